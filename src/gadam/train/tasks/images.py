"""Image classification."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from typing_extensions import override

from gadam.runs.recipe import Data, Recipe, RecipeError
from gadam.train import data, lstm, models, transformer
from gadam.train.data import text
from gadam.train.tasks.task import Purpose, Task, seed_for

__all__ = ["ImageTask", "LabeledImages", "build_classifier"]

LabeledImages = tuple[Tensor, Tensor]  # normalized images and labels


class ImageTask(Task[LabeledImages]):
    """Image classification.

    Args:
        recipe: The recipe.
        seed: Determines the initial weights, the order of the data and its augmentation.
        device: The device of the model and the batches.
        data_dir: The folder of all data sets.
    """

    metric = "accuracy"
    mode: Literal["max", "min"] = "max"
    notices: tuple[str, ...] = ()

    def __init__(
        self, recipe: Recipe, seed: int, device: torch.device, data_dir: str | None
    ) -> None:
        self.recipe, self.seed, self.device = recipe, seed, device
        self.dataset, self._splits = _load_splits(recipe.data, data_dir)
        self.splits: tuple[str, ...] = (
            ("validation", "test") if "validation" in self._splits else ("test",)
        )
        torch.manual_seed(seed_for(seed, 0, "model"))
        # Weights are drawn on the CPU, so that they do not depend on the device.
        network = build_classifier(recipe, data_dir, torch.device("cpu"))
        # Convolutions are faster in this memory format, with the same results.
        self.model: nn.Module = network.to(device).to(
            memory_format=torch.channels_last  # type: ignore[call-overload]
        )

    def _batches(
        self,
        split: str,
        batch_size: int,
        *,
        augment: bool = False,
        shuffle: torch.Generator | None = None,
    ) -> Iterator[LabeledImages]:
        for x, y in data.batches(
            self._splits[split],
            batch_size,
            mean=self.dataset.mean,
            std=self.dataset.std,
            augment=augment,
            pad=self.recipe.data.pad,
            shuffle=shuffle,
            device=self.device,
            workers=self.recipe.data.workers,
        ):
            yield x.contiguous(memory_format=torch.channels_last), y

    def _shuffled(self, purpose: Purpose, epoch: int) -> Iterator[LabeledImages]:
        generator = torch.Generator().manual_seed(seed_for(self.seed, epoch, purpose))
        return self._batches(
            "train", self.recipe.batch_size, augment=self.recipe.data.augment, shuffle=generator
        )

    @override
    def steps(self, epoch: int) -> int:
        return -(-len(self._splits["train"]) // self.recipe.batch_size)

    @override
    def batches(self, epoch: int) -> Iterator[LabeledImages]:
        return self._shuffled("order", epoch)

    @override
    def rate_factor(self, batch: LabeledImages) -> float:
        return 1.0

    @override
    def micro_batches(self, batch: LabeledImages, count: int) -> list[tuple[LabeledImages, float]]:
        if count == 1:
            return [(batch, 1.0)]
        x, y = batch
        return [((a, b), len(b) / len(y)) for a, b in zip(x.chunk(count), y.chunk(count))]

    @override
    def loss(self, model: nn.Module, batch: LabeledImages) -> tuple[Tensor, int]:
        x, y = batch
        return F.cross_entropy(model(x), y), len(y)

    @override
    def refresh(self, epoch: int) -> Iterator[LabeledImages]:
        return self._shuffled("refresh", epoch)

    @override
    def training_data(self, examples: int | None = None) -> Iterator[LabeledImages]:
        left = len(self._splits["train"]) if examples is None else examples
        for x, y in self._batches("train", self.recipe.batch_size):
            if left <= 0:
                return
            yield x[:left], y[:left]
            left -= len(y)

    @override
    @torch.no_grad()
    def scores(self, model: nn.Module, split: str) -> Iterator[tuple[Tensor, Tensor]]:
        model.eval()
        for x, y in self._batches(split, max(self.recipe.batch_size, 250)):
            yield model(x).float(), y

    @override
    @torch.no_grad()
    def evaluate(self, model: nn.Module, split: str) -> dict[str, float]:
        top = min(5, self.dataset.num_classes)
        totals = torch.zeros(3, dtype=torch.float64, device=self.device)
        for scores, y in self.scores(model, split):
            hits = scores.topk(top).indices == y[:, None]
            loss = F.cross_entropy(scores, y, reduction="sum").double()
            totals += torch.stack([loss, hits[:, 0].sum(), hits.sum()])
        mean_loss, top1, top5 = (totals / len(self._splits[split])).tolist()
        return {"accuracy": 100 * top1, "top5": 100 * top5, "loss": mean_loss}


def build_classifier(recipe: Recipe, data_dir: str | None, device: torch.device) -> nn.Module:
    """Build the network of a recipe for images, with new weights.

    Args:
        recipe: The recipe.
        data_dir: The folder of all data sets.
        device: The device on which weights are drawn, or "meta" for none.

    Raises:
        RecipeError: The recipe's network or data is not for images.
    """
    if lstm.canonical(recipe.model) or transformer.canonical(recipe.model):
        raise RecipeError(
            f"{recipe.model} is a language model. Use a recipe for texts, such as lm-mini."
        )
    if text.canonical(recipe.data.name) is not None:
        raise RecipeError(f"{recipe.data.name} is a text. Use a recipe for texts, such as lm-mini.")
    dataset, _ = _load_splits(recipe.data, data_dir)
    channels, height, width = dataset.input_shape
    shape = (channels, recipe.data.size or height, recipe.data.size or width)
    with device:
        return models.build(recipe.model, dataset.num_classes, shape)


@lru_cache(maxsize=2)  # a worker process trains many runs on the same data
def _load_splits(
    settings: Data, data_dir: str | None
) -> tuple[data.Dataset, dict[str, data.ImageSplit]]:
    """Load a data set and derive its splits.

    The images that are held out or get noisy labels are the same for every seed of a run.
    """
    dataset = data.load(settings.name, data_dir)
    train, test = dataset.train, dataset.test
    if settings.size is not None:
        if not isinstance(train, data.Images) or not isinstance(test, data.Images):
            raise RecipeError(f"data.size cannot be set for {settings.name}. Leave it at none.")
        train, test = data.resized(train, settings.size), data.resized(test, settings.size)
    if (settings.examples or 0) > len(train) or settings.validation >= len(train):
        raise RecipeError(
            f"{settings.name} has {len(train)} training examples. Use fewer for data.examples and "
            "data.validation."
        )
    if settings.examples is not None:
        train = data.subset(train, settings.examples)
    splits: dict[str, data.ImageSplit] = {"test": test}
    if settings.validation:
        train, splits["validation"] = data.held_out(train, settings.validation)
    if settings.label_noise:  # in the training labels only: validation labels stay correct
        train = data.with_label_noise(train, settings.label_noise, dataset.num_classes)
    splits["train"] = train
    return dataset, splits
