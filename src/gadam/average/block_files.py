"""The files of :class:`gadam.BlockAverages`: block means in a folder, and the manifest of them.

A block is one safetensors file. The manifest lists the blocks that count, with their hashes, and is
replaced atomically. A file appears whole, is never overwritten, and is deleted only after a
manifest without it is on disk. So a process may be killed at any moment.

A file is written from the tensors' own memory, one tensor at a time, and hashed in the same pass.
That takes no memory, and hardly any time in which other threads have to wait for Python.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
import re
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gadam.average.block_contents import BlockError, Contents, merged
from gadam.average.export import import_safetensors, overwrite_error, place_file, sync

__all__ = ["Block", "BlockFolder", "Manifest", "blocks_from", "pair_to_merge"]

_MANIFEST = "blocks.json"  # not the name of a run's manifest, which `gadam verify` looks for
_FORMAT = 1
_BLOCK_FILE = re.compile(r"\.?\d{12,}-\d{12,}\.safetensors(\.\d+)?")
_CHUNK = 1 << 20
_TYPES = {
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float32: "F32",
    torch.float64: "F64",
}
PATIENCE = 300.0  # seconds to wait for a block that another process writes


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
        run: The number of the run that the blocks belong to; 0 before its first step.
        blocks: The blocks, in order and without gaps.
        checkpoints: The blocks at the steps of the last checkpoints, whose files are kept so that
            the run can be resumed there.
    """

    every: int
    stride: int
    run: int = 0
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
            "run": self.run,
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
            content["run"],
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
            self._on_disk = self._current()
            names = {entry.name for entry in self.path.iterdir()} if self.path.exists() else set()
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

    def wait_for(self, stop: int) -> Manifest:
        """Return the manifest, once another process has written the block that ends at a step.

        Args:
            stop: The last step of the block.

        Raises:
            BlockError: If the block does not appear.
        """
        deadline = time.monotonic() + PATIENCE
        while True:
            try:
                manifest = self.read()
            except BlockError:
                if self._on_disk == self._current():
                    raise
                continue  # the other process has just replaced it, and deleted old files
            if manifest is not None and stop in manifest.boundaries:
                return manifest
            if time.monotonic() > deadline:
                raise BlockError(
                    f"{self.path} does not have the block that ends at step {stop}, which the "
                    "first process writes. Pass a folder that all processes share."
                )
            time.sleep(0.02)

    def _current(self) -> bytes | None:
        try:
            return (self.path / _MANIFEST).read_bytes()
        except FileNotFoundError:
            return None

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
            if self._current() != self._on_disk:
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
        types = {str(like.dtype).removeprefix("torch.") for like in contents.likes().values()}
        try:
            about = f"{block.start} {block.stop} {block.count} {block.skipped}"
            digest = _write_safetensors(temporary, contents, {"gadam.block": about})
            place_file(temporary, target)
        except FileExistsError as error:
            raise BlockError(str(overwrite_error(target))) from error
        except OSError as error:
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
        return Contents(file.keys(), file.get_tensor)  # type: ignore[no-untyped-call]

    def merge(self, first: Block, second: Block) -> Block:
        """Write the block of two neighbors. Their own files stay.

        Args:
            first: The earlier block.
            second: The block after it.
        """
        count = first.count + second.count
        block = Block(first.start, second.stop, count, first.skipped + second.skipped)
        shares = [first.count / max(count, 1), second.count / max(count, 1)]
        return self.write(block, merged([self.open(first), self.open(second)], shares))


def _write_safetensors(path: Path, contents: Contents, metadata: Mapping[str, str]) -> str:
    """Write tensors to a safetensors file, and return its hash.

    Args:
        path: The file.
        contents: The tensors. They are computed one at a time.
        metadata: Text by name.
    """
    likes = contents.likes()
    # Wide types first, so that every tensor is aligned.
    keys = sorted(likes, key=lambda key: (-likes[key].dtype.itemsize, key))
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    end = 0
    for key in keys:
        like, begin = likes[key], end
        end += like.numel() * like.dtype.itemsize
        header[key] = {
            "dtype": _TYPES[like.dtype],
            "shape": list(like.shape),
            "data_offsets": [begin, end],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    digest = hashlib.sha256()
    with open(path, "wb") as file:
        start = len(text).to_bytes(8, "little") + text
        file.write(start)
        digest.update(start)
        for key in keys:
            tensor = contents.tensor(key).detach().cpu().contiguous()
            data = _memory(tensor)
            file.write(data)
            digest.update(data)
    return digest.hexdigest()


def _memory(tensor: Tensor) -> ctypes.Array[ctypes.c_char]:
    """Return the bytes of a contiguous tensor on the host, without a copy. It must outlive them."""
    size = tensor.numel() * tensor.element_size()
    return (ctypes.c_char * size).from_address(tensor.data_ptr() if size else 0)


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


def _cannot_write(path: Path, error: Exception) -> str:
    reason = getattr(error, "strerror", None) or error
    return f"{path} could not be written: {reason}. Earlier blocks are intact."
