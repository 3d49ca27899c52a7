"""The checks of the prose find what they are for. `make lint` runs them on the project."""

from __future__ import annotations

import doctest
from pathlib import Path

import pytest
from tools import prose

ROOT = Path(__file__).parents[2]

VOCABULARY = prose.phrases(prose.VOCABULARY.read_text())


@pytest.mark.parametrize(
    "sentence",
    [
        '    """Gives whether all parameters are finite after it.',
        "17 to 23 s a run",
        "SWA's gain is not sure",
        "lr must not be negative, as -1 is",
        "A command that was stopped goes on where it was when it is given again",
        "another process is at work in X",
        "or, to train, say another --out",
        "imported when it is first asked for: what is asked for",
        "It was mended.",
        "Start anew.",
    ],
)
def test_phrases_of_the_design_are_found(sentence):
    assert list(prose.unwanted(sentence, VOCABULARY))


@pytest.mark.parametrize(
    "sentence",
    [
        "Returns True if all parameters are finite after the step.",
        "17–23 s per run",
        "SWA's gain is not statistically significant.",
        "lr must be non-negative, got -1.",
        "Rerun an interrupted command to resume it.",
        "Another process is using X. Wait for it to finish, or pass a different --out.",
        "Import optional modules lazily.",
        "Recommend the start. Two seeds give very wide intervals.",
    ],
)
def test_what_to_write_instead_is_accepted(sentence):
    assert list(prose.unwanted(sentence, VOCABULARY)) == []


@pytest.mark.parametrize("name", ["prose", "sphinx_extension"])
def test_examples_in_docstrings_are_right(name):
    module = pytest.importorskip(f"tools.{name}")
    failed, tried = doctest.testmod(module)
    assert tried
    assert not failed


def test_a_phrase_without_advice_is_refused():
    with pytest.raises(ValueError, match="without =>"):
        prose.phrases("anew")


def test_broken_links_are_found(tmp_path):
    (tmp_path / "b.md").write_text("# One title\n## One title\n```\n# no title\n```\n")
    page = tmp_path / "a.md"
    page.write_text(
        "# A page\n[ok](b.md) [ok](b.md#one-title-1) [ok](#a-page) [ok](https://x.org/y)\n"
        "`[code](no.md)` [bad](c.md) [bad](b.md#no-title) ![bad](c.png) [bad](#b)\n"
    )
    assert list(prose.broken_links(page)) == [
        "c.md leads to no file",
        "b.md#no-title leads to no heading",
        "c.png leads to no file",
        "#b leads to no heading",
    ]
