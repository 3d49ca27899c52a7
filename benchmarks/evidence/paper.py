"""The paper's tables and figures at mini scale that have no committed results yet.

`python -m benchmarks.evidence.paper plan` estimates their cost, and `run` trains them one after the
other, the cheapest first, and packs each into `results/NAME.json`. Stop `run` at any time; rerun it
to resume.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch

from gadam.commands.recipes import apply
from gadam.runs.archive import write_archive
from gadam.runs.recipe import Recipe
from gadam.train import tasks
from gadam.train.experiments import get

__all__ = ["EXPERIMENTS", "Reproduction", "core_minutes", "recipes_of"]

RESULTS = Path(__file__).parents[2] / "results"

_SMALL = ("data.examples=5000", "data.validation=2000", "data.size=16", "data.label_noise=0")
CIFAR100 = ("data.name=cifar100", *_SMALL)
IMAGENET32 = ("data.name=imagenet32", *_SMALL)
MNIST = ("data.name=mnist", "data.examples=10000", "data.validation=2000", "data.size=28")


@dataclass(frozen=True)
class Reproduction:
    """How an experiment is run.

    Args:
        settings: Changes to all of its recipes. None keeps the bundled data, a part of
            Fashion-MNIST with noisy labels.
        rows: Train only the rows with these words in their label.
    """

    settings: tuple[str, ...] = ()
    rows: str = ""

    def command(self, name: str) -> list[str]:
        """Return the command line.

        Args:
            name: The experiment.
        """
        rows = ["--rows", self.rows] if self.rows else []
        sets = [argument for setting in self.settings for argument in ("--set", setting)]
        return ["gadam", "reproduce", name, *rows, *sets]


# On the paper's data where one can have it without an account. 3,000 images with their true labels,
# without augmentation, are fewer than the networks have parameters, as in the paper.
EXPERIMENTS = {
    "mnist-logistic": Reproduction(MNIST),
    "tab-auto": Reproduction(CIFAR100),
    "fig2a": Reproduction(CIFAR100),
    "fig3a": Reproduction(CIFAR100),
    "tab-resnext": Reproduction(CIFAR100),
    "tab-linear-step": Reproduction(CIFAR100),
    "fig-lookahead": Reproduction(CIFAR100),
    "fig1a": Reproduction(CIFAR100),
    "tab-c10": Reproduction(),
    "tab-cifar": Reproduction(CIFAR100, rows="C-100"),
    "tab-imagenet32": Reproduction(IMAGENET32),
}


def recipes_of(name: str) -> list[Recipe]:
    """Return the recipes that an experiment trains.

    Args:
        name: One of :data:`EXPERIMENTS`.

    Raises:
        ValueError: A setting is wrong.
    """
    plan = EXPERIMENTS[name]
    rows = {
        label: recipe
        for label, recipe in get(name, "mini").recipes.items()
        if plan.rows.lower() in label.lower()
    }
    made, problems = apply(rows, plan.settings)
    if problems:
        raise ValueError("\n".join(problems))
    return list(made.values())


def core_minutes(name: str, seeds: int) -> float:
    """Estimate the cost of an experiment from one epoch of each kind of run.

    Args:
        name: One of :data:`EXPERIMENTS`.
        seeds: Runs per recipe.
    """
    known: dict[tuple[object, ...], tuple[float, float]] = {}
    total = 0.0
    for recipe in recipes_of(name):
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
    for name, one in EXPERIMENTS.items():
        if (results / f"{name}.json").exists():
            continue
        minutes = core_minutes(name, get(name, "mini").seeds)
        total += minutes
        print(f"{minutes:6.1f}  {' '.join(one.command(name))}", flush=True)
    print(f"About {total:.0f} core-minutes.")


def run(results: Path, workers: int) -> None:
    """Train and pack everything that remains."""
    os.nice(19)
    for name, one in EXPERIMENTS.items():
        target = results / f"{name}.json"
        if target.exists():
            continue
        command = [sys.executable, "-m", *one.command(name), "--workers", str(workers), "--quiet"]
        print(" ".join(one.command(name)), flush=True)
        subprocess.run(command, check=True)
        write_archive(Path("runs", name), target)


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
