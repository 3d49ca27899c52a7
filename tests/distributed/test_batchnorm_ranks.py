"""BatchNorm statistics over ranks that have different numbers of batches, or an error."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
import batchnorm_workers
import workers


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
    workers.run(partial(batchnorm_workers.run_all, names), world, tmp_path)
