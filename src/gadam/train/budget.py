"""Fit a comparison into a time budget, by a short pilot on the machine that will run it."""

from __future__ import annotations

import heapq
import math
import re
import tempfile
import time
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

from gadam.runs.files import Document
from gadam.runs.recipe import Recipe, RecipeError
from gadam.runs.record import EpochRecord
from gadam.train.experiments import in_proportion
from gadam.train.search import MIN_EPOCHS, Comparison, Plan, Run, Setting
from gadam.train.sweep import OnNotice, OnProgress, ShouldStop

__all__ = [
    "PilotJob",
    "Timing",
    "duration_text",
    "fit",
    "parse_duration",
    "pilot_recipe",
    "steadied",
    "wall_seconds",
]

_UNITS = {"h": 3600.0, "m": 60.0, "s": 1.0}
_DURATION = re.compile(r"(?:(?P<h>\d+(?:\.\d+)?)h)?(?:(?P<m>\d+(?:\.\d+)?)m)?(?:(?P<s>\d+)s)?")

# Trials and seeds, the best first. A budget gets the first that fits.
_SIZES = ((48, 10), (32, 8), (24, 5), (16, 5), (12, 5), (12, 3), (9, 3), (6, 3), (6, 2))
_LEAST = (4, 2)
_SHARES = (1.0, 0.5, 0.25)  # of the task's epochs
MARGIN = 0.92  # what a plan may use of the time: no pilot is exact


def parse_duration(text: str) -> float:
    """Return a duration in seconds.

    Args:
        text: Such as 2h, 90m, 1h30m or 45s.

    Raises:
        RecipeError: The text is not a duration.

    Example:
        >>> parse_duration("1h30m")
        5400.0
    """
    found = _DURATION.fullmatch(text.strip().lower().replace(" ", "").replace("min", "m"))
    parts = {unit: float(n) for unit, n in found.groupdict().items() if n} if found else {}
    seconds = sum(_UNITS[unit] * n for unit, n in parts.items())
    if not seconds:
        raise RecipeError(f"--budget takes a time such as 2h, 90m, 1h30m or 45s, got {text!r}.")
    return seconds


def duration_text(seconds: float) -> str:
    """Return a duration as text, rounded up to seconds, minutes, or five minutes.

    Args:
        seconds: The duration.

    Example:
        >>> [duration_text(s) for s in (44.2, 80, 600, 6500, 7200)]
        ['45 s', '2 min', '10 min', '1 h 50 min', '2 h']
    """
    if seconds < 60:
        return f"{math.ceil(seconds)} s"
    minutes = math.ceil(seconds / 60)
    if minutes < 60:
        return f"{minutes} min"
    hours, rest = divmod(5 * math.ceil(minutes / 5), 60)
    return f"{hours} h {rest} min" if rest else f"{hours} h"


@dataclass(frozen=True)
class Timing:
    """What the runs of a method cost, in seconds.

    Args:
        setup: Per run, before and after training: load the data, build the model, write files.
        epoch: Per epoch of training.
        evaluation: Per evaluation of all points on all splits, the BatchNorm refresh included.
        began: When the pilot began, on the system's clock: after its process had started.
    """

    setup: float
    epoch: float
    evaluation: float
    began: float = 0.0

    def run(self, epochs: int, evaluations: int) -> float:
        """Return the seconds of a run.

        Args:
            epochs: Its epochs.
            evaluations: How often it is evaluated.
        """
        return self.setup + epochs * self.epoch + evaluations * self.evaluation

    def to_dict(self) -> Document:
        """Return the timing as plain data."""
        return {"setup": self.setup, "epoch": self.epoch, "evaluation": self.evaluation}


def pilot_recipe(recipe: Recipe) -> Recipe:
    """Return two epochs of a recipe, with all points evaluated after each.

    Args:
        recipe: The recipe.
    """
    short = in_proportion(recipe, 2)
    average = None if short.average is None else replace(short.average, start=0)
    return replace(short, average=average, evaluate_every=1, keep_iterates=0, blocks=0)


@dataclass(frozen=True)
class PilotJob:
    """Time a recipe. See :class:`gadam.train.sweep.Job`.

    Args:
        label: The method.
        recipe: From :func:`pilot_recipe`.
        folder: A folder to remove afterwards.
        limit: Stop after about this many seconds of training, and estimate the rest.
        data_dir: Where data sets are.
        device: Where to compute.
        threads: CPU threads.
        seed: The seed of the run.
        storage: Where runs go, if nodes share no folder. The pilot has a temporary folder then.
    """

    label: str
    recipe: Recipe
    folder: Path
    limit: float
    data_dir: str | None = None
    device: str = "cpu"
    threads: int = 1
    seed: int = 0
    storage: str | None = None

    event = "pilot"
    total = 2.0

    def run(self, on_progress: OnProgress, on_notice: OnNotice, should_stop: ShouldStop) -> Timing:
        """Train for up to two epochs, and return the timing."""
        from gadam.train.loop import Stopped, train

        began, start = time.time(), time.perf_counter()
        marks: list[tuple[float, float]] = []  # epochs done, and when
        records: list[EpochRecord] = []

        def note(done: float, record: EpochRecord | None) -> None:
            marks.append((done, time.perf_counter() - start))
            records.extend([] if record is None else [record])
            on_progress(done, None)

        first_step: float | None = None  # loading the data does not count
        stopped_by_sweep = False

        def is_over() -> bool:
            nonlocal first_step, stopped_by_sweep
            stopped_by_sweep = should_stop()
            now = time.perf_counter()
            first_step = first_step or now
            # The first steps are slow: do not judge by them alone.
            limit = self.limit if len(marks) > 1 else 4 * self.limit
            return stopped_by_sweep or now - first_step > limit

        own = nullcontext(str(self.folder))
        try:
            with own if self.storage is None else tempfile.TemporaryDirectory() as folder:
                train(
                    self.recipe,
                    folder,
                    seed=self.seed,
                    data_dir=self.data_dir,
                    device=self.device,
                    threads=self.threads,
                    label=self.label,
                    on_progress=note,
                    should_stop=is_over,
                )
        except Stopped:
            if stopped_by_sweep:
                raise
        return replace(timing_of(marks, records, time.perf_counter() - start), began=began)

    def describe(self, update: object) -> str:
        """Return nothing: a pilot has no updates."""
        return ""

    def outcome(self, result: Timing) -> str:
        """Return the timing as text."""
        return f"{result.epoch:.3g} s per epoch, {result.evaluation:.3g} s per evaluation"


def timing_of(
    marks: list[tuple[float, float]], records: list[EpochRecord], seconds: float
) -> Timing:
    """Return the timing of a run of two epochs that may have been stopped.

    Args:
        marks: Epochs done so far, and the seconds until then, in order.
        records: The complete epochs.
        seconds: The seconds of the whole run.
    """
    if records:
        last = records[-1].seconds  # the first epoch warms up
        evaluation = last["refresh"] + last["evaluate"]
        known = sum(sum(record.seconds.values()) for record in records)
        setup = seconds - known if len(records) == 2 else marks[0][1]
        return Timing(max(setup, 0.0), last["train"], evaluation)
    if len(marks) < 2:
        return Timing(seconds, math.inf, math.inf)
    (first, begin), (last_done, end) = marks[0], marks[-1]
    epoch = (end - begin) / (last_done - first)
    # Nothing was evaluated: two points, each a pass over the training data and over the splits.
    return Timing(max(0.0, begin - first * epoch), epoch, 1.5 * epoch)


def steadied(timings: Mapping[str, Timing]) -> dict[str, Timing]:
    """Return the timings with less noise.

    Only the first pilots load data and libraries, so all methods get the median setup. No method
    is much faster than the others, so none gets less than the median of the other times.

    Args:
        timings: By method.
    """
    setup = median(timing.setup for timing in timings.values())
    epoch = median(timing.epoch for timing in timings.values())
    evaluation = median(timing.evaluation for timing in timings.values())
    return {
        method: replace(
            timing,
            setup=setup,
            epoch=max(timing.epoch, epoch),
            evaluation=max(timing.evaluation, evaluation),
        )
        for method, timing in timings.items()
    }


def wall_seconds(plan: Plan, timings: Mapping[str, Timing], workers: int) -> float:
    """Return the wall time of a comparison, by playing it through.

    Args:
        plan: How much to train.
        timings: By method.
        workers: Runs at a time.
    """
    comparison = Comparison(plan, dict.fromkeys(timings, Setting(0.1, 0.1)))
    waiting, clock = deque(comparison.start()), 0.0
    running: list[tuple[float, int]] = []  # ends, and indices of runs
    begun: list[Run] = []
    while waiting or running:
        while waiting and len(running) < workers:
            run = waiting.popleft()
            evaluations = _evaluations(plan) if run.is_final else 1
            seconds = timings[run.method].run(run.trial.epochs, evaluations)
            heapq.heappush(running, (clock + seconds, len(begun)))
            begun.append(run)
        clock, index = heapq.heappop(running)
        waiting += comparison.after(begun[index], score=-float(begun[index].trial.number))
    return clock


def fit(
    seconds: float,
    timings: Mapping[str, Timing],
    workers: int,
    *,
    epochs: int,
    trials: int | None = None,
    seeds: int | None = None,
) -> tuple[Plan, float]:
    """Return the largest plan that fits into a time, and its wall time.

    Fewer epochs than the task asks for are a last resort: they change the question.

    Args:
        seconds: The time that is left.
        timings: By method.
        workers: Runs at a time.
        epochs: The epochs that the task asks for.
        trials: Trials per method, if they are given.
        seeds: Seeds per method, if they are given.

    Returns:
        The plan and its wall time. If nothing fits, the smallest plan, whose time exceeds
        ``seconds``.
    """
    *others, least = _plans(epochs, trials, seeds)
    for plan in others:
        if _work(plan, timings) / workers / MARGIN <= seconds:
            needed = wall_seconds(plan, timings, workers) / MARGIN
            if needed <= seconds:
                return plan, needed
    return least, wall_seconds(least, timings, workers) / MARGIN


def _evaluations(plan: Plan) -> int:
    """Return how often a final run is evaluated, at most."""
    return min(11, plan.epochs)


def _work(plan: Plan, timings: Mapping[str, Timing]) -> float:
    """Return the seconds of all runs, one after another."""
    evaluations = plan.runs - plan.seeds + plan.seeds * _evaluations(plan)
    return sum(
        plan.runs * t.setup + plan.total_epochs * t.epoch + evaluations * t.evaluation
        for t in timings.values()
    )


def _plans(epochs: int, trials: int | None, seeds: int | None) -> Iterator[Plan]:
    """Return the possible plans, the best first."""
    lengths = [max(min(epochs, MIN_EPOCHS), round(epochs * share)) for share in _SHARES]
    sizes = [*_SIZES, _LEAST]
    for length in dict.fromkeys(lengths):
        for size in sizes if length == lengths[-1] else _SIZES:
            yield Plan(trials or size[0], length, seeds or size[1])
