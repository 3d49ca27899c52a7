"""Errors in the paper, each with the printed and the corrected formula as code.

The tests check each correction, most of them against a simulation, and check that the printed
formula fails.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from gadam.theory import closed_forms, predict
from gadam.theory.model import Quadratic, Segment
from gadam.theory.noise import Kernel
from gadam.theory.spectrum import Array, Spectrum

__all__ = ["ERRATA", "Erratum"]


@dataclass(frozen=True)
class Erratum:
    """An error in the paper.

    Args:
        where: Location in the paper.
        printed_as: The printed statement.
        correction: The correct statement.
        printed: The printed formula.
        corrected: The correct formula, with the same arguments.
    """

    where: str
    printed_as: str
    correction: str
    printed: Callable[..., float]
    corrected: Callable[..., float]


def _printed_average_variance(rate: float, lam: float, noise: float, steps: int) -> float:
    return noise / (steps * lam)


def _leading_average_variance(rate: float, lam: float, noise: float, steps: int) -> float:
    return float(closed_forms.average_variance(rate, lam, noise, steps, leading=True))


def _printed_finite_sum(rate: float, lam: float, noise: float, steps: int) -> float:
    # The proof states this for w_1 … w_n, but it holds for w_0 … w_(n−1).
    q = 1 - rate * lam
    bracket = steps - 2 * (1 - q**steps) / (rate * lam) + (1 - q ** (2 * steps)) / (1 - q**2)
    return noise * bracket / (lam * steps) ** 2


def _finite_sum(rate: float, lam: float, noise: float, steps: int) -> float:
    return float(closed_forms.average_variance(rate, lam, noise, steps))


def _printed_last_variance(rate: float, lam: float, noise: float) -> float:
    return noise * rate / (2 * lam * (1 - rate * lam))


def _last_variance(rate: float, lam: float, noise: float) -> float:
    return float(closed_forms.last_variance(rate, lam, noise))


def _printed_trace(kernel: Kernel, squared_distance: float, dimension: int) -> float:
    d2 = np.asarray(squared_distance)
    return float(dimension * kernel.first_derivative(d2) + d2 * kernel.second_derivative(d2))


def _trace(kernel: Kernel, squared_distance: float, dimension: int) -> float:
    return float(kernel.trace(np.asarray(squared_distance), dimension))


def _printed_relative_kernel(w: Array, other: Array) -> float:
    away = w - other
    return float(np.exp(-(away @ away) / (w @ w)))


def _relative_kernel(w: Array, other: Array) -> float:
    away = w - other
    return float(np.exp(-2 * (away @ away) / (w @ w + other @ other)))


def _printed_stride_variance(
    rate: float, lam: float, noise: float, steps: int, every: int
) -> float:
    # The mean of w_1, w_2, …, w_⌊n/κ⌋.
    return float(closed_forms.average_variance(rate, lam, noise, steps // every))


def _stride_variance(rate: float, lam: float, noise: float, steps: int, every: int) -> float:
    return float(closed_forms.average_variance(rate, lam, noise, steps, every))


def _printed_stride_factor(rate: float, lam: float, every: int) -> float:
    return float(every)


def _stride_factor(rate: float, lam: float, every: int) -> float:
    """Ratio of the variances with stride κ and stride 1, as n → ∞."""
    x = rate * lam
    between = closed_forms.one_minus_power(x, 2 * every) / (x * (2 - x))
    return float(every * between * (x / closed_forms.one_minus_power(x, every)) ** 2)


def _printed_ema_variance(
    rate: float, lam: float, noise: float, decay: float, steps: int | None = None
) -> float:
    kappa = 1.0 if steps is None else 1 - (1 - rate * lam) ** (steps - 2)
    return (1 - decay) / (1 + decay) * rate * noise / lam * kappa


def _ema_variance(
    rate: float, lam: float, noise: float, decay: float, steps: int | None = None
) -> float:
    """Variance of an EMA that starts at zero, after n steps or as n → ∞."""
    if steps is None:
        return float(closed_forms.ema_variance(rate, lam, noise, decay))
    model = Quadratic(Spectrum([lam]), noise, start=0.0)
    debiased = predict.ema(model, Segment(steps, rate), decay).variance[0]
    return float(debiased * (1 - decay**steps) ** 2)


def _printed_ema_mean(rate: float, lam: float, decay: float, steps: int) -> float:
    q = 1 - rate * lam
    return (1 - decay) * q ** (steps + 1) * (1 - (decay / q) ** (steps - 1)) / (q - decay)


def _ema_mean(rate: float, lam: float, decay: float, steps: int) -> float:
    """Mean of an EMA of w_1, …, w_n that starts at zero, over w_0."""
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
    # Update (9) with a perfect preconditioner, λ̃ + ε = λ. Its w* term lacks H̃⁻¹.
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
        "The variance of the average is σ²/(Bn)·⟨1/λ⟩.",
        "σ²/(Bn)·⟨1/λ²⟩, as in the proofs.",
        _printed_average_variance,
        _leading_average_variance,
    ),
    "finite-sum": Erratum(
        "Proof of Theorem 1, finite sum",
        "n − 2(1 − qⁿ)/(αλ) + (1 − q²ⁿ)/(1 − q²) for w_1, …, w_n.",
        "This holds for w_0, …, w_(n−1). For w_1, …, w_n it is "
        "n − 2q(1 − qⁿ)/(1 − q) + q²(1 − q²ⁿ)/(1 − q²).",
        _printed_finite_sum,
        _finite_sum,
    ),
    "last": Erratum(
        "Proof of Theorem 1, last lines",
        "The variance of the last iterate is ασ²/(2Bλ(1 − αλ)).",
        "ασ²/(Bλ(2 − αλ)), as in the theorem.",
        _printed_last_variance,
        _last_variance,
    ),
    "trace": Erratum(
        "Trace lemma and Theorem 2",
        "The covariance of the noise at two points has trace P·k' + d²·k''.",
        "P·k' − d²·k''.",
        _printed_trace,
        _trace,
    ),
    "relative-kernel": Erratum(
        "Theorem 3",
        "A Gaussian process with kernel k(−‖w − w'‖²/‖w‖²).",
        "This is not symmetric in w and w', so it is not a covariance. Neither is the mean of "
        "both orders, which is not positive semi-definite. With ½(‖w‖² + ‖w'‖²) in place of ‖w‖² "
        "it is a covariance, for every k(−d²) that is one in all dimensions. A stationary kernel "
        "of w/‖w‖ and log ‖w‖ is another. Both agree with the printed kernel to leading order.",
        _printed_relative_kernel,
        _relative_kernel,
    ),
    "stride": Erratum(
        "Corollary on strides",
        "The strided average is the mean of w_1, w_2, …, w_⌊n/κ⌋.",
        "It is the mean of w_κ, w_2κ, …, which matches the corollary's variance to leading order. "
        "The exact variance has the bracket of the finite sum in Q = q^κ.",
        _printed_stride_variance,
        _stride_variance,
    ),
    "stride-factor": Erratum(
        "Main text, after Theorem 2",
        "Sampling every κ-th iterate increases the variance by roughly a factor of κ.",
        "By κ(1 − q^2κ)/(1 − q²)·((1 − q)/(1 − q^κ))², which is close to 1 if καλ is small.",
        _printed_stride_factor,
        _stride_factor,
    ),
    "ema": Erratum(
        "Section on Lookahead",
        "The variance of the EMA is (1 − ρ)/(1 + ρ)·ασ²κ/λ with κ = 1 − q^(n−2).",
        "As n → ∞, V·(1 − ρ)/(1 + ρ)·(1 + ρq)/(1 − ρq), where V = ασ²/(Bλ(2 − αλ)) is the variance "
        "of the iterate: iterates are not independent. After n steps, an EMA that starts at zero "
        "has variance α²σ²/B·((1 − ρ)/(q − ρ))²·Σ(q^m − ρ^m)², summed over m = 1, …, n.",
        _printed_ema_variance,
        _ema_variance,
    ),
    "ema-mean": Erratum(
        "Section on Lookahead",
        "The mean of the EMA is (1 − ρ)w_0 q^(n+1)(1 − (ρ/q)^(n−1))/(q − ρ).",
        "This holds for an EMA that starts at zero and takes w_2, …, w_n. If it also takes w_1, it "
        "is the same with (ρ/q)ⁿ. Debiased, it is divided by 1 − ρⁿ.",
        _printed_ema_mean,
        _ema_mean,
    ),
    "adaptive-variance": Erratum(
        "Theorem 4",
        "With a perfect preconditioner, the variance of the iterate is ασ²/(B(2 − α)) and that of "
        "the average is σ²/(Bn).",
        "Any actual method preconditions the noise too. Both variances are then multiplied by "
        "1/λ².",
        _printed_adaptive_variance,
        _adaptive_variance,
    ),
    "loss": Erratum(
        "Loss of the model",
        "L = wᵀHw, with gradient Hw.",
        "L = ½wᵀHw.",
        _printed_loss,
        _loss,
    ),
    "settling-point": Erratum(
        "Update (9) and Theorem 4",
        "The term in w* is αHw*, and the iterate converges to a point near w*.",
        "With that term it converges to λw*/(1 + γ). With αH̃⁻¹Hw* it converges to w*/(1 + γ).",
        _printed_settling_point,
        _settling_point,
    ),
    "ball": Erratum(
        "Lemma on the incomplete gamma function",
        "For a ≪ x, its exponent is −x + a·log x − a − a·log a − ½·log a.",
        "For x ≪ a, with + a instead of − a.",
        _printed_ball,
        _ball,
    ),
}
