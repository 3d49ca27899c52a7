"""What the training loop costs beside the training: `python benchmarks/loop.py [--json FILE]`.

On one thread, an epoch of `vgg-mini`: reading, augmenting and batching alone; the steps alone (model, loss,
backward, optimiser) on batches that are ready; and the loop that does it all. Interleaved, medians.
"""

from __future__ import annotations

import argparse
import json
import platform
import tempfile
import time
from pathlib import Path
from statistics import median

import torch

from gadam.train import loop, optimizers, task
from gadam.train.recipe import Average, Data, Optimizer, Recipe
from gadam.train.record import read_lines

SETTINGS = {
    "fashion-mini, 14x14": Data("fashion-mini", validation=1500, size=14, augment=True, pad=2),
    "fashion-mini, 28x28": Data("fashion-mini", validation=3500, augment=True),
}


def measure(data: Data, repetitions: int) -> dict[str, float]:
    """Seconds of an epoch's parts."""
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
    problem = task.build(recipe, 0, torch.device("cpu"), None)
    optimizer, _ = optimizers.build(recipe, problem.model, 0)
    ready = list(problem.batches(0))
    seconds: dict[str, list[float]] = {"data": [], "steps": [], "loop": []}
    for repetition in range(repetitions):
        start = time.perf_counter()
        for _ in problem.batches(repetition):
            pass
        seconds["data"].append(time.perf_counter() - start)
        problem.model.train()
        start = time.perf_counter()
        for batch in ready:
            optimizer.zero_grad()
            problem.loss(problem.model, batch)[0].backward()
            optimizer.step()
        seconds["steps"].append(time.perf_counter() - start)
        with tempfile.TemporaryDirectory() as folder:
            loop.train(recipe, folder)
            lines = read_lines(Path(folder) / "epochs.jsonl")
            seconds["loop"].append(lines[-1]["seconds"]["train"])  # warmed up, as the others are
    return {name: median(values) for name, values in seconds.items()}


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repetitions", type=int, default=9)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    report = {
        "machine": {"processor": platform.machine(), "torch": torch.__version__},
        "repetitions": arguments.repetitions,
        "epochs": {},
    }
    for name, data in SETTINGS.items():
        seconds = measure(data, arguments.repetitions)
        shares = {
            "data": seconds["data"] / seconds["steps"],
            "loop": (seconds["loop"] - seconds["data"] - seconds["steps"]) / seconds["steps"],
        }
        report["epochs"][name] = {"seconds": seconds, "shares of the steps": shares}
        print(
            f"{name}: steps {seconds['steps']:.2f} s, data {100 * shares['data']:.1f} %, "
            f"the loop itself {100 * shares['loop']:.1f} %"
        )
    if arguments.json:
        arguments.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
