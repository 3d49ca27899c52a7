"""Weightings composed from blocks: the weight of each block, and what that leaves out."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from gadam.average.plan import Mean, Weighting, Window

__all__ = ["block_weights", "misplaced_weight"]


def _first_samples(count: int, weighting: Weighting) -> Tensor:
    """Return the total weight of the first 0, 1, …, ``count`` of that many samples."""
    if isinstance(weighting, Window):
        size = min(weighting.size, count)
        return (torch.arange(count + 1, dtype=torch.float64) - (count - size)).clamp(min=0) / size
    # Each later sample scales the earlier ones down: their total is a product of 1 - w.
    latest = weighting.weight(torch.arange(2, count + 1, dtype=torch.float64))
    shrunk = torch.log1p(-latest).flip(0).cumsum(0).flip(0).exp()
    ends = torch.zeros(1, dtype=torch.float64), torch.ones(1, dtype=torch.float64)
    return torch.cat([ends[0], shrunk, ends[1]])


def block_weights(counts: Sequence[int], weighting: Weighting) -> list[float]:
    """Return the total weight of the samples of each of some consecutive blocks.

    Args:
        counts: The number of samples of each block.
        weighting: The weighting of all samples.

    Example:
        >>> import gadam
        >>> block_weights([1, 1, 2], gadam.Mean())
        [0.25, 0.25, 0.5]
    """
    if isinstance(weighting, Mean):
        return [count / sum(counts) for count in counts]
    ends = torch.tensor([0, *counts]).cumsum(0)
    return _first_samples(sum(counts), weighting)[ends].diff().tolist()


def misplaced_weight(counts: Sequence[int], weighting: Weighting) -> float:
    """Return how much weight is on other samples of the same block if each block is a plain mean.

    Args:
        counts: The number of samples of each block.
        weighting: The weighting of all samples.

    Example:
        >>> import gadam
        >>> round(misplaced_weight([2], gadam.LinearDecay()), 6)  # 1/3 and 2/3, not 1/2 and 1/2
        0.166667
    """
    if isinstance(weighting, Mean):
        return 0.0
    exact = _first_samples(sum(counts), weighting).diff()
    sizes = torch.tensor(counts)
    used = torch.tensor(block_weights(counts, weighting), dtype=torch.float64)
    spread = (used / sizes.clamp(min=1)).repeat_interleave(sizes)
    return 0.5 * float((exact - spread).abs().sum())
