"""Runs that were never run: folders as training leaves them, from made-up numbers."""

from __future__ import annotations

import json
import random
from pathlib import Path

from gadam.train.recipe import (
    Average,
    Data,
    Language,
    Optimizer,
    Recipe,
    Schedule,
    to_dict,
)

RECIPES = {
    "AdamW": Recipe(
        "a", "vgg-mini", optimizer=Optimizer("adamw", 0.01), schedule=Schedule("linear"), epochs=6
    ),
    "Gadam": Recipe(
        "b",
        "vgg-mini",
        optimizer=Optimizer("adamw", 0.01),
        schedule=Schedule("linear-ia"),
        average=Average(2),
        epochs=6,
    ),
}


LANGUAGE = Recipe(
    "c",
    "awd-lstm-mini",
    data=Data("toy-language", augment=False),
    optimizer=Optimizer("adam", 0.01),
    average=Average(2),
    language=Language(),
    epochs=6,
)


def run(
    folder: Path, label: str, seed: int, *, recipe: Recipe | None = None, epochs: int | None = None
) -> None:
    """A run folder, unfinished where it has fewer epochs than its recipe."""
    recipe = recipe or RECIPES[label]
    chance = random.Random(f"{label} {seed}")
    epochs = recipe.epochs if epochs is None else epochs
    folder.mkdir(parents=True)
    description = {
        "label": label,
        "recipe": to_dict(recipe),
        "seed": seed,
        "versions": {"gadam": "0", "torch": "2"},
        "machine": {"system": "made up"},
    }
    (folder / "run.json").write_text(json.dumps(description))
    lines = []
    for epoch in range(1, epochs + 1):
        sampled = recipe.average is not None and epoch > 2
        value = 60 + 3 * epoch + chance.random()
        point = {"accuracy": value, "top5": 99.0, "loss": 1.0}
        if recipe.language is not None:
            point = {"perplexity": 100 - value, "loss": 1.0}
        line = {
            "epoch": epoch,
            "lr": 0.01,
            "train_loss": 1 / epoch,
            "samples": max(0, epoch - 2) if sampled else 0,
            "iterate": {"test": point, "validation": point},
            "seconds": {"train": 1.0 + chance.random(), "refresh": 0.2, "evaluate": 0.1},
        }
        if sampled:
            step = 2 if recipe.language is None else -2
            better = {**point, recipe.metric: point[recipe.metric] + step}
            line["average"] = {"test": better, "validation": better}
        lines.append(line)
    (folder / "epochs.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    if epochs == recipe.epochs:
        last = lines[-1]
        result = {
            "status": "done",
            "epochs": epochs,
            "iterate": last["iterate"],
            "average": last.get("average"),
            "samples": last["samples"],
            "parameters": 1234,
            "seconds": {"train": 9.0, "refresh": 1.0, "evaluate": 0.5},
            "peak_memory": 3 * 2**20,
        }
        (folder / "result.json").write_text(json.dumps(result))


def sweep(folder: Path, seeds: int = 3) -> Path:
    """Two methods, some seeds, and what the sweep says of itself."""
    for label in RECIPES:
        for seed in range(seeds):
            run(folder / f"{label.lower()}-{seed}", label, seed)
    description = {
        "name": "made",
        "title": "Made up",
        "metric": "accuracy",
        "note": "",
        "rows": list(RECIPES),
        "bases": {"Gadam": "AdamW"},
        "published": {"Gadam": 75.73},
        "seeds": seeds,
        "command": "gadam reproduce made",
    }
    (folder / "experiment.json").write_text(json.dumps(description))
    return folder
