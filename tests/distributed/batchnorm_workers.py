"""The processes of the tests of BatchNorm statistics over ranks."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import gadam
from contract import same

COUNTS = ([3, 1, 0], [0, 3, 1], [1, 2, 5])  # batches per rank


class Net(nn.Module):
    """Layers that the ranks cannot share evenly, and an input by keyword."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(5, 7)
        self.norm = nn.BatchNorm1d(7)
        self.second = nn.Linear(7, 3)
        self.last = nn.BatchNorm1d(3)

    def forward(self, x: torch.Tensor, shift: torch.Tensor | None = None) -> torch.Tensor:
        hidden = self.first(x if shift is None else x + shift)
        return self.last(self.second(torch.tanh(self.norm(hidden))))


def run_all(names: tuple[str, ...], rank: int, folder: Path) -> None:
    for name in names:
        globals()[name](rank, folder)


def sharded(mesh: Any = None) -> Any:
    model = Net()
    for layer in (model.first, model.second):
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def replicated(mesh: Any = None) -> Any:
    return DistributedDataParallel(Net())


def batch(rank: int, i: int) -> torch.Tensor:
    """Return a batch of an odd size, down to one sample, with a mean that drifts."""
    generator = torch.Generator().manual_seed(100 * rank + i)
    size = (7, 1, 12, 3, 5)[(rank + i) % 5]
    return torch.randn(size, 5, generator=generator) * (1 + i) + 3 * rank


def batches(counts: list[int], rank: int) -> list[torch.Tensor]:
    return [batch(rank, i) for i in range(counts[rank])]


def statistics(model: Any) -> dict[str, torch.Tensor]:
    inner = model.module if isinstance(model, DistributedDataParallel) else model
    return {name: buffer.detach().clone() for name, buffer in inner.named_buffers()}


def check(model: Any, counts: list[int], group: Any = None) -> None:
    """The statistics are those of all batches in one process, with the same bits on every rank."""
    alone = Net()
    everything = [x for rank in range(len(counts)) for x in batches(counts, rank)]
    gadam.refresh_batchnorm(alone, everything)
    got = statistics(model)
    torch.testing.assert_close(got, dict(alone.named_buffers()), rtol=1e-5, atol=1e-6)
    assert got["norm.num_batches_tracked"] == sum(counts)
    gathered: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(gathered, got, group=group)
    for other in gathered:
        same(other, got)


def uneven(make: Callable[[], Any], **keywords: Any) -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    for counts in COUNTS:
        mine = batches(counts[:world], rank)
        as_dicts = [{"x": x - 1, "shift": torch.ones(5), "label": 0} for x in mine]
        for given in (mine, iter(as_dicts)):
            model = make()
            hooks = [len(m._forward_pre_hooks) for m in model.modules()]
            gadam.refresh_batchnorm(model, given, **keywords)
            check(model, counts[:world])
            assert [len(m._forward_pre_hooks) for m in model.modules()] == hooks
            assert all(m.training for m in model.modules())


def uneven_sharded(rank: int, folder: Path) -> None:
    uneven(sharded)


def uneven_replicated(rank: int, folder: Path) -> None:
    uneven(replicated)
    uneven(Net, process_group=dist.group.WORLD)


def run_each(model: nn.Module, inputs: list[torch.Tensor]) -> None:
    for x in inputs:
        model(x)


def uneven_callables(rank: int, folder: Path) -> None:
    """A callable runs the model as often as it likes, on its own, even through DDP."""
    world = dist.get_world_size()
    for counts in COUNTS:
        for make in (sharded, replicated):
            model, mine = make(), batches(counts[:world], rank)
            gadam.refresh_batchnorm(model, partial(run_each, model, mine))
            check(model, counts[:world])


def max_batches(rank: int, folder: Path) -> None:
    world = dist.get_world_size()
    model = sharded()
    gadam.refresh_batchnorm(model, batches([9] * world, rank), max_batches=rank + 1)
    check(model, list(range(1, world + 1)))


def no_batches(rank: int, folder: Path) -> None:
    for make in (sharded, replicated):
        model = make()
        before = statistics(model)
        with pytest.raises(ValueError, match="No batch reached"):
            gadam.refresh_batchnorm(model, [])
        same(statistics(model), before)


def failing_loader(failing: int, after: int) -> Iterator[torch.Tensor]:
    for i in range(4):
        if dist.get_rank() == failing and i == after:
            raise OSError("the disk is gone")
        yield batch(dist.get_rank(), i)


def failures(rank: int, folder: Path) -> None:
    """An error on one rank ends the refresh on all of them, and the group stays usable."""
    failing = dist.get_world_size() - 1

    def broken_forward(model: nn.Module, x: torch.Tensor) -> object:
        if rank == failing:
            raise KeyError("pixels")
        return model(x)

    def broken_callable() -> None:
        if rank == failing:
            raise KeyboardInterrupt
        model(batch(rank, 0))

    mine = batches([3] * 4, rank)
    attacks: list[tuple[type[BaseException], str, Callable[[Any], None]]] = [
        (OSError, "disk", lambda m: gadam.refresh_batchnorm(m, failing_loader(failing, 0))),
        (OSError, "disk", lambda m: gadam.refresh_batchnorm(m, failing_loader(failing, 2))),
        (KeyError, "pixels", lambda m: gadam.refresh_batchnorm(m, mine, forward=broken_forward)),
        (KeyboardInterrupt, "", lambda m: gadam.refresh_batchnorm(m, broken_callable)),
        (
            TypeError,
            "not str",
            lambda m: gadam.refresh_batchnorm(m, ["text"] if rank == failing else mine),
        ),
    ]
    for make in (sharded, replicated):
        for kind, text, attack in attacks:
            model = make()
            gadam.refresh_batchnorm(model, mine)
            before, modes = copy.deepcopy(statistics(model)), [m.training for m in model.modules()]
            if rank == failing:
                with pytest.raises(kind, match=text):
                    attack(model)
            else:
                sentence = f"unchanged on all of them. rank {failing}: {kind.__name__}: .*{text}"
                with pytest.raises(RuntimeError, match=sentence):
                    attack(model)
            same(statistics(model), before)
            assert [m.training for m in model.modules()] == modes
            gadam.refresh_batchnorm(model, mine)
            check(model, [3] * dist.get_world_size())


def failure_inside_a_replicated_model(rank: int, folder: Path) -> None:
    model = replicated()
    wide = [torch.randn(4, 6)] if rank == 0 else batches([3] * 4, rank)
    with pytest.raises(RuntimeError, match="shapes" if rank == 0 else "rank 0: RuntimeError"):
        gadam.refresh_batchnorm(model, wide)
    dist.barrier()


def failure_inside_a_sharded_model(rank: int, folder: Path) -> None:
    """It cannot be announced. But the rank raises it, and its exit ends the others."""
    model = sharded()
    wide = [torch.randn(4, 6)] if rank == 0 else batches([3] * 4, rank)
    with pytest.raises(RuntimeError, match="shapes" if rank == 0 else "(?i)connection"):
        gadam.refresh_batchnorm(model, wide)
    os._exit(0)


def a_batch_that_cannot_be_sent(rank: int, folder: Path) -> None:
    """Rank 0 has no batch, and the others cannot pickle theirs."""
    model = sharded()
    before = statistics(model)

    model.forward = lambda x, secret: Net.forward(model, x)
    mine = [{"x": x, "secret": lambda: None} for x in batches([0, 2, 2], rank)]
    with pytest.raises(RuntimeError, match=r"cannot be sent|cannot share"):
        gadam.refresh_batchnorm(model, mine)
    same(statistics(model), before)


def submodules(rank: int, folder: Path) -> None:
    """A forward function may call the parts of the model itself."""
    world = dist.get_world_size()
    for counts in COUNTS:
        model = Net()
        fully_shard(model.first)
        fully_shard(model.second)

        def run(model: Any, x: torch.Tensor) -> None:
            hidden = torch.tanh(model.norm(model.first(x)))
            model.last(model.second(hidden))

        gadam.refresh_batchnorm(model, batches(counts[:world], rank), forward=run)
        check(model, counts[:world])


def part_of_the_world(rank: int, folder: Path) -> None:
    """Ranks 0 and 1 share a model. Rank 2 does something else."""
    from torch.distributed.device_mesh import DeviceMesh

    mesh = DeviceMesh("cpu", [0, 1])
    if rank < 2:
        model = sharded(mesh)
        for _ in range(2):  # the second time, the weights are gathered
            gadam.refresh_batchnorm(model, batches([3, 0], rank))
            check(model, [3, 0], mesh.get_group())


def two_dimensions(rank: int, folder: Path) -> None:
    """Weights are sharded over columns and replicated over rows: all ranks have their own data."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    counts = [2, 0, 1, 4]
    model = sharded(mesh)
    gadam.refresh_batchnorm(model, batches(counts, rank))
    check(model, counts)
    # Pool over a part of those that must agree.
    model = sharded(mesh)
    gadam.refresh_batchnorm(model, batches(counts, rank), process_group=mesh.get_group("shard"))
    alone = Net()
    row = (0, 1) if rank < 2 else (2, 3)
    gadam.refresh_batchnorm(alone, [x for r in row for x in batches(counts, r)])
    torch.testing.assert_close(statistics(model), dict(alone.named_buffers()), rtol=1e-5, atol=1e-6)
