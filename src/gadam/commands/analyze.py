"""`gadam analyse`."""

from __future__ import annotations

import json
import platform
import shlex
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

import torch
import tyro

import gadam
from gadam._names import did_you_mean
from gadam.analysis.sections import Section, sections
from gadam.analysis.study import FAILED, NEEDS, OF_ITERATES, PARTS, Plan, StudyJob
from gadam.report.command import write as write_report
from gadam.report.page import ReportError
from gadam.report.records import Collection, RunRecord, collect
from gadam.train import data, screen
from gadam.train.recipe import RecipeError
from gadam.train.record import RunError, to_json, write_atomically, write_json
from gadam.train.sweep import available_cores, sweep

__all__ = ["analyse", "run"]


def run(arguments: list[str]) -> int:
    """Run the command. Gives its exit code."""

    def analyse_(
        folder: tyro.conf.Positional[Path],
        parts: str = "",
        examples: int | None = None,
        kind: Literal["hessian", "ggn"] = "hessian",
        batchnorm: Literal["eval", "train"] = "eval",
        probes: int = 20,
        tolerance: float = 1e-3,
        steps: int = 40,
        grid: int = 13,
        workers: int | None = None,
        threads: int = 1,
        device: str = "cpu",
        data_dir: Path | None = None,
        quiet: bool = False,
        json: bool = False,
    ) -> dict[str, Any]:
        """Measure finished runs, from their checkpoints, and add what is found to their report.

        Diversity of iterates, ensembles, effective learning rates, curvature, gradient noise, landscapes. What is measured
        is written down at once: the same command goes on where it was stopped. Iterates are there for runs that were
        trained with `--set keep=N`, which keeps those of the last N epochs.

        Args:
            folder: a run, or a sweep of them
            parts: which, separated by commas; by default what the sweep is for, or all: diversity, ensemble, networks,
                rate, parameters, curvature, density, landscape
            examples: training examples for curvature and noise (default: all of them)
            kind: of curvature: the Hessian, or the generalised Gauss-Newton matrix
            batchnorm: for curvature, with running statistics (eval) or each batch's own (train)
            probes: random vectors for traces
            tolerance: relative, of the spectral norm
            steps: of Lanczos' method for the density
            grid: places along each side of the plane
            workers: runs at a time (default: one for each core)
            threads: of each
            device: where to compute, such as cuda
            data_dir: where data sets are (default: $GADAM_DATA, then ~/.cache/gadam/data)
            quiet: only the tables at the end
            json: events and tables as lines of JSON
        """
        return locals()

    flags = (tyro.conf.FlagCreatePairsOff,)
    options = tyro.cli(analyse_, prog="gadam analyse", args=arguments, config=flags)
    folder = options.pop("folder")
    try:
        found = analyse(folder, command=shlex.join(["gadam", "analyse", *arguments]), **options)
    except (RecipeError, data.DataError, RunError, ReportError, ValueError) as error:
        print(f"gadam analyse: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\nstopped; the same command goes on from where it was", file=sys.stderr, flush=True)
        return 130
    return 0 if found else 1


def analyse(
    folder: Path,
    *,
    parts: str = "",
    workers: int | None = None,
    threads: int = 1,
    device: str = "cpu",
    data_dir: Path | None = None,
    quiet: bool = False,
    json: bool = False,
    command: str = "",
    **settings: Any,
) -> bool:
    """Measure the runs in a folder, write ``analysis.json`` and the report's sections. Gives whether all went well."""
    collection = _collected(folder)
    for name, value in (("threads", threads), ("workers", workers)):
        if value is not None and value < 1:
            raise ValueError(f"--{name} must be at least 1, not {value}")
    try:
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"--device {device}: {str(error).splitlines()[0]}") from None
    plan = Plan(_wanted(parts, folder, collection), **settings)
    finished = [run for run in collection.runs if run.result is not None]
    jobs = {
        (run.label, run.seed): StudyJob(
            run.label,
            run.recipe,
            run.seed,
            run.folder,
            plan,
            None if data_dir is None else str(data_dir),
            device,
            threads,
        )
        for run in finished
    }
    several = available_cores() // threads if device == "cpu" else 1
    listener: Any = screen.listener(len(jobs), quiet=quiet, as_json=json)
    with listener:
        done = sweep(list(jobs.values()), listener, workers or max(1, several))
    values = {key: done[job] for key, job in jobs.items() if done.get(job) is not None}
    well = len(values) == len(jobs) and not any(FAILED in found for found in values.values())
    found = sections(collection, values, plan)
    _write(folder, found, plan, command)
    page = write_report([folder], folder)
    if json:
        said = {"event": "analysis", "parts": {s.name: s.summary for s in found}}
        print(to_json({**said, "report": str(page)}), flush=True)
    else:
        _print(found)
        print(f"The report is {page}; its numbers are in {folder / 'analysis.json'}")
    missing = [part for part in plan.parts if part not in {s.name for s in found}]
    for part in missing:
        need = f": it needs {NEEDS[part]}" if part in NEEDS and well else ""
        print(f"There was nothing to show of {part}{need}", file=sys.stderr)
    return well and bool(found)


def _collected(folder: Path) -> Collection:
    collection = collect([folder])
    if not collection.runs:
        raise RunError("; ".join(collection.problems) or f"there are no runs in {folder}")
    if all(run.result is None for run in collection.runs):
        raise RunError(f"no run in {folder} is finished: give the command that trains them again")
    return collection


def _wanted(parts: str, folder: Path, collection: Collection) -> tuple[str, ...]:
    """The parts that are asked for, or that the sweep is for, or all that these runs can have."""
    asked = [part.strip() for part in parts.split(",") if part.strip()]
    for part in asked:
        if part not in PARTS:
            near = did_you_mean(part, PARTS)
            hint = f": did you mean {near!r}?" if near else f": there are {', '.join(PARTS)}"
            raise ValueError(f"there is no part {part!r}{hint}")
    if asked:
        return tuple(dict.fromkeys(asked))
    if collection.analysis:
        return tuple(part for part in collection.analysis if part in PARTS)
    return tuple(part for part in PARTS if _possible(part, collection))


def _possible(part: str, collection: Collection) -> bool:
    runs: Sequence[RunRecord] = [run for run in collection.runs if run.result is not None]
    if part in OF_ITERATES:
        return any(run.recipe.keep > 1 for run in runs)
    if part == "networks":
        seeds = [sum(r.label == label for r in runs) for label in collection.labels]
        return max(seeds) > 1
    if part == "parameters":
        return bool(collection.experiment.bases)
    if part == "rate":
        return any("norms" in line for run in runs for line in run.lines)
    if part == "landscape":
        return any((run.result or {}).get("average") for run in runs)
    return True


def _write(folder: Path, found: list[Section], plan: Plan, command: str) -> None:
    place = folder / "sections"
    try:
        place.mkdir(exist_ok=True)
    except OSError as error:
        raise RunError(f"{place} cannot be written to: {error.strerror}") from None
    for section in found:
        for name, content in section.files.items():
            write_atomically(place / name, content)
        page = {"title": section.title, "blocks": section.blocks}
        write_json(place / f"analysis-{section.name}.json", page)
    for part in set(plan.parts) - {section.name for section in found}:  # of another time
        (place / f"analysis-{part}.json").unlink(missing_ok=True)
    path = folder / "analysis.json"
    try:
        parts = dict(json.loads(path.read_text())["parts"])
    except (OSError, ValueError, KeyError, TypeError):
        parts = {}
    parts = {name: part for name, part in parts.items() if name not in plan.parts}
    settings = {name: value for name, value in asdict(plan).items() if name != "parts"}
    about = {
        "command": command,
        "settings": settings,
        "versions": {"gadam": gadam.__version__, "torch": torch.__version__},
        "machine": {"system": platform.platform(), "cores": available_cores()},
    }
    parts |= {section.name: {**about, "values": section.summary} for section in found}
    write_json(path, {"parts": parts})


def _print(found: list[Section]) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console(width=None if Console().is_terminal else 200)
    for section in found:
        for block in section.blocks:
            if block["kind"] == "table":
                shown = Table(title=section.title, title_justify="left")
                for i, name in enumerate(block["header"]):
                    shown.add_column(name, justify="left" if i == 0 else "right")
                for row in block["rows"]:
                    shown.add_row(*row)
                console.print(shown)
