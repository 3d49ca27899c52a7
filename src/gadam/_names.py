"""Words of messages: lookup of names that users type, suggestions, and plurals."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from pathlib import Path

__all__ = ["count", "did_you_mean", "find", "is_path", "is_written_as_path"]


def count(number: int, noun: str) -> str:
    """Return a number with its noun, in the plural unless it is one.

    Args:
        number: The number.
        noun: The noun in the singular. Its plural ends in s.

    Example:
        >>> count(1, "run"), count(1200, "run")
        ('1 run', '1,200 runs')
    """
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def did_you_mean(word: str, known: Iterable[str]) -> str | None:
    """Return the known word that is closest to a misspelled one, or None if none is close.

    Args:
        word: The misspelled word.
        known: The words to suggest.
    """
    return next(iter(get_close_matches(word, list(known), n=1)), None)


def find(name: str, known: Mapping[str, str]) -> tuple[str | None, str | None]:
    """Look up a name. Only letters and digits count, and case does not.

    Args:
        name: The name as the user typed it.
        known: The canonical name of each accepted spelling.

    Returns:
        The canonical name, or None if the name is unknown; then the suggestion for an unknown name,
        or None.

    Example:
        >>> find("CIFAR-100", {"cifar100": "cifar100"})
        ('cifar100', None)
        >>> find("cifar1000", {"cifar100": "cifar100"})
        (None, 'cifar100')
    """
    canonical = {_letters_and_digits(spelling): meaning for spelling, meaning in known.items()}
    typed = _letters_and_digits(name)
    close = None if typed in canonical else did_you_mean(typed, canonical)
    return canonical.get(typed), canonical[close] if close is not None else None


def is_written_as_path(name: str) -> bool:
    """Return True if a name that a user typed can only be a path.

    Args:
        name: As the user typed it.

    Example:
        >>> [is_written_as_path(name) for name in ("photos/flowers", "digits.npz", "cifar10")]
        [True, True, False]
    """
    return name.startswith((".", "~")) or Path(name).name != name or name.endswith(_DATA_SUFFIXES)


def is_path(name: str) -> bool:
    """Return True if a name that a user typed is a path: it is written as one, or is a folder.

    Args:
        name: As the user typed it.
    """
    return is_written_as_path(name) or (name != "" and Path(name).is_dir())


_DATA_SUFFIXES = (".npz", ".txt")


def _letters_and_digits(text: str) -> str:
    return re.sub("[^a-z0-9]", "", text.lower())
