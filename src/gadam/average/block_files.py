"""The files of :class:`gadam.BlockAverages`: block means in a folder, and the manifest of them.

A block is one safetensors file. The manifest lists the blocks that count, with their hashes, and is
replaced atomically. A file appears whole, is never overwritten, and is deleted only after a
manifest without it is on disk. So a process may be killed at any moment.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gadam._errors import UserError
from gadam.average.export import import_safetensors, overwrite_error, place_file, sync

__all__ = [
    "Block",
    "BlockError",
    "BlockFolder",
    "Contents",
    "Manifest",
    "blocks_from",
    "combined",
    "pair_to_merge",
]

_MANIFEST = "manifest.json"
_FORMAT = 1
_BLOCK_FILE = re.compile(r"\.?\d{12,}-\d{12,}\.safetensors(\.\d+)?")
_INITIAL = "initial."
_CHUNK = 1 << 20


class BlockError(UserError, ValueError):
    """The blocks of a run cannot be used. The message says why, and what to do."""


@dataclass(frozen=True)
class Block:
    """The mean of the iterates after steps ``start + 1`` … ``stop``.

    Attributes:
        start: The step before the first one of the block.
        stop: The last step of the block.
        count: The number of iterates in the mean.
        skipped: The number of iterates that were due but not finite.
        dtype: The types of the means, such as ``"float32"``.
        sha256: The hash of the file.
    """

    start: int
    stop: int
    count: int
    skipped: int
    dtype: str = ""
    sha256: str = ""

    @property
    def file(self) -> str:
        """The name of the block's file."""
        return f"{self.start:012d}-{self.stop:012d}.safetensors"


@dataclass(frozen=True)
class Manifest:
    """The blocks of a run.

    Attributes:
        every: Steps per block.
        stride: Steps per sample.
        blocks: The blocks, in order and without gaps.
        checkpoints: The blocks at the steps of the last checkpoints, whose files are kept so that
            the run can be resumed there.
    """

    every: int
    stride: int
    blocks: tuple[Block, ...] = ()
    checkpoints: Mapping[int, tuple[Block, ...]] = field(default_factory=dict)

    @property
    def boundaries(self) -> list[int]:
        """The steps at which blocks begin or end."""
        return [block.start for block in self.blocks] + [block.stop for block in self.blocks[-1:]]

    @property
    def files(self) -> dict[str, Block]:
        """All blocks whose files must exist, by file."""
        kept = [block for blocks in self.checkpoints.values() for block in blocks]
        return {block.file: block for block in (*self.blocks, *kept)}

    def at(self, step: int) -> tuple[Block, ...] | None:
        """Return the blocks as they were at an earlier step, or None if they are not known.

        Args:
            step: The step.
        """
        if step in self.checkpoints:
            return self.checkpoints[step]
        if any(b.start < step < b.stop and b.stop - b.start > self.every for b in self.blocks):
            return None  # merged later
        return tuple(block for block in self.blocks if block.stop <= step)

    def with_checkpoint(self, step: int, keep: int) -> Manifest:
        """Return the manifest with a checkpoint of the blocks as they are now.

        Args:
            step: The step.
            keep: The number of checkpoints to keep, the new one included.
        """
        known = {s: b for s, b in self.checkpoints.items() if s < step}
        oldest = max(len(known) - keep + 1, 0)
        known = dict(sorted(known.items())[oldest:])
        return replace(self, checkpoints={**known, step: self.blocks})

    def to_bytes(self) -> bytes:
        """Return the manifest as JSON that contains its own hash."""
        content = {
            "format": _FORMAT,
            "every": self.every,
            "stride": self.stride,
            "blocks": [asdict(block) for block in self.blocks],
            "checkpoints": {
                str(step): [asdict(block) for block in blocks]
                for step, blocks in self.checkpoints.items()
            },
        }
        content["sha256"] = _seal(content)
        return (json.dumps(content, indent=1) + "\n").encode()

    @classmethod
    def from_bytes(cls, text: bytes) -> Manifest:
        """Undo :meth:`to_bytes`.

        Args:
            text: The JSON text.

        Raises:
            KeyError, TypeError, ValueError, AttributeError: If the text is damaged.
        """
        content = json.loads(text)
        if content.pop("sha256") != _seal(content):
            raise ValueError("it does not match its hash")
        if content["format"] != _FORMAT:
            raise ValueError(f"its format is {content['format']!r}")
        return cls(
            content["every"],
            content["stride"],
            blocks_from(content["blocks"]),
            {int(step): blocks_from(found) for step, found in content["checkpoints"].items()},
        )


def blocks_from(entries: Iterable[Mapping[str, Any]]) -> tuple[Block, ...]:
    """Return blocks from plain data, as in a manifest or a state dict.

    Args:
        entries: The fields of each block.

    Raises:
        TypeError, ValueError: If they are not the fields of blocks without gaps.
    """
    blocks = tuple(Block(**entry) for entry in entries)
    for block, following in pairwise(blocks):
        if block.stop != following.start:
            raise ValueError(f"there is a gap after step {block.stop}")
    return blocks


def _seal(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


# ------------------------------------------------------------------------------------------ merging


def pair_to_merge(boundaries: Sequence[int], every: int) -> int:
    r"""Return which two neighboring blocks to merge, by the index of the first one.

    The choice minimizes the length of the merged block :math:`[a, c]` relative to its distance from
    the end :math:`T`, :math:`(c - a) / (T - c + \text{every})`. If there are :math:`M + 1` blocks
    and this ratio exceeds :math:`\rho` for every pair, then :math:`T - a + \text{every}` grows by
    more than a factor :math:`1 + \rho` with each of :math:`m = \lfloor (M + 1) / 2 \rfloor`
    disjoint pairs, counted from the end. So the smallest ratio is at most
    :math:`(n + 1)^{1/m} - 1` for :math:`n` blocks' worth of steps, and it only shrinks as
    :math:`T` grows.

    Args:
        boundaries: The steps at which blocks begin or end.
        every: The steps of a block that was not merged.
    """
    end = boundaries[-1]
    ratios = [(c - a) / (end - c + every) for a, c in zip(boundaries, boundaries[2:])]
    return ratios.index(min(ratios))


class Contents:
    """The tensors of a block: the mean of each parameter, by its index in the optimizer.

    A parameter that joined the optimizer, or was unfrozen, in the middle of training was constant
    before. The block in which that happened also holds its initial value, which is its mean over
    all earlier blocks.

    Args:
        tensors: The tensors by key, or an open safetensors file.
        keys: Their keys.
    """

    def __init__(self, tensors: Any, keys: Iterable[str]) -> None:
        self._tensors, self._keys = tensors, set(keys)

    @classmethod
    def of(cls, means: Mapping[int, Tensor], initial: Mapping[int, Tensor]) -> Contents:
        """Return contents in memory.

        Args:
            means: The means by index of the parameter.
            initial: The initial values of parameters that joined in this block.
        """
        tensors = {str(i): _real(mean) for i, mean in means.items()}
        tensors.update({f"{_INITIAL}{i}": _real(value) for i, value in initial.items()})
        return cls(_InMemory(tensors), tensors)

    def mean(self, index: int) -> Tensor | None:
        """Return a parameter's mean as a real tensor, or None if it was not trained yet.

        Args:
            index: The index of the parameter.
        """
        return self._get(str(index))

    def initial(self, index: int) -> Tensor | None:
        """Return the value of a parameter before this block, if it joined in this block.

        Args:
            index: The index of the parameter.
        """
        return self._get(f"{_INITIAL}{index}")

    def _get(self, key: str) -> Tensor | None:
        found: Tensor | None = self._tensors.get_tensor(key) if key in self._keys else None
        return found

    @property
    def indices(self) -> list[int]:
        """The indices of the parameters."""
        return sorted(int(key) for key in self._keys if not key.startswith(_INITIAL))

    @property
    def joined(self) -> list[int]:
        """The indices of the parameters that joined in this block."""
        return sorted(
            int(key.removeprefix(_INITIAL)) for key in self._keys if key.startswith(_INITIAL)
        )

    def tensors(self) -> dict[str, Tensor]:
        """Return all tensors by key, on the host."""
        return {key: self._tensors.get_tensor(key).cpu().contiguous() for key in sorted(self._keys)}


class _InMemory:
    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self._tensors = tensors

    def get_tensor(self, key: str) -> Tensor:
        return self._tensors[key]


def combined(
    contents: Sequence[Contents], shares: Sequence[float], index: int, before: Tensor | None = None
) -> Tensor | None:
    """Return a weighted mean of a parameter's means in consecutive blocks, in float64.

    Args:
        contents: The blocks, in order.
        shares: Their weights, which sum to one.
        index: The index of the parameter.
        before: The value before a block that is not among these, if it joined only there.

    Returns:
        The mean as a real tensor, or None if the parameter is in none of the blocks.
    """
    total: Tensor | None = None
    is_complete = True
    for share, block in reversed(list(zip(shares, contents))):
        mean = block.mean(index)
        if mean is None:
            mean = before
        if index in block.joined:
            before = block.initial(index)
        if share and mean is not None:
            part = mean.to(torch.float64) * share
            total = part if total is None else total.add_(part)
        is_complete &= mean is not None or not share
    if total is not None and not is_complete:
        raise BlockError(
            f"The value of parameter {index} before it joined is not known. Start the window at a "
            "later boundary."
        )
    return total


def merged(first: Block, second: Block, contents: Sequence[Contents]) -> tuple[Block, Contents]:
    """Return the block of two neighbors, whose mean is the weighted mean of theirs.

    Args:
        first: The earlier block.
        second: The block after it.
        contents: The contents of both.
    """
    count = first.count + second.count
    shares = [first.count / max(count, 1), second.count / max(count, 1)]
    means: dict[int, Tensor] = {}
    initial: dict[int, Tensor] = {}
    for index in sorted({index for found in contents for index in found.indices}):
        mean = combined(contents, shares, index)
        means_of = (found.mean(index) for found in contents)
        like = next(mean for mean in means_of if mean is not None)
        if mean is not None:
            means[index] = mean.to(like.dtype)
    for found in contents:
        initial.update({i: value for i in found.joined if (value := found.initial(i)) is not None})
    block = Block(first.start, second.stop, count, first.skipped + second.skipped)
    return block, Contents.of(means, initial)


def _real(tensor: Tensor) -> Tensor:
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


# ------------------------------------------------------------------------------------------- folder


class BlockFolder:
    """A folder of blocks and their manifest.

    Args:
        path: The folder. It is created with the first manifest.

    Raises:
        BlockError: If the folder has other content, or is damaged.
        ImportError: If safetensors is not installed.
    """

    def __init__(self, path: Path) -> None:
        import_safetensors("BlockAverages")
        self.path = path
        self._on_disk: bytes | None = None  # the manifest as it was last read or written
        self._checked: set[str] = set()  # files whose hash is known to be right

    def read(self) -> Manifest | None:
        """Return the manifest, or None if the folder is new."""
        target = self.path / _MANIFEST
        try:
            names = {entry.name for entry in self.path.iterdir()} if self.path.exists() else set()
            self._on_disk = target.read_bytes() if _MANIFEST in names else None
        except OSError as error:
            raise BlockError(f"{self.path} cannot be read: {error.strerror or error}.") from error
        if self._on_disk is None:
            if any(not name.startswith(".") for name in names):
                raise BlockError(
                    f"{self.path} is not empty and has no manifest of blocks. Pass a new folder."
                )
            return None
        try:
            manifest = Manifest.from_bytes(self._on_disk)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise BlockError(
                f"{target} is damaged ({error}). Restore it from a copy, or pass a new folder."
            ) from error
        missing = sorted(set(manifest.files) - names)
        if missing:
            raise BlockError(
                f"{self.path} is damaged: {missing[0]} is missing. Restore it from a copy, or pass "
                "a new folder."
            )
        return manifest

    def commit(self, manifest: Manifest) -> None:
        """Write the manifest, then delete the files of blocks that it does not list.

        Args:
            manifest: The manifest. The files of its blocks exist.

        Raises:
            BlockError: If another process has changed the folder, or it cannot be written.
        """
        target = self.path / _MANIFEST
        temporary = self.path / f".{_MANIFEST}.{os.getpid()}"
        content = manifest.to_bytes()
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            found = target.read_bytes() if target.exists() else None
            if found != self._on_disk:
                raise BlockError(
                    f"Another process has written to {self.path}. Pass a different folder to each "
                    "run."
                )
            with open(temporary, "wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(target)
            sync(self.path)
            self._on_disk = content
            kept = manifest.files
            for entry in self.path.iterdir():
                if _BLOCK_FILE.fullmatch(entry.name) and entry.name not in kept:
                    entry.unlink()
        except OSError as error:
            with suppress(OSError):
                temporary.unlink()
            raise BlockError(_cannot_write(target, error)) from error

    def write(self, block: Block, contents: Contents) -> Block:
        """Write a block.

        Args:
            block: The block.
            contents: Its tensors.

        Returns:
            The block with its dtype and hash.

        Raises:
            BlockError: If the file exists or cannot be written.
        """
        target = self.path / block.file
        temporary = target.with_name(f".{target.name}.{os.getpid()}")
        tensors = contents.tensors()
        types = {str(tensor.dtype).removeprefix("torch.") for tensor in tensors.values()}
        try:
            # One entry: safetensors writes several in random order.
            about = {"gadam.block": f"{block.start} {block.stop} {block.count} {block.skipped}"}
            import_safetensors("BlockAverages")(tensors, str(temporary), about)
            digest = _sha256(temporary)
            place_file(temporary, target)
        except FileExistsError as error:
            raise BlockError(str(overwrite_error(target))) from error
        except Exception as error:  # safetensors has its own errors for a full disk
            raise BlockError(_cannot_write(target, error)) from error
        finally:
            with suppress(OSError):
                temporary.unlink()
        self._checked.add(block.file)
        return replace(block, dtype=",".join(sorted(types)), sha256=digest)

    def open(self, block: Block) -> Contents:
        """Return the contents of a block, whose tensors are read on demand.

        Args:
            block: The block.

        Raises:
            BlockError: If the file is missing or damaged.
        """
        from safetensors import SafetensorError, safe_open

        path = self.path / block.file
        try:
            if block.file not in self._checked and _sha256(path) != block.sha256:
                raise BlockError(
                    f"{path} is damaged: it does not match its hash. Restore it from a copy."
                )
            self._checked.add(block.file)
            file = safe_open(str(path), framework="pt")
        except (OSError, SafetensorError) as error:
            raise BlockError(f"{path} cannot be read: {error}.") from error
        return Contents(file, file.keys())  # type: ignore[no-untyped-call]

    def merge(self, first: Block, second: Block) -> Block:
        """Write the block of two neighbors. Their own files stay.

        Args:
            first: The earlier block.
            second: The block after it.
        """
        return self.write(*merged(first, second, [self.open(first), self.open(second)]))


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


def _cannot_write(path: Path, error: Exception) -> str:
    reason = getattr(error, "strerror", None) or error
    return f"{path} could not be written: {reason}. Earlier blocks are intact."
