"""How a sweep looks while it runs: bars for a person, lines for a log, JSON for a program."""

from __future__ import annotations

import sys
import time
from typing import Any, TextIO

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from gadam.train import summary
from gadam.train.experiments import COMPARE, LM_MINI, Experiment, hours
from gadam.train.record import to_json
from gadam.train.sweep import Listener, Work

__all__ = ["Bars", "JsonLines", "Lines", "Quiet", "listener", "print_list", "print_table"]


class Quiet:
    """Says only what went wrong."""

    def started(self, job: Work) -> None: ...

    def went_on(self, job: Work, done: float, line: dict[str, Any] | None) -> None: ...

    def noticed(self, job: Work, sentence: str) -> None:
        print(f"{job.label}, seed {job.seed}: {sentence}", file=sys.stderr, flush=True)

    def finished(self, job: Work, result: dict[str, Any]) -> None: ...

    def failed(self, job: Work, reason: str) -> None:
        print(f"FAILED {job.label}, seed {job.seed}: {reason}", file=sys.stderr, flush=True)

    def __enter__(self) -> Quiet:
        return self

    def __exit__(self, *_: object) -> None: ...


class Lines(Quiet):
    """Plain lines, where nobody watches: a run's start, its epochs once in a while, its end."""

    def __init__(self, seconds: float = 10.0) -> None:
        self.seconds = seconds
        self._last: dict[Work, float] = {}

    def started(self, job: Work) -> None:
        self._last[job] = time.monotonic()
        print(f"{job.label}, seed {job.seed}: begins", flush=True)

    def went_on(self, job: Work, done: float, line: dict[str, Any] | None) -> None:
        if line is not None and time.monotonic() - self._last.get(job, 0.0) > self.seconds:
            self._last[job] = time.monotonic()
            print(f"{job.label}, seed {job.seed}: {job.told(line)}", flush=True)

    def finished(self, job: Work, result: dict[str, Any]) -> None:
        print(f"{job.label}, seed {job.seed}: {job.outcome(result)}", flush=True)


class JsonLines(Quiet):
    """One JSON object a line, for programs."""

    def __init__(self, file: TextIO | None = None) -> None:
        self._file = file or sys.stdout

    def _say(self, event: str, job: Work, **content: Any) -> None:
        line = {"event": event, "run": job.label, "seed": job.seed, "folder": str(job.folder)}
        print(to_json({**line, **content}), file=self._file, flush=True)

    def started(self, job: Work) -> None:
        self._say("started", job)

    def went_on(self, job: Work, done: float, line: dict[str, Any] | None) -> None:
        if line is not None:
            self._say("epoch" if "epoch" in line else "measured", job, **line)

    def finished(self, job: Work, result: dict[str, Any]) -> None:
        self._say("finished", job, **result)

    def noticed(self, job: Work, sentence: str) -> None:
        self._say("noticed", job, sentence=sentence)

    def failed(self, job: Work, reason: str) -> None:
        self._say("failed", job, reason=reason)


class Bars(Quiet):
    """A bar for each run under way and one for all of them."""

    def __init__(self, console: Console, jobs: int) -> None:
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
            TextColumn("{task.percentage:>3.0f} %"),
            TextColumn("[dim]{task.fields[told]}"),
            console=console,
        )
        self._total = self._all.add_task("all", total=jobs, done=0)
        self._tasks: dict[Work, Any] = {}
        self._done: dict[Work, float] = {}
        self._live = Live(Group(self._all, self._runs), console=console, refresh_per_second=6)

    def __enter__(self) -> Bars:
        self._live.__enter__()
        return self

    def __exit__(self, *arguments: Any) -> None:
        self._live.__exit__(*arguments)

    def started(self, job: Work) -> None:
        self._tasks[job] = self._runs.add_task(
            f"{job.label}, seed {job.seed}", total=job.total, told=""
        )

    def went_on(self, job: Work, done: float, line: dict[str, Any] | None) -> None:
        self._runs.update(self._tasks[job], completed=done)
        if line:
            self._runs.update(self._tasks[job], told=job.told(line))
        self._done[job] = 0.999 * done / job.total  # over when it says so
        self._count()

    def _count(self) -> None:
        done = self._done.values()
        self._all.update(self._total, completed=sum(done), done=sum(share == 1.0 for share in done))

    def _close(self, job: Work) -> None:
        if job in self._tasks:
            self._runs.remove_task(self._tasks.pop(job))
        self._done[job] = 1.0
        self._count()

    def finished(self, job: Work, result: dict[str, Any]) -> None:
        self._close(job)
        self._console.print(f"[dim]{job.label}, seed {job.seed}: {job.outcome(result)}")

    def noticed(self, job: Work, sentence: str) -> None:
        self._console.print(f"{job.label}, seed {job.seed}: {sentence}", markup=False)

    def failed(self, job: Work, reason: str) -> None:
        self._close(job)
        self._console.print(f"[red]FAILED[/] {job.label}, seed {job.seed}: ", end="")
        self._console.print(reason, markup=False)


def listener(jobs: int, *, quiet: bool, as_json: bool) -> Listener:
    """Who suits those who are listening."""
    if as_json:
        return JsonLines()
    if quiet:
        return Quiet()
    console = Console()
    return Bars(console, jobs) if console.is_terminal else Lines()


def print_table(experiment: Experiment, table: list[summary.Row]) -> None:
    """The table at the end, on the screen."""
    console = Console(width=None if Console().is_terminal else 160)
    title = f"{experiment.title}: test {summary.described(experiment.metrics)}"
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
        "Mean ± standard error over seeds. A method with an average is used at its average; its gain "
        "is paired by seed, and positive where it is better. Validation is that point's result on held-out data, where there is some.",
        style="dim",
    )
    if experiment.note:
        console.print(experiment.note, style="dim")


def print_list(found: list[tuple[str, Experiment, Experiment]], with_recipes: bool) -> None:
    """What there is, with costs: at mini scale in minutes of a core, at the paper's in GPU hours."""
    console = Console(width=None if Console().is_terminal else 160)
    shown = Table("name", "what", box=None, pad_edge=False)
    for heading in ("runs", "mini: minutes of a core", "paper: hours of a GPU"):
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
        "\n`gadam reproduce NAME` runs one of these; `gadam train RECIPE` a single recipe "
        "(`gadam list --recipes` names them). Costs are rough estimates.",
        style="dim",
    )
