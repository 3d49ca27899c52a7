"""Many runs at once: what a job is, who receives its events, and who runs it.

A :class:`Launcher` runs the jobs: in processes of this machine, or on a Ray cluster. If a job
fails, that is reported and the others continue. Finished jobs are not run again.
"""

from __future__ import annotations

import os
import traceback
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol, TypeAlias

from gadam._errors import UserError
from gadam.runs.files import Document
from gadam.runs.recipe import Recipe
from gadam.runs.record import POINTS, EpochRecord, RunResult
from gadam.runs.summary import decimals, is_percentage
from gadam.train.storage import stored_folder

__all__ = [
    "Job",
    "Launcher",
    "Listener",
    "Sweep",
    "TrainingJob",
    "available_cores",
    "run_job",
    "sweep",
]


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
        storage: The URL of the run's folder, if it is not a folder of a file system. Then
            ``folder`` is only the run's name.
    """

    label: str
    recipe: Recipe
    seed: int
    folder: Path
    data_dir: str | None = None
    device: str = "cpu"
    threads: int = 1
    accept_changed_code: bool = False
    storage: str | None = None

    event = "epoch"

    @property
    def total(self) -> float:
        """The recipe's epochs."""
        return self.recipe.epochs

    def run(
        self, on_progress: OnProgress, on_notice: OnNotice, should_stop: ShouldStop
    ) -> RunResult:
        """Train the run, or resume it. See :class:`Job`."""
        if self.storage is None:
            return self.run_here(on_progress, on_notice, should_stop)
        with stored_folder(self.storage) as (folder, look):

            def report(done: float, update: Reportable | None) -> None:
                on_progress(done, update)
                look()

            return replace(self, folder=folder).run_here(report, on_notice, should_stop)

    def run_here(
        self, on_progress: OnProgress, on_notice: OnNotice, should_stop: ShouldStop
    ) -> RunResult:
        """Train the run in its folder of this machine. See :meth:`run`."""
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
                unit = "%" if is_percentage(metric) else ""
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


Then: TypeAlias = Callable[[Any, Any], Iterable[Job]]
# A kind and its content: ("progress", done, update), ("notice", sentence), ("finished", result),
# ("failed", reason).
Message: TypeAlias = tuple[Any, ...]


class Sweep:
    """The jobs of a sweep: those that wait, and the results of those that ended.

    Args:
        jobs: In the order in which to start them.
        listener: Receives every event, in this process.
        then: As for :func:`sweep`.

    Attributes:
        waiting: The jobs that no launcher has taken yet.
        results: The result of each job that ended, or None if it failed.
    """

    def __init__(self, jobs: Iterable[Job], listener: Listener, then: Then | None = None) -> None:
        self.waiting: deque[Job] = deque(jobs)
        self.results: dict[Any, Any] = {}
        self._listener, self._then = listener, then

    def start(self, job: Job) -> None:
        """Report that a job begins. Call this once per job.

        Args:
            job: The job.
        """
        self._listener.on_start(job)

    def report(self, job: Job, message: Message) -> None:
        """Report what a job sent. A job that ends may add others to those that wait.

        Args:
            job: The job, which was started.
            message: From :func:`run_job`.
        """
        kind, *content = message
        if kind == "progress":
            self._listener.on_progress(job, *content)
        elif kind == "notice":
            self._listener.on_notice(job, *content)
        else:
            is_finished = kind == "finished"
            self.results[job] = content[0] if is_finished else None
            (self._listener.on_finish if is_finished else self._listener.on_failure)(job, *content)
            if self._then is not None:
                self.waiting += self._then(job, self.results[job])


class Launcher(Protocol):
    """Runs the jobs of a sweep somewhere."""

    @property
    def slots(self) -> int:
        """How many jobs can run at a time."""
        ...

    def run(self, sweep: Sweep) -> None:
        """Run jobs until none is waiting or running.

        On Ctrl-C, or if the listener raises an error, stop the running jobs.

        Args:
            sweep: The jobs to take, and where to report their events.
        """
        ...


def available_cores() -> int:
    """Return the number of cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def sweep(
    jobs: Iterable[Job],
    listener: Listener,
    workers: int | None = None,
    then: Then | None = None,
    launcher: Launcher | None = None,
) -> dict[Any, Any]:
    """Run all jobs.

    On Ctrl-C the jobs stop. Run the same sweep again to resume them from their last checkpoints.

    Args:
        jobs: In the order in which to start them.
        listener: Receives every event, in this process.
        workers: Processes on this machine; None means one per core. Not used with a ``launcher``.
        then: Called with each job that ended and its result, or None if it failed. Returns jobs
            to run after those that are waiting.
        launcher: Where to run the jobs. Default: this machine.

    Returns:
        The result of each job, or None if it failed.
    """
    if launcher is None:
        from gadam.train.launchers.local import LocalLauncher  # it imports this module

        launcher = LocalLauncher(workers)
    work = Sweep(jobs, listener, then)
    launcher.run(work)
    return work.results


def run_job(job: Job, send: Callable[[Message], None], should_stop: ShouldStop) -> Message | None:
    """Run a job in this process.

    Args:
        job: The job.
        send: Called with messages about progress, and notices.
        should_stop: Polled often; if it returns True, the job stops.

    Returns:
        The last message: how the job ended. None if it was stopped.

    Raises:
        ConnectionError: ``send`` raised it. The job has stopped.
    """
    from gadam.train.loop import Stopped

    try:
        result = job.run(
            on_progress=lambda done, update: send(("progress", done, update)),
            on_notice=lambda sentence: send(("notice", sentence)),
            should_stop=should_stop,
        )
    except Stopped:
        return None
    except ConnectionError:
        raise
    except UserError as error:
        return "failed", str(error)
    except Exception:
        return "failed", traceback.format_exc()
    return "finished", result
