"""Worker processes that pull runs from a queue."""

from __future__ import annotations

import multiprocessing
import os
import time
import traceback
from collections.abc import Callable
from multiprocessing.pool import AsyncResult

from benchmarks.evidence import harness
from benchmarks.evidence.harness import Record, Trial

__all__ = ["work"]


def work(
    queue: Callable[[], list[Trial]],
    finish: Callable[[list[Record]], None],
    workers: int,
    train: Callable[[Trial], list[Record]] = harness.run,
) -> list[Trial]:
    """Run trials until the queue is empty, each in a new process at the lowest priority.

    Args:
        queue: Returns the trials that remain, in order. It is asked again after each run, because
            results decide what is next.
        finish: Called with the records of each finished run.
        workers: The number of processes.
        train: Runs a trial.

    Returns:
        The trials that failed. Each was tried once.
    """
    os.environ["OMP_NUM_THREADS"] = "1"
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["benchmarks.evidence.harness"])  # imports torch once
    active: dict[Trial, AsyncResult[list[Record]]] = {}
    failed: list[Trial] = []
    # A new process per run: nothing of a run remains for the next one.
    with context.Pool(workers, initializer=os.nice, initargs=(19,), maxtasksperchild=1) as pool:
        while True:
            if len(active) < workers:
                left = [one for one in queue() if one not in active and one not in failed]
                for trial in left[: workers - len(active)]:
                    active[trial] = pool.apply_async(train, [trial])
            if not active:
                return failed
            time.sleep(0.2)
            for trial in [trial for trial, result in active.items() if result.ready()]:
                try:
                    records = active.pop(trial).get()
                except Exception:
                    traceback.print_exc()
                    failed.append(trial)
                else:
                    finish(records)
