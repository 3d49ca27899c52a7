"""Measure the overhead of the training loop.

Run `python benchmarks/loop.py [--out FILE]`. It times an epoch of `vgg-mini` on one thread:
loading, augmenting, and batching alone; the steps alone (model, loss, backward pass, optimizer) on
prepared batches; and the complete loop. Runs are interleaved, and medians are reported.
"""

from __future__ import annotations

import argparse
import platform
import tempfile
import time
from pathlib import Path
from statistics import median

import torch

from gadam.runs.files import Document, write_json
from gadam.runs.lines import read_epochs
from gadam.runs.recipe import Average, Data, Optimizer, Recipe
from gadam.train import loop, optimizers, tasks

SETTINGS = {
    "fashion-mini, 14x14": Data("fashion-mini", validation=1500, size=14, augment=True, pad=2),
    "fashion-mini, 28x28": Data("fashion-mini", validation=3500, augment=True),
}


def measure(data: Data, repetitions: int) -> dict[str, float]:
    """Return the seconds per epoch of data, steps, and loop."""
    recipe = Recipe(
        "r",
        model="vgg-mini",
        data=data,
        optimizer=Optimizer("adamw", 1e-3, 0.1),
        average=Average(0, every=1),
        epochs=3,
        evaluate_every=3,
        refresh_batchnorm=False,
    )
    task = tasks.build(recipe, 0, torch.device("cpu"), None)
    optimizer, _ = optimizers.build(recipe, task.model, 0)
    ready = list(task.batches(0))
    seconds: dict[str, list[float]] = {"data": [], "steps": [], "loop": []}
    for repetition in range(repetitions):
        start = time.perf_counter()
        for _ in task.batches(repetition):
            pass
        seconds["data"].append(time.perf_counter() - start)
        task.model.train()
        start = time.perf_counter()
        for batch in ready:
            optimizer.zero_grad()
            task.loss(task.model, batch)[0].backward()
            optimizer.step()
        seconds["steps"].append(time.perf_counter() - start)
        with tempfile.TemporaryDirectory() as folder:
            loop.train(recipe, folder)
            last = read_epochs(Path(folder) / "epochs.jsonl")[-1]  # warmed up, like the others
            seconds["loop"].append(last.seconds["train"])
    return {name: median(values) for name, values in seconds.items()}


def main() -> None:
    """Run the benchmark, print the results, and write them as JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--repetitions", type=int, default=9)
    parser.add_argument("--out", type=Path, help="write the results to this file")
    options = parser.parse_args()
    torch.set_num_threads(1)
    epochs: Document = {}
    for name, data in SETTINGS.items():
        seconds = measure(data, options.repetitions)
        overhead = {
            "data": seconds["data"] / seconds["steps"],
            "loop": (seconds["loop"] - seconds["data"] - seconds["steps"]) / seconds["steps"],
        }
        epochs[name] = {"seconds": seconds, "overhead relative to steps": overhead}
        print(
            f"{name}: steps {seconds['steps']:.2f} s, data {100 * overhead['data']:.1f}%, "
            f"loop {100 * overhead['loop']:.1f}%"
        )
    if options.out:
        report = {
            "machine": {"processor": platform.machine(), "torch": torch.__version__},
            "repetitions": options.repetitions,
            "epochs": epochs,
        }
        write_json(options.out, report)


if __name__ == "__main__":
    main()
