"""An ensemble of networks that were trained with different seeds."""

from __future__ import annotations

from collections.abc import Iterable

from gadam.analysis import ensemble
from gadam.report.chart import Chart, Series
from gadam.runs.collect import Collection
from gadam.study.decay import over_decay
from gadam.study.measured import Measured
from gadam.study.part import Part, Study, Unit
from gadam.study.predictions import (
    PredictionsValue,
    load_predictions,
    predictions_file,
    predictions_unit,
)
from gadam.study.section import (
    SectionBuilder,
    as_error,
    curve,
    error_name,
    mean_dict,
    mean_text,
    number_text,
)

__all__ = ["NetworksPart"]


class NetworksPart(Part):
    """Average the predicted probabilities of the runs of a row."""

    name = "networks"
    order = 30
    title = "Ensemble of networks trained with different seeds"
    needs = "runs with several seeds"

    def is_possible(self, collection: Collection) -> bool:
        """Return True if a row has several finished runs.

        Args:
            collection: The runs.
        """
        finished = [run.label for run in collection.runs if run.result is not None]
        return any(finished.count(label) > 1 for label in collection.labels)

    def units(self, study: Study) -> Iterable[Unit]:
        """Return the predictions of the run's final point.

        Args:
            study: The run.
        """
        return [predictions_unit(study, study.points.final, name="network")]

    def report(self, measured: Measured, section: SectionBuilder) -> None:
        """Add the table of errors, and charts over the number of networks and weight decay.

        Args:
            measured: The runs and their values.
            section: The section to fill.
        """
        rows: list[list[str]] = []
        curves: list[Series] = []
        gains: dict[str, list[float]] = {}
        error = ""
        for row in measured.by_row("network"):
            metric = measured.metric(row)
            files = []
            for run in measured.runs(row):
                value: PredictionsValue | None = measured.value(run, "network")
                if value is not None:
                    files.append(predictions_file(run.folder, value["file"]))
            if len(files) < 2:
                continue
            error = error_name(metric)
            predictions = [load_predictions(path) for path in files]
            alone, together = ensemble([logs for logs, _ in predictions], predictions[0][1])
            singles = [as_error(score, metric) for score in alone]
            by_count = [as_error(score, metric) for score in together]
            # There is one ensemble. The uncertainty of its gain is the spread of the networks.
            gains[row] = [single - by_count[-1] for single in singles]
            rows.append(
                [
                    row,
                    str(len(files)),
                    mean_text(singles),
                    number_text(by_count[-1]),
                    mean_text(gains[row]),
                ]
            )
            section.summary[row] = {
                "networks": len(files),
                "one": mean_dict(singles),
                "ensemble": by_count[-1],
                "gain": mean_dict(gains[row]),
            }
            curves.append(curve(row, enumerate(by_count, 1)))
        if not rows:
            return
        section.text(
            "The mean probabilities of networks that were trained independently, one per seed. The "
            "standard error of the gain is over these networks; there is only one ensemble."
        )
        section.table(["method", "networks", f"one network: {error}", "ensemble", "gain"], rows)
        caption = "Error of an ensemble of independent networks by their number."
        title = "Ensembles of networks"
        section.chart(
            "networks",
            Chart(title, caption, "networks", error, curves, log_x=False, log_y=False),
        )
        over_decay(
            measured,
            section,
            "networks-decay",
            "Gain of an ensemble of networks over a single network, over weight decay.",
            {"ensemble of networks, {method}": gains},
            f"gain in {error}",
        )
