"""How ranks train one model: replicas with averaged gradients (DDP), or shards of it (FSDP2).

The gradient of a step is the mean over the whole batch. Rank r has the mean loss :math:`L_r` of its
part, a fraction :math:`s_r` of the batch. DDP and FSDP2 average gradients over N ranks, so each
rank's loss is multiplied by :math:`N s_r`, which makes it exact for parts of any size.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from gadam.train.distributed import Ranks
from gadam.train.tasks import Task, TaskError

__all__ = ["Loss", "blocks", "check_gradients", "loss_of", "shard", "without_communication"]

Loss: TypeAlias = Callable[[Any], tuple[Tensor, int]]
"""Returns the mean loss of a batch, and the number of examples in it."""


class _LossModule(nn.Module):
    """The model and its loss as one module, so that a task gets the model itself under DDP."""

    def __init__(self, task: Task, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self._task = task

    def forward(self, batch: Any) -> tuple[Tensor, int]:
        return self._task.loss(self.model, batch)


def loss_of(task: Task, model: nn.Module, ranks: Ranks) -> Loss:
    """Return the loss of a batch as a function whose gradients are averaged over all ranks.

    Args:
        task: The task.
        model: Its model, possibly compiled, and sharded under FSDP2.
        ranks: The processes that train it.
    """
    if ranks.size == 1 or ranks.is_sharded:
        return lambda batch: task.loss(model, batch)
    # The loop broadcasts buffers, for both strategies. Newer versions of torch rename the option.
    known = inspect.signature(DistributedDataParallel).parameters
    option = "forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers"
    return DistributedDataParallel(_LossModule(task, model), **{option: False})  # type: ignore[arg-type]


def without_communication(loss: Loss, *, last: bool) -> AbstractContextManager[Any]:
    """Return a context in which gradients accumulate locally, unless this is the last piece.

    Args:
        loss: What :func:`loss_of` returned.
        last: Whether it is the last piece of the step.
    """
    if last or not isinstance(loss, DistributedDataParallel):
        return nullcontext()
    return loss.no_sync()


def check_gradients(model: nn.Module) -> None:
    """Raise an error if a parameter has no gradient: the ranks would wait for it forever.

    Args:
        model: The model, after its first backward pass.

    Raises:
        TaskError: Some parameters are not used.
    """
    unused = [n for n, p in model.named_parameters() if p.requires_grad and p.grad is None]
    if unused:
        raise TaskError(
            f"The loss does not depend on {', '.join(unused[:3])}{', …' if unused[3:] else ''}. "
            "Set requires_grad=False for parameters that are not used, or train with one process."
        )


def shard(model: nn.Module, ranks: Ranks, amp: str | None) -> None:
    """Shard a model over all ranks: each of its blocks, and the rest together.

    A model that its task has already sharded stays as it is.

    Args:
        model: The model. All ranks have the same weights.
        ranks: The processes that train it.
        amp: "bf16" or "fp16" to compute in this type, with gradients reduced in float32.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

    if any(isinstance(module, FSDPModule) for module in model.modules()):
        return
    mesh = init_device_mesh(ranks.device.type, (ranks.size,))
    policy = MixedPrecisionPolicy()
    if amp is not None:
        dtype = torch.bfloat16 if amp == "bf16" else torch.float16
        policy = MixedPrecisionPolicy(dtype, torch.float32, torch.float32)
    for block in blocks(model):
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)


def blocks(model: nn.Module) -> Iterator[nn.Module]:
    """Iterate over the blocks of a model: the outermost modules that a list or sequence repeats.

    Single layers in a sequence are too small to be sharded alone.

    Args:
        model: The model.

    Example:
        >>> layer = nn.TransformerEncoderLayer(4, 1, 4)
        >>> encoder = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
        >>> len(list(blocks(nn.Sequential(nn.Linear(2, 4), encoder))))
        1
        >>> len(list(blocks(encoder)))
        3
    """
    for child in model.children():
        if isinstance(child, nn.ModuleList):
            yield from (each for each in child if any(True for _ in each.parameters()))
        elif isinstance(model, nn.Sequential) and any(True for _ in child.children()):
            yield child
        else:
            yield from blocks(child)
