"""Colors and line styles."""

from __future__ import annotations

import re
from importlib import resources

from hypothesis import given
from hypothesis import strategies as st

from gadam.report.style import COLORS, MARKS, PAIRS, colors_by_label, styles, vega_dashes


def test_24_methods_look_different():
    names = [f"method {i}" for i in range(24)]
    pairs = {names[i + 1]: names[i] for i in range(0, 24, 2)}
    for bases in ({}, pairs, {names[1]: names[0], names[2]: names[0]}):
        found = styles(names, bases)
        assert list(found) == names
        assert len({(s.color, s.shape) for s in found.values()}) == 24
        assert len({(s.color, s.dashes) for s in found.values()}) == 24


def test_pairs_get_related_colors_and_equal_names_share_a_style():
    bases = {"SWA": "SGD", "EMA": "SGD", "Gadam": "AdamW"}
    found = styles(["SGD", "SWA", "AdamW", "Gadam", "EMA", "SGD"], bases)
    assert list(found) == ["SGD", "SWA", "AdamW", "Gadam", "EMA"]
    assert (found["SGD"].color, found["SWA"].color) == PAIRS[0]
    assert (found["AdamW"].color, found["Gadam"].color) == PAIRS[1]
    assert found["EMA"].color == PAIRS[2][1]


@given(st.lists(st.text(max_size=3), max_size=40), st.data())
def test_any_methods_and_bases_have_styles(names, data):
    bases = data.draw(st.dictionaries(st.text(max_size=3), st.sampled_from(names or [""])))
    assert set(styles(names, bases)) == set(names)


def test_colors_stand_out_on_both_backgrounds():
    """The contrast that WCAG asks of graphics is 3."""

    def luminance(color: str) -> float:
        parts = [int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        red, green, blue = (
            c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4 for c in parts
        )
        return 0.2126 * red + 0.7152 * green + 0.0722 * blue

    css = resources.files("gadam.report").joinpath("page.css").read_text()
    backgrounds = re.findall(r"--paper: (#[0-9a-f]{6});", css)
    assert len(backgrounds) == 2
    for paper in map(luminance, backgrounds):
        for color in map(luminance, COLORS):
            dark, light = sorted((paper, color))
            assert (light + 0.05) / (dark + 0.05) >= 3


def test_equal_labels_share_a_color():
    assert colors_by_label(["a", "b", "a"]) == {"a": COLORS[0], "b": COLORS[1]}


def test_vega_draws_a_solid_line_for_no_dashes():
    assert vega_dashes(()) == [1, 0]
    assert vega_dashes((2, 3)) == [2, 3]


def test_all_marks_are_known_to_charts():
    assert set(MARKS.values()) == {"line", "dashed", "points"}
