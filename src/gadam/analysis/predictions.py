"""Diversity of the predictions of several models, and the accuracy of their ensemble.

A point is an iterate of one run or an independent network. Each point is represented by its
log-probabilities, one row per example. Only one model needs to be in memory at a time, and the
log-probabilities may stay on disk (``torch.load(path, mmap=True)``): all functions process a chunk
of examples at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from gadam._modes import preserved_modes

__all__ = ["Diversity", "Score", "diversity", "ensemble", "log_probabilities"]

Batch = Any
"""One item of the loader. Only ``forward`` looks inside it."""
MEASURES = ("kl", "total_variation", "disagreement", "squared_distance")


@torch.no_grad()
def log_probabilities(
    model: nn.Module,
    batches: Iterable[Batch],
    forward: Callable[[nn.Module, Batch], Tensor] | None = None,
) -> Tensor:
    """Compute the log-probabilities of each example, on the CPU.

    The model runs in evaluation mode. Its training modes are restored afterwards.

    Args:
        model: Classifier that returns logits.
        batches: Inputs, or tuples with the inputs first.
        forward: Maps the model and a batch to logits. Defaults to calling the model on the inputs.

    Returns:
        Log-probabilities of shape (examples, classes).

    Raises:
        ValueError: If ``batches`` is empty.
    """
    outputs = []
    with preserved_modes(model):
        model.eval()
        for batch in batches:
            if forward is not None:
                logits = forward(model, batch)
            else:
                logits = model(batch[0] if isinstance(batch, tuple | list) else batch)
            outputs.append(logits.float().log_softmax(-1).cpu())
    if not outputs:
        raise ValueError("batches is empty: there is nothing to predict.")
    return torch.cat(outputs)


@dataclass(frozen=True, eq=False)
class Diversity:
    """Differences between the predictions p, q of all pairs of n points.

    Each measure is an (n, n) matrix of means over the examples.

    Attributes:
        kl: The symmetrized Kullback-Leibler divergence ½ Σ (p log p/q + q log q/p), in nats.
        total_variation: ``½ Σ |p − q|``, between 0 (identical) and 1.
        disagreement: Fraction of the examples where the most probable classes differ.
        squared_distance: Σ (p − q)², the squared L2 distance.
        examples: Number of examples.
    """

    kl: Tensor
    total_variation: Tensor
    disagreement: Tensor
    squared_distance: Tensor
    examples: int

    def mean(self, measure: str) -> float:
        """Return the mean over all pairs of distinct points.

        Args:
            measure: ``"kl"``, ``"total_variation"``, ``"disagreement"``, or ``"squared_distance"``.

        Returns:
            The mean over pairs and examples.
        """
        matrix = self._matrix(measure)
        n = len(matrix)
        return float(matrix.sum() / (n * (n - 1)))

    def thousands(self, measure: str) -> float:
        """Return the mean over pairs of the sum over examples, in thousands.

        This is the unit of the paper's table.

        Args:
            measure: As in :meth:`mean`.

        Returns:
            The mean, multiplied by the number of examples and divided by 1,000.
        """
        return self.mean(measure) * self.examples / 1000

    def by_distance(self, measure: str) -> list[float]:
        """Return the mean over pairs by their distance in the sequence of points.

        Args:
            measure: As in :meth:`mean`.

        Returns:
            The means over the pairs that are 1, 2, … positions apart.
        """
        matrix = self._matrix(measure)
        return [float(matrix.diagonal(k).mean()) for k in range(1, len(matrix))]

    def _matrix(self, measure: str) -> Tensor:
        if measure not in MEASURES:
            raise ValueError(f"measure must be one of {', '.join(MEASURES)}, got {measure!r}.")
        matrix: Tensor = getattr(self, measure)
        return matrix


def _chunks(points: Sequence[Tensor], max_elements: int) -> Iterator[Tensor]:
    """Yield the same rows of all points, stacked, with about ``max_elements`` elements in total."""
    if not points:
        raise ValueError("points is empty. Pass the predictions of at least one point.")
    shape = points[0].shape
    for i, point in enumerate(points):
        if point.dim() != 2 or point.shape != shape:
            raise ValueError(
                "All points must have predictions of the same shape (examples, classes): "
                f"point 0 has {tuple(shape)}, point {i} has {tuple(point.shape)}."
            )
    rows = max(1, max_elements // (len(points) * max(1, shape[1])))
    for start in range(0, shape[0], rows):
        chunk = torch.stack([point[start : start + rows] for point in points]).double()
        if not bool(chunk.isfinite().all()):
            raise ValueError("Log-probabilities must be finite. At least one point has diverged.")
        # Half-precision log-probabilities sum to one only roughly.
        worst = float(chunk.logsumexp(-1).abs().max()) if shape[1] else 0.0
        if worst > 0.1:
            raise ValueError(
                "points must contain log-probabilities, which sum to one per example after exp(). "
                "Apply log_softmax(-1) to logits, or log() to probabilities."
            )
        yield chunk


def diversity(points: Sequence[Tensor], *, max_elements: int = 2**24) -> Diversity:
    """Compare the predictions of all pairs of points, exactly over all examples.

    Args:
        points: Log-probabilities of each point, of shape (examples, classes), as returned by
            :func:`log_probabilities`.
        max_elements: Number of predictions to process at a time. A few copies of them are made.

    Returns:
        The differences by several measures.

    Raises:
        ValueError: If there are fewer than two points, or their shapes differ, or a value is not
            finite, or the points are not log-probabilities.

    Example:
        >>> sure, unsure = torch.tensor([[0.9, 0.1]]).log(), torch.tensor([[0.6, 0.4]]).log()
        >>> result = diversity([sure, unsure])
        >>> round(result.mean("total_variation"), 3), result.mean("disagreement")
        (0.3, 0.0)
    """
    n = len(points)
    if n < 2:
        raise ValueError(f"diversity needs at least two points, got {n}.")
    kl, squares, absolute, differ = (torch.zeros(n, n, dtype=torch.float64) for _ in range(4))
    examples = 0
    for logs in _chunks(points, max_elements):
        best = logs.argmax(-1)
        differ += (best[:, None] != best[None, :]).sum(-1)
        probabilities, logs = logs.exp().flatten(1), logs.flatten(1)
        absolute += torch.cdist(probabilities, probabilities, p=1)
        # Both measures depend only on differences between points. Subtracting the mean over points
        # first avoids cancellation.
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
    """Compute Σ (aᵢ − aⱼ)(bᵢ − bⱼ) for all i, j from the products Σ aᵢ bⱼ.

    The results are clamped to be non-negative, and the diagonal is exactly zero.
    """
    own = products.diagonal()
    differences = (own[:, None] + own[None, :] - products - products.T).clamp_min(0)
    return differences.fill_diagonal_(0)


class Score(NamedTuple):
    """Quality of predictions.

    Attributes:
        accuracy: Accuracy in percent.
        loss: Mean of −log p of the true class, in nats.
    """

    accuracy: float
    loss: float


def ensemble(
    points: Sequence[Tensor], targets: Tensor, *, max_elements: int = 2**24
) -> tuple[list[Score], list[Score]]:
    """Score each point, and the mean probabilities of the first 1, 2, … points.

    Args:
        points: Log-probabilities of each point, of shape (examples, classes).
        targets: True classes, of shape (examples,).
        max_elements: Number of predictions to process at a time. A few copies of them are made.

    Returns:
        The scores of the single points, and of the ensembles of the first 1, 2, … points.

    Raises:
        ValueError: If shapes differ, a value is not finite, or the points are not
            log-probabilities.

    Example:
        >>> first = torch.tensor([[0.9, 0.1], [0.7, 0.3]]).log()
        >>> second = torch.tensor([[0.4, 0.6], [0.2, 0.8]]).log()
        >>> single, combined = ensemble([first, second], torch.tensor([0, 1]))
        >>> [score.accuracy for score in single], combined[-1].accuracy
        ([50.0, 50.0], 100.0)
    """
    n = len(points)
    if n and targets.shape != points[0].shape[:1]:
        raise ValueError(
            f"targets must have shape {tuple(points[0].shape[:1])}, got {tuple(targets.shape)}."
        )
    # (single, combined) × points × (correct, −log p)
    sums = torch.zeros(2, n, 2, dtype=torch.float64)
    row = 0
    counts = torch.arange(1, n + 1, dtype=torch.float64).log()[:, None, None]
    for logs in _chunks(points, max_elements):
        true = targets[row : row + logs.shape[1]].cpu()
        row += len(true)
        combined_logs = logs.logcumsumexp(0) - counts
        index = true[None, :, None].expand(n, -1, 1)
        for i, predictions in enumerate((logs, combined_logs)):
            sums[i, :, 0] += (predictions.argmax(-1) == true).sum(-1)
            sums[i, :, 1] -= predictions.gather(-1, index).sum((1, 2))
    single, combined = (
        [Score(100 * float(correct) / row, float(loss) / row) for correct, loss in each]
        for each in sums
    )
    return single, combined
