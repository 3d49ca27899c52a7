"""The loss along the line and in the plane through the iterates and the average."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property, partial
from typing import TypedDict

import torch
from torch import nn

from gadam.analysis import Plane, along_line, over_plane
from gadam.report.chart import Chart
from gadam.report.figures import png_and_svg
from gadam.report.style import COLORS, RC_PARAMS
from gadam.runs.collect import Collection, RunRecord
from gadam.runs.experiment import more_is_better
from gadam.study.measured import Measured
from gadam.study.part import Part, Study, Unit
from gadam.study.section import SectionBuilder, curve, error_name, mean_curve
from gadam.train.experiments import slug

__all__ = ["LandscapePart"]

_Metrics = dict[str, float]
"""Metrics at a position, such as "train loss" and "test accuracy"."""


class _Line(TypedDict):
    at: list[float]
    values: list[_Metrics]


class _Frame(TypedDict):
    """Coordinates of the points in the plane, and of a grid around them.

    All are empty if the points lie on a line.
    """

    points: dict[str, list[float]]
    x: list[float]
    y: list[float]


class LandscapePart(Part):
    """Evaluate the loss along the line and in the plane through iterates and average."""

    name = "landscape"
    order = 80
    title = "Loss along the line and in the plane through the iterates and the average"
    needs = "an average"

    def is_possible(self, collection: Collection) -> bool:
        """Return True if a finished run has an average.

        Args:
            collection: The runs.
        """
        return any(run.result.average for run in collection.runs if run.result is not None)

    def units(self, study: Study) -> Iterable[Unit]:
        """Return the line, then the plane row by row if the run kept iterates.

        Args:
            study: The run.
        """
        points, grid = study.points, study.settings.grid
        if not points.has_average:
            return []
        ends = [points.identity("iterate"), points.identity("average")]
        at = [round(-0.5 + 2 * i / (2 * grid - 2), 6) for i in range(2 * grid - 1)]
        units = [Unit("line", {"what": "line", "of": ends, "at": at}, lambda: _line(study, at))]
        if not [epoch for epoch in points.kept if epoch != points.epochs]:
            study.notice("The run kept no iterates. Its landscape has a line but no plane.")
            return units
        surface = _Surface(study)
        kept = [points.identity(epoch) for epoch in points.kept]
        frame = {"of": [*ends, *kept], "grid": grid}
        units.append(Unit("plane", {"what": "plane", **frame}, lambda: surface.frame))
        for row in range(grid):
            key = {"what": "plane row", **frame, "row": row}
            units.append(Unit(f"plane/{row}", key, partial(surface.row, row)))
        return units

    def report(self, measured: Measured, section: SectionBuilder) -> None:
        """Add a chart of the lines, and a contour plot of the plane of one run per row.

        Args:
            measured: The runs and their values.
            section: The section to fill.
        """
        lines: dict[str, list[_Line]] = measured.by_row("line")
        if not lines:
            return
        section.text(
            "The line goes from the last iterate (0) through the average (1) and beyond. The plane "
            "goes through the first iterate, the last iterate and the average. BatchNorm "
            "statistics are recomputed at each position."
        )
        curves = []
        for row, values in lines.items():
            for split in ("train", "test"):
                heights = mean_curve([[p[f"{split} loss"] for p in v["values"]] for v in values])
                curves.append(curve(f"{row}, {split}", zip(values[0]["at"], heights)))
        caption = "Loss on training and test data along the line. Means over seeds."
        title = "Loss along the line"
        section.chart(
            "line",
            Chart(title, caption, "position", "loss, nats", curves, log_x=False, log_y=False),
        )
        for row in measured.by_row("plane"):
            _add_plane(measured, section, row)
        section.summary = {row: values[0] for row, values in lines.items()}


# ------------------------------------------------------------------------------------- measuring


def _evaluate(study: Study, model: nn.Module) -> _Metrics:
    study.check_stop()
    study.points.refresh(study.points.epochs)
    found = study.points.metrics()
    return {f"{split} {name}": v for split, values in found.items() for name, v in values.items()}


def _line(study: Study, at: list[float]) -> _Line:
    ends = study.points.weights("iterate"), study.points.weights("average")
    return {
        "at": at,
        "values": along_line(study.points.model, *ends, partial(_evaluate, study), at),
    }


@dataclass
class _Surface:
    """The plane through the first kept iterate, the last one, and the average."""

    study: Study

    @cached_property
    def plane(self) -> Plane:
        points = self.study.points
        ends = points.weights(points.kept[0]), points.weights("iterate")
        return Plane.through(*ends, points.weights("average"), points.names)

    @cached_property
    def frame(self) -> _Frame:
        points, grid = self.study.points, self.study.settings.grid
        try:
            plane = self.plane
        except ValueError:
            return {"points": {}, "x": [], "y": []}
        where = {str(epoch): plane.coordinates(points.weights(epoch)) for epoch in points.kept}
        where["average"] = plane.coordinates(points.weights("average"))
        ranges = [(min(values), max(values)) for values in zip(*where.values())]
        margin = 0.25 * max(high - low for low, high in ranges)
        sides = []
        for low, high in ranges:
            step = (high - low + 2 * margin) / (grid - 1)
            sides.append([low - margin + i * step for i in range(grid)])
        return {
            "points": {name: list(place) for name, place in where.items()},
            "x": sides[0],
            "y": sides[1],
        }

    def row(self, row: int) -> list[_Metrics]:
        if not self.frame["x"]:
            return []
        at = [(x, self.frame["y"][row]) for x in self.frame["x"]]
        return over_plane(self.study.points.model, self.plane, partial(_evaluate, self.study), at)


# ------------------------------------------------------------------------------------- reporting


def _add_plane(measured: Measured, section: SectionBuilder, row: str) -> None:
    """Add the plane of the first run of a row that has one."""
    metric = measured.metric(row)
    run, frame = _first_plane(measured, row)
    if not frame["x"]:
        section.text(f"{row}: the first iterate, the last iterate and the average lie on a line.")
        return
    rows: list[list[_Metrics]] = [
        values
        for i in range(len(frame["y"]))
        if (values := measured.value(run, f"plane/{i}")) is not None
    ]
    if len(rows) < len(frame["y"]):
        section.text(f"{row}: some of the plane could not be measured. Run the analysis again.")
        return
    name = f"plane-{slug(row)[:60]}-{hashlib.sha256(row.encode()).hexdigest()[:6]}"
    caption = (
        f"{row}, seed {run.seed}: training loss and {error_name(metric)} in the plane through the "
        "first iterate, the last iterate and the average. Axes are distances in weight space. "
        "Points in between are projections of the other iterates."
    )
    section.image(name, _draw_plane(frame, rows, metric), caption)


def _first_plane(measured: Measured, row: str) -> tuple[RunRecord, _Frame]:
    for run in measured.runs(row):
        frame: _Frame | None = measured.value(run, "plane")
        if frame is not None:
            return run, frame
    raise LookupError(f"no run of {row} has a plane")


def _draw_plane(frame: _Frame, rows: list[list[_Metrics]], metric: str) -> dict[str, bytes]:
    """Draw filled contours of the training loss and of the test error, as PNG and SVG."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    def test_error(at: _Metrics) -> float:
        value = at[f"test {metric}"]
        return 100 - value if more_is_better(metric) else value

    heights: dict[str, Callable[[_Metrics], float]] = {
        "training loss": lambda at: at["train loss"],
        error_name(metric): test_error,
    }
    with mpl.rc_context({**RC_PARAMS, "axes.grid": False}):
        figure = Figure(figsize=(8.4, 3.6))
        for axes, (title, height) in zip(figure.subplots(1, 2), heights.items()):
            z = torch.tensor([[height(at) for at in row] for row in rows], dtype=torch.float64)
            flat = z[z.isfinite()].sort().values
            # Put levels at quantiles, so that steep walls do not use up all colors.
            levels = sorted(set(flat[torch.linspace(0, len(flat) - 1, 14).long()].tolist()))
            if len(levels) < 3:
                levels = [float(flat[0]) - 1, float(flat[0]), float(flat[-1]) + 1]
            filled = axes.contourf(frame["x"], frame["y"], z.numpy(), levels, cmap="viridis")
            figure.colorbar(filled, ax=axes, format="%.3g", shrink=0.7)
            iterates = [p for name, p in frame["points"].items() if name != "average"]
            axes.plot(*zip(*iterates), "o-", color="white", ms=3, lw=0.7, mec="black")
            style = {"color": "white", "fontsize": 8, "textcoords": "offset points"}
            for text, place in (("first", iterates[0]), ("last", iterates[-1])):
                axes.annotate(text, place, xytext=(4, 4), **style)
            average = frame["points"]["average"]
            axes.plot(*average, "*", color=COLORS[1], ms=11, mec="black", mew=0.6)
            axes.annotate("average", average, xytext=(6, 4), **style)
            axes.set_title(title, fontsize=9)
            axes.set_aspect("equal")
        return png_and_svg(figure)
