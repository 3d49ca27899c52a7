"""Exports and health of sharded averages, with two and three local processes (gloo)."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from torch.multiprocessing.spawn import spawn

sys.path.insert(0, str(Path(__file__).parent))
import export_workers
import workers


@pytest.mark.parametrize("processes", [2, 3])
@pytest.mark.parametrize("name", ["exports", "files", "health", "health_of_replicas"])
def test_sharded_models(name, processes, tmp_path):
    worker = getattr(export_workers, name)
    spawn(workers.launch, args=(processes, str(tmp_path), worker), nprocs=processes)
