"""Batches: every image once, normalized, augmented as documented, and reproducible."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
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
from torch.nn.functional import pad

from gadam.train.data import DataError, ImageFiles, Images, batches
from numbered_images import indices, numbered

TWO_CHANNELS: dict[str, Any] = {"mean": (100 / 255, 50.4 / 255), "std": (1 / 255, 2 / 255)}


def to_bytes(images: Tensor) -> Tensor:
    """Undo the normalization by TWO_CHANNELS."""
    values = images.float() * torch.tensor([1.0, 2.0]).view(-1, 1, 1)
    return (values + torch.tensor([100, 50.4]).view(-1, 1, 1)).round().to(torch.uint8)


def full_pass(
    split: Images | ImageFiles, batch_size: int = 7, **options: Any
) -> tuple[Tensor, Tensor]:
    images, labels = zip(*batches(split, batch_size, **{**TWO_CHANNELS, **options}))
    return torch.cat(images), torch.cat(labels)


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


# ----------------------------------------------------------------------------------- in memory


@given(
    count=st.integers(0, 60),
    batch_size=st.integers(1, 70),
    shuffled=st.booleans(),
    augment=st.booleans(),
)
def test_pass_has_each_image_once(
    count: int, batch_size: int, shuffled: bool, augment: bool
) -> None:
    split = numbered(list(range(count)))
    shuffle = seeded() if shuffled else None
    drawn = list(
        batches(split, batch_size, augment=augment, pad=0, shuffle=shuffle, **TWO_CHANNELS)
    )
    sizes = [len(labels) for _, labels in drawn]
    left = count % batch_size
    assert sizes == [batch_size] * (count // batch_size) + ([left] if left else [])
    seen = [label for _, labels in drawn for label in labels.tolist()]
    assert sorted(seen) == list(range(count))
    if not shuffled:
        assert seen == list(range(count))
    for images, labels in drawn:
        assert indices(Images(to_bytes(images), labels)) == labels.tolist()


def test_images_are_normalized() -> None:
    split = numbered([0, 1, 2])
    images, _ = next(batches(split, 3, mean=(0.5, 0.25), std=(0.1, 2.0)))
    expected = split.images / 255
    expected = (expected - torch.tensor([0.5, 0.25]).view(-1, 1, 1)) / torch.tensor(
        [0.1, 2.0]
    ).view(-1, 1, 1)
    torch.testing.assert_close(images, expected)


def possible_crops(image: Tensor, edge: int) -> dict[tuple[int, int, int], Tensor]:
    """Return everything that augmentation can make of an image."""
    height, width = image.shape[1:]
    padded = torch.stack(
        [pad(image[0], [edge] * 4, value=100), pad(image[1], [edge] * 4, value=50)]
    )
    return {
        (flipped, down, right): crop.flip(-1) if flipped else crop
        for flipped, down, right in product((0, 1), *[range(2 * edge + 1)] * 2)
        for crop in [padded[:, down : down + height, right : right + width]]
    }


def random_images(count: int, height: int, width: int) -> Images:
    images = torch.randint(256, (count, 2, height, width), generator=seeded(), dtype=torch.uint8)
    return Images(images, torch.arange(count))


@given(
    height=st.integers(1, 6),
    width=st.integers(1, 6),
    edge=st.integers(0, 4),
    batch_size=st.integers(1, 12),
)
def test_augmented_image_is_a_crop_of_the_padded_image_or_its_mirror_image(
    height: int, width: int, edge: int, batch_size: int
) -> None:
    split = random_images(10, height, width)
    images, labels = full_pass(split, batch_size, augment=True, shuffle=seeded(), pad=edge)
    for image, label in zip(to_bytes(images), labels):
        assert any(image.equal(crop) for crop in possible_crops(split.images[label], edge).values())


def test_every_crop_and_flip_is_equally_likely() -> None:
    split = random_images(1, 5, 5)
    possible = possible_crops(split.images[0], 1)
    repeated = Images(split.images.repeat(3600, 1, 1, 1), split.labels.repeat(3600))
    images, _ = full_pass(repeated, 100, augment=True, shuffle=seeded(), pad=1)
    made = to_bytes(images)
    counts = {
        drawn: int((made == crop).flatten(1).all(1).sum()) for drawn, crop in possible.items()
    }
    assert sum(counts.values()) == 3600
    assert all(140 < count < 260 for count in counts.values())  # 200 each, within 4 sigma


def test_all_random_numbers_are_drawn_at_the_call() -> None:
    split = random_images(40, 6, 6)
    generator = seeded(3)
    before = torch.get_rng_state()
    abandoned = batches(split, 8, augment=True, shuffle=generator, **TWO_CHANNELS)
    second = full_pass(split, 8, augment=True, shuffle=generator)
    next(abandoned)
    assert torch.get_rng_state().equal(before)

    generator = seeded(3)
    first = full_pass(split, 8, augment=True, shuffle=generator)
    again = full_pass(split, 8, augment=True, shuffle=generator)
    assert all(one.equal(other) for one, other in zip(second, again))
    assert not first[0].equal(again[0])


def test_empty_batch_raises() -> None:
    with pytest.raises(ValueError, match="batch_size must be at least 1, got 0"):
        batches(numbered([0]), 0, **TWO_CHANNELS)


# ---------------------------------------------------------------------------------- from files

# Ignore warnings about machines with few cores, and about forking in Python 3.12 and later.
few_cores = pytest.mark.filterwarnings(
    "ignore:This DataLoader will create", "ignore:This process.*is multi-threaded"
)
UNCHANGED: dict[str, Any] = {"mean": (0.0,) * 3, "std": (1 / 255,) * 3}


def save(file: Path, pixels: np.ndarray, mode: str = "RGB") -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels).convert(mode).save(file)


def noise(seed: int, height: int = 40, width: int = 50) -> np.ndarray:
    return np.random.default_rng(seed).integers(256, size=(height, width, 3), dtype=np.uint8)


@pytest.fixture
def files(tmp_path: Path) -> ImageFiles:
    for label in ("n01", "n02"):
        folder = tmp_path / label
        save(folder / "a.JPEG", noise(1))
        save(folder / "b.jpg", noise(2), "L")
        save(folder / "c.JPG", noise(3), "CMYK")
        save(folder / "d.png", noise(4), "P")
        save(folder / "e.jpeg", noise(5, 9, 90))
    found = tuple(sorted(file for file in tmp_path.rglob("*") if file.is_file()))
    return ImageFiles(found, torch.tensor([0] * 5 + [1] * 5), size=16)


def decoded(split: ImageFiles, workers: int, **options: Any) -> tuple[Tensor, Tensor]:
    return full_pass(split, 3, workers=workers, **{**UNCHANGED, **options})


@few_cores
def test_workers_persist_and_do_not_change_images(files: ImageFiles) -> None:
    generators = seeded(1), seeded(1)
    children = []
    passes = []
    for _ in range(2):
        alone, helped = (
            decoded(files, workers, augment=True, shuffle=generator)
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
def test_concurrent_passes_are_independent(files: ImageFiles) -> None:
    expected = decoded(files, 0)[0]
    decoded(files, 1)  # leaves an idle worker
    passes = (batches(files, 3, workers=1, **UNCHANGED) for _ in range(2))
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
def test_workers_can_be_spawned(files: ImageFiles) -> None:
    assert decoded(files, 1)[0].equal(decoded(files, 0)[0])


@few_cores
@pytest.mark.parametrize("workers", [0, 1])
def test_damaged_image_is_named(workers: int, files: ImageFiles) -> None:
    file = next(file for file in files.files if file.match("n02/a.JPEG"))
    file.write_bytes(file.read_bytes()[:700])
    with pytest.raises(DataError, match=r"Cannot decode .*n02/a\.JPEG \(.*\)\. Replace") as error:
        decoded(files, workers)
    assert "\n" not in str(error.value)


def coordinates(height: int, width: int) -> np.ndarray:
    """Return an image: red is the column of a pixel, green its row."""
    down, right = np.mgrid[:height, :width]
    return np.stack([right, down, 0 * down], -1).astype(np.uint8)


def repeated(file: Path, count: int) -> ImageFiles:
    return ImageFiles((file,) * count, torch.zeros(count), size=16)


def test_center_is_cropped_without_augmentation(tmp_path: Path) -> None:
    save(tmp_path / "a.png", coordinates(128, 256))
    image = decoded(repeated(tmp_path / "a.png", 1), 0)[0][0]
    # 7/8 of the short side, centered. The first and last of 16 pixels are 7 wide.
    assert image[0, 0, [0, -1]].tolist() == pytest.approx([75, 180], abs=1)
    assert image[1, [0, -1], 0].tolist() == pytest.approx([11, 116], abs=1)
    assert image[0].std(0).max() == 0


def test_random_crops_have_the_documented_scale_and_ratio(tmp_path: Path) -> None:
    save(tmp_path / "a.png", coordinates(200, 250))
    images = decoded(repeated(tmp_path / "a.png", 200), 0, augment=True, shuffle=seeded())[0]
    wide = (images[:, 0, 0, -1] - images[:, 0, 0, 0]) * 16 / 15
    tall = (images[:, 1, -1, 0] - images[:, 1, 0, 0]) * 16 / 15
    assert 0.4 < (wide < 0).float().mean() < 0.6  # flipped
    area, ratio = wide.abs() * tall / (200 * 250), wide.abs() / tall
    assert 0.07 < area.min() < 0.15
    assert 0.85 < area.max() < 1.03
    assert 0.72 < ratio.min() < 0.8
    assert 1.25 < ratio.max() < 1.4


@pytest.mark.parametrize(("height", "width"), [(1, 200), (200, 1), (1, 1)])
def test_very_long_image_is_cropped(height: int, width: int, tmp_path: Path) -> None:
    save(tmp_path / "a.png", noise(0, height, width))
    for augment in (True, False):
        images, _ = decoded(repeated(tmp_path / "a.png", 20), 0, augment=augment)
        assert images.shape == (20, 3, 16, 16)
