"""Write run folders as training leaves them, with made-up numbers."""

from __future__ import annotations

import random
from pathlib import Path

from gadam.runs import (
    Average,
    Data,
    EpochRecord,
    Experiment,
    Language,
    Optimizer,
    Recipe,
    RunHeader,
    RunResult,
    Schedule,
)
from gadam.runs.files import to_json, write_json
from gadam.runs.lines import chained
from gadam.runs.manifest import FileHash, write_manifest
from gadam.runs.record import FORMAT

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
    folder: Path,
    label: str,
    seed: int,
    *,
    recipe: Recipe | None = None,
    epochs: int | None = None,
    sealed: bool = False,
) -> None:
    """Write a run folder.

    Args:
        folder: Where to write it.
        label: The run's name; one of :data:`RECIPES` if no recipe is passed.
        seed: The run's seed.
        recipe: What it trains.
        epochs: Epochs done. With fewer than the recipe's, the run is not finished.
        sealed: Write hashes and a manifest. Otherwise, write the format of older versions.
    """
    recipe = recipe or RECIPES[label]
    epochs = recipe.epochs if epochs is None else epochs
    folder.mkdir(parents=True)
    versions, machine = {"gadam": "0", "torch": "2"}, {"system": "made up"}
    version = FORMAT if sealed else 1
    header = RunHeader(label, recipe, seed, 1, versions, machine, version)
    write_json(folder / "run.json", header.to_dict())
    rng = random.Random(f"{label} {seed}")
    records = [_record(recipe, epoch, rng) for epoch in range(1, epochs + 1)]
    lines = "".join(to_json(record.to_dict()) + "\n" for record in records)
    if sealed:
        lines = chained(records, (folder / "run.json").read_bytes())
    (folder / "epochs.jsonl").write_text(lines)
    if epochs == recipe.epochs:
        last = records[-1]
        assert last.iterate is not None
        result = RunResult(
            "done",
            epochs,
            last.iterate,
            last.average,
            last.samples,
            parameters=1234,
            seconds={"train": 9.0, "refresh": 1.0, "evaluate": 0.5},
            peak_memory=3 * 2**20,
        )
        write_json(folder / "result.json", result.to_dict())
        if sealed:
            names = ("run.json", "epochs.jsonl", "result.json")
            hashes = {name: FileHash.of((folder / name).read_bytes()) for name in names}
            write_manifest(folder, hashes)


def _record(recipe: Recipe, epoch: int, rng: random.Random) -> EpochRecord:
    sampled = recipe.average is not None and epoch > 2
    value = 60 + 3 * epoch + rng.random()
    point = {"accuracy": value, "top5": 99.0, "loss": 1.0}
    step = 2
    if recipe.language is not None:
        point, step = {"perplexity": 100 - value, "loss": 1.0}, -2
    better = {**point, recipe.metric: point[recipe.metric] + step}
    return EpochRecord(
        epoch,
        lr=0.01,
        train_loss=1 / epoch,
        samples=epoch - 2 if sampled else 0,
        iterate={"test": point, "validation": point},
        average={"test": better, "validation": better} if sampled else None,
        seconds={"train": 1.0 + rng.random(), "refresh": 0.2, "evaluate": 0.1},
    )


def sweep(folder: Path, seeds: int = 3, *, sealed: bool = False) -> Path:
    """Write the folder of an experiment with two methods.

    Args:
        folder: Where to write it.
        seeds: Runs per method.
        sealed: As for :func:`run`.

    Returns:
        The folder.
    """
    for label in RECIPES:
        for seed in range(seeds):
            run(folder / f"{label.lower()}-{seed}", label, seed, sealed=sealed)
    experiment = Experiment(
        "made",
        "Made up",
        RECIPES,
        bases={"Gadam": "AdamW"},
        published={"Gadam": 75.73},
        seeds=seeds,
        command="gadam reproduce made",
    )
    write_json(folder / "experiment.json", experiment.to_dict())
    return folder
