"""The processes of the distributed tests."""

from __future__ import annotations

import copy
import os
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.multiprocessing.spawn import ProcessContext, start_processes

import gadam
import quick_processes
from gadam.average import block_files

Worker = Callable[[int, Path], None]

SECONDS = 180
# torch 2.6 cannot train a model on the CPU that fully_shard has sharded.
SHARDS_ON_CPU = hasattr(torch.cpu.Stream, "record_event")


def run(worker: Worker, processes: int, folder: Path) -> None:
    """Run a worker in local processes (gloo). A hang is a failure.

    Args:
        worker: Called with the rank and the folder.
        processes: How many ranks there are.
        folder: A folder that they share.
    """
    started = start_processes(
        launch,
        args=(processes, str(folder), worker),
        nprocs=processes,
        join=False,
        start_method=quick_processes.context().get_start_method(),
    )
    finish(started)


def finish(started: ProcessContext, seconds: float = SECONDS) -> None:
    """Wait for processes, and raise the error of one that failed. A hang is a failure.

    Args:
        started: The processes.
        seconds: How long to wait.
    """
    end = time.monotonic() + seconds
    try:
        # join raises the error of a failed process, with its traceback.
        while not started.join(timeout=1):
            assert time.monotonic() < end, f"The processes did not end within {seconds} seconds."
    finally:
        for process in started.processes:
            if process.is_alive():
                process.kill()


def complete_streams_of_the_cpu() -> None:
    """Let torch 2.6 shard models on the CPU: its streams there lack what fully_shard calls."""
    stream: Any = torch.cpu.Stream
    if not hasattr(stream, "record_event"):
        stream.record_event = lambda *_: torch.cpu.Event()
        stream.wait_event = lambda *_: None


def launch(rank: int, world: int, folder: str, worker: Worker) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    complete_streams_of_the_cpu()
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", f"file://{folder}/rendezvous", rank=rank, world_size=world)
    try:
        worker(rank, Path(folder))
        dist.barrier()
    finally:
        dist.destroy_process_group()
    # The test is over. Shutting the interpreter down next to gloo's threads sometimes aborts it
    # ("terminate called without an active exception"). Plain torch does the same, and
    # scripts/exit_abort.py says why: models of the test still hold their process groups here.
    sys.stdout.flush()
    os._exit(0)


def network(batchnorm: bool = False) -> nn.Sequential:
    """Return layers with sizes that two processes cannot share evenly."""
    torch.manual_seed(0)
    middle: nn.Module = nn.BatchNorm1d(7) if batchnorm else nn.Tanh()
    return nn.Sequential(nn.Linear(5, 7), middle, nn.Linear(7, 3), nn.Tanh(), nn.Linear(3, 1))


def data(step: int, rank: int | None = None) -> torch.Tensor:
    """Return the batch of a step, for one process or for all of them."""
    whole = torch.randn(8, 5, generator=torch.Generator().manual_seed(step))
    return whole if rank is None else whole.chunk(dist.get_world_size())[rank]


def full(model: nn.Module) -> list[torch.Tensor]:
    return [getattr(p, "full_tensor", lambda p=p: p)().detach().clone() for p in model.parameters()]


def fit(model: nn.Module, optimizer: Any, steps: range, rank: int | None) -> None:
    for step in steps:
        optimizer.zero_grad()
        model(data(step, rank)).square().mean().backward()
        optimizer.step()


def sharded(plan: gadam.Averaging, lookahead: bool = False, **kwargs: Any) -> tuple[nn.Module, Any]:
    from torch.distributed.fsdp import fully_shard

    model = network()
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer)
    fully_shard(model)
    optimizer: Any = gadam.GadamX(model.parameters(), 0.05, average=plan, **kwargs)
    return model, gadam.Lookahead(optimizer, k=2) if lookahead else optimizer


def fsdp_equals_one_process(rank: int, folder: Path) -> None:
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor.debug import CommDebugMode

    for kwargs in ({}, {"foreach": True}, {"lookahead": True}):
        plan = gadam.Averaging(start=3)
        alone = network()
        lookahead = bool(kwargs.get("lookahead"))
        expected: Any = gadam.GadamX(alone.parameters(), 0.05, average=plan)
        expected = gadam.Lookahead(expected, k=2) if lookahead else expected
        fit(alone, expected, range(6), None)

        model, optimizer = sharded(plan, **kwargs)
        fit(model, optimizer, range(6), rank)
        torch.testing.assert_close(full(model), full(alone), rtol=1e-4, atol=1e-5)
        assert optimizer.average.count == expected.average.count == 4

        for p in model.parameters():
            average = optimizer.state[p]["average"]
            assert isinstance(average, DTensor)
            assert average.placements == p.placements  # type: ignore[attr-defined]
            assert average.to_local().shape == p.to_local().shape  # type: ignore[attr-defined]

        # The average inside, the raw bits outside, and forward passes that see them
        before = [p.to_local().clone() for p in model.parameters()]  # type: ignore[attr-defined]
        probe = data(99)
        with torch.no_grad():
            raw = model(probe).clone()
        with CommDebugMode() as communication:
            block = optimizer.average.applied(model)
            block.__enter__()
        assert communication.get_total_counts() == 0
        with torch.no_grad(), expected.average.applied(alone):
            inside = model(probe).clone()
            torch.testing.assert_close(inside, alone(probe), rtol=1e-4, atol=1e-5)
        block.__exit__(None, None, None)
        for p, bits in zip(model.parameters(), before):
            assert torch.equal(p.to_local(), bits)  # type: ignore[attr-defined]
        with torch.no_grad():
            assert torch.equal(model(probe), raw)
        assert not torch.allclose(inside, raw)

        averaged = optimizer.average.model_state_dict(model)
        for name, value in expected.average.model_state_dict(alone).items():
            torch.testing.assert_close(averaged[name].full_tensor(), value, rtol=1e-4, atol=1e-5)


def fsdp_gathers_nothing(rank: int, folder: Path) -> None:
    """A step with a sample reduces one number, to agree that it is finite, and nothing else."""
    from torch.distributed.tensor.debug import CommDebugMode

    model, optimizer = sharded(gadam.Averaging(start=1, every=2))
    for step, collectives in ((1, 1), (2, 0), (3, 1)):
        optimizer.zero_grad()
        model(data(step, rank)).square().mean().backward()
        with CommDebugMode() as communication:
            optimizer.step()
        counts = {str(op): n for op, n in communication.get_comm_counts().items()}
        assert sum(counts.values()) == collectives, counts
        assert all("allreduce" in op.replace("_", "") for op in counts), counts


def fsdp_agrees_on_what_is_finite(rank: int, folder: Path) -> None:
    """A NaN in the shard of one process keeps the sample out of all averages."""
    model, optimizer = sharded(gadam.Averaging(start=1))
    fit(model, optimizer, range(2), rank)
    weight = next(iter(model.parameters()))
    if rank == 1:
        with torch.no_grad():
            weight.to_local()[0, 0] = float("nan")  # type: ignore[attr-defined]
    assert not optimizer.average.update()
    assert (optimizer.average.count, optimizer.average.skipped) == (2, 1)


def fsdp_checkpoint(rank: int, folder: Path) -> None:
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    plan = gadam.Averaging(start=2, dtype=torch.float64)
    model, optimizer = sharded(plan)
    fit(model, optimizer, range(4), rank)
    states = get_state_dict(model, optimizer)
    dcp.save({"model": states[0], "optimizer": states[1]}, checkpoint_id=folder / "checkpoint")
    fit(model, optimizer, range(4, 7), rank)

    resumed, fresh = sharded(plan)
    target: Any = dict(zip(("model", "optimizer"), get_state_dict(resumed, fresh)))
    assert fresh.average.count == 0
    dcp.load(target, checkpoint_id=folder / "checkpoint")
    set_state_dict(
        resumed,
        fresh,
        model_state_dict=target["model"],
        optim_state_dict=target["optimizer"],
    )
    assert fresh.average.count == 3
    fit(resumed, fresh, range(4, 7), rank)
    for p, q in zip(model.parameters(), resumed.parameters()):
        assert torch.equal(p.to_local(), q.to_local())  # type: ignore[attr-defined]
        mine, theirs = optimizer.state[p]["average"], fresh.state[q]["average"]
        assert theirs.dtype == torch.float64
        assert torch.equal(mine.to_local(), theirs.to_local())
    assert fresh.average.count == optimizer.average.count == 6


def fsdp_swa(rank: int, folder: Path) -> None:
    """IterateAverage on a torch optimizer, with a distributed checkpoint of its own state."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.fsdp import fully_shard

    def make() -> tuple[nn.Module, torch.optim.Optimizer, gadam.IterateAverage]:
        model = network()
        fully_shard(model)
        sgd = torch.optim.SGD(model.parameters(), lr=0.1)
        return model, sgd, gadam.IterateAverage(sgd, gadam.Averaging(start=2))

    model, sgd, average = make()
    fit(model, sgd, range(5), rank)
    dcp.save({"average": average.state_dict()}, checkpoint_id=folder / "swa")
    other, _, restored = make()
    target = {"average": restored.state_dict()}
    dcp.load(target, checkpoint_id=folder / "swa")
    restored.load_state_dict(target["average"])
    assert restored.count == average.count == 4
    mine, theirs = average.model_state_dict(model), restored.model_state_dict(other)
    for name in mine:
        assert torch.equal(mine[name].to_local(), theirs[name].to_local())


def ddp_batchnorm(rank: int, folder: Path) -> None:
    """Ranks with different data and numbers of batches end with the same, correct statistics."""
    from torch.nn.parallel import DistributedDataParallel

    batches = [torch.randn(6, 5, generator=torch.Generator().manual_seed(i)) for i in range(5)]
    mine = batches[:3] if rank == 0 else batches[3:]
    for wrap in ("ddp", "compiled", ""):
        model: Any = network(batchnorm=True)
        inner: Any = model
        if wrap:
            model = DistributedDataParallel(model)
            model = torch.compile(model, backend="eager") if wrap == "compiled" else model
            gadam.refresh_batchnorm(model, mine)
        else:
            gadam.refresh_batchnorm(model, mine, process_group=dist.group.WORLD)
        alone = network(batchnorm=True)
        gadam.refresh_batchnorm(alone, batches)
        expected: Any = alone[1]
        torch.testing.assert_close(inner[1].running_mean, expected.running_mean)
        torch.testing.assert_close(inner[1].running_var, expected.running_var)
        assert inner[1].num_batches_tracked == 5
        everyone = [torch.empty_like(inner[1].running_var) for _ in range(2)]
        dist.all_gather(everyone, inner[1].running_var)
        assert torch.equal(everyone[0], everyone[1])


def ddp_training(rank: int, folder: Path) -> None:
    from torch.nn.parallel import DistributedDataParallel

    plan = gadam.Averaging(start=2)
    model = DistributedDataParallel(network(batchnorm=True))
    optimizer = gadam.Gadam(model.parameters(), 0.05, average=plan)
    fit(model, optimizer, range(5), rank)
    before = copy.deepcopy(model.state_dict())
    with optimizer.average.applied(model, batchnorm=[data(s, rank) for s in range(3)]):
        inside = copy.deepcopy(model.state_dict())
    for tensors in (inside, before):
        for name in tensors if tensors is inside else [n for n in before if "running" not in n]:
            everyone = [torch.empty_like(tensors[name]) for _ in range(2)]
            dist.all_gather(everyone, tensors[name])
            assert torch.equal(everyone[0], everyone[1]), name
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name])


def fsdp_warm_up_from_zero(rank: int, folder: Path) -> None:
    """A first step with lr = 0 counts in every process, even in one without gradients."""
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    model = nn.Linear(5, 1, bias=False)  # one row: the second process has no shard
    fully_shard(model)
    inner = gadam.Gadam(model.parameters(), lr=0.1, average=gadam.Averaging(start=2))
    optimizer = gadam.Lookahead(inner)
    warm_up = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda t: t / 10)
    for step in range(3):
        fit(model, optimizer, range(step, step + 1), rank)
        warm_up.step()
    assert optimizer.average.count == 2
    assert optimizer.param_groups[0]["lookahead_steps"] == 3


def zero_redundancy(rank: int, folder: Path) -> None:
    from torch.distributed.optim import ZeroRedundancyOptimizer
    from torch.nn.parallel import DistributedDataParallel

    model = DistributedDataParallel(network())
    optimizer = ZeroRedundancyOptimizer(
        model.parameters(), optimizer_class=gadam.Gadam, lr=0.05, average=gadam.Averaging(start=2)
    )
    fit(model, optimizer, range(4), rank)
    alone = network()
    fit(alone, torch.optim.AdamW(alone.parameters(), lr=0.05), range(4), None)
    torch.testing.assert_close(full(model), full(alone), rtol=1e-4, atol=1e-5)
    assert optimizer.optim.average.count == 3


def zero_redundancy_checkpoint(rank: int, folder: Path) -> None:
    """update() and begin() last, and a consolidated state dict restores the average."""
    from torch.distributed.optim import ZeroRedundancyOptimizer
    from torch.nn.parallel import DistributedDataParallel

    for attach in (False, True):

        def make(attach: bool = attach) -> tuple[nn.Module, Any, gadam.IterateAverage]:
            model = DistributedDataParallel(network())
            if attach:
                optimizer = ZeroRedundancyOptimizer(
                    model.parameters(), optimizer_class=torch.optim.AdamW, lr=0.05
                )
                return model, optimizer, gadam.IterateAverage(optimizer)
            optimizer = ZeroRedundancyOptimizer(
                model.parameters(), optimizer_class=gadam.Gadam, lr=0.05
            )
            average = gadam.average_of(optimizer)
            assert average is not None
            return model, optimizer, average

        model, optimizer, average = make()
        fit(model, optimizer, range(3), rank)
        assert average.update()
        fit(model, optimizer, range(3, 5), rank)
        assert (average.count, average.phase) == (1, "waiting")
        average.begin()
        fit(model, optimizer, range(5, 8), rank)
        assert (average.count, average.phase, average._progress.steps) == (4, "averaging", 8)

        for target in range(2):
            optimizer.consolidate_state_dict(to=target)
            if rank == target:
                saved = copy.deepcopy(optimizer.state_dict())
        other, fresh, restored = make()
        other.load_state_dict(copy.deepcopy(model.state_dict()))
        fresh.load_state_dict(saved)
        assert (restored.count, restored.phase) == (4, "averaging")
        fit(model, optimizer, range(8, 11), rank)
        fit(other, fresh, range(8, 11), rank)
        assert restored.count == average.count == 7
        for p, q in zip(average._averaged(), restored._averaged()):
            assert torch.equal(average._value(p), restored._value(q))
        assert len(average._averaged()) > 0


def zero_redundancy_export(rank: int, folder: Path) -> None:
    """A part of the average is refused, and the consolidated state has all of it."""
    from torch.distributed.optim import ZeroRedundancyOptimizer
    from torch.nn.parallel import DistributedDataParallel

    plan = gadam.Averaging(start=2)
    model = DistributedDataParallel(network())
    zero = ZeroRedundancyOptimizer(model.parameters(), optimizer_class=torch.optim.AdamW, lr=0.05)
    average = gadam.IterateAverage(zero, plan)
    iterates = []
    for step in range(4):
        fit(model, zero, range(step, step + 1), rank)
        iterates.append(full(model.module))
    before = full(model.module)
    with pytest.raises(RuntimeError, match="only its own part"), average.applied(model):
        pass
    with pytest.raises(RuntimeError, match="only its own part"):
        average.model_state_dict(model.module)
    assert all(map(torch.equal, before, full(model.module)))
    zero.consolidate_state_dict(to=0)
    if rank == 0:
        adamw = torch.optim.AdamW(model.module.parameters())
        whole = gadam.IterateAverage(adamw, plan)
        adamw.load_state_dict(zero.state_dict())
        found = whole.model_state_dict(model.module)
        names = [name for name, _ in model.module.named_parameters()]
        for name, *values in zip(names, *iterates[1:]):
            torch.testing.assert_close(found[name], torch.stack(values).mean(0))


def fsdp_non_finite_samples_of_the_kernel(rank: int, folder: Path) -> None:
    """A NaN in one process's shard takes the sample out of the averages of both."""
    model, optimizer = sharded(gadam.Averaging(start=1))
    fit(model, optimizer, range(5), rank)
    averages = [optimizer.state[p]["average"].to_local() for p in model.parameters()]
    before = [average.clone() for average in averages]
    optimizer.zero_grad()
    model(data(5, rank)).square().mean().backward()
    if rank == 1:
        weight = next(iter(model.parameters()))
        weight.grad.to_local()[0, 0] = float("nan")  # type: ignore[union-attr]
    optimizer.step()
    assert (optimizer.average.count, optimizer.average.skipped) == (5, 1)
    torch.testing.assert_close(averages, before, rtol=1e-6, atol=1e-7)


def fsdp_attached_checkpoint(rank: int, folder: Path) -> None:
    """The average of a torch optimizer travels in the optimizer's distributed checkpoint."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import (
        StateDictOptions,
        get_state_dict,
        set_state_dict,
    )
    from torch.distributed.fsdp import fully_shard

    def make() -> tuple[nn.Module, torch.optim.Optimizer, gadam.IterateAverage]:
        model = network()
        fully_shard(model)
        adamw = torch.optim.AdamW(model.parameters(), lr=0.05)
        return model, adamw, gadam.IterateAverage(adamw, gadam.Averaging(start=2))

    for options in (
        StateDictOptions(),
        StateDictOptions(flatten_optimizer_state_dict=True),
        StateDictOptions(full_state_dict=True),
    ):
        model, optimizer, average = make()
        fit(model, optimizer, range(5), rank)
        states = get_state_dict(model, optimizer, options=options)
        other, fresh, restored = make()
        target: Any = dict(
            zip(("model", "optimizer"), get_state_dict(other, fresh, options=options))
        )
        if options.full_state_dict:
            target = copy.deepcopy({"model": states[0], "optimizer": states[1]})
        else:
            name = folder / f"attached-{options.flatten_optimizer_state_dict}"
            dcp.save({"model": states[0], "optimizer": states[1]}, checkpoint_id=name)
            dcp.load(target, checkpoint_id=name)
        set_state_dict(
            other,
            fresh,
            model_state_dict=target["model"],
            optim_state_dict=target["optimizer"],
            options=options,
        )
        assert restored.count == average.count == 4, options
        for p, q in zip(model.parameters(), other.parameters()):
            assert torch.equal(average._value(p), restored._value(q)), options


def fsdp_blocks(rank: int, folder: Path) -> None:
    """Each process writes the blocks of its shards, and a resumed run writes the same files."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
    from torch.distributed.tensor.debug import CommDebugMode

    def make(name: str) -> tuple[nn.Module, Any, gadam.BlockAverages]:
        model, optimizer = sharded(gadam.Averaging(start=4))
        return (
            model,
            optimizer,
            gadam.BlockAverages(optimizer, folder / name, every=3, max_blocks=2),
        )

    def files(name: str) -> dict[str, bytes]:
        own = folder / name / f"shard-{rank:05d}-of-00002"
        return {path.name: path.read_bytes() for path in own.glob("*.safetensors")}

    model, optimizer, blocks = make("undisturbed")
    iterates = []
    for step in range(12):
        fit(model, optimizer, range(step, step + 1), rank)
        iterates.append(full(model))
    boundaries = blocks.boundaries
    assert (len(boundaries), boundaries[-1]) == (3, 12)
    for start in boundaries[:-1]:
        expected = [torch.stack(column).mean(0) for column in zip(*iterates[start:])]
        with CommDebugMode() as communication, blocks.applied(model, start):
            pass
        # The processes agree on their blocks, and gather nothing.
        assert set(communication.get_comm_counts()) <= {torch.ops.c10d.allreduce_}
        assert communication.get_total_counts() <= 2
        with blocks.applied(model, start):
            torch.testing.assert_close(full(model), expected)
        gathered = blocks.model_state_dict(model, start, full=True)
        if rank == 0:
            torch.testing.assert_close(list(gathered.values()), expected)

    model, optimizer, blocks = make("resumed")
    fit(model, optimizer, range(7), rank)
    states = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer)))
    small = blocks.state_dict()
    everywhere: list[Any] = [None, None]
    torch.distributed.all_gather_object(everywhere, small)
    assert everywhere[0] == everywhere[1]  # so that one process may save it for all
    dcp.save(states, checkpoint_id=folder / "checkpoint")
    fit(model, optimizer, range(7, 11), rank)
    blocks.flush()
    model, optimizer, blocks = make("resumed")
    target: Any = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer)))
    dcp.load(target, checkpoint_id=folder / "checkpoint")
    set_state_dict(
        model,
        optimizer,
        model_state_dict=target["model"],
        optim_state_dict=target["optimizer"],
    )
    blocks.load_state_dict(small)
    fit(model, optimizer, range(7, 12), rank)
    blocks.flush()
    assert blocks.boundaries == boundaries
    assert files("undisturbed").items() <= files("resumed").items()

    # The shards of one process are those of another run.
    if rank == 1:
        for name in ("undisturbed", "resumed"):
            own = folder / name / "shard-00001-of-00002"
            own.rename(folder / f"{name}-shard")
        for name, other in (("undisturbed", "resumed"), ("resumed", "undisturbed")):
            (folder / f"{other}-shard").rename(folder / name / "shard-00001-of-00002")
    torch.distributed.barrier()
    model, optimizer, blocks = make("resumed")
    if rank == 1:
        with pytest.raises(gadam.average.BlockError, match="blocks of another run"):
            blocks.load_state_dict(small)
    else:
        blocks.load_state_dict(small)


def ddp_blocks(rank: int, folder: Path) -> None:
    """The first process writes the blocks of replicated parameters, and all of them read these."""
    model = network()
    ddp = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    blocks = gadam.BlockAverages(optimizer, folder / "blocks", every=2, max_blocks=3)
    iterates = []
    for step in range(10):
        fit(ddp, optimizer, range(step, step + 1), rank)
        iterates.append(full(model))
        if step == 4:
            assert blocks.boundaries == [0, 2, 4]  # no collective: the others wait for the disk
    assert blocks.boundaries[-1] == 10
    assert len(blocks.boundaries) == 4
    raw = full(model)
    for start in blocks.boundaries[:-1]:
        expected = [torch.stack(column).mean(0) for column in zip(*iterates[start:])]
        with blocks.applied(model, start):
            torch.testing.assert_close(full(model), expected)
        assert all(map(torch.equal, full(model), raw))
    torch.distributed.barrier()
    if rank:
        # A folder that is not shared, or a first process that cannot write.
        block_files.PATIENCE = 0.0
        blocks._ended = 12
        with pytest.raises(gadam.average.BlockError, match="block that ends at step 12"):
            blocks.model_state_dict(model)


def fsdp_without_private_constructors(rank: int, folder: Path) -> None:
    """Averages of sharded parameters do not need torch's private DTensor constructor."""
    from gadam import _torch

    _torch._SPEC_MODULE = "no_such_module"
    fsdp_equals_one_process(rank, folder)
