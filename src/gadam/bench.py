"""How long a step takes, side by side with other optimisers, in one run.

On the parameter shapes of real networks, repetitions interleaved, medians: a noisy machine is noisy
for all of them. Ratios are to torch's fused AdamW; the machine's own copy bandwidth stands beside.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import json
import platform
import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

import gadam

__all__ = ["NETWORKS", "contenders", "run", "table"]

Shape = tuple[int, ...]
Step = Callable[[], object]


# ------------------------------------------------------------------------------------- networks


def resnet50() -> Iterator[Shape]:
    """ResNet-50 on ImageNet: 161 tensors, 25,557,032 parameters."""

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
    """VGG-16 with BatchNorm on CIFAR-100: 15,299,748 parameters."""
    inputs = 3
    for outputs in (64, 64, 128, 128, 256, 256, 256, 512, 512, 512, 512, 512, 512):
        yield from ((outputs, inputs, 3, 3), (outputs,), (outputs,), (outputs,))
        inputs = outputs
    yield from ((512, 512), (512,), (512, 512), (512,), (100, 512), (100,))


def preresnet110() -> Iterator[Shape]:
    """PreResNet-110 on CIFAR-100: 332 tensors, most of them small, 1,169,972 parameters."""
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
    """AWD-LSTM on Penn Treebank, tied: 24,221,600 parameters."""
    yield (10_000, 400)
    for inputs, hidden in ((400, 1150), (1150, 1150), (1150, 400)):
        yield from ((4 * hidden, inputs), (4 * hidden, hidden), (4 * hidden,), (4 * hidden,))
    yield (10_000,)


def transformer() -> Iterator[Shape]:
    """A transformer of twelve layers of width 768 with 32,000 tokens: 110 M parameters."""
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

BASE = "torch AdamW fused"
Builder = Callable[[list[nn.Parameter]], tuple[Step, Any]]  # the step, and who holds its state


def contenders() -> dict[str, Builder]:
    """What can be measured here, by name. Peers that are not installed are left out."""
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

    always = gadam.Averaging(start=1)
    found: dict[str, Builder] = {
        BASE: plain(torch.optim.AdamW, lr=1e-3, fused=True, **decay),
        "torch AdamW foreach": plain(torch.optim.AdamW, lr=1e-3, foreach=True, **decay),
        "torch AdamW loop": plain(torch.optim.AdamW, lr=1e-3, foreach=False, **decay),
        "torch AdamW fused + AveragedModel": with_averaged_model,
        "Gadam": plain(gadam.Gadam, lr=1e-3, **decay),
        "Gadam, a sample every step": plain(gadam.Gadam, lr=1e-3, average=always, **decay),
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
    return sum(t.numel() * t.element_size() for t in tensors) / sum(p.numel() for p in params)


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
) -> dict[str, dict[str, float]]:
    steps: dict[str, Step] = {}
    rows: dict[str, dict[str, float]] = {}
    for name, build in builders.items():
        params = [nn.Parameter(value.clone()) for value in values]
        for p, gradient in zip(params, gradients):
            p.grad = gradient  # nobody writes to gradients: all may share them
        step, holder = build(params)
        for _ in range(warm_up):
            step()
        steps[name] = step
        rows[name] = {"state bytes per parameter": round(_state_bytes(holder, step, params), 2)}
    times: dict[str, list[float]] = {name: [] for name in steps}
    # In another order each time: who comes after a wasteful one finds the caches swept.
    order, shuffle = list(steps), random.Random(0).shuffle
    for _ in range(repetitions):
        shuffle(order)
        for name in order:
            step = steps[name]
            start = time.perf_counter()
            step()
            times[name].append(time.perf_counter() - start)
    for name, seconds in times.items():
        rows[name]["milliseconds"] = round(1e3 * median(seconds), 3)
        rows[name]["ratio"] = round(median(seconds) / median(times[BASE]), 3)
    return rows


def measure(
    network: str, names: list[str] | None = None, repetitions: int = 25, warm_up: int = 12
) -> dict[str, Any]:
    """Median seconds of a step on this network's shapes, for each contender."""
    shapes = list(NETWORKS[network]())
    generator = torch.Generator().manual_seed(0)

    def draw() -> list[Tensor]:
        return [torch.randn(shape, generator=generator) for shape in shapes]

    values, gradients = draw(), draw()
    elements = sum(value.numel() for value in values)
    builders = {n: b for n, b in contenders().items() if names is None or n in names}
    rivals = [name for name in builders if name != BASE]
    # As many side by side as fit into some 8 GB, each time with the one they are compared to.
    together = max(1, int(8e9 / (20 * elements)) - 1)
    result: dict[str, Any] = {}
    for first in range(0, len(rivals), together):
        group = {n: builders[n] for n in rivals[first : first + together]}
        group[BASE] = contenders()[BASE]
        rows = _side_by_side(group, values, gradients, repetitions, warm_up)
        result = {**rows, **result}
    result = {name: result[name] for name in [BASE, *rivals]}
    passes = 3.5  # a copy reads and writes: seven passes are three and a half copies
    return {
        "network": network,
        "tensors": len(shapes),
        "parameters": elements,
        "seven passes at copy bandwidth, milliseconds": round(
            1e3 * passes * _copy_seconds(elements, repetitions), 3
        ),
        "repetitions": repetitions,
        "results": result,
    }


def run(
    networks: list[str], names: list[str] | None = None, repetitions: int = 25
) -> dict[str, Any]:
    """Measure on these networks; gives what `gadam bench --json` writes."""

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
            "system": platform.platform(),
            "python": platform.python_version(),
            "kernel": gadam.backends()["cpu"],
        },
        "versions": {name: version(name) for name in packages},
        "networks": [measure(network, names, repetitions) for network in networks],
    }


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def table(report: dict[str, Any]) -> str:
    """The report as Markdown, one table a network."""
    lines = []
    for network in report["networks"]:
        lines += [
            f"**{network['network']}**: {network['tensors']} tensors, "
            f"{network['parameters']:,} parameters; seven passes over memory at this machine's copy "
            f"bandwidth take {network['seven passes at copy bandwidth, milliseconds']:.1f} ms",
            "",
            "| optimiser | step, ms | ratio | state, bytes a parameter |",
            "|---|---:|---:|---:|",
        ]
        for name, row in network["results"].items():
            lines.append(
                f"| {name} | {row['milliseconds']:.2f} | {row['ratio']:.2f} | "
                f"{row['state bytes per parameter']:.0f} |"
            )
        lines.append("")
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
    """Run `gadam bench` on the command line."""
    import argparse

    parser = argparse.ArgumentParser(
        prog="gadam bench", description=(__doc__ or "").split("\n\n")[0]
    )
    parser.add_argument(
        "networks", nargs="*", metavar="NETWORK", help=f"of {', '.join(NETWORKS)} (default: all)"
    )
    parser.add_argument("--repetitions", type=int, default=25, help="of each, interleaved")
    parser.add_argument("--threads", type=int, default=None, help="default: as torch has it")
    parser.add_argument("--json", type=Path, help="write the numbers here")
    options = parser.parse_args(arguments)
    unknown = [name for name in options.networks if name not in NETWORKS]
    if unknown:
        parser.error(f"no network {unknown[0]!r}: there are {', '.join(NETWORKS)}")
    if options.repetitions < 1:
        parser.error("--repetitions must be at least 1")
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    missing = {"schedulefree AdamW", "pytorch_optimizer PAdam"} - set(contenders())
    for name in sorted(missing):
        print(f"left out: {name} is not installed (pip install 'gadam[bench]')")
    report = run(options.networks or list(NETWORKS), repetitions=options.repetitions)
    print(f"{report['machine']['processor']}, {report['machine']['threads']} threads, ", end="")
    print(f"torch {report['versions']['torch']}, kernel: {report['machine']['kernel']}\n")
    print(table(report))
    if options.json:
        options.json.write_text(json.dumps(report, indent=1) + "\n")
        print(f"written to {options.json}")
    return 0
