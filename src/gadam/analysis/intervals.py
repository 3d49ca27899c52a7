"""Confidence intervals of means over few samples."""

from __future__ import annotations

import math
from statistics import NormalDist

__all__ = ["confidence_interval", "student_quantile"]


def student_quantile(freedom: int, confidence: float = 0.95) -> float:
    """Return t such that Student's T lies within ±t with the given probability.

    Args:
        freedom: Degrees of freedom ν, at least 1.
        confidence: The probability.

    Returns:
        The two-sided quantile.

    Raises:
        ValueError: If an argument is out of range.

    Example:
        >>> round(student_quantile(3), 3), round(student_quantile(30), 3)
        (3.182, 2.042)
    """
    if freedom < 1 or not 0 < confidence < 1:
        raise ValueError(
            "freedom must be at least 1 and confidence between 0 and 1, "
            f"got {freedom} and {confidence}."
        )
    if freedom > 1000:
        return NormalDist().inv_cdf((1 + confidence) / 2)
    low, high = 0.0, math.pi / 2  # θ = atan(t/√ν)
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (low, middle) if _within(middle, freedom) > confidence else (middle, high)
    return math.sqrt(freedom) * math.tan(low)


def _within(angle: float, freedom: int) -> float:
    """Return P(|T| < √ν·tan θ), which is a finite sum of powers of cos θ for integer ν."""
    sine, cosine = math.sin(angle), math.cos(angle)
    odd = freedom % 2
    term, total = (cosine, 0.0) if odd else (1.0, 0.0)
    for i in range(odd, freedom - 1, 2):
        total += term
        term *= cosine**2 * (i + 1) / (i + 2)
    return 2 / math.pi * (angle + sine * total) if odd else sine * total


def confidence_interval(
    value: float, error: float, freedom: int, confidence: float = 0.95, *, positive: bool = False
) -> tuple[float, float]:
    """Return Student's interval of a mean.

    Args:
        value: The mean.
        error: Its standard error.
        freedom: Degrees of freedom of the standard error. If 0, nothing is known about the error.
        confidence: The probability that the interval contains the expectation.
        positive: The samples are positive and skewed to the right, such as squared norms. The upper
            end is then computed on a logarithmic scale.

    Returns:
        The lower and the upper end.

    Example:
        >>> low, high = confidence_interval(10.0, 1.0, freedom=3)
        >>> round(low, 2), round(high, 2)
        (6.82, 13.18)
    """
    if error == 0:
        return value, value
    if freedom < 1:
        return (0.0 if positive else -math.inf), math.inf
    half = student_quantile(freedom, confidence) * error
    if not positive or value <= 0:
        return value - half, value + half
    return max(0.0, value - half), value * math.exp(min(half / value, 700.0))
