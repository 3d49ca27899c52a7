"""Draw the pictures of docs/theory.md from the committed numbers: `python scripts/theory_pictures.py`.

The numbers come from `gadam theory all --out results/theory`; of what that writes, the JSON files are kept.
"""

from __future__ import annotations

import json
from pathlib import Path

from gadam.report.chart import Chart, Series, draw

ROOT = Path(__file__).parents[1]


def main() -> None:
    """Draw them all."""
    out = ROOT / "docs" / "theory"
    out.mkdir(exist_ok=True)
    for path in sorted((ROOT / "results" / "theory").glob("*.json")):
        content = json.loads(path.read_text())
        del content["name"]
        content["series"] = [Series(**series) for series in content["series"]]
        (out / f"{path.stem}.png").write_bytes(draw(Chart(**content))["png"])


if __name__ == "__main__":
    main()
