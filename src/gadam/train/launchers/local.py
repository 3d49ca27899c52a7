"""Run jobs on all cores of this machine, with one process and one thread each.

Workers stay alive between jobs, because importing torch takes seconds. If a process dies, only its
job fails. A ``ProcessPoolExecutor`` does not fit: it fails all jobs if one process dies, and its
processes outlive a parent that was killed. Here each worker has its own pipe. It ends when the
other side of the pipe is closed.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnContext
from typing import Any

from gadam.train.sweep import Job, Sweep, available_cores, run_job

__all__ = ["LocalLauncher"]


class LocalLauncher:
    """Runs the jobs of a sweep in processes of this machine.

    Args:
        workers: The number of processes. Default: one per core.

    Attributes:
        slots: The number of processes.
    """

    def __init__(self, workers: int | None = None) -> None:
        self.slots = workers or available_cores()

    def run(self, sweep: Sweep) -> None:
        """Run jobs until none is waiting or running. See :class:`gadam.train.sweep.Launcher`.

        Args:
            sweep: The jobs to take, and where to report their events.
        """
        context = multiprocessing.get_context("spawn")
        stop = context.RawValue("b", 0)  # an Event stays locked if a process is killed inside it
        workers: list[_Worker] = []
        try:
            while True:
                workers[:] = [w for w in workers if w.job is not None or w.process.is_alive()]
                idle = [worker for worker in workers if worker.job is None]
                while sweep.waiting and (idle or len(workers) < self.slots):
                    if not idle:
                        workers.append(_Worker(context, stop))
                    worker = idle.pop(0) if idle else workers[-1]
                    worker.assign(sweep.waiting.popleft(), sweep)
                busy = [worker for worker in workers if worker.job is not None]
                if not busy:
                    return
                ready = wait([source for worker in busy for source in worker.sources])
                for worker in busy:
                    if any(source in ready for source in worker.sources):
                        worker.receive(sweep)
        finally:
            stop.value = 1
            for worker in workers:
                worker.connection.close()
            for worker in workers:
                worker.process.join(timeout=5)
                if worker.process.is_alive():
                    worker.process.terminate()


class _Worker:
    def __init__(self, context: SpawnContext, stop: Any) -> None:
        self.connection, theirs = context.Pipe()
        # Not a daemon: daemons may not start the child processes that decode images.
        self.process = context.Process(target=_work, args=(theirs, stop))
        with _one_thread(), _ignoring_interrupts():
            self.process.start()
        theirs.close()
        self.sources = (self.connection, self.process.sentinel)
        self.job: Job | None = None

    def assign(self, job: Job, sweep: Sweep) -> None:
        self.job = job
        sweep.start(job)
        with suppress(OSError):  # the process just died; its sentinel reports that
            self.connection.send(job)

    def receive(self, sweep: Sweep) -> None:
        """Report the worker's messages, or its death."""
        is_dead = not self.process.is_alive()  # before its last messages are read
        while self.job is not None:
            try:
                if not self.connection.poll():
                    break
                message = self.connection.recv()
            except (EOFError, OSError):
                break  # it died
            self._report(sweep, message)
        if self.job is not None and is_dead:
            code = self.process.exitcode
            hint = ": out of memory?" if code == -9 else ""
            self._report(sweep, ("failed", f"its process died (exit code {code}{hint})"))

    def _report(self, sweep: Sweep, message: tuple[Any, ...]) -> None:
        assert self.job is not None
        job = self.job
        if message[0] in ("finished", "failed"):
            self.job = None
        sweep.report(job, message)


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
    while True:
        try:
            job: Job = connection.recv()
            ended = run_job(job, connection.send, lambda: bool(stop.value))
            if ended is None:
                return
            connection.send(ended)
        except (EOFError, OSError):  # the parent has closed the connection, or died
            return
