"""Charts over weight decay, for experiments with rows that differ only in it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from gadam.report.chart import Chart, Series
from gadam.runs.recipe import Recipe
from gadam.study.measured import Measured
from gadam.study.section import SectionBuilder, seed_means

__all__ = ["decay_families", "decay_of", "over_decay"]


def decay_of(measured: Measured, row: str) -> float:
    """Return the weight decay of a row.

    Args:
        measured: The runs.
        row: The row.
    """
    return measured.experiment.recipes[row].optimizer.weight_decay


def decay_families(measured: Measured, rows: Iterable[str]) -> list[list[str]]:
    """Group rows that differ only in their weight decay.

    Args:
        measured: The runs.
        rows: The rows to group.

    Returns:
        Groups with at least two different weight decays, each sorted by weight decay.
    """
    groups: dict[Recipe, list[str]] = {}
    for row in rows:
        recipe = measured.experiment.recipes[row]
        same = replace(recipe, name="", optimizer=replace(recipe.optimizer, weight_decay=0.0))
        groups.setdefault(same, []).append(row)
    return [
        sorted(group, key=lambda row: decay_of(measured, row))
        for group in groups.values()
        if len({decay_of(measured, row) for row in group}) > 1
    ]


def over_decay(
    measured: Measured,
    section: SectionBuilder,
    name: str,
    title: str,
    values: Mapping[str, Mapping[str, list[float]]],
    y: str,
) -> None:
    """Add a chart over weight decay, if there are rows that differ in it.

    Args:
        measured: The runs.
        section: Where to add the chart.
        name: The name of its files.
        title: What it shows, as a sentence.
        values: For each label, the values by row, one per seed. ``{method}`` in a label is replaced
            by the method.
        y: The title of the vertical axis.
    """
    series: list[Series] = []
    for label, by_row in values.items():
        families = decay_families(measured, by_row)
        methods = [measured.experiment.recipes[family[0]].method for family in families]
        for family, method in zip(families, methods):
            # Distinguish families of the same method by their first row.
            name_in_label = family[0] if methods.count(method) > 1 else method
            points = [(decay_of(measured, row), by_row[row]) for row in family]
            means = seed_means(label.format(method=name_in_label), points)
            series += [replace(means, kind="curve", error=[]), means]
    if series:
        caption = f"{title} Points are means over seeds; bars are two standard errors."
        chart = Chart(title, caption, "weight decay", y, series, log_x=False, log_y=False)
        section.chart(name, chart)
