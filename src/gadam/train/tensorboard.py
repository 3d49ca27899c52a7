"""A run's record as TensorBoard reads it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from gadam.train.recipe import RecipeError
from gadam.train.record import read_lines

__all__ = ["export", "writer"]


def writer() -> Any:
    """TensorBoard's own, if it is there."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise RecipeError("--tensorboard needs its package: pip install tensorboard") from None
    return SummaryWriter


def export(folder: Path) -> None:
    """Write the record's curves beside it, anew."""
    target = folder / "tensorboard"
    for old in target.glob("events.*"):
        old.unlink()
    with writer()(str(target)) as events:
        for line in read_lines(folder / "epochs.jsonl"):
            if line["train_loss"] is not None:
                events.add_scalar("train/loss", line["train_loss"], line["epoch"])
            events.add_scalar("lr", line["lr"], line["epoch"])
            for point in ("iterate", "average"):
                for part, measures in line.get(point, {}).items():
                    for name, value in measures.items():
                        if value is not None:
                            events.add_scalar(f"{point}/{part} {name}", value, line["epoch"])
