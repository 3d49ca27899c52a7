"""The program as its user meets it."""

from __future__ import annotations

import json
import sys

import pytest

from gadam import cli
from gadam.train import commands, experiments, sweep

TINY = [
    "--set",
    "epochs=2",
    "--set",
    "examples=1600",
    "--set",
    "data.size=8",
    "--set",
    "average.start=0",
]


def run(*arguments: str) -> int:
    return cli.main(list(arguments))


def test_help_reads_like_a_guide(capsys):
    assert run("--help") == run() == 0
    text = capsys.readouterr().out
    for command in commands._COMMANDS:
        assert f"gadam {command}" in text
    assert "Exit codes" in text


@pytest.mark.parametrize("command", commands._COMMANDS)
def test_every_command_has_help(command, capsys):
    with pytest.raises(SystemExit) as stop:
        run(command, "--help")
    assert stop.value.code == 0
    assert f"gadam {command}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["compar"], "did you mean 'compare'"),
        (["reproduce", "tab-cifra"], "did you mean 'tab-cifar'"),
        (["train", "compare-gadm"], "did you mean 'compare-gadam'"),
        (["train", "compare-gadam", "--set", "lrr=1"], "did you mean 'lr'"),
        (["compare", "--seeds", "0"], "at least 1"),
        (["compare", "--set", "epochs=many"], "whole number"),
        (["data", "cifar1000"], "did you mean"),
        (["compare", "--set", "model=vgg-minni"], "did you mean"),
        (["compare", "--set", "data.name=cifar1000"], "did you mean"),
        (["compare", "--set", "data.size=4"], "at least 8x8"),
        (["compare", "--device", "warp9"], "--device warp9"),
        (["compare", "--threads", "0"], "--threads must be at least 1"),
        (["compare", "--set", "betas=0.9,1.5"], "Invalid beta parameter"),
        (["compare", "--set", "examples=999999"], "5000 training examples"),
        (["compare", "--set", "clip=-1"], "clip must be positive"),
        (["compare", "--set", "epochs=2"], "leaves nothing to average"),
        (["compare", "--set", "average.decay=2", "--set", "weighting=ema"], "Invalid decay"),
        (["compare", "--set", "name=adamw"], "could be any of"),
    ],
)
def test_mistakes_get_a_sentence_and_code_2(arguments, sentence, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert run(*arguments) == 2
    errors = capsys.readouterr().err
    assert sentence in errors
    assert "Traceback" not in errors
    assert not list(tmp_path.iterdir())


def test_missing_data_is_said_before_any_work(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GADAM_DATA", str(tmp_path / "nowhere"))
    assert run("reproduce", "tab-cifar", "--scale", "paper") == 2
    assert "gadam data cifar10" in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()


def test_a_flag_that_does_not_exist(capsys):
    with pytest.raises(SystemExit) as stop:
        run("compare", "--sedes", "3")
    assert stop.value.code == 2


def test_list_names_everything_with_its_cost(capsys):
    assert run("list", "--json") == 0
    listed = json.loads(capsys.readouterr().out)
    assert [entry["name"] for entry in listed] == experiments.names()
    assert all(entry["hours"]["mini"] > 0 for entry in listed)
    assert run("list", "--recipes") == 0
    text = capsys.readouterr().out
    assert "tab-linear-step" in text
    assert "compare-gadam" in text


def test_train_with_changed_settings(tmp_path, capsys):
    arguments = [
        "train",
        "compare-gadam",
        "--out",
        str(tmp_path),
        *TINY,
        "--json",
        "--workers",
        "1",
    ]
    assert run(*arguments) == 0
    events = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [event["event"] for event in events] == ["started", "epoch", "epoch", "finished"]
    assert events[-1]["samples"] == 2
    recipe = json.loads((tmp_path / "compare-gadam-0" / "run.json").read_text())["recipe"]
    assert (recipe["epochs"], recipe["average"]["start"]) == (2, 0)
    # The same again is done already; another recipe in the same place is refused.
    assert run(*arguments) == 0
    assert run(*arguments, "--set", "lr=0.5") == 2
    assert "another recipe (optimizer.lr" in capsys.readouterr().err


def test_compare_ends_with_a_table(tmp_path, capsys):
    assert run("compare", "--out", str(tmp_path), "--seeds", "2", *TINY) == 0
    text = capsys.readouterr().out
    for method in ("SGD", "SWA", "AdamW", "Gadam", "PadamW", "GadamX"):
        assert method in text
    assert "±" in text
    table = json.loads((tmp_path / "summary.json").read_text())
    assert len(table["rows"]) == len(experiments.get("compare").recipes)
    assert all(row["runs"] == 2 for row in table["rows"])
    differences = [row["difference"] for row in table["rows"] if row["base"]]
    assert all(d["count"] == 2 for d in differences)
    assert "| method |" in (tmp_path / "summary.md").read_text()
    assert f"The report is {tmp_path / 'report.html'}" in text


def test_the_report_is_written_for_programs_too(tmp_path, capsys):
    arguments = ["--out", str(tmp_path), "--seeds", "1", *TINY, "--json"]
    assert run("reproduce", "mnist-logistic", *arguments) == 0
    last = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert last["event"] == "summary"
    assert last["report"] == str(tmp_path / "report.html")
    assert (tmp_path / "report.html").exists()


def test_settings_of_the_average_are_for_those_who_have_one(tmp_path, capsys):
    arguments = ["--out", str(tmp_path), "--seeds", "1", *TINY[:-1], "start=1", "--quiet"]
    assert run("reproduce", "mnist-logistic", *arguments) == 0
    averages = {
        path.parent.name: json.loads(path.read_text())["recipe"]["average"]
        for path in tmp_path.rglob("run.json")
    }
    assert averages["sgd-0"] is None
    assert averages["swa-0"]["start"] == 1


def test_a_failed_run_gives_code_1(tmp_path, capsys):
    (tmp_path / "compare-sgd-0" / ".lock").mkdir(parents=True)  # cannot be opened
    assert run("train", "compare-sgd", "--out", str(tmp_path), *TINY) == 1
    captured = capsys.readouterr()
    assert "FAILED" in captured.out + captured.err


def test_a_missing_extra_is_named(monkeypatch):
    for name in list(sys.modules):
        if name == "gadam.train.commands" or name.split(".")[0] == "tyro":
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "tyro", None)
    monkeypatch.delattr(sys.modules["gadam.train"], "commands", raising=False)
    with pytest.raises(SystemExit, match=r"pip install 'gadam\[train\]'"):
        run("compare")


def test_one_process_for_each_core():
    assert sweep.available_cores() >= 1
