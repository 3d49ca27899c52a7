"""Launchers: the same jobs in local processes and on a Ray cluster."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import gadam.runs.folder
import quick_processes
from compare_runs import assert_same_run
from gadam.commands import main
from gadam.commands.options import SweepOptions
from gadam.commands.sweeps import make_launcher
from gadam.runs import Average, Data, Optimizer, Recipe
from gadam.train.launchers.local import LocalLauncher
from gadam.train.launchers.ray import (
    LauncherError,
    RayLauncher,
    _connect,
    _results_only_on_stdout,
)
from gadam.train.sweep import Job, Launcher, Reportable, TrainingJob, sweep
from sweep_events import Recorder, holder

ray: Any = pytest.importorskip("ray")

RECIPE = Recipe(
    "r",
    model="logistic",
    data=Data("fashion-mini", validation=100, examples=400, size=14, augment=False),
    optimizer=Optimizer("adamw", 1e-2, 0.1),
    average=Average(1),
    epochs=3,
)
LONG = replace(RECIPE, epochs=300, evaluate_every=100)


class Killer(Recorder):
    """Kills the worker of a run after some epochs, once per epoch in the list."""

    def __init__(self, label: str, epochs: list[int]) -> None:
        super().__init__()
        self.label, self.epochs = label, epochs

    def on_progress(self, job: Job, done: float, update: Reportable | None) -> None:
        super().on_progress(job, done, update)
        if job.label == self.label and self.epochs and done >= self.epochs[0]:
            pid = holder(job.folder)
            if pid is not None:
                self.epochs.pop(0)
                os.kill(pid, signal.SIGKILL)


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    """Start Ray on this machine, with checkpoints after every epoch."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GADAM_CHECKPOINT_SECONDS", "0")
        patch.setenv("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
        ray.init(
            "local",
            num_cpus=2,
            include_dashboard=False,
            log_to_driver=False,
            logging_level="ERROR",
        )
        yield
        ray.shutdown()


def launcher(**kwargs: Any) -> Launcher:
    return RayLauncher(**kwargs)


def test_without_ray_the_error_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(LauncherError, match=r"needs ray.*pip install 'gadam\[ray\]'"):
        RayLauncher()


def test_wrong_options_are_explained_before_any_work(tmp_path, monkeypatch, capsys):
    command = ["train", "compare-gadam", "--out", str(tmp_path / "runs")]
    monkeypatch.setitem(sys.modules, "ray", None)
    for options, sentence in (
        (["--address", "auto"], "--address needs --launcher ray."),
        (["--gpus", "1"], "--gpus needs --launcher ray."),
        (["--launcher", "ray", "--cpus", "0"], "--cpus must be positive, got 0."),
        (["--launcher", "ray", "--gpus", "-1"], "--gpus must be non-negative, got -1."),
        (["--launcher", "ray"], "Run `pip install 'gadam[ray]'`."),
    ):
        assert main([*command, *options]) == 2
        assert sentence in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()


def test_resources_follow_from_the_device_and_the_threads(monkeypatch):
    made = []
    monkeypatch.setattr(
        "gadam.train.launchers.ray.RayLauncher", lambda *arguments: made.append(arguments)
    )
    for options in (
        SweepOptions(launcher="ray", threads=3),
        SweepOptions(launcher="ray", device="cuda", address="auto", workers=2),
        SweepOptions(launcher="ray", device="cuda", gpus=0.5, cpus=4),
    ):
        make_launcher(options)
    assert made == [(None, 3, 0.0, None), ("auto", 1, 1.0, 2), (None, 4, 0.5, None)]
    local = make_launcher(SweepOptions(workers=3))
    assert isinstance(local, LocalLauncher)
    assert local.slots == 3


def test_an_address_without_a_cluster(monkeypatch):
    def refuse(*_: object, **__: object) -> None:
        raise ConnectionError("Could not find any running Ray instance.\nMore.")

    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", refuse)
    with pytest.raises(LauncherError, match=r"no Ray cluster at auto .*Ray instance\.\)\. Start"):
        _connect("auto")


@pytest.mark.usefixtures("cluster")
def test_runs_have_the_same_bits_as_in_local_processes(tmp_path):
    def jobs(place: str) -> list[TrainingJob]:
        folder, missing = tmp_path / place, replace(RECIPE, data=Data("cifar10"))
        return [
            TrainingJob("long", replace(LONG, epochs=60), 0, folder / "long"),
            TrainingJob("bad", missing, 0, folder / "bad", str(tmp_path)),
            TrainingJob("short", RECIPE, 1, folder / "short"),
        ]

    with quick_processes.for_sweeps():
        sweep(jobs("local"), Recorder(), workers=1)
    # One worker is killed. Its run continues from its checkpoint.
    recorder = Killer("long", [3])
    results = sweep(jobs("ray"), recorder, launcher=launcher())
    assert {job.label: r is not None for job, r in results.items()} == {
        "long": True,
        "bad": False,
        "short": True,
    }
    for name in ("long", "short"):
        assert_same_run(tmp_path / "local" / name, tmp_path / "ray" / name)
    assert sorted(recorder.of("start")) == [("bad",), ("long",), ("short",)]
    lost = [sentence for label, sentence in recorder.of("notice") if label == "long"]
    assert lost == ["It lost its worker (its process died) and continues from its checkpoint."]
    ((label, reason),) = recorder.of("failure")
    assert label == "bad"
    assert "gadam data cifar10" in reason
    assert "Traceback" not in reason
    epochs = [epoch for label, epoch in recorder.of("epoch") if label == "long"]
    assert set(epochs) == set(range(1, 61))
    assert epochs[-1] == 60
    assert epochs.count(2) == 1  # it did not begin again
    assert not list((tmp_path / "ray").glob(".launch*"))

    again = Recorder()  # finished runs are skipped, and jobs may lead to other jobs
    first, _, second = jobs("ray")
    found = sweep(
        [first],
        again,
        launcher=launcher(workers=1),
        then=lambda job, result: [second] if job is first and result is not None else [],
    )
    assert found == {first: results[first], second: results[second]}
    assert not again.of("epoch")


@pytest.mark.slow
@pytest.mark.usefixtures("cluster")
def test_a_run_that_never_gets_further_fails(tmp_path, monkeypatch):
    monkeypatch.setattr("gadam.train.launchers.ray.RETRIES", 1)
    slow = replace(RECIPE, batch_size=1, data=replace(RECIPE.data, examples=1900))
    job = TrainingJob("slow", slow, 0, tmp_path / "slow")
    recorder, is_over = Recorder(), threading.Event()

    def kill() -> None:
        while not is_over.wait(0.02):
            if (pid := holder(job.folder)) is not None:
                os.kill(pid, signal.SIGKILL)

    killer = threading.Thread(target=kill)
    killer.start()
    try:
        assert sweep([job], recorder, launcher=launcher()) == {job: None}
    finally:
        is_over.set()
        killer.join()
    assert len(recorder.of("notice")) == 1
    ((_, reason),) = recorder.of("failure")
    assert reason == "it lost its worker 2 times without progress: its process died"


@pytest.mark.usefixtures("cluster")
def test_nodes_that_see_other_files_or_have_other_versions_are_refused(tmp_path, monkeypatch):
    job = TrainingJob("short", RECIPE, 0, tmp_path / "short")
    recorder = Recorder()
    with monkeypatch.context() as patch:
        patch.setattr(Path, "touch", lambda self: None)
        assert sweep([job], recorder, launcher=launcher(share_seconds=0.0)) == {job: None}
    ((_, reason),) = recorder.of("failure")
    assert f"does not see the files in {tmp_path}. Pass an --out on a file system" in reason
    monkeypatch.setattr("gadam.train.launchers.ray.versions", lambda: {"torch": "1.13"})
    recorder = Recorder()
    assert sweep([job], recorder, launcher=launcher()) == {job: None}
    ((_, reason),) = recorder.of("failure")
    now = gadam.runs.folder.versions()["torch"]
    assert f"has torch {now} instead of 1.13. Install the same versions on all nodes." in reason


@pytest.mark.usefixtures("cluster")
def test_an_error_of_the_listener_stops_the_runs(tmp_path):
    class Failing(Recorder):
        def on_progress(self, job: Job, done: float, update: Reportable | None) -> None:
            raise BrokenPipeError

    job = TrainingJob("long", replace(LONG, epochs=100_000), 0, tmp_path / "long")
    with pytest.raises(BrokenPipeError):
        sweep([job], Failing(), launcher=launcher())
    assert holder(job.folder) is None
    assert not (job.folder / "failure.json").exists()  # it was interrupted, and can be resumed


@pytest.mark.usefixtures("cluster")
def test_slots_and_resources():
    assert launcher().slots == 2
    assert launcher(cpus=2).slots == 1
    assert launcher(cpus=0.5, workers=3).slots == 3
    assert RayLauncher().notice() == ""
    assert "has 1 CPUs and 1 GPUs now. The runs wait for one." in RayLauncher(gpus=1).notice()


def test_what_ray_prints_does_not_reach_standard_output(capsys):
    with _results_only_on_stdout():
        print("result")
        thread = threading.Thread(target=print, args=("noise",), name="ray_listen_error_messages")
        thread.start()
        thread.join()
    printed = capsys.readouterr()
    assert (printed.out, printed.err) == ("result\n", "noise\n")


@pytest.mark.slow
def test_a_node_that_dies_in_the_middle_changes_nothing(tmp_path, monkeypatch):
    """Two nodes, each with two runs. One node is killed; its runs continue on the other."""
    from ray.cluster_utils import Cluster

    monkeypatch.setenv("GADAM_CHECKPOINT_SECONDS", "0")
    if ray.is_initialized():
        ray.shutdown()  # of the other tests

    def jobs(place: str) -> list[TrainingJob]:
        return [
            TrainingJob(f"run {seed}", LONG, seed, tmp_path / place / str(seed))
            for seed in range(4)
        ]

    with quick_processes.for_sweeps():
        sweep(jobs("local"), Recorder(), workers=2)
    cluster = Cluster(True, head_node_args={"num_cpus": 2, "include_dashboard": False})
    try:
        node = cluster.add_node(num_cpus=2)
        ray.init(cluster.address, log_to_driver=False, logging_level="ERROR")

        class NodeKiller(Recorder):
            is_done = False

            def on_progress(self, job: Job, done: float, update: Reportable | None) -> None:
                super().on_progress(job, done, update)
                begun = {label for label, *_ in self.of("epoch")}
                if len(begun) == 4 and not self.is_done:
                    self.is_done = True
                    cluster.remove_node(node, allow_graceful=False)

        recorder = NodeKiller()
        results = sweep(jobs("ray"), recorder, launcher=launcher())
        assert None not in results.values(), recorder.of("failure")
        lost = [label for label, sentence in recorder.of("notice") if "lost its worker" in sentence]
        assert len(lost) == 2
        for seed in range(4):
            assert_same_run(tmp_path / "local" / str(seed), tmp_path / "ray" / str(seed))
    finally:
        ray.shutdown()
        cluster.shutdown()


@pytest.mark.slow
def test_ctrl_c_stops_the_command_and_the_same_command_resumes(tmp_path):
    """Standard output is JSON only, and the end is that of local processes."""
    settings = ["epochs=300", "examples=1900", "average.start=5", "data.size=8"]
    settings += ["evaluate_every=100"]
    command = [sys.executable, "-m", "gadam", "train", "compare-gadam", "--json"]
    command += [word for setting in settings for word in ("--set", setting)]
    environment = {**os.environ, "GADAM_CHECKPOINT_SECONDS": "0"}
    environment.pop("RAY_ADDRESS", None)
    # A shell that runs the tests in the background makes them and their children ignore Ctrl-C.
    process = subprocess.Popen(
        [*command, "--launcher", "ray", "--out", str(tmp_path / "ray")],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    assert process.stdout is not None
    for line in process.stdout:
        if json.loads(line)["event"] == "epoch":
            break
    process.send_signal(signal.SIGINT)
    output, errors = process.communicate(timeout=120)
    assert process.returncode == 130, errors
    assert "Interrupted. Rerun the same command to resume." in errors
    assert all(json.loads(line)["event"] in ("epoch", "notice") for line in output.splitlines())
    folder = tmp_path / "ray" / "compare-gadam-0"
    assert list(folder.glob("checkpoint-*"))
    assert not (folder / "result.json").exists()
    for options in (["--launcher", "ray", "--out", "ray"], ["--out", "local"]):
        subprocess.run([*command, *options], env=environment, check=True, cwd=tmp_path)
    assert_same_run(folder, tmp_path / "local" / "compare-gadam-0")
