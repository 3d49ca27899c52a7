"""`gadam theory`: figures of the theory, and advice for a run."""

from __future__ import annotations

import shlex
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from gadam._names import did_you_mean
from gadam.commands.analyze import analyze
from gadam.commands.options import Count, Flag, Folder, MaybeInt, option, parse
from gadam.report import write as write_report
from gadam.report.chart import Chart, draw, vega
from gadam.report.theory_figures import FIGURES
from gadam.runs.collect import collect
from gadam.runs.files import (
    RunError,
    explain_os_error,
    read_json,
    to_json,
    write_atomically,
    write_json,
)
from gadam.runs.recipe import RecipeError
from gadam.study import Settings

__all__ = ["run", "save"]


@dataclass(frozen=True, kw_only=True)
class _Options:
    """Plot what the theory predicts beside a simulation, or get its advice for a run."""

    name: Annotated[tyro.conf.Positional[str], option("NAME")]
    """A figure, `all` of them, or `plan` for advice on a run."""
    folder: Annotated[tyro.conf.Positional[Path | None], option("[RUN]")] = None
    """The folder of a run or a sweep, for `plan`."""
    measure: Flag = False
    """For `plan`: measure curvature and gradient noise at a checkpoint, predict the losses of the
    last iterate, the average, an EMA and a decayed learning rate, and compare them with
    continuations of the run. Takes minutes. Rerun an interrupted command to resume it."""
    examples: Count = 1000
    """Training examples for curvature, with --measure."""
    epoch: MaybeInt = None
    """Measure at the iterate kept after this epoch, with --measure. Default: the earliest one, or
    the last iterate."""
    epochs: MaybeInt = None
    """Epochs to predict, with --measure. Default: to the end of the run, or half of its length."""
    continuations: Count = 2
    """Times to continue the run for the comparison, with --measure."""
    kind: Literal["hessian", "ggn"] = "hessian"
    """The curvature matrix, with --measure: the Hessian, or the Gauss-Newton matrix."""
    workers: MaybeInt = None
    """Runs to measure at a time. Default: one per core."""
    data_dir: Folder = None
    """Where data sets are. Default: $GADAM_DATA, then ~/.cache/gadam/data."""
    out: Annotated[Path, option("DIR")] = Path("runs/theory")
    """Where to write the figures."""
    seed: Count = 0
    """Seed of the simulation."""
    json: Flag = False
    """Print one JSON object per line."""


def run(arguments: list[str]) -> int:
    """Run the command.

    Args:
        arguments: The command line after `gadam theory`.

    Returns:
        The exit code.
    """
    options = parse(_Options, "theory", arguments)
    if options.name == "plan":
        if options.folder is None:
            raise RecipeError("`gadam theory plan` needs the folder of a run.")
        if options.measure:
            return _measured_plan(options, ["gadam", "theory", *arguments])
        return _plan(options.folder, options.json)
    if options.measure:
        raise RecipeError("Only `gadam theory plan RUN` takes --measure.")
    if options.folder is not None:
        raise RecipeError(f"Only `gadam theory plan` takes a folder. Remove {options.folder}.")
    if options.seed < 0:
        raise RecipeError(f"--seed must be non-negative, got {options.seed}.")
    wanted = list(FIGURES) if options.name == "all" else [options.name]
    if wanted[0] not in FIGURES:
        near = did_you_mean(options.name, [*FIGURES, "all", "plan"])
        hint = f"Did you mean {near!r}?" if near else f"Use one of {', '.join(FIGURES)}, all."
        raise RecipeError(f"There is no figure {options.name!r}. {hint}")
    try:  # before any work
        (options.out / "sections").mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RunError(explain_os_error(error, options.out)) from None
    for name in wanted:
        chart = FIGURES[name](options.seed)
        save(name, chart, options.out)
        if options.json:
            print(to_json({"event": "figure", "name": name, **asdict(chart)}), flush=True)
        else:
            print(f"{name}: {chart.title}. {chart.caption}\n", flush=True)
    page = write_report([options.out], options.out)
    if not options.json:
        print(f"The figures are in {options.out}. The page is {page}.")
    return 0


def save(name: str, chart: Chart, folder: Path) -> None:
    """Write NAME.png, NAME.svg, NAME.json, and a section of the report page.

    Args:
        name: The figure.
        chart: Its content.
        folder: Where to write; has a folder `sections`.
    """
    for suffix, content in draw(chart).items():
        write_atomically(folder / f"{name}.{suffix}", content)
    write_json(folder / f"{name}.json", {"name": name, **asdict(chart)})
    block = {"kind": "chart", "spec": vega(chart), "caption": chart.caption}
    section = {"title": chart.title, "blocks": [block]}
    write_json(folder / "sections" / f"theory-{name}.json", section)


# ------------------------------------------------------------------------------------------ plan


def _measured_plan(options: _Options, command: list[str]) -> int:
    """Measure runs, and print the advice for each."""
    assert options.folder is not None
    settings = Settings(
        options.examples,
        options.kind,
        epoch=options.epoch,
        horizon=options.epochs,
        continuations=options.continuations,
    )
    complete = analyze(
        options.folder,
        parts=["prediction"],
        settings=settings,
        workers=options.workers,
        data_dir=options.data_dir,
        json=options.json,
        command=shlex.join(command),
    )
    _print_advice(options.folder, options.json)
    return 0 if complete else 1


def _print_advice(folder: Path, as_json: bool) -> bool:
    """Print the advice of earlier measurements. Return False if there are none."""
    path = folder / "analysis.json"
    parts = read_json(path)["parts"] if path.is_file() else {}
    found = parts.get("prediction", {}).get("values", {})
    for name, each in found.items():
        if as_json:
            print(to_json({"event": "plan", "run": name, **each}), flush=True)
            continue
        print(f"\n{name}:\n{each['text']}")
        for caution in each.get("cautions", ()):
            print(f"- {caution}")
    return bool(found)


def _plan(folder: Path, as_json: bool) -> int:
    """Print the advice of earlier measurements."""
    runs = collect([folder])
    if not runs.runs:
        raise RunError(" ".join(runs.problems) or f"There are no runs in {folder}.")
    if not _print_advice(folder, as_json):
        raise RunError(
            f"Nothing has been measured in {folder} yet. Pass --measure. It takes minutes. Rerun "
            "an interrupted command to resume it."
        )
    return 0
