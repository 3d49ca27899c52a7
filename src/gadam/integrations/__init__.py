"""Averages in the trainers of other frameworks. Each module needs the extra of the same name.

A module is imported on first use: ``gadam.integrations.lightning`` needs no import of its own.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from types import ModuleType

    from gadam.integrations import accelerate, fabric, lightning, transformers

__all__ = ["accelerate", "fabric", "lightning", "transformers"]


def __getattr__(name: str) -> ModuleType:
    if name not in __all__:
        raise AttributeError(f"module 'gadam.integrations' has no attribute {name!r}")
    return import_module(f"gadam.integrations.{name}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
