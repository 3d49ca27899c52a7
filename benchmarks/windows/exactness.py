"""Errors and memory of block averages: `python -m benchmarks.windows.exactness`.

Errors: random windows of float32 runs, with merged blocks among them, against the mean of the same
iterates in float64. Memory: the peak of a process with block averages, minus that of one without,
in copies of the weights (Linux), with and without mapped files. Results go to
results/block-exactness.json.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import subprocess
import sys
import tempfile
from itertools import pairwise
from pathlib import Path

import torch
from torch import Tensor, nn

import gadam
from gadam.runs.files import Document, write_json

RESULT = Path(__file__).parents[2] / "results" / "block-exactness.json"
STEPS, WINDOWS, SEEDS = 3000, 50, (0, 1, 2, 3, 4)
CASES = {
    "Gadam, blocks of 10 steps": ("gadam", 10, 16),
    "Gadam, blocks of 100 steps": ("gadam", 100, 8),
    "Gadam, blocks of 1,000 steps": ("gadam", 1000, 64),
    "SGD, blocks of 100 steps": ("sgd", 100, 8),
    "AdamW, blocks of 100 steps": ("adamw", 100, 8),
    "steady drift, blocks of 100 steps": ("drift", 100, 8),
    "steady drift, blocks of 1,000 steps": ("drift", 1000, 64),
}


def exactness(name: str, every: int, max_blocks: int, seed: int, steps: int = STEPS) -> Document:
    """Return the largest errors of random windows, relative to norms of the mean.

    Args:
        name: The optimizer, or "drift" for SGD with constant gradients, the worst case: roundings
            of an entry go in one direction.
        every: Steps per block.
        max_blocks: The number of blocks to keep.
        seed: Of the weights, the data, and the windows.
        steps: The number of steps.

    Returns:
        The errors relative to the norm of all weights, and of each tensor's own norm, which may be
        close to zero.
    """
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(20, 40), nn.Tanh(), nn.Linear(40, 40), nn.Linear(40, 1))
    sgd = torch.optim.SGD
    makes = {"gadam": gadam.Gadam, "sgd": sgd, "adamw": torch.optim.AdamW, "drift": sgd}
    optimizer = makes[name](model.parameters(), lr=1e-2)
    drift = [torch.rand_like(p) for p in model.parameters()]
    total = [torch.zeros_like(p, dtype=torch.float64) for p in model.parameters()]
    sums: dict[int, list[Tensor]] = {0: [t.clone() for t in total]}  # of the iterates up to a step
    with tempfile.TemporaryDirectory() as place:
        blocks = gadam.BlockAverages(optimizer, f"{place}/b", every=every, max_blocks=max_blocks)
        for step in range(1, steps + 1):
            optimizer.zero_grad()
            if name == "drift":
                for p, gradient in zip(model.parameters(), drift):
                    p.grad = gradient.clone()
            else:
                data = torch.randn(8, 20)
                (model(data).squeeze(1) - data.sum(1)).square().mean().backward()
            optimizer.step()
            for t, p in zip(total, model.parameters()):
                t += p.detach()
            if step % every == 0:
                sums[step] = [t.clone() for t in total]
        boundaries = blocks.boundaries
        generator = random.Random(seed)
        errors: list[float] = []
        per_tensor: list[float] = []
        for _ in range(WINDOWS):
            start, stop = sorted(generator.sample(boundaries, 2))
            found = blocks.model_state_dict(model, start, stop)
            means = [(end - begin) / (stop - start) for begin, end in zip(sums[start], sums[stop])]
            away = [value.double() - mean for value, mean in zip(found.values(), means)]
            errors.append(_norm(away) / _norm(means))
            per_tensor += [_norm([one]) / _norm([mean]) for one, mean in zip(away, means)]
        blocks.remove()
    return {
        "windows": WINDOWS,
        "blocks": len(boundaries) - 1,
        "merged": sum(stop - start > every for start, stop in pairwise(boundaries)),
        "largest": max(errors),
        "largest of a tensor": max(per_tensor),
    }


def _norm(tensors: list[Tensor]) -> float:
    return float(torch.cat([tensor.flatten() for tensor in tensors]).norm())


def worst(case: tuple[str, int, int]) -> Document:
    """Return the largest errors over all seeds.

    Args:
        case: The optimizer, the steps per block, and the number of blocks to keep.
    """
    found = [exactness(*case, seed=seed) for seed in SEEDS]
    largest = {key: max(each[key] for each in found) for key in found[0] if "largest" in key}
    return {**found[0], **largest}


_CODE = """
import re, sys, tempfile, threading, time
from pathlib import Path
import torch, gadam
torch.set_num_threads(1)
own = 0  # memory that is no mapped file has no record of its peak

def kib(name):
    return int(re.search(name + r":\\s+(\\d+)", Path("/proc/self/status").read_text())[1])

def watch():
    global own
    while True:
        own = max(own, kib("RssAnon"))
        time.sleep(0.0005)

threading.Thread(target=watch, daemon=True).start()
mode, mib, tensor = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
model = torch.nn.ParameterList([torch.ones(tensor, 2**18) for _ in range(mib // tensor)])
for p in model:
    p.grad = torch.ones_like(p)
optimizer = gadam.Gadam(model.parameters(), lr=1e-3)
with tempfile.TemporaryDirectory() as place:
    blocks = None
    if mode != "without":
        kept = 2 if mode == "merging" else 64
        blocks = gadam.BlockAverages(optimizer, place + "/b", every=3, max_blocks=kept)
    for _ in range(15):
        optimizer.step()
    if blocks is not None:
        blocks.finish()
    if mode == "applied":
        with blocks.applied(model, 6):
            pass
    print(kib("VmHWM"), own)
"""


def memory(mib: int = 128, tensor: int = 8) -> Document:
    """Return the memory that block averages take, in copies of the weights.

    Args:
        mib: The size of the weights, in MiB.
        tensor: The size of each tensor, in MiB.
    """
    peaks = {}
    for mode in ("without", "blocks", "merging", "applied"):
        done = subprocess.run(
            [sys.executable, "-c", _CODE, mode, str(mib), str(tensor)],
            check=True,
            capture_output=True,
            text=True,
        )
        peaks[mode] = [int(number) / 1024 for number in done.stdout.split()]
    copies = {
        mode: [round((peak - base) / mib, 2) for peak, base in zip(peaks[mode], peaks["without"])]
        for mode in peaks
        if mode != "without"
    }
    return {
        "weights_mib": mib,
        "tensor_mib": tensor,
        "copies": {mode: both[1] for mode, both in copies.items()},
        "copies with mapped files": {mode: both[0] for mode, both in copies.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--out", type=Path, default=RESULT)
    options = parser.parse_args()
    torch.set_num_threads(1)
    vars(os)["fsync"] = lambda descriptor: None  # do not wait for the disk
    report = {
        "command": "python -m benchmarks.windows.exactness",
        "seeds": SEEDS,
        "steps": STEPS,
        "versions": {"gadam": gadam.__version__, "torch": torch.__version__},
        "machine": {"system": platform.platform(), "python": platform.python_version()},
        "errors": {label: worst(case) for label, case in CASES.items()},
        "memory": memory(),
    }
    write_json(options.out, report)
    print(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
