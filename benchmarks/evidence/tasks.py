"""The tasks: real data, networks, budgets, and where each base's grid of settings begins.

Sizes come from the pilot: see README.md and results/evidence/pilot.json.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from gadam.runs.recipe import Data, Language, Recipe
from gadam.train.experiments import MINI_LANGUAGE

__all__ = ["TASKS", "Workload"]

Center = tuple[float, float]  # learning rate and weight decay


@dataclass(frozen=True)
class Workload:
    """A task with its budget.

    Args:
        recipe: Data, network, epochs, batch size, and clipping. Its optimizer is not used.
        centers: Learning rate and weight decay in the middle of each base's first grid.
        minutes: CPU minutes of an average run, for estimates.
        methods: The methods to train, or None for all.
        refresh: Training batches for BatchNorm statistics.
        test: Test images to evaluate, or None for all.
    """

    recipe: Recipe
    centers: dict[str, Center]
    minutes: float
    methods: tuple[str, ...] | None = None
    refresh: int = 8
    test: int | None = None

    @property
    def name(self) -> str:
        """The name of the task."""
        return self.recipe.name


IMAGE_CENTERS: dict[str, Center] = {
    "sgd": (0.1, 1e-3),
    "adamw": (3e-3, 0.3),
    "padamw": (0.3, 1e-2),
    "muon": (3e-3, 0.3),
    "schedule-free-adamw": (1e-2, 0.3),
    "schedule-free-sgd": (3.0, 1e-3),
}
TEXT_CENTERS: dict[str, Center] = {
    "sgd": (1.0, 1e-5),
    "adamw": (3e-3, 0.1),
    "padamw": (0.3, 1e-3),
    "muon": (3e-3, 0.1),
    "schedule-free-adamw": (1e-2, 0.1),
    "schedule-free-sgd": (10.0, 1e-5),
}
# What two tasks are limited to: both schedules of the paper's bases, and the strongest rival.
STRONGEST = (
    "sgd cosine",
    "adamw cosine",
    "adamw held",
    "padamw cosine",
    "padamw held",
    "schedule-free-adamw",
)
# SGD does not train transformers well: not worth its share of the budget there.
WITHOUT_SGD = (
    "adamw cosine",
    "schedule-free-adamw",
    "padamw held",
    "adamw held",
    "padamw cosine",
    "muon cosine",
    "muon held",
)


def _images(
    name: str, model: str, data: Data, epochs: int, minutes: float, **more: object
) -> Workload:
    recipe = Recipe(name, model=model, data=data, epochs=epochs, batch_size=128)
    return Workload(recipe, IMAGE_CENTERS, minutes, **more)  # type: ignore[arg-type]


_FASHION = Data("fashion-mini", validation=1500, examples=4000, size=14, augment=False)
_CIFAR = Data("cifar100n", validation=2000, examples=12_000, size=16, augment=False, pad=2)
_TRANSFORMER = Language(
    bptt=64,
    vary_bptt=False,
    dropout=0.1,
    dropout_hidden=0.1,
    dropout_input=0.1,
    dropout_words=0.0,
    weight_drop=0.0,
    ar_alpha=0.0,
    tar_beta=0.0,
)
_PTB = Recipe(
    "ptb-lstm",
    model="awd-lstm-mini",
    data=Data("ptb-mini", augment=False),
    language=MINI_LANGUAGE,
    epochs=15,
    batch_size=10,
    clip_grad_norm=0.25,
)

_ALL = (
    _images("fashion-noisy", "vgg-mini", replace(_FASHION, label_noise=0.3), 20, 0.5),
    _images("cifar100n", "vgg-mini", _CIFAR, 20, 1.5, test=4000),
    Workload(
        replace(
            _PTB,
            name="ptb-transformer",
            model="transformer-mini",
            language=_TRANSFORMER,
            epochs=12,
            clip_grad_norm=1.0,
        ),
        TEXT_CENTERS,
        1.6,
        methods=WITHOUT_SGD,
    ),
    Workload(_PTB, TEXT_CENTERS, 1.4),
    _images("fashion-clean", "vgg-mini", _FASHION, 20, 0.5),
    _images(
        "cifar100",
        "vgg-mini-wide",
        replace(_CIFAR, name="cifar100", examples=5_000),
        20,
        2,
        methods=STRONGEST,
        test=4000,
    ),
    _images(
        "imagenet32",
        "vgg-mini",
        Data("imagenet32", validation=2000, size=16, pad=2),
        20,
        1.2,
        methods=STRONGEST,
    ),
)
TASKS = {task.name: task for task in _ALL}
