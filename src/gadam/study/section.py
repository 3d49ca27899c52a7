"""Build a section of the report, and format its numbers."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Literal, TypeAlias, TypedDict

from gadam.report.chart import Chart, Series, draw, vega
from gadam.runs.experiment import more_is_better
from gadam.runs.files import Document, Json
from gadam.runs.summary import SeedMean

__all__ = [
    "Block",
    "MeanDict",
    "SectionBuilder",
    "as_error",
    "curve",
    "error_name",
    "mean_curve",
    "mean_dict",
    "mean_text",
    "number_text",
    "seed_means",
]


class TextBlock(TypedDict):
    """A paragraph."""

    kind: Literal["text"]
    text: str


class TableBlock(TypedDict):
    """A table of texts."""

    kind: Literal["table"]
    header: list[str]
    rows: list[list[str]]


class ChartBlock(TypedDict):
    """An interactive chart."""

    kind: Literal["chart"]
    spec: Json
    caption: str


class ImageBlock(TypedDict):
    """An image file next to the section."""

    kind: Literal["image"]
    file: str
    caption: str


Block: TypeAlias = TextBlock | TableBlock | ChartBlock | ImageBlock


@dataclass
class SectionBuilder:
    """A section of the report, block by block.

    Args:
        name: The name of the part; its files are named by it.
        title: The heading.
        summary: The numbers, for ``analysis.json``.
        blocks: What the page shows, as :mod:`gadam.report.sections` reads it.
        files: The content of figures by file name.
    """

    name: str
    title: str
    summary: Document = field(default_factory=dict)
    blocks: list[Block] = field(default_factory=list)
    files: dict[str, bytes] = field(default_factory=dict)

    def text(self, text: str) -> None:
        """Add a paragraph.

        Args:
            text: The paragraph.
        """
        self.blocks.append({"kind": "text", "text": text})

    def table(self, header: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
        """Add a table.

        Args:
            header: The names of the columns.
            rows: The cells of each row.
        """
        self.blocks.append({"kind": "table", "header": list(header), "rows": list(map(list, rows))})

    def chart(self, name: str, chart: Chart) -> None:
        """Add a chart to the page, and the same chart as files for a paper.

        Args:
            name: The name of the files, without a suffix.
            chart: The chart.
        """
        self.blocks.append({"kind": "chart", "spec": vega(chart), "caption": chart.caption})
        for suffix, content in draw(chart).items():
            self.files[f"{name}.{suffix}"] = content

    def image(self, name: str, content: Mapping[str, bytes], caption: str) -> None:
        """Add an image.

        Args:
            name: The name of the files, without a suffix.
            content: The files by suffix. The page shows the PNG.
            caption: How to read it.
        """
        for suffix, data in content.items():
            self.files[f"{name}.{suffix}"] = data
        self.blocks.append({"kind": "image", "file": f"{name}.png", "caption": caption})

    @property
    def tables(self) -> list[TableBlock]:
        """The tables of the section."""
        return [block for block in self.blocks if block["kind"] == "table"]


# --------------------------------------------------------------------------------------- numbers


class MeanDict(TypedDict):
    """A mean over seeds, as it stands in ``analysis.json``."""

    mean: float | None
    error: float | None
    runs: int


def number_text(value: float) -> str:
    """Return a number with three or four significant digits.

    Args:
        value: The number.

    Example:
        >>> number_text(0.012345), number_text(12345.6)
        ('0.0123', '1.235e+04')
    """
    return f"{value:.3g}" if abs(value) < 1000 else f"{value:.4g}"


def mean_text(values: Iterable[float]) -> str:
    """Return the mean over seeds as text, with its standard error if there are several.

    Args:
        values: One per seed. Values that are not finite are skipped.

    Example:
        >>> mean_text([1.0, 2.0]), mean_text([1.0]), mean_text([])
        ('1.5 ± 0.5', '1', '–')
    """
    mean = SeedMean.of(values)
    if mean is None:
        return "–"
    if mean.error is None:
        return number_text(mean.mean)
    return f"{number_text(mean.mean)} ± {mean.error:.1g}"


def mean_dict(values: Iterable[float] | SeedMean | None) -> MeanDict:
    """Return a mean over seeds as plain data.

    Args:
        values: One per seed, or their mean. Values that are not finite are skipped.
    """
    mean = values if values is None or isinstance(values, SeedMean) else SeedMean.of(values)
    if mean is None:
        return {"mean": None, "error": None, "runs": 0}
    return {"mean": mean.mean, "error": mean.error, "runs": mean.count}


def as_error(score: Sequence[float], metric: str) -> float:
    """Return a score as a number that is better the lower it is.

    Args:
        score: Accuracy in percent, and loss in nats.
        metric: The metric that rates the run.

    Returns:
        The error in percent, or the perplexity.
    """
    accuracy, loss = score
    return 100 - accuracy if more_is_better(metric) else math.exp(min(loss, 700))


def error_name(metric: str) -> str:
    """Return the name and unit of what :func:`as_error` returns.

    Args:
        metric: The metric that rates the run.
    """
    return "test error, %" if more_is_better(metric) else f"test {metric}"


# ---------------------------------------------------------------------------------------- series


def curve(label: str, points: Iterable[tuple[float, float]]) -> Series:
    """Return a curve through the points with a finite y.

    Args:
        label: The label in the legend.
        points: (x, y) pairs.
    """
    finite = [(float(x), float(y)) for x, y in points if math.isfinite(y)]
    return Series(label, "curve", [x for x, _ in finite], [y for _, y in finite])


def seed_means(label: str, points: Iterable[tuple[float, Iterable[float]]]) -> Series:
    """Return means over seeds with their standard errors.

    Args:
        label: The label in the legend.
        points: x, and the values of the seeds at x.
    """
    means = [(x, mean) for x, values in points if (mean := SeedMean.of(values)) is not None]
    return Series(
        label,
        "measured",
        [x for x, _ in means],
        [mean.mean for _, mean in means],
        [mean.error or 0.0 for _, mean in means],
    )


def mean_curve(curves: Sequence[Sequence[float]]) -> list[float]:
    """Return the pointwise mean of curves, up to the end of the shortest one.

    Args:
        curves: The heights of each curve.
    """
    return [fmean(values) for values in zip(*curves)]
