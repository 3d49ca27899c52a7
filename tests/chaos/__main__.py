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

from chaos import faults
from chaos.faults import Tally
from gadam.runs.folder import versions
from gadam.train.sweep import available_cores


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m chaos", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--kills", type=int, default=240)
    parser.add_argument("--damages", type=int, default=400)
    parser.add_argument("--full-disks", type=int, default=20)
    parser.add_argument("--pairs", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="write the figures to this file")
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
    try:
        for name, step in steps:
            print(f"{name} … ({time.monotonic() - began:.0f} s)", file=sys.stderr, flush=True)
            tallies |= step(random.Random(f"{name} {options.seed}"))
        verified = faults.verify_seconds(home)
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
            "seconds to verify 100 runs": verified,
            "faults": {name: tally.to_dict() for name, tally in tallies.items()},
        }
        options.out.write_text(json.dumps(content, indent=1) + "\n")
    return 1 if total.lost or total.wrong else 0


def _command(options: argparse.Namespace, parser: argparse.ArgumentParser) -> str:
    """Return the command with the options that are not the defaults."""
    changed = [
        f"--{name.replace('_', '-')} {value}"
        for name, value in vars(options).items()
        if name != "out" and value != parser.get_default(name)
    ]
    return f"make chaos ARGS='{' '.join(changed)}'" if changed else "make chaos"


if __name__ == "__main__":
    sys.exit(main())
