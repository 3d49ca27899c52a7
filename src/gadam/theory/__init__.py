"""The paper's theory as a tool: predictions, with its errors corrected, and simulators that test them.

>>> from gadam import theory
>>> model = theory.Quadratic(theory.power_law(1000, exponent=0.5), noise=1.0, start=1.0)
>>> run = theory.Segment(steps=2000, rate=0.5, batch_size=4)
>>> last, mean = theory.last_iterate(model, run), theory.average(model, run, first=1000)
>>> round(last.loss, 2), round(mean.loss, 2)
(31.75, 2.51)
"""

from gadam.theory.errata import ERRATA, Erratum
from gadam.theory.mean_field import Dependent, dependent
from gadam.theory.noise import Absolute, ExactNoise, FourierNoise, Relative, summed_noise_trace
from gadam.theory.planning import Advice, CurveAdvice, from_curve, from_measurements, plan
from gadam.theory.predict import (
    Moments,
    Segment,
    Quadratic,
    average,
    average_mean,
    average_variance,
    best_rate,
    squared_separation,
    ema,
    ema_variance,
    far_apart,
    last_iterate,
    last_variance,
    log_ball_probability,
    regret_bound,
)
from gadam.theory.simulation import Simulation, simulate, simulate_dependent
from gadam.theory.spectrum import Spectrum, marchenko_pastur, measured, power_law

__all__ = [
    "ERRATA",
    "Absolute",
    "Advice",
    "CurveAdvice",
    "Dependent",
    "Erratum",
    "ExactNoise",
    "FourierNoise",
    "Moments",
    "Segment",
    "Quadratic",
    "Relative",
    "Simulation",
    "Spectrum",
    "average",
    "average_mean",
    "average_variance",
    "best_rate",
    "dependent",
    "squared_separation",
    "ema",
    "ema_variance",
    "far_apart",
    "from_curve",
    "from_measurements",
    "last_iterate",
    "last_variance",
    "log_ball_probability",
    "marchenko_pastur",
    "measured",
    "plan",
    "power_law",
    "regret_bound",
    "simulate",
    "simulate_dependent",
    "summed_noise_trace",
]
