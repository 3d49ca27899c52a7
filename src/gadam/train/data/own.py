"""Your own images: a folder with a subfolder per class, or a NumPy archive.

A folder is either divided into ``train``, ``val`` and ``test``, or gadam holds out test images. The
images become one tensor of bytes if they fit into memory. Otherwise they stay files.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from gadam.train.data.dataset import Dataset, ImageFiles, Images, ImageSplit
from gadam.train.data.errors import DataError, import_extra
from gadam.train.data.formats import (
    IMAGE_SUFFIXES,
    UnreadableFile,
    is_gray,
    naming,
    open_image,
    read_arrays,
)
from gadam.train.data.splits import held_out_fraction, resized

if TYPE_CHECKING:
    import numpy as np

__all__ = ["load", "version"]

TEST_FRACTION = 0.2  # held out if there are no test images
DEFAULT_SIZE = 64  # of images that differ in size
LARGEST_TENSOR = 2**29  # bytes; every training process has its own copy

_SPLITS = {
    "train": "train",
    "training": "train",
    "val": "validation",
    "valid": "validation",
    "validation": "validation",
    "test": "test",
    "testing": "test",
}
_LAYOUT = "PATH/CLASS/*.png or PATH/train/CLASS/*.png"


def load(path: Path, size: int | None = None) -> Dataset:
    """Load images of your own.

    Args:
        path: A folder with a subfolder per class; or one with ``train`` and, if there are any,
            ``val`` and ``test``, each with a subfolder per class; or an ``.npz`` file with x_train
            and y_train and, if there are any, x_val, y_val, x_test and y_test.
        size: Height and width. The default is that of the images, or 64 if they differ.

    Returns:
        The data set. Without test images, it holds out a fifth of the training images, the same
        ones every time. Its notices tell what was decided.

    Raises:
        DataError: The data is incomplete, contradictory or damaged.
    """
    if path.is_dir():
        return _from_folder(path, size)
    if path.suffix.lower() == ".npz":
        return _from_archive(path, size)
    kind = "a text" if path.suffix.lower() == ".txt" else "neither a folder nor an .npz file"
    raise DataError(f"{path} is {kind}. For images, pass a folder ({_LAYOUT}) or an .npz file.")


def version(path: Path) -> str:
    """Return a text that changes if anything in a file or folder does, without reading it.

    Args:
        path: The file or folder.
    """
    files = [path] if path.is_file() else sorted(path.rglob("*"))
    digest = hashlib.sha256()
    for file in files:
        status = file.stat()
        digest.update(f"{file.absolute()}\0{status.st_size}\0{status.st_mtime_ns}\0".encode())
    return digest.hexdigest()


def _dataset(
    path: Path,
    splits: Mapping[str, ImageSplit],
    classes: int,
    fingerprint: str,
    notices: list[str],
) -> Dataset:
    """Hold out test images if there are none, and measure the training images."""
    if classes < 2:
        raise DataError(f"{path} has only one class. A classifier needs at least two.")
    train, test = splits["train"], splits.get("test")
    if test is None:
        train, test = held_out_fraction(train, TEST_FRACTION)
        if not len(test):
            raise DataError(f"{path} has one image per class. Add images, or a test set.")
        notices = [
            *notices,
            f"{path} has no test images. {len(test):,} of its {len(train) + len(test):,} training "
            "images are held out for the test.",
        ]
    mean, std = _statistics(train)
    return Dataset(
        str(path),
        train,
        test,
        classes,
        mean,
        std,
        splits.get("validation"),
        tuple(notices),
        fingerprint,
    )


def _statistics(split: ImageSplit) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return the mean and standard deviation of each channel, for pixels in [0, 1]."""
    if isinstance(split, ImageFiles):  # a sample is precise enough
        files = split.files[:: max(1, len(split) // 500)]
        images = _decode(files, (split.size, split.size), 3)
    else:
        images = split.images
    values = torch.arange(256, dtype=torch.float64) / 255
    means, stds = [], []
    for channel in images.unbind(1):
        share = torch.bincount(channel.flatten(), minlength=256).double() / channel.numel()
        mean = (share * values).sum()
        means.append(mean.item())
        stds.append((share * (values - mean).square()).sum().sqrt().item())
    # A constant channel must not be divided by zero.
    return tuple(means), tuple(max(std, 1 / 255) for std in stds)


# ---------------------------------------------------------------------------------- image folders


def _from_folder(path: Path, size: int | None) -> Dataset:
    folders = _split_folders(path)
    classes = sorted(_subfolders(folders["train"]))
    _require_equal_classes(folders, classes)
    listed = {split: _list(folder, classes) for split, folder in folders.items()}
    digest = hashlib.sha256()
    for files, _ in listed.values():
        for file in files:
            digest.update(f"{file.relative_to(path)}\0{file.stat().st_size}\0".encode())
    everything = [file for files, _ in listed.values() for file in files]
    shape, channels, notices = _choose_shape(path, everything, size)
    splits: dict[str, ImageSplit]
    if _fits(len(everything), channels, shape):
        splits = {
            split: Images(_decode(files, shape, channels), labels)
            for split, (files, labels) in listed.items()
        }
    else:
        splits = {
            split: ImageFiles(files, labels, shape[0]) for split, (files, labels) in listed.items()
        }
    return _dataset(path, splits, len(classes), digest.hexdigest(), notices)


def _split_folders(path: Path) -> dict[str, Path]:
    """Return the folder of each split. Without splits, the whole folder is for training."""
    found: dict[str, Path] = {}
    for name, folder in _subfolders(path).items():
        split = _SPLITS.get(name.lower())
        if split is not None and _subfolders(folder):  # otherwise, it is a class of that name
            if split in found:
                raise DataError(
                    f"{path} has two {split} folders, {found[split].name} and {name}. Remove one."
                )
            found[split] = folder
    if "train" in found:
        return found
    if found:
        folder = next(iter(found.values()))
        raise DataError(f"{path} has the folder {folder.name} but no folder train. Add it.")
    return {"train": path}


def _subfolders(path: Path) -> dict[str, Path]:
    try:
        entries = sorted(path.iterdir())
    except OSError as error:
        raise DataError(f"Cannot read {path} ({error.strerror}).") from None
    return {p.name: p for p in entries if p.is_dir() and not p.name.startswith((".", "__"))}


def _images_in(folder: Path) -> list[Path]:
    return sorted(
        path
        for path in folder.rglob("*")
        if path.suffix.lower() in IMAGE_SUFFIXES
        and not any(part.startswith(".") for part in path.relative_to(folder).parts)
    )


def _require_equal_classes(folders: Mapping[str, Path], classes: list[str]) -> None:
    train = folders["train"]
    if not classes:
        if any(path.suffix.lower() == ".txt" for path in train.iterdir()):
            raise DataError(f"{train} contains text. Use a recipe for texts, such as lm-mini.")
        what = "images, but no folders of classes" if _images_in(train) else "no images"
        raise DataError(
            f"{train} contains {what}. Put the images of each class into a folder of its own: "
            f"{_LAYOUT}."
        )
    for folder in folders.values():
        others = set(_subfolders(folder))
        differing = [(classes, others, folder), (others, classes, train)]
        for expected, found, place in differing:
            missing = sorted(set(expected) - set(found))
            if missing:
                raise DataError(
                    f"The splits must have the same classes. {place} has no {_listed(missing)}."
                )


def _listed(names: list[str], most: int = 5) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def _list(folder: Path, classes: list[str]) -> tuple[tuple[Path, ...], Tensor]:
    by_class = [_images_in(folder / name) for name in classes]
    empty = [name for name, files in zip(classes, by_class) if not files]
    if empty:
        raise DataError(
            f"There are no images in {_listed([str(folder / name) for name in empty])}. Add "
            f"images ({', '.join(sorted(IMAGE_SUFFIXES))}), or remove the "
            f"{'folder' if len(empty) == 1 else 'folders'}."
        )
    counts = torch.tensor([len(files) for files in by_class])
    labels = torch.arange(len(classes)).repeat_interleave(counts)
    return tuple(file for files in by_class for file in files), labels


_Size = tuple[int, int]  # height and width


def _fits(count: int, channels: int, shape: _Size) -> bool:
    return count * channels * shape[0] * shape[1] <= LARGEST_TENSOR


def _choose_shape(path: Path, files: list[Path], size: int | None) -> tuple[_Size, int, list[str]]:
    """Return the height and width, the channels, and what the user should know about them."""
    if size is not None and not _fits(len(files), 3, (size, size)):
        return (size, size), 3, []
    pillow = import_extra("PIL.Image")
    sizes, gray, broken = set(), True, []
    for file in files:
        try:
            with pillow.open(file) as opened:  # reads only the header
                sizes.add((opened.height, opened.width))
                gray &= is_gray(opened)
        except Exception as error:  # decoders raise almost anything on a damaged file
            broken.append((file, error))
    _refuse_broken(broken)
    channels = 1 if gray else 3
    if size is not None:
        return (size, size), channels, []
    height, width = min(sizes)
    if len(sizes) == 1 and _fits(len(files), channels, (height, width)):
        return (height, width), channels, []
    if len(sizes) == 1:
        side, reason = ImageFiles.size, f"are too large for memory at {height}x{width}"
    else:
        side, reason = DEFAULT_SIZE, "differ in size"
    notice = (
        f"The images in {path} {reason}. They are cropped to squares and resized to {side}x{side}. "
        "Set data.size for another size."
    )
    return (side, side), channels, [notice]


def _decode(files: tuple[Path, ...], shape: _Size, channels: int) -> Tensor:
    """Decode images into one tensor. An image of another size is cropped and resized."""
    pillow = import_extra("PIL.Image")
    height, width = shape
    pixels = torch.empty(len(files), channels, height, width, dtype=torch.uint8)
    broken = []
    for place, file in zip(pixels, files):
        try:
            image = open_image(file).convert("L" if channels == 1 else "RGB")
        except Exception as error:  # decoders raise almost anything on a damaged file
            broken.append((file, error))
            continue
        if image.size != (width, height):
            scale = min(image.width / width, image.height / height)
            left, top = (image.width - scale * width) / 2, (image.height - scale * height) / 2
            box = (left, top, left + scale * width, top + scale * height)
            image = image.resize((width, height), pillow.Resampling.BILINEAR, box=box)
        flat = torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8)
        place.copy_(flat.view(height, width, channels).permute(2, 0, 1))
    _refuse_broken(broken)
    return pixels


def _refuse_broken(broken: list[tuple[Path, Exception]]) -> None:
    if len(broken) == 1:
        raise DataError(f"Cannot decode {broken[0][0]} ({broken[0][1]}). Replace or remove it.")
    if broken:
        files = _listed([str(file) for file, _ in broken])
        raise DataError(f"Cannot decode {len(broken)} images: {files}. Replace or remove them.")


# --------------------------------------------------------------------------------------- archives


def _from_archive(path: Path, size: int | None) -> Dataset:
    digest = hashlib.sha256()
    try:
        with naming(path):
            with path.open("rb") as opened:
                while piece := opened.read(2**20):
                    digest.update(piece)
            arrays = {
                named: _Array(f"{key} in {path}", value)
                for key, value in read_arrays(path, lambda key: _role(key) is not None).items()
                if (named := _role(key)) is not None
            }
    except UnreadableFile as error:
        raise DataError(f"{error}. Write it with numpy.savez.") from error.__cause__
    splits = [
        name for name in _FULL_NAMES if name == "train" or {(name, "x"), (name, "y")} & set(arrays)
    ]
    for split in splits:
        for axis in ("x", "y"):
            if (split, axis) not in arrays:
                raise DataError(
                    f"{path} has no {axis}_{_FULL_NAMES[split]}. It needs x_train and y_train, and "
                    "can have x_val, y_val, x_test and y_test."
                )
    labels, classes = _labels({split: arrays[split, "y"] for split in splits})
    images, notices = _pixels({split: arrays[split, "x"] for split in splits})
    found: dict[str, ImageSplit] = {}
    for split in splits:
        if len(images[split]) != len(labels[split]):
            raise DataError(
                f"{arrays[split, 'x'].name} has {len(images[split]):,} images, but "
                f"{arrays[split, 'y'].name} has {len(labels[split]):,} labels."
            )
        whole = Images(images[split], labels[split])
        found[split] = whole if size is None else resized(whole, size)
    return _dataset(path, found, classes, digest.hexdigest(), notices)


@dataclass(frozen=True)
class _Array:
    """An array of an archive.

    Attributes:
        name: How to name it in a sentence.
        values: Its values.
    """

    name: str
    values: np.ndarray


_FULL_NAMES = {"train": "train", "validation": "val", "test": "test"}
_AXES = {"x": "x", "images": "x", "y": "y", "labels": "y"}


def _role(key: str) -> tuple[str, str] | None:
    """Return what an array is: ("train", "x") for x_train, X_train and train_images."""
    words = key.lower().split("_")
    split = [_SPLITS[word] for word in words if word in _SPLITS]
    axis = [_AXES[word] for word in words if word in _AXES]
    return (split[0], axis[0]) if len(words) == 2 and split and axis else None


def _labels(arrays: Mapping[str, _Array]) -> tuple[dict[str, Tensor], int]:
    """Return labels from 0, in the order of the original ones, and the number of classes."""
    numpy = import_extra("numpy")
    plain = {split: replace(array, values=_classes(array)) for split, array in arrays.items()}
    known = numpy.unique(plain["train"].values)
    numbered = {}
    for split, array in plain.items():
        unknown = numpy.setdiff1d(array.values, known)
        if len(unknown):
            raise DataError(
                f"{array.name} has labels that the training labels do not have: "
                f"{_listed([str(label) for label in unknown])}."
            )
        numbered[split] = torch.from_numpy(numpy.searchsorted(known, array.values)).long()
    return numbered, len(known)


def _classes(array: _Array) -> np.ndarray:
    """Return one label per image: of a column, or of one-hot rows."""
    values = array.values
    if values.ndim == 2 and values.shape[1] == 1:
        values = values[:, 0]
    if values.ndim == 2 and ((values == 0) | (values == 1)).all() and (values.sum(1) == 1).all():
        values = values.argmax(1)
    if values.ndim != 1 or not len(values):
        raise DataError(
            f"{array.name} must be one label per image, or one-hot rows, got an array of shape "
            f"{array.values.shape}."
        )
    if values.dtype.kind not in "iubUS" and not (values == values.astype("int64")).all():
        raise DataError(f"{array.name} must be whole numbers. For classes, number them from 0.")
    return values


def _pixels(arrays: Mapping[str, _Array]) -> tuple[dict[str, Tensor], list[str]]:
    """Return images as bytes, (N, C, H, W)."""
    numpy = import_extra("numpy")
    shaped = {split: replace(a, values=_channels_first(a)) for split, a in arrays.items()}
    train = shaped["train"]
    for array in shaped.values():
        if array.values.shape[1:] != train.values.shape[1:]:
            raise DataError(
                f"The splits must have images of the same shape (C, H, W), but {array.name} has "
                f"{array.values.shape[1:]} and {train.name} has {train.values.shape[1:]}."
            )
        if array.values.dtype.kind not in "iufb":
            raise DataError(f"{array.name} must be numbers, got {array.values.dtype}.")
        if array.values.dtype.kind == "f" and not numpy.isfinite(array.values).all():
            raise DataError(f"{array.name} has values that are not finite. Remove them.")
    lowest, highest = float(train.values.min()), float(train.values.max())
    notices = []
    if all(array.values.dtype == numpy.uint8 for array in shaped.values()):
        low, scale = 0.0, 1.0
    elif lowest >= 0 and highest <= 1:
        low, scale = 0.0, 255.0
    elif lowest >= 0 and highest <= 255:
        low, scale = 0.0, 1.0
    else:
        low, scale = lowest, 255 / (highest - lowest)
        notices.append(
            f"The images of {train.name} are between {lowest:g} and {highest:g}. They are mapped "
            "to 256 levels, then normalized."
        )
    pixels = {}
    for split, array in shaped.items():
        values = array.values
        if values.dtype != numpy.uint8 or scale != 1:
            pieces = (_bytes(piece, low, scale) for piece in _pieces(values))
            pixels[split] = torch.cat(list(pieces))
        else:
            pixels[split] = torch.from_numpy(numpy.ascontiguousarray(values))
    return pixels, notices


def _pieces(values: np.ndarray) -> Iterator[np.ndarray]:
    # The whole array as doubles would take eight times the memory of its bytes.
    return (values[at : at + 1024] for at in range(0, len(values), 1024))


def _bytes(values: np.ndarray, low: float, scale: float) -> Tensor:
    scaled = (values.astype("float64") - low) * scale
    return torch.from_numpy(scaled.round().clip(0, 255).astype("uint8", order="C"))


def _channels_first(array: _Array) -> np.ndarray:
    """Return the images as (N, C, H, W). There are fewer channels than rows or columns."""
    values = array.values
    if values.ndim == 3:
        values = values[:, None]
    if values.ndim != 4 or not values.size:
        raise DataError(
            f"{array.name} must be images of shape (N, H, W), (N, H, W, C) or (N, C, H, W), got "
            f"{array.values.shape}."
        )
    _, first, _, last = values.shape
    if first == last:
        raise DataError(
            f"{array.name} has the shape {values.shape}: the channels cannot be told from the rows "
            "and columns. Use fewer channels than rows."
        )
    return values if first < last else values.transpose(0, 3, 1, 2)
