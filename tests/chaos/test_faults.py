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
def test_a_small_sample_loses_nothing(tmp_path):
    """Run it in a new process, because it forks."""
    counts = ["--kills", "12", "--damages", "26", "--full-disks", "2", "--pairs", "2"]
    command = [sys.executable, "-m", "chaos", *counts, "--out", str(tmp_path / "chaos.json")]
    folder = Path(__file__).parents[1]
    environment = {**os.environ, "PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    faults = json.loads((tmp_path / "chaos.json").read_text())["faults"]
    assert sum(tally["tried"] for tally in faults.values()) == 12 + 26 + 2 + 2
    assert {(tally["lost"], tally["wrong"]) for tally in faults.values()} == {(0, 0)}
