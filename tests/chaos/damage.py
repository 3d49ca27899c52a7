"""Damage files at random, and check what reports and the next run make of them."""

from __future__ import annotations

import random
import shutil
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from compare_runs import numbers
from contract import same
from gadam._errors import UserError
from gadam.report.page import render
from gadam.runs import Collection, Recipe, collect
from gadam.runs.files import read_json
from gadam.runs.folder import State, read_weights
from gadam.runs.manifest import Problem, check_run, check_tree
from gadam.train import loop

KINDS = {
    "header": "run.json",
    "lines": "epochs.jsonl",
    "result": "result.json",
    "manifest": "manifest.json",
    "checkpoint": "checkpoint-*.pt",
    "iterate": "iterates/*.pt",
    "lock": ".lock",
}
SWEEP_KINDS = {
    "experiment": "experiment.json",
    "summary": "summary.json",
    "analysis": "analysis.json",
    "section": "sections/*.json",
    "notebook": "*/analysis.jsonl",
    "predictions": "*/predictions/*.pt",
}
_WAYS = ("flip", "flip", "flip", "burst", "zero", "cut", "empty", "remove", "insert", "repeat")


def damage(path: Path, rng: random.Random) -> str:
    """Damage a file at a random offset, or remove it.

    Args:
        path: The file.
        rng: The source of randomness.

    Returns:
        What was done.
    """
    content = bytearray(path.read_bytes())
    size = len(content)
    way = rng.choice(_WAYS) if size else "insert"
    at = rng.randrange(size) if size else 0
    length = rng.randint(1, 32)
    if way == "flip":
        content[at] ^= 1 << rng.randrange(8)
    elif way == "burst":
        content[at : at + length] = rng.randbytes(len(content[at : at + length]))
    elif way == "zero":
        content[at : at + 512] = bytes(len(content[at : at + 512]))
    elif way == "cut":
        del content[at:]
    elif way == "empty":
        content.clear()
    elif way == "insert":
        content[at:at] = rng.choice([rng.randbytes(length), b"[" * 3000, b"\n", b"{}", b"9"])
    elif way == "repeat":
        content[at:at] = content[at : at + length]
    if way == "remove":
        path.unlink()
    else:
        path.write_bytes(content)
    return f"{way} {path.name} at {at:,} of {size:,}"


def choose(folder: Path, pattern: str, rng: random.Random) -> Path:
    """Choose a file. If it is the lock, create it, as a killed process leaves it.

    Args:
        folder: Where.
        pattern: Which files.
        rng: The source of randomness.
    """
    if pattern == KINDS["lock"]:
        (folder / pattern).touch()
    return rng.choice(sorted(path for path in folder.glob(pattern) if path.is_file()))


# ------------------------------------------------------------------------------------------ checks


def wrong_numbers(found: Collection, expected: Collection) -> list[str]:
    """Return what a report would show that is not true.

    Args:
        found: What was read from damaged folders.
        expected: What was read before.
    """
    truth = {(run.label, run.seed): run for run in expected.runs}
    wrong = []
    for run in found.runs:
        known = truth.get((run.label, run.seed))
        # A name may be damaged so that it becomes an unknown field, which nothing shows.
        header = replace(run.header, extra={})
        if known is None or (run.recipe, header) != (known.recipe, known.header):
            wrong.append(f"{run.label}, seed {run.seed} is another run")
        elif run.result is not None and run.result != known.result:
            wrong.append(f"{run.label}, seed {run.seed} has another result")
        elif run.epochs != known.epochs[: len(run.epochs)]:
            wrong.append(f"{run.label}, seed {run.seed} has other lines")
        elif run.result is None and known.result is not None and not found.problems:
            wrong.append(f"{run.label}, seed {run.seed} has lost its result without a sentence")
    experiment = replace(expected.experiment, recipes=found.experiment.recipes)
    if found.experiment.name and found.experiment != experiment and not found.problems:
        wrong.append("the experiment is another one")
    if found.sections != expected.sections and not found.problems:
        wrong.append("the sections are others")
    return wrong


def undetected(folder: Path, before: dict[Path, bytes]) -> list[str]:
    """Return the changed files that `gadam verify --weights` does not name.

    Args:
        folder: The folder.
        before: The content of its files that have hashes.
    """
    named: set[Path] = set()
    for found in check_tree(folder, weights=True):
        problems: Iterable[Problem] = [found] if isinstance(found, Problem) else found.problems
        named |= {problem.path for problem in problems}
    return [
        f"{path.name} is not named"
        for path, content in before.items()
        if _content(path) != content
        and not named & {path, *_vouching(path)}
        and _counts(path)
        and not _is_cut_notebook(path, content)
    ]


def _is_cut_notebook(path: Path, before: bytes) -> bool:
    """Return True if the last lines of an analysis are gone: they are measured again."""
    return path.name == "analysis.jsonl" and before.startswith(_content(path) or b"")


def _content(path: Path) -> bytes | None:
    return path.read_bytes() if path.exists() else None


def _vouching(path: Path) -> tuple[Path, ...]:
    """Return the files that vouch for another. If they are damaged, it is in doubt as well."""
    return path.with_name("manifest.json"), path.with_name("run.json")


def _counts(path: Path) -> bool:
    """Return False if the change matters to nobody: to a run that is not finished, or to spaces."""
    if path.name == "manifest.json" and not path.exists():
        return False  # the run is not finished without it
    try:
        read_json(path)
    except ValueError:
        return True
    return (
        path.name not in ("manifest.json", *SWEEP_KINDS.values()) and "sections" not in path.parts
    )


def check_report(folder: Path, expected: Collection) -> list[str]:
    """Read and render the runs of a folder, and return what is wrong.

    Args:
        folder: The folder.
        expected: What was read before.
    """
    found = collect([folder])
    render(found)
    return wrong_numbers(found, expected)


def check_training(folder: Path, recipe: Recipe, whole: Path) -> tuple[str, list[str]]:
    """Train the run in a folder to its end, and compare it with an undisturbed one.

    Args:
        folder: The folder.
        recipe: What to train.
        whole: The folder of an undisturbed run.

    Returns:
        The sentence that refused it, if any, and what is wrong.
    """
    try:
        loop.train(recipe, folder)
    except UserError as error:
        return str(error), []
    return "", differences(whole, folder)


def differences(whole: Path, folder: Path) -> list[str]:
    """Return what differs between two finished runs: numbers, and weights that can be loaded.

    Args:
        whole: The folder of an undisturbed run.
        folder: The folder of a disturbed one.
    """
    wrong = []
    if numbers(whole) != numbers(folder):
        wrong.append(f"{folder.name} has other numbers than an undisturbed run")
    weights = (".pt", ".dcp")
    wrong += [str(p) for p in check_run(folder).problems if p.path.suffix not in weights]
    for pattern in ("checkpoint-*.pt", "checkpoint-*.dcp", "iterates/iterate-*.pt"):
        truth = {path.name.rpartition("-")[0]: path for path in whole.glob(pattern)}
        for path in folder.glob(pattern):
            state, known = read_weights(path), truth.get(path.name.rpartition("-")[0])
            if state is None or known is None:  # damaged, and nobody loads it
                continue
            try:
                same(_weights(state), _weights(read_weights(known)))
            except AssertionError:
                wrong.append(f"{path.name} has other weights than that of an undisturbed run")
    return wrong


def _weights(state: State | None) -> State:
    return {key: v for key, v in (state or {}).items() if key not in ("lines", "header")}


def fresh_copy(source: Path, target: Path) -> Path:
    """Copy a folder, replacing an earlier copy.

    Args:
        source: The folder.
        target: The copy.
    """
    if target.exists():
        shutil.rmtree(target)
    shutil.copytree(source, target, symlinks=True)
    return target
