"""`python -m chaos.ray_kills FOLDER COUNT SEED`: kill workers and nodes of a Ray cluster.

Four runs train on a cluster of two nodes, again and again. At random moments, a worker or a node is
killed; a new node takes its place. The runs must end with the bits of undisturbed ones.
"""

from __future__ import annotations

import json
import logging
import os
import random
import shutil
import signal
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

os.environ |= {"GADAM_CHECKPOINT_SECONDS": "0", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}

import ray
from ray.cluster_utils import Cluster

from chaos.damage import differences
from chaos.faults import Tally
from gadam.runs import Average, Data, Optimizer, Recipe
from gadam.train.launchers.ray import RayLauncher
from gadam.train.sweep import Job, Reportable, TrainingJob, sweep
from sweep_events import holder

RUNS = 4
RECIPE = Recipe(
    "r",
    model="logistic",
    data=Data("fashion-mini", validation=100, examples=400, size=14, augment=False),
    optimizer=Optimizer("adamw", 1e-2, 0.1),
    average=Average(1),
    epochs=120,
    evaluate_every=40,
)


class Killer:
    """A listener that kills at random moments."""

    def __init__(self, cluster: Any, kind: str, kills: int, rng: random.Random) -> None:
        self.cluster, self.kind, self.kills, self.rng = cluster, kind, kills, rng
        self.done, self.failures, self.wait = 0, [""][:0], rng.randint(1, 60)

    def on_progress(self, job: Job, done: float, update: Reportable | None) -> None:
        self.wait -= update is not None
        if self.done == self.kills or self.wait > 0:
            return
        if self.kind == "node":
            victim = self.rng.choice(sorted(self.cluster.worker_nodes, key=str))
            self.cluster.remove_node(victim, allow_graceful=False)
            self.cluster.add_node(num_cpus=2)
        elif (pid := holder(job.folder)) is not None:
            os.kill(pid, signal.SIGKILL)
        else:
            return
        self.done += 1
        self.wait = self.rng.randint(40, 120)

    def on_failure(self, job: Job, reason: str) -> None:
        self.failures.append(f"{job.label}: {reason}")

    def on_start(self, job: Job) -> None: ...

    def on_notice(self, job: Job, sentence: str) -> None: ...

    def on_finish(self, job: Job, result: Reportable) -> None: ...


def main(folder: Path, count: int, rng: random.Random) -> None:
    folder.mkdir(parents=True, exist_ok=True)

    def jobs(place: str) -> list[TrainingJob]:
        return [TrainingJob(f"run {s}", RECIPE, s, folder / place / str(s)) for s in range(RUNS)]

    nodes = -(-count // 3)
    wanted = {"worker": count - nodes, "node": nodes}
    tallies = {kind: Tally() for kind in wanted}
    cluster = Cluster(True, head_node_args={"num_cpus": 2, "include_dashboard": False})
    cluster.add_node(num_cpus=2)
    ray.init(cluster.address, log_to_driver=False, logging_level=logging.ERROR)
    try:
        none = Killer(cluster, "worker", 0, rng)
        sweep(jobs("whole"), none, launcher=RayLauncher())
        for kind, tally in tallies.items():
            while tally.tried < wanted[kind]:
                killer = Killer(cluster, kind, min(4, wanted[kind] - tally.tried), rng)
                found = sweep(jobs("torn"), killer, launcher=RayLauncher())
                tally.tried += killer.done
                for failure in killer.failures:
                    tally.note("lost", failure)
                for job, result in found.items():
                    if result is not None:
                        wrong = differences(folder / "whole" / job.folder.name, job.folder)
                        for sentence in wrong:
                            tally.note("wrong", sentence)
                shutil.rmtree(folder / "torn")
                print(kind, tally.to_dict(), file=sys.stderr, flush=True)
    finally:
        names = {"worker": "kill a worker of Ray", "node": "kill a node of Ray"}
        content = {names[kind]: asdict(tally) for kind, tally in tallies.items()}
        (folder / "tallies.json").write_text(json.dumps(content))
        ray.shutdown()
        cluster.shutdown()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), random.Random(int(sys.argv[3])))
