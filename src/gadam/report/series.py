"""The numbers behind the charts. The page and the figures are drawn from the same ones."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from gadam.runs import Collection, RunRecord, more_is_better
from gadam.runs.record import Point
from gadam.runs.summary import SeedMean

__all__ = [
    "Cost",
    "Curve",
    "LearningRate",
    "averaged_labels",
    "axis_title",
    "costs",
    "curves",
    "floors",
    "rates",
    "styled_as",
    "to_error",
]

_POINTS: tuple[Point, Point] = ("average", "iterate")  # in drawing order


@dataclass(frozen=True)
class Curve:
    """A method's metric at one point over training: the mean over seeds and its standard error.

    Args:
        label: The method.
        point: "average" or "iterate".
        metric: Its name. Accuracies are shown as errors; see :func:`to_error`.
        split: "test" or "validation".
        epoch: The evaluated epochs. All fields below have one entry for each.
        seconds: Mean wall time since the start.
        value: The mean over seeds.
        low: The mean minus one standard error.
        high: The mean plus one standard error.
        seeds: The number of seeds.
    """

    label: str
    point: Point
    metric: str
    split: str
    epoch: tuple[int, ...]
    seconds: tuple[float, ...]
    value: tuple[float, ...]
    low: tuple[float, ...]
    high: tuple[float, ...]
    seeds: tuple[int, ...]


@dataclass(frozen=True)
class LearningRate:
    """A method's learning rate over training.

    Args:
        label: The method.
        rate: The learning rate per epoch. The last one is repeated, so that a step plot shows it.
        start: Epochs before averaging starts; None if it does not.
    """

    label: str
    rate: tuple[float, ...]
    start: int | None


@dataclass(frozen=True)
class Cost:
    """What a method costs, averaged over its runs.

    Args:
        label: The method.
        seconds: Wall time per epoch by activity.
        peak_memory: Megabytes, if the platform reports them.
        parameters: Size of the network, if a run has finished.
    """

    label: str
    seconds: Mapping[str, float]
    peak_memory: int | None
    parameters: int | None


def to_error(metric: str, value: float) -> float:
    """Return the metric as charts show it: an accuracy as an error, so that smaller is better.

    Args:
        metric: Its name.
        value: Its value.
    """
    return 100.0 - value if more_is_better(metric) else value


def axis_title(metric: str, split: str = "test") -> str:
    """Return the title of a metric's axis.

    Args:
        metric: Its name.
        split: "test" or "validation".
    """
    errors = {"accuracy": f"{split} error, %", "top5": f"top-5 {split} error, %"}
    return errors.get(metric, f"{split} {metric}")


def curves(collection: Collection, split: str = "test") -> list[Curve]:
    """Return the learning curves of all methods, for their averages and iterates.

    Args:
        collection: The runs.
        split: "test" or "validation".
    """
    found = []
    for label in collection.labels:
        metric = collection.experiment.metric_of(label)
        for point in _POINTS:
            curve = _curve(collection.runs_of(label), label, point, metric, split)
            if curve is not None:
                found.append(curve)
    return found


def _curve(
    runs: Iterable[RunRecord], label: str, point: Point, metric: str, split: str
) -> Curve | None:
    by_epoch: dict[int, list[tuple[float, float]]] = defaultdict(list)  # values and seconds
    for run in runs:
        elapsed = 0.0
        for record in run.epochs:
            elapsed += sum(record.seconds.values())
            value = record.metric(metric, point, split)
            if value is not None:
                by_epoch[record.epoch].append((to_error(metric, value), elapsed))
    rows = []
    for epoch, pairs in sorted(by_epoch.items()):
        mean = SeedMean.of(value for value, _ in pairs)
        if mean is None:
            continue
        error = mean.error or 0.0
        seconds = round(sum(s for _, s in pairs) / len(pairs), 2)
        bounds = round(mean.mean - error, 4), round(mean.mean + error, 4)
        rows.append((epoch, seconds, round(mean.mean, 4), *bounds, len(pairs)))
    if not rows:
        return None
    epochs, elapsed_seconds, values, lows, highs, seeds = zip(*rows)
    return Curve(label, point, metric, split, epochs, elapsed_seconds, values, lows, highs, seeds)


def averaged_labels(found: Iterable[Curve]) -> set[str]:
    """Return the methods that have a curve of their average.

    Args:
        found: All curves of a chart.
    """
    return {curve.label for curve in found if curve.point == "average"}


def styled_as(curve: Curve, averaged: set[str]) -> Point:
    """Return the point that decides a curve's line style.

    A method without an average is rated by its iterate, so its iterate is drawn like an average.

    Args:
        curve: The curve.
        averaged: The methods that have an average; see :func:`averaged_labels`.
    """
    return curve.point if curve.label in averaged else "average"


def floors(collection: Collection, split: str = "test") -> dict[str, float]:
    """Return the best possible value by metric, for the metrics where it is known.

    Args:
        collection: The runs.
        split: "test" or "validation".
    """
    known = collection.experiment.floors
    return {
        metric: known[metric][split]
        for metric in collection.experiment.metrics
        if split in known.get(metric, {})
    }


def rates(collection: Collection) -> list[LearningRate]:
    """Return each method's learning rate, and where its averaging starts.

    Args:
        collection: The runs.
    """
    found = []
    for label in collection.labels:
        runs = collection.runs_of(label)
        recipe = runs[0].recipe
        values = [recipe.learning_rate(epoch) for epoch in range(recipe.epochs)]
        values.append(values[-1])
        rounded = tuple(float(f"{value:.6g}") for value in values)
        found.append(LearningRate(label, rounded, _averaging_start(runs)))
    return found


def _averaging_start(runs: list[RunRecord]) -> int | None:
    average = runs[0].recipe.average
    if average is None:
        return None
    if isinstance(average.start, int):
        return average.start
    # A trigger takes its first sample at the end of the epoch that records it.
    sampled = [record.epoch for run in runs for record in run.epochs if record.samples]
    return min(sampled) - 1 if sampled else None


def costs(collection: Collection) -> list[Cost]:
    """Return the time and memory that each method takes.

    Args:
        collection: The runs.
    """
    found = []
    for label in collection.labels:
        runs = [run for run in collection.runs_of(label) if run.epochs]
        if not runs:
            continue
        records = [record for run in runs for record in run.epochs]
        totals: dict[str, float] = defaultdict(float)
        for record in records:
            for activity, seconds in record.seconds.items():
                totals[activity] += seconds
        results = [run.result for run in runs if run.result is not None]
        memory = [result.peak_memory for result in results if result.peak_memory]
        found.append(
            Cost(
                label,
                {activity: round(total / len(records), 4) for activity, total in totals.items()},
                round(max(memory) / 2**20) if memory else None,
                results[0].parameters if results else None,
            )
        )
    return found
