"""Count aborts at exit ("terminate called without an active exception") with plain torch and gloo.

    python scripts/exit_abort.py [TIMES] [--destroy]

It needs no gadam. On a busy machine with two cores (Python 3.11, torch 2.13), 2 of 26 runs aborted
without `--destroy`, and 0 of 8 with it: too few to tell the two apart.

The likely cause, from torch's issues 190489 and 38228; no backtrace was taken here: a thread of
gloo releases its tensor a little after the operation has ended. If the interpreter is shutting
down by then, torch asks for the interpreter's lock in that thread, and CPython 3.11 ends the thread
with `pthread_exit`. This unwinds its stack through a destructor, so `std::terminate` aborts
the process.

With `--destroy`, each process destroys its process group before it ends, which should join its
threads. A model of FSDP2 or DDP holds the group, too, so free the model before.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from typing import Any

kept: Any = None


def work(rank: int, folder: str, destroy: bool) -> None:
    """Take part in an operation, as one of two processes."""
    global kept
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo", f"file://{folder}/rendezvous", rank=rank, world_size=2)
    dist.barrier()
    kept = torch.ones(10)
    if rank == 1:
        time.sleep(3)
    operation = dist.all_reduce(kept, async_op=True)
    if rank == 1:
        operation.wait()
    if destroy:
        dist.destroy_process_group()


def main() -> None:
    options = [option for option in sys.argv[1:] if option == "--destroy"]
    numbers = [option for option in sys.argv[1:] if option not in options]
    if len(numbers) == 2:
        work(int(numbers[0]), numbers[1], bool(options))
        return
    times, aborted = int(numbers[0]) if numbers else 20, 0
    for _ in range(times):
        with tempfile.TemporaryDirectory() as folder:
            command = [sys.executable, __file__]
            ranks = [subprocess.Popen([*command, str(r), folder, *options]) for r in range(2)]
            aborted += -6 in [rank.wait() for rank in ranks]
    print(f"{aborted} of {times} runs aborted")


if __name__ == "__main__":
    main()
