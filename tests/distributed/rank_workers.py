"""Ranks of the training loop in local processes, as torchrun would start them."""

from __future__ import annotations

import os
import socket
import sys
import time
import warnings
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import torch
from torch.multiprocessing.spawn import start_processes

import quick_processes
from gadam.runs.recipe import Recipe
from gadam.train import distributed, loop
from gadam.train.distributed import Ranks, Strategy

Worker = Callable[[Ranks, Path], None]
SECONDS = 240


def run(worker: Worker, processes: int, folder: Path, strategy: Strategy = "ddp") -> None:
    """Run a worker in local ranks (gloo). A hang is a failure.

    Args:
        worker: Called with the ranks and the folder.
        processes: How many ranks there are.
        folder: A folder that they share.
        strategy: How they train.
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
    end = time.monotonic() + SECONDS
    try:
        while not started.join(timeout=1):
            assert time.monotonic() < end, f"The ranks did not end within {SECONDS} seconds."
    finally:
        for process in started.processes:
            if process.is_alive():
                process.kill()


def launch(
    rank: int, world: int, port: int, folder: str, worker: Worker, strategy: Strategy
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
    with distributed.session("cpu", strategy) as ranks:
        worker(ranks, Path(folder))
        ranks.agree()
    sys.stdout.flush()
    os._exit(0)  # see workers.launch


def train(recipe: Recipe, folder: Path, ranks: Ranks, **options: Any) -> Any:
    return loop.train(recipe, folder, seed=3, ranks=ranks, **options)
