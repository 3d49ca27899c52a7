"""The spectrum of a large symmetric matrix, from matrix-vector products alone.

This module computes the largest eigenvalues, the spectral density, the spectral measure of a given
vector, the trace, and the Frobenius norm. A matrix is any object with a ``dimension`` and a product
``matrix @ vector`` with torch vectors, such as :class:`gadam.analysis.Curvature`. Stochastic
estimates come with their standard errors.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Literal, Protocol

import torch
from torch import Tensor

from gadam.analysis.intervals import confidence_interval

__all__ = [
    "Density",
    "Eigen",
    "Estimate",
    "Matrix",
    "Ritz",
    "ritz",
    "spectral_density",
    "squared_norm",
    "top_eigenvalues",
    "trace",
    "trace_and_frobenius",
]


class Matrix(Protocol):
    """A symmetric matrix that can be multiplied with vectors."""

    @property
    def dimension(self) -> int:
        """The number of rows."""

    def __matmul__(self, vector: Tensor, /) -> Tensor:
        """Multiply with a vector."""


@dataclass(frozen=True)
class Estimate:
    """A mean over random probes. Unpacks to its value and error.

    Attributes:
        value: The mean.
        error: Its standard error.
        freedom: Degrees of freedom of the standard error: one less than the number of probes.
        positive: Whether the samples are positive, such as squared norms.

    Example:
        >>> estimate = Estimate(10.0, 1.0, freedom=3)
        >>> value, error = estimate
        >>> [round(end, 1) for end in estimate.interval()]  # Four probes: ±3.2 standard errors.
        [6.8, 13.2]
    """

    value: float
    error: float
    freedom: int = 0
    positive: bool = False

    def interval(self, confidence: float = 0.95) -> tuple[float, float]:
        """Return Student's confidence interval, which is honest for few probes.

        It covers the true value as often as stated if many eigenvalues contribute. If two or three
        dominate, the samples are skewed, and it covers about 85% at 95%.

        Args:
            confidence: The probability to cover the true value.

        Returns:
            The lower and the upper end.
        """
        return confidence_interval(
            self.value, self.error, self.freedom, confidence, positive=self.positive
        )

    def __iter__(self) -> Iterator[float]:
        return iter((self.value, self.error))


def _like(matrix: Matrix) -> Tensor:
    """Return an empty vector with the device and dtype of the matrix, but at least float32.

    Half precision is too coarse for Lanczos vectors.
    """
    params: Sequence[Tensor] | None = getattr(matrix, "params", None)
    if not params:
        return torch.empty(0, dtype=torch.float64)
    dtype = torch.promote_types(params[0].dtype, torch.float32)
    return params[0].detach().new_empty(0, dtype=dtype)


def _probe(matrix: Matrix, like: Tensor, generator: torch.Generator) -> Tensor:
    """Draw random signs. Of all probe distributions, they have the lowest variance."""
    signs = torch.randint(0, 2, (matrix.dimension,), generator=generator)
    return (2 * signs - 1).to(like)


# ------------------------------------------------------------------------------------------ Lanczos


class _Lanczos:
    """Lanczos tridiagonalization: the matrix in an orthonormal basis that grows by one per product.

    Each new vector is orthogonalized against all previous ones, twice. Without that, rounding would
    produce spurious copies of converged eigenvalues. If the Krylov space is exhausted, the
    iteration continues from a new random vector.
    """

    BLOCK = 16

    def __init__(self, matrix: Matrix, start: Tensor, generator: torch.Generator) -> None:
        self.matrix, self.generator = matrix, generator
        self.size = 0
        self._blocks: list[Tensor] = []  # Blocks of rows, so that growing copies nothing.
        self._add(start / start.norm())
        self.diagonal: list[float] = []
        self.off_diagonal: list[float] = []
        self.exhausted = False

    def step(self) -> None:
        """Extend the basis by one vector."""
        newest = self._blocks[-1][(self.size - 1) % self.BLOCK]
        image = self.matrix @ newest
        self.diagonal.append(float(newest.double() @ image.double()))
        image, size = self._orthogonalize(image), 0.0
        scale = max(map(abs, (*self.diagonal, *self.off_diagonal, 1e-300)))
        if float(image.norm()) > 100 * torch.finfo(image.dtype).eps * scale:
            size = float(image.norm())
        self.off_diagonal.append(size)
        self.exhausted = self.size == self.matrix.dimension
        if not self.exhausted:
            if size == 0.0:
                fresh = torch.randn(len(image), generator=self.generator).to(image)
                image = self._orthogonalize(fresh)
            self._add(image / image.norm())

    def _add(self, vector: Tensor) -> None:
        if self.size % self.BLOCK == 0:
            rows = min(self.BLOCK, self.matrix.dimension - self.size)
            self._blocks.append(vector.new_zeros(rows, len(vector)))
        self._blocks[-1][self.size % self.BLOCK] = vector
        self.size += 1

    def _orthogonalize(self, vector: Tensor) -> Tensor:
        """Remove the components in the span of the basis."""
        for _ in range(2):
            vector = vector - sum(block.T @ (block @ vector) for block in self._blocks)
        return vector

    def combine(self, weights: Tensor) -> Tensor:
        """Compute linear combinations of the basis vectors, one per row of ``weights``."""
        padded = weights.new_zeros(len(weights), self.BLOCK * len(self._blocks))
        padded[:, : weights.shape[1]] = weights
        parts = zip(torch.split(padded, self.BLOCK, dim=1), self._blocks)
        return reduce(torch.add, (w[:, : len(block)].to(block) @ block for w, block in parts))

    def ritz(self) -> tuple[Tensor, Tensor]:
        """Return ascending eigenvalues and eigenvectors (columns) of the tridiagonal matrix."""
        t = torch.diag(torch.tensor(self.diagonal, dtype=torch.float64))
        if len(self.diagonal) > 1:
            entries = self.off_diagonal[: len(self.diagonal) - 1]
            off_diagonal = torch.tensor(entries, dtype=torch.float64)
            t += torch.diag(off_diagonal, 1) + torch.diag(off_diagonal, -1)
        values, vectors = torch.linalg.eigh(t)
        return values, vectors

    def residuals(self, vectors: Tensor) -> Tensor:
        """Return the residual norm of each Ritz pair, which bounds the error of its value."""
        last = 0.0 if self.exhausted else self.off_diagonal[-1]
        return last * vectors[-1].abs()


@dataclass(frozen=True, eq=False)
class Eigen:
    """Eigenvalues and eigenvectors, in the requested order.

    Attributes:
        values: Eigenvalues.
        errors: A bound on the error of each eigenvalue.
        vectors: Eigenvectors, as rows.
        products: Number of matrix-vector products used.
    """

    values: Tensor
    errors: Tensor
    vectors: Tensor
    products: int


def top_eigenvalues(
    matrix: Matrix,
    count: int = 1,
    *,
    by: Literal["magnitude", "value"] = "magnitude",
    tolerance: float = 1e-4,
    products: int = 200,
    seed: int = 0,
) -> Eigen:
    """Compute the largest eigenvalues, by the Lanczos method with full reorthogonalization.

    A degenerate eigenvalue may be found only once.

    Args:
        matrix: The matrix.
        count: Number of eigenvalues.
        by: Order by ``"magnitude"`` or ``"value"``. By magnitude, the first eigenvalue is the
            spectral norm with its sign.
        tolerance: Relative residual at which an eigenvalue counts as converged. The residual bounds
            the distance to the nearest eigenvalue. The error of the largest eigenvalue is almost
            always of the order of its square.
        products: Maximum number of matrix-vector products. One basis vector per product is kept in
            memory.
        seed: Seed of the start vector.

    Returns:
        The eigenvalues with their error bounds and eigenvectors.

    Raises:
        ValueError: If ``count`` or ``by`` is invalid.

    Example:
        >>> class Diagonal:
        ...     dimension = 100
        ...     def __matmul__(self, v):
        ...         return v * torch.arange(100)
        >>> [round(float(v), 3) for v in top_eigenvalues(Diagonal(), 2).values]
        [99.0, 98.0]
    """
    if not 1 <= count <= matrix.dimension:
        raise ValueError(f"count must be between 1 and {matrix.dimension}, got {count}.")
    if by not in ("magnitude", "value"):
        raise ValueError(f"by must be 'magnitude' or 'value', got {by!r}.")
    generator = torch.Generator().manual_seed(seed)
    start = torch.randn(matrix.dimension, generator=generator).to(_like(matrix))
    lanczos = _Lanczos(matrix, start, generator)
    while True:
        lanczos.step()
        if len(lanczos.diagonal) >= count or lanczos.exhausted:
            values, vectors = lanczos.ritz()
            order = (values.abs() if by == "magnitude" else values).argsort(descending=True)[:count]
            errors = lanczos.residuals(vectors)[order]
            converged = bool((errors <= tolerance * values[order].abs().clamp_min(1e-300)).all())
            if converged or lanczos.exhausted or len(lanczos.diagonal) >= products:
                break
    eigenvectors = lanczos.combine(vectors[:, order].T)
    return Eigen(values[order], errors, eigenvectors, len(lanczos.diagonal))


# ----------------------------------------------------------------------------------- given vectors


@dataclass(frozen=True, eq=False)
class Ritz:
    """A matrix in the Krylov space of a vector: its Ritz values and vectors.

    For any polynomial f of degree up to 2·steps − 1, and the start vector b,
    bᵀf(H)b = Σ components² · f(values). Values with a small error are eigenvalues of the matrix.

    Attributes:
        values: Ritz values, in descending order.
        errors: Norm of the residual Hy − θy of each pair, which bounds the error of its value.
        vectors: Orthonormal Ritz vectors y, as rows.
        components: bᵀy for each vector.
    """

    values: Tensor
    errors: Tensor
    vectors: Tensor
    components: Tensor


def ritz(matrix: Matrix, start: Tensor, *, steps: int = 50, seed: int = 0) -> Ritz:
    """Compute the Ritz pairs of a matrix in the Krylov space of a vector.

    Args:
        matrix: The matrix.
        start: The vector b. It must not be zero.
        steps: Lanczos steps. Fewer are taken if the space is exhausted.
        seed: Seed of a fallback for exhausted spaces.

    Returns:
        The Ritz pairs.

    Raises:
        ValueError: If ``steps`` is less than 1, or the vector is zero or not finite.

    Example:
        >>> class Diagonal:
        ...     dimension = 3
        ...     def __matmul__(self, v):
        ...         return v * torch.tensor([1.0, 2.0, 3.0])
        >>> found = ritz(Diagonal(), torch.tensor([3.0, 0.0, 4.0]))
        >>> [round(float(v), 4) for v in found.values]
        [3.0, 1.0]
        >>> [round(abs(float(c)), 4) for c in found.components]
        [4.0, 3.0]
    """
    norm = float(start.double().norm())
    if steps < 1:
        raise ValueError(f"steps must be at least 1, got {steps}.")
    if not 0 < norm < float("inf"):
        raise ValueError("start must be a finite vector that is not zero.")
    lanczos = _lanczos(matrix, start, steps, torch.Generator().manual_seed(seed))
    values, weights = lanczos.ritz()
    vectors = lanczos.combine(weights.T)
    pairs = values, lanczos.residuals(weights), vectors, norm * weights[0]
    return Ritz(*(each.flip(0) for each in pairs))


def _lanczos(matrix: Matrix, start: Tensor, steps: int, generator: torch.Generator) -> _Lanczos:
    """Take Lanczos steps until the Krylov space of the start vector is exhausted."""
    lanczos = _Lanczos(matrix, start, generator)
    for _ in range(steps):
        lanczos.step()
        if lanczos.off_diagonal[-1] == 0.0 or lanczos.exhausted:
            break
    return lanczos


# ------------------------------------------------------------------------------------------ density


@dataclass(frozen=True, eq=False)
class Density:
    """A spectral density as a sum of point masses.

    ``gadam.theory.measured(density.nodes, density.weights, P)`` converts it to a spectrum for
    predictions.

    Attributes:
        nodes: Positions of the masses on the eigenvalue axis.
        weights: Fraction of all eigenvalues at each node.
    """

    nodes: Tensor
    weights: Tensor

    def mean(self, power: int) -> float:
        """Return the moment Tr Hᵏ/P.

        Args:
            power: The order k of the moment.

        Returns:
            The mean of the k-th power of the eigenvalues.
        """
        return float(self.weights @ self.nodes**power)

    def smoothed(self, at: Tensor, width: float) -> Tensor:
        """Smooth the density with a Gaussian kernel.

        Args:
            at: Positions on the eigenvalue axis.
            width: Standard deviation of the kernel.

        Returns:
            The density at each position.
        """
        z = (at[:, None] - self.nodes[None]) / width
        density: Tensor = torch.exp(-(z**2) / 2) @ self.weights / (width * (2 * torch.pi) ** 0.5)
        return density


def spectral_density(matrix: Matrix, *, probes: int = 4, steps: int = 50, seed: int = 0) -> Density:
    """Estimate the spectral density by stochastic Lanczos quadrature.

    Each probe contributes the Gauss quadrature of its own spectral measure.

    Args:
        matrix: The matrix.
        probes: Number of random probe vectors.
        steps: Lanczos steps per probe. The moments of the probe's spectral measure are exact up to
            order 2·steps − 1.
        seed: Seed of the probes.

    Returns:
        The density as point masses.

    Raises:
        ValueError: If ``probes`` or ``steps`` is less than 1.
    """
    if probes < 1 or steps < 1:
        raise ValueError(f"probes and steps must be at least 1, got {probes} and {steps}.")
    generator, like = torch.Generator().manual_seed(seed), _like(matrix)
    nodes, weights = [], []
    for _ in range(probes):
        lanczos = _lanczos(matrix, _probe(matrix, like, generator), steps, generator)
        values, vectors = lanczos.ritz()
        nodes.append(values)
        weights.append(vectors[0] ** 2 / probes)
    return Density(torch.cat(nodes), torch.cat(weights))


# ------------------------------------------------------------------------------------------- traces


def _estimate(samples: list[float], positive: bool = False) -> Estimate:
    values = torch.tensor(samples, dtype=torch.float64)
    error = float(values.std() / len(samples) ** 0.5) if len(samples) > 1 else float("nan")
    return Estimate(float(values.mean()), error, len(samples) - 1, positive)


def trace(
    matrix: Matrix,
    *,
    probes: int = 30,
    method: Literal["hutchinson", "hutch++"] = "hutchinson",
    seed: int = 0,
) -> Estimate:
    """Estimate the trace from random probes.

    Args:
        matrix: The matrix.
        probes: Number of matrix-vector products.
        method: ``"hutchinson"`` averages vᵀHv over random signs v. ``"hutch++"`` (Meyer, Musco,
            Musco, and Woodruff, 2021) finds a dominant subspace with a third of the products,
            computes the trace on it exactly, and estimates only the rest. It is far more accurate
            if few eigenvalues are large.
        seed: Seed of the probes.

    Returns:
        The estimate with its standard error.

    Raises:
        ValueError: If ``method`` is unknown or there are too few probes.
    """
    generator, like = torch.Generator().manual_seed(seed), _like(matrix)

    def quadratic(v: Tensor) -> float:
        return float(v.double() @ (matrix @ v).double())

    if method == "hutchinson":
        return trace_and_frobenius(matrix, probes=probes, seed=seed)[0]
    if method != "hutch++":
        raise ValueError(f"method must be 'hutchinson' or 'hutch++', got {method!r}.")
    third = probes // 3
    if third < 2:
        raise ValueError(f"hutch++ needs at least 6 probes, got {probes}.")
    if third >= matrix.dimension:  # Nothing is left to estimate.
        units = torch.eye(matrix.dimension, dtype=like.dtype, device=like.device)
        return Estimate(sum(map(quadratic, units)), 0.0)
    images = torch.stack([matrix @ _probe(matrix, like, generator) for _ in range(third)], dim=1)
    basis = torch.linalg.qr(images).Q
    exact = sum(quadratic(column) for column in basis.T)
    samples = []
    for _ in range(third):
        v = _probe(matrix, like, generator)
        samples.append(quadratic(v - basis @ (basis.T @ v)))
    remainder = _estimate(samples)
    return Estimate(exact + remainder.value, remainder.error, remainder.freedom)


def trace_and_frobenius(
    matrix: Matrix, *, probes: int = 30, seed: int = 0
) -> tuple[Estimate, Estimate]:
    """Estimate Tr H and ‖H‖²_F from the same products.

    Returns the results of :func:`trace` and :func:`squared_norm` at the cost of one.

    Args:
        matrix: The matrix.
        probes: Number of matrix-vector products.
        seed: Seed of the probes.

    Returns:
        The trace and the squared Frobenius norm, each with its standard error.

    Raises:
        ValueError: If there are fewer than two probes.
    """
    if probes < 2:
        raise ValueError(f"probes must be at least 2, got {probes}.")
    generator, like = torch.Generator().manual_seed(seed), _like(matrix)
    traces, squares = [], []
    for _ in range(probes):
        v = _probe(matrix, like, generator)
        image = (matrix @ v).double()
        traces.append(float(v.double() @ image))
        squares.append(float(image.square().sum()))
    return _estimate(traces), _estimate(squares, positive=True)


def squared_norm(matrix: Matrix, *, probes: int = 30, seed: int = 0) -> Estimate:
    """Estimate the squared Frobenius norm ‖H‖²_F as the mean of ‖Hv‖² over random probes.

    Args:
        matrix: The matrix.
        probes: Number of matrix-vector products.
        seed: Seed of the probes.

    Returns:
        The estimate with its standard error.

    Raises:
        ValueError: If there are fewer than two probes.
    """
    return trace_and_frobenius(matrix, probes=probes, seed=seed)[1]
