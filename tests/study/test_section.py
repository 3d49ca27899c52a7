"""Build a section, and format its numbers."""

from __future__ import annotations

import math

from gadam.report.chart import Chart
from gadam.study.section import (
    SectionBuilder,
    as_error,
    curve,
    error_name,
    mean_curve,
    mean_dict,
    mean_text,
    seed_means,
)


def test_blocks_and_files():
    section = SectionBuilder("name", "Title")
    section.text("A sentence.")
    section.table(["a", "b"], [("1", "2")])
    section.chart("drawn", Chart("t", "c", "x", "y", [curve("l", [(1, 2), (2, 3)])]))
    section.image("contours", {"png": b"1", "svg": b"2"}, "A caption.")
    assert [block["kind"] for block in section.blocks] == ["text", "table", "chart", "image"]
    assert section.tables == [{"kind": "table", "header": ["a", "b"], "rows": [["1", "2"]]}]
    assert list(section.files) == ["drawn.png", "drawn.svg", "contours.png", "contours.svg"]


def test_values_that_are_not_finite_are_skipped():
    assert mean_text([math.nan, 2.0]) == "2"
    assert mean_text([math.inf]) == "–"
    assert mean_dict([math.nan]) == {"mean": None, "error": None, "runs": 0}
    assert mean_dict([1.0, 3.0, math.nan]) == {"mean": 2.0, "error": 1.0, "runs": 2}
    assert curve("l", [(1, math.nan), (2, 3)]).x == [2.0]
    assert seed_means("l", [(1, [math.nan]), (2, [3.0, 5.0])]).y == [4.0]


def test_mean_curve_ends_with_the_shortest_curve():
    assert mean_curve([[1.0, 2.0, 3.0], [3.0, 4.0]]) == [2.0, 3.0]


def test_errors_are_percentages_or_perplexities():
    assert as_error((81.0, 1.0), "accuracy") == 19.0
    assert as_error((81.0, 1.0), "perplexity") == math.e
    assert math.isfinite(as_error((0.0, 1e6), "perplexity"))
    assert error_name("accuracy") == "test error, %"
    assert error_name("perplexity") == "test perplexity"
