"""Averaging tools of other frameworks, and ours, on the same criteria.

One module per framework runs every tool on every criterion and writes
``results/frameworks-NAME.json``, from which ``tools/tables.py`` writes the tables of
``docs/frameworks.md``:

    python -m benchmarks.frameworks.lightning
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from gadam.runs.files import write_json

__all__ = ["CRITERIA", "ROOT", "Verdict", "write_results"]

ROOT = Path(__file__).parents[2]

# The criteria by name, with what is right.
CRITERIA = {
    "validation": "validation during training sees the average",
    "delayed start": "before the first sample, validation sees the raw weights",
    "resume": "a run that resumes ends with the same bits",
    "bfloat16": "an average of bfloat16 weights moves as it should",
    "BatchNorm": "the statistics of the final model are those of its weights",
    "exception": "an error in validation leaves the raw weights in the model",
    "sharding": "FSDP2 on two processes works",
    "saved weights": "every checkpoint has the average, and those to resume from the raw weights",
    "extra memory": "copies of the weights that are held in training, and in validation",
}


@dataclass(frozen=True)
class Verdict:
    """What a tool does on a criterion.

    Attributes:
        right: Whether it does what the criterion says, or None if that does not apply.
        text: What it does, in a few words.
        value: The measured number, if there is one.
    """

    right: bool | None
    text: str
    value: float | None = None


def write_results(
    name: str, verdicts: Mapping[str, Mapping[str, Verdict]], versions: Mapping[str, str]
) -> None:
    """Write the verdicts on all tools of a framework to ``results/frameworks-NAME.json``.

    Args:
        name: The name of the framework.
        verdicts: The verdicts by tool and criterion.
        versions: The versions of the packages.
    """
    tools = {tool: {c: asdict(v) for c, v in found.items()} for tool, found in verdicts.items()}
    versions = {"torch": torch.__version__, **versions}
    path = ROOT / "results" / f"frameworks-{name}.json"
    write_json(path, {"versions": versions, "criteria": CRITERIA, "tools": tools})
