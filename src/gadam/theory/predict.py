"""Predictions for the last iterate, average, strided average and EMA on a noisy quadratic.

The iterate, the momentum buffer and the running sum of the samples form a linear Gaussian process
per direction. All predictions are exact for any number of steps: the transitions of this process
are composed by doubling, without a loop over steps. See :mod:`gadam.theory.model` for the step,
and :mod:`gadam.theory.closed_forms` for the paper's formulas.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from gadam.theory.model import Moments, Quadratic, Segment, as_segments, check_sampling
from gadam.theory.spectrum import Array

__all__ = ["average", "check_finite", "ema", "last_iterate", "squared_separation"]


# Composition of transitions.


class _Transition(NamedTuple):
    """Several steps of the state x: x' = A·x + d + Gaussian noise with covariance V.

    The state of a direction is the iterate, then the momentum buffer if there is one, then the
    running sum if there is one. Directions are the last axis: A has shape (state, state, K). The
    response r is what unit noise in the gradients of all steps adds to the state.
    """

    matrix: Array
    offset: Array
    covariance: Array
    response: Array


class _Sample(NamedTuple):
    """What a sample does to the running sum: S ← keep·S + take·w."""

    keep: float
    take: float


def _compose(one: _Transition, two: _Transition) -> _Transition:
    """Apply one, then two. For SGD with αλ < 1 nothing is subtracted, so no precision is lost."""
    carried = np.einsum("ijk,jlk->ilk", two.matrix, one.covariance)
    return _Transition(
        np.einsum("ijk,jlk->ilk", two.matrix, one.matrix),
        np.einsum("ijk,jk->ik", two.matrix, one.offset) + two.offset,
        np.einsum("ijk,ljk->ilk", carried, two.matrix) + two.covariance,
        np.einsum("ijk,jk->ik", two.matrix, one.response) + two.response,
    )


def _repeat(transition: _Transition, number: int) -> _Transition:
    """Apply a transition several times, by doubling."""
    result = None
    while number:
        if number % 2:
            result = transition if result is None else _compose(result, transition)
        number //= 2
        if number:
            transition = _compose(transition, transition)
    return _identity(*transition.offset.shape) if result is None else result


def _identity(size: int, directions: int) -> _Transition:
    matrix: Array = np.zeros((size, size, directions))
    matrix[range(size), range(size)] = 1.0
    zero = np.zeros((size, directions))
    return _Transition(matrix, zero, np.zeros_like(matrix), zero.copy())


def _one_step(model: Quadratic, segment: Segment, size: int, dampening: float) -> _Transition:
    """Return one step of the method. The running sum, if any, is the last of ``size`` values."""
    step = _identity(size, len(model.start))
    alpha, mu = segment.rate * model.gradient_scale, model.momentum
    to_gradient, to_buffer = (1.0, mu) if model.nesterov else (0.0, 1.0)  # u = … g + … b
    kept = 1 - dampening  # the share of the gradient that enters the buffer
    through = to_gradient + to_buffer * kept
    # Each value is the response of (w, b) to one of: w, b, the gradient at w = 0, its noise.
    step.matrix[0, 0] = 1 - segment.rate * model.decay - alpha * through * model.slope
    step.offset[0] = alpha * through * model.spectrum.eigenvalues * model.minimum
    response = -alpha * through
    step.response[0] = response
    if mu:
        step.response[1] = kept
        step.matrix[0, 1] = -alpha * to_buffer * mu
        step.matrix[1, 0], step.matrix[1, 1] = kept * model.slope, mu
        step.offset[1] = -kept * model.spectrum.eigenvalues * model.minimum
    covariance = step.response[:, None] * step.response * model.noise / segment.batch_size
    return step._replace(covariance=covariance)


class _Piece(NamedTuple):
    """Equal steps. ``shared`` is the variance that their noise loses because it sums to zero.

    It is None if the next piece belongs to the same epoch.
    """

    step: _Transition
    number: int
    shared: Array | None


def _pieces(model: Quadratic, segments: Sequence[Segment], size: int) -> list[_Piece]:
    """Divide the segments into pieces of equal steps within one epoch."""
    pieces: list[_Piece] = []
    for segment in segments:
        step = _one_step(model, segment, size, model.dampening)
        epoch = segment.epoch or segment.steps
        shared = 0 * model.noise
        if segment.epoch:
            # The mean of an epoch's noise, which each of its steps lacks.
            shared = segment.reshuffled * model.noise / (segment.batch_size * epoch)
        left = segment.steps
        while left:
            number = min(epoch, left)
            left -= number
            if not pieces and model.undampened_start:
                first = _one_step(model, segment, size, 0.0)
                pieces.append(_Piece(first, 1, None if number > 1 else shared))
                number -= 1
            if number:
                pieces.append(_Piece(step, number, shared))
    return pieces


def _follow(result: _Transition, transition: _Transition, shared: Array | None) -> _Transition:
    """Append the transition of a piece, and end the epoch if the piece does."""
    result = _compose(result, transition)
    if shared is None:
        return result
    lost = shared * result.response[:, None] * result.response
    return result._replace(
        covariance=result.covariance - lost, response=np.zeros_like(result.response)
    )


def _run(
    model: Quadratic, segments: Sequence[Segment], sample: _Sample, first: int, every: int
) -> tuple[_Transition, int]:
    """Compose all segments, with a sample after steps first, first + every, …; count samples."""
    size = _state_size(model) + 1
    result = _identity(size, len(model.start))
    taken = _identity(size, len(model.start))
    taken.matrix[-1, -1], taken.matrix[-1, 0] = sample.keep, sample.take
    known: dict[tuple[int, int, int], tuple[_Transition, int]] = {}  # epochs are often equal
    time = count = 0
    for step, number, shared in _pieces(model, segments, size):
        ahead = first - time if time < first else every - (time - first) % every
        key = id(step), number, min(ahead, number + 1)
        if key not in known:
            known[key] = _with_samples(step, number, taken, ahead, every)
        piece, samples = known[key]
        result = _follow(result, piece, shared)
        time, count = time + number, count + samples
    return result, count


def _with_samples(
    step: _Transition, number: int, taken: _Transition, ahead: int, every: int
) -> tuple[_Transition, int]:
    """Compose steps, with a sample after ``ahead`` of them, then every so often; count samples."""
    if ahead > number:
        return _repeat(step, number), 0
    result = _compose(_repeat(step, ahead), taken)
    more, rest = divmod(number - ahead, every)
    if more:
        result = _compose(result, _repeat(_compose(_repeat(step, every), taken), more))
    return (_compose(result, _repeat(step, rest)) if rest else result), 1 + more


def _state_size(model: Quadratic) -> int:
    return 2 if model.momentum else 1


def _start(model: Quadratic, size: int) -> Array:
    """Return the initial state: the start, the buffer and a zero sum."""
    state: Array = np.zeros((size, len(model.start)))
    state[0] = model.start
    if model.buffer is not None:
        state[1] = model.buffer
    return state


def _moments(
    model: Quadratic, segments: Sequence[Segment], total: _Transition, value: int, scale: float
) -> Moments:
    """Return the moments of one value of the state, divided by ``scale``."""
    start = _start(model, len(total.offset))
    mean = np.einsum("jk,jk->k", total.matrix[value], start) + total.offset[value]
    variance = total.covariance[value, value]
    with np.errstate(over="ignore", invalid="ignore"):
        check_finite(model, segments, mean**2 + variance)
    return Moments(model, mean / scale, variance / scale**2)


def check_finite(model: Quadratic, segments: Sequence[Segment], *values: Array) -> None:
    """Raise an error if a recursion has left the range of floating-point numbers.

    Args:
        model: The quadratic and the method.
        segments: The steps.
        *values: Results of the recursion.

    Raises:
        ValueError: If a value is not finite.
    """
    if all(np.isfinite(value).all() for value in values):
        return
    rate, limit = max(segment.rate for segment in segments), model.stable_below()
    reason = (
        f"the method is stable only at rates below {limit:.4g}, got {rate:g}. Lower the rate"
        if rate >= limit
        else "a value exceeds the range of floating-point numbers. Lower the start or the noise"
    )
    raise ValueError(f"The iterate diverges: {reason}.")


# Moments of the last iterate, the average and the EMA.


def last_iterate(model: Quadratic, segments: Sequence[Segment] | Segment) -> Moments:
    """Predict the last iterate. Use several segments for learning rate drops and batch growth.

    Args:
        model: The quadratic.
        segments: The steps.

    Returns:
        Moments of the last iterate.

    Raises:
        ValueError: If the iterate diverges beyond the range of floating-point numbers.
    """
    found = as_segments(segments)
    return _moments(model, found, _final(model, found), 0, 1.0)


def _final(model: Quadratic, segments: Sequence[Segment]) -> _Transition:
    """Compose all steps of the iterate and the buffer."""
    size = _state_size(model)
    total = _identity(size, len(model.start))
    with np.errstate(over="ignore", invalid="ignore"):
        known: dict[tuple[int, int], _Transition] = {}
        for step, number, shared in _pieces(model, segments, size):
            if (id(step), number) not in known:
                known[id(step), number] = _repeat(step, number)
            total = _follow(total, known[id(step), number], shared)
    return total


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
        ValueError: If no step is sampled, or the iterate diverges.
    """
    check_sampling(first, every)
    return _sampled(model, as_segments(segments), None, first, every)


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
        ValueError: If no step is sampled, or the iterate diverges.
    """
    check_sampling(first, every, decay)
    return _sampled(model, as_segments(segments), decay, first, every)


def _sampled(
    model: Quadratic, segments: list[Segment], decay: float | None, first: int, every: int
) -> Moments:
    """Return the moments of the average, or of the EMA if there is a decay."""
    sample = _Sample(1.0, 1.0) if decay is None else _Sample(decay, 1 - decay)
    with np.errstate(over="ignore", invalid="ignore"):
        total, count = _run(model, segments, sample, first, every)
    if not count:
        raise ValueError(f"No step is sampled: training ends before step {first}.")
    weight = count if decay is None else -np.expm1(count * np.log(decay))
    return _moments(model, segments, total, -1, weight)


def squared_separation(model: Quadratic, segment: Segment, steps: int | Array) -> Array:
    """Compute E‖w_n − w_(n+k)‖², where w_n is the iterate at the end of the segment.

    Args:
        model: The quadratic.
        segment: Steps up to w_n. Later steps use the same rate and batch size.
        steps: k, one or several.

    Returns:
        The expected squared distance for each k.

    Raises:
        ValueError: If the iterate diverges beyond the range of floating-point numbers.
    """
    (segment,) = as_segments([segment])
    here = _final(model, [segment])
    size = len(here.offset)
    mean = np.einsum("ijk,jk->ik", here.matrix, _start(model, size)) + here.offset
    step = _one_step(model, segment, size, model.dampening)
    squares: Array = np.array([_moved(mean, here, step, int(k)) for k in np.ravel(steps)])
    check_finite(model, [segment], squares)
    return (squares @ model.spectrum.counts).reshape(np.shape(steps))


def _moved(mean: Array, here: _Transition, step: _Transition, number: int) -> Array:
    """Return E(w_(n+k) − w_n)² per direction, from the state at step n."""
    with np.errstate(over="ignore", invalid="ignore"):
        later = _repeat(step, number)
        change = _power_minus_one(step.matrix, number)[0]
        moved = np.einsum("jk,jk->k", change, mean) + later.offset[0]
        spread = np.einsum("ik,ijk,jk->k", change, here.covariance, change)
        squares: Array = moved**2 + spread + later.covariance[0, 0]
    return squares


def _power_minus_one(matrix: Array, number: int) -> Array:
    """Compute Aᵏ − 1 by doubling. Small changes keep their precision."""
    change = matrix - _identity(len(matrix), matrix.shape[-1]).matrix
    result: Array = np.zeros_like(matrix)
    while number:
        if number % 2:
            result = np.einsum("ijk,jlk->ilk", result, change) + result + change
        change = np.einsum("ijk,jlk->ilk", change, change) + 2 * change
        number //= 2
    return result
