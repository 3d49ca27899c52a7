"""Readers of the file formats in which image data sets are published.

A reader takes a file and returns its images and labels. It raises an exception of any kind if the
file is damaged; :func:`naming` turns it into an :class:`UnreadableFile` that names the file.
"""

from __future__ import annotations

import gzip
import os
import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from io import BufferedIOBase
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any
from zipfile import is_zipfile

import torch
from torch import Tensor

from gadam.train.data.dataset import ImageFiles
from gadam.train.data.errors import DataError, import_extra

if TYPE_CHECKING:
    import numpy as np
    from PIL.Image import Image

__all__ = [
    "IMAGE_SUFFIXES",
    "Arrays",
    "UnreadableFile",
    "is_gray",
    "naming",
    "open_image",
    "read_arrays",
    "read_cifar_binary",
    "read_idx_pair",
    "read_image_folder",
    "read_npz",
    "read_pickle",
]

Arrays = tuple[Tensor, Tensor]  # images (N, C, H, W) and labels (N,)

IMAGE_SUFFIXES = frozenset(
    (".bmp", ".gif", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp")
)

_MAX_COMPRESSION = 1032  # of the deflate algorithm: no file expands by more


class UnreadableFile(Exception):
    """A file is missing or damaged. The message names it, without a final period."""


@contextmanager
def naming(file: Path) -> Iterator[None]:
    """Turn any error in the block into an :class:`UnreadableFile` that names the file.

    Args:
        file: The file that the block reads.
    """
    try:
        yield
    except (DataError, UnreadableFile):
        raise
    except FileNotFoundError as error:
        raise UnreadableFile(f"{file} is missing") from error
    except Exception as error:  # decoders raise almost anything on a damaged file
        reason = str(error) or type(error).__name__
        raise UnreadableFile(f"Cannot read {file} ({reason})") from error


def _bytes(file: Path) -> Tensor:
    # Memory-mapped: the only copy is made where the files of a split are concatenated.
    return torch.from_file(str(file), size=file.stat().st_size, dtype=torch.uint8)


def _read_at_most(file: BufferedIOBase, size: int) -> bytearray:
    """Read in pieces: the file may be much shorter than its header claims."""
    content = bytearray()
    while len(content) < size and (piece := file.read(min(size - len(content), 2**20))):
        content += piece
    return content


def _rgb(pixels: Tensor) -> Tensor:
    if pixels.dtype != torch.uint8 or pixels.ndim != 2 or pixels.shape[1] != 3072:
        raise ValueError("the pixels are not rows of 3,072 bytes")
    return pixels.view(-1, 3, 32, 32)


# -------------------------------------------------------------------------------- binary formats


def read_cifar_binary(file: Path, label_bytes: int) -> Arrays:
    """Read CIFAR's binary format.

    Args:
        file: The file.
        label_bytes: Labels per record, one byte each. The last one is used: CIFAR-100's fine label.
    """
    length, size = label_bytes + 3072, file.stat().st_size
    if size == 0 or size % length:
        raise ValueError(f"{size:,} bytes is not a whole number of {length:,}-byte records")
    records = _bytes(file).view(-1, length)
    return _rgb(records[:, label_bytes:]), records[:, label_bytes - 1].long()


def _read_idx(file: Path, dims: int) -> Tensor:
    start = 4 + 4 * dims
    compressed = file.suffix == ".gz"
    with gzip.open(file) if compressed else file.open("rb") as opened:
        header = _read_at_most(opened, start)
        if header[:4] != bytes([0, 0, 8, dims]) or len(header) < start:
            raise ValueError(f"it is not an idx file of {dims}-dimensional bytes")
        shape = [int.from_bytes(header[at : at + 4], "big") for at in range(4, start, 4)]
        expected = prod(shape)
        if not compressed:
            found = file.stat().st_size - start
        elif expected > _MAX_COMPRESSION * file.stat().st_size:
            raise ValueError(f"it is too small to contain the {expected:,} bytes of its header")
        else:
            # One byte more than the header says, however much the file would decompress to.
            content = _read_at_most(opened, expected + 1)
            found = len(content)
    if found != expected:
        more = "more than " if compressed and found > expected else ""
        number = expected if more else found
        raise ValueError(f"{more}{number:,} bytes after the header, expected {expected:,}")
    if not expected:
        return torch.empty(shape, dtype=torch.uint8)
    if compressed:
        return torch.frombuffer(content, dtype=torch.uint8).view(shape)
    return _bytes(file)[start:].view(shape)


def read_idx_pair(file: Path) -> Arrays:
    """Read MNIST's idx format: a file of images, and the file of labels next to it.

    Args:
        file: The file of images, for example ``train-images-idx3-ubyte.gz``.
    """
    labels = file.with_name(file.name.replace("images-idx3", "labels-idx1"))
    with naming(labels):
        numbers = _read_idx(labels, 1).long()
    return _read_idx(file, 3).unsqueeze(1), numbers


def read_arrays(
    file: Path, wanted: Callable[[str], bool] = lambda name: True
) -> dict[str, np.ndarray]:
    """Read arrays from a NumPy archive, without unpickling anything.

    Args:
        file: The archive.
        wanted: Returns True for the names of arrays to read.
    """
    if not is_zipfile(file):  # otherwise NumPy would try to read it as a pickle
        raise ValueError("it is not an npz file")
    with import_extra("numpy").load(file, allow_pickle=False) as archive:
        return {name: archive[name] for name in archive.files if wanted(name)}


def read_npz(file: Path) -> Arrays:
    """Read downsampled ImageNet from a NumPy archive. Its labels start at 1.

    Args:
        file: The archive.
    """
    arrays = read_arrays(file, ("data", "labels").__contains__)
    pixels, labels = (torch.from_numpy(arrays[key]) for key in ("data", "labels"))
    if labels.dtype.is_floating_point or labels.ndim != 1:
        raise ValueError("the labels are not a row of integers")
    return _rgb(pixels), labels.long() - 1


# --------------------------------------------------------------------------------------- pickles


class _Array:
    """The state of a pickled array.

    NumPy does not rebuild the array: it would trust whatever the file says about its memory.
    """

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        _, self.shape, self.dtype, self.by_columns, self.content = state

    def tensor(self) -> Tensor:
        if self.dtype.code not in ("u1", b"u1") or type(self.content) is not bytes:
            raise ValueError("the pixels are not bytes")
        content = torch.frombuffer(bytearray(self.content), dtype=torch.uint8)
        if self.by_columns:
            return content.view(self.shape[::-1]).t().contiguous()
        return content.view(self.shape)


class _Dtype:
    def __init__(self, code: str | bytes, *_: object) -> None:
        self.code = code

    def __setstate__(self, state: object) -> None:
        """Ignore byte order and alignment: bytes have neither."""


class _ArrayUnpickler(pickle.Unpickler):
    """Unpickles arrays only. It never calls anything that the file names."""

    replacements: dict[tuple[str, str], Callable[..., object]] = {  # noqa: RUF012 — a constant
        ("numpy.core.multiarray", "_reconstruct"): lambda *_: _Array(),
        ("numpy._core.multiarray", "_reconstruct"): lambda *_: _Array(),
        ("numpy", "ndarray"): _Array,
        ("numpy", "dtype"): _Dtype,
        ("_codecs", "encode"): lambda text, *_: text.encode("latin1"),
    }

    def find_class(self, module: str, name: str) -> Callable[..., object]:
        if (module, name) not in self.replacements:
            raise ValueError(f"it refers to {module}.{name}, which an array of images never needs")
        return self.replacements[module, name]


def read_pickle(file: Path, key: str, first_label: int = 0) -> Arrays:
    """Read a pickled dictionary of pixels and labels, without running any code from the file.

    Args:
        file: The file.
        key: The key of the labels. The key of the pixels is "data".
        first_label: The lowest label in the file.
    """
    with file.open("rb") as opened:
        content = _ArrayUnpickler(opened, encoding="bytes").load()
    content = content if type(content) is dict else {}
    # Python 2 wrote keys as bytes, Python 3 as strings.
    pixels, labels = (content.get(name, content.get(name.encode())) for name in ("data", key))
    if type(pixels) is not _Array or type(labels) is not list or {*map(type, labels)} != {int}:
        raise ValueError("it does not contain an array of pixels and a list of labels")
    return _rgb(pixels.tensor()), torch.tensor(labels) - first_label


# ---------------------------------------------------------------------------------------- images


def is_gray(image: Image) -> bool:
    """Return True if an image has no color.

    Args:
        image: An image that need not be decoded yet.
    """
    return image.mode in ("1", "L", "LA") or image.mode.startswith("I")


def open_image(file: Path) -> Image:
    """Decode an image to 8 bits per channel: mode "L" if it has no color, otherwise "RGB".

    Transparent pixels are put on white. 16-bit gray levels are scaled to 8 bits.

    Args:
        file: The image.
    """
    pillow = import_extra("PIL.Image")
    with pillow.open(file) as opened:
        image: Image = opened
        if image.mode.startswith("I"):  # Pillow would clip the values at 255
            levels = import_extra("numpy").asarray(image).clip(0, 65535) // 257
            scaled: Image = pillow.fromarray(levels.astype("uint8"))
            return scaled
        if image.mode == "F":
            raise ValueError("its pixels are floating-point numbers")
        mode = "L" if is_gray(image) else "RGB"
        if "A" in image.getbands() or "transparency" in image.info:
            white: Image = pillow.new("RGBA", image.size, "white")
            white.alpha_composite(image.convert("RGBA"))
            image = white
        return image.convert(mode)


# --------------------------------------------------------------------------------- image folders


def read_image_folder(folder: Path, classes: list[str]) -> ImageFiles:
    """List the images of a folder with one subfolder per class.

    Args:
        folder: The folder.
        classes: The names of the subfolders. A label is an index into them.

    Raises:
        UnreadableFile: There are no images.
    """
    found = [
        (subfolder / file, label)
        for label, subfolder in enumerate(folder / name for name in classes)
        for file in sorted(os.listdir(subfolder))
        if Path(file).suffix.lower() in IMAGE_SUFFIXES
    ]
    if not found:
        raise UnreadableFile(f"{folder} contains no images")
    files, labels = zip(*found)
    return ImageFiles(files, torch.tensor(labels))
