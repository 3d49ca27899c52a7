"""`python -m chaos`: inject faults into the commands, and print tried / lost / wrong.

Kills: a command is killed with SIGKILL at a random moment (its process, one of its workers, or its
whole group) and given again until it ends. Then its numbers and weights must be, to the bit, those
of an undisturbed command. Damage: a file is damaged at a random offset. Reports, `gadam verify` and
the next training run must answer with a sentence or the right numbers. *Lost* counts commands that
did not end or ended with a traceback. *Wrong* counts numbers, weights and recipes that are false.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("GADAM_CHECKPOINT_SECONDS", "0.02")

from chaos import faults, scale
from chaos.faults import Tally
from gadam.runs.folder import versions
from gadam.train.sweep import available_cores

COUNTS = {  # by whether the runs are on several ranks and on Ray
    False: {"kills": 240, "damages": 400, "full_disks": 20, "pairs": 20, "ray": 0},
    True: {"kills": 60, "damages": 40, "full_disks": 10, "pairs": 0, "ray": 15},
}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m chaos", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--scale", action="store_true", help="runs on several ranks and on Ray")
    parser.add_argument("--kills", type=int)
    parser.add_argument("--damages", type=int)
    parser.add_argument("--full-disks", type=int)
    parser.add_argument("--pairs", type=int)
    parser.add_argument("--ray", type=int, help="kills of workers and nodes of a Ray cluster")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="write the figures to this file")
    parser.set_defaults(**COUNTS[parser.parse_args(arguments).scale])
    options = parser.parse_args(arguments)
    began = time.monotonic()
    home = Path(tempfile.mkdtemp(prefix="gadam-chaos-"))
    tallies: dict[str, Tally] = {}
    steps: list[tuple[str, Callable[[random.Random], dict[str, Tally]]]] = [
        ("kills", lambda rng: faults.kills(home, options.kills, rng)),
        ("damage", lambda rng: faults.damages(home, options.damages, rng)),
        ("disks", lambda rng: faults.full_disks(home, options.full_disks, rng)),
        ("pairs", lambda rng: faults.pairs(home, options.pairs, rng)),
    ]
    if options.scale:
        steps = [
            ("kills of ranks", lambda rng: scale.rank_kills(home, options.kills, rng)),
            ("damage", lambda rng: scale.damages(home, options.damages, rng)),
            ("disks", lambda rng: scale.full_disks(home, options.full_disks, rng)),
            ("Ray", lambda rng: scale.ray_kills(home, options.ray, rng)),
        ]
    try:
        for name, step in steps:
            print(f"{name} … ({time.monotonic() - began:.0f} s)", file=sys.stderr, flush=True)
            tallies |= step(random.Random(f"{name} {options.seed}"))
        verified = {} if options.scale else faults.verify_seconds(home)
    finally:
        shutil.rmtree(home, ignore_errors=True)
    width = max(map(len, tallies))
    print(f"{'fault':<{width}}  tried   lost  wrong")
    total = Tally()
    for name, tally in tallies.items():
        print(f"{name:<{width}}  {tally.tried:5}  {tally.lost:5}  {tally.wrong:5}")
        total += tally
    print(f"{'all':<{width}}  {total.tried:5}  {total.lost:5}  {total.wrong:5}")
    for note in total.notes:
        print(note, file=sys.stderr)
    if options.out is not None:
        content = {
            "command": _command(options, parser),
            "seed": options.seed,
            "seconds": round(time.monotonic() - began),
            "versions": versions(),
            "machine": {"system": platform.platform(), "cores": available_cores()},
            **({"seconds to verify 100 runs": verified} if verified else {}),
            "faults": {name: tally.to_dict() for name, tally in tallies.items()},
        }
        options.out.write_text(json.dumps(content, indent=1) + "\n")
    return 1 if total.lost or total.wrong else 0


def _command(options: argparse.Namespace, parser: argparse.ArgumentParser) -> str:
    """Return the command with the options that are not the defaults."""
    changed = [
        f"--{name.replace('_', '-')} {value}"
        for name, value in vars(options).items()
        if name not in ("out", "scale") and value != parser.get_default(name)
    ]
    target = "make chaos-scale" if options.scale else "make chaos"
    return f"{target} ARGS='{' '.join(changed)}'" if changed else target


if __name__ == "__main__":
    sys.exit(main())
