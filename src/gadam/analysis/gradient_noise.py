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
    total = torch.zeros(at.dimension, dtype=torch.float64, device=at.params[0].device)
    squares, count = [], 0
    parts = _by_example(at, max(1, numbers // at.dimension)) if per == "example" else _by_batch(at)
    for gradients, square, size in parts:
        total += gradients
        squares.append(square)
        count += size
    if count == 0:
        raise ValueError("there is no data to take gradients of")
    squared = float((total / count).square().sum())
    if per == "example":
        return GradientNoise(max(0.0, sum(squares) / count - squared), 0.0, squared, at.dimension)
    batches = len(squares)
    if batches < 2:
        raise ValueError('per="batch" needs at least two batches')
    # Between groups of n_j examples the mean square Σ n_j ‖g_j − ḡ‖²/(J − 1) has the expectation Tr Σ.
    trace = max(0.0, (sum(squares) - count * squared) / (batches - 1))
    spread = torch.tensor(squares, dtype=torch.float64).std()
    return GradientNoise(trace, float(spread) / math.sqrt(batches), squared, at.dimension)


def _by_batch(at: Curvature) -> Iterator[tuple[Tensor, float, int]]:
    """n·g, n·‖g‖² and n for each batch of n examples."""
    for gradient, size in at.batch_gradients():
        yield size * gradient.double(), size * _squared_norm(gradient), size


def _by_example(at: Curvature, at_a_time: int) -> Iterator[tuple[Tensor, float, int]]:
    """Σ g, Σ ‖g‖² over some examples, and how many they are."""

    def loss(params: dict[str, Tensor], example: Any) -> Tensor:
        alone = pytree.tree_map(lambda t: t.unsqueeze(0), example)
        value, _ = at.loss(at.with_parameters(params), alone)
        return value

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
