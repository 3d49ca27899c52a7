"""The checks of the built site find what they are for. `make docs` runs them on the real one."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from tools import site_check

ROOT = Path(__file__).parents[2]

GOOD = """<html><head><link rel="stylesheet" href="site.css"><link rel="canonical"
href="https://example.org/a"></head><body><h1 id="top">A</h1>
<a href="#top">up</a> <a href="b.html#here">b</a> <a href="https://example.org">elsewhere</a>
<img src="a.svg" alt="A picture"><dt id="gadam.EMA"></dt></body></html>"""


@pytest.fixture
def site(tmp_path):
    (tmp_path / "index.html").write_text(GOOD)
    (tmp_path / "b.html").write_text('<p id="here"></p>')
    (tmp_path / "site.css").write_text("a { background: url(a.svg) }")
    (tmp_path / "a.svg").write_text('<svg xmlns="http://www.w3.org/2000/svg"></svg>')
    return tmp_path


def test_a_complete_site_has_no_problems(site):
    names = {"gadam.EMA": "gadam.average.plan.EMA", "gadam.average.EMA": "gadam.average.plan.EMA"}
    assert site_check.check(site, names) == []


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        ('href="site.css"', 'href="https://cdn.example.org/a.css"', "loads https://cdn"),
        ('href="site.css"', 'href="//cdn.example.org/a.css"', "loads //cdn"),
        ("</head>", '<script src="https://x.org/a.js"></script></head>', "loads https://x"),
        ("</head>", "<style>@import 'https://x.org/a.css'</style></head>", "loads https://x"),
        ('<a href="#top"', '<a style="background:url(https://x.org/a)" href="#top"', "loads https"),
        ('src="a.svg"', 'src="http://x.org/a.svg"', "loads http://x"),
        ('alt="A picture"', 'alt=""', "a.svg has no alt text"),
        ('href="#top"', 'href="#bottom"', "#bottom leads to a place that does not exist"),
        ('href="b.html#here"', 'href="b.html#there"', "b.html#there leads to a place"),
        ('href="b.html#here"', 'href="c.html"', "c.html leads nowhere"),
        ('href="b.html#here"', 'href="../b.html"', "../b.html leads nowhere"),
        ('<dt id="gadam.EMA">', "<dt>", "gadam.EMA is public but not documented"),
    ],
)
def test_each_problem_is_found(site, old, new, problem):
    assert old in GOOD
    (site / "index.html").write_text(GOOD.replace(old, new))
    (found,) = site_check.check(site, {"gadam.EMA": "gadam.average.plan.EMA"})
    assert problem in found


def test_remote_assets_of_style_sheets_and_pictures_are_found(site):
    (site / "site.css").write_text("@font-face { src: url('https://fonts.example.org/a.woff2') }")
    (site / "a.svg").write_text('<svg><image href="https://x.org/a.png"/></svg>')
    problems = site_check.check(site)
    assert len(problems) == 2
    assert all("loads https://" in problem for problem in problems)


def test_an_empty_folder_is_a_problem(tmp_path):
    (problem,) = site_check.check(tmp_path)
    assert "has no pages" in problem


def test_public_names_are_those_of_the_packages():
    import gadam
    from gadam import analysis, average, schedule

    names = site_check.public_names()
    for module in (gadam, analysis, average, schedule):
        assert {f"{module.__name__}.{name}" for name in module.__all__} <= set(names)
    assert names["gadam.EMA"] == names["gadam.average.EMA"] == "gadam.average.plan.EMA"
    assert names["gadam.schedule"] == "gadam.schedule"
    assert "gadam.integrations.lightning.AveragedWeights" in names
    for name in ("EMA", "Gadam", "IterateAverage", "refresh_batchnorm"):
        home, _, symbol = names[f"gadam.{name}"].rpartition(".")
        assert getattr(gadam, name) is getattr(sys.modules[home], symbol)


def test_all_pages_are_in_the_table_of_contents():
    """`make docs` fails for a page that no table of contents lists. Find it without a build."""
    for folder in (ROOT / "docs", ROOT / "docs" / "reference"):
        text = (folder / "index.md").read_text()
        listed = {line.rpartition("<")[2].rstrip(">") for line in text.splitlines()}
        pages = {path.stem for path in folder.glob("*.md")} - {"index"}
        assert not pages - listed, f"{folder / 'index.md'} lacks {pages - listed}"
