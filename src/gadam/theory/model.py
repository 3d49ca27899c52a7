"""The noisy quadratic, the method that minimizes it, and the distribution of a point.

The true loss is L(w) = ½ Σ λ (w − w*)² in the eigenbasis of the Hessian. Each gradient carries
independent noise ε of variance s² = σ²/B per direction. One step of torch's SGD with decoupled
weight decay γ_d, L2 regularization γ_c and a preconditioner h is, per direction,

    g = λ(w − w*) + γ_c·w + ε,   b ← μ·b + (1 − τ)·g,   w ← (1 − αγ_d)·w − αh·u,

with u = b, or u = g + μ·b for Nesterov momentum. Without momentum (μ = 0) this is
w ← q·w + (1 − q)·w° − αh·ε with q = 1 − α(γ + λh) and w° = λh·w*/(γ + λh).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import ArrayLike
from scipy import integrate

from gadam.theory.spectrum import Array, Spectrum

__all__ = [
    "Moments",
    "Quadratic",
    "Segment",
    "as_segments",
    "check_sampling",
    "from_hessian",
]


@dataclass(frozen=True)
class Segment:
    """Steps at a constant learning rate and batch size.

    Args:
        steps: Number of steps.
        rate: α.
        batch_size: B.
        epoch: Steps per epoch, if each example is drawn once per epoch. An epoch starts with the
            segment. None for independent batches. Without replacement, the noise of an epoch sums
            to zero, which matters little for the iterate, and much for its average.
        reshuffled: The share of the noise's variance that is drawn without replacement. The rest,
            such as that of data augmentation, is independent.
    """

    steps: int
    rate: float
    batch_size: float = 1.0
    epoch: int | None = None
    reshuffled: float = 1.0

    def __post_init__(self) -> None:
        if self.steps != int(self.steps) or self.steps < 0:
            raise ValueError(f"steps must be a non-negative integer, got {self.steps}.")
        if not 0 <= self.rate < np.inf:
            raise ValueError(f"rate must be non-negative and finite, got {self.rate}.")
        if not self.batch_size > 0:
            raise ValueError(f"batch_size must be positive, got {self.batch_size}.")
        if self.epoch is not None and (self.epoch < 1 or self.epoch != int(self.epoch)):
            raise ValueError(f"epoch must be a positive number of steps, got {self.epoch}.")
        if not 0 <= self.reshuffled <= 1:
            raise ValueError(f"reshuffled must be between 0 and 1, got {self.reshuffled}.")


@dataclass(frozen=True, eq=False)
class Quadratic:
    """A noisy quadratic and the method that minimizes it.

    The momentum arguments have the meaning that they have in :class:`torch.optim.SGD`. Adam with
    converged second moments has momentum β₁ and dampening β₁; see :func:`from_hessian`.

    Args:
        spectrum: λ.
        noise: σ², the variance of the gradient of one example, per direction or for all.
        start: w_0 in the eigenbasis, per direction or for all.
        minimum: w*, per direction or for all.
        weight_decay: γ.
        preconditioner: λ̃ + ε, the divisor that an adaptive method applies to gradients. None for
            SGD.
        momentum: μ, in [0, 1).
        dampening: τ, in [0, 1). As in torch, the first gradient of a new optimizer is not dampened.
        nesterov: Use Nesterov momentum.
        decoupled: Decouple the weight decay from the gradient, as AdamW does. False for L2
            regularization, as in :class:`torch.optim.SGD`. Without momentum and preconditioner,
            both are the same.
        buffer: The momentum buffer b at the start, per direction or for all, to continue a run.
            None for a new optimizer.

    Example:
        >>> model = Quadratic(Spectrum([2.0], counts=[1000]), noise=1.0, start=1.0)
        >>> segments = [Segment(steps=4000, rate=0.05)]
        >>> from gadam.theory import average, last_iterate
        >>> round(last_iterate(model, segments).loss, 3), round(average(model, segments).loss, 3)
        (13.158, 0.067)
    """

    spectrum: Spectrum
    noise: Array
    start: Array
    minimum: Array
    weight_decay: float
    preconditioner: Array | None
    momentum: float
    dampening: float
    nesterov: bool
    decoupled: bool
    buffer: Array | None

    def __init__(
        self,
        spectrum: Spectrum,
        noise: ArrayLike = 1.0,
        start: ArrayLike = 1.0,
        minimum: ArrayLike = 0.0,
        weight_decay: float = 0.0,
        preconditioner: ArrayLike | None = None,
        momentum: float = 0.0,
        dampening: float = 0.0,
        nesterov: bool = False,
        decoupled: bool = True,
        buffer: ArrayLike | None = None,
    ) -> None:
        if not isinstance(spectrum, Spectrum):
            raise TypeError(
                f"spectrum must be a Spectrum, got {_shown(spectrum)}. "
                "Wrap the eigenvalues: Quadratic(Spectrum([1.0, 2.0]))."
            )
        given = {"noise": noise, "start": start, "minimum": minimum}
        optional = {"preconditioner": preconditioner, "buffer": buffer}
        given |= {name: value for name, value in optional.items() if value is not None}
        values: dict[str, Array] = {}
        shape = spectrum.eigenvalues.shape
        for name, value in given.items():
            each = np.asarray(value, dtype=float)
            if each.ndim and each.shape != shape:
                raise ValueError(
                    f"{name} must be one number or one per eigenvalue ({shape[0]}), "
                    f"got shape {each.shape}."
                )
            if not np.isfinite(each).all():
                raise ValueError(f"{name} must be finite.")
            values[name] = np.broadcast_to(each, shape)
        if preconditioner is not None and (values["preconditioner"] <= 0).any():
            raise ValueError("preconditioner must be positive.")
        if (values["noise"] < 0).any() or not 0 <= weight_decay < np.inf:
            raise ValueError("noise and weight_decay must be non-negative.")
        if not (0 <= momentum < 1 and 0 <= dampening < 1):
            raise ValueError(
                f"momentum and dampening must be in [0, 1), got {momentum} and {dampening}."
            )
        if (nesterov or dampening or buffer is not None) and not momentum:
            raise ValueError("nesterov, dampening and buffer need momentum. Pass momentum > 0.")
        if nesterov and dampening:
            raise ValueError("Nesterov momentum needs zero dampening.")
        fields: dict[str, object] = {
            "spectrum": spectrum,
            "weight_decay": weight_decay,
            "momentum": momentum,
            "dampening": dampening,
            "nesterov": nesterov,
            "decoupled": decoupled,
            **dict.fromkeys(optional),
            **values,
        }
        for name, field in fields.items():
            object.__setattr__(self, name, field)

    @property
    def gradient_scale(self) -> Array:
        """h, the factor that multiplies gradients."""
        if self.preconditioner is None:
            return np.ones_like(self.spectrum.eigenvalues)
        return 1 / self.preconditioner

    @property
    def slope(self) -> Array:
        """The derivative of the gradient: λ, plus γ if the weight decay is not decoupled."""
        return self.spectrum.eigenvalues + (0.0 if self.decoupled else self.weight_decay)

    @property
    def decay(self) -> float:
        """The decoupled weight decay, by which a step multiplies w directly."""
        return self.weight_decay if self.decoupled else 0.0

    @property
    def undampened_start(self) -> bool:
        """Whether the first gradient enters the buffer undampened, as in a new optimizer."""
        return bool(self.dampening) and self.buffer is None

    @property
    def contraction(self) -> Array:
        """γ + λh/(1 − μ)·(1 − τ), the speed at which slow directions converge.

        Without momentum, one step multiplies the distance to the settling point by 1 − α times
        this. With momentum, that holds on average in directions where it is small.
        """
        gain = (1 - self.dampening) / (1 - self.momentum)
        return self.decay + gain * self.gradient_scale * self.slope

    @property
    def settling_point(self) -> Array:
        """w°, the limit of the mean of the iterate."""
        gain = (1 - self.dampening) / (1 - self.momentum)
        target = gain * self.spectrum.eigenvalues * self.gradient_scale * self.minimum
        contraction = self.contraction
        point: Array = np.divide(target, contraction, out=self.start.copy(), where=contraction > 0)
        return point

    def stable_below(self) -> float:
        """Return the learning rate at and above which the iterate diverges."""
        mu = self.momentum
        gain = 1 + 2 * mu if self.nesterov else 1 - self.dampening
        sharpest = (self.decay + gain * self.gradient_scale * self.slope / (1 + mu)).max()
        return float(2 / sharpest) if sharpest > 0 else np.inf


def from_hessian(
    hessian: ArrayLike,
    noise: ArrayLike,
    *,
    start: ArrayLike,
    minimum: ArrayLike = 0.0,
    divisor: ArrayLike | None = None,
    weight_decay: float = 0.0,
    momentum: float = 0.0,
    dampening: float = 0.0,
    nesterov: bool = False,
    decoupled: bool = True,
    buffer: ArrayLike | None = None,
) -> Quadratic:
    r"""Build the quadratic of a Hessian and a noise covariance, in the parameters' own basis.

    Adam divides the gradient of parameter i by :math:`d_i = \sqrt{\hat v_i} + \epsilon`. With
    converged second moments and :math:`u = D^{1/2} w`, this is SGD on the Hessian
    :math:`D^{-1/2} H D^{-1/2}` with noise covariance :math:`D^{-1/2} \Sigma D^{-1/2}`, at the same
    loss. The result is the quadratic in the eigenbasis of that matrix. Only the variance of the
    noise along each eigenvector enters the expected loss, so expected losses are exact for any Σ.

    Args:
        hessian: H, of shape (P, P).
        noise: Σ, the covariance of the gradient of one example, of shape (P, P).
        start: w_0, of shape (P,) or one number.
        minimum: w*, of shape (P,) or one number.
        divisor: d, the measured divisor of each parameter. None for SGD.
        weight_decay: γ.
        momentum: μ. For Adam, β₁.
        dampening: τ. For Adam, β₁.
        nesterov: Use Nesterov momentum.
        decoupled: False for L2 regularization, which cannot be combined with a divisor.
        buffer: The momentum buffer at the start, of shape (P,) or one number, to continue a run.
            For Adam, its first moments. None for a new optimizer.

    Returns:
        The quadratic. Its distances are in u, its losses are those of w.

    Raises:
        ValueError: If a shape does not match, or H has a negative eigenvalue.

    Example:
        >>> hessian = np.array([[2.0, 1.0], [1.0, 2.0]])
        >>> sgd = from_hessian(hessian, 0.1 * hessian, start=[1.0, 0.0])
        >>> sgd.spectrum.eigenvalues.round(6).tolist(), sgd.noise.round(6).tolist()
        ([1.0, 3.0], [0.1, 0.3])
        >>> adam = from_hessian(
        ...     hessian, 0.1 * hessian, start=1.0, divisor=[0.5, 0.1], momentum=0.9, dampening=0.9
        ... )
        >>> from gadam.theory import last_iterate
        >>> round(last_iterate(adam, Segment(0, 0.1)).loss, 6)  # ½·wᵀHw, in any basis
        3.0
    """
    h, sigma = np.asarray(hessian, dtype=float), np.asarray(noise, dtype=float)
    if h.ndim != 2 or h.shape != h.T.shape or sigma.shape != h.shape:
        raise ValueError(
            f"hessian and noise must be square matrices of the same size, got shapes {h.shape} "
            f"and {sigma.shape}."
        )
    d = np.ones(len(h)) if divisor is None else np.broadcast_to(divisor, len(h)).astype(float)
    if not ((d > 0) & np.isfinite(d)).all():
        raise ValueError("divisor must be positive and finite.")
    if divisor is not None and weight_decay and not decoupled:
        raise ValueError(
            "With a divisor, L2 regularization does not share the eigenvectors of the Hessian. "
            "Use decoupled weight decay."
        )
    root = np.sqrt(d)
    values, vectors = np.linalg.eigh((h + h.T) / 2 / np.outer(root, root))
    if values[0] < -1e-10 * abs(values[-1]):
        raise ValueError(f"hessian must be positive semi-definite, got an eigenvalue {values[0]}.")
    across = vectors / root[:, None]  # maps a gradient in w to the eigenbasis

    def project(point: ArrayLike) -> Array:
        found: Array = vectors.T @ (root * np.broadcast_to(point, len(h)))
        return found

    return Quadratic(
        Spectrum(np.maximum(values, 0.0)),
        np.maximum(np.einsum("ik,ij,jk->k", across, sigma, across), 0.0),
        project(start),
        project(minimum),
        weight_decay,
        None,
        momentum,
        dampening,
        nesterov,
        decoupled,
        None if buffer is None else across.T @ np.broadcast_to(buffer, len(h)),
    )


@dataclass(frozen=True, eq=False)
class Moments:
    """The distribution of a point: Gaussian and independent across directions.

    Args:
        model: Model of the point.
        mean: Mean per direction.
        variance: Variance per direction.
    """

    model: Quadratic
    mean: Array
    variance: Array

    @property
    def _counts(self) -> Array:
        return self.model.spectrum.counts

    @property
    def bias(self) -> Array:
        """The difference between the mean and w*, per direction."""
        return self.mean - self.model.minimum

    @property
    def squared_distance(self) -> float:
        """E‖w − w*‖²."""
        return float(self._counts @ (self.bias**2 + self.variance))

    @property
    def loss(self) -> float:
        """E L(w)."""
        return float(
            0.5 * (self._counts * self.model.spectrum.eigenvalues) @ (self.bias**2 + self.variance)
        )

    @property
    def loss_std(self) -> float:
        """The standard deviation of L(w)."""
        lam, b, v = self.model.spectrum.eigenvalues, self.bias, self.variance
        return float(np.sqrt(self._counts @ (lam**2 * (v**2 / 2 + b**2 * v))))

    @property
    def squared_distance_std(self) -> float:
        """The standard deviation of ‖w − w*‖²."""
        return float(
            np.sqrt(self._counts @ (2 * self.variance**2 + 4 * self.bias**2 * self.variance))
        )

    @property
    def trace(self) -> float:
        """Tr Cov(w)."""
        return float(self._counts @ self.variance)

    @cached_property
    def distance(self) -> float:
        """E‖w − w*‖.

        Computed from the Laplace transform of X = ‖w − w*‖²:
        E√X = ∫ (1 − E e^−tX) t^−3/2 dt / 2√π.
        """
        scale = self.squared_distance
        if scale == 0:
            return 0.0
        b2, v, n = self.bias**2 / scale, self.variance / scale, self._counts

        def integrand(u: float) -> float:  # t = e^u
            t = np.exp(u)
            exponent = -n @ (np.log1p(2 * t * v) / 2 + t * b2 / (1 + 2 * t * v))
            return float(-np.expm1(exponent) * np.exp(-u / 2))

        value, _ = integrate.quad(integrand, -60, 60, points=[0.0], limit=400)
        return float(np.sqrt(scale) * value / (2 * np.sqrt(np.pi)))

    def tail_bound(self, t: float) -> float:
        """Bound the probability that ‖w − w*‖ is t or more away from its mean (Theorem 1).

        The norm is 1-Lipschitz, so Gaussian concentration yields 2·exp(−t²/2v), where v is the
        largest variance. This is the constant that the theorem leaves open. The bound does not
        grow with P. (The theorem uses √E‖w − w*‖² instead of the mean, which is larger by at most
        v/2E‖w − w*‖.)

        Args:
            t: Deviation from the mean distance.

        Returns:
            An upper bound on the probability.
        """
        largest = float(self.variance.max())
        if t <= 0:
            return 1.0
        return 0.0 if largest == 0 else float(min(1.0, 2 * np.exp(-(t**2) / (2 * largest))))


def check_sampling(first: int, every: int, decay: float | None = None) -> None:
    """Validate a sampling. Steps count from 1, as in :class:`gadam.Averaging`.

    Args:
        first: First sampled step.
        every: Stride.
        decay: ρ of an EMA, or None.

    Raises:
        ValueError: If a value is out of range.
    """
    if first < 1 or every < 1 or first != int(first) or every != int(every):
        raise ValueError(f"first and every must be integers of at least 1, got {first}, {every}.")
    if decay is not None and not 0 < decay < 1:
        raise ValueError(f"decay must be in (0, 1), got {decay}.")


def as_segments(segments: Sequence[Segment] | Segment) -> list[Segment]:
    """Return one or several segments as a list.

    Args:
        segments: One or several segments.

    Returns:
        A non-empty list.

    Raises:
        TypeError: If an item is not a segment.
        ValueError: If there are none.
    """
    if isinstance(segments, Segment):
        return [segments]
    found = list(segments) if isinstance(segments, Iterable) else [segments]
    if not found:
        raise ValueError("Pass at least one segment.")
    if not all(isinstance(segment, Segment) for segment in found):
        raise TypeError(
            f"segments must be Segment objects, got {_shown(segments)}. "
            "Write Segment(steps=100, rate=0.1)."
        )
    return found


def _shown(value: object) -> str:
    """Return a short text of a wrong argument for an error message."""
    text = repr(value)
    return text if len(text) < 60 else f"a {type(value).__name__}"
