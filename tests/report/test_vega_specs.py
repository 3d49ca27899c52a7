"""The specifications of the page's charts."""

from __future__ import annotations

import re

import pytest

from gadam.report.series import Gain
from gadam.report.style import styles
from gadam.report.vega_specs import gains_spec

NAMES = {"Gadam": "Gadam", "AdamW": "AdamW"}


@pytest.mark.parametrize(
    ("scale", "ticks"), [(40.0, {"−40", "+50"}), (0.0004, {"−0.0004", "+0.0005"})]
)
def test_gains_of_all_sizes_have_plain_numbers_on_the_axis(scale, ticks):
    vl_convert = pytest.importorskip("vl_convert")
    gain = Gain("Gadam", "AdamW", 0.1 * scale, -scale, 1.2 * scale, seeds=2)
    spec = gains_spec([gain], NAMES, styles(NAMES), "gain", (gain.low, gain.high))
    texts = set(re.findall(r">([^<>]+)<", vl_convert.vegalite_to_svg(spec)))
    assert ticks <= texts
    assert not [text for text in texts if re.search(r"\de[+−-]", text)]
