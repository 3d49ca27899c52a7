"""Check lines and planes through points in weight space."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from gadam.analysis import Plane, along_line, over_plane


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, 2, bias=False), nn.BatchNorm1d(2))


def point(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {n: torch.randn(p.shape, generator=generator) for n, p in model().named_parameters()}


def height(m: nn.Module) -> dict[str, float]:
    m(torch.ones(3, 2))  # Updates the running statistics.
    return {"loss": sum(float(p.detach().square().sum()) for p in m.parameters())}


def squared(state: dict[str, torch.Tensor]) -> float:
    return sum(float(t.double().square().sum()) for t in state.values())


def test_line_evaluates_each_position_and_restores_the_model():
    m = model().train()
    m[1].eval()
    before = {name: t.clone() for name, t in m.state_dict().items()}
    a, b = point(1), point(2)
    found = along_line(m, a, b, height, [0.0, 0.5, 1.0, 2.0])
    expected = [squared({n: a[n] + t * (b[n] - a[n]) for n in a}) for t in (0.0, 0.5, 1.0, 2.0)]
    assert [v["loss"] for v in found] == pytest.approx(expected, rel=1e-5)
    assert all(torch.equal(t, before[name]) for name, t in m.state_dict().items())
    assert [module.training for module in m] == [True, False]


def test_model_is_restored_after_an_error():
    m = model()
    before = {name: t.clone() for name, t in m.state_dict().items()}

    def fails(_: nn.Module) -> dict[str, float]:
        raise RuntimeError("no")

    with pytest.raises(RuntimeError, match="no"):
        along_line(m, point(1), point(2), fails, [0.0])
    assert all(torch.equal(t, before[name]) for name, t in m.state_dict().items())


def test_plane_coordinates_and_evaluation():
    a, b, c, d = (point(seed) for seed in range(4))
    plane = Plane.through(a, b, c, list(a))
    assert plane.coordinates(a) == pytest.approx((0.0, 0.0), abs=1e-6)
    x, y = plane.coordinates(b)
    assert y == pytest.approx(0.0, abs=1e-6)
    assert x**2 == pytest.approx(squared({n: b[n] - a[n] for n in a}), rel=1e-5)
    for each in (a, b, c):  # These points lie in the plane.
        back = plane.at(*plane.coordinates(each))
        assert squared({n: back[n] - each[n] for n in a}) == pytest.approx(0.0, abs=1e-10)
    # Other points map to the nearest point in the plane.
    projected = plane.at(*plane.coordinates(d))
    nearest = squared({n: projected[n] - d[n] for n in a})
    x, y = plane.coordinates(d)
    for dx, dy in ((0.1, 0.0), (0.0, 0.1), (-0.1, -0.1)):
        other = plane.at(x + dx, y + dy)
        assert squared({n: other[n] - d[n] for n in a}) > nearest
    m = model()
    found = over_plane(m, plane, height, [(0.0, 0.0), plane.coordinates(c)])
    assert [v["loss"] for v in found] == pytest.approx([squared(a), squared(c)], rel=1e-5)


def test_collinear_points_raise():
    a, b = point(1), point(2)
    middle = {n: (a[n] + b[n]) / 2 for n in a}  # Collinear up to rounding.
    with pytest.raises(ValueError, match="lie on a line"):
        Plane.through(a, b, middle, list(a))
    with pytest.raises(ValueError, match="identical"):
        Plane.through(a, a, b, list(a))
