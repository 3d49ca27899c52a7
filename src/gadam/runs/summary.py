"""From results to a table: means over seeds with standard errors, and paired differences."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from statistics import fmean, stdev

from gadam.runs.experiment import Experiment, more_is_better
from gadam.runs.files import Document
from gadam.runs.recipe import Data
from gadam.runs.record import RunResult

__all__ = [
    "HEADER",
    "Row",
    "SeedMean",
    "best",
    "by_task",
    "cells",
    "mean_text",
    "row_title",
    "summarize",
    "to_dict",
    "to_markdown",
    "with_units",
]

# The 97.5 % quantile of Student's t with 1, 2, … degrees of freedom.
_STUDENT = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)


def _student(freedom: int) -> float:
    if freedom <= len(_STUDENT):
        return _STUDENT[freedom - 1]
    z = 1.959964  # the normal quantile, and the first terms of Student's expansion around it
    return z + (z**3 + z) / (4 * freedom) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2)


@dataclass(frozen=True)
class SeedMean:
    """A mean over seeds.

    Args:
        mean: The mean.
        error: Its standard error; None for one seed.
        count: The number of seeds.
    """

    mean: float
    error: float | None
    count: int

    @classmethod
    def of(cls, values: Iterable[float | None]) -> SeedMean | None:
        """Return the mean of the values that are present and finite, or None if there are none.

        Args:
            values: One per seed.
        """
        kept = [value for value in values if value is not None and math.isfinite(value)]
        if not kept:
            return None
        error = stdev(kept) / math.sqrt(len(kept)) if len(kept) > 1 else None
        return cls(fmean(kept), error, len(kept))

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
    """One row of the table.

    Args:
        label: The method.
        metric: The metric that rates it.
        iterate: The last iterate's test metric.
        average: The average's, if there is one.
        base: The row it is compared with.
        difference: The gain over the base, paired by seed and positive if this row is better. Each
            method counts at the point it is used at: its average if it has one.
        validation: The metric of that point on the validation split, if there is one.
        published: The paper's number.
        seconds: Mean wall time per run.
        runs: Finished runs.
        failed: Failed runs.
        diverged: Finished runs that diverged.
    """

    label: str
    metric: str
    iterate: SeedMean | None
    average: SeedMean | None
    base: str | None
    difference: SeedMean | None
    validation: SeedMean | None
    published: float | None
    seconds: float | None
    runs: int
    failed: int
    diverged: int


def summarize(
    experiment: Experiment, results: Mapping[tuple[str, int], RunResult | None]
) -> list[Row]:
    """Return the table of an experiment.

    Args:
        experiment: Whose rows.
        results: By row and seed; None for a failed run.
    """
    by_row: dict[str, dict[int, RunResult]] = {label: {} for label in experiment.recipes}
    failed = dict.fromkeys(experiment.recipes, 0)
    for (label, seed), result in results.items():
        if result is None:
            failed[label] += 1
        else:
            by_row[label][seed] = result

    def used(result: RunResult, split: str, metric: str) -> float | None:
        return result.metric(metric, result.used_point, split)

    table = []
    for label, by_seed in by_row.items():
        runs = list(by_seed.values())
        metric = experiment.metric_of(label)
        sign = 1 if more_is_better(metric) else -1
        base = experiment.bases.get(label)
        partners = by_row.get(base, {}) if base else {}
        pairs = [
            (used(by_seed[s], "test", metric), used(partners[s], "test", metric))
            for s in by_seed
            if s in partners
        ]
        table.append(
            Row(
                label,
                metric,
                iterate=SeedMean.of(r.metric(metric, "iterate") for r in runs),
                average=SeedMean.of(r.metric(metric, "average") for r in runs),
                base=base,
                difference=SeedMean.of(
                    sign * (a - b) for a, b in pairs if a is not None and b is not None
                ),
                validation=SeedMean.of(used(r, "validation", metric) for r in runs),
                published=experiment.published.get(label),
                seconds=fmean(r.total_seconds for r in runs) if runs else None,
                runs=len(runs),
                failed=failed[label],
                diverged=sum(r.diverged for r in runs),
            )
        )
    return table


HEADER = ("method", "iterate", "average", "gain (95 % interval)", "validation", "seconds per run")


def row_title(row: Row) -> str:
    """Return the row's label, with the number of failed and diverged runs.

    Args:
        row: The row.
    """
    trouble = [
        f"{n} {what}" for n, what in ((row.failed, "failed"), (row.diverged, "diverged")) if n
    ]
    return row.label + (f" ({', '.join(trouble)})" if trouble else "")


def mean_text(mean: SeedMean | None, row: Row) -> str:
    """Return a mean as text. If some runs lack it (a trigger that did not fire), say how many.

    Args:
        mean: A mean over the row's runs.
        row: The row.
    """
    if mean is None:
        return "–"
    return str(mean) + (f" ({mean.count} of {row.runs})" if mean.count < row.runs else "")


def cells(row: Row) -> tuple[str, ...]:
    """Return a row as text, in the order of :data:`HEADER`.

    Args:
        row: The row.
    """
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
        row_title(row),
        mean_text(row.iterate, row),
        mean_text(row.average, row),
        gain,
        mean_text(row.validation, row),
        "–" if row.seconds is None else f"{row.seconds:.0f}",
    )


def with_units(metrics: Iterable[str]) -> str:
    """Return metric names with their units.

    Args:
        metrics: Their names.
    """
    return " or ".join(f"{m}, %" if more_is_better(m) else m for m in metrics)


def by_task(experiment: Experiment, table: list[Row]) -> list[list[Row]]:
    """Group rows by network and data set. Rows of different tasks cannot be compared.

    Args:
        experiment: Whose table.
        table: Its rows.
    """
    tasks: dict[tuple[str, Data], list[Row]] = {}
    for row in table:
        recipe = experiment.recipes[row.label]
        tasks.setdefault((recipe.model, recipe.data), []).append(row)
    return list(tasks.values())


def best(experiment: Experiment, table: list[Row]) -> set[str]:
    """Return the labels of the best test results, one per task.

    Args:
        experiment: Whose table.
        table: Its rows.
    """
    leaders = set()
    for rows in by_task(experiment, table):
        means = {r.label: p.mean for r in rows if (p := r.average or r.iterate) is not None}
        if means:
            pick = max if more_is_better(rows[0].metric) else min
            leaders.add(pick(means, key=means.__getitem__))
    return leaders


def to_markdown(experiment: Experiment, table: list[Row]) -> str:
    """Return the table as Markdown, with the best test results in bold.

    Args:
        experiment: Whose table.
        table: Its rows.
    """
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


def to_dict(experiment: Experiment, table: list[Row]) -> Document:
    """Return the table as plain data, with the experiment's title, note and metrics.

    Args:
        experiment: Whose table.
        table: Its rows.
    """
    return {
        "experiment": experiment.name,
        "title": experiment.title,
        "metric": ", ".join(experiment.metrics),
        "note": experiment.note,
        "rows": [asdict(row) for row in table],
    }
