"""The command `gadam analyze`."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from gadam.commands import console
from gadam.commands.options import (
    Count,
    Flag,
    Folder,
    MaybeInt,
    check_device,
    check_positive,
    option,
)
from gadam.report import write
from gadam.runs.collect import Collection, collect
from gadam.runs.files import RunError, to_json
from gadam.runs.lock import locked
from gadam.study import (
    Settings,
    StudyJob,
    StudyResult,
    build_sections,
    find,
    write_sections,
)
from gadam.study import parts as all_parts
from gadam.study.section import SectionBuilder
from gadam.train.sweep import available_cores, sweep

__all__ = ["analyze", "run"]


@dataclass(frozen=True)
class _Options:
    """Options of the command.

    Args:
        folder: A run, or a sweep. The search goes two levels deep.
        parts: Parts to measure, separated by commas. Default: the parts that the experiment is
            about, or all parts that these runs allow.
        examples: Training examples for curvature and gradient noise. Default: all.
        kind: The curvature matrix: the Hessian, or the generalized Gauss-Newton matrix.
        batchnorm: BatchNorm statistics for curvature: running (eval) or per batch (train).
        probes: Random vectors per trace estimate.
        tolerance: Relative tolerance of the spectral norm.
        steps: Lanczos steps for the spectral density.
        grid: Grid points along each side of the plane.
        workers: Runs at a time. Default: one per core.
        threads: Threads per run.
        device: Where to compute, such as cuda.
        data_dir: Where data sets are. Default: $GADAM_DATA, then ~/.cache/gadam/data.
        quiet: Print only the final tables.
        json: Print events and the final tables as JSON, one object per line.
    """

    folder: Annotated[Path, tyro.conf.Positional, option("DIR")]
    parts: Annotated[str, option("PART,…")] = ""
    examples: MaybeInt = None
    kind: Literal["hessian", "ggn"] = "hessian"
    batchnorm: Literal["eval", "train"] = "eval"
    probes: Count = 20
    tolerance: Annotated[float, option("X")] = 1e-3
    steps: Count = 40
    grid: Count = 13
    workers: MaybeInt = None
    threads: Count = 1
    device: Annotated[str, option("DEVICE")] = "cpu"
    data_dir: Folder = None
    quiet: Flag = False
    json: Flag = False

    @property
    def settings(self) -> Settings:
        """How closely to measure."""
        return Settings(
            self.examples,
            self.kind,
            self.batchnorm,
            self.probes,
            self.tolerance,
            self.steps,
            self.grid,
        )


def _description() -> str:
    known = all_parts()
    width = max(map(len, known))
    listed = "\n".join(f"  {name:<{width}}  {part.title}" for name, part in known.items())
    return (
        "Measure finished runs from their checkpoints, and add the results to their report.\n\n"
        "Each value is saved as soon as it is known. Rerun an interrupted command to resume it.\n"
        "To compare iterates, train with `--set keep_iterates=N`, which keeps those of the last N\n"
        f"epochs.\n\nParts:\n{listed}"
    )


def run(arguments: list[str]) -> int:
    """Run the command.

    Args:
        arguments: The command line after `gadam analyze`.

    Returns:
        The exit code.

    Raises:
        UserError: The command cannot be carried out.
    """
    options = tyro.cli(
        _Options,
        prog="gadam analyze",
        description=_description(),
        args=arguments,
        config=(tyro.conf.FlagCreatePairsOff,),
    )
    done = analyze(
        options.folder,
        parts=[name.strip() for name in options.parts.split(",") if name.strip()],
        settings=options.settings,
        workers=options.workers,
        threads=options.threads,
        device=options.device,
        data_dir=options.data_dir,
        quiet=options.quiet,
        json=options.json,
        command=shlex.join(["gadam", "analyze", *arguments]),
    )
    return 0 if done else 1


def analyze(
    folder: Path,
    *,
    parts: Sequence[str] = (),
    settings: Settings = Settings(),  # noqa: B008 (immutable)
    workers: int | None = None,
    threads: int = 1,
    device: str = "cpu",
    data_dir: Path | None = None,
    quiet: bool = False,
    json: bool = False,
    command: str = "",
) -> bool:
    """Measure the runs in a folder, and write ``analysis.json`` and the sections of the report.

    Args:
        folder: A run, or a sweep.
        parts: The names of the parts to measure. Default: the parts that the experiment is about,
            or all parts that these runs allow.
        settings: How closely to measure.
        workers: Runs at a time. Default: one per core.
        threads: Threads per run.
        device: Where to compute.
        data_dir: Where data sets are; None uses the default.
        quiet: Print only the final tables.
        json: Print events and the final tables as JSON, one object per line.
        command: The command line, for the record.

    Returns:
        True if everything was measured and there is something to show.

    Raises:
        UserError: The runs cannot be analyzed as requested.
    """
    collection = _collect(folder)
    check_positive(threads=threads, workers=workers)
    check_device(device)
    names = _choose(parts, collection)
    if not quiet and not json:
        print(f"Found {collection.describe()} in {folder}. Measuring {', '.join(names)}.")
    jobs = {
        (run.label, run.seed): StudyJob(
            run.label,
            run.recipe,
            run.seed,
            run.folder,
            names,
            settings,
            None if data_dir is None else str(data_dir),
            device,
            threads,
        )
        for run in collection.runs
        if run.result is not None
    }
    at_a_time = available_cores() // threads if device == "cpu" else 1
    with console.listener(len(jobs), quiet=quiet, as_json=json) as listener:
        done = sweep(list(jobs.values()), listener, workers or max(1, at_a_time))
    results: dict[tuple[str, int], StudyResult] = {
        key: done[job] for key, job in jobs.items() if done.get(job) is not None
    }
    complete = len(results) == len(jobs) and not any(r.failed for r in results.values())
    values = {key: result.values for key, result in results.items()}
    sections = build_sections(collection, values, names, settings)
    with locked(folder, ".analysis.lock"):  # the numbers of other parts are read and kept
        write_sections(folder, sections, names, settings, command)
        page = write([folder], folder)
    if json:
        _print_json(sections, page)
    else:
        _print_tables(sections)
        print(f"Report: {page}. Numbers: {folder / 'analysis.json'}.")
    shown = {section.name for section in sections}
    for part in find(names):
        if part.name not in shown:
            need = f" It needs {part.needs}." if part.needs and complete else ""
            print(f"There is nothing to show for {part.name}.{need}", file=sys.stderr)
    return complete and bool(sections)


def _collect(folder: Path) -> Collection:
    collection = collect([folder])
    if not collection.runs:
        found = f"There are no runs in {folder} or up to two levels below it."
        raise RunError(" ".join(collection.problems) or found)
    if all(run.result is None for run in collection.runs):
        raise RunError(f"No run in {folder} is finished. Rerun the command that trains them.")
    return collection


def _choose(requested: Sequence[str], collection: Collection) -> tuple[str, ...]:
    """Return the requested parts, or those of the experiment, or all that are possible."""
    if requested:
        return tuple(part.name for part in find(requested))
    known = all_parts()
    if collection.experiment.analysis:
        return tuple(name for name in collection.experiment.analysis if name in known)
    return tuple(
        name for name, part in known.items() if part.is_possible(collection) and not part.on_request
    )


def _print_json(sections: Sequence[SectionBuilder], page: Path) -> None:
    content = {
        "event": "analysis",
        "parts": {section.name: section.summary for section in sections},
        "tables": {
            section.name: [
                {"header": table["header"], "rows": table["rows"]} for table in section.tables
            ]
            for section in sections
        },
        "report": str(page),
    }
    print(to_json(content), flush=True)


def _print_tables(sections: Sequence[SectionBuilder]) -> None:
    from rich.table import Table

    screen = console.open_console()
    for section in sections:
        for block in section.tables:
            table = Table(title=section.title, title_justify="left")
            for i, name in enumerate(block["header"]):
                table.add_column(name, justify="left" if i == 0 else "right")
            for row in block["rows"]:
                table.add_row(*row)
            screen.print(table)
