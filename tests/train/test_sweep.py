"""Sweeps: many runs at once, failures of some of them, interruption and resumption."""

from __future__ import annotations

import json
import math
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

import quick_processes
from compare_runs import assert_same_run
from gadam.runs import Average, Data, EpochRecord, Language, Optimizer, Recipe, RunResult
from gadam.runs.lines import read_epochs
from gadam.train.sweep import Job, Reportable, TrainingJob, available_cores, sweep
from sweep_events import Recorder

DATA = Data("fashion-mini", validation=100, examples=400, size=14, augment=False)
RECIPE = Recipe(
    "r",
    model="logistic",
    data=DATA,
    optimizer=Optimizer("adamw", 1e-2, 0.1),
    average=Average(1),
    epochs=3,
)


@pytest.fixture
def quick_workers() -> Iterator[None]:
    """Fork the workers of this test, where it does not matter how they start."""
    with quick_processes.for_sweeps():
        yield


def test_failures_are_reported_while_the_other_runs_continue(tmp_path):
    jobs = [
        TrainingJob("good", RECIPE, 0, tmp_path / "good"),
        TrainingJob("bad model", replace(RECIPE, model="vgg-minni"), 0, tmp_path / "bad"),
        TrainingJob(
            "no data", replace(RECIPE, data=Data("cifar10")), 0, tmp_path / "no", str(tmp_path)
        ),
        TrainingJob("good too", RECIPE, 1, tmp_path / "too"),
    ]
    recorder = Recorder()
    results = sweep(jobs, recorder, workers=2)
    assert [results[job] is not None for job in jobs] == [True, False, False, True]
    reasons = dict(recorder.of("failure"))
    assert "Did you mean 'vgg-mini'?" in reasons["bad model"]
    assert "gadam data cifar10" in reasons["no data"]
    assert "Traceback" not in reasons["no data"]
    assert [epoch for label, epoch in recorder.of("epoch") if label == "good"] == [1, 2, 3]
    again = Recorder()
    assert sweep(jobs, again, workers=1)[jobs[0]] == results[jobs[0]]
    assert not [event for event in again.of("epoch") if event[0].startswith("good")]


def test_a_worker_that_dies_fails_only_its_own_run(tmp_path):
    long = replace(RECIPE, epochs=100_000, evaluate_every=100_000)

    class Killer(Recorder):
        def on_progress(self, job: Job, done: float, update: Reportable | None) -> None:
            super().on_progress(job, done, update)
            if job.label == "long" and update is not None:
                for worker in multiprocessing.active_children():
                    assert worker.pid is not None
                    os.kill(worker.pid, signal.SIGKILL)

    jobs = [
        TrainingJob("long", long, 0, tmp_path / "long"),
        TrainingJob("short", RECIPE, 0, tmp_path / "short"),
    ]
    recorder = Killer()
    results = sweep(jobs, recorder, workers=1)
    assert results[jobs[0]] is None
    assert results[jobs[1]] is not None
    assert "its process died (exit code -9: out of memory?)" in recorder.of("failure")[0][1]


def test_a_worker_may_start_processes_that_decode_images(tmp_path):
    image = pytest.importorskip("PIL.Image")
    for split in ("train", "val"):
        for wnid in ("n01", "n02"):
            folder = tmp_path / "imagenet" / split / wnid
            folder.mkdir(parents=True)
            for i in range(3):
                image.new("RGB", (300, 280), (40 * i, 90, 20)).save(folder / f"{i}.jpg")
    recipe = replace(RECIPE, data=Data("imagenet", workers=1), epochs=1, average=None, batch_size=4)
    job = TrainingJob("folders", recipe, 0, tmp_path / "run", str(tmp_path))
    recorder = Recorder()
    assert sweep([job], recorder, workers=1)[job] is not None, recorder.of("failure")


@pytest.mark.usefixtures("quick_workers")
def test_a_listener_that_fails_ends_the_sweep(tmp_path):
    class Failing(Recorder):
        def on_finish(self, job: Job, result: Reportable) -> None:
            raise BrokenPipeError

    with pytest.raises(BrokenPipeError):
        sweep([TrainingJob("short", RECIPE, 0, tmp_path)], Failing(), workers=1)


@pytest.mark.usefixtures("quick_workers")
def test_a_damaged_checkpoint_is_reported(tmp_path):
    job = TrainingJob("short", RECIPE, 0, tmp_path)
    sweep([job], Recorder(), workers=1)
    (tmp_path / "result.json").unlink()
    for path in tmp_path.glob("checkpoint-*.pt"):
        path.write_bytes(b"")
    recorder = Recorder()
    assert sweep([job], recorder, workers=1)[job] is not None
    assert "is damaged. It was set aside" in recorder.of("notice")[0][1]


@pytest.mark.parametrize(
    ("record", "text"),
    [
        (EpochRecord(1, 0.1, 0.5), "epoch 1/3, training loss 0.500"),
        (
            EpochRecord(2, 0.1, 0.5, iterate={"test": {"accuracy": 80.0}}),
            "epoch 2/3, training loss 0.500, test accuracy: iterate 80.0%",
        ),
        (
            EpochRecord(
                3,
                0.1,
                0.5,
                iterate={"test": {"accuracy": 80.0}, "validation": {"accuracy": 75.0}},
                average={"test": {"accuracy": 82.0}, "validation": {"accuracy": 77.0}},
            ),
            "epoch 3/3, training loss 0.500, validation accuracy: iterate 75.0%, average 77.0%",
        ),
        (
            EpochRecord(3, 0.1, math.nan, iterate={"test": {"accuracy": math.nan}}),
            "epoch 3/3, training loss nan",
        ),
    ],
)
def test_an_epoch_as_text(record, text, tmp_path):
    assert TrainingJob("label", RECIPE, 0, tmp_path).describe(record) == text


def test_a_result_as_text(tmp_path):
    language = Language(bptt=20)
    recipe = replace(RECIPE, data=Data("toy-language", augment=False), language=language)
    result = RunResult("done", 3, {"test": {"perplexity": 99.96}}, seconds={"train": 7.6})
    job = TrainingJob("label", recipe, 0, tmp_path)
    assert job.outcome(result) == "done in 8 s, test perplexity: iterate 99.96"
    assert (job.total, job.event) == (3, "epoch")


def test_there_is_at_least_one_core():
    assert available_cores() >= 1


def test_no_jobs():
    assert sweep([], Recorder()) == {}


# ------------------------------------------------------------------------------- killed programs

COMMAND = [sys.executable, "-m", "gadam", "train", "compare-gadam", "--quiet"]
SMALL = ["epochs=12", "examples=1900", "average.start=5", "average.every=3", "data.size=8"]
SETTINGS = [word for setting in SMALL for word in ("--set", setting)]


def start(folder: Path, *arguments: str, **environment: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*COMMAND, *SETTINGS, "--out", str(folder), *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "GADAM_CHECKPOINT_SECONDS": "0", **environment},
        start_new_session=True,
        # A shell that runs the tests in the background makes them and their children ignore Ctrl-C.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )


def wait_for_epochs(folder: Path, count: int, process: subprocess.Popen[str]) -> None:
    record = folder / "compare-gadam-0" / "epochs.jsonl"
    while process.poll() is None:
        if record.exists() and record.read_text().count("\n") >= count:
            return
        time.sleep(0.05)


def test_ctrl_c_stops_cleanly_and_the_same_command_resumes(tmp_path):
    longer = ("--set", "epochs=80", "--set", "evaluate_every=40")
    process = start(tmp_path, *longer)
    wait_for_epochs(tmp_path, 2, process)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "Interrupted. Rerun the same command to resume." in errors
    assert "Traceback" not in errors
    process = start(tmp_path, *longer)
    output, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    assert "Gadam" in output
    result = json.loads((tmp_path / "compare-gadam-0" / "result.json").read_text())
    assert result["epochs"] == 80


def test_a_second_command_cannot_change_a_running_run(tmp_path):
    """The second command is refused, and the record never says that its recipe was trained."""
    header = tmp_path / "compare-gadam-0" / "run.json"
    first = start(tmp_path, "--set", "epochs=1000000", "--set", "lr=0.003")
    try:
        while not header.exists() and first.poll() is None:
            time.sleep(0.01)
        before = header.read_bytes()
        second = start(tmp_path, "--set", "epochs=1000000", "--set", "lr=0.5")
        _, errors = second.communicate(timeout=120)
        assert second.returncode != 0
        assert "Another process is using" in errors or "holds a run of another recipe" in errors
        assert "Traceback" not in errors
        assert header.read_bytes() == before
    finally:
        first.send_signal(signal.SIGINT)
        first.communicate(timeout=120)
    assert read_epochs(header.with_name("epochs.jsonl"))
    third = start(tmp_path, "--set", "epochs=1000000", "--set", "lr=0.5")
    _, errors = third.communicate(timeout=120)
    assert third.returncode == 2
    assert "holds a run of another recipe (optimizer.lr: 0.003 → 0.5)" in errors


@pytest.mark.slow
def test_a_run_killed_at_ten_random_moments_ends_with_the_same_bits(tmp_path):
    whole, torn = tmp_path / "whole", tmp_path / "torn"
    undisturbed = start(whole)
    began = time.monotonic()
    assert undisturbed.wait() == 0
    duration = time.monotonic() - began
    undisturbed.communicate()
    moments = random.Random(0)
    killed = 0
    for _ in range(10):
        process = start(torn)
        time.sleep(moments.uniform(0.3, 0.9) * duration)
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            killed += 1
        process.communicate()
    last = start(torn)
    _, errors = last.communicate()
    assert last.returncode == 0, errors
    assert killed > 0
    assert_same_run(whole / "compare-gadam-0", torn / "compare-gadam-0")


def test_jobs_may_lead_to_other_jobs(tmp_path):
    def then(job: TrainingJob, result: RunResult | None) -> list[TrainingJob]:
        assert (result is None) == (job.label == "bad")
        following = {"first": ("bad", "second"), "bad": ("third",)}.get(job.label, ())
        return [jobs[label] for label in following]

    short = replace(RECIPE, epochs=1, average=None)
    bad = replace(short, model="vgg-minni")
    jobs = {
        label: TrainingJob(label, bad if label == "bad" else short, 0, tmp_path / label)
        for label in ("first", "bad", "second", "third")
    }
    recorder = Recorder()
    results = sweep([jobs["first"]], recorder, workers=2, then=then)
    assert {job.label: result is not None for job, result in results.items()} == {
        "first": True,
        "bad": False,
        "second": True,
        "third": True,
    }
