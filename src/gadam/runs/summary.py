"""From results to a table: means over seeds with standard errors, and paired differences."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import PurePath
from statistics import fmean, stdev

from gadam.runs.experiment import Experiment
from gadam.runs.files import Document
from gadam.runs.recipe import Recipe
from gadam.runs.record import RunResult

__all__ = [
    "HEADER",
    "Row",
    "SeedMean",
    "TaskGroup",
    "best",
    "by_task",
    "cells",
    "decimals",
    "gain_text",
    "is_percentage",
    "mean_text",
    "row_title",
    "summarize",
    "task_groups",
    "to_dict",
    "to_markdown",
    "with_units",
]

# The 97.5% quantile of Student's t with 1, 2, … degrees of freedom.
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
        """Half the width of the 95% confidence interval, or None if the spread is not known.

        Equal values, such as accuracies on few examples, say nothing about the spread.
        """
        if self.error is None or self.error <= 1e-12 + 1e-9 * abs(self.mean):
            return None
        return self.error * _student(self.count - 1)

    @property
    def bounds(self) -> tuple[float, float] | None:
        """The ends of the 95% confidence interval, or None if the spread is not known."""
        half = self.interval
        return None if half is None else (self.mean - half, self.mean + half)

    def __str__(self) -> str:
        digits = decimals(self.mean)
        error = "" if self.error is None else f" ± {self.error:.{digits}f}"
        return f"{self.mean:.{digits}f}{error}"


def decimals(value: float) -> int:
    """Return how many decimals show a value: two, or more for three digits of a small one.

    >>> [f"{value:.{decimals(value)}f}" for value in (83.217, 1.5, 0.8321, 0.0123456)]
    ['83.22', '1.50', '0.832', '0.0123']

    Args:
        value: The value.
    """
    if not 0 < abs(value) < 1:
        return 2
    return min(2 - math.floor(math.log10(abs(value))), 8)


def signed(numbers: Sequence[float], digits: int) -> list[str]:
    """Return numbers as text with a sign and the same decimals.

    Up to two more decimals are added where a number that is not zero would read as zero: whether an
    interval starts at -0.004 or at 0.004 matters.

    >>> signed((0.013, -0.004, 0.03), 2), signed((2.85, 1.8, 3.9), 1)
    (['+0.013', '-0.004', '+0.030'], ['+2.9', '+1.8', '+3.9'])

    Args:
        numbers: The numbers.
        digits: How many decimals they have at least.
    """
    least = min((abs(number) for number in numbers if abs(number) > 1e-12), default=1.0)
    for _ in range(2):
        digits += float(f"{least:.{digits}f}") == 0
    return [f"{number if abs(number) > 1e-12 else 0.0:+.{digits}f}" for number in numbers]


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
        sign = 1 if experiment.mode_of(label) == "max" else -1
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


HEADER = ("method", "iterate", "average", "gain (95% interval)", "validation", "seconds per run")


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


def gain_text(row: Row) -> str:
    """Return a row's gain with its interval and base, or nothing if it has none.

    Args:
        row: The row.
    """
    if row.difference is None:
        return ""
    used = row.average or row.iterate
    digits = decimals(used.mean if used else row.difference.mean)
    mean, *bounds = signed((row.difference.mean, *(row.difference.bounds or ())), digits)
    interval = f" ({bounds[0]} to {bounds[1]})" if bounds else ""
    return f"{mean}{interval} over {row.base}"


def cells(row: Row) -> tuple[str, ...]:
    """Return a row as text, in the order of :data:`HEADER`.

    Args:
        row: The row.
    """
    return (
        row_title(row),
        mean_text(row.iterate, row),
        mean_text(row.average, row),
        gain_text(row),
        mean_text(row.validation, row),
        "–" if row.seconds is None else f"{row.seconds:.0f}",
    )


def is_percentage(metric: str) -> bool:
    """Return True for a metric that gadam measures in percent.

    Args:
        metric: Its name.
    """
    return metric in ("accuracy", "top5")


def with_units(metrics: Iterable[str]) -> str:
    """Return metric names with their units.

    Args:
        metrics: Their names.
    """
    return " or ".join(f"{m}, %" if is_percentage(m) else m for m in metrics)


# ----------------------------------------------------------------------------------------- tasks


@dataclass(frozen=True)
class TaskGroup:
    """The rows of one task: one network on one data set. Only these can be compared.

    Args:
        title: The task in words, such as "vgg-mini on fashion-mini, true labels".
        names: By row label, the method's name without the words that all rows of the task share.
    """

    title: str
    names: Mapping[str, str]


def task_groups(experiment: Experiment) -> list[TaskGroup]:
    """Group the rows of an experiment by task, in the order of the rows.

    Args:
        experiment: Whose rows.
    """
    groups: dict[object, list[str]] = {}
    for label, recipe in experiment.recipes.items():
        groups.setdefault(_task_of(recipe), []).append(label)
    recipes = [experiment.recipes[labels[0]] for labels in groups.values()]
    titles = _task_titles(recipes)
    found = []
    for labels, title in zip(groups.values(), titles):
        prefix = _shared_prefix(experiment, labels)
        words = prefix.strip().rstrip(":")
        known = title.lower()
        heading = f"{words}: {title}" if words and words.lower() not in known else title
        found.append(TaskGroup(heading, {label: label[len(prefix) :] for label in labels}))
    return found


def _task_of(recipe: Recipe) -> tuple[object, ...]:
    if recipe.task is not None:
        return recipe.task.path, recipe.task.function
    return recipe.model, recipe.data


def _task_titles(recipes: list[Recipe]) -> list[str]:
    """Return a title per task, with what it takes to tell them apart."""
    noisy = any(recipe.data.label_noise for recipe in recipes)

    def describe(recipe: Recipe) -> str:
        if recipe.task is not None:
            return PurePath(recipe.task.path).name
        text = f"{recipe.model} on {recipe.data.name}"
        if noisy and recipe.language is None:
            noise = recipe.data.label_noise
            text += f", {100 * noise:g}% label noise" if noise else ", true labels"
        return text

    titles = [describe(recipe) for recipe in recipes]
    settings = [asdict(recipe.data) for recipe in recipes]

    def differing(i: int) -> list[str]:
        twins = [settings[j] for j, other in enumerate(titles) if other == titles[i]]
        return [
            f"{name}={value}"
            for name, value in settings[i].items()
            if value is not None and any(twin[name] != value for twin in twins)
        ]

    return [", ".join([title, *differing(i)]) for i, title in enumerate(titles)]


def _shared_prefix(experiment: Experiment, labels: list[str]) -> str:
    """Return the words before the method's name, if they are the same in all labels of a task."""
    prefixes = set()
    for label in labels:
        before, found, _ = label.partition(experiment.recipes[label].method)
        prefixes.add(before if found else "")
    return prefixes.pop() if len(prefixes) == 1 else ""


def by_task(experiment: Experiment, table: list[Row]) -> list[list[Row]]:
    """Group rows by task; see :func:`task_groups`. Tasks without rows are left out.

    Args:
        experiment: Whose table.
        table: Its rows.
    """
    groups = [
        [row for row in table if row.label in group.names] for group in task_groups(experiment)
    ]
    return [rows for rows in groups if rows]


def best(experiment: Experiment, table: list[Row]) -> set[str]:
    """Return the label of the best row of each task, at the point where it is used.

    The choice uses the validation split if all rows have it, like :mod:`gadam.runs.verdict`. Rows
    with failed or diverged runs are left out.

    Args:
        experiment: Whose table.
        table: Its rows.
    """
    leaders = set()
    for rows in by_task(experiment, table):
        sound = [row for row in rows if not row.failed and not row.diverged]
        held_out = {row.label: row.validation for row in sound}
        test = {row.label: row.average or row.iterate for row in sound}
        judged = held_out if all(held_out.values()) else test
        means = {label: mean.mean for label, mean in judged.items() if mean is not None}
        if means:
            pick = max if experiment.mode_of(rows[0].label) == "max" else min
            leaders.add(pick(means, key=means.__getitem__))
    return leaders


def to_markdown(experiment: Experiment, table: list[Row]) -> str:
    """Return the table as Markdown, with the test result of the best row of each task in bold.

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
