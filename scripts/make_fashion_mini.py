"""Select fashion-mini from the complete Fashion-MNIST. The files are reproducible byte for byte.

    python scripts/make_fashion_mini.py FOLDER

FOLDER contains the four idx files, gzipped or not.
"""

from __future__ import annotations

import gzip
import sys
from pathlib import Path

import torch
from torch import Tensor

from gadam.train import data

TARGET = Path(data.__file__).with_name("fashion_mini")


def write(file: Path, values: Tensor) -> None:
    """Write an idx file.

    Args:
        file: The file to write.
        values: The images or labels, between 0 and 255.
    """
    header = bytes([0, 0, 8, values.ndim]) + b"".join(n.to_bytes(4, "big") for n in values.shape)
    # Leave out the time and the file name, so that the bytes are always the same.
    with file.open("wb") as raw, gzip.GzipFile("", "wb", 9, raw, mtime=0) as packed:
        packed.write(header + bytes(values.to(torch.uint8).flatten().tolist()))


def main() -> None:
    """Write the four files of fashion-mini into the package."""
    complete = data.load("fashion-mnist", sys.argv[1])
    for stem, split, count in (("train", complete.train, 5000), ("t10k", complete.test, 2000)):
        assert isinstance(split, data.Images)
        picked = data.subset(split, count)
        write(TARGET / f"{stem}-images-idx3-ubyte.gz", picked.images.squeeze(1))
        write(TARGET / f"{stem}-labels-idx1-ubyte.gz", picked.labels)


if __name__ == "__main__":
    main()
