"""Average or decay? What each method reaches at its own best learning rate.

A constant learning rate leaves noise in the last iterate. A decay of the rate removes it at the end
of training, and an average removes it without a decay. Each method has its own best rate, so they
are compared only after each has been tuned. The predictions are those of
:mod:`gadam.theory.predict`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

import numpy as np
from scipy import optimize

from gadam.theory.model import Moments, Quadratic, Segment
from gadam.theory.predict import average, ema, last_iterate
from gadam.theory.spectrum import Array

__all__ = [
    "METHODS",
    "SCHEDULES",
    "Method",
    "Tuned",
    "loss_by_batch_size",
    "loss_by_budget",
    "loss_by_start",
    "scheduled",
    "tune",
]

Method = Literal["constant", "average", "ema", "wsd", "cosine", "linear"]
METHODS: tuple[Method, ...] = ("constant", "average", "ema", "wsd", "cosine", "linear")
"""The last iterate, the average and the EMA at a constant rate; the last iterate of decays."""

SCHEDULES: dict[str, Callable[[float], float]] = {
    "constant": lambda done: 1.0,
    "wsd": lambda done: min(1.0, (1 - done) / 0.2),
    "cosine": lambda done: (1 + math.cos(math.pi * done)) / 2,
    "linear": lambda done: 1 - done,
}
"""The factor of the rate by the fraction of training done. WSD decays in the last fifth."""


def scheduled(
    schedule: str | Callable[[float], float],
    steps: int,
    rate: float,
    batch_size: float = 1.0,
    pieces: int = 50,
) -> list[Segment]:
    """Divide a learning-rate schedule into segments of constant rate.

    Args:
        schedule: A key of :data:`SCHEDULES`, or a function from the fraction of training done to
            the factor of the rate.
        steps: n.
        rate: α, which the factors multiply.
        batch_size: B.
        pieces: Number of segments. Each has the rate of its middle. Pass ``steps`` for a new rate
            at each step.

    Returns:
        The segments.

    Raises:
        TypeError: If ``steps`` is not an integer.
        ValueError: If the schedule is unknown or a number is not positive.

    Example:
        >>> [segment.rate for segment in scheduled("linear", steps=100, rate=1.0, pieces=4)]
        [0.875, 0.625, 0.375, 0.125]
    """
    if isinstance(schedule, str) and schedule not in SCHEDULES:
        raise ValueError(f"schedule must be one of {', '.join(SCHEDULES)}, got {schedule!r}.")
    _check_steps(steps)
    if pieces < 1:
        raise ValueError(f"pieces must be at least 1, got {pieces}.")
    factor = SCHEDULES[schedule] if isinstance(schedule, str) else schedule
    edges = np.round(np.linspace(0, steps, min(pieces, steps) + 1)).astype(int).tolist()
    if schedule == "constant":
        edges = [0, steps]
    return [
        Segment(b - a, rate * factor((a + b) / 2 / steps), batch_size) for a, b in pairwise(edges)
    ]


def _check_steps(steps: int) -> None:
    if not isinstance(steps, int | np.integer):
        raise TypeError(f"steps must be an integer, got {steps!r}.")
    if steps < 1:
        raise ValueError(f"steps must be at least 1, got {steps}.")


@dataclass(frozen=True)
class Tuned:
    """A method at its best learning rate.

    Args:
        method: One of :data:`METHODS`.
        loss: Expected excess loss.
        rate: The best α.
        steps: n.
        batch_size: B.
        first: The best T_avg of an average, otherwise None.
        decay: The best ρ of an EMA, otherwise None.
    """

    method: Method
    loss: float
    rate: float
    steps: int
    batch_size: float
    first: int | None = None
    decay: float | None = None

    def segments(self, pieces: int = 50) -> list[Segment]:
        """Return the steps of the method.

        Args:
            pieces: Number of segments of a decay.

        Returns:
            The segments.
        """
        schedule = self.method if self.method in SCHEDULES else "constant"
        return scheduled(schedule, self.steps, self.rate, self.batch_size, pieces)


def tune(model: Quadratic, steps: int, method: Method, batch_size: float = 1.0) -> Tuned:
    """Find the learning rate at which a method has the lowest expected loss.

    For an average, the start is tuned too, and for an EMA its decay.

    Args:
        model: The quadratic and the optimizer.
        steps: n.
        method: One of :data:`METHODS`.
        batch_size: B.

    Returns:
        The method at its best rate.

    Raises:
        TypeError: If ``steps`` is not an integer.
        ValueError: If the method is unknown, there are no steps, or the loss has no curvature.

    Example:
        >>> from gadam.theory.spectrum import power_law
        >>> model = Quadratic(power_law(50, exponent=1.0), noise=1.0, start=10.0)
        >>> best = {method: tune(model, 1000, method) for method in ("constant", "average")}
        >>> best["average"].loss < best["constant"].loss
        True
        >>> best["average"].rate > best["constant"].rate  # an average affords a higher rate
        True
    """
    if method not in METHODS:
        raise ValueError(f"method must be one of {', '.join(METHODS)}, got {method!r}.")
    _check_steps(steps)
    limit = model.stable_below()
    if not math.isfinite(limit):
        raise ValueError("The loss has no curvature, so it has no best learning rate.")
    best: dict[float, Tuned] = {}

    def loss(log_rate: float) -> float:
        found = _at_rate(model, steps, method, math.exp(log_rate), batch_size)
        best[found.loss] = found
        return found.loss

    _minimize(loss, math.log(limit) - 12, math.log(0.98 * limit), points=16)
    return best[min(best)]


def _at_rate(model: Quadratic, steps: int, method: Method, rate: float, batch_size: float) -> Tuned:
    """Return a method at a given rate, with the best start or decay of its average."""
    segment = Segment(steps, rate, batch_size)
    if method == "average":
        # The number of averaged iterates on a logarithmic scale, from 1 to all of them.
        def averaged(log_count: float) -> float:
            return average(model, segment, _first(steps, log_count)).loss

        log_count = _minimize(averaged, 0.0, math.log(steps), points=10)
        first = _first(steps, log_count)
        return Tuned(method, averaged(log_count), rate, steps, batch_size, first=first)
    if method == "ema":

        def moving(log_window: float) -> float:
            return ema(model, segment, _decay(log_window)).loss

        log_window = _minimize(moving, 0.1, math.log(2.0 * steps + 2), points=10)
        decay = _decay(log_window)
        return Tuned(method, moving(log_window), rate, steps, batch_size, decay=decay)
    segments = scheduled(method, steps, rate, batch_size)
    return Tuned(method, last_iterate(model, segments).loss, rate, steps, batch_size)


def _first(steps: int, log_count: float) -> int:
    return max(1, min(steps, steps + 1 - round(math.exp(log_count))))


def _decay(log_window: float) -> float:
    return 1 - math.exp(-log_window)


def _minimize(function: Callable[[float], float], low: float, high: float, points: int) -> float:
    """Minimize over a grid, then between the neighbors of its best point."""
    grid = np.linspace(low, high, points)
    values = [function(float(x)) for x in grid]
    best = int(np.argmin(values))
    bounds = (grid[max(best - 1, 0)], grid[min(best + 1, points - 1)])
    if bounds[0] == bounds[1]:
        return float(grid[best])
    found = optimize.minimize_scalar(
        function, bounds=bounds, method="bounded", options={"xatol": 0.02}
    )
    return float(found.x) if found.fun < values[best] else float(grid[best])


# Curves.


def loss_by_budget(
    model: Quadratic,
    budgets: Sequence[int],
    methods: Sequence[Method] = METHODS,
    batch_size: float = 1.0,
) -> dict[Method, list[Tuned]]:
    """Tune each method for each number of steps.

    Args:
        model: The quadratic and the optimizer.
        budgets: Numbers of steps.
        methods: The methods.
        batch_size: B.

    Returns:
        By method, the tuned method for each budget.
    """
    return {
        method: [tune(model, int(steps), method, batch_size) for steps in budgets]
        for method in methods
    }


def loss_by_start(model: Quadratic, segment: Segment, starts: Sequence[int]) -> list[Moments]:
    """Predict the average for each start, at a constant rate.

    Args:
        model: The quadratic and the optimizer.
        segment: The steps.
        starts: Values of T_avg, the first sampled step.

    Returns:
        Moments of the average for each start.

    Raises:
        ValueError: If a start is after the last step.
    """
    return [average(model, segment, int(first)) for first in starts]


def loss_by_batch_size(
    model: Quadratic,
    examples: float,
    batch_sizes: Sequence[float] | Array,
    methods: Sequence[Method] = METHODS,
    overhead: float = 0.0,
) -> dict[Method, list[Tuned]]:
    """Tune each method for each batch size, at equal cost.

    A step costs its B examples plus a fixed overhead. Without overhead, small batches are never
    worse, and the loss rises from the critical batch size on, where the steps become too few. With
    overhead there is an optimum: ``min(curve, key=lambda tuned: tuned.loss)``.

    Args:
        model: The quadratic and the optimizer.
        examples: The cost of training, in examples.
        batch_sizes: Values of B.
        methods: The methods.
        overhead: The fixed cost of a step, in examples.

    Returns:
        By method, the tuned method for each batch size.

    Raises:
        ValueError: If the cost does not suffice for one step.
    """
    if overhead < 0 or not all(0 < size + overhead <= examples for size in batch_sizes):
        raise ValueError(
            "examples must suffice for one step at each batch size, and overhead must be "
            f"non-negative, got {examples:g} and {overhead:g}."
        )
    numbers = [int(examples // (size + overhead)) for size in batch_sizes]
    return {
        method: [
            tune(model, steps, method, float(size)) for steps, size in zip(numbers, batch_sizes)
        ]
        for method in methods
    }
