"""Spectra: the curvatures that a loss has, and in how many directions it has them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.integrate import cumulative_simpson

__all__ = ["Array", "Spectrum", "marchenko_pastur", "measured", "power_law"]

Array = NDArray[np.floating[Any]]


@dataclass(frozen=True, eq=False)
class Spectrum:
    """Eigenvalues of the true loss's Hessian.

    Args:
        eigenvalues: λ, none of them negative
        counts: in how many directions each is found; once each if not said

    Example:
        >>> spectrum = Spectrum([0.5, 2.0], counts=[90, 10])
        >>> spectrum.dimension, float(spectrum.mean(lambda x: x))
        (100.0, 0.65)
    """

    eigenvalues: Array
    counts: Array

    def __init__(self, eigenvalues: ArrayLike, counts: ArrayLike | None = None) -> None:
        values = np.atleast_1d(np.asarray(eigenvalues, dtype=float))
        number = np.ones_like(values) if counts is None else np.asarray(counts, dtype=float)
        if values.ndim != 1 or not len(values) or not np.isfinite(values).all():
            raise ValueError("eigenvalues must be a list of finite numbers, not empty")
        if number.shape != values.shape or (number <= 0).any():
            raise ValueError("there must be a positive count for each eigenvalue")
        if (values < 0).any():
            raise ValueError(
                f"the loss has no minimum along a negative eigenvalue ({values.min():g}): leave it out"
            )
        object.__setattr__(self, "eigenvalues", values)
        object.__setattr__(self, "counts", number)

    @property
    def dimension(self) -> float:
        """P, the number of directions."""
        return float(self.counts.sum())

    def mean(self, function: Callable[[Array], Array]) -> float:
        """⟨f(λ)⟩, the mean over all directions."""
        return float(np.average(function(self.eigenvalues), weights=self.counts))

    def expanded(self) -> Array:
        """An eigenvalue for each direction."""
        if not np.allclose(self.counts, np.round(self.counts)):
            raise ValueError("counts that are not whole cannot be expanded: make a finer spectrum")
        return np.repeat(self.eigenvalues, np.round(self.counts).astype(int))


def _quantiles(cumulated: Array, at: Array, dimension: int, points: int | None) -> Spectrum:
    """Directions spread evenly over the probability, so that sums over them are integrals."""
    number = min(dimension, 1000) if points is None else points
    middle = (np.arange(number) + 0.5) / number
    values = np.interp(middle, cumulated / cumulated[-1], at)
    return Spectrum(values, np.full(number, dimension / number))


def marchenko_pastur(
    dimension: int, ratio: float, scale: float = 1.0, points: int | None = None
) -> Spectrum:
    """The spectrum of a random covariance matrix, ratio = parameters over examples, below 1.

    Args:
        dimension: P
        ratio: r: eigenvalues lie within scale · (1 ± √r)²
        scale: their mean
        points: how many of them to use; at most 1,000 if not said

    Example:
        >>> round(marchenko_pastur(10_000, ratio=0.5).mean(lambda x: x**2), 4)  # 1 + r
        1.5
    """
    if not 0 < ratio < 1 or scale <= 0:
        raise ValueError(
            f"the ratio must lie in (0, 1) and the scale be positive: {ratio}, {scale}"
        )
    low, high = (1 - np.sqrt(ratio)) ** 2, (1 + np.sqrt(ratio)) ** 2
    angle = np.linspace(0, np.pi, 20_001)  # x = middle − half · cos(angle) takes the roots out
    x = (low + high) / 2 - (high - low) / 2 * np.cos(angle)
    density = np.sin(angle) ** 2 / x
    cumulated = np.concatenate([[0.0], cumulative_simpson(density, x=angle)])
    return _quantiles(cumulated, scale * x, dimension, points)


def power_law(
    dimension: int, exponent: float = 1.0, largest: float = 1.0, points: int | None = None
) -> Spectrum:
    """λ_i = largest · i^−exponent: a few steep directions and very many flat ones.

    Args:
        dimension: P
        exponent: how fast they fall
        largest: the first
        points: how many to use: the steepest ones singly, the others in groups; all if not said
    """
    if exponent < 0 or largest <= 0:
        raise ValueError("the exponent must not be negative and the largest eigenvalue be positive")
    if points is None or points >= dimension:
        return Spectrum(largest * np.arange(1, dimension + 1.0) ** -exponent)
    edges = np.unique(np.round(np.geomspace(1, dimension + 1, points + 1)).astype(int))
    counts = np.diff(edges)
    middle = np.exp([np.log(np.arange(a, b)).mean() for a, b in pairwise(edges)])
    return Spectrum(largest * middle**-exponent, counts)


def measured(nodes: ArrayLike, weights: ArrayLike, dimension: int) -> Spectrum:
    """From a density that was measured, as stochastic Lanczos quadrature gives it.

    Args:
        nodes: Ritz values; negative ones, along which there is no minimum, are left out
        weights: of each, in proportion
        dimension: P

    Example:
        >>> measured([-0.1, 0.5, 2.0], [0.2, 0.6, 0.2], dimension=100).dimension
        80.0
    """
    at, share = np.asarray(nodes, dtype=float), np.asarray(weights, dtype=float)
    kept = (at >= 0) & (share > 0)
    return Spectrum(at[kept], dimension * share[kept] / share.sum())
