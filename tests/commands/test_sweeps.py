"""`gadam train`, `compare` and `reproduce`: what they train, write and print."""

from __future__ import annotations

import io
import json
from contextlib import redirect_stdout
from pathlib import Path

import pytest

import synthetic
from gadam.commands import main, sweeps
from gadam.commands.options import SweepOptions
from gadam.runs import Experiment, RunResult, collect
from gadam.runs.files import read_json
from gadam.runs.summary import summarize
from gadam.train import experiments

pytestmark = pytest.mark.usefixtures("quick_workers")

SETTINGS = ["epochs=2", "examples=1600", "data.size=8", "average.start=0"]
TINY = [word for setting in SETTINGS for word in ("--set", setting)]


def run(*arguments: str) -> int:
    return main(list(arguments))


# ----------------------------------------------------------------------------------------- train


def test_train_with_changed_settings(tmp_path, capsys):
    arguments = ["train", "compare-gadam", "--out", str(tmp_path), *TINY, "--json"]
    arguments += ["--workers", "1"]
    assert run(*arguments) == 0
    events = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    kinds = ["started", "epoch", "epoch", "finished", "summary"]
    assert [event["event"] for event in events] == kinds
    finished, summary = events[-2:]
    assert finished["samples"] == 2
    assert RunResult.from_dict(json.loads((tmp_path / "compare-gadam-0/result.json").read_text()))
    accuracy = finished["average"]["test"]["accuracy"]
    assert summary["rows"][0]["average"] == {"mean": accuracy, "error": None, "count": 1}
    recipe = json.loads((tmp_path / "compare-gadam-0" / "run.json").read_text())["recipe"]
    assert (recipe["epochs"], recipe["average"]["start"]) == (2, 0)
    # The same command is done already; another recipe in the same folder is refused.
    assert run(*arguments) == 0
    again = [json.loads(line)["event"] for line in capsys.readouterr().out.splitlines()]
    assert again == ["started", "finished", "summary"]
    assert run(*arguments, "--set", "lr=0.5") == 2
    assert "holds a run of another recipe (optimizer.lr" in capsys.readouterr().err


def test_train_several_seeds(tmp_path, capsys):
    arguments = ["--out", str(tmp_path), *TINY[:-2], "--quiet", "--seed", "3", "--seeds", "2"]
    assert run("train", "compare-sgd", *arguments) == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["compare-sgd-3", "compare-sgd-4"]
    text = capsys.readouterr().out
    assert "±" in text
    assert f"The runs are in {tmp_path}." in text


def test_a_failed_run_ends_with_code_1(tmp_path, capsys):
    (tmp_path / "compare-sgd-0" / ".lock").mkdir(parents=True)  # cannot be opened
    assert run("train", "compare-sgd", "--out", str(tmp_path), *TINY[:-2]) == 1
    captured = capsys.readouterr()
    assert "FAILED compare-sgd, seed 0: " in captured.err
    assert "compare-sgd (1 failed)" in captured.out


def test_tensorboard_files(tmp_path, capsys):
    arguments = ["train", "compare-gadam", "--out", str(tmp_path), *TINY, "--tensorboard"]
    try:
        import tensorboard  # noqa: F401
    except ImportError:
        assert run(*arguments) == 2
        assert "--tensorboard needs a package. Run: pip install tensorboard" in (
            capsys.readouterr().err
        )
        assert not list(tmp_path.iterdir())
    else:
        assert run(*arguments) == 0
        assert list(tmp_path.rglob("events.*"))


# ------------------------------------------------------------------------- compare and reproduce


@pytest.fixture(scope="module")
def compared(tmp_path_factory) -> tuple[Path, str]:
    """Return the folder and the output of a tiny comparison."""
    folder = tmp_path_factory.mktemp("compare")
    with redirect_stdout(io.StringIO()) as printed:
        assert run("compare", "--out", str(folder), "--seeds", "2", *TINY) == 0
    return folder, printed.getvalue()


def test_compare_ends_with_a_table(compared):
    folder, text = compared
    for method in ("SGD", "SWA", "AdamW", "Gadam", "PadamW", "GadamX"):
        assert method in text
    assert "±" in text
    assert "What iterate averaging does: test accuracy, %" in text
    assert f"The runs, summary.md and summary.json are in {folder}." in text
    assert f"The report is {folder / 'report.html'}." in text
    assert "| method |" in (folder / "summary.md").read_text()
    verdicts = read_json(folder / "summary.json")["verdicts"]
    assert len(verdicts) == 2
    for verdict in verdicts:
        assert f"{verdict['task']}: {verdict['sentence']}" in text


def test_compare_writes_its_numbers(compared):
    folder, _ = compared
    content = read_json(folder / "summary.json")
    recipes = experiments.get("compare").recipes
    assert [row["label"] for row in content["rows"]] == list(recipes)
    assert all(row["runs"] == 2 for row in content["rows"])
    differences = [row["difference"] for row in content["rows"] if row["base"]]
    assert all(d["count"] == 2 for d in differences)
    assert set(content["recipes"]) == set(recipes)
    assert {"scale", "seeds", "command", "versions", "machine", "note"} <= set(content)
    assert content["command"] == "gadam compare --seeds 2 " + " ".join(TINY)


def test_the_folder_describes_the_experiment(compared):
    folder, _ = compared
    experiment = Experiment.from_dict(read_json(folder / "experiment.json"))
    assert (experiment.name, experiment.seeds, experiment.split) == ("compare", 2, "test")
    assert all(recipe.epochs == 2 for recipe in experiment.recipes.values())
    found = collect([folder])
    assert found.problems == ()
    assert (len(found.runs), found.expected) == (24, 24)
    assert found.experiment == experiment
    table = summarize(found.experiment, found.results)
    content = read_json(folder / "summary.json")
    assert [row.iterate and row.iterate.mean for row in table] == [
        row["iterate"]["mean"] for row in content["rows"]
    ]


def test_the_summary_event_names_the_report(tmp_path, capsys):
    arguments = ["--out", str(tmp_path), "--seeds", "1", *TINY, "--json"]
    assert run("reproduce", "mnist-logistic", *arguments) == 0
    last = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert last["event"] == "summary"
    assert last["report"] == str(tmp_path / "report.html")
    assert (tmp_path / "report.html").exists()
    written = read_json(tmp_path / "summary.json")
    assert {key: last[key] for key in written} == written


def test_settings_of_the_average_apply_to_rows_that_have_one(tmp_path):
    arguments = ["--out", str(tmp_path), "--seeds", "1", *TINY[:-1], "start=1", "--quiet"]
    assert run("reproduce", "mnist-logistic", *arguments) == 0
    averages = {
        path.parent.name: json.loads(path.read_text())["recipe"]["average"]
        for path in tmp_path.rglob("run.json")
    }
    assert averages["sgd-0"] is None
    assert averages["swa-0"]["start"] == 1


def test_rows_are_selected_by_whole_words():
    experiment = experiments.get("tab-cifar")
    for wanted in ("gadam", "GADAM"):
        rows = sweeps.select_rows(experiment, wanted).recipes
        assert rows
        assert all(row.endswith("Gadam") for row in rows)  # not GadamX
    assert sweeps.select_rows(experiment, "") == experiment


def test_published_numbers_are_dropped_if_the_task_changes(monkeypatch):
    synthetic.install(monkeypatch)
    experiment = experiments.get("tab-cifar", "paper")
    assert experiment.published
    same = sweeps._described(experiment, SweepOptions(settings=("lr=0.05",), seeds=7))
    assert (same.published, same.seeds) == (experiment.published, 7)
    other = sweeps._described(experiment, SweepOptions(settings=("data.label_noise=0.1",)))
    assert other.published == {}


def test_the_floor_is_known_if_all_rows_learn_the_same_synthetic_text():
    texts = experiments.get("lm-mini").recipes.values()
    floors = sweeps.known_floors(texts)
    assert set(floors["perplexity"]) >= {"test"}
    assert "The true probabilities have a test perplexity of" in sweeps.floor_note(floors)
    images = experiments.get("compare").recipes.values()
    assert sweeps.known_floors(images) == sweeps.known_floors([*texts, *images]) == {}
    assert sweeps.floor_note({}) == ""
