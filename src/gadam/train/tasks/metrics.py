"""Metrics of supervised tasks, by name."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

from gadam._names import did_you_mean
from gadam.runs.recipe import Mode
from gadam.train.tasks.task import TaskError

__all__ = ["BUILT_IN", "Metric", "find"]

IGNORED = -100  # the target that cross_entropy ignores


# The sum of a batch's terms, and how many there are, from its outputs and targets.
Sums = Callable[[Tensor, Tensor], tuple[Tensor, int]]


def _identity(mean: float) -> float:
    return mean


def _exp(mean: float) -> float:
    return math.exp(mean) if not mean >= 700 else math.inf


class Metric(NamedTuple):
    """A metric that is a function of a mean over all examples.

    Attributes:
        mode: Whether a larger ("max") or smaller ("min") value is better.
        sums: The terms of the mean; None for the loss.
        finish: Returns the metric from the mean.
    """

    mode: Mode
    sums: Sums | None
    finish: Callable[[float], float] = _identity


def _hits(outputs: Tensor, targets: Tensor, top: int) -> tuple[Tensor, int]:
    """Count correct predictions. Classes are in dimension 1 of the outputs."""
    if targets.shape == outputs.shape and (outputs.ndim == 1 or outputs.shape[1] == 1):
        correct = (outputs > 0) == (targets > 0.5)  # one logit per example
        return correct.sum(), correct.numel()
    if targets.shape == outputs.shape:  # one-hot, or probabilities
        targets = targets.argmax(1)
    if targets.ndim != outputs.ndim - 1 or targets.is_floating_point():
        raise TaskError(
            "accuracy needs class indices as targets, one dimension less than the outputs (or one "
            f"logit per example, with targets of the same shape); got outputs of shape "
            f"{tuple(outputs.shape)} and {targets.dtype} targets of shape {tuple(targets.shape)}. "
            "Pass another metric."
        )
    best = outputs.topk(min(top, outputs.shape[1]), dim=1).indices
    counted = targets != IGNORED
    correct = (best == targets.unsqueeze(1)).any(1) & counted
    return correct.sum(), int(counted.sum())


def _accuracy(outputs: Tensor, targets: Tensor) -> tuple[Tensor, int]:
    hits, count = _hits(outputs, targets, 1)
    return 100 * hits.double(), count


def _top5(outputs: Tensor, targets: Tensor) -> tuple[Tensor, int]:
    hits, count = _hits(outputs, targets, 5)
    return 100 * hits.double(), count


def _difference(outputs: Tensor, targets: Tensor) -> Tensor:
    if outputs.shape != targets.shape:
        raise TaskError(
            f"mse and mae need outputs and targets of the same shape, got {tuple(outputs.shape)} "
            f"and {tuple(targets.shape)}. Reshape one of them."
        )
    return outputs.double() - targets.double()


def _squares(outputs: Tensor, targets: Tensor) -> tuple[Tensor, int]:
    return _difference(outputs, targets).square().sum(), outputs.numel()


def _absolutes(outputs: Tensor, targets: Tensor) -> tuple[Tensor, int]:
    return _difference(outputs, targets).abs().sum(), outputs.numel()


BUILT_IN: dict[str, Metric] = {
    "accuracy": Metric("max", _accuracy),
    "top5": Metric("max", _top5),
    "loss": Metric("min", None),
    "perplexity": Metric("min", None, _exp),
    "mse": Metric("min", _squares),
    "rmse": Metric("min", _squares, math.sqrt),
    "mae": Metric("min", _absolutes),
}


def find(name: str) -> Metric:
    """Return a built-in metric.

    Args:
        name: Its name.

    Raises:
        TaskError: There is no such metric.
    """
    if name in BUILT_IN:
        return BUILT_IN[name]
    near = did_you_mean(name, BUILT_IN)
    hint = f"Did you mean {near!r}?" if near else f"Choose from {', '.join(BUILT_IN)}."
    raise TaskError(
        f"There is no metric {name!r}. {hint} Or pass a function of (outputs, targets)."
    )
