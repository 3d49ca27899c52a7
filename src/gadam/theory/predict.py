"""What SGD's last iterate, its average, its strided average and its EMA do on a noisy quadratic.

The true loss is L(w) = ½ Σ λ (w − w*)², in the Hessian's eigenbasis; a gradient is seen with independent noise
of variance s² = σ²/B in each direction. One step of a (preconditioned, decaying) method is then, direction by
direction,

    w ← q·w + (1 − q)·w° − α·h·ε,     q = 1 − α(γ + λh),   w° = λh·w*/(γ + λh),

with h = 1 for SGD and h = 1/(λ̃ + ε) for an adaptive method. Everything here is exact at any number of steps:
iterate and running sum together are a linear Gaussian process, and stretches of such a process are composed,
by doubling, without a loop over steps. The closed forms of the paper (corrected) and their leading orders stand
below; they agree with it and explain it, but lose their digits where n·α·λ is small.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike
from scipy import integrate, special

from gadam.theory.spectrum import Array, Spectrum

__all__ = [
    "Moments",
    "Segment",
    "Quadratic",
    "average",
    "average_mean",
    "average_variance",
    "best_rate",
    "check_sampling",
    "squared_separation",
    "ema",
    "ema_variance",
    "far_apart",
    "last_iterate",
    "last_variance",
    "as_segments",
    "log_ball_probability",
    "regret_bound",
]


@dataclass(frozen=True)
class Segment:
    """Some steps at one learning rate and batch size."""

    steps: int
    rate: float
    batch_size: float = 1.0

    def __post_init__(self) -> None:
        if self.steps != int(self.steps) or not (self.steps >= 0 and 0 <= self.rate < np.inf):
            raise ValueError(
                f"steps must be a whole number, and neither they nor rate negative: {self}"
            )
        if not self.batch_size > 0:
            raise ValueError(f"the batch size must be positive: {self}")


@dataclass(frozen=True, eq=False)
class Quadratic:
    """A noisy quadratic, and the method that descends it.

    Args:
        spectrum: λ
        noise: σ², the variance of one example's gradient in each direction (one number for all, or one each)
        start: w_0, in each direction of the eigenbasis (or one number for all)
        minimum: w*, likewise
        weight_decay: γ, decoupled
        preconditioner: λ̃ + ε, by which an adaptive method divides gradients; SGD if None

    Example:
        >>> model = Quadratic(Spectrum([2.0], counts=[1000]), noise=1.0, start=1.0)
        >>> run = [Segment(steps=4000, rate=0.05)]
        >>> round(last_iterate(model, run).loss, 3), round(average(model, run).loss, 3)
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
        values: dict[str, Any] = {"preconditioner": None}
        for name, value in given.items():
            each = np.broadcast_to(np.asarray(value, dtype=float), spectrum.eigenvalues.shape)
            if not np.isfinite(each).all():
                raise ValueError(f"{name} must be finite")
            values[name] = each
        if preconditioner is not None and (values["preconditioner"] <= 0).any():
            raise ValueError("the preconditioner must be positive")
        if (values["noise"] < 0).any() or not weight_decay >= 0:
            raise ValueError("noise and weight_decay must not be negative")
        values |= {"spectrum": spectrum, "weight_decay": weight_decay}
        for name, value in values.items():
            object.__setattr__(self, name, value)

    @property
    def gradient_scale(self) -> Array:
        """h, by which gradients are multiplied."""
        if self.preconditioner is None:
            return np.ones_like(self.spectrum.eigenvalues)
        return 1 / self.preconditioner

    @property
    def contraction(self) -> Array:
        """γ + λh: the rate times this is what a step takes off the distance to the settling point."""
        return self.weight_decay + self.spectrum.eigenvalues * self.gradient_scale

    @property
    def settling_point(self) -> Array:
        """w°, where the iterate's mean ends."""
        pull = self.contraction
        at = self.spectrum.eigenvalues * self.gradient_scale * self.minimum
        return np.divide(at, pull, out=self.start.copy(), where=pull > 0)

    def stable_below(self) -> float:
        """The learning rate from which on the iterate diverges."""
        return float(2 / self.contraction.max()) if self.contraction.max() > 0 else np.inf


@dataclass(frozen=True, eq=False)
class Moments:
    """A point's distribution: Gaussian, and independent between directions.

    Args:
        model: whose
        mean: in each direction
        variance: likewise
    """

    model: Quadratic
    mean: Array
    variance: Array

    @property
    def _counts(self) -> Array:
        return self.model.spectrum.counts

    @property
    def bias(self) -> Array:
        """The mean's distance to w*, in each direction."""
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
        """E‖w − w*‖, from the Laplace transform of its square: E√X = ∫ (1 − E e^−tX) t^−3/2 dt / 2√π."""
        scale = self.squared_distance
        if scale == 0:
            return 0.0
        b2, v, n = self.bias**2 / scale, self.variance / scale, self._counts

        def integrand(u: float) -> float:  # with t = e^u
            t = np.exp(u)
            exponent = -n @ (np.log1p(2 * t * v) / 2 + t * b2 / (1 + 2 * t * v))
            return float(-np.expm1(exponent) * np.exp(-u / 2))

        value, _ = integrate.quad(integrand, -60, 60, points=[0.0], limit=400)
        return float(np.sqrt(scale) * value / (2 * np.sqrt(np.pi)))

    def tail_bound(self, t: float) -> float:
        """Theorem 1: a bound on the probability of |‖w − w*‖ − E‖w − w*‖| ≥ t.

        ‖·‖ has slope one, so Gaussian concentration gives 2·exp(−t²/2v), v the largest variance: the
        constant that the theorem leaves open, and a bound that does not grow with P. (The theorem is about
        √E‖w − w*‖² in place of the mean, which is larger by v/2E‖w − w*‖ at most.)
        """
        largest = float(self.variance.max())
        if t <= 0:
            return 1.0
        return 0.0 if largest == 0 else float(min(1.0, 2 * np.exp(-(t**2) / (2 * largest))))


# ------------------------------------------------------------------------------------- the machinery


class _Stretch(NamedTuple):
    """Some steps of iterate w and running sum S: w' = q·w + d + …, S' = r·S + a·w + e + ….

    The noise of (w', S') has the variances v and u and the covariance c.
    """

    q: Array
    d: Array
    a: Array
    r: Array
    e: Array
    v: Array
    c: Array
    u: Array


def _then(one: _Stretch, two: _Stretch) -> _Stretch:
    """One after the other. For 0 < q nothing is ever subtracted: no digits are lost."""
    return _Stretch(
        q=two.q * one.q,
        d=two.q * one.d + two.d,
        a=two.r * one.a + two.a * one.q,
        r=two.r * one.r,
        e=two.r * one.e + two.a * one.d + two.e,
        v=two.q**2 * one.v + two.v,
        c=two.q * (two.r * one.c + two.a * one.v) + two.c,
        u=two.r**2 * one.u + 2 * two.r * two.a * one.c + two.a**2 * one.v + two.u,
    )


def _times(stretch: _Stretch, number: int) -> _Stretch:
    """So many of them in a row, by doubling."""
    result = _nothing(stretch.q)
    while number:
        if number % 2:
            result = _then(result, stretch)
        stretch = _then(stretch, stretch)
        number //= 2
    return result


def _nothing(like: Array) -> _Stretch:
    zero, one = np.zeros_like(like), np.ones_like(like)
    return _Stretch(one, zero, zero, one, zero, zero, zero, zero)


def _step(model: Quadratic, segment: Segment) -> _Stretch:
    q = 1 - segment.rate * model.contraction
    noise = (segment.rate * model.gradient_scale) ** 2 * model.noise / segment.batch_size
    drift = segment.rate * model.contraction * model.settling_point
    return _nothing(q)._replace(q=q, d=drift, v=noise)


def _whole_run(
    model: Quadratic, segments: Sequence[Segment], sample: _Stretch, first: int, every: int
) -> tuple[_Stretch, int]:
    """All segments, with a sample after the steps first, first + every, …; and how many there were."""
    run, time, count = _nothing(model.contraction), 0, 0
    for segment in segments:
        step, left = _step(model, segment), segment.steps
        while left > 0:
            ahead = first - time if time < first else every - (time - first) % every
            if ahead > left:
                run, time, left = _then(run, _times(step, left)), time + left, 0
                continue
            more = (left - ahead) // every
            run = _then(_then(run, _times(step, ahead)), sample)
            run = _then(run, _times(_then(_times(step, every), sample), more))
            used = ahead + more * every
            time, left, count = time + used, left - used, count + 1 + more
    return run, count


def check_sampling(first: int, every: int, decay: float | None = None) -> None:
    """Refuse samples that cannot be. Steps count from 1, as for :class:`gadam.Averaging`."""
    if first < 1 or every < 1 or first != int(first) or every != int(every):
        raise ValueError(f"first and every must be whole and at least 1, not {first} and {every}")
    if decay is not None and not 0 < decay < 1:
        raise ValueError(f"decay must lie in (0, 1), not {decay}")


def as_segments(segments: Sequence[Segment] | Segment) -> list[Segment]:
    """One segment or several, as a list."""
    found = [segments] if isinstance(segments, Segment) else list(segments)
    if not found:
        raise ValueError("there must be at least one segment")
    return found


# -------------------------------------------------------------------------------- the points' moments


def last_iterate(model: Quadratic, segments: Sequence[Segment] | Segment) -> Moments:
    """The last iterate after all segments (rate drops and batch growth are segments)."""
    run, _ = _whole_run(model, as_segments(segments), _nothing(model.contraction), 1 << 62, 1)
    return Moments(model, run.q * model.start + run.d, run.v)


def average(
    model: Quadratic, segments: Sequence[Segment] | Segment, first: int = 1, every: int = 1
) -> Moments:
    """The mean of the iterates after steps first, first + every, … (tail averaging, with a stride).

    These are ``gadam.Averaging(start=first, every=every)``'s samples.

    Args:
        model: the quadratic
        segments: the steps
        first: T_avg
        every: κ
    """
    check_sampling(first, every)
    one = np.ones_like(model.contraction)
    sample = _nothing(one)._replace(a=one)
    run, count = _whole_run(model, as_segments(segments), sample, first, every)
    if not count:
        raise ValueError(f"no step is sampled: the run ends before step {first}")
    mean = (run.a * model.start + run.e) / count
    return Moments(model, mean, run.u / count**2)


def ema(
    model: Quadratic, segments: Sequence[Segment] | Segment, decay: float, first: int = 1, every: int = 1
) -> Moments:
    """The exponential moving average, debiased: sample i of n weighs ρ^(n−i), over their sum.

    Args:
        model: the quadratic
        segments: the steps
        decay: ρ, per sample
        first: the first step that is sampled
        every: κ
    """
    check_sampling(first, every, decay)
    one = np.ones_like(model.contraction)
    sample = _nothing(one)._replace(a=(1 - decay) * one, r=decay * one)
    run, count = _whole_run(model, as_segments(segments), sample, first, every)
    if not count:
        raise ValueError(f"no step is sampled: the run ends before step {first}")
    weight = -np.expm1(count * np.log(decay))
    mean = (run.a * model.start + run.e) / weight
    return Moments(model, mean, run.u / weight**2)


def squared_separation(model: Quadratic, segment: Segment, steps: int | Array) -> Array:
    """E‖w_n − w_n+k‖² of iterates k steps apart, the first of them at the end of the segment.

    Args:
        model: the quadratic
        segment: leads to the first; the run goes on like it
        steps: k, one or several
    """
    here = last_iterate(model, segment)
    q = 1 - segment.rate * model.contraction
    k = np.asarray(steps)[..., None]
    gone = 1 - q**k
    from_settled = here.mean - model.settling_point
    noise = (segment.rate * model.gradient_scale) ** 2 * model.noise / segment.batch_size
    with np.errstate(divide="ignore", invalid="ignore"):
        new = np.where(np.abs(q) == 1, k * noise, noise * (1 - q ** (2 * k)) / (1 - q**2))
    squares = gone**2 * (from_settled**2 + here.variance) + new
    return squares @ model.spectrum.counts


# --------------------------------------------------------- the paper's closed forms, corrected, and beside


def _converging(rate: float, eigenvalue: ArrayLike) -> Array:
    """The eigenvalues, if a settled state exists."""
    lam = np.asarray(eigenvalue, dtype=float)
    if not ((lam > 0) & (rate * lam < 2) & (rate > 0)).all():
        raise ValueError("nothing settles unless 0 < αλ < 2: ask last_iterate and average instead")
    return lam


def average_mean(rate: float, eigenvalue: ArrayLike, steps: int, *, leading: bool = False) -> Array:
    """Of the mean of w_1, …, w_n, over w_0: q(1 − qⁿ)/(αλn); to leading order (1 − αλ)/(αλn)."""
    lam = _converging(rate, eigenvalue)
    q = 1 - rate * lam
    gone = 1.0 if leading else 1 - q**steps
    return q * gone / (rate * lam * steps)


def last_variance(
    rate: float, eigenvalue: ArrayLike, noise: float, steps: int | None = None
) -> Array:
    """Of the last iterate: αs²(1 − q²ⁿ)/(λ(2 − αλ)); to leading order, as n → ∞, without the bracket.

    (The proof of Theorem 1 ends with α/(2λ(1 − αλ)), which is another number.)
    """
    lam = _converging(rate, eigenvalue)
    settled = rate * noise / (lam * (2 - rate * lam))
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
    """Of the mean of w_κ, w_2κ, … up to w_n, from a fixed w_0.

    Exactly, with m = ⌊n/κ⌋ and Q = q^κ,
    s²α²(1 − q^2κ)/(1 − q²)/(m²(1 − Q)²) · (m − 2Q(1 − Q^m)/(1 − Q) + Q²(1 − Q^2m)/(1 − Q²)).
    To leading order s²/(nλ²) for κ = 1. (The main text prints ⟨1/λ⟩ for ⟨1/λ²⟩, the corollary averages
    w_1, w_2, … for w_κ, w_2κ, ….)

    Args:
        rate: α
        eigenvalue: λ
        noise: s² = σ²/B
        steps: n
        every: κ
        leading: to leading order in n
    """
    check_sampling(every, every)
    lam = _converging(rate, eigenvalue)
    q = 1 - rate * lam
    big, m = q**every, steps // every
    if m < 1:
        raise ValueError(f"no step is sampled: {steps} steps with a stride of {every}")
    unit = noise * rate**2 * (1 - q ** (2 * every)) / (1 - q**2) / (1 - big) ** 2
    if leading:
        return unit * every / steps
    bracket = m - 2 * big * (1 - big**m) / (1 - big) + big**2 * (1 - big ** (2 * m)) / (1 - big**2)
    return unit * bracket / m**2


def ema_variance(rate: float, eigenvalue: ArrayLike, noise: float, decay: float) -> Array:
    """Of the EMA, settled: V·(1 − ρ)/(1 + ρ)·(1 + ρq)/(1 − ρq), V the iterate's.

    (The paper prints (1 − ρ)/(1 + ρ)·αs²/λ: it takes iterates for independent, and loses 1/(2 − αλ).)
    """
    check_sampling(1, 1, decay if np.ndim(decay) == 0 else None)
    q = 1 - rate * _converging(rate, eigenvalue)
    iterates = last_variance(rate, eigenvalue, noise)
    return iterates * (1 - decay) / (1 + decay) * (1 + decay * q) / (1 - decay * q)


# ------------------------------------------------------------------- distances, and convergence bounds


def log_ball_probability(
    dimension: ArrayLike, points: ArrayLike, radius: ArrayLike, std: float
) -> Array:
    """The logarithm of a bound on the probability that N(0, σ²I) falls within a radius of any of n points.

    Lemma: it is at most the regularised incomplete gamma function r(a; x), a = P/2, x = n^(2/P) δ²/2σ². In
    high dimension that underflows, so its logarithm is computed by Kummer's positive series,
    r = x^a e^−x/Γ(a + 1) · ₁F₁(1; a + 1; x). (The paper's asymptotic form needs x ≪ a, not a ≪ x, and its
    exponent has −a for +a.)

    Args:
        dimension: P
        points: n
        radius: δ
        deviation: σ
    """
    a = np.asarray(dimension, dtype=float) / 2
    x = np.exp(np.log(points) / a) * np.asarray(radius, dtype=float) ** 2 / (2 * std**2)
    x, a = np.broadcast_arrays(x, a)
    small = x < a + 1
    with np.errstate(all="ignore"):
        below = a * np.log(x) - x - special.gammaln(a + 1)
        below = below + np.log(special.hyp1f1(1.0, a + 1, np.where(small, x, 0.0)))
        above = np.log(special.gammainc(a, x))
    return np.where(small, below, above)


def far_apart(dimension: int, points: int, distance: float, std: float) -> float:
    """At least this probable: that n draws from N(0, σ²I) around wherever are all this far apart.

    Of iterates, σ is the deviation of a step's noise in each direction, α·√(σ²/B).
    """
    earlier = np.arange(1, points)
    log_each = log_ball_probability(dimension, earlier, distance, std)
    return float(max(0.0, 1 - np.exp(special.logsumexp(log_each)))) if points > 1 else 1.0


def regret_bound(
    squared_distance: float, rate: float, steps: int, noise: float, smoothness: float
) -> float:
    """‖w_0 − w*‖²/(2αT) + ασ²: what the mean of w_1, …, w_T is above the best loss, at most, in expectation.

    For any convex loss whose gradient has the Lipschitz constant β, if α ≤ 1/β.

    Args:
        squared_distance: ‖w_0 − w*‖²
        rate: α
        steps: T
        noise: σ², of the whole gradient: the trace of its covariance
        smoothness: β
    """
    if not 0 < rate * smoothness <= 1:
        raise ValueError(f"the bound holds for rates up to 1/β = {1 / smoothness:g}, not {rate:g}")
    return squared_distance / (2 * rate * steps) + rate * noise


def best_rate(smoothness: float, std: float, steps: int, distance: float) -> float:
    """(β + σ√T/D)⁻¹, with which the bound is βD²/2T + 1.5·σD/√T at most: as good as can be, up to constants."""
    return 1 / (smoothness + std * np.sqrt(steps) / distance)
