"""Draw the figures of docs/theory.md from the committed results: `python -m tools.theory_figures`.

The results are those of `gadam theory all --out FOLDER`, packed with
`python -m tools.archive pack FOLDER results/theory.json`.
"""

from __future__ import annotations

from gadam.report.chart import Chart, Series, draw
from gadam.runs.archive import read_archive
from tools import DOCS, RESULTS


def main() -> None:
    """Draw all figures as PNG files in docs/theory."""
    out = DOCS / "theory"
    out.mkdir(exist_ok=True)
    for content in read_archive(RESULTS / "theory.json").values():
        name = content.pop("name")
        series = [Series(**each) for each in content.pop("series")]
        (out / f"{name}.png").write_bytes(draw(Chart(**content, series=series))["png"])


if __name__ == "__main__":
    main()
