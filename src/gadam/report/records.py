"""What is on the disk: runs finished, running, failed or damaged."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gadam.train.experiments import Experiment
from gadam.train.recipe import Recipe, RecipeError, from_dict
from gadam.train.record import read_lines

__all__ = ["Collection", "RunRecord", "collect"]


@dataclass(frozen=True)
class RunRecord:
    """One run as its folder tells it."""

    folder: Path
    label: str
    recipe: Recipe
    seed: int
    lines: tuple[dict[str, Any], ...]
    result: dict[str, Any] | None
    versions: dict[str, str]
    machine: dict[str, str]
    failure: str = ""

    @property
    def status(self) -> str:
        """How far it is: "done", "diverged", "at epoch 3 of 20", or why it failed."""
        if self.result is not None:
            return str(self.result["status"])
        if self.failure:
            return f"failed ({self.failure})"
        return f"at epoch {len(self.lines)} of {self.recipe.epochs}"


@dataclass(frozen=True)
class Collection:
    """Runs that are looked at together.

    Args:
        title: of the page
        runs: by label, then seed, in the experiment's order
        experiment: what they belong to; made up from the runs where no folder says it
        command: that reproduces it, where it is known
        sections: what other parts of the library have left to be shown, see :func:`collect`
        problems: what is missing or damaged, in sentences
    """

    title: str
    runs: tuple[RunRecord, ...]
    experiment: Experiment
    command: str = ""
    sections: tuple[dict[str, Any], ...] = ()
    problems: tuple[str, ...] = ()
    expected: int = 0

    @property
    def labels(self) -> list[str]:
        """The rows that have runs, in order."""
        return list(dict.fromkeys(run.label for run in self.runs))

    @property
    def results(self) -> dict[tuple[str, int], dict[str, Any] | None]:
        """Of the runs that are over, by label and seed."""
        return {(r.label, r.seed): r.result for r in self.runs if r.result is not None}


def collect(folders: Iterable[str | Path]) -> Collection:
    """Read every run in or below these folders.

    A damaged or foreign file is named among the problems and passed over. Another part of the library
    adds a section to the page by leaving ``sections/*.json`` in a folder: a title and a list of
    blocks, see :mod:`gadam.report.page`.
    """
    problems: list[str] = []
    runs: list[RunRecord] = []
    found: list[dict[str, Any]] = []
    sections: list[dict[str, Any]] = []
    for folder in map(Path, folders):
        if not folder.is_dir():
            problems.append(f"{folder} is not a folder")
            continue
        for path in sorted(folder.rglob("run.json")):
            run = _read_run(path, problems)
            runs += [run] if run is not None else []
        for path in sorted(folder.rglob("experiment.json")):
            description = _read_json(path, problems)
            found += [description] if description is not None else []
        for path in sorted(folder.rglob("sections/*.json")):
            section = _read_json(path, problems)
            if section is not None and isinstance(section.get("blocks"), list):
                sections.append({**section, "folder": str(path.parent)})
            elif section is not None:
                problems.append(f"{path} is not a section: it has no list of blocks")
    return _ordered(runs, found, tuple(sections), problems)


def _read_json(path: Path, problems: list[str]) -> dict[str, Any] | None:
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        problems.append(f"{path} is damaged and left out ({error})")
        return None
    if isinstance(content, dict):
        return content
    problems.append(f"{path} is damaged and left out (it is not what gadam writes)")
    return None


def _read_run(path: Path, problems: list[str]) -> RunRecord | None:
    content = _read_json(path, problems)
    if content is None:
        return None
    folder = path.parent
    try:
        recipe = from_dict(content["recipe"])
        run = RunRecord(
            folder=folder,
            label=str(content.get("label") or recipe.method),
            recipe=recipe,
            seed=int(content["seed"]),
            lines=tuple(read_lines(folder / "epochs.jsonl")),
            result=_read_json(folder / "result.json", problems)
            if (folder / "result.json").exists()
            else None,
            versions=dict(content.get("versions", {})),
            machine=dict(content.get("machine", {})),
            failure=str((_read_json(failed, problems) or {}).get("reason", "unknown"))
            if (failed := folder / "failure.json").exists()
            else "",
        )
        if run.result is not None:  # what the page relies on
            run.result["iterate"]["test"], run.result["seconds"], run.result["status"]
            run.result.get("average") is None or run.result["average"]["test"]
    except (RecipeError, KeyError, TypeError, ValueError) as error:
        problems.append(f"{path} is damaged and left out ({error})")
        return None
    written = (folder / "epochs.jsonl").read_text(errors="replace") if run.lines else ""
    torn = written.count("\n") - len(run.lines)
    if torn > 0:
        problems.append(f"{folder / 'epochs.jsonl'}: {torn} damaged lines are left out")
    return run


def _ordered(
    runs: list[RunRecord],
    found: list[dict[str, Any]],
    sections: tuple[dict[str, Any], ...],
    problems: list[str],
) -> Collection:
    first = found[0] if found else {}
    rows: list[str] = [str(label) for e in found for label in e.get("rows", [])]
    order = {label: i for i, label in enumerate(dict.fromkeys(rows))}
    runs = sorted(runs, key=lambda r: (order.get(r.label, len(order)), r.label, r.seed))
    seen = {(run.label, run.seed) for run in runs}
    if len(seen) < len(runs):
        problems.append("some runs have the same name and seed: the last of each is in the table")
    recipes = {run.label: run.recipe for run in runs}
    experiment = Experiment(
        name=str(first.get("name", "")),
        title=str(first.get("title", "Runs")),
        recipes=recipes,
        bases={
            str(a): str(b)
            for e in found
            for a, b in dict(e.get("bases", {})).items()
            if a in recipes and b in recipes
        },
        published={
            str(k): float(v) for e in found for k, v in dict(e.get("published", {})).items()
        },
        metric=str(first.get("metric", "accuracy")),
        note=str(first.get("note", "")),
    )
    expected = sum(len(e.get("rows", [])) * int(e.get("seeds", 0)) for e in found)
    if expected > len(runs):
        problems.append(f"{expected - len(runs)} of {expected} runs have not begun")
    problems += [
        f"{run.label}, seed {run.seed} failed: {run.failure}" for run in runs if run.failure
    ]
    unfinished = [run for run in runs if run.result is None and not run.failure]
    if unfinished:
        problems.append(f"{len(unfinished)} runs are not finished: they are not in the table")
    title = experiment.title if len(found) < 2 else " · ".join(str(e.get("title")) for e in found)
    return Collection(
        title=title,
        runs=tuple(runs),
        experiment=experiment,
        command=str(first.get("command", "")),
        sections=sections,
        problems=tuple(problems),
        expected=expected,
    )
