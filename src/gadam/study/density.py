"""The density of the spectrum of the Hessian."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TypedDict

import torch

from gadam.analysis import Curvature, Density, spectral_density
from gadam.report.chart import Chart
from gadam.runs.record import POINTS
from gadam.study.hessian import curvature_unit, describe_matrix
from gadam.study.measured import Measured
from gadam.study.part import Part, Study, Unit
from gadam.study.section import SectionBuilder, curve

__all__ = ["DensityPart"]


class _Density(TypedDict):
    nodes: list[float]
    weights: list[float]


class DensityPart(Part):
    """Estimate the spectral density by stochastic Lanczos quadrature."""

    name = "density"
    order = 70
    title = "Spectral density of the Hessian"

    def units(self, study: Study) -> Iterable[Unit]:
        """Return the density at the last iterate and at the average.

        Args:
            study: The run.
        """
        steps = study.settings.steps

        def density(at: Curvature) -> _Density:
            found = spectral_density(at, probes=1, steps=steps)
            return {"nodes": found.nodes.tolist(), "weights": found.weights.tolist()}

        return [
            curvature_unit(study, "density", point, density, steps=steps)
            for point in study.points.ends
        ]

    def report(self, measured: Measured, section: SectionBuilder) -> None:
        """Add a chart of the densities.

        Args:
            measured: The runs and their values.
            section: The section to fill.
        """
        parameters = {
            run.label: (run.result.parameters if run.result is not None else None) or 1
            for run in measured.collection.runs
        }
        series = []
        for point in POINTS:
            found: dict[str, list[_Density]] = measured.by_row(f"density/{point}")
            for row, values in found.items():
                nodes, weights = (
                    torch.cat([torch.tensor(numbers, dtype=torch.float64) for numbers in columns])
                    for columns in zip(*((v["nodes"], v["weights"]) for v in values))
                )
                weights = weights / len(values)
                low, high = float(nodes.min()), float(nodes.max())
                width = max(high - low, 1e-12) / 60
                at = torch.linspace(low - 3 * width, high + 3 * width, 200, dtype=torch.float64)
                heights = Density(nodes, weights).smoothed(at, width)
                # Show everything down to a tenth of the peak of a single eigenvalue.
                lowest = 0.1 / (parameters[row] * width * math.sqrt(2 * math.pi))
                shown = heights.clamp_min(lowest).tolist()
                series.append(curve(f"{row}, {point}", zip(at.tolist(), shown)))
                section.summary.setdefault(row, {})[point] = {
                    "nodes": nodes.tolist(),
                    "weights": weights.tolist(),
                }
        if series:
            caption = (
                f"{describe_matrix(measured.settings)}: the density of its eigenvalues by "
                "stochastic Lanczos quadrature, smoothed with a normal distribution. The vertical "
                "axis is logarithmic because nearly all eigenvalues are close to zero."
            )
            chart = Chart("Spectrum", caption, "eigenvalue", "density", series, log_x=False)
            section.chart("density", chart)
