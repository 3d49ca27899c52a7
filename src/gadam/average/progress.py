"""How far an average has come."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

__all__ = ["Phase", "Progress"]

Phase = Literal["waiting", "averaging", "finished"]
_PHASES: tuple[Phase, ...] = ("waiting", "averaging", "finished")


@dataclass(frozen=True)
class Progress:
    """How far an average has come."""

    phase: Phase = "waiting"
    steps: int = 0  # steps of the optimiser seen
    begun: int = 0  # the first step to sample, once phase is "averaging"
    count: int = 0  # samples taken
    skipped: int = 0  # samples that were due and not finite
    memory: tuple[float, ...] = ()  # the trigger's

    def numbers(self) -> dict[str, float]:
        """Everything as numbers by name."""
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
        """As 0-dim tensors on the host.

        Every kind of checkpoint can hold those, and torch.compile does not make a new graph for each
        new value. Given what was packed before, only what has changed is made anew.
        """
        old = before.numbers() if before is not None else {}
        kept = packed_before if packed_before is not None else {}
        return {
            name: kept[name] if old.get(name) == value else torch.tensor(value, device="cpu")
            for name, value in self.numbers().items()
        }

    @classmethod
    def unpack(cls, packed: dict[str, Any]) -> Progress:
        """Undo :meth:`pack`. Raises KeyError, IndexError or TypeError for what it did not make."""
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
