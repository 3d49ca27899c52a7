"""Writers of small image data sets in every supported file format and folder layout."""

from __future__ import annotations

import gzip
import io
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from gadam.train.data import DataError, ImageFiles, Images, load

Pair = tuple[np.ndarray, list[int]]  # images and labels
Writer = Callable[[Path, Pair, Pair], None]  # of a folder, from training and test images


class Layout(NamedTuple):
    """A data set in one of its formats."""

    name: str
    classes: int
    shape: tuple[int, ...]
    folder: str
    write: Writer


def draw_images(count: int, classes: int, *shape: int, seed: int = 0) -> Pair:
    """Draw images. The highest label occurs, so that a reader finds all classes."""
    rng = np.random.default_rng(seed)
    labels = rng.integers(classes, size=count).tolist()
    return rng.integers(256, size=(count, *shape), dtype=np.uint8), [*labels[:-1], classes - 1]


def write(file: Path, content: bytes) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(gzip.compress(content) if file.suffix == ".gz" else content)


# ------------------------------------------------------------------------------- file formats


def idx(values: Any) -> bytes:
    values = np.asarray(values, dtype=np.uint8)
    return (
        bytes([0, 0, 8, values.ndim]) + np.array(values.shape, ">i4").tobytes() + values.tobytes()
    )


def records(pair: Pair, coarse: bytes = b"") -> bytes:
    return b"".join(coarse + bytes([label]) + rows.tobytes() for rows, label in zip(*pair))


def python_3(pair: Pair, key: str, protocol: int = 4, as_bytes: bool = False) -> bytes:
    content = {"data": pair[0].reshape(-1, 3072), key: pair[1], "mean": np.zeros(3072)}
    return pickle.dumps(
        {name.encode() if as_bytes else name: value for name, value in content.items()}, protocol
    )


def python_2(pair: Pair, key: str) -> bytes:
    """Write a pickle like the official downloads, opcode by opcode: Python 3 cannot write it."""
    images, labels = pair

    def string(text: bytes) -> bytes:
        return b"T" + len(text).to_bytes(4, "little") + text

    def number(value: int) -> bytes:
        return b"J" + value.to_bytes(4, "little", signed=True)

    def row(*items: bytes) -> bytes:
        return b"(" + b"".join(items) + b"t"

    no, one = number(0), number(1)
    kind = row(number(3), string(b"|"), b"NNN", number(-1), number(-1), no)
    dtype = b"cnumpy\ndtype\n" + row(string(b"u1"), no, one) + b"R" + kind + b"b"
    empty = b"cnumpy.core.multiarray\n_reconstruct\n"
    empty += row(b"cnumpy\nndarray\n", row(no), string(b"b")) + b"R"
    shape = row(number(len(images)), number(3072))
    array = empty + row(one, shape, dtype, b"\x89", string(images.tobytes())) + b"b"
    listed = b"](" + b"".join(map(number, labels)) + b"e"
    return b"\x80\x02}(" + string(b"data") + array + string(key.encode()) + listed + b"u."


def npz(pair: Pair) -> bytes:
    file = io.BytesIO()
    np.savez(file, data=pair[0].reshape(-1, 3072), labels=np.array(pair[1]) + 1)
    return file.getvalue()


def labels_from_one(pair: Pair) -> Pair:
    return pair[0], [label + 1 for label in pair[1]]


# ------------------------------------------------------------------------------------- layouts


def pieces(pair: Pair, count: int) -> list[Pair]:
    images = np.array_split(pair[0], count)
    ends = np.cumsum([len(piece) for piece in images])
    return [(piece, pair[1][end - len(piece) : end]) for piece, end in zip(images, ends)]


def in_files(
    train: Callable[[int], str], test: str, count: int, content: Callable[[Pair], bytes]
) -> Writer:
    def write_all(folder: Path, training: Pair, testing: Pair) -> None:
        for number, piece in enumerate(pieces(training, count), 1):
            write(folder / train(number), content(piece))
        write(folder / test, content(testing))

    return write_all


def idx_files(end: str) -> Writer:
    def write_all(folder: Path, *splits: Pair) -> None:
        for stem, (images, labels) in zip(("train", "t10k"), splits):
            write(folder / f"{stem}-images-idx3-ubyte{end}", idx(images.squeeze(1)))
            write(folder / f"{stem}-labels-idx1-ubyte{end}", idx(labels))

    return write_all


FIVE_BINARY = "data_batch_{}.bin".format, "test_batch.bin", 5
FIVE_PICKLED = "data_batch_{}".format, "test_batch", 5
BINARY = (lambda _: "train.bin"), "test.bin", 1
PICKLED = (lambda _: "train"), "test", 1
NPZ = "train_data_batch_{}.npz".format, "val_data.npz", 11
TWO_PICKLED = "train_data_batch_{}".format, "val_data", 2
RGB, GRAY = (3, 32, 32), (1, 28, 28)
C10, C100, IN32 = ("cifar10", 10, RGB), ("cifar100", 100, RGB), ("imagenet32", 7, RGB)

LAYOUTS = {
    "cifar10": Layout(*C10, "cifar-10-batches-bin", in_files(*FIVE_BINARY, records)),
    "cifar10-py": Layout(
        *C10,
        "cifar-10-batches-py",
        in_files(*FIVE_PICKLED, lambda pair: python_2(pair, "labels")),
    ),
    "cifar100": Layout(
        *C100,
        "cifar-100-binary",
        in_files(*BINARY, lambda pair: records(pair, coarse=b"\x13")),
    ),
    "cifar100-py": Layout(
        *C100,
        "cifar-100-python",
        in_files(*PICKLED, lambda pair: python_2(pair, "fine_labels")),
    ),
    "cifar100-py3": Layout(
        *C100,
        "cifar-100-python",
        in_files(*PICKLED, lambda pair: python_3(pair, "fine_labels", 2, as_bytes=True)),
    ),
    "mnist": Layout("mnist", 10, GRAY, "MNIST/raw", idx_files("")),
    "mnist-gz": Layout("mnist", 10, GRAY, "mnist", idx_files(".gz")),
    "fashion": Layout("fashion-mnist", 10, GRAY, "FashionMNIST/raw", idx_files("")),
    "fashion-gz": Layout("fashion-mnist", 10, GRAY, "fashion-mnist", idx_files(".gz")),
    "imagenet32": Layout(*IN32, "imagenet32", in_files(*NPZ, npz)),
    "imagenet32-py": Layout(
        *IN32,
        "imagenet32",
        in_files(*TWO_PICKLED, lambda pair: python_3(labels_from_one(pair), "labels")),
    ),
}


def write_layout(
    layout: str, root: Path, without_folder: bool = False
) -> tuple[str, Path, Pair, Pair]:
    """Write 23 training and 5 test images.

    Returns:
        The data set's name, the folder of its files, the training images and the test images.
    """
    name, classes, shape, subfolder, write_all = LAYOUTS[layout]
    folder = root if without_folder else root / subfolder
    training, testing = draw_images(23, classes, *shape), draw_images(5, classes, *shape, seed=1)
    write_all(folder, training, testing)
    return name, folder, training, testing


# ---------------------------------------------------------------------------------- assertions


def is_equal(split: Images | ImageFiles, pair: Pair) -> bool:
    assert isinstance(split, Images)
    assert split.images.dtype == torch.uint8
    assert split.images.is_contiguous()
    assert split.labels.dtype == torch.int64
    return np.array_equal(split.images.numpy(), pair[0]) and split.labels.tolist() == pair[1]


def assert_load_fails(name: str, root: Path, match: str) -> None:
    with pytest.raises(DataError, match=match) as error:
        load(name, root)
    assert "\n" not in str(error.value)
