"""Sections of the page that other parts of the library write."""

from __future__ import annotations

from typing import Any

from gadam.report.sections import render_sections
from gadam.runs.collect import Section


def test_all_kinds_of_blocks(tmp_path):
    folder = tmp_path / "sections"
    folder.mkdir()
    (folder / "image.png").write_bytes(b"\x89PNG")
    (tmp_path / "secret.png").write_bytes(b"secret")
    spec = {"mark": "bar", "data": {"values": []}}
    blocks: list[dict[str, Any]] = [
        {"kind": "text", "text": "Iterates are far apart."},
        {"kind": "code", "text": "if a < b:\n    pass"},
        {"kind": "table", "header": ["a", "b"], "rows": [["x", 1.5]]},
        {"kind": "chart", "spec": {**spec, "usermeta": {}}, "caption": "bars"},
        {"kind": "image", "file": "image.png", "caption": "an image"},
        {"kind": "image", "file": "../secret.png"},
    ]
    html, charts = render_sections([Section("Diversity", tuple(blocks), folder)])
    assert "<h2>Diversity</h2>" in html
    assert "Iterates are far apart." in html
    assert "<pre>if a &lt; b:\n    pass</pre>" in html
    assert "<span>1.5</span>" in html
    assert 'id="section-chart-0"' in html
    assert "data:image/png" in html
    assert html.count("cannot be displayed") == 1
    assert charts == [spec]


def test_damaged_blocks_are_replaced_by_a_note(tmp_path):
    blocks = (
        3,
        None,
        {"kind": "unknown"},
        {"kind": "table", "rows": [3]},
        {"kind": "image", "file": "\0"},
        {"kind": "chart", "spec": "x"},
    )
    html, charts = render_sections([Section("<odd>", blocks, tmp_path)])
    assert "&lt;odd&gt;" in html
    assert html.count("cannot be displayed") == len(blocks)
    assert charts == []


def test_charts_are_numbered_across_sections(tmp_path):
    chart = {"kind": "chart", "spec": {"mark": "bar"}}
    sections = [Section(title, (chart,), tmp_path) for title in ("one", "two")]
    html, charts = render_sections(sections)
    assert 'id="section-chart-1"' in html
    assert len(charts) == 2
