"""k steps, a checkpoint, and k steps in a new process equal 2k steps bit for bit."""

from __future__ import annotations

import subprocess
import sys

import torch

import resume_worker
from contract import same
from gadam.average.progress import Progress


def test_resume_in_a_new_process_is_bitwise(tmp_path):
    resume_worker.main("straight", str(tmp_path / "straight.pt"))
    checkpoint = str(tmp_path / "checkpoint.pt")
    resume_worker.main("save", checkpoint)
    command = [resume_worker.__file__, "resume", str(tmp_path / "resumed.pt"), checkpoint]
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    straight = torch.load(tmp_path / "straight.pt", weights_only=True)
    resumed = torch.load(tmp_path / "resumed.pt", weights_only=True)
    assert len(straight) > 100
    for case, expected in straight.items():
        try:
            same(resumed[case], expected)
        except AssertionError as error:
            raise AssertionError(f"{case} does not resume bitwise: {error}") from error

    # The cases match their names: some averages start before the checkpoint, some after it.
    saved = torch.load(checkpoint, weights_only=True)

    def count(states: dict, plan: str) -> int:
        state = states[repr(("Gadam", plan, "float32", False))]
        return Progress.unpack(state["optimizer"]["state"][0]["average_progress"]).count

    assert [count(saved, p) for p in ("before", "at", "next", "after")] == [0, 1, 0, 2]
    assert [count(straight, p) for p in ("before", "at", "next", "after")] == [3, 6, 5, 5]
    assert (count(saved, "plateau waiting"), count(straight, "plateau waiting")) == (0, 3)
    assert (count(saved, "plateau averaging"), count(straight, "plateau averaging")) == (1, 2)
    assert (count(saved, "non-monotone"), count(straight, "non-monotone")) == (0, 4)
