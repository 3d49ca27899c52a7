"""Validation perplexity over a grid of learning rates: from it the mini recipes' rates are chosen.

    python scripts/tune_language.py RUNS results/ptb-mini-tuning.json

needs Penn Treebank (GADAM_DATA says where). RUNS is a folder for the runs; given again, it goes on.
"""

from __future__ import annotations

import platform
import sys
from dataclasses import replace
from pathlib import Path

import torch

import gadam
from gadam.train import experiments, screen
from gadam.train.record import write_json
from gadam.train.sweep import Job, available_cores, sweep

SEED = 10  # none that a result is reported for
FACTORS = (0.3, 1.0, 3.0)  # times the rate that stands in the recipe when this is run


def main(runs: Path, out: Path) -> None:
    """Run the grid and write it down."""
    rows = {
        **experiments.get("tab-ptb").recipes,
        "Scheduled Adam": experiments.get("tab-ptb-nt").recipes["Scheduled Adam"],
    }
    del rows["Adam"]  # Gadam's own iterates
    jobs = {}
    for label, recipe in rows.items():
        for factor in FACTORS:
            rate = float(f"{recipe.optimizer.lr * factor:.2g}")
            changed = replace(
                recipe, optimizer=replace(recipe.optimizer, lr=rate), evaluate_every=5
            )
            folder = runs / f"{experiments.slug(label)}-{rate:g}"
            jobs[label, rate] = Job(label, changed, SEED, folder, None, "cpu", 1)
    with screen.Lines(60) as listener:
        done = sweep(list(jobs.values()), listener, available_cores())
    content = {
        "what": "validation perplexity of the last iterate and of the average over learning rates",
        "recipe": "those of `gadam reproduce tab-ptb` and tab-ptb-nt at mini scale",
        "seed": SEED,
        "versions": {"gadam": gadam.__version__, "torch": torch.__version__},
        "machine": {"system": platform.platform(), "cores": available_cores()},
        "rows": [
            {
                "method": label,
                "lr": rate,
                **{
                    point: result[point] and round(result[point]["validation"]["perplexity"], 2)
                    for point in ("iterate", "average")
                },
            }
            for (label, rate), job in jobs.items()
            if (result := done.get(job)) is not None
        ],
    }
    write_json(out, content)


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
