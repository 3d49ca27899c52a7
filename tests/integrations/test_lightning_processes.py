"""AveragedWeights with two local processes (gloo)."""

from __future__ import annotations

import socket
import sys
from pathlib import Path

from torch.multiprocessing.spawn import spawn

sys.path.insert(0, str(Path(__file__).parent))
import lightning_workers

# One launch for all: importing Lightning takes longer than they do.
WORKERS = ("ddp_batchnorm", "ddp_observe", "fsdp2", "fsdp2_distributed_checkpoint")


def test_two_processes(tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    # spawn raises the error of a failed process here, with its traceback.
    spawn(lightning_workers.launch, args=(2, str(tmp_path), port, WORKERS), nprocs=2)
