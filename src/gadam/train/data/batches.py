"""Batches of normalized images: from one tensor, augmented in bulk, or decoded from files."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from math import exp, log, sqrt
from pathlib import Path

import torch
from torch import Tensor
from torch.utils.data import DataLoader
from torch.utils.data import Dataset as TorchDataset

from gadam.train.data.dataset import DecodeRequest, ImageFiles, ImageSplit
from gadam.train.data.errors import DataError, import_extra
from gadam.train.data.formats import open_image

__all__ = ["batches"]


def batches(
    split: ImageSplit,
    batch_size: int,
    *,
    mean: tuple[float, ...],
    std: tuple[float, ...],
    augment: bool = False,
    pad: int = 4,
    shuffle: torch.Generator | None = None,
    device: torch.device | str = "cpu",
    workers: int = 0,
    select: Callable[[Tensor], Tensor] | None = None,
) -> Iterator[tuple[Tensor, Tensor]]:
    """Iterate once over the images.

    All random numbers are drawn on the CPU when this function is called. So neither the device, nor
    the number of workers, nor an early end of the iteration changes the images or the generator's
    final state.

    Args:
        split: The images.
        batch_size: Images per batch. The last batch may be smaller.
        mean: Subtracted per channel, for pixels in [0, 1].
        std: The divisor per channel, for pixels in [0, 1].
        augment: Flip half of the images, and crop each at random. An image in memory is padded with
            the mean and cropped to its own size. An image from a file is cropped at a random scale
            and aspect ratio.
        pad: Padding for ``augment`` on every side, in pixels, for images in memory.
        shuffle: Draws the order and the augmentation. If None, the order is that of the split, and
            augmentation draws from torch's global generator.
        device: The device of the batches.
        workers: Processes that decode files. They are kept for the next pass over the same split.
        select: Returns the examples to load, from the places of a batch in this pass. The others
            do not change them. Default: all.

    Returns:
        An iterator over pairs of normalized images (float32) and labels.

    Example:
        >>> from gadam.train.data import load
        >>> data = load("fashion-mini")
        >>> images, labels = next(batches(data.train, 128, mean=data.mean, std=data.std))
        >>> images.shape, labels.shape
        (torch.Size([128, 1, 28, 28]), torch.Size([128]))
    """
    if batch_size < 1:
        raise ValueError(f"batch_size must be at least 1, got {batch_size}.")
    count = len(split)
    order = torch.arange(count) if shuffle is None else torch.randperm(count, generator=shuffle)
    places = torch.split(torch.arange(count), batch_size) if count else ()
    places = places if select is None else tuple(map(select, places))
    picks = tuple(order[place] for place in places)
    center, scale = (
        torch.tensor(values, device=device).mul_(255).view(-1, 1, 1) for values in (mean, std)
    )
    raw: Iterator[Tensor]
    if isinstance(split, ImageFiles):
        seed = int(torch.randint(2**62, (), generator=shuffle)) if augment else None
        raw = _decoded(split, picks, seed, workers)
    else:
        images = split.images
        # index_select copies whole images: ten times as fast as images[pick].
        raw = (images.index_select(0, pick.to(images.device)).to(device) for pick in picks)
        if augment and count:
            draws = [
                torch.randint(n, (count,), generator=shuffle) for n in (2, 2 * pad + 1, 2 * pad + 1)
            ]
            raw = _augmented(raw, split.shape, min(batch_size, count), draws, places, pad, center)
    return (
        (pixels.to(device).float().sub_(center).div_(scale), split.labels[pick].to(device))
        for pixels, pick in zip(raw, picks)
    )


# ----------------------------------------------------------------------------------- in memory


def _augmented(
    raw: Iterator[Tensor],
    shape: tuple[int, ...],
    batch_size: int,
    draws: list[Tensor],
    places: Sequence[Tensor],
    pad: int,
    fill: Tensor,
) -> Iterator[Tensor]:
    """Crop each image, or its mirror image, from its padded version.

    The padding is the mean, rounded to a byte, so that everything stays in bytes. It is zero after
    normalization, up to half a gray level.
    """
    channels, height, width = shape
    tall, wide = height + 2 * pad, width + 2 * pad
    canvas = fill.round().to(torch.uint8).expand(batch_size, 2, channels, tall, wide).contiguous()
    plain, mirror = canvas[..., pad : pad + height, pad : pad + width].unbind(1)
    # Copying whole rows out of the canvas is fast. A row's offset is its position in an unshifted
    # crop, plus the shift drawn for its image.
    rows = canvas.flatten().unfold(0, width, 1)
    begin = torch.arange(0, canvas.numel(), wide, device=fill.device)
    begin = begin.view(canvas.shape[:-1])[:, 0, :, :height]
    mirrored, down, right = draws
    shifts = (mirrored * channels * tall + down) * wide + right
    shifts = shifts.to(fill.device).view(-1, 1, 1)
    for pixels, place in zip(raw, places):
        count, shift = len(pixels), shifts[place.to(fill.device)]
        plain[:count], mirror[:count] = pixels, pixels.flip(-1)
        yield rows.index_select(0, (begin[:count] + shift).flatten()).view(pixels.shape)


# ----------------------------------------------------------------------------------- from files


def _decoded(
    split: ImageFiles, picks: tuple[Tensor, ...], seed: int | None, workers: int
) -> Iterator[Tensor]:
    # Remove the loader while it is in use: a concurrent pass must get its own workers.
    idle = split._idle_loaders.pop(workers, None)
    if idle is not None:
        loader, requests = idle
    else:
        requests = []
        loader = DataLoader(
            _Decoder(split.files, split.size),
            batch_size=None,
            sampler=requests,
            num_workers=workers,
            persistent_workers=workers > 0,
            generator=torch.Generator(),  # otherwise it would draw from torch's global generator
        )
    requests[:] = [(seed, pick.tolist()) for pick in picks]
    for pixels in loader:
        if isinstance(pixels, str):
            raise DataError(pixels)
        yield pixels
    split._idle_loaders[workers] = loader, requests


class _Decoder(TorchDataset[Tensor | str]):
    """Decodes a batch of files to bytes, in a worker process."""

    def __init__(self, files: tuple[Path, ...], size: int) -> None:
        self.files = files
        self.size = size

    def __getitem__(self, request: DecodeRequest) -> Tensor | str:
        seed, places = request
        try:
            return torch.stack([self._decode(place, seed) for place in places])
        except DataError as error:
            return str(error)  # an exception would arrive with the worker's whole traceback

    def _decode(self, place: int, seed: int | None) -> Tensor:
        pillow = import_extra("PIL.Image")
        # Seeded per image: neither the worker nor what it decoded before changes the crop.
        rng = None if seed is None else random.Random(f"{seed} {place}")
        try:
            image = open_image(self.files[place]).convert("RGB")
        except Exception as error:  # decoders raise almost anything on a damaged file
            raise DataError(
                f"Cannot decode {self.files[place]} ({error}). Replace or remove it."
            ) from error
        box = _random_box(image.size, rng) if rng else _central_box(image.size)
        image = image.resize((self.size, self.size), pillow.Resampling.BILINEAR, box=box)
        if rng and rng.random() < 0.5:
            image = image.transpose(pillow.Transpose.FLIP_LEFT_RIGHT)
        pixels = torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8)
        return pixels.view(self.size, self.size, 3).permute(2, 0, 1)


_Box = tuple[float, float, float, float]  # left, top, right, bottom


def _central_box(size: tuple[int, int]) -> _Box:
    """Return the usual center crop: resize the short side to 256, then crop to 224 x 224."""
    width, height = size
    side = min(size) * 224 / 256
    left, top = (width - side) / 2, (height - side) / 2
    return left, top, left + side, top + side


def _random_box(size: tuple[int, int], rng: random.Random) -> _Box:
    """Draw a crop with 8–100% of the area and an aspect ratio between 3:4 and 4:3."""
    width, height = size
    for _ in range(10):
        area = width * height * rng.uniform(0.08, 1)
        ratio = exp(rng.uniform(log(3 / 4), log(4 / 3)))
        wide, tall = round(sqrt(area * ratio)), round(sqrt(area / ratio))
        if 0 < wide <= width and 0 < tall <= height:
            left, top = rng.randint(0, width - wide), rng.randint(0, height - tall)
            return left, top, left + wide, top + tall
    # A very long image rarely has room for such a crop: use as much of its center as the ratio
    # allows.
    wide, tall = min(width, height * 4 // 3 or 1), min(height, width * 4 // 3 or 1)
    left, top = (width - wide) // 2, (height - tall) // 2
    return left, top, left + wide, top + tall
