"""Iterate averages: plans, triggers, the running average, and BatchNorm statistics for it."""

from gadam.average.iterate import IterateAverage
from gadam.average.plan import (
    EMA,
    Averaging,
    LinearDecay,
    Mean,
    NonMonotone,
    Plateau,
    PowerEMA,
    Window,
)

__all__ = [
    "EMA",
    "Averaging",
    "IterateAverage",
    "LinearDecay",
    "Mean",
    "NonMonotone",
    "Plateau",
    "PowerEMA",
    "Window",
]
