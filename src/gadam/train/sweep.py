"""Run many jobs on all cores, with one process and one thread each.

Workers stay alive between jobs, because importing torch takes seconds. If a job fails or its
process dies, that is reported and the others continue. Finished jobs are not run again.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnContext
from pathlib import Path
from typing import Any, Protocol, TypeAlias

from gadam._errors import UserError
from gadam.runs.files import Document
from gadam.runs.recipe import Recipe
from gadam.runs.record import POINTS, EpochRecord, RunResult
from gadam.runs.summary import decimals, is_percentage

__all__ = ["Job", "Listener", "TrainingJob", "available_cores", "sweep"]


class Reportable(Protocol):
    """Something that can be written as JSON."""

    def to_dict(self) -> Document:
        """Return it as plain data."""
        ...


OnProgress: TypeAlias = Callable[[float, Reportable | None], None]
OnNotice: TypeAlias = Callable[[str], None]
ShouldStop: TypeAlias = Callable[[], bool]


class Job(Protocol):
    """Work on one run, in its folder. It is pickled and sent to another process."""

    @property
    def label(self) -> str:
        """The run's name beside other runs."""
        ...

    @property
    def seed(self) -> int:
        """The run's seed."""
        ...

    @property
    def folder(self) -> Path:
        """The run's folder."""
        ...

    @property
    def total(self) -> float:
        """The progress that means done."""
        ...

    @property
    def event(self) -> str:
        """What one update is called in JSON output, such as "epoch"."""
        ...

    def run(self, on_progress: OnProgress, on_notice: OnNotice, should_stop: ShouldStop) -> Any:
        """Do the work and return its result, which has ``to_dict()``.

        Args:
            on_progress: Called with the progress so far, and an update or None.
            on_notice: Called with sentences that the user should read.
            should_stop: Polled often; if it returns True, the job raises ``Stopped``.
        """
        ...

    def describe(self, update: Any) -> str:
        """Return an update as text.

        Args:
            update: What ``on_progress`` received.
        """
        ...

    def outcome(self, result: Any) -> str:
        """Return the result as text.

        Args:
            result: What :meth:`run` returned.
        """
        ...


@dataclass(frozen=True)
class TrainingJob:
    """A run to train.

    Args:
        label: The run's name beside other runs.
        recipe: What to train.
        seed: The run's seed.
        folder: The run's folder.
        data_dir: Where data sets are.
        device: Where to compute.
        threads: CPU threads.
        accept_changed_code: Resume a run although the user's own code has changed.
    """

    label: str
    recipe: Recipe
    seed: int
    folder: Path
    data_dir: str | None = None
    device: str = "cpu"
    threads: int = 1
    accept_changed_code: bool = False

    event = "epoch"

    @property
    def total(self) -> float:
        """The recipe's epochs."""
        return self.recipe.epochs

    def run(
        self, on_progress: OnProgress, on_notice: OnNotice, should_stop: ShouldStop
    ) -> RunResult:
        """Train the run, or resume it. See :class:`Job`."""
        from gadam.train.loop import train

        return train(
            self.recipe,
            self.folder,
            seed=self.seed,
            data_dir=self.data_dir,
            device=self.device,
            threads=self.threads,
            label=self.label,
            accept_changed_code=self.accept_changed_code,
            on_progress=on_progress,
            on_notice=on_notice,
            should_stop=should_stop,
        )

    def describe(self, update: EpochRecord) -> str:
        """Return an epoch's record as text. See :class:`Job`."""
        points = self._points(update)
        shown = f", {points}" if points else ""
        done = f"epoch {update.epoch}/{self.recipe.epochs}"
        return f"{done}, training loss {update.train_loss:.3f}{shown}"

    def outcome(self, result: RunResult) -> str:
        """Return the run's result as text. See :class:`Job`."""
        return f"{result.status} in {result.total_seconds:.0f} s, {self._points(result)}"

    def _points(self, record: EpochRecord | RunResult) -> str:
        """Describe both points: on validation data, if there is some."""
        metric, shown = self.recipe.metric, []
        split = "validation" if "validation" in (record.used or {}) else "test"
        for point in POINTS:
            value = record.metric(metric, point, split)
            if value is not None:
                digits = 1 if is_percentage(metric) else decimals(value)
                unit = " %" if is_percentage(metric) else ""
                shown.append(f"{point} {value:.{digits}f}{unit}")
        return f"{split} {metric}: {', '.join(shown)}" if shown else ""


class Listener(Protocol):
    """Receives the events of a sweep."""

    def on_start(self, job: Job) -> None:
        """Handle the start of a job."""
        ...

    def on_progress(self, job: Job, done: float, update: Reportable | None) -> None:
        """Handle progress of a job."""
        ...

    def on_notice(self, job: Job, sentence: str) -> None:
        """Handle a sentence for the user."""
        ...

    def on_finish(self, job: Job, result: Reportable) -> None:
        """Handle the end of a job."""
        ...

    def on_failure(self, job: Job, reason: str) -> None:
        """Handle the failure of a job."""
        ...


def available_cores() -> int:
    """Return the number of cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def sweep(
    jobs: Iterable[Job],
    listener: Listener,
    workers: int | None = None,
    then: Callable[[Any, Any], Iterable[Job]] | None = None,
) -> dict[Any, Any]:
    """Run all jobs.

    On Ctrl-C the jobs stop. Run the same sweep again to resume them from their last checkpoints.

    Args:
        jobs: In the order in which to start them.
        listener: Receives every event, in this process.
        workers: Processes; None means one per core.
        then: Called with each job that ended and its result, or None if it failed. Returns jobs
            to run after those that are waiting.

    Returns:
        The result of each job, or None if it failed.
    """
    waiting: deque[Job] = deque(jobs)
    results: dict[Any, Any] = {}
    if not waiting:
        return results
    count = workers or available_cores()
    with _pool(min(count, len(waiting)) if then is None else count) as (pool, start):
        for worker in pool:
            worker.assign(waiting, listener)
        while any(worker.job for worker in pool):
            ready = wait([w.connection for w in pool] + [w.process.sentinel for w in pool])
            for i, worker in enumerate(pool):
                if worker.connection in ready or worker.process.sentinel in ready:
                    job = worker.job
                    worker.receive(listener, results)
                    is_dead = not worker.process.is_alive()
                    if is_dead:
                        worker.reap(listener, results)
                    if then is not None and job is not None and worker.job is None:
                        waiting += then(job, results[job])
                    if is_dead and waiting:
                        pool[i] = start()
            pool[:] = [w for w in pool if w.process.is_alive()]
            for worker in pool:
                if worker.job is None and waiting:
                    worker.assign(waiting, listener)
    return results


class _Worker:
    def __init__(self, context: SpawnContext, stop: Any) -> None:
        self.connection, theirs = context.Pipe()
        # Not a daemon: daemons may not start the child processes that decode images.
        self.process = context.Process(target=_work, args=(theirs, stop))
        with _one_thread(), _ignoring_interrupts():
            self.process.start()
        theirs.close()
        self.job: Job | None = None

    def assign(self, waiting: deque[Job], listener: Listener) -> None:
        self.job = waiting.popleft() if waiting else None
        if self.job is not None:
            listener.on_start(self.job)
            with suppress(OSError):  # the process just died; its sentinel reports that
                self.connection.send(self.job)

    def receive(self, listener: Listener, results: dict[Any, Any]) -> None:
        """Handle the worker's messages."""
        while self.job is not None:
            try:
                if not self.connection.poll():
                    return
                kind, *content = self.connection.recv()
            except (EOFError, OSError):
                return  # it died: see reap
            if kind == "progress":
                listener.on_progress(self.job, *content)
            elif kind == "notice":
                listener.on_notice(self.job, *content)
            else:
                job, self.job = self.job, None
                results[job] = content[0] if kind == "finished" else None
                end = listener.on_finish if kind == "finished" else listener.on_failure
                end(job, content[0])

    def reap(self, listener: Listener, results: dict[Any, Any]) -> None:
        if self.job is not None:
            code = self.process.exitcode
            hint = ": out of memory?" if code == -9 else ""
            results[self.job] = None
            listener.on_failure(self.job, f"its process died (exit code {code}{hint})")
            self.job = None


@contextmanager
def _pool(count: int) -> Iterator[tuple[list[_Worker], Callable[[], _Worker]]]:
    context = multiprocessing.get_context("spawn")
    stop = context.RawValue("b", 0)  # an Event stays locked if a process is killed inside it
    workers: list[_Worker] = []

    def start() -> _Worker:
        workers.append(_Worker(context, stop))
        return workers[-1]

    try:
        yield [start() for _ in range(count)], start
    finally:
        stop.value = 1
        for worker in workers:
            worker.connection.close()
        for worker in workers:
            worker.process.join(timeout=5)
            if worker.process.is_alive():
                worker.process.terminate()


@contextmanager
def _one_thread() -> Iterator[None]:
    """Give child processes one thread in libraries that read the environment at startup."""
    before = os.environ.get("OMP_NUM_THREADS")
    os.environ["OMP_NUM_THREADS"] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ["OMP_NUM_THREADS"]
        else:
            os.environ["OMP_NUM_THREADS"] = before


@contextmanager
def _ignoring_interrupts() -> Iterator[None]:
    """Start child processes with Ctrl-C ignored: the parent handles it."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _work(connection: Connection, stop: Any) -> None:
    """Run jobs until the parent closes the connection."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    from gadam.train.loop import Stopped

    while True:
        try:
            job: Job = connection.recv()
        except (EOFError, OSError):
            return
        outcome: tuple[str, Any]
        try:
            result = job.run(
                on_progress=lambda done, update: connection.send(("progress", done, update)),
                on_notice=lambda sentence: connection.send(("notice", sentence)),
                should_stop=lambda: bool(stop.value),
            )
            outcome = ("finished", result)
        except (Stopped, ConnectionError):
            return
        except UserError as error:
            outcome = ("failed", str(error))
        except Exception:
            outcome = ("failed", traceback.format_exc())
        try:
            connection.send(outcome)
        except ConnectionError:
            return
