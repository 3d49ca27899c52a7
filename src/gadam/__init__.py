"""Iterate averaging that works in practice: Gadam, GadamX and what belongs around them."""

from typing import TYPE_CHECKING, Any

from gadam.average import EMA, Averaging, IterateAverage, Mean, NonMonotone, Plateau, Window
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

# What not everybody wants is imported when it is first asked for.
_LATER = {"Lookahead": "gadam.optim.lookahead", "refresh_batchnorm": "gadam.average.batchnorm"}


def __getattr__(name: str) -> Any:
    from importlib import import_module

    if name == "schedule":
        return import_module("gadam.schedule")
    if name in _LATER:
        value = globals()[name] = getattr(import_module(_LATER[name]), name)
        return value
    raise AttributeError(f"module 'gadam' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
