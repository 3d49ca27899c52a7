"""Which average to use: every average of the final runs, compared with one reference each.

All averages watch the same runs, so their differences have no noise between runs. Runs at a held
rate compare with the paper's average, the mean of the last half. Runs with a cosine schedule or WSD
compare with their last iterate.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import fmean

from benchmarks.evidence import tuning
from benchmarks.evidence.contenders import value
from benchmarks.evidence.harness import OWN, Record
from benchmarks.evidence.methods import AVERAGES
from benchmarks.evidence.tasks import Workload
from gadam.runs.files import Document

__all__ = ["REFERENCES", "compare"]

# The reference of each schedule.
REFERENCES = {"held": "half", "cosine": OWN, "annealed": OWN}


def compare(
    workloads: Mapping[str, Workload], records: Mapping[str, Sequence[Record]]
) -> dict[str, Document]:
    """Return the mean difference of each average to the reference, per schedule.

    A difference is in points of accuracy or in percent of the perplexity, and positive if the
    average is better than the reference. The bases of a task count the same, and so do all tasks.

    Args:
        workloads: The tasks.
        records: The records of each task.

    Returns:
        Per schedule and point, the difference on each task, their mean, and the worst one.
    """
    found: dict[str, Document] = {}
    for schedule, reference in REFERENCES.items():
        rows: Document = {}
        for point in (OWN, *AVERAGES, "bema"):
            if point == reference:
                continue
            tasks = {
                name: difference
                for name, workload in workloads.items()
                if (difference := _difference(workload, records[name], schedule, point)) is not None
            }
            if tasks:
                worst = min(tasks.values())
                rows[point] = {"tasks": tasks, "mean": fmean(tasks.values()), "worst": worst}
        found[schedule] = rows
    return found


def _difference(
    workload: Workload, records: Sequence[Record], schedule: str, point: str
) -> float | None:
    """Return the mean over the bases of a task, at the settings that are best on validation data.

    Those are the ones of the paper's average and of the best average, or of the last iterate and of
    the best average.
    """
    gains = []
    for base in ("sgd", "adamw", "padamw", "muon"):
        method = f"{base} {schedule}"
        settings = {
            tuning.best(records, method, target, workload.mode)
            for target in tuning.targets(method)
            if target[0] == schedule
        }
        found = [
            _gain(record, point, REFERENCES[schedule], workload)
            for record in records
            if record.trial.method == method
            and record.trial.knobs in settings
            and record.trial.seed in workload.seeds
        ]
        known = [gain for gain in found if gain is not None]
        if known:
            gains.append(fmean(known))
    return fmean(gains) if gains else None


def _gain(record: Record, point: str, reference: str, workload: Workload) -> float | None:
    one = value(record, point, workload.metric)
    other = value(record, reference, workload.metric)
    if one is None or other is None:
        return None
    return 100 * math.log(other / one) if workload.metric == "perplexity" else one - other
