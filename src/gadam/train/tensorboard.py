"""Export a run's record to TensorBoard."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from gadam.runs.lines import read_epochs
from gadam.runs.recipe import RecipeError
from gadam.runs.record import POINTS

__all__ = ["export", "summary_writer"]


def summary_writer() -> Any:
    """Return TensorBoard's ``SummaryWriter`` class, if it is installed."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise RecipeError("--tensorboard needs a package. Run: pip install tensorboard") from None
    return SummaryWriter


def export(folder: Path) -> None:
    """Write the record's curves to `tensorboard/` beside it, replacing older ones.

    Args:
        folder: The run's folder.
    """
    target = folder / "tensorboard"
    for old in target.glob("events.*"):
        old.unlink()
    with summary_writer()(str(target)) as events:
        for record in read_epochs(folder / "epochs.jsonl"):
            if record.train_loss == record.train_loss:
                events.add_scalar("train/loss", record.train_loss, record.epoch)
            events.add_scalar("lr", record.lr, record.epoch)
            for point in POINTS:
                metrics = record.iterate if point == "iterate" else record.average
                for split, names in (metrics or {}).items():
                    for name in names:
                        value = record.metric(name, point, split)
                        if value is not None:
                            events.add_scalar(f"{point}/{split} {name}", value, record.epoch)
