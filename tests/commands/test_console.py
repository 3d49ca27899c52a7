"""What a sweep prints: bars in a terminal, lines in a log, JSON for programs."""

from __future__ import annotations

import io
import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

import made
from gadam.commands import console
from gadam.commands.console import Bars, JsonLines, Lines, Quiet
from gadam.runs import Experiment, RunResult, collect
from gadam.runs.record import EpochRecord
from gadam.runs.summary import SeedMean, summarize
from gadam.runs.verdict import Verdict
from gadam.train import experiments
from gadam.train.sweep import Listener, TrainingJob

JOB = TrainingJob("Gadam", made.RECIPES["Gadam"], 3, Path("runs/gadam-3"))
EPOCH = EpochRecord(1, 0.1, math.nan, iterate={"test": {"accuracy": 80.0}})
RESULT = RunResult("done", 6, {"test": {"accuracy": 81.0}}, seconds={"train": 2.0})


def play(listener: Listener) -> None:
    """Send every kind of event."""
    listener.on_start(JOB)
    listener.on_progress(JOB, 0.5, None)
    listener.on_progress(JOB, 1.0, EPOCH)
    listener.on_notice(JOB, "A file [was] damaged.")
    listener.on_finish(JOB, RESULT)
    listener.on_failure(JOB, "no [memory]")


def test_quiet_prints_only_what_went_wrong(capsys):
    with Quiet() as listener:
        play(listener)
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.splitlines() == [
        "Gadam, seed 3: A file [was] damaged.",
        "FAILED Gadam, seed 3: no [memory]",
    ]


def test_lines_for_a_log(capsys):
    with Lines(seconds=-1.0) as listener:
        play(listener)
    captured = capsys.readouterr()
    assert captured.out.splitlines() == [
        "Gadam, seed 3: started",
        "Gadam, seed 3: epoch 1/6, training loss nan, test accuracy: iterate 80.0%",
        "Gadam, seed 3: done in 2 s, test accuracy: iterate 81.0%",
    ]
    assert "FAILED Gadam, seed 3: no [memory]" in captured.err


def test_lines_are_not_printed_too_often(capsys):
    listener = Lines(seconds=1000.0)
    listener.on_start(JOB)
    for _ in range(5):
        listener.on_progress(JOB, 1.0, EPOCH)
    assert capsys.readouterr().out == "Gadam, seed 3: started\n"


def test_json_for_programs():
    file = io.StringIO()
    with JsonLines(file) as listener:
        play(listener)
    lines = [json.loads(line) for line in file.getvalue().splitlines()]
    about = {"run": "Gadam", "seed": 3, "folder": str(JOB.folder)}
    assert lines == [
        {"event": "started", **about},
        {"event": "epoch", **about, **EPOCH.to_dict(), "train_loss": None},
        {"event": "notice", **about, "sentence": "A file [was] damaged."},
        {"event": "finished", **about, **RESULT.to_dict()},
        {"event": "failed", **about, "reason": "no [memory]"},
    ]


def test_bars_for_a_terminal():
    screen = io.StringIO()
    terminal = Console(file=screen, force_terminal=True, width=120, color_system=None)
    with Bars(terminal, jobs=1) as listener:
        play(listener)
    text = screen.getvalue()
    assert "1/1 runs" in text
    assert "Gadam, seed 3: done in 2 s, test accuracy: iterate 81.0%" in text
    assert "Gadam, seed 3: A file [was] damaged." in text
    assert "FAILED Gadam, seed 3: no [memory]" in text


@pytest.mark.parametrize(
    ("quiet", "as_json", "kind"),
    [
        (False, False, Lines),
        (True, False, Quiet),
        (False, True, JsonLines),
        (True, True, JsonLines),
    ],
)
def test_the_listener_fits_the_output(quiet, as_json, kind):
    assert type(console.listener(3, quiet=quiet, as_json=as_json)) is kind


def test_the_final_table(tmp_path, capsys):
    found = collect([made.sweep(tmp_path)])
    table = summarize(found.experiment, found.results)
    console.print_table(found.experiment, table)
    text = capsys.readouterr().out
    assert "Made up: test accuracy, %" in text
    assert "paper, at full scale" in text
    assert "75.73" in text
    for row in table:
        assert str(row.iterate) in text
        assert row.average is None or str(row.average) in text
    assert "Mean ± standard error over seeds." in text


def test_the_note_is_below_the_table(capsys):
    experiment = Experiment("e", "Title", {}, note="Half of the labels are wrong.")
    console.print_table(experiment, [])
    assert capsys.readouterr().out.rstrip().endswith("Half of the labels are wrong.")


def test_the_list_of_experiments(capsys):
    names = ["compare", "tab-cifar"]
    found = [(name, experiments.get(name), experiments.get(name, "paper")) for name in names]
    console.print_list(found, with_recipes=False)
    text = capsys.readouterr().out
    assert "paper: GPU hours" in text
    assert "cifar10, cifar100" in text
    assert "compare-gadam" not in text
    console.print_list(found, with_recipes=True)
    assert "compare-gadam" in capsys.readouterr().out


def test_piped_output_is_never_truncated(capsys):
    recipe = made.RECIPES["Gadam"]
    label = "a method with a long name " * 20
    experiment = Experiment("e", "Title", {label: recipe}, note="A long note. " * 50)
    result = RunResult("done", 6, {"test": {"accuracy": 81.0}}, seconds={"train": 2.0})
    results: dict[tuple[str, int], RunResult | None] = {(label, 0): result}
    console.print_table(experiment, summarize(experiment, results))
    lines = capsys.readouterr().out.splitlines()
    assert any(label.strip() in line and "81.00" in line for line in lines)
    assert ("A long note. " * 50).strip() in [line.strip() for line in lines]
    assert not any("…" in line for line in lines)


def test_verdicts_have_headings_if_there_are_several(capsys):
    first = Verdict("task [a]", "accuracy", "SGD", SeedMean(81.0, 0.1, 3))
    console.print_verdicts([first])
    assert capsys.readouterr().out == "SGD is best: 81.0% accuracy.\n"
    console.print_verdicts([first, replace(first, task="task b")])
    assert capsys.readouterr().out.splitlines() == [
        "task [a]: SGD is best: 81.0% accuracy.",
        "task b: SGD is best: 81.0% accuracy.",
    ]


def test_a_notice_that_runs_share_is_printed_once(capsys):
    with Lines() as listener:
        for seed in range(3):
            listener.on_notice(replace(JOB, seed=seed), "There is no test data.")
    assert capsys.readouterr().err.splitlines() == ["Gadam, seed 0: There is no test data."]
