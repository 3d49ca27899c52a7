"""`--json` means the same in every command: one JSON object per line, and nothing else."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import made
from gadam.commands import COMMANDS, bench, main
from gadam.train import experiments

pytestmark = pytest.mark.usefixtures("quick_workers")

SETTINGS = ["epochs=2", "examples=1600", "data.size=8", "average.start=0"]
TINY = [word for setting in SETTINGS for word in ("--set", setting)]

# The arguments of each command, and the events it prints, the last ones with the final table.
CASES: dict[str, tuple[list[str], list[str]]] = {
    "train": (
        ["compare-gadam", *TINY, "--out", "runs"],
        ["started", "epoch", "epoch", "finished", "summary"],
    ),
    "compare": ([*TINY, "--seeds", "1", "--out", "runs"], ["summary"]),
    "reproduce": (
        ["mnist-logistic", *TINY, "--seeds", "1", "--out", "runs", "--workers", "1"],
        ["started", "epoch", "epoch", "finished"] * 2 + ["summary"],
    ),
    "list": ([], ["experiment"]),
    "data": (["fashion-mini"], ["data"]),
    "tails": (["trained"], ["tails"]),
    "average": (["step-*.pt", "--out", "averaged.pt"], ["average"]),
    "report": (["made"], ["report"]),
    "analyze": (["made", "--parts", "rate,parameters", "--workers", "1"], ["analysis"]),
    "theory": (["ema", "--out", "figures"], ["figure"]),
    "bench": (["preresnet110", "--repetitions", "1"], ["bench"]),
    "verify": (["made"], ["summary"]),
}


def refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")


def objects(text: str) -> list[dict[str, Any]]:
    """Parse one JSON object per line."""
    found = [json.loads(line, parse_constant=refuse) for line in text.splitlines()]
    assert all(isinstance(line, dict) for line in found)
    return found


def test_every_command_is_tested():
    assert set(CASES) == set(COMMANDS)


@pytest.mark.parametrize("command", CASES)
def test_json(command, tmp_path: Path, monkeypatch, capfd):
    """Capture the file descriptors, so that worker processes count too."""
    monkeypatch.chdir(tmp_path)
    known = bench.contenders()
    monkeypatch.setattr(bench, "contenders", lambda: {n: known[n] for n in (bench.BASE, "Gadam")})
    made.sweep(tmp_path / "made")
    for step in (1, 2):
        torch.save({"w": torch.ones(2)}, f"step-{step}.pt")
    if command == "tails":
        assert main(["train", "compare-gadam", *TINY, "--set", "blocks=1", "--out", "trained"]) == 0
        capfd.readouterr()
    arguments, events = CASES[command]
    assert main([command, *arguments, "--json"]) == 0
    lines = objects(capfd.readouterr().out)
    assert lines
    found = [line["event"] for line in lines]
    if command in ("train", "reproduce"):
        assert found == events
    assert found[-len(events) :] == events


def test_the_final_table_is_printed(tmp_path, capsys):
    arguments, _ = CASES["train"]
    assert main(["train", *arguments[:-1], str(tmp_path), "--json"]) == 0
    *_, finished, summary = objects(capsys.readouterr().out)
    (row,) = summary["rows"]
    assert row["iterate"]["mean"] == finished["iterate"]["test"]["accuracy"]
    assert row["average"]["mean"] == finished["average"]["test"]["accuracy"]


def test_the_tables_of_the_analysis_are_printed(tmp_path, capsys):
    made.sweep(tmp_path)
    assert main(["analyze", str(tmp_path), "--parts", "parameters", "--json"]) == 0
    last = objects(capsys.readouterr().out)[-1]
    (table,) = last["tables"]["parameters"]
    assert all(len(row) == len(table["header"]) for row in table["rows"])
    assert last["report"] == str(tmp_path / "report.html")


def test_a_failure_is_an_event(tmp_path, capsys):
    (tmp_path / "compare-sgd-0" / ".lock").mkdir(parents=True)  # cannot be opened
    arguments = ["compare-sgd", *TINY[:-2], "--out", str(tmp_path), "--json"]
    assert main(["train", *arguments]) == 1
    lines = objects(capsys.readouterr().out)
    assert [line["event"] for line in lines] == ["started", "failed", "summary"]
    assert "could not be written" in lines[1]["reason"]
    assert (lines[2]["rows"][0]["runs"], lines[2]["rows"][0]["failed"]) == (0, 1)


def test_numbers_that_json_cannot_represent_are_null(tmp_path, capsys):
    arguments = ["compare-sgd", *TINY[:-2], "--set", "lr=1e38", "--out", str(tmp_path), "--json"]
    assert main(["train", *arguments]) == 0
    lines = objects(capsys.readouterr().out)
    assert lines[-2]["status"] == "diverged"
    assert lines[-2]["iterate"]["test"]["loss"] is None


def test_list_names_every_experiment_with_its_cost(capsys):
    assert main(["list", "--json"]) == 0
    listed = objects(capsys.readouterr().out)
    assert [entry["name"] for entry in listed] == experiments.names()
    assert all(entry["hours"][scale] > 0 for entry in listed for scale in ("mini", "paper"))
    assert main(["list", "--recipes"]) == 0
    text = capsys.readouterr().out
    for recipe in (name for entry in listed for name in entry["recipes"]):
        assert recipe in text
