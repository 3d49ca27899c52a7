"""Every file format is read, damaged files are named, and pickles never run code."""

from __future__ import annotations

import os
import pickle
import sys
import tracemalloc
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gadam.train.data import DataError, load
from image_layouts import (
    LAYOUTS,
    RGB,
    assert_load_fails,
    draw_images,
    idx,
    idx_files,
    is_equal,
    write,
    write_layout,
)

every_layout = pytest.mark.parametrize("layout", LAYOUTS)
UNREADABLE = r"Cannot read .*{}.* \(.*GADAM_DATA\.$"


@every_layout
@pytest.mark.parametrize("keep", [0.0, 0.45, 0.999])
def test_truncated_file_is_named(layout: str, keep: float, tmp_path: Path) -> None:
    name, folder, *_ = write_layout(layout, tmp_path)
    for file in folder.iterdir():
        content = file.read_bytes()
        file.write_bytes(content[: int(keep * len(content))])
        assert_load_fails(name, tmp_path, UNREADABLE.format(file.name))
        file.write_bytes(content)


@every_layout
def test_file_with_other_content_is_named(layout: str, tmp_path: Path) -> None:
    name, folder, *_ = write_layout(layout, tmp_path)
    for file in folder.iterdir():
        content = file.read_bytes()
        file.write_bytes(b"<html>404</html>")
        assert_load_fails(name, tmp_path, UNREADABLE.format(file.name))
        file.write_bytes(content)


@pytest.mark.parametrize(
    ("layout", "highest"),
    [("cifar10", 10), ("cifar100-py", 100), ("mnist", 10), ("imagenet32", 1000)],
)
def test_label_out_of_range_raises(layout: str, highest: int, tmp_path: Path) -> None:
    name, _, shape, _, write_all = LAYOUTS[layout]
    images, labels = draw_images(6, 5, *shape)
    write_all(tmp_path, (images, [*labels[:-1], highest]), (images, labels))
    assert_load_fails(name, tmp_path, "a label is out of range")


def test_different_numbers_of_images_and_labels_raise(tmp_path: Path) -> None:
    _, folder, *_ = write_layout("mnist", tmp_path)
    write(folder / "train-labels-idx1-ubyte", idx([1, 2, 3]))
    assert_load_fails("mnist", tmp_path, "23 images but 3 labels")


@given(shape=st.tuples(*[st.integers(1, 9)] * 3), change=st.integers(-20, 20))
def test_idx_file_must_have_the_length_in_its_header(
    shape: tuple[int, int, int], change: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    root = tmp_path_factory.mktemp("idx")
    images, labels = draw_images(shape[0], 10, 1, *shape[1:])
    idx_files("")(root, (images, labels), (images, labels))
    file = root / "t10k-images-idx3-ubyte"
    content = file.read_bytes()
    file.write_bytes(content[:change] if change < 0 else content + bytes(change))
    if change:
        with pytest.raises(DataError, match=r"Cannot read .*t10k-images-idx3-ubyte"):
            load("mnist", root)
    else:
        assert is_equal(load("mnist", root).test, (images, labels))


# ------------------------------------------------------------------------------------- pickles


@pytest.mark.parametrize("claimed", [(10, 28, 28), (2**32 - 1,) * 3])
def test_decompression_is_bounded_by_the_header(claimed: tuple[int, ...], tmp_path: Path) -> None:
    """300 MB of zeros in 300 kB, behind a header that claims much less, or much more."""
    layout = next(name for name in LAYOUTS if "mnist" in name and "gz" in name)
    name, folder, *_ = write_layout(layout, tmp_path)
    compress = zlib.compressobj(9, zlib.DEFLATED, 31)
    header = bytes([0, 0, 8, 3]) + b"".join(size.to_bytes(4, "big") for size in claimed)
    bomb = compress.compress(header)
    for _ in range(300):
        bomb += compress.compress(bytes(10**6))
    images = folder / "train-images-idx3-ubyte.gz"
    images.write_bytes(bomb + compress.flush())
    tracemalloc.start()
    try:
        assert_load_fails(name, tmp_path, UNREADABLE.format(images.name))
        assert tracemalloc.get_traced_memory()[1] < 2 * 10**7
    finally:
        tracemalloc.stop()


def test_array_in_column_order_is_read(tmp_path: Path) -> None:
    pixels, labels = draw_images(6, 100, 3072)
    by_columns = {b"data": np.asfortranarray(pixels), b"fine_labels": labels}
    for file in ("train", "test"):
        write(tmp_path / file, pickle.dumps(by_columns, 2))
    assert is_equal(load("cifar100", tmp_path).train, (pixels.reshape(-1, *RGB), labels))


class MakesFolder:
    """Creates a folder when it is unpickled."""

    def __init__(self, folder: Path) -> None:
        self.folder = str(folder)

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (self.folder,)


@pytest.mark.parametrize("protocol", [0, 2, 4])
@pytest.mark.parametrize("name", ["cifar100", "imagenet32"])
def test_pickle_with_code_is_not_run(name: str, protocol: int, tmp_path: Path) -> None:
    marker = tmp_path / "was-run"
    malicious = pickle.dumps({b"data": MakesFolder(marker), b"fine_labels": [0]}, protocol)
    pickle.loads(malicious)  # the attack works on a plain unpickler
    marker.rmdir()
    files = ("train", "test") if name == "cifar100" else ("train_data_batch_1", "val_data")
    for file in files:
        write(tmp_path / file, malicious)
    assert_load_fails(name, tmp_path, r"it refers to (posix|nt)\.mkdir, which an array")
    assert not marker.exists()


@pytest.mark.parametrize(
    "reference", ["builtins\neval", "numpy\nload", "numpy\nndarray.tofile", "_codecs\nlookup"]
)
def test_pickle_can_refer_only_to_arrays(reference: str, tmp_path: Path) -> None:
    for file in ("train", "test"):
        write(tmp_path / file, b"\x80\x04c" + reference.encode() + b"\n.")
    assert_load_fails(
        "cifar100", tmp_path, f"it refers to {reference.replace(chr(10), '.')}, which"
    )


def test_pickled_length_in_place_of_pixels_raises(tmp_path: Path) -> None:
    array: Any = np.zeros((2, 3072), np.uint8).__reduce__()
    _, shape, dtype, *_ = array[2]

    class Hollow:
        def __reduce__(self) -> tuple[Any, ...]:
            return array[0], array[1], (1, shape, dtype, False, 2 * 3072)

    for file in ("train", "test"):
        write(tmp_path / file, pickle.dumps({"data": Hollow(), "fine_labels": [1, 2]}, 4))
    assert_load_fails(
        "cifar100", tmp_path, r"Cannot read .*train \(the pixels are not bytes\)\. Run"
    )


@pytest.mark.parametrize(
    "content",
    [
        [1, 2],
        {"data": 1, "fine_labels": [1]},
        {"data": np.zeros((2, 3072), np.uint8), "fine_labels": [1, "2"]},
        {"data": np.zeros((2, 3072), np.uint8), "fine_labels": (1, 2)},
        {"data": np.zeros((2, 3072), np.uint8), "fine_labels": [1]},
        {"data": np.zeros((2, 3072), np.float32), "fine_labels": [1, 2]},
        {"data": np.zeros((2, 3071), np.uint8), "fine_labels": [1, 2]},
        {"data": np.zeros((2, 3, 1024), np.uint8), "fine_labels": [1, 2]},
        {"data": np.array([[{}]], object), "fine_labels": [1]},
        {"fine_labels": [1, 2]},
    ],
)
def test_pickle_with_other_content_raises(content: object, tmp_path: Path) -> None:
    for file in ("train", "test"):
        write(tmp_path / file, pickle.dumps(content, 4))
    assert_load_fails("cifar100", tmp_path, r"Cannot read .*train \(")


# ----------------------------------------------------------------------------------------- npz


@pytest.mark.parametrize(
    ("pixels", "labels"),
    [
        (np.zeros((2, 3072), np.float32), np.ones(2, int)),
        (np.zeros((2, 3072), np.uint8), np.ones(2)),
        (np.zeros((2, 3072), np.uint8), np.zeros(2, int)),
        (np.zeros((2, 100), np.uint8), np.ones(2, int)),
        (np.array([MakesFolder(Path("never"))], object), np.ones(1, int)),
    ],
)
def test_npz_with_other_content_raises(
    pixels: np.ndarray, labels: np.ndarray, tmp_path: Path
) -> None:
    for file in ("train_data_batch_1.npz", "val_data.npz"):
        np.savez(tmp_path / file, data=pixels, labels=labels)
    assert_load_fails("imagenet32", tmp_path, r"Cannot read .*train_data_batch_1\.npz \(")


def test_missing_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_layout("imagenet32", tmp_path)
    monkeypatch.setitem(sys.modules, "numpy", None)
    assert_load_fails(
        "imagenet32", tmp_path, r"^numpy is not installed\. Run `pip install 'gadam\[train\]'`\.$"
    )
