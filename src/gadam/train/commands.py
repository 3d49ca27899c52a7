"""The commands of the program: compare, train, reproduce, list, data."""

from __future__ import annotations

import json
import platform
import re
import shlex
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import tyro

import gadam
from gadam._names import did_you_mean
from gadam.train import data, experiments, screen, summary, task, text
from gadam.train.experiments import Experiment
from gadam.train.recipe import Recipe, RecipeError, concerns, override, to_dict
from gadam.train.record import Run, RunError, to_json, write_atomically, write_json
from gadam.train.sweep import Job, available_cores, sweep

__all__ = ["run"]

Settings = Annotated[
    tyro.conf.UseAppendAction[tuple[str, ...]], tyro.conf.arg(name="set", metavar="KEY=VALUE")
]


@dataclass(frozen=True)
class Common:
    """What every command that trains takes."""

    out: Path | None = None
    """the folder of the runs (default: runs/NAME)"""
    seeds: int | None = None
    """how many seeds"""
    workers: int | None = None
    """runs at a time (default: one for each core)"""
    threads: int = 1
    """threads of a run; one and more workers is faster"""
    device: str = "cpu"
    """where to compute, such as cuda"""
    data_dir: Path | None = None
    """where data sets are (default: $GADAM_DATA, then ~/.cache/gadam/data)"""
    settings: Settings = ()
    """change a setting of all recipes, such as lr=0.05; may be given again"""
    quiet: bool = False
    """only the table at the end"""
    json: bool = False
    """events and the table as lines of JSON"""
    tensorboard: bool = False
    """write the curves for TensorBoard too, beside the runs"""

    @property
    def directory(self) -> str | None:
        """Where data sets are, if that is said."""
        return None if self.data_dir is None else str(self.data_dir)


def run(name: str, arguments: list[str]) -> int:
    """Run a command; what is wrong is said in a sentence. Gives the exit code."""
    try:
        return _COMMANDS[name](arguments)
    except (RecipeError, data.DataError, RunError) as error:
        print(f"gadam {name}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(
            "\nstopped; the same command goes on from where the runs are",
            file=sys.stderr,
            flush=True,
        )
        return 130


def _parsed(command: Callable[..., Any], arguments: list[str]) -> Any:
    """What the command, a function that gives its arguments back, is asked for."""
    name = command.__name__.rstrip("_")
    flags = (tyro.conf.FlagCreatePairsOff,)
    return tyro.cli(command, prog=f"gadam {name}", args=arguments, config=flags)


# ------------------------------------------------------------------------------ compare and reproduce


def _compare(arguments: list[str]) -> int:
    def compare(
        common: tyro.conf.OmitArgPrefixes[Common] = Common(),  # noqa: B008
    ) -> tuple[str, Any, str, Common]:
        """Six optimisers side by side, on data that comes with gadam: what averaging does.

        SGD, AdamW and PadamW by the learning-rate schedule that suits them, and the averages of their
        iterates at a rate that stays high: SWA, Gadam, GadamX. About five minutes on two cores.
        """
        return experiments.COMPARE, "mini", "", common

    return _sweep(*_parsed(compare, arguments))


def _reproduce(arguments: list[str]) -> int:
    def reproduce(
        name: tyro.conf.Positional[str],
        scale: Literal["mini", "paper"] = "mini",
        rows: str = "",
        common: tyro.conf.OmitArgPrefixes[Common] = Common(),  # noqa: B008
    ) -> tuple[str, Any, str, Common]:
        """A table or a figure of the paper.

        Args:
            name: as `gadam list` has it, such as tab-cifar
            scale: mini takes minutes a run on one core; paper is the true settings
            rows: only those with this in their label, such as LSTM
            common: how to run it
        """
        return name, scale, rows, common

    return _sweep(*_parsed(reproduce, arguments))


def _sweep(name: str, scale: Literal["mini", "paper"], rows: str, common: Common) -> int:
    experiment = _only(experiments.get(name, scale), rows)
    recipes = _overridden(experiment.recipes, common.settings)
    published = {
        row: number
        for row, number in experiment.published.items()
        if _same_task(recipes[row], experiment.recipes[row])
    }
    note = f"{experiment.note} {_best_possible(recipes.values())}".strip()
    experiment = replace(experiment, recipes=recipes, published=published, note=note)
    _check(list(recipes.values()), common)
    folder = common.out or Path("runs") / (name if scale == "mini" else f"{name}-{scale}")
    seeds = common.seeds or experiment.seeds
    jobs = {
        (row, seed): _job(row, recipe, seed, folder / f"{experiments.slug(row)}-{seed}", common)
        for seed in range(seeds)
        for row, recipe in recipes.items()
    }
    description = {
        "name": experiment.name,
        "title": experiment.title,
        "metric": next((m for m in experiment.metrics if m != "perplexity"), "perplexity"),
        "part": experiment.part,
        "note": experiment.note,
        "rows": list(recipes),
        "bases": dict(experiment.bases),
        "published": dict(experiment.published),
        "seeds": seeds,
        "analysis": list(experiment.analysis),
        "command": _command_line(name, scale, rows, seeds, common),
    }
    done = _run_all(list(jobs.values()), common, folder, description)
    results = {key: done.get(job) for key, job in jobs.items()}
    table = summary.rows(experiment, results)
    content = {
        **summary.to_json(experiment, table),
        "scale": scale,
        "seeds": seeds,
        "command": description["command"],
        "versions": {"gadam": gadam.__version__, "torch": torch.__version__},
        "machine": {"system": platform.platform(), "cores": available_cores()},
        "recipes": {row: to_dict(recipe) for row, recipe in recipes.items()},
    }
    write_json(folder / "summary.json", content)
    write_atomically(folder / "summary.md", (summary.markdown(experiment, table) + "\n").encode())
    _export(jobs.values(), common)
    page = _report(folder)
    if common.json:
        print(to_json({"event": "summary", "report": page and str(page), **content}), flush=True)
    else:
        screen.print_table(experiment, table)
        print(f"The runs, and this table as summary.md and summary.json, are in {folder}")
        if page is not None:
            print(f"The report is {page}")
    failed = any(result is None for result in results.values())
    if experiment.analysis and any(result is not None for result in results.values()):
        failed |= not _analyse(folder, common)
    return 1 if failed else 0


def _analyse(folder: Path, common: Common) -> bool:
    """Measure what the experiment is for, if what that needs is there."""
    try:
        from gadam.analysis.command import analyse
    except ImportError as error:
        print(f"There is no analysis: it needs {error.name}", file=sys.stderr)
        return True
    return analyse(
        folder,
        workers=common.workers,
        threads=common.threads,
        device=common.device,
        data_dir=common.data_dir,
        quiet=common.quiet,
        json=common.json,
        command=shlex.join(["gadam", "analyse", folder.name]),
    )


def _only(experiment: Experiment, wanted: str) -> Experiment:
    """The rows with these words in their label, in either case."""
    words = re.compile(rf"(?<!\w){re.escape(wanted)}(?!\w)", re.IGNORECASE)
    kept = {row: r for row, r in experiment.recipes.items() if words.search(row) or not wanted}
    if not kept:
        rows = ", ".join(experiment.recipes)
        raise RecipeError(f"{experiment.name} has no row with {wanted!r} in it: there are {rows}")
    bases = {a: b for a, b in experiment.bases.items() if a in kept and b in kept}
    published = {row: n for row, n in experiment.published.items() if row in kept}
    return replace(experiment, recipes=kept, bases=bases, published=published)


def _command_line(name: str, scale: str, rows: str, seeds: int, common: Common) -> str:
    words = ["gadam", "compare"] if name == experiments.COMPARE else ["gadam", "reproduce", name]
    words += ["--scale", scale] if name != experiments.COMPARE else []
    words += ["--rows", rows] if rows else []
    words += ["--seeds", str(seeds)]
    words += [word for setting in common.settings for word in ("--set", setting)]
    return shlex.join(words)


def _overridden(recipes: Mapping[str, Recipe], settings: Sequence[str]) -> dict[str, Recipe]:
    """With the settings that are given for all, where they concern the recipe; they must concern one."""
    for setting in settings:
        if not any(concerns(setting, recipe) for recipe in recipes.values()):
            raise RecipeError(f"--set {setting} concerns none of the rows")
    return {
        row: override(recipe, [s for s in settings if concerns(s, recipe)])
        for row, recipe in recipes.items()
    }


def _best_possible(recipes: Iterable[Recipe]) -> str:
    """In a sentence, where it is known of the text that all learn."""
    texts = {r.data.name if r.language is not None else "" for r in recipes}
    best = text.best_perplexity(texts.pop()) if len(texts) == 1 else {}
    return f"The true probabilities have a test perplexity of {best['test']:.2f}." if best else ""


def _same_task(a: Recipe, b: Recipe) -> bool:
    """Whether a published number of the one can stand beside the other."""
    return (a.model, a.data) == (b.model, b.data)


def _job(label: str, recipe: Recipe, seed: int, folder: Path, common: Common) -> Job:
    return Job(label, recipe, seed, folder, common.directory, common.device, common.threads)


def _run_all(
    jobs: list[Job], common: Common, folder: Path, description: dict[str, Any] | None = None
) -> dict[Job, Any]:
    for job in jobs:  # before any work: a folder that holds something else
        Run(job.folder, job.recipe, job.seed, job.label).begin(job.threads)
    if description is not None:
        write_json(folder / "experiment.json", description)
    several = available_cores() // common.threads if common.device == "cpu" else 1
    workers = common.workers or max(1, several)
    listener: Any = screen.listener(len(jobs), quiet=common.quiet, as_json=common.json)
    with listener:
        return sweep(jobs, listener, workers)


def _report(folder: Path) -> Path | None:
    """Write the report too, if what it needs is there; gives where it is."""
    try:
        from gadam.report.command import write

        return write([folder], folder)
    except (ImportError, RuntimeError) as error:
        print(f"There is no report: {error}", file=sys.stderr)
        return None


def _export(jobs: Iterable[Job], common: Common) -> None:
    if common.tensorboard:
        from gadam.train.tensorboard import export

        for job in jobs:
            export(job.folder)


def _check(recipes: Iterable[Recipe], common: Common) -> None:
    """Look for every data set, network and the device before anything is trained."""
    for name, value in (
        ("threads", common.threads),
        ("workers", common.workers),
        ("seeds", common.seeds),
    ):
        if value is not None and value < 1:
            raise RecipeError(f"--{name} must be at least 1, not {value}")
    if common.tensorboard:
        from gadam.train.tensorboard import writer

        writer()
    try:
        torch.empty(1, device=common.device)
    except (RuntimeError, AssertionError) as error:
        raise RecipeError(f"--device {common.device}: {str(error).splitlines()[0]}") from None
    try:
        for recipe in recipes:
            task.check(recipe, common.directory)
    except ValueError as error:  # a name that is none, a beta that cannot be
        raise RecipeError(str(error)) from None


# ---------------------------------------------------------------------------------------------- train


def _train(arguments: list[str]) -> int:
    def train(
        recipe: tyro.conf.Positional[str],
        seed: int = 0,
        scale: Literal["mini", "paper"] = "mini",
        common: tyro.conf.OmitArgPrefixes[Common] = Common(),  # noqa: B008
    ) -> tuple[str, int, Any, Common]:
        """One run of one recipe.

        Args:
            recipe: as `gadam list` has it, such as compare-gadam
            seed: the first seed (with --seeds N also those after it)
            scale: mini or paper
            common: how to run it
        """
        return recipe, seed, scale, common

    name, first, scale, common = _parsed(train, arguments)
    known = experiments.recipes(scale)
    if name not in known:
        near = did_you_mean(name, known)
        hint = f": did you mean {near!r}?" if near else ""
        raise RecipeError(f"there is no recipe {name!r}{hint} (see `gadam list --recipes`)")
    recipe = override(known[name], common.settings)
    _check([recipe], common)
    folder = common.out or Path("runs") / ("train" if scale == "mini" else f"train-{scale}")
    seeds = range(first, first + (common.seeds or 1))
    if not 0 <= first < 2**31:
        raise RecipeError(f"--seed must lie between 0 and 2³¹, not {first}")
    jobs = [_job(name, recipe, seed, folder / f"{name}-{seed}", common) for seed in seeds]
    done = _run_all(jobs, common, folder)
    _export(jobs, common)
    if not common.json:
        experiment = Experiment(name, recipe.method, {name: recipe}, note=_best_possible([recipe]))
        results = {(name, job.seed): done.get(job) for job in jobs}
        screen.print_table(experiment, summary.rows(experiment, results))
        print(f"The runs are in {folder}")
    return 1 if any(done.get(job) is None for job in jobs) else 0


# ----------------------------------------------------------------------------------------------- list


def _list(arguments: list[str]) -> int:
    def list_(recipes: bool = False, json: bool = False) -> tuple[bool, bool]:
        """What there is to reproduce and to train.

        Args:
            recipes: the single recipes too
            json: as JSON
        """
        return recipes, json

    with_recipes, as_json = _parsed(list_, arguments)
    found = [
        (name, experiments.get(name), experiments.get(name, "paper"))
        for name in experiments.names()
    ]
    if as_json:
        content = [
            {
                "name": name,
                "title": small.title,
                "recipes": [r.name for r in small.recipes.values()],
                "seeds": {"mini": small.seeds, "paper": large.seeds},
                "hours": {"mini": experiments.hours(small), "paper": experiments.hours(large)},
                "data": sorted({r.data.name for r in large.recipes.values()}),
                "analysis": list(large.analysis),
            }
            for name, small, large in found
        ]
        print(json.dumps(content))
        return 0
    screen.print_list(found, with_recipes)
    return 0


# ----------------------------------------------------------------------------------------------- data


def _data(arguments: list[str]) -> int:
    def data_(name: tyro.conf.Positional[str], data_dir: Path | None = None) -> tuple[str, Any]:
        """Download a data set, check it, and lay it out for the other commands.

        Args:
            name: cifar10, cifar100, mnist, fashion-mnist or ptb
            data_dir: where to (default: $GADAM_DATA, then ~/.cache/gadam/data)
        """
        return name, data_dir

    from gadam.train.download import fetch

    name, directory = _parsed(data_, arguments)
    try:
        root = fetch(name, directory)
        if text.canonical(name) != text.MADE_UP:
            print(f"{name} is in {root}")
    except ValueError as error:  # a name that is none
        raise RecipeError(str(error)) from None
    return 0


_COMMANDS: dict[str, Callable[[list[str]], int]] = {
    "compare": _compare,
    "train": _train,
    "reproduce": _reproduce,
    "list": _list,
    "data": _data,
}
