"""Deriving image splits from others: held-out images, subsets, label noise, smaller images."""

from __future__ import annotations

import zlib
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn.functional import adaptive_avg_pool2d

from gadam.train.data.dataset import ImageFiles, SplitT

__all__ = ["held_out", "held_out_fraction", "resized", "subset", "with_label_noise"]


def held_out(split: SplitT, count: int, seed: int = 0) -> tuple[SplitT, SplitT]:
    """Hold out images, the same number per class as far as possible.

    Args:
        split: The images to divide.
        count: The number of images to hold out.
        seed: Determines the choice.

    Returns:
        The remaining images, and those held out.

    Example:
        >>> from gadam.train.data import load
        >>> rest, held = held_out(load("fashion-mini").train, 500)
        >>> len(rest), held.labels.bincount().unique().tolist()
        (4500, [50])
    """
    picked = _balanced(split.labels, count, _generator("held out", seed))
    return _select(split, ~picked), _select(split, picked)


def held_out_fraction(split: SplitT, fraction: float, seed: int = 0) -> tuple[SplitT, SplitT]:
    """Hold out the same fraction of every class, at least one image if it has several.

    Args:
        split: The images to divide.
        fraction: The fraction to hold out.
        seed: Determines the choice.

    Returns:
        The remaining images, and those held out.

    Example:
        >>> from gadam.train.data import load
        >>> rest, held = held_out_fraction(load("fashion-mini").train, 0.2)
        >>> len(rest), held.labels.bincount().unique().tolist()
        (4000, [100])
    """
    if not 0 <= fraction < 1:
        raise ValueError(f"fraction must be in [0, 1), got {fraction}.")
    order = torch.randperm(len(split), generator=_generator("held out", seed))
    picked = torch.zeros(len(split), dtype=torch.bool)
    for label in range(int(split.labels.max()) + 1):
        members = order[split.labels[order] == label]
        least = 1 if fraction and len(members) > 1 else 0
        count = max(min(round(fraction * len(members)), len(members) - 1), least)
        picked[members[:count]] = True
    return _select(split, ~picked), _select(split, picked)


def subset(split: SplitT, count: int, seed: int = 0) -> SplitT:
    """Pick images, the same number per class as far as possible.

    Args:
        split: The images to pick from.
        count: The number of images to pick.
        seed: Determines the choice.
    """
    return _select(split, _balanced(split.labels, count, _generator("subset", seed)))


def with_label_noise(split: SplitT, fraction: float, num_classes: int, seed: int = 0) -> SplitT:
    """Redraw a fraction of the labels uniformly from all classes. Some come out unchanged.

    Args:
        split: The images.
        fraction: The fraction of the labels to redraw.
        num_classes: The number of classes.
        seed: Determines the choice and the labels.
    """
    if not 0 <= fraction <= 1:
        raise ValueError(f"fraction must be in [0, 1], got {fraction}.")
    generator = _generator("label noise", seed)
    chosen = torch.randperm(len(split), generator=generator)[: round(fraction * len(split))]
    labels = split.labels.clone()
    labels[chosen] = torch.randint(num_classes, chosen.shape, generator=generator)
    return replace(split, labels=labels)


def resized(split: SplitT, size: int) -> SplitT:
    """Resize images to ``size`` x ``size``. Each new pixel is the mean of the old ones.

    Args:
        split: The images. Those in files are resized when they are decoded.
        size: The new height and width.
    """
    if size < 1:
        raise ValueError(f"size must be at least 1, got {size}.")
    if isinstance(split, ImageFiles):
        return replace(split, size=size)
    # In pieces: the whole split as floats would take four times its memory.
    pieces = (adaptive_avg_pool2d(piece.float(), size) for piece in torch.split(split.images, 1024))
    return replace(split, images=torch.cat([piece.round_().to(torch.uint8) for piece in pieces]))


def _generator(purpose: str, seed: int) -> torch.Generator:
    # Different purposes must not draw the same images from the same seed.
    return torch.Generator().manual_seed(zlib.crc32(f"{purpose} {seed}".encode()))


def _select(split: SplitT, picked: Tensor) -> SplitT:
    places = picked.nonzero().flatten()
    labels = split.labels[places]
    if isinstance(split, ImageFiles):
        return replace(split, files=tuple(split.files[at] for at in places.tolist()), labels=labels)
    return replace(split, images=split.images.index_select(0, places), labels=labels)


def _balanced(labels: Tensor, count: int, generator: torch.Generator) -> Tensor:
    """Return a mask of ``count`` images: the first of each class, then the second, and so on."""
    if not 0 <= count <= len(labels):
        raise ValueError(f"Cannot pick {count:,} of {len(labels):,} images.")
    order = torch.randperm(len(labels), generator=generator)
    by_class = order[labels[order].argsort(stable=True)]
    sizes = labels.bincount()
    first = sizes.cumsum(0) - sizes
    rank = torch.arange(len(labels)) - first[labels[by_class]]
    picked = torch.zeros_like(labels, dtype=torch.bool)
    picked[by_class[rank.argsort(stable=True)[:count]]] = True
    return picked
