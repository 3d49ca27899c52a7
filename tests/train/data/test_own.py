"""Images of your own: folders and archives of every kind, and a sentence for every problem."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image

from gadam.train.data import DataError, Dataset, ImageFiles, Images, batches, load, own

CLASSES = ("cat", "dog", "owl")


def pixels(index: int, height: int = 6, width: int = 6, channels: int = 3) -> np.ndarray:
    rng = np.random.default_rng(index)
    shape = (height, width, channels) if channels > 1 else (height, width)
    return rng.integers(256, size=shape, dtype=np.uint8)


def write_folder(root: Path, per_class: int | Mapping[str, int] = 5, first: int = 0) -> Path:
    for label, name in enumerate(CLASSES):
        (root / name).mkdir(parents=True, exist_ok=True)
        count = per_class if isinstance(per_class, int) else per_class[name]
        for index in range(count):
            image = Image.fromarray(pixels(first + 100 * label + index))
            image.save(root / name / f"{index:03}.png")
    return root


def images_of(split: object) -> torch.Tensor:
    assert isinstance(split, Images)
    return split.images


def assert_refused(path: Path, *sentences: str, size: int | None = None) -> None:
    with pytest.raises(DataError) as error:
        own.load(path, size)
    message = str(error.value)
    assert "\n" not in message
    assert message.endswith(".")
    for sentence in sentences:
        assert sentence in message


# ------------------------------------------------------------------------------- whole folders


def test_folder_without_splits_holds_out_test_images(tmp_path: Path) -> None:
    write_folder(tmp_path / "animals", {"cat": 20, "dog": 10, "owl": 2})
    (tmp_path / "animals" / ".ipynb_checkpoints").mkdir()
    (tmp_path / "animals" / "cat" / "notes.txt").write_text("not an image")
    a, b = (own.load(tmp_path / "animals") for _ in range(2))
    assert (a.num_classes, a.input_shape, a.validation) == (3, (3, 6, 6), None)
    # A fifth of every class, and at least one image.
    assert a.test.labels.bincount().tolist() == [4, 2, 1]
    assert a.train.labels.bincount().tolist() == [16, 8, 1]
    assert images_of(a.test).equal(images_of(b.test))
    together = torch.cat([images_of(a.train), images_of(a.test)])
    assert len({bytes(image.numpy().tobytes()) for image in together}) == 32
    assert a.notices == (
        f"{tmp_path / 'animals'} has no test images. 7 of its 32 training images are held out for "
        "the test.",
    )


def test_folder_with_splits(tmp_path: Path) -> None:
    for number, split in enumerate(("train", "val", "test")):
        write_folder(tmp_path / split, 4 - number, first=10 * number)
    dataset = own.load(tmp_path)
    assert dataset.validation is not None
    assert [len(s) for s in (dataset.train, dataset.validation, dataset.test)] == [12, 9, 6]
    assert dataset.notices == ()
    first = torch.from_numpy(pixels(110)).permute(2, 0, 1)  # val/dog/000.png
    assert images_of(dataset.validation)[3].equal(first)
    assert int(dataset.validation.labels[3]) == 1


def test_class_can_be_named_like_a_split(tmp_path: Path) -> None:
    write_folder(tmp_path)
    (tmp_path / "owl").rename(tmp_path / "train")
    assert own.load(tmp_path).num_classes == 3


def test_statistics_are_those_of_the_training_images(tmp_path: Path) -> None:
    dataset = own.load(write_folder(tmp_path, 20))
    values = images_of(dataset.train).double() / 255
    assert dataset.mean == pytest.approx(values.mean((0, 2, 3)).tolist())
    assert dataset.std == pytest.approx(values.std((0, 2, 3), correction=0).tolist())
    x, _ = next(batches(dataset.train, 1000, mean=dataset.mean, std=dataset.std))
    assert x.mean().item() == pytest.approx(0, abs=1e-5)
    assert x.std().item() == pytest.approx(1, abs=1e-3)


def test_constant_images_are_not_divided_by_zero(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", x_train=np.zeros((4, 5, 5), np.uint8), y_train=[0, 1, 0, 1])
    assert own.load(tmp_path / "a.npz").std == (1 / 255,)


# ------------------------------------------------------------------------------- kinds of images


def test_gray_images_have_one_channel(tmp_path: Path) -> None:
    write_folder(tmp_path)
    for file in tmp_path.rglob("*.png"):
        Image.fromarray(pixels(1, channels=1)).save(file)
    Image.fromarray(pixels(2, channels=1).astype(np.uint16) * 257).save(tmp_path / "cat/000.png")
    dataset = own.load(tmp_path)
    assert dataset.input_shape == (1, 6, 6)
    wanted = torch.from_numpy(pixels(2, channels=1))
    found = torch.cat([images_of(dataset.train), images_of(dataset.test)])
    assert any(wanted.equal(image[0]) for image in found), "16 bits are scaled to 8"
    Image.fromarray(pixels(3)).save(tmp_path / "dog/000.png")
    assert own.load(tmp_path).input_shape == (3, 6, 6)


def test_transparent_pixels_are_white(tmp_path: Path) -> None:
    write_folder(tmp_path)
    clear = np.zeros((6, 6, 4), np.uint8)
    for file in (tmp_path / "cat").iterdir():
        Image.fromarray(clear).save(file)
    dataset = own.load(tmp_path)
    assert images_of(dataset.train)[dataset.train.labels == 0].eq(255).all()


def test_images_of_different_sizes_are_cropped_and_resized(tmp_path: Path) -> None:
    write_folder(tmp_path)
    wide = np.zeros((8, 24, 3), np.uint8)
    wide[:, 8:16] = 255  # the square in the middle
    for file in (tmp_path / "cat").iterdir():
        Image.fromarray(wide).save(file)
    dataset = own.load(tmp_path)
    assert dataset.input_shape == (3, 64, 64)
    assert "differ in size. They are cropped to squares and resized to 64x64" in dataset.notices[0]
    assert images_of(own.load(tmp_path, size=4).train)[0].gt(200).all(), "the black sides are gone"
    assert own.load(tmp_path, size=4).input_shape == (3, 4, 4)
    assert len(own.load(tmp_path, size=4).notices) == 1


def test_many_images_stay_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(own, "LARGEST_TENSOR", 1000)
    write_folder(tmp_path, 10)
    Image.fromarray(np.zeros((9, 9, 4), np.uint8)).save(tmp_path / "cat/000.png")
    dataset = own.load(tmp_path, size=8)
    assert isinstance(dataset.train, ImageFiles)
    assert dataset.input_shape == (3, 8, 8)
    assert dataset.mean == pytest.approx([0.5] * 3, abs=0.05)
    x, _ = next(batches(dataset.train, 64, mean=dataset.mean, std=dataset.std, augment=True))
    assert x.shape == (24, 3, 8, 8)
    (tmp_path / "cat/000.png").unlink()
    assert "too large for memory at 6x6" in own.load(tmp_path).notices[0]
    assert own.load(tmp_path).input_shape == (3, 224, 224)


# ---------------------------------------------------------------------------- problems of folders


def test_broken_images_are_named(tmp_path: Path) -> None:
    write_folder(tmp_path)
    content = (tmp_path / "cat/001.png").read_bytes()
    (tmp_path / "cat/001.png").write_bytes(content[:60])  # the header is intact
    assert_refused(tmp_path, f"Cannot decode {tmp_path / 'cat/001.png'} (", "Replace or remove it")
    for name in ("cat/001.png", "owl/000.png"):
        (tmp_path / name).write_bytes(b"no image")
    assert_refused(tmp_path, "Cannot decode 2 images: ", "cat/001.png", "owl/000.png")


def test_wrong_folders_are_explained(tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    assert_refused(empty, "contains no images", "PATH/CLASS/*.png")
    Image.fromarray(pixels(0)).save(empty / "a.png")
    assert_refused(empty, "contains images, but no folders of classes")
    (empty / "a.png").rename(empty / "train.txt")
    assert_refused(empty, "contains text. Use a recipe for texts")
    one = write_folder(tmp_path / "one")
    (one / "cat").rename(tmp_path / "spare")
    (one / "dog" / "000.png").rename(tmp_path / "000.png")
    for file in (one / "owl").iterdir():
        file.unlink()
    assert_refused(one, f"There are no images in {one / 'owl'}")
    (one / "owl").rmdir()
    assert_refused(one, "has only one class")
    assert_refused(tmp_path / "000.png", "is neither a folder nor an .npz file")


def test_splits_must_have_the_same_classes(tmp_path: Path) -> None:
    write_folder(tmp_path / "train", 1)
    write_folder(tmp_path / "test", 1)
    (tmp_path / "test" / "dog").rename(tmp_path / "test" / "dgo")
    assert_refused(tmp_path, f"{tmp_path / 'test'} has no dog")
    (tmp_path / "train" / "cow").mkdir()
    assert_refused(tmp_path, "has no cow, dog")
    (tmp_path / "train").rename(tmp_path / "trian")
    assert_refused(tmp_path, "has the folder test but no folder train")


def test_two_folders_of_one_split_are_refused(tmp_path: Path) -> None:
    for name in ("train", "val", "validation"):
        write_folder(tmp_path / name, 1)
    assert_refused(tmp_path, "two validation folders, val and validation")


# ------------------------------------------------------------------------------------- archives


def save(path: Path, **arrays: Any) -> Dataset:
    np.savez(path, **arrays)
    return own.load(path)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=20)
@given(
    layout=st.sampled_from(["NHW", "NHWC", "NCHW"]),
    kind=st.sampled_from(["uint8", "float32", "unit", "int64", "centered"]),
    labels=st.sampled_from(["from 1", "gaps", "column", "one-hot", "float", "names"]),
    keys=st.sampled_from(["x_{}", "X_{}", "{}_images"]),
)
def test_every_layout_of_an_archive(
    layout: str, kind: str, labels: str, keys: str, tmp_path: Path
) -> None:
    rng = np.random.default_rng(0)
    truth, numbers = rng.integers(256, size=(12, 3, 5, 7), dtype=np.uint8), np.arange(12) % 3
    truth[0, :, 0, :2] = 0, 255  # so that the range is known
    truth = truth[:, :1] if layout == "NHW" else truth
    images = {"NHW": truth[:, 0], "NHWC": truth.transpose(0, 2, 3, 1), "NCHW": truth}[layout]
    images = {
        "uint8": images,
        "float32": images.astype("float32"),
        "unit": images / 255,
        "int64": images.astype("int64"),
        "centered": images / 10 - 7,
    }[kind]
    y = {
        "from 1": numbers + 1,
        "gaps": numbers * 7 - 5,
        "column": numbers[:, None],
        "one-hot": np.eye(3)[numbers],
        "float": numbers.astype("float64"),
        "names": np.array(["a", "bb", "ccc"])[numbers],
    }[labels]
    label_keys = keys.replace("x", "y").replace("X", "Y").replace("images", "labels")
    arrays = {keys.format(name): images for name in ("train", "val", "test")}
    arrays |= {label_keys.format(name): y for name in ("train", "val", "test")}
    dataset = save(tmp_path / "own.npz", **arrays)
    assert dataset.num_classes == 3
    assert dataset.validation is not None
    for split in (dataset.train, dataset.validation, dataset.test):
        assert images_of(split).equal(torch.from_numpy(truth))
        assert images_of(split).is_contiguous()
        assert split.labels.tolist() == numbers.tolist()
    assert bool(dataset.notices) is (kind == "centered")


def test_archive_without_a_test_holds_it_out(tmp_path: Path) -> None:
    x, y = np.zeros((10, 4, 5), np.uint8), np.arange(10) % 2
    other = np.array([{}], object)
    dataset = save(tmp_path / "a.npz", x_train=x, y_train=y, x_val=x, y_val=y, other=other)
    assert (len(dataset.train), len(dataset.test)) == (8, 2)
    assert dataset.validation is not None
    assert len(dataset.validation) == 10
    assert own.load(tmp_path / "a.npz", size=2).input_shape == (1, 2, 2)


X, Y = np.zeros((4, 5, 6), np.uint8), np.array([0, 1, 0, 1])


@pytest.mark.parametrize(
    ("arrays", "sentence"),
    [
        ({"y_train": Y}, "has no x_train. It needs x_train and y_train"),
        ({"x_train": X, "y_train": Y, "x_test": X}, "has no y_test"),
        ({"x_train": X, "y_train": Y, "y_val": Y}, "has no x_val"),
        ({"x_train": X, "y_train": Y[:3]}, "has 4 images, but y_train"),
        ({"x_train": X[:, 0], "y_train": Y}, "must be images of shape (N, H, W)"),
        ({"x_train": X[:0], "y_train": Y[:0]}, "must be one label per image"),
        ({"x_train": np.zeros((4, 8, 8, 8)), "y_train": Y}, "cannot be told from the rows"),
        ({"x_train": X + np.inf, "y_train": Y}, "not finite"),
        ({"x_train": X.astype(str), "y_train": Y}, "must be numbers"),
        ({"x_train": X, "y_train": Y + 0.5}, "must be whole numbers"),
        ({"x_train": X, "y_train": np.ones((4, 2))}, "or one-hot rows"),
        ({"x_train": X, "y_train": Y * 0}, "has only one class"),
        ({"x_train": X, "y_train": Y, "x_test": X, "y_test": Y + 1}, "do not have: 2."),
        ({"x_train": X, "y_train": Y, "x_test": X[:, 1:], "y_test": Y}, "the same shape"),
        ({"x_train": np.array([{}] * 4), "y_train": Y}, "Write it with numpy.savez"),
    ],
)
def test_problems_of_archives_get_a_sentence(
    arrays: dict[str, object], sentence: str, tmp_path: Path
) -> None:
    np.savez(tmp_path / "own.npz", **arrays)  # type: ignore[arg-type]
    assert_refused(tmp_path / "own.npz", sentence)


def test_file_that_is_no_archive_is_named(tmp_path: Path) -> None:
    (tmp_path / "own.npz").write_bytes(b"PK, but not really")
    assert_refused(tmp_path / "own.npz", "Cannot read ", "own.npz (it is not an npz file)")


# ----------------------------------------------------------------------------- names and changes


def test_paths_and_names_below_the_data_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_folder(tmp_path / "data" / "animals")
    monkeypatch.chdir(tmp_path)
    for name in ("data/animals", str(tmp_path / "data" / "animals"), "./data/animals"):
        assert load(name).num_classes == 3
    assert load("animals", tmp_path / "data").num_classes == 3
    write_folder(tmp_path / "fashion-mini")
    assert load("fashion-mini").num_classes == 10, "a known name is not a path"
    assert load("./fashion-mini").num_classes == 3
    with pytest.raises(DataError, match=r"There is no file or folder gone/animals\. Pass a folder"):
        load("gone/animals")


def test_fingerprint_changes_with_the_files(tmp_path: Path) -> None:
    before = own.load(write_folder(tmp_path / "a")).fingerprint
    assert own.load(write_folder(tmp_path / "b")).fingerprint == before
    (tmp_path / "b" / "cat" / "000.png").unlink()
    assert own.load(tmp_path / "b").fingerprint != before
    archives = [save(tmp_path / f"{n}.npz", x_train=X + n, y_train=Y) for n in (0, 1)]
    assert archives[0].fingerprint != archives[1].fingerprint
    assert load("fashion-mini").fingerprint == ""
