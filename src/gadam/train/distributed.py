"""The processes that train one model together, started by torchrun.

Each process is a rank. All ranks walk through the same sequence of batches, and each trains on its
own part of every batch. Everything here also works for a process that trains alone: then nothing
is communicated.
"""

from __future__ import annotations

import gc
import hashlib
import os
import signal
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor, nn

from gadam._errors import UserError

__all__ = [
    "ALONE",
    "EXIT_PREEMPTED",
    "LostRank",
    "Preemption",
    "RankError",
    "Ranks",
    "Strategy",
    "is_first",
    "is_launched",
    "meet",
    "session",
]

T = TypeVar("T")
Strategy = Literal["ddp", "fsdp2"]

_FAILED = 2**31  # more than any wish

EXIT_PREEMPTED = 143
"""The exit code of a command that SIGTERM stopped: 128 + 15, as shells count."""


class RankError(UserError, RuntimeError):
    """Another process of the run failed, so this one cannot continue."""


class LostRank(RankError):
    """Another process of the run died without a word, such as by SIGKILL."""


def is_launched() -> bool:
    """Return True if torchrun, or something that sets the same variables, started this process."""
    return all(name in os.environ for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"))


def is_first() -> bool:
    """Return True if this process is the one that prints and writes."""
    return not is_launched() or os.environ["RANK"] == "0"


@dataclass(frozen=True)
class Ranks:
    """The ranks of a run, seen from one of them.

    Args:
        rank: The number of this process.
        size: The number of processes.
        strategy: "ddp" (every rank holds the model) or "fsdp2" (every rank holds shards of it).
        device: The device of this process.
        control: The group for messages on the host, beside those of the model.
        saving: The group for checkpoints that a thread writes.
        store: Where a rank leaves its last words.

    Example:
        >>> ALONE.size, ALONE.is_first, ALONE.first(lambda: "value")
        (1, True, 'value')
    """

    rank: int = 0
    size: int = 1
    strategy: Strategy = "ddp"
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    control: Any = None
    saving: Any = None
    store: Any = None

    @property
    def is_first(self) -> bool:
        """Whether this rank writes the run's folder."""
        return self.rank == 0

    @property
    def is_distributed(self) -> bool:
        """Whether there is a process group, even if it has only one process."""
        return self.control is not None

    @property
    def is_sharded(self) -> bool:
        """Whether each rank holds only shards of the model."""
        return self.strategy == "fsdp2" and self.is_distributed

    @property
    def group(self) -> Any:
        """The group of all ranks for the model's own communication, or None."""
        import torch.distributed as dist

        return dist.group.WORLD if self.size > 1 else None

    def seed(self, seed: int) -> int:
        """Return a seed for the noise in this rank's network, which sees other rows.

        Args:
            seed: The seed of all ranks. The first one keeps it.
        """
        return (seed + self.rank * 0x9E3779B97F4A7C15) % 2**63 if self.rank else seed

    def part(self, pieces: Sequence[tuple[T, float]]) -> tuple[T, float]:
        """Return this rank's piece of a batch and its fraction of it.

        Ranks for which there is no piece get the first one, with the fraction 0. They run it to
        take part in the communication of the others.

        Args:
            pieces: At most one per rank, each with its fraction of the batch.
        """
        return pieces[self.rank] if self.rank < len(pieces) else (pieces[0][0], 0.0)

    # --------------------------------------------------------------------------- communication

    def sum(self, values: Tensor) -> Tensor:
        """Return the sum of a tensor over all ranks, in float64 on the CPU. Collective.

        Args:
            values: The terms of this rank.
        """
        if self.size == 1:
            return values
        import torch.distributed as dist

        total = values.detach().to("cpu", torch.float64, copy=True)
        dist.all_reduce(total, group=self.control)
        return total

    def max(self, value: int) -> int:
        """Return the largest of the ranks' numbers. Collective.

        Args:
            value: The number of this rank.
        """
        if self.size == 1:
            return value
        import torch.distributed as dist

        largest = torch.tensor(value, dtype=torch.int64)
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=self.control)
        return int(largest)

    def gather(self, value: T) -> list[T]:
        """Return the values of all ranks, in their order. Collective.

        Args:
            value: The value of this rank. It is pickled.
        """
        if self.size == 1:
            return [value]
        import torch.distributed as dist

        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self.control)
        return values

    def agree(self, wish: int = 0, error: BaseException | None = None) -> int:
        """Return the largest wish of all ranks. Collective.

        Args:
            wish: A small number.
            error: What went wrong on this rank. Then all ranks raise an error.

        Raises:
            RankError: Another rank has an error. A rank raises its own error as it is.
        """
        if self.size > 1:
            wish = self.max(_FAILED if error is not None else wish)
            if wish == _FAILED:
                problems = self.gather(None if error is None else describe(error))
                if error is None:
                    raise RankError(_named(problems))
        if error is not None:
            raise _Shared.of(error)
        return wish

    def first(self, function: Callable[[], T]) -> T:
        """Call a function on the first rank only, and return its result on all. Collective.

        Args:
            function: Its result is pickled.

        Raises:
            RankError: It failed. The first rank raises the function's own error.
        """
        if self.size == 1:
            return function()
        import torch.distributed as dist

        message: list[Any] = [None, None]
        failure: Exception | None = None
        if self.is_first:
            try:
                message[0] = function()
            except Exception as error:
                failure, message = error, [None, describe(error)]
        dist.broadcast_object_list(message, src=0, group=self.control)
        if failure is not None:
            raise _Shared.of(failure)
        if message[1] is not None:
            raise RankError(message[1])
        result: T = message[0]
        return result

    @contextmanager
    def together(self) -> Iterator[None]:
        """Let all ranks fail if one fails in a block that communicates nothing. Collective.

        Raises:
            RankError: Another rank failed.
        """
        try:
            yield
        except Exception as error:
            self.agree(error=error)
            raise
        self.agree()

    def broadcast_buffers(self, model: nn.Module) -> None:
        """Give all ranks the buffers of the first one, such as BatchNorm statistics. Collective.

        Args:
            model: The model.
        """
        if self.size == 1:
            return
        import torch.distributed as dist

        kinds: dict[torch.dtype, list[Tensor]] = {}
        for buffer in model.buffers():
            kinds.setdefault(buffer.dtype, []).append(buffer)
        for buffers in kinds.values():  # one message each
            message = torch.cat([buffer.detach().flatten() for buffer in buffers])
            dist.broadcast(message, src=0)
            for buffer, part in zip(buffers, torch.split(message, [b.numel() for b in buffers])):
                buffer.detach().copy_(part.view_as(buffer))

    # -------------------------------------------------------------------------------- last words

    def announce(self, error: BaseException) -> None:
        """Leave word of an error that the other ranks do not know of, before this rank exits.

        Args:
            error: What went wrong.
        """
        is_known = isinstance(error, RankError) or _Shared.is_shared(error)
        if self.size > 1 and not is_known and not _is_communication(error):
            with suppress(Exception):  # the store may be gone, too
                self.store.set("failure", f"Rank {self.rank}: {describe(error)}")

    @contextmanager
    def explained(self) -> Iterator[None]:
        """Tell the other ranks about an error in a block, or replace it by what they have told.

        Raises:
            RankError: Communication failed because another rank failed.
        """
        try:
            yield
        except Exception as error:
            self.announce(error)
            cause = self.explain(error)
            if cause is error:
                raise
            raise cause from error

    def explain(self, error: Exception) -> Exception:
        """Return the reason for an error of communication: what another rank has announced.

        Args:
            error: What this rank has seen, such as a closed connection.
        """
        if self.size == 1 or isinstance(error, UserError) or not _is_communication(error):
            return error
        with suppress(Exception):
            if self.store.check(["failure"]):
                return RankError(self.store.get("failure").decode())
        return LostRank(
            "Another process of this run died. Rerun the command to resume, or let torchrun "
            "restart it with --max-restarts."
        )


ALONE = Ranks()


class _Shared:
    """Marks errors that all ranks know of."""

    @staticmethod
    def of(error: BaseException) -> BaseException:
        error.__dict__["_gadam_shared"] = True
        return error

    @staticmethod
    def is_shared(error: BaseException) -> bool:
        return "_gadam_shared" in error.__dict__


def describe(error: BaseException) -> str:
    """Return an error as a sentence for the other ranks.

    Args:
        error: The error.
    """
    return str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}"


def _named(problems: Sequence[str | None]) -> str:
    """Return the sentences of the ranks that failed; one if all say the same."""
    found = {f"Rank {rank}: {text}": text for rank, text in enumerate(problems) if text is not None}
    return next(iter(found)) if len(set(found.values())) == 1 else " ".join(found)


def _is_communication(error: BaseException) -> bool:
    """Return True if this may be an error of a collective operation."""
    import torch.distributed as dist

    if isinstance(error, ConnectionError | dist.DistError):
        return True
    words = "gloo/", "nccl", "connection closed", "connection reset"
    return isinstance(error, RuntimeError) and any(word in str(error).lower() for word in words)


# ------------------------------------------------------------------------------------- the session


@contextmanager
def session(device: str = "cpu", strategy: Strategy = "ddp") -> Iterator[Ranks]:
    """Join the process group that torchrun has prepared, and leave it at the end.

    Args:
        device: "cpu" (gloo) or "cuda" (NCCL, one GPU per process).
        strategy: "ddp" or "fsdp2".

    Yields:
        The ranks, seen from this process.

    Raises:
        RankError: A node has fewer GPUs than processes.
    """
    import torch.distributed as dist
    from torch.distributed import distributed_c10d as c10d
    from torch.distributed.rendezvous import rendezvous

    place = torch.device(device)
    if place.type == "cuda":
        index = int(os.environ.get("LOCAL_RANK", "0"))
        if index >= torch.cuda.device_count():
            raise RankError(
                f"This machine has {torch.cuda.device_count()} GPUs. Pass torchrun "
                "--nproc-per-node with at most as many."
            )
        place = torch.device("cuda", index)
        torch.cuda.set_device(place)
    shared, rank, size = next(iter(rendezvous("env://")))
    shared = c10d.PrefixStore("gadam", shared)
    store = c10d.PrefixStore(meet(shared, rank, size), shared)
    backend = "cpu:gloo,cuda:nccl" if place.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=store, rank=rank, world_size=size)
    try:
        control, saving = dist.new_group(backend="gloo"), dist.new_group(backend="gloo")
        words = c10d.PrefixStore("last-words", store)
        yield Ranks(rank, size, strategy, place, control, saving, words)
    finally:
        dist.destroy_process_group()
        gc.collect()  # models hold groups, and a thread of gloo at exit can abort the process


def meet(store: Any, rank: int, size: int, seconds: float = 600.0) -> str:
    """Wait for the other ranks, and return a name for this attempt to train. Collective.

    torchrun keeps its store when it restarts the ranks, with the addresses of those that have died.
    So each rank leaves a random name. The first one lists the names, and the list counts once all
    ranks have found their own names in it.

    Args:
        store: The store of torchrun.
        rank: The number of this process.
        size: The number of processes.
        seconds: How long to wait.

    Returns:
        The same string on all ranks, which no attempt before has used.

    Raises:
        RankError: Some ranks did not arrive.
    """
    name, end = uuid.uuid4().hex, time.monotonic() + seconds
    store.set(f"rank {rank}", name)
    names = [f"rank {i}" for i in range(size)]
    while time.monotonic() < end:
        if rank == 0 and store.check(names):
            store.set("ranks", b",".join(store.multi_get(names)))
        if store.check(["ranks"]):
            found = store.get("ranks").decode()
            if name in found.split(","):
                attempt = hashlib.sha256(found.encode()).hexdigest()
                store.set(f"{attempt} {rank}", "here")
                if store.check([f"{attempt} {i}" for i in range(size)]):
                    return attempt
        time.sleep(0.05)
    raise RankError(f"Not all {size} processes arrived within {seconds:.0f} seconds.")


class Preemption:
    """Notes SIGTERM, which schedulers send before they take a machine away, and Ctrl-C.

    Example:
        >>> with Preemption() as preemption:
        ...     preemption.is_requested()
        False
    """

    def __init__(self) -> None:
        self._received: int | None = None
        self._before: dict[int, Any] = {}

    def is_requested(self) -> bool:
        """Return True if a signal has arrived."""
        return self._received is not None

    @property
    def exit_code(self) -> int:
        """128 and the number of the signal; that of SIGTERM if another rank has received it."""
        return EXIT_PREEMPTED if self._received is None else 128 + self._received

    def __enter__(self) -> Preemption:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT):
                self._before[number] = signal.signal(number, self._note)
        return self

    def _note(self, number: int, *_: object) -> None:
        self._received = number

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None and issubclass(kind, LostRank):
            # torchrun sends SIGTERM to the ranks that are left. Let them report and exit first.
            self._before.pop(signal.SIGTERM, None)
        for number, handler in self._before.items():
            signal.signal(number, handler)
