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
        if number.shape != values.shape or not (number > 0).all():
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
            raise ValueError(
                "counts that are not whole cannot be simulated: give one eigenvalue a direction (nodes=P)"
            )
        return np.repeat(self.eigenvalues, np.round(self.counts).astype(int))


def marchenko_pastur(
    dimension: int, ratio: float, scale: float = 1.0, nodes: int | None = None
) -> Spectrum:
    """The spectrum of a random covariance matrix, ratio = parameters over examples.

    Args:
        dimension: P
        ratio: r: eigenvalues lie within scale · (1 ± √r)²; for r > 1 a share 1 − 1/r of them is zero
        scale: their mean
        nodes: None for 1,000 nodes of a Gauss quadrature, with counts that are not whole; or P, for one eigenvalue a
            direction, as a simulation needs them

    Example:
        >>> round(marchenko_pastur(10_000, ratio=0.5).mean(lambda x: 1 / x**2), 6)  # (1 − r)⁻³
        8.0
    """
    if not (ratio > 0 and scale > 0 and dimension >= 1) or nodes not in (None, dimension):
        raise ValueError(
            f"ratio and scale must be positive, and nodes None or P: {ratio}, {scale}, {nodes}"
        )
    low, high = (1 - np.sqrt(ratio)) ** 2, (1 + np.sqrt(ratio)) ** 2
    zeros = dimension * max(0.0, 1 - 1 / ratio)

    def at(
        angle: Array,
    ) -> tuple[Array, Array]:  # x = middle − half · cos(angle) takes the roots out
        x = (low + high) / 2 - (high - low) / 2 * np.cos(angle)
        return x, np.sin(angle) ** 2 / x

    if nodes is None:
        x, density = at(np.arange(1, 1001) * np.pi / 1001)  # Gauss and Chebyshev's
        values, counts = scale * x, (dimension - zeros) * density / density.sum()
    else:
        angle = np.linspace(0, np.pi, 20_001)[1:]
        x, density = at(angle)
        cumulated = np.concatenate([[0.0], cumulative_simpson(density, x=angle)])
        zeros = round(zeros)
        middle = (np.arange(dimension - zeros) + 0.5) / (dimension - zeros)
        values = scale * np.interp(middle, cumulated / cumulated[-1], x)
        counts = np.ones_like(values)
    if zeros:
        values, counts = np.append(values, 0.0), np.append(counts, zeros)
    return Spectrum(values, counts)


def power_law(
    dimension: int, exponent: float = 1.0, largest: float = 1.0, nodes: int | None = None
) -> Spectrum:
    """λ_i = largest · i^−exponent: a few steep directions and very many flat ones.

    Args:
        dimension: P
        exponent: how fast they fall
        largest: the first
        nodes: how many to use: the steepest ones singly, the others in groups; all if not said
    """
    if not (exponent >= 0 and largest > 0 and dimension >= 1) or (nodes or 1) < 1:
        raise ValueError("the exponent must not be negative and the largest eigenvalue be positive")
    if nodes is None or nodes >= dimension:
        return Spectrum(largest * np.arange(1, dimension + 1.0) ** -exponent)
    edges = np.unique(np.round(np.geomspace(1, dimension + 1, nodes + 1)).astype(int))
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
    if at.shape != share.shape or not np.isfinite([at, share]).all() or (share < 0).any():
        raise ValueError("there must be a finite node for each weight, and no weight negative")
    kept = (at >= 0) & (share > 0)
    return Spectrum(at[kept], dimension * share[kept] / share.sum())
