"""The training loop: one for every task, optimiser, schedule and average.

What decides an epoch is the recipe, the seed, the epoch's number, and the state after the epoch
before: nothing else, so a run that was killed goes on to the very same numbers.
"""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import nn

import gadam
from gadam.analysis.weights import norms
from gadam.train import optimizers, task
from gadam.train.recipe import Average, Recipe
from gadam.train.record import Run

__all__ = ["Stopped", "train"]

# As much as a killed run may lose; a checkpoint costs well below 1 % of it.
CHECKPOINT_SECONDS = float(os.environ.get("GADAM_CHECKPOINT_SECONDS", 20))
REPORT_SECONDS = 0.1


class Stopped(Exception):
    """The run was asked to stop. Its folder holds all that is needed to go on."""


def train(
    recipe: Recipe,
    folder: str | Path,
    *,
    seed: int = 0,
    data_dir: str | None = None,
    device: str | torch.device = "cpu",
    threads: int = 1,
    label: str = "",
    progress: Callable[[float, dict[str, Any] | None], None] = lambda epochs, line: None,
    notice: Callable[[str], None] = lambda sentence: None,
    should_stop: Callable[[], bool] = lambda: False,
) -> dict[str, Any]:
    """Train by a recipe, or go on where the folder's run was left. Gives the run's result.

    Args:
        recipe: what to do
        folder: where the run is recorded
        seed: of the initial weights, the order of the data and every other chance
        data_dir: where data sets are
        device: where to compute
        threads: on the CPU
        label: what the run is called beside others
        progress: is told how many epochs are done, and each epoch's line of the record
        notice: is told what was found damaged
        should_stop: asked at every step; True raises :class:`Stopped`
    """
    run = Run(folder, recipe, seed, label)
    with run.locked():
        torch.set_num_threads(run.begin(threads))
        if run.result is not None:
            return run.result
        place = torch.device(device)
        if place.type == "cuda":
            torch.cuda.reset_peak_memory_stats(place)
        try:
            result = _train(run, place, data_dir, progress, notice, should_stop)
        except Stopped:
            raise
        except Exception as error:
            run.fail(f"{type(error).__name__}: {error}")
            raise
        run.finish(result)
        return result


def _train(
    run: Run,
    device: torch.device,
    data_dir: str | None,
    progress: Callable[[float, dict[str, Any] | None], None],
    notice: Callable[[str], None],
    should_stop: Callable[[], bool],
) -> dict[str, Any]:
    recipe, seed = run.recipe, run.seed
    problem = task.build(recipe, seed, device, data_dir)
    model = problem.model
    optimizer, average = optimizers.build(
        recipe, model, task.steps_before_averaging(recipe, problem), problem.mode
    )
    scaler = torch.amp.GradScaler(device.type, enabled=recipe.amp == "fp16")
    forward: Any = model
    if recipe.compile:
        # What was compiled for a run before, or a graph that learns of sizes as they come, would make
        # the last bits depend on what the process has seen.
        torch._dynamo.reset()
        forward = torch.compile(model, dynamic=False)
    finished = False

    done, state = run.load()
    for sentence in (*run.damaged, *problem.notices):
        notice(sentence)
    if state is not None:
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        if average is not None:
            average.load_state_dict(state["average"])
        scaler.load_state_dict(state["scaler"])
        finished = state["finished"]

    saved = time.monotonic()
    while done < recipe.epochs and not finished:
        epoch = done
        clock = _Clock()
        rate = recipe.optimizer.lr * optimizers.rate_factor(recipe, epoch)
        torch.manual_seed(task.seed_for(seed, epoch, "noise in the network"))

        model.train()
        total, examples = torch.zeros((), dtype=torch.float64, device=device), 0
        reported, steps = time.monotonic(), problem.steps(epoch)
        for step, batch in enumerate(problem.batches(epoch)):
            if should_stop():
                raise Stopped
            for group in optimizer.param_groups:
                group["lr"] = rate * problem.rate_factor(batch)
            optimizer.zero_grad()
            for part, share in problem.split(batch, recipe.accumulate):
                with _autocast(recipe, device):
                    loss, size = problem.loss(forward, part)
                scaler.scale(loss * share).backward()
                total += loss.detach() * size
                examples += size
            if recipe.clip is not None:
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(model.parameters(), recipe.clip)
            scaler.step(optimizer)
            scaler.update()
            if time.monotonic() - reported > REPORT_SECONDS:
                reported = time.monotonic()
                progress(epoch + (step + 1) / steps, None)
        done = epoch + 1
        if average is not None and _due_after(recipe.average, done, average.phase):
            average.update()
        clock.lap("train")

        line: dict[str, Any] = {
            "epoch": done,
            "lr": rate,
            "train_loss": float(total) / max(examples, 1),
            "samples": average.count if average is not None else 0,
            "norms": {name: float(f"{norm:.6g}") for name, norm in norms(model).items()},
        }
        finished = not math.isfinite(line["train_loss"])
        if done % recipe.evaluate_every == 0 or done == recipe.epochs or finished:
            judged = line["iterate"] = _measure(problem, epoch, recipe, nullcontext(), clock)
            if average is not None and line["samples"]:
                judged = line["average"] = _measure(
                    problem, epoch, recipe, average.applied(model), clock
                )
            finished |= not all(math.isfinite(m[problem.metric]) for m in judged.values())
            if average is not None and "validation" in judged:
                finished |= average.observe(judged["validation"][problem.metric])
        if _kept(recipe, done):
            run.keep_iterate(done, model.state_dict(), recipe.keep)
        line["seconds"] = clock.laps
        run.append(line)
        progress(done, line)

        if time.monotonic() - saved > CHECKPOINT_SECONDS or done == recipe.epochs or finished:
            run.save(
                done,
                {
                    "model": model.state_dict(),
                    "optimizer": optimizer.state_dict(),
                    "average": average.state_dict() if average is not None else None,
                    "scaler": scaler.state_dict(),
                    "finished": finished,
                },
            )
            saved = time.monotonic()
    return _result(run, problem.model, device)


def _due_after(plan: Average | None, epochs: int, phase: str) -> bool:
    """Whether a plan that samples once an epoch samples now."""
    if plan is None or plan.every != "epoch":
        return False
    return epochs > plan.start if isinstance(plan.start, int) else phase == "averaging"


def _kept(recipe: Recipe, epochs: int) -> bool:
    """Whether the weights after so many epochs may be among the last that are to be kept."""
    triggered = recipe.average is not None and not isinstance(recipe.average.start, int)
    return recipe.keep > 0 and (triggered or epochs > recipe.epochs - recipe.keep)


def _autocast(recipe: Recipe, device: torch.device) -> AbstractContextManager[Any]:
    if recipe.amp is None:
        return nullcontext()
    dtype = torch.bfloat16 if recipe.amp == "bf16" else torch.float16
    return torch.autocast(device.type, dtype=dtype)


def _measure(
    problem: task.Task,
    epoch: int,
    recipe: Recipe,
    applied: AbstractContextManager[Any],
    clock: _Clock,
) -> dict[str, dict[str, float]]:
    """How well a point does: the one that is in the model once it is ``applied``."""
    with applied:
        if recipe.refresh_batchnorm:
            gadam.refresh_batchnorm(problem.model, problem.refresh(epoch))
        clock.lap("refresh")
        measured = {part: problem.evaluate(problem.model, part) for part in problem.parts}
        clock.lap("evaluate")
    return measured


class _Clock:
    """Seconds by what they were spent on."""

    def __init__(self) -> None:
        self.laps = {"train": 0.0, "refresh": 0.0, "evaluate": 0.0}
        self._last = time.perf_counter()

    def lap(self, name: str) -> None:
        now = time.perf_counter()
        self.laps[name] = round(self.laps[name] + now - self._last, 4)
        self._last = now


def _result(run: Run, model: nn.Module, device: torch.device) -> dict[str, Any]:
    lines = run.lines
    last = lines[-1]
    seconds = {
        key: round(sum(line["seconds"][key] for line in lines), 3) for key in last["seconds"]
    }
    judged = last.get("average") or last["iterate"]
    diverged = last["train_loss"] is None or any(
        measured[run.recipe.metric] is None for measured in judged.values()
    )
    return {
        "status": "diverged" if diverged else "done",
        "epochs": last["epoch"],
        "iterate": last["iterate"],
        "average": last.get("average"),
        "samples": last["samples"],
        "parameters": sum(p.numel() for p in model.parameters()),
        "seconds": seconds,
        "peak_memory": _peak_memory(device),
    }


def _peak_memory(device: torch.device) -> int | None:
    """Bytes: of the device's allocator, or of the process, with what it ran before."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    try:
        import resource
    except ImportError:  # not on Windows
        return None
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
