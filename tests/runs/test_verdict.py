"""The answer of an experiment: the best method, and what averaging gains."""

from __future__ import annotations

import json
from dataclasses import replace
from statistics import fmean

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gadam.runs.experiment import Experiment
from gadam.runs.files import to_json
from gadam.runs.recipe import Average, Data, Language, Optimizer, OwnTask, Recipe
from gadam.runs.record import RunResult
from gadam.runs.summary import SeedMean, best, summarize
from gadam.runs.verdict import Verdict, verdicts

SGD = Recipe("a", "logistic", optimizer=Optimizer("sgd"))
ROWS = {
    "SGD": SGD,
    "SWA": replace(SGD, average=Average(3)),
    "AdamW": replace(SGD, optimizer=Optimizer("adamw")),
    "Gadam": replace(SGD, optimizer=Optimizer("adamw"), average=Average(3)),
}
FOUR = Experiment("e", "title", ROWS, seeds=3)


def result(test: float, validation: float | None = None, metric: str = "accuracy") -> RunResult:
    point = {"test": {metric: test}}
    if validation is not None:
        point["validation"] = {metric: validation}
    return RunResult("done", 5, iterate=point)


def results(validation: bool = True, **tests: list[float]) -> dict[tuple[str, int], RunResult]:
    """Return a result per value, equal on both splits."""
    return {
        (row, seed): result(value, value if validation else None)
        for row, values in tests.items()
        for seed, value in enumerate(values)
    }


def only(experiment: Experiment, found: dict[tuple[str, int], RunResult]) -> Verdict:
    (verdict,) = verdicts(experiment, found)
    return verdict


# -------------------------------------------------------------------------------------- choosing

VALUES = st.lists(st.floats(1, 99), min_size=3, max_size=3)


@given(st.fixed_dictionaries(dict.fromkeys(ROWS, VALUES)))
def test_the_best_of_each_kind_is_compared(values):
    verdict = only(FOUR, results(**values))
    means = {row: fmean(numbers) for row, numbers in values.items()}
    assert means[verdict.best] == max(means.values())
    assert verdict.base is not None
    assert verdict.averaged is not None
    assert means[verdict.base] == max(means["SGD"], means["AdamW"])
    assert means[verdict.averaged] == max(means["SWA"], means["Gadam"])
    pairs = zip(values[verdict.averaged], values[verdict.base])
    assert verdict.gain == SeedMean.of(a - b for a, b in pairs)
    assert verdict.value == SeedMean.of(values[verdict.best])
    assert verdict.missing == 0


def test_validation_data_choose_and_test_data_are_reported():
    found = {
        ("SGD", 0): result(80.0, 70.0),
        ("SWA", 0): result(81.0, 75.0),
        ("Gadam", 0): result(90.0, 74.0),
    }
    verdict = only(FOUR, found)
    assert (verdict.best, verdict.chosen_on) == ("SWA", "validation")
    assert verdict.value.mean == 81.0
    assert verdict.gain == SeedMean(1.0, None, 1)


def test_of_equal_rows_the_verdict_and_the_table_choose_the_same():
    found = {(row, 0): result(test, 85.0) for row, test in zip(ROWS, (70.0, 80.0, 70.0, 80.0))}
    one = replace(FOUR, seeds=1)
    assert only(one, found).best == "SGD"
    assert best(one, summarize(one, found)) == {"SGD"}


def test_test_data_choose_if_a_row_has_no_validation_data():
    found = {("SGD", 0): result(80.0, 70.0), ("Gadam", 0): result(90.0)}
    verdict = only(FOUR, found)
    assert (verdict.best, verdict.chosen_on) == ("Gadam", "test")
    assert "chosen on test data" in verdict.sentence()


def test_failed_and_diverged_rows_are_never_best():
    found: dict[tuple[str, int], RunResult | None] = {**results(SGD=[80.0, 80.0])}
    found |= {("SWA", 0): replace(result(95.0, 95.0), status="diverged")}
    found |= {("Gadam", 0): result(99.0, 99.0), ("Gadam", 1): None}
    found |= {("AdamW", 0): result(float("nan"), 90.0)}
    (verdict,) = verdicts(FOUR, found)
    assert (verdict.best, verdict.averaged, verdict.gain) == ("SGD", None, None)
    assert verdicts(FOUR, {("Gadam", 0): None}) == []
    assert verdicts(FOUR, {}) == []


def test_rows_of_a_running_sweep_are_compared_on_the_seeds_they_share():
    found = results(SGD=[80.0, 60.0, 60.0], SWA=[79.0])
    verdict = only(FOUR, found)
    assert verdict.best == "SGD"
    assert verdict.gain == SeedMean(-1.0, None, 1)
    assert verdict.missing == 12 - 4
    assert verdict.sentence().startswith("So far, SGD is best on validation data: 66.7% ac")
    assert verdict.sentence().endswith("8 runs are not finished.")


def test_smaller_is_better_for_a_loss():
    text = Recipe("t", "lstm", Data("toy-language", augment=False), language=Language())
    experiment = Experiment("l", "t", {"Adam": text, "Gadam": replace(text, average=Average(3))})
    found = {
        (row, seed): result(value, value, "perplexity")
        for row, values in {"Adam": [70.0, 71.0, 72.0], "Gadam": [65.0, 66.5, 66.0]}.items()
        for seed, value in enumerate(values)
    }
    verdict = only(experiment, found)
    assert verdict.sentence() == (
        "Gadam is best: perplexity 65.83, a gain of +5.17 over Adam (95% interval +3.27 to +7.06)."
    )


def test_the_mode_of_an_own_metric_decides():
    own = Recipe("t", "", task=OwnTask("my_task.py", metric="regret", mode="min"))
    experiment = Experiment("o", "t", {"SGD": own, "SWA": replace(own, average=Average(3))})
    found = {(row, 0): result(v, v, "regret") for row, v in {"SGD": 0.031, "SWA": 0.012}.items()}
    verdict = only(experiment, found)
    assert (verdict.task, verdict.best) == ("my_task.py", "SWA")
    assert verdict.sentence().startswith("So far, SWA is best: regret 0.0120, a gain of +0.0190")


def test_schedule_free_counts_as_averaging():
    free = replace(SGD, optimizer=Optimizer("schedule-free"))
    found = {("SGD", 0): result(80.0, 80.0), ("free", 0): result(81.0, 81.0)}
    verdict = only(Experiment("e", "t", {"SGD": SGD, "free": free}, seeds=1), found)
    assert (verdict.averaged, verdict.base) == ("free", "SGD")


def test_tasks_are_judged_separately():
    other = {f"true labels: {row}": replace(r, data=Data("other")) for row, r in ROWS.items()}
    both = Experiment("e", "t", {**ROWS, **other}, seeds=1)
    found = results(SGD=[80.0], SWA=[81.0])
    found |= {("true labels: SGD", 0): result(99.0, 99.0)}
    first, second = verdicts(both, found)
    assert (first.best, second.best) == ("SWA", "true labels: SGD")
    assert second.sentence().startswith("So far, SGD is best: 99.0% accuracy.")
    assert first.task != second.task


# ------------------------------------------------------------------------------------- sentences


@pytest.mark.parametrize(
    ("sgd", "swa", "expected"),
    [
        (
            [80.0, 81.0, 82.0],
            [82.5, 84.0, 85.0],
            "SWA is best: 83.8% accuracy, +2.8 points over SGD (95% interval +2.1 to +3.6).",
        ),
        (
            [80.0, 81.0, 82.0],
            [80.5, 84.0, 81.0],
            "SWA is best: 81.8% accuracy, but there is no significant difference: +0.8 points "
            "over SGD (95% interval -4.2 to +5.9).",
        ),
        (
            [80.0, 81.0, 82.0],
            [80.5, 79.0, 81.0],
            "SGD is best: 81.0% accuracy. There is no significant difference: SWA has -0.8 points "
            "against SGD (95% interval -4.0 to +2.3).",
        ),
        (
            [80.0, 81.0, 82.0],
            [79.0, 80.0, 80.7],
            "SGD is best: 81.0% accuracy. Averaging does not help: SWA has -1.1 points against "
            "SGD (95% interval -1.5 to -0.7).",
        ),
        (
            [80.0, 80.2, 82.0],
            [81.0, 81.2, 83.0],
            "SWA is best: 81.7% accuracy, +1.0 points over SGD. The gain of all seeds is the "
            "same, which gives no interval: the difference may be chance.",
        ),
        (
            [80.0, 81.0],
            [80.5, 82.5],
            "SWA is best: 81.5% accuracy, but there is no significant difference: +1.0 points "
            "over SGD (95% interval -5.4 to +7.4). Two seeds give a very wide interval: add "
            "seeds.",
        ),
        (
            [80.0],
            [82.0],
            "SWA is best: 82.0% accuracy, +2.0 points over SGD. One seed gives no interval: the "
            "difference may be chance.",
        ),
        (
            [82.0],
            [80.0],
            "SGD is best: 82.0% accuracy. SWA has -2.0 points against SGD. One seed gives no "
            "interval: the difference may be chance.",
        ),
    ],
)
def test_sentences(sgd, swa, expected):
    two = Experiment("e", "t", {row: ROWS[row] for row in ("SGD", "SWA")}, seeds=len(sgd))
    verdict = only(two, results(SGD=sgd, SWA=swa))
    assert verdict.sentence() == expected
    assert verdict.significant == ("interval +2" in expected or "does not help" in expected)
    plain = json.loads(to_json(verdict.to_dict()))
    assert plain["sentence"] == expected


def test_a_choice_that_test_data_contradict():
    found = {("SGD", s): result(80.0 + s, 70.0) for s in range(3)}
    found |= {("SWA", s): result(78.0 + 1.1 * s, 71.0) for s in range(3)}
    two = Experiment("e", "t", {row: ROWS[row] for row in ("SGD", "SWA")})
    assert only(two, found).sentence() == (
        "SWA is best on validation data: 79.1% accuracy on test data. SGD is better there: SWA "
        "has -1.9 points against SGD (95% interval -2.1 to -1.7)."
    )


def test_methods_of_one_kind_have_no_gain():
    bases = Experiment("e", "t", {row: ROWS[row] for row in ("SGD", "AdamW")}, seeds=1)
    assert only(bases, results(SGD=[80.0], AdamW=[81.0])).sentence() == (
        "AdamW is best: 81.0% accuracy."
    )
