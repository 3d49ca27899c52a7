"""What a large run costs per rank: memory, traffic, time, and what breaks first.

The costs per parameter are measured with the real optimizers (:func:`measure`). Everything else is
arithmetic on the shapes of the parameters: which rows of which tensor a rank holds, and what the
collectives of FSDP2 or DDP move. The bandwidths are those of a :class:`Machine`, which states its
assumptions. State per rank and bytes per collective are exact: tests compare them with runs on 1, 2
and 3 ranks. Times are estimates.

Example:
    >>> costs = measure("gadam")
    >>> costs.moments, costs.average
    (8, 4)
    >>> big = predict(NETWORKS["70B"], ranks=64, costs=costs)
    >>> round(big.memory["average"] / 1e9, 1)  # GB per rank
    4.4
    >>> big.traffic["average"] < 20  # bytes per sample: the ranks agree that it is finite
    True
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Literal, TypeAlias, cast

import torch
from torch import nn

import gadam
from gadam._torch import BATCHNORM_TYPES
from gadam.runs.files import Document

__all__ = [
    "NETWORKS",
    "Costs",
    "Machine",
    "Network",
    "Prediction",
    "Settings",
    "measure",
    "predict",
    "shard_rows",
]

Shape: TypeAlias = tuple[int, ...]
Strategy: TypeAlias = Literal["ddp", "fsdp2"]


# ---------------------------------------------------------------------------------- measured costs


@dataclass(frozen=True)
class Costs:
    """Bytes that an optimizer and its average hold.

    Args:
        moments: Per parameter: the optimizer's own state.
        average: Per parameter.
        per_tensor: Per tensor of parameters: counters.
        fixed: Per optimizer: the progress of the average.
    """

    moments: int
    average: int
    per_tensor: int = 0
    fixed: int = 0

    def state(self, parameters: int, tensors: int) -> int:
        """Return the bytes of all state.

        Args:
            parameters: The number of parameters.
            tensors: The number of tensors that they are in.
        """
        return (self.moments + self.average) * parameters + self.per_tensor * tensors + self.fixed


def measure(
    optimizer: Literal["sgd", "adamw", "gadam", "gadamx"] = "gadam",
    dtype: torch.dtype = torch.float32,
) -> Costs:
    """Measure what an optimizer holds, after two steps on two small tensors.

    Args:
        optimizer: The optimizer. The last two average their iterates.
        dtype: The type of the weights.

    Example:
        >>> measure("adamw").moments, measure("adamw").average
        (8, 0)
        >>> measure("gadamx", torch.bfloat16).average
        4
    """
    params = [nn.Parameter(torch.ones(size, dtype=dtype)) for size in (64, 96)]
    average = gadam.Averaging(start=1)
    makers: dict[str, Callable[[], torch.optim.Optimizer]] = {
        "sgd": lambda: torch.optim.SGD(params, 0.1, momentum=0.9),
        "adamw": lambda: torch.optim.AdamW(params),
        "gadam": lambda: gadam.Gadam(params, average=average),
        "gadamx": lambda: gadam.GadamX(params, average=average),
    }
    made = makers[optimizer]()
    for _ in range(2):
        for p in params:
            p.grad = torch.ones_like(p)
        made.step()
    bytes_of = dict.fromkeys(("moments", "average", "per_tensor", "fixed"), 0)
    entries = [(p, name, value) for p in params for name, value in made.state[p].items()]
    owners: dict[int, set[int]] = {}  # the parameters that hold a tensor, by its storage
    for p, _, value in entries:
        owners.setdefault(value.data_ptr(), set()).add(id(p))
    seen: set[int] = set()
    for p, name, value in entries:
        if value.shape == p.shape:
            kind = "average" if name.startswith("average") else "moments"
            bytes_of[kind] += value.element_size() * (p is params[0])
        elif len(owners[value.data_ptr()]) > 1:
            is_new = value.data_ptr() not in seen
            bytes_of["fixed"] += value.numel() * value.element_size() * is_new
            seen.add(value.data_ptr())
        else:
            bytes_of["per_tensor"] += value.numel() * value.element_size() * (p is params[0])
    return Costs(**bytes_of)


# ------------------------------------------------------------------------------------- the network


@dataclass(frozen=True)
class Network:
    """The shapes of a model's parameters, in the units that FSDP2 gathers.

    Args:
        name: The model.
        blocks: The shapes of the parameters of each block, in the order of the forward pass.
        root: The shapes of the parameters outside of blocks.
        channels: The sizes of the BatchNorm layers, if there are any.
        width: Activations per example between two blocks.
    """

    name: str
    blocks: tuple[tuple[Shape, ...], ...]
    root: tuple[Shape, ...]
    channels: tuple[int, ...] = ()
    width: int = 0

    @classmethod
    def transformer(
        cls,
        name: str,
        *,
        layers: int,
        width: int,
        feedforward: int,
        heads: int,
        kv_heads: int,
        words: int,
        tied: bool = False,
    ) -> Network:
        """Return a decoder with grouped-query attention and gated feed-forward layers.

        Args:
            name: The model.
            layers: The number of blocks.
            width: The size of the residual stream.
            feedforward: The inner size of the feed-forward layers.
            heads: Attention heads.
            kv_heads: Heads of keys and values.
            words: The size of the vocabulary.
            tied: Whether the first and the last layer share their weights.

        Example:
            >>> small = Network.transformer("tiny", layers=2, width=8, feedforward=16, heads=2,
            ...     kv_heads=1, words=10)
            >>> small.parameters
            1352
        """
        head = width // heads
        block = (
            *((width, width), (kv_heads * head, width), (kv_heads * head, width), (width, width)),
            *((feedforward, width), (feedforward, width), (width, feedforward)),
            *((width,), (width,)),
        )
        root = ((words, width), (width,)) + (() if tied else ((words, width),))
        return cls(name, (block,) * layers, root, width=width)

    @classmethod
    def of(cls, model: nn.Module, blocks: Iterable[nn.Module], name: str = "") -> Network:
        """Return the network of a model.

        Args:
            model: The model, before it is sharded.
            blocks: The modules that ``fully_shard`` is applied to, besides the model.
            name: The model's name.

        Example:
            >>> model = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Linear(5, 2))
            >>> network = Network.of(model, [model[2]])
            >>> network.blocks, network.root, network.channels
            ((((2, 5), (2,)),), ((5, 3), (5,), (5,), (5,)), (5,))
        """
        grouped = [list(block.parameters()) for block in blocks]
        inside = {p for group in grouped for p in group}
        layers = [m for m in model.modules() if isinstance(m, BATCHNORM_TYPES)]
        return cls(
            name,
            tuple(tuple(tuple(p.shape) for p in group) for group in grouped),
            tuple(tuple(p.shape) for p in model.parameters() if p not in inside),
            tuple(cast(int, layer.num_features) for layer in layers),
        )

    @property
    def units(self) -> Iterator[tuple[Shape, ...]]:
        """The units that are gathered together: each block, and the root."""
        yield from self.blocks
        yield self.root

    @cached_property
    def parameters(self) -> int:
        """The number of parameters."""
        return sum(math.prod(shape) for unit in self.units for shape in unit)

    @cached_property
    def tensors(self) -> int:
        """The number of tensors that the parameters are in."""
        return sum(len(unit) for unit in self.units)


_llama = partial(Network.transformer, words=128_256, kv_heads=8)
#: Networks of usual shapes: those of Llama 3 and 3.2.
NETWORKS = {
    network.name: network
    for network in (
        _llama("1B", layers=16, width=2048, feedforward=8192, heads=32, tied=True),
        _llama("8B", layers=32, width=4096, feedforward=14_336, heads=32),
        _llama("70B", layers=80, width=8192, feedforward=28_672, heads=64),
    )
}


def shard_rows(rows: int, rank: int, ranks: int) -> int:
    """Return how many rows of a tensor a rank holds. FSDP2 shards the first dimension in chunks.

    Args:
        rows: The size of the first dimension.
        rank: The rank.
        ranks: The number of ranks.

    Example:
        >>> [shard_rows(7, rank, 3) for rank in range(3)], [shard_rows(1, r, 3) for r in range(3)]
        ([3, 3, 1], [1, 0, 0])
    """
    chunk = math.ceil(rows / ranks)
    return min(max(rows - rank * chunk, 0), chunk)


def _numbers(shapes: tuple[Shape, ...], rank: int, ranks: int) -> int:
    """Return how many parameters a rank holds of some tensors."""
    return sum(shard_rows(s[0], rank, ranks) * math.prod(s[1:]) for s in shapes)


# ------------------------------------------------------------------------------------- predictions


@dataclass(frozen=True)
class Machine:
    """A cluster. The defaults are those of nodes with 8 H100 GPUs and one 400 Gbit/s link per GPU.

    Args:
        gpus_per_node: GPUs that the fast links connect.
        memory: Bytes per GPU.
        flops: Matrix products per second and GPU, in bfloat16, at the efficiency of real training
            (40% of 989 TFLOP/s).
        memory_bandwidth: Bytes per second of a GPU's memory (80% of 3.35 TB/s).
        link: Bytes per second and GPU within a node (NVLink, 80% of 450 GB/s).
        network: Bytes per second and GPU between nodes (80% of 50 GB/s).
        latency: Seconds per collective and hop. It grows with the number of ranks.
        storage: Bytes per second that the shared file system takes from all nodes together.
        overlaps: Whether collectives run while the GPU computes.
    """

    gpus_per_node: int = 8
    memory: float = 80e9
    flops: float = 0.4 * 989e12
    memory_bandwidth: float = 0.8 * 3.35e12
    link: float = 0.8 * 450e9
    network: float = 0.8 * 50e9
    latency: float = 5e-6
    storage: float = 100e9
    overlaps: bool = True

    def collective_seconds(self, sent: float, ranks: int) -> float:
        """Return the time of a ring collective.

        Args:
            sent: Bytes that each rank sends.
            ranks: The number of ranks.
        """
        bandwidth = self.link if ranks <= self.gpus_per_node else self.network
        return sent / bandwidth + self.latency * (ranks - 1)


@dataclass(frozen=True)
class Settings:
    """How a run is set up.

    Args:
        strategy: "fsdp2" shards everything, "ddp" replicates it.
        weight_bytes: Per parameter, of the weights that the optimizer updates.
        compute_bytes: Per number in the forward pass (2 for bfloat16).
        reduce_bytes: Per number of gradients that are reduced.
        examples: Examples (tokens) per rank and step.
        blocks_every: Steps per block of :class:`gadam.BlockAverages`; 0 for none.
        max_blocks: Blocks that are kept.
        refresh_batches: Batches of a BatchNorm refresh.
        checkpoint_every: Steps per checkpoint.
        recompute: Whether the backward pass computes the activations of the blocks again.
    """

    strategy: Strategy = "fsdp2"
    weight_bytes: int = 4
    compute_bytes: int = 2
    reduce_bytes: int = 4
    examples: int = 8192
    blocks_every: int = 100
    max_blocks: int = 64
    refresh_batches: int = 100
    checkpoint_every: int = 500
    recompute: bool = True


@dataclass(frozen=True)
class Prediction:
    """What a run costs one rank.

    Args:
        network: The name of the network.
        ranks: The number of ranks.
        memory: Bytes by use. "gathered" and "activations" are estimates, the others are exact.
        traffic: Bytes that the rank sends, by activity: "step" per step, "average" per sample,
            "applied" per swap, "blocks" per block, "refresh" per refresh.
        storage: Bytes that all ranks together write: "block", "blocks" (all that are kept) and
            "checkpoint".
        seconds: "compute", "communication", "update", "average" and "step" (all together) per
            step; "applied" per swap; "refresh"; "block" and "checkpoint" to write one.
        problems: What does not work, the worst first; empty if all is well.
    """

    network: str
    ranks: int
    memory: Mapping[str, int]
    traffic: Mapping[str, int]
    storage: Mapping[str, int]
    seconds: Mapping[str, float]
    problems: tuple[str, ...]

    def to_dict(self) -> Document:
        """Return the prediction as plain data."""
        return {
            "network": self.network,
            "ranks": self.ranks,
            "memory": dict(self.memory),
            "traffic": dict(self.traffic),
            "storage": dict(self.storage),
            "seconds": {name: float(f"{value:.4g}") for name, value in self.seconds.items()},
            "problems": list(self.problems),
        }


def predict(
    network: Network,
    ranks: int,
    costs: Costs | None = None,
    settings: Settings = Settings(),  # noqa: B008 (immutable)
    machine: Machine = Machine(),  # noqa: B008 (immutable)
    rank: int = 0,
) -> Prediction:
    """Predict what a run costs a rank.

    Args:
        network: The network.
        ranks: The number of ranks.
        costs: Of the optimizer. Default: those of Gadam, measured.
        settings: How the run is set up.
        machine: The cluster.
        rank: The rank. The first one holds the most.
    """
    costs = costs or measure("gadam")
    memory = _memory(network, ranks, rank, costs, settings)
    traffic = _traffic(network, ranks, settings)
    parameters = network.parameters
    block = parameters * (costs.average or 4)
    storage = {
        "block": block,
        "blocks": block * settings.max_blocks,
        "checkpoint": parameters * settings.weight_bytes + costs.state(parameters, network.tensors),
    }
    seconds = _seconds(network, ranks, memory, traffic, storage, settings, machine)
    problems = _problems(memory, storage, seconds, settings, machine)
    return Prediction(network.name, ranks, memory, traffic, storage, seconds, problems)


def _memory(
    network: Network, ranks: int, rank: int, costs: Costs, settings: Settings
) -> dict[str, int]:
    is_sharded = settings.strategy == "fsdp2"
    shares = ranks if is_sharded else 1
    held = sum(_numbers(unit, rank if is_sharded else 0, shares) for unit in network.units)
    sizes = sorted((sum(math.prod(s) for s in unit) for unit in network.units), reverse=True)
    # FSDP2 holds the unit in use, gathers the next one, and reduces the gradients of one.
    gathered = sum(sizes[:2]) * settings.compute_bytes + sizes[0] * settings.reduce_bytes
    # Between blocks, if the blocks recompute what is inside of them.
    between = settings.examples * network.width * settings.compute_bytes * len(network.blocks)
    # The mean of the current block, and the one that is being written, if this rank writes.
    buffers = 2 if is_sharded or rank == 0 else 1
    return {
        "weights": held * settings.weight_bytes,
        "gradients": held * settings.weight_bytes,
        "moments": held * costs.moments,
        "average": held * costs.average,
        "counters": costs.per_tensor * network.tensors + costs.fixed,
        "gathered": gathered if is_sharded and ranks > 1 else 0,
        "activations": between,
        # The raw weights and BatchNorm statistics meanwhile.
        "applied": held * settings.weight_bytes + sum(8 * n + 8 for n in network.channels),
        "blocks": buffers * held * (costs.average or 4) if settings.blocks_every else 0,
        "refresh": sum(2 + 2 * n for n in network.channels) * 8,
    }


def _traffic(network: Network, ranks: int, settings: Settings) -> dict[str, int]:
    others = ranks - 1
    # What a rank sends to gather a unit once: its own chunk of each tensor, padded.
    chunks = [_numbers(unit, 0, ranks) for unit in network.units]
    statistics = sum(2 + 2 * n for n in network.channels) * 8
    if settings.strategy == "ddp":
        step = 2 * others * network.parameters * settings.reduce_bytes // ranks
        blocks, root, agree = 0, 0, 0  # every rank has all weights
    else:
        blocks, root = others * sum(chunks[:-1]), others * chunks[-1]
        # Blocks are gathered again in the backward pass; the root stays.
        gathered = (2 * blocks + root) * settings.compute_bytes
        step = gathered + (blocks + root) * settings.reduce_bytes
        agree = 2 * others * _FLAG // ranks
    # The ranks agree before each batch, and that there is none left. The root stays here, too.
    batches = settings.refresh_batches
    refresh = (batches * blocks + root) * settings.compute_bytes
    refresh += (batches + 1) * (2 * others * _ROUND // ranks) + others * statistics
    return {
        "step": step,
        "average": agree,
        "applied": 0,
        "blocks": 0,
        "refresh": refresh if network.channels else 0,
    }


_FLAG = 8  # bytes: whether a sample is finite
_ROUND = 32  # bytes: whether a rank has another batch


def _seconds(
    network: Network,
    ranks: int,
    memory: Mapping[str, int],
    traffic: Mapping[str, int],
    storage: Mapping[str, int],
    settings: Settings,
    machine: Machine,
) -> dict[str, float]:
    held = memory["weights"] // settings.weight_bytes
    # Weights, gradients and moments are read, all but the gradients are written.
    update = (3 * memory["weights"] + 2 * memory["moments"]) / machine.memory_bandwidth
    average = 2 * memory["average"] / machine.memory_bandwidth  # in the kernel's own pass
    forward = 2 * network.parameters * settings.examples / machine.flops
    compute, communication, step = _timeline(network, ranks, traffic, settings, machine)
    refresh = settings.refresh_batches * max(
        forward, machine.collective_seconds(_forward_bytes(network, ranks, settings), ranks)
    )
    return {
        "compute": compute,
        "communication": communication,
        "update": update,
        "average": average,
        "step": step + update + average,
        # Read and write the raw copy and the weights, in and out.
        "applied": 2 * (2 * settings.weight_bytes + 8) * held / machine.memory_bandwidth,
        "refresh": refresh if network.channels else 0.0,
        "block": storage["block"] / machine.storage,
        "checkpoint": storage["checkpoint"] / machine.storage,
    }


def _forward_bytes(network: Network, ranks: int, settings: Settings) -> int:
    chunks = sum(_numbers(unit, 0, ranks) for unit in network.units)
    return chunks * (ranks - 1) * settings.compute_bytes if settings.strategy == "fsdp2" else 0


def _timeline(
    network: Network,
    ranks: int,
    traffic: Mapping[str, int],
    settings: Settings,
    machine: Machine,
) -> tuple[float, float, float]:
    """Play a step through: a compute stream and a communication stream, one unit after another.

    Returns:
        The seconds of computation, of communication, and of both together.
    """
    units = list(network.units)
    sizes = [sum(math.prod(shape) for shape in unit) for unit in units]
    # Two per parameter and example forward; twice that backward, and maybe forward again.
    forward = [2 * size * settings.examples / machine.flops for size in sizes]
    backward = [(3 if settings.recompute else 2) * seconds for seconds in forward]

    def moved(index: int, width: int) -> float:
        if ranks == 1:
            return 0.0
        sent = _numbers(units[index], 0, ranks) * (ranks - 1) * width
        return machine.collective_seconds(sent, ranks)

    if settings.strategy == "ddp":
        reduce = machine.collective_seconds(traffic["step"], ranks) if ranks > 1 else 0.0
        compute = sum(forward) + sum(backward)
        # Gradients are reduced while the rest of the backward pass runs.
        hidden = sum(backward) * (1 - 1 / len(units)) if machine.overlaps else 0.0
        return compute, reduce, compute + max(0.0, reduce - hidden)

    order = [len(units) - 1, *range(len(units) - 1)]  # the root is gathered first, and stays
    gathers = {i: moved(i, settings.compute_bytes) for i in order}
    reduces = {i: moved(i, settings.reduce_bytes) for i in order}
    communication = sum(gathers.values()) + sum(reduces.values())
    communication += sum(gathers[i] for i in order[1:])
    compute = sum(forward) + sum(backward)
    if not machine.overlaps:
        return compute, communication, compute + communication
    wire = gpu = 0.0  # when each stream is free
    for i in order:  # a unit is gathered while the unit before it computes
        wire += gathers[i]
        gpu = max(gpu, wire) + forward[i]
    wire = max(wire, gpu - forward[order[-1]])
    for i in reversed(order):
        if i != order[0]:
            wire += gathers[i]
        gpu = max(gpu, wire) + backward[i]
        wire = max(wire, gpu - backward[i]) + reduces[i]
    return compute, communication, max(gpu, wire)


def _problems(
    memory: Mapping[str, int],
    storage: Mapping[str, int],
    seconds: Mapping[str, float],
    settings: Settings,
    machine: Machine,
) -> tuple[str, ...]:
    """Return what does not work, and what slows the run down, the worst first."""
    found = []
    used = sum(size for name, size in memory.items() if name != "applied")
    if used > machine.memory:
        found.append(
            f"memory: {used / 1e9:,.0f} GB per GPU, but there are {machine.memory / 1e9:g}"
        )
    elif used + memory["applied"] > machine.memory:
        found.append("memory: no room for the raw weights while the average is applied")
    if settings.blocks_every and seconds["block"] > settings.blocks_every * seconds["step"]:
        found.append("blocks: the file system takes longer to write one than training takes")
    if seconds["checkpoint"] > 0.1 * settings.checkpoint_every * seconds["step"]:
        found.append("checkpoints: writing one takes more than 10% of the time between two")
    waiting = seconds["step"] - seconds["compute"] - seconds["update"] - seconds["average"]
    if waiting > 0.1 * seconds["step"]:
        share = waiting / seconds["step"]
        found.append(f"network: GPUs wait for it {share:.0%} of the time")
    return tuple(found)
