"""Paired comparisons over seeds, and the correction for making many of them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

from scipy.special import bdtrc, stdtr, stdtrit

__all__ = ["Paired", "holm", "mean_and_error", "sign_test"]


def mean_and_error(values: Sequence[float]) -> tuple[float, float | None]:
    """Return the mean and its standard error, which is None for one value.

    Args:
        values: At least one value.
    """
    error = stdev(values) / math.sqrt(len(values)) if len(values) > 1 else None
    return fmean(values), error


@dataclass(frozen=True)
class Paired:
    """The mean difference over pairs.

    Args:
        mean: The mean difference.
        error: Its standard error.
        count: The number of pairs, at least two.
    """

    mean: float
    error: float
    count: int

    @classmethod
    def of(cls, first: Mapping[int, float], second: Mapping[int, float]) -> Paired | None:
        """Compare values of the same seeds, or return None if they share fewer than two.

        Args:
            first: Values by seed.
            second: Values by seed. The difference is positive if the first are larger.
        """
        seeds = sorted(first.keys() & second.keys())
        if len(seeds) < 2:
            return None
        mean, error = mean_and_error([first[seed] - second[seed] for seed in seeds])
        assert error is not None
        return cls(mean, error, len(seeds))

    @property
    def p_value(self) -> float:
        """The two-sided p-value of Student's t-test."""
        if self.error == 0:
            return 1.0 if self.mean == 0 else 0.0
        return float(2 * stdtr(self.count - 1, -abs(self.mean / self.error)))

    def interval(self, confidence: float = 0.95) -> tuple[float, float]:
        """Return a confidence interval.

        Args:
            confidence: How often such an interval contains the true difference.
        """
        half = self.error * float(stdtrit(self.count - 1, (1 + confidence) / 2))
        return self.mean - half, self.mean + half


def holm(p_values: Sequence[float]) -> list[float]:
    """Return p-values that are corrected for their number (Holm, 1979), in the same order.

    >>> holm([0.01, 0.04, 0.03])
    [0.03, 0.06, 0.06]

    Args:
        p_values: All that were looked at.
    """
    corrected = [0.0] * len(p_values)
    largest = 0.0
    for rank, index in enumerate(sorted(range(len(p_values)), key=p_values.__getitem__)):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[index]))
        corrected[index] = largest
    return corrected


def sign_test(positive: int, negative: int) -> float:
    """Return the two-sided p-value that both signs are equally likely.

    Args:
        positive: How many differences are positive.
        negative: How many are negative. Ties do not count.
    """
    total, more = positive + negative, max(positive, negative)
    if total == 0 or more * 2 == total:
        return 1.0
    return min(1.0, 2 * float(bdtrc(more - 1, total, 0.5)))
