"""Quantitative form of Theorems 2 and 3: averaging when the noise depends on the weights.

In high dimension, distances between iterates barely fluctuate. Per direction, the process ∇η then
enters only through two functions of pairs of times (this is dynamical mean-field theory):

- The noise is Gaussian in time. Its covariance is Tr Cov(ε(w_t), ε(w_s))/P at the distance between
  w_t and w_s.
- The noise responds to the iterate. A step moves against the noise that it saw, and along that
  direction the process is expected to rise again. For each earlier s, the noise at w_t contains
  Tr(∂w_t/∂ε_s)/P times the derivative of Tr Cov(ε(w_t), ε(w_s)) with respect to w_t. For a kernel
  of the distance this is −k''·Tr(∂w_t/∂ε_s)·(w_t − w_s), a pull toward earlier iterates.

Both functions follow from the distances, and the distances follow from both functions. The
equations are causal, so one pass over the steps solves them. The paper bounds the first function
by its value at a minimum distance δ with unspecified constants. It omits the second, which has
relative order Pσ²/(λℓ)² and is negligible only if ℓ is large compared to √P·σ/λ.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from gadam.theory.model import Moments, Quadratic, Segment, as_segments, check_sampling
from gadam.theory.noise import Kernel, Relative
from gadam.theory.predict import check_finite
from gadam.theory.spectrum import Array

__all__ = ["Dependent", "dependent"]

MAX_ELEMENTS = 5 * 10**8  # array elements, 4 GB


@dataclass(frozen=True, eq=False)
class Dependent:
    """Predictions for training with dependent noise, to leading order in 1/P.

    Args:
        last: Moments of the last iterate.
        average: Moments of the average of the samples.
        squared_separation: E‖w_i − w_j‖² of the iterates w_0, …, w_(n−1), where gradients were
            taken.
        noise_covariance: Covariance of the noise at these iterates, per direction.
    """

    last: Moments
    average: Moments
    squared_separation: Array
    noise_covariance: Array


@np.errstate(over="ignore", invalid="ignore")
def dependent(
    model: Quadratic,
    segments: Sequence[Segment] | Segment,
    kernel: Kernel,
    first: int = 1,
    every: int = 1,
) -> Dependent:
    """Solve for the iterates, their distances and the noise self-consistently.

    The kernel sets the noise variance. The model's own σ² and the batch sizes are ignored. The
    cost per eigenvalue is O(n³) operations and n² numbers.

    Args:
        model: The quadratic.
        segments: The steps.
        kernel: Kernel of the noise process.
        first: T_avg, the first sampled step.
        every: κ, the stride.

    Returns:
        The predictions.

    Raises:
        ValueError: If no step is sampled, the problem does not fit in memory, the iterate diverges,
            or the method has momentum.

    Example:
        >>> from gadam.theory.noise import Absolute
        >>> from gadam.theory.spectrum import Spectrum
        >>> model = Quadratic(Spectrum([1.0], [1000]), start=0.0)
        >>> near, far = (
        ...     dependent(model, Segment(100, rate=0.2), Absolute(length_scale=ell)).average.trace
        ...     for ell in (300.0, 1.0)
        ... )
        >>> near > 20 * far  # noise that is the same at every step does not average out
        True
    """
    check_sampling(first, every)
    if model.momentum:
        raise ValueError("dependent() supports only methods without momentum. Pass momentum=0.")
    rates = np.concatenate([np.full(s.steps, s.rate) for s in as_segments(segments)])
    steps = len(rates)
    if len(model.contraction) * steps**2 > MAX_ELEMENTS:
        raise ValueError(
            f"{len(model.contraction)} eigenvalues and {steps} steps need too much memory. "
            "Group similar eigenvalues with counts."
        )
    sampled = np.arange(first, steps + 1, every)
    if not len(sampled):
        raise ValueError(f"No step is sampled: training ends before step {first}.")
    counts, dimension = model.spectrum.counts, model.spectrum.dimension
    contraction, gradient_scale = model.contraction, model.gradient_scale
    # reach[k, t, s] is the derivative of w_t with respect to the noise at w_s, for eigenvalue k.
    reach: Array = np.zeros((len(counts), steps + 1, steps))
    mean: Array = np.empty((len(counts), steps + 1))
    mean[:, 0] = model.start
    noise: Array = np.zeros((steps, steps))
    gram: Array = np.zeros((steps, steps))
    for t, rate in enumerate(rates):
        now = slice(0, t + 1)
        seen = reach[:, t, :t] @ noise[:t, :t]
        covariance = np.einsum("ku,ksu->ks", seen, reach[:, now, :t])
        gram[t, now] = gram[now, t] = counts @ (mean[:, t, None] * mean[:, now] + covariance)
        response = counts @ reach[:, t, now]  # Tr ∂w_t/∂ε_s
        pair = _pairs(kernel, gram, t, response, dimension)
        noise[t, now] = noise[now, t] = pair.covariance
        q = (1 - rate * contraction)[:, None]
        step_size = rate * gradient_scale[:, None]
        drift_of_mean = rate * contraction * model.settling_point
        for path, drift in ((reach, 0.0), (mean[..., None], drift_of_mean[:, None])):
            pull = pair.to_here.sum() * path[:, t] - np.einsum(
                "s,ks...->k...", pair.to_there, path[:, now]
            )
            path[:, t + 1] = q * path[:, t] - step_size * pull + drift
        reach[:, t + 1, t] -= step_size[:, 0]
    weights = np.zeros(steps + 1)
    weights[sampled] = 1 / len(sampled)
    combined = np.einsum("t,kts->ks", weights, reach)
    squares = np.diagonal(gram)
    check_finite(model, as_segments(segments), mean, reach)
    return Dependent(
        Moments(model, mean[:, -1], np.einsum("ks,su,ku->k", reach[:, -1], noise, reach[:, -1])),
        Moments(model, mean @ weights, np.einsum("ks,su,ku->k", combined, noise, combined)),
        np.maximum(squares[:, None] + squares[None] - 2 * gram, 0.0),
        noise,
    )


@dataclass(frozen=True, eq=False)
class _Pairs:
    """Pairs of w_t and each w_s with s ≤ t.

    The noise at w_t contains the pull Σ (to_here·w_t − to_there·w_s).
    """

    covariance: Array
    to_here: Array
    to_there: Array


def _pairs(kernel: Kernel, gram: Array, t: int, response: Array, dimension: float) -> _Pairs:
    here, there, across = gram[t, t], np.diagonal(gram)[: t + 1], gram[t, : t + 1]
    if not isinstance(kernel, Relative):
        d2 = np.maximum(here + there - 2 * across, 0.0)
        pull = -kernel.second_derivative(d2) * response
        return _Pairs(kernel.trace(d2, dimension) / dimension, pull, pull)
    if (there == 0).any():
        raise ValueError("The relative kernel is undefined at w = 0. Use a nonzero start.")
    norms = np.sqrt(here * there)
    cosine, ratio = across / norms, np.log(here / there) / 2
    apart = np.maximum(2 - 2 * cosine + ratio**2, 0.0)
    # Tr Cov/P is k' over the product of the norms. The noise responds with its derivative with
    # respect to w_t: through the distance, in the plane of w_t and w_s, and through the norm,
    # along w_t.
    covariance = kernel.first_derivative(apart) / norms
    pull = -kernel.second_derivative(apart) * response / norms
    to_here = (pull * (cosine + ratio) - covariance * response) / here
    return _Pairs(covariance, to_here, pull / norms)
