"""`gadam bench`: time one optimizer step beside other optimizers, in the same run.

Measures on the parameter shapes of real networks and reports medians and quartiles. Repetitions are
interleaved, so noise of the machine hits all optimizers alike. Ratios are to torch's fused AdamW in
the same repetition; the machine's copy bandwidth is shown for reference. A busy machine and times
that vary are pointed out. Block averages are measured over whole blocks, too
(:mod:`gadam.commands.bench_blocks`).
"""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import platform
import random
import shutil
import sys
import tempfile
import time
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median, quantiles
from typing import Annotated, Any

import torch
import tyro
from torch import Tensor, nn

import gadam
from gadam._names import count
from gadam.commands import bench_blocks
from gadam.commands.options import Count, Flag, MaybeInt, check_positive, option, parse
from gadam.runs.files import Document, to_json, write_json
from gadam.runs.recipe import RecipeError
from gadam.train.sweep import available_cores

__all__ = ["NETWORKS", "contenders", "measure", "measure_all", "run", "to_markdown", "warnings"]

Shape = tuple[int, ...]
Step = Callable[[], object]


# ------------------------------------------------------------------------------------- networks


def resnet50() -> Iterator[Shape]:
    """Yield the shapes of ResNet-50 on ImageNet: 161 tensors, 25,557,032 parameters."""

    def convolution(inputs: int, outputs: int, size: int) -> Iterator[Shape]:
        yield from ((outputs, inputs, size, size), (outputs,), (outputs,))

    yield from convolution(3, 64, 7)
    inputs = 64
    for planes, blocks in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for block in range(blocks):
            yield from convolution(inputs, planes, 1)
            yield from convolution(planes, planes, 3)
            yield from convolution(planes, 4 * planes, 1)
            if block == 0:
                yield from convolution(inputs, 4 * planes, 1)
            inputs = 4 * planes
    yield from ((1000, 2048), (1000,))


def vgg16() -> Iterator[Shape]:
    """Yield the shapes of VGG-16 with BatchNorm on CIFAR-100: 15,299,748 parameters."""
    inputs = 3
    for outputs in (64, 64, 128, 128, 256, 256, 256, 512, 512, 512, 512, 512, 512):
        yield from ((outputs, inputs, 3, 3), (outputs,), (outputs,), (outputs,))
        inputs = outputs
    yield from ((512, 512), (512,), (512, 512), (512,), (100, 512), (100,))


def preresnet110() -> Iterator[Shape]:
    """Yield the shapes of PreResNet-110 on CIFAR-100: 332 small tensors, 1,169,972 parameters."""
    yield (16, 3, 3, 3)
    inputs = 16
    for planes in (16, 32, 64):
        for block in range(12):
            yield from ((inputs,), (inputs,), (planes, inputs, 1, 1))
            yield from ((planes,), (planes,), (planes, planes, 3, 3))
            yield from ((planes,), (planes,), (4 * planes, planes, 1, 1))
            if block == 0:
                yield (4 * planes, inputs, 1, 1)
            inputs = 4 * planes
    yield from ((256,), (256,), (100, 256), (100,))


def awd_lstm() -> Iterator[Shape]:
    """Yield the shapes of the tied AWD-LSTM on Penn Treebank: 24,221,600 parameters."""
    yield (10_000, 400)
    for inputs, hidden in ((400, 1150), (1150, 1150), (1150, 400)):
        yield from ((4 * hidden, inputs), (4 * hidden, hidden), (4 * hidden,), (4 * hidden,))
    yield (10_000,)


def transformer() -> Iterator[Shape]:
    """Yield the shapes of a transformer: 12 layers, width 768, 32,000 tokens, 110 M parameters."""
    width = 768
    yield from ((32_000, width), (1024, width))
    for _ in range(12):
        yield from ((width,), (width,), (3 * width, width), (3 * width,), (width, width), (width,))
        yield from (
            (width,),
            (width,),
            (4 * width, width),
            (4 * width,),
            (width, 4 * width),
            (width,),
        )
    yield from ((width,), (width,))


NETWORKS: dict[str, Callable[[], Iterator[Shape]]] = {
    "resnet50": resnet50,
    "vgg16": vgg16,
    "preresnet110": preresnet110,
    "awd-lstm": awd_lstm,
    "transformer": transformer,
}


# ----------------------------------------------------------------------------------- contenders

BASE = bench_blocks.BASE
Builder = Callable[[list[nn.Parameter]], tuple[Step, Any]]  # the step, and the owner of its state
Row = dict[str, Any]  # the measurements of one optimizer: numbers, and pairs of quartiles


def contenders() -> dict[str, Builder]:
    """Return the optimizers to measure by name. Peers that are not installed are left out."""
    decay: dict[str, Any] = {"weight_decay": 0.01}

    def plain(make: Callable[..., Any], **kwargs: Any) -> Builder:
        def build(params: list[nn.Parameter]) -> tuple[Step, Any]:
            optimizer = make(params, **kwargs)
            if hasattr(optimizer, "train"):
                optimizer.train()
            return optimizer.step, optimizer

        return build

    def with_averaged_model(params: list[nn.Parameter]) -> tuple[Step, Any]:
        model = nn.ParameterList(params)
        optimizer = torch.optim.AdamW(params, lr=1e-3, fused=True, **decay)
        averaged = torch.optim.swa_utils.AveragedModel(model)

        def step() -> None:
            optimizer.step()
            averaged.update_parameters(model)

        step.extra = list(averaged.module.parameters())  # type: ignore[attr-defined]
        return step, optimizer

    def with_blocks(params: list[nn.Parameter]) -> tuple[Step, Any]:
        folder = tempfile.mkdtemp(prefix="gadam-bench-")
        optimizer = gadam.Gadam(params, lr=1e-3, **decay)
        blocks = gadam.BlockAverages(optimizer, folder, every=10**9)
        weakref.finalize(blocks, shutil.rmtree, folder, ignore_errors=True)

        def step() -> None:
            optimizer.step()

        states = optimizer.state_dict()["state"].values()
        step.extra = [state["block_mean"] for state in states]  # type: ignore[attr-defined]
        return step, optimizer

    always = gadam.Averaging(start=1)
    between = gadam.Averaging(start=1, interpolation=0.9)
    found: dict[str, Builder] = {
        BASE: plain(torch.optim.AdamW, lr=1e-3, fused=True, **decay),
        "torch AdamW foreach": plain(torch.optim.AdamW, lr=1e-3, foreach=True, **decay),
        "torch AdamW loop": plain(torch.optim.AdamW, lr=1e-3, foreach=False, **decay),
        "torch AdamW fused + AveragedModel": with_averaged_model,
        "Gadam": plain(gadam.Gadam, lr=1e-3, **decay),
        "Gadam, a sample every step": plain(gadam.Gadam, lr=1e-3, average=always, **decay),
        "Gadam, sampled into a block": with_blocks,
        "Gadam, interpolated": plain(
            gadam.Gadam, lr=1e-3, betas=(0.0, 0.999), average=between, **decay
        ),
        "GadamX p=1/8": plain(gadam.GadamX, lr=0.1, **decay),
        "GadamX p=1/8, a sample every step": plain(gadam.GadamX, lr=0.1, average=always, **decay),
        "GadamX p=0.2": plain(gadam.GadamX, lr=0.1, partial=0.2, **decay),
        "GadamX p=1/8 foreach": plain(gadam.GadamX, lr=0.1, foreach=True, **decay),
        "GadamX p=1/8 loop": plain(gadam.GadamX, lr=0.1, foreach=False, **decay),
    }
    for module, attribute, name, kwargs in (
        ("schedulefree", "AdamWScheduleFree", "schedulefree AdamW", {"lr": 1e-3, **decay}),
        ("pytorch_optimizer", "PAdam", "pytorch_optimizer PAdam", {"lr": 0.1, "partial": 0.125}),
    ):
        try:
            peer = getattr(importlib.import_module(module), attribute)
        except ImportError:
            continue
        found[name] = plain(peer, **kwargs)
    return found


# -------------------------------------------------------------------------------------- measuring


def _state_bytes(optimizer: Any, step: Step, params: list[nn.Parameter]) -> float:
    tensors = [
        value
        for state in optimizer.state.values()
        for value in state.values()
        if torch.is_tensor(value) and value.dim() > 0
    ]
    tensors += getattr(step, "extra", [])
    sizes = {t.data_ptr(): t.numel() * t.element_size() for t in tensors}  # shared ones count once
    return sum(sizes.values()) / sum(p.numel() for p in params)


def _copy_seconds(elements: int, repetitions: int) -> float:
    source, target = torch.rand(elements), torch.empty(elements)
    times = []
    for _ in range(repetitions):
        start = time.perf_counter()
        target.copy_(source)
        times.append(time.perf_counter() - start)
    return median(times)


def _side_by_side(
    builders: dict[str, Builder],
    values: list[Tensor],
    gradients: list[Tensor],
    repetitions: int,
    warm_up: int,
) -> dict[str, Row]:
    steps: dict[str, Step] = {}
    rows: dict[str, Row] = {}
    for name, build in builders.items():
        params = [nn.Parameter(value.clone()) for value in values]
        for p, gradient in zip(params, gradients):
            p.grad = gradient  # shared: no optimizer writes to gradients
        step, holder = build(params)
        for _ in range(warm_up):
            step()
        steps[name] = step
        rows[name] = {"state bytes per parameter": round(_state_bytes(holder, step, params), 2)}
    times: dict[str, list[float]] = {name: [] for name in steps}
    # Shuffle the order each time: a wasteful step evicts the caches of the one after it.
    order, shuffle = list(steps), random.Random(0).shuffle
    for _ in range(repetitions):
        shuffle(order)
        for name in order:
            step = steps[name]
            start = time.perf_counter()
            step()
            times[name].append(time.perf_counter() - start)
    for name, seconds in times.items():
        paired = [mine / base for mine, base in zip(seconds, times[BASE])]
        rows[name]["milliseconds"] = round(1e3 * median(seconds), 3)
        rows[name]["milliseconds, quartiles"] = _quartiles([1e3 * s for s in seconds])
        rows[name]["ratio"] = round(median(seconds) / median(times[BASE]), 3)
        rows[name]["ratio, quartiles"] = _quartiles(paired)
    return rows


def _quartiles(values: list[float]) -> list[float]:
    """Return the first and the third quartile."""
    if len(values) == 1:
        values = values * 2
    first, _, third = quantiles(values, n=4, method="inclusive")
    return [round(first, 3), round(third, 3)]


def measure(
    network: str,
    names: list[str] | None = None,
    repetitions: int = 25,
    warm_up: int = 12,
    blocks: int = 0,
) -> Document:
    """Measure the time of a step on a network's shapes, for each optimizer: median and quartiles.

    Args:
        network: One of :data:`NETWORKS`.
        names: Which of :func:`contenders`; None means all.
        repetitions: Steps to time.
        warm_up: Steps before timing.
        blocks: Blocks of 100 steps to finish, to measure what that costs; 0 to leave this out.

    Returns:
        What `gadam bench --json` prints for this network.
    """
    shapes = list(NETWORKS[network]())
    generator = torch.Generator().manual_seed(0)

    def draw() -> list[Tensor]:
        return [torch.randn(shape, generator=generator) for shape in shapes]

    values, gradients = draw(), draw()
    elements = sum(value.numel() for value in values)
    builders = {n: b for n, b in contenders().items() if names is None or n in names}
    rivals = [name for name in builders if name != BASE]
    # As many at a time as fit into about 8 GB, always together with the base.
    together = max(1, int(8e9 / (20 * elements)) - 1)
    result: dict[str, Row] = {}
    for first in range(0, len(rivals), together):
        group = {n: builders[n] for n in rivals[first : first + together]}
        group[BASE] = contenders()[BASE]
        rows = _side_by_side(group, values, gradients, repetitions, warm_up)
        result = {**rows, **result}
    result = {name: result[name] for name in [BASE, *rivals]}
    passes = 3.5  # a copy reads and writes: seven passes equal three and a half copies
    return {
        "network": network,
        "tensors": len(shapes),
        "parameters": elements,
        "seven passes at copy bandwidth, milliseconds": round(
            1e3 * passes * _copy_seconds(elements, repetitions), 3
        ),
        "repetitions": repetitions,
        "results": result,
        **({"blocks": bench_blocks.measure_blocks(values, gradients, blocks)} if blocks else {}),
    }


def measure_all(
    networks: list[str], names: list[str] | None = None, repetitions: int = 25, blocks: int = 0
) -> Document:
    """Measure on several networks.

    Args:
        networks: Of :data:`NETWORKS`.
        names: Which of :func:`contenders`; None means all.
        repetitions: Steps to time.
        blocks: Blocks to finish, as in :func:`measure`.

    Returns:
        What `gadam bench --out` writes.
    """

    def version(package: str) -> str | None:
        try:
            return importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            return None

    packages = ("torch", "gadam", "schedulefree", "pytorch_optimizer")
    return {
        "machine": {
            "processor": _processor(),
            "threads": torch.get_num_threads(),
            "cores": available_cores(),
            "load average": load_average(),
            "system": platform.platform(),
            "python": platform.python_version(),
            "kernel": gadam.backends()["cpu"],
        },
        "versions": {name: version(name) for name in packages},
        "networks": [measure(network, names, repetitions, blocks=blocks) for network in networks],
    }


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def load_average() -> float | None:
    """Return the mean number of running programs over the last minute, or None if unknown."""
    try:
        return round(os.getloadavg()[0], 2)
    except (AttributeError, OSError):  # not on every system
        return None


BUSY = 0.5  # running programs per core
VARIABLE = 0.2  # difference of the quartiles, relative to the median


def warnings(report: Document) -> list[str]:
    """Return sentences about reasons not to trust the numbers.

    Args:
        report: What :func:`measure_all` returned.
    """
    found = []
    load, cores = report["machine"]["load average"], report["machine"]["cores"]
    if load is not None and load > BUSY * cores:
        found.append(
            f"The machine is busy: its load average was {load:.1f} on {count(cores, 'core')} "
            "before the measurement. Stop other programs and measure again."
        )
    for network in report["networks"]:
        base = network["results"][BASE]
        first, third = base["milliseconds, quartiles"]
        spread = (third - first) / base["milliseconds"] if base["milliseconds"] else 0.0
        if spread > VARIABLE:
            found.append(
                f"The quartiles of {BASE} on {network['network']} differ by {spread:.0%} of the "
                "median. Other programs may be running."
            )
    return found


def to_markdown(report: Document) -> str:
    """Return the report as Markdown, one table per network.

    Args:
        report: What :func:`measure_all` returned.
    """
    lines = []
    for network in report["networks"]:
        lines += [
            f"**{network['network']}**: {count(network['tensors'], 'tensor')}, "
            f"{network['parameters']:,} parameters; seven passes over memory at this machine's "
            f"copy bandwidth take {network['seven passes at copy bandwidth, milliseconds']:.1f} ms",
            "",
            "| optimizer | step, ms | quartiles | ratio | quartiles | state, bytes per parameter |",
            "|---|---:|---:|---:|---:|---:|",
        ]
        for name, row in network["results"].items():
            times, ratios = (
                f"{row[kind]:.2f} | {'–'.join(f'{q:.2f}' for q in row[f'{kind}, quartiles'])}"
                for kind in ("milliseconds", "ratio")
            )
            state = f"{row['state bytes per parameter']:.0f}"
            lines.append(f"| {name} | {times} | {ratios} | {state} |")
        lines.append("")
        if "blocks" in network:
            lines += [*bench_blocks.to_markdown(network["blocks"]), ""]
    return "\n".join(lines)


@dataclass(frozen=True)
class _Options:
    """Time one optimizer step on this machine, beside other optimizers."""

    networks: Annotated[tyro.conf.Positional[tuple[str, ...]], option("[NETWORK ...]")] = ()
    """Networks to take the parameter shapes from: resnet50, vgg16, preresnet110, awd-lstm or
    transformer. Default: all."""
    repetitions: Count = 25
    """Steps to time per optimizer, interleaved."""
    blocks: int = 3
    """Blocks of 100 steps to finish per network, to measure what that costs. 0 leaves this out."""
    threads: MaybeInt = None
    """CPU threads. Default: torch's."""
    out: Annotated[Path | None, option("FILE")] = None
    """Write all numbers to this JSON file."""
    json: Flag = False
    """Print one JSON object per line, one per network."""


def run(arguments: list[str]) -> int:
    """Run the command.

    Args:
        arguments: The command line after `gadam bench`.

    Returns:
        The exit code.
    """
    options = parse(_Options, "bench", arguments)
    for name in options.networks:
        if name not in NETWORKS:
            raise RecipeError(f"There is no network {name!r}. Use one of {', '.join(NETWORKS)}.")
    check_positive(repetitions=options.repetitions, threads=options.threads)
    if options.blocks < 0:
        raise RecipeError(f"--blocks must be non-negative, got {options.blocks}.")
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    for name in sorted({"schedulefree AdamW", "pytorch_optimizer PAdam"} - set(contenders())):
        message = f"Left out {name}: it is not installed. Run: pip install 'gadam[bench]'"
        print(message, file=sys.stderr)
    report = measure_all(
        list(options.networks) or list(NETWORKS),
        repetitions=options.repetitions,
        blocks=options.blocks,
    )
    if options.json:
        about = {name: report[name] for name in ("machine", "versions")}
        for network in report["networks"]:
            print(to_json({"event": "bench", **network, **about}), flush=True)
    else:
        machine, torch_version = report["machine"], report["versions"]["torch"]
        threads = count(machine["threads"], "thread")
        print(
            f"{machine['processor']}, {threads}, torch {torch_version}, "
            f"kernel: {machine['kernel']}\n"
        )
        print(to_markdown(report))
    for warning in warnings(report):
        print(f"warning: {warning}", file=sys.stderr)
    if options.out is not None:
        write_json(options.out, report)
        if not options.json:
            print(f"The numbers are in {options.out}.")
    return 0
