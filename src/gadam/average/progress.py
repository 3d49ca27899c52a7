"""The progress of an average: its phase and its counters."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

__all__ = ["Phase", "Progress"]

Phase = Literal["waiting", "averaging", "finished"]
_PHASES: tuple[Phase, ...] = ("waiting", "averaging", "finished")


@dataclass(frozen=True)
class Progress:
    """The progress of an average.

    Attributes:
        phase: ``"waiting"``, ``"averaging"`` or ``"finished"``.
        steps: The steps of the optimizer so far.
        begun: The first step to sample, once the phase is ``"averaging"``.
        count: The samples taken.
        skipped: The samples that were due but not finite.
        memory: The state of the plan's trigger.
    """

    phase: Phase = "waiting"
    steps: int = 0
    begun: int = 0
    count: int = 0
    skipped: int = 0
    memory: tuple[float, ...] = ()

    def numbers(self) -> dict[str, float]:
        """Return everything as numbers by name."""
        return {
            "phase": _PHASES.index(self.phase),
            "steps": self.steps,
            "begun": self.begun,
            "count": self.count,
            "skipped": self.skipped,
            **{f"memory_{i}": value for i, value in enumerate(self.memory)},
        }

    def pack(
        self, before: Progress | None = None, packed_before: dict[str, Tensor] | None = None
    ) -> dict[str, Tensor]:
        """Return everything as 0-dim tensors on the host.

        Every kind of checkpoint can store those, and torch.compile does not recompile when their
        values change.

        Args:
            before: The progress that was packed last.
            packed_before: The result of packing it. Tensors that did not change are reused.
        """
        old = before.numbers() if before is not None else {}
        reusable = packed_before if packed_before is not None else {}
        return {
            name: reusable[name] if old.get(name) == value else torch.tensor(value, device="cpu")
            for name, value in self.numbers().items()
        }

    @classmethod
    def unpack(cls, packed: Mapping[str, object]) -> Progress:
        """Undo :meth:`pack`.

        Args:
            packed: The tensors, or plain numbers, by name.

        Raises:
            KeyError, IndexError, TypeError: If ``packed`` is not a packed progress.
        """
        numbers = {name: torch.as_tensor(value).item() for name, value in packed.items()}
        memory = [name for name in numbers if name.startswith("memory_")]
        return cls(
            phase=_PHASES[int(numbers["phase"])],
            steps=int(numbers["steps"]),
            begun=int(numbers["begun"]),
            count=int(numbers["count"]),
            skipped=int(numbers["skipped"]),
            memory=tuple(float(numbers[f"memory_{i}"]) for i in range(len(memory))),
        )
