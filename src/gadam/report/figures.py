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
    FLOOR_COLOR_IN_FIGURES,
    RC_PARAMS,
    Dashes,
    styles,
)
from gadam.runs import Collection
from gadam.runs.files import write_atomically

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["matplotlib_dashes", "png_and_svg", "set_log_scale", "write_figures"]


def write_figures(collection: Collection, folder: Path) -> list[Path]:
    """Write figures of learning curves, learning rates and costs.

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
    metrics = collection.experiment.metrics
    panels: dict[str, list[Callable[[Axes], None]]] = {
        "curves": [lambda axes, m=m: _draw_curves(collection, axes, m) for m in metrics],  # type: ignore[misc]
        "rates": [lambda axes: _draw_rates(collection, axes)],
        "costs": [lambda axes: _draw_costs(collection, axes)],
    }
    written = []
    with mpl.rc_context(RC_PARAMS), warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # from matplotlib's search for ticks
        for name, draw_panels in panels.items():
            figure = Figure(figsize=(6.3 * len(draw_panels), 3.6))
            row = figure.subplots(1, len(draw_panels), squeeze=False)[0]
            for axes, draw_panel in zip(row, draw_panels):
                draw_panel(axes)
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


def _draw_curves(collection: Collection, axes: Axes, metric: str) -> None:
    method_styles = styles(collection.labels)
    split = collection.experiment.split
    curves = [curve for curve in series.curves(collection, split) if curve.metric == metric]
    if not curves:  # the runs have no such split
        split = "test"
        curves = [curve for curve in series.curves(collection) if curve.metric == metric]
    averaged = series.averaged_labels(curves)
    for curve in curves:
        style = method_styles[curve.label]
        styled_as = series.styled_as(curve, averaged)
        main = styled_as == "average"
        axes.plot(
            curve.epoch,
            curve.value,
            color=style.color,
            linestyle=matplotlib_dashes(style.dashes[styled_as]),
            linewidth=1.5 if main else 0.9,
            marker="o" if len(curve.epoch) == 1 else None,
            label=curve.label if main else None,
        )
        axes.fill_between(
            curve.epoch, curve.low, curve.high, color=style.color, alpha=BAND_OPACITY, lw=0
        )
    axes.locator_params(axis="x", integer=True)
    axes.set_xlabel("epoch")
    axes.set_ylabel(series.axis_title(metric, split))
    floor = series.floors(collection, split).get(metric)
    if floor is not None:
        axes.axhline(
            floor, color=FLOOR_COLOR_IN_FIGURES, linestyle=":", linewidth=1, label="best possible"
        )
    if curves:
        axes.legend(ncols=2)


def _draw_rates(collection: Collection, axes: Axes) -> None:
    method_styles = styles(collection.labels)
    for rate in series.rates(collection):
        style = method_styles[rate.label]
        axes.step(
            range(len(rate.rate)),
            rate.rate,
            where="post",
            color=style.color,
            linestyle=matplotlib_dashes(style.dashes["average"]),
            label=rate.label,
        )
        if rate.start is not None:
            axes.axvline(rate.start, color=style.color, linestyle="--", linewidth=1)
    axes.set_xlabel("epoch")
    axes.set_ylabel("learning rate")
    if collection.labels:
        set_log_scale(axes, "y")
        axes.legend(ncols=2)


def _draw_costs(collection: Collection, axes: Axes) -> None:
    costs = series.costs(collection)
    labels = [cost.label for cost in costs]
    left = [0.0] * len(costs)
    for activity, color in COST_COLORS.items():
        seconds = [cost.seconds.get(activity, 0.0) for cost in costs]
        axes.barh(labels, seconds, left=left, color=color, label=activity)
        left = [a + b for a, b in zip(left, seconds)]
    axes.invert_yaxis()
    axes.grid(axis="y", visible=False)
    axes.set_xlabel("seconds per epoch")
    if costs:
        axes.legend()
