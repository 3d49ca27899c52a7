"""Checkpoints that several processes write together, in the format of torch.distributed.checkpoint.

A checkpoint is a folder, `checkpoint-<epochs>-<hash>.dcp`. Within an epoch, its name also has the
steps: `checkpoint-<epochs>+<steps>-<hash>.dcp`.

=========================  =================================================================
`__<rank>_<n>.distcp`      the tensors, some from each rank
`.metadata`                where each part of each tensor is
`rest.pt`                  everything else: numbers, names, small tensors, the run's record
`manifest.json`            sizes and hashes of these files; its own hash is in the folder's name
=========================  =================================================================

The folder gets its name when it is complete. So what has the name is complete, and a file from
elsewhere, or from another checkpoint, does not fit.
"""

from __future__ import annotations

import hashlib
import io
import pickle
import re
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from typing_extensions import override

from gadam._dtensor import is_dtensor
from gadam.runs.files import (
    RunError,
    parse_json,
    read_regular_file,
    sha256,
    sync_folder,
    to_json,
    write_atomically,
)

__all__ = ["SUFFIX", "Reader", "commit", "hash_file", "joined", "read", "separated", "verify"]

SUFFIX = ".dcp"
_MANIFEST, _REST = "manifest.json", "rest.pt"
_FILE = re.compile(r"\.metadata|rest\.pt|__\d+_\d+\.distcp")
_TENSOR = "gadam.tensor"  # the key of a tensor's name, in its place
_SMALL = 64  # tensors with at most so many elements are saved with the rest

State: TypeAlias = dict[str, Any]
Tensors: TypeAlias = dict[str, dict[str, Tensor]]  # by the first key, then by the others
Make: TypeAlias = Callable[[str, str, torch.Size, torch.dtype], Tensor]


# ----------------------------------------------------------------------------- tensors and the rest


def separated(state: State) -> tuple[Tensors, State]:
    """Separate the tensors of a state from the rest.

    A tensor that occurs twice is saved once. Every rank gets the same names.

    Args:
        state: Nested dicts, lists and tuples.

    Returns:
        The tensors, and the state with a name in the place of each.

    Example:
        >>> tensors, rest = separated({"model": {"weight": torch.zeros(100)}, "finished": False})
        >>> list(tensors["model"]), rest["finished"]
        (['weight'], False)
    """
    tensors: Tensors = {}
    known: dict[int, State] = {}

    def place(value: Any, path: tuple[str, ...]) -> Any:
        if isinstance(value, Tensor):
            if value.numel() <= _SMALL and not is_dtensor(value):
                return value.detach().cpu().clone()
            if id(value) not in known:
                key, name = path[0], ".".join(path[1:])
                tensors.setdefault(key, {})[name] = value.detach()
                known[id(value)] = {_TENSOR: [key, name]}
            return known[id(value)]
        if isinstance(value, Mapping):
            return {key: place(each, (*path, str(key))) for key, each in value.items()}
        if isinstance(value, list | tuple):
            values = [place(each, (*path, str(i))) for i, each in enumerate(value)]
            return values if isinstance(value, list) else tuple(values)
        return value

    return tensors, place(state, ())


def joined(tensors: Tensors, rest: Any) -> Any:
    """Return the state that :func:`separated` took apart.

    Args:
        tensors: The tensors.
        rest: Everything else.
    """
    if isinstance(rest, dict):
        if rest.keys() == {_TENSOR}:
            key, name = rest[_TENSOR]
            return tensors[key][name]
        return {key: joined(tensors, value) for key, value in rest.items()}
    if isinstance(rest, list | tuple):
        values = [joined(tensors, value) for value in rest]
        return values if isinstance(rest, list) else tuple(values)
    return rest


# -------------------------------------------------------------------------------------------- files


def hash_file(path: Path) -> dict[str, Any]:
    """Return the size and the hash of a file, as in a manifest.

    Args:
        path: The file. It is read in pieces.
    """
    digest, size = hashlib.sha256(), 0
    with path.open("rb") as file:
        while content := file.read(2**20):
            digest.update(content)
            size += len(content)
    return {"size": size, "sha256": digest.hexdigest()}


def commit(folder: Path, target: str, rest: State, hashes: Mapping[str, dict[str, Any]]) -> Path:
    """Complete a checkpoint whose tensors have been written, and give it its name.

    Args:
        folder: The folder with the tensors, beside its target.
        target: The beginning of its name, such as "checkpoint-000012".
        rest: What is not in the files of the tensors.
        hashes: Of the files of the tensors.

    Returns:
        The checkpoint.

    Raises:
        RunError: A file cannot be written.
    """
    buffer = io.BytesIO()
    torch.save(rest, buffer)
    write_atomically(folder / _REST, buffer.getvalue())
    files = {**hashes, **{name: hash_file(folder / name) for name in (_REST, ".metadata")}}
    content = (to_json({"files": dict(sorted(files.items()))}, indent=1) + "\n").encode()
    write_atomically(folder / _MANIFEST, content)
    path = folder.with_name(f"{target}-{sha256(content)[:16]}{SUFFIX}")
    if path.exists():  # the same content
        shutil.rmtree(folder)
        return path
    folder.rename(path)
    sync_folder(path.parent)
    return path


def verify(path: Path) -> str:
    """Check that a checkpoint is as it was written.

    Args:
        path: Its folder.

    Returns:
        What is wrong, as a clause without a subject; empty if nothing is.
    """
    try:
        content = read_regular_file(path / _MANIFEST)
        if sha256(content)[:16] != path.stem.split("-")[-1]:
            return f"has a {_MANIFEST} that does not match its name"
        files: dict[str, dict[str, Any]] = parse_json(content)["files"]
        if not all(_FILE.fullmatch(name) for name in files):  # never look outside the folder
            return f"has a {_MANIFEST} with other files"
        if others := {p.name for p in path.glob("*.distcp")} - set(files):
            return f"has files of another checkpoint ({min(others)})"
        with ThreadPoolExecutor(8) as pool:
            found = dict(zip(files, pool.map(lambda name: hash_file(path / name), files)))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return f"cannot be read ({error})"
    changed = [name for name in files if found[name] != files[name]]
    return f"has a damaged file, {changed[0]}" if changed else ""


def read_rest(path: Path) -> State:
    """Return what a checkpoint holds beside its tensors. Verify it first.

    Args:
        path: Its folder.

    Raises:
        RunError: It cannot be read.
    """
    try:
        content = read_regular_file(path / _REST)
        rest = torch.load(io.BytesIO(content), weights_only=True, map_location="cpu")
    except Exception as error:  # unpicklers raise almost anything on a file that is not theirs
        raise RunError(f"{path / _REST} cannot be read ({error}).") from error
    if not isinstance(rest, dict):
        raise RunError(f"{path / _REST} is not the state of a run.")
    return rest


def read(path: Path, make: Make | None = None) -> State:
    """Read a checkpoint, or this process's shards of it. Verify it first. Not collective.

    Args:
        path: Its folder.
        make: Returns the tensor to read into, from its keys, shape and type. Default: a whole
            tensor on the host.

    Raises:
        RunError: It cannot be read.
    """
    rest = read_rest(path)
    try:
        reader = Reader(path)
        tensors: Tensors = {}
        for name, keys in (reader.metadata.planner_data or {}).items():
            entry = reader.metadata.state_dict_metadata[name]
            if isinstance(entry, TensorStorageMetadata):
                key, inner = map(str, keys)
                dtype = entry.properties.dtype
                tensors.setdefault(key, {})[inner] = (
                    make(key, inner, entry.size, dtype)
                    if make is not None
                    else torch.empty(entry.size, dtype=dtype)
                )
        with quiet():
            load(tensors, storage_reader=reader, no_dist=True)
    except Exception as error:
        raise RunError(f"{path} cannot be read ({error}).") from error
    state: State = joined(tensors, rest)
    return state


def remove(path: Path) -> None:
    """Remove a checkpoint: first its name, so that no part of it is ever found.

    Args:
        path: Its folder.
    """
    with suppress(OSError):
        shutil.rmtree(path.rename(path.with_name(f".{path.name}.removed")), ignore_errors=True)


@contextmanager
def quiet() -> Iterator[None]:
    """Ignore the warnings of torch.distributed.checkpoint about a single process."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is ")
        warnings.filterwarnings("ignore", "TypedStorage is deprecated")
        yield


# ----------------------------------------------------------------------------------------- metadata

# All that the metadata of a folder consists of. A pickle can name any function.
_METADATA = "torch.distributed.checkpoint.metadata"
_ALLOWED = {
    **dict.fromkeys(
        (
            "BytesStorageMetadata",
            "ChunkStorageMetadata",
            "Metadata",
            "MetadataIndex",
            "StorageMeta",
            "TensorProperties",
            "TensorStorageMetadata",
            "_MEM_FORMAT_ENCODING",
        ),
        _METADATA,
    ),
    "_StorageInfo": "torch.distributed.checkpoint.filesystem",
    "_get_layout": "torch.serialization",
    "Size": "torch",
    **dict.fromkeys(("Path", "PosixPath", "PurePosixPath"), "pathlib"),
}


class _MetadataUnpickler(pickle.Unpickler):
    @override
    def find_class(self, module: str, name: str) -> Any:
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if is_dtype or _ALLOWED.get(name) == module.replace("pathlib._local", "pathlib"):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"it refers to {module}.{name}")


class Reader(FileSystemReader):
    """Reads a folder of torch.distributed.checkpoint. Runs no code from its metadata.

    Args:
        folder: The folder.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        with open(folder / ".metadata", "rb") as file:
            self.metadata: Metadata = _MetadataUnpickler(file).load()

    @override
    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        if self.metadata.storage_meta is not None:
            self.metadata.storage_meta.load_id = self.load_id
        return self.metadata
