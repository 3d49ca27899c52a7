"""A run is deterministic, averages do not interfere, and a branch equals a run of its own."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from pathlib import Path

import benchmarks.evidence.__main__ as main
import pytest
import torch
from benchmarks.evidence.harness import OWN, Record, Trial
from benchmarks.evidence.methods import AVERAGES, Knobs
from benchmarks.evidence.tasks import TASKS, Workload

from benchmarks.evidence import harness, methods, results
from gadam.runs.recipe import Data, Language, Recipe

IMAGES = Workload(
    Recipe(
        "tiny",
        model="vgg-mini-narrow",
        data=Data("fashion-mini", validation=40, examples=200, size=8, label_noise=0.3, pad=1),
        epochs=4,
        batch_size=32,
    ),
    title="Tiny images",
    centers=TASKS["cifar100n-5k"].centers,
    minutes=0.1,
    methods=(),
    refresh=2,
    test=50,
)
TEXT = Workload(
    Recipe(
        "tiny-text",
        model="awd-lstm-mini",
        data=Data("toy-language", examples=1000, augment=False),
        language=Language(bptt=20),
        epochs=2,
        batch_size=10,
        clip_grad_norm=0.25,
    ),
    title="Tiny text",
    centers=TASKS["ptb-lstm-short"].centers,
    minutes=0.1,
    methods=(),
)
KNOBS = {
    "sgd": Knobs(0.1, 1e-3),
    "adamw": Knobs(3e-3, 0.1),
    "padamw": Knobs(0.3, 1e-2),
    "muon": Knobs(3e-3, 0.1),
    "schedule-free-adamw": Knobs(1e-2, 0.1),
    "schedule-free-sgd": Knobs(1.0, 1e-3),
    "gpa": Knobs(3e-3, 0.1, 0.99),
    "adam-l2": Knobs(3e-3, 1e-3),
    "gadam-lookahead": Knobs(3e-3, 0.1),
    "between/plain/uniform": Knobs(1e-2, 0.1),
}


def run(
    method: str,
    workload: Workload = IMAGES,
    seed: int = 0,
    averages: Collection[str] = (*AVERAGES, "bema"),
) -> list[Record]:
    trial = Trial(workload.name, method, KNOBS[method.split()[0]], seed)
    return harness.run(trial, workload, averages)


def without_times(record: Record) -> Record:
    return replace(record, seconds={})


@pytest.fixture
def few_evaluations(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(harness, "EVALUATIONS", 4)


@pytest.mark.parametrize(
    "method",
    [
        *("sgd cosine", "adamw held", "padamw linear", "muon cosine"),
        *("schedule-free-adamw", "gpa cosine", "between/plain/uniform cold"),
        *("gadam-lookahead held", "adam-l2 held"),
    ],
)
@pytest.mark.usefixtures("few_evaluations")
def test_runs_are_deterministic(method: str) -> None:
    first, second = ([without_times(record) for record in run(method)] for _ in range(2))
    assert first == second
    record = first[0]
    assert record.diverged is None
    assert record.steps == 20
    assert len(record.validation[OWN]) == 4
    assert record.test[OWN]["accuracy"] is not None
    if methods.averages_itself(record.trial.base):
        assert record.validation.keys() == record.test.keys() == {OWN}
    else:
        assert record.validation.keys() == record.test.keys()
        assert {OWN, "bema", *AVERAGES} - {"auto"} <= record.validation.keys()
    assert without_times(run(method, seed=1)[0]).validation != record.validation


@pytest.mark.usefixtures("few_evaluations")
def test_language_models_run() -> None:
    held, decayed = run("adamw held", TEXT)
    assert held.final("half") > 0
    assert decayed.trial.method == "adamw wsd"


@pytest.mark.usefixtures("few_evaluations")
def test_averages_do_not_change_the_run() -> None:
    (alone,), (watched,) = run("padamw cosine", averages=()), run("padamw cosine")
    assert alone.validation[OWN] == watched.validation[OWN]
    assert alone.test[OWN] == watched.test[OWN]


@pytest.mark.usefixtures("few_evaluations")
def test_an_average_does_not_depend_on_the_others() -> None:
    together = run("adamw cosine")[0]
    for name in ("tail 10%", "half, paper's stride", "ema 0.99", "lawa", "auto", "bema"):
        alone = run("adamw cosine", averages=[name])[0]
        assert alone.test.keys() <= {OWN, name}
        assert alone.validation.get(name) == together.validation.get(name), name
        assert alone.test.get(name) == together.test.get(name), name


@pytest.mark.usefixtures("few_evaluations")
def test_the_branch_of_a_held_run_equals_a_run_of_its_own() -> None:
    held, branch = run("adamw held")
    (own,) = run("adamw wsd")
    assert without_times(branch) == without_times(own)
    assert branch.seconds.keys() == own.seconds.keys()
    assert held.validation[OWN][:3] == branch.validation[OWN][:3]
    assert held.validation[OWN][3] != branch.validation[OWN][3]
    (annealed,) = run("adamw annealed")  # the same with averages
    assert annealed.validation[OWN] == branch.validation[OWN]
    assert annealed.test[OWN] == branch.test[OWN]
    assert {"half", "ema 5%"} <= annealed.test.keys()


@pytest.mark.usefixtures("few_evaluations")
def test_a_diverged_run_is_recorded() -> None:
    trial = Trial("tiny", "sgd held", Knobs(1e30, 0.0), 0)
    for record in harness.run(trial, IMAGES):
        assert record.diverged is not None
        assert record.final(OWN) != record.final(OWN)  # NaN
        assert without_times(Record.from_json(record.to_json())) == without_times(record)


@pytest.mark.usefixtures("few_evaluations")
def test_a_run_that_learns_nothing_ends_early(monkeypatch: pytest.MonkeyPatch) -> None:
    trial = Trial("tiny", "adamw cosine", Knobs(3e-3, 0.0), 0)
    monkeypatch.setattr(methods, "rate_factor", lambda *_: -1.0)  # ascend
    (record,) = harness.run(trial, IMAGES)
    assert record.diverged == 10
    assert [step for step, *_ in record.validation[OWN]] == [5]
    monkeypatch.undo()
    (record,) = harness.run(trial, IMAGES)
    assert record.diverged is None


def test_records_survive_json() -> None:
    measured: list[tuple[int, float | None, float | None]] = [(1, 2.0, None)]
    record = Record(Trial("t", "adamw cosine", Knobs(0.1, 0.0), 3), 1, {OWN: measured})
    again = Record.from_json(record.to_json())
    assert again.trial == record.trial
    assert again.final(OWN) == 2.0
    assert torch.tensor(again.final("half")).isnan()


def test_every_task_has_a_center_for_each_base() -> None:
    for workload in TASKS.values():
        assert {method.split()[0] for method in workload.methods} <= set(workload.centers)
        assert len(set(workload.methods)) == len(workload.methods)


@pytest.mark.usefixtures("few_evaluations")
def test_any_row_can_be_verified(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(harness, "TASKS", {"tiny": IMAGES})
    for method in ("adamw held", "schedule-free-adamw"):
        results.append(run(method), tmp_path)
    main.verify([IMAGES], tmp_path, [2, 3])  # the branch of the held run, and Schedule-Free
    assert capsys.readouterr().out.count(": equal; made on ") == 2
    with pytest.raises(SystemExit, match="tiny has no row 4"):
        main.verify([IMAGES], tmp_path, [4])
    file = results.path("tiny", tmp_path)
    first, *others = file.read_text().splitlines()
    changed = Record.from_json(first)
    changed.test[OWN]["accuracy"] = 99.0
    file.write_text("\n".join([changed.to_json(), *others]) + "\n")
    with pytest.raises(SystemExit, match="Rows that differ: 1"):
        main.verify([IMAGES], tmp_path, [1])
