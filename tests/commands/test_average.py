"""`gadam average`."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from gadam.commands import main


@pytest.fixture(autouse=True)
def _checkpoints(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for step in range(2, 12):
        state = {"w": torch.full((2,), float(step)), "bn.running_mean": torch.zeros(1)}
        torch.save(state, f"step-{step}.pt")


def test_the_command_of_the_documentation(capsys):
    arguments = ["step-*.pt", "--last", "20%", "--out", "averaged.pt"]
    assert main(["average", *arguments]) == 0
    assert torch.load("averaged.pt")["w"].tolist() == [10.5, 10.5]
    assert capsys.readouterr().out == (
        "Averaging 2 checkpoints, the oldest first:\n  step-10.pt\n  step-11.pt\n"
        "Wrote averaged.pt: 2 tensors (float32), weights mean.\n"
    )


def test_many_checkpoints_are_abbreviated(capsys):
    assert main(["average", "step-*.pt", "--weights", "ema", "--out", "averaged"]) == 0
    out = capsys.readouterr().out.splitlines()
    assert out[1:7] == [f"  {n}" for n in
        ("step-2.pt", "step-3.pt", "step-4.pt", "…", "step-10.pt", "step-11.pt")]  # fmt: skip
    assert out[-1].endswith("weights ema, decay 0.707107 per checkpoint.")


def test_json_is_the_provenance(capsys):
    arguments = ["step-*.pt", "--from-step", "9", "--weights", "linear", "--sha256", "--json"]
    assert main(["average", *arguments, "--out", "averaged"]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    event = json.loads(line)
    assert event.pop("event") == "average"
    assert event == json.loads(Path("averaged/gadam-average.json").read_text())
    assert [each["weight"] for each in event["inputs"]] == pytest.approx([1 / 6, 2 / 6, 3 / 6])
    assert {len(each["sha256"]) for each in event["inputs"]} == {64}
    assert event["command"] == f"gadam average 'step-*.pt' {' '.join(arguments[1:])} --out averaged"


def test_notes_and_selections_are_printed(tmp_path, capsys):
    task = """
import torch
from gadam.train import SupervisedTask

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.w = torch.nn.Parameter(torch.zeros(2))
        self.bn = torch.nn.Module()
        self.bn.register_buffer("running_mean", torch.zeros(1))

    def forward(self, x):
        return x * self.w

def task():
    x = torch.ones(20, 2)
    return SupervisedTask(model=Net, train=(x, 5.6 * x), validation=(x, 5.6 * x),
                          loss=torch.nn.functional.mse_loss, metric="mae")
"""
    (tmp_path / "my_task.py").write_text(task)
    arguments = ["--select", "greedy", "--task", "my_task.py", "--out", "averaged.pt"]
    assert main(["average", "step-*.pt", *arguments]) == 0
    # 6 is the best (0.4); with 5, the mean is 5.5 (0.1); nothing else is that close.
    expected = "Kept 2 of 10 checkpoints: step-5.pt, step-6.pt. Validation mae: 0.1.\n"
    assert expected in capsys.readouterr().out
    arguments = ["step-2.pt", "step-3.pt", "--dtype", "floot32", "--out", "other"]
    assert main(["average", *arguments]) == 2
    assert "Did you mean float32?" in capsys.readouterr().err


def test_stale_statistics_are_noted(capsys):
    for step in (2, 3):
        state = torch.load(f"step-{step}.pt")
        torch.save({**state, "bn.running_var": torch.ones(1)}, f"step-{step}.pt")
    assert main(["average", "step-2.pt", "step-3.pt", "--out", "averaged"]) == 0
    assert capsys.readouterr().err.startswith("Note: The BatchNorm statistics are averages")


def test_no_checkpoints(capsys):
    assert main(["average", "--out", "averaged"]) == 2
    assert capsys.readouterr().err == "gadam average: Pass at least one path or glob.\n"


def test_help_does_not_import_torch():
    program = (
        "import sys; from gadam.commands import main\n"
        "try: main(['average', '--help'])\n"
        "except SystemExit: sys.exit('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True)
    assert done.returncode == 0
