"""Data sets: image sets and texts, read from their official downloads.

A small image set is one tensor of bytes, which is batched and augmented in bulk. ImageNet's folders
are decoded by worker processes. Images of your own are in :mod:`gadam.train.data.own`, texts in
:mod:`gadam.train.data.text`, downloads in :mod:`gadam.train.data.download`.
"""

from gadam.train.data.batches import batches
from gadam.train.data.dataset import Dataset, ImageFiles, Images, ImageSplit
from gadam.train.data.errors import DataError
from gadam.train.data.sources import (
    canonical,
    data_root,
    folder_of,
    how_to_get,
    load,
    names,
    own_path,
)
from gadam.train.data.splits import (
    held_out,
    held_out_fraction,
    resized,
    subset,
    with_label_noise,
)

__all__ = [
    "DataError",
    "Dataset",
    "ImageFiles",
    "ImageSplit",
    "Images",
    "batches",
    "canonical",
    "data_root",
    "folder_of",
    "held_out",
    "held_out_fraction",
    "how_to_get",
    "load",
    "names",
    "own_path",
    "resized",
    "subset",
    "with_label_noise",
]
