"""The formats of checkpoints: what is in them, reading a part of a tensor, and writing the same.

A checkpoint is opened for a group of tensors at a time and read in parts, so that no more than the
current group is in memory. Add a format as a subclass of :class:`Checkpoint`, and select it in
:func:`open_checkpoint`.
"""

from __future__ import annotations

import ctypes
import json
import pickle
import re
import shutil
import zipfile
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from io import FileIO
from math import prod
from pathlib import Path
from typing import Any, Literal, Protocol, TypeAlias, cast

import torch
from torch import Tensor
from typing_extensions import override

from gadam.checkpoints.errors import CheckpointError, enumerated

__all__ = [
    "ARCHIVED_PROVENANCE",
    "METADATA_KEY",
    "MODEL_KEYS",
    "PROVENANCE",
    "SUPPORTED",
    "TORCH_SUFFIXES",
    "Checkpoint",
    "Folder",
    "Part",
    "Point",
    "Read",
    "SafetensorsFile",
    "Source",
    "TensorInfo",
    "TorchFile",
    "find_weights",
    "is_training_state",
    "memory",
    "open_checkpoint",
]

PROVENANCE = "gadam-average.json"
ARCHIVED_PROVENANCE = f"archive/{PROVENANCE}"  # in a torch file
METADATA_KEY = "gadam.average"  # of a safetensors file
TORCH_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt")

Point: TypeAlias = Literal["iterate", "average"]
Read: TypeAlias = Callable[[str, int, int], Tensor]
"""Returns the elements from start to stop of a flattened tensor."""


@dataclass(frozen=True)
class TensorInfo:
    """What a checkpoint says about a tensor.

    Attributes:
        shape: Its shape.
        dtype: Its type.
        obstacle: Why it cannot be averaged, such as "a sparse tensor"; empty if it can.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    obstacle: str = ""

    @property
    def numel(self) -> int:
        """The number of its elements."""
        return prod(self.shape)

    @property
    def is_averaged(self) -> bool:
        """Whether it is averaged. Integers and flags are taken from the last checkpoint."""
        return self.dtype.is_floating_point


@dataclass(frozen=True)
class Part:
    """Consecutive elements of a flattened tensor, and their values."""

    name: str
    start: int
    values: Tensor


class Source(Protocol):
    """Where a writer gets the tensors of the result from."""

    @property
    def aliases(self) -> Mapping[str, str]:
        """Names of tensors that are another one."""
        ...

    def dtype(self, name: str) -> torch.dtype:
        """Return the type of a tensor."""
        ...

    def parts(self, names: Sequence[str]) -> Iterator[Part]:
        """Iterate over the elements of these tensors, in this order."""
        ...


class Checkpoint(ABC):
    """The model's tensors in a checkpoint.

    Attributes:
        path: Its file or folder.
        tensors: What is known about each tensor.
        files: The files that hold them.
        aliases: For each name of a tensor that has an earlier name too, that name.
        left_out: What :meth:`write` does not copy, because it belongs to the training.
        notices: Sentences for the user.
        reads_whole_tensors: Whether reading a part of a tensor takes as long as all of it.
    """

    path: Path
    tensors: dict[str, TensorInfo]
    files: tuple[Path, ...]
    aliases: Mapping[str, str] = {}
    left_out: tuple[str, ...] = ()
    reads_whole_tensors = False
    notices: tuple[str, ...] = ()

    @abstractmethod
    def open(self) -> AbstractContextManager[Read]:
        """Open the checkpoint to read tensors. Closing it frees all memory."""

    @abstractmethod
    def write(self, target: Path, source: Source, provenance: str) -> None:
        """Write a checkpoint with this layout and other tensors.

        Args:
            target: A file or folder that does not exist.
            source: The tensors.
            provenance: JSON, to store with them.
        """


def open_checkpoint(path: Path, *, key: str | None = None, point: Point = "iterate") -> Checkpoint:
    """Return a checkpoint, by its format.

    Args:
        path: A file or folder.
        key: Where a torch file has the weights, such as "ema.model". The default finds them.
        point: Which weights to use of a Lightning checkpoint that has both.

    Raises:
        CheckpointError: It is not a checkpoint, or is damaged.
    """
    if path.is_dir():
        if (path / ".metadata").is_file():
            from gadam.checkpoints.distributed import DistributedFolder

            return DistributedFolder(path, key)
        return Folder(path, key, point)
    if path.suffix == ".safetensors":
        return SafetensorsFile(path)
    if path.suffix in TORCH_SUFFIXES:
        return TorchFile(path, key, point)
    known = ", ".join((".safetensors", *TORCH_SUFFIXES))
    raise CheckpointError(f"{path} is not a checkpoint. Pass folders, or files named {known}.")


def memory(tensor: Tensor) -> ctypes.Array[ctypes.c_char]:
    """Return the bytes of a contiguous tensor, without a copy.

    Args:
        tensor: On the host. It must outlive the result.
    """
    size = tensor.numel() * tensor.element_size()
    return (ctypes.c_char * size).from_address(tensor.data_ptr() if size else 0)


# ------------------------------------------------------------------------------------ safetensors


_DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I16": torch.int16,
    "U16": torch.uint16,
    "I32": torch.int32,
    "U32": torch.uint32,
    "I64": torch.int64,
    "U64": torch.uint64,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
}
_CODES = {dtype: code for code, dtype in _DTYPES.items()}
SUPPORTED = frozenset(_CODES)


class SafetensorsFile(Checkpoint):
    """A safetensors file.

    The format is an 8-byte length, a JSON header, and the tensors. It is read and written here, so
    that a part of a tensor is in memory instead of a file.

    Args:
        path: The file.

    Raises:
        CheckpointError: The file is damaged.
    """

    def __init__(self, path: Path) -> None:
        self.path, self.files = path, (path,)
        try:
            with open(path, "rb") as file:
                size = int.from_bytes(file.read(8), "little")
                if size > path.stat().st_size:
                    raise ValueError("its header is longer than the file")
                header = json.loads(file.read(size))
                end = path.stat().st_size - size - 8
            self.metadata: dict[str, str] = header.pop("__metadata__", {})
            self._begin = size + 8
            self._offsets = {name: entry["data_offsets"][0] for name, entry in header.items()}
            self.tensors = {
                name: _safetensors_info(entry, end)
                for name, entry in sorted(header.items(), key=lambda item: self._offsets[item[0]])
            }
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(
                f"{path} is damaged or is not a safetensors file ({error})."
            ) from error

    @override
    @contextmanager
    def open(self) -> Iterator[Read]:
        with open(self.path, "rb", buffering=0) as file:

            def read(name: str, start: int, stop: int) -> Tensor:
                values = torch.empty(stop - start, dtype=self.tensors[name].dtype)
                file.seek(self._begin + self._offsets[name] + start * values.element_size())
                _fill(file, values, self.path)
                return values

            yield read

    @override
    def write(self, target: Path, source: Source, provenance: str) -> None:
        # Wide types first, so that every tensor is aligned.
        names = sorted(self.tensors, key=lambda name: -source.dtype(name).itemsize)
        header: dict[str, Any] = {
            "__metadata__": {
                "format": "pt",
                **{k: v for k, v in self.metadata.items() if not k.startswith("gadam.")},
                METADATA_KEY: provenance,
            }
        }
        end = 0
        for name in names:
            info, dtype, begin = self.tensors[name], source.dtype(name), end
            end += info.numel * dtype.itemsize
            header[name] = {
                "dtype": _CODES[dtype],
                "shape": list(info.shape),
                "data_offsets": [begin, end],
            }
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        with open(target, "wb") as file:
            file.write(len(text).to_bytes(8, "little"))
            file.write(text)
            for part in source.parts(names):
                file.write(memory(part.values.contiguous()))


def _safetensors_info(entry: Mapping[str, Any], end: int) -> TensorInfo:
    shape, code = tuple(entry["shape"]), entry["dtype"]
    begin, stop = entry["data_offsets"]
    if not 0 <= begin <= stop <= end:
        raise ValueError("it is shorter than its header says")
    dtype = _DTYPES.get(code)
    if dtype is None:
        # Its type does not matter: nothing reads it.
        return TensorInfo(shape, torch.uint8, f"of type {code}")
    info = TensorInfo(shape, dtype)
    if stop - begin != info.numel * dtype.itemsize:
        raise ValueError("a tensor's size does not match its shape")
    return info


def _fill(file: FileIO, values: Tensor, path: Path) -> None:
    view = memoryview(memory(values)).cast("B")
    while view:
        count = file.readinto(view)
        if not count:
            raise CheckpointError(f"{path} became shorter while it was read.")
        view = view[count:]


# ------------------------------------------------------------------------------------ torch files


# Where trainers put the weights, in the order of preference.
MODEL_KEYS = ("state_dict", "model_state_dict", "model_state", "model", "module")
_RAW_KEY = "current_model_state"  # Lightning, if "state_dict" has the average
# The state of a training that does not fit the averaged weights.
_TRAINING = re.compile(
    r"(optim(izer)?s?|(lr_)?schedulers?|(grad_)?scaler|amp|rng)(_states?)?(_dict)?|"
    r"current_model_state|averaging_state|average"
)


def is_training_state(key: str) -> bool:
    """Return True if an entry of a checkpoint is state of a training, such as the optimizer's.

    Args:
        key: The name of the entry.
    """
    return _TRAINING.fullmatch(key) is not None


class TorchFile(Checkpoint):
    """A file of ``torch.save``: a state dict, or a dict that contains one, such as Lightning's.

    Args:
        path: The file.
        key: Where the weights are, such as "ema.model". The default finds them.
        point: Which weights to use of a Lightning checkpoint that has both.

    Raises:
        CheckpointError: The file is damaged, has no weights, or more than one candidate.
    """

    def __init__(self, path: Path, key: str | None = None, point: Point = "iterate") -> None:
        self.path, self.files = path, (path,)
        content = _load(path)
        self._keys = tuple(key.split(".")) if key else find_weights(content, path, point)
        if self._keys[-1:] == (_RAW_KEY,):
            self.notices = (
                "The checkpoints contain averaged and raw weights. The raw ones are averaged. Pass "
                "--point average for the others.",
            )
        state = self._state(content)
        self.tensors = {n: _torch_info(v) for n, v in state.items() if isinstance(v, Tensor)}
        if not self.tensors:
            raise CheckpointError(f"{path} has no tensors at {key or 'any known key'}.")
        self.aliases = _aliases(state)
        if self._keys:
            self.left_out = tuple(str(key) for key in content if is_training_state(str(key)))

    def _state(self, content: Any) -> dict[str, Any]:
        for key in self._keys:
            if not isinstance(content, dict) or key not in content:
                found = enumerated(list(map(str, content))) if isinstance(content, dict) else "none"
                raise CheckpointError(
                    f"{self.path} has no entry {'.'.join(self._keys)!r}. Its keys are {found}."
                )
            content = content[key]
        if not isinstance(content, dict):
            raise CheckpointError(f"{self.path} has no state dict at {'.'.join(self._keys)!r}.")
        return content

    @override
    @contextmanager
    def open(self) -> Iterator[Read]:
        state = self._state(_load(self.path))

        def read(name: str, start: int, stop: int) -> Tensor:
            values: Tensor = state[name].detach().reshape(-1)[start:stop]
            return values

        yield read
        state.clear()

    @override
    def write(self, target: Path, source: Source, provenance: str) -> None:
        content = _load(self.path)
        state = self._state(content)
        tensors = {
            name: torch.empty(info.shape, dtype=source.dtype(name))
            for name, info in self.tensors.items()
            if name not in source.aliases
        }
        for part in source.parts(list(tensors)):
            place = tensors[part.name].view(-1)[part.start : part.start + part.values.numel()]
            place.copy_(part.values)
        state.update(tensors)
        aliases = source.aliases.items()
        state.update({name: tensors[known] for name, known in aliases if name in self.tensors})
        if self._keys[-1:] == (_RAW_KEY,):
            content["state_dict"] = state
        for name in [key for key in content if str(key) in self.left_out]:
            del content[name]
        with open(target, "wb") as file:  # torch would name the archive's folder after a path
            torch.save(content, file)
        # Other entries of the archive do not concern torch.load.
        with zipfile.ZipFile(target, "a") as archive:
            archive.writestr(ARCHIVED_PROVENANCE, provenance)


def _load(path: Path) -> Any:
    """Load a torch file without running code from it, memory-mapped if it is a zip archive."""
    mmap = zipfile.is_zipfile(path)
    try:
        return torch.load(path, weights_only=True, map_location="cpu", mmap=mmap)
    except pickle.UnpicklingError as error:
        unsafe = re.search(r"Unsupported global: GLOBAL (\S+)|class (\S+) was not", str(error))
        what = f" ({unsafe[1] or unsafe[2]})" if unsafe else ""
        raise CheckpointError(
            f"{path} contains Python objects other than tensors{what}, which torch does not load "
            "safely. Save a state dict instead."
        ) from error
    except (OSError, RuntimeError, EOFError, ValueError, KeyError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise CheckpointError(f"{path} is damaged or is not a torch file ({reason}).") from error


def find_weights(content: Any, path: Path, point: Point = "iterate") -> tuple[str, ...]:
    """Return the keys that lead to the model's state dict.

    Args:
        content: What ``torch.load`` returned.
        path: Its file, for error messages.
        point: Which weights to use if there are raw and averaged ones.

    Raises:
        CheckpointError: There is no state dict, or more than one.

    Example:
        >>> find_weights({"epoch": 3, "model": {"w": torch.ones(2)}}, Path("a.pt"))
        ('model',)
    """
    if isinstance(content, dict):
        if point == "iterate" and _is_state_dict(content.get(_RAW_KEY)):
            return (_RAW_KEY,)
        found = [key for key in MODEL_KEYS if _is_state_dict(content.get(key))]
        if len(found) > 1:
            raise CheckpointError(
                f"{path} has weights at {' and '.join(found)}. Select one with --key {found[0]}."
            )
        if found:
            return (found[0], *find_weights(content[found[0]], path, point))
        # Tensors beside a dict of tensors are no state dict, but something like a step counter.
        nested = any(
            _is_state_dict(value)
            for key, value in content.items()
            if not str(key).endswith("_extra_state")
        )
        if not nested and any(isinstance(value, Tensor) for value in content.values()):
            return ()
    keys = f" Its keys are {enumerated(list(map(str, content)))}." if content else ""
    raise CheckpointError(
        f"{path} has no model weights at a known key.{keys} Select one with --key."
        if isinstance(content, dict)
        else f"{path} contains a {type(content).__name__}, not a state dict."
    )


def _is_state_dict(value: Any) -> bool:
    """Return True if a value is a state dict, or a dict that contains one."""
    return isinstance(value, dict) and (
        any(isinstance(each, Tensor) for each in value.values())
        or any(_is_state_dict(value.get(key)) for key in MODEL_KEYS)
    )


def _torch_info(tensor: Tensor) -> TensorInfo:
    obstacle = ""
    if type(tensor) not in (Tensor, torch.nn.Parameter):
        obstacle = f"a {type(tensor).__name__}"
    elif tensor.layout != torch.strided:
        obstacle = "a sparse tensor"
    elif tensor.is_quantized or tensor.dtype not in SUPPORTED:
        obstacle = f"of type {str(tensor.dtype).removeprefix('torch.')}"
    return TensorInfo(tuple(tensor.shape), tensor.dtype, obstacle)


def _aliases(state: Mapping[str, Any]) -> dict[str, str]:
    """Return the names of tensors that are another one, such as tied weights."""
    first: dict[object, str] = {}
    aliases = {}
    for name, value in state.items():
        if isinstance(value, Tensor) and value.layout == torch.strided and value.numel():
            identity = (value.data_ptr(), value.dtype, value.shape, value.stride())
            if first.setdefault(identity, name) != name:
                aliases[name] = first[identity]
    return aliases


# ---------------------------------------------------------------------------------------- folders


_WEIGHTS = ("model", "adapter_model", "diffusion_pytorch_model", "pytorch_model")
# Weights that would contradict the averaged ones, and the state of the training.
_LEFT_OUT = re.compile(
    r".*\.(safetensors|bin|pt|pth|ckpt|h5|msgpack|onnx|gguf|distcp)(\.index\.json)?|"
    r"optimizer.*|scheduler.*|trainer_state\.json|global_step.*|latest|zero_to_fp32\.py|"
    rf"checkpoint-.*|gadam|{re.escape(PROVENANCE)}|\..*"
)


def _is_left_out(name: str) -> bool:
    return _LEFT_OUT.fullmatch(name) is not None and name != "training_args.bin"


class Folder(Checkpoint):
    """A folder with a model as Hugging Face saves it: whole or in shards, or an adapter.

    Args:
        path: The folder.
        key: Where torch files have the weights.
        point: Which weights to use of torch files that have both.

    Raises:
        CheckpointError: It has no weights, or several, or is damaged.
    """

    def __init__(self, path: Path, key: str | None = None, point: Point = "iterate") -> None:
        self.path = path
        names, self._index = _weight_files(path)
        self._shards: list[Checkpoint] = [
            open_checkpoint(path / name, key=key, point=point) for name in names
        ]
        self.files = tuple(shard.path for shard in self._shards)
        self.tensors = {}
        self._home: dict[str, Checkpoint] = {}
        for shard in self._shards:
            for name, info in shard.tensors.items():
                if name in self._home:
                    raise CheckpointError(f"{path} has {name} in two shards.")
                self.tensors[name], self._home[name] = info, shard
        self.aliases = {n: known for shard in self._shards for n, known in shard.aliases.items()}
        self._others = [
            each for each in sorted(path.iterdir()) if each.name not in {*names, self._index}
        ]
        self.left_out = tuple(each.name for each in self._others if _is_left_out(each.name))
        self._check()

    def _check(self) -> None:
        if self._index is not None:
            expected = _json(self.path / self._index)["weight_map"]
            missing = [name for name in expected if name not in self.tensors]
            if missing:
                raise CheckpointError(f"The shards in {self.path} lack {enumerated(missing)}.")
        config = self.path / "config.json"
        if config.is_file() and _json(config).get("quantization_config"):
            raise CheckpointError(
                f"{self.path} is quantized. Average the checkpoints before quantization."
            )

    @override
    @contextmanager
    def open(self) -> Iterator[Read]:
        with ExitStack() as stack:
            opened: dict[Checkpoint, Read] = {}

            def read(name: str, start: int, stop: int) -> Tensor:
                shard = self._home[name]
                if shard not in opened:
                    opened[shard] = stack.enter_context(shard.open())
                return opened[shard](name, start, stop)

            yield read

    @override
    def write(self, target: Path, source: Source, provenance: str) -> None:
        target.mkdir()
        for path in self._others:
            if path.name not in self.left_out:
                copy = shutil.copytree if path.is_dir() else shutil.copy2
                copy(path, target / path.name)
        for shard in self._shards:
            shard.write(target / shard.path.name, source, provenance)
        size = sum(info.numel * source.dtype(n).itemsize for n, info in self.tensors.items())
        if self._index is not None:
            index = _json(self.path / self._index)
            index["metadata"] = {**(index.get("metadata") or {}), "total_size": size}
            (target / self._index).write_text(json.dumps(index, indent=2) + "\n")
        self._write_config(target / "config.json", source)
        (target / PROVENANCE).write_text(provenance)

    def _write_config(self, config: Path, source: Source) -> None:
        """Make a copied config name the type of the weights, which from_pretrained goes by."""
        changed = {
            source.dtype(name)
            for name, info in self.tensors.items()
            if info.is_averaged and source.dtype(name) != info.dtype
        }
        if len(changed) == 1 and config.is_file():
            content = _json(config)
            for key in {"dtype", "torch_dtype"} & set(content):
                content[key] = str(next(iter(changed))).removeprefix("torch.")
            config.write_text(json.dumps(content, indent=2) + "\n")


def _weight_files(folder: Path) -> tuple[list[str], str | None]:
    """Return the files with a model's weights, and the file that lists them, if there is one."""
    for suffix in ("safetensors", *(each[1:] for each in TORCH_SUFFIXES)):
        indexes = sorted(path.name for path in folder.glob(f"*.{suffix}.index.json"))
        whole = [f"{n}.{suffix}" for n in _WEIGHTS if (folder / f"{n}.{suffix}").is_file()]
        if not whole and not indexes and suffix == "safetensors":
            whole = sorted(path.name for path in folder.glob("*.safetensors"))
        if len(whole) + len(indexes) > 1:
            raise CheckpointError(
                f"{folder} has several models: {enumerated([*whole, *indexes])}. Pass their files "
                "instead of folders."
            )
        if indexes:
            try:
                names = sorted(set(_json(folder / indexes[0])["weight_map"].values()))
            except (KeyError, AttributeError, TypeError) as error:
                raise CheckpointError(f"{folder / indexes[0]} is damaged.") from error
            missing = [name for name in names if not (folder / name).is_file()]
            if missing:
                raise CheckpointError(f"{folder} lacks {enumerated(missing)}.")
            if any(Path(name).name != name for name in names):
                raise CheckpointError(f"{folder / indexes[0]} names files outside of the folder.")
            return names, indexes[0]
        if whole:
            return whole, None
    raise CheckpointError(
        f"{folder} has no weights. Pass folders with model.safetensors, adapter_model.safetensors, "
        "shards with an index, or .metadata (DCP), or files."
    )


def _json(path: Path) -> dict[str, Any]:
    try:
        return cast(dict[str, Any], json.loads(path.read_text()))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} is damaged ({error}).") from error
