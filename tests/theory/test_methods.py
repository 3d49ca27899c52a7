"""Tests of tuned methods: against brute force, closed forms and simulations."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

from gadam import theory
from gadam.theory.methods import SCHEDULES

MODEL = theory.Quadratic(
    theory.power_law(20, exponent=1.0), noise=theory.power_law(20).eigenvalues, start=1.0
)


def brute_force(steps: int, method: theory.Method) -> float:
    """Return the lowest loss over a fine grid of rates, and of starts or decays."""
    rates = np.geomspace(1e-3, 1.96, 40) / MODEL.spectrum.eigenvalues.max()
    if method == "average":
        return min(
            theory.average(MODEL, theory.Segment(steps, rate), first).loss
            for rate, first in product(rates, range(1, steps + 1, max(1, steps // 20)))
        )
    if method == "ema":
        return min(
            theory.ema(MODEL, theory.Segment(steps, rate), decay).loss
            for rate, decay in product(rates, 1 - np.geomspace(0.9, 0.5 / steps, 20))
        )
    return min(
        theory.last_iterate(MODEL, theory.scheduled(method, steps, rate)).loss for rate in rates
    )


@pytest.mark.parametrize("method", theory.METHODS)
@pytest.mark.parametrize("steps", [40, 400])
def test_tuned_methods_are_as_good_as_brute_force(method, steps):
    tuned = theory.tune(MODEL, steps, method)
    assert tuned.loss <= 1.003 * brute_force(steps, method)
    assert 0 < tuned.rate < MODEL.stable_below()
    assert (tuned.first is None, tuned.decay is None) == (method != "average", method != "ema")


@pytest.mark.parametrize("method", theory.METHODS)
def test_the_simulation_of_a_tuned_method_agrees(method):
    tuned = theory.tune(MODEL, 300, method)
    replicas = 400
    result = theory.simulate(
        MODEL,
        tuned.segments(),
        replicas=replicas,
        first=tuned.first or 1,
        decay=tuned.decay,
        record=[300],
        seed=5,
    )
    losses = result.loss[method if method in ("average", "ema") else "last"][0]
    error = losses.std(ddof=1) / np.sqrt(replicas)
    assert abs(losses.mean() - tuned.loss) < 4 * error


def test_one_direction_has_a_closed_form():
    """With one step, the loss is ½λ((1 − αλ)² + α²s²), which is lowest at α = λ/(λ² + s²)."""
    model = theory.Quadratic(theory.Spectrum([2.0]), noise=3.0, start=1.0)
    tuned = theory.tune(model, 1, "constant")
    assert tuned.rate == pytest.approx(2 / 7, rel=0.02)
    assert tuned.loss == pytest.approx(3 / 7, rel=1e-3)
    larger = theory.tune(model, 1, "constant", batch_size=4.0)
    assert larger.loss == pytest.approx((3 / 4) / (4 + 3 / 4), rel=1e-3)


def test_long_averages_reach_the_noise_floor():
    """The loss of the best average approaches Tr Σ/(2n⟨λ⟩): P/2n for noise λ."""
    (tuned,) = theory.loss_by_budget(MODEL, [100_000], ["average"])["average"]
    assert tuned.loss == pytest.approx(20 / 2 / 100_000, rel=0.02)
    decayed = theory.tune(MODEL, 100_000, "linear")
    assert decayed.loss > 1.5 * tuned.loss
    assert decayed.rate < 0.2 * tuned.rate


def test_methods_use_momentum_and_preconditioners():
    spectrum = MODEL.spectrum
    model = theory.Quadratic(
        spectrum, MODEL.noise, momentum=0.9, dampening=0.9, preconditioner=spectrum.eigenvalues
    )
    tuned = theory.tune(model, 200, "average")
    assert tuned.rate < model.stable_below()
    assert tuned.loss < theory.tune(model, 200, "constant").loss


def test_schedules_cover_all_steps_and_end_at_zero():
    for name in SCHEDULES:
        segments = theory.scheduled(name, steps=103, rate=0.5, batch_size=3, pieces=20)
        assert sum(segment.steps for segment in segments) == 103
        assert {segment.batch_size for segment in segments} == {3}
        assert segments[0].rate == pytest.approx(0.5, rel=0.05)
        if name != "constant":
            assert segments[-1].rate < 0.07
    assert len(theory.scheduled(lambda done: 0.5, steps=3, rate=1.0)) == 3


def test_finer_pieces_change_little():
    rate = theory.tune(MODEL, 400, "cosine").rate
    coarse, fine = (
        theory.last_iterate(MODEL, theory.scheduled("cosine", 400, rate, pieces=pieces)).loss
        for pieces in (50, 400)
    )
    assert coarse == pytest.approx(fine, rel=0.01)


def test_starts():
    segment = theory.Segment(100, 0.5)
    first, last = theory.loss_by_start(MODEL, segment, [1, 100])
    assert first.loss == theory.average(MODEL, segment).loss
    assert last.loss == pytest.approx(theory.last_iterate(MODEL, segment).loss)


def test_batch_sizes_have_an_optimum_only_with_overhead():
    sizes = [1, 64, 2000]
    model = theory.Quadratic(MODEL.spectrum, 10 * MODEL.noise)
    free = theory.loss_by_batch_size(model, 4000, sizes, ["average"])["average"]
    losses = [tuned.loss for tuned in free]
    assert min(losses) >= 0.99 * losses[0]
    assert [tuned.steps for tuned in free] == [4000 // size for size in sizes]
    costly = theory.loss_by_batch_size(model, 4000, sizes, ["average"], overhead=8)["average"]
    best = int(np.argmin([tuned.loss for tuned in costly]))
    assert best == 1


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: theory.tune(MODEL, 10, "wsdd"), ValueError, "method must be one of"),  # type: ignore[arg-type]
        (lambda: theory.tune(MODEL, 0, "wsd"), ValueError, "at least 1"),
        (lambda: theory.tune(MODEL, (10, 0.1), "wsd"), TypeError, "an integer"),  # type: ignore[arg-type]
        (lambda: theory.tune(MODEL, 10, "wsd", 0), ValueError, "batch_size must be positive"),
        (
            lambda: theory.tune(theory.Quadratic(theory.Spectrum([0.0])), 10, "wsd"),
            ValueError,
            "no curvature",
        ),
        (lambda: theory.scheduled("square", 10, 0.1), ValueError, "schedule must be one of"),
        (lambda: theory.scheduled("linear", 0, 0.1), ValueError, "at least 1"),
        (lambda: theory.loss_by_start(MODEL, theory.Segment(9, 0.1), [10]), ValueError, "sampled"),
        (lambda: theory.loss_by_batch_size(MODEL, 10, [20]), ValueError, "must suffice"),
        (lambda: theory.loss_by_batch_size(MODEL, 10, [1], overhead=-1), ValueError, "overhead"),
    ],
)
def test_invalid_arguments_raise(make, error, message):
    with pytest.raises(error, match=message):
        make()
