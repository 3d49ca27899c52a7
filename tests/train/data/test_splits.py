"""Derived splits: balanced, disjoint, reproducible."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.functional import avg_pool2d

from gadam.train import data
from gadam.train.data import ImageFiles, Images
from image_layouts import draw_images
from numbered_images import indices, numbered

labels_and_count = st.lists(st.integers(0, 5), min_size=1, max_size=80).flatmap(
    lambda labels: st.tuples(st.just(labels), st.integers(0, len(labels)))
)


@given(drawn=labels_and_count, seed=st.integers(-3, 3))
def test_held_out_is_disjoint_complete_and_balanced(
    drawn: tuple[list[int], int], seed: int
) -> None:
    labels, count = drawn
    split = numbered(labels)
    rest, held = data.held_out(split, count, seed)
    assert len(held) == count
    assert sorted(indices(rest) + indices(held)) == list(range(len(labels)))
    assert [labels[i] for i in indices(held)] == held.labels.tolist()
    assert [labels[i] for i in indices(rest)] == rest.labels.tolist()
    picked, available = held.labels.bincount(minlength=6), split.labels.bincount(minlength=6)
    # A class may have one image less than the others, or fewer if it has no more.
    assert ((picked >= picked.max() - 1) | (picked == available)).all()
    assert indices(data.held_out(split, count, seed)[1]) == indices(held)


def test_seed_and_purpose_change_the_choice() -> None:
    split = numbered([0, 1] * 200)
    picks = [indices(data.subset(split, 40, seed)) for seed in (0, 1)]
    picks.append(indices(data.held_out(split, 40)[1]))
    assert len({tuple(pick) for pick in picks}) == 3
    assert indices(data.subset(split, 40)) == picks[0] == sorted(picks[0])


@pytest.mark.parametrize("count", [-1, 5])
def test_impossible_count_raises(count: int) -> None:
    for pick in (data.held_out, data.subset):
        with pytest.raises(ValueError, match=f"Cannot pick {count} of 4 images"):
            pick(numbered([0] * 4), count)


@given(count=st.integers(1, 300), fraction=st.floats(0, 1), seed=st.integers(0, 5))
def test_label_noise_redraws_exactly_its_fraction(count: int, fraction: float, seed: int) -> None:
    split = numbered([7] * count)
    # With a billion classes, no label is redrawn to its old value.
    noisy = data.with_label_noise(split, fraction, 10**9, seed)
    assert int((noisy.labels != 7).sum()) == round(fraction * count)
    assert split.labels.tolist() == [7] * count
    assert noisy.labels.equal(data.with_label_noise(split, fraction, 10**9, seed).labels)
    assert noisy.images.equal(split.images)


def test_label_noise_is_uniform_over_classes() -> None:
    noisy = data.with_label_noise(numbered([3] * 5000), 1, 5)
    assert noisy.labels.bincount().float() / 5000 == pytest.approx([0.2] * 5, abs=0.03)


@pytest.mark.parametrize("fraction", [-0.1, 1.1, float("nan")])
def test_label_noise_outside_unit_interval_raises(fraction: float) -> None:
    with pytest.raises(ValueError, match=r"fraction must be in \[0, 1\]"):
        data.with_label_noise(numbered([0]), fraction, 2)


def test_resizing_averages_pixels() -> None:
    images, labels = draw_images(1500, 10, 3, 8, 8)
    split = Images(torch.from_numpy(images), torch.tensor(labels))
    small = data.resized(split, 4)
    assert small.images.equal(avg_pool2d(split.images.float(), 2).round().to(torch.uint8))
    assert small.labels is split.labels
    assert data.resized(split, 3).images.shape == (1500, 3, 3, 3)
    with pytest.raises(ValueError, match="at least 1, got 0"):
        data.resized(split, 0)


def test_splits_of_image_files() -> None:
    files = tuple(Path(f"{number}.png") for number in range(10))
    split = ImageFiles(files, torch.tensor([0] * 5 + [1] * 5), size=16)
    rest, held = data.held_out(split, 4)
    assert held.labels.tolist() == [0, 0, 1, 1]
    assert {*rest.files, *held.files} == {*split.files}
    assert not {*rest.files} & {*held.files}
    assert held.shape == (3, 16, 16)
    assert data.with_label_noise(split, 1, 10**9).files == split.files


@given(
    labels=st.lists(st.integers(0, 5), min_size=1, max_size=80),
    fraction=st.floats(0, 0.99),
    seed=st.integers(-3, 3),
)
def test_held_out_fraction_is_that_of_every_class(
    labels: list[int], fraction: float, seed: int
) -> None:
    split = numbered(labels)
    rest, held = data.held_out_fraction(split, fraction, seed)
    assert sorted(indices(rest) + indices(held)) == list(range(len(labels)))
    assert indices(data.held_out_fraction(split, fraction, seed)[1]) == indices(held)
    for label in set(labels):
        available, picked = labels.count(label), held.labels.tolist().count(label)
        assert picked < available, "every class can be learned"
        assert abs(picked - fraction * available) <= 1
        assert not (fraction and available > 1) or picked >= 1, "every class is tested"


@pytest.mark.parametrize("fraction", [-0.1, 1, 2.0])
def test_held_out_fraction_out_of_range_raises(fraction: float) -> None:
    with pytest.raises(ValueError, match=r"fraction must be in \[0, 1\)"):
        data.held_out_fraction(numbered([0, 1]), fraction)
