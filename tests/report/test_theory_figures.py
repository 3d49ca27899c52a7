"""The figures of the theory: simulations agree with predictions."""

from __future__ import annotations

import numpy as np
import pytest

from gadam.report.theory_figures import FIGURES

NAMES = {
    "shell",
    "dimension",
    "dependence",
    "stride",
    "ema",
    "preconditioning",
    "batch-growth",
    "budget",
    "start",
    "batch-size",
}


def test_the_figures_are_complete():
    assert set(FIGURES) == NAMES


# test_mean_field.py and test_methods.py compare the same with fewer steps.
SLOW = {"dependence", "budget", "batch-size"}


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW)) for name in sorted(NAMES)],
)
def test_the_simulation_agrees_with_the_prediction(name):
    """Every point is within five standard errors of the line, which has a knot there."""
    chart = FIGURES[name](1)
    lines = {s.label: s for s in chart.series if s.kind == "prediction"}
    points = [s for s in chart.series if s.kind == "simulation"]
    assert points
    for s in points:
        line = lines[s.label]
        x, knots = (np.log(v) if chart.log_x else np.array(v) for v in (s.x, line.x))
        assert all(np.isclose(knots, at).any() for at in x)
        expected = np.exp(np.interp(x, knots, np.log(line.y)))
        # The mean field and the features have a relative error of 1/P + P/M.
        systematic = 0.03 if name == "dependence" else 0.0
        error = np.hypot(s.error, systematic * expected)
        assert np.abs((np.array(s.y) - expected) / error).max() < 5, s.label
