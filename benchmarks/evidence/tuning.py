"""Which runs remain: grids of settings, their extension, and the final seeds.

Every method starts with a 3x3 grid of learning rates and weight decays on seed 0. The best setting
of a grid counts only if all four of its neighbors are measured too. Otherwise they are next, so a
grid grows where its best setting is at an edge. Then each method's own knob is tried, and the best
settings run on fresh seeds.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import replace

from benchmarks.evidence.harness import OWN, Record, Trial
from benchmarks.evidence.methods import Knobs
from benchmarks.evidence.tasks import Workload

__all__ = ["METHODS", "SEEDS", "TARGETS", "best", "level", "methods_of", "pending", "score"]

SEEDS = (1, 2, 3, 4, 5)  # of the final runs; seed 0 tunes
MAX_EXTRA = 10  # settings beyond the first grid
AVERAGE = "average"  # the best of all averages of a run

METHODS = (
    "adamw cosine",
    "schedule-free-adamw",
    "padamw held",
    "adamw held",
    "sgd cosine",
    "padamw cosine",
    "sgd held",
    "muon cosine",
    "schedule-free-sgd",
    "muon held",
)
DEFAULT_BETA = Knobs(0, 0).beta
BETAS = (0.95, 0.98)  # the own knob of Schedule-Free, after its default

# Per schedule, the points that are each tuned on their own: the schedule of the record and the
# point. Runs at a held rate have the paper's average, any average, and the branch that decays.
TARGETS: dict[str, tuple[tuple[str, str], ...]] = {
    "cosine": (("cosine", OWN), ("cosine", AVERAGE)),
    "linear": (("linear", OWN), ("linear", AVERAGE)),
    "held": (("held", "half"), ("held", AVERAGE), ("wsd", OWN)),
    "": (("", OWN),),
}


def methods_of(workload: Workload) -> tuple[str, ...]:
    """Return the methods that are trained on a task.

    Args:
        workload: The task.
    """
    return METHODS if workload.methods is None else workload.methods


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
    points = [name for name in record.validation if name != OWN] if point == AVERAGE else [point]
    sign = 1 if mode == "max" else -1
    found = [sign * record.final(name) for name in points]
    return max((value for value in found if not math.isnan(value)), default=-math.inf)


def best(
    records: Iterable[Record], method: str, target: tuple[str, str], mode: str
) -> Knobs | None:
    """Return the settings at which a target has the best validation metric on seed 0.

    Args:
        records: Records of one task.
        method: One of :data:`METHODS`.
        target: One of the method's :data:`TARGETS`.
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
    tuning = [
        Trial(workload.name, method, knobs, 0)
        for method in methods_of(workload)
        for knobs in _to_tune(workload, method, records)
    ]
    if tuning:
        return tuning
    done = {record.trial for record in records}
    final = [
        Trial(workload.name, method, knobs, seed)
        for method in methods_of(workload)
        for knobs in _chosen(workload, method, records)
        for seed in SEEDS
    ]
    return [trial for trial in final if trial not in done]


def _targets(method: str) -> tuple[tuple[str, str], ...]:
    return TARGETS[method.split()[1] if " " in method else ""]


def _mode(workload: Workload) -> str:
    return "max" if workload.recipe.language is None else "min"


def _chosen(workload: Workload, method: str, records: list[Record]) -> list[Knobs]:
    found = [best(records, method, target, _mode(workload)) for target in _targets(method)]
    return list(dict.fromkeys(knobs for knobs in found if knobs is not None))


def _to_tune(workload: Workload, method: str, records: list[Record]) -> list[Knobs]:
    tuned = [
        record
        for record in records
        if record.trial.seed == 0 and record.trial.base == method.split()[0]
    ]
    done = {record.trial.knobs for record in tuned if record.trial.method == method}
    lr, decay = workload.centers[method.split()[0]]
    grid = [Knobs(level(lr, i), level(decay, j)) for i in (0, 1, -1) for j in (0, 1, -1)]
    missing = [knobs for knobs in grid if knobs not in done]
    if missing:
        return missing
    # The own knob comes last: until then, only its default counts.
    default = [record for record in tuned if record.trial.knobs.beta == DEFAULT_BETA]
    chosen = _chosen(workload, method, default)
    around = dict.fromkeys(n for knobs in chosen for n in _neighbors(knobs) if n not in done)
    extra = len([knobs for knobs in done if knobs not in grid and knobs.beta == DEFAULT_BETA])
    if around and extra < MAX_EXTRA:
        return [*around][: MAX_EXTRA - extra]
    betas = BETAS if method.startswith("schedule-free") else ()
    own = [replace(chosen[0], beta=beta) for beta in betas]
    return [knobs for knobs in own if knobs not in done]


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
    usual = 5  # settings beyond the first grid
    settings = 2  # distinct settings on final seeds
    runs = 0.0
    for method in methods_of(workload):
        tuned = {r.trial.knobs for r in records if r.trial.method == method and r.trial.seed == 0}
        final = [r for r in records if r.trial.method == method and r.trial.seed > 0]
        known = len(_to_tune(workload, method, records))
        left = max(known, 9 + usual - len(tuned)) if known else 0
        chosen = len(_chosen(workload, method, records)) if not known else settings
        left += max(0, len(SEEDS) * chosen - len(final))
        runs += left * (1.2 if method.endswith("held") else 1)  # with the branch that decays
    return runs


def summary(workload: Workload, records: list[Record]) -> Iterator[str]:
    """Describe the best setting of each target by its validation metric.

    Args:
        workload: The task.
        records: The records of the task.
    """
    mode = _mode(workload)
    for method in methods_of(workload):
        for schedule, point in _targets(method):
            knobs = best(records, method, (schedule, point), mode)
            if knobs is None:
                continue
            recorded = f"{method.split()[0]} {schedule}".strip()
            (record,) = [r for r in records if r.trial == Trial(workload.name, recorded, knobs, 0)]
            value = abs(score(record, point, mode))
            names = [n for n in record.validation if point == AVERAGE and n != OWN]
            which = next((n for n in names if abs(record.final(n)) == value), point)
            yield f"{recorded:20} {which:22} {value:8.2f} at {knobs}"
