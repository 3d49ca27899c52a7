"""Data sets are found under every name and layout, and missing files come with instructions."""

from __future__ import annotations

import os
from itertools import product
from pathlib import Path

import pytest
import torch

from gadam.train import data
from gadam.train.data import DataError, ImageFiles, Images, load
from image_layouts import LAYOUTS, assert_load_fails, is_equal, write, write_layout

every_layout = pytest.mark.parametrize("layout", LAYOUTS)


@every_layout
@pytest.mark.parametrize("without_folder", [False, True])
def test_every_layout_is_read(layout: str, without_folder: bool, tmp_path: Path) -> None:
    name, _, training, testing = write_layout(layout, tmp_path, without_folder)
    dataset = load(name, tmp_path)
    assert dataset.name == name
    assert is_equal(dataset.train, training)
    assert is_equal(dataset.test, testing)
    assert dataset.num_classes == LAYOUTS[layout].classes
    assert dataset.input_shape == training[0].shape[1:]
    assert len(dataset.mean) == len(dataset.std) == dataset.input_shape[0]
    assert len(dataset.train) == 23


def test_environment_variable_sets_the_data_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_layout("cifar100", tmp_path)
    monkeypatch.setenv("GADAM_DATA", str(tmp_path))
    assert len(load("cifar100").train) == 23
    monkeypatch.delenv("GADAM_DATA")
    monkeypatch.setenv("HOME", str(tmp_path / "nobody"))
    with pytest.raises(DataError, match=r"nobody/\.cache/gadam/data/cifar-100-binary/train\.bin"):
        load("cifar100")


@pytest.mark.parametrize("spelling", ["CIFAR-100", "cifar_100", "Cifar 100", "cifar100"])
def test_names_ignore_case_and_punctuation(spelling: str, tmp_path: Path) -> None:
    write_layout("cifar100", tmp_path)
    assert load(spelling, tmp_path).name == "cifar100"


def test_unknown_name_gets_a_hint() -> None:
    with pytest.raises(DataError, match=r"set 'fasion-mini'\. Did you mean fashion-mini\?$"):
        load("fasion-mini")
    with pytest.raises(DataError, match=r"one of fashion-mini, cifar10, .*imagenet, or the path"):
        load("quux")


@every_layout
def test_missing_file_is_named_with_instructions(layout: str, tmp_path: Path) -> None:
    name, folder, *_ = write_layout(layout, tmp_path)
    for file in sorted(folder.iterdir()):
        if "imagenet32" in layout and "train" in file.name:
            continue  # any number of training files is accepted
        content = file.read_bytes()
        file.unlink()
        instructions = (
            "Download it with your own account"
            if name == "imagenet32"
            else f"Run `gadam data {name}`"
        )
        match = rf"{file.name} is missing\. {instructions}.* GADAM_DATA\.$"
        assert_load_fails(name, tmp_path, match)
        file.write_bytes(content)
    load(name, tmp_path)


# ------------------------------------------------------------------------------- fashion-mini


def test_fashion_mini_is_balanced_and_needs_no_files() -> None:
    dataset = load("Fashion Mini", "nowhere")
    for split, per_class in ((dataset.train, 500), (dataset.test, 200)):
        assert isinstance(split, Images)
        assert split.labels.bincount().tolist() == [per_class] * 10
        assert split.images.shape == (10 * per_class, 1, 28, 28)
        values = split.images / 255
        assert values.mean().item() == pytest.approx(dataset.mean[0], abs=0.01)
        assert values.std().item() == pytest.approx(dataset.std[0], abs=0.01)


def test_fashion_mini_includes_its_license() -> None:
    text = (Path(data.__file__).parent / "fashion_mini" / "LICENSE").read_text()
    assert "Copyright (c) 2017 Zalando SE" in text
    assert "MIT" in text


# ---------------------------------------------------------------------------------- cifar100n


def test_cifar100n_replaces_the_training_labels_only(tmp_path: Path) -> None:
    _, _, training, testing = write_layout("cifar100", tmp_path)
    human = [(7 * index) % 100 for index in range(23)]
    write(tmp_path / "cifar-100n" / "fine_labels.bin", bytes(human))
    relabeled = load("CIFAR-100N", tmp_path)
    assert relabeled.name == "cifar100n"
    assert is_equal(relabeled.train, (training[0], human))
    assert is_equal(relabeled.test, testing)
    assert (relabeled.num_classes, relabeled.mean) == (100, load("cifar100", tmp_path).mean)


def test_cifar100n_needs_one_valid_label_per_image(tmp_path: Path) -> None:
    assert_load_fails("cifar100n", tmp_path, r"train\.bin is missing\. .*run `gadam data cifar100`")
    write_layout("cifar100", tmp_path)
    file = tmp_path / "cifar-100n" / "fine_labels.bin"
    match = r"fine_labels\.bin is missing\. .*github.*noisy_label to .*fine_labels.bin, one byte"
    assert_load_fails("cifar100n", tmp_path, match)
    for content, reason in (
        (b"", "0 labels for 23 training images"),
        (bytes(22), "22 labels for 23 training images"),
        (bytes([*range(22), 100]), "a label is out of range"),
    ):
        write(file, content)
        assert_load_fails("cifar100n", tmp_path, rf"Cannot read .*fine_labels\.bin \({reason}\)")


# ------------------------------------------------------------------------------ image folders


@pytest.fixture
def imagenet(tmp_path: Path) -> Path:
    for folder, label in product(("train", "val"), ("n02", "n01")):
        for file in ("a.JPEG", "b.jpg", "c.JPG", "d.png", "e.jpeg", "notes.txt"):
            write(tmp_path / "imagenet" / folder / label / file, b"not decoded here")
    return tmp_path


@pytest.mark.parametrize("place", ["imagenet", "", "imagenet-sample"])
def test_subfolders_are_classes(place: str, imagenet: Path, tmp_path: Path) -> None:
    root = tmp_path / "elsewhere"
    root.mkdir()
    (imagenet / "imagenet").rename(root / (place or "moved"))
    dataset = load("imagenet", root / ("" if place else "moved"))
    assert isinstance(dataset.train, ImageFiles)
    assert [file.name for file in dataset.train.files[:5]] == [
        *("a.JPEG", "b.jpg", "c.JPG", "d.png", "e.jpeg")
    ]
    assert [file.parent.name for file in dataset.train.files] == ["n01"] * 5 + ["n02"] * 5
    assert dataset.train.labels.tolist() == [0] * 5 + [1] * 5
    assert len(dataset.test) == 10
    assert dataset.num_classes == 2
    assert dataset.input_shape == (3, 224, 224)


def test_train_and_val_must_have_the_same_classes(imagenet: Path) -> None:
    (imagenet / "imagenet" / "val" / "n01").rename(imagenet / "imagenet" / "val" / "n03")
    with pytest.raises(DataError, match=r"does not have the same classes as .*your own account"):
        load("imagenet", imagenet)


def test_missing_imagenet_folder_is_named(tmp_path: Path) -> None:
    match = r"imagenet/train is missing\. Download it with your own account"
    assert_load_fails("imagenet", tmp_path, match)
    (tmp_path / "imagenet" / "train" / "n01").mkdir(parents=True)
    assert_load_fails("imagenet", tmp_path, "imagenet/val is missing")
    (tmp_path / "imagenet" / "val" / "n01").mkdir(parents=True)
    assert_load_fails("imagenet", tmp_path, "imagenet/train contains no images")


# ----------------------------------------------------------------------------- official files


@pytest.mark.parametrize(
    ("name", "train", "test", "classes"),
    [
        ("cifar10", 50_000, 10_000, 10),
        ("cifar100", 50_000, 10_000, 100),
        ("cifar100n", 50_000, 10_000, 100),
        ("mnist", 60_000, 10_000, 10),
        ("fashion-mnist", 60_000, 10_000, 10),
    ],
)
def test_official_files(name: str, train: int, test: int, classes: int) -> None:
    if "GADAM_DATA" not in os.environ:
        pytest.skip("GADAM_DATA is not set")
    try:
        dataset = load(name)
    except DataError as error:
        pytest.skip(str(error))
    assert (len(dataset.train), len(dataset.test), dataset.num_classes) == (train, test, classes)
    assert isinstance(dataset.train, Images)
    assert dataset.train.labels.bincount(minlength=classes).min() > 0
    # The published statistics are those of these images.
    counts = torch.stack(
        [plane.flatten().bincount(minlength=256) for plane in dataset.train.images.unbind(1)]
    )
    values = torch.arange(256) / 255
    fraction = counts / counts.sum(1, keepdim=True)
    mean = fraction @ values
    std = (fraction @ values.square() - mean.square()).sqrt()
    assert mean.tolist() == pytest.approx(dataset.mean, abs=2e-4)
    assert std.tolist() == pytest.approx(dataset.std, abs=2e-4)
