"""Distances between points in weight space, and effective learning rates."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from gadam._dtensor import whole

__all__ = ["Distances", "distances", "effective_rate", "effective_rates", "norms"]

State = Mapping[str, Tensor]
"""Tensors by name, as in a state dict."""


class HasNorms(Protocol):
    """The norms of the weights after one epoch, such as the record of an epoch."""

    @property
    def epoch(self) -> int:
        """The number of completed epochs."""

    @property
    def lr(self) -> float:
        """The learning rate of the epoch."""

    @property
    def norms(self) -> Mapping[str, float]:
        """Norms by parameter name, as returned by :func:`norms`. Unknown norms are NaN."""


@dataclass(frozen=True, eq=False)
class Distances:
    """Distances between all pairs of n points.

    Attributes:
        matrix: ‖wᵢ − wⱼ‖, of shape (n, n).
        norms: ‖wᵢ‖, of shape (n,).
    """

    matrix: Tensor
    norms: Tensor

    @property
    def mean(self) -> float:
        """The mean distance over all pairs of distinct points."""
        n = len(self.norms)
        return float(self.matrix.sum() / (n * (n - 1)))

    @property
    def relative(self) -> float:
        """The mean distance divided by the mean norm."""
        return self.mean / float(self.norms.mean())

    @property
    def consecutive(self) -> float:
        """The mean distance between consecutive points."""
        return float(self.matrix.diagonal(1).mean())

    def by_distance(self) -> list[float]:
        """Return the mean distances of the pairs that are 1, 2, … positions apart."""
        return [float(self.matrix.diagonal(k).mean()) for k in range(1, len(self.norms))]


def distances(
    points: Sequence[State], names: Iterable[str] | None = None, *, max_elements: int | None = None
) -> Distances:
    """Compute the distances in weight space between all pairs of points.

    The points may stay on disk (``torch.load(path, mmap=True)``). At most ``max_elements`` of
    their elements are in memory at a time.

    Args:
        points: State dicts, or other mappings of names to tensors.
        names: Names of the tensors to compare, such as those of the parameters without the buffers.
            Defaults to all floating-point tensors.
        max_elements: Maximum number of elements in memory at a time. Defaults to twice the size of
            a point.

    Returns:
        The distances and the norms of the points.

    Raises:
        ValueError: If there are fewer than two points, or their tensors do not match.

    Example:
        >>> points = [{"w": torch.tensor([3.0, 4.0])}, {"w": torch.tensor([3.0, 1.0])}]
        >>> distances(points).mean
        3.0
    """
    n = len(points)
    if n < 2:
        raise ValueError(f"distances needs at least two points, got {n}.")
    if names is None:
        names = [name for name, t in points[0].items() if t.is_floating_point()]
    names = list(names)
    for i, point in enumerate(points):
        for name in names:
            if name not in point or point[name].shape != points[0][name].shape:
                raise ValueError(
                    f"Point {i} must have a tensor {name!r} with the same shape as in point 0."
                )
    if max_elements is None:
        max_elements = 2 * sum(points[0][name].numel() for name in names)
    # Each element is held once in single precision and twice in double precision.
    chunk = max(1, max_elements // (5 * n))
    squares = torch.zeros(n, n, dtype=torch.float64)
    lengths = torch.zeros(n, dtype=torch.float64)
    for name in names:
        flat = [point[name].reshape(-1) for point in points]
        for start in range(0, flat[0].numel(), chunk):
            w = torch.stack([f[start : start + chunk].cpu() for f in flat]).double()
            lengths += w.square().sum(1)
            w = w - w.mean(0)  # Leaves distances unchanged and avoids cancellation.
            products = w @ w.T
            own = products.diagonal()
            squares += own[:, None] + own[None, :] - 2 * products
    return Distances(squares.clamp_min(0).sqrt().fill_diagonal_(0), lengths.sqrt())


def effective_rate(model: nn.Module, lr: float) -> dict[str, float]:
    r"""Compute the effective learning rates of a model's weights.

    If BatchNorm follows a layer, the norm of the layer's weights has no effect on its output, and
    the direction of the weights turns at a rate proportional to the effective learning rate

    .. math::
        \alpha_{\text{eff}} = \alpha / \lVert w \rVert^2

    (Hoffer, Banner, Golan, and Soudry, 2018).

    Args:
        model: Model to measure.
        lr: The learning rate α.

    Returns:
        Effective learning rates by parameter name, for each parameter with two or more dimensions,
        and for all parameters together under ``"all"``.
    """
    return _rates(lr, norms(model))


@torch.no_grad()
def norms(model: nn.Module) -> dict[str, float]:
    """Compute the Euclidean norms of a model's weights. Collective if the model is sharded.

    Args:
        model: Model to measure.

    Returns:
        Norms by parameter name, for each parameter with two or more dimensions, and for all
        parameters together under ``"all"``.
    """
    squares = {
        name: float(whole(p.detach().double().square().sum()))
        for name, p in model.named_parameters()
    }
    shaped = [name for name, p in model.named_parameters() if p.dim() > 1]
    return {"all": math.sqrt(sum(squares.values()))} | {
        name: math.sqrt(squares[name]) for name in shaped
    }


def _rates(lr: float, lengths: Mapping[str, float]) -> dict[str, float]:
    return {name: lr / norm**2 if norm else math.inf for name, norm in lengths.items()}


def effective_rates(epochs: Iterable[HasNorms]) -> dict[str, list[tuple[int, float]]]:
    """Compute the effective learning rates over the epochs of a run.

    Norms that are missing or not finite are skipped.

    Args:
        epochs: The learning rate and the norms of the weights, per epoch.

    Returns:
        (epoch, effective learning rate) pairs by parameter name.
    """
    rates: dict[str, list[tuple[int, float]]] = {}
    for record in epochs:
        known = {name: norm for name, norm in record.norms.items() if math.isfinite(norm)}
        for name, rate in _rates(record.lr, known).items():
            rates.setdefault(name, []).append((record.epoch, rate))
    return rates
