"""Workers pull from a queue that grows, in processes of their own, and survive a failed run."""

from __future__ import annotations

import os

import pytest
from benchmarks.evidence.harness import OWN, Record, Trial
from benchmarks.evidence.methods import Knobs
from benchmarks.evidence.workers import work


def pretend(trial: Trial) -> list[Record]:
    """Return a record with the process and its priority in place of metrics."""
    if trial.seed == 2:
        raise RuntimeError("This run fails.")
    return [Record(trial, 1, {OWN: [(1, float(os.getpid()), float(os.nice(0)))]})]


def test_runs_follow_a_queue_that_depends_on_results(capfd: pytest.CaptureFixture[str]) -> None:
    done: list[Record] = []

    def queue() -> list[Trial]:
        known = range(4) if len(done) < 2 else range(5)
        finished = {record.trial.seed for record in done}
        return [Trial("t", "m", Knobs(1, 0), seed) for seed in known if seed not in finished]

    failed = work(queue, done.extend, workers=2, train=pretend)
    assert [trial.seed for trial in failed] == [2]
    assert sorted(record.trial.seed for record in done) == [0, 1, 3, 4]
    processes = {record.validation[OWN][0][1] for record in done}
    assert len(processes) == 4
    assert os.getpid() not in processes
    assert {record.validation[OWN][0][2] for record in done} == {19.0}
    assert "This run fails." in capfd.readouterr().err
