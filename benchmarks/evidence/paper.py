"""The paper's tables and figures with small networks, on a part of the paper's data.

`gadam reproduce` has them on the data that comes with the package, with noisy labels. Here they are
on images of the paper's data sets, with true labels, at settings that suit them.

`python -m benchmarks.evidence.paper run` trains the experiments without committed results, one
after the other, and packs each into `results/NAME.json`. Stop it at any time; rerun it to resume.
Many rows of the paper stand in several tables: each is trained once. `plan` lists what remains, and
`tune` measures the grids behind the settings.
"""

from __future__ import annotations

import argparse
import os
import sys
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Literal

import torch

from gadam.commands import console
from gadam.commands.options import SweepOptions
from gadam.commands.sweeps import select_rows, train_experiment
from gadam.runs.archive import write_archive
from gadam.runs.experiment import Experiment
from gadam.runs.files import to_json, write_atomically
from gadam.runs.recipe import Average, Data, Optimizer, Recipe
from gadam.train import experiments
from gadam.train.catalog import LINEAR, LINEAR_IA
from gadam.train.launchers.local import LocalLauncher
from gadam.train.sweep import TrainingJob, sweep

__all__ = ["DATA", "EXPERIMENTS", "SETTINGS", "experiment_of", "remaining"]

RESULTS = Path(__file__).parents[2] / "results"
# 2,000 training images without augmentation, in batches of 64: as in the evidence (cifar100-2k), so
# that the networks have more parameters than examples and overfit, as in the paper.
DATA = {
    name: Data(name, validation=2000, examples=4000, size=16, augment=False)
    for name in ("cifar10", "cifar100", "imagenet32")
}
BATCH_SIZE = 64
EVALUATIONS = 4  # along a run
# The rows that each experiment trains, by words in their labels: "" is all, and None is none, if
# other experiments have all of its rows.
EXPERIMENTS: dict[str, str | None] = {
    "tab-cifar": "",
    "tab-auto": "",
    "fig2a": "",
    "fig-lookahead": "LH",
    "tab-linear-step": "step",
    "tab-resnext": "",
    "fig1a": "",
    "tab-imagenet32": "",
    "tab-c10": None,
    "fig3a": None,
    "fig3b": None,
    "fig-c10": None,
}

# ---------------------------------------------------------------------------------------- settings

# Learning rate and weight decay in the paper (VGG-16 with BatchNorm), and those that are best for
# vgg-mini on CIFAR-100: of sgd by `tune`, of adamw and padamw in the evidence (the average of half
# of the run and a decayed rate, task cifar100-2k). Those of adam and padam are guesses.
SETTINGS: dict[str, tuple[tuple[float, float], tuple[float, float]]] = {
    "sgd": ((0.1, 5e-4), (0.3, 3e-4)),
    "adam": ((1e-3, 1e-4), (1e-2, 1e-3)),
    "adamw": ((5e-4, 0.25), (3e-3, 0.3)),
    "padamw": ((0.1, 2.5e-3), (0.3, 3e-3)),
    "padam": ((0.1, 5e-4), (0.3, 1e-3)),
}
GRIDS: dict[Literal["sgd"], tuple[tuple[float, ...], tuple[float, ...]]] = {
    "sgd": ((0.03, 0.1, 0.3, 1.0), (1e-4, 3e-4, 1e-3, 3e-3, 1e-2)),
}
TUNING_SEED = 10
TUNED = RESULTS / "evidence" / "paper-settings.json"


def _adapted(recipe: Recipe) -> Optimizer:
    """Return a setting of the paper as it suits the small networks and data.

    Ratios between networks and rows are the paper's. On ImageNet-32, the paper has 400 times as
    many images and hardly any decay: there, the settings are those of CIFAR-100. A network without
    BatchNorm does not train at higher rates, and keeps the paper's.
    """
    optimizer = recipe.optimizer
    (paper_lr, paper_decay), (lr, decay) = SETTINGS[optimizer.name]
    if recipe.data.name == "imagenet32":
        return replace(optimizer, lr=lr, weight_decay=decay)
    if recipe.model == "vgg16":
        lr = paper_lr
    return replace(
        optimizer,
        lr=optimizer.lr * lr / paper_lr,
        weight_decay=optimizer.weight_decay * decay / paper_decay,
    )


def experiment_of(name: str) -> Experiment:
    """Return an experiment with all of its rows.

    Args:
        name: One of :data:`EXPERIMENTS`.
    """
    small, large = experiments.get(name), experiments.get(name, "paper")
    recipes = {}
    for row, recipe in small.recipes.items():
        of_paper = large.recipes[row]
        by_trigger = recipe.average is not None and isinstance(recipe.average.start, str)
        recipes[row] = replace(
            recipe,
            data=DATA[of_paper.data.name],
            batch_size=BATCH_SIZE,
            optimizer=_adapted(of_paper),
            evaluate_every=1 if by_trigger else recipe.epochs // EVALUATIONS,
            keep_iterates=0,
        )
    command = f"python -m benchmarks.evidence.paper run {name}"
    return replace(
        small, recipes=recipes, published={}, analysis=(), command=command, note="", floors={}
    )


# ---------------------------------------------------------------------------------------- commands


def remaining(results: Path, names: list[str]) -> list[Experiment]:
    """Return the experiments to train, each with only the rows that it trains itself.

    Args:
        results: The folder of the results.
        names: The experiments to choose from.
    """
    return [
        select_rows(experiment_of(name), words)
        for name in names
        if (words := EXPERIMENTS[name]) is not None and not (results / f"{name}.json").exists()
    ]


def plan(results: Path, workers: int, names: list[str]) -> None:
    """Print how many runs remain."""
    for one in remaining(results, names):
        print(f"{one.command}: {len(one.recipes) * one.seeds} runs")


def run(results: Path, workers: int, names: list[str]) -> None:
    """Train and pack everything that remains."""
    options = SweepOptions(workers=workers, quiet=True)
    for one in remaining(results, names):
        print(one.command, flush=True)
        folder = Path("runs", one.name)
        if train_experiment(one, folder, options):
            sys.exit(f"Runs of {one.name} failed. Fix the cause and run again.")
        write_archive(folder, results / f"{one.name}.json")


def tune(results: Path, workers: int, names: list[str]) -> None:
    """Measure plain and averaged runs over the grids, on validation data."""
    jobs = {
        (base, lr, decay, averaged): TrainingJob(
            f"{base} {'averaged' if averaged else 'plain'}",
            _tuned(Optimizer(base, lr, decay), averaged),
            TUNING_SEED,
            Path("runs", "paper-settings", f"{base}-{lr:g}-{decay:g}-{averaged:d}"),
        )
        for base, (rates, decays) in GRIDS.items()
        for lr in rates
        for decay in decays
        for averaged in (False, True)
    }
    listener = console.listener(len(jobs), quiet=False, as_json=False)
    with listener:
        done = sweep(list(jobs.values()), listener, launcher=LocalLauncher(workers))
    rows = []
    for (base, lr, decay, averaged), job in jobs.items():
        result = done[job]
        point = None if result is None else result.average if averaged else result.iterate
        rows.append(
            {
                "optimizer": base,
                "averaged": averaged,
                "lr": lr,
                "weight_decay": decay,
                "validation": None if point is None else point["validation"]["accuracy"],
            }
        )
    content = {
        "what": "validation accuracy (%) over grids: plain with a linear decay, and averaged from "
        "the middle on, vgg-mini on 2,000 images of CIFAR-100 at 16x16, 20 epochs",
        "command": "python -m benchmarks.evidence.paper tune",
        "seed": TUNING_SEED,
        "torch": torch.__version__,
        "rows": rows,
    }
    write_atomically(TUNED, (to_json(content, indent=1) + "\n").encode())
    for base in GRIDS:
        print(base, *best(rows, base))


def best(rows: list[dict[str, object]], base: str) -> tuple[float, float]:
    """Return the learning rate and the weight decay with the best mean of plain and averaged runs.

    Args:
        rows: Rows of the tuning's file.
        base: The optimizer.
    """
    found: dict[tuple[float, float], list[float]] = {}
    for row in rows:
        if row["optimizer"] == base and row["validation"] is not None:
            key = float(str(row["lr"])), float(str(row["weight_decay"]))
            found.setdefault(key, []).append(float(str(row["validation"])))
    return max(found, key=lambda key: (len(found[key]), fmean(found[key])))


def _tuned(optimizer: Optimizer, averaged: bool) -> Recipe:
    return Recipe(
        "paper-settings",
        model="vgg-mini",
        data=DATA["cifar100"],
        batch_size=BATCH_SIZE,
        optimizer=optimizer,
        schedule=LINEAR_IA if averaged else LINEAR,
        average=Average(11) if averaged else None,
        epochs=experiments.MINI_EPOCHS,
        evaluate_every=experiments.MINI_EPOCHS,
        evaluate_on=("validation",),
    )


def main() -> None:
    """Parse the command line and run a command."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.evidence.paper")
    commands = {"plan": plan, "run": run, "tune": tune}
    parser.add_argument("command", choices=commands)
    parser.add_argument("names", nargs="*", help="experiments; the default is all")
    parser.add_argument("--workers", type=int, default=2, help="runs at a time")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the results")
    options = parser.parse_args()
    unknown = [name for name in options.names if name not in EXPERIMENTS]
    if unknown:
        parser.error(f"Unknown: {', '.join(unknown)}. Choose from {', '.join(EXPERIMENTS)}.")
    os.nice(19)
    commands[options.command](options.results, options.workers, options.names or [*EXPERIMENTS])


if __name__ == "__main__":
    main()
