"""From measured values to the report: build the sections of the parts, and write them."""

from __future__ import annotations

import platform
from collections.abc import Mapping, Sequence
from pathlib import Path

from gadam.runs.collect import Collection
from gadam.runs.files import (
    Document,
    RunError,
    explain_os_error,
    read_json,
    write_atomically,
    write_json,
)
from gadam.runs.folder import versions
from gadam.study.measured import Measured, RunValues
from gadam.study.part import find
from gadam.study.section import SectionBuilder
from gadam.study.settings import Settings
from gadam.train.sweep import available_cores

__all__ = ["build_sections", "write_sections"]


def build_sections(
    collection: Collection,
    values: Mapping[tuple[str, int], RunValues],
    parts: Sequence[str],
    settings: Settings,
) -> list[SectionBuilder]:
    """Build the sections of the parts. A part without any values is left out.

    Args:
        collection: The runs.
        values: Values by label and seed.
        parts: The names of the parts, in the order of the report.
        settings: How the values were measured.
    """
    measured = Measured(collection, values, settings)
    sections = []
    for part in find(parts):
        section = SectionBuilder(part.name, part.title)
        part.report(measured, section)
        if section.blocks:
            sections.append(section)
    return sections


def write_sections(
    folder: Path,
    sections: Sequence[SectionBuilder],
    parts: Sequence[str],
    settings: Settings,
    command: str,
) -> None:
    """Write the sections for the report, and their numbers to ``analysis.json``.

    Results of other parts in the folder are kept.

    Args:
        folder: The folder of the runs.
        sections: The sections.
        parts: The names of the parts that were measured. Old sections of theirs are removed.
        settings: How the values were measured.
        command: The command that measured them.

    Raises:
        RunError: A file cannot be written.
    """
    place = folder / "sections"
    try:
        place.mkdir(exist_ok=True)
    except OSError as error:
        raise RunError(explain_os_error(error, place)) from None
    for section in sections:
        for name, content in section.files.items():
            write_atomically(place / name, content)
        page = {"title": section.title, "blocks": section.blocks}
        write_json(place / f"analysis-{section.name}.json", page, sealed=True)
    for name in set(parts) - {section.name for section in sections}:
        (place / f"analysis-{name}.json").unlink(missing_ok=True)  # from an earlier analysis
    origin = {
        "command": command,
        "settings": settings.to_dict(),
        "versions": versions(),
        "machine": {"system": platform.platform(), "cores": available_cores()},
    }
    path = folder / "analysis.json"
    kept = {name: part for name, part in _read_parts(path).items() if name not in parts}
    new = {section.name: {**origin, "values": section.summary} for section in sections}
    write_json(path, {"parts": kept | new}, sealed=True)


def _read_parts(path: Path) -> Document:
    try:
        return dict(read_json(path)["parts"])
    except (ValueError, KeyError, TypeError):
        return {}
