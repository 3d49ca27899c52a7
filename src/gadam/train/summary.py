"""From results to a table: means with their standard errors, and paired differences."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from statistics import fmean, stdev
from typing import Any

from gadam.train.experiments import Experiment

__all__ = [
    "Estimate",
    "Row",
    "best",
    "by_task",
    "cells",
    "described",
    "markdown",
    "more_is_better",
    "of_runs",
    "rows",
    "titled",
    "to_json",
]

# The 97.5 % quantile of Student's t with 1, 2, … degrees of freedom.
_STUDENT = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)


def _student(freedom: int) -> float:
    if freedom <= len(_STUDENT):
        return _STUDENT[freedom - 1]
    z = 1.959964  # and the first terms by which Student's quantile differs from the normal one
    return z + (z**3 + z) / (4 * freedom) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2)


@dataclass(frozen=True)
class Estimate:
    """A mean over seeds, its standard error (None for one seed) and how many there were."""

    mean: float
    error: float | None
    count: int

    @classmethod
    def of(cls, values: list[float]) -> Estimate | None:
        """From the values; None from none."""
        if not values:
            return None
        error = stdev(values) / math.sqrt(len(values)) if len(values) > 1 else None
        return cls(fmean(values), error, len(values))

    @property
    def interval(self) -> float | None:
        """Half the width of the 95 % confidence interval."""
        if self.error is None:
            return None
        return self.error * _student(self.count - 1)

    def __str__(self) -> str:
        return f"{self.mean:.2f}" if self.error is None else f"{self.mean:.2f} ± {self.error:.2f}"


@dataclass(frozen=True)
class Row:
    """A method's line of the table.

    Args:
        label: the row
        metric: what it is judged by
        iterate: the last iterate's metric
        average: the average's, where there is one
        base: the row it is set against
        difference: the gain over it, paired by seed, positive where this row is better: of what each
            method is used for, its average if it has one
        validation: the metric of that point on the validation split, where there is one
        published: the paper's number
        seconds: of a run, in the mean
        runs, failed, diverged: how many
    """

    label: str
    metric: str
    iterate: Estimate | None
    average: Estimate | None
    base: str | None
    difference: Estimate | None
    validation: Estimate | None
    published: float | None
    seconds: float | None
    runs: int
    failed: int
    diverged: int


def rows(
    experiment: Experiment, results: Mapping[tuple[str, int], dict[str, Any] | None]
) -> list[Row]:
    """The table of an experiment.

    Args:
        experiment: whose rows
        results: by row and seed; None where a run failed
    """
    by_row: dict[str, dict[int, dict[str, Any]]] = {label: {} for label in experiment.recipes}
    failed = dict.fromkeys(experiment.recipes, 0)
    for (label, seed), result in results.items():
        if result is None:
            failed[label] += 1
        else:
            by_row[label][seed] = result

    def at(point: dict[str, Any] | None, part: str, metric: str) -> float | None:
        value = ((point or {}).get(part) or {}).get(metric)
        return float(value) if isinstance(value, int | float) and math.isfinite(value) else None

    def used(result: dict[str, Any], part: str, metric: str) -> float | None:
        return at(result.get("average") or result.get("iterate"), part, metric)

    def estimate(values: Iterable[float | None]) -> Estimate | None:
        return Estimate.of([value for value in values if value is not None])

    table = []
    for label, runs in by_row.items():
        metric = experiment.metric_of(label)
        sign = 1 if more_is_better(metric) else -1
        base = experiment.bases.get(label)
        partners = by_row.get(base, {}) if base else {}
        pairs = [
            (used(runs[s], "test", metric), used(partners[s], "test", metric))
            for s in runs
            if s in partners
        ]
        table.append(
            Row(
                label,
                metric,
                iterate=estimate(at(r.get("iterate"), "test", metric) for r in runs.values()),
                average=estimate(at(r.get("average"), "test", metric) for r in runs.values()),
                base=base,
                difference=estimate(
                    sign * (a - b) for a, b in pairs if a is not None and b is not None
                ),
                validation=estimate(used(r, "validation", metric) for r in runs.values()),
                published=experiment.published.get(label),
                seconds=fmean(sum(r["seconds"].values()) for r in runs.values()) if runs else None,
                runs=len(runs),
                failed=failed[label],
                diverged=sum(r["status"] == "diverged" for r in runs.values()),
            )
        )
    return table


HEADER = ("method", "iterate", "average", "gain (95 % interval)", "validation", "seconds a run")


def titled(row: Row) -> str:
    """The row's label, with what went wrong in it."""
    trouble = [
        f"{n} {what}" for n, what in ((row.failed, "failed"), (row.diverged, "diverged")) if n
    ]
    return row.label + (f" ({', '.join(trouble)})" if trouble else "")


def of_runs(estimate: Estimate | None, row: Row) -> str:
    """An estimate as text; where not all runs have it (a trigger that did not fire), of how many."""
    if estimate is None:
        return "–"
    return str(estimate) + (
        f" ({estimate.count} of {row.runs})" if estimate.count < row.runs else ""
    )


def cells(row: Row) -> tuple[str, ...]:
    """A row as text."""
    gain = ""
    if row.difference is not None:
        half = row.difference.interval
        bounds = (
            ""
            if half is None
            else f" (95 %: {row.difference.mean - half:+.2f} to {row.difference.mean + half:+.2f})"
        )
        gain = f"{row.difference.mean:+.2f}{bounds} over {row.base}"
    return (
        titled(row),
        of_runs(row.iterate, row),
        of_runs(row.average, row),
        gain,
        of_runs(row.validation, row),
        "–" if row.seconds is None else f"{row.seconds:.0f}",
    )


def more_is_better(metric: str) -> bool:
    """Whether a larger value is a better one: of accuracies, in %."""
    return metric in ("accuracy", "top5")


def described(metrics: Iterable[str]) -> str:
    """Metrics with their units."""
    return " or ".join(f"{m}, %" if more_is_better(m) else m for m in metrics)


def by_task(experiment: Experiment, table: list[Row]) -> list[list[Row]]:
    """The rows of each network and data set: others are other tasks, not to be compared with them."""
    tasks: dict[Any, list[Row]] = {}
    for row in table:
        recipe = experiment.recipes[row.label]
        tasks.setdefault((recipe.model, recipe.data), []).append(row)
    return list(tasks.values())


def best(experiment: Experiment, table: list[Row]) -> set[str]:
    """The labels of the best test results, one for each task."""
    leaders = set()
    for rows_ in by_task(experiment, table):
        means = {r.label: p.mean for r in rows_ if (p := r.average or r.iterate) is not None}
        if means:
            pick = max if more_is_better(rows_[0].metric) else min
            leaders.add(pick(means, key=means.__getitem__))
    return leaders


def markdown(experiment: Experiment, table: list[Row]) -> str:
    """The table as Markdown, the best test results in bold."""
    leaders = best(experiment, table)
    published = any(row.published is not None for row in table)
    header = [*HEADER, *(["paper, at full scale"] if published else [])]
    lines = [f"| {' | '.join(header)} |", "|---|" + "---:|" * (len(header) - 1)]
    for row in table:
        shown = list(cells(row))
        if row.label in leaders:
            column = 2 if row.average else 1
            shown[column] = f"**{shown[column]}**"
        if published:
            shown.append("" if row.published is None else f"{row.published:g}")
        lines.append(f"| {' | '.join(text.replace('|', chr(92) + '|') for text in shown)} |")
    return "\n".join(lines)


def to_json(experiment: Experiment, table: list[Row]) -> dict[str, Any]:
    """The table as plain data."""
    return {
        "experiment": experiment.name,
        "title": experiment.title,
        "metric": ", ".join(experiment.metrics),
        "note": experiment.note,
        "rows": [asdict(row) for row in table],
    }
