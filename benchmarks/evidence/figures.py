"""Forest plots of the evidence, as SVG that is readable on light and dark pages."""

from __future__ import annotations

import math
from html import escape
from pathlib import Path

from benchmarks.evidence.contenders import GADAM
from gadam.runs.files import Document, write_atomically

__all__ = ["FOLDER", "forest", "write"]

FOLDER = Path(__file__).parents[2] / "docs" / "evidence"
REFERENCE = GADAM
WIDTH, LEFT, RIGHT, TOP, ROW, BOTTOM = 720, 215, 95, 34, 22, 44
# One palette for both backgrounds: media queries ignore the theme switch of the site.
STYLE = """text{font:13px system-ui,sans-serif;fill:#777c82}
.zero{stroke:#777c82;stroke-dasharray:4 3}.grid{stroke:#868b9155}
.averaged{stroke:#2f7fd0;fill:#2f7fd0}.plain{stroke:#d9632a;fill:#d9632a}"""


def write(summary: Document, folder: Path = FOLDER) -> list[Path]:
    """Write one figure per task that has comparisons.

    Args:
        summary: What :func:`benchmarks.evidence.analysis.summarize` returns.
        folder: The folder of the figures.

    Returns:
        The files.
    """
    written = []
    for name, task in summary["tasks"].items():
        content = forest(task)
        if content is not None:
            folder.mkdir(parents=True, exist_ok=True)
            written.append(folder / f"{name}.svg")
            write_atomically(written[-1], content.encode())
    return written


def forest(task: Document) -> str | None:
    """Return differences to Gadam with 95% intervals, or None if there are none.

    Args:
        task: An entry of the summary.
    """
    rows = [row for row in task["rows"] if REFERENCE in row["differences"]]
    if not rows:
        return None
    found = [row["differences"][REFERENCE] for row in rows]
    ticks = _ticks(
        min(0.0, *(one["interval"][0] for one in found)),
        max(0.0, *(one["interval"][1] for one in found)),
    )
    low, high = ticks[0], ticks[-1]

    def x(number: float) -> float:
        return LEFT + (number - low) / (high - low) * (WIDTH - LEFT - RIGHT)

    height = TOP + ROW * len(rows) + BOTTOM
    bottom = TOP + ROW * len(rows)
    unit = "points of accuracy" if task["metric"] == "accuracy" else "lower perplexity"
    title = f"{task['title']}: difference to {REFERENCE}"
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" '
        f'width="{WIDTH}" height="{height}" role="img" aria-label="{escape(title)}">',
        f"<title>{escape(title)}</title><style>{STYLE}</style>",
        _text(f"{title}, 95% intervals", WIDTH / 2, 18, "middle"),
    ]
    for tick in ticks:
        kind = "zero" if tick == 0 else "grid"
        at = f"{x(tick):.1f}"
        parts.append(f'<line class="{kind}" x1="{at}" x2="{at}" y1="{TOP - 6}" y2="{bottom}"/>')
        parts.append(_text(f"{tick:+g}", x(tick), bottom + 16, "middle", "muted"))
    for index, (row, one) in enumerate(zip(rows, found)):
        y = TOP + ROW * index + ROW / 2
        kind = "averaged" if row["averaged"] else "plain"
        start, end = (f"{x(number):.1f}" for number in one["interval"])
        parts += [
            _text(row["label"], LEFT - 12, y + 4, "end"),
            f'<line class="{kind}" stroke-width="2" x1="{start}" x2="{end}" y1="{y}" y2="{y}"/>',
            f'<circle class="{kind}" r="4" cx="{x(one["mean"]):.1f}" cy="{y}"/>',
            _text(f"{row['mean']:.2f}", WIDTH - 8, y + 4, "end", "muted"),
        ]
    note = f"better than {REFERENCE} to the right, in {unit}; right column: test mean"
    parts += [_text(note, (LEFT + WIDTH - RIGHT) / 2, bottom + 36, "middle", "muted"), "</svg>"]
    return "\n".join(parts) + "\n"


def _text(text: str, x: float, y: float, anchor: str, kind: str = "label") -> str:
    place = f'x="{x:.1f}" y="{y:.0f}" text-anchor="{anchor}"'
    return f'<text class="{kind}" {place}>{escape(text)}</text>'


def _ticks(low: float, high: float) -> list[float]:
    """Return round numbers that enclose an interval, with zero among them."""
    raw = max(high - low, 1e-6) / 6
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= raw)
    first, last = math.floor(low / step), math.ceil(high / step)
    return [round(index * step, 9) for index in range(first, last + 1)]
