"""Collecting run folders: finished, running, failed, damaged and foreign ones."""

from __future__ import annotations

import json
import math
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import made
from gadam.runs.collect import collect
from gadam.runs.files import write_json


def change(path: Path, **values: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


# --------------------------------------------------------------------------------- intact folders


def test_a_finished_sweep(tmp_path):
    found = collect([made.sweep(tmp_path)])
    assert found.problems == ()
    assert found.title == found.experiment.title == "Made up"
    assert found.labels == ["AdamW", "Gadam"]
    assert [(run.label, run.seed) for run in found.runs] == [
        (label, seed) for label in ("AdamW", "Gadam") for seed in range(3)
    ]
    assert found.expected == 6
    assert set(found.results) == {(run.label, run.seed) for run in found.runs}
    assert found.experiment.recipes == made.RECIPES
    assert found.experiment.bases == {"Gadam": "AdamW"}
    assert found.experiment.command == "gadam reproduce made"


def test_a_run_is_read_completely(tmp_path):
    made.sweep(tmp_path)
    run = collect([tmp_path]).runs_of("Gadam")[1]
    assert run.folder == tmp_path / "gadam-1"
    assert (run.label, run.seed, run.recipe) == ("Gadam", 1, made.RECIPES["Gadam"])
    assert run.header.versions == {"gadam": "0", "torch": "2"}
    assert [record.epoch for record in run.epochs] == [1, 2, 3, 4, 5, 6]
    assert run.result is not None
    assert run.result.average == run.epochs[-1].average
    assert run.status == "done"


def test_runs_without_an_experiment(tmp_path):
    made.run(tmp_path / "a", "Gadam", 0)
    made.run(tmp_path / "b", "AdamW", 0)
    found = collect([tmp_path])
    assert (found.title, found.expected, found.problems) == ("Runs", 0, ())
    assert found.labels == ["AdamW", "Gadam"]


def test_nothing(tmp_path):
    found = collect([tmp_path])
    assert (found.runs, found.problems) == ((), ())


def test_a_folder_that_does_not_exist(tmp_path):
    assert collect([tmp_path / "gone"]).problems == (f"{tmp_path / 'gone'} is not a folder.",)


def test_a_folder_given_twice_counts_once(tmp_path):
    made.sweep(tmp_path)
    assert len(collect([tmp_path, tmp_path / "gadam-0", str(tmp_path)]).runs) == 6


def test_a_label_may_be_missing(tmp_path):
    made.run(tmp_path / "a", "Gadam", 0)
    for value in (None, ""):
        change(tmp_path / "a" / "run.json", label=value)
        assert collect([tmp_path]).labels == ["Gadam"]  # the name of its method


def test_old_headers_without_threads_are_read(tmp_path):
    made.run(tmp_path / "a", "Gadam", 0)
    header = json.loads((tmp_path / "a" / "run.json").read_text())
    del header["threads"]
    write_json(tmp_path / "a" / "run.json", header)
    assert collect([tmp_path]).problems == ()


# ---------------------------------------------------------------------------- unfinished runs


def test_a_running_sweep(tmp_path):
    made.sweep(tmp_path)
    shutil.rmtree(tmp_path / "gadam-2")
    shutil.rmtree(tmp_path / "gadam-1")
    made.run(tmp_path / "gadam-1", "Gadam", 1, epochs=2)
    found = collect([tmp_path])
    assert found.problems == (
        "1 of 6 runs has not started.",
        "1 run is not finished. It is not in the table.",
    )
    assert found.runs_of("Gadam")[1].status == "at epoch 2 of 6"
    assert ("Gadam", 1) not in found.results


def test_a_failed_run(tmp_path):
    made.sweep(tmp_path)
    (tmp_path / "gadam-1" / "result.json").unlink()
    write_json(tmp_path / "gadam-1" / "failure.json", {"reason": "no memory"})
    found = collect([tmp_path])
    assert found.problems == ("Gadam, seed 1 failed: no memory",)
    assert found.runs_of("Gadam")[1].status == "failed (no memory)"
    assert found.results["Gadam", 1] is None


@pytest.mark.parametrize("content", ["{", "{}", "[]", '{"reason": null}'])
def test_a_damaged_failure_is_a_failure(tmp_path, content):
    made.sweep(tmp_path)
    (tmp_path / "gadam-1" / "result.json").unlink()
    (tmp_path / "gadam-1" / "failure.json").write_text(content)
    found = collect([tmp_path])
    assert "Gadam, seed 1 failed: unknown" in found.problems
    assert found.results["Gadam", 1] is None


def test_diverged_runs_are_named(tmp_path):
    made.run(tmp_path / "a", "Gadam", 0)
    made.run(tmp_path / "b", "LSTM", 0, recipe=made.LANGUAGE)
    for folder in ("a", "b"):
        change(tmp_path / folder / "result.json", status="diverged")
    assert collect([tmp_path]).problems == (
        "Gadam, seed 0 diverged: the means include its last metrics.",
        "LSTM, seed 0 diverged: no mean includes it.",
    )


def test_null_is_read_as_nan(tmp_path):
    made.run(tmp_path / "a", "Gadam", 0)
    point = {"test": {"accuracy": None}}
    change(tmp_path / "a" / "result.json", iterate=point)
    lines = tmp_path / "a" / "epochs.jsonl"
    *before, last = lines.read_text().splitlines(keepends=True)
    last = json.dumps({**json.loads(last), "iterate": point}) + "\n"
    lines.write_text("".join([*before, last]))
    result = collect([tmp_path]).runs[0].result
    assert result is not None
    assert math.isnan(result.iterate["test"]["accuracy"])
    assert result.metric("accuracy", "iterate") is None


# --------------------------------------------------------------------------------- damaged files


@pytest.mark.parametrize("name", ["run.json", "result.json", "experiment.json"])
@pytest.mark.parametrize(
    "content",
    [
        "",
        "{",
        "[]",
        "3",
        "{}",
        "[" * 100_000,
        '{"recipe": 3, "seed": 1}',
        '{"recipe": {"name": "r", "model": "m"}, "seed": "one"}',
        '{"status": 1}',
        '{"name": "e", "title": "t", "recipes": [], "seeds": 1}',
        '{"name": "e", "title": "t", "recipes": {}, "seeds": "many"}',
    ],
)
def test_a_damaged_file_is_named_and_skipped(tmp_path, name, content):
    made.sweep(tmp_path)
    folder = tmp_path if name == "experiment.json" else tmp_path / "gadam-1"
    (folder / name).write_text(content)
    found = collect([tmp_path])
    named = [p for p in found.problems if "is damaged" in p]
    assert len(named) == 1
    assert str(folder) in named[0]
    assert named[0].endswith(".")
    assert not named[0].endswith("..")
    assert len(found.runs) >= 5
    assert len(found.runs_of("AdamW")) == 3


def test_bytes_that_are_no_text_are_skipped(tmp_path):
    made.sweep(tmp_path)
    (tmp_path / "gadam-1" / "run.json").write_bytes(b"\xff\xfe")
    (tmp_path / "gadam-2" / "epochs.jsonl").write_bytes(b"\xff\xfe\n")
    found = collect([tmp_path])
    assert len(found.runs) == 5
    assert any("gadam-1" in problem for problem in found.problems)
    assert any("gadam-2" in problem for problem in found.problems)


def test_a_recipe_of_another_version_is_named(tmp_path):
    made.sweep(tmp_path)
    change(tmp_path / "gadam-1" / "run.json", recipe={"name": "r", "model": "m", "tomorrow": 1})
    problem = next(p for p in collect([tmp_path]).problems if "gadam-1" in p)
    assert "written by another version of gadam: it has ['tomorrow']." in problem


def test_damaged_lines_are_counted(tmp_path):
    made.sweep(tmp_path)
    lines = tmp_path / "gadam-1" / "epochs.jsonl"
    with lines.open("a") as file:
        file.write("torn\n")
    assert collect([tmp_path]).problems == (f"{lines} has 1 damaged line.",)


def test_one_line_of_a_running_run_may_be_incomplete(tmp_path):
    made.run(tmp_path / "a", "Gadam", 0, epochs=2)
    lines = tmp_path / "a" / "epochs.jsonl"
    with lines.open("a") as file:
        file.write('{"epoch": 3, "lr": 0.\n')
    found = collect([tmp_path])
    assert len(found.runs[0].epochs) == 2
    assert not any("damaged" in problem for problem in found.problems)
    with lines.open("a") as file:
        file.write("more\n")
    assert f"{lines} has 2 damaged lines." in collect([tmp_path]).problems


@pytest.mark.parametrize("name", ["result.json", "epochs.jsonl", "run.json", "manifest.json"])
def test_changed_files_of_a_finished_run_are_named(tmp_path, name):
    made.run(tmp_path / "a", "Gadam", 0, sealed=True)
    assert collect([tmp_path]).problems == ()
    path = tmp_path / "a" / name
    content = bytearray(path.read_bytes())
    content[content.index(b"1")] ^= 2
    path.write_bytes(content)
    found = collect([tmp_path])
    expected = "is damaged" if name == "manifest.json" else "does not match manifest.json"
    assert f"{path} {expected}" in found.problems[0]
    if name == "run.json":
        assert found.runs == ()
        assert found.problems[1] == f"{path.parent} was skipped: its recipe cannot be trusted."
    elif name == "epochs.jsonl":  # the result is intact
        assert found.results["Gadam", 0] is not None
        assert len(found.runs[0].epochs) < 6
    else:
        assert f"The result of {path.parent} was left out." in found.problems
        assert found.results == {}


@pytest.mark.parametrize("cut", range(1, 20))
def test_a_cut_record_of_a_finished_run_is_named(tmp_path, cut):
    made.run(tmp_path / "a", "Gadam", 0, sealed=True)
    lines = tmp_path / "a" / "epochs.jsonl"
    content = lines.read_bytes()
    lines.write_bytes(content[: cut * len(content) // 20])
    assert f"{lines} does not match manifest.json" in collect([tmp_path]).problems[0]


def test_a_result_without_a_manifest_does_not_count(tmp_path):
    made.run(tmp_path / "a", "Gadam", 0, sealed=True)
    (tmp_path / "a" / "manifest.json").unlink()
    found = collect([tmp_path])
    assert (found.results, found.runs[0].status) == ({}, "at epoch 6 of 6")


def test_a_changed_experiment_is_named(tmp_path):
    experiment = collect([made.sweep(tmp_path)]).experiment
    path = tmp_path / "experiment.json"
    write_json(path, experiment.to_dict(), sealed=True)
    assert collect([tmp_path]).experiment == experiment
    path.write_text(path.read_text().replace("75.73", "85.73"))
    assert "its content does not match its hash" in collect([tmp_path]).problems[0]


def test_foreign_files_are_ignored(tmp_path):
    made.sweep(tmp_path)
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "gadam-1" / "settings.json").write_text("{")
    (tmp_path / "node_modules").mkdir()
    (tmp_path / "node_modules" / "package.json").write_text("[]")
    assert collect([tmp_path]).problems == ()


def test_a_foreign_file_with_a_known_name_is_named(tmp_path):
    made.sweep(tmp_path)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "run.json").write_text('{"scripts": {}}')
    found = collect([tmp_path])
    assert len(found.runs) == 6
    assert any(str(tmp_path / "other") in problem for problem in found.problems)


def test_labels_are_made_printable(tmp_path):
    made.run(tmp_path / "a", "Gadam", 0)
    change(tmp_path / "a" / "run.json", label="a\n\ud800" + "x" * 5000)
    label = collect([tmp_path]).labels[0]
    assert label.startswith("a??x")
    assert len(label) == 80
    label.encode()


# --------------------------------------------------------------------------- several experiments


def test_shared_labels_are_told_apart_by_title(tmp_path):
    one, two = made.sweep(tmp_path / "one"), made.sweep(tmp_path / "two")
    change(two / "experiment.json", title="Another", command="gadam reproduce other")
    found = collect([one, two])
    assert found.labels == [
        "Made up: AdamW",
        "Made up: Gadam",
        "Another: AdamW",
        "Another: Gadam",
    ]
    assert found.title == "Made up · Another"
    assert found.expected == 12
    assert found.problems == ()
    assert found.experiment.bases == {
        "Made up: Gadam": "Made up: AdamW",
        "Another: Gadam": "Another: AdamW",
    }
    assert found.experiment.published == {"Made up: Gadam": 75.73, "Another: Gadam": 75.73}
    assert found.experiment.command == "gadam reproduce made\ngadam reproduce other"


def test_only_shared_labels_are_changed(tmp_path):
    made.sweep(tmp_path / "one")
    two = tmp_path / "two"
    made.run(two / "a", "Gadam", 0)
    made.run(two / "b", "Own", 0, recipe=made.RECIPES["AdamW"])
    assert set(collect([tmp_path]).labels) == {"AdamW", "Made up: Gadam", "Gadam", "Own"}


def test_runs_with_the_same_label_and_seed_are_reported(tmp_path):
    made.run(tmp_path / "a", "Gadam", 0)
    made.run(tmp_path / "b", "Gadam", 0)
    found = collect([tmp_path])
    assert found.problems == ("Some runs share a name and seed. The table shows the last of each.",)
    assert len(found.results) == 1


def with_metric(folder: Path, title: str, metric: str) -> None:
    made.sweep(folder, seeds=1)
    change(folder / "experiment.json", title=title, metric=metric)


def test_experiments_with_different_metrics(tmp_path):
    with_metric(tmp_path / "one", "One", "top5")
    with_metric(tmp_path / "two", "Two", "accuracy")
    found = collect([tmp_path / "one", tmp_path / "two"])
    assert found.experiment.metric == "top5"
    assert found.problems == (
        "The experiments use different metrics (top5, accuracy). All are shown by top5.",
    )


def test_texts_do_not_decide_the_metric_of_images(tmp_path):
    """Experiments on texts are rated by perplexity, whatever metric they have for images."""
    text = tmp_path / "text"
    made.run(text / "a", "LSTM", 0, recipe=made.LANGUAGE)
    experiment = replace(
        collect([made.sweep(tmp_path / "template")]).experiment,
        title="Texts",
        recipes={"LSTM": made.LANGUAGE},
        bases={},
        published={},
        seeds=1,
    )
    write_json(text / "experiment.json", experiment.to_dict())
    with_metric(tmp_path / "images", "Images", "top5")
    found = collect([text, tmp_path / "images"])
    assert found.experiment.metric == "top5"
    assert found.experiment.metrics == ["perplexity", "top5"]
    assert found.problems == ()


def test_floors_are_those_of_a_single_experiment(tmp_path):
    one, two = made.sweep(tmp_path / "one"), made.sweep(tmp_path / "two")
    change(one / "experiment.json", floors={"perplexity": {"test": 9.5}})
    assert collect([one]).experiment.floors == {"perplexity": {"test": 9.5}}
    assert collect([one, two]).experiment.floors == {}


# -------------------------------------------------------------------------------------- sections


def test_sections_of_other_parts(tmp_path):
    made.sweep(tmp_path)
    blocks = [{"kind": "text", "text": "Iterates are far apart."}]
    (tmp_path / "sections").mkdir()
    write_json(tmp_path / "sections" / "a.json", {"title": "Diversity", "blocks": blocks})
    write_json(tmp_path / "sections" / "b.json", {"title": "No blocks"})
    (tmp_path / "sections" / "c.json").write_text("{")
    found = collect([tmp_path])
    assert [(s.title, s.blocks, s.folder) for s in found.sections] == [
        ("Diversity", tuple(blocks), tmp_path / "sections")
    ]
    sections = tmp_path / "sections"
    assert found.problems[0] == f"{sections / 'b.json'} is not a section: it has no list of blocks."
    assert found.problems[1].startswith(f"{sections / 'c.json'} is damaged and was skipped: ")


def test_searches_two_levels_deep(tmp_path):
    for depth, place in enumerate(("", "a", "a/b", "a/b/c")):
        made.run(tmp_path / "here" / place / f"run-{depth}", "Gadam", depth)

    def seeds(folder: Path) -> list[int]:
        return [run.seed for run in collect([folder]).runs]

    assert seeds(tmp_path / "here") == [0, 1]
    assert seeds(tmp_path / "here" / "a" / "b") == [2, 3]
    assert seeds(tmp_path / "here" / "run-0") == [0]


@pytest.mark.parametrize(
    ("finished", "unfinished", "expected"),
    [
        (1, 0, "1 run (finished)"),
        (0, 1, "1 run (not finished)"),
        (2, 0, "2 runs (all finished)"),
        (0, 2, "2 runs (none finished)"),
        (1, 2, "3 runs (1 finished)"),
    ],
)
def test_describes_what_was_found(tmp_path, finished, unfinished, expected):
    for seed in range(finished + unfinished):
        made.run(tmp_path / str(seed), "Gadam", seed)
        if seed >= finished:
            (tmp_path / str(seed) / "result.json").unlink()
            (tmp_path / str(seed) / "manifest.json").unlink(missing_ok=True)
    assert collect([tmp_path]).describe() == expected
