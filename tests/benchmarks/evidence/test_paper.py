"""The paper's experiments use the paper's data, and costs are measured for every contender."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from benchmarks.evidence.harness import EVALUATIONS
from benchmarks.evidence.paper import EXPERIMENTS, SETTINGS, experiment_of, remaining
from benchmarks.evidence.tasks import TASKS

from benchmarks.evidence import costs, equal_time, paper, results, tuning
from gadam.train.experiments import get


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_every_row_is_on_true_labels_of_the_papers_data(name: str) -> None:
    rows, of_paper = experiment_of(name).recipes, get(name, "paper").recipes
    assert rows.keys() == of_paper.keys() == get(name).recipes.keys()
    for row, recipe in rows.items():
        assert recipe.data.name == of_paper[row].data.name
        assert (recipe.data.label_noise, recipe.data.examples) == (0, 4000)
        assert recipe.epochs % recipe.evaluate_every == 0


def test_rows_that_are_not_trained_are_trained_elsewhere() -> None:
    trained = {
        replace(recipe, name="")
        for one in remaining(Path("no results"), [*EXPERIMENTS])
        for recipe in one.recipes.values()
    }
    for name in EXPERIMENTS:
        for recipe in experiment_of(name).recipes.values():
            assert replace(recipe, name="") in trained


def test_only_what_has_no_results_remains(tmp_path: Path) -> None:
    (tmp_path / "fig2a.json").touch()
    left = remaining(tmp_path, ["fig2a", "fig3a", "tab-linear-step"])
    assert [one.name for one in left] == ["tab-linear-step"]
    assert all(row.endswith("step") for row in left[0].recipes)
    assert left[0].command == "python -m benchmarks.evidence.paper run tab-linear-step"


def test_settings_keep_the_ratios_of_the_paper() -> None:
    rows, of_paper = experiment_of("tab-cifar").recipes, get("tab-cifar", "paper").recipes
    for name in ("lr", "weight_decay"):
        ratios = [
            getattr(one["VGG-16 C-100 Gadam"].optimizer, name)
            / getattr(one["PRN-110 C-100 Gadam"].optimizer, name)
            for one in (rows, of_paper)
        ]
        assert ratios[0] == pytest.approx(ratios[1])
    assert rows["VGG-16 C-100 Gadam"].optimizer.lr == pytest.approx(SETTINGS["adamw"][1][0])
    assert rows["VGG-16 C-100 PadamW"].optimizer.amsgrad


def test_settings_are_the_best_of_the_committed_grids() -> None:
    rows = json.loads(paper.TUNED.read_text())["rows"]
    for base in paper.GRIDS:
        assert SETTINGS[base][1] == paper.best(rows, base)
    # Of the others, in the evidence: the average of the last half and WSD share a rate, and the
    # decay is theirs or between them.
    workload, records = TASKS["cifar100-2k"], results.read("cifar100-2k")
    for other in ("adamw", "padamw"):
        found = [
            tuning.best(records, f"{other} held", target, workload.mode)
            for target in (("held", "half"), ("wsd", "own"))
        ]
        decays = sorted(one.weight_decay for one in found if one is not None)
        lr, decay = SETTINGS[other][1]
        assert {one.lr for one in found if one is not None} == {lr}
        assert decays[0] <= decay <= decays[1]


def test_the_best_setting_serves_plain_and_averaged_runs() -> None:
    def row(lr: float, averaged: bool, validation: float | None) -> dict[str, object]:
        fixed = {"optimizer": "sgd", "weight_decay": 0.1, "averaged": averaged}
        return {**fixed, "lr": lr, "validation": validation}

    rows = [row(1, False, 50.0), row(1, True, 60.0), row(3, False, 70.0), row(3, True, 30.0)]
    rows += [row(9, False, 99.0), row(9, True, None)]  # one of them diverged
    assert paper.best(rows, "sgd") == (1.0, 0.1)


def test_costs_are_measured_for_every_contender() -> None:
    found = costs.measure(TASKS["fashion-clean"], steps=1)
    assert found["step"].keys() == found["run"].keys() == costs.ROWS.keys()
    assert {*equal_time.OURS, *equal_time.RIVALS.values()} <= costs.ROWS.keys()
    assert all(milliseconds > 0 for milliseconds in found["step"].values())
    assert found["steps"] == 400
    expected = 400 * found["step"]["Gadam"] + EVALUATIONS * found["evaluation"]
    assert found["run"]["Gadam"] == pytest.approx(expected)
