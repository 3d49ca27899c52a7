"""CPU time of a step and of an evaluated point, with one average at most, as a user has it."""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import cycle, islice
from statistics import median

import torch

import gadam
from benchmarks.evidence import methods
from benchmarks.evidence.methods import BASES, Knobs
from benchmarks.evidence.tasks import Workload
from gadam.runs.files import Document
from gadam.train import tasks as gadam_tasks

__all__ = ["measure"]

# The contenders: a base, and whether its last half is averaged.
ROWS: dict[str, tuple[str, bool]] = {
    "AdamW": ("adamw", False),
    "AdamW + average (Gadam)": ("adamw", True),
    "PadamW": ("padamw", False),
    "PadamW + average (GadamX)": ("padamw", True),
    "SGD": ("sgd", False),
    "SGD + average (SWA)": ("sgd", True),
    "Gadam + Lookahead": ("gadam-lookahead", False),
    "Schedule-Free AdamW": ("schedule-free-adamw", False),
    "GPA-AdamW": ("gpa", False),
    "Muon": ("muon", False),
}
assert {base for base, _ in ROWS.values()} <= {*BASES}


class _Contender:
    """A model in training, and its next step."""

    def __init__(self, workload: Workload, base: str, is_averaged: bool) -> None:
        self.task = gadam_tasks.build(workload.recipe, 0, torch.device("cpu"), None)
        self.batches = cycle(islice(self.task.batches(0), 8))
        knobs = Knobs(1e-3, 0.1, methods.OWN_KNOB.get(base, (0.9,))[0])
        self.optimizer = methods.build(base, self.task.model, knobs, total=1000)
        if is_averaged:
            gadam.IterateAverage(self.optimizer, gadam.Averaging(start=1))

    def step(self) -> None:
        batch = next(self.batches)
        self.optimizer.zero_grad()
        loss, _ = self.task.loss(self.task.model, batch)
        loss.backward()
        self.optimizer.step()


def measure(workload: Workload, steps: int) -> Document:
    """Measure all contenders in turn, step by step.

    Args:
        workload: The task.
        steps: How many steps of each.

    Returns:
        CPU milliseconds: medians over the steps of each contender, a BatchNorm refresh, and an
        evaluation on validation data.
    """
    torch.set_num_threads(1)
    found = {label: _Contender(workload, *row) for label, row in ROWS.items()}
    times: dict[str, list[float]] = {label: [] for label in found}
    for index in range(steps + 3):
        for label, contender in found.items():
            spent = _cpu_milliseconds(contender.step)
            if index >= 3:  # the first ones allocate
                times[label].append(spent)
    task = found["AdamW"].task
    batches = [*islice(task.refresh(0), workload.refresh)]
    refresh = _cpu_milliseconds(lambda: gadam.refresh_batchnorm(task.model, batches))
    evaluate = _cpu_milliseconds(lambda: task.evaluate(task.model, "validation"))
    return {
        "task": workload.name,
        "steps": steps,
        "torch": torch.__version__,
        "step": {label: median(numbers) for label, numbers in times.items()},
        "refresh": refresh,
        "evaluate": evaluate,
        "run": sum(map(task.steps, range(workload.recipe.epochs))),
    }


def _cpu_milliseconds(work: Callable[[], object]) -> float:
    start = time.process_time()
    work()
    return 1000 * (time.process_time() - start)
