"""Pick fashion-mini out of the complete Fashion-MNIST: the same files every time.

    python scripts/make_fashion_mini.py FOLDER

where FOLDER has the four idx files, gzipped or not.
"""

from __future__ import annotations

import gzip
import sys
from pathlib import Path

import torch
from torch import Tensor

from gadam.train import data

TO = Path(data.__file__).with_name("fashion_mini")


def write(file: Path, values: Tensor) -> None:
    header = bytes([0, 0, 8, values.ndim]) + b"".join(n.to_bytes(4, "big") for n in values.shape)
    # Neither the time nor the file's name goes into it.
    with file.open("wb") as raw, gzip.GzipFile("", "wb", 9, raw, mtime=0) as packed:
        packed.write(header + bytes(values.to(torch.uint8).flatten().tolist()))


def main() -> None:
    complete = data.load("fashion-mnist", sys.argv[1])
    for stem, part, count in (("train", complete.train, 5000), ("t10k", complete.test, 2000)):
        assert isinstance(part, data.Images)
        picked = data.subset(part, count)
        write(TO / f"{stem}-images-idx3-ubyte.gz", picked.images.squeeze(1))
        write(TO / f"{stem}-labels-idx1-ubyte.gz", picked.labels)


if __name__ == "__main__":
    main()
