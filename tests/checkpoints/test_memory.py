from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def benchmark(monkeypatch):
    monkeypatch.syspath_prepend(ROOT)
    from benchmarks import checkpoint_memory

    return checkpoint_memory


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize(("layout", "count"), [("safetensors", 2), ("torch", 1), ("dcp", 1)])
def test_the_peak_is_below_two_shards_and_one_tensor(layout, count, benchmark):
    row = benchmark.measure(count, shard=128, tensor=16, checkpoints=2, layout=layout)
    assert row["peak_mib"] <= row["limit_mib"]


def test_the_committed_peaks_are_below_two_shards_and_one_tensor(benchmark):
    rows = json.loads(benchmark.RESULT.read_text())["rows"]
    assert [row["layout"] for row in rows] == [row["layout"] for row in benchmark.ROWS]
    assert all(0 < row["peak_mib"] <= row["limit_mib"] for row in rows)
