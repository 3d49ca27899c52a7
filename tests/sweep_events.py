"""Watch sweeps: the events of their jobs, and the processes that run them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from gadam.runs import EpochRecord, RunResult
from gadam.train.sweep import Job, Reportable


class Recorder:
    """A listener that records the events it receives."""

    def __init__(self) -> None:
        self.events: list[tuple[Any, ...]] = []

    def on_start(self, job: Job) -> None:
        self.events.append(("start", job.label))

    def on_progress(self, job: Job, done: float, update: Reportable | None) -> None:
        if update is not None:
            assert isinstance(update, EpochRecord)
            self.events.append(("epoch", job.label, update.epoch))

    def on_notice(self, job: Job, sentence: str) -> None:
        self.events.append(("notice", job.label, sentence))

    def on_finish(self, job: Job, result: Reportable) -> None:
        assert isinstance(result, RunResult)
        self.events.append(("finish", job.label))

    def on_failure(self, job: Job, reason: str) -> None:
        self.events.append(("failure", job.label, reason))

    def of(self, kind: str) -> list[tuple[Any, ...]]:
        return [event[1:] for event in self.events if event[0] == kind]


def holder(folder: Path) -> int | None:
    """Return the process that has the lock of a run open."""
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if any(os.readlink(fd) == str(folder / ".lock") for fd in (process / "fd").iterdir()):
                return int(process.name)
        except OSError:  # it has ended
            continue
    return None
