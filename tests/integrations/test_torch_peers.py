"""Checkpoints of torch's own optimizers and of AveragedModel, in and out."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import gadam


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 1)).double()


def train(model: nn.Module, optimizer: Any, steps: range, after: Any = lambda: None) -> None:
    for step in steps:
        x = torch.randn(8, 3, generator=torch.Generator().manual_seed(step)).double()
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
        after()


def values(model: nn.Module) -> list[Tensor]:
    return [p.detach().clone() for p in model.parameters()]


def equal(a: list[Tensor], b: list[Tensor]) -> bool:
    return len(a) == len(b) and all(map(torch.equal, a, b))


@pytest.mark.parametrize("amsgrad", [False, True])
def test_training_moves_from_adamw_to_gadam_and_back(amsgrad):
    settings: dict[str, Any] = {"lr": 0.01, "weight_decay": 0.1, "amsgrad": amsgrad}
    settings["foreach"] = False  # one implementation, so that the results are bitwise equal
    whole, moved = network(), network()
    adamw = torch.optim.AdamW(whole.parameters(), **settings)
    train(whole, adamw, range(9))

    first = torch.optim.AdamW(moved.parameters(), **settings)
    train(moved, first, range(3))
    plan = gadam.Averaging(start=5)
    second = gadam.Gadam(moved.parameters(), average=plan, **settings)
    second.load_state_dict(first.state_dict())
    train(moved, second, range(3, 6))
    assert second.average.count == 2  # AdamW's steps count: samples at steps 5 and 6
    third = torch.optim.AdamW(moved.parameters(), **settings)
    third.load_state_dict(second.state_dict())
    train(moved, third, range(6, 9))
    assert equal(values(moved), values(whole))


@pytest.mark.parametrize("weighting", [gadam.Mean(), gadam.EMA(0.8)], ids=["mean", "ema"])
def test_an_averaged_model_goes_on_here_and_back(weighting):
    """Start with torch, continue here, and finish with torch: the average is torch's own."""
    ema = isinstance(weighting, gadam.EMA)
    options: dict[str, Any] = {"multi_avg_fn": get_ema_multi_avg_fn(0.8)} if ema else {}
    model = network()
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    reference = AveragedModel(model, **options)
    train(model, sgd, range(20), lambda: reference.update_parameters(model))

    model = network()
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    swa = AveragedModel(model, **options)
    train(model, sgd, range(8), lambda: swa.update_parameters(model))
    average = gadam.IterateAverage(sgd, gadam.Averaging(start=1, weighting=weighting))
    average.load_averaged_model(swa.state_dict(), model)
    assert average.count == 8
    train(model, sgd, range(8, 14))
    average.remove()
    back = AveragedModel(network(), **options)
    back.load_state_dict(average.averaged_model_state_dict(model))
    assert int(back.n_averaged) == 14
    train(model, sgd, range(14, 20), lambda: back.update_parameters(model))

    # torch's EMA starts at the first sample with all the weight. Ours has no bias: after n samples
    # the difference is below 0.8^n.
    tolerance = 0.8**8 if ema else 1e-12
    for found, expected in zip(back.module.parameters(), reference.module.parameters()):
        torch.testing.assert_close(found, expected, atol=tolerance, rtol=0)
