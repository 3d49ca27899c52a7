"""Exports and health of sharded averages, with two and three local processes (gloo)."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
import export_workers
import workers


@pytest.mark.skipif(not workers.SHARDS_ON_CPU, reason="cannot train sharded models on the CPU")
@pytest.mark.parametrize("processes", [2, 3])
@pytest.mark.parametrize("name", ["exports", "files", "health", "health_of_replicas"])
def test_sharded_models(name, processes, tmp_path):
    workers.run(getattr(export_workers, name), processes, tmp_path)
