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

__all__ = ["GradientNoise", "measure_noise"]


@dataclass(frozen=True)
class GradientNoise:
    """Noise of the per-example gradients g, which have mean ḡ and covariance Σ.

    Attributes:
        trace: Tr Σ, the mean of ‖g − ḡ‖². A batch of B independent examples has Tr Σ/B.
        error: Standard error of the trace, or 0 if the trace is exact.
        squared_gradient: ‖ḡ‖².
        dimension: The number of parameters P.
    """

    trace: float
    error: float
    squared_gradient: float
    dimension: int

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
    at: Curvature, *, per: Literal["example", "batch"] = "example", max_elements: int = 2**26
) -> GradientNoise:
    r"""Measure the gradient noise over the data, at the weights of a :class:`Curvature`.

    With the gradients :math:`g_n` of single examples and their mean :math:`\bar g`, the trace of
    the noise covariance is

    .. math::
        \operatorname{Tr} \Sigma = \frac{1}{N} \sum_n \lVert g_n - \bar g \rVert^2.

    Args:
        at: Defines the model, the data, the loss, and the BatchNorm mode.
        per: ``"example"`` is exact. It computes the gradient of each example, which needs a loss
            that supports ``torch.vmap``, batches with the examples in the first dimension, and
            BatchNorm in evaluation mode. ``"batch"`` estimates the noise from the spread of the
            batch gradients. It works with any loss, but needs at least two randomly drawn batches.
        max_elements: Maximum number of gradient elements in memory at a time, for ``"example"``.

    Returns:
        The noise, with a standard error if it was estimated.

    Raises:
        ValueError: If there is too little data, or if ``per="example"`` is combined with BatchNorm
            in training mode.

    Example:
        >>> _ = torch.manual_seed(0)
        >>> model = torch.nn.Linear(3, 2)
        >>> data = [(torch.randn(8, 3), torch.randint(2, (8,))) for _ in range(4)]
        >>> noise = measure_noise(Curvature(model, data))
        >>> noise.trace > 0 and noise.dimension == 8
        True
    """
    if per not in ("example", "batch"):
        raise ValueError(f"per must be 'example' or 'batch', got {per!r}.")
    if per == "example" and at.batchnorm == "train":
        raise ValueError(
            'With batchnorm="train", single examples have no gradient of their own. '
            'Use per="batch".'
        )
    if per == "batch":
        return _between_batches(at)
    total = torch.zeros(at.dimension, dtype=torch.float64, device=at.params[0].device)
    squares, count = 0.0, 0
    for gradients, square, size in _by_example(at, max(1, max_elements // at.dimension)):
        total += gradients
        squares += square
        count += size
    if count == 0:
        raise ValueError("batches is empty: there is no data to compute gradients on.")
    squared = _squared_norm(total / count)
    return GradientNoise(max(0.0, squares / count - squared), 0.0, squared, at.dimension)


def _between_batches(at: Curvature) -> GradientNoise:
    """Estimate the noise from J batches of n_j examples.

    The between-group mean square Σ n_j ‖g_j − ḡ‖²/(J − 1) has expectation Tr Σ.
    """
    mean = at.gradient().double()
    spread = [size * _squared_norm(g.double() - mean) for g, size in at.batch_gradients()]
    if len(spread) < 2:
        raise ValueError('per="batch" needs at least two batches.')
    samples = torch.tensor(spread, dtype=torch.float64) * len(spread) / (len(spread) - 1)
    error = float(samples.std()) / math.sqrt(len(spread))
    return GradientNoise(float(samples.mean()), error, _squared_norm(mean), at.dimension)


def _by_example(at: Curvature, chunk: int) -> Iterator[tuple[Tensor, float, int]]:
    """Yield Σ g, Σ ‖g‖², and the number of examples, for up to ``chunk`` examples at a time."""

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
                gradients = torch.cat([by_name[name].flatten(1) for name in at.names], dim=1)
                yield (
                    gradients.sum(0, dtype=torch.float64),
                    _squared_norm(gradients),
                    len(gradients),
                )


def _squared_norm(gradients: Tensor) -> float:
    return float(torch.linalg.vector_norm(gradients, dtype=torch.float64) ** 2)
