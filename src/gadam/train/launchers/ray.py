"""Run jobs on a Ray cluster, one Ray task per job.

Nothing goes through Ray's object store but short messages. Everything else is in the folders of the
runs, which all nodes must see: on a file system that they share, or in a storage (see
:mod:`gadam.train.storage`). So a run that lost its worker continues from its last checkpoint on
another node, with the same numbers as if nothing had happened.
"""

from __future__ import annotations

import os
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO, cast

from gadam._errors import UserError
from gadam.runs import lock
from gadam.runs.files import RunError, explain_os_error
from gadam.runs.folder import versions
from gadam.train.sweep import Job, Message, Sweep, run_job

__all__ = ["LauncherError", "RayLauncher", "import_ray"]

RETRIES = 3  # of a run that loses its workers again and again without any progress
POLL_SECONDS = 0.2  # between two looks at the messages
REPORT_SECONDS = 1.0  # between two messages about the same epoch, and two looks for a stop
STOP_SECONDS = 10.0  # for runs to stop by themselves
SHARE_SECONDS = 60.0  # until a new file is visible on all nodes; NFS caches folders
LOCK_SECONDS = 180.0  # until a file system releases the locks of a node that died


class LauncherError(UserError, RuntimeError):
    """The cluster cannot be used. The message says why, and what to do."""


class RayLauncher:
    """Runs the jobs of a sweep on a Ray cluster.

    Args:
        address: The cluster, such as "auto" for the one that this machine belongs to. Default: the
            environment's ``RAY_ADDRESS``, or Ray on this machine alone. A program that has called
            ``ray.init`` uses that cluster.
        cpus: CPUs per job.
        gpus: GPUs per job. Parts of a GPU are allowed.
        workers: The maximum number of jobs at a time. Default: as many as the cluster can run.
        share_seconds: How long a new file may take to be visible on all nodes.

    Raises:
        LauncherError: Ray is not installed, or there is no cluster at the address.
    """

    def __init__(
        self,
        address: str | None = None,
        cpus: float = 1,
        gpus: float = 0,
        workers: int | None = None,
        share_seconds: float = SHARE_SECONDS,
    ) -> None:
        self.cpus, self.gpus, self.workers = cpus, gpus, workers
        self._share_seconds = share_seconds
        self._ray = _connect(address)

    @property
    def slots(self) -> int:
        """How many jobs the cluster can run at a time, with the nodes that it has now."""
        total = sum(self._room(node["Resources"]) for node in self._ray.nodes() if node["Alive"])
        return min(max(total, 1), self.workers or sys.maxsize)

    def _room(self, resources: dict[str, float]) -> int:
        wanted = {"CPU": self.cpus, "GPU": self.gpus}
        shares = [resources.get(name, 0.0) / amount for name, amount in wanted.items() if amount]
        return int(min(shares))

    def run(self, sweep: Sweep) -> None:
        """Run jobs until none is waiting or running. See :class:`gadam.train.sweep.Launcher`.

        Args:
            sweep: The jobs to take, and where to report their events.

        Raises:
            LauncherError: The cluster failed.
        """
        ray = self._ray
        with _results_only_on_stdout():
            try:
                with _Launch(self, sweep) as launch:
                    launch.run()
            except ray.exceptions.RayError as error:
                reason = str(error).strip().splitlines()[0]
                raise LauncherError(
                    f"The Ray cluster failed ({reason}). Rerun the command to resume."
                ) from error

    def notice(self) -> str:
        """Return a sentence if no node can run a job now, or an empty one."""
        if any(node["Alive"] and self._room(node["Resources"]) for node in self._ray.nodes()):
            return ""
        return (
            f"No node of the Ray cluster has {self.cpus:g} CPUs and {self.gpus:g} GPUs now. The "
            "runs wait for one. Press Ctrl-C and pass smaller --cpus and --gpus if none will come."
        )


def import_ray() -> Any:
    """Return the module ``ray``.

    Raises:
        LauncherError: Ray is not installed.
    """
    try:
        import ray
    except ImportError:
        raise LauncherError(
            "--launcher ray needs ray, which is not installed. Run `pip install 'gadam[ray]'`."
        ) from None
    return ray


def _connect(address: str | None) -> Any:
    """Connect this process to a cluster, and return the module ``ray``."""
    ray = import_ray()
    if ray.is_initialized():
        return ray
    place = address or os.environ.get("RAY_ADDRESS") or "local"
    options: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR"}
    if place == "local":
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        options["include_dashboard"] = False
    try:
        ray.init(place, **options)
    except (ConnectionError, RuntimeError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise LauncherError(
            f"There is no Ray cluster at {place} ({reason}). Start one with `ray start --head`, or "
            "leave --address out to run Ray on this machine alone."
        ) from error
    return ray


@dataclass
class _Running:
    """A job that was submitted.

    Args:
        number: Its number in the sweep.
        job: The job.
        attempt: The number of the attempt, from 1. Messages of earlier ones are dropped.
        is_announced: Whether the listener knows of its start.
        is_running: Whether this attempt has a worker.
        furthest: The most progress that was reported with an update.
        lost: How often it lost its worker since then.
    """

    number: int
    job: Job
    attempt: int = 1
    is_announced: bool = False
    is_running: bool = False
    furthest: float = 0.0
    lost: int = 0


@dataclass(frozen=True)
class _Place:
    """What a worker needs to know about the process that launched it.

    Args:
        mailbox: The actor that passes the messages on.
        token: The name of a file that the launcher writes beside the run folders.
        folder: The working directory.
        versions: The versions that results depend on.
        share_seconds: How long a new file may take to be visible.
    """

    mailbox: Any
    token: str
    folder: str
    versions: dict[str, str]
    share_seconds: float


class _Launch:
    """One sweep on the cluster: its mailbox, its tasks, and the files that mark its folders."""

    def __init__(self, launcher: RayLauncher, sweep: Sweep) -> None:
        self.launcher, self.sweep, self.ray = launcher, sweep, launcher._ray
        self.tasks: dict[Any, _Running] = {}
        self.jobs: list[_Running] = []
        self.marks: set[Path] = set()
        exceptions = self.ray.exceptions
        self.losses = (
            exceptions.WorkerCrashedError,
            exceptions.NodeDiedError,
            exceptions.OutOfMemoryError,
            exceptions.LocalRayletDiedError,
        )

    def __enter__(self) -> _Launch:
        ray = self.ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        # The node of this process is the only one that the sweep cannot do without.
        here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
        self.mailbox = ray.remote(_Mailbox).options(num_cpus=0, scheduling_strategy=here).remote()
        self.place = _Place(
            self.mailbox,
            # If this process is killed, the next sweep removes the file like a temporary one.
            f".launch-{uuid.uuid4().hex}.json.{os.getpid()}",
            os.getcwd(),
            versions(),
            self.launcher._share_seconds,
        )
        # As in local workers. Ray would give each task as many threads as CPUs.
        own = {name: value for name, value in os.environ.items() if name.startswith("GADAM_")}
        self.work = ray.remote(_work).options(
            num_cpus=self.launcher.cpus,
            num_gpus=self.launcher.gpus,
            max_retries=0,
            runtime_env={"env_vars": {**own, "OMP_NUM_THREADS": "1"}},
        )
        return self

    def __exit__(self, *_: object) -> None:
        try:
            with suppress(self.ray.exceptions.RayError):
                self._stop()
                self.ray.kill(self.mailbox)
        finally:
            for mark in self.marks:
                with suppress(OSError):
                    mark.unlink()

    def _stop(self) -> None:
        """Stop the tasks that run, and those that wait for a node."""
        ray = self.ray
        if not self.tasks:
            return
        ray.get(self.mailbox.stop.remote())
        for task, running in self.tasks.items():
            if not running.is_running:
                ray.cancel(task)
        left = list(self.tasks)
        _, left = ray.wait(left, num_returns=len(left), timeout=STOP_SECONDS)
        for task in left:
            ray.cancel(task, force=True)

    def run(self) -> None:
        """Submit jobs, and report their messages, until all have ended."""
        ray, sweep, limit = self.ray, self.sweep, self.launcher.workers or sys.maxsize
        warning = self.launcher.notice()
        while sweep.waiting or self.tasks:
            while sweep.waiting and len(self.tasks) < limit:
                running = _Running(len(self.jobs), sweep.waiting.popleft())
                self.jobs.append(running)
                self._submit(running)
            if warning:
                sweep.report(self.jobs[0].job, ("notice", warning))
                warning = ""
            ended, _ = ray.wait(list(self.tasks), num_returns=len(self.tasks), timeout=POLL_SECONDS)
            # A task waits for its last message to arrive before it ends.
            for number, attempt, message in ray.get(self.mailbox.take.remote()):
                if attempt == self.jobs[number].attempt:
                    self._receive(self.jobs[number], message)
            for task in ended:
                self._end(task, self.tasks.pop(task))

    def _submit(self, running: _Running) -> None:
        mark = running.job.folder.parent / self.place.token
        if mark not in self.marks and not _is_stored(running.job):
            try:
                mark.parent.mkdir(parents=True, exist_ok=True)
                mark.touch()
            except OSError as error:
                raise RunError(explain_os_error(error, mark.parent)) from None
            self.marks.add(mark)
        task = self.work.remote(self.place, running.number, running.attempt, running.job)
        self.tasks[task] = running

    def _receive(self, running: _Running, message: Message) -> None:
        if not running.is_announced:
            running.is_announced = True
            self.sweep.start(running.job)
        if message[0] == "progress" and message[2] is not None and message[1] > running.furthest:
            running.furthest, running.lost = message[1], 0
        if message[0] == "started":
            running.is_running = True
        else:
            self.sweep.report(running.job, message)

    def _end(self, task: Any, running: _Running) -> None:
        try:
            self._receive(running, self.ray.get(task))
        except self.losses as error:
            running.lost += 1
            reason = _reason(error)
            if running.lost > RETRIES:
                self._receive(
                    running,
                    (
                        "failed",
                        f"it lost its worker {running.lost} times without progress: {reason}",
                    ),
                )
                return
            self._receive(
                running,
                ("notice", f"It lost its worker ({reason}) and continues from its checkpoint."),
            )
            running.attempt, running.is_running = running.attempt + 1, False
            self._submit(running)
        except self.ray.exceptions.RayError as error:  # the worker could not be set up
            self._receive(running, ("failed", str(error).strip()))


def _reason(error: Exception) -> str:
    """Return why a worker was lost."""
    reasons = {
        "WorkerCrashedError": "its process died",
        "OutOfMemoryError": "the node ran out of memory",
    }
    return reasons.get(type(error).__name__, "its node died")


# ----------------------------------------------------------------------------------- in the workers


class _Mailbox:
    """An actor that holds the workers' messages until the launcher takes them."""

    def __init__(self) -> None:
        self.messages: list[tuple[int, int, Message]] = []
        self.is_stopped = False

    def put(self, number: int, attempt: int, message: Message) -> None:
        self.messages.append((number, attempt, message))

    def take(self) -> list[tuple[int, int, Message]]:
        taken, self.messages = self.messages, []
        return taken

    def stop(self) -> None:
        self.is_stopped = True

    def should_stop(self) -> bool:
        return self.is_stopped


@dataclass
class _Channel:
    """A worker's side of the mailbox.

    Args:
        mailbox: The actor.
        number: The job's number.
        attempt: The number of the attempt.
    """

    mailbox: Any
    number: int
    attempt: int
    _last: Any = None
    _asked: Any = None
    _times: dict[str, float] = field(default_factory=dict)

    def send(self, message: Message) -> None:
        """Send a message, unless it only says again how far the epoch is."""
        is_detail = message[0] == "progress" and message[2] is None
        if not is_detail or self._is_time("report"):
            self._last = self.mailbox.put.remote(self.number, self.attempt, message)

    def should_stop(self) -> bool:
        """Return True once the launcher wants to stop. Asks at most once per second."""
        if not self._is_time("ask"):
            return False
        import ray

        # The answer to the question of a second ago: training does not wait for it.
        asked, self._asked = self._asked, self.mailbox.should_stop.remote()
        if asked is None or not ray.wait([asked], timeout=0)[0]:
            return False
        return bool(self._get(asked))

    def flush(self) -> None:
        """Wait until the last message has arrived."""
        if self._last is not None:
            self._get(self._last)

    def _get(self, reference: Any) -> Any:
        import ray

        try:
            return ray.get(reference)
        except ray.exceptions.RayError as error:
            raise ConnectionError("The launcher has ended.") from error

    def _is_time(self, what: str) -> bool:
        now = time.monotonic()
        is_time = now - self._times.get(what, -REPORT_SECONDS) >= REPORT_SECONDS
        if is_time:
            self._times[what] = now
        return is_time


def _is_stored(job: Job) -> bool:
    """Return True for a job that keeps its files in a storage, so nodes may share no folder."""
    return getattr(job, "storage", None) is not None


def _work(place: _Place, number: int, attempt: int, job: Job) -> Message:
    """Run a job on a node, and return how it ended."""
    channel = _Channel(place.mailbox, number, attempt)
    channel.send(("started",))
    try:
        _enter(place, job)
        if attempt > 1 and not _is_stored(job):
            _wait_for_lock(job.folder)
    except UserError as error:
        ended: Message | None = ("failed", str(error))
    else:
        ended = run_job(job, channel.send, channel.should_stop)
    channel.flush()
    return ended or ("failed", "it was stopped")


def _enter(place: _Place, job: Job) -> None:
    """Check that this node sees what the launcher sees, and go to its working directory."""
    import socket

    node = socket.gethostname()
    here = versions()
    if here != place.versions:
        different = ", ".join(
            f"{name} {here.get(name)} instead of {version}"
            for name, version in place.versions.items()
            if here.get(name) != version
        )
        raise LauncherError(f"Node {node} has {different}. Install the same versions on all nodes.")
    try:
        os.chdir(place.folder)  # for relative paths of data and of the user's code
    except OSError:
        if not job.folder.is_absolute() and not _is_stored(job):
            raise LauncherError(
                f"Node {node} does not have the folder {place.folder}. Pass absolute paths, or run "
                "the command in a folder that all nodes share."
            ) from None
    mark = job.folder.parent / place.token
    if not _is_stored(job) and not _becomes_true(mark.exists, place.share_seconds):
        raise LauncherError(
            f"Node {node} does not see the files in {mark.parent}. Pass an --out on a file system "
            "that all nodes share, or a URL such as s3://bucket/runs."
        )


def _wait_for_lock(folder: Path) -> None:
    """Wait until the lock of a worker that was lost is released."""

    def is_free() -> bool:
        try:
            with lock.locked(folder):
                return True
        except RunError:
            return False

    _becomes_true(is_free, LOCK_SECONDS)  # the run itself reports that it is still locked


def _becomes_true(condition: Callable[[], bool], seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True


# ---------------------------------------------------------------------------------- in the terminal


class _WithoutRay:
    """Standard output, without what the threads of Ray print there about lost nodes."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def _target(self) -> TextIO:
        is_ray = threading.current_thread().name.startswith("ray_")
        return sys.stderr if is_ray else self._stream

    def write(self, text: str) -> int:
        return self._target().write(text)

    def writelines(self, lines: Iterable[str]) -> None:
        self._target().writelines(lines)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextmanager
def _results_only_on_stdout() -> Iterator[None]:
    """Send what Ray prints to standard error: programs read JSON from standard output."""
    before = sys.stdout
    sys.stdout = cast(TextIO, _WithoutRay(before))
    try:
        yield
    finally:
        sys.stdout = before
