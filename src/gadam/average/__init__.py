"""Iterate averages: plans, triggers, the running average, and BatchNorm statistics for it."""

from gadam.average.iterate import IterateAverage
from gadam.average.plan import EMA, Averaging, Mean, NonMonotone, Plateau, Window

__all__ = ["EMA", "Averaging", "IterateAverage", "Mean", "NonMonotone", "Plateau", "Window"]
