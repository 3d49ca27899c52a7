"""Optimizers inside the wrappers of other libraries, and the averages that belong to them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch.optim import Optimizer

if TYPE_CHECKING:
    from gadam.average.iterate import IterateAverage

__all__ = ["AVERAGES", "average_of", "is_partitioned", "unwrapped"]

AVERAGES = "_iterate_averages"  # the attribute of an optimizer that lists its averages

# The class of a wrapper by package and name, and its attribute that holds the inner optimizer. By
# name, because importing these libraries to check for them takes seconds.
_WRAPPERS = {
    ("accelerate", "AcceleratedOptimizer"): "optimizer",
    ("gadam", "Lookahead"): "optimizer",
    ("lightning", "LightningOptimizer"): "optimizer",
    ("lightning", "_FabricOptimizer"): "optimizer",
    ("lightning_fabric", "_FabricOptimizer"): "optimizer",
    ("pytorch_lightning", "LightningOptimizer"): "optimizer",
    ("torch", "ZeroRedundancyOptimizer"): "optim",
}


def unwrapped(optimizer: object) -> Optimizer:
    """Return the optimizer that takes the steps.

    Args:
        optimizer: An optimizer, or one inside the wrappers of Accelerate, Lightning, Fabric,
            ZeroRedundancyOptimizer or :class:`gadam.Lookahead`.

    Raises:
        TypeError: If there is no torch optimizer inside.
    """
    inner: Any = optimizer
    while (name := _attribute(inner)) is not None:
        inner = getattr(inner, name)
    if not isinstance(inner, Optimizer):
        raise TypeError(
            f"IterateAverage needs a torch optimizer, not {type(optimizer).__name__}. Pass an "
            "optimizer, or a list of optimizers."
        )
    return inner


def _attribute(wrapper: object) -> str | None:
    for cls in type(wrapper).__mro__:
        name = _WRAPPERS.get((cls.__module__.partition(".")[0], cls.__name__))
        if name is not None:
            return name
    return None


def is_partitioned(optimizer: object) -> bool:
    """Return True if a wrapper leaves only a part of the parameters to this process's optimizer.

    Args:
        optimizer: An optimizer, or a wrapper.
    """
    inner: Any = optimizer
    while (name := _attribute(inner)) is not None:
        if name == "optim" and getattr(inner, "world_size", 1) > 1:  # ZeroRedundancyOptimizer
            return True
        inner = getattr(inner, name)
    return False


def average_of(optimizer: object) -> IterateAverage | None:
    """Return the average of an optimizer, through any wrapper.

    Args:
        optimizer: An optimizer, or a wrapper that holds one in an attribute such as ``optimizer``.

    Returns:
        The optimizer's built-in average, or the first one that was attached to it, or None.

    Example:
        >>> import torch, gadam
        >>> sgd = torch.optim.SGD(torch.nn.Linear(4, 1).parameters(), lr=0.1)
        >>> gadam.average_of(sgd) is None
        True
        >>> average = gadam.IterateAverage(sgd, gadam.Averaging(start=100))
        >>> gadam.average_of(gadam.Lookahead(sgd)) is average
        True
    """
    waiting: list[Any] = [optimizer]
    seen: list[object] = []
    while waiting:
        inner = waiting.pop(0)
        if inner is None or any(inner is other for other in seen):
            continue
        seen.append(inner)
        attached = getattr(inner, "__dict__", {}).get(AVERAGES)
        if attached is not None and attached.averages:
            average: IterateAverage = attached.averages[0]
            return average
        if isinstance(inner, (list, tuple)):
            waiting += inner
            continue
        waiting += [getattr(inner, name, None) for name in _INNER]
        waiting += filter(_holds_optimizers, getattr(inner, "__dict__", {}).values())
    return None


def _holds_optimizers(value: object) -> bool:
    """Return True if an attribute is an optimizer, or a list of optimizers."""
    several = value if isinstance(value, (list, tuple)) else [value]
    return bool(several) and all(isinstance(one, Optimizer) for one in several)


_INNER = ("optimizer", "optim", "_optimizer", "base_optimizer", "optimizers")
