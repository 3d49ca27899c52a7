"""The measurement of a run, its predictions, and its continuations."""

from __future__ import annotations

from statistics import fmean

import pytest

from gadam.runs.folder import RunFolder
from gadam.runs.recipe import Data, Optimizer, Recipe
from gadam.study.forecast import Forecast
from gadam.study.job import NOTEBOOK, measure
from gadam.study.settings import Settings
from gadam.train.loop import train


@pytest.mark.parametrize("optimizer", [Optimizer("sgd", 0.01), Optimizer("adamw", 0.001)])
def test_logistic_regression_is_predicted_and_resumes(tmp_path, optimizer):
    recipe = Recipe(
        "logistic",
        "logistic",
        Data(examples=400, augment=False),
        optimizer,
        epochs=4,
        batch_size=50,
        evaluate_every=4,
    )
    train(recipe, tmp_path / "run")
    run = RunFolder(tmp_path / "run", recipe, 0)
    settings = Settings(400, horizon=2, continuations=2)
    values = measure(run, ["prediction"], settings).values
    forecast = Forecast(values["prediction/measurement"], horizon=2)
    assert forecast.problem is None
    assert forecast.misfit < 0.05
    continued = [values[f"prediction/continuation-{i}"] for i in range(2)]
    for predicted, point in (
        (forecast.last(), "last"),
        (forecast.ema(), "ema"),
        (forecast.decayed(), "decayed"),
    ):
        assert predicted.covers(fmean(each[point][-1] for each in continued)), point
    assert forecast.average(1).covers(fmean(each["starts"][0] for each in continued))
    written = (tmp_path / "run" / NOTEBOOK).read_bytes()
    assert measure(run, ["prediction"], settings).values == values
    assert (tmp_path / "run" / NOTEBOOK).read_bytes() == written
