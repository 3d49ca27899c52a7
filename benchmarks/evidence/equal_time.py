"""Ours at the steps that fit into a rival's time.

Test metrics are measured at the end of a run only. So this comparison reads validation metrics: the
rival's at its end, and ours on its curve, at the share of the steps that takes as long as the
rival's whole run. A held rate makes that possible: a shorter run is the beginning of a longer one,
up to its warm-up. The average is the one that has a curve and needs no start, an EMA.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from statistics import fmean

from benchmarks.evidence.contenders import CONTENDERS, GADAM, GADAMX, INTERPOLATED, MUON, Reading
from benchmarks.evidence.harness import OWN, Record
from benchmarks.evidence.statistics import Paired
from benchmarks.evidence.tasks import Workload
from gadam.runs.files import Document

__all__ = ["RIVALS", "compare", "on_curve"]

# The point that is read along the runs of each method of ours.
OURS = {
    **dict.fromkeys((GADAM, GADAMX, "SWA", MUON), "ema 5%"),
    **dict.fromkeys(INTERPOLATED, OWN),
}
# Rivals, and the rows of the cost table that they pay for.
RIVALS = {
    "AdamW, cosine": "AdamW",
    "AdamW, WSD": "AdamW",
    "AdamW, linear": "AdamW",
    "AdamW, cosine, average": "Gadam",
    "PadamW, cosine": "PadamW",
    "PadamW, WSD": "PadamW",
    "PadamW, cosine, average": "GadamX",
    "SGD, cosine": "SGD",
    "SGD, WSD": "SGD",
    "SGD, cosine, average": "SWA",
    "Muon, cosine": "Muon",
    "Muon, WSD": "Muon",
    "Muon, cosine, average": "Muon, average",
    "Muon, WSD, average": "Muon, average",
    "Schedule-Free AdamW": "Schedule-Free AdamW",
    "GPA-AdamW, cosine": "GPA-AdamW",
}


def compare(
    workload: Workload, records: Sequence[Record], readings: Mapping[str, Reading], cost: Document
) -> dict[str, Document]:
    """Compare ours with each rival at equal time, on one task.

    Args:
        workload: The task.
        records: Its records.
        readings: What was chosen on validation data, by the label of a contender.
        cost: The costs of the task, as :func:`benchmarks.evidence.costs.measure` returns them.

    Returns:
        Per method of ours and rival: the share of the steps, what the missing steps cost ours, and
        the gain over the rival with its 95% interval. In points of accuracy, or in percent of the
        perplexity; a positive gain is in favor of ours.
    """
    step = cost["step"]
    found: dict[str, Document] = {}
    for ours, point in OURS.items():
        for rival, paid in RIVALS.items():
            if ours not in readings or rival not in readings:
                continue
            share = min(1.0, step[paid] / step[ours])  # evaluations cost both the same
            mine = _at(share, ours, point, workload, records, readings[ours])
            whole = _at(1.0, ours, point, workload, records, readings[ours])
            theirs = _at(1.0, rival, readings[rival].point, workload, records, readings[rival])
            paired = Paired.of(mine, theirs)
            if paired is None:
                continue
            found.setdefault(ours, {})[rival] = {
                "share": share,
                "cost": fmean(whole[seed] - mine[seed] for seed in mine.keys() & whole.keys()),
                "mean": paired.mean,
                "interval": list(paired.interval()),
                "pairs": paired.count,
            }
    return found


def _at(
    share: float,
    label: str,
    point: str,
    workload: Workload,
    records: Sequence[Record],
    reading: Reading,
) -> dict[int, float]:
    """Return validation metrics by seed after a share of the steps. More is better."""
    found = {}
    for record in records:
        trial = record.trial
        if (
            trial.method == CONTENDERS[label].recorded
            and trial.knobs == reading.knobs
            and trial.seed in workload.seeds
        ):
            curve = [(step, number) for step, number, _ in record.validation.get(point, [])]
            number = on_curve(curve, share * record.steps)
            if number is not None:
                is_accuracy = workload.metric == "accuracy"
                found[trial.seed] = number if is_accuracy else -100 * math.log(number)
    return found


def on_curve(curve: Sequence[tuple[int, float | None]], step: float) -> float | None:
    """Return a metric between two evaluations, on the line through both.

    >>> on_curve([(100, 80.0), (120, 84.0)], 110)
    82.0

    Args:
        curve: Steps in ascending order, and their metrics.
        step: The step. It need not be a whole number.

    Returns:
        None before the first evaluation, after the last one, or beside one that is not finite.
    """
    index = bisect_left([at for at, _ in curve], step)
    if index == len(curve) or (index == 0 and curve[0][0] != step):
        return None
    after, high = curve[index]
    if after == step or high is None:
        return high
    before, low = curve[index - 1]
    return None if low is None else low + (high - low) * (step - before) / (after - before)
