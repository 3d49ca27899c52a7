"""Plans, weightings and triggers, each compared with a simple model."""

from __future__ import annotations

import math
import pickle
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import gadam
from contract import parameters, train
from oracle import ema, mean, sampled_steps, window


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: gadam.Averaging(start=-1), "Invalid start: -1"),
        (lambda: gadam.Averaging(start=6e4), "Invalid start: 60000.0"),  # type: ignore[arg-type]
        (lambda: gadam.Averaging(start=True), "Invalid start: True"),
        (lambda: gadam.Averaging(start="plateau"), "Invalid start: 'plateau'"),  # type: ignore[arg-type]
        (lambda: gadam.Averaging(every=0), "Invalid every: 0"),
        (lambda: gadam.Averaging(every=1.5), "Invalid every: 1.5"),  # type: ignore[arg-type]
        (lambda: gadam.Averaging(weighting="ema"), "Invalid weighting: 'ema'"),  # type: ignore[arg-type]
        (lambda: gadam.Averaging(dtype=torch.int32), "Invalid dtype: torch.int32"),
        (lambda: gadam.EMA(1.0), "Invalid decay: 1.0"),
        (lambda: gadam.EMA(0.0), "Invalid decay: 0.0"),
        (lambda: gadam.Window(0), "Invalid window size: 0"),
        (lambda: gadam.Plateau(patience=0), "Invalid patience: 0"),
        (lambda: gadam.Plateau(mode="up"), "Invalid mode: 'up'"),  # type: ignore[arg-type]
        (lambda: gadam.NonMonotone(interval=0), "Invalid interval: 0"),
    ],
)
def test_invalid_plans_are_rejected(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_a_plan_is_a_frozen_value():
    plan = gadam.Averaging(start=gadam.Plateau(3), every=None, weighting=gadam.EMA(0.9))
    assert plan == pickle.loads(pickle.dumps(plan))
    assert hash(plan) == hash(gadam.Averaging(gadam.Plateau(3), None, gadam.EMA(0.9)))
    with pytest.raises(AttributeError):
        plan.every = 2  # type: ignore[misc]


@given(
    start=st.integers(0, 15),
    every=st.integers(1, 5),
    total=st.integers(1, 20),
    weighting=st.one_of(
        st.just(gadam.Mean()),
        st.floats(0.01, 0.99).map(gadam.EMA),
        st.integers(1, 6).map(gadam.Window),
    ),
    iterates=st.lists(st.floats(-10, 10), min_size=20, max_size=20),
)
def test_samples_the_right_steps_with_the_right_weights(start, every, total, weighting, iterates):
    p = torch.nn.Parameter(torch.zeros(1, dtype=torch.float64))
    sgd = torch.optim.SGD([p], lr=1.0)
    average = gadam.IterateAverage(sgd, gadam.Averaging(start, every, weighting))
    for x in iterates[:total]:
        p.grad = p.detach() - x  # one step of SGD with lr = 1 ends at x
        sgd.step()
    samples = [iterates[t - 1] for t in sampled_steps(total, start, every)]
    assert average.count == len(samples)
    assert average.phase == ("averaging" if total >= max(start, 1) else "waiting")
    if not samples:
        return
    if isinstance(weighting, gadam.EMA):
        expected = ema(samples, weighting.decay)
    elif isinstance(weighting, gadam.Window):
        expected = window(samples, weighting.size)
    else:
        expected = mean(samples)
    with average.applied():
        assert p.item() == pytest.approx(expected, rel=1e-9, abs=1e-9)


@given(st.floats(1e-6, 1 - 1e-6), st.integers(1, 10_000))
def test_ema_weights_sum_to_one(decay, count):
    """The weights c_n and 1 - c_n reproduce ρ^(n-i) / Σρ^j."""
    weight = gadam.EMA(decay).weight(count)
    total = count if decay == 1 else (1 - decay**count) / (1 - decay)
    assert weight == pytest.approx(1 / total, rel=1e-6)
    assert gadam.EMA(decay).weight(1) == 1.0


# --------------------------------------------------------------------------------------- triggers

METRICS = st.lists(st.sampled_from([0.0, 1.0, 2.0, 3.0, 4.0, math.nan]), max_size=30)


def observe_all(trigger: Any, metrics: list[float]) -> list[str]:
    """Return the phase after each observation."""
    sgd = torch.optim.SGD(parameters(), lr=0.1)
    average = gadam.IterateAverage(sgd, gadam.Averaging(start=trigger))
    phases: list[str] = []
    for metric in metrics:
        stop = average.observe(metric)
        assert stop == (average.phase == "finished")
        phases.append(average.phase)
    return phases


@given(METRICS, st.integers(1, 4), st.sampled_from(["max", "min"]))
def test_plateau_equals_a_simple_model(metrics, patience, mode):
    sign = 1 if mode == "max" else -1
    expected, phase, history = [], "waiting", []
    for metric in metrics:
        if phase != "finished":
            history.append(sign * metric)
            # observations since the first best one
            ranked = [-math.inf if math.isnan(x) else x for x in history]
            best = max(ranked)
            since = len(ranked) - 1 - ranked.index(best) if best > -math.inf else len(ranked)
            if since >= patience:
                phase = "averaging" if phase == "waiting" else "finished"
                history = []
        expected.append(phase)
    assert observe_all(gadam.Plateau(patience, mode), metrics) == expected


@given(
    st.lists(st.sampled_from([1.0, 2.0, 3.0, 4.0]), max_size=30),
    st.integers(1, 6),
    st.sampled_from(["max", "min"]),
)
def test_non_monotone_equals_the_rule_of_nt_asgd(metrics, interval, mode):
    sign = 1 if mode == "min" else -1
    history: list[float] = []
    expected, phase = [], "waiting"
    for metric in metrics:
        loss = sign * metric
        if phase == "waiting" and len(history) > interval and loss > min(history[:-interval]):
            phase = "averaging"
        history.append(loss)
        expected.append(phase)
    assert observe_all(gadam.NonMonotone(interval, mode), metrics) == expected


def test_plateau_starts_samples_at_the_next_step_and_stops():
    params = parameters()
    optimizer = gadam.Gadam(params, average=gadam.Averaging(start=gadam.Plateau(2)))
    average = optimizer.average
    train(optimizer, params, 3)
    assert not average.observe(0.7)
    assert not average.observe(0.7)
    assert average.phase == "waiting"
    assert not average.observe(0.6)
    assert (average.phase, average.count) == ("averaging", 0)
    train(optimizer, params, 4, first=4)
    assert average.count == 4
    assert not average.observe(0.1)  # the old best is forgotten: 0.1 is a new best
    assert not average.observe(0.05)
    assert average.observe(0.1)
    assert average.phase == "finished"
    train(optimizer, params, 2, first=8)
    assert average.count == 4
    assert not average.update()
    assert average.count == 4
    assert average.observe(0.9)


def test_non_monotone_never_stops():
    phases = observe_all(gadam.NonMonotone(2), [5, 4, 3, 9, 9, 9, *[10] * 20])
    assert phases[-1] == "averaging"


def test_a_plan_without_trigger_ignores_metrics():
    sgd = torch.optim.SGD(parameters(), lr=0.1)
    average = gadam.IterateAverage(sgd, gadam.Averaging(start=3))
    assert not any(average.observe(0.0) for _ in range(50))
    assert average.phase == "waiting"
