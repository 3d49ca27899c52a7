"""The tensors of blocks, and weighted means of them, computed one tensor at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch import Tensor

from gadam._errors import UserError

__all__ = ["BlockError", "Contents", "combined", "merged", "real"]

_INITIAL = "initial."
# As many elements as torch handles in the calling thread. More would start threads, which would
# compete with those of the training, and leave the cache.
_PIECE = 1 << 15


class BlockError(UserError, ValueError):
    """The blocks of a run cannot be used. The message says why, and what to do."""


class Contents:
    """The tensors of a block: the mean of each parameter, by its index in the optimizer.

    A parameter that joined the optimizer, or was unfrozen, in the middle of training was constant
    before. The block in which that happened also holds its initial value, which is its mean over
    all earlier blocks.

    Args:
        keys: The keys of the tensors.
        tensor: A function that returns a tensor by its key.
        like: A function that returns a tensor with the same shape and type; None for the same one.
    """

    def __init__(
        self,
        keys: Iterable[str],
        tensor: Callable[[str], Tensor],
        like: Callable[[str], Tensor] | None = None,
    ) -> None:
        self._keys = set(keys)
        self.tensor, self._like = tensor, like or tensor

    @classmethod
    def of(cls, means: Mapping[int, Tensor], initial: Mapping[int, Tensor]) -> Contents:
        """Return contents in memory.

        Args:
            means: The means by index of the parameter.
            initial: The initial values of parameters that joined in this block.
        """
        tensors = {str(i): real(mean) for i, mean in means.items()}
        tensors.update({f"{_INITIAL}{i}": real(value) for i, value in initial.items()})
        return cls(tensors, tensors.__getitem__)

    def mean(self, index: int) -> Tensor | None:
        """Return a parameter's mean as a real tensor, or None if it was not trained yet.

        Args:
            index: The index of the parameter.
        """
        key = str(index)
        return self.tensor(key) if key in self._keys else None

    def initial(self, index: int) -> Tensor | None:
        """Return the value of a parameter before this block, if it joined in this block.

        Args:
            index: The index of the parameter.
        """
        key = f"{_INITIAL}{index}"
        return self.tensor(key) if key in self._keys else None

    @property
    def indices(self) -> list[int]:
        """The indices of the parameters."""
        return sorted(int(key) for key in self._keys if not key.startswith(_INITIAL))

    def likes(self) -> dict[str, Tensor]:
        """Return tensors with the shapes and types of all tensors, by key."""
        return {key: self._like(key) for key in self._keys}


def combined(
    contents: Sequence[Contents],
    shares: Sequence[float],
    index: int,
    before: Tensor | None = None,
    dtype: torch.dtype = torch.float64,
) -> Tensor | None:
    """Return a weighted mean of a parameter's means in consecutive blocks, computed in float64.

    Args:
        contents: The blocks, in order.
        shares: Their weights, which sum to one.
        index: The index of the parameter.
        before: The value before a block that is not among these, if it joined only there.
        dtype: The type of the result.

    Returns:
        The mean as a real tensor, or None if the parameter is in none of the blocks.
    """
    parts: list[tuple[float, Tensor]] = []
    is_complete = True
    for share, block in reversed(list(zip(shares, contents))):
        mean = block.mean(index)
        mean = before if mean is None else mean
        initial = block.initial(index)
        before = before if initial is None else initial
        if share and mean is not None:
            parts.append((share, mean))
        is_complete &= mean is not None or not share
    if parts and not is_complete:
        raise BlockError(
            f"The value of parameter {index} before it joined is not known. Start the window at a "
            "later boundary."
        )
    return _weighted_sum(parts, dtype) if parts else None


def _weighted_sum(parts: Sequence[tuple[float, Tensor]], dtype: torch.dtype) -> Tensor:
    """Return a weighted sum, computed in float64."""
    result = torch.empty(parts[0][1].shape, dtype=dtype)
    flat, size = result.view(-1), result.numel()
    tensors = [(weight, tensor.cpu().reshape(-1)) for weight, tensor in parts]
    wide = torch.empty(2, min(size, _PIECE), dtype=torch.float64)
    for begin in range(0, size, _PIECE):
        end = min(begin + _PIECE, size)
        total, term = wide[:, : end - begin]
        total.zero_()
        for weight, tensor in tensors:
            total.add_(term.copy_(tensor[begin:end]), alpha=weight)
        flat[begin:end].copy_(total)
    return result


def merged(contents: Sequence[Contents], shares: Sequence[float]) -> Contents:
    """Return the contents of the block of two neighbors, which are computed on demand.

    Args:
        contents: The contents of both, in order.
        shares: Their weights, which sum to one.
    """

    def like(key: str) -> Tensor:
        return next(found._like(key) for found in contents if key in found._keys)

    def tensor(key: str) -> Tensor:
        if key.startswith(_INITIAL):
            return like(key)
        mean = combined(contents, shares, int(key), dtype=like(key).dtype)
        assert mean is not None  # one of the blocks has it, and a share
        return mean

    return Contents(set().union(*(found._keys for found in contents)), tensor, like)


def real(tensor: Tensor) -> Tensor:
    """Return a tensor with its real and imaginary parts, if it is complex.

    Args:
        tensor: The tensor.
    """
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor
