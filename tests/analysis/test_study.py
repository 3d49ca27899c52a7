"""What is measured of a run: the right numbers, and none of them twice."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import gadam
from gadam.analysis import Curvature, distances, measure_noise, top_eigenvalues
from gadam.analysis import study as study_module
from gadam.analysis.study import FAILED, Plan, measure
from gadam.train import task
from gadam.train.loop import Stopped, train
from gadam.train.recipe import Average, Data, Optimizer, Recipe, Schedule
from gadam.train.record import Run, RunError, read_weights

RECIPE = Recipe(
    "small",
    model="vgg-mini",
    data=Data("fashion-mini", examples=500, validation=100, size=8, augment=False),
    optimizer=Optimizer("adamw", 0.01, 0.1),
    schedule=Schedule("constant"),
    average=Average(1),
    epochs=4,
    keep=3,
)
QUICK: dict[str, Any] = {"probes": 3, "steps": 3, "grid": 3, "examples": 128}


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("study") / "run"
    train(RECIPE, folder, label="Gadam")
    return folder


@pytest.fixture
def run(trained, tmp_path) -> Run:
    shutil.copytree(trained, tmp_path / "run")
    return Run(tmp_path / "run", RECIPE, 0)


def point(run: Run, name: int | str) -> tuple[task.Task, dict[str, Any]]:
    """A point of the run by the shortest way."""
    problem = task.build(RECIPE, 0, torch.device("cpu"), None)
    weights = read_weights(run.iterates()[name]) if isinstance(name, int) else None
    if weights is None:
        samples = [read_weights(path) for path in run.iterates().values()]
        weights = dict(samples[-1] or {})
        for key, _ in problem.model.named_parameters():
            weights[key] = torch.stack([s[key] for s in samples if s is not None]).mean(0)
    problem.model.load_state_dict(weights)
    gadam.refresh_batchnorm(
        problem.model, problem.refresh((name if isinstance(name, int) else 4) - 1)
    )
    return problem, weights


def test_the_run_keeps_what_it_averages(run):
    assert list(run.iterates()) == [2, 3, 4]
    result = run.result
    assert result is not None
    assert result["samples"] == 3
    line = run.lines[-1]
    problem, _ = point(run, 4)
    assert line["norms"] == pytest.approx(gadam.analysis.norms(problem.model), rel=1e-5)


def test_diversity_and_ensembles_are_of_the_points_that_were_evaluated(run):
    values = measure(run, Plan(("diversity", "ensemble"), **QUICK))
    ensemble = values["ensemble"]
    iterate, average = (run.result or {})["iterate"]["test"], (run.result or {})["average"]["test"]
    assert ensemble["alone"][-1] == pytest.approx([iterate["accuracy"], iterate["loss"]], rel=1e-5)
    assert ensemble["average"] == pytest.approx([average["accuracy"], average["loss"]], rel=1e-5)
    logs = []
    for epoch in (2, 3, 4):
        problem, _ = point(run, epoch)
        logs.append(
            torch.cat([s.log_softmax(-1) for s, _ in problem.scores(problem.model, "test")])
        )
    expected = gadam.analysis.diversity(logs)
    for name in ("kl", "total_variation", "disagreement", "squared_distance"):
        assert values["diversity"][name]["mean"] == pytest.approx(expected.mean(name), rel=1e-4)
    assert values["diversity"]["examples"] == len(logs[0])
    names = [name for name, _ in problem.model.named_parameters()]
    apart = distances([point(run, e)[1] for e in (2, 3, 4)], names)
    assert values["distances"]["mean"] == pytest.approx(apart.mean, rel=1e-6)
    assert values["distances"]["relative"] == pytest.approx(apart.relative, rel=1e-6)


@pytest.mark.parametrize("name", ["iterate", "average"])
def test_curvature_is_of_that_point(run, name):
    values = measure(run, Plan(("curvature",), **QUICK))
    problem, _ = point(run, 4 if name == "iterate" else name)
    at = Curvature(problem.model, list(problem.training_data(128)))
    largest = float(top_eigenvalues(at).values[0])
    assert values[f"norm/{name}"]["value"] == pytest.approx(largest, rel=2e-3)
    noise = measure_noise(at)
    assert values[f"noise/{name}"]["trace"] == pytest.approx(noise.trace, rel=1e-3)
    measured = values[f"metrics/{name}"]["test"]["accuracy"]
    assert measured == pytest.approx((run.result or {})[name]["test"]["accuracy"], abs=0.11)


def test_the_landscape_has_the_points_in_it(run):
    values = measure(run, Plan(("landscape",), **QUICK))
    line = dict(zip(values["line"]["at"], values["line"]["values"]))
    for t, name in ((0.0, "iterate"), (1.0, "average")):
        assert line[t]["test loss"] == pytest.approx(
            (run.result or {})[name]["test"]["loss"], rel=1e-3
        )
    frame = values["plane"]
    assert frame["points"]["2"] == pytest.approx([0, 0], abs=1e-6)
    assert frame["points"]["4"][1] == pytest.approx(0, abs=1e-6)
    assert min(frame["x"]) < 0 < max(frame["x"])
    assert len(values["plane/2"]) == 3
    assert values["plane/0"][0]["train loss"] > 0


def counted(monkeypatch) -> list[Any]:
    """The points that are put into the model from now on."""
    seen: list[Any] = []
    put = study_module._Points.put

    def watched(self, point):
        seen.append(point)
        return put(self, point)

    monkeypatch.setattr(study_module._Points, "put", watched)
    return seen


def test_what_is_known_is_not_measured_again(run, monkeypatch):
    plan = Plan(("diversity", "curvature"), **QUICK)
    first = measure(run, plan)
    seen = counted(monkeypatch)
    assert measure(run, plan) == first
    assert seen == []
    more = measure(run, replace(plan, probes=4))  # another setting, of this value alone
    assert seen == ["iterate", "average"]
    assert more["norm/iterate"] == first["norm/iterate"]


def test_a_torn_line_costs_one_value(run, monkeypatch):
    plan = Plan(("diversity", "curvature"), **QUICK)
    first = measure(run, plan)
    notes = run.folder / "analysis.jsonl"
    lines = notes.read_text().splitlines()
    assert json.loads(lines[-1])["key"]["what"] == "noise"
    notes.write_text("\n".join([*lines[:-1], lines[-1][:20]]))
    seen = counted(monkeypatch)
    assert measure(run, plan) == first
    assert seen == ["average"]
    assert measure(run, plan) == first
    assert seen == ["average"]


def test_it_stops_when_asked_and_goes_on(run):
    plan = Plan(("curvature",), **QUICK)
    whole = measure(run, plan)
    (run.folder / "analysis.jsonl").unlink()
    left = [9]  # asked that often: within a product

    def soon() -> bool:
        left[0] -= 1
        return left[0] < 0

    with pytest.raises(Stopped):
        measure(run, plan, should_stop=soon)
    kept = (run.folder / "analysis.jsonl").read_text().count("\n")
    assert 0 < kept < len(whole)
    assert measure(run, plan) == whole


@pytest.mark.parametrize("harm", ["removed", "damaged", "cut off"])
def test_predictions_are_a_cache(run, harm):
    plan = Plan(("diversity", "ensemble"), **QUICK)
    first = measure(run, plan)
    notes = run.folder / "analysis.jsonl"
    kept = [line for line in notes.read_text().splitlines() if '"predictions"' in line]
    notes.write_text("\n".join(kept) + "\n")  # what is made of them must be made again
    path = sorted((run.folder / "predictions").iterdir())[1]
    content = path.read_bytes()
    if harm == "removed":
        path.unlink()
    else:
        half = len(content) // 2
        path.write_bytes(
            content[:half] + (b"?" + content[half + 1 :] if harm == "damaged" else b"")
        )
    assert measure(run, plan) == first


def test_a_damaged_iterate_is_named_and_the_rest_is_measured(run):
    path = run.iterates()[3]
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 255
    path.write_bytes(bytes(content))
    said: list[str] = []
    values = measure(run, Plan(("diversity", "curvature"), **QUICK), notice=said.append)
    assert "predictions/3" in values[FAILED]
    assert "distances" in values[FAILED]
    assert any("is damaged: remove it" in sentence for sentence in said)
    assert "norm/average" in values
    path.unlink()
    values = measure(run, Plan(("diversity",), **QUICK))
    assert values["diversity"]["points"] == 2
    assert FAILED not in values


def test_other_weights_are_other_values(run):
    plan = Plan(("curvature",), **QUICK)
    before = measure(run, plan)
    (checkpoint,) = run.folder.glob("checkpoint-000004-*.pt")
    state = read_weights(checkpoint)
    assert state is not None
    state["model"] = {
        name: t * 1.5 if t.is_floating_point() else t for name, t in state["model"].items()
    }
    checkpoint.unlink()
    run.save(4, {name: value for name, value in state.items() if name != "lines"})
    after = measure(run, plan)
    assert after["norm/iterate"] != before["norm/iterate"]


def test_a_run_without_its_last_checkpoint_is_refused(run):
    (checkpoint,) = run.folder.glob("checkpoint-000004-*.pt")
    checkpoint.write_bytes(b"no")
    with pytest.raises(RunError, match=r"lost its last checkpoint: remove result\.json"):
        measure(run, Plan(("curvature",), **QUICK))
    (run.folder / "result.json").unlink()
    with pytest.raises(RunError, match="is not finished"):
        measure(run, Plan(("curvature",), **QUICK))


def trained_as(tmp_path: Path, **changes: Any) -> Run:
    recipe = replace(RECIPE, **changes)
    train(recipe, tmp_path / "other")
    return Run(tmp_path / "other", recipe, 0)


def test_of_a_window_only_what_is_in_it_counts(tmp_path):
    run = trained_as(tmp_path, average=Average(0, weighting="window", size=2), keep=4)
    assert measure(run, Plan(("diversity",), **QUICK))["diversity"]["points"] == 2


def test_two_iterates_and_their_average_make_a_line_but_no_plane(tmp_path):
    run = trained_as(tmp_path, epochs=3)
    assert list(run.iterates()) == [1, 2, 3]  # the first is not of the average
    values = measure(run, Plan(("landscape", "diversity"), **QUICK))
    assert values["diversity"]["points"] == 2
    assert values["plane"]["x"] == []
    assert FAILED not in values


def test_without_iterates_it_says_what_to_do(tmp_path):
    run = trained_as(tmp_path, epochs=2, average=Average(0), keep=0)
    said: list[str] = []
    assert measure(run, Plan(("diversity",), **QUICK), notice=said.append) == {}
    assert "--set keep=N" in said[0]


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"parts": ("diversty",)}, "no part 'diversty'"),
        ({"probes": 1}, "probes must be at least 2"),
        ({"grid": 2}, "grid must be at least 3"),
        ({"examples": 0}, "examples must be at least 1"),
        ({"tolerance": 1.0}, "tolerance must lie"),
    ],
)
def test_plans_that_cannot_be(changes, sentence):
    with pytest.raises(ValueError, match=sentence):
        Plan(**{"parts": ("curvature",), **changes})
