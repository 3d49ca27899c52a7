"""Tables of results: means over seeds, intervals, paired differences."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from statistics import mean, stdev

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from gadam.runs import summary
from gadam.runs.experiment import Experiment
from gadam.runs.files import to_json
from gadam.runs.recipe import Average, Data, Language, OwnTask, Recipe
from gadam.runs.record import RunResult
from gadam.runs.summary import SeedMean, summarize


def result(iterate: float, average: float | None = None, metric: str = "accuracy") -> RunResult:
    def point(value: float) -> dict[str, dict[str, float]]:
        return {"test": {metric: value}, "validation": {metric: value + 1}}

    return RunResult(
        "done",
        5,
        iterate=point(iterate),
        average=None if average is None else point(average),
        seconds={"train": 2.0, "refresh": 1.0},
    )


BOTH = Experiment(
    "e",
    "title",
    {"AdamW": Recipe("a", "logistic"), "Gadam": Recipe("b", "logistic")},
    bases={"Gadam": "AdamW"},
    published={"Gadam": 75.73},
)
TEXT = Recipe("t", "awd-lstm-mini", Data("toy-language", augment=False), language=Language())
TEXTS = Experiment(
    "l",
    "title",
    {"Adam": TEXT, "Gadam": replace(TEXT, average=Average(3))},
    bases={"Gadam": "Adam"},
)


# ----------------------------------------------------------------------------------------- means


@given(st.lists(st.floats(0, 100), min_size=2, max_size=30))
def test_mean_and_standard_error(values):
    found = SeedMean.of(values)
    assert found is not None
    assert found.mean == pytest.approx(mean(values))
    assert found.error == pytest.approx(stdev(values) / len(values) ** 0.5)
    assert found.count == len(values)


def test_one_seed_has_no_error():
    assert SeedMean.of([81.0]) == SeedMean(81.0, None, 1)
    assert SeedMean(81.0, None, 1).interval is None
    assert str(SeedMean(81.0, None, 1)) == "81.00"
    assert str(SeedMean(81.0, 0.126, 3)) == "81.00 ± 0.13"


def test_missing_values_are_left_out():
    assert SeedMean.of([None, 1.0, math.nan, 3.0, math.inf]) == SeedMean.of([1.0, 3.0])
    assert SeedMean.of([None, math.nan]) is None
    assert SeedMean.of([]) is None


@pytest.mark.parametrize(("count", "quantile"), [(2, 12.706), (3, 4.303), (10, 2.262)])
def test_intervals_use_student_quantiles(count, quantile):
    assert SeedMean(0.0, 1.0, count).interval == pytest.approx(quantile, abs=1e-3)


def test_intervals_of_many_seeds_are_not_too_narrow():
    scipy_quantiles = {11: 2.228, 20: 2.093, 60: 2.001}
    for count, quantile in scipy_quantiles.items():
        assert SeedMean(0.0, 1.0, count).interval == pytest.approx(quantile, rel=0.002)


# ------------------------------------------------------------------------------------------ rows


def test_differences_are_paired_by_seed_at_the_point_in_use():
    results = {
        ("AdamW", 0): result(80.0),
        ("AdamW", 1): result(90.0),
        ("Gadam", 0): result(70.0, 81.0),
        ("Gadam", 1): result(70.0, 91.0),
        ("Gadam", 2): result(70.0, 50.0),  # no partner
    }
    base, gadam = summarize(BOTH, results)
    assert base.difference is None
    assert gadam.difference == SeedMean(1.0, 0.0, 2)
    assert gadam.iterate == SeedMean(70.0, 0.0, 3)
    assert gadam.validation is not None
    assert gadam.validation.mean == pytest.approx(75.0)
    assert gadam.seconds == 3.0
    assert (gadam.runs, gadam.failed, gadam.diverged) == (3, 0, 0)
    assert summary.best(BOTH, [base, gadam]) == {"AdamW"}


def test_less_perplexity_is_a_gain():
    results = {
        ("Adam", 0): result(100.0, metric="perplexity"),
        ("Gadam", 0): result(110.0, 90.0, metric="perplexity"),
    }
    table = summarize(TEXTS, results)
    assert [row.metric for row in table] == ["perplexity"] * 2
    assert table[1].difference == SeedMean(10.0, None, 1)
    assert summary.best(TEXTS, table) == {"Gadam"}


def test_failed_runs_are_counted():
    table = summarize(BOTH, {("AdamW", 0): result(80.0), ("Gadam", 0): None})
    text = summary.to_markdown(BOTH, table)
    assert "Gadam (1 failed)" in text
    assert "**80.00**" in text
    assert "75.73" in text
    assert table[1].difference is None
    assert table[1].seconds is None


def test_diverged_runs_are_counted_and_have_no_mean():
    diverged = replace(
        result(80.0, metric="perplexity"),
        status="diverged",
        iterate={"test": {"perplexity": math.nan}},
    )
    results = {("Adam", 0): diverged, ("Adam", 1): result(90.0, metric="perplexity")}
    row, _ = summarize(TEXTS, results)
    assert (row.runs, row.diverged) == (2, 1)
    assert row.iterate == SeedMean(90.0, None, 1)
    assert summary.row_title(row) == "Adam (1 diverged)"
    assert summary.cells(row)[1] == "90.00 (1 of 2)"


def test_an_average_that_some_runs_lack_is_marked():
    """If a trigger does not fire, a run has no average and counts with its last iterate."""
    results = {("Gadam", 0): result(80.0, 85.0), ("Gadam", 1): result(82.0)}
    results |= {("AdamW", 0): result(79.0), ("AdamW", 1): result(80.0)}
    _, row = summarize(BOTH, results)
    assert row.average is not None
    assert row.average.count == 1
    assert summary.cells(row)[2] == "85.00 (1 of 2)"
    assert row.difference is not None
    assert row.difference.mean == pytest.approx((6.0 + 2.0) / 2)


def test_gains_show_their_interval():
    results = {("AdamW", seed): result(80.0 + seed) for seed in range(3)}
    results |= {("Gadam", seed): result(0.0, 81.0 + 2 * seed) for seed in range(3)}
    _, row = summarize(BOTH, results)
    half = 4.303 / 3**0.5
    assert summary.cells(row)[3] == f"+2.00 ({2 - half:+.2f} to {2 + half:+.2f}) over AdamW"


# ----------------------------------------------------------------------------------------- texts


def test_rows_of_different_tasks_are_not_compared():
    mixed = replace(BOTH, recipes={**BOTH.recipes, "LSTM": TEXT})
    results = {
        ("AdamW", 0): result(80.0),
        ("Gadam", 0): result(79.0),
        ("LSTM", 0): result(99.0, metric="perplexity"),
    }
    table = summarize(mixed, results)
    assert [[row.label for row in rows] for rows in summary.by_task(mixed, table)] == [
        ["AdamW", "Gadam"],
        ["LSTM"],
    ]
    assert summary.best(mixed, table) == {"AdamW", "LSTM"}


def test_the_best_row_is_chosen_on_validation_data_and_is_sound():
    def measured(test: float, validation: float | None) -> RunResult:
        held_out = {} if validation is None else {"validation": {"accuracy": validation}}
        return replace(result(test), iterate={"test": {"accuracy": test}, **held_out})

    def leaders(adamw: RunResult, gadam: RunResult) -> set[str]:
        results = {("AdamW", 0): adamw, ("Gadam", 0): gadam}
        return summary.best(BOTH, summarize(BOTH, results))

    assert leaders(measured(80.0, 79.0), measured(79.0, 80.0)) == {"Gadam"}
    assert leaders(measured(80.0, None), measured(79.0, 80.0)) == {"AdamW"}
    diverged = replace(measured(90.0, 90.0), status="diverged")
    assert leaders(measured(80.0, 79.0), diverged) == {"AdamW"}


def test_tasks_have_titles_that_tell_them_apart_and_rows_short_names():
    noisy = Recipe("a", "vgg-mini", Data("fashion-mini", label_noise=0.3))
    true = replace(noisy, data=Data("fashion-mini"))
    average = Average(3)
    rows = {
        "SGD": noisy,
        "SWA": replace(noisy, average=average),
        "true labels: SGD": true,
        "true labels: SWA": replace(true, average=average),
        "small SGD": replace(true, data=Data("fashion-mini", examples=100)),
        "wide SGD": replace(true, model="vgg-mini-wide"),
        "my SGD": Recipe("b", "", task=OwnTask("here/my_task.py")),
    }
    groups = summary.task_groups(Experiment("e", "title", rows))
    assert [(group.title, list(group.names.values())) for group in groups] == [
        ("vgg-mini on fashion-mini, 30% label noise", ["SGD", "SWA"]),
        ("vgg-mini on fashion-mini, true labels", ["SGD", "SWA"]),
        ("small: vgg-mini on fashion-mini, true labels, examples=100", ["SGD"]),
        ("vgg-mini-wide on fashion-mini, true labels", ["SGD"]),
        ("my_task.py", ["SGD"]),
    ]
    assert [label for group in groups for label in group.names] == list(rows)


def test_small_values_keep_three_digits():
    results = {("AdamW", s): result(0.0121 + 4e-4 * s) for s in (0, 1)}
    results |= {("Gadam", s): result(0.0, 0.0131 + 4.1e-4 * s) for s in (0, 1)}
    cells = summary.cells(summarize(BOTH, results)[1])
    assert cells[2] == "0.0133 ± 0.0002"
    assert cells[3] == "+0.0010 (+0.0009 to +0.0011) over AdamW"


def test_equal_gains_have_no_interval():
    same, different = SeedMean.of([1.0, 1.0, 1.0 + 1e-15]), SeedMean.of([1e-9, 2e-9])
    assert same is not None
    assert same.bounds is None
    assert different is not None
    assert different.bounds is not None


@given(st.lists(st.floats(-1e3, 1e3), min_size=3, max_size=3), st.integers(0, 6))
@example([0.0, 0.0, 0.5], 0)
def test_signs_and_zeros_of_gains_are_those_of_the_numbers(numbers, digits):
    shown = summary.signed(numbers, digits)
    assert len({len(text.partition(".")[2]) for text in shown}) == 1
    for number, text in zip(numbers, shown):
        if number == 0 or abs(number) > 0.5 * 10 ** -(digits + 2):
            assert (float(text) > 0, float(text) < 0) == (number > 0, number < 0)
        assert abs(float(text) - number) <= 0.51 * 10**-digits


def test_an_interval_next_to_zero_shows_its_side_of_zero():
    for gains, expected in (
        ((0.0, 0.013, 0.026), "+0.01 (-0.02 to +0.05)"),
        ((0.01, 0.02, 0.0267), "+0.019 (-0.002 to +0.040)"),
    ):
        results = {("AdamW", seed): result(1.25) for seed in range(3)}
        results |= {("Gadam", seed): result(0.0, 1.25 + gain) for seed, gain in enumerate(gains)}
        _, row = summarize(BOTH, results)
        assert summary.cells(row)[3] == f"{expected} over AdamW"


def test_markdown_escapes_bars_and_has_equal_columns():
    odd = BOTH.renamed({"Gadam": "Gadam | 2"})
    table = summarize(odd, {("AdamW", 0): result(80.0), ("Gadam | 2", 0): result(70.0, 81.0)})
    lines = summary.to_markdown(odd, table).splitlines()
    assert "Gadam \\| 2" in lines[-1]
    columns = {line.replace("\\|", "").count("|") for line in lines}
    assert len(columns) == 1


def test_the_table_is_plain_data():
    table = summarize(BOTH, {("AdamW", 0): result(80.0), ("Gadam", 0): None})
    plain = json.loads(to_json(summary.to_dict(BOTH, table)))
    assert [row["label"] for row in plain["rows"]] == ["AdamW", "Gadam"]
    assert plain["rows"][0]["iterate"] == {"mean": 80.0, "error": None, "count": 1}
    assert (plain["experiment"], plain["metric"]) == ("e", "accuracy")


def test_units():
    assert summary.with_units(["accuracy", "perplexity"]) == "accuracy, % or perplexity"
