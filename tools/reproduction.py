"""The tables of docs/reproducing.md: every experiment of the paper, its cost, and its results.

`python -m tools.tables` writes them.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

from gadam.runs.archive import read_archive
from gadam.runs.experiment import Experiment
from gadam.runs.files import Json
from gadam.runs.summary import SeedMean
from gadam.train import experiments
from tools import RESULTS

__all__ = ["index", "results"]


def index() -> str:
    """Return a table of all experiments: what they show, their commands, costs, and states."""
    lines = [
        "| name | shows | mini, core minutes | paper, GPU hours | data | run here |",
        "|---|---|---:|---:|---|---|",
    ]
    for name, small, large in _catalog():
        done = _summary(name)
        rows = {row["label"] for row in done["rows"]} if done else set()
        state = f"{len(rows)} of {len(small.recipes)} rows" if rows else "no"
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
        done = _summary(name)
        if done is None and not large.published:
            continue
        section = [f"### {name}", "", f"{large.title}. "]
        if done is None:
            section[-1] += f"Not run here. Command: `gadam reproduce {name}`."
            table = _published(large.published)
        else:
            section[-1] += (
                f"{_unit(small)}. Command: `{done['command']}` (mini scale, {done['seeds']} seeds, "
                f"torch {done['versions']['torch']}). Source: `results/{name}.json`."
            )
            table = _beside(done["rows"], large.published)
        sections.append("\n".join([*section, "", *table]))
    return "\n\n".join(sections)


def _published(published: Mapping[str, float]) -> list[str]:
    lines = ["| method | paper |", "|---|---:|"]
    return lines + [f"| {label} | {value:.2f} |" for label, value in published.items()]


def _beside(rows: list[dict[str, Json]], published: Mapping[str, float]) -> list[str]:
    lines = ["| method | ours: last iterate | ours: average | paper |", "|---|---:|---:|---:|"]
    for row in rows:
        ours = [_text(row[point]) for point in ("iterate", "average")]
        number = published.get(row["label"])
        lines.append(
            f"| {row['label']} | {' | '.join(ours)} | {'' if number is None else f'{number:.2f}'} |"
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
def _summary(name: str) -> dict[str, Json] | None:
    path = RESULTS / f"{name}.json"
    return read_archive(path)["summary.json"] if path.is_file() else None
