"""Theorems 2 and 3 as numbers: what averaging does when the noise depends on the place.

In high dimension distances between iterates hardly fluctuate, and all that matters of the process ∇η are, direction
by direction, two functions of pairs of times (this is dynamical mean-field theory):

- the noise is Gaussian in time, with the covariance Tr Cov(ε(w_t), ε(w_s))/P at the distance of w_t and w_s;
- and it answers. A step moves against the noise that it saw, and along that line the process is known to rise: the
  noise at w_t contains Tr(∂w_t/∂ε_s)/P times the derivative of Tr Cov(ε(w_t), ε(w_s)) with respect to w_t, for each s
  before: of a kernel of the distance −k''·Tr(∂w_t/∂ε_s)·(w_t − w_s), a pull back to where the iterate has been.

Both follow from the distances, and the distances from both; as all is causal, one pass over the steps solves it. The
paper bounds the first by its value at a least distance δ, leaving constants open, and does not have the second, which
is of relative order Pσ²/(λℓ)² and so not small before ℓ is large beside √P·σ/λ.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from gadam.theory.noise import Kernel, Relative
from gadam.theory.predict import Moments, Segment, Quadratic, check_sampling, as_segments
from gadam.theory.spectrum import Array

__all__ = ["Dependent", "dependent"]

MAX_ELEMENTS = 5 * 10**8  # numbers: four gigabytes


@dataclass(frozen=True, eq=False)
class Dependent:
    """What is expected of a run with dependent noise, to leading order in 1/P.

    Args:
        last: the last iterate
        average: the average of the samples
        squared_separation: E‖w_i − w_j‖² of the iterates w_0, …, w_n−1, at which noise was seen
        noise_covariance: of the noise at them, in each direction
    """

    last: Moments
    average: Moments
    squared_separation: Array
    noise_covariance: Array


def dependent(
    model: Quadratic,
    segments: Sequence[Segment] | Segment,
    kernel: Kernel,
    first: int = 1,
    every: int = 1,
) -> Dependent:
    """Iterates, their distances and the noise they see, all in agreement.

    The kernel says how strong the noise is: the model's own σ², and batch sizes, are not used. It takes some n³
    operations and n² numbers for each eigenvalue.

    Args:
        model: the quadratic
        segments: the steps
        kernel: of the process
        first: T_avg
        every: κ

    Example:
        >>> from gadam.theory.noise import Absolute
        >>> from gadam.theory.spectrum import Spectrum
        >>> model = Quadratic(Spectrum([1.0], [1000]), start=0.0)
        >>> near, far = (
        ...     dependent(model, Segment(100, rate=0.2), Absolute(length_scale=ell)).average.trace
        ...     for ell in (300.0, 1.0)
        ... )
        >>> near > 20 * far  # the same noise at every step does not average out
        True
    """
    check_sampling(first, every)
    rates = np.concatenate([np.full(p.steps, p.rate) for p in as_segments(segments)])
    steps = len(rates)
    if len(model.contraction) * steps**2 > MAX_ELEMENTS:
        raise ValueError(
            f"{len(model.contraction)} eigenvalues and {steps} steps take too much memory: put eigenvalues that are "
            "alike together (counts)"
        )
    sampled = np.arange(first, steps + 1, every)
    if not len(sampled):
        raise ValueError(f"no step is sampled: the run ends before step {first}")
    counts, dimension = model.spectrum.counts, model.spectrum.dimension
    contraction, gain = model.contraction, model.gradient_scale
    # How w_t follows from the noise at the iterates before it, for each eigenvalue; and its mean.
    reach = np.zeros((len(counts), steps + 1, steps))
    mean = np.empty((len(counts), steps + 1))
    mean[:, 0] = model.start
    noise, gram = np.zeros((steps, steps)), np.zeros((steps, steps))
    for t, rate in enumerate(rates):
        now = slice(0, t + 1)
        seen = reach[:, t, :t] @ noise[:t, :t]
        covariance = np.einsum("ku,ksu->ks", seen, reach[:, now, :t])
        gram[t, now] = gram[now, t] = counts @ (mean[:, t, None] * mean[:, now] + covariance)
        response = counts @ reach[:, t, now]  # Tr ∂w_t/∂ε_s
        pair = _at(kernel, gram, t, response, dimension)
        noise[t, now] = noise[now, t] = pair.covariance
        q = (1 - rate * contraction)[:, None]
        step = rate * gain[:, None]
        settle = rate * contraction * model.settling_point
        for path, drift in ((reach, 0.0), (mean[..., None], settle[:, None])):
            pull = pair.to_here.sum() * path[:, t] - np.einsum(
                "s,ks...->k...", pair.to_there, path[:, now]
            )
            path[:, t + 1] = q * path[:, t] - step * pull + drift
        reach[:, t + 1, t] -= step[:, 0]
    weights = np.zeros(steps + 1)
    weights[sampled] = 1 / len(sampled)
    combined = np.einsum("t,kts->ks", weights, reach)
    squares = np.diagonal(gram)
    return Dependent(
        Moments(model, mean[:, -1], np.einsum("ks,su,ku->k", reach[:, -1], noise, reach[:, -1])),
        Moments(model, mean @ weights, np.einsum("ks,su,ku->k", combined, noise, combined)),
        np.maximum(squares[:, None] + squares[None] - 2 * gram, 0.0),
        noise,
    )


@dataclass(frozen=True, eq=False)
class _Pair:
    """Of w_t and each w_s up to it: the noise's covariance, and its pull Σ (to_here·w_t − to_there·w_s)."""

    covariance: Array
    to_here: Array
    to_there: Array


def _at(kernel: Kernel, gram: Array, t: int, response: Array, dimension: float) -> _Pair:
    here, there, across = gram[t, t], np.diagonal(gram)[: t + 1], gram[t, : t + 1]
    if not isinstance(kernel, Relative):
        d2 = np.maximum(here + there - 2 * across, 0.0)
        pull = -kernel.second_derivative(d2) * response
        return _Pair(kernel.trace(d2, dimension) / dimension, pull, pull)
    if (there == 0).any():
        raise ValueError("the relative kernel has no meaning at w = 0: start elsewhere")
    norms = np.sqrt(here * there)
    cosine, ratio = across / norms, np.log(here / there) / 2
    apart = np.maximum(2 - 2 * cosine + ratio**2, 0.0)
    # Tr Cov/P is k' over both norms, and the noise answers by its derivative with respect to w_t: through the distance,
    # in the plane of w_t and w_s, and through the norm, along w_t.
    covariance = kernel.first_derivative(apart) / norms
    pull = -kernel.second_derivative(apart) * response / norms
    to_here = (pull * (cosine + ratio) - covariance * response) / here
    return _Pair(covariance, to_here, pull / norms)
