"""The numbers behind the figures: the page's and the paper's are drawn from the same ones."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

from gadam.report.records import Collection
from gadam.train import optimizers, text
from gadam.train.summary import Estimate, more_is_better

__all__ = ["COLOURS", "Curve", "Style", "costs", "curves", "floors", "rates", "styles"]

# Okabe and Ito's, which the colour-blind can tell apart; the yellow is too light for lines.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#6A4C93", "#8C564B")
_DASHES: dict[str, tuple[tuple[int, ...], ...]] = {  # in turn, when the colours have been used up
    "average": ((), (10, 3), (10, 2, 2, 2)),
    "iterate": ((2, 3), (1, 2), (4, 2, 1, 2)),
}
POINTS = ("average", "iterate")


@dataclass(frozen=True)
class Style:
    """How a method's lines are drawn, by point."""

    colour: str
    dashes: dict[str, tuple[int, ...]]


def styles(labels: list[str]) -> dict[str, Style]:
    """A style for each method, no two alike for 24 of them."""
    return {
        label: Style(
            COLOURS[i % len(COLOURS)],
            {p: _DASHES[p][(i // len(COLOURS)) % 3] for p in POINTS},
        )
        for i, label in enumerate(labels)
    }


@dataclass(frozen=True)
class Curve:
    """A method's metric along training at one point: mean and band of a standard error over seeds."""

    label: str
    point: str
    metric: str
    part: str
    epoch: list[int] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    value: list[float] = field(default_factory=list)
    low: list[float] = field(default_factory=list)
    high: list[float] = field(default_factory=list)
    seeds: list[int] = field(default_factory=list)


def shown(metric: str, value: float) -> float:
    """The metric as the curves show it, the smaller the better: an accuracy as an error."""
    return 100.0 - value if more_is_better(metric) else value


def axis_title(metric: str, part: str = "test") -> str:
    """What stands at the axis."""
    return {"accuracy": f"{part} error, %", "top5": f"top-5 {part} error, %"}.get(
        metric, f"{part} {metric}"
    )


def curves(collection: Collection, part: str = "test") -> list[Curve]:
    """All curves of a part of the data, each method's average and iterate."""
    found = []
    for label in collection.labels:
        metric = collection.experiment.metric_of(label)
        values: dict[str, dict[int, list[tuple[float, float]]]] = {
            p: defaultdict(list) for p in POINTS
        }
        for run in (r for r in collection.runs if r.label == label):
            elapsed = 0.0
            for line in run.lines:
                elapsed += sum(line.get("seconds", {}).values())
                for point in POINTS:
                    value = line.get(point, {}).get(part, {}).get(metric)
                    if value is not None:
                        values[point][line["epoch"]].append((shown(metric, value), elapsed))
        for point, by_epoch in values.items():
            if by_epoch:
                found.append(_filled(Curve(label, point, metric, part), by_epoch))
    return found


def floors(collection: Collection, part: str = "test") -> dict[str, float]:
    """The best that is possible, by metric, where it is known and the same for all of its rows."""
    known: dict[str, set[float | None]] = defaultdict(set)
    for label in collection.labels:
        recipe = collection.experiment.recipes[label]
        best = text.best_perplexity(recipe.data.name) if recipe.language is not None else {}
        known[collection.experiment.metric_of(label)].add(best.get(part))
    return {
        metric: floor
        for metric, (floor, *others) in known.items()
        if floor is not None and not others
    }


def _filled(curve: Curve, by_epoch: dict[int, list[tuple[float, float]]]) -> Curve:
    for epoch, pairs in sorted(by_epoch.items()):
        estimate = Estimate.of([value for value, _ in pairs])
        if estimate is None:
            continue
        error = estimate.error or 0.0
        curve.epoch.append(epoch)
        curve.seconds.append(round(sum(s for _, s in pairs) / len(pairs), 2))
        curve.value.append(round(estimate.mean, 4))
        curve.low.append(round(estimate.mean - error, 4))
        curve.high.append(round(estimate.mean + error, 4))
        curve.seeds.append(len(pairs))
    return curve


def drawn_as(curve: Curve, averaged: set[str]) -> str:
    """The point whose line style a curve has: a method without an average is judged by its iterate,
    and drawn as averages are.
    """
    return curve.point if curve.label in averaged else "average"


def rates(collection: Collection) -> list[dict[str, Any]]:
    """Each method's learning rate by epoch, and the epoch after which averaging starts."""
    found = []
    for label in collection.labels:
        run = next(r for r in collection.runs if r.label == label)
        recipe = run.recipe
        values = [
            recipe.optimizer.lr * optimizers.rate_factor(recipe, e) for e in range(recipe.epochs)
        ]
        sampled = [
            line["epoch"]
            for r in collection.runs
            if r.label == label
            for line in r.lines
            if line.get("samples")
        ]
        planned = recipe.average.start if recipe.average is not None else None
        # A trigger's first sample is in the line of the epoch after which it was taken.
        start = planned if isinstance(planned, int) else min(sampled, default=0) - 1
        if planned is None or start < 0:
            start = None
        values.append(values[-1])  # the last epoch has a width too
        found.append({"label": label, "rate": [float(f"{v:.6g}") for v in values], "start": start})
    return found


def costs(collection: Collection) -> list[dict[str, Any]]:
    """Seconds of an epoch by what they are spent on, and memory, in the mean over a method's runs."""
    found = []
    for label in collection.labels:
        runs = [r for r in collection.runs if r.label == label and r.lines]
        if not runs:
            continue
        totals: dict[str, float] = defaultdict(float)
        epochs = 0
        for run in runs:
            epochs += len(run.lines)
            for line in run.lines:
                for what, seconds in line.get("seconds", {}).items():
                    totals[what] += seconds
        memory = [r.result["peak_memory"] for r in runs if r.result and r.result.get("peak_memory")]
        found.append(
            {
                "label": label,
                "seconds": {what: round(s / max(epochs, 1), 4) for what, s in totals.items()},
                "memory": round(max(memory) / 2**20) if memory else None,
                "parameters": next((r.result.get("parameters") for r in runs if r.result), None),
            }
        )
    return found
