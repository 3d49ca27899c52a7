"""What a run writes down: a line per epoch, and its result.

Metrics are stored by point (the last iterate, the average), then split, then name. Read one with
:meth:`EpochRecord.metric`; nothing else needs to know the nesting.

>>> line = EpochRecord.from_dict({
...     "epoch": 1, "lr": 0.1, "train_loss": None, "samples": 0,
...     "iterate": {"test": {"accuracy": 81.5}}, "seconds": {"train": 2.0},
... })
>>> line.metric("accuracy", "iterate"), line.metric("accuracy", "average"), line.train_loss
(81.5, None, nan)
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Literal, TypeAlias

from gadam.runs.fields import (
    Record,
    between,
    mapping_of,
    number,
    number_or_null,
    one_of,
    optional,
    parse,
    sequence_of,
    text,
    whole,
)
from gadam.runs.files import Document
from gadam.runs.recipe import Recipe

__all__ = ["FORMAT", "POINTS", "EpochRecord", "Point", "RunHeader", "RunResult", "SplitMetrics"]

Point: TypeAlias = Literal["iterate", "average"]
POINTS: tuple[Point, Point] = ("iterate", "average")
SplitMetrics: TypeAlias = Mapping[str, Mapping[str, float]]  # by split, then name

FORMAT = 2  # of new runs; see RunHeader

_numbers = mapping_of(number_or_null)
_metrics = mapping_of(_numbers)


class _Evaluated:
    """Read metrics at either point."""

    iterate: SplitMetrics | None
    average: SplitMetrics | None

    def metric(self, name: str, point: Point, split: str = "test") -> float | None:
        """Return a metric, or None if it was not measured or is not finite.

        Args:
            name: Such as "accuracy", "loss" or "perplexity".
            point: "iterate" or "average".
            split: "validation" or "test".
        """
        metrics = self.iterate if point == "iterate" else self.average
        value = (metrics or {}).get(split, {}).get(name, math.nan)
        return value if math.isfinite(value) else None

    @property
    def used_point(self) -> Point:
        """The point a user would deploy: the average if there is one."""
        return "iterate" if self.average is None else "average"

    @property
    def used(self) -> SplitMetrics | None:
        """The metrics at :attr:`used_point`."""
        return self.iterate if self.average is None else self.average


@dataclass(frozen=True)
class EpochRecord(Record, _Evaluated):
    """One line of `epochs.jsonl`.

    Args:
        epoch: Epochs done, from 1.
        lr: The learning rate of the epoch.
        train_loss: Its mean training loss; NaN if it diverged.
        samples: Iterates in the average so far.
        iterate: Metrics of the last iterate by split, if it was evaluated.
        average: Metrics of the average by split, if it was evaluated.
        seconds: Wall time by activity.
        norms: Norms of the weights by layer.
        extra: Fields written by a newer version, kept as they are.
    """

    epoch: int
    lr: float
    train_loss: float
    samples: int = 0
    iterate: SplitMetrics | None = None
    average: SplitMetrics | None = None
    seconds: Mapping[str, float] = field(default_factory=dict)
    norms: Mapping[str, float] = field(default_factory=dict)

    def to_dict(self) -> Document:
        """Return the record as plain data. Points that were not evaluated are left out."""
        content: Document = {"epoch": self.epoch, "lr": self.lr, "train_loss": self.train_loss}
        content["samples"] = self.samples
        if self.norms:
            content["norms"] = dict(self.norms)
        for point in POINTS:
            metrics: SplitMetrics | None = getattr(self, point)
            if metrics is not None:
                content[point] = _plain(metrics)
        return {**content, "seconds": dict(self.seconds), **self.extra}

    @classmethod
    def from_dict(cls, values: Document) -> EpochRecord:
        """Return the record that :meth:`to_dict` wrote.

        Args:
            values: Plain data; unknown fields are kept in :attr:`extra`.

        Raises:
            RunError: A field is missing or has the wrong type.
        """
        return parse(
            cls,
            values,
            {
                "epoch": whole,
                "lr": number,
                "train_loss": number_or_null,
                "samples": whole,
                "iterate": optional(_metrics),
                "average": optional(_metrics),
                "seconds": _numbers,
                "norms": _numbers,
            },
        )


@dataclass(frozen=True)
class RunResult(Record, _Evaluated):
    """How a run ended: `result.json`.

    Args:
        status: "done" or "diverged".
        epochs: Epochs trained.
        iterate: Metrics of the last iterate by split.
        average: Metrics of the average by split, if there is one.
        samples: Iterates in the average.
        parameters: Size of the network.
        seconds: Wall time by activity, over the run.
        peak_memory: Bytes, if the platform reports them.
        extra: Fields written by a newer version, kept as they are.
    """

    status: Literal["done", "diverged"]
    epochs: int
    iterate: SplitMetrics
    average: SplitMetrics | None = None
    samples: int = 0
    parameters: int | None = None
    seconds: Mapping[str, float] = field(default_factory=dict)
    peak_memory: int | None = None

    @property
    def diverged(self) -> bool:
        """True if a loss or metric stopped being finite."""
        return self.status == "diverged"

    @property
    def total_seconds(self) -> float:
        """Wall time of the run."""
        return sum(self.seconds.values())

    def to_dict(self) -> Document:
        """Return the result as plain data."""
        content = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "extra"}
        content["iterate"] = _plain(self.iterate)
        content["average"] = None if self.average is None else _plain(self.average)
        content["seconds"] = dict(self.seconds)
        return {**content, **self.extra}

    @classmethod
    def from_dict(cls, values: Document) -> RunResult:
        """Return the result that :meth:`to_dict` wrote.

        Args:
            values: Plain data; unknown fields are kept in :attr:`extra`.

        Raises:
            RunError: A field is missing or has the wrong type.
        """
        return parse(
            cls,
            values,
            {
                "status": one_of("done", "diverged"),
                "epochs": whole,
                "iterate": _metrics,
                "average": optional(_metrics),
                "samples": whole,
                "parameters": optional(whole),
                "seconds": _numbers,
                "peak_memory": optional(whole),
            },
        )


@dataclass(frozen=True)
class RunHeader(Record):
    """What a run is, written before it starts: `run.json`.

    Args:
        label: Its name beside other runs.
        recipe: What it trains.
        seed: The seed of everything random.
        threads: CPU threads it began with. The last bits of sums depend on them.
        versions: Of gadam and torch.
        machine: Python, operating system and processor.
        code: The files of the user's own task or network, if there is one: their hashes by name. A
            run that continued with changed code has several entries, oldest first.
        format: 2 if the run's lines carry hashes and its end is marked by a manifest; 1 for runs of
            older versions.
        extra: Fields written by a newer version, kept as they are.
    """

    label: str
    recipe: Recipe
    seed: int
    threads: int
    versions: Mapping[str, str] = field(default_factory=dict)
    machine: Mapping[str, str] = field(default_factory=dict)
    format: int = 1
    code: tuple[Mapping[str, str], ...] = ()

    def to_dict(self) -> Document:
        """Return the header as plain data."""
        return {
            "label": self.label,
            "recipe": self.recipe.to_dict(),
            "seed": self.seed,
            "threads": self.threads,
            "versions": dict(self.versions),
            "machine": dict(self.machine),
            "format": self.format,
            **({"code": [dict(files) for files in self.code]} if self.code else {}),
            **self.extra,
        }

    @classmethod
    def from_dict(cls, values: Document) -> RunHeader:
        """Return the header that :meth:`to_dict` wrote.

        Args:
            values: Plain data; unknown fields are kept in :attr:`extra`.

        Raises:
            RunError: A field is missing or has the wrong type.
            RecipeError: The recipe is not valid.
        """
        return parse(
            cls,
            values,
            {
                "label": text,
                "recipe": Recipe.from_dict,
                "seed": whole,
                "threads": between(1, 4096),
                "versions": mapping_of(text),
                "machine": mapping_of(text),
                "format": between(1, FORMAT),
                "code": sequence_of(mapping_of(text)),
            },
        )


def _plain(metrics: SplitMetrics) -> dict[str, dict[str, float]]:
    return {split: dict(values) for split, values in metrics.items()}
