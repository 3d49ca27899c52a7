"""A figure of curves and points as data; drawn in the style of a paper, and for the page."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from gadam.report.figures import STYLE, dash, logarithmic, rendered
from gadam.report.series import COLOURS

__all__ = ["Chart", "Series", "draw", "vega"]

# How each kind is drawn: what is computed is a line, what is seen are points; what is wrong is dashed.
MARKS = {
    "prediction": "line",
    "printed": "dashed",
    "simulation": "points",
    "curve": "line",
    "measured": "points",
}


@dataclass(frozen=True)
class Series:
    """A curve, or points with the standard errors of their heights.

    Args:
        label: one colour for all that share it, as a prediction and the simulation of it
        kind: what it is, one of :data:`MARKS`, which says how it is drawn
        x: across
        y: up
        error: of y, where there is one
    """

    label: str
    kind: str
    x: list[float]
    y: list[float]
    error: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class Chart:
    """One figure.

    Args:
        title: what it shows
        caption: how to read it
        x: what is across
        y: what is up
        series: the curves and points
        log_x: whether that axis is logarithmic
        log_y: likewise
    """

    title: str
    caption: str
    x: str
    y: str
    series: list[Series]
    log_x: bool = True
    log_y: bool = True


def _colours(picture: Chart) -> dict[str, str]:
    labels = dict.fromkeys(series.label for series in picture.series)
    return {label: COLOURS[i % len(COLOURS)] for i, label in enumerate(labels)}


def draw(picture: Chart) -> dict[str, bytes]:
    """The figure as PNG and SVG."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    colours = _colours(picture)
    lined = {series.label for series in picture.series if MARKS[series.kind] != "points"}
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(6.3, 3.8))
        axes = figure.add_subplot()
        for series in picture.series:
            colour = colours[series.label]
            if MARKS[series.kind] == "points":
                axes.errorbar(
                    series.x,
                    series.y,
                    yerr=[2 * e for e in series.error] or None,
                    color=colour,
                    fmt="o",
                    markersize=4,
                    capsize=2,
                    label=series.label if series.label not in lined else None,
                )
            else:
                style: Any = "-" if MARKS[series.kind] == "line" else dash((4, 3))
                axes.plot(series.x, series.y, color=colour, linestyle=style, label=series.label)
        for axis, log in ((axes.xaxis, picture.log_x), (axes.yaxis, picture.log_y)):
            if log:
                logarithmic(axis)
        axes.set_xlabel(picture.x)
        axes.set_ylabel(picture.y)
        axes.legend()
        return rendered(figure)


def vega(picture: Chart) -> dict[str, Any]:
    """The figure for the page."""
    colours = _colours(picture)
    rows = [
        {
            "label": s.label,
            "kind": s.kind,
            "mark": MARKS[s.kind],
            "x": x,
            "y": y,
            "low": y - 2 * e,
            "high": y + 2 * e,
        }
        for s in picture.series
        for x, y, e in zip(s.x, s.y, s.error or [0.0] * len(s.x))
    ]

    def axis(name: str, title: str, log: bool) -> dict[str, Any]:
        scale = {"type": "log"} if log else {"type": "linear", "zero": False}
        number = {"field": name, "type": "quantitative", "axis": {"format": "~g"}}
        return {**number, "title": title, "scale": scale}

    across, up = axis("x", picture.x, picture.log_x), axis("y", picture.y, picture.log_y)
    colour = {
        "field": "label",
        "type": "nominal",
        "title": None,
        "scale": {"domain": list(colours), "range": list(colours.values())},
        "legend": {"orient": "top", "columns": 3, "labelLimit": 300},
    }
    tooltip = [
        {"field": "label", "title": "what"},
        {"field": "kind"},
        {"field": "x", "title": picture.x, "format": ".4~g"},
        {"field": "y", "title": picture.y, "format": ".4~g"},
    ]
    return {
        "$schema": "https://vega.github.io/schema/vega-lite/v6.json",
        "width": "container",
        "height": 320,
        "data": {"values": rows},
        "layer": [
            {
                "transform": [{"filter": f"datum.mark == '{mark}'"}],
                "mark": {"type": "line", "strokeDash": list(pattern)},
                "encoding": {"x": across, "y": up, "color": colour, "tooltip": tooltip},
            }
            for mark, pattern in (("line", (1, 0)), ("dashed", (4, 3)))
        ]
        + [
            {
                "transform": [{"filter": "datum.mark == 'points'"}],
                "mark": "rule",
                "encoding": {
                    "x": across,
                    "y": {**up, "field": "low"},
                    "y2": {"field": "high"},
                    "color": colour,
                },
            },
            {
                "transform": [{"filter": "datum.mark == 'points'"}],
                "mark": {"type": "point", "filled": True, "size": 45},
                "encoding": {"x": across, "y": up, "color": colour, "tooltip": tooltip},
            },
        ],
    }
