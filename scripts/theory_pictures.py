"""Draw the figures of docs/theory.md from the committed results.

Usage: `python scripts/theory_pictures.py`. The results come from
`gadam theory all --out results/theory`. Only the JSON files that it writes are committed.
"""

from __future__ import annotations

import json
from pathlib import Path

from gadam.report.chart import Chart, Series, draw

ROOT = Path(__file__).parents[1]


def main() -> None:
    """Draw all figures as PNG files in docs/theory."""
    out = ROOT / "docs" / "theory"
    out.mkdir(exist_ok=True)
    for path in sorted((ROOT / "results" / "theory").glob("*.json")):
        content = json.loads(path.read_text())
        del content["name"]
        content["series"] = [Series(**series) for series in content["series"]]
        (out / f"{path.stem}.png").write_bytes(draw(Chart(**content))["png"])


if __name__ == "__main__":
    main()
