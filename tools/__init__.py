"""Generators of the documentation's tables and figures. Run one with `python -m tools.NAME`.

They read the committed results in `results/`, so that every number in the documentation comes from
one of them.
"""

from pathlib import Path

__all__ = ["DOCS", "RESULTS", "ROOT"]

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "results"
DOCS = ROOT / "docs"
