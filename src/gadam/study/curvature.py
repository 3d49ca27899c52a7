"""The curvature of the loss, and the noise of its gradients."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypedDict

from gadam.analysis import Curvature, measure_noise, top_eigenvalues, trace_and_frobenius
from gadam.runs.experiment import more_is_better
from gadam.runs.files import Json
from gadam.runs.record import Point
from gadam.study.hessian import curvature_unit, describe_matrix
from gadam.study.measured import Measured
from gadam.study.part import Part, Study, Unit
from gadam.study.section import MeanDict, SectionBuilder, mean_dict, mean_text

__all__ = ["CurvaturePart"]

_MAX_PRODUCTS = 200
# The points in the order of the table: the last iterate is in parentheses after the average.
_POINTS: tuple[Point, Point] = ("average", "iterate")


class _Norm(TypedDict):
    value: float
    error: float
    products: int


class _Moments(TypedDict):
    """Values come with the standard error over probes."""

    trace: list[float]
    squared_norm: list[float]
    dimension: int


class _Noise(TypedDict):
    trace: float
    error: float
    squared_gradient: float
    scale: float
    per_parameter: float


class CurvaturePart(Part):
    """Measure the spectral norm, trace, and Frobenius norm of the Hessian, and gradient noise."""

    name = "curvature"
    order = 60
    title = "Curvature of the loss (norm and trace of the Hessian) and gradient noise"

    def units(self, study: Study) -> Iterable[Unit]:
        """Return the metrics, norms, traces and noise at the last iterate and at the average.

        Args:
            study: The run.
        """
        return [unit for point in study.points.ends for unit in _units(study, point)]

    def report(self, measured: Measured, section: SectionBuilder) -> None:
        """Add the paper's table of sharpness.

        Args:
            measured: The runs and their values.
            section: The section to fill.
        """
        norms: dict[Point, dict[str, list[_Norm]]] = {
            point: measured.by_row(f"norm/{point}") for point in _POINTS
        }
        if not any(norms.values()):
            return
        section.text(
            f"{describe_matrix(measured.settings)}: its largest eigenvalue by magnitude, and "
            "‖H‖²_F and Tr H per parameter, as in the paper's table. Numbers in parentheses are "
            "for the last iterate, the others for the average. The noise is that of the gradients "
            "of single examples: Tr Σ/P, and Tr Σ/‖ḡ‖², the batch size at which the noise is as "
            "large as the gradient."
        )
        rough = [
            f"{row}, {point}"
            for point, by_row in norms.items()
            for row, found in by_row.items()
            if any(n["error"] > measured.settings.tolerance * abs(n["value"]) for n in found)
        ]
        if rough:
            section.text(f"The spectral norm has not converged for: {'; '.join(rough)}.")
        is_language = not all(map(more_is_better, measured.experiment.metrics))
        rows: list[list[str]] = []
        for row in measured.collection.labels:
            columns = [
                _columns(measured, section, row, point, "loss" if is_language else "accuracy")
                for point in _POINTS
                if row in norms[point]
            ]
            if columns:
                cells = []
                for name in columns[0]:
                    texts = [mean_text(values[name]) for values in columns]
                    cells.append(texts[0] + (f" ({texts[1]})" if len(texts) > 1 else ""))
                rows.append([row, *cells])
        metrics = (
            ["train loss", "test loss"]
            if is_language
            else ["train accuracy, %", "test accuracy, %"]
        )
        matrix = ["spectral norm", "‖H‖²_F/P", "Tr H/P", "noise, Tr Σ/P", "noise scale"]
        section.table(["method", *metrics, *matrix], rows)


# ------------------------------------------------------------------------------------- measuring


def _units(study: Study, point: Point) -> list[Unit]:
    settings = study.settings

    def metrics() -> dict[str, dict[str, float]]:
        study.points.load(point)
        return study.points.metrics()

    def norm(at: Curvature) -> _Norm:
        found = top_eigenvalues(at, tolerance=settings.tolerance, products=_MAX_PRODUCTS)
        return {
            "value": float(found.values[0]),
            "error": float(found.errors[0]),
            "products": found.products,
        }

    def moments(at: Curvature) -> _Moments:
        trace, squared = trace_and_frobenius(at, probes=settings.probes)
        return {"trace": list(trace), "squared_norm": list(squared), "dimension": at.dimension}

    def noise(at: Curvature) -> _Noise:
        exact = not study.is_language and settings.batchnorm == "eval"
        found = measure_noise(at, per="example" if exact else "batch")
        return {
            "trace": found.trace,
            "error": found.error,
            "squared_gradient": found.squared_gradient,
            "scale": found.scale,
            "per_parameter": found.per_parameter,
        }

    key = {"what": "metrics", "of": study.points.identity(point)}
    return [
        Unit(f"metrics/{point}", key, metrics),
        curvature_unit(study, "norm", point, norm, tolerance=settings.tolerance),
        curvature_unit(study, "moments", point, moments, probes=settings.probes),
        curvature_unit(study, "noise", point, noise),
    ]


# ------------------------------------------------------------------------------------- reporting


def _columns(
    measured: Measured, section: SectionBuilder, row: str, point: Point, metric: str
) -> dict[str, list[float]]:
    """Return the cells of a row at a point, and add them to the summary."""
    metrics: list[dict[str, dict[str, float]]] = _values(measured, "metrics", row, point)
    norms: list[_Norm] = _values(measured, "norm", row, point)
    moments: list[_Moments] = _values(measured, "moments", row, point)
    noise: list[_Noise] = _values(measured, "noise", row, point)
    # The keys of these columns in analysis.json.
    columns = {
        "train": [m["train"][metric] for m in metrics],
        "test": [m["test"][metric] for m in metrics],
        "spectral norm": [n["value"] for n in norms],
        "squared norm a parameter": [m["squared_norm"][0] / m["dimension"] for m in moments],
        "trace a parameter": [m["trace"][0] / m["dimension"] for m in moments],
        "noise a parameter": [n["per_parameter"] for n in noise],
        "noise scale": [n["scale"] for n in noise],
    }
    means: dict[str, MeanDict] = {name: mean_dict(values) for name, values in columns.items()}
    section.summary.setdefault(row, {})[point] = means | {
        "trace": mean_dict(m["trace"][0] for m in moments),
        "squared norm": mean_dict(m["squared_norm"][0] for m in moments),
        "probes' error of the trace": mean_dict(m["trace"][1] for m in moments),
        "probes' error of the squared norm": mean_dict(m["squared_norm"][1] for m in moments),
    }
    return columns


def _values(measured: Measured, what: str, row: str, point: Point) -> list[Json]:
    return measured.by_row(f"{what}/{point}").get(row, [])
