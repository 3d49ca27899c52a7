"""Result files: one per task, one record per line."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from benchmarks.evidence.harness import Record, Trial

__all__ = ["FOLDER", "append", "path", "read"]

FOLDER = Path(__file__).parents[2] / "results" / "evidence"


def path(task: str, folder: Path = FOLDER) -> Path:
    """Return the results file of a task.

    Args:
        task: The task.
        folder: The folder of the result files.
    """
    return folder / f"{task}.jsonl"


def read(task: str, folder: Path = FOLDER) -> list[Record]:
    """Return the records of a task, in the order in which they finished, each trial once.

    Args:
        task: The task.
        folder: The folder of the result files.
    """
    file = path(task, folder)
    if not file.exists():
        return []
    records: dict[Trial, Record] = {}
    for line in file.read_text().splitlines():
        record = Record.from_json(line)
        records.setdefault(record.trial, record)
    return list(records.values())


def append(records: Iterable[Record], folder: Path = FOLDER) -> None:
    """Add the records of one run, all or none of them.

    Args:
        records: The records, all of one task.
        folder: The folder of the result files.
    """
    found = list(records)
    folder.mkdir(parents=True, exist_ok=True)
    with path(found[0].trial.task, folder).open("a") as file:
        file.write("".join(record.to_json() + "\n" for record in found))
