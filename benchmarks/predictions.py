"""Compare predicted with measured losses: `python -m benchmarks.predictions`.

Each run trains a real problem. Then `gadam theory plan RUN --measure` measures curvature, slope and
gradient noise at one of its points, predicts the training losses of the last iterate, the average,
an EMA and a decayed learning rate some epochs later, and continues the run several times with other
orders of the data. The predictions see none of these continuations. Results go to
results/predictions.json. An interrupted command resumes.
"""

from __future__ import annotations

import argparse
import json
import platform
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from gadam.commands.analyze import analyze
from gadam.runs.files import read_json
from gadam.runs.recipe import Average, Optimizer, Recipe, override
from gadam.study import Settings
from gadam.train import experiments, loop
from gadam.train.tasks import own

TASKS = Path(__file__).with_name("prediction_tasks.py")
RESULT = Path(__file__).parents[1] / "results" / "predictions.json"


@dataclass(frozen=True)
class Case:
    """A problem and an optimizer.

    Args:
        problem: A function of prediction_tasks.py, or a recipe of `gadam train`.
        optimizer: At a constant learning rate. None for that of the recipe.
        seeds: Number of runs.
        epochs: Epochs before the measurement.
        horizon: Epochs to predict. None predicts to the end of the run.
        continuations: Times to continue each run.
        examples: Training examples for curvature.
    """

    problem: str
    optimizer: Optimizer | None
    seeds: int = 2
    epochs: int = 20
    horizon: int | None = 10
    continuations: int = 4
    examples: int = 4000

    @property
    def name(self) -> str:
        problem = self.problem.replace("_", "-")
        return problem if self.optimizer is None else f"{problem}-{self.optimizer.name}"

    def recipe(self) -> Recipe:
        """Return the recipe of the run."""
        if self.optimizer is None:  # keep the iterates from the middle of the run on
            return override(experiments.recipes()[self.problem], ["keep_iterates=15"])
        return Recipe(
            self.name,
            self.problem,
            optimizer=self.optimizer,
            average=Average(self.epochs - 1),
            task=own.describe(TASKS, self.problem),
            epochs=self.epochs,
            batch_size=50,
            evaluate_every=self.epochs,
        )


CASES = (
    Case("linear_regression", Optimizer("sgd", 0.0005, momentum=0.9)),
    Case("linear_regression", Optimizer("adamw", 0.001, 0.01)),
    Case("softmax_regression", Optimizer("sgd", 0.01, 1e-3, momentum=0.9)),
    Case("softmax_regression", Optimizer("adamw", 0.003, 0.01)),
    Case("perceptron", Optimizer("sgd", 0.01, 1e-3, momentum=0.9)),
    Case("perceptron", Optimizer("adamw", 0.003, 0.01)),
    Case("compare-swa", None, seeds=1, horizon=None, continuations=2, examples=1000),
)


def measure(case: Case, folder: Path, workers: int | None) -> list[dict[str, Any]]:
    """Train the runs of a case, and return one row per seed."""
    recipe = case.recipe()
    for seed in range(case.seeds):
        loop.train(recipe, folder / f"{case.name}-{seed}", seed=seed, label=case.name)
    settings = Settings(case.examples, horizon=case.horizon, continuations=case.continuations)
    complete = analyze(folder, parts=["prediction"], settings=settings, workers=workers, quiet=True)
    if not complete:
        raise SystemExit(f"Some runs in {folder} could not be measured.")
    found = read_json(folder / "analysis.json")["parts"]["prediction"]["values"]
    rows = []
    for key, values in found.items():
        row = {"problem": case.problem, "optimizer": recipe.optimizer.name, "run": key}
        rows.append({**row, **{name: values.get(name) for name in _KEPT}})
    return rows


_KEPT = (
    "epoch",
    "horizon",
    "rate",
    "start",
    "start_loss",
    "self_test",
    "slope_difference",
    "misfit",
    "points",
    "reason",
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=RESULT)
    parser.add_argument("--runs", type=Path, default=Path("runs/predictions"))
    parser.add_argument("--workers", type=int, default=None)
    parser.add_argument("--only", default="", help="names of cases that contain this")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows: list[dict[str, Any]] = []
    for case in CASES:
        if options.only in case.name:
            rows += measure(case, options.runs / case.name, options.workers)
            for row in rows[-case.seeds :]:
                print(row["run"], row["reason"] or row["points"], flush=True)
    content = {
        "command": "python -m benchmarks.predictions",
        "machine": {"cores": torch.multiprocessing.cpu_count(), "kernel": platform.system()},
        "versions": {"torch": torch.__version__, "python": platform.python_version()},
        "rows": rows,
    }
    options.out.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
