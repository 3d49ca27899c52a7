"""DDP and FSDP2 with two local processes (gloo)."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
import workers


@pytest.mark.parametrize(
    "name",
    [
        "fsdp_equals_one_process",
        "fsdp_without_private_constructors",
        "fsdp_gathers_nothing",
        "fsdp_agrees_on_what_is_finite",
        "fsdp_checkpoint",
        "fsdp_swa",
        "ddp_batchnorm",
        "ddp_training",
        "fsdp_warm_up_from_zero",
        "zero_redundancy",
        "zero_redundancy_checkpoint",
        "zero_redundancy_export",
        "fsdp_non_finite_samples_of_the_kernel",
        "fsdp_attached_checkpoint",
        "fsdp_blocks",
        "ddp_blocks",
    ],
)
def test_two_processes(name, tmp_path):
    if name.startswith("fsdp") and not workers.SHARDS_ON_CPU:
        pytest.skip("this version of torch cannot train sharded models on the CPU")
    workers.run(getattr(workers, name), 2, tmp_path)
