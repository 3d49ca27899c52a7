"""The effective learning rate during training."""

from __future__ import annotations

from collections.abc import Callable

from gadam.analysis import effective_rates
from gadam.report.chart import Chart
from gadam.runs.collect import Collection
from gadam.study.measured import Measured
from gadam.study.part import Part
from gadam.study.section import SectionBuilder, curve, mean_curve, mean_dict, mean_text

__all__ = ["RatePart"]

_Rates = dict[str, list[tuple[int, float]]]
"""(epoch, rate) pairs by layer, and for all weights together under "all"."""


class RatePart(Part):
    """Compute α/‖w‖² from the norms in the runs' records."""

    name = "rate"
    order = 40
    title = "Effective learning rate during training"
    needs = "weight norms in the runs' epoch records; older versions did not write them"
    needs_weights = False

    def is_possible(self, collection: Collection) -> bool:
        """Return True if a finished run recorded weight norms.

        Args:
            collection: The runs.
        """
        finished = [run for run in collection.runs if run.result is not None]
        return any(record.norms for run in finished for record in run.epochs)

    def report(self, measured: Measured, section: SectionBuilder) -> None:
        """Add tables of rates by epoch and by layer, and a chart over epochs.

        Args:
            measured: The runs and their values.
            section: The section to fill.
        """
        rates: dict[str, list[_Rates]] = {}
        for row in measured.collection.labels:
            found = [r for run in measured.runs(row) if (r := effective_rates(run.epochs))]
            if found:
                rates[row] = found
        if not rates:
            return
        section.text(
            "α/‖w‖², the rate at which the direction of the weights turns: of all weights together "
            "over the epochs, and of each layer in the last epoch."
        )
        _by_epoch(section, rates)
        _by_layer(measured, section, rates)


def _by_epoch(section: SectionBuilder, rates: dict[str, list[_Rates]]) -> None:
    positions: dict[str, Callable[[int], int]] = {
        "first": lambda count: 0,
        "middle": lambda count: count // 2,
        "last": lambda count: count - 1,
    }
    curves, rows = [], []
    for row, runs in rates.items():
        epochs = [epoch for epoch, _ in runs[0]["all"]]
        mean = mean_curve([[rate for _, rate in run["all"]] for run in runs])
        curves.append(curve(row, [(e, m) for e, m in zip(epochs, mean) if m > 0]))
        columns = {
            name: [run["all"][at(len(run["all"]))][1] for run in runs]
            for name, at in positions.items()
        }
        rows.append([row, *map(mean_text, columns.values())])
        section.summary[row] = {name: mean_dict(values) for name, values in columns.items()}
    section.table(["method", "first epoch", "middle epoch", "last epoch"], rows)
    title = "Effective learning rate"
    caption = "α/‖w‖² of all weights together. Means over seeds."
    section.chart("rate", Chart(title, caption, "epoch", "α/‖w‖²", curves, log_x=False))


def _by_layer(measured: Measured, section: SectionBuilder, rates: dict[str, list[_Rates]]) -> None:
    by_model: dict[str, dict[str, list[_Rates]]] = {}
    for row, runs in rates.items():
        model = measured.experiment.recipes[row].model
        by_model.setdefault(model, {})[row] = runs
    for model, rows in by_model.items():
        names = [name for name in next(iter(rows.values()))[0] if name != "all"]
        section.table(
            [f"layer of {model}", *rows],
            [
                [name, *(mean_text(run[name][-1][1] for run in runs) for runs in rows.values())]
                for name in names
            ],
        )
        for row, runs in rows.items():
            section.summary[row]["layers"] = {
                name: mean_dict(run[name][-1][1] for run in runs) for name in names
            }
        if len(rates) == 1:
            (runs,) = rows.values()
            curves = [curve(name, [(e, r) for e, r in runs[0][name] if r > 0]) for name in names]
            title, caption = "Effective learning rate by layer", "α/‖w‖² of each layer."
            chart = Chart(title, caption, "epoch", "α/‖w‖²", curves, log_x=False)
            section.chart("rate-layers", chart)
