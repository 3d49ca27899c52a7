"""Averages of checkpoints on disk, of any training.

:func:`average` is ``gadam average`` as a function. It needs ``gadam[train]``.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gadam.checkpoints.averaging import average
    from gadam.checkpoints.errors import CheckpointError
    from gadam.checkpoints.provenance import Input, Provenance, read_provenance
    from gadam.checkpoints.weighting import relative_weights

__all__ = [
    "CheckpointError",
    "Input",
    "Provenance",
    "average",
    "read_provenance",
    "relative_weights",
]

# Import optional modules lazily.
_LAZY = {
    "CheckpointError": "errors",
    "Input": "provenance",
    "Provenance": "provenance",
    "average": "averaging",
    "read_provenance": "provenance",
    "relative_weights": "weighting",
}


def __getattr__(name: str) -> object:
    from importlib import import_module

    if name in _LAZY:
        value = globals()[name] = getattr(import_module(f"{__name__}.{_LAZY[name]}"), name)
        return value
    raise AttributeError(f"module 'gadam.checkpoints' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
