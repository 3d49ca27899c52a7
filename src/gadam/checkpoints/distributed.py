"""Folders of torch.distributed.checkpoint (DCP), read and written by one process."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from typing_extensions import override

from gadam.checkpoints.errors import CheckpointError
from gadam.checkpoints.formats import (
    MODEL_KEYS,
    PROVENANCE,
    SUPPORTED,
    Checkpoint,
    Read,
    Source,
    TensorInfo,
    is_training_state,
)
from gadam.runs.sharded import Reader, quiet

__all__ = ["DistributedFolder"]


class _Planner(DefaultSavePlanner):
    """Saves tensors that are computed when they are written."""

    def __init__(self, compute: Callable[[str], Tensor]) -> None:
        super().__init__()
        self._compute = compute

    @override
    def lookup_object(self, index: MetadataIndex) -> Tensor:
        return self._compute(index.fqn)


class DistributedFolder(Checkpoint):
    """A DCP folder. Only the model in it is used: not the optimizer, nor anything else.

    Args:
        path: The folder.
        key: Where the weights are, such as "app.model". The default finds them.

    Raises:
        CheckpointError: The folder is damaged, or has no weights.
    """

    reads_whole_tensors = True

    def __init__(self, path: Path, key: str | None = None) -> None:
        self.path = path
        self.files = tuple(sorted(path.glob("*.distcp")))
        try:
            self._reader = Reader(path)
            entries = self._reader.metadata.state_dict_metadata
            # Keys from the outside in. A flat dict has none.
            places: dict[str, tuple[Any, ...]] = {
                **{name: (name,) for name in entries},
                **(self._reader.metadata.planner_data or {}),
            }
        except (OSError, pickle.UnpicklingError, AttributeError, EOFError, ValueError) as error:
            raise CheckpointError(f"{path / '.metadata'} cannot be read ({error}).") from error
        tensors = {n: e for n, e in entries.items() if isinstance(e, TensorStorageMetadata)}
        depth = _prefix(places, list(tensors), key.split(".") if key else None)
        self._places = {
            name: places[name]
            for name in tensors
            if places[name][: len(depth)] == depth
            and not (len(depth) == 0 and is_training_state(str(places[name][0])))
        }
        if not self._places:
            raise CheckpointError(f"{path} has no model weights at {key or 'a known key'}.")
        self.tensors = {name: _info(tensors[name]) for name in self._places}
        used = {place[0] for place in self._places.values()}
        others = {str(places[name][0]) for name in entries if places[name][0] not in used}
        self.left_out = tuple(sorted(others))

    @override
    @contextmanager
    def open(self) -> Iterator[Read]:
        known: dict[str, Tensor] = {}

        def read(name: str, start: int, stop: int) -> Tensor:
            if name not in known:
                known.clear()
                info = self.tensors[name]
                known[name] = torch.empty(info.shape, dtype=info.dtype)
                with quiet():
                    load({name: known[name]}, storage_reader=self._reader)
            return known[name].view(-1)[start:stop]

        yield read

    @override
    def write(self, target: Path, source: Source, provenance: str) -> None:
        problems: list[CheckpointError] = []

        def compute(name: str) -> Tensor:
            result = torch.empty(self.tensors[name].shape, dtype=source.dtype(name))
            try:
                for part in source.parts([name]):
                    result.view(-1)[part.start : part.start + part.values.numel()] = part.values
            except CheckpointError as error:
                problems.append(error)
                raise
            return result

        state: dict[str, Any] = {}
        for name, place in self._places.items():
            inner = state
            for key in place[:-1]:
                inner = inner.setdefault(key, {})
            shape, dtype = self.tensors[name].shape, source.dtype(name)
            inner[place[-1]] = torch.empty(shape, dtype=dtype, device="meta")
        # A file per tensor, because the writer holds a whole file in memory.
        writer = FileSystemWriter(target, single_file_per_rank=False)
        try:
            with quiet():
                save(state, storage_writer=writer, planner=_Planner(compute))
        except CheckpointException:  # torch wraps errors in one with all tracebacks
            if problems:
                raise problems[0] from None
            raise
        (target / PROVENANCE).write_text(provenance)


def _info(entry: TensorStorageMetadata) -> TensorInfo:
    dtype = entry.properties.dtype
    obstacle = "" if dtype in SUPPORTED else f"of type {str(dtype).removeprefix('torch.')}"
    return TensorInfo(tuple(entry.size), dtype, obstacle)


def _prefix(
    places: dict[str, tuple[Any, ...]], tensors: list[str], key: list[str] | None
) -> tuple[Any, ...]:
    """Return the keys that lead to the model, the fewest ones."""
    if key is not None:
        return tuple(key)
    found = {
        place[: i + 1]
        for place in (places[name] for name in tensors)
        for i, part in enumerate(place[:-1])
        if part in MODEL_KEYS
    }
    return min(found, key=len, default=())
