"""k steps, a checkpoint, and k steps in a new process equal 2k steps bit for bit."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import torch

from contract import same
from gadam.average.progress import Progress


def run(*arguments: object) -> None:
    worker = Path(__file__).with_name("resume_worker.py")
    done = subprocess.run(
        [sys.executable, worker, *map(str, arguments)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


def test_resume_in_a_new_process_is_bitwise(tmp_path):
    run("straight", tmp_path / "straight.pt")
    run("save", tmp_path / "checkpoint.pt")
    run("resume", tmp_path / "resumed.pt", tmp_path / "checkpoint.pt")
    straight = torch.load(tmp_path / "straight.pt", weights_only=True)
    resumed = torch.load(tmp_path / "resumed.pt", weights_only=True)
    assert len(straight) > 100
    for case, expected in straight.items():
        try:
            same(resumed[case], expected)
        except AssertionError as error:
            raise AssertionError(f"{case} does not resume bitwise: {error}") from error

    # The cases match their names: some averages start before the checkpoint, some after it.
    checkpoint = torch.load(tmp_path / "checkpoint.pt", weights_only=True)

    def count(states: dict, plan: str) -> int:
        state = states[repr(("Gadam", plan, "float32", False))]
        return Progress.unpack(state["optimizer"]["state"][0]["average_progress"]).count

    assert [count(checkpoint, p) for p in ("before", "at", "next", "after")] == [0, 1, 0, 2]
    assert [count(straight, p) for p in ("before", "at", "next", "after")] == [3, 6, 5, 5]
    assert (count(checkpoint, "plateau waiting"), count(straight, "plateau waiting")) == (0, 3)
    assert (count(checkpoint, "plateau averaging"), count(straight, "plateau averaging")) == (1, 2)
    assert (count(checkpoint, "non-monotone"), count(straight, "non-monotone")) == (0, 4)
