"""The training loop: one for every task, optimizer, schedule and average.

An epoch is a function of the recipe, the seed, its number, and the state after the epoch before.
Nothing else enters, so a killed run resumes to exactly the same numbers.
"""

from __future__ import annotations

import math
import os
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

import gadam
from gadam.analysis.weights import norms
from gadam.runs.files import RunError, explain_os_error
from gadam.runs.folder import RunFolder
from gadam.runs.recipe import Average, Recipe
from gadam.runs.record import EpochRecord, RunResult, SplitMetrics
from gadam.train import optimizers, tasks

__all__ = ["Stopped", "train"]

# What a killed run may lose. A checkpoint costs well below 1 % of it.
CHECKPOINT_SECONDS = float(os.environ.get("GADAM_CHECKPOINT_SECONDS", 20))
REPORT_SECONDS = 0.1


class Stopped(Exception):
    """The run was asked to stop. Its folder holds everything needed to resume it."""


def train(
    recipe: Recipe,
    folder: str | Path,
    *,
    seed: int = 0,
    data_dir: str | None = None,
    device: str | torch.device = "cpu",
    threads: int = 1,
    label: str = "",
    accept_changed_code: bool = False,
    on_progress: Callable[[float, EpochRecord | None], None] = lambda epochs, record: None,
    on_notice: Callable[[str], None] = lambda sentence: None,
    should_stop: Callable[[], bool] = lambda: False,
) -> RunResult:
    """Train a recipe, or resume the run found in the folder.

    Args:
        recipe: What to train.
        folder: Where to record the run.
        seed: Seed of the initial weights, the data order and everything else that is random.
        data_dir: Where data sets are.
        device: Where to compute.
        threads: CPU threads.
        label: The run's name beside other runs.
        accept_changed_code: Resume a run although the user's own code has changed.
        on_progress: Called with the epochs done so far, and each epoch's record.
        on_notice: Called with sentences about damaged files and about the data.
        should_stop: Polled at every step; if it returns True, :class:`Stopped` is raised.

    Returns:
        The run's result.
    """
    recipe = tasks.with_code(recipe)
    run = RunFolder(folder, recipe, seed, label, accept_changed_code=accept_changed_code)
    with run.locked():
        try:
            torch.set_num_threads(run.begin(threads))
            if (known := run.result) is not None:
                return known
        except OSError as error:
            raise RunError(explain_os_error(error, Path(error.filename or folder))) from error
        place = torch.device(device)
        if place.type == "cuda":
            torch.cuda.reset_peak_memory_stats(place)
        try:
            result = _train(run, place, data_dir, on_progress, on_notice, should_stop)
            run.finish(result)
        except (Stopped, ConnectionError):  # interrupted, or the sweep's process died
            raise
        except OSError as error:
            run.fail(f"{type(error).__name__}: {error}")
            raise RunError(explain_os_error(error, Path(error.filename or folder))) from error
        except Exception as error:
            run.fail(f"{type(error).__name__}: {error}")
            raise
        _tell(run, on_notice)
        return result


def _tell(run: RunFolder, on_notice: Callable[[str], None]) -> None:
    while run.damaged:
        on_notice(run.damaged.pop(0))


def _train(
    run: RunFolder,
    device: torch.device,
    data_dir: str | None,
    on_progress: Callable[[float, EpochRecord | None], None],
    on_notice: Callable[[str], None],
    should_stop: Callable[[], bool],
) -> RunResult:
    recipe, seed = run.recipe, run.seed
    task = tasks.build(recipe, seed, device, data_dir)
    model = task.model
    optimizer, average = optimizers.build(
        recipe, model, tasks.steps_before_averaging(recipe, task), task.mode
    )
    blocks: gadam.BlockAverages | None = None
    scaler = torch.amp.GradScaler(device.type, enabled=recipe.amp == "fp16")
    forward: nn.Module = model
    if recipe.compile:
        # Graphs compiled for an earlier run, or specialized to sizes seen so far, would make the
        # last bits depend on the history of the process.
        torch.compiler.reset()
        forward = torch.compile(model, dynamic=False)  # type: ignore[assignment]
    finished = False

    done, state = run.load()
    _tell(run, on_notice)
    for sentence in task.notices:
        on_notice(sentence)
    fingerprint = getattr(task, "fingerprint", "")
    if run.history and run.history[0].extra.get("data", fingerprint) != fingerprint:
        on_notice(f"{recipe.data.name} changed after {run.folder} was started.")
    if recipe.blocks:
        folder = run.folder / "blocks"
        if state is None and folder.exists():  # of a process that was killed before its checkpoint
            shutil.rmtree(folder)
        blocks = gadam.BlockAverages(optimizer, folder, every=recipe.blocks)
    if state is not None:
        try:
            model.load_state_dict(state["model"])
            optimizer.load_state_dict(state["optimizer"])
            if average is not None:
                average.load_state_dict(state["average"])
            if blocks is not None:
                blocks.load_state_dict(state["blocks"])
            scaler.load_state_dict(state["scaler"])
            finished = bool(state["finished"])
        except (KeyError, TypeError, ValueError, AttributeError, RuntimeError) as error:
            reason = str(error).strip().splitlines()[0] if str(error).strip() else repr(error)
            raise RunError(
                f"The last checkpoint of {run.folder} does not fit its recipe ({reason}). Remove "
                "it to continue from the one before it, or pass a different --out."
            ) from error

    saved = time.monotonic()
    while done < recipe.epochs and not finished:
        epoch = done
        clock = _Clock()
        rate = recipe.learning_rate(epoch)
        tasks.seed_all(tasks.seed_for(seed, epoch, "noise in the network"))

        model.train()
        precise = torch.float32 if device.type == "mps" else torch.float64
        total, examples = torch.zeros((), dtype=precise, device=device), 0
        reported, steps = time.monotonic(), task.steps(epoch)
        for step, batch in enumerate(task.batches(epoch)):
            if should_stop():
                raise Stopped
            for group in optimizer.param_groups:
                group["lr"] = rate * task.rate_factor(batch)
            optimizer.zero_grad()
            for micro_batch, share in task.micro_batches(batch, recipe.accumulate):
                with _autocast(recipe, device):
                    loss, size = task.loss(forward, micro_batch)
                scaler.scale(loss * share).backward()  # type: ignore[no-untyped-call]
                total += loss.detach() * size
                examples += size
            if recipe.clip_grad_norm is not None:
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(model.parameters(), recipe.clip_grad_norm)
            scaler.step(optimizer)
            scaler.update()
            if time.monotonic() - reported > REPORT_SECONDS:
                reported = time.monotonic()
                on_progress(epoch + (step + 1) / steps, None)
        done = epoch + 1
        if average is not None and _due_after(recipe.average, done, average.phase):
            average.update()
        clock.lap("train")

        train_loss = float(total) / max(examples, 1)
        samples = average.count if average is not None else 0
        weight_norms = {name: float(f"{norm:.6g}") for name, norm in norms(model).items()}
        iterate: SplitMetrics | None = None
        averaged: SplitMetrics | None = None
        finished = not math.isfinite(train_loss)
        last = done == recipe.epochs or finished
        if done % recipe.evaluate_every == 0 or last:
            used = iterate = _measure(task, epoch, recipe, nullcontext(), clock, last=last)
            if average is not None and samples:
                point = average.applied(model, batchnorm=False)  # _measure refreshes them
                used = averaged = _measure(task, epoch, recipe, point, clock, last=last)
            finished |= not all(math.isfinite(m[task.metric]) for m in used.values())
            if average is not None and "validation" in used:
                finished |= average.observe(used["validation"][task.metric])
        if _keeps_iterate(recipe, done):
            run.keep_iterate(done, model.state_dict(), recipe.keep_iterates)
        record = EpochRecord(
            done,
            rate,
            train_loss,
            samples,
            iterate,
            averaged,
            clock.laps,
            weight_norms,
            extra={"data": fingerprint} if fingerprint and done == 1 else {},
        )
        run.append(record)
        on_progress(done, record)

        if time.monotonic() - saved > CHECKPOINT_SECONDS or done == recipe.epochs or finished:
            if blocks is not None and (done == recipe.epochs or finished):
                blocks.finish()
            extra = {"blocks": blocks.state_dict()} if blocks is not None else {}
            run.save(
                done,
                {
                    "model": model.state_dict(),
                    "optimizer": optimizer.state_dict(),
                    "average": average.state_dict() if average is not None else None,
                    "scaler": scaler.state_dict(),
                    "finished": finished,
                    **extra,
                },
            )
            saved = time.monotonic()
    return _result(run.history, recipe, model, device)


def _due_after(plan: Average | None, epochs: int, phase: str) -> bool:
    """Return True if a plan that samples once per epoch samples after this one."""
    if plan is None or plan.every != "epoch":
        return False
    return epochs > plan.start if isinstance(plan.start, int) else phase == "averaging"


def _keeps_iterate(recipe: Recipe, epochs: int) -> bool:
    """Return True if the weights after this epoch may be among the last ones to keep."""
    triggered = recipe.average is not None and not isinstance(recipe.average.start, int)
    count = recipe.keep_iterates
    return count > 0 and (triggered or epochs > recipe.epochs - count)


def _autocast(recipe: Recipe, device: torch.device) -> AbstractContextManager[Any]:
    if recipe.amp is None:
        return nullcontext()
    dtype = torch.bfloat16 if recipe.amp == "bf16" else torch.float16
    return torch.autocast(device.type, dtype=dtype)


def _measure(
    task: tasks.Task,
    epoch: int,
    recipe: Recipe,
    applied: AbstractContextManager[Any],
    clock: _Clock,
    *,
    last: bool,
) -> SplitMetrics:
    """Evaluate the point that is in the model once it is ``applied``."""
    with applied:
        if recipe.refresh_batchnorm:
            batches = islice(task.refresh(epoch), None if last else recipe.refresh_batches)
            gadam.refresh_batchnorm(task.model, batches, forward=task.loss)
        clock.lap("refresh")
        splits: list[str] = [split for split in task.splits if split in recipe.evaluate_on]
        measured = {split: task.evaluate(task.model, split) for split in splits}
        clock.lap("evaluate")
    return measured


class _Clock:
    """Wall time by activity."""

    def __init__(self) -> None:
        self.laps = {"train": 0.0, "refresh": 0.0, "evaluate": 0.0}
        self._last = time.perf_counter()

    def lap(self, activity: str) -> None:
        now = time.perf_counter()
        self.laps[activity] = round(self.laps[activity] + now - self._last, 4)
        self._last = now


def _result(
    history: Sequence[EpochRecord], recipe: Recipe, model: nn.Module, device: torch.device
) -> RunResult:
    last = history[-1]
    assert last.iterate is not None, "the last epoch is always evaluated"
    seconds = {
        activity: round(sum(record.seconds[activity] for record in history), 3)
        for activity in last.seconds
    }
    metrics = (last.metric(recipe.metric, last.used_point, split) for split in last.used or {})
    diverged = not math.isfinite(last.train_loss) or None in metrics
    status: Literal["done", "diverged"] = "diverged" if diverged else "done"
    return RunResult(
        status,
        last.epoch,
        last.iterate,
        last.average,
        last.samples,
        sum(p.numel() for p in model.parameters()),
        seconds,
        _peak_memory(device),
    )


def _peak_memory(device: torch.device) -> int | None:
    """Return the peak in bytes: of the device's allocator, or of the whole process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    try:
        import resource
    except ImportError:  # Windows
        return None
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
