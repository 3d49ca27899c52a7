"""Processes that start quickly: forks of a server that has imported torch and gadam.

A spawned process takes seconds to import them. Use one where starting a program is what is tested.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.context import ForkServerContext
from types import SimpleNamespace

import pytest

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


@contextmanager
def for_sweeps() -> Iterator[None]:
    """Use such processes as the workers of sweeps inside this block."""
    from gadam.train.launchers import local

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(local, "multiprocessing", SimpleNamespace(get_context=lambda _: context()))
        yield
