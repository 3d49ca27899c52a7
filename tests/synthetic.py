"""Data sets of a few random images in the shapes of the real ones, and texts of a few words."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from gadam.runs.recipe import Average, Recipe
from gadam.train import data
from gadam.train.data import text
from gadam.train.tasks import images, language

SHAPES = {
    "fashion-mini": ((1, 28, 28), 10),
    "mnist": ((1, 28, 28), 10),
    "cifar10": ((3, 32, 32), 10),
    "cifar100": ((3, 32, 32), 100),
    "imagenet32": ((3, 32, 32), 1000),
    "imagenet": ((3, 224, 224), 1000),
}
WORDS = {"toy-language": 574, "ptb-mini": 2_000, "ptb": 10_000}

# Without the cache, which may hold real data.
_LOAD_SPLITS, _LOAD_CORPUS = images._load_splits.__wrapped__, language._load_corpus.__wrapped__


def load(name: str, *, train: int = 10, test: int = 4) -> data.Dataset:
    """Return random images.

    Args:
        name: The data set to imitate.
        train: Number of training images.
        test: Number of test images.
    """
    shape, classes = SHAPES[name]
    generator = torch.Generator().manual_seed(0)

    def draw(count: int) -> data.Images:
        pixels = torch.randint(256, (count, *shape), generator=generator).to(torch.uint8)
        return data.Images(pixels, torch.arange(count) % classes)

    return data.Dataset(
        name,
        draw(train),
        draw(test),
        num_classes=classes,
        mean=(0.5,) * shape[0],
        std=(0.25,) * shape[0],
    )


def load_text(name: str) -> text.Corpus:
    """Return a random text of 22 words per split.

    Args:
        name: The text to imitate.
    """
    generator = torch.Generator().manual_seed(0)
    train, validation, test = (
        torch.randint(WORDS[name], (22,), generator=generator) for _ in range(3)
    )
    return text.Corpus(name, tuple(map(str, range(WORDS[name]))), train, validation, test)


def install(monkeypatch: pytest.MonkeyPatch, *, train: int = 10, test: int = 4) -> None:
    """Let recipes load this data instead of the real data.

    Args:
        monkeypatch: Restores the real data after the test.
        train: Number of training images.
        test: Number of test images.
    """
    monkeypatch.setattr(data, "load", lambda name, *_: load(name, train=train, test=test))
    monkeypatch.setattr(text, "load", lambda name, *_: load_text(name))
    monkeypatch.setattr(images, "_load_splits", _LOAD_SPLITS)
    monkeypatch.setattr(language, "_load_corpus", _LOAD_CORPUS)


def two_steps(recipe: Recipe) -> Recipe:
    """Return the recipe cut to one epoch of two steps, with a sample if it has an average.

    Args:
        recipe: Any recipe.
    """
    validation = 2 if recipe.data.validation else 0
    average = recipe.average
    if isinstance(average, Average) and isinstance(average.start, int):
        average = replace(average, start=0, every=1 if average.every != "epoch" else "epoch")
    if recipe.language is not None:  # 22 words: two columns of two passages
        settings = replace(recipe.language, bptt=5, vary_bptt=False)
        return replace(recipe, epochs=1, batch_size=2, average=average, language=settings)
    return replace(
        recipe,
        epochs=1,
        batch_size=(10 - validation) // 2,
        average=average,
        data=replace(recipe.data, validation=validation, examples=None),
    )
