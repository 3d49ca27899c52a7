"""The page's charts as Vega-Lite specifications. ``page.js`` adds the selected data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from gadam.report.series import Curve, averaged_labels, styled_as
from gadam.report.style import (
    BAND_OPACITY,
    COST_COLORS,
    FLOOR_COLOR_ON_PAGE,
    FLOOR_DASHES,
    START_DASHES,
    Style,
    vega_dashes,
)

__all__ = ["COMMON", "Spec", "costs_spec", "curves_spec", "rates_spec"]

Spec: TypeAlias = dict[str, Any]  # a Vega-Lite specification, or an object inside one

COMMON: Spec = {
    "$schema": "https://vega.github.io/schema/vega-lite/v6.json",
    "width": "container",
}
_EPOCH: Spec = {
    "field": "epoch",
    "type": "quantitative",
    "title": "epoch",
    "axis": {"tickMinStep": 1, "format": "d"},
}


def _color(styles: Mapping[str, Style]) -> Spec:
    return {
        "field": "label",
        "type": "nominal",
        "legend": None,
        "scale": {"domain": list(styles), "range": [style.color for style in styles.values()]},
    }


def _stroke_dash(field: str, dashes: Sequence[tuple[str, list[int]]]) -> Spec:
    return {
        "field": field,
        "type": "nominal",
        "legend": None,
        "scale": {
            "domain": [name for name, _ in dashes],
            "range": [pattern for _, pattern in dashes],
        },
    }


def curves_spec(curves: Sequence[Curve], styles: Mapping[str, Style]) -> Spec:
    """Return the chart of learning curves.

    Its data sets are ``curves`` (rows of :class:`~gadam.report.series.Curve`, with a field
    ``style`` that joins label and point) and ``floor`` (the best possible value).

    Args:
        curves: All curves of one split.
        styles: By method.
    """
    averaged = averaged_labels(curves)
    dashes = [
        (
            f"{curve.label} {curve.point}",
            vega_dashes(styles[curve.label].dashes[styled_as(curve, averaged)]),
        )
        for curve in curves
    ]
    color = _color(styles)
    value = {"field": "value", "type": "quantitative", "scale": {"zero": False}}
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
        "mark": {"type": "line", "strokeWidth": 2},
        "encoding": {
            "x": _EPOCH,
            "y": value,
            "color": color,
            "strokeDash": _stroke_dash("style", dashes),
        },
    }
    nearest: Spec = {
        "mark": {"type": "point", "filled": True, "size": 70},
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
        "height": 380,
        "config": {"customFormatTypes": True},
        "data": {"name": "curves"},
        "layer": [band, line, nearest, floor],
    }


def _curves_tooltip() -> list[Spec]:
    # With "nearest", Vega-Lite shows only fields that have a format, so text needs one too.
    text = {"format": "", "formatType": "toString"}
    return [
        {"field": "label", "type": "nominal", "title": "method", **text},
        {"field": "point", "type": "nominal", **text},
        {"field": "epoch", "type": "quantitative"},
        {"field": "seconds", "type": "quantitative", "format": ",.0f"},
        {"field": "value", "type": "quantitative", "format": ".2f"},
        {"field": "low", "type": "quantitative", "title": "minus one s.e.", "format": ".2f"},
        {"field": "high", "type": "quantitative", "title": "plus one s.e.", "format": ".2f"},
        {"field": "seeds", "type": "quantitative"},
    ]


def rates_spec(styles: Mapping[str, Style]) -> Spec:
    """Return the chart of learning rates.

    Its data sets are ``rates`` (label, epoch, rate) and ``starts`` (label, epoch).

    Args:
        styles: By method.
    """
    color = _color(styles)
    dashes = [(label, vega_dashes(style.dashes["average"])) for label, style in styles.items()]
    line: Spec = {
        "data": {"name": "rates"},
        "mark": {"type": "line", "interpolate": "step-after", "strokeWidth": 2},
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
            "strokeDash": _stroke_dash("label", dashes),
            "tooltip": [{"field": "label"}, {"field": "epoch"}, {"field": "rate"}],
        },
    }
    start: Spec = {
        "data": {"name": "starts"},
        "mark": {"type": "rule", "strokeDash": list(START_DASHES), "strokeWidth": 1.5},
        "encoding": {
            "x": _EPOCH,
            "color": color,
            "tooltip": [{"field": "label"}, {"field": "epoch", "title": "averaging starts"}],
        },
    }
    return {**COMMON, "height": 220, "layer": [line, start]}


def costs_spec(styles: Mapping[str, Style]) -> Spec:
    """Return the chart of costs.

    Its data set is ``costs`` (label, activity, seconds).

    Args:
        styles: By method; only their order is used.
    """
    return {
        **COMMON,
        "data": {"name": "costs"},
        "mark": "bar",
        "encoding": {
            "y": {
                "field": "label",
                "type": "nominal",
                "title": None,
                "sort": list(styles),
                "axis": {"labelLimit": 220},
            },
            "x": {
                "field": "seconds",
                "type": "quantitative",
                "aggregate": "sum",
                "title": "seconds per epoch",
            },
            "color": {
                "field": "activity",
                "type": "nominal",
                "title": None,
                "sort": list(COST_COLORS),
                "scale": {"domain": list(COST_COLORS), "range": list(COST_COLORS.values())},
                "legend": {"orient": "top"},
            },
            "tooltip": [
                {"field": "label"},
                {"field": "activity"},
                {"field": "seconds", "format": ".2f"},
            ],
        },
    }
