"""Predict what large runs cost, and check the predictions: `python -m benchmarks.capacity`.

Predictions come from gadam.train.capacity. Here, small models are trained on 1, 2 and 3 ranks
(gloo, on this machine). The bytes of state per rank and the bytes that the collectives move must be
exactly as predicted. The time of a step is predicted from the speed of computation, memory, and
collectives, each measured alone in the same processes. Results go to results/capacity.json.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.multiprocessing.spawn import start_processes
from torch.utils._python_dispatch import TorchDispatchMode

import gadam
from gadam.train.capacity import (
    NETWORKS,
    Costs,
    Machine,
    Network,
    Settings,
    measure,
    predict,
)

Work: TypeAlias = Callable[[int, Path], list[dict[str, Any]]]

RESULT = Path(__file__).parents[1] / "results" / "capacity.json"
RANKS = (8, 64, 256, 1024)
REFRESH_BATCHES = 3


class Traffic(TorchDispatchMode):
    """Counts the bytes that this rank sends in collectives, as ring algorithms do.

    Attributes:
        sent: Bytes, by collective.
    """

    def __init__(self) -> None:
        super().__init__()
        self.sent: Counter[str] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        name = func.name()
        if name.startswith("c10d::"):
            others, ranks = dist.get_world_size() - 1, dist.get_world_size()
            sent = {
                "_allgather_base_": lambda: _size(args[1]) * others,
                "allgather_": lambda: _size(args[1]) * others,
                "_reduce_scatter_base_": lambda: _size(args[0]) * others,
                "allreduce_": lambda: 2 * others * _size(args[0]) // ranks,
                "broadcast_": lambda: _size(args[0]),  # DDP, before its second step
                "barrier": lambda: 0,
            }[name.removeprefix("c10d::").split(".")[0]]()
            self.sent[name.removeprefix("c10d::").split(".")[0]] += sent
        return func(*args, **(kwargs or {}))

    @property
    def total(self) -> int:
        return sum(self.sent.values())


def _size(tensors: Any) -> int:
    if isinstance(tensors, Tensor):
        return tensors.numel() * tensors.element_size()
    return sum(map(_size, tensors))


class Block(nn.Module):
    """A block with sizes that 2 and 3 ranks cannot share evenly."""

    def __init__(self, width: int, inner: int, batchnorm: bool) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(width, inner), nn.Linear(inner, width)
        self.norm = nn.BatchNorm1d(inner) if batchnorm else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        """Return the output."""
        output: Tensor = x + self.last(self.norm(self.first(x)).relu())
        return output


class Model(nn.Module):
    """Some blocks between two layers."""

    def __init__(
        self, width: int = 5, inner: int = 7, blocks: int = 3, batchnorm: bool = True
    ) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, width), nn.Linear(width, 2)
        self.blocks = nn.ModuleList(Block(width, inner, batchnorm) for _ in range(blocks))

    def forward(self, x: Tensor) -> Tensor:
        """Return the output."""
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        output: Tensor = self.last(x)
        return output


@dataclass
class Observed:
    """What a rank held and sent, in bytes."""

    memory: dict[str, int] = field(default_factory=dict)
    traffic: dict[str, int] = field(default_factory=dict)


def _live_bytes() -> int:
    """Return the bytes of all tensors in this process."""
    gc.collect()
    storages = {
        tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
        for tensor in gc.get_objects()
        if type(tensor) in (Tensor, nn.Parameter)
    }
    return sum(storages.values())


def _model(settings: Settings) -> Model:
    return Model(batchnorm=settings.compute_bytes == 4)  # the CPU has none in bfloat16


def observe(settings: Settings, folder: Path) -> Observed:
    """Train a small model on the ranks of the current process group, and count bytes.

    Args:
        settings: The strategy, the types, and the batches of a refresh.
        folder: Where to store block averages.
    """
    torch.manual_seed(0)
    model: Any = _model(settings)
    if settings.strategy == "fsdp2":
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        types = {2: torch.bfloat16, 4: torch.float32}
        policy = MixedPrecisionPolicy(types[settings.compute_bytes], types[settings.reduce_bytes])
        for block in model.blocks:
            fully_shard(block, mp_policy=policy)
        fully_shard(model, mp_policy=policy)
    elif dist.get_world_size() > 1:
        model = nn.parallel.DistributedDataParallel(model, broadcast_buffers=False)
    optimizer = gadam.Gadam(model.parameters(), 0.01, average=gadam.Averaging(start=1))
    observed = Observed()
    for attempt in range(6):
        if attempt == 1:
            before = _live_bytes()
            blocks = gadam.BlockAverages(optimizer, folder, every=2)
        optimizer.zero_grad()
        with Traffic() as step:
            model(torch.randn(6, 4)).float().square().mean().backward()
        with Traffic() as sample:
            optimizer.step()
    blocks.flush()
    observed.memory["blocks"] = _live_bytes() - before
    before = _live_bytes()
    with Traffic() as swap, optimizer.average.applied(model, batchnorm=False):
        observed.memory["applied"] = _live_bytes() - before
    with Traffic() as refresh:
        gadam.refresh_batchnorm(model, [torch.randn(6, 4)] * settings.refresh_batches)
    with Traffic() as writing:
        blocks.finish()
    observed.traffic = {
        "step": step.total,
        "average": sample.total,
        "applied": swap.total,
        "blocks": writing.total,
        "refresh": refresh.total,
    }
    seen: dict[int, tuple[str, int]] = {}
    kinds = {"exp_avg": "moments", "exp_avg_sq": "moments", "average": "average"}
    for state in optimizer.state.values():
        for name, value in state.items():
            local = value.to_local() if hasattr(value, "to_local") else value
            seen[id(value)] = (kinds.get(name, "counters"), _size(local))
    for kind in ("moments", "average", "counters"):
        observed.memory[kind] = sum(size for k, size in seen.values() if k == kind)
    return observed


def expected(settings: Settings, ranks: int, rank: int, costs: Costs) -> Observed:
    """Predict what :func:`observe` measures."""
    model = _model(settings)
    network = Network.of(model, model.blocks)
    found = predict(network, ranks, costs, settings, rank=rank)
    kinds = ("moments", "average", "counters", "blocks", "applied")
    memory = {kind: found.memory[kind] for kind in kinds}
    return Observed(memory, dict(found.traffic))


CASES = {
    "fsdp2, float32": Settings(
        "fsdp2", compute_bytes=4, reduce_bytes=4, refresh_batches=REFRESH_BATCHES
    ),
    "fsdp2, bfloat16": Settings(
        "fsdp2", compute_bytes=2, reduce_bytes=4, refresh_batches=REFRESH_BATCHES
    ),
    "ddp, float32": Settings(
        "ddp", compute_bytes=4, reduce_bytes=4, refresh_batches=REFRESH_BATCHES
    ),
}


def check(rank: int, folder: Path) -> list[dict[str, Any]]:
    """Run all cases on the current process group, and return what was expected and observed."""
    rows, costs, ranks = [], measure("gadam"), dist.get_world_size()
    for name, settings in CASES.items():
        place = folder / name.replace(", ", "-")
        want, got = expected(settings, ranks, rank, costs), observe(settings, place)
        rows.append(
            {
                "case": name,
                "ranks": ranks,
                "rank": rank,
                "expected": asdict(want),
                "observed": asdict(got),
            }
        )
    return rows


def median_seconds(function: Callable[[], object], repetitions: int = 7) -> float:
    """Return the median time of a function that all ranks call together."""
    times = []
    for _ in range(repetitions + 1):
        dist.barrier()
        start = time.perf_counter()
        function()
        times.append(time.perf_counter() - start)
    return statistics.median(times[1:])


def time_step(rank: int, folder: Path) -> list[dict[str, Any]]:
    """Predict the time of a step with FSDP2 on the current process group, and measure it."""
    from torch.distributed.fsdp import fully_shard

    ranks, batch = dist.get_world_size(), torch.randn(256, 4)
    settings = Settings(compute_bytes=4, examples=len(batch), recompute=False)

    def trained(model: nn.Module) -> tuple[Callable[[], None], gadam.Gadam]:
        optimizer = gadam.Gadam(model.parameters(), average=gadam.Averaging(start=1))

        def step() -> None:
            optimizer.zero_grad()
            model(batch).square().mean().backward()

        return step, optimizer

    def model() -> Model:
        return Model(width=384, inner=1536, blocks=4, batchnorm=False)

    # The parts alone
    alone = model()
    network = Network.of(alone, alone.blocks)
    compute, optimizer = trained(alone)
    flops = 6 * network.parameters * len(batch) / median_seconds(compute)
    update = predict(network, 1, settings=settings, machine=Machine(memory_bandwidth=1.0))
    moved = update.seconds["update"] + update.seconds["average"]  # bytes, at one byte per second
    bandwidth = moved / median_seconds(optimizer.step)
    chunk = torch.ones(sum(p.numel() for p in alone.blocks[0].parameters()) // ranks)
    whole, one = torch.empty(len(chunk) * ranks), torch.empty(ranks)
    long = median_seconds(lambda: dist.all_gather_into_tensor(whole, chunk))
    short = median_seconds(lambda: dist.all_gather_into_tensor(one, torch.ones(1)))
    others = max(ranks - 1, 1)
    link = len(chunk) * 4 * others / max(long - short, 1e-9)
    machine = Machine(
        flops=flops,
        memory_bandwidth=bandwidth,
        link=link,
        latency=short / others,
        overlaps=False,
    )
    # All of it together
    sharded = model()
    for block in sharded.blocks:
        fully_shard(block)
    fully_shard(sharded)
    compute, optimizer = trained(sharded)

    def step() -> None:
        compute()
        optimizer.step()

    measured = median_seconds(step)
    predicted = predict(network, ranks, settings=settings, machine=machine).seconds
    return [
        {
            "ranks": ranks,
            "rank": rank,
            "measured": measured,
            "predicted": predicted["step"],
            "communication": predicted["communication"],
        }
    ]


def run_rank(rank: int, ranks: int, folder: str, work: Work) -> None:
    """Do some work as one of several processes, and write its rows to a file."""
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", f"file://{folder}/rendezvous", rank=rank, world_size=ranks)
    rows = work(rank, Path(folder) / "blocks")
    (Path(folder) / f"rows-{rank}.json").write_text(json.dumps(rows))
    dist.barrier()
    dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)  # as in tests/distributed/workers.py


def on_ranks(work: Work, start_method: str = "spawn") -> list[dict[str, Any]]:
    """Return the rows of some work on 1, 2 and 3 ranks.

    Args:
        work: :func:`check` or :func:`time_step`.
        start_method: How to start the processes.
    """
    rows: list[dict[str, Any]] = []
    for ranks in (1, 2, 3):
        with tempfile.TemporaryDirectory() as folder:
            start_processes(run_rank, (ranks, folder, work), ranks, start_method=start_method)
            for path in sorted(Path(folder).glob("rows-*.json")):
                rows += json.loads(path.read_text())
    return rows


def predictions() -> list[dict[str, Any]]:
    """Return the predictions of the documentation: with Gadam and BatchNorm in every block."""
    costs = measure("gadam")
    rows = []
    for network in NETWORKS.values():
        # Two normalizations per block. Language models have none that needs a refresh.
        normalized = replace(network, channels=(network.width,) * 2 * len(network.blocks))
        rows += [predict(normalized, ranks, costs).to_dict() for ranks in RANKS]
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=RESULT)
    out: Path = parser.parse_args().out
    found = on_ranks(check)
    wrong = [row for row in found if row["expected"] != row["observed"]]
    for row in wrong:
        print(row)
    content = {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "costs": {name: asdict(measure(name)) for name in ("sgd", "adamw", "gadam", "gadamx")},
        "machine": asdict(Machine()),
        "settings": asdict(Settings()),
        "parameters": {name: network.parameters for name, network in NETWORKS.items()},
        "checks": {
            "ranks": sorted({row["ranks"] for row in found}),
            "cases": sorted({row["case"] for row in found}),
            "compared": sum(len(kind) for row in found for kind in row["expected"].values()),
            "wrong": len(wrong),
        },
        "seconds": [row for row in on_ranks(time_step) if row["rank"] == 0],
        "predictions": predictions(),
    }
    out.write_text(json.dumps(content, indent=1) + "\n")
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
