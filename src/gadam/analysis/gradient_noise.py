"""The noise of gradients: how much those of single examples differ."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from gadam.analysis.curvature import Curvature

__all__ = ["GradientNoise", "measure_noise"]


@dataclass(frozen=True)
class GradientNoise:
    """Of gradients of single examples g, with mean ḡ and covariance Σ.

    Attributes:
        trace: Tr Σ, the mean of ‖g − ḡ‖²; a batch of B independent examples has Tr Σ/B.
        error: The standard error of that, where it was estimated; 0 where it is exact.
        squared_gradient: ‖ḡ‖².
        dimension: P, how many parameters there are.
    """

    trace: float
    error: float
    squared_gradient: float
    dimension: int

    @property
    def per_parameter(self) -> float:
        """Tr Σ/P: the theory's σ²."""
        return self.trace / self.dimension

    @property
    def scale(self) -> float:
        """Tr Σ/‖ḡ‖²: the batch at which noise and gradient are of a size (McCandlish et al., 2018)."""
        return self.trace / self.squared_gradient if self.squared_gradient else math.inf


def measure_noise(
    at: Curvature, *, per: Literal["example", "batch"] = "example", numbers: int = 2**26
) -> GradientNoise:
    """The gradient noise over the data, at the weights that a :class:`Curvature` is of.

    Args:
        at: says the model, the data, the loss, and how BatchNorm is
        per: "example" is exact, from the gradient of each example alone (the loss must be one that ``torch.vmap`` can
            take, on batches whose tensors have the examples first; BatchNorm must be as in evaluation). "batch"
            estimates it from how much the gradients of batches differ, with any loss; the batches must be drawn at
            random, two at least
        numbers: in the gradients that are in memory at a time, with "example"

    Example:
        >>> _ = torch.manual_seed(0)
        >>> model = torch.nn.Linear(3, 2)
        >>> data = [(torch.randn(8, 3), torch.randint(2, (8,))) for _ in range(4)]
        >>> noise = measure_noise(Curvature(model, data))
        >>> noise.trace > 0 and noise.dimension == 8
        True
    """
    if per not in ("example", "batch"):
        raise ValueError(f"per is example or batch, not {per!r}")
    if per == "example" and at.batchnorm == "train":
        raise ValueError(
            'with BatchNorm as in training no example has a gradient of its own: say per="batch"'
        )
    if per == "batch":
        return _between_batches(at)
    total = torch.zeros(at.dimension, dtype=torch.float64, device=at.params[0].device)
    squares, count = 0.0, 0
    for gradients, square, size in _by_example(at, max(1, numbers // at.dimension)):
        total += gradients
        squares += square
        count += size
    if count == 0:
        raise ValueError("there is no data to take gradients of")
    squared = _squared_norm(total / count)
    return GradientNoise(max(0.0, squares / count - squared), 0.0, squared, at.dimension)


def _between_batches(at: Curvature) -> GradientNoise:
    """Between J groups of n_j examples the mean square Σ n_j ‖g_j − ḡ‖²/(J − 1) has the expectation Tr Σ."""
    mean = at.gradient().double()
    apart = [size * _squared_norm(g.double() - mean) for g, size in at.batch_gradients()]
    if len(apart) < 2:
        raise ValueError('per="batch" needs at least two batches')
    found = torch.tensor(apart, dtype=torch.float64) * len(apart) / (len(apart) - 1)
    error = float(found.std()) / math.sqrt(len(apart))
    return GradientNoise(float(found.mean()), error, _squared_norm(mean), at.dimension)


def _by_example(at: Curvature, at_a_time: int) -> Iterator[tuple[Tensor, float, int]]:
    """Σ g, Σ ‖g‖² over some examples, and how many they are."""

    def loss(params: dict[str, Tensor], example: Any) -> Tensor:
        alone = pytree.tree_map(lambda t: t.unsqueeze(0), example)
        return at.loss_at(params, alone)[0]

    params = dict(zip(at.names, (p.detach() for p in at.params)))
    each = torch.vmap(torch.func.grad(loss), (None, 0))
    with at.ready():
        for batch in at.batches:
            size = pytree.tree_leaves(batch)[0].shape[0]
            for start in range(0, size, at_a_time):
                some = pytree.tree_map(lambda t, s=start: t[s : s + at_a_time], batch)
                found = each(params, some)
                gradients = torch.cat([found[name].flatten(1) for name in at.names], dim=1)
                yield (
                    gradients.sum(0, dtype=torch.float64),
                    _squared_norm(gradients),
                    len(gradients),
                )


def _squared_norm(gradients: Tensor) -> float:
    return float(torch.linalg.vector_norm(gradients, dtype=torch.float64) ** 2)
