"""The error of this package."""

from __future__ import annotations

from collections.abc import Sequence

from gadam._errors import UserError

__all__ = ["CheckpointError", "enumerated"]


class CheckpointError(UserError, ValueError):
    """Checkpoints cannot be averaged. The message says why, and what to do."""


def enumerated(items: Sequence[str], limit: int = 10) -> str:
    """Return items as text, at most some of them.

    Args:
        items: The items.
        limit: The number of items to name.

    Example:
        >>> enumerated(["a", "b", "c"], limit=2)
        'a, b, and 1 more'
    """
    shown = ", ".join(items[:limit])
    return shown if len(items) <= limit else f"{shown}, and {len(items) - limit} more"
