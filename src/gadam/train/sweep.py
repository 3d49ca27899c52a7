"""Many runs over all cores: one process and one thread each.

Workers stay warm from run to run (importing torch takes seconds). A run that fails is reported while
the rest go on; so is one whose process dies. What is finished is not run again.
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
from pathlib import Path
from typing import Any, Protocol

from gadam.train.recipe import Recipe, RecipeError
from gadam.train.summary import more_is_better

__all__ = ["Job", "Listener", "Work", "available_cores", "sweep"]


class Work(Protocol):
    """What a worker does: something with a run, in its folder. It is sent to another process."""

    @property
    def label(self) -> str: ...

    @property
    def seed(self) -> int: ...

    @property
    def folder(self) -> Path: ...

    @property
    def total(self) -> float:
        """What :meth:`run` will have done when it is over, as it tells its progress."""
        ...

    def run(
        self,
        progress: Callable[[float, dict[str, Any] | None], None],
        notice: Callable[[str], None],
        should_stop: Callable[[], bool],
    ) -> dict[str, Any]:
        """Do it; gives the result."""
        ...

    def told(self, line: dict[str, Any]) -> str:
        """What ``progress`` was told, for a person."""
        ...

    def outcome(self, result: dict[str, Any]) -> str:
        """The result, for a person."""
        ...


@dataclass(frozen=True)
class Job:
    """A run to be trained."""

    label: str
    recipe: Recipe
    seed: int
    folder: Path
    data_dir: str | None = None
    device: str = "cpu"
    threads: int = 1

    @property
    def total(self) -> float:
        return self.recipe.epochs

    def run(
        self,
        progress: Callable[[float, dict[str, Any] | None], None],
        notice: Callable[[str], None],
        should_stop: Callable[[], bool],
    ) -> dict[str, Any]:
        from gadam.train.loop import train

        return train(
            self.recipe,
            self.folder,
            seed=self.seed,
            data_dir=self.data_dir,
            device=self.device,
            threads=self.threads,
            label=self.label,
            progress=progress,
            notice=notice,
            should_stop=should_stop,
        )

    def told(self, line: dict[str, Any]) -> str:
        points = self._points(line)
        shown = f", {points}" if points else ""
        return f"epoch {line['epoch']}/{self.recipe.epochs}, training loss {line['train_loss']:.3f}{shown}"

    def outcome(self, result: dict[str, Any]) -> str:
        seconds = sum(result["seconds"].values())
        return f"{result['status']} in {seconds:.0f} s, {self._points(result)}"

    def _points(self, line: dict[str, Any]) -> str:
        """How both points do where they were evaluated: on validation data, if there are some."""
        found, part = [], "test"
        metric = self.recipe.metric
        as_error = more_is_better(metric)
        for point in ("iterate", "average"):
            if line.get(point):
                part = "validation" if "validation" in line[point] else "test"
                value = line[point][part].get(metric)
                if value is not None:
                    found.append(
                        f"{point} {f'{100 - value:.1f} %' if as_error else f'{value:.1f}'}"
                    )
        return f"{part} {'error' if as_error else metric}: {', '.join(found)}" if found else ""


class Listener(Protocol):
    """Who is told how a sweep goes on."""

    def started(self, job: Work) -> None: ...

    def went_on(self, job: Work, done: float, line: dict[str, Any] | None) -> None: ...

    def noticed(self, job: Work, sentence: str) -> None: ...

    def finished(self, job: Work, result: dict[str, Any]) -> None: ...

    def failed(self, job: Work, reason: str) -> None: ...


def available_cores() -> int:
    """The cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def sweep(jobs: Iterable[Work], listener: Listener, workers: int | None = None) -> dict[Any, Any]:
    """Run all jobs. Gives the result of each, or None where it failed.

    On Ctrl-C the runs stop where they are, to go on from their last checkpoint another time.

    Args:
        jobs: in the order in which they are begun
        listener: is told of every event, in this process
        workers: processes; None is one for each core
    """
    waiting: deque[Work] = deque(jobs)
    results: dict[Any, Any] = {}
    count = min(workers or available_cores(), len(waiting))
    if count == 0:
        return results
    with _pool(count) as (pool, start):
        for worker in pool:
            worker.give(waiting, listener)
        while any(worker.job for worker in pool):
            ready = wait([w.connection for w in pool] + [w.process.sentinel for w in pool])
            for i, worker in enumerate(pool):
                if worker.connection in ready or worker.process.sentinel in ready:
                    over = worker.hear(listener, results)
                    if not worker.process.is_alive():
                        worker.bury(listener, results)
                        if waiting:
                            worker = pool[i] = start()
                        over = True
                    if over and worker.process.is_alive():
                        worker.give(waiting, listener)
            pool[:] = [w for w in pool if w.process.is_alive()]
    return results


class _Worker:
    def __init__(self, context: Any, stop: Any) -> None:
        self.connection, theirs = context.Pipe()
        # Not a daemon: those may not have the children that decode pictures.
        self.process = context.Process(target=_work, args=(theirs, stop))
        with _one_thread(), _deaf_to_interrupts():
            self.process.start()
        theirs.close()
        self.job: Work | None = None

    def give(self, waiting: deque[Work], listener: Listener) -> None:
        self.job = waiting.popleft() if waiting else None
        if self.job is not None:
            listener.started(self.job)
            with suppress(OSError):  # it has just died: that shows at once
                self.connection.send(self.job)

    def hear(self, listener: Listener, results: dict[Work, Any]) -> bool:
        """Take in what the worker has said; gives whether its job is over."""
        while self.job is not None:
            try:
                if not self.connection.poll():
                    return False
                kind, *content = self.connection.recv()
            except (EOFError, OSError):
                return False  # it died: see bury
            if kind == "went on":
                listener.went_on(self.job, *content)
            elif kind == "noticed":
                listener.noticed(self.job, *content)
            else:
                job, self.job = self.job, None
                results[job] = content[0] if kind == "finished" else None
                (listener.finished if kind == "finished" else listener.failed)(job, content[0])
        return True

    def bury(self, listener: Listener, results: dict[Work, Any]) -> None:
        if self.job is not None:
            code = self.process.exitcode
            reason = (
                f"its process died (exit code {code}{': out of memory?' if code == -9 else ''})"
            )
            results[self.job] = None
            listener.failed(self.job, reason)
            self.job = None


@contextmanager
def _pool(count: int) -> Iterator[tuple[list[_Worker], Callable[[], _Worker]]]:
    context = multiprocessing.get_context("spawn")
    stop = context.RawValue("b", 0)  # not an Event: who is killed inside of one leaves it locked
    everyone: list[_Worker] = []

    def start() -> _Worker:
        everyone.append(_Worker(context, stop))
        return everyone[-1]

    try:
        yield [start() for _ in range(count)], start
    finally:
        stop.value = 1
        for worker in everyone:
            worker.connection.close()
        for worker in everyone:
            worker.process.join(timeout=5)
            if worker.process.is_alive():
                worker.process.terminate()


@contextmanager
def _one_thread() -> Iterator[None]:
    """Of what reads it at start-up, as OpenMP does, a child has one thread."""
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
def _deaf_to_interrupts() -> Iterator[None]:
    """Ctrl-C is the parent's to handle: a child is born deaf to it."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _work(connection: Connection, stop: Any) -> None:
    """What a worker does until nobody listens any more."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    from gadam.train.data import DataError
    from gadam.train.loop import Stopped
    from gadam.train.record import RunError

    while True:
        try:
            job: Work = connection.recv()
        except (EOFError, OSError):
            return
        try:
            outcome: tuple[str, Any]
            result = job.run(
                progress=lambda done, line: connection.send(("went on", done, line)),
                notice=lambda sentence: connection.send(("noticed", sentence)),
                should_stop=lambda: bool(stop.value),
            )
            outcome = ("finished", result)
        except (Stopped, ConnectionError):
            return
        except (DataError, RunError, RecipeError) as error:
            outcome = ("failed", str(error))
        except Exception:
            outcome = ("failed", traceback.format_exc())
        try:
            connection.send(outcome)
        except ConnectionError:
            return
