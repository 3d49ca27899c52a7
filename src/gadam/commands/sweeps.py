"""Run the recipes of an experiment, and write its table and report."""

from __future__ import annotations

import platform
import re
import shlex
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from gadam._names import is_path
from gadam.commands import console
from gadam.commands.options import SweepOptions
from gadam.commands.recipes import changed
from gadam.runs import lock, summary
from gadam.runs.experiment import Experiment
from gadam.runs.files import (
    Document,
    RunError,
    explain_os_error,
    to_json,
    write_atomically,
    write_json,
)
from gadam.runs.folder import RunFolder, versions
from gadam.runs.recipe import Recipe, RecipeError
from gadam.runs.record import RunResult
from gadam.runs.verdict import Verdict, verdicts
from gadam.train import experiments
from gadam.train.data import text
from gadam.train.launchers.local import LocalLauncher
from gadam.train.storage import Storage
from gadam.train.sweep import Launcher, TrainingJob, available_cores, sweep

__all__ = [
    "Addition",
    "Scale",
    "check_folders",
    "conclude",
    "fetch",
    "known_floors",
    "locked",
    "make_launcher",
    "run_all",
    "run_experiment",
    "select_rows",
    "train_experiment",
    "workspace",
]

Scale = Literal["mini", "paper"]


def run_experiment(
    name: str, scale: Scale, rows: str, options: SweepOptions, methods: Sequence[str] = ()
) -> int:
    """Train all rows and seeds of an experiment, and write its table and report.

    Args:
        name: The experiment.
        scale: "mini" or "paper".
        rows: Train only rows with these words in their label; empty means all.
        options: How to run it.
        methods: Train only rows of these methods; empty means all.

    Returns:
        The exit code.
    """
    experiment = select_rows(experiments.get(name, scale), rows)
    if methods:
        kept = {row: r for row, r in experiment.recipes.items() if r.method in methods}
        experiment = experiment.restricted_to(kept)
    experiment = _described(experiment, options)
    experiment = replace(
        experiment, command=_command_line(name, scale, rows, experiment, options, methods)
    )
    folder = options.folder(name if scale == "mini" else f"{name}-{scale}")
    return train_experiment(experiment, folder, options, scale)


def train_experiment(
    experiment: Experiment, folder: Path, options: SweepOptions, scale: Scale = "mini"
) -> int:
    """Train all rows and seeds of an experiment as it is, and write its table and report.

    Args:
        experiment: What to train.
        folder: The folder of its runs.
        options: How to train it. Its settings are not applied.
        scale: "mini" or "paper".

    Returns:
        The exit code.
    """
    jobs = {
        (row, seed): job(row, recipe, seed, folder / f"{experiments.slug(row)}-{seed}", options)
        for seed in range(experiment.seeds)
        for row, recipe in experiment.recipes.items()
    }
    with workspace(folder, options):
        done = run_all(list(jobs.values()), options, experiment=(experiment, folder))
        results = {key: done.get(job) for key, job in jobs.items()}
        conclude(experiment, folder, list(jobs.values()), results, options, scale)
    failed = any(result is None for result in results.values())
    if experiment.analysis and any(result is not None for result in results.values()):
        failed |= not _analyze(folder, options)
    return 1 if failed else 0


@dataclass(frozen=True)
class Addition:
    """What a command adds to the end of an experiment.

    Args:
        content: Added to `summary.json`.
        text: Printed below the verdicts.
    """

    content: Document = field(default_factory=dict)
    text: str = ""


def conclude(
    experiment: Experiment,
    folder: Path,
    jobs: Iterable[TrainingJob],
    results: Mapping[tuple[str, int], RunResult | None],
    options: SweepOptions,
    scale: Scale = "mini",
    add: Callable[[list[Verdict]], Addition] = lambda verdicts: Addition(),
) -> None:
    """Write the table, the verdicts and the report of an experiment, and print them.

    Args:
        experiment: What was run.
        folder: Its folder. The caller holds its lock.
        jobs: Its runs.
        results: By row and seed; None for a failed run.
        options: How it was run.
        scale: "mini" or "paper".
        add: What else to write and print, from the verdicts.
    """
    table = summary.summarize(experiment, results)
    answers = verdicts(experiment, results)
    addition = add(answers)
    content = {
        **summary_document(experiment, table, scale),
        "verdicts": [verdict.to_dict() for verdict in answers],
        **addition.content,
    }
    write_json(folder / "summary.json", content, sealed=True)
    text_table = summary.to_markdown(experiment, table) + "\n"
    write_atomically(folder / "summary.md", text_table.encode())
    export(jobs, options)
    page = _report(folder)
    if options.json:
        path = None if page is None else str(page)
        print(to_json({"event": "summary", "report": path, **content}), flush=True)
        return
    console.print_table(experiment, table)
    console.print_verdicts(answers)
    print(addition.text, end="")
    also = "" if options.storage is None else f" and in {options.storage}"
    print(f"The runs, summary.md and summary.json are in {folder}{also}.")
    if page is not None:
        print(f"The report is {page}.")


def summary_document(experiment: Experiment, table: list[summary.Row], scale: Scale) -> Document:
    """Return the content of `summary.json`.

    Args:
        experiment: What was run.
        table: Its rows.
        scale: "mini" or "paper".
    """
    return {
        **summary.to_dict(experiment, table),
        "scale": scale,
        "seeds": experiment.seeds,
        "command": experiment.command,
        "versions": versions(),
        "machine": {"system": platform.platform(), "cores": available_cores()},
        "recipes": {row: recipe.to_dict() for row, recipe in experiment.recipes.items()},
    }


def _described(experiment: Experiment, options: SweepOptions) -> Experiment:
    """Apply the settings, and add what is known of the experiment's data."""
    recipes = changed(experiment.recipes, options, everywhere=False)
    if any(is_path(recipe.data.name) for recipe in recipes.values()):
        # Rows can differ only in what they do to gadam's data, as the note explains.
        recipes = _different(recipes)
        experiment = replace(experiment.restricted_to(recipes), note="")
    published = {
        row: number
        for row, number in experiment.published.items()
        if _same_task(recipes[row], experiment.recipes[row])
    }
    floors = known_floors(recipes.values())
    return replace(
        experiment,
        recipes=recipes,
        published=published,
        floors=floors,
        note=f"{experiment.note} {floor_note(floors)}".strip(),
        seeds=options.seeds or experiment.seeds,
    )


def _analyze(folder: Path, options: SweepOptions) -> bool:
    """Measure what the experiment is about, if the analysis extra is installed."""
    try:
        from gadam.commands.analyze import analyze
    except ImportError as error:
        print(f"Skipped the analysis: it needs {error.name}.", file=sys.stderr)
        return True
    return analyze(
        folder,
        workers=options.workers,
        threads=options.threads,
        device=options.device,
        data_dir=options.data_dir,
        quiet=options.quiet,
        json=options.json,
        command=shlex.join(["gadam", "analyze", folder.name]),
    )


def select_rows(experiment: Experiment, wanted: str) -> Experiment:
    """Return the experiment with only some of its rows.

    Args:
        experiment: The experiment.
        wanted: Keep the rows with these words in their label, ignoring case; all if empty.

    Raises:
        RecipeError: No row has them.
    """
    words = re.compile(rf"(?<!\w){re.escape(wanted)}(?!\w)", re.IGNORECASE)
    kept = {row: r for row, r in experiment.recipes.items() if words.search(row) or not wanted}
    if not kept:
        rows = ", ".join(experiment.recipes)
        raise RecipeError(f"{experiment.name} has no row matching {wanted!r}. Its rows are {rows}.")
    return experiment.restricted_to(kept)


def _command_line(
    name: str,
    scale: str,
    rows: str,
    experiment: Experiment,
    options: SweepOptions,
    methods: Sequence[str],
) -> str:
    words = ["gadam", "compare"] if name == experiments.COMPARE else ["gadam", "reproduce", name]
    words += ["--scale", scale] if name != experiments.COMPARE else []
    words += ["--rows", rows] if rows else []
    words += ["--methods", *methods] if methods else []
    words += ["--seeds", str(options.seeds)] if options.seeds else []
    words += [word for setting in options.settings for word in ("--set", setting)]
    return shlex.join(words)


def _different(recipes: Mapping[str, Recipe]) -> dict[str, Recipe]:
    """Drop rows that are equal to an earlier row."""
    found: dict[Recipe, str] = {}
    for row, recipe in recipes.items():
        found.setdefault(replace(recipe, name=""), row)
    return {row: recipes[row] for row in found.values()}


def known_floors(recipes: Iterable[Recipe]) -> dict[str, dict[str, float]]:
    """Return the best possible values by metric and split, if all recipes share known ones.

    Args:
        recipes: Of one experiment.
    """
    names = {r.data.name if r.language is not None else "" for r in recipes}
    best = text.best_perplexity(names.pop()) if len(names) == 1 else {}
    return {"perplexity": dict(best)} if best else {}


def floor_note(floors: Mapping[str, Mapping[str, float]]) -> str:
    """Return a sentence about the best possible perplexity, if it is known.

    Args:
        floors: By metric, then split.
    """
    best = floors.get("perplexity", {})
    return f"The true probabilities have a test perplexity of {best['test']:.2f}." if best else ""


def _same_task(a: Recipe, b: Recipe) -> bool:
    """Return True if a published number of one recipe applies to the other."""
    return (a.model, a.data) == (b.model, b.data)


def job(label: str, recipe: Recipe, seed: int, folder: Path, options: SweepOptions) -> TrainingJob:
    """Return the job of one run.

    Args:
        label: The run's name beside other runs.
        recipe: What to train.
        seed: The run's seed.
        folder: The run's folder.
        options: How to run it.
    """
    return TrainingJob(
        label,
        recipe,
        seed,
        folder,
        options.data_path,
        options.device,
        options.threads,
        options.accept_changed_code,
        # The folder is runs/NAME/…, because --out is the URL.
        options.storage and "/".join((options.storage.rstrip("/"), *folder.parts[2:])),
    )


def run_all(
    jobs: list[TrainingJob],
    options: SweepOptions,
    experiment: tuple[Experiment, Path] | None = None,
) -> dict[TrainingJob, RunResult | None]:
    """Train the runs on all cores.

    Args:
        jobs: The runs.
        options: How to run them.
        experiment: What they belong to, and the folder to write it to. The caller holds its lock.

    Returns:
        The result of each run, or None if it failed.
    """
    fetch(jobs)
    check_folders(jobs)
    if experiment is not None:
        write_json(experiment[1] / "experiment.json", experiment[0].to_dict(), sealed=True)
    with console.listener(len(jobs), quiet=options.quiet, as_json=options.json) as listener:
        results = sweep(jobs, listener, launcher=make_launcher(options))
    fetch(jobs)
    return results


def fetch(jobs: Iterable[TrainingJob]) -> None:
    """Copy runs that are in a storage to their folders on this machine.

    Args:
        jobs: The runs.
    """
    for each in jobs:
        if each.storage is not None:
            Storage(each.storage).pull(each.folder)


def check_folders(jobs: Iterable[TrainingJob]) -> None:
    """Raise an error if the folder of a run holds something else, before any work.

    Args:
        jobs: The runs.

    Raises:
        RunError: A folder holds another run.
    """
    for each in jobs:
        accept = each.accept_changed_code
        RunFolder(
            each.folder, each.recipe, each.seed, each.label, accept_changed_code=accept
        ).check()


def make_launcher(options: SweepOptions) -> Launcher:
    """Return the launcher of the runs.

    Args:
        options: How to run them.
    """
    if options.launcher == "ray":
        from gadam.train.launchers.ray import RayLauncher

        gpus = float(options.device.startswith("cuda")) if options.gpus is None else options.gpus
        cpus = options.threads if options.cpus is None else options.cpus
        return RayLauncher(options.address, cpus, gpus, options.workers)
    several = available_cores() // options.threads if options.device == "cpu" else 1
    return LocalLauncher(options.workers or max(1, several))


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Keep other sweeps from writing to a folder, and remove what killed processes left.

    Args:
        folder: Created if it does not exist.

    Raises:
        RunError: Another process is using the folder, or it cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RunError(explain_os_error(error, folder)) from None
    with lock.locked(folder):
        for place in ("", "sections", "figures"):
            lock.remove_temporary_files(folder / place, of_dead_processes=True)
        yield


@contextmanager
def workspace(folder: Path, options: SweepOptions) -> Iterator[None]:
    """Lock the folder of an experiment. If it is in a storage, begin and end with what is there.

    Args:
        folder: The folder on this machine.
        options: Where the runs go.

    Raises:
        RunError: Another process is using the folder, or the storage cannot be used.
    """
    with locked(folder):
        if options.storage is None:
            yield
            return
        storage = Storage(options.storage)
        storage.pull(folder, ignore=_is_of_a_run)
        try:
            yield
        finally:
            storage.push(folder, ignore=_is_of_a_run)


def _is_of_a_run(name: str) -> bool:
    """Return True for the name of a file that a run wrote, which the run copies itself."""
    return "/" in name and name.split("/")[0] not in ("sections", "figures")


def _report(folder: Path) -> Path | None:
    """Write the report if the report extra is installed."""
    try:
        from gadam.report import write

        return write([folder], folder)
    except (ImportError, RuntimeError) as error:
        print(f"Skipped the report: {error}", file=sys.stderr)
        return None


def export(jobs: Iterable[TrainingJob], options: SweepOptions) -> None:
    """Write TensorBoard files if they were asked for.

    Args:
        jobs: The runs.
        options: How they were run.
    """
    if options.tensorboard:
        from gadam.train import tensorboard

        for each in jobs:
            tensorboard.export(each.folder)
