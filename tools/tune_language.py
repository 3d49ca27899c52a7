"""Measure the validation perplexity over learning rates, to choose those of the mini recipes.

    python -m tools.tune_language RUNS results/ptb-mini-tuning.json

This needs Penn Treebank; the environment variable GADAM_DATA says where data sets are. RUNS is a
folder for the runs. Rerun an interrupted command to resume it.
"""

from __future__ import annotations

import argparse
import platform
from dataclasses import replace
from pathlib import Path

from gadam.commands.console import Lines
from gadam.runs.files import write_json
from gadam.runs.folder import versions
from gadam.runs.record import POINTS, Point, RunResult
from gadam.train import experiments
from gadam.train.sweep import TrainingJob, available_cores, sweep

SEED = 10  # no reported result has this seed
FACTORS = (0.3, 1.0, 3.0)  # times the learning rate in the recipe


def main() -> None:
    """Train the grid and write its results."""
    parser = argparse.ArgumentParser(prog="python -m tools.tune_language", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("runs", type=Path, metavar="RUNS", help="the folder for the runs")
    parser.add_argument("out", type=Path, metavar="FILE", help="where to write the results")
    options = parser.parse_args()
    jobs = grid(options.runs)
    with Lines(60) as listener:
        results: dict[TrainingJob, RunResult | None] = sweep(
            list(jobs.values()), listener, available_cores()
        )
    content = {
        "what": "validation perplexity of the last iterate and the average over learning rates",
        "recipe": "as in `gadam reproduce tab-ptb` and tab-ptb-nt at mini scale",
        "seed": SEED,
        "versions": versions(),
        "machine": {"system": platform.platform(), "cores": available_cores()},
        "rows": [
            {
                "method": label,
                "lr": rate,
                **{point: _perplexity(result, point) for point in POINTS},
            }
            for (label, rate), job in jobs.items()
            if (result := results.get(job)) is not None
        ],
    }
    write_json(options.out, content)


def grid(folder: Path) -> dict[tuple[str, float], TrainingJob]:
    """Return the jobs by method and learning rate.

    Args:
        folder: The folder for the runs.
    """
    rows = {
        **experiments.get("tab-ptb").recipes,
        "Scheduled Adam": experiments.get("tab-ptb-nt").recipes["Scheduled Adam"],
    }
    del rows["Adam"]  # its iterates are Gadam's
    jobs = {}
    for label, recipe in rows.items():
        for factor in FACTORS:
            rate = float(f"{recipe.optimizer.lr * factor:.2g}")
            changed = replace(
                recipe, optimizer=replace(recipe.optimizer, lr=rate), evaluate_every=5
            )
            run = folder / f"{experiments.slug(label)}-{rate:g}"
            jobs[label, rate] = TrainingJob(label, changed, SEED, run)
    return jobs


def _perplexity(result: RunResult, point: Point) -> float | None:
    value = result.metric("perplexity", point, "validation")
    return None if value is None else round(value, 2)


if __name__ == "__main__":
    main()
