"""A small sample of the faults that `make chaos` injects."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="it looks for workers in /proc")
@pytest.mark.parametrize(
    ("options", "total"),
    [
        ("--kills 12 --damages 26 --full-disks 2 --pairs 2", 12 + 26 + 2 + 2),
        ("--scale --kills 6 --damages 4 --full-disks 1 --ray 3", 6 + 4 + 1 + 3),
    ],
    ids=["one process", "scale"],
)
def test_a_small_sample_loses_nothing(options, total, tmp_path):
    """Run it in a new process, because it forks."""
    if "--scale" in options:
        pytest.importorskip("ray")
    out = ["--out", str(tmp_path / "chaos.json")]
    command = [sys.executable, "-m", "chaos", *options.split(), *out]
    folder = Path(__file__).parents[1]
    environment = {**os.environ, "PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    faults = json.loads((tmp_path / "chaos.json").read_text())["faults"]
    assert sum(tally["tried"] for tally in faults.values()) == total
    assert {(tally["lost"], tally["wrong"]) for tally in faults.values()} == {(0, 0)}
