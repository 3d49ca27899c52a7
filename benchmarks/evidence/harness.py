"""One training run, and everything that is measured along it."""

from __future__ import annotations

import json
import math
import os
import platform
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Collection, Iterator
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from itertools import islice
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import nn

import gadam
from benchmarks.evidence import methods
from benchmarks.evidence.methods import Applied, Knobs
from benchmarks.evidence.tasks import TASKS, Workload
from gadam.train import tasks as gadam_tasks
from gadam.train.data import subset
from gadam.train.tasks import ImageTask, LanguageTask, seed_for

__all__ = ["EVALUATIONS", "OWN", "Record", "Trial", "machine", "rerun", "run"]

EVALUATIONS = 12  # along a run; of averages at every second one
OWN = "own"  # the point that the base itself ends at: the iterate, or its own average
Number = float | None  # None if it is not finite


@dataclass(frozen=True)
class Trial:
    """A training run.

    Args:
        task: One of the tasks.
        method: A base and a schedule, such as "adamw cosine", or a base that needs no schedule.
        knobs: The tuned settings.
        seed: Determines the initial weights, the order of the data, and dropout. Seed 0 tunes.
    """

    task: str
    method: str
    knobs: Knobs
    seed: int

    @property
    def base(self) -> str:
        """The base optimizer."""
        return self.method.split()[0]

    @property
    def schedule(self) -> str:
        """The schedule. Schedule-Free holds its rate."""
        return self.method.split()[1] if " " in self.method else "held"

    @property
    def key(self) -> str:
        """A string that identifies the trial."""
        return json.dumps(asdict(self), sort_keys=True)


@dataclass
class Record:
    """What is known about a run, as one line of a results file.

    Attributes:
        trial: The run.
        steps: Optimizer steps in the budget.
        validation: Per point, the step, the metric, and the loss of each evaluation.
        test: Per point, the metrics at the end. Only the final analysis reads them.
        train_loss: The mean loss over the last twentieth of the steps.
        auto: The steps in which the automatic average started and stopped.
        diverged: The step in which the loss was not finite, or in which, after half of the run or
            more, it was above the first one. The run ends there.
        seconds: CPU seconds per activity.
        parameters: The size of the model.
        versions: The versions that produced the record.
    """

    trial: Trial
    steps: int
    validation: dict[str, list[tuple[int, Number, Number]]] = field(default_factory=dict)
    test: dict[str, dict[str, Number]] = field(default_factory=dict)
    train_loss: Number = None
    auto: dict[str, int] = field(default_factory=dict)
    diverged: int | None = None
    seconds: dict[str, float] = field(default_factory=dict)
    parameters: int = 0
    versions: dict[str, str] = field(default_factory=dict)

    def final(self, point: str) -> float:
        """Return the validation metric of a point at the end of the run, or NaN without one.

        Args:
            point: :data:`OWN`, or the name of an average.
        """
        measured = self.validation.get(point, [])
        value = measured[-1][1] if measured and measured[-1][0] == self.steps else None
        return math.nan if value is None else value

    def to_json(self) -> str:
        """Return the record as one line."""
        return json.dumps(asdict(self), allow_nan=False)

    @classmethod
    def from_json(cls, line: str) -> Record:
        """Read what :meth:`to_json` wrote.

        Args:
            line: The line.
        """
        fields = json.loads(line)
        trial = fields.pop("trial")
        trial["knobs"] = Knobs(**trial["knobs"])
        for measured in fields["validation"].values():
            measured[:] = map(tuple, measured)
        return cls(Trial(**trial), **fields)


def _finite(value: float) -> Number:
    return round(value, 6) if math.isfinite(value) else None


def run(
    trial: Trial,
    workload: Workload | None = None,
    averages: Collection[str] = (*methods.AVERAGES, "bema"),
    with_branch: bool = True,
) -> list[Record]:
    """Train once, on one thread.

    A run at a held rate also returns the record of the same base with the schedule "wsd", its
    branch: up to the decay at the end, both are the same run.

    Args:
        trial: The run.
        workload: The task. The default is the one that the trial names.
        averages: The averages to measure. They do not change the run.
        with_branch: Whether to train the branch of a run at a held rate.

    Returns:
        One record, or two at a held rate with its branch.
    """
    torch.set_num_threads(1)
    training = _Training(trial, workload or TASKS[trial.task], averages)
    records = []
    if with_branch and trial.schedule == "held" and trial.method != trial.base:
        training.advance(math.floor((1 - methods.WSD_TAIL) * training.record.steps))
        records.append(_in_fork(lambda: training.finish("wsd")))
    return [training.finish(trial.schedule), *records]


def rerun(record: Record) -> Record:
    """Train the run of a record again.

    Args:
        record: A record that :func:`run` has returned.

    Returns:
        The new record. On the same machine, and with the same versions, it differs only in
        ``seconds`` and ``versions``.
    """
    trial = record.trial
    if trial.schedule == "wsd":  # a branch of a run at a held rate
        trial = replace(trial, method=f"{trial.base} held")
    return next(one for one in run(trial) if one.trial == record.trial)


class _Training:
    """The state of a run."""

    def __init__(self, trial: Trial, workload: Workload, averages: Collection[str]) -> None:
        self.clock = _Clock()
        self.trial, self.workload = trial, workload
        recipe = workload.recipe
        self.task = gadam_tasks.build(recipe, trial.seed, torch.device("cpu"), None)
        if workload.test is not None and isinstance(self.task, ImageTask):
            self.task._splits = dict(self.task._splits)
            self.task._splits["test"] = subset(self.task._splits["test"], workload.test)
        if isinstance(self.task, LanguageTask):
            # Much faster than one column, for a few words without context.
            columns = dict.fromkeys(self.task.EVALUATION_COLUMNS, workload.columns)
            self.task.EVALUATION_COLUMNS = columns  # type: ignore[misc]
        self.model = self.task.model
        total = sum(map(self.task.steps, range(recipe.epochs)))
        self.record = Record(trial, total, versions=_versions())
        self.record.parameters = sum(p.numel() for p in self.model.parameters())
        self.optimizer = methods.build(trial.base, self.model, trial.knobs, total)
        self.points: dict[str, Applied] = {OWN: methods.own_point(trial.base, self.optimizer)}
        if not methods.averages_itself(trial.base):
            # Lookahead's inner optimizer is sampled after each synchronization.
            watched = getattr(self.optimizer, "optimizer", self.optimizer)
            for name, plan in methods.AVERAGES.items():
                if name in averages:
                    self.points[name] = gadam.IterateAverage(watched, plan(total, self.task.mode))
            if "bema" in averages:
                self.points["bema"] = methods.BEMA(watched, start=total // 2)
        self.evaluated = [round(total * i / EVALUATIONS) for i in range(1, EVALUATIONS + 1)]
        self.has_batchnorm = any(
            isinstance(module, nn.modules.batchnorm._BatchNorm) for module in self.model.modules()
        )
        self.step = 0
        self.losses: list[float] = []
        self.batches = self._batches()
        self.clock.lap("setup")

    def _batches(self) -> Iterator[Any]:
        for epoch in range(self.workload.recipe.epochs):
            torch.manual_seed(seed_for(self.trial.seed, epoch, "noise in the network"))
            yield from self.task.batches(epoch)

    def advance(self, until: int) -> None:
        """Train until a step, unless the run has diverged, and evaluate along the way."""
        recipe, total = self.workload.recipe, self.record.steps
        self.model.train()
        while self.step < until and self.record.diverged is None:
            batch = next(self.batches)
            self.step += 1
            factor = self.task.rate_factor(batch)
            if not methods.has_own_warm_up(self.trial.base):
                factor *= methods.rate_factor(self.trial.schedule, self.step, total)
            for group in self.optimizer.param_groups:
                group["lr"] = self.trial.knobs.lr * factor
            self.optimizer.zero_grad()
            loss, _ = self.task.loss(self.model, batch)
            loss.backward()
            if recipe.clip_grad_norm is not None:
                nn.utils.clip_grad_norm_(self.model.parameters(), recipe.clip_grad_norm)
            self.optimizer.step()
            self.losses.append(loss.item())
            if not math.isfinite(self.losses[-1]) or self._has_learned_nothing():
                self.record.diverged = self.step
            elif self.step in self.evaluated and self.step < total:
                self.clock.lap("train")
                self._evaluate(self.evaluated.index(self.step) % 2 == 1)
        self.clock.lap("train")

    def _has_learned_nothing(self) -> bool:
        """Return True if half of the run or more has not brought the loss below the first one.

        Looked at in every evaluated step, over the steps since the last one.
        """
        if self.step not in self.evaluated or 2 * self.step < self.record.steps:
            return False
        since = max(1, self.record.steps // EVALUATIONS)
        return fmean(self.losses[-since:]) > self.losses[0]

    def _evaluate(self, also_curves: bool) -> None:
        metric = self._measure(OWN)
        auto = self.points.get("auto")
        assert auto is None or isinstance(auto, gadam.IterateAverage)
        if auto is not None and auto.phase == "waiting":
            auto.observe(metric)
            if auto.phase == "averaging":
                self.record.auto["start"] = self.step
        elif auto is not None and auto.phase == "averaging" and auto.observe(self._measure("auto")):
            self.record.auto["stop"] = self.step
        for name in methods.CURVES if also_curves else ():
            average = self.points.get(name)
            if isinstance(average, gadam.IterateAverage) and name != "auto" and average.count:
                self._measure(name)
        self.model.train()

    def _measure(self, name: str, with_test: bool = False) -> float:
        """Evaluate a point with its own BatchNorm statistics, and return the metric."""
        refresh = islice(self.task.refresh(0), self.workload.refresh)
        with self.points[name].applied(
            self.model, batchnorm=refresh if self.has_batchnorm else None
        ):
            self.clock.lap("refresh")
            found = self.task.evaluate(self.model, "validation")
            measured = self.step, _finite(found[self.task.metric]), _finite(found["loss"])
            self.record.validation.setdefault(name, []).append(measured)
            self.clock.lap("evaluate")
            if with_test:
                test = self.task.evaluate(self.model, "test")
                self.record.test[name] = {key: _finite(value) for key, value in test.items()}
        self.clock.lap("test")
        return found[self.task.metric]

    def finish(self, schedule: str) -> Record:
        """Train to the end by a schedule, evaluate every point, and return the record."""
        if schedule != self.trial.schedule:
            self.trial = replace(self.trial, method=f"{self.trial.base} {schedule}")
            self.record.trial = self.trial
        self.advance(self.record.steps)
        if self.record.diverged is None:
            # Of the branch that decays to zero, only the iterate is compared.
            ends = {OWN: self.points[OWN]} if schedule == "wsd" else self.points
            for name, point in ends.items():
                if not isinstance(point, gadam.IterateAverage) or point.count:
                    self._measure(name, with_test=True)
        self.record.train_loss = _finite(fmean(self.losses[-max(1, self.record.steps // 20) :]))
        self.record.seconds = self.clock.seconds()
        return self.record


class _Clock:
    """CPU seconds per activity: other processes on the machine do not count."""

    def __init__(self) -> None:
        self.laps: dict[str, float] = {}
        self.last = time.process_time()

    def lap(self, activity: str) -> None:
        now = time.process_time()
        # A fork starts a clock of its own.
        self.laps[activity] = self.laps.get(activity, 0.0) + now - min(self.last, now)
        self.last = now

    def seconds(self) -> dict[str, float]:
        return {activity: round(seconds, 2) for activity, seconds in self.laps.items()}


def _in_fork(work: Callable[[], Record]) -> Record:
    """Call a function in a copy of this process, which leaves everything here as it is."""
    readable, writable = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            with os.fdopen(writable, "w") as out:
                out.write(work().to_json())
            os._exit(0)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(1)
    # If this process is stopped, its copy must not go on.
    previous = signal.signal(signal.SIGTERM, lambda *_: sys.exit("Stopped."))
    try:
        os.close(writable)
        with os.fdopen(readable) as sent:
            line = sent.read()
    finally:
        signal.signal(signal.SIGTERM, previous)
        os.kill(child, signal.SIGKILL if sys.exc_info()[0] else 0)
        status = os.waitpid(child, 0)[1]
    if status != 0:
        raise RuntimeError("The branch of the run failed.")
    return Record.from_json(line)


@cache
def _versions() -> dict[str, str]:
    return {
        "torch": torch.__version__,
        "gadam": _commit(Path(gadam.__file__).parent),
        "harness": _commit(Path(__file__).parent),
        "machine": machine(),
    }


def machine() -> str:
    """Return the processor and the instruction set that torch uses: others round differently."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    processor = names[0] if names else platform.processor() or platform.machine()
    return f"{processor}, {torch.backends.cpu.get_cpu_capability()}"


def _commit(folder: Path) -> str:
    command = ["git", "describe", "--always", "--abbrev=12", "--dirty", "--exclude=*"]
    found = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    return found.stdout.strip() or "unknown"
