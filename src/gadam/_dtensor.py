"""Shards: the part of a tensor that lives in this process."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

__all__ = ["all_finite", "any_nonzero", "local", "all_reduce_min", "new_like"]


def _is_dtensor(tensor: Any) -> bool:
    # By its looks: torch.distributed.tensor costs a quarter of a second to import.
    return hasattr(tensor, "device_mesh") and hasattr(tensor, "to_local")


def local(tensor: Any, like: Any = None) -> Tensor:
    """This process's shard of a DTensor, sharing its memory; any other tensor as it is.

    With ``like``, the shard that belongs beside this process's shard of ``like``.
    """
    if not _is_dtensor(tensor):
        return tensor
    if like is not None and tensor.placements != like.placements:
        tensor = tensor.redistribute(placements=like.placements)
    return tensor.to_local()


def new_like(tensor: Any, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros of the tensor's shape and memory format, sharded as it is sharded."""
    shard = local(tensor).detach()
    zeros = torch.zeros_like(shard, dtype=dtype, device=device, memory_format=torch.preserve_format)
    if not _is_dtensor(tensor):
        return zeros
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

    # Not DTensor.from_local, which would move a shard kept on the host to the mesh's device.
    meta = TensorMeta(tensor.shape, tensor.stride(), dtype)
    spec = DTensorSpec(tensor.device_mesh, tensor.placements, tensor_meta=meta)
    return DTensor(zeros, spec, requires_grad=False)


def all_reduce_min(answer: float, tensors: Iterable[Any]) -> float:
    """The all_reduce_min answer of the processes that share these tensors. Every one of them must call it."""
    return _agree(answer, list(tensors), min)


def any_nonzero(tensors: Iterable[Any]) -> bool:
    """Whether an entry is not zero, in any process that shares these tensors.

    Like :func:`all_finite`, to be called by every process.
    """
    tensors = list(tensors)
    return bool(_agree(any(bool(local(tensor).any()) for tensor in tensors), tensors, max))


def all_finite(tensors: Iterable[Any]) -> bool:
    """Whether no entry is NaN or infinite, in any process that shares these tensors.

    Every process must call it, whatever it holds: for DTensors it ends in a reduction of one number.
    """
    tensors = list(tensors)
    flags: defaultdict[torch.device, list[Tensor]] = defaultdict(list)
    for tensor in tensors:
        shard = local(tensor).detach()
        if shard.numel():
            # One pass, no temporary (isfinite().all() takes ten times as long); both carry NaN on.
            low, high = torch.aminmax(torch.view_as_real(shard) if shard.is_complex() else shard)
            flags[shard.device].append(torch.isfinite(low) & torch.isfinite(high))
    finite = all(bool(torch.stack(of_device).all()) for of_device in flags.values())
    return bool(_agree(finite, tensors, min))


def _agree(answer: float, tensors: list[Any], of: Callable[..., Any]) -> float:
    """The min or max of the answers of the processes that hold shards of these tensors."""
    meshes = list(dict.fromkeys(t.device_mesh for t in tensors if _is_dtensor(t)))
    if meshes:
        import torch.distributed as dist

        operation = dist.ReduceOp.MAX if of is max else dist.ReduceOp.MIN
        for mesh in meshes:
            shared = torch.tensor(float(answer), device=mesh.device_type)
            for group in mesh.get_all_groups():
                dist.all_reduce(shared, operation, group=group)
            answer = float(shared)
    return answer
