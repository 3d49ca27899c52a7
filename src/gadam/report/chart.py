"""A chart of curves and points as data, drawn as a figure for a paper or for the page."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gadam.report.figures import matplotlib_dashes, png_and_svg, set_log_scale
from gadam.report.style import DASHED, MARKS, RC_PARAMS, colors_by_label, vega_dashes
from gadam.report.vega_specs import COMMON, Spec

__all__ = ["Chart", "Series", "draw", "vega"]


@dataclass(frozen=True)
class Series:
    """A curve, or points with standard errors.

    Args:
        label: Its name in the legend. Series with the same label share a color, such as a
            prediction and its simulation.
        kind: A key of :data:`gadam.report.style.MARKS`, which decides how it is drawn.
        x: Horizontal positions.
        y: Vertical positions.
        error: Standard errors of ``y``; empty if there are none.
    """

    label: str
    kind: str
    x: Sequence[float]
    y: Sequence[float]
    error: Sequence[float] = ()


@dataclass(frozen=True)
class Chart:
    """One chart.

    Args:
        title: What it shows.
        caption: How to read it.
        x: The title of the horizontal axis.
        y: The title of the vertical axis.
        series: The curves and points.
        log_x: Use a logarithmic horizontal axis.
        log_y: Use a logarithmic vertical axis.
    """

    title: str
    caption: str
    x: str
    y: str
    series: Sequence[Series]
    log_x: bool = True
    log_y: bool = True


def draw(chart: Chart) -> dict[str, bytes]:
    """Return the content of the chart's PNG and SVG files by extension.

    Args:
        chart: The chart. Error bars show two standard errors.
    """
    import matplotlib as mpl
    from matplotlib.figure import Figure

    colors = colors_by_label(series.label for series in chart.series)
    has_line = {series.label for series in chart.series if MARKS[series.kind] != "points"}
    with mpl.rc_context(RC_PARAMS):
        figure = Figure(figsize=(6.3, 3.8))
        axes = figure.add_subplot()
        for series in chart.series:
            color = colors[series.label]
            if MARKS[series.kind] == "points":
                axes.errorbar(
                    series.x,
                    series.y,
                    yerr=[2 * e for e in series.error] or None,
                    color=color,
                    fmt="o",
                    markersize=4,
                    capsize=2,
                    label=series.label if series.label not in has_line else None,
                )
            else:
                style = matplotlib_dashes(() if MARKS[series.kind] == "line" else DASHED)
                axes.plot(series.x, series.y, color=color, linestyle=style, label=series.label)
        if chart.log_x:
            set_log_scale(axes, "x")
        if chart.log_y:
            set_log_scale(axes, "y")
        axes.set_xlabel(chart.x)
        axes.set_ylabel(chart.y)
        axes.legend()
        return png_and_svg(figure)


def vega(chart: Chart) -> Spec:
    """Return the chart for the page.

    Args:
        chart: The chart. Error bars show two standard errors.
    """
    colors = colors_by_label(series.label for series in chart.series)
    rows = [
        {
            "label": series.label,
            "kind": series.kind,
            "mark": MARKS[series.kind],
            "x": x,
            "y": y,
            "low": y - 2 * error,
            "high": y + 2 * error,
        }
        for series in chart.series
        for x, y, error in zip(series.x, series.y, series.error or [0.0] * len(series.x))
    ]

    def axis(name: str, title: str, log: bool) -> Spec:
        scale = {"type": "log"} if log else {"type": "linear", "zero": False}
        number = {"field": name, "type": "quantitative", "axis": {"format": "~g"}}
        return {**number, "title": title, "scale": scale}

    x_axis, y_axis = axis("x", chart.x, chart.log_x), axis("y", chart.y, chart.log_y)
    color = {
        "field": "label",
        "type": "nominal",
        "title": None,
        "scale": {"domain": list(colors), "range": list(colors.values())},
        "legend": {"orient": "top", "columns": 3, "labelLimit": 300},
    }
    tooltip = [
        {"field": "label", "title": "series"},
        {"field": "kind"},
        {"field": "x", "title": chart.x, "format": ".4~g"},
        {"field": "y", "title": chart.y, "format": ".4~g"},
    ]
    encoding = {"x": x_axis, "y": y_axis, "color": color, "tooltip": tooltip}
    lines = [
        {
            "transform": [{"filter": f"datum.mark == '{mark}'"}],
            "mark": {"type": "line", "strokeDash": vega_dashes(dashes)},
            "encoding": encoding,
        }
        for mark, dashes in (("line", ()), ("dashed", DASHED))
    ]
    error_bars = {
        "transform": [{"filter": "datum.mark == 'points'"}],
        "mark": "rule",
        "encoding": {
            "x": x_axis,
            "y": {**y_axis, "field": "low"},
            "y2": {"field": "high"},
            "color": color,
        },
    }
    points = {
        "transform": [{"filter": "datum.mark == 'points'"}],
        "mark": {"type": "point", "filled": True, "size": 45},
        "encoding": encoding,
    }
    return {
        **COMMON,
        "height": 320,
        "data": {"values": rows},
        "layer": [*lines, error_bars, points],
    }
