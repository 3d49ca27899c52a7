"""How much the predictions and weights of a run's iterates differ."""

from __future__ import annotations

from collections.abc import Iterable
from statistics import fmean
from typing import TypedDict

from gadam.analysis import distances, diversity
from gadam.report.chart import Chart
from gadam.runs.collect import Collection, RunRecord
from gadam.runs.experiment import more_is_better
from gadam.runs.record import POINTS
from gadam.study.decay import decay_families, decay_of, over_decay
from gadam.study.measured import Measured
from gadam.study.part import Part, Study, Unit
from gadam.study.predictions import iterate_units, read_predictions
from gadam.study.section import (
    MeanDict,
    SectionBuilder,
    curve,
    error_name,
    mean_curve,
    mean_dict,
    mean_text,
)

__all__ = ["DiversityPart"]


class _Measure(TypedDict):
    mean: float
    thousands: float
    by_distance: list[float]


class _Diversity(TypedDict):
    points: int
    examples: int
    kl: _Measure
    total_variation: _Measure
    disagreement: _Measure
    squared_distance: _Measure


class _Distances(TypedDict):
    mean: float
    relative: float
    consecutive: float
    norm: float
    by_distance: list[float]


class DiversityPart(Part):
    """Compare the predictions and weights of all pairs of kept iterates."""

    name = "diversity"
    order = 10
    title = "Diversity of the iterates' predictions and weights"
    needs = "kept iterates; train with --set keep_iterates=N"

    def is_possible(self, collection: Collection) -> bool:
        """Return True if a finished run kept several iterates.

        Args:
            collection: The runs.
        """
        return any(r.recipe.keep_iterates > 1 for r in collection.runs if r.result is not None)

    def units(self, study: Study) -> Iterable[Unit]:
        """Return the predictions of each iterate, then the differences between iterates.

        Args:
            study: The run.
        """
        predictions = iterate_units(study)
        if not predictions:
            return []
        of = [study.points.identity(epoch) for epoch in study.points.kept]
        return [
            *predictions,
            Unit("diversity", {"what": "diversity", "of": of}, lambda: _diversity(study)),
            Unit("distances", {"what": "distances", "of": of}, lambda: _distances(study)),
        ]

    def report(self, measured: Measured, section: SectionBuilder) -> None:
        """Add the table of differences, and charts over distance and weight decay.

        Args:
            measured: The runs and their values.
            section: The section to fill.
        """
        values: dict[str, list[_Diversity]] = measured.by_row("diversity")
        if not values:
            return
        section.text(
            "Differences between the test-set predictions of all pairs of iterates of a run: means "
            "over pairs and test examples, then over seeds. Columns in thousands are sums over the "
            "test set, as in the paper's table. KL is symmetrized. The relative distance is the "
            "distance divided by the mean norm of the weights. ΔE is how far the average's error "
            "is below the last iterate's."
        )
        _table(measured, section, values)
        curves = [
            curve(row, enumerate(mean_curve([v["kl"]["by_distance"] for v in found]), 1))
            for row, found in values.items()
        ]
        caption = (
            "Symmetrized KL between iterates by their distance in the sequence of kept iterates "
            "(epochs, if all were kept). Means over pairs and seeds."
        )
        title = "Difference of predictions by distance between iterates"
        section.chart(
            "diversity",
            Chart(title, caption, "positions apart", "KL, nats", curves, log_x=False, log_y=False),
        )
        _errors_over_decay(measured, section)
        _kl_over_decay(measured, section, values)


# ------------------------------------------------------------------------------------- measuring


def _diversity(study: Study) -> _Diversity:
    found = diversity(read_predictions(study, study.points.kept)[0])

    def measure(name: str) -> _Measure:
        return {
            "mean": found.mean(name),
            "thousands": found.thousands(name),
            "by_distance": found.by_distance(name),
        }

    return {
        "points": len(found.kl),
        "examples": found.examples,
        "kl": measure("kl"),
        "total_variation": measure("total_variation"),
        "disagreement": measure("disagreement"),
        "squared_distance": measure("squared_distance"),
    }


def _distances(study: Study) -> _Distances:
    points = study.points
    found = distances([points.mapped(epoch) for epoch in points.kept], points.names)
    return {
        "mean": found.mean,
        "relative": found.relative,
        "consecutive": found.consecutive,
        "norm": float(found.norms.mean()),
        "by_distance": found.by_distance(),
    }


# ------------------------------------------------------------------------------------- reporting


def _table(
    measured: Measured, section: SectionBuilder, values: dict[str, list[_Diversity]]
) -> None:
    lengths: dict[str, list[_Distances]] = measured.by_row("distances")
    rows = []
    for row, found in values.items():
        metric = measured.metric(row)
        apart = lengths.get(row, [])
        # The keys of these columns in analysis.json.
        columns: dict[str, list[float]] = {
            "kl": [v["kl"]["mean"] for v in found],
            "total_variation": [v["total_variation"]["mean"] for v in found],
            "disagreement": [100.0 * v["disagreement"]["mean"] for v in found],
            "squared_distance": [v["squared_distance"]["mean"] for v in found],
            "kl in thousands": [v["kl"]["thousands"] for v in found],
            "total_variation in thousands": [v["total_variation"]["thousands"] for v in found],
            "distance": [d["mean"] for d in apart],
            "relative distance": [d["relative"] for d in apart],
            "drop": [d for run in measured.runs(row) if (d := _drop(run, metric)) is not None],
        }
        rows.append([row, *(mean_text(v) for v in columns.values())])
        means: dict[str, MeanDict | int] = {name: mean_dict(v) for name, v in columns.items() if v}
        counts = {"iterates": found[0]["points"], "examples": found[0]["examples"]}
        section.summary[row] = means | counts
    section.table(
        [
            "method",
            "KL, nats",
            "total variation",
            "disagreement, %",
            "‖p−q‖²",
            "KL, thousands",
            "total variation, thousands",
            "distance",
            "relative distance",
            "ΔE",
        ],
        rows,
    )


def _drop(run: RunRecord, metric: str) -> float | None:
    """Return how far the average's test error or perplexity is below the last iterate's."""
    if run.result is None:
        return None
    iterate, average = (run.result.metric(metric, point) for point in POINTS)
    if iterate is None or average is None:
        return None
    return average - iterate if more_is_better(metric) else iterate - average


def _errors_over_decay(measured: Measured, section: SectionBuilder) -> None:
    alone, last, average = "{method}", "{method}, last iterate", "{method}, average"
    errors: dict[str, dict[str, list[float]]] = {alone: {}, last: {}, average: {}}
    for row in measured.collection.labels:
        metric = measured.metric(row)
        for run in measured.runs(row):
            assert run.result is not None
            iterate = alone if run.result.average is None else last
            for point, label in zip(POINTS, (iterate, average)):
                value = run.result.metric(metric, point)
                if value is not None:
                    error = 100 - value if more_is_better(metric) else value
                    errors[label].setdefault(row, []).append(error)
    over_decay(
        measured,
        section,
        "error-decay",
        "Test error over weight decay, for last iterates and averages.",
        errors,
        error_name(measured.experiment.metrics[0]),
    )


def _kl_over_decay(
    measured: Measured, section: SectionBuilder, values: dict[str, list[_Diversity]]
) -> None:
    normalized: dict[str, list[float]] = {}
    for family in decay_families(measured, values):
        unit = fmean(v["kl"]["mean"] for v in values[family[0]])
        if decay_of(measured, family[0]) or not unit:
            continue
        normalized |= {row: [v["kl"]["mean"] / unit for v in values[row]] for row in family}
    over_decay(
        measured,
        section,
        "diversity-decay",
        "Symmetrized KL between iterates over weight decay, relative to no decay.",
        {"KL between iterates of {method}": normalized},
        "KL, relative",
    )
