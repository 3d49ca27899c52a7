"""How different the predictions of several points are, and how good they are together.

Points are iterates, or independent networks. Of each there are log-probabilities, a row for each example: one model is in
memory at a time, and what it says may lie on the disk (``torch.load(path, mmap=True)``): all pairs are gone through some
examples at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

__all__ = ["Diversity", "Score", "diversity", "ensemble", "log_probabilities"]

MEASURES = ("kl", "total_variation", "disagreement", "squared_distance")


@torch.no_grad()
def log_probabilities(
    model: nn.Module,
    batches: Iterable[Any],
    forward: Callable[[nn.Module, Any], Tensor] | None = None,
) -> Tensor:
    """Log-probabilities of each example, on the CPU. The model is in evaluation mode meanwhile.

    Args:
        model: whose
        batches: inputs, or tuples that begin with them
        forward: gives the logits of a batch, as it comes, instead
    """
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        found = []
        for batch in batches:
            if forward is not None:
                logits = forward(model, batch)
            else:
                logits = model(batch[0] if isinstance(batch, tuple | list) else batch)
            found.append(logits.float().log_softmax(-1).cpu())
    finally:
        for module, training in modes.items():
            module.training = training
    if not found:
        raise ValueError("there is nothing to predict: no batches came")
    return torch.cat(found)


@dataclass(frozen=True, eq=False)
class Diversity:
    """How different the predictions p, q of all pairs of n points are: (n, n) matrices of means over the examples.

    Attributes:
        kl: The symmetrised divergence ½ Σ (p log p/q + q log q/p), in nats.
        total_variation: ½ Σ |p − q|: from 0, the same, to 1.
        disagreement: The share of the examples at which the most probable classes are different.
        squared_distance: Σ (p − q)², the square of the L2 distance.
        examples: How many there were.
    """

    kl: Tensor
    total_variation: Tensor
    disagreement: Tensor
    squared_distance: Tensor
    examples: int

    def mean(self, measure: str) -> float:
        """Over all pairs of different points."""
        matrix = self._matrix(measure)
        n = len(matrix)
        return float(matrix.sum() / (n * (n - 1)))

    def thousands(self, measure: str) -> float:
        """The mean over pairs of the sum over all examples, in thousands: the unit of the paper's table."""
        return self.mean(measure) * self.examples / 1000

    def by_distance(self, measure: str) -> list[float]:
        """The mean over pairs that are 1, 2, … places apart in the order of the points."""
        matrix = self._matrix(measure)
        return [float(matrix.diagonal(k).mean()) for k in range(1, len(matrix))]

    def _matrix(self, measure: str) -> Tensor:
        if measure not in MEASURES:
            raise ValueError(f"the measures are {', '.join(MEASURES)}; there is no {measure!r}")
        matrix: Tensor = getattr(self, measure)
        return matrix


def _chunks(points: Sequence[Tensor], numbers: int) -> Iterator[Tensor]:
    """The same rows of all points, stacked, so many that they hold about so many numbers."""
    if not points:
        raise ValueError("there are no points")
    shape = points[0].shape
    for i, point in enumerate(points):
        if point.dim() != 2 or point.shape != shape:
            raise ValueError(
                f"each point's predictions must be (examples, classes), the same for all: those of point {i} "
                f"are {tuple(point.shape)}, of the first {tuple(shape)}"
            )
    rows = max(1, numbers // (len(points) * max(1, shape[1])))
    for start in range(0, shape[0], rows):
        chunk = torch.stack([point[start : start + rows] for point in points]).double()
        if not bool(chunk.isfinite().all()):
            raise ValueError("log-probabilities must be finite: a point has diverged")
        yield chunk


def diversity(points: Sequence[Tensor], *, numbers: int = 2**24) -> Diversity:
    """Between all pairs of points, exact over all examples.

    Args:
        points: the log-probabilities of each, (examples, classes), as :func:`log_probabilities` gives them
        numbers: of predictions that are taken at a time; there are a few copies of them

    Example:
        >>> sure, unsure = torch.tensor([[0.9, 0.1]]).log(), torch.tensor([[0.6, 0.4]]).log()
        >>> found = diversity([sure, unsure])
        >>> round(found.mean("total_variation"), 3), found.mean("disagreement")
        (0.3, 0.0)
    """
    n = len(points)
    if n < 2:
        raise ValueError(f"diversity is between at least two points, not {n}")
    kl, squares, absolute, differ = (torch.zeros(n, n, dtype=torch.float64) for _ in range(4))
    examples = 0
    for logs in _chunks(points, numbers):
        best = logs.argmax(-1)
        differ += (best[:, None] != best[None, :]).sum(-1)
        probabilities, logs = logs.exp().flatten(1), logs.flatten(1)
        absolute += torch.cdist(probabilities, probabilities, p=1)
        # Both are differences of the points' entries alone: so take out what all have in common, and lose no digits.
        probabilities = probabilities - probabilities.mean(0)
        logs = logs - logs.mean(0)
        kl += _from_products(probabilities @ logs.T) / 2
        squares += _from_products(probabilities @ probabilities.T)
        examples += best.shape[1]
    return Diversity(
        kl=kl / examples,
        total_variation=absolute / 2 / examples,
        disagreement=differ / examples,
        squared_distance=squares / examples,
        examples=examples,
    )


def _from_products(products: Tensor) -> Tensor:
    """Σ (aᵢ − aⱼ)(bᵢ − bⱼ) for all i, j from the products Σ aᵢ bⱼ; no less than nought, and nought on the diagonal."""
    own = products.diagonal()
    differences = (own[:, None] + own[None, :] - products - products.T).clamp_min(0)
    return differences.fill_diagonal_(0)


class Score(NamedTuple):
    """How good predictions are: accuracy in %, and the mean of −log p of what is true, in nats."""

    accuracy: float
    loss: float


def ensemble(
    points: Sequence[Tensor], targets: Tensor, *, numbers: int = 2**24
) -> tuple[list[Score], list[Score]]:
    """How good each point is, and how good the mean probabilities of the first 1, 2, … of them are.

    Args:
        points: the log-probabilities of each, (examples, classes)
        targets: what is true, (examples)
        numbers: of predictions that are taken at a time; there are a few copies of them

    Example:
        >>> points = [torch.tensor([[0.9, 0.1], [0.7, 0.3]]).log(), torch.tensor([[0.4, 0.6], [0.2, 0.8]]).log()]
        >>> alone, together = ensemble(points, torch.tensor([0, 1]))
        >>> [score.accuracy for score in alone], together[-1].accuracy
        ([50.0, 50.0], 100.0)
    """
    n = len(points)
    if n and targets.shape != points[0].shape[:1]:
        raise ValueError(
            f"there are {tuple(targets.shape)} targets for {tuple(points[0].shape[:1])} examples"
        )
    sums = torch.zeros(2, n, 2, dtype=torch.float64)  # (alone, together) × points × (right, −log p)
    row = 0
    counts = torch.arange(1, n + 1, dtype=torch.float64).log()[:, None, None]
    for logs in _chunks(points, numbers):
        true = targets[row : row + logs.shape[1]].cpu()
        row += len(true)
        together = logs.logcumsumexp(0) - counts
        for which, each in enumerate((logs, together)):
            sums[which, :, 0] += (each.argmax(-1) == true).sum(-1)
            where = true[None, :, None].expand(n, -1, 1)
            sums[which, :, 1] -= each.gather(-1, where).sum((1, 2))
    alone, whole = (
        [Score(100 * float(right) / row, float(loss) / row) for right, loss in each]
        for each in sums
    )
    return alone, whole
