"""How a sweep looks while it runs: bars in a terminal, lines in a log, JSON for programs."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from types import TracebackType
from typing import TextIO

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from gadam.runs import summary
from gadam.runs.experiment import Experiment
from gadam.runs.files import Json, to_json
from gadam.runs.verdict import Verdict
from gadam.train.experiments import COMPARE, LM_MINI, hours
from gadam.train.sweep import Job, Reportable

__all__ = [
    "Bars",
    "JsonLines",
    "Lines",
    "Quiet",
    "listener",
    "open_console",
    "print_list",
    "print_table",
    "print_verdicts",
]


def open_console() -> Console:
    """Return the console of standard output. If it is piped, no line is ever too long for it."""
    console = Console()
    return console if console.is_terminal else Console(width=10_000)


class Quiet:
    """Print only what went wrong. A notice that many runs share is printed once."""

    def __init__(self) -> None:
        self._told: set[str] = set()

    def on_start(self, job: Job) -> None:
        """Ignore it."""

    def on_progress(self, job: Job, done: float, update: Reportable | None) -> None:
        """Ignore it."""

    def on_notice(self, job: Job, sentence: str) -> None:
        """Print the sentence, unless it was printed before."""
        if self._is_new(sentence):
            print(f"{job.label}, seed {job.seed}: {sentence}", file=sys.stderr, flush=True)

    def _is_new(self, sentence: str) -> bool:
        is_new = sentence not in self._told
        self._told.add(sentence)
        return is_new

    def on_finish(self, job: Job, result: Reportable) -> None:
        """Ignore it."""

    def on_failure(self, job: Job, reason: str) -> None:
        """Print the reason."""
        print(f"FAILED {job.label}, seed {job.seed}: {reason}", file=sys.stderr, flush=True)

    def __enter__(self) -> Quiet:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None: ...


class Lines(Quiet):
    """Print plain lines, for logs: each run's start, some of its epochs, its end.

    Args:
        seconds: Least time between two lines about the same run.
    """

    def __init__(self, seconds: float = 10.0) -> None:
        super().__init__()
        self.seconds = seconds
        self._last: dict[Job, float] = {}

    def on_start(self, job: Job) -> None:
        """Print a line."""
        self._last[job] = time.monotonic()
        print(f"{job.label}, seed {job.seed}: started", flush=True)

    def on_progress(self, job: Job, done: float, update: Reportable | None) -> None:
        """Print a line if the last one is old enough."""
        if update is not None and time.monotonic() - self._last.get(job, 0.0) > self.seconds:
            self._last[job] = time.monotonic()
            print(f"{job.label}, seed {job.seed}: {job.describe(update)}", flush=True)

    def on_finish(self, job: Job, result: Reportable) -> None:
        """Print the outcome."""
        print(f"{job.label}, seed {job.seed}: {job.outcome(result)}", flush=True)


class JsonLines(Quiet):
    """Print one JSON object per event, for programs.

    Args:
        file: Where to. Default: standard output.
    """

    def __init__(self, file: TextIO | None = None) -> None:
        super().__init__()
        self._file = file or sys.stdout

    def _print(self, event: str, job: Job, **content: Json) -> None:
        line = {"event": event, "run": job.label, "seed": job.seed, "folder": str(job.folder)}
        print(to_json({**line, **content}), file=self._file, flush=True)

    def on_start(self, job: Job) -> None:
        """Print the event."""
        self._print("started", job)

    def on_progress(self, job: Job, done: float, update: Reportable | None) -> None:
        """Print the event if there is an update."""
        if update is not None:
            self._print(job.event, job, **update.to_dict())

    def on_finish(self, job: Job, result: Reportable) -> None:
        """Print the event with the result."""
        self._print("finished", job, **result.to_dict())

    def on_notice(self, job: Job, sentence: str) -> None:
        """Print the event."""
        self._print("notice", job, sentence=sentence)

    def on_failure(self, job: Job, reason: str) -> None:
        """Print the event."""
        self._print("failed", job, reason=reason)


class Bars(Quiet):
    """Show a progress bar per active run, and one for all runs.

    Args:
        console: The terminal.
        jobs: The number of runs.
    """

    def __init__(self, console: Console, jobs: int) -> None:
        super().__init__()
        self._console = console
        self._all = Progress(
            TextColumn("[bold]{task.description}"),
            BarColumn(),
            TextColumn("{task.fields[done]}/{task.total} runs"),
            TimeRemainingColumn(),
            console=console,
        )
        self._runs = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            TextColumn("{task.percentage:>3.0f}%"),
            TextColumn("[dim]{task.fields[update]}"),
            console=console,
        )
        self._total = self._all.add_task("all", total=jobs, done=0)
        self._tasks: dict[Job, TaskID] = {}
        self._done: dict[Job, float] = {}
        self._live = Live(Group(self._all, self._runs), console=console, refresh_per_second=6)

    def __enter__(self) -> Bars:
        self._live.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._live.__exit__(kind, error, trace)

    def on_start(self, job: Job) -> None:
        """Add a bar."""
        self._tasks[job] = self._runs.add_task(
            f"{job.label}, seed {job.seed}", total=job.total, update=""
        )

    def on_progress(self, job: Job, done: float, update: Reportable | None) -> None:
        """Advance the run's bar."""
        self._runs.update(self._tasks[job], completed=done)
        if update is not None:
            self._runs.update(self._tasks[job], update=job.describe(update))
        self._done[job] = 0.999 * done / job.total  # only on_finish completes it
        self._count()

    def _count(self) -> None:
        done = self._done.values()
        self._all.update(self._total, completed=sum(done), done=sum(share == 1.0 for share in done))

    def _close(self, job: Job) -> None:
        if job in self._tasks:
            self._runs.remove_task(self._tasks.pop(job))
        self._done[job] = 1.0
        self._count()

    def on_finish(self, job: Job, result: Reportable) -> None:
        """Remove the run's bar and print the outcome."""
        self._close(job)
        outcome = f"{job.label}, seed {job.seed}: {job.outcome(result)}"
        self._console.print(outcome, style="dim", markup=False)

    def on_notice(self, job: Job, sentence: str) -> None:
        """Print the sentence above the bars, unless it was printed before."""
        if self._is_new(sentence):
            self._console.print(f"{job.label}, seed {job.seed}: {sentence}", markup=False)

    def on_failure(self, job: Job, reason: str) -> None:
        """Remove the run's bar and print the reason."""
        self._close(job)
        # In one piece: the bars overwrite a line that is not complete.
        failed = Text.assemble(("FAILED", "red"), f" {job.label}, seed {job.seed}: {reason}")
        self._console.print(failed)


def listener(jobs: int, *, quiet: bool, as_json: bool) -> Quiet:
    """Return the listener that fits the output: JSON, quiet, a terminal, or a log.

    Args:
        jobs: The number of runs.
        quiet: Print only what went wrong.
        as_json: Print JSON.
    """
    if as_json:
        return JsonLines()
    if quiet:
        return Quiet()
    console = Console()
    return Bars(console, jobs) if console.is_terminal else Lines()


def print_table(experiment: Experiment, table: list[summary.Row]) -> None:
    """Print the final table.

    Args:
        experiment: What was run.
        table: Its rows.
    """
    console = open_console()
    title = f"{experiment.title}: test {summary.with_units(experiment.metrics)}"
    shown = Table(title=title, title_justify="left")
    published = any(row.published is not None for row in table)
    for i, name in enumerate([*summary.HEADER, *(["paper, at full scale"] if published else [])]):
        shown.add_column(name, justify="left" if i in (0, 3) else "right")
    best = summary.best(experiment, table)
    for row in table:
        values = list(summary.cells(row))
        if published:
            values.append("" if row.published is None else f"{row.published:g}")
        shown.add_row(*values, style="bold" if row.label in best else None)
    console.print(shown)
    console.print(
        "Mean ± standard error over seeds. A method with an average is used at its average. Gains "
        "are paired by seed and positive if the method is better. Validation is the result of the "
        "same point on held-out data, if there is any.",
        style="dim",
    )
    if experiment.note:
        console.print(experiment.note, style="dim")


def print_verdicts(verdicts: Sequence[Verdict]) -> None:
    """Print the answer for each task, with the task's heading if there are several.

    Args:
        verdicts: The answers.
    """
    console = open_console()
    for verdict in verdicts:
        heading = f"{verdict.task}: " if len(verdicts) > 1 else ""
        console.print(f"{heading}{verdict.sentence()}", style="bold", markup=False, highlight=False)


def print_list(found: list[tuple[str, Experiment, Experiment]], with_recipes: bool) -> None:
    """Print the experiments with their costs.

    Args:
        found: Name, mini scale and full scale of each.
        with_recipes: Also print their recipes.
    """
    console = open_console()
    shown = Table(box=None, pad_edge=False)
    shown.add_column("name", no_wrap=True)  # to be copied
    shown.add_column("title")
    for heading in ("runs", "mini: core minutes", "paper: GPU hours"):
        shown.add_column(heading, justify="right")
    shown.add_column("paper: data")
    for name, small, large in found:
        sets = ", ".join(sorted({r.data.name for r in large.recipes.values()}))
        own = name in (COMPARE, LM_MINI)
        shown.add_row(
            name,
            small.title,
            f"{len(small.recipes)} x {small.seeds}",
            f"{60 * hours(small):.0f}",
            "" if own else f"{hours(large):,.0f}",
            "" if own else sets,
        )
        if with_recipes:
            for recipe in small.recipes.values():
                shown.add_row(
                    f"  {recipe.name}", f"[dim]{recipe.method}, {recipe.model}", "", "", "", ""
                )
    console.print(shown)
    console.print(
        "\n`gadam reproduce NAME` runs an experiment; `gadam train RECIPE` trains one recipe "
        "(`gadam list --recipes` prints their names). Costs are rough estimates.",
        style="dim",
    )
