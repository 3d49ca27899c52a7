"""`gadam average`."""

from __future__ import annotations

import shlex
import sys
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

from gadam._names import count
from gadam.commands.options import Flag, MaybeInt, option, parse

if TYPE_CHECKING:
    from gadam.checkpoints.finding import Found
    from gadam.checkpoints.provenance import Provenance

__all__ = ["run"]


@dataclass(frozen=True, kw_only=True)
class _Options:
    """Average checkpoints on disk, of any training.

    Takes Hugging Face folders (whole, sharded, adapters), .safetensors files, .pt, .pth and .bin
    state dicts, Lightning's .ckpt files, DCP folders, and the folders of gadam's runs. The result
    has the layout of the last checkpoint, and says where it comes from.
    """

    paths: Annotated[tyro.conf.Positional[tuple[str, ...]], option("CHECKPOINT [CHECKPOINT ...]")]
    """Checkpoints, or globs of them in quotes. They are sorted by the numbers in their names."""
    out: Annotated[Path, option("OUT")]
    """The folder to write. For files, it may also be a file with the same suffix."""
    weights: Literal["mean", "ema", "linear", "wsm"] = "mean"
    """mean: equal. ema: see --decay. linear: 1, 2, 3, and so on. wsm: see --shape."""
    last: Annotated[str | None, option("N|N%")] = None
    """How many of the last checkpoints to use, such as 5 or 20%. Default: all."""
    from_step: MaybeInt = None
    """The first step to use."""
    to_step: MaybeInt = None
    """The last step to use."""
    order: Literal["steps", "given"] = "steps"
    """given: the checkpoints are listed from the oldest to the newest."""
    decay: Annotated[float | None, option("X")] = None
    """Of ema: a checkpoint's weight relative to the next. Default: weights halve over a fifth."""
    shape: Literal["1-sqrt", "cosine", "linear"] = "1-sqrt"
    """Of wsm: the decay of the learning rate that the average emulates."""
    dtype: Annotated[str | None, option("TYPE")] = None
    """Type of the averaged tensors, such as float32. Default: that of the last checkpoint."""
    key: Annotated[str | None, option("KEY")] = None
    """Where torch files or DCP folders have the weights, such as ema.model. Default: found."""
    point: Literal["iterate", "average"] = "iterate"
    """Which weights to use of Lightning checkpoints that have raw and averaged ones."""
    refresh: Annotated[str | None, option("FILE")] = None
    """Recompute BatchNorm statistics with the task that a file defines, such as my_task.py."""
    select: Annotated[Literal["greedy"] | None, option("greedy")] = None
    """Keep a checkpoint only if it improves the validation metric of --task."""
    task: Annotated[str | None, option("FILE")] = None
    """The file with the task for --select, such as my_task.py."""
    sha256: Flag = False
    """Store the hashes of the checkpoints too. This reads them once more."""
    json: Flag = False
    """Print one JSON object per line."""


def run(arguments: list[str]) -> int:
    """Run the command.

    Args:
        arguments: The command line after `gadam average`.

    Returns:
        The exit code.
    """
    options = parse(_Options, "average", arguments)
    from gadam.checkpoints import average
    from gadam.runs.files import to_json

    shows_progress = sys.stderr.isatty() and not options.json

    def show(done: int, total: int) -> None:
        end = "\n" if done == total else ""
        print(f"\r{100 * done // max(total, 1):3d}%", end=end, file=sys.stderr, flush=True)

    with warnings.catch_warnings(record=True):  # the notices are printed below
        warnings.simplefilter("always")
        provenance = average(
            options.paths,
            options.out,
            options.weights,
            last=options.last,
            from_step=options.from_step,
            to_step=options.to_step,
            order=options.order,
            decay=options.decay,
            shape=options.shape,
            dtype=options.dtype,
            key=options.key,
            point=options.point,
            refresh=options.refresh,
            select=options.select,
            task=options.task,
            sha256=options.sha256,
            command=shlex.join(["gadam", "average", *arguments]),
            on_found=None if options.json else _print_order,
            on_progress=show if shows_progress else None,
        )
    if options.json:
        print(to_json({"event": "average", **provenance.to_dict()}))
        return 0
    for notice in provenance.notices:
        print(f"Note: {notice}", file=sys.stderr)
    print(_summary(provenance))
    return 0


def _print_order(found: Sequence[Found]) -> None:
    """Say which checkpoints are averaged, in which order."""
    paths = [str(each.path) for each in found]
    shown = paths if len(paths) <= 6 else [*paths[:3], "…", *paths[-2:]]
    print(f"Averaging {count(len(paths), 'checkpoint')}, the oldest first:", flush=True)
    for path in shown:
        print(f"  {path}", flush=True)


def _summary(provenance: Provenance) -> str:
    used = [each for each in provenance.inputs if each.weight]
    lines = []
    if provenance.metric is not None:
        kept = ", ".join(each.path for each in used)
        lines.append(
            f"Kept {len(used)} of {len(provenance.inputs)} checkpoints: {kept}. Validation "
            f"{provenance.metric}: {provenance.score:.4g}."
        )
    lines.append(
        f"Wrote {provenance.out}: {count(provenance.averaged, 'tensor')} ({provenance.dtype}), "
        f"weights {provenance.weights}."
    )
    return "\n".join(lines)
