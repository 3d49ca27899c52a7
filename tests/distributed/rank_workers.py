"""Ranks of the training loop in local processes, as torchrun would start them."""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import workers
from torch.multiprocessing.spawn import start_processes

import quick_processes
from compare_runs import stop_after
from gadam._dtensor import is_dtensor, whole
from gadam.commands import main
from gadam.optim import cpu
from gadam.runs.recipe import Average, Optimizer, Recipe
from gadam.train import SupervisedTask, distributed, loop, optimizers
from gadam.train.distributed import Ranks, Strategy
from gadam.train.journal import whole_state
from gadam.train.tasks import batch as batch_of
from gadam.train.tasks.own import describe

Worker = Callable[[Ranks, Path], None]
SECONDS = 240


def run(worker: Worker, processes: int, folder: Path, strategy: Strategy | None = "ddp") -> None:
    """Run a worker in local ranks (gloo). A hang is a failure.

    Args:
        worker: Called with the ranks and the folder.
        processes: How many ranks there are.
        folder: A folder that they share.
        strategy: How they train. None leaves it to the worker to join the others.
    """
    with closing(socket.socket()) as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    started = start_processes(
        launch,
        args=(processes, port, str(folder), worker, strategy),
        nprocs=processes,
        join=False,
        start_method=quick_processes.context().get_start_method(),
    )
    workers.finish(started, SECONDS)


def launch(
    rank: int, world: int, port: int, folder: str, worker: Worker, strategy: Strategy | None
) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    os.environ |= {
        "RANK": str(rank),
        "WORLD_SIZE": str(world),
        "LOCAL_RANK": str(rank),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "GLOO_SOCKET_IFNAME": "lo",
    }
    if strategy is None:
        worker(distributed.ALONE, Path(folder))
    else:
        with distributed.session("cpu", strategy) as ranks:
            worker(ranks, Path(folder))
            ranks.agree()
    sys.stdout.flush()
    os._exit(0)  # see workers.launch


def train(recipe: Recipe, folder: Path, ranks: Ranks, **options: Any) -> Any:
    return loop.train(recipe, folder, seed=3, ranks=ranks, **options)


# ------------------------------------------------------------------------------- observed runs

DOUBLE = """
import torch
from torch import nn

from gadam.train import SupervisedTask


def task():
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(163, 6, generator=draw, dtype=torch.float64)
    y = x.cos().sum(1, keepdim=True)
    model = lambda: nn.Sequential(nn.Linear(6, 70), nn.Tanh(), nn.Linear(70, 1)).double()
    return SupervisedTask(model, (x[:103], y[:103]), (x[103:], y[103:]), metric="mse",
                          loss=nn.functional.mse_loss)
"""

NORMALIZED = """
import torch
from torch import nn

from gadam.train import SupervisedTask


def task():
    draw = torch.Generator().manual_seed(0)
    x = 3 + torch.randn(161, 6, generator=draw)
    y = (x[:, 0] > 3).long()
    model = lambda: nn.Sequential(nn.BatchNorm1d(6), nn.Linear(6, 80), nn.BatchNorm1d(80),
                                  nn.ReLU(), nn.Linear(80, 2))
    return SupervisedTask(model, (x[:101], y[:101]), (x[101:], y[101:]))
"""


def own(code: str, name: str, folder: Path, **settings: Any) -> Recipe:
    """Return a recipe with a task of its own.

    Args:
        code: The file of the task.
        name: The recipe's name.
        folder: Where to write the file.
        **settings: Of the recipe.
    """
    path = folder / f"{name}.py"
    path.write_text(code)
    kept: dict[str, Any] = {
        "optimizer": Optimizer("adamw", 1e-2, 0.1),
        "average": Average(1, every=1),
        "epochs": 9,
        "batch_size": 20,
        **settings,
    }
    return Recipe(name, model="own", task=describe(path), **kept)


class Observed:
    """What a rank did in a run: its batches, its buffers in evaluations, and what it held."""

    def __init__(self) -> None:
        self.batches: list[Any] = []
        self.buffers: list[Any] = []
        self.kernels = 0  # launches of the fused kernel
        self._optimizer: Any = None
        self._model: Any = None

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Observe the runs in a block."""
        backward, build = loop._Training._backward, optimizers.build
        step = cpu.Launch.step
        observed = self

        def watched_build(recipe: Recipe, model: Any, *others: Any) -> Any:
            observed._model = model
            built = build(recipe, model, *others)
            observed._optimizer = built[0]
            return built

        def watched_backward(training: Any, part: Any) -> None:
            if part.share:
                observed.batches.append(batch_of.apply(lambda t: t.detach().clone(), part.batch))
            else:
                observed.batches.append(None)
            backward(training, part)

        def watched_evaluate(kind: Any) -> Any:
            original = kind.evaluate

            def evaluate(task: Any, model: Any, split: str) -> Any:
                buffers = {n: b.detach().clone() for n, b in model.named_buffers()}
                observed.buffers.append(buffers)
                return original(task, model, split)

            return evaluate

        def watched_step(launch: Any, *args: Any, **kwargs: Any) -> Any:
            observed.kernels += 1
            return step(launch, *args, **kwargs)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(optimizers, "build", watched_build)
            patch.setattr(loop._Training, "_backward", watched_backward)
            patch.setattr(cpu.Launch, "step", watched_step)
            patch.setattr(SupervisedTask, "evaluate", watched_evaluate(SupervisedTask))
            yield

    def save(self, path: Path) -> None:
        """Write what was observed to a file. Collective.

        Args:
            path: The file.
        """
        state: dict[str, list[Any]] = {}
        kinds = set()
        for p in self._model.parameters():
            for name, value in self._optimizer.state[p].items():
                kinds.add((name, is_dtensor(value)))
                state.setdefault(name, []).append(whole(value).detach().clone())
        content = {
            "model": {name: value.clone() for name, value in whole_state(self._model).items()},
            "sharded": all(is_dtensor(p) for p in self._model.parameters()),
            "kinds": sorted(kinds),
            "state": state,
            "batches": self.batches,
            "buffers": self.buffers,
            "kernels": self.kernels,
        }
        torch.save(content, path)


def observe(
    ranks: Ranks,
    folder: Path,
    *,
    recipes: Sequence[Recipe],
    stop: int | None = None,
    seconds: float = 1e9,
    **options: Any,
) -> None:
    """Train recipes in `folder/NAME`, and write `folder/NAME-RANK.pt` about each.

    Args:
        ranks: The ranks.
        folder: Where.
        recipes: What to train.
        stop: Ask the last rank to stop after so many steps.
        seconds: Seconds between checkpoints.
        **options: Of :func:`loop.train`.
    """
    for recipe in recipes:
        observed = Observed()
        if stop is not None and ranks.rank == ranks.size - 1:
            options["should_stop"] = stop_after(stop)
        with observed.watching(), pytest.MonkeyPatch.context() as patch:
            patch.setattr(loop, "CHECKPOINT_SECONDS", seconds)
            try:
                train(recipe, folder / recipe.name, ranks, **options)
                assert stop is None
            except loop.Stopped:
                assert stop is not None
        observed.save(folder / f"{recipe.name}-{ranks.rank}.pt")


def results(folder: Path, name: str) -> list[Any]:
    """Return what :func:`observe` has written about a run, rank by rank."""
    paths = sorted(folder.glob(f"{name}-[0-9].pt"))
    return [torch.load(path, weights_only=False) for path in paths]


# ------------------------------------------------------------------------------------ commands


def command(_: Ranks, folder: Path, arguments: Sequence[str] = (), terminate: str = "") -> None:
    """Run `gadam` as a rank, and write `code-RANK` and `output-RANK`.

    Args:
        _: Not used: the command joins the other ranks.
        folder: Where to write them.
        arguments: The command line after `gadam`.
        terminate: The last rank gets SIGTERM when there are files with this pattern.
    """
    rank, last = os.environ["RANK"], int(os.environ["WORLD_SIZE"]) - 1

    def wait_and_terminate() -> None:
        end = time.monotonic() + SECONDS
        while time.monotonic() < end and not list(folder.glob(terminate)):
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGTERM)

    if terminate:
        loop.CHECKPOINT_SECONDS = 0.0
    if terminate and int(rank) == last:
        threading.Thread(target=wait_and_terminate, daemon=True).start()
    with (folder / f"output-{rank}").open("w") as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
        try:
            code = main(list(arguments))
        except SystemExit as stop:
            code = stop.code  # type: ignore[assignment]
        sys.stdout.flush()
        sys.stderr.flush()
    (folder / f"code-{rank}").write_text(str(code))
