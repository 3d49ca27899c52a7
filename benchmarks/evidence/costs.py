"""CPU time of a step and of a whole run, with one average at most, as a user has it."""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import cycle, islice
from statistics import median

import torch
from torch import nn
from torch.optim import Optimizer

import gadam
from benchmarks.evidence import methods
from benchmarks.evidence.harness import EVALUATIONS
from benchmarks.evidence.methods import Knobs
from benchmarks.evidence.tasks import Workload
from gadam.runs.files import Document
from gadam.train import tasks as gadam_tasks

__all__ = ["ROWS", "STEPS", "measure"]

STEPS = 60  # measured, of each contender
LR, DECAY = 1e-3, 0.1
EVERY_STEP = gadam.Averaging(start=1)
INTERPOLATED = gadam.Averaging(start=1, interpolation=0.9)


def _rival(base: str) -> Callable[[nn.Module], Optimizer]:
    knobs = Knobs(LR, DECAY, methods.OWN_KNOB.get(base, (0.9,))[0])
    return lambda model: methods.build(base, model, knobs, total=1000)


def _ours(
    kind: Callable[..., Optimizer], plan: gadam.Averaging | None = None, beta1: float = 0.9
) -> Callable[[nn.Module], Optimizer]:
    """Use the backend that a user has: the harness runs the reference implementation instead."""
    built_in = {} if plan is None else {"average": plan}
    return lambda model: kind(
        model.parameters(), LR, betas=(beta1, 0.999), weight_decay=DECAY, **built_in
    )


def _averaged(base: str) -> Callable[[nn.Module], Optimizer]:
    def build(model: nn.Module) -> Optimizer:
        optimizer = _rival(base)(model)
        gadam.IterateAverage(optimizer, EVERY_STEP)
        return optimizer

    return build


# Averages take a sample in every step: no plan costs more.
ROWS: dict[str, Callable[[nn.Module], Optimizer]] = {
    "AdamW": _rival("adamw"),
    "Gadam": _ours(gadam.Gadam, EVERY_STEP),
    "Gadam, interpolated": _ours(gadam.Gadam, INTERPOLATED, beta1=0.0),
    "PadamW": _ours(gadam.PadamW),
    "GadamX": _ours(gadam.GadamX, EVERY_STEP),
    "GadamX, interpolated": _ours(gadam.GadamX, INTERPOLATED, beta1=0.0),
    "SGD": _rival("sgd"),
    "SWA": _averaged("sgd"),
    "Gadam + Lookahead": lambda model: gadam.Lookahead(_ours(gadam.Gadam, EVERY_STEP)(model)),
    "Schedule-Free AdamW": _rival("schedule-free-adamw"),
    "GPA-AdamW": _rival("gpa"),
    "Muon": _rival("muon"),
    "Muon, average": _averaged("muon"),
}


class _Contender:
    """A model in training, and its next step."""

    def __init__(self, workload: Workload, build: Callable[[nn.Module], Optimizer]) -> None:
        self.task = gadam_tasks.build(workload.recipe, 0, torch.device("cpu"), None)
        self.batches = cycle(islice(self.task.batches(0), 8))
        self.optimizer = build(self.task.model)

    def step(self) -> None:
        batch = next(self.batches)
        self.optimizer.zero_grad()
        loss, _ = self.task.loss(self.task.model, batch)
        loss.backward()
        self.optimizer.step()


def measure(workload: Workload, steps: int = STEPS) -> Document:
    """Measure all contenders in turn, step by step.

    Args:
        workload: The task.
        steps: How many steps of each.

    Returns:
        CPU milliseconds: medians over the steps of each contender, an evaluation on validation data
        with its BatchNorm refresh, and whole runs in which one point is evaluated.
    """
    torch.set_num_threads(1)
    found = {label: _Contender(workload, build) for label, build in ROWS.items()}
    times: dict[str, list[float]] = {label: [] for label in found}
    for index in range(steps + 3):
        for label, contender in found.items():
            spent = _cpu_milliseconds(contender.step)
            if index >= 3:  # the first ones allocate
                times[label].append(spent)
    task = found["AdamW"].task
    batches = [*islice(task.refresh(0), workload.refresh)]

    def evaluate() -> None:
        gadam.refresh_batchnorm(task.model, batches)
        task.evaluate(task.model, "validation")

    evaluation = median(_cpu_milliseconds(evaluate) for _ in range(3))
    step = {label: median(numbers) for label, numbers in times.items()}
    total = sum(map(task.steps, range(workload.recipe.epochs)))
    return {
        "step": step,
        "evaluation": evaluation,
        "run": {label: total * one + EVALUATIONS * evaluation for label, one in step.items()},
        "steps": total,
    }


def _cpu_milliseconds(work: Callable[[], object]) -> float:
    start = time.process_time()
    work()
    return 1000 * (time.process_time() - start)
