"""Extra sections of the page, written by other parts of the library.

To add a section, write ``sections/NAME.json`` in the folder of a run or a sweep. It holds
``{"title": …, "blocks": [block, …]}`` with these blocks:

======================================================  =======================================
``{"kind": "text", "text": …}``                         a paragraph
``{"kind": "code", "text": …}``                         lines of code
``{"kind": "table", "header": […], "rows": [[…], …]}``  a table
``{"kind": "chart", "spec": …, "caption": …}``          a Vega-Lite chart
``{"kind": "image", "file": …, "caption": …}``          a PNG or SVG file beside the JSON file
======================================================  =======================================
"""

from __future__ import annotations

import base64
from collections.abc import Iterable
from html import escape
from pathlib import Path

from gadam.report.tables import html_table
from gadam.report.vega_specs import Spec
from gadam.runs.collect import Section
from gadam.runs.files import Json, nan_to_null

__all__ = ["render_sections"]

_IMAGE_TYPES = {".png": "image/png", ".svg": "image/svg+xml"}


def render_sections(sections: Iterable[Section]) -> tuple[str, list[Spec]]:
    """Render sections as HTML. A damaged block is replaced by a note.

    Args:
        sections: The sections.

    Returns:
        The HTML, and the charts that ``page.js`` draws into ``#section-chart-0``, ``-1``, ….
    """
    charts: list[Spec] = []
    html = "".join(_render_section(section, charts) for section in sections)
    return html, charts


def _render_section(section: Section, charts: list[Spec]) -> str:
    blocks = ""
    for block in section.blocks:
        try:
            blocks += _render_block(block, section.folder, charts)
        except (OSError, TypeError, ValueError, AttributeError) as error:
            blocks += f'<p class="note">This block cannot be displayed: {escape(str(error))}</p>'
    return f"<section><h2>{escape(section.title)}</h2>{blocks}</section>"


def _render_block(block: Json, folder: Path, charts: list[Spec]) -> str:
    """Render a block, and append its chart if it has one. Any JSON value may be passed."""
    kind = block.get("kind") if isinstance(block, dict) else None
    if kind == "text":
        return f"<p>{escape(str(block.get('text', '')))}</p>"
    if kind == "code":
        return f"<pre>{escape(str(block.get('text', '')))}</pre>"
    if kind == "table":
        header = [str(cell) for cell in block.get("header", [])]
        rows = [[str(cell) for cell in row] for row in block.get("rows", [])]
        return html_table(header, rows, str(block.get("caption", "")))
    if kind == "chart" and isinstance(block.get("spec"), dict):
        # `usermeta` could change how vega-embed loads and draws the chart.
        spec = {key: value for key, value in block["spec"].items() if key != "usermeta"}
        charts.append(nan_to_null(spec))
        name = f"section-chart-{len(charts) - 1}"
        label = escape(str(block.get("caption", "figure")))
        chart = f'<div class="chart" id="{name}" role="img" aria-label="{label}"></div>'
        return _figure(chart, block)
    if kind == "image":
        path = (folder / str(block.get("file", ""))).resolve()
        inside = path.is_relative_to(folder.resolve())
        if inside and path.is_file() and path.suffix in _IMAGE_TYPES:
            content = base64.b64encode(path.read_bytes()).decode()
            label = escape(str(block.get("caption", "figure")))
            source = f"data:{_IMAGE_TYPES[path.suffix]};base64,{content}"
            return _figure(f'<img src="{source}" alt="{label}">', block)
    return '<p class="note">This block cannot be displayed.</p>'


def _figure(content: str, block: dict[str, Json]) -> str:
    caption = escape(str(block.get("caption", "")))
    return f"<figure>{content}<figcaption>{caption}</figcaption></figure>"
