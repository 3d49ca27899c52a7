"""Find checkpoints, and put them in the order of their steps."""

from __future__ import annotations

import glob
import math
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Literal, TypeAlias

from gadam._names import count
from gadam.checkpoints.errors import CheckpointError, enumerated
from gadam.checkpoints.formats import PROVENANCE

__all__ = ["Found", "Order", "choose", "find", "steps_in_names"]

Order: TypeAlias = Literal["steps", "given"]

# What the number in a name counts, the most exact word first.
_WORDS = ("step", "iter", "checkpoint", "ckpt", "epoch")
_NUMBER = re.compile(r"\d+")
# A whole number, and not the 1 of 1.5, 1,000, 1e3, or 1k.
_WHOLE = r"(\d+)(?![.,]?\d|e[+-]?\d|[kmb](?![a-z]))"
_HASHED = re.compile(r"((?:checkpoint|iterate)-\d{6})-[0-9a-f]{16}(?=\.(?:pt|dcp)$)")  # of gadam's
_BLOCK = re.compile(r"\d{12,}-\d{12,}\.safetensors(\.\d+)?")  # of gadam.BlockAverages


@dataclass(frozen=True)
class Found:
    """A checkpoint on disk.

    Attributes:
        path: Its file or folder.
        step: The number in its name, or None if the order was given.
    """

    path: Path
    step: int | None


def find(patterns: Sequence[str | os.PathLike[str]], order: Order = "steps") -> list[Found]:
    """Return the checkpoints that match some patterns, the oldest first.

    The folder of one of gadam's runs stands for the iterates that it kept, or else its
    checkpoints. A folder that contains folders named ``checkpoint-*`` stands for those. A glob
    leaves out the folders of earlier results, unless it matches nothing else.

    Args:
        patterns: Paths and globs.
        order: "steps" sorts by the numbers in the names. "given" keeps the order of the patterns.

    Raises:
        CheckpointError: Nothing matches, or the order is ambiguous.
    """
    if order not in ("steps", "given"):
        raise CheckpointError(f"order must be steps or given, got {order!r}.")
    paths: dict[str, Path] = {}
    for pattern in patterns:
        for path in _expanded(os.fspath(pattern)):
            paths.setdefault(os.path.abspath(path), path)
    if order == "given":
        return [Found(path, None) for path in paths.values()]
    steps = steps_in_names(list(paths))
    found = [Found(path, step) for path, step in zip(paths.values(), steps)]
    return sorted(found, key=lambda each: each.step or 0)


def _expanded(pattern: str) -> list[Path]:
    path = Path(pattern).expanduser()
    if path.exists():
        return _inside(path)
    matches = sorted(glob.glob(str(path), recursive=True))
    if not matches:
        raise CheckpointError(f"{pattern} does not exist or matches nothing.")
    # An earlier result beside the checkpoints is no checkpoint of their training.
    matches = [each for each in matches if not (Path(each) / PROVENANCE).is_file()] or matches
    return [inner for match in matches for inner in _inside(Path(match))]


def _inside(path: Path) -> list[Path]:
    """Return the checkpoints in a folder that is not a checkpoint itself."""
    if not path.is_dir():
        return [path]
    if (path / "run.json").is_file():
        kept = sorted((path / "iterates").glob("iterate-*.pt")) or sorted(
            (*path.glob("checkpoint-*.pt"), *path.glob("checkpoint-*.dcp"))
        )
        if not kept:
            raise CheckpointError(
                f"{path} has no iterates and no checkpoints. Train with --set keep_iterates=10."
            )
        return kept
    if (path / "blocks.json").is_file() and any(map(_BLOCK.fullmatch, os.listdir(path))):
        # The means of blocks need the weights in the manifest, which BlockAverages knows.
        raise CheckpointError(
            f"{path} is a folder of gadam.BlockAverages. Use its model_state_dict(model, start, "
            "stop), which averages any window of blocks."
        )
    return sorted(each for each in path.glob("checkpoint-*") if each.is_dir()) or [path]


def steps_in_names(paths: Sequence[str]) -> list[int]:
    """Return the number in each path that counts steps.

    This is the number after "step", "iter", "checkpoint", "ckpt" or "epoch", or else the only
    number that differs between the paths. Numbers such as 1k or 1.5 are not read.

    Args:
        paths: Absolute paths.

    Raises:
        CheckpointError: It is ambiguous.

    Example:
        >>> steps_in_names(["/a/epoch=0-step=100.ckpt", "/a/epoch=1-step=90.ckpt"])
        [100, 90]
        >>> steps_in_names(["/a/v2-300.pt", "/a/v2-1000.pt"])
        [300, 1000]
    """
    names = _relative(paths)
    for word in _WORDS:
        pattern = re.compile(
            rf"(?<![a-z]){word}s?[^0-9a-z/]?{_WHOLE}|_{word}s?{_WHOLE}", re.IGNORECASE
        )
        hits = [pattern.findall(name) for name in names]
        if all(len(hit) == 1 for hit in hits):
            return _distinct([int("".join(hit[0])) for hit in hits], names)
    numbers = [[int(number) for number in _NUMBER.findall(name)] for name in names]
    if len({_NUMBER.sub("#", name) for name in names}) == 1:
        varying = [column for column in zip(*numbers) if len(set(column)) > 1 or len(names) == 1]
        if len(varying) == 1:
            return _distinct(list(varying[0]), names)
    raise CheckpointError(
        f"The order of {names[0]} and {names[-1]} is ambiguous: no single number in the names "
        "counts steps. Pass the checkpoints from the oldest to the newest with --order given."
    )


def _relative(paths: Sequence[str]) -> list[str]:
    """Return what distinguishes the paths, without the hashes that end the names of gadam."""
    common = os.path.commonpath([os.path.dirname(path) for path in paths])
    return [_HASHED.sub(r"\1", Path(os.path.relpath(path, common)).as_posix()) for path in paths]


def _distinct(steps: list[int], names: Sequence[str]) -> list[int]:
    first: dict[int, str] = {}
    for step, name in zip(steps, names):
        if step in first:
            raise CheckpointError(
                f"The order of {first[step]} and {name} is ambiguous: both are of step {step}. "
                "Pass the checkpoints from the oldest to the newest with --order given."
            )
        first[step] = name
    return steps


def choose(
    found: Sequence[Found],
    last: int | str | None = None,
    from_step: int | None = None,
    to_step: int | None = None,
) -> list[Found]:
    """Return the checkpoints of a window.

    Args:
        found: Checkpoints, the oldest first.
        last: How many of the last ones, or a percentage such as "20%", rounded up.
        from_step: The first step of the window.
        to_step: The last step of the window.

    Raises:
        CheckpointError: The window holds fewer than two checkpoints, or is invalid.

    Example:
        >>> found = [Found(Path(f"checkpoint-{step}"), step) for step in (10, 20, 30, 40, 50, 60)]
        >>> [each.step for each in choose(found, last="40%", to_step=50)]
        [40, 50]
    """
    if from_step is not None or to_step is not None:
        if any(each.step is None for each in found):
            raise CheckpointError(
                "--from-step and --to-step need step numbers. Do not use them with --order given."
            )
        low = -math.inf if from_step is None else from_step
        high = math.inf if to_step is None else to_step
        inside = [each for each in found if low <= (each.step or 0) <= high]
        if not inside:
            steps = enumerated([str(each.step) for each in found])
            raise CheckpointError(f"No checkpoint is in the range of steps. There are {steps}.")
        found = inside
    chosen = list(found)[-_number(last, len(found)) :]
    if len(chosen) < 2:
        which = "" if last is None else f"--last {last} of {count(len(found), 'checkpoint')} is 1. "
        raise CheckpointError(f"{which}An average needs at least two checkpoints.")
    return chosen


def _number(last: int | str | None, total: int) -> int:
    """Return how many of the last checkpoints to use."""
    if last is None:
        return total
    text = str(last).strip()
    try:
        if text.endswith("%"):
            share = Fraction(text[:-1].strip())
            number = math.ceil(total * share / 100) if 0 < share <= 100 else 0
        else:
            number = int(text)
    except (ValueError, ZeroDivisionError):
        number = 0
    if number < 1:
        raise CheckpointError(
            f"--last must be a number of checkpoints or a percentage such as 20%, got {last}."
        )
    if number > total:
        raise CheckpointError(f"--last {last} is more than {count(total, 'checkpoint')}.")
    return number
