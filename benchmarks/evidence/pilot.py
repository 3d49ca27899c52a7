"""The pilot that chose the sizes of the tasks, on training and validation data only."""

from __future__ import annotations

from dataclasses import replace

from benchmarks.evidence.harness import Record, Trial, run
from benchmarks.evidence.methods import Knobs
from benchmarks.evidence.tasks import TASKS, Workload

__all__ = ["CANDIDATES", "METHODS", "measure"]

METHODS = ("adamw held",)


def _sized(
    task: str, model: str, images: int, epochs: int, augment: bool = True, batch_size: int = 128
) -> Workload:
    data = replace(
        TASKS[task].recipe.data, examples=images + 2000, validation=2000, augment=augment
    )
    recipe = replace(
        TASKS[task].recipe, model=model, data=data, epochs=epochs, batch_size=batch_size
    )
    return replace(TASKS[task], recipe=recipe)


def _text(task: str, epochs: int) -> Workload:
    return replace(TASKS[task], recipe=replace(TASKS[task].recipe, epochs=epochs))


CANDIDATES: dict[str, Workload] = {
    "cifar100n, vgg-mini, 10,000 images, 20 epochs": _sized("cifar100n-5k", "vgg-mini", 10_000, 20),
    "cifar100n, vgg-mini, 5,000 images, 40 epochs": _sized("cifar100n-5k", "vgg-mini", 5_000, 40),
    "cifar100n, vgg-mini, 10,000 images, 20 epochs, no augmentation": _sized(
        "cifar100n-5k", "vgg-mini", 10_000, 20, augment=False
    ),
    "cifar100n, vgg-mini, 5,000 images, 20 epochs, no augmentation": _sized(
        "cifar100n-5k", "vgg-mini", 5_000, 20, augment=False
    ),
    "cifar100, vgg-mini-wide, 3,000 images, 20 epochs": _sized(
        "cifar100-2k", "vgg-mini-wide", 3_000, 20
    ),
    "cifar100, vgg-mini-wide, 3,000 images, 20 epochs, no augmentation": _sized(
        "cifar100-2k", "vgg-mini-wide", 3_000, 20, augment=False
    ),
    "cifar100, vgg-mini, 2,000 images, 30 epochs, no augmentation": _sized(
        "cifar100-2k", "vgg-mini", 2_000, 30, augment=False, batch_size=64
    ),
    "imagenet32, vgg-mini, 8,000 images, 20 epochs": _sized(
        "imagenet32-short", "vgg-mini", 8_000, 20
    ),
    "ptb-lstm, ptb-mini, 20 epochs": _text("ptb-lstm-short", 20),
    "ptb-transformer, ptb-mini, 20 epochs": _text("ptb-transformer-short", 20),
    "ptb-transformer, ptb-mini, 5 epochs": _text("ptb-transformer-short", 5),
}
KNOBS = {"image": Knobs(3e-3, 0.3), "text": Knobs(3e-3, 0.1)}


def measure(candidate: str, method: str) -> list[Record]:
    """Train a candidate once.

    Args:
        candidate: One of :data:`CANDIDATES`.
        method: One of :data:`METHODS`.

    Returns:
        The records, without the test metrics: nobody chooses by those.
    """
    workload = CANDIDATES[candidate]
    kind = "image" if workload.recipe.language is None else "text"
    records = run(Trial(workload.name, method, KNOBS[kind], 0), workload)
    for record in records:
        record.trial = replace(record.trial, task=candidate)
        record.test = {}
    return records
