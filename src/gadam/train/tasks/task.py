"""The interface between the training loop and what is learned, and helpers of all tasks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal, Protocol

from torch import Tensor, nn
from typing_extensions import TypeVar

from gadam.runs.recipe import Recipe, RecipeError

__all__ = ["Purpose", "Task", "seed_for", "steps_before_averaging"]

BatchT = TypeVar("BatchT", default=Any)  # `Task` alone is a task with batches of any type
Purpose = Literal["model", "order", "refresh", "noise in the network"]
_PURPOSES: tuple[Purpose, ...] = ("model", "order", "refresh", "noise in the network")


class Task(Protocol[BatchT]):
    """A learning problem: a model, its data, its loss and its metrics.

    Attributes:
        model: The model to train.
        splits: The splits to evaluate: "validation" if there is one, and "test".
        metric: The metric that rates a run.
        mode: Whether a higher ("max") or lower ("min") metric is better.
        notices: Sentences that tell the user about problems of the data.
    """

    model: nn.Module
    splits: tuple[str, ...]
    metric: str
    mode: Literal["max", "min"]
    notices: tuple[str, ...]

    def steps(self, epoch: int) -> int:
        """Return the number of training batches in an epoch.

        Args:
            epoch: Counted from 0.
        """
        ...

    def batches(self, epoch: int) -> Iterator[BatchT]:
        """Iterate over the training batches of an epoch. Only the seed and the epoch matter.

        Args:
            epoch: Counted from 0.
        """
        ...

    def rate_factor(self, batch: BatchT) -> float:
        """Return the factor by which to multiply the learning rate for a batch.

        Args:
            batch: A training batch.
        """
        ...

    def micro_batches(self, batch: BatchT, count: int) -> list[tuple[BatchT, float]]:
        """Divide a batch for gradient accumulation.

        Args:
            batch: A training batch.
            count: The maximum number of micro-batches.

        Returns:
            The micro-batches, each with its fraction of the batch.
        """
        ...

    def loss(self, model: nn.Module, batch: BatchT) -> tuple[Tensor, int]:
        """Return the mean loss of a batch, and the number of examples in it.

        Args:
            model: The model of the task, possibly compiled.
            batch: A training batch.
        """
        ...

    def refresh(self, epoch: int) -> Iterator[BatchT]:
        """Iterate over the batches for the BatchNorm statistics: augmented training data.

        Args:
            epoch: Counted from 0.
        """
        ...

    def training_data(self, examples: int | None = None) -> Iterator[BatchT]:
        """Iterate over the training data in a fixed order, without augmentation.

        Args:
            examples: The number of examples. The default is all.
        """
        ...

    def scores(self, model: nn.Module, split: str) -> Iterator[tuple[Tensor, Tensor]]:
        """Iterate over the model's logits and the true classes, some rows at a time.

        Args:
            model: The model of the task.
            split: The split to predict: "train", "validation" or "test".
        """
        ...

    def evaluate(self, model: nn.Module, split: str) -> dict[str, float]:
        """Return the metrics of the model on a split.

        Args:
            model: The model of the task.
            split: The split to evaluate: "train", "validation" or "test".
        """
        ...


def seed_for(seed: int, epoch: int, purpose: Purpose) -> int:
    """Return a separate seed for each use of randomness, so that epochs are independent.

    Args:
        seed: The seed of the run.
        epoch: Counted from 0.
        purpose: What the seed is for.
    """
    return (seed * 1_000_003 + epoch) * len(_PURPOSES) + _PURPOSES.index(purpose)


def steps_before_averaging(recipe: Recipe, task: Task) -> int:
    """Return the number of steps before averaging starts, or 0 if a trigger starts it.

    Args:
        recipe: The recipe.
        task: Its task.

    Raises:
        RecipeError: The sampling interval is longer than the rest of the run.
    """
    average = recipe.average
    if average is None or not isinstance(average.start, int):
        return 0
    left = sum(map(task.steps, range(average.start, recipe.epochs)))
    if isinstance(average.every, int) and average.every > left:
        raise RecipeError(
            f"average.every={average.every} takes no sample: only {left} steps remain from epoch "
            f"{average.start} on. Use a smaller average.every."
        )
    return sum(map(task.steps, range(average.start)))
