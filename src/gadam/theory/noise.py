"""Gradient noise that depends on where it is taken: the gradient of a Gaussian process η.

For η with covariance k(w, w') the noise ε = ∇η has Cov(ε_i(w), ε_j(w')) = ∂_i ∂'_j k(w, w'): gradients at near
points are nearly the same, so that iterates have to move apart for their average to gain from independence.
Both kernels here are a squared exponential of a map φ of the weights:

    k(w, w') = σ²ℓ² exp(−‖φ(w) − φ(w')‖² / 2ℓ²)

with φ(w) = w for absolute distances, and φ(w) = (w/‖w‖, log ‖w‖) for relative ones. (The paper's kernel of
relative distance, k(−‖w − w'‖²/‖w‖²), is not symmetric, and made symmetric it is no covariance. To leading order
in the distance this one is the same.)
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
    """A squared exponential of a map of the weights.

    Args:
        noise: σ², of the noise at one point (for :class:`Relative`: at one with ‖w‖ = 1)
        length: ℓ, how far apart two points are (in φ) when they have become different
    """

    noise: float = 1.0
    length_scale: float = 1.0

    def __post_init__(self) -> None:
        if self.noise < 0 or self.length_scale <= 0:
            raise ValueError("the noise must not be negative, and the length positive")

    @abstractmethod
    def map(self, w: Array) -> Array:
        """φ(w), of one point or several (…, P)."""

    @abstractmethod
    def pull_back(self, w: Array, v: Array) -> Array:
        """J(w)ᵀv, J the Jacobian of φ: what a gradient in φ is in w."""

    # As functions of the squared distance d², with k(w, w') = k(−d²/2) as the paper writes it.

    def value(self, squared_distance: Array) -> Array:
        """K(−d²/2)."""
        return self.noise * self.length_scale**2 * np.exp(-squared_distance / (2 * self.length_scale**2))

    def first_derivative(self, squared_distance: Array) -> Array:
        """k'(−d²/2); at zero it is σ²."""
        return self.value(squared_distance) / self.length_scale**2

    def second_derivative(self, squared_distance: Array) -> Array:
        """k''(−d²/2)."""
        return self.value(squared_distance) / self.length_scale**4

    def trace(self, squared_distance: Array, dimension: float) -> Array:
        """Tr Cov(ε, ε') of points in φ this far apart: P·k' − d²·k''. (Printed with a plus.)"""
        d2 = np.asarray(squared_distance, dtype=float)
        return dimension * self.first_derivative(d2) - d2 * self.second_derivative(d2)

    def covariance(self, w: Array, other: Array) -> Array:
        """Cov(ε(w), ε(w')), a matrix (P, P)."""
        apart = self.map(w) - self.map(other)
        d2 = apart @ apart
        inner = self.first_derivative(d2) * np.eye(len(apart)) - self.second_derivative(d2) * np.outer(apart, apart)
        return self.pull_back(other, self.pull_back(w, inner.T).T)  # JᵀAJ'


class Absolute(Kernel):
    """A kernel of the distance between weights.

    Example:
        >>> Absolute(noise=2.0, length_scale=3.0).covariance(np.zeros(2), np.zeros(2))
        array([[2., 0.],
               [0., 2.]])
    """

    def map(self, w: Array) -> Array:
        return w

    def pull_back(self, w: Array, v: Array) -> Array:
        return v


class Relative(Kernel):
    """A kernel of the relative distance: of directions w/‖w‖, and of the ratio of norms.

    The noise at a point has variance σ²/‖w‖² in each direction.
    """

    def trace(self, squared_distance: Array, dimension: float) -> Array:
        """Refused: it is not a function of the distance."""
        raise TypeError("a relative kernel's trace depends on both points: ask covariance(w, w')")

    def map(self, w: Array) -> Array:
        norm = np.linalg.norm(w, axis=-1, keepdims=True)
        if not (norm > 0).all():
            raise ValueError("the relative kernel has no meaning at w = 0: start elsewhere")
        return np.concatenate([w / norm, np.log(norm)], axis=-1)

    def pull_back(self, w: Array, v: Array) -> Array:
        norm = np.linalg.norm(w, axis=-1, keepdims=True)
        u, across, along = w / norm, v[..., :-1], v[..., -1:]
        return (across - u * (u * across).sum(-1, keepdims=True) + u * along) / norm


def summed_noise_trace(kernel: Kernel, weights: Array, points: Array) -> float:
    """Tr Cov(Σ a_i ε(w_i)) of given points: the lemma behind Theorem 2, for absolute distances.

    P·σ² Σ a_i² + 2 Σ_{i<j} a_i a_j (P·k'(−d²/2) − d²·k''(−d²/2)).

    Args:
        kernel: an :class:`Absolute` one
        weights: a
        points: w, (n, P)
    """
    squares = (points**2).sum(1)
    d2 = np.maximum(squares[:, None] + squares[None] - 2 * points @ points.T, 0.0)
    np.fill_diagonal(d2, 0.0)
    return float(weights @ kernel.trace(d2, points.shape[1]) @ weights)


class NoiseDraw(Protocol):
    """One draw of the process: the same point gets the same noise."""

    def __call__(self, w: Array) -> Array:
        """The gradient noise at a point (P,)."""
        ...


class ExactNoise:
    """A draw of ∇η, exact: each new point is drawn from its distribution given all that were drawn.

    The covariance of all values so far is kept as a Cholesky factor; n points in P dimensions take
    (nP)² numbers and (nP)³ operations, so that more than :attr:`MAX_VALUES` values are refused.

    Args:
        kernel: of the process
        seed: of the draw

    Example:
        >>> noise = ExactNoise(Absolute(length_scale=2.0), seed=0)
        >>> here = noise(np.zeros(3))
        >>> bool(np.allclose(noise(np.full(3, 1e-6)), here, atol=1e-4))
        True
    """

    MAX_VALUES = 4000
    # Points so near that rounding makes the covariance singular: this much of σ² is added to it, so that the noise
    # of two of them differs by some 1e-5 σ.
    JITTER = 1e-10

    def __init__(self, kernel: Kernel, seed: int) -> None:
        self.kernel = kernel
        self._random = np.random.default_rng(seed)
        self._points: list[Array] = []
        self._values: list[Array] = []
        self._factor = np.zeros((0, 0))
        self._white = np.zeros(0)

    def __call__(self, w: Array) -> Array:
        """The noise at a point (P,)."""
        done, size = len(self._white), len(w)
        for point, value in zip(self._points, self._values):
            if np.array_equal(point, w):
                return value.copy()
        if self.kernel.noise == 0:
            return np.zeros(size)
        if done + size > self.MAX_VALUES:
            raise ValueError(
                f"{len(self._points) + 1} points in {size} dimensions are too many for exact draws "
                f"(n·P ≤ {self.MAX_VALUES}): use FourierNoise"
            )
        own = self.kernel.covariance(w, w)
        own = own + self.JITTER * np.trace(own) / size * np.eye(size)
        if done:
            across = np.concatenate([self.kernel.covariance(p, w) for p in self._points])
            solved = linalg.solve_triangular(self._factor, across, lower=True)
        else:
            solved = np.zeros((0, size))
        rest = own - solved.T @ solved
        values, vectors = np.linalg.eigh((rest + rest.T) / 2)
        corner = linalg.cholesky(
            (vectors * np.maximum(values, self.JITTER * np.trace(own) / size)) @ vectors.T,
            lower=True,
        )
        factor = np.zeros((done + size, done + size))
        factor[:done, :done] = self._factor
        factor[done:, :done] = solved.T
        factor[done:, done:] = corner
        new = self._random.standard_normal(size)
        self._factor, self._white = factor, np.concatenate([self._white, new])
        self._points.append(np.array(w, dtype=float))
        self._values.append(factor[done:] @ self._white)
        return self._values[-1].copy()


class FourierNoise:
    """A draw of ∇η by random Fourier features: η(w) = σℓ/√M Σ a_m cos(ω_m·φ(w)) + b_m sin(ω_m·φ(w)).

    Given the frequencies this is exactly Gaussian, and over independent ones its covariance is exactly ∂∂'k. The M
    frequencies of one draw make two errors. Tr Cov(ε, ε')/P has a standard deviation of at most σ²·√((1 + 2/P)/M), see
    :attr:`error`. And the slope of the noise is that of the process only up to a share P/M: where the iterate feels it
    (see :mod:`gadam.theory.mean_field`), M has to be large beside P.

    Args:
        kernel: of the process
        dimension: P
        features: M; ten times P if not said
        seed: of the draw
        structured: take the frequencies as rows of products of random signs and cosine transforms, which in high
            dimension are as good as independent ones and need neither their memory nor their time; from
            P = 500 on if not said
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
                f"structured frequencies are for high dimensions, not for {dimension}: they would not be normal"
            )
        self._frequencies = (_Structured if structured else _Dense)(random, wanted, size)
        self.features = self._frequencies.features
        scale = np.sqrt(kernel.noise / self.features) * kernel.length_scale
        self._amplitude: Array = scale * random.standard_normal((2, self.features))

    @property
    def error(self) -> float:
        """The standard deviation of Tr Cov(ε, ε')/P over draws of frequencies, at most, over σ²."""
        return float(np.sqrt((1 + 2 / self.dimension) / self.features))

    def __call__(self, w: Array) -> Array:
        """The noise at a point (P,)."""
        length = self.kernel.length_scale
        angle = self._frequencies.forward(self.kernel.map(w)) / length
        a, b = self._amplitude
        back = self._frequencies.adjoint(b * np.cos(angle) - a * np.sin(angle)) / length
        return self.kernel.pull_back(w, back)


class _Dense:
    """Independent normal frequencies, as a matrix."""

    def __init__(self, random: np.random.Generator, features: int, size: int) -> None:
        self.features = features
        self._matrix = random.standard_normal((features, size))

    def forward(self, x: Array) -> Array:
        return self._matrix @ x

    def adjoint(self, v: Array) -> Array:
        return v @ self._matrix


class _Structured:
    """Blocks S·C·D₁·C·D₂·C·D₃ of an orthonormal cosine transform C and diagonals D of random signs.

    S gives each row the length that a row of independent normal numbers has.
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
        return out.sum(0)
