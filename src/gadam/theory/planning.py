"""From a run of one's own to advice: how much averaging should help, from when on, how often to sample.

Under the model of :mod:`gadam.theory.predict`, and with what is known of the run: its rate and batch size, and
measured noise and curvature, or its loss curve alone. Each piece of advice says how far to trust it.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import ArrayLike
from scipy import optimize

from gadam import schedule
from gadam.theory.predict import Segment, Quadratic, average, last_iterate
from gadam.theory.spectrum import Spectrum, power_law

__all__ = ["Advice", "CurveAdvice", "from_curve", "from_measurements", "plan"]


@dataclass(frozen=True)
class Advice:
    """What to do, and what it should bring. Losses are above the best there is.

    Args:
        first: T_avg: the first step to sample, ``start`` of :class:`gadam.Averaging`
        every: the longest stride that costs next to nothing, its ``every``
        last_loss: of the last iterate at the constant rate
        average_loss: of the average
        decayed_loss: of the last iterate when the rate falls by the paper's linear schedule instead
        cautions: how far to trust it, in sentences
    """

    first: int
    every: int
    last_loss: float
    average_loss: float
    decayed_loss: float
    cautions: tuple[str, ...]

    @property
    def gain(self) -> float:
        """The share of the last iterate's excess loss that averaging takes away."""
        return 1 - self.average_loss / self.last_loss if self.last_loss else 0.0

    def __str__(self) -> str:
        lines = [
            f"Average from step {self.first:,} on, every {self.every:,} steps.",
            f"Expected loss above the best: {self.last_loss:.3g} at the last iterate, "
            f"{self.average_loss:.3g} at the average ({100 * self.gain:.0f} % less), "
            f"{self.decayed_loss:.3g} if the rate decays linearly instead.",
        ]
        return "\n".join([*lines, *(f"- {caution}" for caution in self.cautions)])


def plan(
    model: Quadratic, rate: float, steps: int, batch_size: float = 1.0, slack: float = 0.05
) -> Advice:
    """The best T_avg and stride under the model.

    Args:
        model: the quadratic
        rate: α, constant
        steps: n
        batch_size: B
        slack: how much more loss a longer stride may cost, as a share

    Example:
        >>> model = Quadratic(Spectrum([1.0, 0.01], counts=[10, 1000]), noise=1.0, start=20.0)
        >>> advice = plan(model, rate=0.5, steps=10_000)
        >>> 200 < advice.first < 5_000, advice.average_loss < 0.1 * advice.last_loss
        (True, True)
    """
    if not 0 < rate < model.stable_below():
        raise ValueError(
            f"at the rate {rate:g} the model diverges: it is stable below {model.stable_below():.4g}"
        )
    if steps < 2:
        raise ValueError(f"there must be at least 2 steps, not {steps}")
    run = Segment(steps, rate, batch_size)

    def loss(first: int, every: int = 1) -> float:
        return average(model, run, first, every).loss

    grid = np.unique(np.concatenate([np.geomspace(1, steps, 40), np.linspace(1, steps, 40)]))
    starts = np.unique(grid.astype(int))
    best = int(min(starts, key=loss))
    near = np.searchsorted(starts, best)
    low, high = starts[max(near - 1, 0)], starts[min(near + 1, len(starts) - 1)]
    best = int(min(np.unique(np.linspace(low, high, 40).astype(int)), key=loss))
    least = loss(best)
    strides = np.unique(np.geomspace(1, max(1, steps - best), 60).astype(int))
    every = int(max(k for k in strides if loss(best, int(k)) <= (1 + slack) * least))
    last = last_iterate(model, run).loss
    return Advice(
        best, every, last, least, _decayed(model, run), _cautions(model, run, last, least)
    )


def _decayed(model: Quadratic, run: Segment, pieces: int = 40) -> float:
    """By the paper's linear schedule, in pieces."""
    edges = np.round(np.linspace(0, run.steps, pieces + 1)).astype(int)
    segments = []
    for a, b in pairwise(edges):
        factor = schedule.linear((a + b) / 2, run.steps)
        segments.append(Segment(int(b - a), run.rate * factor, run.batch_size))
    return last_iterate(model, segments).loss


def _cautions(model: Quadratic, run: Segment, last: float, least: float) -> tuple[str, ...]:
    found = ["The model is a quadratic with noise that is the same in all directions and places."]
    sharpest = run.rate * model.contraction.max()
    if sharpest > 1:
        found.append(
            f"αλ reaches {sharpest:.2g}: there the iterate overshoots, and a true loss is hardly quadratic."
        )
    slow = run.rate * run.steps * model.contraction
    unsettled = float(model.spectrum.counts[slow < 3].sum() / model.spectrum.dimension)
    if unsettled > 0.05:
        found.append(
            f"{100 * unsettled:.0f} % of the directions have not settled in this many steps: what is left of "
            "their start decides as much as noise does."
        )
    if least > 0.9 * last:
        found.append("Averaging hardly helps here: the loss is not noise, but distance to go.")
    return tuple(found)


def from_measurements(
    *,
    parameters: int,
    noise_trace: float,
    spectrum: Spectrum | None = None,
    hessian_trace: float | None = None,
    largest_eigenvalue: float | None = None,
    excess_loss: float,
) -> Quadratic:
    """The quadratic that has what was measured of a network.

    Args:
        parameters: P
        noise_trace: the trace of the covariance of one example's gradient
        spectrum: of the Hessian, if it was measured; else a power law is fitted to the next two
        hessian_trace: Tr H
        largest_eigenvalue: of H
        excess_loss: how far the loss is above the best one, where the run starts; it is spread so that the start is
            as far from the minimum in all directions, and where averaging should begin depends on that

    Example:
        >>> model = from_measurements(
        ...     parameters=10_000, noise_trace=50.0, hessian_trace=200.0, largest_eigenvalue=20.0,
        ...     excess_loss=1.5,
        ... )
        >>> round(model.spectrum.dimension), round(last_iterate(model, Segment(0, 0.1)).loss, 6)
        (10000, 1.5)
    """
    if spectrum is None:
        if hessian_trace is None or largest_eigenvalue is None:
            raise ValueError("say the spectrum, or both hessian_trace and largest_eigenvalue")
        ratio = hessian_trace / largest_eigenvalue
        if not 1 < ratio < parameters:
            raise ValueError(
                f"the trace ({hessian_trace:g}) must lie between the largest eigenvalue "
                f"({largest_eigenvalue:g}) and P times it"
            )
        ranks = np.arange(1.0, parameters + 1)
        exponent = optimize.brentq(lambda s: (ranks**-s).sum() - ratio, 0.0, 50.0)
        spectrum = power_law(parameters, exponent, largest_eigenvalue, nodes=min(parameters, 500))
    elif hessian_trace is not None or largest_eigenvalue is not None:
        raise ValueError(
            "say the spectrum, or hessian_trace and largest_eigenvalue: not all of them"
        )
    if not np.isclose(spectrum.dimension, parameters, rtol=0.05):
        raise ValueError(
            f"the spectrum has {spectrum.dimension:g} directions, the network {parameters} parameters"
        )
    total = float(spectrum.counts @ spectrum.eigenvalues)
    if total <= 0 or excess_loss < 0 or noise_trace < 0:
        raise ValueError("curvature must be positive; noise and excess loss must not be negative")
    start = np.sqrt(2 * excess_loss / total)
    return Quadratic(spectrum, noise=noise_trace / parameters, start=start)


@dataclass(frozen=True)
class CurveAdvice:
    """What a loss curve alone tells.

    Args:
        first: T_avg: from where on the curve only fluctuates
        every: a stride that loses next to nothing
        time_constant: in which the transient falls to 1/e
        settled_loss: where the curve ends
        fluctuation: its standard deviation there
        noise_cost: what noise costs, if the iterates scatter around the minimum of this very loss
        cautions: how far to trust it
        unit: what all of these are counted in
    """

    first: int
    every: int
    time_constant: float
    settled_loss: float
    fluctuation: float
    noise_cost: float
    cautions: tuple[str, ...]
    unit: str = "step"

    def __str__(self) -> str:
        stride = "" if self.every == 1 else f", every {self.every:,} {self.unit}s"
        lines = [
            f"Average from {self.unit} {self.first:,} on{stride}.",
            f"The loss settles at {self.settled_loss:.4g} ± {self.fluctuation:.2g} within some "
            f"{self.time_constant:,.0f} {self.unit}s; its fluctuation indicates that noise costs "
            f"{self.noise_cost:.2g} or more.",
        ]
        return "\n".join([*lines, *(f"- {caution}" for caution in self.cautions)])


def from_curve(
    steps: ArrayLike, losses: ArrayLike, effective_dimension: float = 1.0, unit: str = "step"
) -> CurveAdvice:
    """Advice from the losses of iterates along a run at a constant rate.

    The curve is fitted by a transient and a level, c + a·e^(−t/τ). Around its level the loss ½ Σ λw² of settled
    iterates has the mean E = ½ Σ λV and the standard deviation E·√(2/P_eff): so a fluctuation indicates that noise costs
    √(P_eff/2) times as much, most of which a long average takes off. That supposes that iterates scatter around the
    minimum of the loss that is measured. Where they settle beside it (by weight decay, or as it is a validation loss),
    the loss fluctuates more, and the indication is too high.

    Args:
        steps: at which the losses were measured
        losses: of the iterate, on data that is always the same
        effective_dimension: P_eff = (Σ λV)²/Σ (λV)²; it is at least 1, and far more in a network
        unit: what steps are, in words

    Raises:
        ValueError: where the curve has not settled, or is no such curve: then there is no advice

    Example:
        >>> t = np.arange(0, 10_000, 100)
        >>> wobble = 0.02 * np.random.default_rng(0).standard_normal(100)
        >>> advice = from_curve(t, 0.5 + 2 * np.exp(-t / 800) + wobble)
        >>> 600 < advice.time_constant < 1000, 2000 < advice.first < 6000
        (True, True)
    """
    t, y = np.asarray(steps, dtype=float), np.asarray(losses, dtype=float)
    if t.shape != y.shape or t.ndim != 1 or len(t) < 8:
        raise ValueError("there must be a loss for each step, and at least 8 of them")
    if not (np.isfinite(y).all() and np.isfinite(t).all()) or (np.diff(t) <= 0).any():
        raise ValueError("losses must be finite, and steps increasing")
    if not effective_dimension >= 1:
        raise ValueError(f"effective_dimension must be at least 1, not {effective_dimension}")
    span = t[-1] - t[0]
    tail = y[len(y) // 2 :]

    def curve(x: np.ndarray, level: float, height: float, tau: float) -> np.ndarray:
        return level + height * np.exp(-(x - t[0]) / tau)

    guess = (float(tail.mean()), float(y[0] - tail.mean()), span / 10)
    bounds = ([-np.inf, -np.inf, span / (10 * len(t))], [np.inf, np.inf, 10 * span])
    try:
        (level, height, tau), _ = optimize.curve_fit(curve, t, y, p0=guess, bounds=bounds)
    except RuntimeError:
        raise ValueError("no transient and level can be fitted to this curve") from None
    settled = t - t[0] > 3 * tau
    if settled.sum() < 5:
        raise ValueError(
            f"the curve has not settled in {span:,.0f} {unit}s, so that there is nothing to average yet: train on at "
            "this rate"
        )
    left = (y - curve(t, level, height, tau))[settled]
    slope, level_left = np.polyfit(t[settled], left, 1)
    wobble = float((left - slope * t[settled] - level_left).std(ddof=2))
    drift = float(slope * np.ptp(t[settled]))
    if abs(drift) > 4 * wobble + 0.05 * abs(height):
        raise ValueError(
            "the curve does not settle: after its fast part it goes on by more than it fluctuates"
        )
    # From where on the transient is lost in the fluctuation.
    wait = tau * np.log(max(2 * abs(height) / wobble, 1.0)) if wobble > 0 else 10 * tau
    first = int(np.ceil(min(t[0] + wait, t[settled][-3])))
    cautions = (
        f"{int(settled.sum())} points lie after the transient.",
        "What noise costs cannot be read from a curve, it is only indicated"
        + (
            ": here by one effective direction, where a network has many."
            if effective_dimension == 1
            else "."
        ),
    )
    return CurveAdvice(
        first,
        max(1, int(tau)),  # iterates nearer than that are alike
        float(tau),
        float(level),
        wobble,
        float(np.sqrt(effective_dimension / 2)) * wobble,
        cautions,
        unit,
    )
