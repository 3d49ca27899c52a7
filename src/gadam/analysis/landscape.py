"""The loss along a line and in a plane through points of weight space."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

__all__ = ["Plane", "along_line", "over_plane"]

State = Mapping[str, Tensor]
Measure = Callable[[nn.Module], Mapping[str, float]]
"""How good a model is, by several measures; it should refresh BatchNorm statistics where there are some."""


@contextmanager
def _lent(model: nn.Module) -> Iterator[None]:
    """Everything in the model is afterwards what it was."""
    before = {name: t.clone() for name, t in model.state_dict().items()}
    modes = {module: module.training for module in model.modules()}
    try:
        yield
    finally:
        model.load_state_dict(before)
        for module, training in modes.items():
            module.training = training


@torch.no_grad()
def _put(model: nn.Module, weights: Mapping[str, Tensor]) -> None:
    for name, p in model.named_parameters():
        p.copy_(weights[name])


def along_line(
    model: nn.Module, start: State, end: State, measure: Measure, at: Sequence[float]
) -> list[dict[str, float]]:
    """What is measured at start + t·(end − start), for each t of ``at``.

    Args:
        model: to put the weights into; it is afterwards as it was
        start: where t = 0, by parameters' names
        end: where t = 1
        measure: called with the model at each place
        at: the places

    Example:
        >>> model = nn.Linear(1, 1, bias=False)
        >>> ends = {"weight": torch.tensor([[0.0]])}, {"weight": torch.tensor([[2.0]])}
        >>> along_line(model, *ends, lambda m: {"loss": m.weight.item() ** 2}, at=[0, 0.5, 1])
        [{'loss': 0.0}, {'loss': 1.0}, {'loss': 4.0}]
    """
    names = [name for name, _ in model.named_parameters()]
    found = []
    with _lent(model):
        for t in at:
            _put(model, {name: torch.lerp(start[name], end[name], float(t)) for name in names})
            found.append(dict(measure(model)))
    return found


@dataclass(frozen=True, eq=False)
class Plane:
    """Through three points: the first is its origin, the second lies on its first axis.

    Distances in the plane are distances in weight space.
    """

    origin: State
    across: State
    up: State

    @classmethod
    def through(cls, first: State, second: State, third: State, names: Sequence[str]) -> Plane:
        """Three points that do not lie on a line, by parameters' names."""
        origin = {name: first[name].double() for name in names}
        across = {name: second[name].double() - origin[name] for name in names}
        up = {name: third[name].double() - origin[name] for name in names}
        length, size = _dot(across, across) ** 0.5, _dot(up, up) ** 0.5
        if length == 0.0:
            raise ValueError("the first two points are the same")
        across = {name: v / length for name, v in across.items()}
        along = _dot(across, up)
        up = {name: v - along * across[name] for name, v in up.items()}
        height = _dot(up, up) ** 0.5
        # Rounding of the weights alone would make a direction.
        rounding = 10 * torch.finfo(first[names[0]].dtype).eps * _dot(origin, origin) ** 0.5
        if height <= max(rounding, 1e-6 * size):
            raise ValueError("the three points lie on a line: they make no plane")
        return cls(origin, across, {name: v / height for name, v in up.items()})

    def coordinates(self, point: State) -> tuple[float, float]:
        """Where a point is, or the foot of its perpendicular."""
        away = {name: point[name].double() - v for name, v in self.origin.items()}
        return _dot(away, self.across), _dot(away, self.up)

    def at(self, x: float, y: float) -> dict[str, Tensor]:
        """The weights there."""
        return {
            name: origin + x * self.across[name] + y * self.up[name]
            for name, origin in self.origin.items()
        }


def _dot(a: State, b: State) -> float:
    return sum(float((a[name] * b[name]).sum()) for name in a)


def over_plane(
    model: nn.Module, plane: Plane, measure: Measure, at: Sequence[tuple[float, float]]
) -> list[dict[str, float]]:
    """What is measured at these places of the plane; the model is afterwards as it was."""
    found = []
    with _lent(model):
        for x, y in at:
            _put(model, plane.at(x, y))
            found.append(dict(measure(model)))
    return found
