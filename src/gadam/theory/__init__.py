"""The paper's theory, with its errors corrected: exact predictions and simulators.

>>> from gadam import theory
>>> model = theory.Quadratic(theory.power_law(1000, exponent=0.5), noise=1.0, start=1.0)
>>> segment = theory.Segment(steps=2000, rate=0.5, batch_size=4)
>>> last = theory.last_iterate(model, segment)
>>> tail = theory.average(model, segment, first=1000)
>>> round(last.loss, 2), round(tail.loss, 2)
(31.75, 2.51)
"""

from gadam.theory.closed_forms import (
    average_mean,
    average_variance,
    best_rate,
    ema_variance,
    far_apart,
    last_variance,
    log_ball_probability,
    regret_bound,
)
from gadam.theory.errata import ERRATA, Erratum
from gadam.theory.mean_field import Dependent, dependent
from gadam.theory.methods import (
    METHODS,
    Method,
    Tuned,
    loss_by_batch_size,
    loss_by_budget,
    loss_by_start,
    scheduled,
    tune,
)
from gadam.theory.model import Moments, Quadratic, Segment, from_hessian
from gadam.theory.noise import Absolute, ExactNoise, FourierNoise, Relative, summed_noise_trace
from gadam.theory.planning import Advice, from_measurements, plan
from gadam.theory.predict import average, ema, last_iterate, squared_separation
from gadam.theory.simulation import Simulation, simulate, simulate_dependent
from gadam.theory.spectrum import Spectrum, marchenko_pastur, measured, power_law

__all__ = [
    "ERRATA",
    "METHODS",
    "Absolute",
    "Advice",
    "Dependent",
    "Erratum",
    "ExactNoise",
    "FourierNoise",
    "Method",
    "Moments",
    "Quadratic",
    "Relative",
    "Segment",
    "Simulation",
    "Spectrum",
    "Tuned",
    "average",
    "average_mean",
    "average_variance",
    "best_rate",
    "dependent",
    "ema",
    "ema_variance",
    "far_apart",
    "from_hessian",
    "from_measurements",
    "last_iterate",
    "last_variance",
    "log_ball_probability",
    "loss_by_batch_size",
    "loss_by_budget",
    "loss_by_start",
    "marchenko_pastur",
    "measured",
    "plan",
    "power_law",
    "regret_bound",
    "scheduled",
    "simulate",
    "simulate_dependent",
    "squared_separation",
    "summed_noise_trace",
    "tune",
]
