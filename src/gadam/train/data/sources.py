"""The image data sets: their names, where their files are, and how to load them."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from importlib import resources
from pathlib import Path

import torch

from gadam._names import did_you_mean, find, is_written_as_path
from gadam.train.data import own
from gadam.train.data.dataset import Dataset, Images, ImageSplit
from gadam.train.data.errors import DataError
from gadam.train.data.formats import (
    Arrays,
    UnreadableFile,
    naming,
    read_cifar_binary,
    read_idx_pair,
    read_image_folder,
    read_npz,
    read_pickle,
)
from gadam.train.data.splits import resized

__all__ = [
    "canonical",
    "data_root",
    "folder_of",
    "how_to_get",
    "load",
    "locate",
    "names",
    "own_path",
]

IF_ELSEWHERE = "If it is elsewhere, pass --data-dir or set GADAM_DATA."


def names() -> list[str]:
    """Return the names of the data sets that :func:`load` knows."""
    return list(_SOURCES)


def load(name: str, data_dir: str | Path | None = None, size: int | None = None) -> Dataset:
    """Load a data set.

    Args:
        name: One of :func:`names`, where case and punctuation do not matter. Or images of your own:
            the path of a folder or an ``.npz`` file as in :func:`gadam.train.data.own.load`, or its
            name below ``data_dir``.
        data_dir: The folder of all data sets. The default is the environment variable
            ``GADAM_DATA``, then ``~/.cache/gadam/data``. fashion-mini is part of the package.
        size: Resize the images to this height and width.

    Returns:
        The data set.

    Raises:
        DataError: The name is unknown, or a file is missing or damaged.

    Example:
        >>> data = load("fashion-mini")
        >>> len(data.train), len(data.test), data.num_classes, data.input_shape
        (5000, 2000, 10, (1, 28, 28))
    """
    if (path := own_path(name, data_dir)) is not None:
        return own.load(path, size)
    name = canonical(name)
    source, root = _SOURCES[name], folder_of(name, data_dir)
    try:
        train, test, classes = source.read(root)
    except UnreadableFile as error:
        raise DataError(f"{error}. {how_to_get(name, root)}") from error.__cause__
    if size is not None:
        train, test = resized(train, size), resized(test, size)
    return Dataset(name, train, test, classes, source.mean, source.std)


def own_path(name: str, data_dir: str | Path | None = None) -> Path | None:
    """Return the file or folder of images of your own, or None for a published data set.

    Args:
        name: As for :func:`load`.
        data_dir: As for :func:`load`.
    """
    is_known = _find(name)[0] is not None and not is_written_as_path(name)
    return None if is_known else locate(name, data_root(data_dir))


def canonical(name: str, *, published: bool = False) -> str:
    """Return the name as :func:`names` spells it.

    Args:
        name: A name as the user typed it.
        published: True if images of the user's own make no sense, and errors do not suggest them.

    Raises:
        DataError: The name is unknown.
    """
    found, near = _find(name)
    if found is not None and not is_written_as_path(name):
        return found
    if is_written_as_path(name):
        raise DataError(
            f"There is no file or folder {Path(name).expanduser()}. Pass a folder with a subfolder "
            "of images per class, or an .npz file."
        )
    choices = f"Use one of {', '.join(names())}"
    if not published:
        folders = (path.name for path in Path.cwd().glob("*") if path.is_dir())
        near = near or did_you_mean(name, folders)
        choices += ", or the path of your own images"
    hint = f"Did you mean {near}?" if near else f"{choices}."
    raise DataError(f"Unknown data set {name!r}. {hint}")


def _find(name: str) -> tuple[str | None, str | None]:
    return find(name, {known: known for known in _SOURCES})


def locate(name: str, root: Path) -> Path | None:
    """Return the file or folder that a name stands for, or None if there is none.

    Args:
        name: A path, or a name below ``root``.
        root: The folder of all data sets.
    """
    places = (Path(name).expanduser(), root / name)
    return next((place for place in places if name and place.exists()), None)


def data_root(data_dir: str | Path | None = None) -> Path:
    """Return the folder of all data sets.

    Args:
        data_dir: As for :func:`load`.
    """
    return Path(data_dir or os.environ.get("GADAM_DATA") or "~/.cache/gadam/data").expanduser()


def folder_of(name: str, data_dir: str | Path | None = None) -> Path:
    """Return the folder that :func:`load` searches for a data set.

    Args:
        name: The canonical name.
        data_dir: As for :func:`load`.
    """
    if name == "fashion-mini":
        return Path(str(resources.files("gadam.train.data"))) / "fashion_mini"
    return data_root(data_dir)


def how_to_get(name: str, root: Path) -> str:
    """Return sentences that tell the user how to get a data set.

    Args:
        name: The canonical name.
        root: The folder of all data sets.
    """
    if name == "fashion-mini":
        return "It is part of the package. Reinstall gadam."
    account = "Download it with your own account at image-net.org"
    source = _SOURCES[name]
    if isinstance(source, _ImageFolders):
        place = root / "imagenet" / "{train,val}" / "<class>" / "*.JPEG"
        return f"{account}, and store the images as {place}. {IF_ELSEWHERE}"
    if isinstance(source, _Relabeled):
        return (
            "Its images are those of CIFAR-100: run `gadam data cifar100`. Its labels are in "
            "CIFAR-100_human.pt at github.com/UCSC-REAL/cifar-10-100n: write the array noisy_label "
            f"to {root / source.labels}, one byte per image. {IF_ELSEWHERE}"
        )
    place = root / source.layouts[0].folders[0]
    if name == "imagenet32":
        files = "train_data_batch_*.npz and val_data.npz"
        return f"{account}, and put {files} into {place}. {IF_ELSEWHERE}"
    return f"Run `gadam data {name}`, or put the official files into {place}. {IF_ELSEWHERE}"


# --------------------------------------------------------------------------------- kinds of sources


@dataclass(frozen=True)
class _Layout:
    """One of the ways in which the files of a data set are arranged on disk.

    Attributes:
        folders: The folders to search, below the folder of all data sets.
        train: Glob patterns of the training files.
        test: Glob patterns of the test files.
        read: The reader of a file.
    """

    folders: tuple[str, ...]
    train: tuple[str, ...]
    test: tuple[str, ...]
    read: Callable[[Path], Arrays]

    def find(self, folder: Path) -> tuple[list[Path], list[Path], list[Path]]:
        """Return the training files, the test files, and the patterns without a file."""
        found = {pattern: _files(folder, pattern) for pattern in (*self.train, *self.test)}
        missing = [folder / pattern for pattern, files in found.items() if not files]
        train, test = (
            [file for pattern in patterns for file in found[pattern]]
            for patterns in (self.train, self.test)
        )
        return train, test, missing


def _files(folder: Path, pattern: str) -> list[Path]:
    files = (path for path in folder.glob(pattern) if path.is_file())
    return sorted(files, key=lambda path: (len(path.name), path.name))  # 2 before 10


@dataclass(frozen=True)
class _Arrays:
    """A data set of small images, loaded into memory.

    Attributes:
        layouts: The supported layouts, in order of preference.
        classes: The number of classes.
        mean: The published mean of each channel.
        std: The published standard deviation of each channel.
        may_be_sampled: The files may be a sample with fewer classes.
    """

    layouts: tuple[_Layout, ...]
    classes: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    may_be_sampled: bool = False

    def read(self, root: Path) -> tuple[Images, Images, int]:
        """Return the training images, the test images and the number of classes."""
        incomplete = []
        for layout in self.layouts:
            for folder in (*layout.folders, ""):
                train, test, missing = layout.find(root / folder)
                if not missing:
                    splits = [self._concatenate(layout, files) for files in (train, test)]
                    highest = max(int(split.labels.max()) for split in splits)
                    classes = highest + 1 if self.may_be_sampled else self.classes
                    return splits[0], splits[1], classes
                incomplete.append((len(missing) - len(train) - len(test), missing[0]))
        # Name what is missing in the most complete folder; min returns the first of equals.
        raise UnreadableFile(f"{min(incomplete, key=lambda place: place[0])[1]} is missing")

    def _concatenate(self, layout: _Layout, files: list[Path]) -> Images:
        images, labels = zip(*(self._read_file(layout, file) for file in files))
        return Images(torch.cat(images), torch.cat(labels))

    def _read_file(self, layout: _Layout, file: Path) -> Arrays:
        with naming(file):
            images, labels = layout.read(file)
            if len(images) != len(labels) or not len(labels):
                raise ValueError(f"{len(images)} images but {len(labels)} labels")
            if labels.min() < 0 or labels.max() >= self.classes:
                raise ValueError("a label is out of range")
        return images, labels


@dataclass(frozen=True)
class _ImageFolders:
    """ImageNet: folders ``train`` and ``val``, each with one subfolder per class.

    Attributes:
        mean: The published mean of each channel.
        std: The published standard deviation of each channel.
    """

    mean: tuple[float, ...]
    std: tuple[float, ...]

    def read(self, root: Path) -> tuple[ImageSplit, ImageSplit, int]:
        """Return the training images, the test images and the number of classes."""
        places = [root / name for name in ("imagenet", "", "imagenet-sample")]
        place = next((place for place in places if (place / "train").is_dir()), places[0])
        folders = place / "train", place / "val"
        for folder in folders:
            if not folder.is_dir():
                raise UnreadableFile(f"{folder} is missing")
        classes, val_classes = (
            sorted(path.name for path in folder.iterdir() if path.is_dir()) for folder in folders
        )
        if classes != val_classes:
            raise UnreadableFile(f"{folders[1]} does not have the same classes as {folders[0]}")
        train, test = (read_image_folder(folder, classes) for folder in folders)
        return train, test, len(classes)


@dataclass(frozen=True)
class _Relabeled:
    """A data set with other labels for its training images. The test labels stay.

    Attributes:
        original: The data set.
        labels: The file of the labels below the folder of all data sets, one byte per image.
    """

    original: _Arrays
    labels: str

    @property
    def mean(self) -> tuple[float, ...]:
        """The published mean of each channel."""
        return self.original.mean

    @property
    def std(self) -> tuple[float, ...]:
        """The published standard deviation of each channel."""
        return self.original.std

    def read(self, root: Path) -> tuple[ImageSplit, ImageSplit, int]:
        """Return the training images, the test images and the number of classes."""
        train, test, classes = self.original.read(root)
        file = root / self.labels
        with naming(file):
            labels = torch.tensor([*file.read_bytes()])
            if len(labels) != len(train):
                raise ValueError(f"{len(labels):,} labels for {len(train):,} training images")
            if labels.max() >= classes:
                raise ValueError("a label is out of range")
        return replace(train, labels=labels), test, classes


# --------------------------------------------------------------------------------------- the table


def _idx_layouts(*folders: str) -> tuple[_Layout, ...]:
    train, test = "train-images-idx3-ubyte", "t10k-images-idx3-ubyte"
    return tuple(
        _Layout(folders, (train + end,), (test + end,), read_idx_pair) for end in ("", ".gz")
    )


_IMAGENET = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
_FASHION = (0.2860,), (0.3530,)
_CIFAR10_BATCHES = tuple(f"data_batch_{number}" for number in range(1, 6))
_CIFAR100 = _Arrays(
    (
        _Layout(
            ("cifar-100-binary",),
            ("train.bin",),
            ("test.bin",),
            partial(read_cifar_binary, label_bytes=2),
        ),
        _Layout(
            ("cifar-100-python",),
            ("train",),
            ("test",),
            partial(read_pickle, key="fine_labels"),
        ),
    ),
    100,
    (0.5071, 0.4865, 0.4409),
    (0.2673, 0.2564, 0.2762),
)

_SOURCES: dict[str, _Arrays | _Relabeled | _ImageFolders] = {
    "fashion-mini": _Arrays(_idx_layouts(), 10, *_FASHION),
    "cifar10": _Arrays(
        (
            _Layout(
                ("cifar-10-batches-bin",),
                tuple(f"{name}.bin" for name in _CIFAR10_BATCHES),
                ("test_batch.bin",),
                partial(read_cifar_binary, label_bytes=1),
            ),
            _Layout(
                ("cifar-10-batches-py",),
                _CIFAR10_BATCHES,
                ("test_batch",),
                partial(read_pickle, key="labels"),
            ),
        ),
        10,
        (0.4914, 0.4822, 0.4465),
        (0.2470, 0.2435, 0.2616),
    ),
    "cifar100": _CIFAR100,
    # The labels of human annotators, 40% of them wrong (Wei et al., 2022, arXiv 2110.12088).
    "cifar100n": _Relabeled(_CIFAR100, "cifar-100n/fine_labels.bin"),
    "mnist": _Arrays(_idx_layouts("MNIST/raw", "mnist"), 10, (0.1307,), (0.3081,)),
    "fashion-mnist": _Arrays(_idx_layouts("FashionMNIST/raw", "fashion-mnist"), 10, *_FASHION),
    "imagenet32": _Arrays(
        (
            _Layout(("imagenet32",), ("train_data_batch_*.npz",), ("val_data.npz",), read_npz),
            _Layout(
                ("imagenet32",),
                ("train_data_batch_*[0-9]",),
                ("val_data",),
                partial(read_pickle, key="labels", first_label=1),
            ),
        ),
        1000,
        *_IMAGENET,
        may_be_sampled=True,
    ),
    "imagenet": _ImageFolders(*_IMAGENET),
}
