"""Points in weight space: how far iterates lie apart, and how fast their directions turn."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["Distances", "distances", "effective_rate", "effective_rates", "norms"]

State = Mapping[str, Tensor]


@dataclass(frozen=True, eq=False)
class Distances:
    """Between all pairs of n points.

    Attributes:
        matrix: ‖wᵢ − wⱼ‖, (n, n).
        norms: ‖wᵢ‖.
    """

    matrix: Tensor
    norms: Tensor

    @property
    def mean(self) -> float:
        """Over all pairs of different points."""
        n = len(self.norms)
        return float(self.matrix.sum() / (n * (n - 1)))

    @property
    def relative(self) -> float:
        """The mean distance over the mean norm."""
        return self.mean / float(self.norms.mean())

    @property
    def consecutive(self) -> float:
        """The mean distance from a point to the next."""
        return float(self.matrix.diagonal(1).mean())

    def by_distance(self) -> list[float]:
        """The mean over pairs that are 1, 2, … places apart in the order of the points."""
        return [float(self.matrix.diagonal(k).mean()) for k in range(1, len(self.norms))]


def distances(
    points: Sequence[State], names: Iterable[str] | None = None, *, numbers: int | None = None
) -> Distances:
    """In weight space, between all pairs of points.

    The points may lie on the disk (``torch.load(path, mmap=True)``): not more than two of them, or ``numbers``, are in
    memory at a time.

    Args:
        points: the tensors of each by name, as a state_dict
        names: of those that count, such as the parameters' (buffers are no weights); else all that hold real numbers
        numbers: that are in memory at a time

    Example:
        >>> points = [{"w": torch.tensor([3.0, 4.0])}, {"w": torch.tensor([3.0, 1.0])}]
        >>> distances(points).mean
        3.0
    """
    n = len(points)
    if n < 2:
        raise ValueError(f"distances are between at least two points, not {n}")
    if names is None:
        names = [name for name, t in points[0].items() if t.is_floating_point()]
    names = list(names)
    for i, point in enumerate(points):
        for name in names:
            if name not in point or point[name].shape != points[0][name].shape:
                raise ValueError(f"point {i} has no {name!r} of the shape that the first has")
    if numbers is None:
        numbers = 2 * sum(points[0][name].numel() for name in names)
    chunk = max(1, numbers // (5 * n))  # once as they are, twice in double precision
    squares = torch.zeros(n, n, dtype=torch.float64)
    lengths = torch.zeros(n, dtype=torch.float64)
    for name in names:
        flat = [point[name].reshape(-1) for point in points]
        for start in range(0, flat[0].numel(), chunk):
            w = torch.stack([f[start : start + chunk].cpu() for f in flat]).double()
            lengths += w.square().sum(1)
            w = w - w.mean(0)  # distances do not change, and lose no digits
            products = w @ w.T
            own = products.diagonal()
            squares += own[:, None] + own[None, :] - 2 * products
    return Distances(squares.clamp_min(0).sqrt().fill_diagonal_(0), lengths.sqrt())


def effective_rate(model: nn.Module, lr: float) -> dict[str, float]:
    """α/‖w‖² of each weight that is a matrix or a filter, and of all parameters together (as "all").

    Where BatchNorm follows a layer, the length of its weights does not matter, and their direction turns at a rate in
    proportion to this (Hoffer, Banner, Golan and Soudry, 2018).
    """
    return _rates(lr, norms(model))


@torch.no_grad()
def norms(model: nn.Module) -> dict[str, float]:
    """‖w‖ of each weight that is a matrix or a filter, and of all parameters together (as "all")."""
    squares = {name: float(p.double().square().sum()) for name, p in model.named_parameters()}
    shaped = [name for name, p in model.named_parameters() if p.dim() > 1]
    return {"all": math.sqrt(sum(squares.values()))} | {
        name: math.sqrt(squares[name]) for name in shaped
    }


def _rates(lr: float, lengths: Mapping[str, float]) -> dict[str, float]:
    return {name: lr / norm**2 if norm else math.inf for name, norm in lengths.items()}


def effective_rates(lines: Iterable[Mapping[str, Any]]) -> dict[str, list[tuple[int, float]]]:
    """The same along training, from a run's lines (``epochs.jsonl``): (epoch, α/‖w‖²) by layer.

    Norms that are not there, as in runs before gadam took them down, or no numbers, are left out.
    """
    found: dict[str, list[tuple[int, float]]] = {}
    for line in lines:
        norms = {name: norm for name, norm in (line.get("norms") or {}).items() if norm is not None}
        for name, rate in _rates(line["lr"], norms).items():
            found.setdefault(name, []).append((line["epoch"], rate))
    return found
