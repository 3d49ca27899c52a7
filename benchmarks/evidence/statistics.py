"""Paired comparisons over seeds, and the correction for making many of them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import correlation, fmean, stdev

from scipy.special import bdtrc, ndtr, ndtri, stdtr, stdtrit

__all__ = [
    "Difference",
    "Paired",
    "correlated",
    "holm",
    "mean_and_error",
    "sign_test",
    "stouffer",
    "unpaired",
]


def mean_and_error(values: Sequence[float]) -> tuple[float, float | None]:
    """Return the mean and its standard error, which is None for one value.

    Args:
        values: At least one value.
    """
    error = stdev(values) / math.sqrt(len(values)) if len(values) > 1 else None
    return fmean(values), error


@dataclass(frozen=True)
class Difference:
    """A difference of means, by Student's t.

    Args:
        mean: The difference.
        error: Its standard error.
        freedom: The degrees of freedom of the error.
    """

    mean: float
    error: float
    freedom: float

    @property
    def p_value(self) -> float:
        """The two-sided p-value of the t-test."""
        if self.error == 0:
            return 1.0 if self.mean == 0 else 0.0
        return float(2 * stdtr(self.freedom, -abs(self.mean / self.error)))

    def interval(self, confidence: float = 0.95) -> tuple[float, float]:
        """Return a confidence interval.

        Args:
            confidence: How often such an interval contains the true difference.
        """
        half = self.error * float(stdtrit(self.freedom, (1 + confidence) / 2))
        return self.mean - half, self.mean + half


@dataclass(frozen=True)
class Paired(Difference):
    """The mean difference over pairs, of which there are at least two."""

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
        return cls(mean, error, len(seeds) - 1)

    @property
    def count(self) -> int:
        """The number of pairs."""
        return round(self.freedom) + 1


Spread = tuple[float, float, int]  # a mean over runs, its standard error, and their number


def unpaired(first: Spread, second: Spread) -> Difference:
    """Compare means over runs that share nothing (Welch, 1947).

    Args:
        first: A mean over two runs or more.
        second: Another one. The difference is positive if the first is larger.
    """
    variances = [error**2 for _, error, _ in (first, second)]
    total = sum(variances)
    parts = sum(v**2 / (one[2] - 1) for v, one in zip(variances, (first, second)))
    freedom = total**2 / parts if parts else math.inf
    return Difference(first[0] - second[0], math.sqrt(total), freedom)


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


def stouffer(differences: Sequence[Difference]) -> tuple[float, float]:
    """Combine independent tests (Stouffer, 1949).

    Args:
        differences: At least one.

    Returns:
        The combined z, positive if the differences are, and its two-sided p-value.
    """
    scores = []
    for one in differences:
        # Half of a p-value of zero has no finite score.
        tail = max(one.p_value / 2, 1e-300)
        scores.append(math.copysign(-float(ndtri(tail)), one.mean))
    z = math.fsum(scores) / math.sqrt(len(scores))
    return z, float(2 * ndtr(-abs(z)))


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


def correlated(first: Sequence[float], second: Sequence[float]) -> tuple[float, float, float]:
    """Return Pearson's correlation and its 95% interval (Fisher, 1921).

    Args:
        first: Four values or more.
        second: As many values.
    """
    r = correlation(first, second)
    half = float(ndtri(0.975)) / math.sqrt(len(first) - 3)
    return r, math.tanh(math.atanh(r) - half), math.tanh(math.atanh(r) + half)
