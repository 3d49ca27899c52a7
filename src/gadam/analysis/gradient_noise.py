"""Gradient noise: how much the gradients of single examples differ."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from operator import itemgetter
from typing import Literal

import torch
from torch import Tensor

from gadam._torch import tree_leaves, tree_map
from gadam.analysis.curvature import Batch, Curvature
from gadam.analysis.intervals import confidence_interval

__all__ = ["GradientNoise", "NoiseSums", "gradients_of", "measure_noise"]


@dataclass(frozen=True)
class GradientNoise:
    """Noise of the per-example gradients g, which have mean ḡ and covariance Σ.

    Attributes:
        trace: Tr Σ, the mean of ‖g − ḡ‖². A batch of B independent examples has Tr Σ/B.
        error: Standard error of the trace, or 0 if the trace is exact. NaN for two batches, whose
            spread says nothing about its own error.
        squared_gradient: ‖ḡ‖².
        dimension: The number of parameters P.
        along: vᵀΣv, the variance along each of the given directions. Empty if none were given.
        freedom: Degrees of freedom of the standard error.
    """

    trace: float
    error: float
    squared_gradient: float
    dimension: int
    along: tuple[float, ...] = ()
    freedom: int = 0

    def interval(self, confidence: float = 0.95) -> tuple[float, float]:
        """Return Student's confidence interval of the trace, which is honest for few batches.

        It covers the true trace as often as stated if the noise has many directions. If two or
        three dominate, it covers about 90% at 95%.

        Args:
            confidence: The probability to cover the true trace.

        Returns:
            The lower and the upper end.
        """
        return confidence_interval(self.trace, self.error, self.freedom, confidence, positive=True)

    @property
    def per_parameter(self) -> float:
        """Tr Σ/P, the theory's σ²."""
        return self.trace / self.dimension

    @property
    def scale(self) -> float:
        """Tr Σ/‖ḡ‖², the simple noise scale (McCandlish et al., 2018).

        At this batch size, noise and gradient have the same magnitude.
        """
        return self.trace / self.squared_gradient if self.squared_gradient else math.inf


def measure_noise(
    at: Curvature,
    *,
    per: Literal["example", "batch"] = "example",
    directions: Tensor | None = None,
    max_elements: int = 2**26,
) -> GradientNoise:
    r"""Measure the gradient noise over the data, at the weights of a :class:`Curvature`.

    With the gradients :math:`g_n` of single examples and their mean :math:`\bar g`, the trace of
    the noise covariance, and its variance along a direction :math:`v`, are

    .. math::
        \operatorname{Tr} \Sigma = \frac{1}{N} \sum_n \lVert g_n - \bar g \rVert^2,
        \qquad
        v^\top \Sigma v = \frac{1}{N} \sum_n \bigl(v^\top (g_n - \bar g)\bigr)^2.

    Noise is far from equal in all directions: it is larger where the loss is more curved. Use
    :func:`gadam.analysis.measure_directions` to measure it over the whole spectrum.

    Args:
        at: Defines the model, the data, the loss, and the BatchNorm mode.
        per: ``"example"`` is exact. It computes the gradient of each example, which needs a loss
            that supports ``torch.vmap``, batches with the examples in the first dimension, and
            BatchNorm in evaluation mode. ``"batch"`` estimates the noise from the spread of the
            batch gradients. It works with any loss, but needs at least two randomly drawn batches.
        directions: Unit vectors as rows, such as ``top_eigenvalues(at, 10).vectors``, along which
            to measure the noise too.
        max_elements: Maximum number of gradient elements in memory at a time, for ``"example"``.

    Returns:
        The noise, with a standard error if it was estimated.

    Raises:
        ValueError: If there is too little data, the directions have the wrong shape, or
            ``per="example"`` is combined with BatchNorm in training mode.

    Example:
        >>> _ = torch.manual_seed(0)
        >>> model = torch.nn.Linear(3, 2)
        >>> data = [(torch.randn(8, 3), torch.randint(2, (8,))) for _ in range(4)]
        >>> noise = measure_noise(Curvature(model, data), directions=torch.eye(8))
        >>> noise.trace > 0 and noise.dimension == 8
        True
        >>> abs(sum(noise.along) - noise.trace) < 1e-6
        True
    """
    if directions is not None and (directions.dim() != 2 or directions.shape[1] != at.dimension):
        raise ValueError(
            f"directions must be rows of length {at.dimension}, got {tuple(directions.shape)}."
        )
    rows = gradients_of(at, per, max_elements)
    sums = NoiseSums(at.gradient(), directions)
    for gradients, size in rows:
        sums.add(gradients, size)
    return sums.result(exact=per == "example")


def gradients_of(
    at: Curvature, per: Literal["example", "batch"], max_elements: int = 2**26
) -> Iterator[tuple[Tensor, int]]:
    """Yield gradients as rows, and the number of examples behind each row.

    Args:
        at: Defines the model, the data, the loss, and the BatchNorm mode.
        per: "example" yields several rows at a time, and "batch" one.
        max_elements: Maximum number of elements at a time.

    Raises:
        ValueError: If ``per`` is unknown or does not fit the BatchNorm mode.
    """
    if per not in ("example", "batch"):
        raise ValueError(f"per must be 'example' or 'batch', got {per!r}.")
    if per == "example" and at.batchnorm == "train":
        raise ValueError(
            'With batchnorm="train", single examples have no gradient of their own. '
            'Use per="batch".'
        )
    if per == "batch":
        return ((gradient[None], size) for gradient, size in at.batch_gradients())
    return ((rows, 1) for rows in _by_example(at, max(1, max_elements // at.dimension)))


class NoiseSums:
    """Running sums over gradients, from which the covariance Σ of their noise follows.

    Args:
        center: The mean gradient, or a vector near it. It is subtracted from all gradients, so that
            no digits cancel.
        directions: Unit vectors as rows, along which to measure the variance.
        probes: Number of random combinations of the noise to draw.
        seed: Seed of the combinations.
    """

    def __init__(
        self, center: Tensor, directions: Tensor | None = None, probes: int = 0, seed: int = 0
    ) -> None:
        self._center, self._directions = center.double(), directions
        self._generator = torch.Generator().manual_seed(seed)
        self._sizes: list[int] = []
        self._squares: list[float] = []
        self._projected: list[Tensor] = []
        self._sum = torch.zeros_like(self._center)
        self._probes = self._center.new_zeros(probes, len(center))
        self._weights = self._center.new_zeros(probes)

    def add(self, gradients: Tensor, size: int) -> None:
        """Add gradients.

        Args:
            gradients: Gradients of mean losses, as rows.
            size: The number of examples behind each row.
        """
        rows = gradients.detach().double() - self._center
        self._sizes += [size] * len(rows)
        self._squares += (size * rows.square().sum(1)).tolist()
        self._sum += size * rows.sum(0)
        if self._directions is not None:
            self._projected.append((rows @ self._directions.to(rows).T).cpu())
        if len(self._probes):
            signs = torch.randint(0, 2, (len(self._probes), len(rows)), generator=self._generator)
            weights = (math.sqrt(size) * (2.0 * signs - 1)).to(rows)
            self._probes += weights @ rows
            self._weights += weights.sum(1)

    def mean(self) -> Tensor:
        """Return ḡ, the mean gradient."""
        return self._center + self._shift()

    def combinations(self) -> Tensor:
        """Return random vectors with covariance Σ, as rows: signed sums of all deviations."""
        deviations = self._probes - self._weights[:, None] * self._shift()
        return deviations / math.sqrt(max(1, len(self._sizes) - 1))

    def result(self, *, exact: bool) -> GradientNoise:
        """Return the noise.

        Args:
            exact: The gradients are those of all single examples, so the noise is theirs.
                Otherwise, the noise of one example is estimated from the spread of J batches of n
                examples: the mean square Σ n‖g − ḡ‖²/(J − 1) has expectation Tr Σ.

        Raises:
            ValueError: If there are too few gradients.
        """
        shift, count = self._shift(), len(self._sizes)
        if not exact and count < 2:
            raise ValueError('per="batch" needs at least two batches.')
        sizes = torch.tensor(self._sizes, dtype=torch.float64)
        squares = torch.tensor(self._squares, dtype=torch.float64)
        divisor = count if exact else count - 1
        trace = (float(squares.sum()) - float(sizes.sum()) * _squared_norm(shift)) / divisor
        # All squares share the mean ḡ. With normal gradients, the variance of the trace is
        # therefore (J − 1)/(J − 2) times what their spread suggests, with one degree less.
        freedom = 0 if exact else count - 2
        error = 0.0 if exact else math.nan
        if freedom > 0:
            error = float(squares.std()) * math.sqrt(count / (divisor * freedom))
        along: tuple[float, ...] = ()
        if self._projected:
            points = torch.cat(self._projected)
            deviations = points - (sizes @ points) / sizes.sum()
            along = tuple((sizes @ deviations.square() / divisor).tolist())
        squared = _squared_norm(self.mean())
        return GradientNoise(max(0.0, trace), error, squared, len(shift), along, freedom)

    def _shift(self) -> Tensor:
        if not self._sizes:
            raise ValueError("batches is empty: there is no data to compute gradients on.")
        return self._sum / sum(self._sizes)


def _by_example(at: Curvature, chunk: int) -> Iterator[Tensor]:
    """Yield the gradients of up to ``chunk`` examples at a time, as rows."""

    def loss(params: dict[str, Tensor], example: Batch) -> Tensor:
        batch = tree_map(lambda t: t.unsqueeze(0), example)
        return at.loss_at(params, batch)[0]

    params = dict(zip(at.names, (p.detach() for p in at.params)))
    example_gradients = torch.vmap(torch.func.grad(loss), (None, 0))
    with at.ready():
        for batch in at.batches:
            size = tree_leaves(batch)[0].shape[0]
            for start in range(0, size, chunk):
                examples = tree_map(itemgetter(slice(start, start + chunk)), batch)
                by_name = example_gradients(params, examples)
                yield torch.cat([by_name[name].flatten(1) for name in at.names], dim=1)


def _squared_norm(gradients: Tensor) -> float:
    return float(torch.linalg.vector_norm(gradients, dtype=torch.float64) ** 2)
