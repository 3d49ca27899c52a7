"""Predictions for SGD's last iterate, average, strided average and EMA on a noisy quadratic.

The true loss is L(w) = ½ Σ λ (w − w*)² in the eigenbasis of the Hessian. Each gradient carries
independent noise of variance s² = σ²/B per direction. One step of a preconditioned method with
decoupled weight decay is, per direction,

    w ← q·w + (1 − q)·w° − α·h·ε,     q = 1 − α(γ + λh),   w° = λh·w*/(γ + λh),

with h = 1 for SGD and h = 1/(λ̃ + ε) for an adaptive method. All predictions are exact for any
number of steps: the iterate and the running sum form a linear Gaussian process, and its
transitions are composed by doubling, without a loop over steps. The corrected closed forms of the
paper and their leading orders follow below. They agree with the exact predictions, but lose
precision where n·α·λ is small.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike
from scipy import integrate, special

from gadam.theory.spectrum import Array, Spectrum

__all__ = [
    "Moments",
    "Quadratic",
    "Segment",
    "as_segments",
    "average",
    "average_mean",
    "average_variance",
    "best_rate",
    "check_sampling",
    "ema",
    "ema_variance",
    "far_apart",
    "last_iterate",
    "last_variance",
    "log_ball_probability",
    "regret_bound",
    "squared_separation",
]


@dataclass(frozen=True)
class Segment:
    """Steps at a constant learning rate and batch size.

    Args:
        steps: Number of steps.
        rate: α.
        batch_size: B.
    """

    steps: int
    rate: float
    batch_size: float = 1.0

    def __post_init__(self) -> None:
        if self.steps != int(self.steps) or self.steps < 0:
            raise ValueError(f"steps must be a non-negative integer, got {self.steps}.")
        if not 0 <= self.rate < np.inf:
            raise ValueError(f"rate must be non-negative and finite, got {self.rate}.")
        if not self.batch_size > 0:
            raise ValueError(f"batch_size must be positive, got {self.batch_size}.")


@dataclass(frozen=True, eq=False)
class Quadratic:
    """A noisy quadratic and the method that minimizes it.

    Args:
        spectrum: λ.
        noise: σ², the variance of the gradient of one example, per direction or for all.
        start: w_0 in the eigenbasis, per direction or for all.
        minimum: w*, per direction or for all.
        weight_decay: γ, decoupled.
        preconditioner: λ̃ + ε, the divisor that an adaptive method applies to gradients. None for
            SGD.

    Example:
        >>> model = Quadratic(Spectrum([2.0], counts=[1000]), noise=1.0, start=1.0)
        >>> segments = [Segment(steps=4000, rate=0.05)]
        >>> round(last_iterate(model, segments).loss, 3), round(average(model, segments).loss, 3)
        (13.158, 0.067)
    """

    spectrum: Spectrum
    noise: Array
    start: Array
    minimum: Array
    weight_decay: float
    preconditioner: Array | None

    def __init__(
        self,
        spectrum: Spectrum,
        noise: ArrayLike = 1.0,
        start: ArrayLike = 1.0,
        minimum: ArrayLike = 0.0,
        weight_decay: float = 0.0,
        preconditioner: ArrayLike | None = None,
    ) -> None:
        given = {"noise": noise, "start": start, "minimum": minimum}
        given |= {} if preconditioner is None else {"preconditioner": preconditioner}
        values: dict[str, Array] = {}
        for name, value in given.items():
            each = np.broadcast_to(np.asarray(value, dtype=float), spectrum.eigenvalues.shape)
            if not np.isfinite(each).all():
                raise ValueError(f"{name} must be finite.")
            values[name] = each
        if preconditioner is not None and (values["preconditioner"] <= 0).any():
            raise ValueError("preconditioner must be positive.")
        if (values["noise"] < 0).any() or not weight_decay >= 0:
            raise ValueError("noise and weight_decay must be non-negative.")
        object.__setattr__(self, "spectrum", spectrum)
        object.__setattr__(self, "weight_decay", weight_decay)
        object.__setattr__(self, "preconditioner", None)
        for name, value in values.items():
            object.__setattr__(self, name, value)

    @property
    def gradient_scale(self) -> Array:
        """h, the factor that multiplies gradients."""
        if self.preconditioner is None:
            return np.ones_like(self.spectrum.eigenvalues)
        return 1 / self.preconditioner

    @property
    def contraction(self) -> Array:
        """γ + λh. One step multiplies the distance to the settling point by 1 − α(γ + λh)."""
        return self.weight_decay + self.spectrum.eigenvalues * self.gradient_scale

    @property
    def settling_point(self) -> Array:
        """w°, the limit of the mean of the iterate."""
        contraction = self.contraction
        target = self.spectrum.eigenvalues * self.gradient_scale * self.minimum
        point: Array = np.divide(target, contraction, out=self.start.copy(), where=contraction > 0)
        return point

    def stable_below(self) -> float:
        """Return the learning rate at and above which the iterate diverges."""
        return float(2 / self.contraction.max()) if self.contraction.max() > 0 else np.inf


@dataclass(frozen=True, eq=False)
class Moments:
    """The distribution of a point: Gaussian and independent across directions.

    Args:
        model: Model of the point.
        mean: Mean per direction.
        variance: Variance per direction.
    """

    model: Quadratic
    mean: Array
    variance: Array

    @property
    def _counts(self) -> Array:
        return self.model.spectrum.counts

    @property
    def bias(self) -> Array:
        """The difference between the mean and w*, per direction."""
        return self.mean - self.model.minimum

    @property
    def squared_distance(self) -> float:
        """E‖w − w*‖²."""
        return float(self._counts @ (self.bias**2 + self.variance))

    @property
    def loss(self) -> float:
        """E L(w)."""
        return float(
            0.5 * (self._counts * self.model.spectrum.eigenvalues) @ (self.bias**2 + self.variance)
        )

    @property
    def loss_std(self) -> float:
        """The standard deviation of L(w)."""
        lam, b, v = self.model.spectrum.eigenvalues, self.bias, self.variance
        return float(np.sqrt(self._counts @ (lam**2 * (v**2 / 2 + b**2 * v))))

    @property
    def squared_distance_std(self) -> float:
        """The standard deviation of ‖w − w*‖²."""
        return float(
            np.sqrt(self._counts @ (2 * self.variance**2 + 4 * self.bias**2 * self.variance))
        )

    @property
    def trace(self) -> float:
        """Tr Cov(w)."""
        return float(self._counts @ self.variance)

    @cached_property
    def distance(self) -> float:
        """E‖w − w*‖.

        Computed from the Laplace transform of X = ‖w − w*‖²:
        E√X = ∫ (1 − E e^−tX) t^−3/2 dt / 2√π.
        """
        scale = self.squared_distance
        if scale == 0:
            return 0.0
        b2, v, n = self.bias**2 / scale, self.variance / scale, self._counts

        def integrand(u: float) -> float:  # t = e^u
            t = np.exp(u)
            exponent = -n @ (np.log1p(2 * t * v) / 2 + t * b2 / (1 + 2 * t * v))
            return float(-np.expm1(exponent) * np.exp(-u / 2))

        value, _ = integrate.quad(integrand, -60, 60, points=[0.0], limit=400)
        return float(np.sqrt(scale) * value / (2 * np.sqrt(np.pi)))

    def tail_bound(self, t: float) -> float:
        """Bound the probability of |‖w − w*‖ − E‖w − w*‖| ≥ t (Theorem 1).

        The norm is 1-Lipschitz, so Gaussian concentration yields 2·exp(−t²/2v), where v is the
        largest variance. This is the constant that the theorem leaves open. The bound does not
        grow with P. (The theorem uses √E‖w − w*‖² instead of the mean, which is larger by at most
        v/2E‖w − w*‖.)

        Args:
            t: Deviation from the mean distance.

        Returns:
            An upper bound on the probability.
        """
        largest = float(self.variance.max())
        if t <= 0:
            return 1.0
        return 0.0 if largest == 0 else float(min(1.0, 2 * np.exp(-(t**2) / (2 * largest))))


# Composition of transitions.


class _Transition(NamedTuple):
    """Several steps of the iterate w and running sum S: w' = q·w + d + …, S' = r·S + a·w + e + ….

    The noise of (w', S') has variances v and u and covariance c.
    """

    q: Array
    d: Array
    a: Array
    r: Array
    e: Array
    v: Array
    c: Array
    u: Array


def _compose(one: _Transition, two: _Transition) -> _Transition:
    """Apply one, then two. For q > 0 nothing is subtracted, so no precision is lost."""
    return _Transition(
        q=two.q * one.q,
        d=two.q * one.d + two.d,
        a=two.r * one.a + two.a * one.q,
        r=two.r * one.r,
        e=two.r * one.e + two.a * one.d + two.e,
        v=two.q**2 * one.v + two.v,
        c=two.q * (two.r * one.c + two.a * one.v) + two.c,
        u=two.r**2 * one.u + 2 * two.r * two.a * one.c + two.a**2 * one.v + two.u,
    )


def _repeat(transition: _Transition, number: int) -> _Transition:
    """Apply a transition several times, by doubling."""
    result = _identity(transition.q)
    while number:
        if number % 2:
            result = _compose(result, transition)
        transition = _compose(transition, transition)
        number //= 2
    return result


def _identity(like: Array) -> _Transition:
    zero, one = np.zeros_like(like), np.ones_like(like)
    return _Transition(one, zero, zero, one, zero, zero, zero, zero)


def _one_step(model: Quadratic, segment: Segment) -> _Transition:
    q = 1 - segment.rate * model.contraction
    noise = (segment.rate * model.gradient_scale) ** 2 * model.noise / segment.batch_size
    drift = segment.rate * model.contraction * model.settling_point
    return _identity(q)._replace(q=q, d=drift, v=noise)


def _compose_all(
    model: Quadratic, segments: Sequence[Segment], sample: _Transition, first: int, every: int
) -> tuple[_Transition, int]:
    """Compose all segments, with a sample after steps first, first + every, …; count samples."""
    result, time, count = _identity(model.contraction), 0, 0
    for segment in segments:
        step, left = _one_step(model, segment), segment.steps
        while left > 0:
            ahead = first - time if time < first else every - (time - first) % every
            if ahead > left:
                result, time, left = _compose(result, _repeat(step, left)), time + left, 0
                continue
            more = (left - ahead) // every
            result = _compose(_compose(result, _repeat(step, ahead)), sample)
            result = _compose(result, _repeat(_compose(_repeat(step, every), sample), more))
            used = ahead + more * every
            time, left, count = time + used, left - used, count + 1 + more
    return result, count


def check_sampling(first: int, every: int, decay: float | None = None) -> None:
    """Validate a sampling. Steps count from 1, as in :class:`gadam.Averaging`.

    Args:
        first: First sampled step.
        every: Stride.
        decay: ρ of an EMA, or None.

    Raises:
        ValueError: If a value is out of range.
    """
    if first < 1 or every < 1 or first != int(first) or every != int(every):
        raise ValueError(f"first and every must be integers of at least 1, got {first}, {every}.")
    if decay is not None and not 0 < decay < 1:
        raise ValueError(f"decay must be in (0, 1), got {decay}.")


def as_segments(segments: Sequence[Segment] | Segment) -> list[Segment]:
    """Return one or several segments as a list.

    Args:
        segments: One or several segments.

    Returns:
        A non-empty list.
    """
    found = [segments] if isinstance(segments, Segment) else list(segments)
    if not found:
        raise ValueError("Pass at least one segment.")
    return found


# Moments of the last iterate, the average and the EMA.


def last_iterate(model: Quadratic, segments: Sequence[Segment] | Segment) -> Moments:
    """Predict the last iterate. Use several segments for learning rate drops and batch growth.

    Args:
        model: The quadratic.
        segments: The steps.

    Returns:
        Moments of the last iterate.
    """
    total, _ = _compose_all(model, as_segments(segments), _identity(model.contraction), 1 << 62, 1)
    return Moments(model, total.q * model.start + total.d, total.v)


def average(
    model: Quadratic, segments: Sequence[Segment] | Segment, first: int = 1, every: int = 1
) -> Moments:
    """Predict the mean of the iterates after steps first, first + every, ….

    These are the samples of ``gadam.Averaging(start=first, every=every)``.

    Args:
        model: The quadratic.
        segments: The steps.
        first: T_avg, the first sampled step.
        every: κ, the stride.

    Returns:
        Moments of the average.

    Raises:
        ValueError: If no step is sampled.
    """
    check_sampling(first, every)
    one = np.ones_like(model.contraction)
    sample = _identity(one)._replace(a=one)
    total, count = _compose_all(model, as_segments(segments), sample, first, every)
    if not count:
        raise ValueError(f"No step is sampled: training ends before step {first}.")
    mean = (total.a * model.start + total.e) / count
    return Moments(model, mean, total.u / count**2)


def ema(
    model: Quadratic,
    segments: Sequence[Segment] | Segment,
    decay: float,
    first: int = 1,
    every: int = 1,
) -> Moments:
    """Predict the debiased EMA. Sample i of n has weight ρ^(n−i), normalized by the sum.

    Args:
        model: The quadratic.
        segments: The steps.
        decay: ρ, per sample.
        first: First sampled step.
        every: κ, the stride.

    Returns:
        Moments of the EMA.

    Raises:
        ValueError: If no step is sampled.
    """
    check_sampling(first, every, decay)
    one = np.ones_like(model.contraction)
    sample = _identity(one)._replace(a=(1 - decay) * one, r=decay * one)
    total, count = _compose_all(model, as_segments(segments), sample, first, every)
    if not count:
        raise ValueError(f"No step is sampled: training ends before step {first}.")
    weight = -np.expm1(count * np.log(decay))
    mean = (total.a * model.start + total.e) / weight
    return Moments(model, mean, total.u / weight**2)


def squared_separation(model: Quadratic, segment: Segment, steps: int | Array) -> Array:
    """Compute E‖w_n − w_(n+k)‖², where w_n is the iterate at the end of the segment.

    Args:
        model: The quadratic.
        segment: Steps up to w_n. Later steps use the same rate and batch size.
        steps: k, one or several.

    Returns:
        The expected squared distance for each k.
    """
    here = last_iterate(model, segment)
    q = 1 - segment.rate * model.contraction
    k = np.asarray(steps)[..., None]
    gone = 1 - q**k
    from_settled = here.mean - model.settling_point
    noise = (segment.rate * model.gradient_scale) ** 2 * model.noise / segment.batch_size
    with np.errstate(divide="ignore", invalid="ignore"):
        new = np.where(np.abs(q) == 1, k * noise, noise * (1 - q ** (2 * k)) / (1 - q**2))
    squares: Array = gone**2 * (from_settled**2 + here.variance) + new
    return squares @ model.spectrum.counts


# Closed forms of the paper, with errors corrected.


def _converging(rate: float, eigenvalue: ArrayLike) -> Array:
    """Return the eigenvalues as an array, or raise if there is no stationary distribution."""
    lam = np.asarray(eigenvalue, dtype=float)
    if not ((lam > 0) & (rate * lam < 2) & (rate > 0)).all():
        raise ValueError(
            "A stationary distribution exists only for 0 < αλ < 2. "
            "Use last_iterate() or average() instead."
        )
    return lam


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
    q = 1 - rate * lam
    gone = 1.0 if leading else 1 - q**steps
    mean: Array = q * gone / (rate * lam * steps)
    return mean


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
    return settled if steps is None else settled * (1 - (1 - rate * lam) ** (2 * steps))


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
    q = 1 - rate * lam
    big, m = q**every, steps // every
    if m < 1:
        raise ValueError(f"No step is sampled: got {steps} steps and a stride of {every}.")
    unit: Array = noise * rate**2 * (1 - q ** (2 * every)) / (1 - q**2) / (1 - big) ** 2
    if leading:
        return unit * every / steps
    bracket: Array = (
        m - 2 * big * (1 - big**m) / (1 - big) + big**2 * (1 - big ** (2 * m)) / (1 - big**2)
    )
    return unit * bracket / m**2


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
    check_sampling(1, 1, float(decay) if np.ndim(decay) == 0 else None)
    q = 1 - rate * _converging(rate, eigenvalue)
    iterates = last_variance(rate, eigenvalue, noise)
    variance: Array = iterates * (1 - decay) / (1 + decay) * (1 + decay * q) / (1 - decay * q)
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
