"""The health of an average: what is measured, and what is called broken."""

from __future__ import annotations

import copy
import math
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor

import gadam
from contract import parameters, train
from gadam.average.health import Health, measure


def of(weights: list[Tensor], averages: list[Tensor], weight: float = 0.5) -> Health:
    values = dict(zip(weights, averages))
    return measure(weights, lambda p: p, lambda p: values[p], weight, samples=3, skipped=1)


def test_distance_is_relative_to_the_norm_of_the_weights():
    weights = [torch.tensor([3.0, 0.0]), torch.tensor([[4.0]])]
    averages = [torch.tensor([3.0, 1.0]), torch.tensor([[6.0]])]
    health = of(weights, averages)
    assert health.distance == pytest.approx(math.sqrt(5) / 5)
    assert (health.samples, health.skipped, health.moving, health.moves) == (3, 1, 1.0, True)
    assert (health.finite, health.weights_finite, health.problems) == (True, True, ())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64, torch.complex64])
def test_all_types_are_measured(dtype):
    weights, average = torch.full((4,), 2.0, dtype=dtype), torch.full((4,), 1.0, dtype=dtype)
    assert of([weights], [average]).distance == pytest.approx(0.5)
    # Norms of half-precision weights do not overflow.
    big = torch.full((1000,), 6e4, dtype=dtype)
    assert of([big], [big]).distance == 0.0


def test_moving_counts_the_entries_that_the_next_sample_changes():
    weights = torch.tensor([1.0, 1.0 + 2**-7, 2.0, 0.0], dtype=torch.bfloat16)
    average = torch.tensor([1.0, 1.0, 1.0, 0.0], dtype=torch.bfloat16)
    health = of([weights], [average], weight=0.1)
    assert health.moving == 0.5  # of two entries that differ, one is too close
    assert of([average], [average]).moving == 1.0  # nothing to do is not frozen


def test_moving_is_measured_evenly_in_large_parameters():
    weights = torch.zeros(4, 100_000).t()  # not contiguous
    weights[:50_000] = 1.0
    weights[50_000:] = 2**-20
    health = of([weights], [torch.ones_like(weights)], weight=2**-30)
    assert health.moving == 0.0
    health = of([weights], [torch.where(weights == 1, 1.0, 2**-12)], weight=0.5)
    assert health.moving == 1.0
    health = of([weights], [torch.where(weights == 1, 1 + 2**-23, 0.0)], weight=0.25)
    assert health.moving == pytest.approx(0.5, abs=0.01)


def test_empty_and_zero_weights_are_measured():
    assert of([torch.zeros(0)], [torch.zeros(0)]).distance == 0.0
    assert of([torch.zeros(2)], [torch.zeros(2)]).distance == 0.0
    assert of([torch.zeros(2)], [torch.ones(2)]).distance == math.inf
    assert of([], []).problems == ()


def test_what_is_broken_is_named():
    one = torch.ones(8)
    assert "is far from the weights" in of([one], [12 * one]).problems[0]
    assert of([one], [-8.9 * one]).problems == ()  # within 10 norms
    assert "The average is not finite" in of([one], [one * math.nan]).problems[0]
    assert "training has diverged" in of([one * math.inf], [one]).problems[0]
    frozen = of([1.1 * one.bfloat16()], [one.bfloat16()], weight=1e-4)
    assert not frozen.moves
    assert "stands still" in frozen.problems[0]
    # An average next to the weights may stand still: nothing is lost.
    assert of([one + 2**-15], [one], weight=1e-4).problems == ()
    assert Health(90, 10, 0.1, 1.0, True, True).problems == ()
    assert "10 of 99 samples were not finite" in Health(89, 10, 0.1, 1.0, True, True).problems[0]
    assert Health(0, 9, math.nan, math.nan, True, True).problems == ()
    assert "12 of 12 samples" in Health(0, 12, math.nan, math.nan, True, True).problems[0]


# --------------------------------------------------------------------------------- in an optimizer


def averaged(steps: int = 5, **plan: Any) -> tuple[list[Any], gadam.IterateAverage]:
    params = parameters()
    optimizer = gadam.Gadam(params, lr=0.01, average=gadam.Averaging(start=1, **plan))
    train(optimizer, params, steps)
    return params, optimizer.average


def test_health_of_a_running_average():
    params, average = averaged()
    health = average.health()
    with torch.no_grad():
        weights = torch.cat([p.detach().flatten() for p in params])
        with average.applied():
            mean = torch.cat([p.detach().flatten() for p in params])
            assert average.health() == health  # of the raw weights, also while applied
    assert health.distance == pytest.approx(((mean - weights).norm() / weights.norm()).item())
    assert (health.samples, health.skipped, health.moves, health.problems) == (5, 0, True, ())


def test_health_without_a_sample_says_nothing_is_wrong():
    average = gadam.Gadam(parameters(), average=gadam.Averaging(start=10)).average
    health = average.health()
    assert math.isnan(health.distance)
    assert (health.samples, health.problems) == (0, ())


def test_measuring_health_changes_nothing():
    params, average = averaged()
    other, twin = averaged()
    for step in range(6, 10):
        average.health()
        train(average.optimizer, params, 1, first=step)
        train(twin.optimizer, other, 1, first=step)
    for p, q in zip(params, other):
        state, same = average.optimizer.state[p], twin.optimizer.state[q]
        assert torch.equal(state["average"], same["average"])


@pytest.mark.parametrize("read", ["applied", "copy_to"])
def test_a_diverged_average_is_noticed_once(read):
    _, average = averaged()
    for state in average.optimizer.state.values():
        state["average"].mul_(1000)

    def use() -> None:
        if read == "applied":
            with average.applied():
                pass
        else:
            average.copy_to()

    with pytest.warns(UserWarning, match="The average is far from the weights"):
        use()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        use()


def test_a_frozen_average_is_noticed():
    """A bfloat16 EMA with decay 0.9999 does not move at all."""
    weighting = gadam.EMA(0.9999)
    plan = gadam.Averaging(start=1, weighting=weighting, dtype=torch.bfloat16)
    p = torch.nn.Parameter(torch.ones(64))
    sgd = torch.optim.SGD([p], lr=1.0)
    average = gadam.IterateAverage(sgd, plan)
    p.grad = torch.zeros_like(p)
    sgd.step()
    state = copy.deepcopy(average.state_dict())
    state["progress"][3] = 20_000  # as if many samples had been taken
    average.load_state_dict(state)
    assert average.count == 20_000
    for _ in range(20):
        p.grad = torch.full_like(p, -0.05)
        sgd.step()
    health = average.health()
    assert not health.moves
    assert health.distance > 0.1
    with pytest.warns(UserWarning, match="stands still.*wider dtype"):
        with average.applied():
            assert torch.equal(p.detach(), torch.ones(64))
    # The default type moves.
    average.remove()
    wide = gadam.IterateAverage(sgd, gadam.Averaging(start=1, weighting=weighting))
    wide.load_state_dict(state)
    assert wide.health().moves


def test_many_samples_that_are_not_finite_are_noticed():
    params, average = averaged(20)
    raw = [p.detach().clone() for p in params]
    for _ in range(12):
        with torch.no_grad():
            params[0][0] = math.nan
        assert not average.update()
    with torch.no_grad():
        for p, value in zip(params, raw):
            p.copy_(value)
    assert average.health().skipped == 12
    with pytest.warns(UserWarning, match="12 of 32 samples were not finite"):
        average.copy_to()


def test_weights_that_are_not_finite_are_told_from_a_broken_average():
    params, average = averaged()
    with torch.no_grad():
        params[0][0] = math.inf
    health = average.health()
    assert (health.finite, health.weights_finite) == (True, False)
    with pytest.warns(UserWarning, match="training has diverged. The average holds the 5 samples"):
        with average.applied():
            pass


def test_a_step_never_measures_health(monkeypatch):
    def fail(*_: object, **__: object) -> None:
        raise AssertionError("measured")

    monkeypatch.setattr("gadam.average.iterate.measure", fail)
    _, average = averaged()
    assert average.count == 5
    average.state_dict()
    with pytest.raises(AssertionError, match="measured"):
        average.health()
