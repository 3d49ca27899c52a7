r"""The weights of checkpoints in an average.

All weights are relative: the average divides by their sum.

**WSM.** Let :math:`\theta_0, \dots, \theta_k` be checkpoints of a phase with a constant learning
rate. A decay of the learning rate would have scaled the update
:math:`\theta_i - \theta_{i-1}` by a factor :math:`\lambda_i`. If the updates themselves do not
change, it would have ended at

.. math::
    \theta_0 + \sum_{i=1}^k \lambda_i (\theta_i - \theta_{i-1})
    = (1 - \lambda_1)\, \theta_0 + \sum_{i=1}^{k-1} (\lambda_i - \lambda_{i+1})\, \theta_i
    + \lambda_k \theta_k.

So a decay is a weighted mean of checkpoints, whose weights are the differences of the factors. They
are non-negative and sum to one, because the factors fall from one to zero. Here
:math:`\lambda_i = f(t_i)` with :math:`t_i = \tfrac{k}{k+1} \tfrac{s_i - s_0}{s_k - s_0}` for the
step numbers :math:`s_i`. For evenly spaced checkpoints, :math:`t_i = i / (k + 1)`, and the linear
decay is the plain mean.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Literal, TypeAlias, get_args

from gadam._names import did_you_mean
from gadam.checkpoints.errors import CheckpointError, enumerated

__all__ = ["Shape", "Weighting", "relative_weights"]

Weighting: TypeAlias = Literal["mean", "ema", "linear", "wsm"]
Shape: TypeAlias = Literal["1-sqrt", "cosine", "linear"]

_SHAPES: dict[str, Callable[[float], float]] = {
    "1-sqrt": lambda t: 1 - math.sqrt(t),
    "cosine": lambda t: (1 + math.cos(math.pi * t)) / 2,
    "linear": lambda t: 1 - t,
}


def relative_weights(
    weighting: Weighting | Sequence[float],
    count: int,
    *,
    steps: Sequence[int] | None = None,
    decay: float | None = None,
    shape: Shape = "1-sqrt",
) -> list[float]:
    """Return the relative weights of checkpoints, the oldest first.

    Args:
        weighting: "mean": equal weights. "ema": each checkpoint has ``decay`` times the weight of
            the next. "linear": 1, 2, 3, …. "wsm": emulate a decay of the learning rate. Or the
            weights themselves.
        count: The number of checkpoints.
        steps: Their step numbers, for "wsm". The default is evenly spaced.
        decay: Of "ema". The default halves the weight every fifth of the checkpoints.
        shape: Of "wsm": the decay to emulate.

    Raises:
        CheckpointError: An argument is invalid.

    Example:
        >>> relative_weights("linear", 3)
        [1.0, 2.0, 3.0]
        >>> relative_weights("ema", 3, decay=0.5)
        [0.25, 0.5, 1.0]
        >>> [round(w, 3) for w in relative_weights("wsm", 4, shape="linear")]
        [0.25, 0.25, 0.25, 0.25]
        >>> [round(w, 3) for w in relative_weights("wsm", 4)]
        [0.5, 0.207, 0.159, 0.134]
    """
    if not isinstance(weighting, str):
        return _checked(list(weighting), count)
    if weighting not in get_args(Weighting):
        near = did_you_mean(weighting, get_args(Weighting))
        hint = f" Did you mean {near!r}?" if near else ""
        raise CheckpointError(f"weights must be mean, ema, linear or wsm, got {weighting!r}.{hint}")
    if decay is not None and weighting != "ema":
        raise CheckpointError(f"decay applies only to the weights ema, not to {weighting}.")
    if weighting == "mean":
        return [1.0] * count
    if weighting == "linear":
        return [float(i) for i in range(1, count + 1)]
    if weighting == "ema":
        factor = 0.5 ** (5 / count) if decay is None else decay
        if not 0 < factor < 1:
            raise CheckpointError(f"decay must be between 0 and 1, got {decay}.")
        return [factor ** (count - 1 - i) for i in range(count)]
    if shape not in _SHAPES:
        raise CheckpointError(f"shape must be {', '.join(_SHAPES)}, got {shape!r}.")
    places = list(range(count)) if steps is None else list(steps)
    length = max(places[-1] - places[0], 1)
    scale = (count - 1) / count / length
    factors = [_SHAPES[shape](scale * (place - places[0])) for place in places]
    # The decay starts at the first checkpoint, whose factor is 1.
    return [factor - after for factor, after in zip(factors, [*factors[1:], 0.0])]


def _checked(weights: list[float], count: int) -> list[float]:
    if len(weights) != count:
        raise CheckpointError(
            f"There are {len(weights)} weights for {count} checkpoints. Pass one per checkpoint."
        )
    if not all(math.isfinite(w) and w >= 0 for w in weights) or not any(weights):
        raise CheckpointError(
            "weights must be finite, non-negative, and not all zero, got "
            f"{enumerated([f'{w:g}' for w in weights])}."
        )
    return [float(w) for w in weights]
