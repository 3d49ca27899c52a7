"""The global generators of random numbers: seeding them, and code that has its own."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor

__all__ = ["Generators", "isolated", "seed_all"]

T = TypeVar("T")


def seed_all(seed: int) -> None:
    """Seed the global generators of torch, of ``random``, and of NumPy if it is imported.

    Args:
        seed: The seed.
    """
    torch.manual_seed(seed)
    _seed_others(seed)


def _seed_others(seed: int) -> None:
    random.seed(seed)
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed(seed % 2**32)


class Generators:
    """Separate states of the global generators on the CPU, for code that uses them.

    Args:
        seed: The seed of all of them. None keeps their present states.

    Example:
        >>> own = Generators(seed=1)
        >>> with own.active():
        ...     first = torch.rand(2)
        >>> _ = torch.rand(2)  # does not matter
        >>> with own.active():
        ...     second = torch.rand(2)
        >>> torch.cat([first, second]).equal(torch.rand(4, generator=torch.manual_seed(1)))
        True
    """

    def __init__(self, seed: int | None = None) -> None:
        outside = self._states()
        if seed is not None:
            torch.default_generator.manual_seed(seed)
            _seed_others(seed)
        self._inside = self._states()
        self._restore(outside)

    @staticmethod
    def _states() -> tuple[Tensor, Any, Any]:
        numpy = sys.modules.get("numpy")
        state = None if numpy is None else numpy.random.get_state()
        return torch.get_rng_state(), random.getstate(), state

    @staticmethod
    def _restore(states: tuple[Tensor, Any, Any]) -> None:
        torch.set_rng_state(states[0])
        random.setstate(states[1])
        if states[2] is not None:
            sys.modules["numpy"].random.set_state(states[2])

    @contextmanager
    def active(self) -> Iterator[None]:
        """Use these states in a block, and continue from them in the next one."""
        outside = self._states()
        self._restore(self._inside)
        try:
            yield
        finally:
            self._inside = self._states()
            self._restore(outside)


def isolated(start: Callable[[], Iterable[T]], seed: int) -> Iterator[T]:
    """Iterate over items that draw from generators of their own.

    Args:
        start: Returns the items.
        seed: The seed of the generators.
    """
    generators = Generators(seed)
    with generators.active():
        iterator = iter(start())
    while True:
        with generators.active():
            try:
                item = next(iterator)
            except StopIteration:
                return
        yield item
