"""Grids grow until the best setting is inside, finals follow, and a queue resumes."""

from __future__ import annotations

import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from benchmarks.evidence.harness import OWN, Record, Trial
from benchmarks.evidence.methods import Knobs
from benchmarks.evidence.tasks import TASKS, Workload
from benchmarks.evidence.tuning import level, pending

from benchmarks.evidence import results, tuning

ROOT = Path(__file__).parents[3]


def workload(*methods: str) -> Workload:
    return replace(TASKS["cifar100n-5k"], methods=methods, extra=10)


def simulated(trial: Trial, peak: Knobs, points: tuple[str, ...] = (OWN, "half")) -> list[Record]:
    """Return records of a run whose metric falls with the distance from a peak."""
    far = abs(math.log10(trial.knobs.lr / peak.lr)) + abs(
        math.log10(trial.knobs.weight_decay / peak.weight_decay)
    )
    metric = 50 - 10 * far - 5 * abs(trial.knobs.beta - peak.beta)
    names = [trial.method]
    if trial.method.endswith("held"):
        names.append(f"{trial.base} wsd")
    return [
        Record(replace(trial, method=name), 10, {point: [(10, metric, 1.0)] for point in points})
        for name in names
    ]


def run_all(task: Workload, peak: Knobs) -> list[Record]:
    records: list[Record] = []
    while trials := pending(task, records):
        assert len(trials) == len(set(trials))
        records += simulated(trials[0], peak)
        assert len(records) < 200
    return records


def test_levels_are_half_decades() -> None:
    assert [level(0.3, steps) for steps in (-3, -2, -1, 0, 1, 2)] == [0.01, 0.03, 0.1, 0.3, 1, 3]
    assert [level(1e-5, steps) for steps in (-1, 0, 1)] == [3e-6, 1e-5, 3e-5]


def test_first_the_grid() -> None:
    trials = pending(workload("adamw cosine"), [])
    assert len(trials) == len(set(trials)) == 9
    assert trials[0].knobs == Knobs(*TASKS["cifar100n-5k"].centers["adamw"])
    assert {trial.seed for trial in trials} == {0}


@pytest.mark.parametrize("schedule", ["eased", "annealed"])
def test_these_schedules_start_where_the_held_rate_ended(schedule: str) -> None:
    method = f"adamw {schedule}"
    task = workload(method, "adamw held")
    assert {trial.method for trial in pending(task, [])} == {"adamw held"}
    lr, decay = task.centers["adamw"]
    peak = Knobs(level(lr, 2), level(decay, -1))
    records = run_all(task, peak)
    followed = [record.trial for record in records if record.trial.method == method]
    assert followed[0] == Trial(task.name, method, peak, 0)
    assert [trial.seed for trial in followed] == [0] * 9 + [*task.seeds]
    assert {trial.knobs for trial in followed if trial.seed} == {peak}


@pytest.mark.parametrize("method", ["adamw cosine", "adamw held", "schedule-free-adamw"])
def test_a_best_setting_at_an_edge_extends_the_grid(method: str) -> None:
    task = workload(method)
    lr, decay = task.centers[method.split()[0]]
    peak = Knobs(level(lr, 3), level(decay, -2))
    records = run_all(task, peak)
    tuned = {r.trial.knobs for r in records if r.trial.seed == 0 and r.trial.method == method}
    assert peak in tuned
    for steps in (-1, 1):
        assert replace(peak, lr=level(peak.lr, steps)) in tuned
        assert replace(peak, weight_decay=level(peak.weight_decay, steps)) in tuned
    final = [r.trial for r in records if r.trial.seed > 0 and r.trial.method == method]
    assert {trial.knobs for trial in final} == {peak}
    assert sorted(trial.seed for trial in final) == [1, 2, 3, 4, 5]


def test_a_second_optimum_is_explored() -> None:
    """A broad peak inside of the grid does not hide a higher one beyond its edge."""
    task = workload("adamw cosine")
    lr, decay = task.centers["adamw"]
    low, high = Knobs(level(lr, -1), decay), Knobs(level(lr, 2), level(decay, 2))
    records: list[Record] = []
    while trials := pending(task, records):
        (near,), (far,) = (simulated(trials[0], peak) for peak in (low, high))
        metrics = [40 + near.final(OWN) / 5, 41 + far.final(OWN) / 5]
        records.append(replace(near, validation={OWN: [(10, max(metrics), 1.0)]}))
    assert tuning.best(records, "adamw cosine", ("cosine", OWN), "max") == high


def test_an_endless_slope_stops() -> None:
    records = run_all(workload("sgd cosine"), Knobs(1e9, 1e9))
    assert len([r for r in records if r.trial.seed == 0]) == 9 + 10


def test_schedule_free_also_tries_its_own_knob() -> None:
    task = workload("schedule-free-adamw")
    records = run_all(task, Knobs(*task.centers["schedule-free-adamw"], beta=0.98))
    assert {r.trial.knobs.beta for r in records if r.trial.seed == 0} == {0.9, 0.95, 0.98}
    assert {r.trial.knobs.beta for r in records if r.trial.seed > 0} == {0.98}


def test_each_target_gets_its_own_best_setting() -> None:
    task = workload("adamw cosine")
    center = Knobs(*task.centers["adamw"])
    other = replace(center, lr=level(center.lr, 1))
    records: list[Record] = []
    while trials := pending(task, records):
        (own,) = simulated(trials[0], center, (OWN,))
        (average,) = simulated(trials[0], other, ("half",))
        records.append(replace(own, validation={**own.validation, **average.validation}))
    assert {r.trial.knobs for r in records if r.trial.seed > 0} == {center, other}


def test_a_diverged_run_is_never_the_best() -> None:
    task = workload("adamw cosine")
    records = [Record(trial, 10, diverged=3) for trial in pending(task, [])]
    good = records[4].trial
    records[4] = simulated(good, good.knobs)[0]
    assert tuning.best(records, "adamw cosine", ("cosine", OWN), "max") == good.knobs


def test_less_perplexity_is_better() -> None:
    trial = Trial("ptb-lstm-short", "adamw cosine", Knobs(0.1, 0.1), 0)
    better, worse = (Record(trial, 1, {OWN: [(1, value, 1.0)]}) for value in (80.0, 90.0))
    assert tuning.score(better, OWN, "min") > tuning.score(worse, OWN, "min")


def test_a_method_is_finished_before_the_next_one_begins() -> None:
    task = workload("adamw cosine", "sgd cosine")
    records: list[Record] = []
    while (trial := pending(task, records)[0]).method == "adamw cosine":
        records += simulated(trial, Knobs(*task.centers["adamw"]))
    assert {record.trial.seed for record in records} == {0, *task.seeds}
    assert trial.seed == 0


def test_methods_with_an_average_of_their_own_have_one_target() -> None:
    assert tuning.targets("gpa cosine") == (("cosine", OWN),)
    assert tuning.targets("between/plain/uniform cold") == (("cold", OWN),)
    assert tuning.targets("schedule-free-adamw") == (("", OWN),)
    task = workload("gpa cosine")
    records = run_all(task, Knobs(*task.centers["gpa"], beta=0.9984))
    assert {r.trial.knobs.beta for r in records if r.trial.seed == 0} == {0.9967, 0.9934, 0.9984}


def test_a_trial_that_ran_twice_counts_once(tmp_path: Path) -> None:
    trial = pending(workload("adamw cosine"), [])[0]
    for _ in range(2):
        results.append(simulated(trial, trial.knobs), tmp_path)
    assert len(results.read(trial.task, tmp_path)) == 1


def test_finished_runs_are_skipped_after_a_restart(tmp_path: Path) -> None:
    task = workload("adamw held")
    before = pending(task, [])
    results.append(simulated(before[0], before[0].knobs), tmp_path)
    results.append(simulated(before[1], before[0].knobs), tmp_path)
    again = results.read(task.name, tmp_path)
    assert [record.trial.method for record in again] == ["adamw held", "adamw wsd"] * 2
    assert pending(task, again) == before[2:]


def test_plan_and_status_print_the_queue(tmp_path: Path) -> None:
    trial = pending(TASKS["fashion-noisy"], [])[0]
    results.append(simulated(trial, trial.knobs), tmp_path)
    for command, expected in (("plan", "core-hours left"), ("status", "50.00 at Knobs")):
        done = subprocess.run(
            [sys.executable, "-m", "benchmarks.evidence", command, "--out", str(tmp_path)],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=True,
        )
        assert expected in done.stdout
