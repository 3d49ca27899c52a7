"""Every example runs, prints both test losses, and the average is better."""

from __future__ import annotations

import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
EXAMPLES = ROOT / "examples"
DISTRIBUTED = "fsdp2.py"
# In this process, because importing these frameworks again for every example would take longer than
# the examples.
ALONE = sorted(path.name for path in EXAMPLES.glob("*.py") if path.name != DISTRIBUTED)


def losses(printed: str) -> tuple[float, float]:
    """Return the test loss of the raw and of the averaged weights."""
    raw = re.search(r"^raw weights.*loss ([\d.]+)", printed, re.MULTILINE)
    averaged = re.search(r"^averaged weights.*loss ([\d.]+)", printed, re.MULTILINE)
    assert raw is not None, printed
    assert averaged is not None, printed
    return float(raw[1]), float(averaged[1])


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("name", ALONE)
def test_the_average_is_better(name, capsys, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(sys, "argv", [name])
    runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    raw, averaged = losses(capsys.readouterr().out)
    assert averaged < raw


def test_the_average_of_shards_is_better():
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    done = subprocess.run(
        [*command, "--nproc-per-node", "2", str(EXAMPLES / DISTRIBUTED)],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    raw, averaged = losses(done.stdout)
    assert averaged < raw
    assert "exported 4 full tensors" in done.stdout


def test_the_index_lists_every_example():
    listed = re.findall(r"\((\w+\.py)\)", (EXAMPLES / "README.md").read_text())
    missing = {path.name for path in EXAMPLES.glob("*.py")} - set(listed)
    assert not {name for name in missing if not name.startswith("lightning_")}
    assert all((EXAMPLES / name).is_file() for name in listed)
