"""The page's charts as figures for a paper, in PNG and SVG."""

from __future__ import annotations

import io
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from gadam.report import series
from gadam.report.errors import ReportError
from gadam.report.style import (
    BAND_OPACITY,
    COST_COLORS,
    COST_NAMES,
    FLOOR_COLOR_IN_FIGURES,
    POINT_DASHES,
    RC_PARAMS,
    Dashes,
    Shape,
)
from gadam.runs import Collection
from gadam.runs.files import write_atomically
from gadam.runs.summary import TaskGroup, task_groups

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["matplotlib_dashes", "png_and_svg", "set_log_scale", "write_figures"]

_MARKERS: dict[Shape, str] = {"circle": "o", "square": "s", "triangle-up": "^"}


def write_figures(collection: Collection, folder: Path) -> list[Path]:
    """Write figures of gains, learning curves, learning rates and costs, with a panel per task.

    Args:
        collection: The runs.
        folder: Where to write; created if it does not exist.

    Returns:
        The files.

    Raises:
        ReportError: The extra ``gadam[report]`` is not installed.
    """
    try:
        import matplotlib as mpl
        from matplotlib.figure import Figure
    except ImportError:
        raise ReportError(
            "The figures need matplotlib. Install it with: pip install 'gadam[report]'"
        ) from None
    folder.mkdir(parents=True, exist_ok=True)
    groups = [
        group
        for group in task_groups(collection.experiment)
        if set(group.names) & set(collection.labels)
    ]
    draw: dict[str, Callable[[Collection, Axes, TaskGroup], None]] = {
        "gains": _draw_gains,
        "curves": _draw_curves,
        "rates": _draw_rates,
        "costs": _draw_costs,
    }
    if not series.gains(collection):
        del draw["gains"]
    written = []
    with mpl.rc_context(RC_PARAMS), warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # from matplotlib's search for ticks
        for name, draw_panel in draw.items():
            figure = Figure(figsize=(6.3 * len(groups), 3.6))
            row = figure.subplots(1, len(groups), squeeze=False)[0]
            for axes, group in zip(row, groups):
                draw_panel(collection, axes, group)
                if len(groups) > 1:
                    axes.set_title(group.title, fontsize=9)
            for extension, content in png_and_svg(figure).items():
                path = folder / f"{name}.{extension}"
                write_atomically(path, content)
                written.append(path)
    return written


# --------------------------------------------------------------------------- matplotlib helpers


def png_and_svg(figure: Figure) -> dict[str, bytes]:
    """Return the content of a figure's files by extension. Equal figures have equal files.

    Args:
        figure: The figure.
    """
    found = {}
    for extension in ("png", "svg"):
        content = io.BytesIO()
        metadata = {"Date": None} if extension == "svg" else {"Software": None}
        figure.savefig(content, format=extension, metadata=metadata)
        found[extension] = content.getvalue()
    return found


def set_log_scale(axes: Axes, which: Literal["x", "y"]) -> None:
    """Make an axis logarithmic, with plain numbers as labels.

    Matplotlib's own labels are math text, which :data:`~gadam.report.style.RC_PARAMS` turns off.

    Args:
        axes: The axes, with all data drawn.
        which: "x" or "y".
    """
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    if which == "x":
        axes.set_xscale("log")
    else:
        axes.set_yscale("log")
    axis = axes.xaxis if which == "x" else axes.yaxis
    low, high = sorted(axis.get_view_interval())
    if high < 100 * low:  # too few powers of ten for labels
        axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_formatter(NullFormatter())


def matplotlib_dashes(dashes: Dashes) -> Any:
    """Return a line style as matplotlib takes it.

    Args:
        dashes: The line style.
    """
    return (0, dashes) if dashes else "-"


# --------------------------------------------------------------------------------------- figures


def _draw_gains(collection: Collection, axes: Axes, group: TaskGroup) -> None:
    names, styles = series.method_names(collection), series.method_styles(collection)
    gains = [gain for gain in series.gains(collection) if gain.label in group.names]
    for i, gain in enumerate(gains):
        color = styles[names[gain.label]].color
        axes.plot([gain.low, gain.high], [i, i], color=color, linewidth=2)
        filled = color if gain.evidence == "significant" else "white"
        axes.plot(gain.mean, i, "o", color=color, markerfacecolor=filled, markersize=7)
    axes.axvline(0, color=FLOOR_COLOR_IN_FIGURES, linewidth=1)
    axes.set_yticks(
        range(len(gains)),
        [f"{names[gain.label]} over {names.get(gain.base, gain.base)}" for gain in gains],
    )
    axes.invert_yaxis()
    axes.margins(y=0.25)
    axes.grid(axis="y", visible=False)
    if gains:
        metric = collection.experiment.metric_of(gains[0].label)
        axes.set_xlabel(f"{series.gain_title(metric)} (95% interval)")


def _draw_curves(collection: Collection, axes: Axes, group: TaskGroup) -> None:
    names, styles = series.method_names(collection), series.method_styles(collection)
    metric = collection.experiment.metric_of(next(iter(group.names)))
    split = collection.experiment.split
    curves = [curve for curve in series.curves(collection, split) if curve.label in group.names]
    if not curves:  # the runs have no such split
        split = "test"
        curves = [curve for curve in series.curves(collection) if curve.label in group.names]
    averaged = {curve.label for curve in curves if curve.point == "average"}
    for curve in curves:
        style = styles[names[curve.label]]
        is_average = curve.point == "average"
        axes.plot(
            curve.epoch,
            curve.value,
            color=style.color,
            linestyle=matplotlib_dashes(POINT_DASHES[curve.point]),
            linewidth=1.6 if is_average else 1.0,
            marker=_MARKERS[style.shape],
            markersize=3 if len(curve.epoch) <= 40 else 1,
            markerfacecolor=style.color if is_average else "white",
            label=names[curve.label] if is_average or curve.label not in averaged else None,
        )
        axes.fill_between(
            curve.epoch, curve.low, curve.high, color=style.color, alpha=BAND_OPACITY, lw=0
        )
    axes.locator_params(axis="x", integer=True)
    axes.set_xlabel("epoch (solid: average, dotted: last iterate)")
    axes.set_ylabel(series.axis_title(metric, split))
    floor = series.floors(collection, split).get(metric)
    if floor is not None:
        axes.axhline(
            floor, color=FLOOR_COLOR_IN_FIGURES, linestyle=":", linewidth=1, label="best possible"
        )
    if curves:
        axes.legend(ncols=2)


def _draw_rates(collection: Collection, axes: Axes, group: TaskGroup) -> None:
    names, styles = series.method_names(collection), series.method_styles(collection)
    for rate in series.rates(collection):
        if rate.label not in group.names:
            continue
        style = styles[names[rate.label]]
        axes.step(
            range(len(rate.rate)),
            rate.rate,
            where="post",
            color=style.color,
            linestyle=matplotlib_dashes(style.dashes),
            label=names[rate.label],
        )
        if rate.start is not None:
            axes.axvline(rate.start, color=style.color, linestyle="--", linewidth=1)
    axes.set_xlabel("epoch")
    axes.set_ylabel("learning rate")
    set_log_scale(axes, "y")
    axes.legend(ncols=2)


def _draw_costs(collection: Collection, axes: Axes, group: TaskGroup) -> None:
    names = series.method_names(collection)
    costs = [cost for cost in series.costs(collection) if cost.label in group.names]
    labels = [names[cost.label] for cost in costs]
    left = [0.0] * len(costs)
    for activity, color in COST_COLORS.items():
        seconds = [cost.seconds.get(activity, 0.0) for cost in costs]
        axes.barh(labels, seconds, left=left, color=color, label=COST_NAMES[activity])
        left = [a + b for a, b in zip(left, seconds)]
    axes.invert_yaxis()
    axes.grid(axis="y", visible=False)
    axes.set_xlabel("seconds per epoch")
    if costs:
        axes.legend()
