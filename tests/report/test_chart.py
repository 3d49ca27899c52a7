"""Charts of curves and points."""

from __future__ import annotations

import pytest

from gadam.report.chart import Chart, Series, draw, vega
from gadam.report.style import COLORS, DASHED

CHART = Chart(
    "A title",
    "A caption.",
    "steps",
    "loss",
    [
        Series("SGD", "prediction", [1.0, 10.0], [2.0, 1.0]),
        Series("SGD", "simulation", [1.0, 10.0], [2.1, 0.9], [0.1, 0.2]),
        Series("paper", "printed", [1.0, 10.0], [3.0, 3.0]),
    ],
    log_y=False,
)


def test_the_same_chart_has_the_same_files():
    files = draw(CHART)
    assert files["png"].startswith(b"\x89PNG")
    assert b"<svg" in files["svg"]
    assert draw(CHART) == files


def test_vega_has_all_points_with_two_standard_errors():
    spec = vega(CHART)
    rows = spec["data"]["values"]
    assert len(rows) == 6
    simulated = next(row for row in rows if row["mark"] == "points")
    assert simulated["low"] == pytest.approx(1.9)
    assert simulated["high"] == pytest.approx(2.3)
    line, dashed, error_bars, points = spec["layer"]
    assert dashed["mark"]["strokeDash"] == list(DASHED)
    assert line["encoding"]["x"]["scale"]["type"] == "log"
    assert line["encoding"]["y"]["scale"]["type"] == "linear"
    assert error_bars["mark"] == "rule"
    assert points["mark"]["type"] == "point"


def test_series_with_the_same_label_share_a_color():
    scale = vega(CHART)["layer"][0]["encoding"]["color"]["scale"]
    assert scale == {"domain": ["SGD", "paper"], "range": list(COLORS[:2])}
