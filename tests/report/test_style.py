"""Colors and line styles."""

from __future__ import annotations

from gadam.report.style import COLORS, MARKS, colors_by_label, styles, vega_dashes


def test_24_methods_look_different():
    found = styles([f"method {i}" for i in range(24)])
    looks = {(s.color, point, s.dashes[point]) for s in found.values() for point in s.dashes}
    assert len(looks) == 48
    assert len({(s.color, s.swatch) for s in found.values()}) == 24


def test_equal_labels_share_a_color():
    assert colors_by_label(["a", "b", "a"]) == {"a": COLORS[0], "b": COLORS[1]}


def test_vega_draws_a_solid_line_for_no_dashes():
    assert vega_dashes(()) == [1, 0]
    assert vega_dashes((2, 3)) == [2, 3]


def test_all_marks_are_known_to_charts():
    assert set(MARKS.values()) == {"line", "dashed", "points"}
