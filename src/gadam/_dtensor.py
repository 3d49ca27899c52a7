"""Distributed tensors: local shards, and agreement between the processes that hold them."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from gadam import _torch

__all__ = [
    "all_finite",
    "all_reduce_min",
    "any_nonzero",
    "is_dtensor",
    "local",
    "new_like",
    "whole",
]


def is_dtensor(tensor: Any) -> bool:
    """Return True if this is a distributed tensor."""
    # By its attributes: importing torch.distributed.tensor takes a quarter of a second.
    return hasattr(tensor, "device_mesh") and hasattr(tensor, "to_local")


def local(tensor: Any, like: Any = None) -> Tensor:
    """Return this process's shard of a DTensor, or any other tensor unchanged.

    The shard shares memory with the DTensor.

    Args:
        tensor: The tensor.
        like: Redistribute the DTensor as this one first, so that the shards match.
    """
    if not is_dtensor(tensor):
        return cast(Tensor, tensor)
    if like is not None and tensor.placements != like.placements:
        tensor = tensor.redistribute(placements=like.placements)
    return cast(Tensor, tensor.to_local())


def whole(tensor: Any) -> Tensor:
    """Return a DTensor as a whole tensor, and any other tensor unchanged.

    This is a collective operation: every process must call it.

    Args:
        tensor: The tensor.
    """
    return cast(Tensor, tensor.full_tensor() if is_dtensor(tensor) else tensor)


def new_like(tensor: Any, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return zeros with the shape, memory format and sharding of a tensor.

    Args:
        tensor: The tensor.
        dtype: The type of the zeros.
        device: The device of the zeros. A shard may live on the host.
    """
    shard = local(tensor).detach()
    zeros = torch.zeros_like(shard, dtype=dtype, device=device, memory_format=torch.preserve_format)
    # Not DTensor.from_local, which moves a shard on the host to the mesh's device.
    return _torch.new_dtensor(zeros, tensor) if is_dtensor(tensor) else zeros


def all_reduce_min(value: float, tensors: Iterable[Any]) -> float:
    """Return the smallest value over the processes that share these tensors.

    This is a collective operation: every process must call it.
    """
    return _all_reduce(value, list(tensors), min)


def any_nonzero(tensors: Iterable[Any]) -> bool:
    """Return True if any entry is nonzero in any process that shares these tensors.

    This is a collective operation: every process must call it.
    """
    tensors = list(tensors)
    return bool(_all_reduce(any(bool(local(tensor).any()) for tensor in tensors), tensors, max))


def all_finite(tensors: Iterable[Any]) -> bool:
    """Return True if no entry is NaN or infinite in any process that shares these tensors.

    This is a collective operation: every process must call it, even one with empty shards. For
    DTensors it ends in a reduction of one number.
    """
    tensors = list(tensors)
    return bool(agree(finite_flag(tensors), tensors))


def finite_flag(tensors: Iterable[Any]) -> Tensor:
    """Return whether no entry of this process's shards is NaN or infinite.

    Args:
        tensors: The tensors.

    Returns:
        A 0-dim boolean tensor on the first tensor's device. Nothing waits for that device.
    """
    shards: defaultdict[torch.device, list[Tensor]] = defaultdict(list)
    home: torch.device | None = None
    for tensor in tensors:
        shard = local(tensor).detach()
        home = home if home is not None else shard.device
        if shard.numel():
            shards[shard.device].append(torch.view_as_real(shard) if shard.is_complex() else shard)
    flags = [
        (_finite_on_host(of_device) if device.type == "cpu" else _finite_on_device(of_device)).to(
            home, non_blocking=True
        )
        for device, of_device in shards.items()
    ]
    if not flags:
        return torch.ones((), dtype=torch.bool, device=home if home is not None else "cpu")
    return flags[0] if len(flags) == 1 else torch.stack(flags).all()


def _finite_on_host(tensors: list[Tensor]) -> Tensor:
    # One pass without a temporary: isfinite().all() takes ten times as long. Both the minimum and
    # the maximum propagate NaN.
    return _are_finite([value for tensor in tensors for value in torch.aminmax(tensor)])


def _finite_on_device(tensors: list[Tensor]) -> Tensor:
    # The largest magnitude of all tensors, which propagates NaN, in a few launches.
    return _are_finite(_torch.foreach_norm(tensors, math.inf))


def _are_finite(numbers: Sequence[Tensor]) -> Tensor:
    widest = torch.float64 if any(x.dtype == torch.float64 for x in numbers) else torch.float32
    return torch.isfinite(torch.stack([x.to(widest) for x in numbers])).all()


def agree(flag: Tensor, tensors: Iterable[Any]) -> Tensor:
    """Return True if the flag is True in all processes that share these tensors.

    This is a collective operation: every process must call it.

    Args:
        flag: A 0-dim boolean tensor.
        tensors: The tensors.

    Returns:
        A tensor like the flag. Nothing waits for its device.
    """
    meshes = list(dict.fromkeys(t.device_mesh for t in tensors if is_dtensor(t)))
    if meshes:
        import torch.distributed as dist

        for mesh in meshes:
            shared = flag.to(mesh.device_type, torch.float32)
            for group in mesh.get_all_groups():
                dist.all_reduce(shared, dist.ReduceOp.MIN, group=group)
            flag = (shared != 0).to(flag.device)
    return flag


def _all_reduce(value: float, tensors: list[Any], reduction: Callable[..., Any]) -> float:
    """Return the min or max of a value over the processes that hold shards of these tensors."""
    meshes = list(dict.fromkeys(t.device_mesh for t in tensors if is_dtensor(t)))
    if meshes:
        import torch.distributed as dist

        operation = dist.ReduceOp.MAX if reduction is max else dist.ReduceOp.MIN
        for mesh in meshes:
            shared = torch.tensor(float(value), device=mesh.device_type)
            for group in mesh.get_all_groups():
                dist.all_reduce(shared, operation, group=group)
            value = float(shared)
    return value
