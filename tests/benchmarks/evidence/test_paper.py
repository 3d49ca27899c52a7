"""The paper's experiments use the paper's data, and costs are measured for every contender."""

from __future__ import annotations

from dataclasses import replace

import pytest
from benchmarks.evidence.harness import EVALUATIONS
from benchmarks.evidence.paper import EXPERIMENTS, Reproduction
from benchmarks.evidence.tasks import TASKS

from benchmarks.evidence import costs, equal_time, paper
from gadam.runs.recipe import Recipe
from gadam.train.experiments import get


def _recipes(name: str, *, trained: bool | None = None) -> dict[str, Recipe]:
    """Return the recipes of all parts of an experiment, or of those that are trained or not."""
    parts = [one for one in EXPERIMENTS[name] if trained is None or one.is_trained is trained]
    return {row: recipe for one in reversed(parts) for row, recipe in one.recipes(name).items()}


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_every_row_is_on_the_data_of_its_part(name: str) -> None:
    for part in EXPERIMENTS[name]:
        expected = dict(setting.split("=") for setting in part.settings)
        recipes = part.recipes(name)
        assert recipes
        for recipe in recipes.values():
            assert recipe.data.name == expected["data.name"]
            if "data.label_noise" in expected:
                assert recipe.data.label_noise == 0
                assert recipe.data.examples == 5000


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_all_rows_are_planned(name: str) -> None:
    assert _recipes(name).keys() == get(name).recipes.keys()


def test_rows_that_are_not_trained_are_trained_elsewhere() -> None:
    trained = {
        replace(recipe, name="")
        for name in EXPERIMENTS
        for recipe in _recipes(name, trained=True).values()
    }
    for name in EXPERIMENTS:
        for recipe in _recipes(name, trained=False).values():
            assert replace(recipe, name="") in trained


def test_only_the_first_part_of_an_experiment_is_trained() -> None:
    for name, parts in EXPERIMENTS.items():
        assert not any(part.is_trained for part in parts[1:])
        assert paper.trained(name) is (parts[0] if parts[0].is_trained else None)


def test_rows_are_on_the_data_that_they_name() -> None:
    data = {row: recipe.data.name for row, recipe in _recipes("tab-cifar").items()}
    assert len(data) == 24
    assert all(name == ("cifar100" if "C-100" in row else "cifar10") for row, name in data.items())


def test_the_command_line() -> None:
    plan = Reproduction(("epochs=3",), rows="C-100")
    assert plan.command("x") == ["gadam", "reproduce", "x", "--rows", "C-100", "--set", "epochs=3"]


def test_a_wrong_setting_is_found() -> None:
    with pytest.raises(ValueError, match="nam"):
        Reproduction(("data.nam=cifar100",)).recipes("fig2a")


def test_costs_are_measured_for_every_contender() -> None:
    found = costs.measure(TASKS["fashion-clean"], steps=1)
    assert found["step"].keys() == found["run"].keys() == costs.ROWS.keys()
    assert {*equal_time.OURS, *equal_time.RIVALS.values()} <= costs.ROWS.keys()
    assert all(milliseconds > 0 for milliseconds in found["step"].values())
    assert found["steps"] == 400
    expected = 400 * found["step"]["Gadam"] + EVALUATIONS * found["evaluation"]
    assert found["run"]["Gadam"] == pytest.approx(expected)
