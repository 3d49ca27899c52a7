"""Faults of runs on several ranks and on Ray, for `python -m chaos --scale`."""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
import traceback
from pathlib import Path
from typing import Any

from chaos import faults
from chaos.damage import damage, fresh_copy
from chaos.faults import COMMANDS, Program, Tally, finish, settings_of, warm_up
from gadam.runs.manifest import Problem, check_tree

RANKS = 2
# Long enough to be hit between its first and its last checkpoint.
TRAIN = [*COMMANDS["train"], *settings_of("epochs=20", "evaluate_every=4", "batch_size=32")]
STRATEGIES = {
    "ddp": [*TRAIN, "--strategy", "ddp"],
    "fsdp2": [*TRAIN, "--strategy", "fsdp2", "--async-checkpoints"],
}
PARTS = {
    "tensors": "*.distcp",
    "metadata": ".metadata",
    "rest": "rest.pt",
    "manifest": "manifest.json",
}


def rank_kills(home: Path, count: int, rng: random.Random) -> dict[str, Tally]:
    """Kill a rank, the launcher, or all of them; see :func:`faults.kills`.

    The launcher is torchrun's: it restarts the ranks when one of them dies.

    Args:
        home: A folder for the runs.
        count: How many kills.
        rng: The source of randomness.
    """
    warm_up(home)
    targets = {"worker": "one rank", "parent": "torchrun", "group": "all processes"}
    commands = {f"{RANKS} ranks, {name}": command for name, command in STRATEGIES.items()}
    found = faults.kill_commands(home, commands, list(targets), count, rng, RANKS)
    pairs = [(name, target) for name in commands for target in targets.values()]
    return {f"kill {b} of {a}": tally for (a, b), tally in zip(pairs, found.values())}


def full_disks(home: Path, count: int, rng: random.Random) -> dict[str, Tally]:
    """Let the disk run full while two ranks train; see :func:`faults.full_disks`.

    Args:
        home: A folder for the runs.
        count: How many times.
        rng: The source of randomness.
    """
    found = faults.full_disks(home, count, rng, STRATEGIES["ddp"], RANKS)
    return {f"full disk, {RANKS} ranks": found["full disk"]}


def damages(home: Path, count: int, rng: random.Random) -> dict[str, Tally]:
    """Damage checkpoints of several ranks, in finished and in stopped runs.

    `gadam verify` must name a damaged checkpoint that a finished run vouches for. A stopped run
    must continue from an intact one.

    Args:
        home: A folder for the runs.
        count: How many times.
        rng: The source of randomness.
    """
    tallies = {f"damage {part} of a checkpoint of {RANKS} ranks": Tally() for part in PARTS}
    first = next(iter(tallies.values()))
    finished, stopped, folder = (home / name for name in ("finished", "stopped", "damaged"))
    if not finish([*TRAIN, "--out", str(finished)], home / "log", first, ranks=RANKS):
        return tallies
    program = Program([*TRAIN, "--out", str(stopped)], home / "log", ranks=RANKS)
    deadline = time.monotonic() + faults.PATIENCE
    while len(list(stopped.glob("*/checkpoint-*"))) < 2 and time.monotonic() < deadline:
        time.sleep(0.01)
    os.kill(program.pid, signal.SIGTERM)
    program.wait(faults.PATIENCE)
    program.clean_up()
    if len(list(stopped.glob("*/checkpoint-*"))) < 2 or list(stopped.glob("*/result.json")):
        first.note("lost", "the run was not stopped between two checkpoints")
        return tallies
    for i in range(count):
        pattern, tally = list(zip(PARTS.values(), tallies.values()))[i % len(PARTS)]
        tally.tried += 1
        source = rng.choice([finished, stopped])
        fresh_copy(source, folder)
        newest = max(folder.glob("*/checkpoint-*.dcp"))
        path = rng.choice(sorted(newest.glob(pattern)))
        what = damage(path, rng)
        if source == finished:
            named: list[Problem] = []
            for found in check_tree(folder, weights=True):
                named += [found] if isinstance(found, Problem) else found.problems
            if not any(newest in (p.path, p.path.parent) for p in named):
                tally.note("wrong", f"{what}: gadam verify does not name it")
        if finish([*TRAIN, "--out", str(folder)], home / "log", tally, ranks=RANKS):
            faults.compare("train", finished, folder, tally)
    return tallies


# --------------------------------------------------------------------------------------------- Ray


def ray_kills(home: Path, count: int, rng: random.Random) -> dict[str, Tally]:
    """Kill workers and nodes of a Ray cluster, in another process: Ray does not survive forks.

    Args:
        home: A folder for the runs.
        count: How many kills; a third of them are of nodes.
        rng: The source of randomness.
    """
    command = [sys.executable, "-m", "chaos.ray_kills", str(home / "ray"), str(count)]
    command.append(str(rng.randrange(2**32)))
    tallies = {"kill a worker of Ray": Tally(), "kill a node of Ray": Tally()}
    done = subprocess.run(command, capture_output=True, text=True)
    with contextlib.suppress(OSError, ValueError):
        content: dict[str, Any] = json.loads((home / "ray" / "tallies.json").read_text())
        return {name: Tally(**values) for name, values in content.items()}
    tallies["kill a worker of Ray"].note("lost", done.stderr[-1500:] or traceback.format_exc())
    shutil.rmtree(home / "ray", ignore_errors=True)
    return tallies
