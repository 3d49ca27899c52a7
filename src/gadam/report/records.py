"""What is on the disk: runs finished, running, failed or damaged."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
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
        analysis: what is to be measured of the runs, as the experiment says
        problems: what is missing or damaged, in sentences
    """

    title: str
    runs: tuple[RunRecord, ...]
    experiment: Experiment
    command: str = ""
    sections: tuple[dict[str, Any], ...] = ()
    analysis: tuple[str, ...] = ()
    problems: tuple[str, ...] = ()
    expected: int = 0

    @property
    def labels(self) -> list[str]:
        """The rows that have runs, in order."""
        return list(dict.fromkeys(run.label for run in self.runs))

    @property
    def results(self) -> dict[tuple[str, int], dict[str, Any] | None]:
        """Of the runs that are over, by label and seed; None where one failed."""
        return {(r.label, r.seed): r.result for r in self.runs if r.result is not None or r.failure}


def collect(folders: Iterable[str | Path]) -> Collection:
    """Read every run in or below these folders.

    A damaged or foreign file is named among the problems and passed over. Another part of the library
    adds a section to the page by leaving ``sections/*.json`` in a folder: a title and a list of
    blocks, see :mod:`gadam.report.page`.
    """
    problems: list[str] = []
    places = []
    for folder in map(Path, folders):
        if folder.is_dir():
            places.append(folder)
        else:
            problems.append(f"{folder} is not a folder")
    experiments = {
        path.parent.resolve(): _read_experiment(path, problems)
        for path in _files(places, "experiment.json")
    }
    runs = []
    for path in _files(places, "run.json"):
        run = _read_run(path, problems)
        if run is not None:
            home = next((p for p in path.resolve().parents if p in experiments), None)
            runs.append((run, home))
    sections = []
    for path in _files(places, "sections/*.json"):
        section = _read_json(path, problems)
        if section is not None and isinstance(section.get("blocks"), list):
            sections.append({**section, "folder": str(path.parent)})
        elif section is not None:
            problems.append(f"{path} is not a section: it has no list of blocks")
    found = {home: e for home, e in experiments.items() if e is not None}
    return _ordered(_told_apart(runs, found), list(found.values()), tuple(sections), problems)


def _files(places: list[Path], pattern: str) -> list[Path]:
    """Each file once, though it lie in several of the places."""
    found = {p.resolve(): p for place in places for p in sorted(place.rglob(pattern))}
    return list(found.values())


def _told_apart(
    runs: list[tuple[RunRecord, Path | None]], found: dict[Path, dict[str, Any]]
) -> list[RunRecord]:
    """Rows of different experiments that share a name get their experiment's title before it."""
    homes: dict[str, set[Path | None]] = {}
    for run, home in runs:
        homes.setdefault(run.label, set()).add(home)
    apart = []
    for run, home in runs:
        if len(homes[run.label]) > 1 and home in found:
            run = replace(run, label=f"{found[home]['title']}: {run.label}")
        apart.append(run)
    shared = {label for label, where in homes.items() if len(where) > 1}
    for e in found.values():
        name = {
            label: f"{e['title']}: {label}" if label in shared else label for label in e["rows"]
        }
        e["rows"] = list(name.values())
        e["bases"] = {name.get(a, a): name.get(b, b) for a, b in e["bases"].items()}
        e["published"] = {name.get(k, k): v for k, v in e["published"].items()}
    return apart


def _read_experiment(path: Path, problems: list[str]) -> dict[str, Any] | None:
    content = _read_json(path, problems)
    if content is None:
        return None
    try:
        return {
            "name": str(content.get("name", "")),
            "title": _clean(content.get("title", "Runs")),
            "metric": str(content.get("metric", "accuracy")),
            "part": "validation" if content.get("part") == "validation" else "test",
            "note": str(content.get("note", "")),
            "rows": [_clean(label) for label in content.get("rows", [])],
            "bases": {_clean(a): _clean(b) for a, b in dict(content.get("bases", {})).items()},
            "published": {
                _clean(k): float(v) for k, v in dict(content.get("published", {})).items()
            },
            "seeds": int(content.get("seeds", 0)),
            "analysis": [str(part) for part in content.get("analysis", [])],
            "command": str(content.get("command", "")),
        }
    except (TypeError, ValueError, AttributeError) as error:
        problems.append(f"{path} is damaged and left out ({error})")
        return None


def _clean(text: object) -> str:
    """A label that can be drawn and encoded: no control characters, no half characters, not endless."""
    shown = "".join(c if c.isprintable() else "?" for c in str(text))
    return shown if len(shown) <= 80 else shown[:79] + "…"


def _numbers(value: Any) -> Any:
    """What a record may hold: numbers that are none (a diverged run's) are left out."""
    if isinstance(value, dict):
        kept = {k: _numbers(v) for k, v in value.items()}
        return {k: v for k, v in kept.items() if v is not None}
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def _read_json(path: Path, problems: list[str]) -> dict[str, Any] | None:
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError) as error:
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
            label=_clean(content.get("label") or recipe.method),
            recipe=recipe,
            seed=int(content["seed"]),
            lines=tuple(_line(line) for line in read_lines(folder / "epochs.jsonl")),
            result=_read_result(folder / "result.json", problems),
            versions=dict(content.get("versions", {})),
            machine=dict(content.get("machine", {})),
            failure=str((_read_json(failed, problems) or {}).get("reason") or "unknown")
            if (failed := folder / "failure.json").exists()
            else "",
        )
    except (RecipeError, KeyError, TypeError, ValueError, AttributeError, OSError) as error:
        what = f"it has no {error}" if isinstance(error, KeyError) else str(error)
        problems.append(f"{folder} is damaged and left out ({what})")
        return None
    lines = folder / "epochs.jsonl"
    torn = (lines.read_text(errors="replace").count("\n") if lines.exists() else 0) - len(run.lines)
    if (torn > 0 and run.result is not None) or torn > 1:  # one may be just being written
        problems.append(f"{lines}: {torn} damaged lines are left out")
    return run


def _line(line: dict[str, Any]) -> dict[str, Any]:
    kept: dict[str, Any] = _numbers(line)
    for name in ("iterate", "average", "seconds"):
        if not isinstance(kept.get(name, {}), dict):
            raise ValueError(f"{name} of epoch {line['epoch']} is not what gadam writes")
    return kept


def _read_result(path: Path, problems: list[str]) -> dict[str, Any] | None:
    content = _read_json(path, problems) if path.exists() else None
    if content is None:
        return None
    result: dict[str, Any] = {"average": None, "parameters": None, **_numbers(content)}
    for name in ("iterate", "seconds"):
        if not isinstance(result[name], dict):
            raise ValueError(f"{name} in {path.name} is not what gadam writes")
    result["status"] = str(result["status"])
    return result


def _ordered(
    runs: list[RunRecord],
    found: list[dict[str, Any]],
    sections: tuple[dict[str, Any], ...],
    problems: list[str],
) -> Collection:
    first = found[0] if found else {}
    rows: list[str] = [label for e in found for label in e["rows"]]
    order = {label: i for i, label in enumerate(dict.fromkeys(rows))}
    runs = sorted(runs, key=lambda r: (order.get(r.label, len(order)), r.label, r.seed))
    seen = {(run.label, run.seed) for run in runs}
    if len(seen) < len(runs):
        problems.append("some runs have the same name and seed: the last of each is in the table")
    recipes = {run.label: run.recipe for run in runs}
    of_pictures = dict.fromkeys(e["metric"] for e in found if e["metric"] != "perplexity")
    experiment = Experiment(
        name=str(first.get("name", "")),
        title=str(first.get("title", "Runs")),
        recipes=recipes,
        bases={a: b for e in found for a, b in e["bases"].items() if a in recipes and b in recipes},
        published={k: v for e in found for k, v in e["published"].items()},
        metric=next(iter(of_pictures), "accuracy"),
        part=str(first.get("part", "test")),
        note=str(first.get("note", "")),
    )
    if len(of_pictures) > 1:
        problems.append(
            f"the experiments are judged by {', '.join(of_pictures)}: all are shown by {experiment.metric}"
        )
    problems += [
        f"{run.label}, seed {run.seed} diverged: "
        + ("it is in the means as it ended" if run.recipe.language is None else "it is in no mean")
        for run in runs
        if run.result is not None and run.result["status"] == "diverged"
    ]
    expected = sum(len(e["rows"]) * e["seeds"] for e in found)
    if expected > len(runs):
        problems.append(f"{expected - len(runs)} of {expected} runs have not begun")
    problems += [
        f"{run.label}, seed {run.seed} failed: {run.failure}" for run in runs if run.failure
    ]
    unfinished = [run for run in runs if run.result is None and not run.failure]
    if unfinished:
        problems.append(f"{len(unfinished)} runs are not finished: they are not in the table")
    title = " · ".join(dict.fromkeys(e["title"] for e in found)) or experiment.title
    return Collection(
        title=title,
        runs=tuple(runs),
        experiment=experiment,
        command="\n".join(e["command"] for e in found if e["command"]),
        sections=sections,
        analysis=tuple(dict.fromkeys(part for e in found for part in e["analysis"])),
        problems=tuple(problems),
        expected=expected,
    )
