"""Check distances and effective rates against direct computation."""

from __future__ import annotations

import math
from typing import NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from gadam.analysis import distances, effective_rate, effective_rates, norms


@given(n=st.integers(2, 5), max_elements=st.integers(1, 60))
def test_distances_match_direct_computation(n, max_elements):
    generator = torch.Generator().manual_seed(n)
    points = [
        {
            "a": torch.randn(3, 4, generator=generator),
            "b": torch.randn(5, generator=generator),
            "counter": torch.tensor(7),
        }
        for _ in range(n)
    ]
    flat = torch.stack([torch.cat([p["a"].flatten(), p["b"]]) for p in points]).double()
    found = distances(points, max_elements=max_elements)
    torch.testing.assert_close(found.matrix, torch.cdist(flat, flat), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(found.norms, flat.norm(dim=1), rtol=1e-6, atol=0)
    pairs = torch.pdist(flat)
    assert found.mean == pytest.approx(float(pairs.mean()), rel=1e-6)
    assert found.relative == pytest.approx(float(pairs.mean() / flat.norm(dim=1).mean()), rel=1e-6)
    assert found.consecutive == pytest.approx(found.by_distance()[0])


def test_small_distances_between_large_weights_keep_precision():
    w = torch.randn(1000, generator=torch.Generator().manual_seed(0)).double() * 100
    step = torch.zeros(1000).double()
    step[0] = 1e-5
    assert distances([{"w": w}, {"w": w + step}]).mean == pytest.approx(1e-5, rel=1e-4)


def test_names_select_the_tensors():
    a = {"w": torch.zeros(2), "running_mean": torch.zeros(2)}
    b = {"w": torch.tensor([3.0, 4.0]), "running_mean": torch.ones(2)}
    assert distances([a, b], ["w"]).mean == 5.0
    with pytest.raises(ValueError, match="Point 1 must have a tensor 'v'"):
        distances([{**a, "v": torch.zeros(1)}, b], ["v"])
    with pytest.raises(ValueError, match="at least two points"):
        distances([a])


def test_effective_rate_is_alpha_over_the_squared_norm():
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Linear(2, 2))
    found = effective_rate(model, 0.1)
    assert set(found) == {"all", "0.weight", "2.weight"}
    weight = model.state_dict()["0.weight"]
    assert found["0.weight"] == pytest.approx(0.1 / float(weight.square().sum()))
    total = sum(float(p.detach().square().sum()) for p in model.parameters())
    assert found["all"] == pytest.approx(0.1 / total)
    assert norms(model)["all"] == pytest.approx(total**0.5)


class Epoch(NamedTuple):
    epoch: int
    lr: float
    norms: dict[str, float]


def test_effective_rates_skip_missing_norms():
    epochs = [
        Epoch(1, 0.1, {"all": 2.0, "w": 1.0}),
        Epoch(2, 0.1, {}),
        Epoch(3, 0.05, {"all": math.nan, "w": 0.5}),
    ]
    assert effective_rates(epochs) == {
        "all": [(1, pytest.approx(0.025))],
        "w": [(1, pytest.approx(0.1)), (3, pytest.approx(0.2))],
    }
