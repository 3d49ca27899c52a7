"""A run's record as TensorBoard reads it."""

from __future__ import annotations

from pathlib import Path

from gadam.train.recipe import RecipeError
from gadam.train.record import read_lines

__all__ = ["export"]


def export(folder: Path) -> None:
    """Write the record's curves beside it, anew."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise RecipeError("--tensorboard needs its package: pip install tensorboard") from None
    target = folder / "tensorboard"
    for old in target.glob("events.*"):
        old.unlink()
    with SummaryWriter(str(target)) as writer:
        for line in read_lines(folder / "epochs.jsonl"):
            writer.add_scalar("train/loss", line["train_loss"], line["epoch"])
            writer.add_scalar("lr", line["lr"], line["epoch"])
            for point in ("iterate", "average"):
                for part, measures in line.get(point, {}).items():
                    for name, value in measures.items():
                        writer.add_scalar(f"{point}/{part} {name}", value, line["epoch"])
