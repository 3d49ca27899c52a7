"""A step with an average does not wait for the device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import gadam
from contract import parameters, same, set_gradients, train
from gadam import _torch
from gadam._dtensor import finite_flag
from gadam.average import sampling


class Reads(TorchDispatchMode):
    """Count how often the host reads a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


def reads_of(optimizer: Any, params: list[nn.Parameter], steps: range) -> int:
    with Reads() as reads:
        for step in steps:
            set_gradients(params, step)
            optimizer.step()
    return reads.count


PLANS = [
    gadam.Averaging(start=1),
    gadam.Averaging(start=2, every=3),
    gadam.Averaging(start=1, weighting=gadam.EMA(0.9)),
    gadam.Averaging(start=1, weighting=gadam.PowerEMA(0.2)),
]


@pytest.mark.parametrize("plan", PLANS, ids=str)
@pytest.mark.parametrize("flags", [{"foreach": True}, {"foreach": False}], ids=str)
def test_a_sample_reads_nothing(plan, flags):
    """Compared with the same optimizer without an average."""
    counts = []
    for average in (None, plan):
        params = parameters(torch.float64)
        optimizer = gadam.GadamX(params, 0.05, average=average, **flags)
        counts.append(reads_of(optimizer, params, range(1, 11)))
    assert counts[1] == counts[0]
    assert optimizer.average.count == (3 if plan.every == 3 else 10)


@pytest.mark.parametrize("plan", PLANS, ids=str)
@pytest.mark.parametrize("make", [torch.optim.SGD, torch.optim.AdamW, torch.optim.Adagrad])
def test_a_sample_beside_a_torch_optimizer_reads_nothing(plan, make):
    counts = []
    for attach in (False, True):
        params = parameters()
        optimizer = make(params, lr=0.05)
        if attach:
            average = gadam.IterateAverage(optimizer, plan)
        counts.append(reads_of(optimizer, params, range(1, 11)))
    assert counts[1] == counts[0]
    assert average.count == (3 if plan.every == 3 else 10)


@pytest.mark.parametrize("plan", PLANS, ids=str)
@pytest.mark.parametrize("foreach", [False, True])
def test_a_capturable_step_reads_nothing_at_all(plan, foreach, monkeypatch):
    monkeypatch.setattr(_torch, "_get_capturable_supported_devices", lambda: ["cpu"])
    params = parameters()
    optimizer = gadam.Gadam(
        params, torch.tensor(0.05), capturable=True, foreach=foreach, average=plan
    )
    set_gradients(params, 1)
    optimizer.step()  # the first step reads the learning rate on the host: it may be a dry run
    assert reads_of(optimizer, params, range(2, 11)) == 0
    assert optimizer.average.count == (3 if plan.every == 3 else 10)


def test_samples_that_are_not_finite_are_counted_on_the_device():
    params = parameters()
    optimizer = gadam.GadamX(params, 0.05, foreach=True, average=gadam.Averaging(start=1))
    iterates = train(optimizer, params, 5)
    before = optimizer.average._value(params[0]).clone()
    with Reads() as reads:
        for p in params:
            p.grad.fill_(float("inf"))  # type: ignore[union-attr]
        optimizer.step()
        counters = optimizer.average._state.tracker.counters
        assert not counters.on_host
    assert reads.count == 2 * len(params)  # the update's own: a step count per correction
    same(optimizer.average._value(params[0]), before)
    assert (optimizer.average.count, optimizer.average.skipped) == (5, 1)
    progress = optimizer.average._progress
    assert (progress.first, progress.last, progress.steps) == (1, 5, 6)
    assert len(iterates) == 5


@pytest.mark.parametrize("plan", [*PLANS, gadam.Averaging(start=4, weighting=gadam.Window(2))])
def test_gradscalers_verdict_stays_on_the_device(plan, monkeypatch):
    """The same samples as if the host reads the verdict, without reading it."""
    results = []
    for on_host in (True, False):
        monkeypatch.setattr(_torch, "is_on_host", lambda _, on_host=on_host: on_host)
        params = parameters()
        adam = torch.optim.AdamW(params, lr=0.05, fused=True)
        average = gadam.IterateAverage(adam, plan)
        set_gradients(params, 1)
        adam.grad_scale = torch.tensor(1.0)  # type: ignore[attr-defined]
        with Reads() as reads:
            for step in range(1, 15):
                adam.found_inf = torch.tensor(float(step in (1, 4, 5, 9)))  # type: ignore[attr-defined]
                set_gradients(params, step)
                if step == 11:
                    params[0].grad[0, 0] = float("nan")  # type: ignore[index]
                if step == 12:
                    params[0].data.nan_to_num_()
                    adam.state[params[0]]["exp_avg"].nan_to_num_()
                    adam.state[params[0]]["exp_avg_sq"].nan_to_num_()
                adam.step()
        if not on_host and plan.weighting.copies == 1:
            assert reads.count == 0
        del adam.found_inf, adam.grad_scale  # type: ignore[attr-defined]
        results.append((average._progress, average.state_dict()))
        assert average._progress.steps == 10
    assert results[0][0] == results[1][0]
    torch.testing.assert_close(results[1][1], results[0][1], rtol=1e-6, atol=1e-7)


def test_a_model_on_two_devices(monkeypatch):
    """The meta device stands in for a second accelerator."""
    params = [nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3, device="meta"))]
    sgd = torch.optim.SGD(params, lr=0.1, foreach=False)
    plan = gadam.Averaging(start=1)
    average = gadam.IterateAverage(sgd, plan)
    # Values on the meta device do not exist: check only those on the other one.
    monkeypatch.setattr(
        sampling, "finite_flag", lambda ts: finite_flag([t for t in ts if not t.is_meta])
    )
    for p in params:
        p.grad = torch.ones_like(p)
    sgd.step()
    sgd.step()
    assert average.count == 2
    torch.testing.assert_close(average._value(params[0]), torch.full((3,), 0.85))
