"""The page's figures in the style of a paper, as PNG and SVG, and its table as Markdown, LaTeX, CSV."""

from __future__ import annotations

import csv
import io
import warnings
from pathlib import Path
from typing import Any

from gadam.report import series
from gadam.report.page import ReportError
from gadam.report.records import Collection
from gadam.train import summary
from gadam.train.record import write_atomically

__all__ = ["STYLE", "dash", "logarithmic", "rendered", "write_figures", "write_tables"]

STYLE: Any = {
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
    "text.parse_math": False,  # a label is a label
    "svg.hashsalt": "gadam",  # the same numbers make the same file
}


def write_figures(collection: Collection, folder: Path) -> list[Path]:
    """Learning curves, learning rates and costs; gives the files."""
    try:
        import matplotlib as mpl
        from matplotlib.figure import Figure
    except ImportError:
        raise ReportError("the figures need matplotlib: pip install 'gadam[report]'") from None
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    with mpl.rc_context(STYLE), warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # of its search for ticks
        metrics = collection.experiment.metrics
        for name, draw in (("curves", _curves), ("rates", _rates), ("costs", _costs)):
            sides = len(metrics) if draw is _curves else 1
            figure = Figure(figsize=(6.3 * sides, 3.6))
            for axes, metric in zip(figure.subplots(1, sides, squeeze=False)[0], metrics):
                draw(collection, axes, metric)
            for ending, content in rendered(figure).items():
                path = folder / f"{name}.{ending}"
                write_atomically(path, content)
                written.append(path)
    return written


def rendered(figure: Any) -> dict[str, bytes]:
    """The figure as PNG and SVG: the same numbers make the same files."""
    found = {}
    for ending in ("png", "svg"):
        content = io.BytesIO()
        metadata = {"Date": None} if ending == "svg" else {"Software": None}
        figure.savefig(content, format=ending, metadata=metadata)
        found[ending] = content.getvalue()
    return found


def logarithmic(axis: Any) -> None:
    """A logarithmic scale with plain numbers at it: labels are not parsed as mathematics."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    axis._set_axes_scale("log")
    low, high = sorted(axis.get_view_interval())
    if high < 100 * low:  # too few powers of ten in it
        axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_formatter(NullFormatter())


def dash(pattern: tuple[int, ...]) -> Any:
    """A pattern as matplotlib takes it."""
    return (0, pattern) if pattern else "-"


def _curves(collection: Collection, axes: Any, metric: str) -> None:
    styles = series.styles(collection.labels)
    part = collection.experiment.part
    curves = [curve for curve in series.curves(collection, part) if curve.metric == metric]
    if not curves:  # where there is no such part
        part = "test"
        curves = [curve for curve in series.curves(collection) if curve.metric == metric]
    averaged = {curve.label for curve in curves if curve.point == "average"}
    for curve in curves:
        style = styles[curve.label]
        main = series.drawn_as(curve, averaged) == "average"
        axes.plot(
            curve.epoch,
            curve.value,
            color=style.colour,
            linestyle=dash(style.dashes["average" if main else "iterate"]),
            linewidth=1.5 if main else 0.9,
            marker="o" if len(curve.epoch) == 1 else None,
            label=curve.label if main else None,
        )
        axes.fill_between(curve.epoch, curve.low, curve.high, color=style.colour, alpha=0.15, lw=0)
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.set_xlabel("epoch")
    axes.set_ylabel(series.axis_title(metric, part))
    floor = series.floors(collection, part).get(metric)
    if floor is not None:
        axes.axhline(floor, color="#555", linestyle=":", linewidth=1, label="best possible")
    if curves:
        axes.legend(ncols=2)


def _rates(collection: Collection, axes: Any, _: str) -> None:
    styles = series.styles(collection.labels)
    for rate in series.rates(collection):
        style = styles[rate["label"]]
        colour = style.colour
        axes.step(
            range(len(rate["rate"])),
            rate["rate"],
            where="post",
            color=colour,
            linestyle=dash(style.dashes["average"]),
            label=rate["label"],
        )
        if rate["start"] is not None:
            axes.axvline(rate["start"], color=colour, linestyle="--", linewidth=1)
    axes.set_xlabel("epoch")
    axes.set_ylabel("learning rate")
    if collection.labels:
        logarithmic(axes.yaxis)
        axes.legend(ncols=2)


def _costs(collection: Collection, axes: Any, _: str) -> None:
    costs = series.costs(collection)
    labels = [cost["label"] for cost in costs]
    left = [0.0] * len(costs)
    for what, colour in (("train", "#0072B2"), ("refresh", "#E69F00"), ("evaluate", "#8a939c")):
        seconds = [cost["seconds"].get(what, 0.0) for cost in costs]
        axes.barh(labels, seconds, left=left, color=colour, label=what)
        left = [a + b for a, b in zip(left, seconds)]
    axes.invert_yaxis()
    axes.grid(axis="y", visible=False)
    axes.set_xlabel("seconds an epoch")
    if costs:
        axes.legend()


def write_tables(collection: Collection, folder: Path) -> list[Path]:
    """The headline table as table.md, table.tex and table.csv; gives the files."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = [r for r in summary.rows(collection.experiment, collection.results) if r.runs]
    texts = {
        "table.md": summary.markdown(collection.experiment, rows) + "\n",
        "table.tex": _latex(rows),
        "table.csv": _csv(rows),
    }
    for name, text in texts.items():
        write_atomically(folder / name, text.encode())
    return [folder / name for name in texts]


def _latex(rows: list[summary.Row]) -> str:
    def cell(text: str) -> str:
        special = {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}"}
        special |= {c: f"\\{c}" for c in "&%$#_{}"}
        special |= {"±": r"$\pm$", "–": "--"}
        return "".join(special.get(c, c) for c in text)

    lines = [
        r"\begin{tabular}{lrrrrr}",
        r"\toprule",
        " & ".join(cell(name) for name in summary.HEADER) + r" \\",
        r"\midrule",
    ]
    lines += [" & ".join(cell(text) for text in summary.cells(row)) + r" \\" for row in rows]
    return "\n".join([*lines, r"\bottomrule", r"\end{tabular}", ""])


def _csv(rows: list[summary.Row]) -> str:
    """In full precision, a column a number."""
    estimates = ("iterate", "average", "validation", "difference")
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    columns = [f"{name}_{part}" for name in estimates for part in ("mean", "error")]
    writer.writerow(["method", "base", "runs", *columns, "published", "seconds"])
    for row in rows:
        numbers = []
        for name in estimates:
            estimate = getattr(row, name)
            numbers += ["", ""] if estimate is None else [estimate.mean, estimate.error]
        writer.writerow([row.label, row.base, row.runs, *numbers, row.published, row.seconds])
    return out.getvalue()
