"""Default settings run where they are missing, and are compared with tuned ones."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from benchmarks.evidence.defaults import FRESH_SEEDS, POINT, SEEDS, SETTINGS, compare, pending
from benchmarks.evidence.harness import Record, Trial
from benchmarks.evidence.methods import FORMS, Knobs
from benchmarks.evidence.tasks import TASKS

from benchmarks.evidence import defaults, harness, tuning

IMAGES, TEXT = TASKS["fashion-clean"], TASKS["ptb-lstm-short"]
BEST = Knobs(1.0, 1e-3)


def record(trial: Trial, metric: float, name: str = "accuracy") -> Record:
    return Record(trial, 10, {POINT: [(10, metric, 1.0)]}, {POINT: {name: metric}})


def final(task: str, name: str = "accuracy") -> list[Record]:
    """Return the evidence's own records: the best setting of GadamX, with its final seeds."""
    trial = Trial(task, "padamw held", BEST, 0)
    return [record(replace(trial, seed=seed), 80.0 + seed, name) for seed in range(6)]


def test_only_missing_trials_run() -> None:
    known = final(IMAGES.name)
    trials = pending(IMAGES, known)
    fixed = [trial for trial in trials if trial.base in SETTINGS]
    assert len(fixed) == sum(map(len, SETTINGS.values())) * len(SEEDS) - len(SEEDS)  # BEST is known
    variants = [trial for trial in trials if trial.base in FORMS]
    assert {trial.knobs.lr for trial in variants} == {0.3, 1.0, 3.0}
    assert {trial.seed for trial in variants} == {0}
    # The best rate of a variant runs on fresh seeds, once all of its rates are measured.
    amsgrad = [trial for trial in variants if trial.base == FORMS[0]]
    known += [record(trial, trial.knobs.lr) for trial in amsgrad]
    next_ones = [trial for trial in pending(IMAGES, known) if trial.base == FORMS[0]]
    assert {trial.seed for trial in next_ones} == set(FRESH_SEEDS)
    assert {trial.knobs.lr for trial in next_ones} == {3.0}


@pytest.mark.parametrize("workload", [IMAGES, TEXT])
def test_gains_are_paired_by_seed(workload) -> None:
    name = workload.metric
    known = final(workload.name, name)
    better = {1: 1.0, 2: 2.0, 3: 3.0}
    for seed, gain in better.items():
        metric = 80.0 + seed + gain if name == "accuracy" else (80.0 + seed) * math.exp(-gain / 100)
        known.append(record(Trial(workload.name, f"{FORMS[0]} held", BEST, seed), metric, name))
    found = compare({workload.name: workload}, {workload.name: known})
    gain = found["variants"][FORMS[0]][workload.name]
    assert gain["mean"] == pytest.approx(2.0)
    assert gain["interval"] == pytest.approx([2 - 4.302653 / math.sqrt(3), 2 + 2.4841], abs=1e-3)
    assert gain["pairs"] == 3
    assert found["variants"][FORMS[1]] == {}


def test_settings_count_once_all_seeds_are_there() -> None:
    trial = Trial(IMAGES.name, "padamw held", BEST, 0)
    one = compare({IMAGES.name: IMAGES}, {IMAGES.name: [record(trial, 70.0)]})
    both = [record(trial, 70.0), record(replace(trial, seed=1), 72.0)]
    two = compare({IMAGES.name: IMAGES}, {IMAGES.name: both})
    index = SETTINGS["padamw"].index(BEST)
    assert one["settings"]["padamw"][index]["tasks"] == {}
    assert two["settings"]["padamw"][index]["tasks"] == {IMAGES.name: 71.0}


def test_only_branches_that_are_compared_are_trained(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, object] = {}

    def run(trial: Trial, **options: object) -> list[Record]:
        asked[trial.method] = options["with_branch"]
        return []

    monkeypatch.setattr(harness, "run", run)
    for method in ("padamw held", "muon held", "adam-l2 held", "adamw cosine"):
        tuning.train(Trial(IMAGES.name, method, BEST, 0))
    assert asked == {
        "padamw held": True,
        "muon held": True,
        "adam-l2 held": False,
        "adamw cosine": False,
    }
    asked.clear()
    defaults.train(Trial(IMAGES.name, "padamw held", BEST, 0))
    assert asked == {"padamw held": False}
