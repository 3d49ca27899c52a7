"""Data sets of pictures: read as their official downloads lie on the disk, cut up, and batched.

A small set lives in one tensor of bytes and is batched and augmented there, all pictures at once;
ImageNet's folders are decoded by worker processes.
"""

from __future__ import annotations

import gzip
import os
import pickle
import random
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from importlib import import_module, resources
from math import exp, log, prod, sqrt
from pathlib import Path
from typing import Any, TypeVar
from zipfile import is_zipfile

import torch
from torch import Tensor
from torch.nn.functional import adaptive_avg_pool2d
from torch.utils.data import DataLoader
from torch.utils.data import Dataset as TorchDataset

from gadam._names import find

__all__ = [
    "DataError",
    "Dataset",
    "Folder",
    "Images",
    "batches",
    "held_out",
    "load",
    "names",
    "resized",
    "subset",
    "with_label_noise",
]


class DataError(RuntimeError):
    """Data is missing or damaged: one sentence that says what is wrong and what to do."""


# ------------------------------------------------------------------------------------- what there is


@dataclass(frozen=True, eq=False)
class Images:
    """Pictures that live in one tensor.

    Attributes:
        images: Bytes, (N, C, H, W).
        labels: int64, (N,).
    """

    images: Tensor
    labels: Tensor

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def shape(self) -> tuple[int, ...]:
        """Channels, height and width."""
        return tuple(self.images.shape[1:])


@dataclass(frozen=True, eq=False)
class Folder:
    """Pictures that lie in files and are decoded when they are asked for.

    Attributes:
        files: One picture each.
        labels: int64, (N,).
    """

    files: tuple[Path, ...]
    labels: Tensor
    # Workers outlive an epoch here, by what they were started for.
    _idle: dict[tuple[Any, ...], tuple[DataLoader, list[Any]]] = field(
        default_factory=dict, init=False, repr=False
    )

    def __len__(self) -> int:
        return len(self.files)

    @property
    def shape(self) -> tuple[int, ...]:
        """Channels, height and width as they are usually decoded."""
        return (3, 224, 224)


Part = TypeVar("Part", bound="Images | Folder")


@dataclass(frozen=True, eq=False)
class Dataset:
    """A set of pictures to train on and one to test on.

    Attributes:
        name: One of :func:`names`.
        train: What to train on.
        test: What to test on.
        num_classes: Labels are below this.
        mean: Of each channel, in units of [0, 1].
        std: The standard deviation of each channel, likewise.
    """

    name: str
    train: Images | Folder
    test: Images | Folder
    num_classes: int
    mean: tuple[float, ...]
    std: tuple[float, ...]

    @property
    def input_shape(self) -> tuple[int, ...]:
        """Channels, height and width of a picture."""
        return self.train.shape


def names() -> list[str]:
    """The data sets that :func:`load` knows."""
    return list(_SOURCES)


def load(name: str, data_dir: str | Path | None = None) -> Dataset:
    """Read a data set.

    Args:
        name: One of :func:`names`; case and punctuation do not matter.
        data_dir: Where the files are; else the environment variable ``GADAM_DATA`` says it, else
            they are in ``~/.cache/gadam/data``. fashion-mini comes with the package.

    Example:
        >>> data = load("fashion-mini")
        >>> len(data.train), len(data.test), data.num_classes, data.input_shape
        (5000, 2000, 10, (1, 28, 28))
    """
    name = canonical(name)
    source, root = _SOURCES[name], folder_of(name, data_dir)
    try:
        train, test, classes = source.read(root)
    except _Unreadable as error:
        raise DataError(f"{error}: {how_to_get(name, root)}") from error.__cause__
    return Dataset(name, train, test, classes, source.mean, source.std)


def canonical(name: str) -> str:
    """The name as :func:`names` spells it."""
    found, near = find(name, {known: known for known in _SOURCES})
    if found is not None:
        return found
    hint = f"did you mean {near}?" if near else f"there are {', '.join(names())}"
    raise ValueError(f"no data set {name!r}: {hint}")


def folder_of(name: str, data_dir: str | Path | None = None) -> Path:
    """Where a data set is looked for."""
    if name == "fashion-mini":
        return Path(str(resources.files("gadam.train"))) / "fashion_mini"
    return Path(data_dir or os.environ.get("GADAM_DATA") or "~/.cache/gadam/data").expanduser()


def how_to_get(name: str, root: Path) -> str:
    """What to do for a data set to be there, as the second half of a sentence."""
    if name == "fashion-mini":
        return "it comes with the package, so install gadam anew"
    elsewhere = "or say where it is by --data-dir or GADAM_DATA"
    account = "with an account of your own at image-net.org"
    source = _SOURCES[name]
    if isinstance(source, _Folders):
        place = root / "imagenet" / "{train,val}" / "<class>" / "*.JPEG"
        return f"{account}, put the pictures as {place}, {elsewhere}"
    place = root / source.forms[0].folders[0]
    if name == "imagenet32":
        files = "train_data_batch_*.npz and val_data.npz"
        return f"{account}, put {files} into {place}, {elsewhere}"
    return f"run `gadam data {name}`, or put the official files into {place}, {elsewhere}"


def extra(module: str) -> Any:
    """A module that comes with ``gadam[train]``."""
    try:
        return import_module(module)
    except ImportError as error:
        package = module.split(".")[0].replace("PIL", "pillow")
        raise DataError(f"this needs {package}: pip install 'gadam[train]'") from error


# ------------------------------------------------------------------------------------- files


class _Unreadable(Exception):
    """What is wrong with which file, as the first half of a sentence."""


@contextmanager
def _naming(file: Path) -> Iterator[None]:
    try:
        yield
    except (DataError, _Unreadable):
        raise
    except FileNotFoundError as error:
        raise _Unreadable(f"{file} is missing") from error
    except Exception as error:  # a damaged file makes its decoder raise nearly anything
        reason = str(error) or type(error).__name__
        raise _Unreadable(f"{file} cannot be read ({reason})") from error


Read = tuple[Tensor, Tensor]  # (N, C, H, W) and (N,)


@dataclass(frozen=True)
class _Form:
    """One of the ways in which a set's files may lie on the disk; the names are glob patterns."""

    folders: tuple[str, ...]
    train: tuple[str, ...]
    test: tuple[str, ...]
    read: Callable[[Path], Read]

    def find(self, folder: Path) -> tuple[list[Path], list[Path], list[Path]]:
        """The files to train on, those to test on, and those that are not there."""
        found = {pattern: _files(folder, pattern) for pattern in (*self.train, *self.test)}
        missing = [folder / pattern for pattern, files in found.items() if not files]
        train, test = (
            [file for pattern in patterns for file in found[pattern]]
            for patterns in (self.train, self.test)
        )
        return train, test, missing


def _files(folder: Path, pattern: str) -> list[Path]:
    files = (path for path in folder.glob(pattern) if path.is_file())
    return sorted(files, key=lambda path: (len(path.name), path.name))  # 2 before 10


@dataclass(frozen=True)
class _Source:
    """A set of small pictures: its forms in order of preference, and its published statistics."""

    forms: tuple[_Form, ...]
    classes: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    sampled: bool = False  # whether there may be fewer classes

    def read(self, root: Path) -> tuple[Images | Folder, Images | Folder, int]:
        absent = []
        for form in self.forms:
            for folder in (*form.folders, ""):
                train, test, missing = form.find(root / folder)
                if not missing:
                    parts = [self._joined(form, files) for files in (train, test)]
                    highest = max(int(part.labels.max()) for part in parts)
                    return parts[0], parts[1], highest + 1 if self.sampled else self.classes
                absent.append((len(missing) - len(train) - len(test), missing[0]))
        # The place where most of it is tells best what is lacking; min keeps the first of equals.
        raise _Unreadable(f"{min(absent, key=lambda lack: lack[0])[1]} is missing")

    def _joined(self, form: _Form, files: list[Path]) -> Images:
        images, labels = zip(*(self._one(form, file) for file in files))
        return Images(torch.cat(images), torch.cat(labels))

    def _one(self, form: _Form, file: Path) -> Read:
        with _naming(file):
            images, labels = form.read(file)
            if len(images) != len(labels) or not len(labels):
                raise ValueError(f"{len(images)} pictures and {len(labels)} labels")
            if labels.min() < 0 or labels.max() >= self.classes:
                raise ValueError("a label is out of range")
        return images, labels


@dataclass(frozen=True)
class _Folders:
    """ImageNet: a folder for each class."""

    mean: tuple[float, ...]
    std: tuple[float, ...]

    def read(self, root: Path) -> tuple[Images | Folder, Images | Folder, int]:
        places = [root / name for name in ("imagenet", "", "imagenet-sample")]
        place = next((place for place in places if (place / "train").is_dir()), places[0])
        parts = place / "train", place / "val"
        for part in parts:
            if not part.is_dir():
                raise _Unreadable(f"{part} is missing")
        classes, of_val = (
            sorted(path.name for path in part.iterdir() if path.is_dir()) for part in parts
        )
        if classes != of_val:
            raise _Unreadable(f"{parts[1]} has not the same folders of classes as {parts[0]}")
        train, test = (self._part(part, classes) for part in parts)
        return train, test, len(classes)

    @staticmethod
    def _part(part: Path, classes: list[str]) -> Folder:
        found = [
            (folder / file, label)
            for label, folder in enumerate(part / name for name in classes)
            for file in sorted(os.listdir(folder))
            if file.lower().endswith((".jpg", ".jpeg", ".png"))
        ]
        if not found:
            raise _Unreadable(f"{part} has no pictures")
        files, labels = zip(*found)
        return Folder(files, torch.tensor(labels))


# ------------------------------------------------------------------------------------- formats


def _bytes(file: Path) -> Tensor:
    if file.suffix == ".gz":
        return torch.frombuffer(bytearray(gzip.decompress(file.read_bytes())), dtype=torch.uint8)
    # Mapped: what is read is then copied once, where the files of a part are joined.
    return torch.from_file(str(file), size=file.stat().st_size, dtype=torch.uint8)


def _records(file: Path, label_bytes: int) -> Read:
    """CIFAR's binary form; of CIFAR-100's two labels the finer one is the second."""
    length, size = label_bytes + 3072, file.stat().st_size
    if size == 0 or size % length:
        raise ValueError(f"{size:,} bytes are not whole records of {length:,}")
    records = _bytes(file).view(-1, length)
    return _rgb(records[:, label_bytes:]), records[:, label_bytes - 1].long()


def _rgb(pixels: Tensor) -> Tensor:
    if pixels.dtype != torch.uint8 or pixels.ndim != 2 or pixels.shape[1] != 3072:
        raise ValueError("its pixels are not rows of 3,072 bytes")
    return pixels.view(-1, 3, 32, 32)


def _idx(file: Path, dims: int) -> Tensor:
    content = _bytes(file)
    start = 4 + 4 * dims
    magic, header = bytes(content[:4].tolist()), bytes(content[4:start].tolist())
    if magic != bytes([0, 0, 8, dims]) or len(header) < 4 * dims:
        raise ValueError(f"it does not begin as an idx file of {dims}-dimensional bytes")
    shape = [int.from_bytes(header[at : at + 4], "big") for at in range(0, len(header), 4)]
    if len(content) - start != prod(shape):
        raise ValueError(f"{len(content) - start:,} bytes after its header, not {prod(shape):,}")
    return content[start:].view(shape)


def _idx_pair(file: Path) -> Read:
    labels = file.with_name(file.name.replace("images-idx3", "labels-idx1"))
    with _naming(labels):
        numbers = _idx(labels, 1).long()
    return _idx(file, 3).unsqueeze(1), numbers


def _npz(file: Path) -> Read:
    if not is_zipfile(file):  # else numpy would take it for a pickle
        raise ValueError("it is no npz file")
    with extra("numpy").load(file, allow_pickle=False) as archive:
        pixels, labels = (torch.from_numpy(archive[key]) for key in ("data", "labels"))
    if labels.dtype.is_floating_point or labels.ndim != 1:
        raise ValueError("its labels are not a row of integers")
    return _rgb(pixels), labels.long() - 1


class _Array:
    """What a pickled array says of itself.

    Numpy is not asked to make the array: it would believe whatever a file says of the memory.
    """

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        _, self.shape, self.dtype, self.by_columns, self.content = state

    def tensor(self) -> Tensor:
        if self.dtype.code not in ("u1", b"u1") or type(self.content) is not bytes:
            raise ValueError("its pixels are not bytes")
        content = torch.frombuffer(bytearray(self.content), dtype=torch.uint8)
        if self.by_columns:
            return content.view(self.shape[::-1]).t().contiguous()
        return content.view(self.shape)


class _Dtype:
    def __init__(self, code: str | bytes, *_: object) -> None:
        self.code = code

    def __setstate__(self, state: object) -> None:
        """Byte order and alignment: of bytes, nothing to know."""


class _Unpickler(pickle.Unpickler):
    """Reads arrays, and calls nothing that a file names."""

    stand_ins: dict[tuple[str, str], Any] = {  # noqa: RUF012 — a constant
        ("numpy.core.multiarray", "_reconstruct"): lambda *_: _Array(),
        ("numpy._core.multiarray", "_reconstruct"): lambda *_: _Array(),
        ("numpy", "ndarray"): _Array,
        ("numpy", "dtype"): _Dtype,
        ("_codecs", "encode"): lambda text, *_: text.encode("latin1"),
    }

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in self.stand_ins:
            raise ValueError(f"it asks for {module}.{name}, which no array of pictures needs")
        return self.stand_ins[module, name]


def _pickled(file: Path, key: str, first_label: int = 0) -> Read:
    with file.open("rb") as opened:
        content = _Unpickler(opened, encoding="bytes").load()
    content = content if type(content) is dict else {}
    # Python 2 wrote its keys as bytes, Python 3 as strings.
    pixels, labels = (content.get(name, content.get(name.encode())) for name in ("data", key))
    if type(pixels) is not _Array or type(labels) is not list or {*map(type, labels)} != {int}:
        raise ValueError("it is not an array of pixels and a list of labels")
    return _rgb(pixels.tensor()), torch.tensor(labels) - first_label


def _idx_forms(*folders: str) -> tuple[_Form, ...]:
    train, test = "train-images-idx3-ubyte", "t10k-images-idx3-ubyte"
    return tuple(_Form(folders, (train + end,), (test + end,), _idx_pair) for end in ("", ".gz"))


_IMAGENET = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
_FASHION = (0.2860,), (0.3530,)
_TENTHS = tuple(f"data_batch_{number}" for number in range(1, 6))

_SOURCES: dict[str, _Source | _Folders] = {
    "fashion-mini": _Source(_idx_forms(), 10, *_FASHION),
    "cifar10": _Source(
        (
            _Form(
                ("cifar-10-batches-bin",),
                tuple(f"{name}.bin" for name in _TENTHS),
                ("test_batch.bin",),
                partial(_records, label_bytes=1),
            ),
            _Form(
                ("cifar-10-batches-py",), _TENTHS, ("test_batch",), partial(_pickled, key="labels")
            ),
        ),
        10,
        (0.4914, 0.4822, 0.4465),
        (0.2470, 0.2435, 0.2616),
    ),
    "cifar100": _Source(
        (
            _Form(
                ("cifar-100-binary",),
                ("train.bin",),
                ("test.bin",),
                partial(_records, label_bytes=2),
            ),
            _Form(
                ("cifar-100-python",), ("train",), ("test",), partial(_pickled, key="fine_labels")
            ),
        ),
        100,
        (0.5071, 0.4865, 0.4409),
        (0.2673, 0.2564, 0.2762),
    ),
    "mnist": _Source(_idx_forms("MNIST/raw", "mnist"), 10, (0.1307,), (0.3081,)),
    "fashion-mnist": _Source(_idx_forms("FashionMNIST/raw", "fashion-mnist"), 10, *_FASHION),
    "imagenet32": _Source(
        (
            _Form(("imagenet32",), ("train_data_batch_*.npz",), ("val_data.npz",), _npz),
            _Form(
                ("imagenet32",),
                ("train_data_batch_*[0-9]",),
                ("val_data",),
                partial(_pickled, key="labels", first_label=1),
            ),
        ),
        1000,
        *_IMAGENET,
        sampled=True,
    ),
    "imagenet": _Folders(*_IMAGENET),
}


# ------------------------------------------------------------------------------------- parts of a set


def held_out(part: Part, count: int, seed: int = 0) -> tuple[Part, Part]:
    """The rest, and ``count`` pictures held out: as many of each class, if there are so many.

    Example:
        >>> rest, held = held_out(load("fashion-mini").train, 500)
        >>> len(rest), held.labels.bincount().unique().tolist()
        (4500, [50])
    """
    picked = _balanced(part.labels, count, _generator("held out", seed))
    return _taken(part, ~picked), _taken(part, picked)


def subset(part: Part, count: int, seed: int = 0) -> Part:
    """``count`` of the pictures: as many of each class, if there are so many."""
    return _taken(part, _balanced(part.labels, count, _generator("subset", seed)))


def with_label_noise(part: Part, fraction: float, num_classes: int, seed: int = 0) -> Part:
    """The part with this fraction of its labels drawn anew from all classes: some stay the same."""
    if not 0 <= fraction <= 1:
        raise ValueError(f"the fraction of labels to draw anew must be in [0, 1], not {fraction}")
    generator = _generator("label noise", seed)
    chosen = torch.randperm(len(part), generator=generator)[: round(fraction * len(part))]
    labels = part.labels.clone()
    labels[chosen] = torch.randint(num_classes, chosen.shape, generator=generator)
    return replace(part, labels=labels)


def resized(part: Images, size: int) -> Images:
    """The pictures at ``size`` x ``size``, each pixel the mean of those it stands for."""
    if size < 1:
        raise ValueError(f"a picture has at least one pixel, so its size cannot be {size}")
    # In pieces: as floats, the whole set would take four times its memory.
    pieces = (adaptive_avg_pool2d(piece.float(), size) for piece in part.images.split(1024))
    return replace(part, images=torch.cat([piece.round_().to(torch.uint8) for piece in pieces]))


def _generator(purpose: str, seed: int) -> torch.Generator:
    # Of one seed, different purposes must not draw the same pictures.
    return torch.Generator().manual_seed(zlib.crc32(f"{purpose} {seed}".encode()))


def _taken(part: Part, picked: Tensor) -> Part:
    places = picked.nonzero().flatten()
    labels = part.labels[places]
    if isinstance(part, Folder):
        return replace(part, files=tuple(part.files[at] for at in places.tolist()), labels=labels)
    return replace(part, images=part.images.index_select(0, places), labels=labels)


def _balanced(labels: Tensor, count: int, generator: torch.Generator) -> Tensor:
    """Whether each picture is picked: the first of each class, the second of each, and so on."""
    if not 0 <= count <= len(labels):
        raise ValueError(f"cannot pick {count:,} out of {len(labels):,} pictures")
    order = torch.randperm(len(labels), generator=generator)
    by_class = order[labels[order].argsort(stable=True)]
    sizes = labels.bincount()
    first = sizes.cumsum(0) - sizes
    rank = torch.arange(len(labels)) - first[labels[by_class]]
    picked = torch.zeros_like(labels, dtype=torch.bool)
    picked[by_class[rank.argsort(stable=True)[:count]]] = True
    return picked


# ------------------------------------------------------------------------------------- batches


def batches(
    part: Images | Folder,
    batch_size: int,
    *,
    mean: tuple[float, ...],
    std: tuple[float, ...],
    augment: bool = False,
    shuffle: torch.Generator | None = None,
    device: torch.device | str = "cpu",
    workers: int = 0,
    drop_last: bool = False,
    dtype: torch.dtype = torch.float32,
    pad: int = 4,
    size: int = 224,
) -> Iterator[tuple[Tensor, Tensor]]:
    """Pass once over the pictures: normalised ones and their labels, on the device.

    All that is random is drawn when this is called, on the CPU: neither the device, nor the number
    of workers, nor how far the pass gets changes the pictures or the generator afterwards.

    Args:
        part: What to pass over.
        batch_size: Pictures in a batch; the last has what is left.
        mean: To be subtracted, per channel, in units of [0, 1].
        std: To be divided by, likewise.
        augment: Whether to mirror half of the pictures and to cut each at random: out of itself
            padded with the mean or, if it is from a file, at a random scale and ratio.
        shuffle: Draws the order, and what augmentation needs; without it the order is that of the
            part, and augmentation draws from torch's global generator.
        device: Where the batches are needed.
        workers: Processes that decode files; they stay for the next pass over the same part.
        drop_last: Whether to leave out a last batch that is not full.
        dtype: Of the pictures.
        pad: Pixels that augmentation adds at every edge.
        size: Height and width of a picture from a file.

    Example:
        >>> data = load("fashion-mini")
        >>> images, labels = next(batches(data.train, 128, mean=data.mean, std=data.std))
        >>> images.shape, labels.shape
        (torch.Size([128, 1, 28, 28]), torch.Size([128]))
    """
    if batch_size < 1:
        raise ValueError(f"a batch has at least one picture, so its size cannot be {batch_size}")
    count = len(part)
    order = torch.arange(count) if shuffle is None else torch.randperm(count, generator=shuffle)
    picks = order.split(batch_size)[: count // batch_size if drop_last else -(-count // batch_size)]
    centre, spread = (
        torch.tensor(values, device=device).mul_(255).view(-1, 1, 1) for values in (mean, std)
    )
    raw: Iterator[Tensor]
    if isinstance(part, Folder):
        seed = int(torch.randint(2**62, (), generator=shuffle)) if augment else None
        raw = _decoded(part, picks, seed, size, workers)
    else:
        images = part.images
        # index_select copies whole pictures, ten times as fast as images[pick].
        raw = (images.index_select(0, pick.to(images.device)).to(device) for pick in picks)
        if augment and count:
            draws = [
                torch.randint(n, (count,), generator=shuffle) for n in (2, 2 * pad + 1, 2 * pad + 1)
            ]
            raw = _cut(raw, part.shape, min(batch_size, count), draws, pad, centre)
    return (
        (
            pictures.to(device).float().sub_(centre).div_(spread).to(dtype),
            part.labels[pick].to(device),
        )
        for pictures, pick in zip(raw, picks)
    )


def _cut(
    raw: Iterator[Tensor],
    shape: tuple[int, ...],
    batch_size: int,
    draws: list[Tensor],
    pad: int,
    fill: Tensor,
) -> Iterator[Tensor]:
    """Each picture or its mirror image, cut out of itself padded with the mean rounded to a byte.

    So padding is zero once normalised, to within half a grey level, and all of it is bytes.
    """
    channels, height, width = shape
    tall, wide = height + 2 * pad, width + 2 * pad
    canvas = fill.round().to(torch.uint8).expand(batch_size, 2, channels, tall, wide).contiguous()
    plain, mirror = canvas[..., pad : pad + height, pad : pad + width].unbind(1)
    # Whole rows are copied out of the canvas's memory, which is what is fast: from where a row
    # begins if nothing is drawn, plus what is drawn for its picture.
    rows = canvas.flatten().unfold(0, width, 1)
    begin = torch.arange(0, canvas.numel(), wide, device=fill.device)
    begin = begin.view(canvas.shape[:-1])[:, 0, :, :height]
    mirrored, down, right = draws
    shifts = (mirrored * channels * tall + down) * wide + right
    for pictures, shift in zip(raw, shifts.to(fill.device).view(-1, 1, 1).split(batch_size)):
        count = len(pictures)
        plain[:count], mirror[:count] = pictures, pictures.flip(-1)
        yield rows.index_select(0, (begin[:count] + shift).flatten()).view(pictures.shape)


def _decoded(
    part: Folder, picks: tuple[Tensor, ...], seed: int | None, size: int, workers: int
) -> Iterator[Tensor]:
    # Taken out while it is in use: a second pass at the same time gets workers of its own.
    loader, plan = part._idle.pop((size, workers), (None, []))
    if loader is None:
        loader = DataLoader(
            _Pictures(part.files, size),
            batch_size=None,
            sampler=plan,
            num_workers=workers,
            persistent_workers=workers > 0,
            generator=torch.Generator(),  # else it would draw from torch's global one
        )
    plan[:] = [(seed, pick.tolist()) for pick in picks]
    for pictures in loader:
        if isinstance(pictures, str):
            raise DataError(pictures)
        yield pictures
    part._idle[size, workers] = loader, plan


class _Pictures(TorchDataset):
    """What a worker knows: files. Asked for a batch of them, it decodes them to bytes."""

    def __init__(self, files: tuple[Path, ...], size: int) -> None:
        self.files = files
        self.size = size

    def __getitem__(self, asked: tuple[int | None, list[int]]) -> Tensor | str:
        seed, places = asked
        try:
            return torch.stack([self._decode(place, seed) for place in places])
        except DataError as error:
            return str(error)  # raised, it would come back from a worker with all its traceback

    def _decode(self, place: int, seed: int | None) -> Tensor:
        image = extra("PIL.Image")
        # By its place, so that it does not matter who decodes it, and what was decoded before.
        rng = None if seed is None else random.Random(f"{seed} {place}")
        try:
            with image.open(self.files[place]) as opened:
                picture = opened.convert("RGB")
        except Exception as error:  # a damaged picture makes its decoder raise nearly anything
            raise DataError(
                f"{self.files[place]} cannot be decoded ({error}): replace or remove it"
            ) from error
        box = _random_box(picture.size, rng) if rng else _central_box(picture.size)
        picture = picture.resize((self.size, self.size), image.Resampling.BILINEAR, box=box)
        if rng and rng.random() < 0.5:
            picture = picture.transpose(image.Transpose.FLIP_LEFT_RIGHT)
        pixels = torch.frombuffer(bytearray(picture.tobytes()), dtype=torch.uint8)
        return pixels.view(self.size, self.size, 3).permute(2, 0, 1)


Box = tuple[float, float, float, float]


def _central_box(size: tuple[int, int]) -> Box:
    """The middle that is left when a picture with its short side at 256 is cut to 224 x 224."""
    width, height = size
    side = min(size) * 224 / 256
    left, top = (width - side) / 2, (height - side) / 2
    return left, top, left + side, top + side


def _random_box(size: tuple[int, int], rng: random.Random) -> Box:
    """Some 8 to 100 % of the area, at a ratio of 3:4 to 4:3."""
    width, height = size
    for _ in range(10):
        area = width * height * rng.uniform(0.08, 1)
        ratio = exp(rng.uniform(log(3 / 4), log(4 / 3)))
        wide, tall = round(sqrt(area * ratio)), round(sqrt(area / ratio))
        if 0 < wide <= width and 0 < tall <= height:
            left, top = rng.randint(0, width - wide), rng.randint(0, height - tall)
            return left, top, left + wide, top + tall
    # A very long picture hardly ever has room for one: as much of its middle as the ratio allows.
    wide, tall = min(width, height * 4 // 3 or 1), min(height, width * 4 // 3 or 1)
    left, top = (width - wide) // 2, (height - tall) // 2
    return left, top, left + wide, top + tall
