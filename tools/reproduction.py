"""The tables of docs/reproducing.md: every experiment of the paper, its cost, and its results.

`python -m tools.tables` writes them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from benchmarks.evidence import paper
from gadam.runs.archive import read_archive
from gadam.runs.experiment import Experiment
from gadam.runs.files import Json
from gadam.runs.recipe import Recipe
from gadam.runs.summary import SeedMean
from gadam.train import experiments
from tools import RESULTS

__all__ = ["index", "results"]


@dataclass(frozen=True)
class _Row:
    """A row of an experiment that was run here.

    Args:
        label: Its label.
        source: The experiment whose results have it.
        result: The row of that experiment's summary.
    """

    label: str
    source: str
    result: dict[str, Json]


def index() -> str:
    """Return a table of all experiments: what they show, their commands, costs, and states."""
    lines = [
        "| name | shows | mini, core minutes | paper, GPU hours | data | run here |",
        "|---|---|---:|---:|---|---|",
    ]
    for name, small, large in _catalog():
        done = _rows(name)
        state = f"{len(done)} of {len(small.recipes)} rows" if done else "no"
        data = ", ".join(sorted({recipe.data.name for recipe in large.recipes.values()}))
        link = f"[{name}](#{name})" if done or large.published else name
        costs = (60 * experiments.hours(small), experiments.hours(large))
        lines.append(
            f"| {link} | {large.title} | {costs[0]:,.0f} | {costs[1]:,.0f} | {data} | {state} |"
        )
    return "\n".join(lines)


def results() -> str:
    """Return a section per experiment with a result of ours or a number that the paper prints."""
    sections = []
    for name, small, large in _catalog():
        done = _rows(name)
        if not done and not large.published:
            continue
        section = [f"### {name}", "", f"{large.title}. "]
        if done:
            section[-1] += f"{_unit(small)}. {_sources(done)}"
            table = _beside(done, large.published)
        else:
            section[-1] += f"Not run here. Command: `gadam reproduce {name}`."
            table = _published(large.published)
        sections.append("\n".join([*section, "", *table]))
    return "\n\n".join(sections)


def _sources(rows: Sequence[_Row]) -> str:
    """Say where the rows come from, and which command made them."""
    said = []
    for source in dict.fromkeys(row.source for row in rows):
        summary = _archive(source)["summary.json"]
        labels = [row.label for row in rows if row.source == source]
        which = "" if len(labels) == len(rows) else f" of {', '.join(labels)}"
        said.append(
            f"Command{which}: `{summary['command']}` (mini scale, {summary['seeds']} seeds, torch "
            f"{summary['versions']['torch']}). Source: `results/{source}.json`."
        )
    return " ".join(said)


def _published(published: Mapping[str, float]) -> list[str]:
    lines = ["| method | paper |", "|---|---:|"]
    return lines + [f"| {label} | {value:.2f} |" for label, value in published.items()]


def _beside(rows: Sequence[_Row], published: Mapping[str, float]) -> list[str]:
    lines = ["| method | ours: last iterate | ours: average | paper |", "|---|---:|---:|---:|"]
    for row in rows:
        ours = [_text(row.result[point]) for point in ("iterate", "average")]
        number = published.get(row.label)
        lines.append(
            f"| {row.label} | {' | '.join(ours)} | {'' if number is None else f'{number:.2f}'} |"
        )
    return lines


def _unit(experiment: Experiment) -> str:
    metrics = {experiment.metric_of(row) for row in experiment.recipes}
    names = {"accuracy": "accuracy in %", "top5": "top-5 accuracy in %"}
    return "Test " + " and ".join(sorted(names.get(metric, metric) for metric in metrics))


def _text(mean: Json) -> str:
    return "" if mean is None else str(SeedMean(**mean))


@cache
def _catalog() -> list[tuple[str, Experiment, Experiment]]:
    """Return the paper's experiments: their names, and their definitions at both scales."""
    return [
        (name, experiments.get(name), experiments.get(name, "paper"))
        for name in experiments.names()
        if name not in ("compare", "lm-mini")
    ]


@cache
def _rows(name: str) -> list[_Row]:
    """Return the rows of an experiment that its own results have, or those of another one.

    The same recipe is the same run: many rows of the paper stand in several tables.
    """
    small = experiments.get(name)
    is_planned = name in paper.EXPERIMENTS
    found: dict[str, _Row] = {}
    if _path(name).is_file():
        own = _archive(name)["summary.json"]["rows"]
        found = {row["label"]: _Row(row["label"], name, row) for row in own}
    if is_planned or not found:
        whole = paper.experiment_of(name) if is_planned else small
        for label, recipe in whole.recipes.items():
            shared = _trained().get((replace(recipe, name=""), whole.metric_of(label)))
            if shared is not None:
                found.setdefault(label, replace(shared, label=label))
    if not _path(name).is_file() and len(found) < len(small.recipes):
        return []  # a few rows that happen to be there, without those to compare them with
    return [found[label] for label in small.recipes if label in found]


@cache
def _trained() -> dict[tuple[Recipe, str], _Row]:
    """Return all rows with results, by their recipe and metric."""
    found: dict[tuple[Recipe, str], _Row] = {}
    for name, *_ in _catalog():
        if not _path(name).is_file():
            continue
        files = _archive(name)
        experiment = Experiment.from_dict(files["experiment.json"])
        for row in files["summary.json"]["rows"]:
            recipe = experiment.recipes[row["label"]]
            key = replace(recipe, name=""), experiment.metric_of(row["label"])
            found.setdefault(key, _Row(row["label"], name, row))
    return found


def _path(name: str) -> Path:
    return RESULTS / f"{name}.json"


@cache
def _archive(name: str) -> dict[str, Json]:
    return read_archive(_path(name))
