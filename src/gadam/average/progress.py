"""The progress of an average: its phase and its counters, on the host or on a device."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

__all__ = ["Numbers", "Phase", "Progress", "Tracker", "is_live"]

Phase = Literal["waiting", "averaging", "finished"]
_PHASES: tuple[Phase, ...] = ("waiting", "averaging", "finished")
_CLOCK, _COUNTERS = 3, 4  # the lengths of the two parts of a packed progress
_PLAN_UNIT = 2.0**-48  # a fingerprint of 47 bits is a fraction below 1/2
_LIVE = 0.5  # added to the first number of a vector that is in use
_LARGEST = 2**53  # the counters that float64 holds exactly


@dataclass(frozen=True)
class Progress:
    """The progress of an average.

    Attributes:
        phase: ``"waiting"``, ``"averaging"`` or ``"finished"``.
        steps: The steps of the optimizer so far.
        begun: The first step to sample, once the phase is ``"averaging"``.
        count: The samples taken.
        skipped: The samples that were due but not finite.
        first: The step of the first sample, or 0 without a sample.
        last: The step of the last sample, or 0 without a sample.
        memory: The state of the plan's trigger.
        plan: The fingerprint of the plan, an odd number below 2⁴⁷, or 0 if it is not known.
    """

    phase: Phase = "waiting"
    steps: int = 0
    begun: int = 0
    count: int = 0
    skipped: int = 0
    first: int = 0
    last: int = 0
    memory: tuple[float, ...] = ()
    plan: int = 0

    @property
    def clock(self) -> tuple[float, ...]:
        """The phase, the steps and the first step to sample, as numbers."""
        return _PHASES.index(self.phase), self.steps, self.begun

    @property
    def counters(self) -> tuple[float, ...]:
        """The counters of samples, and the steps of the first and the last one, as numbers."""
        return self.count, self.skipped, self.first, self.last

    def pack(self, device: torch.device | str = "cpu", live: bool = False) -> Tensor:
        """Return everything as one small vector. Every kind of checkpoint can store that.

        The plan's fingerprint is the fraction of the first number, so the vector has the length
        that it had before there was a fingerprint: a distributed checkpoint restores a tensor only
        into one of its own size. In float32 there is no room for it, and it is left out.

        Args:
            device: The device of the vector.
            live: Mark the vector, for :func:`is_live` to tell it from one in a checkpoint.
        """
        vector = _vector((*self.clock, *self.counters, *self.memory), device)
        if vector.dtype == torch.float64:
            vector[0] += self.plan * _PLAN_UNIT
        if live:
            vector[0] += _LIVE
        return vector

    @classmethod
    def unpack(cls, packed: Tensor) -> Progress:
        """Undo :meth:`pack`.

        Args:
            packed: The vector.

        Raises:
            TypeError, ValueError, IndexError: If ``packed`` is not a packed progress.
        """
        if not isinstance(packed, Tensor) or packed.dim() != 1:
            raise TypeError(f"a progress is a vector, not {packed!r}")
        numbers = packed.tolist()
        counted = numbers[: _CLOCK + _COUNTERS]
        if len(counted) < _CLOCK + _COUNTERS:
            raise ValueError(f"it has {len(counted)} numbers")
        if not all(isinstance(n, (int, float)) and 0 <= n <= _LARGEST for n in counted):
            raise ValueError(f"its counters are {counted}")
        phase = math.floor(counted[0])
        plan = (counted[0] - phase) % _LIVE / _PLAN_UNIT
        if phase >= len(_PHASES):
            raise ValueError(f"its phase is {counted[0]}")
        if packed.dtype != torch.float64:  # a cast has rounded the fingerprint
            plan = 0
        if plan and plan % 2 != 1:
            raise ValueError(f"its phase is {counted[0]}")
        if any(n != int(n) for n in counted[1:]):
            raise ValueError(f"its counters are {counted}")
        memory = numbers[_CLOCK + _COUNTERS :]
        return cls.of((phase, *counted[1:_CLOCK]), counted[_CLOCK:], memory, int(plan))

    @classmethod
    def of(
        cls,
        clock: tuple[float, ...] | list[float],
        counters: tuple[float, ...] | list[float],
        memory: tuple[float, ...] | list[float],
        plan: int = 0,
    ) -> Progress:
        """Undo :attr:`clock` and :attr:`counters`.

        Args:
            clock: The phase, the steps and the first step to sample.
            counters: The counters of samples, and the steps of the first and the last one.
            memory: The state of the plan's trigger.
            plan: The fingerprint of the plan.
        """
        phase, steps, begun = map(int, clock)
        count, skipped, first, last = map(int, counters)
        memory = tuple(map(float, memory))
        return cls(_PHASES[phase], steps, begun, count, skipped, first, last, memory, plan)


def is_live(packed: Tensor) -> bool:
    """Return True if a vector was packed as a live one.

    Args:
        packed: The vector.
    """
    return packed.dim() == 1 and len(packed) > 0 and float(packed[0]) % 1 >= _LIVE


def _vector(values: tuple[float, ...], device: torch.device | str) -> Tensor:
    # Counters are exact in float64 up to 9e15, and in float32, where that is all, up to 2e7.
    wide = torch.float32 if torch.device(device).type == "mps" else torch.float64
    return torch.tensor(values, dtype=wide, device=device)


class Numbers:
    """A few numbers that are on the host, on a device, or both.

    Args:
        values: The numbers.

    Attributes:
        known: The numbers as the host last knew them.
        unread: How often a device has replaced them since.
    """

    def __init__(self, values: tuple[float, ...]) -> None:
        self.known = values
        self.unread = 0
        self._tensor: Tensor | None = None

    @property
    def on_host(self) -> bool:
        """Whether the host knows the numbers."""
        return not self.unread

    def get(self) -> tuple[float, ...]:
        """Return the numbers. This waits for the device if they have changed there."""
        if self.unread and self._tensor is not None:
            self.known, self.unread = tuple(self._tensor.tolist()), 0
        return self.known

    def set(self, values: tuple[float, ...]) -> None:
        """Replace the numbers on the host.

        Args:
            values: The numbers.
        """
        self.known, self.unread, self._tensor = values, 0, None

    def on(self, device: torch.device) -> Tensor:
        """Return the numbers as a vector on a device.

        Args:
            device: The device.
        """
        if self._tensor is None:
            self._tensor = _vector(self.known, device)
        return self._tensor.to(device, non_blocking=True)

    def replace(self, tensor: Tensor) -> None:
        """Replace the numbers on a device.

        Args:
            tensor: The numbers as a vector.
        """
        self._tensor = tensor
        self.unread += 1


class Tracker:
    """The progress of an average while it runs.

    A step on an accelerator changes the counters there, without waiting for them. If GradScaler's
    verdict is on the accelerator, the number of steps is known only there, too. Reading the
    :attr:`progress` waits for both.

    Args:
        progress: The initial progress.

    Attributes:
        clock: The phase, the steps and the first step to sample.
        counters: The counters of samples, and the steps of the first and the last one.
        memory: The state of the plan's trigger.
        plan: The fingerprint of the plan.
    """

    def __init__(self, progress: Progress) -> None:
        self.clock, self.counters = Numbers(progress.clock), Numbers(progress.counters)
        self.memory, self.plan = progress.memory, progress.plan

    @property
    def progress(self) -> Progress:
        """The progress, read back from the device if necessary."""
        return Progress.of(self.clock.get(), self.counters.get(), self.memory, self.plan)

    @progress.setter
    def progress(self, progress: Progress) -> None:
        self.clock.set(progress.clock)
        self.counters.set(progress.counters)
        self.memory, self.plan = progress.memory, progress.plan
