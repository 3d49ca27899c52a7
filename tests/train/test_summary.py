"""The numbers at the end."""

from __future__ import annotations

import json
from statistics import mean, stdev
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gadam.train import summary
from gadam.train.experiments import Experiment
from gadam.train.recipe import Recipe
from gadam.train.summary import Estimate


def result(iterate: float, average: float | None = None) -> dict[str, Any]:
    def point(value: float) -> dict[str, dict[str, float]]:
        return {"test": {"accuracy": value}, "validation": {"accuracy": value + 1}}

    return {
        "status": "done",
        "iterate": point(iterate),
        "average": None if average is None else point(average),
        "seconds": {"train": 2.0, "refresh": 1.0},
    }


BOTH = Experiment(
    "e",
    "title",
    {"AdamW": Recipe("a", "logistic"), "Gadam": Recipe("b", "logistic")},
    bases={"Gadam": "AdamW"},
    published={"Gadam": 75.73},
)


@given(st.lists(st.floats(0, 100), min_size=2, max_size=30))
def test_mean_and_standard_error(values):
    estimate = Estimate.of(values)
    assert estimate is not None
    assert estimate.mean == pytest.approx(mean(values))
    assert estimate.error == pytest.approx(stdev(values) / len(values) ** 0.5)


@pytest.mark.parametrize(("count", "quantile"), [(2, 12.706), (3, 4.303), (10, 2.262)])
def test_intervals_are_students(count, quantile):
    estimate = Estimate(0.0, 1.0, count)
    assert estimate.interval == pytest.approx(quantile, abs=1e-3)


def test_many_seeds_have_an_interval_that_is_not_too_narrow():
    scipy_quantiles = {11: 2.228, 20: 2.093, 60: 2.001}
    for count, quantile in scipy_quantiles.items():
        assert Estimate(0.0, 1.0, count).interval == pytest.approx(quantile, rel=0.002)


def test_differences_are_paired_by_seed_and_of_the_point_in_use():
    results = {
        ("AdamW", 0): result(80.0),
        ("AdamW", 1): result(90.0),
        ("Gadam", 0): result(70.0, 81.0),
        ("Gadam", 1): result(70.0, 91.0),
        ("Gadam", 2): result(70.0, 50.0),  # has no partner
    }
    base, gadam = summary.rows(BOTH, results)
    assert base.difference is None
    assert gadam.difference == Estimate(1.0, 0.0, 2)
    assert gadam.iterate == Estimate(70.0, 0.0, 3)
    assert gadam.validation is not None
    assert gadam.validation.mean == pytest.approx(75.0)
    assert gadam.seconds == 3.0
    assert summary.best(BOTH, [base, gadam]) == {"AdamW"}


def test_failures_and_single_seeds_are_said():
    table = summary.rows(BOTH, {("AdamW", 0): result(80.0), ("Gadam", 0): None})
    text = summary.markdown(BOTH, table)
    assert "Gadam (1 failed)" in text
    assert "**80.00**" in text
    assert "75.73" in text
    assert table[1].difference is None
    json.dumps(summary.to_json(BOTH, table))


def test_an_average_that_not_all_runs_have_says_so():
    """A trigger may not fire: what is shown is of fewer runs, and the gain is of what each was used for."""
    results = {("Gadam", 0): result(80.0, 85.0), ("Gadam", 1): result(82.0)}
    results |= {("AdamW", 0): result(79.0), ("AdamW", 1): result(80.0)}
    _, row = summary.rows(BOTH, results)
    assert row.average is not None
    assert row.average.count == 1
    assert summary.cells(row)[2] == "85.00 (1 of 2)"
    assert row.difference is not None
    assert row.difference.mean == pytest.approx((6.0 + 2.0) / 2)
