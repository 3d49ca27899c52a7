"""Exports of averaged weights: state dicts, and files that say which weights they hold."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn

from gadam import _torch
from gadam._dtensor import is_dtensor, local
from gadam.average.batchnorm import wrapped_module
from gadam.average.plan import Averaging
from gadam.average.progress import Progress

__all__ = [
    "Provenance",
    "bare_names",
    "exported",
    "gadam_version",
    "import_safetensors",
    "overwrite_error",
    "place_file",
    "read_provenance",
    "sync",
    "write_file",
]

_PREFIX = "gadam."


@dataclass(frozen=True)
class Provenance:
    """Which weights a file holds.

    Attributes:
        point: ``"average"``, or ``"iterate"`` if the average had no sample.
        samples: The number of samples in the average. A window holds only the last of them.
        skipped: The number of samples that were due but not finite.
        first_step: The optimizer step of the first sample, or None without a sample.
        last_step: The optimizer step of the last sample, or None without a sample.
        step: The number of optimizer steps when the file was written.
        weighting: The weighting.
        plan: The whole plan.
        gadam_version: The version of gadam that wrote the file.
        torch_version: The version of torch that wrote the file.
    """

    point: Literal["average", "iterate"]
    samples: int
    skipped: int
    first_step: int | None
    last_step: int | None
    step: int
    weighting: str
    plan: str
    gadam_version: str
    torch_version: str

    @classmethod
    def of(cls, progress: Progress, averaging: Averaging) -> Provenance:
        """Return the provenance of an average that these versions of gadam and torch export.

        Args:
            progress: The progress of the average.
            averaging: Its plan.
        """
        return cls(
            point="average" if progress.count else "iterate",
            samples=progress.count,
            skipped=progress.skipped,
            first_step=progress.first or None,
            last_step=progress.last or None,
            step=progress.steps,
            weighting=repr(averaging.weighting),
            plan=repr(averaging),
            gadam_version=gadam_version(),
            torch_version=torch.__version__,
        )

    def to_metadata(self) -> dict[str, str]:
        """Return the provenance as a safetensors file stores it: text by name."""
        return {_PREFIX + k: str(v) for k, v in asdict(self).items() if v is not None}

    @classmethod
    def from_metadata(cls, metadata: Mapping[str, str]) -> Provenance:
        """Undo :meth:`to_metadata`.

        Args:
            metadata: The metadata of a safetensors file.

        Raises:
            KeyError, ValueError: If the provenance is missing or damaged.
        """

        def number(name: str) -> int | None:
            text = metadata.get(_PREFIX + name)
            return None if text is None else int(text)

        point = metadata[_PREFIX + "point"]
        if point not in ("average", "iterate"):
            raise ValueError(f"Invalid point: {point!r}.")
        return cls(
            point=cast(Literal["average", "iterate"], point),
            samples=int(metadata[_PREFIX + "samples"]),
            skipped=int(metadata[_PREFIX + "skipped"]),
            first_step=number("first_step"),
            last_step=number("last_step"),
            step=int(metadata[_PREFIX + "step"]),
            weighting=metadata[_PREFIX + "weighting"],
            plan=metadata[_PREFIX + "plan"],
            gadam_version=metadata[_PREFIX + "gadam_version"],
            torch_version=metadata[_PREFIX + "torch_version"],
        )


def read_provenance(path: str | os.PathLike[str]) -> Provenance:
    """Return which weights a file of ``average.save_model()`` holds.

    This reads only the header of the file and needs only the standard library.

    Args:
        path: The safetensors file.

    Raises:
        ValueError: If the file is not a safetensors file, or was not written by gadam.

    Example:
        >>> import tempfile, torch, gadam
        >>> model = torch.nn.Linear(4, 1)
        >>> optimizer = gadam.Gadam(model.parameters(), average=gadam.Averaging(start=1))
        >>> model(torch.randn(8, 4)).square().mean().backward()
        >>> optimizer.step()
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     optimizer.average.save_model(model, f"{folder}/model.safetensors")
        ...     found = gadam.average.read_provenance(f"{folder}/model.safetensors")
        >>> found.point, found.samples, found.last_step
        ('average', 1, 1)
    """
    with open(path, "rb") as file:
        size = int.from_bytes(file.read(8), "little")
        try:
            if size > os.fstat(file.fileno()).st_size:
                raise ValueError("the header is longer than the file")
            header = json.loads(file.read(size))
            metadata = header.get("__metadata__", {})
        except (ValueError, AttributeError) as error:
            raise ValueError(f"{path} is not a safetensors file ({error}).") from error
    try:
        return Provenance.from_metadata(metadata)
    except (KeyError, ValueError) as error:
        raise ValueError(
            f"{path} does not say which weights it holds. It was not written by "
            f"average.save_model() ({type(error).__name__}: {error})."
        ) from error


def gadam_version() -> str:
    """Return the version of gadam."""
    # Not an import: the package itself imports this module.
    version: str = sys.modules["gadam"].__version__
    return version


def exported(
    model: nn.Module,
    averages: Mapping[Tensor, Callable[[], Tensor]],
    dtype: torch.dtype | None = None,
    full: bool = False,
    device: torch.device | None = None,
) -> dict[str, Any]:
    """Return a copy of the model's state dict with other values for some of its parameters.

    With ``full``, this is a collective operation of the processes that share a sharded model. Every
    process takes part in gathering every sharded tensor, in the order of the state dict, even if
    its own shard is empty. The first process of the mesh receives the tensors, on the host, and the
    other ones receive an empty dict.

    Args:
        model: The model.
        averages: For each parameter to replace, a function that returns this process's shard of its
            value.
        dtype: Cast all floating-point tensors to this type. None leaves averages in their own
            precision and everything else in the model's.
        full: Gather sharded tensors.
        device: The device of the copies. None means the model's own.

    Raises:
        ValueError: If the model has none of the averaged parameters.
        RuntimeError: If the model's ``state_dict()`` copies or omits averaged parameters.
    """
    if dtype is not None and not dtype.is_floating_point:
        raise ValueError(f"Invalid dtype: {dtype}. dtype must be a floating-point type.")
    wanted = set(averages) & set(model.parameters())
    if averages and not wanted:
        raise ValueError("None of the averaged parameters belongs to this model.")
    state_dict: dict[str, Any] = model.state_dict(keep_vars=True)
    tensors = [value for value in state_dict.values() if isinstance(value, Tensor)]
    missing = wanted - set(tensors)
    if missing:
        raise RuntimeError(
            f"The model's state_dict() copies or omits {len(missing)} averaged parameters. "
            "Call model.state_dict() inside applied() instead."
        )
    sharded = [value for value in tensors if is_dtensor(value)] if full else []
    holds = all(_is_first(value) for value in sharded)
    if sharded:
        device = torch.device("cpu")

    copies: dict[Tensor, Tensor] = {}  # a tensor with two names stays one tensor
    with torch.no_grad():
        for tensor in tensors:
            if tensor in copies:
                continue
            shard = averages[tensor]() if tensor in wanted else local(tensor).detach()
            copy = _cast(shard, dtype, local(tensor).device if device is None else device)
            if copy is shard or copy.data_ptr() == local(tensor).data_ptr():
                copy = copy.clone()
            if is_dtensor(tensor):
                copy = _gathered(copy, tensor) if full else _torch.new_dtensor(copy, tensor)
            # Free what another process keeps: at no time does this one hold more than one tensor.
            copies[tensor] = copy if holds else copy.new_empty(0)
    if not holds:
        return {}
    for name, value in state_dict.items():
        if isinstance(value, Tensor):
            state_dict[name] = copies[value]
    return state_dict


def bare_names(model: nn.Module, state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """Return a state dict with the names of the model without the wrappers of DDP and compile.

    Args:
        model: The model, which may be wrapped, or have wrapped modules.
        state_dict: Its state dict.
    """
    prefixes = []
    for path, module in model.named_modules():
        inner = wrapped_module(module)
        for name, child in module.named_children() if inner is not None else ():
            if child is inner:
                outer = f"{path}." if path else ""
                prefixes.append((f"{outer}{name}.", outer))
    bare = {}
    for name, value in state_dict.items():
        for prefix, outer in reversed(prefixes):  # inner modules first
            if name.startswith(prefix):
                name = outer + name[len(prefix) :]
        bare[name] = value
    return bare


def _cast(tensor: Tensor, dtype: torch.dtype | None, device: torch.device) -> Tensor:
    if dtype is None or not (tensor.is_floating_point() or tensor.is_complex()):
        return tensor.to(device)
    return tensor.to(device, dtype.to_complex() if tensor.is_complex() else dtype)


def _is_first(tensor: Any) -> bool:
    coordinate = tensor.device_mesh.get_coordinate()
    return coordinate is not None and not any(coordinate)


def _gathered(shard: Tensor, like: Any) -> Tensor:
    """Return the full tensor on the host. DTensor pads uneven and empty shards by itself."""
    on_mesh = shard.to(local(like).device)
    gathered: Tensor = cast(Any, _torch.new_dtensor(on_mesh, like)).full_tensor()
    return gathered.cpu()


def write_file(
    path: str | os.PathLike[str], state_dict: Mapping[str, Any], provenance: Provenance
) -> None:
    """Write a safetensors file with its provenance, never over another file.

    The file appears complete or not at all. A tensor with two names is stored once, and the
    metadata maps the other name to the stored one, so ``safetensors.torch.load_model`` restores it.

    Args:
        path: The file.
        state_dict: Tensors by name.
        provenance: What the file holds.

    Raises:
        FileExistsError: If the file exists.
        ImportError: If safetensors is not installed.
        TypeError: If an entry is not a tensor.
    """
    save_file = import_safetensors()
    metadata, tensors = {"format": "pt"}, {}
    names: dict[Tensor, str] = {}
    for name, tensor in state_dict.items():
        if not isinstance(tensor, Tensor):
            raise TypeError(
                f"A safetensors file holds only tensors, but the entry {name!r} is a "
                f"{type(tensor).__name__}. Save average.model_state_dict(model) with torch.save "
                "instead."
            )
        if tensor.dtype in (torch.complex32, torch.complex128):
            raise TypeError(
                f"A safetensors file cannot hold the entry {name!r} of type {tensor.dtype}. Pass "
                "dtype=torch.float32, or save average.model_state_dict(model) with torch.save."
            )
        if tensor in names:
            metadata[name] = names[tensor]
            continue
        names[tensor] = name
        tensors[name] = tensor.detach().cpu().contiguous()
    metadata.update(provenance.to_metadata())
    target = Path(path)
    _refuse_overwrite(target)
    if not target.parent.is_dir():
        raise FileNotFoundError(f"The folder {target.parent} does not exist. Create it first.")
    temporary = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        save_file(tensors, str(temporary), metadata)
        place_file(temporary, target)
    finally:
        with suppress(FileNotFoundError):
            temporary.unlink()


def place_file(temporary: Path, target: Path) -> None:
    """Give a complete file its name, never over another file.

    Args:
        temporary: The file, in the same folder. It may still exist afterwards.
        target: Its name.

    Raises:
        FileExistsError: If the target exists.
    """
    sync(temporary)
    try:
        os.link(temporary, target)  # unlike a rename, this fails if the target exists
    except FileExistsError as error:
        raise overwrite_error(target) from error
    except OSError:  # a file system without hard links
        _refuse_overwrite(target)
        temporary.rename(target)
    sync(target.parent)


def overwrite_error(path: str | os.PathLike[str]) -> FileExistsError:
    """Return the error for a file that exists already."""
    return FileExistsError(f"{path} exists. Remove it first, or pass a different path.")


def _refuse_overwrite(path: Path) -> None:
    if os.path.lexists(path):
        raise overwrite_error(path)


def sync(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on disk.

    Args:
        path: The file or folder.
    """
    if path.is_dir() and os.name != "posix":
        return
    descriptor = os.open(path, os.O_RDONLY if os.name == "posix" else os.O_RDWR)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def import_safetensors(
    user: str = "save_model()",
) -> Callable[[dict[str, Tensor], str, dict[str, str]], None]:
    """Return safetensors' function that writes a file, or raise an error that names the extra.

    Args:
        user: What needs it.
    """
    try:
        from safetensors.torch import save_file
    except ImportError as error:
        raise ImportError(
            f"{user} needs safetensors, which is not installed. Run "
            "`pip install 'gadam[safetensors]'`."
        ) from error
    return save_file
