"""Simulators: what the predictions are about, step by step.

With independent noise the directions of the eigenbasis know nothing of each other. They are simulated in
blocks that stay in the processor's cache, each with a stream of random numbers of its own, on all cores: the
result does not depend on how many there are, and a million directions need no more memory than their ends.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np

from gadam.theory.noise import NoiseDraw
from gadam.theory.predict import Segment, Quadratic, check_sampling, as_segments
from gadam.theory.spectrum import Array

__all__ = ["Simulation", "simulate", "simulate_dependent"]

BLOCK = 1 << 15  # values: with noise, sum and average half a megabyte
POINTS = ("last", "average", "ema")


@dataclass(frozen=True, eq=False)
class Simulation:
    """What came out of a simulation.

    Attributes:
        last: The last iterate, (replicas, P).
        average: The mean of the samples, likewise; None if the run ends before the first.
        ema: The debiased exponential moving average, likewise.
        steps: At which the following were recorded.
        squared_distance: ‖w − w*‖² of each point by name, (recorded steps, replicas); NaN before its
            first sample.
        loss: L(w), likewise.
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
        raise ValueError(f"there must be at least one replica, not {replicas}")
    if any(not 1 <= step <= steps for step in record):
        raise ValueError(f"steps to record must lie between 1 and {steps}")
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
    """Descend the quadratic with independent Gaussian noise.

    Args:
        model: the quadratic and the method; its counts must be whole numbers
        segments: the steps
        replicas: independent runs
        first: T_avg, the first step after which the iterate is sampled
        every: κ, steps from sample to sample
        decay: ρ of an EMA of the same samples, if wanted
        record: steps after which distances and losses are noted
        seed: of the noise
        dtype: float32 for speed
        threads: one for each core if not said

    Example:
        >>> from gadam.theory.spectrum import Spectrum
        >>> model = Quadratic(Spectrum([1.0], counts=[50]), noise=1.0)
        >>> run = simulate(model, Segment(200, rate=0.1), replicas=3, first=100)
        >>> run.average.shape, bool((run.average**2).sum() < (run.last**2).sum())
        ((3, 50), True)
    """
    whole = as_segments(segments)
    sampling = _sampling(whole, replicas, first, every, decay, record)
    counts = np.round(model.spectrum.counts).astype(int)
    model.spectrum.expanded()  # refuses counts that are not whole
    direction = np.repeat(np.arange(len(counts)), counts)
    width = max(1, BLOCK // replicas)
    blocks = [direction[i : i + width] for i in range(0, len(direction), width)]
    streams = np.random.SeedSequence(seed).spawn(len(blocks))

    def one(block: int) -> _Block:
        random = np.random.Generator(np.random.SFC64(streams[block]))
        noise: Array = np.empty((replicas, len(blocks[block])), dtype=dtype)

        def draw(w: Array) -> Array:
            return random.standard_normal(out=noise, dtype=dtype)

        return _descend(model, whole, blocks[block], draw, sampling, replicas, dtype)

    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    workers = threads or cores or 1
    with ThreadPoolExecutor(workers) as pool:
        return _joined(list(pool.map(one, range(len(blocks)))), sampling)


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
    """Descend the quadratic plus one draw of a Gaussian process: the noise depends on the point alone.

    The kernel says how strong the noise is: the model's own σ², and batch sizes, are not used.

    Args:
        model: the quadratic and the method
        segments: the steps
        draw: gives the noise of replica 0, 1, …, see :mod:`gadam.theory.noise`
        replicas: independent draws
        first: see :func:`simulate`
        every: likewise
        decay: likewise
        record: likewise
        dtype: likewise
    """
    sampling = _sampling(as_segments(segments), replicas, first, every, decay, record)
    counts = np.round(model.spectrum.counts).astype(int)
    model.spectrum.expanded()
    direction = np.repeat(np.arange(len(counts)), counts)
    runs = []
    for replica in range(replicas):
        noise = draw(replica)

        def at(w: Array, noise: NoiseDraw = noise) -> Array:
            return noise(w[0])[None]

        runs.append(_descend(model, as_segments(segments), direction, at, sampling, 1, dtype, own=False))
    return _stacked([_joined([run], sampling) for run in runs])


@dataclass(frozen=True, eq=False)
class _Block:
    """The points of some directions, and their part of what is recorded: (points, steps, replicas)."""

    points: dict[str, Array | None]
    squares: Array
    losses: Array


def _descend(
    model: Quadratic,
    segments: list[Segment],
    direction: Any,
    draw: Callable[[Array], Array],
    sampling: _Sampling,
    replicas: int,
    dtype: type,
    own: bool = True,
) -> _Block:
    """These directions, step by step. ``own``: unit noise is scaled to the model's."""

    def of(values: Any) -> Array:
        return np.broadcast_to(values, model.contraction.shape)[direction].astype(dtype)

    lam, minimum = of(model.spectrum.eigenvalues), of(model.minimum)
    w = np.tile(of(model.start), (replicas, 1))
    total, moving = np.zeros_like(w), np.zeros_like(w)
    scratch, count, step = np.empty_like(w), 0, 0
    wanted = {s: i for i, s in enumerate(sampling.record)}
    squares = np.full((len(POINTS), len(wanted), replicas), np.nan)
    losses = squares.copy()

    def points() -> dict[str, Array | None]:
        weight = 1 - (sampling.decay or 0.0) ** count
        return {
            "last": w,
            "average": total / count if count else None,
            "ema": moving / weight if count and sampling.decay is not None else None,
        }

    for segment in segments:
        q = of(1 - segment.rate * model.contraction)
        drift = of(segment.rate * model.contraction * model.settling_point)
        moves = bool(drift.any())
        spread = np.sqrt(model.noise / segment.batch_size) if own else 1.0
        scale = of(segment.rate * model.gradient_scale * spread)
        for _ in range(segment.steps):
            np.multiply(draw(w), scale, out=scratch)
            w *= q
            w -= scratch
            if moves:
                w += drift
            step += 1
            if sampling.due(step):
                count += 1
                total += w
                if sampling.decay is not None:
                    moving *= sampling.decay
                    moving += (1 - sampling.decay) * w
            if step in wanted:
                for i, point in enumerate(points().values()):
                    if point is not None:
                        away = (point - minimum).astype(float) ** 2
                        squares[i, wanted[step]] = away.sum(1)
                        losses[i, wanted[step]] = 0.5 * (away @ lam)
    return _Block(points(), squares, losses)


def _joined(blocks: list[_Block], sampling: _Sampling) -> Simulation:
    """All directions."""
    squares = np.sum([block.squares for block in blocks], axis=0)
    losses = np.sum([block.losses for block in blocks], axis=0)
    points: dict[str, Any] = {}
    for name in POINTS:
        parts = [block.points[name] for block in blocks]
        points[name] = None if parts[0] is None else np.concatenate(parts, axis=1)  # type: ignore[arg-type]
    return Simulation(
        **points,
        recorded_steps=sampling.record,
        squared_distance=dict(zip(POINTS, squares)),
        loss=dict(zip(POINTS, losses)),
    )


def _stacked(runs: list[Simulation]) -> Simulation:
    """All replicas."""

    def stack(parts: list[Any], axis: int) -> Any:
        return None if parts[0] is None else np.concatenate(parts, axis=axis)

    return Simulation(
        last=stack([run.last for run in runs], 0),
        average=stack([run.average for run in runs], 0),
        ema=stack([run.ema for run in runs], 0),
        recorded_steps=runs[0].recorded_steps,
        squared_distance={
            name: stack([run.squared_distance[name] for run in runs], 1) for name in POINTS
        },
        loss={name: stack([run.loss[name] for run in runs], 1) for name in POINTS},
    )
