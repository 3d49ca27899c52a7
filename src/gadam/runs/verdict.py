"""The answer of an experiment: which method is best, and what averaging gains.

Each method counts at the point where it is used: its average if it has one. Among several methods,
the one with the best mean on the *validation* split is chosen; its *test* metric and its gain on
test data are reported.

The best of several means is an optimistic estimate, because the best method was also the luckiest.
Choosing on validation data removes the luck that lies in the test examples. The luck of the seeds
remains, because the same trained networks are measured on both splits: if the interval of a gain
barely excludes zero, add seeds. If some row has no validation metric, the choice uses test data,
and :meth:`Verdict.sentence` says so.

Gains are paired by seed. Their intervals are Student's, and describe one task and one pair of
methods. They are not corrected for the number of methods.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from statistics import fmean
from typing import Literal

from gadam.runs.experiment import Experiment
from gadam.runs.files import Document
from gadam.runs.recipe import Recipe
from gadam.runs.record import RunResult
from gadam.runs.summary import SeedMean, TaskGroup, decimals, is_percentage, signed, task_groups

__all__ = ["Verdict", "verdicts"]

_ONE_SEED = "One seed gives no interval: the difference may be chance."
_TWO_SEEDS = "Two seeds give a very wide interval: add seeds."
_SAME_GAINS = (
    "The gain of all seeds is the same, which gives no interval: the difference may be chance."
)


@dataclass(frozen=True)
class Verdict:
    """The answer for one task.

    Args:
        task: The heading of its rows.
        metric: The metric that rates them.
        best: The row of the best method.
        value: Its test metric, at the point where it is used.
        base: The best row without averaging; None if all rows average.
        averaged: The best row with averaging; None if no row averages.
        gain: The gain of ``averaged`` over ``base`` on test data, paired by seed; positive if
            averaging is better. None if there are not both, or if they share no seed.
        names: Names of these rows, without the words that all rows of the task share.
        chosen_on: The split that chose the rows.
        missing: Runs of the task that have not ended.
        leads_test: True if no other row has a better mean on test data.

    Example:
        >>> verdict = Verdict(
        ...     "vgg-mini on fashion-mini", "accuracy", best="GadamX",
        ...     value=SeedMean(83.22, 0.23, 3), base="PadamW", averaged="GadamX",
        ...     gain=SeedMean(2.85, 0.246, 3),
        ... )
        >>> verdict.sentence()
        'GadamX is best: 83.2% accuracy, +2.9 points over PadamW (95% interval +1.8 to +3.9).'
    """

    task: str
    metric: str
    best: str
    value: SeedMean
    base: str | None = None
    averaged: str | None = None
    gain: SeedMean | None = None
    names: Mapping[str, str] = field(default_factory=dict)
    chosen_on: Literal["validation", "test"] = "validation"
    missing: int = 0
    leads_test: bool = True

    @property
    def significant(self) -> bool:
        """True if the 95% interval of the gain excludes zero."""
        bounds = None if self.gain is None else self.gain.bounds
        return bounds is not None and not bounds[0] <= 0 <= bounds[1]

    def sentence(self) -> str:
        """Return the answer as text: the best method, its metric, and what averaging gains."""
        if self.leads_test:
            lead = f"is best: {self._value()}"
        else:
            lead = f"is best on validation data: {self._value()} on test data"
        text = f"{self._name(self.best)} {lead}{self._comparison()}"
        if self.missing:
            count = "1 run is" if self.missing == 1 else f"{self.missing} runs are"
            text = f"So far, {text} {count} not finished."
        if self.chosen_on == "test" and self.gain is not None:
            text += " The methods were chosen on test data, which favors the best one."
        return text

    def to_dict(self) -> Document:
        """Return the verdict as plain data, with its sentence."""
        return {
            **asdict(self),
            "names": dict(self.names),
            "significant": self.significant,
            "sentence": self.sentence(),
        }

    # ------------------------------------------------------------------------------------- words

    def _comparison(self) -> str:
        """Continue the sentence after the best method's metric."""
        if self.gain is None:
            return "."
        averaged, gain = self._name(self.averaged), self._gain(self.gain)
        won = self.best == self.averaged
        if self.gain.bounds is None:
            why = _ONE_SEED if self.gain.count == 1 else _SAME_GAINS
            return f", {gain}. {why}" if won else f". {averaged} has {gain}. {why}"
        if not self.significant:
            hint = f" {_TWO_SEEDS}" if self.gain.count == 2 else ""
            return (
                f", but there is no significant difference: {gain}.{hint}"
                if won
                else f". There is no significant difference: {averaged} has {gain}.{hint}"
            )
        if won == (self.gain.mean > 0):
            return f", {gain}." if won else f". Averaging does not help: {averaged} has {gain}."
        other = self._name(self.base) if won else averaged
        return f". {other} is better there: {averaged} has {gain}."

    def _name(self, row: str | None) -> str:
        return self.names.get(row or "", row or "")

    def _value(self) -> str:
        mean = self.value.mean
        if is_percentage(self.metric):
            return f"{mean:.1f}% {'top-5 accuracy' if self.metric == 'top5' else self.metric}"
        return f"{self.metric} {mean:.{decimals(mean)}f}"

    def _gain(self, gain: SeedMean) -> str:
        numbers = (gain.mean, *(gain.bounds or ()))
        is_points = is_percentage(self.metric)
        digits, unit = (1, " points") if is_points else (decimals(self.value.mean), "")
        mean, *bounds = signed(numbers, digits)
        interval = f" (95% interval {bounds[0]} to {bounds[1]})" if bounds else ""
        amount = f"{mean}{unit}" if unit else f"a gain of {mean}"
        over = "against" if gain.mean < 0 else "over"
        return f"{amount} {over} {self._name(self.base)}{interval}"


# ------------------------------------------------------------------------------------- choosing


def verdicts(
    experiment: Experiment, results: Mapping[tuple[str, int], RunResult | None]
) -> list[Verdict]:
    """Return the answer for each task, in the order of the rows.

    A row with a failed or diverged run is never chosen. A task with no other row has no verdict.

    Args:
        experiment: Whose rows.
        results: By row and seed; None for a failed run. Runs that have not ended are left out.
    """
    found = (_verdict(experiment, group, results) for group in task_groups(experiment))
    return [verdict for verdict in found if verdict is not None]


def _verdict(
    experiment: Experiment,
    group: TaskGroup,
    results: Mapping[tuple[str, int], RunResult | None],
) -> Verdict | None:
    test = {row: _values(experiment, results, row, "test") for row in group.names}
    test = {row: by_seed for row, by_seed in test.items() if by_seed}
    if not test:
        return None
    validation = {row: _values(experiment, results, row, "validation") for row in test}
    chosen_on: Literal["validation", "test"] = "validation" if all(validation.values()) else "test"
    judged = validation if chosen_on == "validation" else test
    sign = 1 if experiment.mode_of(next(iter(test))) == "max" else -1
    shared = set.intersection(*(set(by_seed) for by_seed in judged.values()))

    def score(row: str) -> float:
        """Compare means over the seeds that all rows have, if there are any."""
        values = [value for seed, value in judged[row].items() if seed in shared or not shared]
        return sign * fmean(values)

    def choose(rows: Iterable[str]) -> str | None:
        return max(rows, key=score, default=None)

    base = choose(row for row in test if not _averages(experiment.recipes[row]))
    averaged = choose(row for row in test if _averages(experiment.recipes[row]))
    best = choose(test)  # the first of equal rows, as in the table
    assert best is not None
    value = SeedMean.of(test[best].values())
    assert value is not None
    gain = None
    if base is not None and averaged is not None:
        pairs = ((test[averaged][s], test[base][s]) for s in test[averaged] if s in test[base])
        gain = SeedMean.of(sign * (a - b) for a, b in pairs)
    means = {row: sign * fmean(by_seed.values()) for row, by_seed in test.items()}
    ended = sum(row in group.names for row, _ in results)
    return Verdict(
        group.title,
        experiment.metric_of(best),
        best,
        value,
        base,
        averaged,
        gain,
        names={row: group.names[row] for row in (averaged, base) if row is not None},
        chosen_on=chosen_on,
        missing=max(0, experiment.seeds * len(group.names) - ended),
        leads_test=means[best] >= max(means.values()),
    )


def _values(
    experiment: Experiment,
    results: Mapping[tuple[str, int], RunResult | None],
    row: str,
    split: str,
) -> dict[int, float]:
    """Return the metric in use by seed, or nothing if a run failed, diverged or lacks it."""
    metric = experiment.metric_of(row)
    found = {}
    for (label, seed), result in results.items():
        if label != row:
            continue
        value = None if result is None else result.metric(metric, result.used_point, split)
        if result is None or result.diverged or value is None:
            return {}
        found[seed] = value
    return found


def _averages(recipe: Recipe) -> bool:
    return recipe.average is not None or recipe.optimizer.name == "schedule-free"
