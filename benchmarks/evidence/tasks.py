"""The tasks: real data, networks, budgets, and where each base's grid of settings begins.

Sizes come from the pilot: see README.md and results/evidence/pilot.json.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from benchmarks.evidence.interpolation import VARIANTS
from gadam.runs.recipe import Data, Language, Recipe
from gadam.train.experiments import MINI_LANGUAGE

__all__ = ["TASKS", "Workload"]

Center = tuple[float, float]  # learning rate and weight decay


@dataclass(frozen=True)
class Workload:
    """A task with its budget.

    Args:
        recipe: Data, network, epochs, batch size, and clipping. Its optimizer is not used.
        title: What a reader calls the task.
        centers: Learning rate and weight decay in the middle of each base's first grid.
        minutes: CPU minutes of an average run, for estimates.
        methods: The methods to train, in this order.
        decays: The weight decays of the first grid, in half-decades from its center.
        extra: How many settings may be tried beyond the first grid.
        seeds: The seeds of the final runs. Seed 0 tunes.
        refresh: Training batches for BatchNorm statistics.
        test: Test images to evaluate, or None for all.
        columns: Columns in which a text is evaluated.
        chance: The metric of a model that has learned nothing. A run that diverged counts as one.
    """

    recipe: Recipe
    title: str
    centers: dict[str, Center]
    minutes: float
    methods: tuple[str, ...]
    decays: tuple[int, ...] = (0, 1, -1)
    extra: int = 8
    seeds: tuple[int, ...] = (1, 2, 3, 4, 5)
    refresh: int = 8
    test: int | None = None
    columns: int = 30
    chance: float = 1.0

    @property
    def name(self) -> str:
        """The name of the task. It changes with the size: results of two sizes never mix."""
        return self.recipe.name

    @property
    def mode(self) -> Literal["max", "min"]:
        """Whether more of the metric is better."""
        return "max" if self.recipe.language is None else "min"

    @property
    def metric(self) -> Literal["accuracy", "perplexity"]:
        """The metric of choice and of the final comparison."""
        return "accuracy" if self.recipe.language is None else "perplexity"


IMAGE_CENTERS: dict[str, Center] = {
    "sgd": (0.1, 1e-3),
    "adamw": (3e-3, 0.3),
    "adam-l2": (3e-3, 1e-3),
    "padamw": (0.3, 1e-2),
    "muon": (3e-3, 0.3),
    "gadam-lookahead": (1e-2, 0.3),
    "schedule-free-adamw": (1e-2, 0.3),
    "schedule-free-sgd": (3.0, 1e-3),
    "gpa": (3e-3, 0.3),
    "gadam-between": (1e-2, 0.3),
    "gadamx-between": (0.3, 1e-2),
}
TEXT_CENTERS: dict[str, Center] = {
    "sgd": (1.0, 1e-5),
    "adamw": (3e-3, 0.1),
    "adam-l2": (3e-3, 1e-5),
    "padamw": (0.3, 1e-3),
    "muon": (3e-3, 0.1),
    "gadam-lookahead": (1e-2, 0.1),
    "schedule-free-adamw": (1e-2, 0.1),
    "schedule-free-sgd": (10.0, 1e-5),
    "gpa": (3e-3, 0.1),
    "gadam-between": (1e-2, 0.1),
    "gadamx-between": (0.3, 1e-3),
}
ABLATION_CENTERS: dict[str, Center] = dict.fromkeys(VARIANTS, (1e-2, 0.3))

# The strongest first: if time runs out, the first methods are complete.
FIRST = ("adamw cosine", "schedule-free-adamw", "padamw held", "adamw held")
MUON = ("muon held", "muon eased", "muon cosine", "muon annealed")
STRONGEST = (*FIRST, "padamw eased", "gadamx-between", *MUON)
# SGD does not train transformers well: not worth its share of the budget there.
TRANSFORMER = (*STRONGEST, "gpa cosine", "adamw linear", "gadam-lookahead held")
LSTM = (*STRONGEST, "sgd held", "adamw linear", "gadam-lookahead held", "schedule-free-sgd")
USUAL = (*LSTM, "sgd cosine", "padamw cosine")
WITH_ALL = (*USUAL, "adam-l2 held", "gpa cosine", "adamw eased", "gadam-between")

_FASHION = Data("fashion-mini", validation=1500, examples=4000, size=14, augment=False)
_CIFAR = Data("cifar100n", validation=2000, examples=7_000, size=16, augment=False, pad=2)
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


def _images(name: str, data: Data, epochs: int, batch_size: int = 128) -> Recipe:
    return Recipe(name, model="vgg-mini", data=data, epochs=epochs, batch_size=batch_size)


_PTB = Recipe(
    "ptb-lstm-short",
    model="awd-lstm-mini",
    data=Data("ptb-mini", augment=False),
    language=MINI_LANGUAGE,
    epochs=6,
    batch_size=10,
    clip_grad_norm=0.25,
)
_IMAGENET32 = Workload(
    _images("imagenet32-short", Data("imagenet32", validation=2000, size=16, pad=2), 8),
    "ImageNet-32 sample",
    IMAGE_CENTERS,
    0.53,
    (*STRONGEST, "gadam-between"),
)
_ALL = (
    Workload(
        _images("fashion-noisy", replace(_FASHION, label_noise=0.3), 20),
        "Fashion-MNIST (30% random labels)",
        IMAGE_CENTERS,
        0.45,
        WITH_ALL,
        extra=10,
        chance=10.0,
    ),
    Workload(
        _images("cifar100n-5k", _CIFAR, 20),
        "CIFAR-100N (human label noise)",
        IMAGE_CENTERS,
        0.7,
        WITH_ALL,
        test=4000,
    ),
    Workload(
        _images("fashion-clean", _FASHION, 20),
        "Fashion-MNIST (true labels)",
        IMAGE_CENTERS,
        0.45,
        USUAL,
        chance=10.0,
    ),
    Workload(
        replace(
            _PTB,
            name="ptb-transformer-short",
            model="transformer-mini",
            language=_TRANSFORMER,
            epochs=5,
            clip_grad_norm=1.0,
        ),
        "Penn Treebank (transformer)",
        TEXT_CENTERS,
        0.75,
        TRANSFORMER,
        chance=2000.0,
    ),
    # The best rates are far above the center, which was meant for transformers, too.
    Workload(_PTB, "Penn Treebank (LSTM)", TEXT_CENTERS, 0.65, LSTM, extra=12, chance=2000.0),
    Workload(
        _images("cifar100-2k", replace(_CIFAR, name="cifar100", examples=4_000), 30, batch_size=64),
        "CIFAR-100 (over-parameterized)",
        IMAGE_CENTERS,
        0.55,
        STRONGEST,
        refresh=16,
        test=4000,
    ),
    _IMAGENET32,
    replace(
        _IMAGENET32,
        recipe=replace(_IMAGENET32.recipe, name="ablation"),
        title="Ablation of Schedule-Free on the ImageNet-32 sample",
        centers=ABLATION_CENTERS,
        methods=(*VARIANTS, "between/plain/uniform cold"),
        decays=(0, 1),
        extra=2,
        seeds=(1, 2, 3),
        minutes=0.3,
    ),
)
TASKS = {task.name: task for task in _ALL}
