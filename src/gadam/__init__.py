"""Iterate averaging for PyTorch: Gadam, GadamX, and tools to use them."""

from typing import TYPE_CHECKING

from gadam.average import (
    EMA,
    Averaging,
    IterateAverage,
    LinearDecay,
    Mean,
    NonMonotone,
    Plateau,
    PowerEMA,
    Window,
    average_of,
)
from gadam.optim import Gadam, GadamX, Padam, PadamW, backends

if TYPE_CHECKING:
    from gadam import schedule
    from gadam.average.batchnorm import refresh_batchnorm
    from gadam.optim.lookahead import Lookahead

__version__ = "0.1.0"

__all__ = [
    "EMA",
    "Averaging",
    "Gadam",
    "GadamX",
    "IterateAverage",
    "LinearDecay",
    "Lookahead",
    "Mean",
    "NonMonotone",
    "Padam",
    "PadamW",
    "Plateau",
    "PowerEMA",
    "Window",
    "average_of",
    "backends",
    "refresh_batchnorm",
    "schedule",
]

# Import optional modules lazily.
_LAZY = {"Lookahead": "gadam.optim.lookahead", "refresh_batchnorm": "gadam.average.batchnorm"}


def __getattr__(name: str) -> object:
    from importlib import import_module

    if name == "schedule":
        return import_module("gadam.schedule")
    if name in _LAZY:
        value = globals()[name] = getattr(import_module(_LAZY[name]), name)
        return value
    raise AttributeError(f"module 'gadam' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
