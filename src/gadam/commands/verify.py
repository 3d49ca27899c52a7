"""The command `gadam verify`."""

from __future__ import annotations

import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from gadam._names import count
from gadam.commands.options import Flag, option, parse
from gadam.runs.collect import not_a_folder
from gadam.runs.files import RunError, to_json
from gadam.runs.manifest import Problem, check_tree

__all__ = ["run"]


@dataclass(frozen=True, kw_only=True)
class _Options:
    """Check that the files of runs are as the runs wrote them.

    A finished run lists the hashes of its files in manifest.json. The lines of a running one carry
    hashes. Runs of older versions have neither: their result is compared with their last line.
    """

    folder: Annotated[tyro.conf.Positional[Path], option("DIR")]
    """A run, or a folder of runs."""
    weights: Flag = False
    """Hash checkpoints and iterates too, and require them to exist. Default: compare sizes."""
    json: Flag = False
    """Print one JSON object per line."""


def run(arguments: list[str]) -> int:
    """Run the command.

    Args:
        arguments: The command line after `gadam verify`.

    Returns:
        The exit code: 1 if a file is not as it was written.

    Raises:
        RunError: There is nothing to check.
    """
    options = parse(_Options, "verify", arguments)
    if not options.folder.is_dir():
        raise RunError(not_a_folder(options.folder))
    states: Counter[str] = Counter()
    wrong = 0
    for found in check_tree(options.folder, weights=options.weights):
        problems = (found,) if isinstance(found, Problem) else found.problems
        wrong += len(problems)
        if not isinstance(found, Problem):
            states["wrong" if problems else found.state] += 1
            if options.json:
                event = {"event": "run", "folder": str(found.folder), "state": found.state}
                print(to_json({**event, "problems": list(map(str, problems))}), flush=True)
        elif options.json:
            event = {"event": "file", "path": str(found.path)}
            print(to_json({**event, "problems": [str(found)]}), flush=True)
        if not options.json:
            for problem in problems:
                print(problem, flush=True)
    if not states and not wrong:
        raise RunError(f"There are no runs in {options.folder}.")
    names = ("finished", "unfinished", "unverified", "wrong")
    if options.json:
        counts = {name: states[name] for name in names}
        print(to_json({"event": "summary", **counts, "problems": wrong}), flush=True)
    else:
        print(_summary(states, wrong), file=sys.stderr if wrong else sys.stdout)
    return 1 if wrong else 0


def _summary(states: Counter[str], wrong: int) -> str:
    def clause(state: str, one: str, many: str) -> list[str]:
        number = states[state]
        return [f"{number} {one if number == 1 else many}"] if number else []

    parts = [
        *clause("finished", "matches its manifest", "match their manifest"),
        *clause("unfinished", "is not finished", "are not finished"),
        *clause(
            "unverified",
            "was written by a version without manifests",
            "were written by a version without manifests",
        ),
        *clause("wrong", "does not match", "do not match"),
    ]
    found = f"{count(wrong, 'problem')}." if wrong else "No problems."
    return f"{count(sum(states.values()), 'run')}: {', '.join(parts) or 'none'}. {found}"
