"""The paper's experiments use the paper's data, and costs are measured for every contender."""

from __future__ import annotations

import pytest
from benchmarks.evidence.harness import EVALUATIONS
from benchmarks.evidence.paper import CIFAR100, EXPERIMENTS, Reproduction, recipes_of
from benchmarks.evidence.tasks import TASKS

from benchmarks.evidence import costs, equal_time, paper


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_every_experiment_has_recipes(name: str) -> None:
    recipes = recipes_of(name)
    assert recipes
    expected = dict(setting.split("=") for setting in EXPERIMENTS[name].settings)
    for recipe in recipes:
        assert recipe.data.name == expected.get("data.name", "fashion-mini")
        if EXPERIMENTS[name].settings == CIFAR100:
            assert recipe.data.label_noise == 0
            assert recipe.data.examples == 5000


def test_rows_on_other_data_are_left_out() -> None:
    """No row that says CIFAR-10 is trained on CIFAR-100."""
    assert len(recipes_of("tab-cifar")) == 12
    assert all("c-100" in recipe.name for recipe in recipes_of("tab-cifar"))


def test_the_command_line() -> None:
    plan = Reproduction(("epochs=3",), rows="C-100")
    assert plan.command("x") == ["gadam", "reproduce", "x", "--rows", "C-100", "--set", "epochs=3"]


def test_a_wrong_setting_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(paper.EXPERIMENTS, "fig2a", Reproduction(("data.nam=cifar100",)))
    with pytest.raises(ValueError, match="nam"):
        recipes_of("fig2a")


def test_costs_are_measured_for_every_contender() -> None:
    found = costs.measure(TASKS["fashion-clean"], steps=1)
    assert found["step"].keys() == found["run"].keys() == costs.ROWS.keys()
    assert {*equal_time.OURS, *equal_time.RIVALS.values()} <= costs.ROWS.keys()
    assert all(milliseconds > 0 for milliseconds in found["step"].values())
    assert found["steps"] == 400
    expected = 400 * found["step"]["Gadam"] + EVALUATIONS * found["evaluation"]
    assert found["run"]["Gadam"] == pytest.approx(expected)
