"""What the tables of docs/evidence.md share: the summary, its tasks, and Markdown tables."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cache

from gadam.runs.files import Document
from tools import RESULTS

__all__ = [
    "POINTS",
    "TASKS",
    "best",
    "champion",
    "is_final",
    "mean",
    "read",
    "table",
    "task",
    "unit",
    "with_interval",
]

TASKS = (
    "fashion-noisy",
    "fashion-clean",
    "cifar100n-5k",
    "cifar100-2k",
    "imagenet32-short",
    "ptb-transformer-short",
    "ptb-lstm-short",
)
# Readers' names of points.
POINTS = {
    "own": "",
    "half": "last half",
    "half, paper's stride": "last half, stride",
    "half, linear weights": "last half, linear weights",
    "ema 5%": "EMA, half-life 5%",
    "auto": "automatic start",
    "ema 0.99": "EMA 0.99",
    "ema 0.999": "EMA 0.999",
    "power ema": "power EMA",
    "lawa": "last ten samples",
    "bema": "BEMA",
    **{f"tail {percent}%": f"last {percent}%" for percent in ("0.3", "1", "3", "10", "25", "75")},
}


@cache
def read() -> Document:
    """Return the summary of the evidence."""
    content: Document = json.loads((RESULTS / "evidence" / "summary.json").read_text())
    return content


def task(name: str) -> Document:
    """Return the summary of a task.

    Args:
        name: The task.
    """
    found: Document = read()["tasks"][name]
    return found


def is_final(row: Document, found: Document) -> bool:
    """Return True if a method is tuned and has all final seeds.

    Args:
        row: The row of the method.
        found: The summary of its task.
    """
    return bool(row["tuned"]) and row["seeds"] == found["seeds"]


def champion(found: Document, role: str) -> Document | None:
    """Return the row that is best of its kind on validation data.

    Args:
        found: The summary of a task.
        role: "average", "held", "decayed", or "rival".
    """
    label = found["champions"].get(role)
    return next((row for row in found["rows"] if row["label"] == label), None)


def best(found: Document, rows: list[Document]) -> Document | None:
    """Return the row that is best on validation data, or None without rows.

    Args:
        found: The summary of a task.
        rows: Some of its rows.
    """
    sign = 1 if found["mode"] == "max" else -1
    return max(rows, key=lambda row: sign * row["validation"], default=None)


def mean(row: Document) -> str:
    """Return a mean and its standard error.

    Args:
        row: A row with both.
    """
    if row["mean"] is None:
        return ""
    error = "" if row["error"] is None else f" ± {row['error']:.2f}"
    return f"{row['mean']:.2f}{error}"


def unit(found: Document) -> str:
    """Return the unit of gains: nothing for points of accuracy, % for perplexities.

    Args:
        found: The summary of a task.
    """
    return "%" if found["metric"] == "perplexity" else ""


def with_interval(gain: float, interval: Sequence[float], unit: str) -> str:
    """Return a gain and its interval. It is bold if the interval does not contain zero.

    Args:
        gain: The gain.
        interval: Its interval.
        unit: Its unit.
    """
    low, high = sorted(interval)
    text = f"{gain:+.1f}{unit}"
    return f"{f'**{text}**' if low > 0 or high < 0 else text} ({low:+.1f} to {high:+.1f})"


def table(header: list[str], rows: list[list[str]], caption: str = "", left: int = 1) -> str:
    """Return a Markdown table with numbers to the right, and a caption below.

    Args:
        header: The names of the columns.
        rows: The cells.
        caption: A sentence below the table.
        left: The number of columns with text.
    """
    lines = [f"| {' | '.join(cells)} |" for cells in (header, *rows)]
    lines.insert(1, "|" + "---|" * left + "---:|" * (len(header) - left))
    return "\n".join([*lines, *(["", caption] if caption else [])])
