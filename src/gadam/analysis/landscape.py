"""The loss along a line and over a plane through points in weight space."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from gadam._modes import preserved_modes

__all__ = ["Plane", "along_line", "over_plane"]

State = Mapping[str, Tensor]
"""Tensors by parameter name."""
Measure = Callable[[nn.Module], Mapping[str, float]]
"""Evaluates a model and returns metrics by name.

If the model has BatchNorm layers, it should refresh their statistics first.
"""


@contextmanager
def _preserved(model: nn.Module) -> Iterator[None]:
    """Restore the model's state and training modes on exit."""
    before = {name: t.clone() for name, t in model.state_dict().items()}
    with preserved_modes(model):
        try:
            yield
        finally:
            model.load_state_dict(before)


@torch.no_grad()
def _set_parameters(model: nn.Module, weights: State) -> None:
    for name, p in model.named_parameters():
        p.copy_(weights[name])


def along_line(
    model: nn.Module, start: State, end: State, measure: Measure, at: Sequence[float]
) -> list[dict[str, float]]:
    """Evaluate a model at start + t·(end − start), for each t in ``at``.

    Args:
        model: Model to load the weights into. It is restored afterwards.
        start: Parameters at t = 0, by name.
        end: Parameters at t = 1, by name.
        measure: Evaluates the model at each position.
        at: Positions t. They may lie outside [0, 1].

    Returns:
        The metrics at each position.

    Example:
        >>> model = nn.Linear(1, 1, bias=False)
        >>> ends = {"weight": torch.tensor([[0.0]])}, {"weight": torch.tensor([[2.0]])}
        >>> along_line(model, *ends, lambda m: {"loss": m.weight.item() ** 2}, at=[0, 0.5, 1])
        [{'loss': 0.0}, {'loss': 1.0}, {'loss': 4.0}]
    """
    names = [name for name, _ in model.named_parameters()]
    results = []
    with _preserved(model):
        for t in at:
            weights = {name: torch.lerp(start[name], end[name], float(t)) for name in names}
            _set_parameters(model, weights)
            results.append(dict(measure(model)))
    return results


@dataclass(frozen=True, eq=False)
class Plane:
    """A plane through three points in weight space.

    The first point is the origin, and the second lies on the first axis. The axes have unit length
    and are orthogonal, so distances in the plane equal distances in weight space.

    Attributes:
        origin: The first point.
        across: Unit vector of the first axis.
        up: Unit vector of the second axis.

    Example:
        >>> points = [{"w": torch.tensor(w)} for w in ([0.0, 0.0], [2.0, 0.0], [1.0, 3.0])]
        >>> plane = Plane.through(*points, names=["w"])
        >>> plane.coordinates(points[2])
        (1.0, 3.0)
    """

    origin: State
    across: State
    up: State

    @classmethod
    def through(cls, first: State, second: State, third: State, names: Sequence[str]) -> Plane:
        """Construct the plane through three points that do not lie on a line.

        Args:
            first: The origin of the plane.
            second: A point on the first axis.
            third: Any point of the plane off the first axis.
            names: Names of the parameters that span weight space.

        Returns:
            The plane.

        Raises:
            ValueError: If the points lie on a line.
        """
        origin = {name: first[name].double() for name in names}
        across = {name: second[name].double() - origin[name] for name in names}
        up = {name: third[name].double() - origin[name] for name in names}
        length, size = _dot(across, across) ** 0.5, _dot(up, up) ** 0.5
        if length == 0.0:
            raise ValueError("The first two points are identical.")
        across = {name: v / length for name, v in across.items()}
        along = _dot(across, up)
        up = {name: v - along * across[name] for name, v in up.items()}
        height = _dot(up, up) ** 0.5
        # Below this height, the second axis would be mere rounding error of the weights.
        rounding = 10 * torch.finfo(first[names[0]].dtype).eps * _dot(origin, origin) ** 0.5
        if height <= max(rounding, 1e-6 * size):
            raise ValueError("The three points lie on a line and do not span a plane.")
        return cls(origin, across, {name: v / height for name, v in up.items()})

    def coordinates(self, point: State) -> tuple[float, float]:
        """Project a point onto the plane.

        Args:
            point: Parameters by name.

        Returns:
            The coordinates (x, y) of the nearest point in the plane.
        """
        offset = {name: point[name].double() - v for name, v in self.origin.items()}
        return _dot(offset, self.across), _dot(offset, self.up)

    def at(self, x: float, y: float) -> dict[str, Tensor]:
        """Return the weights at the coordinates (x, y).

        Args:
            x: Coordinate along the first axis.
            y: Coordinate along the second axis.

        Returns:
            Parameters by name, in double precision.
        """
        return {
            name: origin + x * self.across[name] + y * self.up[name]
            for name, origin in self.origin.items()
        }


def _dot(a: State, b: State) -> float:
    return sum(float((a[name] * b[name]).sum()) for name in a)


def over_plane(
    model: nn.Module, plane: Plane, measure: Measure, at: Sequence[tuple[float, float]]
) -> list[dict[str, float]]:
    """Evaluate a model at points of a plane.

    Args:
        model: Model to load the weights into. It is restored afterwards.
        plane: The plane.
        measure: Evaluates the model at each point.
        at: Coordinates (x, y) in the plane.

    Returns:
        The metrics at each point.
    """
    results = []
    with _preserved(model):
        for x, y in at:
            _set_parameters(model, plane.at(x, y))
            results.append(dict(measure(model)))
    return results
