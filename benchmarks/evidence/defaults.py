"""The defaults of Gadam and GadamX against other values, with the average of ``for_budget``.

Two questions, on every task:

- **Rate and decay.** Which values are the best for somebody who tunes nothing? All are the same for
  all tasks, and run on the same seeds.
- **AMSGrad and the form of the update.** Does GadamX gain from AMSGrad, or from the paper's form?
  Each has its best of three rates on seed 0, around the best setting of GadamX. It then runs on
  fresh seeds, and is compared with GadamX at its own best setting.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean

from benchmarks.evidence import harness, tuning
from benchmarks.evidence.contenders import value
from benchmarks.evidence.harness import Record, Trial
from benchmarks.evidence.methods import FORMS, Knobs
from benchmarks.evidence.statistics import Paired
from benchmarks.evidence.tasks import Workload
from gadam.runs.files import Document

__all__ = ["POINT", "SETTINGS", "compare", "folder_in", "pending", "train"]

POINT = "tail 25%"  # the average of Averaging.for_budget(steps)
SETTINGS: dict[str, tuple[Knobs, ...]] = {
    "adamw": (Knobs(1e-3, 1e-2), Knobs(3e-3, 0.1)),
    "padamw": (Knobs(0.1, 2.5e-3), Knobs(0.3, 1e-3), Knobs(1.0, 1e-3)),
}
SEEDS = (0, 1)
FRESH_SEEDS = (1, 2, 3)


def folder_in(folder: Path) -> Path:
    """Return the folder of the records.

    Args:
        folder: The folder of all results.
    """
    return folder / "defaults"


def pending(workload: Workload, records: Sequence[Record]) -> list[Trial]:
    """Return the trials of a task that remain, as far as they are known.

    Args:
        workload: The task.
        records: Its records: those of the evidence, and those that are here.
    """
    done = {record.trial for record in records}
    return [trial for trial in _wanted(workload, records) if trial not in done]


def train(trial: Trial) -> list[Record]:
    """Run a trial, and measure only the average that is compared.

    Args:
        trial: The trial.
    """
    return harness.run(trial, averages=[POINT], with_branch=False)


def _wanted(workload: Workload, records: Sequence[Record]) -> Iterator[Trial]:
    for base, settings in SETTINGS.items():
        for knobs in settings:
            yield from (Trial(workload.name, f"{base} held", knobs, seed) for seed in SEEDS)
    center = _best(workload, records)
    if center is None:
        return
    rates = [replace(center, lr=tuning.level(center.lr, steps)) for steps in (0, 1, -1)]
    for form in FORMS:
        first = [Trial(workload.name, f"{form} held", knobs, 0) for knobs in rates]
        yield from first
        measured = [record for record in records if record.trial in first]
        if len(measured) == len(first):
            best = max(measured, key=lambda record: tuning.score(record, POINT, workload.mode))
            yield from (replace(best.trial, seed=seed) for seed in FRESH_SEEDS)


def _best(workload: Workload, records: Iterable[Record]) -> Knobs | None:
    """Return the best setting of GadamX, of those with final runs."""
    mine = [record for record in records if record.trial.method == "padamw held"]
    final = {one.trial.knobs for one in mine if one.trial.seed == FRESH_SEEDS[-1]}
    tuned = [record for record in mine if record.trial.knobs in final]
    return tuning.best(tuned, "padamw held", ("held", tuning.AVERAGE), workload.mode)


def compare(
    workloads: Mapping[str, Workload], records: Mapping[str, Sequence[Record]]
) -> dict[str, Document]:
    """Return the test metrics of all settings, and the gain of each variant over GadamX.

    Args:
        workloads: The tasks.
        records: The records of each task: those of the evidence, and those that are here.

    Returns:
        "settings": per base, a list with the knobs and the mean metric on each task.
        "variants": per variant and task, the knobs, and the gain with its interval, in points of
        accuracy or in percent of the perplexity; positive is better.
    """
    settings: Document = {
        base: [
            {
                "lr": knobs.lr,
                "weight_decay": knobs.weight_decay,
                "tasks": {
                    name: fmean(found.values())
                    for name, workload in workloads.items()
                    if len(found := _tested(workload, records[name], f"{base} held", knobs, SEEDS))
                    == len(SEEDS)
                },
            }
            for knobs in chosen
        ]
        for base, chosen in SETTINGS.items()
    }
    variants: Document = {form: {} for form in FORMS}
    for name, workload in workloads.items():
        center = _best(workload, records[name])
        if center is None:
            continue
        usual = _oriented(workload, records[name], "padamw held", center)
        for form in FORMS:
            method = f"{form} held"
            for knobs in {one.trial.knobs for one in records[name] if one.trial.method == method}:
                found = _oriented(workload, records[name], method, knobs)
                if (paired := Paired.of(found, usual)) is not None:
                    variants[form][name] = {
                        "lr": knobs.lr,
                        "weight_decay": knobs.weight_decay,
                        "mean": paired.mean,
                        "interval": list(paired.interval()),
                        "pairs": paired.count,
                    }
    return {"settings": settings, "variants": variants}


def _oriented(
    workload: Workload, records: Iterable[Record], method: str, knobs: Knobs
) -> dict[int, float]:
    """Return accuracies, or logarithms of perplexities in percent, negated, by fresh seed."""
    found = _tested(workload, records, method, knobs, FRESH_SEEDS)
    if workload.metric != "perplexity":
        return found
    return {seed: -100 * math.log(number) for seed, number in found.items()}


def _tested(
    workload: Workload,
    records: Iterable[Record],
    method: str,
    knobs: Knobs,
    seeds: Sequence[int],
) -> dict[int, float]:
    """Return the test metric of the average by seed."""
    found = {}
    for record in records:
        trial = record.trial
        if (trial.method, trial.knobs) == (method, knobs) and trial.seed in seeds:
            number = value(record, POINT, workload.metric)
            if number is not None:
                found[trial.seed] = number
    return found
