"""The paper's schedules: values, continuity, and resuming."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gadam import schedule


def optimizer(lr: float | torch.Tensor = 0.1) -> torch.optim.Optimizer:
    return torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=lr)


def test_linear_has_the_papers_values():
    """The budget is T = 300 and the last factor r = 0.01."""
    values = {0: 1.0, 150: 1.0, 210: 0.505, 270: 0.01, 299: 0.01}
    for t, factor in values.items():
        assert schedule.linear(t, 300) == pytest.approx(factor)


def test_linear_for_averaging_has_the_papers_values():
    """With T_avg = 161, the full rate lasts until 80.5, and half of it starts at 144.9."""
    values = {0: 1.0, 80: 1.0, 112.7: 0.75, 145: 0.5, 161: 0.5, 299: 0.5}
    for t, factor in values.items():
        assert schedule.linear_for_averaging(t, 161) == pytest.approx(factor)


def test_step_has_the_papers_values():
    assert [schedule.step(t, (150, 250)) for t in (0, 149, 150, 249, 250, 299)] == pytest.approx(
        [1, 1, 0.1, 0.1, 0.01, 0.01]
    )
    assert schedule.step(60, [60, 30]) == pytest.approx(0.01)


def test_frozen_linear_has_the_papers_values():
    """WRN-28-10 trains for 50 epochs and freezes the rate when averaging starts, at 30."""
    frozen = schedule.linear(30, 50)
    assert 0.01 < frozen < 1
    assert [schedule.frozen_linear(t, 50, 30) for t in (0, 25, 30, 40, 49)] == pytest.approx(
        [1, 1, frozen, frozen, frozen]
    )


@given(st.floats(0, 400), st.floats(1, 300), st.floats(0.0, 1.0))
def test_linear_is_continuous_and_decreasing(t, total, final):
    step = 1e-6 * total
    here, there = schedule.linear(t, total, final), schedule.linear(t + step, total, final)
    assert final - 1e-12 <= there <= here + 1e-12 <= 1 + 1e-11
    assert here - there <= 1e-5


SCHEDULERS: dict[str, Any] = {
    "constant": lambda o: schedule.Constant(o),
    "linear": lambda o: schedule.Linear(o, 20),
    "linear for averaging": lambda o: schedule.LinearForAveraging(o, 12),
    "step": lambda o: schedule.Step(o, [5, 9]),
    "frozen linear": lambda o: schedule.FrozenLinear(o, 20, 13),
}
FUNCTIONS: dict[str, Any] = {
    "constant": schedule.constant,
    "linear": lambda t: schedule.linear(t, 20),
    "linear for averaging": lambda t: schedule.linear_for_averaging(t, 12),
    "step": lambda t: schedule.step(t, [5, 9]),
    "frozen linear": lambda t: schedule.frozen_linear(t, 20, 13),
}


@pytest.mark.parametrize("name", SCHEDULERS)
def test_a_scheduler_equals_its_function(name):
    sgd = optimizer()
    sgd.add_param_group({"params": [torch.nn.Parameter(torch.zeros(1))], "lr": 0.02})
    scheduler = SCHEDULERS[name](sgd)
    for t in range(20):
        factor = FUNCTIONS[name](t)
        assert [g["lr"] for g in sgd.param_groups] == pytest.approx([0.1 * factor, 0.02 * factor])
        assert scheduler.get_last_lr() == pytest.approx([0.1 * factor, 0.02 * factor])
        sgd.step()
        scheduler.step()


@pytest.mark.parametrize("name", SCHEDULERS)
def test_a_scheduler_resumes(name):
    def run(sgd: torch.optim.Optimizer, scheduler: Any, steps: int) -> list[float]:
        rates = []
        for _ in range(steps):
            rates.append(sgd.param_groups[0]["lr"])
            sgd.step()
            scheduler.step()
        return rates

    sgd = optimizer()
    scheduler = SCHEDULERS[name](sgd)
    run(sgd, scheduler, 8)
    file = io.BytesIO()
    torch.save({"optimizer": sgd.state_dict(), "scheduler": scheduler.state_dict()}, file)
    expected = run(sgd, scheduler, 10)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    fresh = optimizer()
    resumed = SCHEDULERS[name](fresh)
    fresh.load_state_dict(saved["optimizer"])
    resumed.load_state_dict(saved["scheduler"])
    assert run(fresh, resumed, 10) == expected


def test_a_tensor_lr_stays_a_tensor():
    sgd = optimizer(torch.tensor(0.1))
    scheduler = schedule.Step(sgd, [1])
    sgd.step()
    scheduler.step()
    assert torch.is_tensor(sgd.param_groups[0]["lr"])
    assert sgd.param_groups[0]["lr"].item() == pytest.approx(0.01)


def test_invalid_arguments_are_rejected_immediately():
    sgd = optimizer()
    before = copy.deepcopy(sgd.state_dict())
    with pytest.raises(ValueError, match="Invalid total: 0"):
        schedule.Linear(sgd, 0)
    with pytest.raises(ValueError, match="Invalid start: -1"):
        schedule.LinearForAveraging(sgd, -1)
    assert sgd.state_dict() == before
