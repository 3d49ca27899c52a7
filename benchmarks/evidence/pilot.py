"""The pilot that chose the sizes of the tasks, on training and validation data only."""

from __future__ import annotations

from dataclasses import replace

from benchmarks.evidence.harness import Record, Trial, run
from benchmarks.evidence.methods import Knobs
from benchmarks.evidence.tasks import TASKS, Workload

__all__ = ["CANDIDATES", "KNOBS", "measure"]


def _sized(task: str, model: str, images: int, epochs: int, batch_size: int = 128) -> Workload:
    workload = TASKS[task]
    data = workload.recipe.data
    recipe = replace(
        workload.recipe,
        model=model,
        data=replace(data, examples=images + data.validation),
        epochs=epochs,
        batch_size=batch_size,
    )
    return replace(workload, recipe=recipe)


def _text(task: str, words: int, epochs: int, batch_size: int) -> Workload:
    workload = TASKS[task]
    data = replace(workload.recipe.data, name="ptb", words=2000, examples=words)
    recipe = replace(workload.recipe, data=data, epochs=epochs, batch_size=batch_size)
    return replace(workload, recipe=recipe)


CANDIDATES: dict[str, Workload] = {
    "fashion-noisy": TASKS["fashion-noisy"],
    "cifar100n, vgg-mini, 10,000 images, 20 epochs": _sized("cifar100n", "vgg-mini", 10_000, 20),
    "cifar100n, vgg-mini-wide, 5,000 images, 14 epochs": _sized(
        "cifar100n", "vgg-mini-wide", 5_000, 14
    ),
    "cifar100n, vgg-mini, 5,000 images, 40 epochs": _sized("cifar100n", "vgg-mini", 5_000, 40),
    "cifar100, vgg-mini, 3,000 images, 40 epochs": _sized("cifar100", "vgg-mini", 3_000, 40),
    "cifar100, vgg-mini-wide, 3,000 images, 20 epochs": _sized(
        "cifar100", "vgg-mini-wide", 3_000, 20
    ),
    "imagenet32, vgg-mini, 8,000 images, 20 epochs": _sized("imagenet32", "vgg-mini", 8_000, 20),
    "ptb-lstm, ptb-mini, 20 epochs": replace(
        TASKS["ptb-lstm"], recipe=replace(TASKS["ptb-lstm"].recipe, epochs=20)
    ),
    "ptb-transformer, ptb-mini, 20 epochs": replace(
        TASKS["ptb-transformer"], recipe=replace(TASKS["ptb-transformer"].recipe, epochs=20)
    ),
    "ptb-lstm, 300,000 words, 5 epochs": _text("ptb-lstm", 300_000, 5, 20),
    "ptb-transformer, 300,000 words, 5 epochs": _text("ptb-transformer", 300_000, 5, 20),
}
KNOBS = {
    "image": {"adamw held": Knobs(3e-3, 0.3), "schedule-free-adamw": Knobs(1e-2, 0.3)},
    "text": {"adamw held": Knobs(3e-3, 0.1), "schedule-free-adamw": Knobs(1e-2, 0.1)},
}


def measure(candidate: str, method: str) -> list[Record]:
    """Train a candidate once.

    Args:
        candidate: One of :data:`CANDIDATES`.
        method: One of the methods in :data:`KNOBS`.

    Returns:
        The records, without the test metrics: nobody chooses by those.
    """
    workload = CANDIDATES[candidate]
    kind = "image" if workload.recipe.language is None else "text"
    records = run(Trial(workload.name, method, KNOBS[kind][method], 0), workload)
    for record in records:
        record.trial = replace(record.trial, task=candidate)
        record.test = {}
    return records
