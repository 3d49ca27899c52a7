"""The pilot that chose the sizes of the tasks, on training and validation data only."""

from __future__ import annotations

from dataclasses import replace

from benchmarks.evidence.harness import Record, Trial, run
from benchmarks.evidence.methods import Knobs
from benchmarks.evidence.tasks import TASKS, Workload

__all__ = ["CANDIDATES", "METHODS", "measure"]

METHODS = ("adamw held", "schedule-free-adamw")


def _sized(
    task: str, model: str, images: int, epochs: int, augment: bool = True, validation: int = 2000
) -> Workload:
    data = replace(
        TASKS[task].recipe.data,
        examples=images + validation,
        validation=validation,
        augment=augment,
    )
    recipe = replace(TASKS[task].recipe, model=model, data=data, epochs=epochs)
    return replace(TASKS[task], recipe=recipe)


CANDIDATES: dict[str, Workload] = {
    "fashion-noisy": TASKS["fashion-noisy"],
    "cifar100n, vgg-mini, 10,000 images, 20 epochs": _sized("cifar100n", "vgg-mini", 10_000, 20),
    "cifar100n, vgg-mini, 5,000 images, 40 epochs": _sized("cifar100n", "vgg-mini", 5_000, 40),
    "cifar100n, vgg-mini, 10,000 images, 20 epochs, no augmentation": _sized(
        "cifar100n", "vgg-mini", 10_000, 20, augment=False
    ),
    "cifar100, vgg-mini-wide, 3,000 images, 20 epochs": _sized(
        "cifar100", "vgg-mini-wide", 3_000, 20
    ),
    "cifar100, vgg-mini-wide, 3,000 images, 20 epochs, no augmentation": _sized(
        "cifar100", "vgg-mini-wide", 3_000, 20, augment=False
    ),
    "imagenet32, vgg-mini, 8,000 images, 20 epochs": _sized("imagenet32", "vgg-mini", 8_000, 20),
    "ptb-lstm, ptb-mini, 20 epochs": replace(
        TASKS["ptb-lstm"], recipe=replace(TASKS["ptb-lstm"].recipe, epochs=20)
    ),
    "ptb-transformer, ptb-mini, 20 epochs": replace(
        TASKS["ptb-transformer"], recipe=replace(TASKS["ptb-transformer"].recipe, epochs=20)
    ),
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
