"""Gradient noise that depends on the weights: the gradient of a Gaussian process η.

If η has covariance k(w, w'), the noise ε = ∇η has Cov(ε_i(w), ε_j(w')) = ∂_i ∂'_j k(w, w').
Gradients at nearby points are nearly equal, so iterates must move apart before averaging reduces
their noise. Both kernels here are a squared exponential of a map φ of the weights:

    k(w, w') = σ²ℓ² exp(−‖φ(w) − φ(w')‖² / 2ℓ²)

with φ(w) = w for absolute distances and φ(w) = (w/‖w‖, log ‖w‖) for relative distances. The
paper's relative kernel, k(−‖w − w'‖²/‖w‖²), is not symmetric, so it is not a covariance. The kernel
used here agrees with it to leading order in the distance.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from scipy import fft, linalg

from gadam.theory.spectrum import Array

__all__ = ["Absolute", "ExactNoise", "FourierNoise", "Kernel", "Relative", "summed_noise_trace"]


@dataclass(frozen=True)
class Kernel(ABC):
    """A squared exponential kernel of a map φ of the weights.

    Args:
        noise: σ², the variance of the noise at one point (for :class:`Relative`, at ‖w‖ = 1).
        length_scale: ℓ, the distance in φ over which the noise decorrelates.
    """

    noise: float = 1.0
    length_scale: float = 1.0

    def __post_init__(self) -> None:
        if self.noise < 0 or self.length_scale <= 0:
            raise ValueError(
                "noise must be non-negative and length_scale must be positive, "
                f"got {self.noise} and {self.length_scale}."
            )

    @abstractmethod
    def map(self, w: Array) -> Array:
        """Compute φ(w).

        Args:
            w: One or several points, of shape (…, P).

        Returns:
            φ(w), of shape (…, P) or (…, P + 1).
        """

    @abstractmethod
    def pull_back(self, w: Array, v: Array) -> Array:
        """Compute J(w)ᵀv, which turns a gradient in φ into a gradient in w.

        Args:
            w: Point at which the Jacobian J of φ is taken.
            v: Vector in the space of φ.

        Returns:
            The vector in weight space.
        """

    # The following are functions of the squared distance d², with k(w, w') = k(−d²/2) as in the
    # paper.

    def value(self, squared_distance: Array) -> Array:
        """Evaluate k(−d²/2).

        Args:
            squared_distance: d².

        Returns:
            The kernel.
        """
        value: Array = (
            self.noise
            * self.length_scale**2
            * np.exp(-squared_distance / (2 * self.length_scale**2))
        )
        return value

    def first_derivative(self, squared_distance: Array) -> Array:
        """Evaluate k'(−d²/2), which is σ² at zero.

        Args:
            squared_distance: d².

        Returns:
            The first derivative.
        """
        return self.value(squared_distance) / self.length_scale**2

    def second_derivative(self, squared_distance: Array) -> Array:
        """Evaluate k''(−d²/2).

        Args:
            squared_distance: d².

        Returns:
            The second derivative.
        """
        return self.value(squared_distance) / self.length_scale**4

    def trace(self, squared_distance: Array, dimension: float) -> Array:
        """Compute Tr Cov(ε, ε') = P·k' − d²·k'' (the paper prints a plus sign).

        Args:
            squared_distance: d² of the two points.
            dimension: P.

        Returns:
            The trace.
        """
        d2 = np.asarray(squared_distance, dtype=float)
        return dimension * self.first_derivative(d2) - d2 * self.second_derivative(d2)

    def covariance(self, w: Array, other: Array) -> Array:
        """Compute Cov(ε(w), ε(w')).

        Args:
            w: One point, of shape (P,).
            other: The other point, w'.

        Returns:
            A matrix of shape (P, P).
        """
        apart = self.map(w) - self.map(other)
        d2 = apart @ apart
        inner = self.first_derivative(d2) * np.eye(len(apart)) - self.second_derivative(
            d2
        ) * np.outer(apart, apart)
        return self.pull_back(other, self.pull_back(w, inner.T).T)  # JᵀAJ'


class Absolute(Kernel):
    """A kernel of the distance between weights.

    Example:
        >>> Absolute(noise=2.0, length_scale=3.0).covariance(np.zeros(2), np.zeros(2))
        array([[2., 0.],
               [0., 2.]])
    """

    def map(self, w: Array) -> Array:
        """Return w itself.

        Args:
            w: One or several points.

        Returns:
            The same points.
        """
        return w

    def pull_back(self, w: Array, v: Array) -> Array:
        """Return v itself, because the Jacobian is the identity.

        Args:
            w: Unused.
            v: Vector to return.

        Returns:
            The same vector.
        """
        return v


class Relative(Kernel):
    """A kernel of the relative distance: of the directions w/‖w‖ and the ratio of the norms.

    The noise at w has variance σ²/‖w‖² per direction.
    """

    def trace(self, squared_distance: Array, dimension: float) -> Array:
        """Raise TypeError, because the trace is not a function of the distance.

        Args:
            squared_distance: Unused.
            dimension: Unused.

        Raises:
            TypeError: Always.
        """
        raise TypeError("The trace of a relative kernel depends on both points. Use covariance().")

    def map(self, w: Array) -> Array:
        """Compute (w/‖w‖, log ‖w‖).

        Args:
            w: One or several points, none of them zero.

        Returns:
            φ(w), of shape (…, P + 1).
        """
        norm = np.linalg.norm(w, axis=-1, keepdims=True)
        if not (norm > 0).all():
            raise ValueError("The relative kernel is undefined at w = 0. Use a nonzero start.")
        return np.concatenate([w / norm, np.log(norm)], axis=-1)

    def pull_back(self, w: Array, v: Array) -> Array:
        """Compute J(w)ᵀv.

        Args:
            w: Point at which the Jacobian is taken.
            v: Vector of shape (…, P + 1).

        Returns:
            The vector in weight space, of shape (…, P).
        """
        norm = np.linalg.norm(w, axis=-1, keepdims=True)
        u, across, along = w / norm, v[..., :-1], v[..., -1:]
        result: Array = (across - u * (u * across).sum(-1, keepdims=True) + u * along) / norm
        return result


def summed_noise_trace(kernel: Kernel, weights: Array, points: Array) -> float:
    """Compute Tr Cov(Σ a_i ε(w_i)), the lemma behind Theorem 2, for absolute distances.

    The result is P·σ² Σ a_i² + 2 Σ_{i<j} a_i a_j (P·k'(−d²/2) − d²·k''(−d²/2)).

    Args:
        kernel: An :class:`Absolute` kernel.
        weights: a.
        points: w, of shape (n, P).

    Returns:
        The trace.
    """
    squares = (points**2).sum(1)
    d2 = np.maximum(squares[:, None] + squares[None] - 2 * points @ points.T, 0.0)
    np.fill_diagonal(d2, 0.0)
    return float(weights @ kernel.trace(d2, points.shape[1]) @ weights)


class NoiseDraw(Protocol):
    """One draw of the process. The same point always has the same noise."""

    def __call__(self, w: Array) -> Array:
        """Return the gradient noise at a point of shape (P,)."""
        ...


class ExactNoise:
    """An exact draw of ∇η. Each new point is drawn conditioned on all previous points.

    The covariance of all values is stored as a Cholesky factor. n points in P dimensions take
    (nP)² numbers and (nP)³ operations, so the number of values is limited to
    :attr:`MAX_VALUES`.

    Args:
        kernel: Kernel of the process.
        seed: Seed of the draw.

    Example:
        >>> noise = ExactNoise(Absolute(length_scale=2.0), seed=0)
        >>> here = noise(np.zeros(3))
        >>> bool(np.allclose(noise(np.full(3, 1e-6)), here, atol=1e-4))
        True
    """

    MAX_VALUES = 4000
    # Rounding makes the covariance of very close points singular. Adding this fraction of σ² fixes
    # that and changes the noise by about 1e-5 σ.
    JITTER = 1e-10

    def __init__(self, kernel: Kernel, seed: int) -> None:
        self.kernel = kernel
        self._random = np.random.default_rng(seed)
        self._points: list[Array] = []
        self._values: list[Array] = []
        self._factor: Array = np.zeros((0, 0))
        self._white: Array = np.zeros(0)

    def __call__(self, w: Array) -> Array:
        """Return the noise at a point.

        Args:
            w: Point of shape (P,).

        Returns:
            The noise, of shape (P,).

        Raises:
            ValueError: If the draw would exceed :attr:`MAX_VALUES` values.
        """
        done, size = len(self._white), len(w)
        for point, known in zip(self._points, self._values):
            if np.array_equal(point, w):
                return np.array(known)
        if self.kernel.noise == 0:
            return np.zeros(size)
        if done + size > self.MAX_VALUES:
            raise ValueError(
                f"Exact draws support n·P ≤ {self.MAX_VALUES} values, "
                f"got {len(self._points) + 1} points in {size} dimensions. Use FourierNoise."
            )
        own = self.kernel.covariance(w, w)
        own = own + self.JITTER * np.trace(own) / size * np.eye(size)
        if done:
            across = np.concatenate([self.kernel.covariance(p, w) for p in self._points])
            solved = linalg.solve_triangular(self._factor, across, lower=True)
        else:
            solved = np.zeros((0, size))
        conditional = own - solved.T @ solved
        values, vectors = np.linalg.eigh((conditional + conditional.T) / 2)
        corner = linalg.cholesky(
            (vectors * np.maximum(values, self.JITTER * np.trace(own) / size)) @ vectors.T,
            lower=True,
        )
        factor: Array = np.zeros((done + size, done + size))
        factor[:done, :done] = self._factor
        factor[done:, :done] = solved.T
        factor[done:, done:] = corner
        new = self._random.standard_normal(size)
        self._factor, self._white = factor, np.concatenate([self._white, new])
        self._points.append(np.array(w, dtype=float))
        noise: Array = factor[done:] @ self._white
        self._values.append(noise)
        return np.array(noise)


class FourierNoise:
    """A draw of ∇η by random Fourier features.

    η(w) = σℓ/√M Σ a_m cos(ω_m·φ(w)) + b_m sin(ω_m·φ(w)). Given the frequencies, this process is
    exactly Gaussian. Averaged over frequencies, its covariance is exactly ∂∂'k. The M frequencies
    of one draw cause two errors. Tr Cov(ε, ε')/P has a standard deviation of at most
    σ²·√((1 + 2/P)/M), see :attr:`error`. The derivative of the noise has a relative error of P/M,
    so M must be large compared to P where the iterate responds to that derivative
    (see :mod:`gadam.theory.mean_field`).

    Args:
        kernel: Kernel of the process.
        dimension: P.
        features: M. Defaults to 10·P.
        seed: Seed of the draw.
        structured: Build the frequencies from products of random signs and cosine transforms. In
            high dimension they are as good as independent frequencies and need less memory and
            time. Defaults to True if P ≥ 500.
    """

    def __init__(
        self,
        kernel: Kernel,
        dimension: int,
        features: int | None = None,
        seed: int = 0,
        structured: bool | None = None,
    ) -> None:
        random = np.random.default_rng(seed)
        self.kernel, self.dimension = kernel, dimension
        size = len(kernel.map(np.ones(dimension)))
        wanted = 10 * dimension if features is None else features
        structured = dimension >= 500 if structured is None else structured
        if structured and dimension < 50:
            raise ValueError(
                "Structured frequencies are approximately normal only for dimension ≥ 50, "
                f"got {dimension}. Pass structured=False."
            )
        self._frequencies = (_Structured if structured else _Dense)(random, wanted, size)
        self.features = self._frequencies.features
        scale = np.sqrt(kernel.noise / self.features) * kernel.length_scale
        self._amplitude: Array = scale * random.standard_normal((2, self.features))

    @property
    def error(self) -> float:
        """Upper bound on the std of Tr Cov(ε, ε')/P over draws of the frequencies, over σ²."""
        return float(np.sqrt((1 + 2 / self.dimension) / self.features))

    def __call__(self, w: Array) -> Array:
        """Return the noise at a point.

        Args:
            w: Point of shape (P,).

        Returns:
            The noise, of shape (P,).
        """
        length_scale = self.kernel.length_scale
        angle = self._frequencies.forward(self.kernel.map(w)) / length_scale
        a, b = self._amplitude
        gradient = self._frequencies.adjoint(b * np.cos(angle) - a * np.sin(angle)) / length_scale
        return self.kernel.pull_back(w, gradient)


class _Dense:
    """Independent normal frequencies, stored as a matrix."""

    def __init__(self, random: np.random.Generator, features: int, size: int) -> None:
        self.features = features
        self._matrix = random.standard_normal((features, size))

    def forward(self, x: Array) -> Array:
        return self._matrix @ x

    def adjoint(self, v: Array) -> Array:
        return v @ self._matrix


class _Structured:
    """Blocks S·C·D₁·C·D₂·C·D₃ of an orthonormal cosine transform C and random sign diagonals D.

    The diagonal S scales each row to the norm of a row of independent normal numbers.
    """

    def __init__(self, random: np.random.Generator, features: int, size: int) -> None:
        blocks = -(-features // size)
        self.features = blocks * size
        self._signs: Array = random.choice([-1.0, 1.0], size=(3, blocks, size))
        self._norms: Array = np.sqrt(random.chisquare(size, (blocks, size)))

    def forward(self, x: Array) -> Array:
        out: Array = np.broadcast_to(x, self._signs.shape[1:])
        for signs in self._signs:
            out = fft.dct(signs * out, norm="ortho", axis=-1)
        return (self._norms * out).ravel()

    def adjoint(self, v: Array) -> Array:
        out: Array = self._norms * v.reshape(self._norms.shape)
        for signs in self._signs[::-1]:
            out = signs * fft.idct(out, norm="ortho", axis=-1)
        total: Array = out.sum(0)
        return total
