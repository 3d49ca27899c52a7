"""Batches of any structure: tensors in tuples, lists and dicts, nested in any way."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

__all__ = ["apply", "concatenated", "divided", "moved", "same", "size", "tensors"]


def tensors(batch: Any) -> Iterator[Tensor]:
    """Iterate over the tensors of a batch.

    Args:
        batch: A batch.
    """
    if isinstance(batch, Tensor):
        yield batch
    elif isinstance(batch, Mapping):
        for value in batch.values():
            yield from tensors(value)
    elif isinstance(batch, tuple | list):
        for value in batch:
            yield from tensors(value)


def apply(function: Callable[[Tensor], Tensor], batch: Any) -> Any:
    """Return the batch with each tensor replaced by a function of it.

    Args:
        function: The function.
        batch: A batch. Anything in it that is not a tensor stays as it is.

    Example:
        >>> apply(lambda x: x + 1, {"x": torch.zeros(2), "names": ["a", "b"]})
        {'x': tensor([1., 1.]), 'names': ['a', 'b']}
    """
    if isinstance(batch, Tensor):
        return function(batch)
    if isinstance(batch, Mapping):
        return {key: apply(function, value) for key, value in batch.items()}
    if isinstance(batch, tuple | list):
        values = [apply(function, value) for value in batch]
        return type(batch)(*values) if hasattr(batch, "_fields") else type(batch)(values)
    return batch


def size(batch: Any) -> int:
    """Return the number of examples in a batch: the first dimension of its first tensor.

    Args:
        batch: A batch.

    Raises:
        ValueError: The batch has no tensor with a dimension.
    """
    for tensor in tensors(batch):
        if tensor.ndim:
            return len(tensor)
    raise ValueError("A batch must hold at least one tensor whose first dimension is the examples.")


def moved(batch: Any, device: torch.device) -> Any:
    """Return the batch on a device.

    Args:
        batch: A batch.
        device: The device.
    """
    return apply(lambda tensor: tensor.to(device, non_blocking=True), batch)


def divided(batch: Any, count: int) -> list[tuple[Any, float]]:
    """Divide a batch along its first dimension, as :meth:`torch.Tensor.chunk` does.

    Args:
        batch: A batch.
        count: The maximum number of pieces.

    Returns:
        The pieces, each with its fraction of the batch.

    Raises:
        ValueError: The batch has parts of different lengths.

    Example:
        >>> [(piece[0].tolist(), share) for piece, share in divided((torch.arange(4),), 2)]
        [([0, 1], 0.5), ([2, 3], 0.5)]
    """
    if count == 1:
        return [(batch, 1.0)]
    total = size(batch)
    step = -(-total // count)
    return [
        (_rows(batch, total, first, first + step), (min(first + step, total) - first) / total)
        for first in range(0, total, step)
    ]


def _rows(batch: Any, total: int, first: int, end: int) -> Any:
    """Return some rows of everything in a batch that has one entry per example."""
    if isinstance(batch, Tensor):
        if batch.ndim and len(batch) != total:
            raise ValueError(
                f"A batch has parts of {total} and {len(batch)} examples, so it cannot be divided. "
                "Implement micro_batches(), or set accumulate=1."
            )
        return batch[first:end] if batch.ndim else batch
    if isinstance(batch, Mapping):
        return {key: _rows(value, total, first, end) for key, value in batch.items()}
    if isinstance(batch, tuple | list):
        if isinstance(batch, list) and len(batch) == total and next(tensors(batch), None) is None:
            return batch[first:end]  # such as names
        values = [_rows(value, total, first, end) for value in batch]
        return type(batch)(*values) if hasattr(batch, "_fields") else type(batch)(values)
    return batch


def concatenated(batches: Sequence[Any]) -> Any:
    """Join batches of the same structure along the first dimension.

    Args:
        batches: At least one. Tensors without a dimension are stacked.
    """
    first = batches[0]
    if isinstance(first, Tensor):
        return torch.cat(list(batches)) if first.ndim else torch.stack(list(batches))
    if isinstance(first, Mapping):
        return {key: concatenated([batch[key] for batch in batches]) for key in first}
    if isinstance(first, tuple | list):
        values = [concatenated(parts) for parts in zip(*batches)]
        return type(first)(*values) if hasattr(first, "_fields") else type(first)(values)
    return list(batches)


def same(a: Any, b: Any) -> bool:
    """Return True if two batches hold the same values, to the bit.

    Args:
        a: One batch.
        b: Another.
    """
    if isinstance(a, Tensor) or isinstance(b, Tensor):
        if not (isinstance(a, Tensor) and isinstance(b, Tensor)) or a.dtype != b.dtype:
            return False
        return a.shape == b.shape and torch.equal(a.nan_to_num(), b.nan_to_num())
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        return list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    if isinstance(a, tuple | list) and isinstance(b, tuple | list):
        return len(a) == len(b) and all(map(same, a, b))
    return a is b or bool(a == b)
