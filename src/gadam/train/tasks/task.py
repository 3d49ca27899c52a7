"""The interface between the training loop and what is learned, and helpers of all tasks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Generic, Literal, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from typing_extensions import TypeVar

from gadam import _torch
from gadam._errors import UserError
from gadam.runs.recipe import Mode, Recipe, RecipeError
from gadam.train.distributed import ALONE, Ranks
from gadam.train.tasks import batch as batches_of

__all__ = [
    "REQUIRED",
    "Part",
    "Purpose",
    "Task",
    "TaskError",
    "seed_for",
    "steps_before_averaging",
]

BatchT = TypeVar("BatchT", default=Any)  # `Task` alone is a task with batches of any type
Purpose = Literal["model", "order", "refresh", "noise in the network"]
_PURPOSES: tuple[Purpose, ...] = ("model", "order", "refresh", "noise in the network")

# What has no default in Task.
REQUIRED = ("setup", "model", "metric", "mode", "steps", "batches", "loss", "evaluate")


class TaskError(UserError, ValueError):
    """A task cannot be used. The message says what is wrong, and what to do.

    Args:
        *problems: One sentence per problem. Several become a list in one message.

    Example:
        >>> print(TaskError("epochs must be at least 1, got 0.", "loss must be a function."))
        The task has 2 problems:
        - epochs must be at least 1, got 0.
        - loss must be a function.
    """

    def __init__(self, *problems: str) -> None:
        self.problems = problems
        listed = "".join(f"\n- {problem}" for problem in problems)
        super().__init__(
            problems[0] if len(problems) == 1 else f"The task has {len(problems)} problems:{listed}"
        )


@dataclass(frozen=True)
class Part(Generic[BatchT]):
    """What one rank trains on in a step.

    Args:
        batch: The rank's part of the step's batch.
        share: Its fraction of that batch. 0 if there is nothing for this rank: then it runs a part
            that does not count, because the other ranks communicate with it.
        rate_factor: The :meth:`Task.rate_factor` of the whole batch.
    """

    batch: BatchT
    share: float = 1.0
    rate_factor: float = 1.0


@runtime_checkable
class Task(Protocol[BatchT]):
    """A learning problem: a model, its data, its loss and its metrics.

    Most supervised problems need only :class:`gadam.train.SupervisedTask`. For anything else,
    subclass this class and implement :meth:`setup`, :meth:`steps`, :meth:`batches`, :meth:`loss`
    and :meth:`evaluate`, and set :attr:`metric` and :attr:`mode`. Everything else has a default.
    Check the result with :func:`gadam.train.check_task`.

    gadam calls :meth:`setup` once per run. Before it, and before each epoch, gadam seeds the global
    generators of torch, ``random`` and NumPy as a function of the run's seed and the epoch. An
    epoch must depend on nothing but these, the weights, and the state of the optimizer. Then a
    killed run resumes to the same numbers.

    Attributes:
        model: The model to train. :meth:`setup` creates it.
        metric: The metric that rates a run: a key of what :meth:`evaluate` returns.
        mode: Whether a larger ("max") or smaller ("min") metric is better.
        splits: The splits to evaluate: "validation" if there is one, and "test".
        notices: Sentences for the user, for example about the data.
        epochs: The epochs that ``gadam compare`` trains for by default.
        ranks: The processes that train the model together, under torchrun. gadam sets it.

    Example:
        A denoising autoencoder, which has no labels:

        >>> import torch
        >>> from gadam.train import Task, check_task
        >>> class Denoising(Task):
        ...     metric, mode, splits, epochs = "reconstruction", "min", ("validation", "test"), 10
        ...
        ...     def setup(self, seed, device):
        ...         fixed = torch.Generator().manual_seed(0)  # the same data for all seeds
        ...         data = torch.randn(192, 2, generator=fixed) @ torch.randn(2, 8, generator=fixed)
        ...         splits = "train", "validation", "test"
        ...         self.data = dict(zip(splits, data.to(device).split(64)))
        ...         self.model = torch.nn.Linear(8, 8, device=device)
        ...
        ...     def steps(self, epoch):
        ...         return 4
        ...
        ...     def batches(self, epoch):
        ...         yield from self.data["train"][torch.randperm(64)].split(16)
        ...
        ...     def loss(self, model, batch):
        ...         noisy = batch + 0.1 * torch.randn_like(batch)
        ...         return torch.nn.functional.mse_loss(model(noisy), batch), len(batch)
        ...
        ...     @torch.no_grad()
        ...     def evaluate(self, model, split):
        ...         data = self.data[split]
        ...         return {"reconstruction": float((model(data) - data).square().mean())}
        >>> check_task(Denoising).notices
        ()
    """

    model: nn.Module
    metric: str
    mode: Mode
    splits: tuple[str, ...] = ("validation", "test")
    notices: tuple[str, ...] = ()
    epochs: int = 20
    ranks: Ranks = ALONE

    def setup(self, seed: int, device: torch.device) -> None:
        """Prepare a run: draw the initial weights of :attr:`model`, and fix the data order.

        A second call prepares another run. Nothing of the first may remain.

        Args:
            seed: The run's seed.
            device: The device of the model and the batches.
        """
        ...

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

    def loss(self, model: nn.Module, batch: BatchT) -> tuple[Tensor, int]:
        """Return the mean loss of a batch, and the number of examples in it.

        Args:
            model: The model of the task, possibly compiled.
            batch: A training batch.
        """
        ...

    def evaluate(self, model: nn.Module, split: str) -> dict[str, float]:
        """Return the metrics of the model on a split. Leave the model as it is.

        Args:
            model: The model of the task. Its weights may be averaged ones.
            split: The split to evaluate: "train", "validation" or "test".
        """
        ...

    def rate_factor(self, batch: BatchT) -> float:
        """Return the factor by which to multiply the learning rate for a batch. Default: 1.

        Args:
            batch: A training batch.
        """
        return 1.0

    def micro_batches(self, batch: BatchT, count: int) -> list[tuple[BatchT, float]]:
        """Divide a batch for gradient accumulation. Default: along the first dimension.

        Args:
            batch: A training batch.
            count: The maximum number of micro-batches.

        Returns:
            The micro-batches, each with its fraction of the batch.
        """
        return batches_of.divided(batch, count)

    def parts(
        self, epoch: int, purpose: Literal["order", "refresh"] = "order"
    ) -> Iterator[Part[BatchT]]:
        """Iterate over this rank's part of each batch. Default: a micro-batch of it.

        Override it to load only what this rank needs, if :meth:`batches` loads slowly. Every rank
        must get as many parts as there are batches.

        Args:
            epoch: Counted from 0.
            purpose: "order" for the training batches, "refresh" for those of :meth:`refresh`.
        """
        for batch in self.batches(epoch) if purpose == "order" else self.refresh(epoch):
            piece, share = part_of(self, batch, self.micro_batches)
            yield Part(piece, share, self.rate_factor(batch))

    def state_dict(self) -> dict[str, Any]:
        """Return what carries over from batch to batch within an epoch. Default: nothing.

        Under torchrun, a checkpoint may be written in the middle of an epoch. All ranks call this,
        and get the result of the first one in :meth:`load_state_dict`.
        """
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue an epoch from the result of :meth:`state_dict`.

        Args:
            state_dict: Maybe of another number of ranks.
        """
        return

    def refresh(self, epoch: int) -> Iterator[BatchT]:
        """Iterate over the batches for the BatchNorm statistics. Default: :meth:`batches`.

        :meth:`loss` runs the model's forward pass on each.

        Args:
            epoch: Counted from 0.
        """
        return self.batches(epoch)

    def training_data(self, examples: int | None = None) -> Iterator[BatchT]:
        """Iterate over the training data in a fixed order, without augmentation if possible.

        `gadam analyze` uses it. Default: the batches of the first epoch.

        Args:
            examples: The number of examples, rounded up to whole batches. The default is all.
        """
        seen = 0
        for batch in self.batches(0):
            if examples is not None and seen >= examples:
                return
            yield batch
            seen += batches_of.size(batch)

    def scores(self, model: nn.Module, split: str) -> Iterator[tuple[Tensor, Tensor]]:
        """Iterate over the model's logits and the true classes, some rows at a time.

        Only the parts of `gadam analyze` that compare predictions need it.

        Args:
            model: The model of the task.
            split: The split to predict: "train", "validation" or "test".

        Raises:
            TaskError: The task does not implement it.
        """
        raise TaskError(
            f"{type(self).__name__} has no class scores. Implement scores(), or use --parts to "
            "leave out the parts that compare predictions."
        )


def part_of(
    task: Task[Any], batch: BatchT, divide: Callable[[BatchT, int], list[tuple[BatchT, float]]]
) -> tuple[BatchT, float]:
    """Return this rank's part of a batch, and its fraction of it; see :meth:`Ranks.part`.

    Args:
        task: The task.
        batch: A batch, or the indices of its examples.
        divide: Divides it into at most as many pieces as its second argument says.
    """
    count = task.ranks.size
    if count == 1:
        return batch, 1.0
    pieces = divide(batch, count)
    if normalizes_batches(task.model):  # and cannot normalize a single example
        while count > 1 and min(batches_of.size(piece) for piece, _ in pieces) < 2:
            count -= 1
            pieces = divide(batch, count)
    return task.ranks.part(pieces)


def normalizes_batches(model: nn.Module) -> bool:
    """Return True if a model has BatchNorm layers.

    Args:
        model: The model.
    """
    return any(isinstance(module, _torch.BATCHNORM_TYPES) for module in model.modules())


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
