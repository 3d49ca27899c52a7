"""The numbers behind the charts. The page and the figures are drawn from the same ones."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from gadam.report.style import Style, styles
from gadam.runs import Collection, RunRecord
from gadam.runs.record import Point
from gadam.runs.summary import SeedMean, is_percentage, summarize, task_groups

__all__ = [
    "Cost",
    "Curve",
    "Gain",
    "LearningRate",
    "axis_title",
    "costs",
    "curves",
    "floors",
    "gain_title",
    "gains",
    "method_names",
    "method_styles",
    "rates",
]

_POINTS: tuple[Point, Point] = ("average", "iterate")  # in drawing order


@dataclass(frozen=True)
class Curve:
    """A method's metric at one point over training: the mean over seeds and its standard error.

    Args:
        label: The method.
        point: "average" or "iterate".
        metric: Its name.
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


@dataclass(frozen=True)
class Gain:
    """A method's gain in the test metric over its base, paired by seed.

    Args:
        label: The row.
        base: The row it is compared with.
        mean: The mean gain; positive is better.
        low: The lower end of the 95% interval; the mean if there is no interval.
        high: The upper end.
        seeds: The number of seeds that both have.
    """

    label: str
    base: str
    mean: float
    low: float
    high: float
    seeds: int

    @property
    def evidence(self) -> str:
        """What the interval says, as the chart's legend does."""
        if self.seeds < 2:
            return "one seed"
        known = self.low < self.high
        return "significant" if known and not self.low <= 0 <= self.high else "not significant"


def method_names(collection: Collection) -> dict[str, str]:
    """Return each row's method, without the words that name its task.

    Args:
        collection: The runs.
    """
    groups = task_groups(collection.experiment)
    names = {label: name for group in groups for label, name in group.names.items()}
    return {label: names[label] for label in collection.labels}


def method_styles(collection: Collection) -> dict[str, Style]:
    """Return the style of each method by its name. A method looks the same in every task.

    Args:
        collection: The runs.
    """
    names = method_names(collection)
    bases = {
        names[label]: names[base]
        for label, base in collection.experiment.bases.items()
        if label in names and base in names
    }
    return styles(names.values(), bases)


def axis_title(metric: str, split: str = "test") -> str:
    """Return the title of a metric's axis.

    Args:
        metric: Its name.
        split: "test" or "validation".
    """
    if is_percentage(metric):
        return f"{split} {_metric_name(metric)}, %"
    return f"{split} {metric}"


def gain_title(metric: str) -> str:
    """Return the title of an axis of gains.

    Args:
        metric: The metric's name.
    """
    unit = ", points" if is_percentage(metric) else ""
    return f"gain in test {_metric_name(metric)}{unit}"


def _metric_name(metric: str) -> str:
    return "top-5 accuracy" if metric == "top5" else metric


def gains(collection: Collection) -> list[Gain]:
    """Return the gain of each method that has a base.

    Args:
        collection: The runs.
    """
    found = []
    for row in summarize(collection.experiment, collection.results):
        if row.difference is not None and row.base is not None:
            low, high = row.difference.bounds or (row.difference.mean,) * 2
            mean, count = row.difference.mean, row.difference.count
            found.append(
                Gain(row.label, row.base, round(mean, 6), round(low, 6), round(high, 6), count)
            )
    return found


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
                by_epoch[record.epoch].append((value, elapsed))
    rows = []
    for epoch, pairs in sorted(by_epoch.items()):
        mean = SeedMean.of(value for value, _ in pairs)
        if mean is None:
            continue
        error = mean.error or 0.0
        seconds = round(sum(s for _, s in pairs) / len(pairs), 2)
        numbers = (mean.mean, mean.mean - error, mean.mean + error)
        rows.append((epoch, seconds, *(float(f"{number:.7g}") for number in numbers), len(pairs)))
    if not rows:
        return None
    epochs, elapsed_seconds, values, lows, highs, seeds = zip(*rows)
    return Curve(label, point, metric, split, epochs, elapsed_seconds, values, lows, highs, seeds)


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
