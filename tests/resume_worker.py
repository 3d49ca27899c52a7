"""Train every case of the resume test: without interruption, up to a checkpoint, or from one.

Run the last one as a program, so that only a file passes from the checkpoint to it:

    python resume_worker.py resume OUT CHECKPOINT
"""

from __future__ import annotations

import itertools
import sys
from typing import Any

import torch

import gadam
from contract import BY_NAME, ROWS, parameters, set_gradients

K = 5  # steps before the checkpoint, and after it

PLANS: dict[str, gadam.Averaging] = {
    "before": gadam.Averaging(start=K + 3),
    "at": gadam.Averaging(start=K),
    "next": gadam.Averaging(start=K + 1),
    "after": gadam.Averaging(start=2, every=2),
    "plateau waiting": gadam.Averaging(start=gadam.Plateau(4, "min")),
    "plateau averaging": gadam.Averaging(start=gadam.Plateau(1, "min")),
    "non-monotone": gadam.Averaging(start=gadam.NonMonotone(3)),
    "offloaded": gadam.Averaging(start=2, device="cpu"),
    "ema": gadam.Averaging(start=2, weighting=gadam.EMA(0.7)),
    "window": gadam.Averaging(start=2, weighting=gadam.Window(3)),
    "wide": gadam.Averaging(start=2, dtype=torch.float64),
}


def cases() -> list[tuple[str, str, str, bool]]:
    """Return (row, plan, dtype, foreach): all rows with some plans, some rows with all plans."""
    some = [(row.name, "after", "float32", False) for row in ROWS]
    some += [(row.name, "at", "bfloat16", False) for row in ROWS]
    some += [(row.name, "after", "float32", True) for row in ROWS if row.flags]
    some += list(
        itertools.product(
            ["Gadam", "GadamX", "Gadam-LH", "SWA"], PLANS, ["float32", "bfloat16"], [False]
        )
    )
    return list(dict.fromkeys(some))


class Case:
    """An optimizer with a built-in or an attached average, or none."""

    def __init__(self, row: str, plan: str, dtype: str, foreach: bool) -> None:
        self.params = parameters(getattr(torch, dtype))
        averaging = PLANS[plan]
        self.attached: gadam.IterateAverage | None = None
        if row == "SWA":
            self.optimizer: Any = torch.optim.SGD(self.params, lr=0.01, momentum=0.9)
            self.attached = gadam.IterateAverage(self.optimizer, averaging)
        else:
            keywords: dict[str, Any] = {"foreach": True} if foreach else {}
            if BY_NAME[row].averages:
                keywords["average"] = averaging
            self.optimizer = BY_NAME[row](self.params, **keywords)
        self.average = self.attached or getattr(self.optimizer, "average", None)

    def train(self, steps: range) -> None:
        for step in steps:
            set_gradients(self.params, step)
            self.optimizer.step()
            if self.average is not None:
                # a loss that falls until step 3 and then rises
                self.average.observe(abs(step - 3.0))

    def state(self) -> dict[str, Any]:
        state = {
            "params": [p.detach() for p in self.params],
            "optimizer": self.optimizer.state_dict(),
        }
        if self.attached is not None:
            state["average"] = self.attached.state_dict()
        return state

    def load(self, state: dict[str, Any]) -> None:
        for p, saved in zip(self.params, state["params"]):
            p.data.copy_(saved)
        self.optimizer.load_state_dict(state["optimizer"])
        if self.attached is not None:
            self.attached.load_state_dict(state["average"])


def main(mode: str, out: str, checkpoint: str | None = None) -> None:
    saved = torch.load(checkpoint, weights_only=True) if checkpoint else {}
    result = {}
    for arguments in cases():
        case = Case(*arguments)
        if mode == "resume":
            case.load(saved[repr(arguments)])
        first, last = {"straight": (1, 2 * K), "save": (1, K), "resume": (K + 1, 2 * K)}[mode]
        case.train(range(first, last + 1))
        result[repr(arguments)] = case.state()
    torch.save(result, out)


if __name__ == "__main__":
    main(*sys.argv[1:])
