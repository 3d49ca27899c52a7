"""Image classification."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from itertools import islice
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from typing_extensions import override

from gadam._modes import preserved_modes
from gadam.runs.recipe import Data, Mode, Recipe, RecipeError
from gadam.train import data, lstm, models, own_network, transformer
from gadam.train.data import text
from gadam.train.tasks.batch import divided
from gadam.train.tasks.task import Part, Task, normalizes_batches, part_of, seed_for

__all__ = ["ImageTask", "LabeledImages", "build_classifier"]

LabeledImages = tuple[Tensor, Tensor]  # normalized images and labels


class ImageTask(Task[LabeledImages]):
    """Image classification.

    Args:
        recipe: The recipe.
        data_dir: The folder of all data sets.
    """

    metric = "accuracy"
    mode: Mode = "max"

    def __init__(self, recipe: Recipe, data_dir: str | None = None) -> None:
        self.recipe, self._data_dir = recipe, data_dir
        self.epochs = recipe.epochs
        self.dataset, self._splits = _splits_of(recipe, data_dir)
        self.splits: tuple[str, ...] = (
            ("validation", "test") if "validation" in self._splits else ("test",)
        )
        self.fingerprint, self.notices = self.dataset.fingerprint, self.dataset.notices
        if self.dataset.validation is not None and recipe.data.validation >= 1:
            self.notices += (
                f"{recipe.data.name} has its own validation images. data.validation="
                f"{recipe.data.validation} is not used.",
            )
        if self.dataset.fingerprint and self.dataset.validation is None and len(self.splits) == 2:
            held_out, kept = len(self._splits["validation"]), len(self._splits["train"])
            self.notices += (
                f"{held_out:,} of the {held_out + kept:,} training images are held out for "
                "validation.",
            )

    @override
    def setup(self, seed: int, device: torch.device) -> None:
        self.seed, self.device = seed, device
        torch.manual_seed(seed_for(seed, 0, "model"))
        # Weights are drawn on the CPU, so that they do not depend on the device.
        network = build_classifier(self.recipe, self._data_dir, torch.device("cpu"))
        # Convolutions are faster with the channels last, with the same results. But a user's
        # network may call `view`, which needs the usual order.
        is_own = own_network.is_own(self.recipe.model)
        self._format = torch.contiguous_format if is_own else torch.channels_last
        self.model: nn.Module = network.to(device).to(
            memory_format=self._format  # type: ignore[call-overload]
        )

    def _parts(
        self,
        split: str,
        batch_size: int,
        *,
        augment: bool = False,
        shuffle: torch.Generator | None = None,
        whole: bool = False,
    ) -> Iterator[Part[LabeledImages]]:
        """Iterate over this rank's part of each batch, or over whole batches."""
        shares: list[float] = []

        def select(places: Tensor) -> Tensor:
            mine, share = (places, 1.0) if whole else part_of(self, places, divided)
            shares.append(share)
            return mine

        found = data.batches(
            self._splits[split],
            batch_size,
            mean=self.dataset.mean,
            std=self.dataset.std,
            augment=augment,
            pad=self.recipe.data.pad,
            shuffle=shuffle,
            device=self.device,
            workers=self.recipe.data.workers,
            select=select,
        )
        for (x, y), share in zip(found, shares):
            yield Part((x.contiguous(memory_format=self._format), y), share)

    def _batches(self, split: str, batch_size: int) -> Iterator[LabeledImages]:
        return (part.batch for part in self._parts(split, batch_size, whole=True))

    @override
    def parts(
        self, epoch: int, purpose: Literal["order", "refresh"] = "order", whole: bool = False
    ) -> Iterator[Part[LabeledImages]]:
        found = self._parts(
            "train",
            self.recipe.batch_size,
            augment=self.recipe.data.augment,
            shuffle=torch.Generator().manual_seed(seed_for(self.seed, epoch, purpose)),
            whole=whole,
        )
        return islice(found, self.steps(epoch))

    @override
    def steps(self, epoch: int) -> int:
        full, rest = divmod(len(self._splits["train"]), self.recipe.batch_size)
        # BatchNorm cannot normalize a single image.
        return full + (rest > (1 if full and normalizes_batches(self.model) else 0))

    @override
    def batches(self, epoch: int) -> Iterator[LabeledImages]:
        return (part.batch for part in self.parts(epoch, "order", whole=True))

    @override
    def loss(self, model: nn.Module, batch: LabeledImages) -> tuple[Tensor, int]:
        x, y = batch
        return F.cross_entropy(model(x), y), len(y)

    @override
    def refresh(self, epoch: int) -> Iterator[LabeledImages]:
        return (part.batch for part in self.parts(epoch, "refresh", whole=True))

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
        for x, y in self._batches(split, self._rows_at_once):
            yield model(x).float(), y

    @property
    def _rows_at_once(self) -> int:
        return max(self.recipe.batch_size, 250)

    @override
    @torch.no_grad()
    def evaluate(self, model: nn.Module, split: str) -> dict[str, float]:
        top = min(5, self.dataset.num_classes)
        totals = torch.zeros(3, dtype=torch.float64, device=self.device)
        with preserved_modes(model):
            model.eval()
            for part in self._parts(split, self._rows_at_once):
                x, y = part.batch
                scores = model(x).float()
                if not part.share:
                    continue  # another rank counts these rows
                hits = scores.topk(top).indices == y[:, None]
                loss = F.cross_entropy(scores, y, reduction="sum").double()
                totals += torch.stack([loss, hits[:, 0].sum(), hits.sum()])
        mean_loss, top1, top5 = (self.ranks.sum(totals) / len(self._splits[split])).tolist()
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
    dataset, _ = _splits_of(recipe, data_dir)
    with device:
        channels, height, width = dataset.input_shape
        return models.build(recipe.model, dataset.num_classes, (channels, height, width))


def _splits_of(
    recipe: Recipe, data_dir: str | None
) -> tuple[data.Dataset, dict[str, data.ImageSplit]]:
    path = data.own_path(recipe.data.name, data_dir)
    return _load_splits(recipe.data, data_dir, "" if path is None else data.own.version(path))


@lru_cache(maxsize=2)  # a worker process trains many runs on the same data
def _load_splits(
    settings: Data, data_dir: str | None, version: str = ""
) -> tuple[data.Dataset, dict[str, data.ImageSplit]]:
    """Load a data set and derive its splits.

    The images that are held out or get noisy labels are the same for every seed of a run. The
    ``version`` makes own data that has changed since be loaded again.
    """
    dataset = data.load(settings.name, data_dir, settings.size)
    train = dataset.train
    if (settings.examples or 0) > len(train) or settings.validation >= len(train):
        raise RecipeError(
            f"{settings.name} has {len(train)} training examples. Use fewer for data.examples and "
            "data.validation."
        )
    if settings.examples is not None:
        train = data.subset(train, settings.examples)
    splits: dict[str, data.ImageSplit] = {"test": dataset.test}
    if dataset.validation is not None:
        splits["validation"] = dataset.validation
    elif settings.validation >= 1:
        train, splits["validation"] = data.held_out(train, int(settings.validation))
    elif settings.validation > 0:
        train, splits["validation"] = data.held_out_fraction(train, settings.validation)
    if settings.label_noise:  # in the training labels only: validation labels stay correct
        train = data.with_label_noise(train, settings.label_noise, dataset.num_classes)
    splits["train"] = train
    return dataset, splits
