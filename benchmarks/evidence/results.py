"""Result files: one per task, one record per line."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from benchmarks.evidence.harness import Record

__all__ = ["FOLDER", "append", "read"]

FOLDER = Path(__file__).parents[2] / "results" / "evidence"


def read(task: str, folder: Path = FOLDER) -> list[Record]:
    """Return the records of a task, in the order in which they finished.

    Args:
        task: The task.
        folder: The folder of the result files.
    """
    file = folder / f"{task}.jsonl"
    if not file.exists():
        return []
    lines = file.read_text().splitlines()
    return [Record.from_json(line) for line in lines]


def append(records: Iterable[Record], folder: Path = FOLDER) -> None:
    """Add the records of one run, all or none of them.

    Args:
        records: The records, all of one task.
        folder: The folder of the result files.
    """
    found = list(records)
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / f"{found[0].trial.task}.jsonl").open("a") as file:
        file.write("".join(record.to_json() + "\n" for record in found))
