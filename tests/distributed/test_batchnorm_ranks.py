"""BatchNorm statistics over ranks that have different numbers of batches, or an error."""

from __future__ import annotations

import sys
import time
from functools import partial
from pathlib import Path

import pytest
import torch.multiprocessing as mp

sys.path.insert(0, str(Path(__file__).parent))
import batchnorm_workers
import workers

SECONDS = 180


@pytest.mark.parametrize(
    ("world", "names"),
    [
        (2, ("uneven_sharded", "max_batches", "no_batches", "a_batch_that_cannot_be_sent")),
        (2, ("uneven_replicated", "uneven_callables", "failure_inside_a_replicated_model")),
        (2, ("failures",)),
        (3, ("uneven_sharded", "submodules", "part_of_the_world")),
        (3, ("uneven_replicated", "uneven_callables")),
        (3, ("failures",)),
        (2, ("failure_inside_a_sharded_model",)),
        (4, ("two_dimensions",)),
    ],
    ids=str,
)
def test_ranks_agree(world, names, tmp_path):
    """A hang is a failure."""
    worker = partial(batchnorm_workers.run_all, names)
    processes = mp.spawn(
        workers.launch, args=(world, str(tmp_path), worker), nprocs=world, join=False
    )
    end = time.monotonic() + SECONDS
    try:
        while not processes.join(timeout=1):
            if time.monotonic() > end:
                pytest.fail(f"The processes did not end within {SECONDS} seconds.")
    finally:
        for process in processes.processes:
            if process.is_alive():
                process.kill()
