"""Where averaged weights come from: what a result says about itself."""

from __future__ import annotations

import json
import os
import zipfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from gadam.checkpoints.errors import CheckpointError
from gadam.checkpoints.formats import (
    ARCHIVED_PROVENANCE,
    METADATA_KEY,
    PROVENANCE,
    SafetensorsFile,
)

__all__ = ["Input", "Provenance", "read_provenance"]


@dataclass(frozen=True)
class Input:
    """A checkpoint that was averaged.

    Attributes:
        path: Its file or folder.
        step: The step number in its name, or None if the order was given.
        weight: Its weight in the average. All weights sum to one. A checkpoint that a selection
            rejected has the weight zero.
        size: The size of its weights in bytes.
        modified: When its weights were last modified, in seconds since 1970.
        sha256: The hash of its weights, if it was computed. The hash of several files is that of
            their hashes, sorted by name.
        score: Its own validation metric, if checkpoints were selected by it.
    """

    path: str
    step: int | None
    weight: float
    size: int
    modified: float
    sha256: str | None = None
    score: float | None = None


@dataclass(frozen=True)
class Provenance:
    """Which weights a result of ``gadam average`` holds.

    Attributes:
        out: The file or folder.
        inputs: The checkpoints, the oldest first. The result has the layout of the last one that
            was used.
        weights: How they were weighted.
        dtype: The type of the averaged tensors.
        averaged: The number of averaged tensors.
        copied: The tensors taken from the last checkpoint: integers and flags.
        batchnorm: "none" if there are no BatchNorm statistics; "stale" if they are averages that
            need a refresh; "refreshed" if they were recomputed.
        metric: The validation metric that checkpoints were selected by, if they were.
        score: The metric of the result.
        left_out: The files and entries of the last checkpoint that were not copied, because they
            belong to its training.
        notices: Sentences for the user.
        command: The command line, if there was one.
        gadam_version: The version of gadam.
        torch_version: The version of torch.
    """

    out: str
    inputs: tuple[Input, ...]
    weights: str
    dtype: str
    averaged: int
    copied: tuple[str, ...]
    batchnorm: Literal["none", "stale", "refreshed"]
    metric: str | None
    score: float | None
    left_out: tuple[str, ...]
    notices: tuple[str, ...]
    command: str
    gadam_version: str
    torch_version: str

    def to_dict(self) -> dict[str, Any]:
        """Return plain data, as :meth:`from_dict` takes it."""
        return asdict(self)

    @classmethod
    def from_dict(cls, content: dict[str, Any]) -> Provenance:
        """Undo :meth:`to_dict`.

        Args:
            content: Plain data.

        Raises:
            KeyError, TypeError: It is damaged.
        """
        lists = {name: tuple(content[name]) for name in ("copied", "left_out", "notices")}
        inputs = tuple(Input(**each) for each in content["inputs"])
        return cls(**{**content, **lists, "inputs": inputs})


def read_provenance(path: str | os.PathLike[str]) -> Provenance:
    """Return where the weights in a result of ``gadam average`` come from.

    Args:
        path: The file or folder.

    Raises:
        CheckpointError: ``gadam average`` did not write it.
    """
    place = Path(path)
    try:
        if place.is_dir():
            text = (place / PROVENANCE).read_text()
        elif place.suffix == ".safetensors":
            text = SafetensorsFile(place).metadata[METADATA_KEY]
        else:
            with zipfile.ZipFile(place) as archive:
                text = archive.read(ARCHIVED_PROVENANCE).decode()
        return Provenance.from_dict(json.loads(text))
    except (OSError, KeyError, TypeError, ValueError, zipfile.BadZipFile) as error:
        raise CheckpointError(
            f"{path} does not say where its weights come from. `gadam average` did not write it."
        ) from error
