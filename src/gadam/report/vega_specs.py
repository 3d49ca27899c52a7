"""The page's charts as Vega-Lite specifications. ``page.js`` adds the selected data."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias

from gadam.report.series import Gain
from gadam.report.style import (
    BAND_OPACITY,
    COST_COLORS,
    COST_NAMES,
    FLOOR_COLOR_ON_PAGE,
    FLOOR_DASHES,
    POINT_DASHES,
    POINT_NAMES,
    START_DASHES,
    Style,
    vega_dashes,
)
from gadam.runs.summary import decimals, signed

__all__ = ["COMMON", "Spec", "costs_spec", "curves_spec", "gains_spec", "rates_spec"]

Spec: TypeAlias = dict[str, Any]  # a Vega-Lite specification, or an object inside one

COMMON: Spec = {
    "$schema": "https://vega.github.io/schema/vega-lite/v6.json",
    "width": "container",
}
_EPOCH: Spec = {
    "field": "epoch",
    "type": "quantitative",
    "title": "epoch",
    "axis": {"tickMinStep": 1, "tickCount": 8, "format": "d", "labelOverlap": True},
}
_LEGEND: Spec = {
    "orient": "bottom",
    "columns": 6,
    "labelLimit": 260,
    "symbolStrokeWidth": 2.5,
    "symbolOpacity": 1,
}
_MARKER = 26  # area in square pixels
_RING = (  # an open circle, as a filled path
    "M-1,0A1,1,0,1,1,1,0A1,1,0,1,1,-1,0ZM-0.6,0A0.6,0.6,0,1,0,0.6,0A0.6,0.6,0,1,0,-0.6,0Z"
)
_MANY_EPOCHS = 40  # from here on, markers would hide the lines


def _scale(styles: Mapping[str, Style], names: Iterable[str], attribute: str) -> Spec:
    domain = list(names)
    return {"domain": domain, "range": [getattr(styles[name], attribute) for name in domain]}


def _color(styles: Mapping[str, Style], names: Iterable[str], legend: Spec | None = None) -> Spec:
    return {
        "field": "name",
        "type": "nominal",
        "title": None,
        "legend": legend,
        "scale": _scale(styles, names, "color"),
    }


# ------------------------------------------------------------------------------------------ gains


def gains_spec(
    gains: Sequence[Gain],
    names: Mapping[str, str],
    styles: Mapping[str, Style],
    title: str,
    domain: tuple[float, float],
) -> Spec:
    """Return the forest plot of one task: a gain per row, its 95% interval, and zero.

    Args:
        gains: The gains of the task.
        names: Method names by row.
        styles: By method name.
        title: The title of the axis.
        domain: The range of the axis, which all tasks share.
    """
    rows = [
        {
            "name": names[gain.label],
            "row": f"{names[gain.label]} over {names.get(gain.base, gain.base)}",
            "mean": gain.mean,
            "low": gain.low,
            "high": gain.high,
            "seeds": gain.seeds,
            "evidence": gain.evidence,
        }
        for gain in gains
    ]
    order = [row["row"] for row in rows]
    numbers = {row["row"]: _numbers(gain) for row, gain in zip(rows, gains)}
    x: Spec = {
        "field": "mean",
        "type": "quantitative",
        "title": title,
        "scale": {"domain": list(domain), "nice": True},
        "axis": {
            "format": "+~r",
            "tickCount": 7,
            "labelExpr": "datum.value == 0 ? '0' : datum.label",
        },
    }
    plain_axis: Spec = {"ticks": False, "domain": False, "labelLimit": 240, "labelPadding": 8}
    y: Spec = {
        "field": "row",
        "type": "nominal",
        "sort": order,
        "title": None,
        "axis": plain_axis,
    }
    color = _color(styles, dict.fromkeys(names[gain.label] for gain in gains))
    tooltip = [
        {"field": "row", "title": "gain of"},
        {"field": "mean", "title": "mean", "format": "+.3~g"},
        {"field": "low", "title": "95% interval from", "format": "+.3~g"},
        {"field": "high", "title": "to", "format": "+.3~g"},
        {"field": "seeds"},
    ]
    evidence = list(dict.fromkeys(gain.evidence for gain in gains))
    zero: Spec = {
        "data": {"values": [{"zero": 0}]},
        "mark": {"type": "rule", "strokeWidth": 1.5, "color": FLOOR_COLOR_ON_PAGE},
        "encoding": {"x": {**x, "field": "zero"}},
    }
    interval: Spec = {
        "mark": {"type": "rule", "strokeWidth": 2, "strokeCap": "round"},
        "encoding": {
            "x": {**x, "field": "low"},
            "x2": {"field": "high"},
            "y": {**y, "axis": None},
            "color": color,
            "tooltip": tooltip,
        },
    }
    point: Spec = {
        "mark": {"type": "point", "size": 130, "filled": True, "opacity": 1},
        "encoding": {
            "x": x,
            "y": y,
            "color": color,
            "shape": {
                "field": "evidence",
                "type": "nominal",
                "title": None,
                "scale": {
                    "domain": evidence,
                    "range": ["circle" if text == "significant" else _RING for text in evidence],
                },
                "legend": {
                    "orient": "bottom",
                    "direction": "horizontal",
                    "symbolFillColor": FLOOR_COLOR_ON_PAGE,
                },
            },
            "tooltip": tooltip,
        },
    }
    text: Spec = {  # the numbers, as labels of an axis on the right
        "name": "numbers",
        "mark": {"type": "point", "opacity": 0, "tooltip": False},
        "encoding": {
            "x": x,
            "y": {
                **y,
                "axis": {
                    **plain_axis,
                    "orient": "right",
                    "labelExpr": f"({json.dumps(numbers)})[datum.label]",
                },
            },
        },
    }
    return {
        **COMMON,
        "height": 34 * len(rows),
        "data": {"values": rows},
        "layer": [zero, interval, point, text],
        "resolve": {"axis": {"y": "independent"}},
    }


def _numbers(gain: Gain) -> str:
    largest = max(abs(gain.low), abs(gain.high))
    digits = 2 if largest >= 0.1 else decimals(largest)
    mean, low, high = signed((gain.mean, gain.low, gain.high), digits)
    return (f"{mean} ({low} to {high})" if gain.low < gain.high else mean).replace("-", "−")


# ----------------------------------------------------------------------------------------- curves


def curves_spec(names: Sequence[str], styles: Mapping[str, Style], epochs: int) -> Spec:
    """Return the chart of one task's learning curves.

    Its data sets are ``curves`` (rows of :class:`~gadam.report.series.Curve` with the method's
    ``name``, and ``point`` in words) and ``floor`` (the best possible value).

    Args:
        names: The methods of the task.
        styles: By method name.
        epochs: The largest number of evaluations of a curve.
    """
    size = _MARKER if epochs <= _MANY_EPOCHS else 4
    legend = {**_LEGEND, "symbolSize": 60}
    color = _color(styles, names, legend)
    shape = {**color, "scale": _scale(styles, names, "shape")}
    value = {
        "field": "value",
        "type": "quantitative",
        "scale": {"zero": False},
        "axis": {"format": ".4~r"},
    }
    points = list(POINT_DASHES)
    dash: Spec = {
        "field": "point",
        "type": "nominal",
        "title": None,
        "legend": {
            "orient": "top",
            "direction": "horizontal",
            "symbolSize": 500,
            "symbolType": "stroke",
            "symbolStrokeColor": FLOOR_COLOR_ON_PAGE,
        },
        "scale": {
            "domain": [POINT_NAMES[point] for point in points],
            "range": [vega_dashes(POINT_DASHES[point]) for point in points],
        },
    }
    is_average = f"datum.point == '{POINT_NAMES['average']}'"
    hover = {
        "name": "hover",
        "select": {"type": "point", "on": "pointerover", "nearest": True, "clear": "pointerout"},
    }
    band: Spec = {
        "mark": {"type": "area", "opacity": BAND_OPACITY, "tooltip": False},
        "encoding": {
            "x": _EPOCH,
            "y": {**value, "field": "low"},
            "y2": {"field": "high"},
            "color": color,
            "detail": {"field": "point"},
        },
    }
    line: Spec = {
        "mark": {"type": "line"},
        "encoding": {
            "x": _EPOCH,
            "y": value,
            "color": color,
            "strokeDash": dash,
            "strokeWidth": {
                "condition": {"test": is_average, "value": 2.5},
                "value": 1.5,
            },
        },
    }
    markers: Spec = {
        "mark": {"type": "point", "strokeWidth": 1.5, "size": size},
        "encoding": {
            "x": _EPOCH,
            "y": value,
            "color": color,
            "shape": shape,
            "fill": color,
            "fillOpacity": {"condition": {"test": is_average, "value": 1}, "value": 0},
        },
    }
    nearest: Spec = {
        "mark": {"type": "point", "filled": True, "size": 90},
        "params": [hover],
        "encoding": {
            "x": _EPOCH,
            "y": value,
            "color": color,
            "opacity": {
                "condition": {"param": "hover", "empty": False, "value": 1},
                "value": 0,
            },
            "tooltip": _curves_tooltip(),
        },
    }
    floor: Spec = {
        "data": {"name": "floor"},
        "mark": {"type": "rule", "strokeDash": list(FLOOR_DASHES), "strokeWidth": 1.5},
        "encoding": {
            "y": value,
            "color": {"value": FLOOR_COLOR_ON_PAGE},
            "tooltip": [{"field": "value", "title": "best possible", "format": ".2f"}],
        },
    }
    return {
        **COMMON,
        "height": 340,
        "config": {"customFormatTypes": True},
        "data": {"name": "curves"},
        "layer": [band, line, markers, nearest, floor],
    }


def _curves_tooltip() -> list[Spec]:
    # With "nearest", Vega-Lite shows only fields that have a format, so text needs one too.
    text = {"format": "", "formatType": "toString"}
    return [
        {"field": "name", "type": "nominal", "title": "method", **text},
        {"field": "point", "type": "nominal", **text},
        {"field": "epoch", "type": "quantitative"},
        {"field": "seconds", "type": "quantitative", "format": ",.0f"},
        {"field": "value", "type": "quantitative", "format": ".4~g"},
        {"field": "low", "type": "quantitative", "title": "minus one s.e.", "format": ".4~g"},
        {"field": "high", "type": "quantitative", "title": "plus one s.e.", "format": ".4~g"},
        {"field": "seeds", "type": "quantitative"},
    ]


# -------------------------------------------------------------------------------- rates and costs


def rates_spec(names: Sequence[str], styles: Mapping[str, Style]) -> Spec:
    """Return the chart of one task's learning rates.

    Its data sets are ``rates`` (name, epoch, rate) and ``starts`` (name, epoch).

    Args:
        names: The methods of the task.
        styles: By method name.
    """
    color = _color(styles, names, {**_LEGEND, "symbolType": "stroke", "symbolSize": 300})
    dashes = _scale(styles, names, "dashes")
    line: Spec = {
        "data": {"name": "rates"},
        "mark": {"type": "line", "interpolate": "step-after", "strokeWidth": 2.5},
        "encoding": {
            "x": _EPOCH,
            "y": {
                "field": "rate",
                "type": "quantitative",
                "title": "learning rate",
                "scale": {"type": "log"},
                "axis": {"format": "~g"},
            },
            "color": color,
            "strokeDash": {
                **color,
                "scale": {**dashes, "range": [vega_dashes(each) for each in dashes["range"]]},
            },
            "tooltip": [
                {"field": "name", "title": "method"},
                {"field": "epoch"},
                {"field": "rate", "title": "learning rate"},
            ],
        },
    }
    start: Spec = {
        "data": {"name": "starts"},
        "mark": {"type": "rule", "strokeDash": list(START_DASHES), "strokeWidth": 1.5},
        "encoding": {
            "x": _EPOCH,
            "color": color,
            "tooltip": [
                {"field": "name", "title": "method"},
                {"field": "epoch", "title": "averaging starts"},
            ],
        },
    }
    return {**COMMON, "height": 240, "layer": [line, start]}


def costs_spec(names: Sequence[str]) -> Spec:
    """Return the chart of one task's costs.

    Its data set is ``costs`` (name, activity, seconds).

    Args:
        names: The methods of the task, in order.
    """
    return {
        **COMMON,
        "height": 26 * len(names),
        "data": {"name": "costs"},
        "mark": "bar",
        "encoding": {
            "y": {
                "field": "name",
                "type": "nominal",
                "title": None,
                "sort": list(names),
                "axis": {"labelLimit": 240, "ticks": False, "domain": False, "labelPadding": 8},
            },
            "x": {
                "field": "seconds",
                "type": "quantitative",
                "aggregate": "sum",
                "title": "seconds per epoch",
                "axis": {"tickCount": 6},
            },
            "color": {
                "field": "activity",
                "type": "nominal",
                "title": None,
                "sort": list(COST_NAMES.values()),
                "scale": {
                    "domain": list(COST_NAMES.values()),
                    "range": [COST_COLORS[activity] for activity in COST_NAMES],
                },
                "legend": {**_LEGEND, "columns": 3},
            },
            "tooltip": [
                {"field": "name", "title": "method"},
                {"field": "activity"},
                {"field": "seconds", "format": ".2f"},
            ],
        },
    }
