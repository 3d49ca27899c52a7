"""The rows of a comparison: a method, what is read along its runs, and its name for readers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Literal

from benchmarks.evidence import methods, tuning
from benchmarks.evidence.harness import OWN, Record, Trial
from benchmarks.evidence.methods import Knobs
from benchmarks.evidence.tasks import Workload
from benchmarks.evidence.tuning import AVERAGE, Target

__all__ = [
    "BASES",
    "CHAMPIONS",
    "CONTENDERS",
    "EASED",
    "GADAM",
    "GADAMX",
    "INTERPOLATED",
    "MUON",
    "Contender",
    "Reading",
    "champions",
    "champions_by_base",
    "read",
    "value",
]

GADAM, GADAMX, MUON = "Gadam", "GadamX", "Muon, average"
INTERPOLATED = ("Gadam, interpolated", "GadamX, interpolated")
EASED = ("Gadam, eased rate", "GadamX, eased rate", "Muon, average, eased rate")
# The optimizers that a reader may have, and the bases whose iterates are theirs.
BASES = {
    "SGD": ("sgd",),
    "AdamW": ("adamw", "gadam-lookahead", "gadam-between"),
    "PadamW": ("padamw", "gadamx-between"),
    "Muon": ("muon",),
}
Family = Literal["average", "decayed", "other"]


@dataclass(frozen=True)
class Contender:
    """A row of a comparison.

    Args:
        label: Its name.
        method: The method that is trained.
        target: The schedule of the record and the point that is read.
        is_averaged: Whether the point is an average.
    """

    label: str
    method: str
    target: Target
    is_averaged: bool = True

    @property
    def recorded(self) -> str:
        """The method of the records that are read."""
        return f"{self.method.split()[0]} {self.target[0]}".strip()

    @property
    def is_tuned_separately(self) -> bool:
        """Whether final runs are at the best setting of this very point."""
        return self.target in tuning.targets(self.method)

    @property
    def family(self) -> Family:
        """What it is: an average at a rate that stays high, a decayed rate, or another method.

        A cosine or WSD with an average, Schedule-Free, and GPA are other methods.
        """
        if not self.is_averaged:
            return "decayed"
        stays_high = self.target[0] in ("held", "eased")
        is_ours = stays_high or self.method.split()[0] in methods.INTERPOLATED
        return "average" if is_ours else "other"


def _plain(label: str, method: str, schedule: str) -> Contender:
    return Contender(label, method, (schedule, OWN), is_averaged=False)


CONTENDERS = {
    one.label: one
    for one in (
        Contender(GADAMX, "padamw held", ("held", AVERAGE)),
        Contender("GadamX, last half", "padamw held", ("held", "half")),
        Contender("GadamX, last quarter", "padamw held", ("held", "tail 25%")),
        Contender(GADAM, "adamw held", ("held", AVERAGE)),
        Contender("Gadam, last half", "adamw held", ("held", "half")),
        Contender("Gadam, last quarter", "adamw held", ("held", "tail 25%")),
        Contender(EASED[0], "adamw eased", ("eased", AVERAGE)),
        Contender(EASED[1], "padamw eased", ("eased", AVERAGE)),
        Contender(EASED[2], "muon eased", ("eased", AVERAGE)),
        Contender("GadamAuto", "adamw held", ("held", "auto")),
        Contender("Gadam + Lookahead", "gadam-lookahead held", ("held", AVERAGE)),
        Contender("SWA", "sgd held", ("held", AVERAGE)),
        Contender("SWA, last half", "sgd held", ("held", "half")),
        Contender("AdamW, cosine, average", "adamw cosine", ("cosine", AVERAGE)),
        Contender("PadamW, cosine, average", "padamw cosine", ("cosine", AVERAGE)),
        Contender("SGD, cosine, average", "sgd cosine", ("cosine", AVERAGE)),
        Contender("Muon, cosine, average", "muon cosine", ("cosine", AVERAGE)),
        Contender("Muon, WSD, average", "muon annealed", ("annealed", AVERAGE)),
        Contender(MUON, "muon held", ("held", AVERAGE)),
        Contender("Schedule-Free AdamW", "schedule-free-adamw", ("", OWN)),
        Contender("Schedule-Free SGD", "schedule-free-sgd", ("", OWN)),
        Contender(INTERPOLATED[0], "gadam-between", ("", OWN)),
        Contender(INTERPOLATED[1], "gadamx-between", ("", OWN)),
        Contender("GPA-AdamW, cosine", "gpa cosine", ("cosine", OWN)),
        Contender("AdamW, constant rate, EMA", "adamw held", ("held", "ema 5%")),
        Contender("LAWA", "adamw held", ("held", "lawa")),
        Contender("BEMA", "adamw held", ("held", "bema")),
        Contender("Adam with L2, average", "adam-l2 held", ("held", AVERAGE)),
        _plain("AdamW, cosine", "adamw cosine", "cosine"),
        _plain("AdamW, WSD", "adamw held", "wsd"),
        _plain("AdamW, linear", "adamw linear", "linear"),
        _plain("PadamW, cosine", "padamw cosine", "cosine"),
        _plain("PadamW, WSD", "padamw held", "wsd"),
        _plain("SGD, cosine", "sgd cosine", "cosine"),
        _plain("SGD, WSD", "sgd held", "wsd"),
        _plain("Muon, cosine", "muon cosine", "cosine"),
        _plain("Muon, WSD", "muon held", "wsd"),
    )
}
# Averages at a rate that stays high: the best of them on validation data stands for all. Those with
# a fixed window are left out, because the others choose among windows.
CHAMPIONS = tuple(
    label
    for label, one in CONTENDERS.items()
    if one.family == "average" and one.target[1] in (AVERAGE, OWN)
)


@dataclass(frozen=True)
class Reading:
    """What the records say about a contender.

    Args:
        knobs: The setting that is best on validation data.
        point: The point that is read, chosen on validation data.
        validation: Its mean metric over all seeds of the setting.
        settings: How many settings were tried.
        is_tuned: Whether all settings are measured that will be tried.
        test: The test metric by final seed.
    """

    knobs: Knobs
    point: str
    validation: float
    settings: int
    is_tuned: bool
    test: dict[int, float]


def value(record: Record, point: str, metric: str) -> float | None:
    """Return the test metric of a point at the end of a run.

    An automatic average that never started is the iterate: that is what its user has.

    Args:
        record: The run.
        point: The point.
        metric: The metric.
    """
    found = record.test.get(point, record.test.get(OWN, {}) if point == "auto" else {})
    return found.get(metric)


def read(contender: Contender, workload: Workload, records: Sequence[Record]) -> Reading | None:
    """Choose by validation data, and read the test metrics of that choice.

    Seed 0 chooses the setting. Among several averages, the one with the best mean over all seeds of
    that setting is read: one seed alone would choose by chance. A point that is not tuned
    separately is read at the setting with final seeds that is best for it.

    Args:
        contender: The row.
        workload: The task.
        records: The records of the task.

    Returns:
        None without records.
    """
    mine = [record for record in records if record.trial.method == contender.recorded]
    tried = [record for record in mine if record.trial.seed == 0]
    candidates = tried
    if not contender.is_tuned_separately:
        final = {record.trial.knobs for record in mine if record.trial.seed > 0}
        candidates = [record for record in tried if record.trial.knobs in final]
    knobs = tuning.best(candidates, contender.method, contender.target, workload.mode)
    if knobs is None:
        return None
    chosen = [record for record in mine if record.trial.knobs == knobs]
    point = tuning.best_point(chosen, contender.target[1], workload.mode)
    if point is None:
        return None
    test = {}
    by_trial = {record.trial: record for record in mine}
    for seed in workload.seeds:
        record = by_trial.get(Trial(workload.name, contender.recorded, knobs, seed))
        number = None if record is None else value(record, point, workload.metric)
        if number is not None:
            test[seed] = number
    is_tuned = tuning.is_tuned(workload, contender.method, list(records))
    validation = fmean(record.final(point) for record in chosen)
    return Reading(knobs, point, validation, len(tried), is_tuned, test)


def champions(workload: Workload, readings: Mapping[str, Reading]) -> dict[str, str]:
    """Return the best average, decayed rate, and method other than averages, on validation data.

    Args:
        workload: The task.
        readings: What the records say about its contenders. Only those with all final seeds count.

    Returns:
        Labels by "average", "held" (an average that only watches, at a held rate), "decayed", and
        "rival". One without candidates is left out.
    """
    final = {
        label: reading.validation
        for label, reading in readings.items()
        if reading.is_tuned and len(reading.test) == len(workload.seeds)
    }
    candidates = {
        "average": [label for label in final if label in CHAMPIONS],
        "held": [label for label in CHAMPIONS if label in final and _only_watches(label)],
        "decayed": [label for label in final if CONTENDERS[label].family == "decayed"],
        "rival": [label for label in final if CONTENDERS[label].family != "average"],
    }
    choose = max if workload.mode == "max" else min
    return {
        role: choose(labels, key=final.__getitem__) for role, labels in candidates.items() if labels
    }


def champions_by_base(
    workload: Workload, readings: Mapping[str, Reading]
) -> dict[str, dict[str, str]]:
    """Return the :func:`champions` among the methods of each optimizer.

    Args:
        workload: The task.
        readings: What the records say about its contenders.

    Returns:
        Labels by the name of an optimizer and the role. One without both an average and a decayed
        rate is left out.
    """
    found = {}
    for base, members in BASES.items():
        own = {
            label: reading
            for label, reading in readings.items()
            if CONTENDERS[label].method.split()[0] in members
        }
        chosen = champions(workload, own)
        if {"average", "decayed"} <= chosen.keys():
            found[base] = chosen
    return found


def _only_watches(label: str) -> bool:
    return CONTENDERS[label].target[0] == "held"
