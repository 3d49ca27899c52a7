"""Hessian spectra: eigenvalues of the loss and the number of directions that share each one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.integrate import cumulative_simpson

__all__ = ["Array", "Spectrum", "marchenko_pastur", "measured", "power_law"]

Array = NDArray[np.floating[Any]]


@dataclass(frozen=True, eq=False)
class Spectrum:
    """Eigenvalues of the Hessian of the true loss.

    Args:
        eigenvalues: λ, all non-negative.
        counts: Number of directions per eigenvalue. Defaults to one each.
        negative: Number of directions of negative curvature that were left out.

    Example:
        >>> spectrum = Spectrum([0.5, 2.0], counts=[90, 10])
        >>> spectrum.dimension, float(spectrum.mean(lambda x: x))
        (100.0, 0.65)
    """

    eigenvalues: Array
    counts: Array
    negative: float

    def __init__(
        self, eigenvalues: ArrayLike, counts: ArrayLike | None = None, negative: float = 0.0
    ) -> None:
        values = np.atleast_1d(np.asarray(eigenvalues, dtype=float))
        number = np.ones_like(values) if counts is None else np.asarray(counts, dtype=float)
        if values.ndim != 1 or not len(values) or not np.isfinite(values).all():
            raise ValueError("eigenvalues must be a non-empty list of finite numbers.")
        if number.shape != values.shape or not (number > 0).all():
            raise ValueError("counts must contain one positive number per eigenvalue.")
        if (values < 0).any():
            raise ValueError(
                "The loss has no minimum along a direction with a negative eigenvalue "
                f"(got {values.min():g}). Use measured(), which handles negative eigenvalues."
            )
        if not 0 <= negative < np.inf:
            raise ValueError(f"negative must be a non-negative number, got {negative}.")
        object.__setattr__(self, "eigenvalues", values)
        object.__setattr__(self, "counts", number)
        object.__setattr__(self, "negative", float(negative))

    @property
    def dimension(self) -> float:
        """P, the number of directions."""
        return float(self.counts.sum())

    def mean(self, function: Callable[[Array], Array]) -> float:
        """Compute ⟨f(λ)⟩, the mean of a function over all directions.

        Args:
            function: Vectorized function of the eigenvalues.

        Returns:
            The mean, weighted by the counts.
        """
        return float(np.average(function(self.eigenvalues), weights=self.counts))

    def expanded(self) -> Array:
        """Return one eigenvalue per direction.

        Raises:
            ValueError: If a count is not an integer.
        """
        if not np.allclose(self.counts, np.round(self.counts)):
            raise ValueError(
                "A simulation needs integer counts. "
                "Pass nodes=P to get one eigenvalue per direction."
            )
        return np.repeat(self.eigenvalues, np.round(self.counts).astype(int))


def marchenko_pastur(
    dimension: int, ratio: float, scale: float = 1.0, nodes: int | None = None
) -> Spectrum:
    """Build the spectrum of a random covariance matrix.

    Args:
        dimension: P.
        ratio: r, the number of parameters over the number of examples. Eigenvalues lie within
            scale · (1 ± √r)². For r > 1, a fraction 1 − 1/r of them is zero.
        scale: Mean of the eigenvalues.
        nodes: None for 1,000 nodes of a Gauss quadrature with fractional counts, or P for one
            eigenvalue per direction, as a simulation needs.

    Returns:
        The spectrum.

    Example:
        >>> round(marchenko_pastur(10_000, ratio=0.5).mean(lambda x: 1 / x**2), 6)  # (1 − r)⁻³
        8.0
    """
    if not (ratio > 0 and scale > 0 and dimension >= 1) or nodes not in (None, dimension):
        raise ValueError(
            "ratio and scale must be positive, and nodes must be None or P, "
            f"got {ratio}, {scale}, {nodes}."
        )
    low, high = (1 - np.sqrt(ratio)) ** 2, (1 + np.sqrt(ratio)) ** 2
    zeros = dimension * max(0.0, 1 - 1 / ratio)

    def at(angle: Array) -> tuple[Array, Array]:
        # Substituting x = center − half-width · cos(angle) removes the square-root singularities.
        x = (low + high) / 2 - (high - low) / 2 * np.cos(angle)
        return x, np.sin(angle) ** 2 / x

    if nodes is None:
        x, density = at(np.arange(1, 1001) * np.pi / 1001)  # Gauss–Chebyshev quadrature
        values, counts = scale * x, (dimension - zeros) * density / density.sum()
    else:
        angle = np.linspace(0, np.pi, 20_001)[1:]
        x, density = at(angle)
        cumulative = np.concatenate([[0.0], cumulative_simpson(density, x=angle)])
        zeros = round(zeros)
        quantiles = (np.arange(dimension - zeros) + 0.5) / (dimension - zeros)
        values = scale * np.interp(quantiles, cumulative / cumulative[-1], x)
        counts = np.ones_like(values)
    if zeros:
        values, counts = np.append(values, 0.0), np.append(counts, zeros)
    return Spectrum(values, counts)


def power_law(
    dimension: int, exponent: float = 1.0, largest: float = 1.0, nodes: int | None = None
) -> Spectrum:
    """Build λ_i = largest · i^−exponent: a few sharp directions and many flat ones.

    Args:
        dimension: P.
        exponent: Decay exponent of the eigenvalues.
        largest: Largest eigenvalue.
        nodes: Number of distinct eigenvalues. The largest ones stay separate and the others are
            grouped. Defaults to all P.

    Returns:
        The spectrum.
    """
    if not (exponent >= 0 and largest > 0 and dimension >= 1) or (nodes or 1) < 1:
        raise ValueError(
            "exponent must be non-negative, and largest, dimension and nodes must be positive."
        )
    if nodes is None or nodes >= dimension:
        return Spectrum(largest * np.arange(1, dimension + 1.0) ** -exponent)
    edges = np.unique(np.round(np.geomspace(1, dimension + 1, nodes + 1)).astype(int))
    counts = np.diff(edges)
    middle = np.exp([np.log(np.arange(a, b)).mean() for a, b in pairwise(edges)])
    return Spectrum(largest * middle**-exponent, counts)


def measured(
    nodes: ArrayLike,
    weights: ArrayLike,
    dimension: int,
    *,
    negative: Literal["drop", "flat"] = "drop",
    round_off: float = 1e-5,
) -> Spectrum:
    """Build a spectrum from a measured density, e.g. from stochastic Lanczos quadrature.

    Args:
        nodes: Ritz values. Values within ``round_off`` of zero, relative to the largest magnitude,
            count as zero.
        weights: Weight of each node, up to a common factor.
        dimension: P.
        negative: What to do with negative curvature, along which the loss has no minimum. "drop"
            leaves these directions out, and reports their number as :attr:`Spectrum.negative`.
            "flat" keeps all nodes, with an eigenvalue of zero for these. A Gauss-Newton matrix
            (``Curvature(kind="ggn")``) has no negative curvature.
        round_off: Relative size of rounding errors.

    Returns:
        The spectrum of the non-negative nodes.

    Raises:
        ValueError: If a value is invalid, or no direction is left.

    Example:
        >>> spectrum = measured([-0.1, -1e-8, 0.5, 2.0], [0.2, 0.1, 0.5, 0.2], dimension=100)
        >>> spectrum.eigenvalues.tolist(), spectrum.dimension, spectrum.negative
        ([0.0, 0.5, 2.0], 80.0, 20.0)
    """
    values, share = np.asarray(nodes, dtype=float), np.asarray(weights, dtype=float)
    if values.shape != share.shape or not np.isfinite([values, share]).all() or (share < 0).any():
        raise ValueError(
            "nodes and weights must be finite and of equal length, and weights non-negative."
        )
    if negative not in ("drop", "flat"):
        raise ValueError(f"negative must be 'drop' or 'flat', got {negative!r}.")
    if not share.sum() > 0:
        raise ValueError("The weights must not all be zero.")
    counts = dimension * share / share.sum()
    values = np.where(np.abs(values) <= round_off * np.abs(values).max(), 0.0, values)
    if negative == "flat":
        return Spectrum(np.maximum(values, 0.0), np.maximum(counts, np.finfo(float).tiny))
    below, kept = values < 0, (values >= 0) & (share > 0)
    if not kept.any():
        raise ValueError(
            "All curvature is negative, so the loss has no minimum here. Measure the Gauss-Newton "
            'matrix instead: Curvature(kind="ggn").'
        )
    return Spectrum(values[kept], counts[kept], float(counts[below].sum()))
