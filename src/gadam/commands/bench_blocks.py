"""What block averages cost, for `gadam bench`: whole rounds of steps, in which blocks end.

A round is as many steps as a block has. A block ends early in the round, and is written while the
other steps run. The round ends when the block is on disk, so all of its cost is in this round, and
nothing is left for the next one, which is another contender's. Blocks are written to a temporary
folder.
"""

from __future__ import annotations

import random
import shutil
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

import torch
from torch import Tensor, nn

import gadam
from gadam.runs.files import Document

__all__ = ["measure_blocks", "to_markdown"]

BASE = "torch AdamW fused"
SAMPLED = "Gadam, every step sampled, no block ends"
ENDED = "Gadam, a block ends"
MERGED = "Gadam, a block ends, and two are merged"
_EARLY = 0.1  # when the block of a round ends, as a share of the round
_NEVER = 10**9


@dataclass(frozen=True)
class _Contender:
    """An optimizer, and its block averages if it has any."""

    step: Callable[[], object]
    blocks: gadam.BlockAverages | None = None

    def run(self, steps: int) -> None:
        """Make steps, and wait until blocks are on disk."""
        for _ in range(steps):
            self.step()
        if self.blocks is not None:
            self.blocks.flush()


def measure_blocks(
    values: list[Tensor], gradients: list[Tensor], rounds: int = 3, every: int = 100
) -> Document:
    """Measure the mean step of rounds in which a block ends, and of others.

    Args:
        values: The parameters' values.
        gradients: Their gradients.
        rounds: The number of rounds of each contender, each with the end of a block.
        every: The steps of a block, and of a round.

    Returns:
        The mean step of each contender in milliseconds, as the median over rounds, and its ratios.
    """
    folder = tempfile.mkdtemp(prefix="gadam-bench-")
    try:
        contenders = {
            BASE: _plain(values, gradients),
            SAMPLED: _with_blocks(values, gradients, f"{folder}/sampled", _NEVER),
            ENDED: _with_blocks(values, gradients, f"{folder}/ended", every),
            MERGED: _with_blocks(values, gradients, f"{folder}/merged", every, max_blocks=2),
        }
        early = max(1, round(_EARLY * every))
        for contender in contenders.values():
            # Also allocates the second buffers. From here on, each block is merged with others.
            contender.run(3 * every - early)
        seconds: dict[str, list[float]] = {name: [] for name in contenders}
        order, shuffle = list(contenders), random.Random(0).shuffle
        for _ in range(rounds):
            shuffle(order)
            for name in order:
                begun = time.perf_counter()
                contenders[name].run(every)
                seconds[name].append((time.perf_counter() - begun) / every)
        ended = [_blocks_of(contenders[name])[-1] // every - 2 for name in (ENDED, MERGED)]
        kept = len(_blocks_of(contenders[MERGED])) - 1
        assert ended == [rounds, rounds], "a block ends in every round"
        assert kept == 2, "blocks were merged"
        for contender in contenders.values():
            if contender.blocks is not None:
                contender.blocks.remove()
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return {
        "steps per block": every,
        "blocks": rounds,
        "results": {name: _row(name, seconds) for name in contenders},
    }


def _row(name: str, seconds: dict[str, list[float]]) -> dict[str, float | None]:
    mean = median(seconds[name])
    added = [mine / base - 1 for mine, base in zip(seconds[name], seconds[SAMPLED])]
    return {
        "milliseconds": round(1e3 * mean, 3),
        "ratio": round(mean / median(seconds[BASE]), 3),
        "added by the end of a block": round(median(added), 4) if name in (ENDED, MERGED) else None,
    }


def _blocks_of(contender: _Contender) -> list[int]:
    assert contender.blocks is not None
    return contender.blocks.boundaries


def _parameters(values: list[Tensor], gradients: list[Tensor]) -> list[nn.Parameter]:
    params = [nn.Parameter(value.clone()) for value in values]
    for p, gradient in zip(params, gradients):
        p.grad = gradient  # shared: no optimizer writes to gradients
    return params


def _plain(values: list[Tensor], gradients: list[Tensor]) -> _Contender:
    params = _parameters(values, gradients)
    return _Contender(torch.optim.AdamW(params, lr=1e-3, fused=True, weight_decay=0.01).step)


def _with_blocks(
    values: list[Tensor], gradients: list[Tensor], folder: str, every: int, max_blocks: int = 64
) -> _Contender:
    optimizer = gadam.Gadam(_parameters(values, gradients), lr=1e-3, weight_decay=0.01)
    blocks = gadam.BlockAverages(optimizer, folder, every=every, max_blocks=max_blocks)
    return _Contender(optimizer.step, blocks)


def to_markdown(report: Document) -> list[str]:
    """Return the lines of a Markdown table.

    Args:
        report: What :func:`measure_blocks` returned.
    """
    lines = [
        f"| {report['blocks']} rounds of {report['steps per block']} steps | mean step, ms | ratio "
        "| added by the end of a block |",
        "|---|---:|---:|---:|",
    ]
    for name, row in report["results"].items():
        added = row["added by the end of a block"]
        share = "" if added is None else f"{100 * added:+.1f}%"
        lines.append(f"| {name} | {row['milliseconds']:.2f} | {row['ratio']:.2f} | {share} |")
    return lines
