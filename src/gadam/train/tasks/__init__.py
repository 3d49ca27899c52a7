"""What is learned: models with their data, losses and metrics. The loop knows only :class:`Task`.

Add a task as a module next to :mod:`gadam.train.tasks.images`, and select it in :func:`build` and
:func:`check`.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from gadam.runs.code import code_hash
from gadam.runs.recipe import OwnTask, Recipe, RecipeError
from gadam.train import optimizers
from gadam.train.distributed import ALONE, Ranks
from gadam.train.tasks.images import ImageTask, build_classifier
from gadam.train.tasks.language import LanguageTask, build_language_model
from gadam.train.tasks.own import load_task
from gadam.train.tasks.randomness import seed_all
from gadam.train.tasks.supervised import SupervisedTask
from gadam.train.tasks.task import Task, TaskError, seed_for, steps_before_averaging

__all__ = [
    "ImageTask",
    "LanguageTask",
    "SupervisedTask",
    "Task",
    "TaskError",
    "build",
    "check",
    "seed_all",
    "seed_for",
    "steps_before_averaging",
    "with_code",
]


def build(
    recipe: Recipe,
    seed: int,
    device: torch.device,
    data_dir: str | None,
    ranks: Ranks = ALONE,
) -> Task:
    """Build the task of a recipe, and set it up for a run.

    Args:
        recipe: The recipe.
        seed: Determines the initial weights and the order of the data.
        device: The device of the model and the batches.
        data_dir: The folder of all data sets.
        ranks: The processes that train the model together.

    Raises:
        UserError: Data is missing, or a setting is invalid, or the user's own task is.
    """
    task: Task
    if recipe.task is not None:
        task = _own(recipe, recipe.task)
    elif recipe.language is not None:
        task = LanguageTask(recipe, data_dir)
    else:
        task = ImageTask(recipe, data_dir)
    task.ranks = ranks
    seed_all(seed_for(seed, 0, "model"))
    task.setup(seed, device)
    return task


def check(recipe: Recipe, data_dir: str | None) -> None:
    """Check that a recipe can be trained: its data, network, optimizer and average.

    Args:
        recipe: The recipe.
        data_dir: The folder of all data sets.

    Raises:
        UserError: Data is missing, or a setting is invalid, or the user's own task is.
        ValueError: A name is unknown, or an argument of the optimizer is invalid.
    """
    if recipe.task is not None:
        network = build(recipe, 0, torch.device("cpu"), data_dir).model
    else:
        build_network = build_classifier if recipe.language is None else build_language_model
        network = build_network(recipe, data_dir, torch.device("meta"))
    optimizers.build(recipe, network, 0)


def with_code(recipe: Recipe) -> Recipe:
    """Return the recipe with the hash of the user's code, if it trains a user's own task.

    Args:
        recipe: The recipe.

    Raises:
        RecipeError: The recipe has the hash of other code.
        CodeError: The code cannot be found or read.
    """
    if recipe.task is None:
        return recipe
    code = code_hash(recipe.task.path)
    if recipe.task.code not in ("", code):
        raise RecipeError(
            f"{recipe.task.path}, or a module that it imports, changed while it was in use. Rerun "
            "the command."
        )
    return replace(recipe, task=replace(recipe.task, code=code))


def _own(recipe: Recipe, own: OwnTask) -> Task:
    """Load the user's task, and check that the recipe fits it."""
    task = load_task(own.path, own.function)
    if (task.metric, task.mode) != (own.metric, own.mode):
        raise RecipeError(
            f"{own.path} has the metric {task.metric!r} (mode {task.mode!r}), but the recipe says "
            f"{own.metric!r} (mode {own.mode!r}). Pass a different --out."
        )
    if isinstance(task, SupervisedTask):
        task.batch_size = recipe.batch_size
    elif recipe.batch_size != Recipe.batch_size:
        raise RecipeError(
            f"{own.path} chooses its own batch size. Leave batch_size at {Recipe.batch_size}."
        )
    if not set(task.splits) & set(recipe.evaluate_on):
        raise RecipeError(
            f"{own.path} has only the splits {', '.join(task.splits)}. Set evaluate_on to some of "
            "them."
        )
    start = recipe.average.start if recipe.average is not None else 0
    if not isinstance(start, int) and "validation" not in task.splits:
        raise RecipeError(
            f"average.start={start!r} needs a validation metric, but {own.path} has no validation "
            "data."
        )
    return task
