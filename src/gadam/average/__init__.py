"""The iterate average: its plan, its triggers, the running thing, and BatchNorm for it."""

from gadam.average.iterate import IterateAverage
from gadam.average.plan import EMA, Averaging, Mean, NonMonotone, Plateau, Window

__all__ = ["EMA", "Averaging", "IterateAverage", "Mean", "NonMonotone", "Plateau", "Window"]
