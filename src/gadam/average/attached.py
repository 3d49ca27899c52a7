"""The averages of an optimizer: the registry that their samplers share, and what kernels ask of it.

An update that can fold a sample in during its own pass asks :func:`fold_into` where, and starts
from the iterates with :func:`step_from_iterates`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from torch import Tensor, nn
from torch.optim import Optimizer

from gadam import _torch
from gadam.average.fold import Fold
from gadam.average.wrappers import AVERAGES

if TYPE_CHECKING:
    from gadam.average.iterate import IterateAverage
    from gadam.average.sampling import Sampler

__all__ = [
    "APPLIED",
    "Applied",
    "Attached",
    "applied_average",
    "attached",
    "cancel_folds",
    "fold_into",
    "free_prefix",
    "interpolating",
    "iterate_of",
    "samplers_of",
    "step_from_iterates",
]

APPLIED = "_applied_average"  # the attribute of an optimizer that holds the average in its weights


class Attached:
    """The averages of an optimizer, and what they share.

    Attributes:
        averages: The averages.
        samplers: Their samplers. One that interpolates is last.
        finite: The parameters that were checked after the current step, and whether they are finite
            in all processes.
    """

    def __init__(self) -> None:
        self.averages: list[IterateAverage] = []
        self.samplers: list[Sampler] = []
        self.finite: tuple[list[Tensor], Tensor | bool] | None = None


def attached(optimizer: Optimizer) -> Attached:
    """Return the registry of an optimizer's averages. It is created if there is none.

    Args:
        optimizer: The optimizer.
    """
    found: Attached | None = optimizer.__dict__.get(AVERAGES)
    if found is None:
        found = optimizer.__dict__[AVERAGES] = Attached()
    return found


def samplers_of(optimizer: Optimizer) -> Sequence[Sampler]:
    """Return the samplers of an optimizer's averages, without creating a registry.

    Args:
        optimizer: The optimizer.
    """
    registry: Attached | None = optimizer.__dict__.get(AVERAGES)
    return registry.samplers if registry is not None else ()


def has_own_step(optimizer: Optimizer) -> bool:
    """Return True if nothing but hooks edits the weights before or after the update of a step.

    That is known of gadam's optimizers, unless a subclass has a ``step()`` of its own.

    Args:
        optimizer: The optimizer.
    """
    return bool(getattr(optimizer, "_has_own_step", False))


def interpolating(optimizers: Sequence[Optimizer]) -> list[Sampler]:
    """Return the samplers that move the weights of these optimizers between steps.

    Args:
        optimizers: The optimizers. Each has at most one such sampler.
    """
    samplers = (sampler for one in optimizers for sampler in samplers_of(one))
    return [sampler for sampler in samplers if sampler.state.iterate is not None]


def iterate_of(optimizers: Sequence[Optimizer], p: Tensor) -> Tensor | None:
    """Return this process's shard of a parameter's iterate, or None if the weights are it.

    Args:
        optimizers: The optimizers.
        p: One of their parameters.
    """
    found = (sampler.state.iterate_of(p) for sampler in interpolating(optimizers))
    return next((iterate for iterate in found if iterate is not None), None)


def free_prefix(
    optimizers: Sequence[Optimizer], name: str = "average", wanted: str | None = None
) -> str:
    """Return a name that no average of these optimizers has: ``average``, or ``average2`` etc.

    Args:
        optimizers: The optimizers of the new average.
        name: The name without a number.
        wanted: The name to return if it is free.
    """
    taken = {s.state.store.prefix for one in optimizers for s in samplers_of(one)}
    if wanted is not None and wanted not in taken:
        return wanted
    number = 1
    while (prefix := f"{name}{number}" if number > 1 else name) in taken:
        number += 1
    return prefix


def fold_into(
    optimizer: Optimizer,
    params: list[Tensor],
    states: Sequence[Mapping[str, Tensor]] | None = None,
) -> Fold | None:
    """Return where the current step may fold these parameters in, after it has updated them.

    A kernel folds one average in per pass: the first one that can be. The others are sampled after
    the step.

    Args:
        optimizer: The optimizer that steps.
        params: The parameters of a group that the step updates.
        states: Their entries in ``optimizer.state``, if the caller has them.

    Returns:
        The averages and the weight, for the kernel to note what it has folded in. None if no sample
        is due, or if other hooks may still change the weights.
    """
    for sampler in samplers_of(optimizer):
        fold = sampler.fold_into(params, states)
        if fold is not None:
            return fold
    return None


@_torch.disable_dynamo
def step_from_iterates(optimizer: Optimizer, params: list[Tensor] | None = None) -> None:
    """Replace the weights by the iterates, if the optimizer's built-in average interpolates.

    A kernel that can step from the iterates themselves does not need this. A step that GradScaler
    has rejected does not, either: the weights stay.

    Args:
        optimizer: The optimizer that steps.
        params: The parameters that the step is about to update. None means all.
    """
    found_inf: Tensor | None = getattr(optimizer, "found_inf", None)
    if found_inf is not None and _torch.is_on_host(found_inf) and bool(found_inf):
        return
    is_watched = len(samplers_of(optimizer)) > 1
    for sampler in interpolating([optimizer]):
        if sampler.state.built_in:
            # Hooks may edit parameters that the step does not update, and other averages sample
            # all of them.
            every = params is None or sampler.is_edited or is_watched
            sampler.point.to_iterate(sampler.state.averaged() if every else params or [])


def cancel_folds(optimizer: Optimizer) -> None:
    """Take out what the current step has folded in, because the step has failed.

    Args:
        optimizer: The optimizer that stepped.
    """
    for sampler in samplers_of(optimizer):
        sampler.cancel_folds()


class Applied(Protocol):
    """Averages whose weights can be in the model, in place of the raw ones."""

    _raw: dict[Tensor, Tensor]

    def raw_state_dict(self, model: nn.Module) -> dict[str, Any]:
        """Return a copy of the model's state dict with the raw weights.

        Args:
            model: The model that holds the parameters.
        """
        ...


def applied_average(optimizers: Sequence[Optimizer]) -> Applied | None:
    """Return the average that is applied to the weights of these optimizers, if any.

    Args:
        optimizers: The optimizers.
    """
    for optimizer in optimizers:
        average: Applied | None = optimizer.__dict__.get(APPLIED)
        if average is not None:
            return average
    return None
