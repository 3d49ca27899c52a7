"""The paper's tables and figures at mini scale, on the paper's data where one can have it.

`python -m benchmarks.evidence.paper plan` estimates the cost of those without committed results,
and `run` trains them one after the other and packs each into `results/NAME.json`. Stop `run` at any
time; rerun it to resume. Many rows of the paper stand in several tables: each is trained once.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from gadam.commands.recipes import apply
from gadam.commands.sweeps import select_rows
from gadam.runs.archive import write_archive
from gadam.runs.recipe import Recipe
from gadam.train import tasks
from gadam.train.experiments import get

__all__ = ["EXPERIMENTS", "Reproduction", "core_minutes", "trained"]

RESULTS = Path(__file__).parents[2] / "results"

_SMALL = ("data.examples=5000", "data.validation=2000", "data.size=16", "data.label_noise=0")
CIFAR10 = ("data.name=cifar10", *_SMALL)
CIFAR100 = ("data.name=cifar100", *_SMALL)
IMAGENET32 = ("data.name=imagenet32", *_SMALL)
MNIST = ("data.name=mnist", "data.examples=10000", "data.validation=2000", "data.size=28")


@dataclass(frozen=True)
class Reproduction:
    """How some rows of an experiment are reproduced.

    Args:
        settings: Changes to their recipes. None keeps the bundled data, a part of Fashion-MNIST
            with noisy labels.
        rows: The rows with these words in their label; all if empty.
        is_trained: Whether to train them. If not, they are rows of another experiment too.
    """

    settings: tuple[str, ...] = ()
    rows: str = ""
    is_trained: bool = True

    def command(self, name: str) -> list[str]:
        """Return the command line.

        Args:
            name: The experiment.
        """
        rows = ["--rows", self.rows] if self.rows else []
        sets = [argument for setting in self.settings for argument in ("--set", setting)]
        return ["gadam", "reproduce", name, *rows, *sets]

    def recipes(self, name: str) -> dict[str, Recipe]:
        """Return the recipes by row.

        Args:
            name: The experiment.

        Raises:
            ValueError: A setting is wrong.
        """
        experiment = select_rows(get(name, "mini"), self.rows)
        made, problems = apply(dict(experiment.recipes), self.settings)
        if problems:
            raise ValueError("\n".join(problems))
        return made


def _shared(settings: tuple[str, ...], rows: str = "") -> Reproduction:
    return Reproduction(settings, rows, is_trained=False)


# 3,000 images with their true labels, without augmentation, are fewer than the networks have
# parameters, as in the paper. At most the first part of an experiment is trained.
EXPERIMENTS: dict[str, tuple[Reproduction, ...]] = {
    "mnist-logistic": (Reproduction(MNIST),),
    "tab-auto": (Reproduction(CIFAR100),),
    "fig2a": (Reproduction(CIFAR100),),
    "tab-cifar": (Reproduction(CIFAR100, "C-100"), _shared(CIFAR10, "C-10")),
    "tab-c10": (Reproduction(CIFAR10),),
    "fig1a": (Reproduction(CIFAR100),),
    "fig-lookahead": (Reproduction(CIFAR100, "LH"), _shared(CIFAR100)),
    "tab-linear-step": (Reproduction(CIFAR100, "step"), _shared(CIFAR100, "linear")),
    "tab-resnext": (Reproduction(CIFAR100),),
    "tab-imagenet32": (Reproduction(IMAGENET32),),
    "fig3a": (_shared(CIFAR100),),
    "fig3b": (_shared(CIFAR100),),
    "fig-c10": (_shared(CIFAR10),),
}


def trained(name: str) -> Reproduction | None:
    """Return what an experiment trains itself, or None if other experiments train all of it.

    Args:
        name: One of :data:`EXPERIMENTS`.
    """
    first = EXPERIMENTS[name][0]
    return first if first.is_trained else None


def core_minutes(name: str, seeds: int) -> float:
    """Estimate the cost of an experiment from one epoch of each kind of run.

    Args:
        name: One of :data:`EXPERIMENTS`.
        seeds: Runs per recipe.
    """
    known: dict[tuple[object, ...], tuple[float, float]] = {}
    total = 0.0
    plan = trained(name)
    for recipe in plan.recipes(name).values() if plan else ():
        kind = recipe.model, recipe.data, recipe.batch_size
        if kind not in known:
            known[kind] = _one_epoch(recipe)
        training, evaluation = known[kind]
        points = 1 if recipe.average is None else 2
        evaluations = recipe.epochs / max(1, recipe.evaluate_every) * points
        total += seeds * (recipe.epochs * training + evaluations * evaluation)
    return total / 60


def _one_epoch(recipe: Recipe) -> tuple[float, float]:
    """Return CPU seconds of an epoch of training, and of an evaluation of one point."""
    torch.set_num_threads(1)
    task = tasks.build(recipe, 0, torch.device("cpu"), None)
    optimizer = torch.optim.SGD(task.model.parameters(), lr=1e-3)
    start = time.process_time()
    for batch in task.batches(0):
        optimizer.zero_grad()
        loss, _ = task.loss(task.model, batch)
        loss.backward()
        optimizer.step()
    trained = time.process_time()
    for split in recipe.evaluate_on:
        task.evaluate(task.model, split)
    return trained - start, time.process_time() - trained


def plan(results: Path, workers: int) -> None:
    """Print the command and the core-minutes of everything that remains."""
    total = 0.0
    for name, one in _remaining(results):
        minutes = core_minutes(name, get(name, "mini").seeds)
        total += minutes
        print(f"{minutes:6.1f}  {' '.join(one.command(name))}", flush=True)
    print(f"About {total:.0f} core-minutes.")


def run(results: Path, workers: int) -> None:
    """Train and pack everything that remains."""
    os.nice(19)
    for name, one in _remaining(results):
        command = [sys.executable, "-m", *one.command(name), "--workers", str(workers), "--quiet"]
        print(" ".join(one.command(name)), flush=True)
        subprocess.run(command, check=True)
        write_archive(Path("runs", name), results / f"{name}.json")


def _remaining(results: Path) -> Iterator[tuple[str, Reproduction]]:
    for name in EXPERIMENTS:
        one = trained(name)
        if one is not None and not (results / f"{name}.json").exists():
            yield name, one


def main() -> None:
    """Parse the command line and run a command."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.evidence.paper")
    commands = {"plan": plan, "run": run}
    parser.add_argument("command", choices=commands)
    parser.add_argument("--workers", type=int, default=2, help="runs at a time")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the results")
    options = parser.parse_args()
    commands[options.command](options.results, options.workers)


if __name__ == "__main__":
    main()
