"""Plans, weightings and triggers, each compared with a simple model."""

from __future__ import annotations

import math
import pickle
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import gadam
from contract import parameters, train
from oracle import ema, linear_decay, mean, power_ema, sampled_steps, window


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
        (lambda: gadam.Averaging(dtype="float32"), "Invalid dtype: 'float32'"),  # type: ignore[arg-type]
        (lambda: gadam.EMA("0.9"), "Invalid decay: '0.9'"),  # type: ignore[arg-type]
        (lambda: gadam.PowerEMA(None), "Invalid sigma_rel: None"),  # type: ignore[arg-type]
        (lambda: gadam.EMA(1.0), "Invalid decay: 1.0"),
        (lambda: gadam.EMA(0.0), "Invalid decay: 0.0"),
        (lambda: gadam.Window(0), "Invalid window size: 0"),
        (lambda: gadam.PowerEMA(0.0), "Invalid sigma_rel: 0.0"),
        (lambda: gadam.PowerEMA(0.29), "Invalid sigma_rel: 0.29"),
        (lambda: gadam.EMA.with_half_life(0), "Invalid half-life: 0"),
        (lambda: gadam.EMA.with_half_life(math.inf), "Invalid half-life: inf"),
        (lambda: gadam.PowerEMA.from_gamma(-0.5), "Invalid gamma: -0.5"),
        (lambda: gadam.PowerEMA.from_gamma(math.inf), "Invalid gamma: inf"),
        (lambda: gadam.Averaging(weighting=gadam.EMA(0.99)), "sets weighting but does not say"),
        (lambda: gadam.Averaging(every=100), "sets every but does not say when to start"),
        (lambda: gadam.Averaging(dtype=torch.float64), "sets dtype but does not say"),
        (lambda: gadam.Averaging(device="cpu"), "sets device but does not say"),
        (lambda: gadam.Averaging(start=1, overlap=True), "Pass device='cpu'"),
        (lambda: gadam.Averaging(start=1, device="cuda", overlap=True), "Pass device='cpu'"),
        (lambda: gadam.Averaging.for_budget(0), "Invalid steps: 0"),
        (lambda: gadam.Averaging.for_budget(1.5), "Invalid steps: 1.5"),  # type: ignore[arg-type]
        (lambda: gadam.Averaging.for_budget(10, every=11), "Invalid every: 11"),
        (lambda: gadam.Averaging.for_budget(10, every=0), "Invalid every: 0"),
        (lambda: gadam.Averaging.for_budget(10, last=0.0), "Invalid last: 0.0"),
        (lambda: gadam.Averaging.for_budget(10, last=25), "Invalid last: 25"),
        (lambda: gadam.Averaging.for_budget(10, last="half"), "Invalid last: 'half'"),  # type: ignore[arg-type]
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
    power = gadam.PowerEMA(0.05)
    assert power.gamma > 0  # cached, but not part of the value
    assert power == pickle.loads(pickle.dumps(power)) == gadam.PowerEMA(0.05)
    assert hash(power) == hash(gadam.PowerEMA(0.05))


def test_a_plan_may_omit_start_only_if_it_cannot_be_meant_to_start():
    """It waits for begin() or update(): on its own, with start=None, or with every=None."""
    waiting = gadam.Averaging()
    assert waiting.start is None
    assert waiting == gadam.Averaging(start=None)
    assert gadam.Averaging(start=None, weighting=gadam.EMA(0.99)).first_step is None
    assert gadam.Averaging(every=None, weighting=gadam.EMA(0.99)).first_step is None
    # A copy of a plan that waits is another plan that waits.
    assert replace(waiting, every=2) == gadam.Averaging(start=None, every=2)
    assert "omitted" not in repr(waiting)


@given(
    st.integers(1, 10**7),
    st.one_of(st.none(), st.integers(1, 10**4)),
    st.sampled_from([0.01, 0.1, 0.25, 0.3, 0.5, 0.75, 1.0]),
)
def test_the_plan_of_a_budget_samples_its_last_part(steps, every, last):
    if every is not None and every > steps:
        every = steps
    plan = gadam.Averaging.for_budget(steps, every, last=last)
    assert isinstance(plan.start, int)
    assert plan.every is not None
    assert plan.start % plan.every == 0  # samples fall on the ends of epochs
    assert plan.every <= plan.start <= steps  # at least one sample
    first = steps - max(steps * last, 1)
    assert plan.start < first + plan.every + 1  # not later than it must be
    if steps // plan.every * plan.every >= first:
        assert plan.start >= first - 1e-6  # not earlier either, if the run has a sample there
    if every is None:
        samples = (steps - plan.start) // plan.every + 1
        assert plan.every == 1 if steps * last < 300 else 149 <= samples <= 301


def test_the_plan_of_a_budget_is_the_last_quarter_or_the_papers_half():
    """One sample per epoch from the middle of 300, 200 and 50 epochs."""
    for epochs, start, per_epoch in ((300, 150, 391), (200, 100, 663), (50, 25, 10_010)):
        plan = gadam.Averaging.for_budget(epochs * per_epoch, every=per_epoch, last=0.5)
        assert plan == gadam.Averaging(start * per_epoch, per_epoch)
    assert gadam.Averaging.for_budget(300 * 391, last=0.5) == gadam.Averaging(150 * 391, 391)
    assert gadam.Averaging.for_budget(300 * 391, every=391) == gadam.Averaging(225 * 391, 391)
    assert gadam.Averaging.for_budget(1000) == gadam.Averaging(750, 1)
    options = {"weighting": gadam.LinearDecay(), "dtype": torch.float64, "device": "cpu"}
    plan = gadam.Averaging.for_budget(100, overlap=True, **options)  # type: ignore[arg-type]
    assert plan == gadam.Averaging(75, 1, overlap=True, **options)  # type: ignore[arg-type]


RECURSIVE = st.one_of(
    st.just(gadam.Mean()),
    st.floats(0.01, 0.99).map(gadam.EMA),
    st.floats(0.02, 0.288).map(gadam.PowerEMA),
    st.floats(0.0, 30.0).map(gadam.PowerEMA.from_gamma),
    st.just(gadam.LinearDecay()),
)
WEIGHTINGS = st.one_of(RECURSIVE, st.integers(1, 6).map(gadam.Window))


def expected_average(weighting: Any, samples: list[float]) -> float:
    """Return the explicit weighted sum."""
    if isinstance(weighting, gadam.EMA):
        return ema(samples, weighting.decay)
    if isinstance(weighting, gadam.Window):
        return window(samples, weighting.size)
    if isinstance(weighting, gadam.PowerEMA):
        return power_ema(samples, weighting.gamma)
    if isinstance(weighting, gadam.LinearDecay):
        return linear_decay(samples)
    return mean(samples)


@pytest.mark.filterwarnings("ignore:The average is far")  # iterates that training never takes
@given(
    start=st.integers(0, 15),
    every=st.integers(1, 5),
    total=st.integers(1, 20),
    weighting=WEIGHTINGS,
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
    with average.applied():
        assert p.item() == pytest.approx(expected_average(weighting, samples), rel=1e-9, abs=1e-9)


@given(st.floats(1e-6, 1 - 1e-6), st.integers(1, 10_000))
def test_ema_weights_sum_to_one(decay, count):
    """The weights c_n and 1 - c_n reproduce ρ^(n-i) / Σρ^j."""
    weight = gadam.EMA(decay).weight(count)
    total = count if decay == 1 else (1 - decay**count) / (1 - decay)
    assert weight == pytest.approx(1 / total, rel=1e-6)
    assert gadam.EMA(decay).weight(1) == 1.0


@given(RECURSIVE, st.lists(st.floats(-1e3, 1e3), min_size=1, max_size=200))
def test_the_recursion_equals_the_explicit_weighted_sum(weighting, samples):
    average = 0.0
    for n, sample in enumerate(samples, 1):
        weight = weighting.weight(n)
        assert 0 < weight <= 1
        assert weighting.weight(1) == 1.0
        average += weight * (sample - average)
    expected = expected_average(weighting, samples)
    assert average == pytest.approx(expected, rel=1e-9, abs=1e-9)


@given(WEIGHTINGS, st.integers(1, 10**6))
def test_a_count_on_a_device_has_the_same_weight(weighting, count):
    """Without a host sync: the count of an accelerator's average lives on the accelerator."""
    host = weighting.weight(count)
    assert isinstance(host, float)
    for dtype in (torch.float64, torch.int64, torch.float32):
        weight = weighting.weight(torch.tensor(count, dtype=dtype))
        assert isinstance(weight, torch.Tensor)
        assert weight.shape == ()
        assert weight.dtype == (torch.float32 if dtype == torch.float32 else torch.float64)
        rel = 1e-4 if dtype == torch.float32 else 1e-12
        assert weight.item() == pytest.approx(host, rel=rel)
    meta = weighting.weight(torch.tensor(count, dtype=torch.float32, device="meta"))
    assert meta.device.type == "meta"  # so nothing read the value


def test_the_weight_of_a_fresh_average_is_exactly_one():
    for weighting in (gadam.Mean(), gadam.EMA(), gadam.PowerEMA(), gadam.LinearDecay()):
        assert weighting.weight(torch.tensor(1.0)).item() == 1.0
        assert weighting.weight(1) == 1.0


@given(st.floats(0.5, 1e6))
def test_the_weights_of_an_ema_halve_in_its_half_life(samples):
    assert gadam.EMA.with_half_life(samples).decay ** samples == pytest.approx(0.5, rel=1e-9)


@given(st.floats(0.0, 1e4))
def test_sigma_rel_and_gamma_convert_into_each_other(gamma):
    weighting = gadam.PowerEMA.from_gamma(gamma)
    variance = (gamma + 1) / ((gamma + 2) ** 2 * (gamma + 3))
    assert weighting.sigma_rel == pytest.approx(math.sqrt(variance), rel=1e-12)
    assert weighting.gamma == pytest.approx(gamma, rel=1e-11, abs=1e-14)


def test_power_ema_has_the_values_and_limits_of_its_paper():
    """EDM2 names σ_rel = 0.05 and 0.10 for γ = 16.97 and 6.94."""
    assert gadam.PowerEMA(0.05).gamma == pytest.approx(16.97, abs=0.005)
    assert gadam.PowerEMA(0.10).gamma == pytest.approx(6.94, abs=0.005)
    uniform = gadam.PowerEMA(1 / math.sqrt(12))
    assert uniform.gamma == pytest.approx(0, abs=1e-14)
    assert uniform.weight(7) == pytest.approx(gadam.Mean().weight(7))


def test_power_ema_has_the_stated_width_and_forgets_at_its_relative_pace():
    """On a weight that ramps from 0 to 1, with every step or every hundredth sampled."""
    weighting = gadam.PowerEMA(0.1)
    gamma = weighting.gamma
    for samples in (200, 20_000):
        ramp = square = 0.0
        for n in range(1, samples + 1):
            weight, x = weighting.weight(n), n / samples
            ramp += weight * (x - ramp)
            square += weight * (x * x - square)
        assert ramp == pytest.approx((gamma + 1) / (gamma + 2), abs=1 / samples)  # 0.888
        assert math.sqrt(square - ramp**2) == pytest.approx(0.1, abs=1 / samples)


@given(st.integers(1, 40), st.lists(st.floats(-1, 1), min_size=40, max_size=40))
def test_averages_emulate_learning_rate_decay(n, updates):
    """The mean of n checkpoints scales update j by (n - j + 1) / n; linear decay, see its doc."""
    iterates = [math.fsum(updates[: i + 1]) for i in range(n)]
    j = range(1, n + 1)
    decayed = math.fsum((n - i + 1) / n * updates[i - 1] for i in j)
    assert mean(iterates) == pytest.approx(decayed, abs=1e-12)
    decayed = math.fsum((1 - i * (i - 1) / (n * (n + 1))) * updates[i - 1] for i in j)
    assert linear_decay(iterates) == pytest.approx(decayed, abs=1e-12)


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
