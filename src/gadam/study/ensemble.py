"""An ensemble of a run's iterates, compared with the average of their weights."""

from __future__ import annotations

from collections.abc import Iterable
from statistics import fmean
from typing import TypedDict

from gadam.analysis import ensemble
from gadam.report.chart import Chart, Series
from gadam.runs.collect import Collection
from gadam.study.decay import over_decay
from gadam.study.measured import Measured
from gadam.study.part import Part, Study, Unit
from gadam.study.points import Point
from gadam.study.predictions import iterate_units, predictions_unit, read_predictions
from gadam.study.section import (
    SectionBuilder,
    as_error,
    curve,
    error_name,
    mean_curve,
    mean_dict,
    mean_text,
    seed_means,
)

__all__ = ["EnsemblePart"]


class _Scores(TypedDict):
    """Scores are pairs of accuracy and loss."""

    alone: list[list[float]]
    together: list[list[float]]


class _Ensemble(_Scores, total=False):
    average: list[float]


class EnsemblePart(Part):
    """Average the predicted probabilities of the kept iterates."""

    name = "ensemble"
    order = 20
    title = "Ensemble of the iterates, compared with the average of their weights"
    needs = "kept iterates; train with --set keep_iterates=N"

    def is_possible(self, collection: Collection) -> bool:
        """Return True if a finished run kept several iterates.

        Args:
            collection: The runs.
        """
        return any(r.recipe.keep_iterates > 1 for r in collection.runs if r.result is not None)

    def units(self, study: Study) -> Iterable[Unit]:
        """Return the predictions of the iterates and the average, then the ensemble.

        Args:
            study: The run.
        """
        predictions = iterate_units(study)
        if not predictions:
            return []
        members: list[Point] = list(study.points.kept)
        if study.points.has_average:
            members.append("average")
            predictions.append(predictions_unit(study, "average"))
        key = {"what": "ensemble", "of": [study.points.identity(point) for point in members]}
        return [*predictions, Unit("ensemble", key, lambda: _ensemble(study))]

    def report(self, measured: Measured, section: SectionBuilder) -> None:
        """Add the table of errors, and charts over the number of iterates and weight decay.

        Args:
            measured: The runs and their values.
            section: The section to fill.
        """
        found: dict[str, list[_Ensemble]] = measured.by_row("ensemble")
        if not found:
            return
        section.text(
            "The mean of the iterates' probabilities, which needs one forward pass per iterate, "
            "and the average of their weights, which needs only one."
        )
        rows: list[list[str]] = []
        curves: list[Series] = []
        of_weights, of_iterates = "{method}, average of weights", "{method}, ensemble of iterates"
        gains: dict[str, dict[str, list[float]]] = {of_weights: {}, of_iterates: {}}
        for row, values in found.items():
            metric = measured.metric(row)
            single = [fmean(as_error(s, metric) for s in v["alone"]) for v in values]
            together = [as_error(v["together"][-1], metric) for v in values]
            average = [as_error(v["average"], metric) for v in values if "average" in v]
            columns = {
                "last iterate": [as_error(v["alone"][-1], metric) for v in values],
                "mean of the iterates": single,
                "ensemble of iterates": together,
                "average of weights": average,
            }
            count = len(values[0]["alone"])
            rows.append([row, str(count), *(mean_text(v) for v in columns.values())])
            section.summary[row] = {name: mean_dict(v) for name, v in columns.items() if v}
            gains[of_iterates][row] = [a - b for a, b in zip(single, together)]
            by_count = mean_curve([[as_error(s, metric) for s in v["together"]] for v in values])
            curves.append(curve(row, enumerate(by_count, 1)))
            if average:
                gains[of_weights][row] = [a - b for a, b in zip(single, average)]
                curves.append(seed_means(row, [(len(by_count), average)]))
        error = error_name(measured.metric(next(iter(found))))
        columns_shown = ("last iterate", "mean of the iterates", "ensemble of iterates")
        header = [f"{name}: {error}" for name in (*columns_shown, "average of weights")]
        section.table(["method", "iterates", *header], rows)
        caption = (
            "Error of an ensemble of the first iterates by their number. Points show the average "
            "of all weights."
        )
        title = "Ensembles of iterates"
        section.chart(
            "ensemble",
            Chart(title, caption, "iterates", error, curves, log_x=False, log_y=False),
        )
        over_decay(
            measured,
            section,
            "ensemble-decay",
            "Gain of averages and of ensembles of iterates over a single iterate, over weight "
            "decay.",
            gains,
            f"gain in {error}",
        )


def _ensemble(study: Study) -> _Ensemble:
    logs, true = read_predictions(study, study.points.kept)
    alone, together = ensemble(logs, true)
    value: _Ensemble = {"alone": list(map(list, alone)), "together": list(map(list, together))}
    if study.points.has_average:
        (average,), _ = ensemble(read_predictions(study, ["average"])[0], true)
        value["average"] = list(average)
    return value
