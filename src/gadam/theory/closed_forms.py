"""The paper's closed forms for SGD on a noisy quadratic, with errors corrected.

They agree with the exact predictions of :mod:`gadam.theory.predict` and keep full precision for any
0 < αλ < 2, however small. Bounds on distances between iterates and on convergence follow below.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike
from scipy import special

from gadam.theory.model import Quadratic, Segment, check_sampling
from gadam.theory.predict import average
from gadam.theory.spectrum import Array, Spectrum

__all__ = [
    "average_mean",
    "average_variance",
    "best_rate",
    "ema_variance",
    "far_apart",
    "last_variance",
    "log_ball_probability",
    "one_minus_power",
    "regret_bound",
]


def _converging(rate: float, eigenvalue: ArrayLike) -> Array:
    """Return the eigenvalues as an array, or raise if there is no stationary distribution."""
    lam = np.asarray(eigenvalue, dtype=float)
    if not ((lam > 0) & (rate * lam < 2) & (rate > 0)).all():
        raise ValueError(
            "A stationary distribution exists only for 0 < αλ < 2. "
            "Use last_iterate() or average() instead."
        )
    return lam


def one_minus_power(distance: ArrayLike, exponent: int) -> Array:
    """Compute 1 − qⁿ for q = 1 − x without cancellation, for x near 0 (and near 2 if n is even).

    Args:
        distance: x = αλ, in (0, 2).
        exponent: n, at least 1.

    Returns:
        1 − qⁿ for each x.
    """
    x = np.asarray(distance, dtype=float)
    with np.errstate(divide="ignore"):  # q = 0
        log_size = np.log1p(-np.minimum(x, 2 - x))  # log |q|
    power = np.expm1(exponent * log_size)  # |q|ⁿ − 1
    result: Array = np.where((x > 1) & (exponent % 2 == 1), 2 + power, -power)
    return result


def average_mean(rate: float, eigenvalue: ArrayLike, steps: int, *, leading: bool = False) -> Array:
    """Compute the mean of (w_1 + … + w_n)/n, over w_0: q(1 − qⁿ)/(αλn).

    The leading order is (1 − αλ)/(αλn).

    Args:
        rate: α.
        eigenvalue: λ.
        steps: n.
        leading: Return the leading order in n.

    Returns:
        The mean for each λ.
    """
    lam = _converging(rate, eigenvalue)
    _check_steps(steps)
    gone = 1.0 if leading else one_minus_power(rate * lam, steps)
    mean: Array = (1 - rate * lam) * gone / (rate * lam * steps)
    return mean


def _check_steps(steps: int) -> None:
    if steps != int(steps) or steps < 1:
        raise ValueError(f"steps must be an integer of at least 1, got {steps}.")


def last_variance(
    rate: float, eigenvalue: ArrayLike, noise: float, steps: int | None = None
) -> Array:
    """Compute the variance of the last iterate: αs²(1 − q²ⁿ)/(λ(2 − αλ)).

    As n → ∞, the factor 1 − q²ⁿ becomes 1. (The proof of Theorem 1 ends with α/(2λ(1 − αλ)),
    which is different.)

    Args:
        rate: α.
        eigenvalue: λ.
        noise: s² = σ²/B.
        steps: n, or None for the stationary variance.

    Returns:
        The variance for each λ.
    """
    lam = _converging(rate, eigenvalue)
    settled: Array = rate * noise / (lam * (2 - rate * lam))
    if steps is None:
        return settled
    _check_steps(steps)
    return settled * one_minus_power(rate * lam, 2 * steps)


def average_variance(
    rate: float,
    eigenvalue: ArrayLike,
    noise: float,
    steps: int,
    every: int = 1,
    *,
    leading: bool = False,
) -> Array:
    """Compute the variance of the mean of w_κ, w_2κ, … up to w_n, from a fixed w_0.

    The exact value, with m = ⌊n/κ⌋ and Q = q^κ, is
    s²α²(1 − q^2κ)/(1 − q²)/(m²(1 − Q)²) · (m − 2Q(1 − Q^m)/(1 − Q) + Q²(1 − Q^2m)/(1 − Q²)).
    The terms of the bracket cancel where nαλ is small, so it is summed by doubling instead.
    The leading order is s²/(nλ²) for κ = 1. (The paper's main text prints ⟨1/λ⟩ instead of
    ⟨1/λ²⟩, and its corollary averages w_1, w_2, … instead of w_κ, w_2κ, ….)

    Args:
        rate: α.
        eigenvalue: λ.
        noise: s² = σ²/B.
        steps: n.
        every: κ.
        leading: Return the leading order in n.

    Returns:
        The variance for each λ.
    """
    check_sampling(every, every)
    lam = _converging(rate, eigenvalue)
    if steps < every:
        raise ValueError(f"No step is sampled: got {steps} steps and a stride of {every}.")
    if leading:
        x = rate * lam
        between = one_minus_power(x, 2 * every) / (x * (2 - x))  # variance of κ steps, over α²s²
        stride: Array = noise * rate**2 * between / one_minus_power(x, every) ** 2 * every / steps
        return stride
    model = Quadratic(Spectrum(lam.ravel()), noise, start=0.0)
    return average(model, Segment(steps, rate), every, every).variance.reshape(lam.shape)


def ema_variance(rate: float, eigenvalue: ArrayLike, noise: float, decay: float | Array) -> Array:
    """Compute the stationary variance of the EMA: V·(1 − ρ)/(1 + ρ)·(1 + ρq)/(1 − ρq).

    V is the variance of the iterate. (The paper prints (1 − ρ)/(1 + ρ)·αs²/λ, which treats
    iterates as independent and omits 1/(2 − αλ).)

    Args:
        rate: α.
        eigenvalue: λ.
        noise: s² = σ²/B.
        decay: ρ, one or several.

    Returns:
        The variance for each λ and ρ.
    """
    for each in np.ravel(decay):
        check_sampling(1, 1, float(each))
    x, gone = rate * _converging(rate, eigenvalue), 1 - np.asarray(decay, dtype=float)
    # 1 − ρ + ρ(2 − x) is 1 + ρq, and 1 − ρ + ρx is 1 − ρq.
    factor = gone / (1 + decay) * (gone + decay * (2 - x)) / (gone + decay * x)
    variance: Array = last_variance(rate, eigenvalue, noise) * factor
    return variance


# Distances between iterates and convergence bounds.


def log_ball_probability(
    dimension: ArrayLike, points: ArrayLike, radius: ArrayLike, std: float
) -> Array:
    """Compute the log of a bound on P(N(0, σ²I) lies within a radius of any of n points).

    By the paper's lemma, the bound is the regularized incomplete gamma function r(a; x) with
    a = P/2 and x = n^(2/P) δ²/2σ². It underflows in high dimension, so this function computes its
    logarithm by Kummer's positive series, r = x^a e^−x/Γ(a + 1) · ₁F₁(1; a + 1; x). (The paper's
    asymptotic form needs x ≪ a, not a ≪ x, and its exponent has −a instead of +a.)

    Args:
        dimension: P.
        points: n.
        radius: δ.
        std: σ.

    Returns:
        The natural logarithm of the bound.
    """
    a = np.asarray(dimension, dtype=float) / 2
    x = np.exp(np.log(points) / a) * np.asarray(radius, dtype=float) ** 2 / (2 * std**2)
    x, a = np.broadcast_arrays(x, a)
    small = x < a + 1
    with np.errstate(all="ignore"):
        below = a * np.log(x) - x - special.gammaln(a + 1)
        below = below + np.log(special.hyp1f1(1.0, a + 1, np.where(small, x, 0.0)))
        above = np.log(special.gammainc(a, x))
    result: Array = np.where(small, below, above)
    return result


def far_apart(dimension: int, points: int, distance: float, std: float) -> float:
    """Bound from below the probability that n draws of N(μ_i, σ²I) are pairwise far apart.

    The bound holds for any centers μ_i. For iterates, σ is the standard deviation of the noise of
    one step per direction, α·√(σ²/B).

    Args:
        dimension: P.
        points: n.
        distance: Minimum distance between any two draws.
        std: σ.

    Returns:
        A lower bound on the probability.
    """
    earlier = np.arange(1, points)
    log_each = log_ball_probability(dimension, earlier, distance, std)
    return float(max(0.0, 1 - np.exp(special.logsumexp(log_each)))) if points > 1 else 1.0


def regret_bound(
    squared_distance: float, rate: float, steps: int, noise: float, smoothness: float
) -> float:
    """Bound the expected excess loss of the mean of w_1, …, w_T: ‖w_0 − w*‖²/(2αT) + ασ².

    The bound holds for any convex loss with a β-Lipschitz gradient if α ≤ 1/β.

    Args:
        squared_distance: ‖w_0 − w*‖².
        rate: α.
        steps: T.
        noise: σ² of the whole gradient, the trace of its covariance.
        smoothness: β.

    Returns:
        The bound.

    Raises:
        ValueError: If α > 1/β.
    """
    if not 0 < rate * smoothness <= 1:
        raise ValueError(
            f"rate must be positive and at most 1/β = {1 / smoothness:g}, got {rate:g}."
        )
    return squared_distance / (2 * rate * steps) + rate * noise


def best_rate(smoothness: float, std: float, steps: int, distance: float) -> float:
    """Compute the learning rate (β + σ√T/D)⁻¹, which is optimal up to constants.

    With it, :func:`regret_bound` is at most βD²/2T + 1.5·σD/√T.

    Args:
        smoothness: β.
        std: σ, the standard deviation of the whole gradient.
        steps: T.
        distance: D = ‖w_0 − w*‖.

    Returns:
        The learning rate.
    """
    return float(1 / (smoothness + std * np.sqrt(steps) / distance))
