"""Pictures: every form on the disk is read, and nothing else; parts and batches are what they say."""

from __future__ import annotations

import gzip
import io
import multiprocessing
import os
import pickle
import sys
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from torch import Tensor
from torch.nn.functional import avg_pool2d, pad

from gadam.train import data
from gadam.train.data import DataError, Folder, Images, batches, load

# ------------------------------------------------------------------------------------- writing files

Pair = tuple[np.ndarray, list[int]]


def pictures(count: int, classes: int, *shape: int, seed: int = 0) -> Pair:
    """The highest label is among them, so that as many classes are found as there are."""
    rng = np.random.default_rng(seed)
    labels = rng.integers(classes, size=count).tolist()
    return rng.integers(256, size=(count, *shape), dtype=np.uint8), [*labels[:-1], classes - 1]


def write(file: Path, content: bytes) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(gzip.compress(content) if file.suffix == ".gz" else content)


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
    """As the official downloads were written: opcode by opcode, for no Python writes them today."""
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


def from_one(pair: Pair) -> Pair:
    return pair[0], [label + 1 for label in pair[1]]


def split(pair: Pair, count: int) -> list[Pair]:
    images = np.array_split(pair[0], count)
    ends = np.cumsum([len(piece) for piece in images])
    return [(piece, pair[1][end - len(piece) : end]) for piece, end in zip(images, ends)]


def in_files(
    train: Callable[[int], str], test: str, count: int, content: Callable[[Pair], bytes]
) -> Callable[[Path, Pair, Pair], None]:
    def lay(folder: Path, training: Pair, testing: Pair) -> None:
        for number, piece in enumerate(split(training, count), 1):
            write(folder / train(number), content(piece))
        write(folder / test, content(testing))

    return lay


def idx_files(end: str) -> Callable[[Path, Pair, Pair], None]:
    def lay(folder: Path, *parts: Pair) -> None:
        for stem, (images, labels) in zip(("train", "t10k"), parts):
            write(folder / f"{stem}-images-idx3-ubyte{end}", idx(images.squeeze(1)))
            write(folder / f"{stem}-labels-idx1-ubyte{end}", idx(labels))

    return lay


TENTHS = "data_batch_{}.bin".format, "test_batch.bin", 5
TENTHS_PY = "data_batch_{}".format, "test_batch", 5
BINARY = (lambda _: "train.bin"), "test.bin", 1
PYTHON = (lambda _: "train"), "test", 1
NPZ = "train_data_batch_{}.npz".format, "val_data.npz", 11
PICKLED = "train_data_batch_{}".format, "val_data", 2
RGB, GREY = (3, 32, 32), (1, 28, 28)
C10, C100, IN32 = ("cifar10", 10, RGB), ("cifar100", 100, RGB), ("imagenet32", 7, RGB)

# Each form: the set and its classes and shape, the folder, how it is laid out there.
FORMS: dict[
    str, tuple[tuple[str, int, tuple[int, ...]], str, Callable[[Path, Pair, Pair], None]]
] = {
    "cifar10": (C10, "cifar-10-batches-bin", in_files(*TENTHS, records)),
    "cifar10-py": (
        C10,
        "cifar-10-batches-py",
        in_files(*TENTHS_PY, lambda pair: python_2(pair, "labels")),
    ),
    "cifar100": (
        C100,
        "cifar-100-binary",
        in_files(*BINARY, lambda pair: records(pair, coarse=b"\x13")),
    ),
    "cifar100-py": (
        C100,
        "cifar-100-python",
        in_files(*PYTHON, lambda pair: python_2(pair, "fine_labels")),
    ),
    "cifar100-py3": (
        C100,
        "cifar-100-python",
        in_files(*PYTHON, lambda pair: python_3(pair, "fine_labels", 2, as_bytes=True)),
    ),
    "mnist": (("mnist", 10, GREY), "MNIST/raw", idx_files("")),
    "mnist-gz": (("mnist", 10, GREY), "mnist", idx_files(".gz")),
    "fashion": (("fashion-mnist", 10, GREY), "FashionMNIST/raw", idx_files("")),
    "fashion-gz": (("fashion-mnist", 10, GREY), "fashion-mnist", idx_files(".gz")),
    "imagenet32": (IN32, "imagenet32", in_files(*NPZ, npz)),
    "imagenet32-py": (
        IN32,
        "imagenet32",
        in_files(*PICKLED, lambda pair: python_3(from_one(pair), "labels")),
    ),
}
every_form = pytest.mark.parametrize("form", FORMS)


def lay_out(form: str, root: Path, directly: bool = False) -> tuple[str, Path, Pair, Pair]:
    (name, classes, shape), folder, lay = FORMS[form]
    folder = "" if directly else folder
    training, testing = pictures(23, classes, *shape), pictures(5, classes, *shape, seed=1)
    lay(root / folder, training, testing)
    return name, root / folder, training, testing


def same(part: Images | Folder, pair: Pair) -> bool:
    assert isinstance(part, Images)
    assert part.images.dtype == torch.uint8
    assert part.images.is_contiguous()
    assert part.labels.dtype == torch.int64
    return np.array_equal(part.images.numpy(), pair[0]) and part.labels.tolist() == pair[1]


# ------------------------------------------------------------------------------------- reading them


@every_form
@pytest.mark.parametrize("directly", [False, True])
def test_each_form_is_read(form: str, directly: bool, tmp_path: Path) -> None:
    name, _, training, testing = lay_out(form, tmp_path, directly)
    dataset = load(name, tmp_path)
    assert dataset.name == name
    assert same(dataset.train, training)
    assert same(dataset.test, testing)
    assert dataset.num_classes == FORMS[form][0][1]
    assert dataset.input_shape == training[0].shape[1:]
    assert len(dataset.mean) == len(dataset.std) == dataset.input_shape[0]
    assert len(dataset.train) == 23


def test_an_array_by_columns_is_read(tmp_path: Path) -> None:
    pixels, labels = pictures(6, 100, 3072)
    by_columns = {b"data": np.asfortranarray(pixels), b"fine_labels": labels}
    for file in ("train", "test"):
        write(tmp_path / file, pickle.dumps(by_columns, 2))
    assert same(load("cifar100", tmp_path).train, (pixels.reshape(-1, *RGB), labels))


def test_the_environment_says_where(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lay_out("cifar100", tmp_path)
    monkeypatch.setenv("GADAM_DATA", str(tmp_path))
    assert len(load("cifar100").train) == 23
    monkeypatch.delenv("GADAM_DATA")
    monkeypatch.setenv("HOME", str(tmp_path / "nobody"))
    with pytest.raises(DataError, match=r"nobody/\.cache/gadam/data/cifar-100-binary/train\.bin"):
        load("cifar100")


@pytest.mark.parametrize("spelt", ["CIFAR-100", "cifar_100", "Cifar 100", "cifar100"])
def test_names_are_matched_forgivingly(spelt: str, tmp_path: Path) -> None:
    lay_out("cifar100", tmp_path)
    assert load(spelt, tmp_path).name == "cifar100"


def test_an_unknown_name_gets_a_hint() -> None:
    with pytest.raises(ValueError, match=r"no data set 'fasion-mini': did you mean fashion-mini\?"):
        load("fasion-mini")
    with pytest.raises(ValueError, match=r"there are fashion-mini, cifar10, .*imagenet$"):
        load("quux")


def refused(name: str, root: Path, match: str) -> None:
    with pytest.raises(DataError, match=match) as error:
        load(name, root)
    assert "\n" not in str(error.value)


@every_form
def test_what_is_missing_is_named_with_a_way_out(form: str, tmp_path: Path) -> None:
    name, folder, *_ = lay_out(form, tmp_path)
    for file in sorted(folder.iterdir()):
        if "imagenet32" in form and "train" in file.name:
            continue  # any number of them will do
        content = file.read_bytes()
        file.unlink()
        way_out = (
            "with an account of your own" if name == "imagenet32" else f"run `gadam data {name}`"
        )
        refused(name, tmp_path, f"{file.name} is missing: {way_out}.* GADAM_DATA$")
        file.write_bytes(content)
    load(name, tmp_path)


@every_form
@pytest.mark.parametrize("keep", [0.0, 0.45, 0.999])
def test_a_truncated_file_is_named(form: str, keep: float, tmp_path: Path) -> None:
    name, folder, *_ = lay_out(form, tmp_path)
    for file in folder.iterdir():
        content = file.read_bytes()
        file.write_bytes(content[: int(keep * len(content))])
        refused(name, tmp_path, f"{file.name} cannot be read .*GADAM_DATA$")
        file.write_bytes(content)


@every_form
def test_a_file_of_something_else_is_named(form: str, tmp_path: Path) -> None:
    name, folder, *_ = lay_out(form, tmp_path)
    for file in folder.iterdir():
        content = file.read_bytes()
        file.write_bytes(b"<html>404</html>")
        refused(name, tmp_path, f"{file.name} cannot be read .*GADAM_DATA$")
        file.write_bytes(content)


@pytest.mark.parametrize(
    ("form", "highest"),
    [("cifar10", 10), ("cifar100-py", 100), ("mnist", 10), ("imagenet32", 1000)],
)
def test_a_label_out_of_range_is_refused(form: str, highest: int, tmp_path: Path) -> None:
    (name, _, shape), _, lay = FORMS[form]
    images, labels = pictures(6, 5, *shape)
    lay(tmp_path, (images, [*labels[:-1], highest]), (images, labels))
    refused(name, tmp_path, "a label is out of range")


def test_pictures_and_labels_must_be_as_many(tmp_path: Path) -> None:
    _, folder, *_ = lay_out("mnist", tmp_path)
    write(folder / "train-labels-idx1-ubyte", idx([1, 2, 3]))
    refused("mnist", tmp_path, "23 pictures and 3 labels")


@given(shape=st.tuples(*[st.integers(1, 9)] * 3), change=st.integers(-20, 20))
def test_an_idx_file_has_exactly_the_length_that_it_says(
    shape: tuple[int, int, int], change: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    root = tmp_path_factory.mktemp("idx")
    images, labels = pictures(shape[0], 10, 1, *shape[1:])
    idx_files("")(root, (images, labels), (images, labels))
    file = root / "t10k-images-idx3-ubyte"
    content = file.read_bytes()
    file.write_bytes(content[:change] if change < 0 else content + bytes(change))
    if change:
        with pytest.raises(DataError, match="t10k-images-idx3-ubyte cannot be read"):
            load("mnist", root)
    else:
        assert same(load("mnist", root).test, (images, labels))


# ------------------------------------------------------------------------------------- pickles


class Touch:
    """Pickled, it makes who reads it create a file."""

    def __init__(self, file: Path) -> None:
        self.file = str(file)

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (self.file,)


@pytest.mark.parametrize("protocol", [0, 2, 4])
@pytest.mark.parametrize("name", ["cifar100", "imagenet32"])
def test_a_pickle_that_would_run_something_is_refused_and_not_run(
    name: str, protocol: int, tmp_path: Path
) -> None:
    marker = tmp_path / "was-run"
    evil = pickle.dumps({b"data": Touch(marker), b"fine_labels": [0]}, protocol)
    pickle.loads(evil)  # it does work
    marker.rmdir()
    files = ("train", "test") if name == "cifar100" else ("train_data_batch_1", "val_data")
    for file in files:
        write(tmp_path / file, evil)
    refused(name, tmp_path, r"it asks for (posix|nt)\.mkdir, which no array")
    assert not marker.exists()


@pytest.mark.parametrize(
    "asked", ["builtins\neval", "numpy\nload", "numpy\nndarray.tofile", "_codecs\nlookup"]
)
def test_nothing_but_arrays_is_in_reach_of_a_pickle(asked: str, tmp_path: Path) -> None:
    for file in ("train", "test"):
        write(tmp_path / file, b"\x80\x04c" + asked.encode() + b"\n.")
    refused("cifar100", tmp_path, f"it asks for {asked.replace(chr(10), '.')}, which")


def test_a_length_is_not_taken_for_pixels(tmp_path: Path) -> None:
    array: Any = np.zeros((2, 3072), np.uint8).__reduce__()
    _, shape, dtype, *_ = array[2]

    class Hollow:
        def __reduce__(self) -> tuple[Any, ...]:
            return array[0], array[1], (1, shape, dtype, False, 2 * 3072)

    for file in ("train", "test"):
        write(tmp_path / file, pickle.dumps({"data": Hollow(), "fine_labels": [1, 2]}, 4))
    refused("cifar100", tmp_path, r"train cannot be read \(its pixels are not bytes")


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
def test_a_pickle_of_something_else_is_refused(content: object, tmp_path: Path) -> None:
    for file in ("train", "test"):
        write(tmp_path / file, pickle.dumps(content, 4))
    refused("cifar100", tmp_path, "train cannot be read")


@pytest.mark.parametrize(
    ("pixels", "labels"),
    [
        (np.zeros((2, 3072), np.float32), np.ones(2, int)),
        (np.zeros((2, 3072), np.uint8), np.ones(2)),
        (np.zeros((2, 3072), np.uint8), np.zeros(2, int)),
        (np.zeros((2, 100), np.uint8), np.ones(2, int)),
        (np.array([Touch(Path("never"))], object), np.ones(1, int)),
    ],
)
def test_an_npz_of_something_else_is_refused(
    pixels: np.ndarray, labels: np.ndarray, tmp_path: Path
) -> None:
    for file in ("train_data_batch_1.npz", "val_data.npz"):
        np.savez(tmp_path / file, data=pixels, labels=labels)
    refused("imagenet32", tmp_path, r"train_data_batch_1\.npz cannot be read")


def test_a_missing_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lay_out("imagenet32", tmp_path)
    monkeypatch.setitem(sys.modules, "numpy", None)
    refused("imagenet32", tmp_path, r"^this needs numpy: pip install 'gadam\[train\]'$")


# ------------------------------------------------------------------------------------- fashion-mini


def test_fashion_mini_is_balanced_and_needs_no_folder() -> None:
    dataset = load("Fashion Mini", "nowhere")
    for part, each in ((dataset.train, 500), (dataset.test, 200)):
        assert isinstance(part, Images)
        assert part.labels.bincount().tolist() == [each] * 10
        assert part.images.shape == (10 * each, 1, 28, 28)
        values = part.images / 255
        assert values.mean().item() == pytest.approx(dataset.mean[0], abs=0.01)
        assert values.std().item() == pytest.approx(dataset.std[0], abs=0.01)


def test_fashion_mini_carries_its_licence() -> None:
    text = (Path(data.__file__).parent / "fashion_mini" / "LICENSE").read_text()
    assert "Copyright (c) 2017 Zalando SE" in text
    assert "MIT" in text


# ------------------------------------------------------------------------------------- parts


def numbered(labels: list[int]) -> Images:
    """Pictures whose one pixel, in two channels, says which they are."""
    places = torch.arange(len(labels))
    images = torch.stack([places // 256, places % 256], 1).to(torch.uint8)
    return Images(images.view(-1, 2, 1, 1), torch.tensor(labels, dtype=torch.int64))


def which(part: Images) -> list[int]:
    return (part.images.flatten(1).long() @ torch.tensor([256, 1])).tolist()


labels_and_count = st.lists(st.integers(0, 5), min_size=1, max_size=80).flatmap(
    lambda labels: st.tuples(st.just(labels), st.integers(0, len(labels)))
)


@given(drawn=labels_and_count, seed=st.integers(-3, 3))
def test_held_out_is_disjoint_complete_and_balanced(
    drawn: tuple[list[int], int], seed: int
) -> None:
    labels, count = drawn
    part = numbered(labels)
    rest, held = data.held_out(part, count, seed)
    assert len(held) == count
    assert sorted(which(rest) + which(held)) == list(range(len(labels)))
    assert [labels[place] for place in which(held)] == held.labels.tolist()
    assert [labels[place] for place in which(rest)] == rest.labels.tolist()
    picked, there = held.labels.bincount(minlength=6), part.labels.bincount(minlength=6)
    # A class has fewer than the others only by one, or because there are no more of it.
    assert ((picked >= picked.max() - 1) | (picked == there)).all()
    assert which(data.held_out(part, count, seed)[1]) == which(held)


def test_another_seed_and_another_purpose_pick_others() -> None:
    part = numbered([0, 1] * 200)
    picks = [which(data.subset(part, 40, seed)) for seed in (0, 1)]
    picks.append(which(data.held_out(part, 40)[1]))
    assert len({tuple(pick) for pick in picks}) == 3
    assert which(data.subset(part, 40)) == picks[0] == sorted(picks[0])


@pytest.mark.parametrize("count", [-1, 5])
def test_no_more_can_be_picked_than_there_are(count: int) -> None:
    for pick in (data.held_out, data.subset):
        with pytest.raises(ValueError, match=f"cannot pick {count} out of 4 pictures"):
            pick(numbered([0] * 4), count)


@given(count=st.integers(1, 300), fraction=st.floats(0, 1), seed=st.integers(0, 5))
def test_label_noise_redraws_exactly_its_fraction(count: int, fraction: float, seed: int) -> None:
    part = numbered([7] * count)
    # Of a thousand million classes, none is drawn again.
    noisy = data.with_label_noise(part, fraction, 10**9, seed)
    assert int((noisy.labels != 7).sum()) == round(fraction * count)
    assert part.labels.tolist() == [7] * count
    assert noisy.labels.equal(data.with_label_noise(part, fraction, 10**9, seed).labels)
    assert noisy.images.equal(part.images)


def test_label_noise_draws_uniformly_from_all_classes() -> None:
    noisy = data.with_label_noise(numbered([3] * 5000), 1, 5)
    assert noisy.labels.bincount().float() / 5000 == pytest.approx([0.2] * 5, abs=0.03)


@pytest.mark.parametrize("fraction", [-0.1, 1.1, float("nan")])
def test_label_noise_refuses_what_is_no_fraction(fraction: float) -> None:
    with pytest.raises(ValueError, match=r"must be in \[0, 1\]"):
        data.with_label_noise(numbered([0]), fraction, 2)


def test_resizing_averages() -> None:
    images, labels = pictures(1500, 10, 3, 8, 8)
    part = Images(torch.from_numpy(images), torch.tensor(labels))
    small = data.resized(part, 4)
    assert small.images.equal(avg_pool2d(part.images.float(), 2).round().to(torch.uint8))
    assert small.labels is part.labels
    assert data.resized(part, 3).images.shape == (1500, 3, 3, 3)
    with pytest.raises(ValueError, match="cannot be 0"):
        data.resized(part, 0)


# ------------------------------------------------------------------------------------- batches

GREY_LEVELS: dict[str, Any] = {"mean": (100 / 255, 50.4 / 255), "std": (1 / 255, 2 / 255)}


def levels(images: Tensor) -> Tensor:
    """From normalised pictures back to bytes."""
    values = images.float() * torch.tensor([1.0, 2.0]).view(-1, 1, 1)
    return (values + torch.tensor([100, 50.4]).view(-1, 1, 1)).round().to(torch.uint8)


def whole(part: Images | Folder, batch_size: int = 7, **options: Any) -> tuple[Tensor, Tensor]:
    images, labels = zip(*batches(part, batch_size, **{**GREY_LEVELS, **options}))
    return torch.cat(images), torch.cat(labels)


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@given(
    count=st.integers(0, 60),
    batch_size=st.integers(1, 70),
    drop_last=st.booleans(),
    shuffled=st.booleans(),
    augment=st.booleans(),
)
def test_a_pass_has_each_picture_once(
    count: int, batch_size: int, drop_last: bool, shuffled: bool, augment: bool
) -> None:
    part = numbered(list(range(count)))
    options: dict[str, Any] = {"drop_last": drop_last, "shuffle": seeded() if shuffled else None}
    got = list(batches(part, batch_size, augment=augment, pad=0, **options, **GREY_LEVELS))
    sizes = [len(labels) for _, labels in got]
    left = count % batch_size
    assert sizes == [batch_size] * (count // batch_size) + (
        [left] if left and not drop_last else []
    )
    seen = [label for _, labels in got for label in labels.tolist()]
    assert len(set(seen)) == len(seen)
    if not shuffled:
        assert seen == list(range(len(seen)))
    for images, labels in got:
        assert which(Images(levels(images), labels)) == labels.tolist()


def test_pictures_are_normalised() -> None:
    part = numbered([0, 1, 2])
    images, _ = next(batches(part, 3, mean=(0.5, 0.25), std=(0.1, 2.0)))
    expected = part.images / 255
    expected = (expected - torch.tensor([0.5, 0.25]).view(-1, 1, 1)) / torch.tensor(
        [0.1, 2.0]
    ).view(-1, 1, 1)
    torch.testing.assert_close(images, expected)
    assert next(batches(part, 3, dtype=torch.bfloat16, **GREY_LEVELS))[0].dtype == torch.bfloat16


def cuts(image: Tensor, edge: int) -> dict[tuple[int, int, int], Tensor]:
    """Everything that augmentation may make of a picture."""
    height, width = image.shape[1:]
    padded = torch.stack(
        [pad(image[0], [edge] * 4, value=100), pad(image[1], [edge] * 4, value=50)]
    )
    return {
        (mirrored, down, right): cut.flip(-1) if mirrored else cut
        for mirrored, down, right in product((0, 1), *[range(2 * edge + 1)] * 2)
        for cut in [padded[:, down : down + height, right : right + width]]
    }


def random_part(count: int, height: int, width: int) -> Images:
    images = torch.randint(256, (count, 2, height, width), generator=seeded(), dtype=torch.uint8)
    return Images(images, torch.arange(count))


@given(
    height=st.integers(1, 6),
    width=st.integers(1, 6),
    edge=st.integers(0, 4),
    batch_size=st.integers(1, 12),
)
def test_augmented_is_a_cut_of_the_padded_picture_or_of_its_mirror_image(
    height: int, width: int, edge: int, batch_size: int
) -> None:
    part = random_part(10, height, width)
    images, labels = whole(part, batch_size, augment=True, shuffle=seeded(), pad=edge)
    for image, label in zip(levels(images), labels):
        assert any(image.equal(cut) for cut in cuts(part.images[label], edge).values())


def test_every_cut_and_mirroring_is_drawn_equally_often() -> None:
    part = random_part(1, 5, 5)
    possible = cuts(part.images[0], 1)
    repeated = Images(part.images.repeat(3600, 1, 1, 1), part.labels.repeat(3600))
    images, _ = whole(repeated, 100, augment=True, shuffle=seeded(), pad=1)
    made = levels(images)
    counts = {drawn: int((made == cut).flatten(1).all(1).sum()) for drawn, cut in possible.items()}
    assert sum(counts.values()) == 3600
    assert all(140 < count < 260 for count in counts.values())  # 200 each, give or take 4 sigma


def test_a_pass_is_determined_by_its_generator_when_it_is_asked_for() -> None:
    part = random_part(40, 6, 6)
    generator = seeded(3)
    before = torch.get_rng_state()
    abandoned = batches(part, 8, augment=True, shuffle=generator, **GREY_LEVELS)
    second = whole(part, 8, augment=True, shuffle=generator)
    next(abandoned)
    assert torch.get_rng_state().equal(before)

    generator = seeded(3)
    first = whole(part, 8, augment=True, shuffle=generator)
    again = whole(part, 8, augment=True, shuffle=generator)
    assert all(one.equal(other) for one, other in zip(second, again))
    assert not first[0].equal(again[0])


def test_a_batch_has_at_least_one_picture() -> None:
    with pytest.raises(ValueError, match="cannot be 0"):
        batches(numbered([0]), 0, **GREY_LEVELS)


# ------------------------------------------------------------------------------------- folders

# Of a machine with few cores, and of Python 3.12 and later, which would rather not fork.
few_cores = pytest.mark.filterwarnings(
    "ignore:This DataLoader will create", "ignore:This process.*is multi-threaded"
)
ONE: dict[str, Any] = {"mean": (0.0,) * 3, "std": (1 / 255,) * 3}


def save(file: Path, pixels: np.ndarray, mode: str = "RGB") -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels).convert(mode).save(file)


def noise(seed: int, height: int = 40, width: int = 50) -> np.ndarray:
    return np.random.default_rng(seed).integers(256, size=(height, width, 3), dtype=np.uint8)


@pytest.fixture
def imagenet(tmp_path: Path) -> Path:
    for part, label in product(("train", "val"), ("n02", "n01")):
        folder = tmp_path / "imagenet" / part / label
        save(folder / "a.JPEG", noise(1))
        save(folder / "b.jpg", noise(2), "L")
        save(folder / "c.JPG", noise(3), "CMYK")
        save(folder / "d.png", noise(4), "P")
        save(folder / "e.jpeg", noise(5, 9, 90))
        (folder / "notes.txt").write_text("not a picture")
    return tmp_path


@pytest.mark.parametrize("place", ["imagenet", "", "imagenet-sample"])
def test_folders_are_classes(place: str, imagenet: Path, tmp_path: Path) -> None:
    root = tmp_path / "elsewhere"
    root.mkdir()
    (imagenet / "imagenet").rename(root / (place or "moved"))
    dataset = load("imagenet", root / ("" if place else "moved"))
    assert isinstance(dataset.train, Folder)
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
    with pytest.raises(
        DataError, match=r"not the same folders of classes as .*account of your own"
    ):
        load("imagenet", imagenet)


def test_imagenet_says_what_is_missing(tmp_path: Path) -> None:
    refused("imagenet", tmp_path, "imagenet/train is missing: with an account of your own")
    (tmp_path / "imagenet" / "train" / "n01").mkdir(parents=True)
    refused("imagenet", tmp_path, "imagenet/val is missing")
    (tmp_path / "imagenet" / "val" / "n01").mkdir(parents=True)
    refused("imagenet", tmp_path, "imagenet/train has no pictures")


def test_parts_of_a_folder(imagenet: Path) -> None:
    part = load("imagenet", imagenet).train
    assert isinstance(part, Folder)
    rest, held = data.held_out(part, 4)
    assert held.labels.tolist() == [0, 0, 1, 1]
    assert {*rest.files, *held.files} == {*part.files}
    assert not {*rest.files} & {*held.files}
    assert data.with_label_noise(part, 1, 10**9).files == part.files


def of_folder(part: Images | Folder, workers: int, **options: Any) -> tuple[Tensor, Tensor]:
    return whole(part, 3, size=16, workers=workers, **{**ONE, **options})


@few_cores
def test_workers_change_nothing_and_stay(imagenet: Path) -> None:
    part = load("imagenet", imagenet).train
    generators = seeded(1), seeded(1)
    children = []
    passes = []
    for _ in range(2):
        alone, helped = (
            of_folder(part, workers, augment=True, shuffle=generator)
            for workers, generator in zip((0, 2), generators)
        )
        assert alone[0].shape == (10, 3, 16, 16)
        assert alone[0].equal(helped[0])
        assert alone[1].equal(helped[1])
        passes.append(alone[0][alone[1].argsort(stable=True)])
        children.append({child.pid for child in multiprocessing.active_children()})
    assert len(children[0]) >= 2
    assert children[0] == children[1]
    assert not passes[0].equal(passes[1])


@few_cores
def test_two_passes_at_once_do_not_meet(imagenet: Path) -> None:
    part = load("imagenet", imagenet).train
    expected = of_folder(part, 0)[0]
    of_folder(part, 1)  # whose worker is now idle
    passes = (batches(part, 3, size=16, workers=1, **ONE) for _ in range(2))
    for (one, _), (other, _), third in zip(*passes, expected.split(3)):
        assert one.equal(third)
        assert other.equal(third)


@pytest.fixture
def spawning() -> Iterator[None]:
    before = multiprocessing.get_start_method()
    multiprocessing.set_start_method("spawn", force=True)
    yield
    multiprocessing.set_start_method(before, force=True)


@few_cores
@pytest.mark.usefixtures("spawning")
def test_workers_can_be_spawned(imagenet: Path) -> None:
    part = load("imagenet", imagenet).train
    assert of_folder(part, 1)[0].equal(of_folder(part, 0)[0])


@few_cores
@pytest.mark.parametrize("workers", [0, 1])
def test_a_picture_that_cannot_be_decoded_is_named(workers: int, imagenet: Path) -> None:
    file = imagenet / "imagenet" / "train" / "n02" / "a.JPEG"
    file.write_bytes(file.read_bytes()[:700])
    part = load("imagenet", imagenet).train
    with pytest.raises(DataError, match=r"n02/a\.JPEG cannot be decoded \(.*\): replace") as error:
        of_folder(part, workers)
    assert "\n" not in str(error.value)


def position(height: int, width: int) -> np.ndarray:
    """Red says how far right a pixel is, green how far down."""
    down, right = np.mgrid[:height, :width]
    return np.stack([right, down, 0 * down], -1).astype(np.uint8)


def test_the_middle_is_cut_when_not_augmented(tmp_path: Path) -> None:
    save(tmp_path / "a.png", position(128, 256))
    image = of_folder(Folder((tmp_path / "a.png",), torch.zeros(1)), 0)[0][0]
    # 7/8 of the short side, centred: the first and last of 16 pixels are 7 wide.
    assert image[0, 0, [0, -1]].tolist() == pytest.approx([75, 180], abs=1)
    assert image[1, [0, -1], 0].tolist() == pytest.approx([11, 116], abs=1)
    assert image[0].std(0).max() == 0


def test_random_cuts_have_the_scale_and_ratio_that_they_should(tmp_path: Path) -> None:
    save(tmp_path / "a.png", position(200, 250))
    part = Folder((tmp_path / "a.png",) * 200, torch.zeros(200))
    images = of_folder(part, 0, augment=True, shuffle=seeded())[0]
    wide = (images[:, 0, 0, -1] - images[:, 0, 0, 0]) * 16 / 15
    tall = (images[:, 1, -1, 0] - images[:, 1, 0, 0]) * 16 / 15
    assert 0.4 < (wide < 0).float().mean() < 0.6  # mirrored
    area, ratio = wide.abs() * tall / (200 * 250), wide.abs() / tall
    assert 0.07 < area.min() < 0.15
    assert 0.85 < area.max() < 1.03
    assert 0.72 < ratio.min() < 0.8
    assert 1.25 < ratio.max() < 1.4


@pytest.mark.parametrize(("height", "width"), [(1, 200), (200, 1), (1, 1)])
def test_a_very_long_picture_is_cut_too(height: int, width: int, tmp_path: Path) -> None:
    save(tmp_path / "a.png", noise(0, height, width))
    part = Folder((tmp_path / "a.png",) * 20, torch.zeros(20))
    for augment in (True, False):
        assert of_folder(part, 0, augment=augment)[0].shape == (20, 3, 16, 16)


# ------------------------------------------------------------------------------------- the true files


@pytest.mark.parametrize(
    ("name", "train", "test", "classes"),
    [
        ("cifar10", 50_000, 10_000, 10),
        ("cifar100", 50_000, 10_000, 100),
        ("mnist", 60_000, 10_000, 10),
        ("fashion-mnist", 60_000, 10_000, 10),
    ],
)
def test_the_true_files(name: str, train: int, test: int, classes: int) -> None:
    if "GADAM_DATA" not in os.environ:
        pytest.skip("GADAM_DATA does not say where they are")
    try:
        dataset = load(name)
    except DataError as error:
        pytest.skip(str(error))
    assert (len(dataset.train), len(dataset.test), dataset.num_classes) == (train, test, classes)
    assert isinstance(dataset.train, Images)
    assert dataset.train.labels.bincount(minlength=classes).min() > 0
    # The published statistics are of these very pictures.
    counts = torch.stack(
        [plane.flatten().bincount(minlength=256) for plane in dataset.train.images.unbind(1)]
    )
    values = torch.arange(256) / 255
    share = counts / counts.sum(1, keepdim=True)
    mean = share @ values
    std = (share @ values.square() - mean.square()).sqrt()
    assert mean.tolist() == pytest.approx(dataset.mean, abs=2e-4)
    assert std.tolist() == pytest.approx(dataset.std, abs=2e-4)
