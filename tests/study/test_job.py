"""Measure a run: the right numbers, and none of them twice."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import gadam
from gadam.analysis import Curvature, distances, measure_noise, norms, top_eigenvalues
from gadam.runs import Average, Data, Optimizer, Recipe, RunError, RunFolder, RunResult, Schedule
from gadam.runs.folder import read_weights
from gadam.runs.record import POINTS
from gadam.study import Settings, StudyError, measure
from gadam.study.points import Points
from gadam.train import tasks
from gadam.train.loop import Stopped, train

RECIPE = Recipe(
    "small",
    model="vgg-mini",
    data=Data("fashion-mini", examples=500, validation=100, size=8, augment=False),
    optimizer=Optimizer("adamw", 0.01, 0.1),
    schedule=Schedule("constant"),
    average=Average(1),
    epochs=4,
    keep_iterates=3,
)
QUICK = Settings(probes=3, steps=3, grid=3, examples=128)


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("study") / "run"
    train(RECIPE, folder, label="Gadam")
    return folder


@pytest.fixture
def run(trained, tmp_path) -> RunFolder:
    shutil.copytree(trained, tmp_path / "run")
    return RunFolder(tmp_path / "run", RECIPE, 0)


@pytest.fixture(scope="module")
def trained_and_measured(trained, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("measured") / "run"
    shutil.copytree(trained, folder)
    measure(RunFolder(folder, RECIPE, 0), ["curvature"], QUICK)
    return folder


@pytest.fixture
def measured(trained_and_measured, tmp_path) -> RunFolder:
    """Return a run whose notebook has its curvature."""
    shutil.copytree(trained_and_measured, tmp_path / "run")
    return RunFolder(tmp_path / "run", RECIPE, 0)


def result_of(run: RunFolder) -> RunResult:
    assert run.result is not None
    return run.result


def load_directly(run: RunFolder, point: int | str) -> tuple[tasks.Task, dict[str, Any]]:
    """Load a point without the study: the average is the mean of the kept iterates."""
    task = tasks.build(RECIPE, 0, torch.device("cpu"), None)
    weights = read_weights(run.iterates()[point]) if isinstance(point, int) else None
    if weights is None:
        samples = [read_weights(path) for path in run.iterates().values()]
        weights = dict(samples[-1] or {})
        for key, _ in task.model.named_parameters():
            weights[key] = torch.stack([s[key] for s in samples if s is not None]).mean(0)
    task.model.load_state_dict(weights)
    epochs = point if isinstance(point, int) else 4
    gadam.refresh_batchnorm(task.model, task.refresh(epochs - 1))
    return task, weights


def test_run_keeps_the_iterates_it_averages(run):
    assert list(run.iterates()) == [2, 3, 4]
    assert result_of(run).samples == 3
    task, _ = load_directly(run, 4)
    assert run.epochs[-1].norms == pytest.approx(norms(task.model), rel=1e-5)


def test_diversity_and_ensemble_match_direct_computation(run):
    values = measure(run, ["diversity", "ensemble"], QUICK).values
    ensemble, result = values["ensemble"], result_of(run)
    for scores, point in zip((ensemble["alone"][-1], ensemble["average"]), POINTS):
        metrics = [result.metric(name, point) for name in ("accuracy", "loss")]
        assert scores == pytest.approx(metrics, rel=1e-5)
    logs = []
    for epoch in (2, 3, 4):
        task, _ = load_directly(run, epoch)
        logs.append(torch.cat([s.log_softmax(-1) for s, _ in task.scores(task.model, "test")]))
    expected = gadam.analysis.diversity(logs)
    for name in ("kl", "total_variation", "disagreement", "squared_distance"):
        assert values["diversity"][name]["mean"] == pytest.approx(expected.mean(name), rel=1e-4)
    assert values["diversity"]["examples"] == len(logs[0])
    names = [name for name, _ in task.model.named_parameters()]
    apart = distances([load_directly(run, epoch)[1] for epoch in (2, 3, 4)], names)
    assert values["distances"]["mean"] == pytest.approx(apart.mean, rel=1e-6)
    assert values["distances"]["relative"] == pytest.approx(apart.relative, rel=1e-6)


@pytest.mark.parametrize("point", POINTS)
def test_curvature_matches_direct_computation(measured, point):
    values = measure(measured, ["curvature"], QUICK).values
    task, _ = load_directly(measured, 4 if point == "iterate" else point)
    at = Curvature(task.model, list(task.training_data(128)))
    largest = float(top_eigenvalues(at).values[0])
    assert values[f"norm/{point}"]["value"] == pytest.approx(largest, rel=2e-3)
    noise = measure_noise(at)
    assert values[f"noise/{point}"]["trace"] == pytest.approx(noise.trace, rel=1e-3)
    accuracy = values[f"metrics/{point}"]["test"]["accuracy"]
    assert accuracy == pytest.approx(result_of(measured).metric("accuracy", point), abs=0.11)


def test_landscape_contains_the_points(run):
    values = measure(run, ["landscape"], QUICK).values
    line = dict(zip(values["line"]["at"], values["line"]["values"]))
    for t, point in zip((0.0, 1.0), POINTS):
        expected = result_of(run).metric("loss", point)
        assert line[t]["test loss"] == pytest.approx(expected, rel=1e-3)
    frame = values["plane"]
    assert frame["points"]["2"] == pytest.approx([0, 0], abs=1e-6)
    assert frame["points"]["4"][1] == pytest.approx(0, abs=1e-6)
    assert min(frame["x"]) < 0 < max(frame["x"])
    assert len(values["plane/2"]) == 3
    assert values["plane/0"][0]["train loss"] > 0


def test_keys_of_the_notebook_are_stable(run):
    """Results on disk are found by these keys, with their items in this order."""
    measure(run, ["diversity", "ensemble", "networks", "curvature", "density", "landscape"], QUICK)
    lines = [json.loads(text) for text in (run.folder / "analysis.jsonl").read_text().splitlines()]
    keys = {line["name"]: line["key"] for line in lines}
    matrix = ["what", "of", "examples", "kind", "batchnorm"]
    assert {name: (key["what"], list(key)) for name, key in keys.items()} == {
        **{f"predictions/{p}": ("predictions", ["what", "of", "rows"]) for p in (2, 3, 4)},
        "diversity": ("diversity", ["what", "of"]),
        "distances": ("distances", ["what", "of"]),
        "predictions/average": ("predictions", ["what", "of", "rows"]),
        "ensemble": ("ensemble", ["what", "of"]),
        **{f"metrics/{p}": ("metrics", ["what", "of"]) for p in ("iterate", "average")},
        **{f"norm/{p}": ("norm", [*matrix, "tolerance"]) for p in ("iterate", "average")},
        **{f"moments/{p}": ("moments", [*matrix, "probes"]) for p in ("iterate", "average")},
        **{f"noise/{p}": ("noise", matrix) for p in ("iterate", "average")},
        **{f"density/{p}": ("density", [*matrix, "steps"]) for p in ("iterate", "average")},
        "line": ("line", ["what", "of", "at"]),
        "plane": ("plane", ["what", "of", "grid"]),
        **{f"plane/{i}": ("plane row", ["what", "of", "grid", "row"]) for i in range(3)},
    }
    iterates = [run.iterates()[epoch].stem for epoch in (2, 3, 4)]
    (checkpoint,) = run.folder.glob("checkpoint-000004-*.pt")
    ends = [checkpoint.stem.replace("checkpoint", point) for point in ("iterate", "average")]
    assert keys["diversity"]["of"] == iterates
    assert keys["ensemble"]["of"] == [*iterates, ends[1]]
    assert keys["line"]["of"] == ends
    assert keys["plane"]["of"] == [*ends, *iterates]


def watch_loads(monkeypatch) -> list[Any]:
    """Record the points that are loaded into the model from now on."""
    seen: list[Any] = []
    load = Points.load

    def watched(self, point):
        seen.append(point)
        return load(self, point)

    monkeypatch.setattr(Points, "load", watched)
    return seen


def test_known_values_are_not_measured_again(run, monkeypatch):
    parts = ["diversity", "curvature"]
    first = measure(run, parts, QUICK)
    seen = watch_loads(monkeypatch)
    assert measure(run, parts, QUICK) == first
    assert seen == []
    more = measure(run, parts, replace(QUICK, probes=4))  # affects only the moments
    assert seen == ["iterate", "average"]
    assert more.values["norm/iterate"] == first.values["norm/iterate"]


def test_torn_line_costs_one_value(run, monkeypatch):
    parts = ["diversity", "curvature"]
    first = measure(run, parts, QUICK)
    notes = run.folder / "analysis.jsonl"
    lines = notes.read_text().splitlines()
    assert json.loads(lines[-1])["key"]["what"] == "noise"
    notes.write_text("\n".join([*lines[:-1], lines[-1][:20]]))
    seen = watch_loads(monkeypatch)
    assert measure(run, parts, QUICK) == first
    assert seen == ["average"]
    assert measure(run, parts, QUICK) == first
    assert seen == ["average"]


@pytest.mark.parametrize("damage", ["value", "hash", "key of the hash"])
def test_changed_value_is_measured_again(measured, monkeypatch, damage):
    before = measure(measured, ["curvature"], QUICK)
    notebook = measured.folder / "analysis.jsonl"
    lines = notebook.read_text().splitlines()
    at = {"value": lines[0].index('"value"') + 12, "hash": -5, "key of the hash": -23}[damage]
    changed = bytearray(lines[0].encode())
    changed[at] ^= 1
    notebook.write_text("\n".join([changed.decode(), *lines[1:]]) + "\n")
    assert measure(measured, ["curvature"], QUICK).values == before.values
    assert len(notebook.read_text().splitlines()) == len(lines)  # the damaged one is gone


def test_stops_on_request_and_resumes(measured):
    whole = measure(measured, ["curvature"], QUICK)
    (measured.folder / "analysis.jsonl").unlink()
    left = [9]  # stop within a product

    def soon() -> bool:
        left[0] -= 1
        return left[0] < 0

    with pytest.raises(Stopped):
        measure(measured, ["curvature"], QUICK, should_stop=soon)
    kept = (measured.folder / "analysis.jsonl").read_text().count("\n")
    assert 0 < kept < len(whole.values)
    assert measure(measured, ["curvature"], QUICK) == whole


@pytest.mark.parametrize("harm", ["removed", "damaged", "cut off"])
def test_predictions_are_a_cache(run, harm):
    parts = ["diversity", "ensemble"]
    first = measure(run, parts, QUICK)
    notes = run.folder / "analysis.jsonl"
    kept = [line for line in notes.read_text().splitlines() if '"predictions"' in line]
    notes.write_text("\n".join(kept) + "\n")  # everything computed from them is computed again
    path = sorted((run.folder / "predictions").iterdir())[1]
    content = path.read_bytes()
    if harm == "removed":
        path.unlink()
    else:
        half = len(content) // 2
        path.write_bytes(
            content[:half] + (b"?" + content[half + 1 :] if harm == "damaged" else b"")
        )
    assert measure(run, parts, QUICK) == first


def test_damaged_iterate_is_named_and_the_rest_is_measured(run):
    path = run.iterates()[3]
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 255
    path.write_bytes(bytes(content))
    notices: list[str] = []
    found = measure(run, ["diversity", "curvature"], QUICK, on_notice=notices.append)
    assert "predictions/3" in found.failed
    assert "distances" in found.failed
    assert found.to_dict()["failed"] == list(found.failed)
    assert any("is damaged. Remove it" in notice for notice in notices)
    assert "norm/average" in found.values
    path.unlink()
    found = measure(run, ["diversity"], QUICK)
    assert found.values["diversity"]["points"] == 2
    assert not found.failed
    assert "failed" not in found.to_dict()


def test_new_weights_are_measured_again(measured):
    before = measure(measured, ["curvature"], QUICK)
    (checkpoint,) = measured.folder.glob("checkpoint-000004-*.pt")
    state = read_weights(checkpoint)
    assert state is not None
    state["model"] = {
        name: t * 1.5 if t.is_floating_point() else t for name, t in state["model"].items()
    }
    checkpoint.unlink()
    measured.save(4, {name: value for name, value in state.items() if name != "lines"})
    after = measure(measured, ["curvature"], QUICK)
    assert after.values["norm/iterate"] != before.values["norm/iterate"]


def test_run_without_its_last_checkpoint_is_refused(run):
    (checkpoint,) = run.folder.glob("checkpoint-000004-*.pt")
    checkpoint.write_bytes(b"no")
    with pytest.raises(RunError, match=r"no intact last checkpoint. Remove its result\.json"):
        measure(run, ["curvature"], QUICK)
    (run.folder / "result.json").unlink()
    with pytest.raises(RunError, match=r"result\.json is missing, but manifest\.json lists it"):
        measure(run, ["curvature"], QUICK)


def train_variant(tmp_path: Path, **changes: Any) -> RunFolder:
    recipe = replace(RECIPE, **changes)
    train(recipe, tmp_path / "other")
    return RunFolder(tmp_path / "other", recipe, 0)


def test_window_average_counts_only_its_window(tmp_path):
    average = Average(0, weighting="window", size=2)
    run = train_variant(tmp_path, average=average, keep_iterates=4)
    assert measure(run, ["diversity"], QUICK).values["diversity"]["points"] == 2


def test_two_iterates_and_their_average_span_no_plane(tmp_path):
    run = train_variant(tmp_path, epochs=3)
    assert list(run.iterates()) == [1, 2, 3]  # the first did not enter the average
    found = measure(run, ["landscape", "diversity"], QUICK)
    assert found.values["diversity"]["points"] == 2
    assert found.values["plane"]["x"] == []
    assert not found.failed


def test_missing_iterates_give_one_notice_that_says_what_to_do(tmp_path):
    run = train_variant(tmp_path, epochs=2, average=Average(0), keep_iterates=0)
    notices: list[str] = []
    found = measure(run, ["diversity", "ensemble"], QUICK, on_notice=notices.append)
    assert not found.values
    (notice,) = notices
    assert "--set keep_iterates=N" in notice


def test_parts_of_records_alone_need_no_weights(run):
    shutil.rmtree(run.folder / "iterates")
    for checkpoint in run.folder.glob("checkpoint-*"):
        checkpoint.unlink()
    assert not measure(run, ["rate", "parameters"], QUICK).values


def test_unknown_part_is_refused(run):
    with pytest.raises(StudyError, match=r"no part 'diversty'\. Did you mean 'diversity'"):
        measure(run, ["diversty"], QUICK)
