"""The gain from averaging by the number of parameters."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from gadam.report.chart import Chart, Series
from gadam.runs.collect import Collection
from gadam.runs.summary import SeedMean, summarize
from gadam.study.measured import Measured
from gadam.study.part import Part
from gadam.study.section import SectionBuilder, curve, mean_dict, seed_means
from gadam.train.catalog import PAPER

__all__ = ["EARLIER", "ParametersPart"]

# Parameters and the test accuracy of SGD and of SWA at the same budget on CIFAR-100, as Izmailov,
# Podoprikhin, Garipov, Vetrov and Wilson (2018) publish them with their code. The paper plots their
# ensembles (FGE), but does not print the numbers.
EARLIER = {
    "VGG-16": (15_291_300, 72.55, 73.91),
    "PreResNet-110": (1_169_972, 76.77, 78.75),
    "PreResNet-164": (1_726_388, 78.49, 79.77),
    "WRN-28-10": (36_546_980, 80.82, 81.46),
}


class ParametersPart(Part):
    """Relate the gain of averaged methods over their bases to the size of the network."""

    name = "parameters"
    order = 50
    title = "Gain from averaging by number of parameters"
    needs = "averaged methods and their bases"
    needs_weights = False

    def is_possible(self, collection: Collection) -> bool:
        """Return True if there are averaged methods and their bases.

        Args:
            collection: The runs.
        """
        return bool(collection.experiment.bases)

    def report(self, measured: Measured, section: SectionBuilder) -> None:
        """Add the table and the chart of gains, and for `fig-iaprevious` the published ones.

        Args:
            measured: The runs and their values.
            section: The section to fill.
        """
        experiment = measured.experiment
        gains = {
            row.label: (row.difference, row.base)
            for row in summarize(experiment, measured.collection.results)
            if row.difference is not None
        }
        if not gains:
            return
        parameters = {
            run.label: run.result.parameters
            for run in measured.collection.runs
            if run.result is not None and run.result.parameters
        }
        table: list[list[str]] = []
        by_method: dict[str, list[tuple[int, SeedMean]]] = {}
        best: dict[int, SeedMean] = {}
        for row in sorted(gains, key=lambda row: parameters.get(row, 0)):
            if row not in parameters:
                continue
            count = parameters[row]
            gain, base = gains[row]
            by_method.setdefault(experiment.recipes[row].method, []).append((count, gain))
            table.append([row, f"{count:,}", f"{gain} over {base}"])
            section.summary[row] = {"parameters": count, "gain": mean_dict(gain), "base": base}
            if count not in best or gain.mean > best[count].mean:
                best[count] = gain
        series = [
            Series(
                method,
                "measured",
                [float(count) for count, _ in found],
                [gain.mean for _, gain in found],
                [gain.error or 0.0 for _, gain in found],
            )
            for method, found in by_method.items()
        ]
        best_gains = [(count, best[count].mean) for count in sorted(best)]
        if len(best_gains) > 1:
            series.append(curve("best method", best_gains))
        section.text(
            "Gain of each averaged method over its base in test "
            f"{' or '.join(experiment.metrics)}, paired by seed."
        )
        section.table(["method", "parameters", "gain"], table)
        title, caption = "Gain from averaging", "Means over seeds; bars are two standard errors."
        chart = Chart(title, caption, "parameters", "gain", series, log_y=False)
        section.chart("parameters", chart)
        if len(best_gains) > 2:
            correlation = _rank_correlation(*zip(*best_gains))
            section.text(
                "The rank correlation of the best gain with the number of parameters is "
                f"{correlation:+.2f}, over {len(best_gains)} networks."
            )
            section.summary["rank correlation"] = correlation
        if experiment.name == "fig-iaprevious":
            _add_published_gains(section)


def _rank_correlation(a: Sequence[float], b: Sequence[float]) -> float:
    ranks = [torch.tensor(v, dtype=torch.float64).argsort().argsort().double() for v in (a, b)]
    return float(torch.corrcoef(torch.stack(ranks))[0, 1])


def _add_published_gains(section: SectionBuilder) -> None:
    """Add the gains on CIFAR-100 that the paper and the authors of SWA published."""
    accuracy = dict(PAPER["tab-cifar"]().published) | {
        f"ResNeXt-29 C-100 {row}": n for row, n in PAPER["tab-resnext"]().published.items()
    }
    sizes = {"VGG-16": 15_299_748, "PRN-110": 1_169_972, "ResNeXt-29": 34_518_948}
    bases = {"SWA": "SGD", "Gadam": "AdamW", "GadamX": "PadamW"}
    series: list[Series] = []
    rows: list[list[str]] = []
    for method, base in bases.items():
        gains = sorted(
            (count, accuracy[f"{network} C-100 {method}"] - accuracy[f"{network} C-100 {base}"])
            for network, count in sizes.items()
        )
        series.append(curve(f"{method}, paper", gains))
        rows += [[f"{method}, paper", f"{count:,}", f"{gain:+.2f}"] for count, gain in gains]
    earlier = sorted((count, swa - sgd) for count, sgd, swa in EARLIER.values())
    series.append(seed_means("SWA, its authors", [(count, [gain]) for count, gain in earlier]))
    rows += [["SWA, its authors", f"{count:,}", f"{gain:+.2f}"] for count, gain in earlier]
    section.text(
        "Published gains at full scale: the paper's on CIFAR-100, and those of SWA's authors at "
        "the same budget. The paper plots the ensembles of SWA's authors, but does not print their "
        "numbers."
    )
    section.table(["source", "parameters", "gain"], rows)
    title = "Published gains"
    caption = "Published gains on CIFAR-100, in percentage points of test accuracy."
    chart = Chart(title, caption, "parameters", "gain", series, log_y=False)
    section.chart("earlier", chart)
