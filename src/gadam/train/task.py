"""What is learnt: a model, its data, its loss and how well it does. The loop knows no more of it."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gadam.train import data, models, optimizers
from gadam.train.recipe import Data, Recipe, RecipeError

__all__ = ["Images", "Task", "build", "check", "seed_for"]

Batch = Any


class Task(Protocol):
    """One learning problem, as the loop sees it."""

    model: nn.Module
    steps_per_epoch: int
    parts: tuple[str, ...]  # what is evaluated: "validation" where there is one, "test"
    metric: str  # what it is judged by
    mode: Literal["max", "min"]  # whether more of it is better

    def batches(self, epoch: int) -> Iterator[Batch]:
        """The training batches of an epoch: a function of the seed and the epoch alone."""
        ...

    def split(self, batch: Batch, parts: int) -> list[tuple[Batch, float]]:
        """The batch in parts, for gradient accumulation, and each part's share of it."""
        ...

    def loss(self, model: nn.Module, batch: Batch) -> tuple[Tensor, int]:
        """The mean loss, and over how many examples."""
        ...

    def refresh(self, epoch: int) -> Iterator[Any]:
        """Inputs from which BatchNorm statistics are taken: the training data, augmented."""
        ...

    def evaluate(self, model: nn.Module, part: str) -> dict[str, float]:
        """How well the model does, by several measures."""
        ...


def seed_for(seed: int, epoch: int, purpose: str) -> int:
    """A seed of its own for each use of randomness, so that an epoch needs no memory of another."""
    purposes = ("model", "order", "refresh", "noise in the network")
    return (seed * 1_000_003 + epoch) * len(purposes) + purposes.index(purpose)


def build(recipe: Recipe, seed: int, device: torch.device, data_dir: str | None) -> Task:
    """The task of a recipe."""
    return Images(recipe, seed, device, data_dir)


@lru_cache(maxsize=2)  # a worker trains many runs on the same data
def _prepared(plan: Data, data_dir: str | None) -> tuple[data.Dataset, dict[str, Any]]:
    """The data set and its parts. Which examples are held out or mislabelled depends on no seed."""
    dataset = data.load(plan.name, data_dir)
    train, test = dataset.train, dataset.test
    if plan.size is not None:
        if not isinstance(train, data.Images) or not isinstance(test, data.Images):
            raise RecipeError(f"data.size cannot be set for {plan.name}")
        train, test = data.resized(train, plan.size), data.resized(test, plan.size)
    if (plan.examples or 0) > len(train) or plan.validation >= len(train):
        raise RecipeError(
            f"{plan.name} has {len(train)} training examples: data.examples and data.validation must be fewer"
        )
    if plan.examples is not None:
        train = data.subset(train, plan.examples)
    parts: dict[str, Any] = {"test": test}
    if plan.validation:
        train, parts["validation"] = data.held_out(train, plan.validation)
    if plan.label_noise:  # in what is trained on: validation labels stay true
        train = data.with_label_noise(train, plan.label_noise, dataset.num_classes)
    parts["train"] = train
    return dataset, parts


def check(recipe: Recipe, data_dir: str | None) -> None:
    """Refuse what cannot be trained, before anything is: data, network, optimiser and average."""
    dataset, parts = _prepared(recipe.data, data_dir)
    with torch.device("meta"):
        network = models.build(recipe.model, dataset.num_classes, _input_shape(recipe, dataset))
    optimizers.build(recipe, network, -(-len(parts["train"]) // recipe.batch_size))


def _input_shape(recipe: Recipe, dataset: data.Dataset) -> tuple[int, int, int]:
    channels, height, width = dataset.input_shape
    return (channels, recipe.data.size or height, recipe.data.size or width)


class Images:
    """Classification of pictures."""

    metric = "accuracy"
    mode: Literal["max", "min"] = "max"

    def __init__(
        self, recipe: Recipe, seed: int, device: torch.device, data_dir: str | None
    ) -> None:
        self.recipe, self.seed, self.device = recipe, seed, device
        self.dataset, self._parts = _prepared(recipe.data, data_dir)
        self.parts: tuple[str, ...] = (
            ("validation", "test") if "validation" in self._parts else ("test",)
        )
        shape = _input_shape(recipe, self.dataset)
        torch.manual_seed(seed_for(seed, 0, "model"))
        network = models.build(recipe.model, self.dataset.num_classes, shape)
        # Convolutions are faster so; what they compute is the same.
        self.model = network.to(device).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.steps_per_epoch = -(-len(self._parts["train"]) // recipe.batch_size)

    def _read(self, part: str, batch_size: int, **kwargs: Any) -> Iterator[tuple[Tensor, Tensor]]:
        for x, y in data.batches(
            self._parts[part],
            batch_size,
            mean=self.dataset.mean,
            std=self.dataset.std,
            device=self.device,
            workers=self.recipe.data.workers,
            **kwargs,
        ):
            yield x.contiguous(memory_format=torch.channels_last), y

    def _in_order_of(self, purpose: str, epoch: int) -> Iterator[tuple[Tensor, Tensor]]:
        generator = torch.Generator().manual_seed(seed_for(self.seed, epoch, purpose))
        return self._read(
            "train",
            self.recipe.batch_size,
            augment=self.recipe.data.augment,
            pad=self.recipe.data.pad,
            shuffle=generator,
        )

    def batches(self, epoch: int) -> Iterator[Batch]:
        return self._in_order_of("order", epoch)

    def split(self, batch: Batch, parts: int) -> list[tuple[Batch, float]]:
        if parts == 1:
            return [(batch, 1.0)]
        x, y = batch
        return [((a, b), len(b) / len(y)) for a, b in zip(x.chunk(parts), y.chunk(parts))]

    def loss(self, model: nn.Module, batch: Batch) -> tuple[Tensor, int]:
        x, y = batch
        return F.cross_entropy(model(x), y), len(y)

    def refresh(self, epoch: int) -> Iterator[Any]:
        return self._in_order_of("refresh", epoch)

    @torch.no_grad()
    def evaluate(self, model: nn.Module, part: str) -> dict[str, float]:
        model.eval()
        top = min(5, self.dataset.num_classes)
        totals = torch.zeros(3, dtype=torch.float64, device=self.device)
        for x, y in self._read(part, max(self.recipe.batch_size, 250)):
            scores = model(x).float()
            hits = scores.topk(top).indices == y[:, None]
            loss = F.cross_entropy(scores, y, reduction="sum").double()
            totals += torch.stack([loss, hits[:, 0].sum(), hits.sum()])
        loss_, first, among = (totals / len(self._parts[part])).tolist()
        return {"accuracy": 100 * first, "top5": 100 * among, "loss": loss_}
