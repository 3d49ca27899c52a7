"""Colors and line styles of all charts, on the page and in figures.

Change a chart's color here. The colors of the page around the charts are in ``page.css``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from gadam.runs.record import Point

__all__ = [
    "BAND_OPACITY",
    "COLORS",
    "COST_COLORS",
    "COST_NAMES",
    "DASHED",
    "FLOOR_COLOR_IN_FIGURES",
    "FLOOR_COLOR_ON_PAGE",
    "FLOOR_DASHES",
    "MARKS",
    "PAIRS",
    "POINT_DASHES",
    "POINT_NAMES",
    "RC_PARAMS",
    "START_DASHES",
    "Dashes",
    "Shape",
    "Style",
    "colors_by_label",
    "styles",
    "vega_dashes",
]

Dashes: TypeAlias = tuple[int, ...]  # lengths of strokes and gaps in turn; empty for a solid line
Shape: TypeAlias = Literal["circle", "square", "triangle-up"]

# Pairs of related colors: of a method without averaging, and of its averaged version. Readers with
# any color vision can tell the pairs apart. The contrast of each color with the page's light and
# dark background is at least 3.
PAIRS = (
    ("#359BC9", "#0069B8"),
    ("#C48700", "#D04A02"),
    ("#779A18", "#00805A"),
    ("#CC79A7", "#7E4FB5"),
)
COLORS = (*(averaged for _, averaged in PAIRS), *(base for base, _ in PAIRS))

# Line styles of the two points.
POINT_DASHES: dict[Point, Dashes] = {"average": (), "iterate": (2, 3)}
POINT_NAMES: dict[Point, str] = {"average": "average", "iterate": "last iterate"}

# What tells methods apart each time the colors run out: markers, or line styles without markers.
_SHAPES: tuple[Shape, Shape, Shape] = ("circle", "square", "triangle-up")
_DASHES: tuple[Dashes, Dashes, Dashes] = ((), (10, 3), (10, 2, 2, 2))

# Where an epoch's time goes.
COST_COLORS = {"train": "#0069B8", "refresh": "#C48700", "evaluate": "#8a939c"}
COST_NAMES = {"train": "training", "refresh": "BatchNorm refresh", "evaluate": "evaluation"}

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
    """How a method is drawn.

    Args:
        color: The color of its lines and markers.
        shape: The shape of its markers.
        dashes: The line style of a chart without markers.
    """

    color: str
    shape: Shape
    dashes: Dashes


def styles(names: Iterable[str], bases: Mapping[str, str] | None = None) -> dict[str, Style]:
    """Return a style for each method. The first 24 differ from each other.

    Args:
        names: The methods. Equal names share a style.
        bases: For averaged methods, the method without averaging. Such pairs get related colors.
    """
    methods = list(dict.fromkeys(names))
    turns = range(1 + len(methods) // len(PAIRS))  # enough for pairs and single methods
    pairs = [(base, averaged, turn) for turn in turns for base, averaged in PAIRS]
    slots: dict[str, tuple[str, int]] = {}
    for method in methods:
        partner = (bases or {}).get(method, method)
        if partner != method and partner in methods and not {method, partner} & set(slots):
            base, averaged, turn = pairs.pop(0)
            slots |= {partner: (base, turn), method: (averaged, turn)}
    taken = set(slots.values())
    free = iter([(c, turn) for turn in turns for c in COLORS if (c, turn) not in taken])
    slots |= {method: next(free) for method in methods if method not in slots}
    return {
        method: Style(color, _SHAPES[turn % len(_SHAPES)], _DASHES[turn % len(_DASHES)])
        for method, (color, turn) in ((method, slots[method]) for method in methods)
    }


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
