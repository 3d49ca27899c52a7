"""The health of an average: is it still an average of these weights, and does it still move."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gadam._dtensor import is_dtensor

__all__ = ["Health", "measure"]

FAR = 10.0
FROZEN, NOTICEABLE = 0.01, 1e-3
MANY, MOST = 10, 0.1
ENTRIES = 2**16


@dataclass(frozen=True)
class Health:
    """The health of an average, as :meth:`gadam.IterateAverage.health` measures it.

    Attributes:
        samples: The number of samples in the average.
        skipped: The number of samples that were due but not finite.
        distance: The distance between the average and the current weights, relative to the norm of
            the weights. NaN without a sample, or if either of them is not finite.
        moving: The fraction of entries that the next sample would change, among those in which the
            average differs from the weights. It is 0 for an average that stands still because its
            type is too narrow for the weight of a sample. It is measured on up to 65,536 evenly
            spaced entries of each parameter. NaN without a sample.
        finite: Whether all entries of the average are finite.
        weights_finite: Whether all entries of the current weights are finite.
    """

    samples: int
    skipped: int
    distance: float
    moving: float
    finite: bool
    weights_finite: bool

    @property
    def moves(self) -> bool:
        """Whether the average still moves: at least 1% of the entries that should."""
        return not self.moving < FROZEN

    @property
    def problems(self) -> tuple[str, ...]:
        r"""What is clearly broken, as sentences. Empty for a healthy average.

        - The average is not finite, or the weights are not.
        - The average is *far*: its distance is above 10. The distance of an average of weights up
          to nine times as large as the current ones, :math:`\|\theta_i\| \le 9 \|\theta\|`, is at
          most 10 by the triangle inequality.
        - The average is *frozen*: the next sample would change less than 1% of the entries that
          differ, at a distance of at least 10⁻³.
        - *Many* samples were not finite: at least 10, and more than 10% of all.
        """
        found = []
        if not self.finite:
            found.append(
                "The average is not finite. Restore it from an earlier checkpoint, or start a new "
                "one."
            )
        elif not self.weights_finite:
            found.append(
                "The weights are not finite: training has diverged. The average holds the "
                f"{self.samples} samples from before."
            )
        if self.distance > FAR:
            found.append(
                f"The average is far from the weights: their distance is {self.distance:.3g} times "
                "the norm of the weights. Check that the average belongs to this model, and that "
                "training has not diverged."
            )
        if not self.moves and self.distance >= NOTICEABLE:
            found.append(
                f"The average stands still: the next sample would change only {self.moving:.2%} of "
                "the entries that differ from the weights, because the weight of a sample is too "
                "small for the average's dtype. Use a wider dtype, or sample less often."
            )
        if self.skipped >= MANY and self.skipped > MOST * (self.skipped + self.samples):
            found.append(
                f"{self.skipped} of {self.skipped + self.samples} samples were not finite and did "
                "not enter the average. Lower the learning rate, or clip gradients."
            )
        return tuple(found)


@torch.no_grad()
def measure(
    params: Iterable[Tensor],
    weights: Callable[[Tensor], Tensor],
    average: Callable[[Tensor], Tensor],
    weight: float,
    samples: int,
    skipped: int,
    *,
    reduce: bool = True,
) -> Health:
    """Measure the health of an average.

    This makes five passes over the parameters, holds a temporary copy of one of them at a time, and
    reads numbers back from a device once.

    Args:
        params: The averaged parameters.
        weights: Returns this process's shard of a parameter's raw weights.
        average: Returns this process's shard of a parameter's average.
        weight: The weight of the next sample.
        samples: The number of samples.
        skipped: The number of samples that were not finite.
        reduce: Sum over the processes that share sharded parameters. This is a collective
            operation with one reduction per device mesh. False measures this process's shards.
    """
    if not samples:
        return Health(samples, skipped, math.nan, math.nan, True, True)
    sums: defaultdict[Any, list[Tensor]] = defaultdict(list)
    for p in params:
        mesh = p.device_mesh if reduce and is_dtensor(p) else None  # type: ignore[attr-defined]
        sums[mesh].append(_sums(weights(p), average(p), weight) / _replicas(p, mesh))
    total = sum((_over_mesh(mesh, _total(rows)) for mesh, rows in sums.items()), torch.zeros(6))
    gap, norm, changed, differ, bad_averages, bad_weights = total.tolist()
    finite = not bad_averages and not bad_weights
    distance = math.sqrt(gap / norm) if norm else (math.inf if gap else 0.0)
    return Health(
        samples,
        skipped,
        distance=distance if finite else math.nan,
        moving=changed / differ if differ else 1.0,
        finite=not bad_averages,
        weights_finite=not bad_weights,
    )


def _sums(weights: Tensor, average: Tensor, weight: float) -> Tensor:
    """Return one parameter's squared distance and norm, and its counts of entries."""
    if weights.is_complex():
        weights, average = torch.view_as_real(weights), torch.view_as_real(average)
    wide = torch.float32 if average.device.type == "mps" else torch.float64
    if not average.numel():
        return torch.zeros(6, dtype=wide, device=average.device)
    sample = weights.to(average.device, average.dtype)
    stride = -(-average.numel() // ENTRIES)
    few = torch.arange(0, average.numel(), stride, device=average.device)
    some, target = average.take(few), sample.take(few)
    differs = some != target
    entries = (
        _norm(sample - average).to(wide).square(),
        _norm(sample).to(wide).square(),
        (differs & (some.lerp(target, weight) != some)).sum() * stride,
        differs.sum() * stride,
        _is_not_finite(average),
        _is_not_finite(sample),
    )
    return torch.stack([entry.to(wide) for entry in entries])


def _norm(tensor: Tensor) -> Tensor:
    norm: Tensor = torch.linalg.vector_norm(tensor, dtype=_at_least_float32(tensor.dtype))
    return norm


def _is_not_finite(tensor: Tensor) -> Tensor:
    low, high = torch.aminmax(tensor)  # both propagate NaN
    return torch.logical_not(torch.isfinite(low) & torch.isfinite(high))


def _at_least_float32(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype.itemsize < 4 else dtype


def _replicas(p: Any, mesh: Any) -> int:
    """Return how many processes of a mesh hold the same entries of a parameter."""
    if mesh is None:
        return 1
    sizes = [mesh.size(i) for i, place in enumerate(p.placements) if not place.is_shard()]
    return math.prod(sizes)


def _total(rows: list[Tensor]) -> Tensor:
    """Return the sum of the rows on the host, with one transfer per device."""
    by_device: defaultdict[torch.device, list[Tensor]] = defaultdict(list)
    for row in rows:
        by_device[row.device].append(row)
    of_devices = [torch.stack(of_device).sum(0).cpu() for of_device in by_device.values()]
    return torch.stack(of_devices).sum(0)


def _over_mesh(mesh: Any, total: Tensor) -> Tensor:
    """Return the sum over the processes of a mesh."""
    if mesh is None:
        return total
    import torch.distributed as dist

    shared = total.to(mesh.device_type)
    for group in mesh.get_all_groups():
        dist.all_reduce(shared, group=group)
    return shared.cpu()
