"""Colors and line styles of all charts, on the page and in figures.

Change a chart's color here. The colors of the page around the charts are in ``page.css``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from gadam.runs.record import Point

__all__ = [
    "BAND_OPACITY",
    "COLORS",
    "COST_COLORS",
    "DASHED",
    "FLOOR_COLOR_IN_FIGURES",
    "FLOOR_COLOR_ON_PAGE",
    "FLOOR_DASHES",
    "MARKS",
    "RC_PARAMS",
    "START_DASHES",
    "Dashes",
    "Style",
    "colors_by_label",
    "styles",
    "vega_dashes",
]

Dashes = tuple[int, ...]  # lengths of strokes and gaps in turn; empty for a solid line

# The palette of Okabe and Ito, which color-blind readers can tell apart. Their yellow is left out,
# because it is too light for lines.
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#6A4C93", "#8C564B")

# Line styles to cycle through each time the colors run out, and the CSS classes of their swatches.
_DASHES: dict[Point, tuple[Dashes, Dashes, Dashes]] = {
    "average": ((), (10, 3), (10, 2, 2, 2)),
    "iterate": ((2, 3), (1, 2), (4, 2, 1, 2)),
}
_SWATCHES = ("swatch", "swatch second", "swatch third")

# Where an epoch's time goes.
COST_COLORS = {"train": "#0072B2", "refresh": "#E69F00", "evaluate": "#8a939c"}

# The best possible value. The page's gray must be visible in dark mode too.
FLOOR_COLOR_ON_PAGE = "#8a939c"
FLOOR_COLOR_IN_FIGURES = "#555"
FLOOR_DASHES: Dashes = (2, 3)

START_DASHES: Dashes = (6, 4)  # where averaging starts
BAND_OPACITY = 0.15  # one standard error around a learning curve

# How `gadam.report.chart` draws each kind of series. Computed values are lines, observed values
# are points, and the paper's misprinted formulas are dashed.
MARKS = {
    "prediction": "line",
    "printed": "dashed",
    "simulation": "points",
    "curve": "line",
    "measured": "points",
}
DASHED: Dashes = (4, 3)

RC_PARAMS: dict[Any, Any] = {  # settings of matplotlib, which types each key on its own
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#e3e7eb",
    "axes.axisbelow": True,
    "legend.frameon": False,
    "legend.fontsize": 8,
    "figure.constrained_layout.use": True,
    "savefig.dpi": 200,
    "text.parse_math": False,  # labels may contain dollar signs
    "svg.hashsalt": "gadam",  # the same numbers produce the same file
}


@dataclass(frozen=True)
class Style:
    """How a method's lines are drawn.

    Args:
        color: The color of all its lines.
        dashes: The line style by point.
        swatch: The CSS classes of its swatch on the page.
    """

    color: str
    dashes: Mapping[Point, Dashes]
    swatch: str


def styles(labels: Iterable[str]) -> dict[str, Style]:
    """Return a style for each method. The first 24 differ from each other.

    Args:
        labels: The methods.
    """
    found = {}
    for i, label in enumerate(labels):
        turn = (i // len(COLORS)) % 3
        dashes = {point: patterns[turn] for point, patterns in _DASHES.items()}
        found[label] = Style(COLORS[i % len(COLORS)], dashes, _SWATCHES[turn])
    return found


def colors_by_label(labels: Iterable[str]) -> dict[str, str]:
    """Return a color for each distinct label, in order of appearance.

    Args:
        labels: The labels; series that belong together share one.
    """
    return {label: COLORS[i % len(COLORS)] for i, label in enumerate(dict.fromkeys(labels))}


def vega_dashes(dashes: Dashes) -> list[int]:
    """Return a line style as Vega-Lite takes it.

    Args:
        dashes: The line style.
    """
    return list(dashes) or [1, 0]
