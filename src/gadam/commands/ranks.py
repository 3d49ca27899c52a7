"""Train with all processes that torchrun has started: one run at a time, with one voice."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from typing import TypeVar

from gadam._errors import UserError
from gadam.commands import console
from gadam.commands.options import SweepOptions
from gadam.runs.recipe import RecipeError
from gadam.runs.record import RunResult
from gadam.train import distributed
from gadam.train.distributed import LostRank, Preemption, Ranks, Strategy
from gadam.train.sweep import Reportable, TrainingJob

__all__ = ["one_voice", "run_all", "with_ranks"]

T = TypeVar("T")


@contextmanager
def one_voice() -> Iterator[None]:
    """Let only the first rank print, in a block that is the same on all ranks."""
    if distributed.is_first():
        yield
        return
    with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere), redirect_stderr(nowhere):
        yield


def with_ranks(
    command: Callable[[Ranks], int], options: SweepOptions, strategy: Strategy | None
) -> int:
    """Run a command on all ranks. If it fails on one, the first rank reports it.

    Args:
        command: What to do, on each rank. Returns the exit code.
        options: How to train.
        strategy: "ddp" or "fsdp2". Default: "ddp".

    Returns:
        The exit code.

    Raises:
        RecipeError: The strategy was given without torchrun.
    """
    if not distributed.is_launched():
        if strategy is not None:
            raise RecipeError(
                f"--strategy {strategy} needs several processes. Start them with `torchrun "
                f"--nproc-per-node=2 -m gadam train … --strategy {strategy}`."
            )
        return command(distributed.ALONE)
    with distributed.session(options.device, strategy or "ddp") as ranks:
        try:
            with ranks.explained():
                return command(ranks)
        except UserError:
            if ranks.is_first:
                raise
            return 2  # the first rank prints it


def run_all(
    jobs: Sequence[TrainingJob],
    options: SweepOptions,
    ranks: Ranks,
    *,
    async_checkpoints: bool = False,
) -> dict[TrainingJob, RunResult | None]:
    """Train runs one after the other, each with all ranks.

    Args:
        jobs: The runs.
        options: How to run them.
        ranks: The processes that train them.
        async_checkpoints: Write checkpoints while training continues.

    Returns:
        The result of each run, or None if it failed. After a failure, the rest is not trained.

    Raises:
        SystemExit: SIGTERM or Ctrl-C has stopped the run, after a checkpoint.
    """
    from gadam.train.loop import Stopped, train

    if options.storage is not None:
        raise RecipeError("--out must be a folder that all ranks share, not a URL, with torchrun.")
    results: dict[TrainingJob, RunResult | None] = {}
    quiet = options.quiet or not ranks.is_first
    as_json = options.json and ranks.is_first
    listening = console.listener(len(jobs), quiet=quiet, as_json=as_json)
    with listening as listener, Preemption() as preemption:
        for job in jobs:
            if ranks.is_first:
                listener.on_start(job)

            def on_progress(done: float, update: Reportable | None, job: TrainingJob = job) -> None:
                if ranks.is_first:
                    listener.on_progress(job, done, update)

            def on_notice(sentence: str, job: TrainingJob = job) -> None:
                if ranks.is_first:
                    listener.on_notice(job, sentence)

            try:
                results[job] = train(
                    job.recipe,
                    job.folder,
                    seed=job.seed,
                    data_dir=job.data_dir,
                    device=ranks.device,
                    threads=job.threads,
                    label=job.label,
                    accept_changed_code=job.accept_changed_code,
                    ranks=ranks,
                    async_checkpoints=async_checkpoints,
                    on_progress=on_progress,
                    on_notice=on_notice,
                    should_stop=preemption.is_requested,
                )
            except Stopped:
                if ranks.is_first:
                    message = (
                        f"Stopped. {job.folder} has a checkpoint. Rerun the command to resume."
                    )
                    print(message, file=sys.stderr, flush=True)
                raise SystemExit(preemption.exit_code) from None
            except LostRank:
                raise  # torchrun may restart the command
            except UserError as error:
                results[job] = None
                if ranks.is_first:
                    listener.on_failure(job, str(error))
                break
            result = results[job]
            if ranks.is_first and result is not None:
                listener.on_finish(job, result)
    return results
