"""The spectrum of a large symmetric matrix from products with vectors: its top, its density, traces.

The matrix is anything with a ``dimension`` and a product ``matrix @ vector`` of torch vectors, such as
:class:`gadam.analysis.Curvature`. What is estimated at random comes with its standard error.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

import torch
from torch import Tensor

__all__ = [
    "Density",
    "Eigen",
    "Estimate",
    "Matrix",
    "spectral_density",
    "squared_norm",
    "top_eigenvalues",
    "trace",
    "trace_and_frobenius",
]


class Matrix(Protocol):
    """A symmetric matrix."""

    @property
    def dimension(self) -> int: ...

    def __matmul__(self, vector: Tensor, /) -> Tensor: ...


class Estimate(NamedTuple):
    """A mean over random probes, and its standard error."""

    value: float
    error: float


def at_least_single(dtype: torch.dtype) -> torch.dtype:
    """What vectors are in: half precision would not do."""
    return torch.promote_types(dtype, torch.float32)


def _like(matrix: Matrix) -> Tensor:
    """An empty vector of the matrix's own place and type, or single precision where that is less."""
    params = getattr(matrix, "params", None)
    if not params:
        return torch.empty(0, dtype=torch.float64)
    return params[0].detach().new_empty(0, dtype=at_least_single(params[0].dtype))


def _probe(matrix: Matrix, like: Tensor, generator: torch.Generator) -> Tensor:
    """Random signs: of all probes they vary least."""
    signs = torch.randint(0, 2, (matrix.dimension,), generator=generator)
    return (2 * signs - 1).to(like)


# ------------------------------------------------------------------------------------------- Lanczos


class _Lanczos:
    """The matrix, tridiagonal in an orthonormal basis that grows by a product a step.

    Each new vector is made orthogonal to all before it, twice: without that, rounding lets found eigenvalues come back.
    Where the space that products reach is exhausted, it goes on from another random vector.
    """

    def __init__(self, matrix: Matrix, start: Tensor, generator: torch.Generator) -> None:
        self.matrix, self.generator = matrix, generator
        self.size = 0
        self._blocks: list[Tensor] = []  # of rows: that nothing is copied as they become more
        self._add(start / start.norm())
        self.diagonal: list[float] = []
        self.beside: list[float] = []
        self.exhausted = False

    def step(self) -> None:
        """Grow by one."""
        newest = self._blocks[-1][(self.size - 1) % self.BLOCK]
        image = self.matrix @ newest
        self.diagonal.append(float(newest.double() @ image.double()))
        image, size = self._rest(image), 0.0
        scale = max(map(abs, (*self.diagonal, *self.beside, 1e-300)))
        if float(image.norm()) > 100 * torch.finfo(image.dtype).eps * scale:
            size = float(image.norm())
        self.beside.append(size)
        self.exhausted = self.size == self.matrix.dimension
        if not self.exhausted:
            if size == 0.0:
                fresh = torch.randn(len(image), generator=self.generator).to(image)
                image = self._rest(fresh)
            self._add(image / image.norm())

    BLOCK = 16

    def _add(self, vector: Tensor) -> None:
        if self.size % self.BLOCK == 0:
            rows = min(self.BLOCK, self.matrix.dimension - self.size)
            self._blocks.append(vector.new_zeros(rows, len(vector)))
        self._blocks[-1][self.size % self.BLOCK] = vector
        self.size += 1

    def _rest(self, vector: Tensor) -> Tensor:
        """What of the vector is orthogonal to the basis."""
        for _ in range(2):
            vector = vector - sum(block.T @ (block @ vector) for block in self._blocks)
        return vector

    def combined(self, weights: Tensor) -> Tensor:
        """Sums of the basis vectors with these weights (a row for each sum)."""
        padded = weights.new_zeros(len(weights), self.BLOCK * len(self._blocks))
        padded[:, : weights.shape[1]] = weights
        parts = zip(padded.split(self.BLOCK, dim=1), self._blocks)
        return sum(w[:, : len(block)].to(block) @ block for w, block in parts)

    def ritz(self) -> tuple[Tensor, Tensor]:
        """Eigenvalues, increasing, and eigenvectors (columns) of the tridiagonal matrix."""
        t = torch.diag(torch.tensor(self.diagonal, dtype=torch.float64))
        if len(self.diagonal) > 1:
            beside = torch.tensor(self.beside[: len(self.diagonal) - 1], dtype=torch.float64)
            t += torch.diag(beside, 1) + torch.diag(beside, -1)
        values, vectors = torch.linalg.eigh(t)
        return values, vectors

    def residuals(self, vectors: Tensor) -> Tensor:
        """How far each Ritz pair is from being an eigenpair: a bound on the error of its value."""
        last = 0.0 if self.exhausted else self.beside[-1]
        return last * vectors[-1].abs()


@dataclass(frozen=True, eq=False)
class Eigen:
    """Eigenvalues, the wanted first, with a bound on the error of each, and their eigenvectors as rows."""

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
    """The largest eigenvalues, by Lanczos' method with full reorthogonalisation.

    An eigenvalue that several directions share exactly may be found once only.

    Args:
        matrix: whose
        count: how many
        by: "magnitude" (the first is then the spectral norm, with its sign), or "value"
        tolerance: of each, relative: its residual's, which bounds how far it is from an eigenvalue; the largest is off by its
            square, nearly always
        products: with vectors, at most; as many copies of the parameters are kept
        seed: of the start

    Example:
        >>> class Diagonal:
        ...     dimension = 100
        ...     def __matmul__(self, v):
        ...         return v * torch.arange(100)
        >>> [round(float(v), 3) for v in top_eigenvalues(Diagonal(), 2).values]
        [99.0, 98.0]
    """
    if not 1 <= count <= matrix.dimension:
        raise ValueError(f"count must lie between 1 and {matrix.dimension}, not {count}")
    if by not in ("magnitude", "value"):
        raise ValueError(f"by is magnitude or value, not {by!r}")
    generator = torch.Generator().manual_seed(seed)
    start = torch.randn(matrix.dimension, generator=generator).to(_like(matrix))
    lanczos = _Lanczos(matrix, start, generator)
    while True:
        lanczos.step()
        if len(lanczos.diagonal) >= count or lanczos.exhausted:
            values, vectors = lanczos.ritz()
            order = (values.abs() if by == "magnitude" else values).argsort(descending=True)[:count]
            errors = lanczos.residuals(vectors)[order]
            good = bool((errors <= tolerance * values[order].abs().clamp_min(1e-300)).all())
            if good or lanczos.exhausted or len(lanczos.diagonal) >= products:
                break
    found = lanczos.combined(vectors[:, order].T)
    return Eigen(values[order], errors, found, len(lanczos.diagonal))


# ------------------------------------------------------------------------------------------- density


@dataclass(frozen=True, eq=False)
class Density:
    """The spectral density as points of mass: eigenvalues, and what share of all is there.

    ``gadam.theory.measured(density.nodes, density.weights, P)`` makes a spectrum of it to predict from.
    """

    nodes: Tensor
    weights: Tensor

    def mean(self, power: int) -> float:
        """Tr Hᵖ/P."""
        return float(self.weights @ self.nodes**power)

    def smoothed(self, at: Tensor, width: float) -> Tensor:
        """The density at these places, each mass spread by a normal distribution of this width."""
        z = (at[:, None] - self.nodes[None]) / width
        return torch.exp(-(z**2) / 2) @ self.weights / (width * (2 * torch.pi) ** 0.5)


def spectral_density(matrix: Matrix, *, probes: int = 4, steps: int = 50, seed: int = 0) -> Density:
    """By stochastic Lanczos quadrature: each probe gives a Gauss quadrature of the density, as it sees it.

    Args:
        matrix: whose
        probes: random vectors
        steps: of Lanczos' method from each; moments up to twice as many are right for each probe
        seed: of the probes
    """
    if probes < 1 or steps < 1:
        raise ValueError(f"probes and steps must be at least 1, not {probes} and {steps}")
    generator, like = torch.Generator().manual_seed(seed), _like(matrix)
    nodes, weights = [], []
    for _ in range(probes):
        lanczos = _Lanczos(matrix, _probe(matrix, like, generator), generator)
        for _ in range(steps):
            lanczos.step()
            if lanczos.beside[-1] == 0.0:  # the quadrature is exact
                break
        values, vectors = lanczos.ritz()
        nodes.append(values)
        weights.append(vectors[0] ** 2 / probes)
    return Density(torch.cat(nodes), torch.cat(weights))


# -------------------------------------------------------------------------------------------- traces


def _estimate(samples: list[float]) -> Estimate:
    values = torch.tensor(samples, dtype=torch.float64)
    error = float(values.std() / len(samples) ** 0.5) if len(samples) > 1 else float("nan")
    return Estimate(float(values.mean()), error)


def trace(
    matrix: Matrix,
    *,
    probes: int = 30,
    method: Literal["hutchinson", "hutch++"] = "hutchinson",
    seed: int = 0,
) -> Estimate:
    """Of the matrix, from random probes.

    Args:
        matrix: whose
        probes: products with vectors
        method: "hutchinson", the mean of vᵀHv; or "hutch++" (Meyer, Musco, Musco and Woodruff, 2021), which takes the
            trace on a space that a third of the probes find exactly and only the rest at random: far better where few
            eigenvalues are large
        seed: of the probes
    """
    generator, like = torch.Generator().manual_seed(seed), _like(matrix)

    def quadratic(v: Tensor) -> float:
        return float(v.double() @ (matrix @ v).double())

    if method == "hutchinson":
        return trace_and_frobenius(matrix, probes=probes, seed=seed)[0]
    if method != "hutch++":
        raise ValueError(f"method is hutchinson or hutch++, not {method!r}")
    third = probes // 3
    if third < 2:
        raise ValueError(f"hutch++ needs at least 6 probes, not {probes}")
    if third >= matrix.dimension:  # there is nothing left to estimate
        units = torch.eye(matrix.dimension, dtype=like.dtype, device=like.device)
        return Estimate(sum(map(quadratic, units)), 0.0)
    images = torch.stack([matrix @ _probe(matrix, like, generator) for _ in range(third)], dim=1)
    basis = torch.linalg.qr(images).Q
    exact = sum(quadratic(column) for column in basis.T)
    rest = []
    for _ in range(third):
        v = _probe(matrix, like, generator)
        rest.append(quadratic(v - basis @ (basis.T @ v)))
    found = _estimate(rest)
    return Estimate(exact + found.value, found.error)


def trace_and_frobenius(
    matrix: Matrix, *, probes: int = 30, seed: int = 0
) -> tuple[Estimate, Estimate]:
    """Tr H and ‖H‖²_F from the same products: as :func:`trace` and :func:`squared_norm`, for the price of one."""
    if probes < 2:
        raise ValueError(f"there must be at least 2 probes, not {probes}")
    generator, like = torch.Generator().manual_seed(seed), _like(matrix)
    traces, squares = [], []
    for _ in range(probes):
        v = _probe(matrix, like, generator)
        image = (matrix @ v).double()
        traces.append(float(v.double() @ image))
        squares.append(float(image.square().sum()))
    return _estimate(traces), _estimate(squares)


def squared_norm(matrix: Matrix, *, probes: int = 30, seed: int = 0) -> Estimate:
    """‖H‖²_F, Frobenius', from the mean of ‖Hv‖² over random probes."""
    return trace_and_frobenius(matrix, probes=probes, seed=seed)[1]
