"""Iterate averaging for PyTorch: Gadam, GadamX, and tools to use them."""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gadam import average as average
    from gadam import integrations as integrations
    from gadam import optim as optim
    from gadam import schedule
    from gadam.average import (
        EMA,
        Averaging,
        BlockAverages,
        IterateAverage,
        LinearDecay,
        Mean,
        NonMonotone,
        Plateau,
        PowerEMA,
        Window,
        average_of,
    )
    from gadam.average.batchnorm import refresh_batchnorm
    from gadam.optim import Gadam, GadamX, Padam, PadamW, backends
    from gadam.optim.lookahead import Lookahead

__version__ = "0.2.0"

__all__ = [
    "EMA",
    "Averaging",
    "BlockAverages",
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

# Import on first use: `gadam --help` does not wait for torch, nor do programs for what they do not
# use.
_MODULES = ("average", "integrations", "optim", "schedule")
_HOMES = {
    "Lookahead": "gadam.optim.lookahead",
    "refresh_batchnorm": "gadam.average.batchnorm",
    **dict.fromkeys(("Gadam", "GadamX", "Padam", "PadamW", "backends"), "gadam.optim"),
}


def __getattr__(name: str) -> object:
    if name in _MODULES:
        return import_module(f"gadam.{name}")
    if name not in __all__:
        raise AttributeError(f"module 'gadam' has no attribute {name!r}")
    value = getattr(import_module(_HOMES.get(name, "gadam.average")), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_MODULES})
