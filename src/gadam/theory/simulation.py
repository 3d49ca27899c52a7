"""Step-by-step simulators of the processes that the predictions describe.

With independent noise, the directions of the eigenbasis do not interact. They are simulated in
blocks that fit in the CPU cache, on all cores, each block with its own random stream. The result
does not depend on the number of threads, and memory is needed only for the final points, even for
a million directions.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from gadam.theory.model import Quadratic, Segment, as_segments, check_sampling
from gadam.theory.noise import NoiseDraw
from gadam.theory.predict import check_finite
from gadam.theory.spectrum import Array

__all__ = ["Simulation", "simulate", "simulate_dependent"]

BLOCK = 1 << 15  # values per block; with noise, sum and average about half a megabyte
POINTS = ("last", "average", "ema")


@dataclass(frozen=True, eq=False)
class Simulation:
    """The result of a simulation.

    Attributes:
        last: The last iterate, of shape (replicas, P).
        average: The mean of the samples, of the same shape. None if nothing was sampled.
        ema: The debiased exponential moving average, of the same shape. None if nothing was
            sampled or no decay was passed.
        recorded_steps: Steps at which the distances and losses were recorded.
        squared_distance: ‖w − w*‖² of each point by name, of shape (recorded steps, replicas).
            NaN before the first sample.
        loss: L(w) of each point by name, of the same shape.
    """

    last: Array
    average: Array | None
    ema: Array | None
    recorded_steps: tuple[int, ...]
    squared_distance: dict[str, Array]
    loss: dict[str, Array]


@dataclass(frozen=True)
class _Sampling:
    first: int
    every: int
    decay: float | None
    record: tuple[int, ...]

    def due(self, step: int) -> bool:
        return step >= self.first and (step - self.first) % self.every == 0


def _sampling(
    segments: list[Segment],
    replicas: int,
    first: int,
    every: int,
    decay: float | None,
    record: Sequence[int],
) -> _Sampling:
    check_sampling(first, every, decay)
    steps = sum(segment.steps for segment in segments)
    if replicas < 1:
        raise ValueError(f"replicas must be at least 1, got {replicas}.")
    if any(not 1 <= step <= steps for step in record):
        raise ValueError(f"Steps to record must be between 1 and {steps}.")
    return _Sampling(first, every, decay, tuple(sorted({int(step) for step in record})))


def simulate(
    model: Quadratic,
    segments: Sequence[Segment] | Segment,
    *,
    replicas: int = 1,
    first: int = 1,
    every: int = 1,
    decay: float | None = None,
    record: Sequence[int] = (),
    seed: int | Sequence[int] = 0,
    dtype: type = np.float64,
    threads: int | None = None,
) -> Simulation:
    """Simulate descent on the quadratic with independent Gaussian noise.

    Args:
        model: The quadratic and the method. The counts of its spectrum must be integers.
        segments: The steps.
        replicas: Number of independent repetitions.
        first: T_avg, the first sampled step.
        every: κ, the stride.
        decay: ρ of an EMA of the same samples, or None.
        record: Steps at which to record distances and losses.
        seed: Seed of the noise.
        dtype: Floating-point type. Use float32 for speed.
        threads: Number of threads. Defaults to one per core.

    Returns:
        The final points and the recorded values.

    Raises:
        ValueError: If the iterate diverges beyond the range of floating-point numbers.

    Example:
        >>> from gadam.theory.spectrum import Spectrum
        >>> model = Quadratic(Spectrum([1.0], counts=[50]), noise=1.0)
        >>> result = simulate(model, Segment(200, rate=0.1), replicas=3, first=100)
        >>> result.average.shape, bool((result.average**2).sum() < (result.last**2).sum())
        ((3, 50), True)
    """
    steps = as_segments(segments)
    sampling = _sampling(steps, replicas, first, every, decay, record)
    direction = _directions(model)
    width = max(1, BLOCK // replicas)
    blocks = [direction[i : i + width] for i in range(0, len(direction), width)]
    streams = np.random.SeedSequence(seed).spawn(len(blocks))

    def run_block(block: int) -> _Block:
        random = np.random.Generator(np.random.SFC64(streams[block]))
        noise: Array = np.empty((replicas, len(blocks[block])), dtype=dtype)

        def draw(w: Array) -> Array:
            return random.standard_normal(out=noise, dtype=dtype)

        return _descend(model, steps, blocks[block], draw, sampling, replicas, dtype)

    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    workers = threads or cores or 1
    with ThreadPoolExecutor(workers) as pool:
        found = _join_directions(list(pool.map(run_block, range(len(blocks)))), sampling)
    check_finite(model, steps, found.last)
    return found


def simulate_dependent(
    model: Quadratic,
    segments: Sequence[Segment] | Segment,
    draw: Callable[[int], NoiseDraw],
    *,
    replicas: int = 1,
    first: int = 1,
    every: int = 1,
    decay: float | None = None,
    record: Sequence[int] = (),
    dtype: type = np.float64,
) -> Simulation:
    """Simulate descent on the quadratic plus one draw of a Gaussian process.

    The noise is a function of the point. The kernel sets its variance, and the model's own σ² and
    the batch sizes are ignored.

    Args:
        model: The quadratic and the method. The counts of its spectrum must be integers.
        segments: The steps.
        draw: Returns the noise of replica 0, 1, …. See :mod:`gadam.theory.noise`.
        replicas: Number of independent draws.
        first: T_avg, the first sampled step.
        every: κ, the stride.
        decay: ρ of an EMA of the same samples, or None.
        record: Steps at which to record distances and losses.
        dtype: Floating-point type.

    Returns:
        The final points and the recorded values.

    Raises:
        ValueError: If the iterate diverges beyond the range of floating-point numbers.
    """
    steps = as_segments(segments)
    sampling = _sampling(steps, replicas, first, every, decay, record)
    direction = _directions(model)
    results = []
    for replica in range(replicas):
        noise = draw(replica)

        def at(w: Array, noise: NoiseDraw = noise) -> Array:
            return noise(w[0])[None]

        block = _descend(model, steps, direction, at, sampling, 1, dtype, unit_noise=False)
        results.append(_join_directions([block], sampling))
    check_finite(model, steps, *(result.last for result in results))
    return _join_replicas(results)


def _directions(model: Quadratic) -> NDArray[np.intp]:
    """Return the index of the eigenvalue of each direction."""
    counts = np.round(model.spectrum.counts).astype(int)
    model.spectrum.expanded()  # raises if a count is not an integer
    return np.repeat(np.arange(len(counts)), counts)


@dataclass(frozen=True, eq=False)
class _Block:
    """The final points of some directions, and their share of the recorded sums.

    ``squares`` and ``losses`` have shape (points, steps, replicas).
    """

    points: dict[str, Array | None]
    squares: Array
    losses: Array


@np.errstate(over="ignore", invalid="ignore")
def _descend(
    model: Quadratic,
    segments: list[Segment],
    direction: NDArray[np.intp],
    draw: Callable[[Array], Array],
    sampling: _Sampling,
    replicas: int,
    dtype: type,
    unit_noise: bool = True,
) -> _Block:
    """Simulate some directions. ``unit_noise``: scale the drawn noise by the model's σ²/B."""

    def per_direction(values: ArrayLike) -> Array:
        return np.broadcast_to(values, model.contraction.shape)[direction].astype(dtype)

    lam, minimum = per_direction(model.spectrum.eigenvalues), per_direction(model.minimum)
    w = np.tile(per_direction(model.start), (replicas, 1))
    total, moving = np.zeros_like(w), np.zeros_like(w)
    scratch, gradient, count, step = np.empty_like(w), np.empty_like(w), 0, 0
    row = {s: i for i, s in enumerate(sampling.record)}
    squares: Array = np.full((len(POINTS), len(row), replicas), np.nan)
    losses = squares.copy()

    def points() -> dict[str, Array | None]:
        weight = 1 - (sampling.decay or 0.0) ** count
        return {
            "last": w,
            "average": total / count if count else None,
            "ema": moving / weight if count and sampling.decay is not None else None,
        }

    slope = per_direction(model.slope)
    pull = per_direction(model.spectrum.eigenvalues * model.minimum)
    moves = bool(pull.any())
    initial = 0.0 if model.buffer is None else model.buffer
    buffer = np.tile(per_direction(initial), (replicas, 1)) if model.momentum else w
    dampened = 0.0 if model.undampened_start else model.dampening
    for segment in segments:
        spread = per_direction(np.sqrt(model.noise / segment.batch_size)) if unit_noise else 1.0
        alpha = per_direction(segment.rate * model.gradient_scale)
        for _ in range(segment.steps):
            np.multiply(draw(w), spread, out=gradient)
            gradient += np.multiply(slope, w, out=scratch)
            if moves:
                gradient -= pull
            update = gradient
            if model.momentum:
                buffer *= model.momentum
                buffer += (1 - dampened) * gradient
                dampened = model.dampening
                update = gradient + model.momentum * buffer if model.nesterov else buffer
            if model.decay:
                w *= 1 - segment.rate * model.decay
            w -= np.multiply(alpha, update, out=scratch)
            step += 1
            if sampling.due(step):
                count += 1
                total += w
                if sampling.decay is not None:
                    moving *= sampling.decay
                    moving += (1 - sampling.decay) * w
            if step in row:
                for i, point in enumerate(points().values()):
                    if point is not None:
                        away = (point - minimum).astype(float) ** 2
                        squares[i, row[step]] = away.sum(1)
                        losses[i, row[step]] = 0.5 * (away @ lam)
    return _Block(points(), squares, losses)


def _join_directions(blocks: list[_Block], sampling: _Sampling) -> Simulation:
    squares = np.sum([block.squares for block in blocks], axis=0)
    losses = np.sum([block.losses for block in blocks], axis=0)
    points = {name: _concatenate([b.points[name] for b in blocks], 1) for name in POINTS}
    last = points["last"]
    assert last is not None
    return Simulation(
        last=last,
        average=points["average"],
        ema=points["ema"],
        recorded_steps=sampling.record,
        squared_distance=dict(zip(POINTS, squares)),
        loss=dict(zip(POINTS, losses)),
    )


def _join_replicas(results: list[Simulation]) -> Simulation:
    return Simulation(
        last=np.concatenate([r.last for r in results]),
        average=_concatenate([r.average for r in results], 0),
        ema=_concatenate([r.ema for r in results], 0),
        recorded_steps=results[0].recorded_steps,
        squared_distance={
            name: np.concatenate([r.squared_distance[name] for r in results], 1) for name in POINTS
        },
        loss={name: np.concatenate([r.loss[name] for r in results], 1) for name in POINTS},
    )


def _concatenate(arrays: Sequence[Array | None], axis: int) -> Array | None:
    """Concatenate arrays of which all or none are None."""
    present = [array for array in arrays if array is not None]
    return np.concatenate(present, axis=axis) if present else None
