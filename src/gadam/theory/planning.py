"""Advice for a training run: when to start averaging, how often to sample, what to expect.

The advice uses the model of :mod:`gadam.theory.predict` and what is known about the run: its
learning rate and batch size, and its measured noise and curvature. Each piece of advice states its
caveats. A loss curve alone is not enough: it does not tell noise from distance to the minimum.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
from numpy.typing import ArrayLike
from scipy import optimize

from gadam import schedule
from gadam.theory.model import Quadratic, Segment
from gadam.theory.predict import average, last_iterate
from gadam.theory.spectrum import Spectrum, power_law

__all__ = ["Advice", "from_measurements", "plan"]


@dataclass(frozen=True)
class Advice:
    """A recommendation and its expected effect. Losses are relative to the minimum.

    Args:
        first: T_avg, the first step to sample: ``start`` of :class:`gadam.Averaging`.
        every: The longest stride with negligible cost: ``every`` of :class:`gadam.Averaging`.
        last_loss: Loss of the last iterate at the constant rate.
        average_loss: Loss of the average.
        decayed_loss: Loss of the last iterate with the paper's linear schedule instead.
        cautions: Caveats, as sentences.
    """

    first: int
    every: int
    last_loss: float
    average_loss: float
    decayed_loss: float
    cautions: tuple[str, ...]

    @property
    def gain(self) -> float:
        """The fraction of the last iterate's excess loss that averaging removes."""
        return 1 - self.average_loss / self.last_loss if self.last_loss else 0.0

    def __str__(self) -> str:
        lines = [
            f"Average every {self.every:,} steps, starting at step {self.first:,}.",
            f"Expected excess loss: {self.last_loss:.3g} at the last iterate, "
            f"{self.average_loss:.3g} at the average ({100 * self.gain:.0f}% less), "
            f"{self.decayed_loss:.3g} with linear learning rate decay instead.",
        ]
        return "\n".join([*lines, *(f"- {caution}" for caution in self.cautions)])


def plan(
    model: Quadratic,
    rate: float,
    steps: int,
    batch_size: float = 1.0,
    slack: float = 0.05,
    *,
    epoch: int | None = None,
    reshuffled: float = 1.0,
) -> Advice:
    """Find the best T_avg and stride under the model.

    Args:
        model: The quadratic.
        rate: α, constant.
        steps: n.
        batch_size: B.
        slack: Relative increase of the loss that a longer stride may cause.
        epoch: Steps per epoch, if each example is drawn once per epoch. See :class:`Segment`.
        reshuffled: The share of the noise that is drawn without replacement.

    Returns:
        The advice.

    Raises:
        ValueError: If the model diverges at this rate.

    Example:
        >>> model = Quadratic(Spectrum([1.0, 0.01], counts=[10, 1000]), noise=1.0, start=20.0)
        >>> advice = plan(model, rate=0.5, steps=10_000)
        >>> 200 < advice.first < 5_000, advice.average_loss < 0.1 * advice.last_loss
        (True, True)
    """
    if not 0 < rate < model.stable_below():
        raise ValueError(
            f"rate must be positive and below {model.stable_below():.4g}, got {rate:g}. "
            "The model diverges at higher rates."
        )
    if steps < 2:
        raise ValueError(f"steps must be at least 2, got {steps}.")
    segment = Segment(steps, rate, batch_size, epoch, reshuffled)

    def loss(first: int, every: int = 1) -> float:
        return average(model, segment, first, every).loss

    grid = np.unique(np.concatenate([np.geomspace(1, steps, 40), np.linspace(1, steps, 40)]))
    candidates = np.unique(grid.astype(int))
    best = int(min(candidates, key=loss))
    index = np.searchsorted(candidates, best)
    low, high = candidates[max(index - 1, 0)], candidates[min(index + 1, len(candidates) - 1)]
    best = int(min(np.unique(np.linspace(low, high, 40).astype(int)), key=loss))
    lowest = loss(best)
    strides = np.unique(np.geomspace(1, max(1, steps - best), 60).astype(int))
    every = int(max(k for k in strides if loss(best, int(k)) <= (1 + slack) * lowest))
    last = last_iterate(model, segment).loss
    cautions = _cautions(model, segment, last, lowest)
    return Advice(best, every, last, lowest, _decayed_loss(model, segment), cautions)


def _decayed_loss(model: Quadratic, segment: Segment, pieces: int = 40) -> float:
    """Approximate the paper's linear schedule by constant pieces."""
    edges = np.round(np.linspace(0, segment.steps, pieces + 1)).astype(int)
    if segment.epoch:  # each piece starts with an epoch
        edges = np.unique([*(edges // segment.epoch * segment.epoch), segment.steps])
    segments = []
    for a, b in pairwise(edges):
        factor = schedule.linear((a + b) / 2, segment.steps)
        segments.append(replace(segment, steps=int(b - a), rate=segment.rate * factor))
    return last_iterate(model, segments).loss


def _cautions(model: Quadratic, segment: Segment, last: float, averaged: float) -> tuple[str, ...]:
    same = bool(np.ptp(model.noise) <= 1e-9 * model.noise.max())
    found = [
        "The model is a quadratic with the same noise in all directions and at all points. Real "
        "noise is larger where the loss is more curved, so its predictions of the average can be "
        "wrong by a factor of five. Measure the noise per direction."
        if same
        else "The model is a quadratic with the noise that was measured in each direction, and "
        "that is the same at all points."
    ]
    if model.spectrum.negative:
        share = model.spectrum.negative / (model.spectrum.dimension + model.spectrum.negative)
        found.append(
            f"{100 * share:.2g}% of the directions have negative curvature. The model leaves them "
            "out."
        )
    sharpest = segment.rate * model.contraction.max()
    if sharpest > 1:
        found.append(
            f"αλ reaches {sharpest:.2g}. The iterate overshoots in such directions, and real "
            "losses are unlikely to be quadratic there."
        )
    progress = segment.rate * segment.steps * model.contraction
    unsettled = float(model.spectrum.counts[progress < 3].sum() / model.spectrum.dimension)
    if unsettled > 0.05:
        found.append(
            f"{100 * unsettled:.0f}% of the directions do not converge in this many steps. Their "
            "remaining distance to the minimum matters as much as noise."
        )
    if averaged > 0.9 * last:
        found.append(
            "Averaging barely helps: the loss comes from distance to the minimum, not from noise."
        )
    return tuple(found)


def from_measurements(
    *,
    parameters: int,
    noise_trace: float | None = None,
    spectrum: Spectrum | None = None,
    hessian_trace: float | None = None,
    largest_eigenvalue: float | None = None,
    excess_loss: float | None = None,
    noise: ArrayLike | None = None,
    gradient: ArrayLike | None = None,
    position: ArrayLike | None = None,
    velocity: ArrayLike | None = None,
    weight_decay: float = 0.0,
    momentum: float = 0.0,
    dampening: float = 0.0,
    nesterov: bool = False,
    decoupled: bool = True,
) -> Quadratic:
    """Build the quadratic that matches measurements of a network.

    Measure noise and slope per direction if you can: :func:`gadam.analysis.measure_directions`
    returns ``spectrum``, ``noise``, ``gradient``, ``position`` and ``velocity``. With equal noise
    in all directions, the predicted loss of the average is often wrong by a factor of two to five.

    Args:
        parameters: P.
        noise_trace: Trace of the covariance of the gradient of one example. The noise is the same
            in all directions. Pass either this or ``noise``.
        spectrum: Measured spectrum of the Hessian. If None, a power law is fitted to
            ``hessian_trace`` and ``largest_eigenvalue``.
        hessian_trace: Tr H.
        largest_eigenvalue: Largest eigenvalue of H.
        excess_loss: Loss at the start minus the minimum loss. The start is placed at the same
            distance from the minimum in all directions, which affects the best time to start
            averaging. Pass either this or ``gradient``.
        noise: Variance of the gradient of one example, per direction of ``spectrum``.
        gradient: Slope of the loss at the start, per direction of ``spectrum``. The distance to
            the minimum is gradient/λ. Eigenvalues below 1e-6 of the largest are raised to that, so
            that the minimum exists; over 10,000 steps, such directions are flat all the same.
        position: Coordinate of the weights per direction, which weight decay shrinks. Needs
            ``gradient``. By default, the minimum is at zero.
        velocity: Momentum buffer per direction, to continue a run.
        weight_decay: γ.
        momentum: μ. For Adam, β₁.
        dampening: τ. For Adam, β₁.
        nesterov: Use Nesterov momentum.
        decoupled: Decouple the weight decay from the gradient.

    Returns:
        The quadratic.

    Raises:
        ValueError: If the measurements are inconsistent.

    Example:
        >>> model = from_measurements(
        ...     parameters=10_000, noise_trace=50.0, hessian_trace=200.0, largest_eigenvalue=20.0,
        ...     excess_loss=1.5,
        ... )
        >>> round(model.spectrum.dimension), round(last_iterate(model, Segment(0, 0.1)).loss, 6)
        (10000, 1.5)
        >>> model = from_measurements(
        ...     parameters=3, spectrum=Spectrum([2.0, 0.1], counts=[1, 2]), noise=[4.0, 0.2],
        ...     gradient=[1.0, 0.2],
        ... )
        >>> model.start.tolist()
        [0.5, 2.0]
    """
    if spectrum is None:
        if noise is not None or gradient is not None:
            raise ValueError("noise and gradient per direction need spectrum.")
        spectrum = _fitted(parameters, hessian_trace, largest_eigenvalue)
    elif hessian_trace is not None or largest_eigenvalue is not None:
        raise ValueError(
            "Pass either spectrum, or hessian_trace and largest_eigenvalue, but not both."
        )
    if (noise_trace is None) == (noise is None):
        raise ValueError("Pass either noise_trace, or noise per direction.")
    if (excess_loss is None) == (gradient is None):
        raise ValueError("Pass either excess_loss, or gradient per direction.")
    if position is not None and gradient is None:
        raise ValueError("position needs gradient.")
    if not np.isclose(spectrum.dimension + spectrum.negative, parameters, rtol=0.05):
        raise ValueError(
            f"The spectrum has {spectrum.dimension + spectrum.negative:g} directions, "
            f"but the network has {parameters} parameters."
        )
    total = float(spectrum.counts @ spectrum.eigenvalues)
    if total <= 0 or (excess_loss or 0) < 0 or (noise_trace or 0) < 0:
        raise ValueError(
            "The Hessian trace must be positive, and noise_trace and excess_loss non-negative."
        )
    if excess_loss is not None:
        start, minimum = np.full(len(spectrum.counts), np.sqrt(2 * excess_loss / total)), 0.0
    else:
        slopes = np.asarray(gradient, dtype=float)
        if slopes.shape != spectrum.eigenvalues.shape:
            raise ValueError(
                f"gradient must have one value per eigenvalue ({len(spectrum.eigenvalues)}), got "
                f"shape {slopes.shape}."
            )
        values = spectrum.eigenvalues
        raised = np.where(slopes == 0, values, np.maximum(values, 1e-6 * values.max()))
        spectrum = Spectrum(raised, spectrum.counts, spectrum.negative)
        distance = np.divide(slopes, raised, out=np.zeros_like(raised), where=slopes != 0)
        start = distance if position is None else np.asarray(position, dtype=float)
        minimum = start - distance
    each = noise_trace / parameters if noise_trace is not None else noise
    return Quadratic(
        spectrum,
        noise=1.0 if each is None else each,
        start=start,
        minimum=minimum,
        weight_decay=weight_decay,
        momentum=momentum,
        dampening=dampening,
        nesterov=nesterov,
        decoupled=decoupled,
        buffer=velocity if momentum else None,
    )


def _fitted(parameters: int, trace: float | None, largest: float | None) -> Spectrum:
    """Fit a power law to the trace and the largest eigenvalue."""
    if trace is None or largest is None:
        raise ValueError("Pass either spectrum, or both hessian_trace and largest_eigenvalue.")
    ratio = trace / largest if largest > 0 else 0.0
    if not 1 < ratio < parameters:
        raise ValueError(
            f"hessian_trace must be between the largest eigenvalue ({largest:g}) "
            f"and P times it, got {trace:g}."
        )
    ranks = np.arange(1.0, parameters + 1)
    exponent = optimize.brentq(lambda s: (ranks**-s).sum() - ratio, 0.0, 50.0)
    return power_law(parameters, exponent, largest, nodes=min(parameters, 500))
