"""What is learned: models with their data, losses and metrics. The loop knows only :class:`Task`.

Add a task as a module next to :mod:`gadam.train.tasks.images`, and select it in :func:`build` and
:func:`check`.
"""

from __future__ import annotations

import torch

from gadam.runs.recipe import Recipe
from gadam.train import optimizers
from gadam.train.tasks.images import ImageTask, build_classifier
from gadam.train.tasks.language import LanguageTask, build_language_model
from gadam.train.tasks.task import Task, seed_for, steps_before_averaging

__all__ = [
    "ImageTask",
    "LanguageTask",
    "Task",
    "build",
    "check",
    "seed_for",
    "steps_before_averaging",
]


def build(recipe: Recipe, seed: int, device: torch.device, data_dir: str | None) -> Task:
    """Build the task of a recipe.

    Args:
        recipe: The recipe.
        seed: Determines the initial weights and the order of the data.
        device: The device of the model and the batches.
        data_dir: The folder of all data sets.
    """
    task: type[ImageTask | LanguageTask] = ImageTask if recipe.language is None else LanguageTask
    return task(recipe, seed, device, data_dir)


def check(recipe: Recipe, data_dir: str | None) -> None:
    """Check that a recipe can be trained: its data, network, optimizer and average.

    Args:
        recipe: The recipe.
        data_dir: The folder of all data sets.

    Raises:
        UserError: Data is missing, or a setting is invalid.
        ValueError: A name is unknown, or an argument of the optimizer is invalid.
    """
    build_network = build_classifier if recipe.language is None else build_language_model
    network = build_network(recipe, data_dir, torch.device("meta"))
    optimizers.build(recipe, network, 0)
