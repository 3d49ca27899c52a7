"""Iterate averages: plans, triggers, the running average, and BatchNorm statistics for it."""

from gadam.average.block_contents import BlockError
from gadam.average.blocks import BlockAverages
from gadam.average.export import Provenance, read_provenance
from gadam.average.health import Health
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
from gadam.average.wrappers import average_of

__all__ = [
    "EMA",
    "Averaging",
    "BlockAverages",
    "BlockError",
    "Health",
    "IterateAverage",
    "LinearDecay",
    "Mean",
    "NonMonotone",
    "Plateau",
    "PowerEMA",
    "Provenance",
    "Window",
    "average_of",
    "read_provenance",
]
