"""The Triton kernel, under Triton's interpreter if Triton is installed."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from gadam.optim import accelerator


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
def test_equals_the_reference_under_the_interpreter():
    worker = Path(__file__).with_name("triton_worker.py")
    done = subprocess.run([sys.executable, worker], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "64 combinations equal the reference" in done.stdout


def test_supports_nothing_on_the_cpu():
    assert not accelerator.supports([torch.zeros(2)])
    assert "torch's fused Adam" in accelerator.describe()
