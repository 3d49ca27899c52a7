"""Many runs at once, and what may go wrong with some of them."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from test_loop import assert_same_run

from gadam.train import sweep as module
from gadam.train.recipe import Average, Data, Optimizer, Recipe
from gadam.train.screen import Quiet
from gadam.train.sweep import Job, Work, sweep

DATA = Data("fashion-mini", validation=100, examples=400, size=14, augment=False)
RECIPE = Recipe(
    "r",
    model="logistic",
    data=DATA,
    optimizer=Optimizer("adamw", 1e-2, 0.1),
    average=Average(1),
    epochs=3,
)


class Heard(Quiet):
    def __init__(self) -> None:
        self.events: list[tuple[Any, ...]] = []

    def started(self, job: Work) -> None:
        self.events.append(("started", job.label))

    def went_on(self, job: Work, epochs: float, line: dict[str, Any] | None) -> None:
        if line is not None:
            self.events.append(("epoch", job.label, line["epoch"]))

    def noticed(self, job: Work, sentence: str) -> None:
        self.events.append(("noticed", job.label, sentence))

    def finished(self, job: Work, result: dict[str, Any]) -> None:
        self.events.append(("finished", job.label))

    def failed(self, job: Work, reason: str) -> None:
        self.events.append(("failed", job.label, reason))

    def of(self, kind: str) -> list[tuple[Any, ...]]:
        return [event[1:] for event in self.events if event[0] == kind]


def test_one_failure_is_reported_while_the_rest_go_on(tmp_path):
    jobs = [
        Job("good", RECIPE, 0, tmp_path / "good"),
        Job("bad model", replace(RECIPE, model="vgg-minni"), 0, tmp_path / "bad"),
        Job("no data", replace(RECIPE, data=Data("cifar10")), 0, tmp_path / "no", str(tmp_path)),
        Job("good too", RECIPE, 1, tmp_path / "too"),
    ]
    heard = Heard()
    results = sweep(jobs, heard, workers=2)
    assert [results[job] is not None for job in jobs] == [True, False, False, True]
    reasons = dict(heard.of("failed"))
    assert "did you mean" in reasons["bad model"]
    assert "gadam data cifar10" in reasons["no data"]
    assert "Traceback" not in reasons["no data"]
    assert [epoch for label, epoch in heard.of("epoch") if label == "good"] == [1, 2, 3]
    again = Heard()
    assert sweep(jobs, again, workers=1)[jobs[0]] == results[jobs[0]]
    assert not [event for event in again.of("epoch") if event[0].startswith("good")]


def test_a_worker_that_dies_takes_only_its_run_with_it(tmp_path):
    long = replace(RECIPE, epochs=100_000, evaluate_every=100_000)

    class Killer(Heard):
        def went_on(self, job: Work, epochs: float, line: dict[str, Any] | None) -> None:
            super().went_on(job, epochs, line)
            if job.label == "long" and line is not None:
                for worker in module.multiprocessing.active_children():
                    os.kill(worker.pid or 0, signal.SIGKILL)

    jobs = [Job("long", long, 0, tmp_path / "long"), Job("short", RECIPE, 0, tmp_path / "short")]
    heard = Killer()
    results = sweep(jobs, heard, workers=1)
    assert results[jobs[0]] is None
    assert results[jobs[1]] is not None
    assert "died" in heard.of("failed")[0][1]


def test_pictures_are_decoded_by_a_workers_own_workers(tmp_path):
    image = pytest.importorskip("PIL.Image")
    for part in ("train", "val"):
        for wnid in ("n01", "n02"):
            folder = tmp_path / "imagenet" / part / wnid
            folder.mkdir(parents=True)
            for i in range(3):
                image.new("RGB", (300, 280), (40 * i, 90, 20)).save(folder / f"{i}.jpg")
    recipe = replace(RECIPE, data=Data("imagenet", workers=1), epochs=1, average=None, batch_size=4)
    job = Job("folders", recipe, 0, tmp_path / "run", str(tmp_path))
    heard = Heard()
    assert sweep([job], heard, workers=1)[job] is not None, heard.of("failed")


def test_a_listener_that_fails_ends_the_sweep_instead_of_hanging_it(tmp_path):
    class Gone(Heard):
        def finished(self, job: Work, result: dict[str, Any]) -> None:
            raise BrokenPipeError

    with pytest.raises(BrokenPipeError):
        sweep([Job("short", RECIPE, 0, tmp_path)], Gone(), workers=1)


def test_a_damaged_checkpoint_is_said(tmp_path):
    job = Job("short", RECIPE, 0, tmp_path)
    sweep([job], Heard(), workers=1)
    (tmp_path / "result.json").unlink()
    for path in tmp_path.glob("checkpoint-*.pt"):
        path.write_bytes(b"")
    heard = Heard()
    assert sweep([job], heard, workers=1)[job] is not None
    assert "was damaged" in heard.of("noticed")[0][1]


def test_no_jobs_no_work():
    assert sweep([], Heard()) == {}


# ----------------------------------------------------------------------------- as a program is killed

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
        # A shell that starts the tests in the background has them ignore Ctrl-C, and so their children.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )


def wait_for_epochs(folder: Path, count: int, process: subprocess.Popen[str]) -> None:
    record = folder / "compare-gadam-0" / "epochs.jsonl"
    while process.poll() is None:
        if record.exists() and record.read_text().count("\n") >= count:
            return
        time.sleep(0.05)


def test_ctrl_c_stops_cleanly_and_the_same_command_goes_on(tmp_path):
    longer = ("--set", "epochs=150", "--set", "evaluate_every=75")
    process = start(tmp_path, *longer)
    wait_for_epochs(tmp_path, 2, process)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "the same command goes on" in errors
    assert "Traceback" not in errors
    process = start(tmp_path, *longer)
    output, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    assert "Gadam" in output
    result = json.loads((tmp_path / "compare-gadam-0" / "result.json").read_text())
    assert result["epochs"] == 150


@pytest.mark.slow
def test_killed_at_ten_random_moments_it_ends_bit_identical(tmp_path):
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
