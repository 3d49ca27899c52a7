"""Write and read the checkpoints of several ranks: each its own part, and all or nothing.

The format is that of :mod:`gadam.runs.sharded`. A checkpoint of any number of ranks, of either
strategy, or of one process, can be loaded into any other.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save

from gadam._dtensor import is_dtensor, local, new_like
from gadam.runs import sharded
from gadam.runs.files import RunError, explain_os_error
from gadam.runs.folder import State, read_weights
from gadam.train.distributed import Ranks, describe

__all__ = ["Saver", "load"]

Commit = Callable[[Path], None]
"""What the first rank does with a complete checkpoint."""


class Saver:
    """Writes checkpoints of several ranks, one at a time.

    Args:
        ranks: The processes that write.
        folder: The run's folder, which all of them can write.
        asynchronous: Write in a thread, from a copy on the host, while training continues.
    """

    def __init__(self, ranks: Ranks, folder: Path, *, asynchronous: bool = False) -> None:
        self._ranks, self._folder = ranks, folder
        self._thread = ThreadPoolExecutor(1, "gadam-checkpoint") if asynchronous else None
        self._writing: Future[None] | None = None

    def save(self, name: str, state: State, record: State, on_commit: Commit) -> None:
        """Write a checkpoint, or start to, after the one before. Collective.

        Args:
            name: The beginning of its name, such as "checkpoint-000012".
            state: What to restore: on each rank, its own shards.
            record: What the first rank adds to it.
            on_commit: What the first rank does with it when it is complete.

        Raises:
            RunError: A rank cannot write. The checkpoints before are intact.
        """
        self.wait()
        tensors, rest = sharded.separated(state)
        if self._thread is None:
            self._write(name, tensors, {**rest, **record}, on_commit)
            return
        copies = {
            key: {each: _copied(value) for each, value in named.items()}
            for key, named in tensors.items()
        }
        self._writing = self._thread.submit(
            self._write, name, copies, {**rest, **record}, on_commit
        )

    def wait(self) -> None:
        """Wait until the last checkpoint is complete.

        Raises:
            RunError: A rank could not write it.
        """
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.result()

    def close(self) -> None:
        """Stop the thread."""
        if self._thread is not None:
            self._thread.shutdown()

    def _write(self, name: str, tensors: sharded.Tensors, rest: State, on_commit: Commit) -> None:
        import torch.distributed as dist

        group, rank = self._ranks.saving, self._ranks.rank
        unfinished = self._folder / f".{name}{sharded.SUFFIX}.unfinished"

        def exchange(value: Any) -> list[Any]:
            values: list[Any] = [None] * self._ranks.size
            dist.all_gather_object(values, value, group=group)
            for other in values:
                if isinstance(other, _Failure):
                    raise RunError(other.sentence)
            return values

        def attempt(action: Callable[[], Any]) -> list[Any]:
            """Do something on this rank, and return the results of all ranks."""
            try:
                value = action()
            except OSError as error:
                value = _Failure(explain_os_error(error, Path(error.filename or unfinished)))
            except Exception as error:
                value = _Failure(describe(error))
            return exchange(value)

        def prepare() -> None:
            if rank == 0:
                shutil.rmtree(unfinished, ignore_errors=True)
                unfinished.mkdir()

        def write() -> None:
            with sharded.quiet():
                try:
                    writer = FileSystemWriter(unfinished)
                    save(dict(tensors), storage_writer=writer, process_group=group)
                except CheckpointException as error:
                    cause = next(iter(error.failures.values()))[0]
                    if isinstance(cause, OSError):
                        raise cause from None
                    raise RunError(f"{unfinished} could not be written: {cause}.") from None

        def hash_own() -> dict[str, Any]:
            own = sorted(unfinished.glob(f"__{rank}_*.distcp"))
            return {path.name: sharded.hash_file(path) for path in own}

        attempt(prepare)
        attempt(write)
        hashes = {key: value for found in attempt(hash_own) for key, value in found.items()}

        def commit() -> None:
            if rank == 0:
                on_commit(sharded.commit(unfinished, name, rest, hashes))

        attempt(commit)


class _Failure:
    """The problem of a rank, as it travels to the others."""

    def __init__(self, sentence: str) -> None:
        self.sentence = sentence


def _copied(tensor: Any) -> Tensor:
    """Return a copy on the host, sharded as the tensor."""
    if not is_dtensor(tensor):
        return tensor.detach().to("cpu", copy=True)  # type: ignore[no-any-return]
    copy = new_like(tensor, tensor.dtype, torch.device("cpu"))
    local(copy).copy_(local(tensor))
    return copy


def load(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer, ranks: Ranks) -> State:
    """Read a checkpoint of any format, with the shards that this rank needs. Collective.

    Args:
        path: A folder of several ranks, or a file of one process.
        model: The model to load it into.
        optimizer: The model's optimizer.
        ranks: The processes that train the model.

    Raises:
        RunError: It cannot be read.
    """
    weights: dict[str, Any] = model.state_dict()
    params: list[Any] = [p for group in optimizer.param_groups for p in group["params"]]

    def template(keys: tuple[str, ...], shape: torch.Size) -> Any:
        """Return the weights that a tensor is sharded as, or None if it is not sharded."""
        found: Any = None
        if keys[0] == "model":
            found = weights.get(".".join(keys[1:]))
        elif len(keys) > 3 and keys[1] == "state" and int(keys[2]) < len(params):
            found = params[int(keys[2])]
        return found if found is not None and is_dtensor(found) and found.shape == shape else None

    def make(key: str, name: str, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        like = template((key, *name.split(".")), shape)
        if like is None:
            return torch.empty(shape, dtype=dtype)
        return new_like(like, dtype, local(like).device)

    def placed(value: Any, keys: tuple[str, ...] = ()) -> Any:
        """Shard what every rank has read whole: small tensors, and those of one process."""
        if isinstance(value, Tensor) and not is_dtensor(value):
            like = template(keys, value.shape)
            return value if like is None else _distributed(value, like)
        if isinstance(value, dict):
            return {key: placed(each, (*keys, str(key))) for key, each in value.items()}
        if isinstance(value, list):
            return [placed(each, (*keys, str(i))) for i, each in enumerate(value)]
        return value

    with ranks.together():
        is_sharded = path.suffix == sharded.SUFFIX
        state = sharded.read(path, make) if is_sharded else read_weights(path)
        if state is None:
            raise RunError(f"{path} is damaged. Rerun the command to use the one before it.")
        for key in ("header", "lines"):
            state.pop(key, None)
    result: State = placed(state)
    return result


def _distributed(tensor: Tensor, like: Any) -> Tensor:
    from torch.distributed.tensor import distribute_tensor

    mesh = like.device_mesh
    return distribute_tensor(tensor.to(mesh.device_type), mesh, like.placements)
