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
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from itertools import count, islice
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

import gadam
from gadam.analysis.weights import norms
from gadam.runs.files import RunError, explain_os_error
from gadam.runs.folder import State
from gadam.runs.recipe import Average, Recipe
from gadam.runs.record import EpochRecord, RunResult, SplitMetrics
from gadam.train import optimizers, parallel, tasks
from gadam.train.distributed import ALONE, Ranks
from gadam.train.journal import Journal, whole_state
from gadam.train.tasks.randomness import isolated
from gadam.train.tasks.task import Part

__all__ = ["Stopped", "train"]

# What a killed run may lose. A checkpoint costs well below 1% of it.
CHECKPOINT_SECONDS = float(os.environ.get("GADAM_CHECKPOINT_SECONDS", 20))
REPORT_SECONDS = 0.1
_SAVE, _STOP = 1, 2  # wishes of ranks: the largest one counts


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
    ranks: Ranks = ALONE,
    async_checkpoints: bool = False,
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
        ranks: The processes that train the run together; see :func:`gadam.train.distributed`. All
            of them call this function with the same arguments.
        async_checkpoints: Write checkpoints of several ranks while training continues.
        on_progress: Called with the epochs done so far, and each epoch's record.
        on_notice: Called with sentences about damaged files and about the data.
        should_stop: Polled at every step; if it returns True, :class:`Stopped` is raised. With
            several ranks, one of them is enough, and a checkpoint is written first.

    Returns:
        The run's result.
    """
    with ranks.explained():
        with ranks.together():
            recipe = tasks.with_code(recipe)
        run = Journal(
            folder,
            recipe,
            seed,
            ranks,
            label=label,
            accept_changed_code=accept_changed_code,
            asynchronous=async_checkpoints,
            on_notice=on_notice,
        )
        place = torch.device(device)
        with run.locked():
            return _locked(run, place, threads, data_dir, on_progress, on_notice, should_stop)


def _locked(
    run: Journal,
    device: torch.device,
    threads: int,
    data_dir: str | None,
    on_progress: Callable[[float, EpochRecord | None], None],
    on_notice: Callable[[str], None],
    should_stop: Callable[[], bool],
) -> RunResult:
    try:
        threads, known = run.begin(threads)
        torch.set_num_threads(threads)
        if known is not None:
            return known
    except OSError as error:
        raise RunError(explain_os_error(error, Path(error.filename or run.path))) from error
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    try:
        with run.ranks.explained():
            training = _Training(run, device, data_dir, on_progress, on_notice, should_stop)
            training.run()
            model = training.task.model
            return run.finish(lambda history: _result(history, run.recipe, model, device))
    except (Stopped, ConnectionError):  # interrupted, or the sweep's process died
        raise
    except OSError as error:
        run.fail(f"{type(error).__name__}: {error}")
        raise RunError(explain_os_error(error, Path(error.filename or run.path))) from error
    except Exception as error:
        run.fail(f"{type(error).__name__}: {error}")
        raise
    finally:
        run.close()


class _Training:
    """A run between its first and its last step.

    Args:
        run: Its record.
        device: Where to compute.
        data_dir: Where data sets are.
        on_progress: As for :func:`train`.
        on_notice: As for :func:`train`.
        should_stop: As for :func:`train`.
    """

    def __init__(
        self,
        run: Journal,
        device: torch.device,
        data_dir: str | None,
        on_progress: Callable[[float, EpochRecord | None], None],
        on_notice: Callable[[str], None],
        should_stop: Callable[[], bool],
    ) -> None:
        self._journal, self._recipe, self._ranks = run, run.recipe, run.ranks
        self._device, self._on_progress, self._should_stop = device, on_progress, should_stop
        recipe, ranks = self._recipe, self._ranks
        with ranks.together():
            self.task = tasks.build(recipe, run.seed, device, data_dir, ranks)
        model = self.task.model
        if ranks.is_sharded:
            parallel.shard(model, ranks, recipe.amp)
        self._optimizer, self._average = optimizers.build(
            recipe, model, tasks.steps_before_averaging(recipe, self.task), self.task.mode
        )
        self._blocks: gadam.BlockAverages | None = None
        self._scaler = torch.amp.GradScaler(device.type, enabled=recipe.amp == "fp16")
        forward: nn.Module = model
        if recipe.compile:
            # Graphs compiled for an earlier run, or specialized to sizes seen so far, would make
            # the last bits depend on the history of the process.
            torch.compiler.reset()
            forward = torch.compile(model, dynamic=False)  # type: ignore[assignment]
        self._finished, self._is_saved, self._is_checked = False, True, False
        self._so_far = _SoFar.of(device)
        self._done, state = run.load(model, self._optimizer)
        for sentence in self.task.notices:
            on_notice(sentence)
        fingerprint = self._fingerprint = getattr(self.task, "fingerprint", "")
        first = run.first_epoch()
        if first is not None and first.extra.get("data", fingerprint) != fingerprint:
            on_notice(f"{recipe.data.name} changed after {run.path} was started.")
        if recipe.blocks:
            folder = run.path / "blocks"
            if state is None and ranks.is_first and folder.exists():
                shutil.rmtree(folder)  # of a process that was killed before its checkpoint
            ranks.agree()
            self._blocks = gadam.BlockAverages(self._optimizer, folder, every=recipe.blocks)
        if state is not None:
            with ranks.together():
                self._restore(state)
        self._loss = parallel.loss_of(self.task, forward, ranks)
        self._saved = time.monotonic()

    # -------------------------------------------------------------------------------- checkpoints

    def _restore(self, state: State) -> None:
        try:
            self.task.model.load_state_dict(state["model"])
            self._optimizer.load_state_dict(state["optimizer"])
            if self._average is not None:
                self._average.load_state_dict(state["average"])
            if self._blocks is not None:
                self._blocks.load_state_dict(self._own_blocks(state))
            self._scaler.load_state_dict(state["scaler"])
            self._finished = bool(state["finished"])
            if "epoch so far" in state:
                saved = state["epoch so far"]
                self._so_far.steps, self._so_far.task = saved["steps"], saved["task"]
                # On as many ranks as before, each continues its own sum: another order would round
                # differently.
                totals = saved.get("totals", [])
                if len(totals) == self._ranks.size:
                    self._so_far.total += totals[self._ranks.rank]
                elif self._ranks.is_first:
                    self._so_far.total += saved["total"]
                if self._ranks.is_first:
                    self._so_far.examples = saved["examples"]
        except (KeyError, TypeError, ValueError, AttributeError, RuntimeError) as error:
            reason = str(error).strip().splitlines()[0] if str(error).strip() else repr(error)
            raise RunError(
                f"The last checkpoint of {self._journal.path} does not fit its recipe ({reason}). "
                "Remove it to continue from the one before it, or pass a different --out."
            ) from error

    def _own_blocks(self, state: State) -> State:
        shards = state.get("blocks of shards")
        if (shards is not None) != self._ranks.is_sharded or (
            shards is not None and len(shards) != self._ranks.size
        ):
            raise ValueError("blocks of shards need the same strategy and number of processes")
        found: State = state["blocks"] if shards is None else shards[self._ranks.rank]
        return found

    def _save(self) -> None:
        """Write a checkpoint, after an epoch or within one."""
        steps, extra = self._so_far.steps, State()
        if steps:
            total, examples = self._so_far.sums(self._ranks)
            extra["epoch so far"] = {
                "steps": steps,
                "total": total,
                "totals": self._so_far.totals(self._ranks),
                "examples": examples,
                "task": self.task.state_dict(),
            }
        if self._blocks is not None:
            if not steps and (self._done == self._recipe.epochs or self._finished):
                self._blocks.finish()
            own = self._blocks.state_dict()
            sharded = self._ranks.is_sharded
            extra |= {"blocks of shards": self._ranks.gather(own)} if sharded else {"blocks": own}
        self._journal.save(
            self._done,
            {
                "model": self.task.model.state_dict(),
                "optimizer": self._optimizer.state_dict(),
                "average": self._average.state_dict() if self._average is not None else None,
                "scaler": self._scaler.state_dict(),
                "finished": self._finished,
                **extra,
            },
            steps,
        )
        self._saved, self._is_saved = time.monotonic(), True

    def _is_due(self) -> bool:
        """Return True if a checkpoint is due. The clock of the first rank counts."""
        return self._ranks.is_first and time.monotonic() - self._saved > CHECKPOINT_SECONDS

    # ------------------------------------------------------------------------------------- epochs

    def run(self) -> None:
        """Train all epochs that are left."""
        while self._done < self._recipe.epochs and not self._finished:
            self._epoch()
            is_last = self._done == self._recipe.epochs or self._finished
            self._is_saved = False
            if self._ranks.agree(self._is_due()) or is_last:
                self._save()

    def _epoch(self) -> None:
        recipe, task, average = self._recipe, self.task, self._average
        epoch = self._done
        clock = _Clock()
        rate = recipe.learning_rate(epoch)
        train_loss = self._steps(epoch, rate)
        done = self._done = epoch + 1
        if average is not None and _due_after(recipe.average, done, average.phase):
            average.update()
        clock.lap("train")

        model = task.model
        samples = average.count if average is not None else 0
        weight_norms = {name: float(f"{norm:.6g}") for name, norm in norms(model).items()}
        iterate: SplitMetrics | None = None
        averaged: SplitMetrics | None = None
        self._finished = not math.isfinite(train_loss)
        last = done == recipe.epochs or self._finished
        if done % recipe.evaluate_every == 0 or last:
            used = iterate = self._measure(epoch, nullcontext(), clock, last=last)
            if average is not None and samples:
                point = average.applied(model, batchnorm=False)  # _measure refreshes them
                used = averaged = self._measure(epoch, point, clock, last=last)
            self._finished |= not all(math.isfinite(m[task.metric]) for m in used.values())
            if average is not None and "validation" in used:
                self._finished |= average.observe(used["validation"][task.metric])
        if _keeps_iterate(recipe, done):
            self._journal.keep_iterate(done, whole_state(model), recipe.keep_iterates)
        record = EpochRecord(
            done,
            rate,
            train_loss,
            samples,
            iterate,
            averaged,
            clock.laps,
            weight_norms,
            extra={"data": self._fingerprint} if self._fingerprint and done == 1 else {},
        )
        self._journal.append(record)
        self._on_progress(done, record)

    def _steps(self, epoch: int, rate: float) -> float:
        """Train for an epoch, or for the rest of one. Return the mean training loss."""
        recipe, task, ranks = self._recipe, self.task, self._ranks
        noise = tasks.seed_for(self._journal.seed, epoch, "noise in the network")
        tasks.seed_all(noise)
        task.model.train()
        so_far = self._so_far
        reported, steps, skipped = time.monotonic(), task.steps(epoch), so_far.steps
        parts = task.parts(epoch)
        if ranks.is_distributed:  # what the network draws must not change the next batch
            parts = isolated(lambda: task.parts(epoch), noise)
        for step in count():
            part, error = _next(parts)
            if step < skipped and part is not None:
                continue
            if step == skipped > 0:
                task.load_state_dict(so_far.task)
            ranks.broadcast_buffers(task.model)  # so that a checkpoint holds those of all ranks
            if self._wishes(part, error) == _STOP:
                raise Stopped
            if part is None:
                break
            if ranks.is_distributed:  # so that an interrupted epoch continues with the same noise
                tasks.seed_all(ranks.seed(noise + (step << 32)))
            for group in self._optimizer.param_groups:
                group["lr"] = rate * part.rate_factor
            self._optimizer.zero_grad()
            self._backward(part)
            if recipe.clip_grad_norm is not None:
                self._scaler.unscale_(self._optimizer)
                nn.utils.clip_grad_norm_(task.model.parameters(), recipe.clip_grad_norm)
            self._scaler.step(self._optimizer)
            self._scaler.update()
            so_far.steps, self._is_saved = step + 1, False
            if time.monotonic() - reported > REPORT_SECONDS:
                reported = time.monotonic()
                self._on_progress(epoch + (step + 1) / steps, None)
        total, examples = so_far.sums(ranks)
        self._so_far = _SoFar.of(self._device)
        return total / max(examples, 1)

    def _wishes(self, part: Part[Any] | None, error: Exception | None) -> int:
        """Agree with the other ranks on what to do before a step, and save if it is time to."""
        wish, distributed = 0, self._ranks.is_distributed
        if part is not None:
            wish = _STOP if self._should_stop() else _SAVE if distributed and self._is_due() else 0
        wish = self._ranks.agree(wish, error)
        if wish and distributed and not self._is_saved:
            self._save()
        return wish

    def _backward(self, part: Part[Any]) -> None:
        """Add the gradients of a part to those of the step."""
        pieces = self.task.micro_batches(part.batch, self._recipe.accumulate)
        if self._ranks.is_sharded and self._recipe.accumulate > 1:  # every pass communicates
            missing = self._ranks.max(len(pieces)) - len(pieces)
            pieces += [(pieces[-1][0], 0.0)] * missing
        scale = part.share * self._ranks.size
        for i, (piece, share) in enumerate(pieces, 1):
            with parallel.without_communication(self._loss, last=i == len(pieces)):
                with self._autocast():
                    loss, size = self._loss(piece)
                self._scaler.scale(loss * (share * scale)).backward()  # type: ignore[no-untyped-call]
            if share and part.share:
                self._so_far.total += loss.detach() * size
                self._so_far.examples += size
        if self._ranks.size > 1 and not self._is_checked:
            parallel.check_gradients(self.task.model)
            self._is_checked = True

    def _autocast(self) -> AbstractContextManager[Any]:
        # The policy of a sharded model converts its weights and inputs itself.
        if self._recipe.amp is None or self._ranks.is_sharded:
            return nullcontext()
        dtype = torch.bfloat16 if self._recipe.amp == "bf16" else torch.float16
        return torch.autocast(self._device.type, dtype=dtype)

    def _measure(
        self, epoch: int, applied: AbstractContextManager[Any], clock: _Clock, *, last: bool
    ) -> SplitMetrics:
        """Evaluate the point that is in the model once it is ``applied``."""
        recipe, task, ranks = self._recipe, self.task, self._ranks
        with applied:
            if recipe.refresh_batchnorm:
                parts = task.parts(epoch, "refresh")
                if ranks.is_distributed:
                    noise = tasks.seed_for(self._journal.seed, epoch, "refresh")
                    parts = isolated(lambda: task.parts(epoch, "refresh"), noise)
                found = islice(parts, None if last else recipe.refresh_batches)
                gadam.refresh_batchnorm(
                    task.model,
                    (part.batch for part in found if part.share),
                    forward=task.loss,
                    process_group=ranks.group,
                )
            clock.lap("refresh")
            splits: list[str] = [split for split in task.splits if split in recipe.evaluate_on]
            measured = {split: task.evaluate(task.model, split) for split in splits}
            clock.lap("evaluate")
        # Decisions depend on these numbers, so they must be the same to the last bit.
        return ranks.first(lambda: measured)


def _next(parts: Iterator[Part[Any]]) -> tuple[Part[Any] | None, Exception | None]:
    """Return the next part, or None, and an error if it cannot be loaded."""
    try:
        return next(parts, None), None
    except Exception as error:
        return None, error


@dataclass
class _SoFar:
    """What is done of the current epoch.

    Args:
        total: The sum of this rank's losses.
        steps: Steps done.
        examples: Examples that this rank has seen.
        task: What the task carries over to the next step, in a resumed epoch.
    """

    total: Tensor
    steps: int = 0
    examples: int = 0
    task: State = field(default_factory=dict)

    @classmethod
    def of(cls, device: torch.device) -> _SoFar:
        precise = torch.float32 if device.type == "mps" else torch.float64
        return cls(torch.zeros((), dtype=precise, device=device))

    def totals(self, ranks: Ranks) -> list[float]:
        """Return the losses of each rank."""
        own = torch.zeros(ranks.size, dtype=torch.float64)
        own[ranks.rank] = self.total
        found: list[float] = ranks.sum(own).tolist()
        return found

    def sums(self, ranks: Ranks) -> tuple[float, int]:
        """Return the losses and examples of all ranks."""
        if ranks.size == 1:
            return float(self.total), self.examples
        total, examples = ranks.sum(torch.stack([self.total, self.total.new_tensor(self.examples)]))
        return float(total), int(examples)


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
