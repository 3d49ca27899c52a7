"""Labeled images, in a tensor or in files, and data sets of them."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from torch import Tensor
from torch.utils.data import DataLoader

__all__ = ["Dataset", "DecodeRequest", "ImageFiles", "ImageSplit", "Images", "SplitT"]

# A batch to decode: the seed of its augmentation (None for no augmentation) and its files' indices.
DecodeRequest = tuple[int | None, list[int]]


@dataclass(frozen=True, eq=False)
class Images:
    """Images in one tensor.

    Attributes:
        images: The pixels, uint8, (N, C, H, W).
        labels: The classes, int64, (N,).
    """

    images: Tensor
    labels: Tensor

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def shape(self) -> tuple[int, ...]:
        """Channels, height and width."""
        return tuple(self.images.shape[1:])


@dataclass(frozen=True, eq=False)
class ImageFiles:
    """Images in files, decoded on demand.

    Attributes:
        files: One file per image.
        labels: The classes, int64, (N,).
        size: Height and width of the decoded images.
    """

    files: tuple[Path, ...]
    labels: Tensor
    size: int = 224
    # Idle loaders by number of workers, with the requests that they read. Starting workers is slow,
    # so a loader is reused in the next epoch.
    _idle_loaders: dict[int, tuple[DataLoader[Tensor | str], list[DecodeRequest]]] = field(
        default_factory=dict, init=False, repr=False
    )

    def __len__(self) -> int:
        return len(self.files)

    @property
    def shape(self) -> tuple[int, ...]:
        """Channels, height and width of the decoded images."""
        return (3, self.size, self.size)


ImageSplit = Images | ImageFiles
SplitT = TypeVar("SplitT", bound=ImageSplit)


@dataclass(frozen=True, eq=False)
class Dataset:
    """Training and test images.

    Attributes:
        name: The canonical name of the data set.
        train: The training images.
        test: The test images.
        num_classes: The number of classes. Labels are below it.
        mean: The mean of each channel, for pixels in [0, 1].
        std: The standard deviation of each channel, for pixels in [0, 1].
        validation: The validation images, if the data set has its own.
        notices: Sentences that tell the user how the files were understood.
        fingerprint: A hash that changes with the files. Empty for the published data sets.
    """

    name: str
    train: ImageSplit
    test: ImageSplit
    num_classes: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    validation: ImageSplit | None = None
    notices: tuple[str, ...] = ()
    fingerprint: str = ""

    @property
    def input_shape(self) -> tuple[int, ...]:
        """Channels, height and width of an image."""
        return self.train.shape
