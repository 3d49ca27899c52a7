"""Compare run folders, and stop runs in the middle."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from contract import same


def numbers(folder: Path) -> tuple[Any, Any]:
    """Return a finished run's result and record without times, memory and hashes.

    Args:
        folder: The run's folder.
    """
    result = json.loads((folder / "result.json").read_text())
    for key in ("seconds", "peak_memory"):
        del result[key]
    lines = [json.loads(line) for line in (folder / "epochs.jsonl").read_text().splitlines()]
    for line in lines:
        del line["seconds"], line["hash"]
    return result, lines


def without_times(folder: Path) -> tuple[Any, Any]:
    """Return a finished run's result and record without times and memory, and its last state.

    Args:
        folder: The run's folder.
    """
    state = torch.load(max(folder.glob("checkpoint-*.pt")), weights_only=True)
    del state["lines"], state["header"]  # they contain times and the folder's label
    return numbers(folder), state


def assert_same_run(a: Path, b: Path) -> None:
    """Check that two runs have the same numbers and the same last state, to the bit.

    Args:
        a: One run's folder.
        b: Another's.
    """
    (numbers_a, state_a), (numbers_b, state_b) = without_times(a), without_times(b)
    assert numbers_a == numbers_b
    same(state_a, state_b)


def stop_after(steps: int) -> Callable[[], bool]:
    """Return a ``should_stop`` that stops training after some steps.

    Args:
        steps: How many.
    """
    calls = iter(range(steps + 1))
    return lambda: next(calls, None) is None
