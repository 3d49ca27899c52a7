"""Schedules, Muon against torch's, and BEMA against its definition."""

from __future__ import annotations

import pytest
import torch
from benchmarks.evidence.methods import BEMA, Knobs, Muon, rate_factor
from torch import nn

from benchmarks.evidence import methods


def test_schedules() -> None:
    assert rate_factor("cold", 1, 100) == 1
    for name in set(methods.SCHEDULES) - {"cold"}:
        factors = [rate_factor(name, step, 100) for step in range(1, 101)]
        assert factors[:3] == pytest.approx([0.2, 0.4, 0.6], rel=0.01), name
        assert factors[4] == pytest.approx(1, abs=0.01), name
        assert max(factors) <= 1
    assert rate_factor("held", 100, 100) == 1
    assert rate_factor("cosine", 51, 100) == pytest.approx(0.5)
    assert rate_factor("cosine", 100, 100) < 1e-3
    assert [rate_factor("wsd", step, 100) for step in (81, 91, 100)] == pytest.approx(
        [1, 0.5, 0.05]
    )
    assert rate_factor("linear", 100, 100) == pytest.approx(0.01)
    eased = [rate_factor("eased", step, 1000) for step in (376, 526, 676, 1000)]
    assert eased == pytest.approx([1, 0.75, 0.5, 0.5])  # the average starts at 750


def test_muon_equals_torchs_up_to_its_precision() -> None:
    ours, theirs = (
        nn.Sequential(nn.Linear(6, 9, bias=False), nn.Tanh(), nn.Linear(9, 4)) for _ in range(2)
    )
    theirs.load_state_dict(ours.state_dict())
    muon = Muon(ours, 0.01, 0.1)
    (hidden, *others) = theirs.parameters()
    peers = [
        torch.optim.Muon([hidden], 0.01, 0.1, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, 0.01, weight_decay=0.1),
    ]
    before = hidden.detach().clone()
    x = torch.randn(16, 6, generator=torch.Generator().manual_seed(0))
    for _ in range(5):
        for model, optimizers in ((ours, [muon]), (theirs, peers)):
            model.zero_grad()
            model(x).square().sum().backward()
            for optimizer in optimizers:
                optimizer.step()
    moved = (hidden - before).norm()
    first, *rest = ours.parameters()
    assert (first - hidden).norm() < 0.03 * moved
    for a, b in zip(rest, others):
        torch.testing.assert_close(a, b, atol=2e-3, rtol=2e-3)


def test_muon_flattens_convolutions_and_leaves_the_rest_to_adamw() -> None:
    convolution = nn.Conv2d(3, 8, 3)
    model = nn.Sequential(convolution, nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8, 8))
    muon = Muon(model, 0.01, 0.0)
    before = convolution.weight.detach().clone()
    x = torch.randn(64, 3, 3, 3, generator=torch.Generator().manual_seed(0))
    model(x).exp().sum().backward()
    muon.step()
    assert [tuple(p.shape) for p in muon.hidden] == [(8, 3, 3, 3)]
    update = (before - convolution.weight.detach()).flatten(1) / (0.01 * 0.2 * 27**0.5)
    singular = torch.linalg.svdvals(update)
    assert singular.min() > 0.6
    assert singular.max() < 1.3


def test_bema_is_an_ema_and_a_correction() -> None:
    p = nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([p], lr=1.0)
    bema = BEMA(optimizer, start=2)
    model = nn.Module()
    model.p = p
    for step in range(1, 6):
        p.grad = torch.full((1,), -float(step))  # the iterates are 1, 3, 6, 10, 15
        optimizer.step()
    ema = 3.0
    for since, iterate in ((1, 6.0), (2, 10.0), (3, 15.0)):
        ema += (10 + since) ** -0.5 * (iterate - ema)
    with bema.applied(model):
        assert p.item() == pytest.approx(ema + 13**-0.2 * (15 - 3))
    assert p.item() == 15


def test_schedule_free_point_restores_the_weights_bit_for_bit() -> None:
    model = nn.Linear(3, 2)
    optimizer = methods.build("schedule-free-adamw", model, Knobs(0.1, 0.0), 100)
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.ones(4, 3)).square().sum().backward()
        optimizer.step()
    before = model.weight.detach().clone()
    with methods.own_point("schedule-free-adamw", optimizer).applied(model):
        assert not torch.equal(model.weight, before)
    assert torch.equal(model.weight, before)


def test_other_updates_of_padamw_differ_in_one_setting_only() -> None:
    model = torch.nn.Linear(2, 1)
    usual, *others = (
        methods.build(base, model, Knobs(0.3, 1e-3), 100).param_groups[0]
        for base in ("padamw", *methods.FORMS)
    )
    changed = [
        {name: group[name] for name in group if name != "params" and group[name] != usual[name]}
        for group in others
    ]
    assert changed == [{"amsgrad": True}, {"form": "paper"}]
