"""Averages in Lightning Fabric."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.fabric import Fabric
from torch import nn

import gadam
from gadam.integrations.common import FrameworkError
from gadam.integrations.fabric import register


def start(precision: Any = "32-true") -> tuple[Any, Any, Any, gadam.IterateAverage]:
    torch.manual_seed(0)
    fabric = Fabric(accelerator="cpu", devices=1, precision=precision)
    net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))
    model, optimizer = fabric.setup(net, torch.optim.Adam(net.parameters(), lr=0.05))
    average = gadam.IterateAverage(optimizer, gadam.Averaging(start=2))
    register(fabric, average)
    return fabric, model, optimizer, average


def train(fabric: Any, model: Any, optimizer: Any, steps: range) -> None:
    for step in steps:
        for micro in range(2):  # accumulation
            batch = torch.randn(8, 4, generator=torch.Generator().manual_seed(2 * step + micro))
            with fabric.no_backward_sync(model, enabled=micro == 0):
                fabric.backward(model(batch).square().mean())
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("precision", ["32-true", "bf16-true", "bf16-mixed"])
def test_a_checkpoint_inside_applied_resumes_bitwise(tmp_path, precision):
    fabric, model, optimizer, average = start(precision)
    train(fabric, model, optimizer, range(4))
    assert average.count == 3
    raw = [t.clone() for t in model.state_dict().values()]
    with average.applied(model, [torch.randn(16, 4).to(next(model.parameters()).dtype)]):
        inside = [t.clone() for t in model.state_dict().values()]
        fabric.save(tmp_path / "c.ckpt", {"model": model, "optimizer": optimizer})
        assert all(map(torch.equal, inside, model.state_dict().values()))
        with pytest.raises(FrameworkError, match="Leave the"):
            fabric.load(tmp_path / "c.ckpt")
    saved = torch.load(tmp_path / "c.ckpt", weights_only=True)
    assert all(map(torch.equal, raw, saved["model"].values()))
    train(fabric, model, optimizer, range(4, 7))
    other, fresh, adam, again = start(precision)
    other.load(tmp_path / "c.ckpt", {"model": fresh, "optimizer": adam}, weights_only=True)
    train(other, fresh, adam, range(4, 7))
    assert all(map(torch.equal, model.state_dict().values(), fresh.state_dict().values()))
    exported = average.model_state_dict(model).values()
    assert all(map(torch.equal, exported, again.model_state_dict(fresh).values()))
    assert again.count == 6
