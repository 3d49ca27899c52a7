"""The best methods are fixed first, and then compared on seeds that have chosen nothing."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import scipy.stats
from benchmarks.evidence.confirmation import (
    SEEDS,
    Choice,
    choose,
    compare,
    folder_in,
    latest,
    pending,
    read_plan,
)
from benchmarks.evidence.contenders import Reading
from benchmarks.evidence.harness import Record, Trial
from benchmarks.evidence.methods import Knobs
from benchmarks.evidence.tasks import TASKS

from benchmarks.evidence import confirmation, results

KNOBS = Knobs(0.1, 0.01)
TASK = "ptb-lstm-short"  # less is better
CHOICES = [
    Choice(TASK, "average", "GadamX", KNOBS, "half"),
    Choice(TASK, "decayed", "PadamW, WSD", KNOBS, "own"),
    Choice(TASK, "rival", "Schedule-Free AdamW", replace(KNOBS, lr=1.0), "own"),
]


def _reading(validation: float, seeds: int = 5) -> Reading:
    test = dict.fromkeys(range(1, seeds + 1), 0.0)
    return Reading(KNOBS, "own", validation, 9, True, test)


def test_a_task_with_new_best_methods_gets_a_new_round(tmp_path: Path) -> None:
    other = "ptb-transformer-short"
    workloads = {TASK: TASKS[TASK], other: TASKS[other]}
    readings = {"GadamX": _reading(80.0), "Gadam": _reading(70.0, seeds=4)}
    readings |= {"PadamW, WSD": _reading(81.0), "Schedule-Free AdamW": _reading(79.0)}
    both = {TASK: readings, other: readings}
    assert choose(workloads, both, tmp_path) == [TASK, other]
    first = read_plan(tmp_path)
    assert {one.role: one.label for one in first if one.task == TASK} == {
        "average": "GadamX",
        "decayed": "PadamW, WSD",
        "rival": "Schedule-Free AdamW",
    }
    assert choose(workloads, both, tmp_path) == []

    both[TASK] = {**readings, "Muon, average": _reading(10.0)}
    assert choose(workloads, both, tmp_path) == [TASK]
    plan = read_plan(tmp_path)
    assert plan[: len(first)] == first  # nothing is overwritten
    assert choose(workloads, both, tmp_path) == []
    now = {(one.task, one.role): (one.label, one.round) for one in latest(plan)}
    assert now[TASK, "average"] == ("Muon, average", 2)
    assert now[TASK, "decayed"] == ("PadamW, WSD", 2)
    assert now[other, "average"] == ("GadamX", 1)
    trials = pending(plan, [])
    assert {one.method for one in trials if one.task == TASK} == {
        "muon held",
        "padamw held",
        "schedule-free-adamw",
    }


def test_choices_with_the_same_run_share_it() -> None:
    trials = pending(CHOICES, [])
    assert len(trials) == 2 * len(SEEDS)  # GadamX and the branch that decays are one run
    assert {trial.method for trial in trials} == {"padamw held", "schedule-free-adamw"}
    assert pending(CHOICES, trials[:3]) == trials[3:]


def test_only_the_points_of_the_plan_are_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(confirmation, "read_plan", lambda _: CHOICES)
    seen = []
    monkeypatch.setattr(confirmation.harness, "run", lambda _, averages: seen.append(averages))
    confirmation.train(Trial(TASK, "padamw held", KNOBS, 6), tmp_path)
    assert seen == [{"half", "own"}]


def _record(method: str, knobs: Knobs, seed: int, point: str, perplexity: float) -> Record:
    return Record(Trial(TASK, method, knobs, seed), 10, test={point: {"perplexity": perplexity}})


def test_differences_are_paired_and_pooled() -> None:
    ours = {6: 80.0, 7: 81.5, 8: 79.0, 9: 82.0, 10: 80.5}
    decayed = {6: 82.0, 7: 82.5, 8: 82.0, 9: 83.0, 10: 82.5}
    records = [_record("padamw held", KNOBS, seed, "half", v) for seed, v in ours.items()]
    records += [_record("padamw wsd", KNOBS, seed, "own", v) for seed, v in decayed.items()]
    records += [_record("padamw held", replace(KNOBS, lr=9.0), 6, "half", 1.0)]  # not in the plan
    found = compare(CHOICES, lambda _: records)
    one = found["tasks"][TASK]["decayed"]
    expected = scipy.stats.ttest_rel([*decayed.values()], [*ours.values()])
    assert one["mean"] == pytest.approx(1.8)
    assert one["interval"] == pytest.approx([*expected.confidence_interval()])
    assert "rival" not in found["tasks"][TASK]
    pooled = found["pooled"]["decayed"]
    assert pooled["p"] == pytest.approx(expected.pvalue)
    assert (pooled["in favor"], pooled["tasks"], pooled["positive"]) == (True, 1, 1)


def test_the_committed_records_are_those_of_the_plan() -> None:
    place = folder_in(results.FOLDER)
    choices = read_plan(place)
    assert {one.role for one in choices} == {"average", "decayed", "rival"}
    wanted = {one.trial(seed) for one in choices for seed in SEEDS}
    for task in {one.task for one in choices}:
        for record in results.read(task, place):
            trial = record.trial
            held = replace(trial, method=trial.method.replace(" wsd", " held"))
            assert held in wanted
        # The seeds are new: no other record has them.
        assert {record.trial.seed for record in results.read(task)}.isdisjoint(SEEDS)
    assert json.loads((place / "plan.json").read_text())
