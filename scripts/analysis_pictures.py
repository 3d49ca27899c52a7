"""Draw the pictures of docs/analysis.md from the committed results: `python scripts/analysis_pictures.py`."""

from __future__ import annotations

from pathlib import Path

from gadam.analysis.sections import sections
from gadam.analysis.study import Notebook, Plan
from gadam.report.records import collect

ROOT = Path(__file__).parents[1]
# The sweep, what is shown of it, and which of its files.
SHOWN = (
    ("fig1b", "diversity", ("error-decay", "diversity-decay", "diversity")),
    ("fig1d", "ensemble", ("ensemble",)),
    ("fig2d", "rate", ("rate",)),
    ("fig3d", "parameters", ("parameters",)),
    ("fig1b", "landscape", ("line", "plane")),
    ("fig1b", "density", ("density",)),
)


def main() -> None:
    """Draw them all."""
    place = ROOT / "docs" / "analysis"
    place.mkdir(exist_ok=True)
    for name, part, wanted in SHOWN:
        collection = collect([ROOT / "results" / name])
        values = {
            (run.label, run.seed): Notebook(run.folder / "analysis.jsonl").newest
            for run in collection.runs
        }
        for section in sections(collection, values, Plan((part,))):
            for file, content in section.files.items():
                stem = file.split(".")[0]
                for each in wanted:
                    plane = each == "plane" and stem.startswith("plane-")
                    if file.endswith(".png") and (stem == each or plane):
                        (place / f"{name}-{each}.png").write_bytes(content)


if __name__ == "__main__":
    main()
