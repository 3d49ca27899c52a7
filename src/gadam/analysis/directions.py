"""The loss around a point, direction by direction: curvature, slope, and gradient noise.

This is what predictions of :mod:`gadam.theory` need. Noise that is assumed to be equal in all
directions predicts the loss of an average wrongly by a factor of up to five, because the noise of
real problems is larger where the loss is more curved.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from gadam.analysis.curvature import Curvature
from gadam.analysis.gradient_noise import GradientNoise, NoiseSums, gradients_of
from gadam.analysis.spectra import Matrix, Ritz, ritz

__all__ = ["Directions", "Gradients", "measure_directions"]

Gradients: TypeAlias = Callable[[], Iterable[tuple[Tensor, int]]]
"""Returns the gradients of mean losses over batches, each with its number of examples."""

_CONVERGED = 0.05  # relative residual below which a Ritz vector counts as an eigenvector


@dataclass(frozen=True, eq=False)
class Directions:
    """The quadratic around a point, and the gradient noise at it, in groups of directions.

    Attributes:
        eigenvalues: λ of each group. Negative values are directions of negative curvature.
        counts: The number of directions in each group. They sum to P.
        noise: σ² per direction: the variance of the gradient of one example along it.
        gradient: The slope of the quadratic at the start, along each direction.
        position: The coordinate of the start along each direction, for weight decay.
        velocity: The coordinate of ``velocity`` along each direction.
        rise: The loss of the quadratic at the start, minus the loss at the weights of the
            :class:`Curvature`. Zero without an offset.
        resolved: The number of groups, the first ones, that are single eigenvectors.
        total: The noise over all directions.
    """

    eigenvalues: Tensor
    counts: Tensor
    noise: Tensor
    gradient: Tensor
    position: Tensor
    velocity: Tensor
    rise: float
    resolved: int
    total: GradientNoise

    @property
    def resolved_noise(self) -> float:
        """The fraction of the noise that lies along single eigenvectors."""
        inside = float((self.noise * self.counts)[: self.resolved].sum())
        return inside / self.total.trace if self.total.trace else 1.0

    @property
    def negative_noise(self) -> float:
        """The fraction of the noise in directions of negative curvature."""
        return self._negative_share(self.noise * self.counts)

    @property
    def negative_gradient(self) -> float:
        """The fraction of the squared gradient in directions of negative curvature."""
        return self._negative_share(self.gradient.square() * self.counts)

    def _negative_share(self, mass: Tensor) -> float:
        # Smaller values are rounding errors of flat directions.
        below = self.eigenvalues < -1e-5 * self.eigenvalues.abs().max()
        return float(mass[below].sum() / mass.sum()) if mass.sum() else 0.0


def measure_directions(
    at: Curvature,
    *,
    per: Literal["example", "batch"] = "batch",
    gradient: Tensor | None = None,
    gradients: Gradients | None = None,
    scale: Tensor | None = None,
    offset: Tensor | None = None,
    velocity: Tensor | None = None,
    steps: int = 60,
    probes: int = 4,
    probe_steps: int = 16,
    seed: int = 0,
) -> Directions:
    r"""Measure curvature, slope, and noise along the directions of the Hessian.

    1. Lanczos iteration from the gradient at the start yields Ritz pairs. They hold the whole
       gradient, and the moments :math:`\bar g^\top H^k \bar g` are exact up to order
       2·steps − 1.
    2. Ritz vectors with a small residual are eigenvectors. The noise along each is measured by
       projecting all gradients on it: :math:`v^\top \Sigma v`.
    3. The rest of the noise is not assumed, but measured as a whole: Lanczos iteration from random
       combinations of the gradients' deviations, orthogonal to these eigenvectors, yields the
       eigenvalues at which it lies. Its trace is set to what the eigenvectors leave of Tr Σ.

    Args:
        at: Defines the model, the data, the loss, and the BatchNorm mode.
        per: Measure the noise from the gradients of all single examples, which is exact, or from
            the spread of the batches. See :func:`gadam.analysis.measure_noise`.
        gradient: The mean gradient, if it was measured on more data than ``at`` has.
        gradients: Returns noisy gradients with mean zero to measure the noise from, instead of the
            deviations of the gradients of ``at``. Use it for the noise that training sees, with
            augmentation and dropout: (g − g')/√2 for two batches at the same weights.
        scale: A preconditioner: the square root of the factors that multiply the gradient, such as
            (√v + ε)^−½ for Adam. Weights w become w/scale, and gradients g become scale·g. In these
            coordinates, the preconditioned method is plain SGD, and all losses are the same.
        offset: Where training starts, relative to the weights of ``at``. An average is the best
            place to measure the curvature of the region around it, but training continues from
            the last iterate. The default is zero.
        velocity: The momentum buffer, or any other vector of gradients, whose coordinates to
            return.
        steps: Lanczos steps from the gradient, with one product each.
        probes: Random combinations of the noise.
        probe_steps: Lanczos steps per combination.
        seed: Seed of the combinations.

    Returns:
        The directions.

    Raises:
        ValueError: If there is too little data, or the gradient is zero.

    Example:
        >>> _ = torch.manual_seed(0)
        >>> model = torch.nn.Linear(3, 2)
        >>> data = [(torch.randn(8, 3), torch.randint(2, (8,))) for _ in range(8)]
        >>> found = measure_directions(Curvature(model, data))
        >>> round(float(found.counts.sum()))
        8
        >>> abs(float(found.noise @ found.counts) - found.total.trace) < 1e-6
        True
    """
    dtype = torch.promote_types(at.params[0].dtype, torch.float32)
    factor = torch.ones((), dtype=dtype) if scale is None else scale.detach().to(dtype)
    factor = factor.to(at.params[0].device)

    def rows() -> Iterable[tuple[Tensor, int]]:
        if gradients is None:
            found: Iterable[tuple[Tensor, int]] = gradients_of(at, per)
        else:
            found = ((gradient[None], size) for gradient, size in gradients())
        return ((factor * each, size) for each, size in found)

    matrix = _Scaled(at, factor)
    center = factor * (at.gradient() if gradient is None else gradient).to(factor)
    start, rise = center, 0.0
    if offset is not None:
        offset = offset.to(center) / factor
        start = center + matrix @ offset
        rise = float((center.double() + start.double()) @ offset.double()) / 2
    krylov = ritz(matrix, start, steps=steps, seed=seed)
    bound = _CONVERGED * krylov.values.abs() + 1e-6 * krylov.values.abs().max()
    converged = krylov.errors <= bound
    order = torch.cat([converged.nonzero()[:, 0], (~converged).nonzero()[:, 0]])
    krylov = Ritz(
        *(t[order] for t in (krylov.values, krylov.errors, krylov.vectors, krylov.components))
    )
    count = int(converged.sum())
    basis = krylov.vectors[:count]

    sums = NoiseSums(center if gradients is None else torch.zeros_like(center), basis, probes, seed)
    for each, size in rows():
        sums.add(each, size)
    total = sums.result(exact=gradients is None and per == "example")
    left = max(0.0, total.trace - sum(total.along))
    rest: list[tuple[Tensor, Tensor]] = []
    outside = at.dimension - len(krylov.values)
    if outside > 0 and left > 1e-9 * total.trace:
        deflated = _Deflated(matrix, basis)
        for vector in sums.combinations().to(dtype):
            found = ritz(deflated, deflated.outside(vector), steps=probe_steps, seed=seed)
            rest.append((found.values, found.components.square()))
    nodes = torch.cat([values for values, _ in rest]) if rest else torch.zeros(0)
    mass = torch.cat([weights for _, weights in rest]) if rest else torch.zeros(0)
    share = mass / mass.sum() if rest else mass

    weights = at.flat([p.detach() for p in at.params]).to(dtype) / factor
    weights = weights if offset is None else weights + offset
    zeros = torch.zeros(len(nodes), dtype=torch.float64)
    single = torch.ones(len(krylov.values), dtype=torch.float64)
    if outside > 0 and not rest:  # nothing moves along the other directions
        nodes, zeros, share = torch.zeros(1), torch.zeros(1, dtype=torch.float64), torch.ones(1)
        left = 0.0
    counts = torch.cat([single, outside * share.double()])
    noise = torch.zeros_like(counts)
    noise[:count] = torch.tensor(total.along, dtype=torch.float64)
    noise[len(single) :] = left / outside if outside else 0.0

    def along(vector: Tensor | None) -> Tensor:
        if vector is None:
            return torch.zeros_like(counts)
        return torch.cat([(krylov.vectors @ vector.to(krylov.vectors)).double().cpu(), zeros])

    return Directions(
        torch.cat([krylov.values.double().cpu(), nodes.double().cpu()]),
        counts,
        noise,
        torch.cat([krylov.components.double().cpu(), zeros]),
        along(weights),
        along(None if velocity is None else factor * velocity.to(factor)),
        rise,
        count,
        total,
    )


class _Scaled:
    """S H S for a diagonal S."""

    def __init__(self, matrix: Curvature, scale: Tensor) -> None:
        self._matrix, self._scale = matrix, scale
        self.dimension = matrix.dimension

    def __matmul__(self, vector: Tensor) -> Tensor:
        scale = self._scale.to(vector)
        return scale * (self._matrix @ (scale * vector)).to(vector)


class _Deflated:
    """A matrix on the space orthogonal to some of its eigenvectors."""

    def __init__(self, matrix: Matrix, eigenvectors: Tensor) -> None:
        self._matrix, self._eigenvectors = matrix, eigenvectors
        self.dimension = matrix.dimension

    def outside(self, vector: Tensor) -> Tensor:
        """Return the part of a vector that is orthogonal to the eigenvectors."""
        for _ in range(2):
            vector = vector - self._eigenvectors.T @ (self._eigenvectors @ vector)
        return vector

    def __matmul__(self, vector: Tensor) -> Tensor:
        return self.outside(self._matrix @ self.outside(vector))
