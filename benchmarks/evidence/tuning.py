"""Which runs remain: grids of settings, their extension, and the final seeds.

Every method starts with a grid of learning rates and weight decays on seed 0. The best setting of a
grid counts only if all four of its neighbors are measured too. Otherwise they are next, so a grid
grows where its best setting is at an edge. The same goes for other settings that are nearly as good
and better than all of their neighbors: with noisy labels, a rate so low that little is memorized is
one optimum, and a high rate with a strong decay is another. Then each method's own knob is tried,
and the best settings run on fresh seeds. A method is finished before the next one begins.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from statistics import fmean

from benchmarks.evidence import harness
from benchmarks.evidence.harness import OWN, Record, Trial
from benchmarks.evidence.methods import OWN_KNOB, Knobs, averages_itself
from benchmarks.evidence.tasks import Workload

__all__ = [
    "AVERAGE",
    "FOLLOWS",
    "Target",
    "best",
    "best_point",
    "is_tuned",
    "level",
    "pending",
    "score",
    "targets",
    "train",
]

AVERAGE = "average"  # the best of all averages of a run
NEAR = 0.04  # of the best metric: how far behind another optimum may be to be explored
Target = tuple[str, str]  # the schedule of a record and a point, tuned on their own
# Grids that start at the best setting of a target along the held rate of the same base.
FOLLOWS: dict[str, Target] = {"eased": ("held", AVERAGE), "annealed": ("wsd", OWN)}


def targets(method: str) -> tuple[Target, ...]:
    """Return what is tuned separately along the runs of a method.

    Runs at a held rate have the paper's average, any average, and the branch that decays. Muon has
    no average of the paper's, and other bases have no branch that is compared.

    Args:
        method: A base and a schedule.
    """
    base, _, schedule = method.partition(" ")
    if averages_itself(base) or schedule == "linear":
        return ((schedule, OWN),)
    if schedule == "cosine":
        return (("cosine", OWN), ("cosine", AVERAGE))
    if schedule == "held" and base in ("sgd", "adamw", "padamw"):
        return (("held", "half"), ("held", AVERAGE), ("wsd", OWN))
    if method == "muon held":
        return (("held", AVERAGE), ("wsd", OWN))
    return ((schedule, AVERAGE),)


def train(trial: Trial) -> list[Record]:
    """Run a trial, with the branch that decays if it is compared.

    Args:
        trial: The trial.
    """
    schedules = [schedule for schedule, _ in targets(trial.method)]
    return harness.run(trial, with_branch="wsd" in schedules)


def level(center: float, steps: int) -> float:
    """Return a value of the series …, 0.1, 0.3, 1, 3, 10, ….

    Args:
        center: A value of the series.
        steps: How many values further.
    """
    exponent = math.floor(math.log10(center) + 1e-9)
    index = 2 * exponent + (center / 10**exponent > 2) + steps
    return float(f"{3 if index % 2 else 1}e{index // 2}")


def score(record: Record, point: str, mode: str) -> float:
    """Return the validation metric of a point at the end of a run. More is better.

    Args:
        record: The run.
        point: A point, or :data:`AVERAGE`.
        mode: "max" or "min".
    """
    chosen = best_point([record], point, mode)
    return -math.inf if chosen is None else _sign(mode) * record.final(chosen)


def best_point(records: Sequence[Record], point: str, mode: str) -> str | None:
    """Return the point itself, or for :data:`AVERAGE` the average with the best mean metric.

    Args:
        records: Runs at one setting.
        point: A point, or :data:`AVERAGE`.
        mode: "max" or "min".

    Returns:
        None if it has no metric at the end of each run.
    """
    points = dict.fromkeys(name for record in records for name in record.validation if name != OWN)
    names = points if point == AVERAGE else [point]
    found = {name: _sign(mode) * fmean(r.final(name) for r in records) for name in names}
    kept = {name: value for name, value in found.items() if not math.isnan(value)}
    return max(kept, key=kept.__getitem__, default=None)


def _sign(mode: str) -> int:
    return 1 if mode == "max" else -1


def best(records: Iterable[Record], method: str, target: Target, mode: str) -> Knobs | None:
    """Return the settings at which a target has the best validation metric on seed 0.

    Args:
        records: Records of one task.
        method: A base and a schedule.
        target: One of the method's :func:`targets`.
        mode: "max" or "min".
    """
    recorded = f"{method.split()[0]} {target[0]}".strip()
    scored = [
        (score(record, target[1], mode), -index, record.trial.knobs)
        for index, record in enumerate(records)
        if record.trial.method == recorded and record.trial.seed == 0
    ]
    return max(scored, key=lambda one: one[:2])[2] if scored else None


def pending(workload: Workload, records: list[Record]) -> list[Trial]:
    """Return the trials of a task that remain, as far as they are known from its records.

    Args:
        workload: The task.
        records: The records of the task.
    """
    done = {record.trial for record in records}
    left = []
    for method in workload.methods:
        base, _, schedule = method.partition(" ")
        if schedule in FOLLOWS and not is_tuned(workload, f"{base} held", records):
            continue
        tuning = _to_tune(workload, method, records)
        left += [Trial(workload.name, method, knobs, 0) for knobs in tuning]
        if not tuning:
            final = [
                Trial(workload.name, method, knobs, seed)
                for knobs in _chosen(workload, method, records)
                for seed in workload.seeds
            ]
            left += [trial for trial in final if trial not in done]
    return left


def is_tuned(workload: Workload, method: str, records: list[Record]) -> bool:
    """Return True if all settings of a method are measured that will be tried.

    Args:
        workload: The task.
        method: A base and a schedule.
        records: The records of the task.
    """
    return not _to_tune(workload, method, records)


def center(workload: Workload, method: str, records: list[Record]) -> tuple[float, float]:
    """Return the learning rate and the weight decay in the middle of a method's first grid.

    Schedules in :data:`FOLLOWS` start where the held rate of the same base ended.

    Args:
        workload: The task.
        method: A base and a schedule.
        records: The records of the task.
    """
    base, _, schedule = method.partition(" ")
    if schedule in FOLLOWS:
        found = best(records, f"{base} held", FOLLOWS[schedule], workload.mode)
        if found is not None:
            return found.lr, found.weight_decay
    return workload.centers[base]


def _chosen(workload: Workload, method: str, records: list[Record]) -> list[Knobs]:
    found = [best(records, method, target, workload.mode) for target in targets(method)]
    return list(dict.fromkeys(knobs for knobs in found if knobs is not None))


def _to_tune(workload: Workload, method: str, records: list[Record]) -> list[Knobs]:
    base = method.split()[0]
    tuned = [r for r in records if r.trial.seed == 0 and r.trial.base == base]
    done = {record.trial.knobs for record in tuned if record.trial.method == method}
    lr, decay = center(workload, method, records)
    default, *others = OWN_KNOB.get(base, (Knobs(0, 0).beta,))
    grid = [
        Knobs(level(lr, i), level(decay, j), default) for i in (0, 1, -1) for j in workload.decays
    ]
    missing = [knobs for knobs in grid if knobs not in done]
    if missing:
        return missing
    # The own knob comes last: until then, only its default counts.
    of_default = [record for record in tuned if record.trial.knobs.beta == default]
    chosen = _chosen(workload, method, of_default)
    promising = [*chosen, *_other_optima(workload, method, of_default)]
    around = dict.fromkeys(n for knobs in promising for n in _neighbors(knobs) if n not in done)
    extra = len([knobs for knobs in done if knobs not in grid and knobs.beta == default])
    if around and extra < workload.extra:
        return [*around][: workload.extra - extra]
    own = [replace(chosen[0], beta=beta) for beta in others]
    return [knobs for knobs in own if knobs not in done]


def _other_optima(workload: Workload, method: str, records: list[Record]) -> list[Knobs]:
    """Return settings near the best metric that no measured neighbor beats, the best first."""
    found: dict[Knobs, float] = {}
    for schedule, point in targets(method):
        recorded = f"{method.split()[0]} {schedule}".strip()
        scores = {
            record.trial.knobs: score(record, point, workload.mode)
            for record in records
            if record.trial.method == recorded
        }
        top = max(scores.values(), default=-math.inf)
        for knobs, value in scores.items():
            around = [scores[n] for n in _neighbors(knobs) if n in scores]
            if value >= max(around, default=value) and top - value <= NEAR * abs(top):
                found[knobs] = max(value - top, found.get(knobs, -math.inf))
    return sorted(found, key=found.__getitem__, reverse=True)


def _neighbors(knobs: Knobs) -> Iterator[Knobs]:
    for steps in (1, -1):
        yield replace(knobs, lr=level(knobs.lr, steps))
    for steps in (1, -1):
        yield replace(knobs, weight_decay=level(knobs.weight_decay, steps))


def expected_runs(workload: Workload, records: list[Record]) -> float:
    """Estimate how many runs remain, with the usual number of extensions.

    Args:
        workload: The task.
        records: The records of the task.
    """
    runs = 0.0
    for method in workload.methods:
        base = method.split()[0]
        usual = min(4, workload.extra) + len(OWN_KNOB.get(base, (0,))) - 1  # beyond the grid
        first = 3 * len(workload.decays)
        tuned = {r.trial.knobs for r in records if r.trial.method == method and r.trial.seed == 0}
        final = [r for r in records if r.trial.method == method and r.trial.seed > 0]
        known = len(_to_tune(workload, method, records))
        left = max(known, first + usual - len(tuned)) if known else 0
        settings = (
            min(2, len(targets(method))) if known else len(_chosen(workload, method, records))
        )
        left += max(0, len(workload.seeds) * settings - len(final))
        runs += left * (1.2 if method.endswith("held") else 1)  # with the branch that decays
    return runs


def summary(workload: Workload, records: list[Record]) -> Iterator[str]:
    """Describe the best setting of each target by its validation metric.

    Args:
        workload: The task.
        records: The records of the task.
    """
    mode = workload.mode
    for method in workload.methods:
        for schedule, point in targets(method):
            knobs = best(records, method, (schedule, point), mode)
            if knobs is None:
                continue
            recorded = f"{method.split()[0]} {schedule}".strip()
            (record,) = [r for r in records if r.trial == Trial(workload.name, recorded, knobs, 0)]
            value = abs(score(record, point, mode))
            which = best_point([record], point, mode)
            yield f"{recorded:20} {which or '':22} {value:8.2f} at {knobs}"
