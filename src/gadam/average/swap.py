"""Swapping other weights into a model, and the raw ones back."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from gadam import _torch
from gadam._dtensor import local
from gadam.average.attached import APPLIED, Applied, applied_average

if TYPE_CHECKING:
    from gadam.average.batchnorm import BatchNorm

__all__ = ["applied_weights", "copied_state_dict", "swapped"]


@contextmanager
def applied_weights(
    owner: Applied,
    optimizers: Sequence[Optimizer],
    model: nn.Module | None,
    params: list[Tensor],
    value: Callable[[Tensor], Tensor],
    batchnorm: BatchNorm,
) -> Iterator[Callable[[], None]]:
    """Swap averaged weights in for the block, and mark the optimizers, which must not step in it.

    Args:
        owner: The averages that the weights come from. Its ``_raw`` holds the raw ones meanwhile.
        optimizers: The optimizers of the parameters.
        model: The model, as in :func:`swapped`.
        params: The parameters.
        value: A function that returns the shard of a parameter to swap in, in any dtype.
        batchnorm: Data for the BatchNorm statistics, as in :meth:`gadam.IterateAverage.applied`.

    Yields:
        A function that makes the swap permanent.
    """
    if applied_average(optimizers) is not None:
        raise RuntimeError("Averaged weights are already applied. applied() does not nest.")
    if isinstance(batchnorm, bool) and batchnorm:
        raise ValueError("batchnorm must be batches, a callable, False or None, got True.")
    if model is not None:
        _check_holds(model, params)
    refreshes = batchnorm is not None and batchnorm is not False
    if refreshes and model is None:
        raise ValueError("batchnorm= needs the model to refresh: pass model=.")
    for optimizer in optimizers:
        optimizer.__dict__[APPLIED] = owner
    try:
        with swapped(model, params, value, owner._raw) as keep:
            if batchnorm is not None and batchnorm is not False and model is not None:
                from gadam.average.batchnorm import refresh_batchnorm  # optional

                refresh_batchnorm(model, batchnorm)
            yield keep
    finally:
        for optimizer in optimizers:
            del optimizer.__dict__[APPLIED]


def _check_holds(model: nn.Module, params: list[Tensor]) -> None:
    """Raise an error if the model is another one: its weights would stay as they are."""
    with torch.no_grad():
        _reshard(model)  # until then, FSDP2 shows other parameters
    held = set(model.parameters())
    if held and params and held.isdisjoint(params):
        raise ValueError(
            "The model does not hold the optimizer's parameters. Pass the model that is trained, "
            "or load average.model_state_dict(trained_model) into this one."
        )


@contextmanager
def swapped(
    model: nn.Module | None,
    params: list[Tensor],
    value: Callable[[Tensor], Tensor],
    raw: dict[Tensor, Tensor],
) -> Iterator[Callable[[], None]]:
    """Swap values into parameters for the block, and restore the raw ones bit for bit.

    The raw weights are copied, not recomputed, and the parameters stay the same objects. So
    optimizers, tied weights and compiled graphs are not affected.

    Args:
        model: The model. Its buffers are restored, too.
        params: The parameters.
        value: A function that returns the shard of a parameter to swap in, in any dtype.
        raw: Receives the raw values of parameters and buffers for the time of the block.

    Yields:
        A function that makes the swap permanent.
    """
    buffers = _Buffers(model)
    kept = False

    def keep() -> None:
        nonlocal kept
        kept = True

    try:
        with torch.no_grad():
            _reshard(model)
            raw.update(buffers.values)
            for p in params:
                raw[p] = local(p).detach().clone()
                local(p).copy_(value(p))
        yield keep
    finally:
        if not kept:
            with torch.no_grad():
                for p in params:
                    if p in raw:
                        local(p).copy_(raw[p])
                buffers.restore()
        _reshard(model)
        raw.clear()


class _Buffers:
    """A snapshot of a model's buffers, those that are None included."""

    def __init__(self, model: nn.Module | None) -> None:
        modules = list(model.modules()) if model is not None else []
        self.tables = [(module, _torch.buffer_table(module)) for module in modules]
        self.values = {
            buffer: local(buffer).detach().clone()
            for _, table in self.tables
            for buffer in table.values()
            if buffer is not None
        }

    def restore(self) -> None:
        for buffer, value in self.values.items():
            local(buffer).copy_(value)
        for module, table in self.tables:
            _torch.restore_buffer_table(module, table)


def _reshard(model: nn.Module | None) -> None:
    """Make FSDP2 free its gathered parameters.

    It keeps the root's after a forward without a backward. The next forward would not see that the
    shards have changed.
    """
    for module in model.modules() if model is not None else ():
        reshard = getattr(module, "reshard", None)
        if callable(reshard) and hasattr(module, "unshard"):
            reshard()


def copied_state_dict(state_dict: dict[str, Any], values: dict[Tensor, Tensor]) -> dict[str, Any]:
    """Copy a state dict's tensors, with these values in place of some of them.

    Args:
        state_dict: The state dict of a model. Its entries are replaced.
        values: The values by tensor: shards, in any dtype.
    """
    copies: dict[Tensor, Tensor] = {}  # a tensor with two names stays one tensor
    for name, tensor in state_dict.items():
        if not isinstance(tensor, Tensor):
            continue
        if tensor not in copies:
            copies[tensor] = tensor.detach().clone()
            if tensor in values:
                local(copies[tensor]).copy_(values[tensor])
        state_dict[name] = copies[tensor]
    return state_dict
