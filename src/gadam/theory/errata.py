"""What is wrong in print, each with what was printed and what is right, as code.

The tests simulate each, and fail for what was printed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from gadam.theory import predict
from gadam.theory.noise import Kernel, Relative
from gadam.theory.spectrum import Array

__all__ = ["ERRATA", "Erratum"]


@dataclass(frozen=True)
class Erratum:
    """A mistake in the paper.

    Args:
        where: in the paper
        printed_as: what it says
        right: what holds
        printed: the printed formula
        corrected: the right one, of the same arguments
    """

    where: str
    printed_as: str
    correction: str
    printed: Callable[..., Any]
    corrected: Callable[..., Any]


def _printed_average_variance(rate: float, lam: float, noise: float, steps: int) -> float:
    return noise / (steps * lam)


def _leading_average_variance(rate: float, lam: float, noise: float, steps: int) -> float:
    return float(predict.average_variance(rate, lam, noise, steps, leading=True))


def _printed_finite_sum(rate: float, lam: float, noise: float, steps: int) -> float:
    # The proof's: of w_0 … w_{n−1}, though it says w_1 … w_n.
    q = 1 - rate * lam
    bracket = steps - 2 * (1 - q**steps) / (rate * lam) + (1 - q ** (2 * steps)) / (1 - q**2)
    return noise * bracket / (lam * steps) ** 2


def _finite_sum(rate: float, lam: float, noise: float, steps: int) -> float:
    return float(predict.average_variance(rate, lam, noise, steps))


def _printed_last_variance(rate: float, lam: float, noise: float) -> float:
    return noise * rate / (2 * lam * (1 - rate * lam))


def _last_variance(rate: float, lam: float, noise: float) -> float:
    return float(predict.last_variance(rate, lam, noise))


def _printed_trace(kernel: Kernel, squared_distance: float, dimension: int) -> float:
    d2 = np.asarray(squared_distance)
    return float(dimension * kernel.first_derivative(d2) + d2 * kernel.second_derivative(d2))


def _trace(kernel: Kernel, squared_distance: float, dimension: int) -> float:
    return float(kernel.trace(np.asarray(squared_distance), dimension))


def _printed_relative_kernel(w: Array, other: Array) -> float:
    away = w - other
    return float(np.exp(-(away @ away) / (w @ w)))


def _relative_kernel(w: Array, other: Array) -> float:
    kernel = Relative(noise=2.0, length_scale=np.sqrt(0.5))  # k(0) = 1, and e^−d² to leading order
    apart = kernel.map(w) - kernel.map(other)
    return float(kernel.value(apart @ apart))


def _printed_stride_variance(
    rate: float, lam: float, noise: float, steps: int, every: int
) -> float:
    # The mean of w_1, w_2, …, as many as there are strides.
    return float(predict.average_variance(rate, lam, noise, steps // every))


def _stride_variance(rate: float, lam: float, noise: float, steps: int, every: int) -> float:
    return float(predict.average_variance(rate, lam, noise, steps, every))


def _printed_stride_factor(rate: float, lam: float, every: int) -> float:
    return float(every)


def _stride_factor(rate: float, lam: float, every: int) -> float:
    """How much larger the average's variance is for sampling each κ-th iterate only, as n → ∞."""
    q = 1 - rate * lam
    return every * (1 - q ** (2 * every)) / (1 - q**2) * ((1 - q) / (1 - q**every)) ** 2


def _printed_ema_variance(rate: float, lam: float, noise: float, decay: float) -> float:
    return (1 - decay) / (1 + decay) * rate * noise / lam


def _ema_variance(rate: float, lam: float, noise: float, decay: float) -> float:
    return float(predict.ema_variance(rate, lam, noise, decay))


def _printed_ema_mean(rate: float, lam: float, decay: float, steps: int) -> float:
    q = 1 - rate * lam
    return (1 - decay) * q ** (steps + 1) * (1 - (decay / q) ** (steps - 1)) / (q - decay)


def _ema_mean(rate: float, lam: float, decay: float, steps: int) -> float:
    """Of the EMA that starts from zero, over w_0."""
    q = 1 - rate * lam
    return (1 - decay) * q ** (steps + 1) * (1 - (decay / q) ** steps) / (q - decay)


def _printed_adaptive_variance(rate: float, lam: float, noise: float) -> float:
    return rate * noise / (2 - rate)


def _adaptive_variance(rate: float, lam: float, noise: float) -> float:
    return rate * noise / (2 - rate) / lam**2


def _printed_loss(lam: float, w: float) -> float:
    return lam * w**2


def _loss(lam: float, w: float) -> float:
    return 0.5 * lam * w**2


def _printed_settling_point(lam: float, gamma: float, minimum: float) -> float:
    # Update (9) with a perfect preconditioner, λ̃ + ε = λ: its w* term lacks the H̃⁻¹.
    return lam * minimum / (1 + gamma)


def _settling_point(lam: float, gamma: float, minimum: float) -> float:
    return minimum / (1 + gamma)


def _printed_ball(a: float, x: float) -> float:
    exponent = -x + a * np.log(x) - a - a * np.log(a) - np.log(a) / 2
    return float(np.exp(exponent) / np.sqrt(2 * np.pi))


def _ball(a: float, x: float) -> float:
    exponent = -x + a * np.log(x) + a - a * np.log(a) - np.log(a) / 2
    return float(np.exp(exponent) / np.sqrt(2 * np.pi))


ERRATA: dict[str, Erratum] = {
    "average": Erratum(
        "Theorems 1 and 2, main text",
        "the average's variance is σ²/(Bn)·⟨1/λ⟩",
        "σ²/(Bn)·⟨1/λ²⟩, as the proofs have it",
        _printed_average_variance,
        _leading_average_variance,
    ),
    "finite-sum": Erratum(
        "proof of Theorem 1, the finite sum",
        "n − 2(1 − qⁿ)/(αλ) + (1 − q²ⁿ)/(1 − q²), of w_1, …, w_n",
        "that is of w_0, …, w_(n−1); of w_1, …, w_n it is n − 2q(1 − qⁿ)/(1 − q) + q²(1 − q²ⁿ)/(1 − q²)",
        _printed_finite_sum,
        _finite_sum,
    ),
    "last": Erratum(
        "proof of Theorem 1, its last lines",
        "the last iterate's variance is ασ²/(2Bλ(1 − αλ))",
        "ασ²/(Bλ(2 − αλ)), as the theorem has it",
        _printed_last_variance,
        _last_variance,
    ),
    "trace": Erratum(
        "the trace lemma and Theorem 2",
        "the covariance of the noise at two points has the trace P·k' + d²·k''",
        "P·k' − d²·k''",
        _printed_trace,
        _trace,
    ),
    "relative-kernel": Erratum(
        "Theorem 3",
        "a Gaussian process with the kernel k(−‖w − w'‖²/‖w‖²)",
        "that is not symmetric, and made symmetric no covariance; a stationary kernel of w/‖w‖ and log ‖w‖ is "
        "one, and the same to leading order",
        _printed_relative_kernel,
        _relative_kernel,
    ),
    "stride": Erratum(
        "corollary on strides",
        "the strided average is the mean of w_1, w_2, …, w_⌊n/κ⌋",
        "it is that of w_κ, w_2κ, …, as its variance has it to leading order; exactly with the bracket of the finite "
        "sum in Q = q^κ",
        _printed_stride_variance,
        _stride_variance,
    ),
    "stride-factor": Erratum(
        "main text, after Theorem 2",
        "sampling each κ-th iterate makes the variance larger roughly by a factor κ",
        "by κ(1 − q^2κ)/(1 − q²)·((1 − q)/(1 − q^κ))², which is near 1 as long as καλ is small",
        _printed_stride_factor,
        _stride_factor,
    ),
    "ema": Erratum(
        "section on Lookahead",
        "the EMA's variance is (1 − ρ)/(1 + ρ)·ασ²κ/λ",
        "V·(1 − ρ)/(1 + ρ)·(1 + ρq)/(1 − ρq) with the iterate's V = ασ²/(Bλ(2 − αλ)): iterates depend on each "
        "other",
        _printed_ema_variance,
        _ema_variance,
    ),
    "ema-mean": Erratum(
        "section on Lookahead",
        "the EMA's mean is (1 − ρ)w_0 q^(n+1)(1 − (ρ/q)^(n−1))/(q − ρ)",
        "with (ρ/q)ⁿ",
        _printed_ema_mean,
        _ema_mean,
    ),
    "adaptive-variance": Erratum(
        "Theorem 4",
        "with a perfect preconditioner the iterate's variance is ασ²/(B(2 − α)), the average's σ²/(Bn)",
        "with the noise preconditioned too, as by any true method, both are 1/λ² times that",
        _printed_adaptive_variance,
        _adaptive_variance,
    ),
    "loss": Erratum(
        "the model's loss",
        "L = wᵀHw, whose gradient is taken to be Hw",
        "L = ½wᵀHw",
        _printed_loss,
        _loss,
    ),
    "settling-point": Erratum(
        "update (9) and Theorem 4",
        "the term of w* is αHw*, and the iterate ends near w*",
        "with that term it ends at λw*/(1 + γ); with αH̃⁻¹Hw* it ends at w*/(1 + γ)",
        _printed_settling_point,
        _settling_point,
    ),
    "ball": Erratum(
        "lemma on the incomplete gamma function",
        "for a ≪ x its exponent is −x + a·log x − a − a·log a − ½·log a",
        "for x ≪ a, with + a",
        _printed_ball,
        _ball,
    ),
}
