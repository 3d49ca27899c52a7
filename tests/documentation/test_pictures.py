"""The site's pictures come from the results, and are readable in light and dark mode."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from tools import site_pictures

ROOT = Path(__file__).parents[2]

BACKGROUNDS = ("#ffffff", "#131416")  # of the site's two modes


def luminance(color: str) -> float:
    levels = [int(color[place : place + 2], 16) / 255 for place in (1, 3, 5)]
    linear = [x / 12.92 if x <= 0.04045 else ((x + 0.055) / 1.055) ** 2.4 for x in levels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: str, other: str) -> float:
    light, dark = sorted((luminance(one), luminance(other)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


def test_contrast_is_that_of_the_standard():
    assert contrast("#000000", "#ffffff") == pytest.approx(21)


@pytest.mark.parametrize("name", site_pictures.PICTURES)
def test_pictures_match_the_results(name):
    path = site_pictures.FOLDER / f"{name}.svg"
    assert path.read_text() == site_pictures.PICTURES[name](), "Run: make tables"


@pytest.mark.parametrize("name", site_pictures.PICTURES)
def test_pictures_are_readable_on_both_backgrounds(name):
    text = (site_pictures.FOLDER / f"{name}.svg").read_text()
    colors = set(re.findall(r'(?:fill|stroke)="(#[0-9a-f]{6})"', text))
    assert colors
    words = set(re.findall(r'<text[^>]* fill="(#[0-9a-f]{6})"', text))
    for background in BACKGROUNDS:
        assert min(contrast(color, background) for color in colors) >= 3
        assert min(contrast(color, background) for color in words) >= 3.5


@pytest.mark.parametrize("name", site_pictures.PICTURES)
def test_pictures_are_shown_with_a_text(name):
    title = re.search(
        r"<title>(.{40,})</title>", (site_pictures.FOLDER / f"{name}.svg").read_text()
    )
    assert title
    pages = [path.read_text() for path in (ROOT / "docs").glob("*.md")]
    assert any(re.search(rf"!\[.{{20,}}\]\(assets/{name}\.svg\)", page) for page in pages)
