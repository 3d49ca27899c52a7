"""Write a report to disk."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from gadam.report.errors import ReportError
from gadam.report.figures import write_figures
from gadam.report.page import render
from gadam.report.tables import write_tables
from gadam.runs import Collection, collect
from gadam.runs.files import write_atomically

__all__ = ["write"]


def write(
    folders: Sequence[Path],
    out: Path,
    *,
    figures: bool = True,
    collection: Collection | None = None,
) -> Path:
    """Write report.html, and figures and tables beside it.

    Problems with single runs are printed to stderr and shown on the page.

    Args:
        folders: Folders of runs, or of whole sweeps.
        out: Where to write; created if it does not exist.
        figures: Also write figures and tables, to the subfolder ``figures``.
        collection: The runs in these folders, if they have been read.

    Returns:
        The path of the page.

    Raises:
        ReportError: There is nothing to report, ``out`` cannot be created, or the extra
            ``gadam[report]`` is not installed.
        RunError: A file cannot be written.
    """
    collection = collect(folders) if collection is None else collection
    if not collection.runs and not collection.sections:
        none = "There are no runs in it or up to two levels below it."
        reason = " ".join(collection.problems) or none
        raise ReportError(f"Nothing to report in {', '.join(map(str, folders))}. {reason}")
    for problem in collection.problems:
        print(f"note: {problem}", file=sys.stderr)
    place = out / "figures" if figures and collection.runs else out
    try:
        place.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ReportError(
            f"{place} could not be created: {error.strerror}. Use a different --out."
        ) from None
    if figures and collection.runs:
        write_figures(collection, place)
        write_tables(collection, place)
    page = out / "report.html"
    write_atomically(page, render(collection).encode())
    return page
