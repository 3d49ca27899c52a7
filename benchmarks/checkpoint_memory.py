"""Measure the memory of `gadam average`: `python -m benchmarks.checkpoint_memory`.

Each row averages checkpoints of one size in a process of its own. The memory is the peak resident
set of that process, minus that of one that averages a few bytes. It comes from Linux's VmHWM,
because getrusage counts what the parent process had in memory when it started this one. Results go
to results/checkpoint-memory.json.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.distributed import checkpoint as dcp

from gadam.checkpoints.formats import memory

RESULT = Path(__file__).parents[1] / "results" / "checkpoint-memory.json"
MIB = 2**20
_CODE = """
import re, sys
from pathlib import Path
import torch
torch.set_num_threads(1)
from gadam.checkpoints import distributed, averaging
averaging.average(sys.argv[1], sys.argv[2], order="steps")
print(re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[1])
"""


def peak(pattern: str, out: Path) -> float:
    """Return the peak resident memory of a process that averages checkpoints, in MiB."""
    done = subprocess.run(
        [sys.executable, "-c", _CODE, pattern, str(out)], check=True, capture_output=True, text=True
    )
    return int(done.stdout) / 1024


def shards(count: int, shard: int, tensor: int) -> Iterator[dict[str, torch.Tensor]]:
    """Yield the shards of a model with tensors of some size, all in MiB of bfloat16."""
    for i in range(count):
        yield {
            f"layers.{i}.{j}.weight": torch.ones(tensor, MIB // 2, dtype=torch.bfloat16)
            for j in range(shard // tensor)
        }


def write_hugging_face(folder: Path, model: Iterator[dict[str, torch.Tensor]], count: int) -> None:
    """Write a sharded folder without another package, one shard at a time."""
    folder.mkdir()
    places = {}
    for i, state in enumerate(model, 1):
        name = f"model-{i:05d}-of-{count:05d}.safetensors"
        places.update(dict.fromkeys(state, name))
        header, end = {}, 0
        for key, value in state.items():
            size = value.numel() * 2
            header[key] = {
                "dtype": "BF16",
                "shape": list(value.shape),
                "data_offsets": [end, end + size],
            }
            end += size
        text = json.dumps(header).encode()
        with open(folder / name, "wb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            for value in state.values():
                file.write(memory(value))
    index = {"metadata": {}, "weight_map": places}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def measure(count: int, shard: int, tensor: int, checkpoints: int, layout: str) -> dict[str, Any]:
    """Measure one row.

    Args:
        count: Shards per checkpoint.
        shard: The size of a shard, in MiB.
        tensor: The size of a tensor, in MiB.
        checkpoints: The number of checkpoints.
        layout: "safetensors", "torch" or "dcp".
    """
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        for step in range(2):
            torch.save({"w": torch.ones(1)}, folder / f"small-{step}.pt")
        base = peak(str(folder / "small-*.pt"), folder / "small")
        for step in range(checkpoints):
            model = shards(count, shard, tensor)
            if layout == "safetensors":
                write_hugging_face(folder / f"step-{step}", model, count)
                continue
            state = {name: value for part in model for name, value in part.items()}
            if layout == "torch":
                torch.save(state, folder / f"step-{step}.pt")
            else:
                dcp.save({"model": state}, checkpoint_id=folder / f"step-{step}")
        used = peak(str(folder / "step-*"), folder / "out") - base
    return {
        "layout": layout,
        "checkpoints": checkpoints,
        "shards": count,
        "shard_mib": shard,
        "tensor_mib": tensor,
        "model_mib": count * shard,
        "peak_mib": round(used),
        "limit_mib": 2 * shard + tensor,
    }


ROWS = [
    {"layout": "safetensors", "count": 4, "shard": 128, "tensor": 16, "checkpoints": 2},
    {"layout": "safetensors", "count": 4, "shard": 128, "tensor": 128, "checkpoints": 2},
    {"layout": "torch", "count": 1, "shard": 256, "tensor": 16, "checkpoints": 2},
    {"layout": "dcp", "count": 1, "shard": 256, "tensor": 16, "checkpoints": 2},
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=RESULT)
    rows = []
    out: Path = parser.parse_args().out
    for row in ROWS:
        rows.append(measure(**row))  # type: ignore[arg-type]
        print(rows[-1], flush=True)
    content = {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "system": platform.system(),
        "rows": rows,
    }
    out.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
