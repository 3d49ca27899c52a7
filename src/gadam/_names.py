"""Names as people type them: forgiving, and with a hint where there is no such name."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from difflib import get_close_matches

__all__ = ["did_you_mean", "find"]


def did_you_mean(word: str, known: Iterable[str]) -> str | None:
    """The nearest of the known words, if one is near."""
    return next(iter(get_close_matches(word, list(known), n=1)), None)


def find(name: str, known: Mapping[str, str]) -> tuple[str | None, str | None]:
    """What a name stands for, cases and all but letters and digits aside; or else the nearest.

    >>> find("CIFAR-100", {"cifar100": "cifar100"})
    ('cifar100', None)
    >>> find("cifar1000", {"cifar100": "cifar100"})
    (None, 'cifar100')

    Args:
        name: as it was typed
        known: what each spelling stands for
    """
    plain = {_letters_and_digits(spelling): meant for spelling, meant in known.items()}
    asked = _letters_and_digits(name)
    near = None if asked in plain else did_you_mean(asked, plain)
    return plain.get(asked), plain[near] if near is not None else None


def _letters_and_digits(text: str) -> str:
    return re.sub("[^a-z0-9]", "", text.lower())
