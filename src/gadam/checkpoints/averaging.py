"""Average checkpoints on disk: the whole way from paths to a result."""

from __future__ import annotations

import hashlib
import os
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import torch

import gadam
from gadam._names import did_you_mean
from gadam.checkpoints.errors import CheckpointError
from gadam.checkpoints.finding import Found, Order, choose, find
from gadam.checkpoints.formats import (
    PROVENANCE,
    TORCH_SUFFIXES,
    Checkpoint,
    Point,
    open_checkpoint,
)
from gadam.checkpoints.merge import Merge, check_match, statistics_of
from gadam.checkpoints.provenance import Input, Provenance
from gadam.checkpoints.publishing import published, refuse_overwrite
from gadam.checkpoints.weighting import Shape, Weighting, relative_weights
from gadam.runs.files import to_json

if TYPE_CHECKING:
    from torch import Tensor

    from gadam.checkpoints.selection import Evaluator
    from gadam.train.tasks import Task

__all__ = ["average"]

STALE = (
    "The BatchNorm statistics are averages of those of the checkpoints and do not fit the averaged "
    "weights. Pass --refresh my_task.py, or call gadam.refresh_batchnorm after loading."
)
_DTYPES = ("float64", "float32", "float16", "bfloat16")
_Path = str | os.PathLike[str]


def average(
    paths: _Path | Sequence[_Path],
    out: _Path,
    weights: Weighting | Sequence[float] = "mean",
    *,
    last: int | str | None = None,
    from_step: int | None = None,
    to_step: int | None = None,
    order: Order = "steps",
    decay: float | None = None,
    shape: Shape = "1-sqrt",
    dtype: torch.dtype | str | None = None,
    key: str | None = None,
    point: Point = "iterate",
    refresh: Task | _Path | None = None,
    select: Literal["greedy"] | None = None,
    task: Task | _Path | None = None,
    sha256: bool = False,
    command: str = "",
    on_found: Callable[[Sequence[Found]], None] | None = None,
    on_progress: Callable[[int, int], None] | None = None,
) -> Provenance:
    """Average checkpoints on disk, and write the result with the layout of the last one.

    Floating-point tensors are averaged in float64, a part at a time. Integers and flags come from
    the last checkpoint. Its other files, such as configuration and tokenizer, are copied, but not
    the state of its optimizer.

    Args:
        paths: Checkpoints or globs of them: Hugging Face folders, whole, sharded, or adapters;
            ``.safetensors``; ``.pt``, ``.pth``, ``.bin`` and Lightning's ``.ckpt``; DCP folders; or
            the folder of one of gadam's runs.
        out: The folder to write. For files, it may also be a file with the same suffix. It must not
            exist.
        weights: "mean", "ema", "linear" or "wsm"; see
            :func:`gadam.checkpoints.relative_weights`. Or one number per checkpoint.
        last: How many of the last checkpoints to use, or a percentage such as "20%".
        from_step: The first step to use.
        to_step: The last step to use.
        order: "steps" orders checkpoints by the numbers in their names. "given" keeps the order of
            ``paths``.
        decay: Of "ema": the weight of a checkpoint relative to the next. The default halves it
            every fifth of the checkpoints.
        shape: Of "wsm": the decay of the learning rate to emulate.
        dtype: The type of the averaged tensors. The default is that of the last checkpoint.
        key: Where torch files or DCP folders have the weights, such as "ema.model".
        point: Which weights to use of Lightning checkpoints that have raw and averaged ones:
            "iterate", the raw ones, or "average".
        refresh: A task, or the file that defines it, to recompute BatchNorm statistics with.
        select: "greedy" keeps a checkpoint only if it improves the validation metric of ``task``.
        task: A task, or the file that defines it, for ``select``.
        sha256: Store the hashes of the checkpoints. This reads them once more.
        command: The command line to store.
        on_found: Called with the checkpoints, the oldest first, before they are read.
        on_progress: Called with the number of elements done and their total.

    Returns:
        What the result holds. It is also in ``gadam-average.json`` in the folder, in the metadata
        of safetensors files, and in torch files.

    Raises:
        CheckpointError: Nothing was written. The message says why.

    Example:
        >>> import tempfile, torch
        >>> from gadam.checkpoints import average
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     for step in (100, 200, 300):
        ...         torch.save({"w": torch.full((2,), float(step))}, f"{folder}/step-{step}.pt")
        ...     result = average(f"{folder}/step-*.pt", f"{folder}/averaged.pt", last=2)
        ...     torch.load(f"{folder}/averaged.pt")
        {'w': tensor([250., 250.])}
        >>> [(each.step, each.weight) for each in result.inputs]
        [(200, 0.5), (300, 0.5)]
    """
    wanted = _dtype(dtype)
    _check_selection(select, task, weights)
    listed = [paths] if isinstance(paths, str | os.PathLike) else list(paths)
    if not listed:
        raise CheckpointError("Pass at least one path or glob.")
    found = choose(find(listed, order), last, from_step, to_step)
    if on_found is not None:
        on_found(found)
    steps = [each.step for each in found if each.step is not None]
    relative = relative_weights(
        weights,
        len(found),
        steps=steps if len(steps) == len(found) else None,
        decay=decay,
        shape=shape,
    )
    target = Path(out)
    refuse_overwrite(target)
    _check_suffix(target, found[-1].path)
    checkpoints = [open_checkpoint(each.path, key=key, point=point) for each in found]
    check_match(checkpoints, wanted)
    before = [_fingerprint(checkpoint) for checkpoint in checkpoints]

    evaluator = soup = None
    user_task = refresh if refresh is not None else task
    if user_task is not None:
        evaluator = _evaluator(user_task)
    if select is not None:
        from gadam.checkpoints.selection import greedy_soup

        assert evaluator is not None
        soup = greedy_soup(checkpoints, evaluator)
        relative = [float(kept) for kept in soup.kept]
    merge = Merge(checkpoints, relative, wanted)
    stale = statistics_of(merge.last.tensors)
    replaced: dict[str, Tensor] = {}
    if evaluator is not None and stale:
        from gadam.checkpoints.selection import refreshed

        replaced = refreshed(merge, evaluator)
        stale = [name for name in stale if name not in replaced]

    notices = list(merge.last.notices)
    if soup is not None and sum(soup.kept) == 1:
        notices.append(
            f"No other checkpoint improves {merge.last.path}, so the result is this one alone."
        )
    if stale:
        notices.append(STALE)
    total = sum(relative)
    provenance = Provenance(
        out=str(out),
        inputs=tuple(
            Input(
                path=str(each.path),
                step=each.step,
                weight=weight / total,
                size=size,
                modified=modified,
                sha256=_sha256(checkpoint) if sha256 else None,
                score=None if soup is None else soup.scores[i],
            )
            for i, (each, weight, checkpoint, (size, modified)) in enumerate(
                zip(found, relative, checkpoints, before)
            )
        ),
        weights=_describe(weights, len(found), decay, shape, select),
        dtype=_types(merge),
        averaged=sum(info.is_averaged for info in merge.last.tensors.values()),
        copied=tuple(n for n, info in merge.last.tensors.items() if not info.is_averaged),
        batchnorm="stale" if stale else "refreshed" if replaced else "none",
        metric=None if soup is None or evaluator is None else evaluator.task.metric,
        score=None if soup is None else soup.score,
        left_out=merge.last.left_out,
        notices=tuple(notices),
        command=command,
        gadam_version=gadam.__version__,
        torch_version=torch.__version__,
    )
    result = Merge(checkpoints, relative, wanted, replaced, on_progress)
    _write(target, result, to_json(provenance.to_dict()))
    for notice in notices:
        warnings.warn(notice, stacklevel=2)
    return provenance


def _write(target: Path, merge: Merge, provenance: str) -> None:
    before = {checkpoint: _fingerprint(checkpoint) for checkpoint in merge.used}
    source = merge.last.path
    with published(target) as temporary:
        if source.is_dir() or target.suffix in _suffixes(source):
            merge.last.write(temporary, merge, provenance)
        else:
            temporary.mkdir()
            merge.last.write(temporary / f"model{source.suffix}", merge, provenance)
            (temporary / PROVENANCE).write_text(provenance)
        for checkpoint, fingerprint in before.items():
            if _fingerprint(checkpoint) != fingerprint:
                raise CheckpointError(
                    f"{checkpoint.path} changed while it was read. Try again when nothing writes "
                    "it."
                )


def _suffixes(source: Path) -> tuple[str, ...]:
    """Return the suffixes of files with the format of another one."""
    return TORCH_SUFFIXES if source.suffix in TORCH_SUFFIXES else (source.suffix,)


def _check_suffix(target: Path, source: Path) -> None:
    known = {".safetensors", *TORCH_SUFFIXES}
    if source.is_dir() and target.suffix in known:
        raise CheckpointError(f"The checkpoints are folders. Pass a folder to --out, not {target}.")
    if not source.is_dir() and target.suffix in known - {*_suffixes(source)}:
        raise CheckpointError(
            f"The result has the format of the checkpoints. Pass --out {target.stem}"
            f"{source.suffix}, or a folder."
        )


def _check_selection(select: str | None, task: object, weights: object) -> None:
    if select not in (None, "greedy"):
        raise CheckpointError(f"select must be greedy, got {select!r}.")
    if select is not None and task is None:
        raise CheckpointError("--select greedy needs validation data. Pass --task my_task.py.")
    if select is None and task is not None:
        raise CheckpointError("--task applies only with --select greedy. Did you mean --refresh?")
    if select is not None and weights != "mean":
        raise CheckpointError("--select greedy averages with equal weights. Remove --weights.")


def _evaluator(task: Task | _Path) -> Evaluator:
    from gadam.checkpoints.selection import Evaluator

    return Evaluator(task)


def _dtype(dtype: torch.dtype | str | None) -> torch.dtype | None:
    if dtype is None:
        return None
    name = str(dtype).removeprefix("torch.")
    if name not in _DTYPES:
        near = did_you_mean(name, _DTYPES)
        hint = f" Did you mean {near}?" if near else ""
        raise CheckpointError(f"dtype must be one of {', '.join(_DTYPES)}, got {name}.{hint}")
    found: torch.dtype = getattr(torch, name)
    return found


def _types(merge: Merge) -> str:
    infos = merge.last.tensors.items()
    types = {str(merge.dtype(name)) for name, info in infos if info.is_averaged}
    return ", ".join(sorted(each.removeprefix("torch.") for each in types))


def _describe(
    weights: Weighting | Sequence[float],
    count: int,
    decay: float | None,
    shape: str,
    select: object,
) -> str:
    if select is not None:
        return "mean of a greedy selection"
    if not isinstance(weights, str):
        return "given"
    if weights == "ema":
        return f"ema, decay {0.5 ** (5 / count) if decay is None else decay:.6g} per checkpoint"
    return f"wsm, {shape} decay" if weights == "wsm" else weights


def _fingerprint(checkpoint: Checkpoint) -> tuple[int, float]:
    """Return the size and the time of the last change of a checkpoint's weights."""
    try:
        states = [path.stat() for path in checkpoint.files]
    except OSError as error:
        raise CheckpointError(f"{checkpoint.path} disappeared while it was read.") from error
    return sum(s.st_size for s in states), max((s.st_mtime for s in states), default=0.0)


def _sha256(checkpoint: Checkpoint) -> str:
    hashes = []
    for path in checkpoint.files:
        with open(path, "rb") as file:
            hashes.append(_digest(file.read, hashlib.sha256()))
    return hashes[0] if len(hashes) == 1 else hashlib.sha256("".join(hashes).encode()).hexdigest()


def _digest(read: Callable[[int], bytes], digest: hashlib._Hash) -> str:
    while block := read(2**20):
        digest.update(block)
    return digest.hexdigest()
