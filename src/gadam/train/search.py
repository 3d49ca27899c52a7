"""Tune the learning rate and the weight decay of a method on validation data.

The search of one method is a pure function: :func:`due` takes the scores so far and returns the
trials to run next. So a search that was killed continues where it was, and every method gets the
same number of trials and the same number of epochs:

1. *Sampling.* Trial 0 is the usual setting. The others are random: log-uniform, and stratified, so
   that each of n equal slices of the range has one trial. Methods with the same base optimizer get
   the same settings.
2. *Successive halving.* All sampled settings train for a fraction of the epochs, the best third of
   them for three times as many, up to the full number.
3. *Follow-up.* A best setting at the edge of what was tried is not accepted: the next trial goes
   beyond it. If the best setting is inside, the next trial is near it.

A score is a validation metric, or its negative if less is better. A trial that diverged scores
``-math.inf``.

Example:
    >>> plan = Plan(trials=6, epochs=12, seeds=3)
    >>> [(rung.trials, rung.epochs) for rung in plan.rungs]
    [(4, 4), (2, 12)]
    >>> scores = {}
    >>> while trials := due(plan, CENTERS["sgd"], scores):
    ...     scores |= {trial: -abs(math.log(trial.setting.lr / 0.05)) for trial in trials}
    >>> len({trial.number for trial in scores})
    6
    >>> 0.02 < tuned(plan, scores).setting.lr < 0.15
    True
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple, TypeAlias

from gadam.runs.recipe import Average, Optimizer, Recipe, Schedule
from gadam.train.experiments import in_proportion

__all__ = [
    "CENTERS",
    "METHODS",
    "TRIAL_SEED",
    "Comparison",
    "Edge",
    "Plan",
    "Run",
    "Rung",
    "Setting",
    "Trial",
    "Tuned",
    "due",
    "method_recipe",
    "recipe_of",
    "tuned",
]

TRIAL_SEED = 1000  # of all trials; the final runs have the seeds 0, 1, … and tune nothing
KEEP = 3  # a rung keeps the best third, for three times the epochs
MIN_EPOCHS = 4  # of a rung: with fewer, there is hardly a schedule and hardly an average

Axis: TypeAlias = Literal["lr", "weight_decay"]
AXES: tuple[Axis, Axis] = ("lr", "weight_decay")
_NAMES = {"lr": "learning rate", "weight_decay": "weight decay"}
REACH = {"lr": 1.0, "weight_decay": 1.5}  # decades on either side of the center
STEP = {"lr": 0.5, "weight_decay": 0.75}  # decades between a best setting and its extension


class Setting(NamedTuple):
    """What is tuned.

    Args:
        lr: The initial learning rate.
        weight_decay: The weight decay.
    """

    lr: float
    weight_decay: float


# The middle of the range of each base optimizer: its usual setting, and for PadamW its default.
CENTERS = {
    "sgd": Setting(0.1, 1e-3),
    "adamw": Setting(1e-3, 0.1),
    "padamw": Setting(0.3, 1e-3),
}


# The base optimizer of each method, and whether it averages.
METHODS: dict[str, tuple[Literal["sgd", "adamw", "padamw"], bool]] = {
    "SGD": ("sgd", False),
    "SWA": ("sgd", True),
    "AdamW": ("adamw", False),
    "Gadam": ("adamw", True),
    "PadamW": ("padamw", False),
    "GadamX": ("padamw", True),
}


class Trial(NamedTuple):
    """A setting to train for some epochs.

    Args:
        number: Counted from 0. A setting keeps its number from rung to rung.
        setting: What to train with.
        epochs: How long to train.
    """

    number: int
    setting: Setting
    epochs: int


class Rung(NamedTuple):
    """A round of successive halving.

    Args:
        trials: The number of settings.
        epochs: How long each is trained.
    """

    trials: int
    epochs: int


class Edge(NamedTuple):
    """A side on which a setting has no neighbor.

    Args:
        axis: "lr" or "weight_decay".
        direction: 1 if nothing higher was tried, -1 if nothing lower.
    """

    axis: Axis
    direction: Literal[1, -1]

    def __str__(self) -> str:
        return f"{'highest' if self.direction > 0 else 'lowest'} {_NAMES[self.axis]}"


@dataclass(frozen=True)
class Plan:
    """How much a comparison trains. It is the same for every method.

    Args:
        trials: Settings tried per method.
        epochs: Epochs of a full run.
        seeds: Final runs per method.
        seed: The seed of the sampled settings.
    """

    trials: int
    epochs: int
    seeds: int
    seed: int = 0

    @property
    def sampled(self) -> int:
        """The number of settings that are sampled. The others follow up on the best of them."""
        return self.trials - min(max(2, self.trials // 3), self.trials - 1)

    @property
    def rungs(self) -> tuple[Rung, ...]:
        """The rounds of the sampled settings. The last has the full number of epochs."""
        counts = [self.sampled]
        while counts[-1] >= KEEP and self.epochs / KEEP ** len(counts) >= MIN_EPOCHS:
            counts.append(math.ceil(counts[-1] / KEEP))
        shares = [KEEP ** (len(counts) - 1 - i) for i in range(len(counts))]
        return tuple(Rung(n, round(self.epochs / share)) for n, share in zip(counts, shares))

    @property
    def runs(self) -> int:
        """The number of runs per method: trials on all rungs, and final runs."""
        return sum(rung.trials for rung in self.rungs) + self.trials - self.sampled + self.seeds

    @property
    def total_epochs(self) -> int:
        """The number of epochs per method, over all of its runs."""
        tuning = sum(rung.trials * rung.epochs for rung in self.rungs)
        return tuning + (self.trials - self.sampled + self.seeds) * self.epochs


@dataclass(frozen=True)
class Tuned:
    """The outcome of a search.

    Args:
        trial: The best trial.
        score: Its score.
        edges: The sides on which its setting is still at the edge of what was tried.
    """

    trial: Trial
    score: float
    edges: tuple[Edge, ...]

    @property
    def setting(self) -> Setting:
        """The best setting."""
        return self.trial.setting

    @property
    def unclear(self) -> list[str]:
        """The edges in words. An axis with edges on both sides was hardly searched."""
        axes = [edge.axis for edge in self.edges]
        both = [_NAMES[axis] for axis in AXES if axes.count(axis) == 2]
        return [str(edge) for edge in self.edges if axes.count(edge.axis) == 1] + both


def due(plan: Plan, center: Setting, scores: Mapping[Trial, float]) -> list[Trial]:
    """Return the trials of a method to run next.

    Args:
        plan: How much to train.
        center: The method's usual setting.
        scores: The scores of the trials so far.

    Returns:
        The trials, which may run at the same time. None are left when the search is over.
    """
    alive = list(enumerate(_sample(plan, center)))
    for rung in plan.rungs:
        entrants = [Trial(number, setting, rung.epochs) for number, setting in alive[: rung.trials]]
        missing = [trial for trial in entrants if trial not in scores]
        if missing:
            return missing
        ranked = sorted(entrants, key=lambda trial: (-scores[trial], trial.number))
        alive = [(trial.number, trial.setting) for trial in ranked]
    for number in range(plan.sampled, plan.trials):
        before = {trial: score for trial, score in scores.items() if trial.number < number}
        trial = Trial(number, _follow_up(plan, number, before), plan.epochs)
        if trial not in scores:
            return [trial]
    return []


def tuned(plan: Plan, scores: Mapping[Trial, float]) -> Tuned:
    """Return the best setting of those that were trained for all epochs.

    Args:
        plan: How much was trained.
        scores: The scores of all trials of a method.
    """
    full = [trial for trial in scores if trial.epochs == plan.epochs]
    best = min(full, key=lambda trial: (-scores[trial], trial.number))
    tried = [trial.setting for trial in scores]
    return Tuned(best, scores[best], tuple(_edges(best.setting, tried)))


class Run(NamedTuple):
    """A run of a comparison: a trial, or a final run of the best one.

    Args:
        method: The method.
        trial: What is trained.
        seed: :data:`TRIAL_SEED`, or the seed of a final run.
    """

    method: str
    trial: Trial
    seed: int

    @property
    def is_final(self) -> bool:
        """True if the run counts in the result."""
        return self.seed != TRIAL_SEED


class Comparison:
    """The searches of several methods side by side, each followed by its final runs.

    Args:
        plan: How much to train.
        centers: The usual setting of each method.

    Attributes:
        scores: The scores of each method's trials so far.

    Example:
        >>> comparison = Comparison(Plan(2, 10, seeds=3), {"SGD": CENTERS["sgd"]})
        >>> (first,) = comparison.start()
        >>> (second,) = comparison.after(first, score=90.0)
        >>> [run.seed for run in comparison.after(second, score=89.0)]
        [0, 1, 2]
        >>> comparison.tuned("SGD").setting
        Setting(lr=0.1, weight_decay=0.001)
    """

    def __init__(self, plan: Plan, centers: Mapping[str, Setting]) -> None:
        self.plan, self.centers = plan, dict(centers)
        self.scores: dict[str, dict[Trial, float]] = {method: {} for method in centers}
        self._begun: dict[str, set[Trial]] = {method: set() for method in centers}

    def start(self) -> list[Run]:
        """Return the first runs, those of all methods in turn."""
        columns = [self._due(method) for method in self.centers]
        return [run for row in zip(*columns, strict=True) for run in row]

    def after(self, run: Run, score: float) -> list[Run]:
        """Return the runs that a result makes possible.

        Args:
            run: The run that ended.
            score: Its validation score.
        """
        if run.is_final:
            return []
        self.scores[run.method][run.trial] = score
        return self._due(run.method)

    def tuned(self, method: str) -> Tuned:
        """Return the best setting of a method whose search is over.

        Args:
            method: The method.
        """
        return tuned(self.plan, self.scores[method])

    def _due(self, method: str) -> list[Run]:
        trials = due(self.plan, self.centers[method], self.scores[method])
        if not trials:
            best = self.tuned(method).trial
            return [Run(method, best, seed) for seed in range(self.plan.seeds)]
        new = [trial for trial in trials if trial not in self._begun[method]]
        self._begun[method].update(new)
        return [Run(method, trial, TRIAL_SEED) for trial in new]


def method_recipe(task: Recipe, method: str) -> Recipe:
    """Return the recipe of a method for a task, with the method's usual setting.

    A base optimizer decays its learning rate to zero along a cosine, which is more common today
    than the paper's linear decay. A method that averages holds half of its rate from the middle of
    the run on, and averages from there.

    Args:
        task: A recipe with the model, the data, the epochs and the batch size.
        method: One of :data:`METHODS`.
    """
    optimizer, averages = METHODS[method]
    return replace(
        task,
        optimizer=Optimizer(optimizer, *CENTERS[optimizer]),
        schedule=Schedule("linear-ia" if averages else "cosine"),
        average=Average(task.epochs // 2) if averages else None,
    )


def recipe_of(recipe: Recipe, trial: Trial) -> Recipe:
    """Return the recipe of a trial. It never evaluates the test split.

    Args:
        recipe: The method's recipe, with all epochs.
        trial: The trial. With fewer epochs, the schedule and the average keep their proportions.
    """
    short = in_proportion(recipe, trial.epochs)
    lr, decay = trial.setting
    return replace(
        short,
        optimizer=replace(short.optimizer, lr=lr, weight_decay=decay),
        evaluate_every=trial.epochs,
        evaluate_on=("validation",),
        keep_iterates=0,
        blocks=0,
    )


def _sample(plan: Plan, center: Setting) -> list[Setting]:
    """Return the usual setting, and a Latin hypercube around it."""
    generator, slices = random.Random(plan.seed), plan.sampled - 1
    columns = []
    for axis in AXES:
        order = generator.sample(range(slices), slices)
        columns.append([(2 * (i + generator.random()) / slices - 1) * REACH[axis] for i in order])
    return [center, *(_moved(center, *offsets) for offsets in zip(*columns))]


def _follow_up(plan: Plan, number: int, scores: Mapping[Trial, float]) -> Setting:
    best = tuned(plan, scores)
    if best.score == -math.inf:  # all diverged
        lowest = min((trial.setting for trial in scores), key=lambda setting: setting.lr)
        return _moved(lowest, -2 * STEP["lr"], 0.0)
    if best.edges:
        axis, direction = best.edges[0]
        offsets = {name: direction * STEP[name] * (name == axis) for name in AXES}
    else:
        generator = random.Random(f"{plan.seed} {number}")
        offsets = {name: generator.uniform(-STEP[name], STEP[name]) / 2 for name in AXES}
    return _moved(best.setting, offsets["lr"], offsets["weight_decay"])


def _moved(setting: Setting, lr: float, weight_decay: float) -> Setting:
    """Move a setting by decades, and round it to three digits."""
    return Setting(
        float(f"{setting.lr * 10**lr:.3g}"),
        float(f"{setting.weight_decay * 10**weight_decay:.3g}"),
    )


def _edges(best: Setting, tried: Sequence[Setting]) -> list[Edge]:
    """Return the sides of a setting on which no trial is at least half a step away."""
    found = []
    for axis in AXES:
        distances = [math.log10(getattr(s, axis) / getattr(best, axis)) for s in tried]
        half = 0.49 * STEP[axis]  # rounding may shorten a step
        found += [Edge(axis, 1)] if max(distances) < half else []
        found += [Edge(axis, -1)] if min(distances) > -half else []
    return found
