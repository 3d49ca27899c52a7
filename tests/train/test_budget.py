"""Plans that fit into a time, and the pilot that measures what a run costs."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gadam.runs.recipe import Average, Data, Optimizer, Recipe, RecipeError, Schedule
from gadam.runs.record import EpochRecord
from gadam.train.budget import (
    PilotJob,
    Timing,
    duration_text,
    fit,
    parse_duration,
    pilot_recipe,
    steadied,
    timing_of,
    wall_seconds,
)
from gadam.train.search import Plan

METHODS = ("SGD", "SWA", "AdamW", "Gadam", "PadamW", "GadamX")


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("2h", 7200), ("90m", 5400), ("1h30m", 5400), ("45s", 45), ("1.5h", 5400), ("2H 5min", 7500)],
)
def test_durations(text, seconds):
    assert parse_duration(text) == seconds


@pytest.mark.parametrize("text", ["", "2", "h", "-1h", "0s", "30m2h", "two hours", "1e3s"])
def test_what_is_not_a_duration_is_refused(text):
    with pytest.raises(RecipeError, match="--budget takes a time such as 2h, 90m"):
        parse_duration(text)


@given(st.floats(0.1, 1e6))
def test_a_duration_is_rounded_up_by_at_most_a_few_minutes(seconds):
    text = duration_text(seconds).replace(" min", "m").replace(" h", "h").replace(" ", "")
    shown = parse_duration(text.removesuffix("s") + "s" if text.endswith("s") else text)
    assert seconds <= shown < seconds + (1.001 if seconds <= 60 else 360)


timings = st.builds(Timing, st.floats(0, 10), st.floats(0.01, 100), st.floats(0, 50))
plans = st.builds(Plan, st.integers(1, 16), st.integers(1, 60), st.integers(1, 4))


@given(plans, timings, st.integers(1, 9))
@settings(max_examples=40, deadline=None)
def test_the_wall_time_of_equal_methods(plan, timing, workers):
    cost = dict.fromkeys(METHODS, timing)
    alone = wall_seconds(plan, cost, 1)
    finals = plan.seeds * min(11, plan.epochs)
    each = plan.runs * timing.setup + plan.total_epochs * timing.epoch
    each += (plan.runs - plan.seeds + finals) * timing.evaluation
    assert alone == pytest.approx(6 * each)
    several = wall_seconds(plan, cost, workers)
    assert alone / workers - 1e-6 <= several <= alone + 1e-6


@given(timings, st.floats(1, 1e6), st.integers(1, 8), st.integers(1, 100))
@settings(max_examples=25, deadline=None)
def test_a_plan_fits_or_is_the_smallest(timing, seconds, workers, epochs):
    cost = {"SGD": timing, "SWA": replace(timing, evaluation=2 * timing.evaluation)}
    plan, needed = fit(seconds, cost, workers, epochs=epochs)
    assert wall_seconds(plan, cost, workers) < needed
    least, least_needed = fit(0, cost, workers, epochs=epochs)
    assert (least.trials, least.seeds) == (4, 2)
    assert needed <= seconds or (plan, needed) == (least, least_needed)
    assert min(epochs, 4) <= plan.epochs <= epochs
    larger, _ = fit(2 * seconds, cost, workers, epochs=epochs)
    assert larger.total_epochs >= plan.total_epochs or larger.epochs > plan.epochs


def test_what_the_user_fixed_stays():
    cost = dict.fromkeys(METHODS, Timing(0.1, 1.0, 0.1))
    plan, _ = fit(3000, cost, 2, epochs=20, seeds=4)
    assert plan.seeds == 4
    plan, _ = fit(3000, cost, 2, epochs=20, trials=7)
    assert plan.trials == 7
    assert plan.epochs == 20


def test_an_endless_pilot_fits_nothing():
    cost = dict.fromkeys(METHODS, Timing(3.0, math.inf, math.inf))
    assert fit(1e9, cost, 2, epochs=20)[1] == math.inf


# --------------------------------------------------------------------------------------- the pilot

RECIPE = Recipe(
    "r",
    "logistic",
    data=Data("fashion-mini", validation=100, examples=600, size=7, augment=False),
    optimizer=Optimizer("adamw", 1e-2, 0.1),
    schedule=Schedule("linear-ia"),
    average=Average(10),
    epochs=20,
)


def test_a_pilot_evaluates_every_point_of_two_epochs():
    short = pilot_recipe(RECIPE)
    assert (short.epochs, short.evaluate_every) == (2, 1)
    assert short.average == Average(0)
    assert pilot_recipe(replace(RECIPE, average=None, schedule=Schedule("cosine"))).average is None


def test_a_pilot_times_a_recipe(tmp_path):
    job = PilotJob("Gadam", pilot_recipe(RECIPE), tmp_path / "pilot", limit=600)
    found = job.run(lambda *_: None, print, lambda: False)
    assert 0 < found.epoch < found.run(2, 1) < 600
    assert found.evaluation > 0
    assert found.began > 0
    assert set(found.to_dict()) == {"setup", "epoch", "evaluation"}
    assert "s per epoch" in job.outcome(found)
    stopped = PilotJob("Gadam", pilot_recipe(RECIPE), tmp_path / "stopped", limit=0)
    assert stopped.run(lambda *_: None, print, lambda: False).epoch == math.inf


def test_a_stopped_pilot_extrapolates():
    marks = [(0.1, 3.0), (0.2, 4.0), (0.3, 5.0)]
    found = timing_of(marks, [], 5.5)
    assert (found.setup, found.epoch, found.evaluation) == pytest.approx((2.0, 10.0, 15.0))
    record = EpochRecord(1, 0.1, 1.0, seconds={"train": 4.0, "refresh": 1.0, "evaluate": 2.0})
    whole = timing_of([(1.0, 8.0), (2.0, 15.0)], [record, record], 15.5)
    assert whole == Timing(1.5, 4.0, 3.0)


def test_noise_of_a_few_pilots_does_not_decide():
    slow_start = {m: Timing(9.0 if m == "SGD" else 1.0, 2.0, 3.0) for m in METHODS}
    assert set(steadied(slow_start).values()) == {Timing(1.0, 2.0, 3.0)}
    lucky = slow_start | {"Gadam": Timing(1.0, 0.1, 0.1), "GadamX": Timing(1.0, 5.0, 6.0)}
    found = steadied(lucky)
    assert found["Gadam"] == found["SGD"] == Timing(1.0, 2.0, 3.0)
    assert found["GadamX"] == Timing(1.0, 5.0, 6.0)
