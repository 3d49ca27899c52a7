"""Iterate averaging that works in practice: Gadam, GadamX and what belongs around them."""

from gadam import schedule
from gadam.average import (
    EMA,
    Averaging,
    IterateAverage,
    Mean,
    NonMonotone,
    Plateau,
    Window,
    refresh_batchnorm,
)
from gadam.optim import Gadam, GadamX, Lookahead, Padam, PadamW, backends

__version__ = "0.1.0"

__all__ = [
    "EMA",
    "Averaging",
    "Gadam",
    "GadamX",
    "IterateAverage",
    "Lookahead",
    "Mean",
    "NonMonotone",
    "Padam",
    "PadamW",
    "Plateau",
    "Window",
    "backends",
    "refresh_batchnorm",
    "schedule",
]
