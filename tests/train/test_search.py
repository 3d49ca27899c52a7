"""The search: equal budgets, edges that are extended, and trials that never see the test split."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gadam.runs.recipe import Average, Optimizer, Recipe, Schedule
from gadam.train.search import (
    AXES,
    CENTERS,
    REACH,
    STEP,
    Edge,
    Plan,
    Setting,
    Trial,
    due,
    recipe_of,
    tuned,
)

plans = st.builds(
    Plan, st.integers(1, 40), st.integers(1, 200), st.integers(1, 5), st.integers(0, 99)
)
centers = st.sampled_from([*CENTERS.values()])


def search(
    plan: Plan, center: Setting, score: Callable[[Trial], float]
) -> tuple[dict[Trial, float], list[list[Trial]]]:
    """Run a whole search. Return the scores, and the trials of each round."""
    scores: dict[Trial, float] = {}
    rounds = []
    while trials := due(plan, center, scores):
        assert not set(trials) & set(scores)
        rounds.append(trials)
        scores |= {trial: score(trial) for trial in trials}
    return scores, rounds


def bowl(lr: float, decay: float) -> Callable[[Trial], float]:
    """Return a score that is best at a setting. Its contours are ellipses in decades."""

    def score(trial: Trial) -> float:
        x = math.log10(trial.setting.lr / lr)
        y = math.log10(trial.setting.weight_decay / decay)
        return -(x**2) - 0.3 * y**2

    return score


def noise(trial: Trial) -> float:
    """Return a score without any structure, and sometimes a divergence."""
    value = hash((trial.number, trial.setting, trial.epochs)) % 1000
    return -math.inf if value < 200 else float(value)


# ------------------------------------------------------------------------------------------ budget


@given(plans, centers, st.sampled_from([noise, bowl(1e-9, 1e9), lambda trial: -math.inf]))
def test_every_search_costs_the_same(plan, center, score):
    scores, _ = search(plan, center, score)
    assert len(scores) + plan.seeds == plan.runs
    assert sum(t.epochs for t in scores) + plan.seeds * plan.epochs == plan.total_epochs
    assert {trial.number for trial in scores} == set(range(plan.trials))
    full = Counter(trial.epochs for trial in scores)[plan.epochs]
    assert full >= min(plan.trials, 1 + plan.trials - plan.sampled)


@given(plans)
def test_rungs_end_with_all_epochs_and_keep_a_third(plan):
    rungs = plan.rungs
    assert rungs[-1].epochs == plan.epochs
    assert rungs[0].trials == plan.sampled >= 1
    for before, after in pairwise(rungs):
        assert before.trials / 3 <= after.trials < before.trials / 3 + 1
        assert before.epochs >= 4
        assert after.epochs == pytest.approx(3 * before.epochs, rel=0.2)


@given(plans, centers)
def test_a_search_repeats_itself_and_resumes_anywhere(plan, center):
    scores, rounds = search(plan, center, noise)
    again, _ = search(plan, center, noise)
    assert list(scores) == list(again)
    # Killed after any prefix of the trials, it continues with the rest of the same round.
    order = [trial for one in rounds for trial in one]
    done = dict(list(scores.items())[: len(order) // 2])
    assert due(plan, center, done)[0] == order[len(done)]


@given(plans, centers)
def test_later_scores_do_not_change_earlier_trials(plan, center):
    scores, rounds = search(plan, center, noise)
    for one in rounds:  # as if only this round's files were lost
        kept = {trial: score for trial, score in scores.items() if trial not in one}
        assert set(due(plan, center, kept)) == set(one)


# ---------------------------------------------------------------------------------------- sampling


@given(plans, centers)
def test_samples_are_stratified_within_the_range(plan, center):
    first, *others = due(plan, center, {})
    assert first.setting == center
    for axis in AXES:
        offsets = sorted(
            math.log10(getattr(t.setting, axis) / getattr(center, axis)) for t in others
        )
        for i, offset in enumerate(offsets):
            low, high = (2 * REACH[axis] * (i + k) / len(others) - REACH[axis] for k in (0, 1))
            assert low - 0.003 <= offset <= high + 0.003  # three digits


def test_methods_with_the_same_base_try_the_same_settings():
    plan = Plan(12, 20, 3)
    assert due(plan, CENTERS["sgd"], {}) == due(plan, CENTERS["sgd"], {})
    other_seed = due(replace(plan, seed=1), CENTERS["sgd"], {})
    assert due(plan, CENTERS["sgd"], {})[1:] != other_seed[1:]


# ------------------------------------------------------------------------------------------- edges


@given(st.sampled_from([6, 9, 12, 24]), centers, st.floats(-1.6, 1.6), st.floats(-1.8, 1.8))
def test_an_optimum_outside_the_range_is_found_or_reported(trials, center, x, y):
    plan = Plan(trials, 20, 3)
    target = Setting(center.lr * 10**x, center.weight_decay * 10**y)
    scores, _ = search(plan, center, bowl(*target))
    best = tuned(plan, scores)
    tried = [trial.setting for trial in scores]
    for axis in AXES:
        values = [getattr(setting, axis) for setting in tried]
        value = getattr(best.setting, axis)
        step = 10 ** (0.45 * STEP[axis])
        assert (Edge(axis, 1) in best.edges) or max(values) > step * value
        assert (Edge(axis, -1) in best.edges) or min(values) < value / step
    if trials >= 12 and not best.edges:
        assert abs(math.log10(best.setting.lr / target.lr)) < 0.8


def test_edges_are_followed_outward_one_step_at_a_time():
    plan = Plan(12, 3, 1)
    scores, rounds = search(plan, CENTERS["sgd"], lambda trial: trial.setting.lr)
    highest = max(trial.setting.lr for trial in rounds[0])
    follow_ups = [one[0].setting.lr for one in rounds[1:]]
    expected = [highest * 10 ** (0.5 * k) for k in (1, 2, 3, 4)]
    assert follow_ups == pytest.approx(expected, rel=0.02)
    assert tuned(plan, scores).edges[0] == Edge("lr", 1)
    assert tuned(plan, scores).unclear[0] == "highest learning rate"
    alone = Plan(1, 3, 1)
    assert tuned(alone, search(alone, CENTERS["sgd"], noise)[0]).unclear == [
        "learning rate",
        "weight decay",
    ]


def test_inside_the_range_the_follow_ups_are_near_the_best_setting():
    plan = Plan(24, 3, 1)
    center = CENTERS["adamw"]
    _, rounds = search(plan, center, bowl(*center))
    for (trial,) in rounds[1:]:
        for axis in AXES:
            distance = abs(math.log10(getattr(trial.setting, axis) / getattr(center, axis)))
            assert distance <= STEP[axis] / 2 + 0.003


def test_if_all_trials_diverge_the_rate_is_lowered():
    def score(trial: Trial) -> float:
        return -trial.setting.lr if trial.setting.lr < 1e-3 else -math.inf

    plan = Plan(9, 30, 1)
    scores, _ = search(plan, CENTERS["sgd"], score)
    assert tuned(plan, scores).setting.lr < 1e-3
    nothing, _ = search(plan, CENTERS["sgd"], lambda trial: -math.inf)
    assert tuned(plan, nothing).score == -math.inf


def test_only_settings_with_all_epochs_can_win():
    plan = Plan(9, 30, 1)  # a score that falls with the number of epochs
    scores, _ = search(plan, CENTERS["sgd"], lambda trial: -trial.epochs - trial.number)
    assert tuned(plan, scores).score <= -30


# ----------------------------------------------------------------------------------------- recipes

SWA = Recipe(
    "swa",
    "vgg-mini",
    optimizer=Optimizer("sgd", 0.1, 1e-3),
    schedule=Schedule("linear-ia"),
    average=Average(15),
    epochs=30,
    evaluate_every=3,
)


@given(st.integers(1, 30))
def test_a_short_trial_keeps_its_proportions_and_does_not_see_the_test_split(epochs):
    recipe = recipe_of(SWA, Trial(3, Setting(0.2, 5e-4), epochs))
    assert (recipe.optimizer.lr, recipe.optimizer.weight_decay) == (0.2, 5e-4)
    assert recipe.evaluate_on == ("validation",)
    assert recipe.epochs == recipe.evaluate_every == epochs
    assert recipe.average is not None
    assert abs(recipe.average.start - epochs / 2) <= 0.5
    assert recipe.learning_rate(0) == 0.2
    assert recipe.learning_rate(epochs - 1) == (0.1 if epochs > 2 else pytest.approx(0.15, rel=0.4))
