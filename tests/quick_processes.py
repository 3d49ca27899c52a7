"""Processes that start quickly: forks of a server that has imported torch and gadam.

A spawned process takes seconds to import them. Use one where starting a program is what is tested.
"""

from __future__ import annotations

import multiprocessing
from multiprocessing.context import ForkServerContext

MODULES = [
    *("gadam", "gadam.train.loop", "gadam.study.job", "pytest", "torch._dynamo"),
    *("torch.distributed.checkpoint.state_dict", "torch.distributed.fsdp"),
    *("torch.distributed.optim", "torch.distributed.tensor.debug", "torch.nn.parallel"),
]


def context() -> ForkServerContext:
    """Return the context whose processes have imported `MODULES`."""
    server = multiprocessing.get_context("forkserver")
    server.set_forkserver_preload(MODULES)
    return server
