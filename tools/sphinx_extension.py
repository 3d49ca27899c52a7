"""What the documentation site needs beyond Sphinx: MathML, and links to files of the repository.

- Formulas become MathML, which browsers draw without scripts or fonts from a network.
- Pages may show a file of the repository: an `{include}` of `../CHANGELOG.md`.
- Links in all of them are to files of the repository, as GitHub needs them. On the site, a link
  leads to the page that shows the file.
"""

from __future__ import annotations

import posixpath
import re
from functools import cache

from docutils import nodes
from docutils.utils.math import latex2mathml
from sphinx.application import Sphinx
from sphinx.writers.html5 import HTML5Translator

from tools import DOCS, ROOT

_LINK = re.compile(r"(?<=\])\((?!\w+:|#)([\w./-]+)(#[\w-]+)?\)")
_SHOWN = re.compile(r"^```\{include\} \.\./(\S+)\n(?::heading-offset: (\d)\n)?```$", re.MULTILINE)


@cache
def pages() -> dict[str, str]:
    """Return the page of the site that shows a file of the repository, by the file's path."""
    found = {"README.md": "index.md"}
    for path in sorted(DOCS.glob("*.md")):
        found |= {shown: path.name for shown, _ in _SHOWN.findall(path.read_text())}
    return found


def site_link(path: str, place: str = "") -> str:
    """Return the target of a link on the site, with parentheses.

    Args:
        path: The file that it leads to, relative to the repository.
        place: The heading in it, with a number sign.

    Returns:
        The target. Empty if the site does not show the file: the link becomes plain text.

    Example:
        >>> site_link("docs/tasks.md", "#a"), site_link("examples/README.md")
        ('(/tasks.md#a)', '(/examples.md)')
        >>> site_link("examples/muon_adamw.py"), site_link("Makefile"), site_link("docs/no.md")
        ('(/examples.md#muon-adamw-py)', '', '(/no.md)')
    """
    example = re.fullmatch(r"examples/(\w+)\.py", path)
    if example:
        return f"(/examples.md#{example[1].replace('_', '-')}-py)"
    if path in pages():
        return f"(/{pages()[path]}{place})"
    if path.startswith("docs/") or not (ROOT / path).exists():
        return f"(/{posixpath.relpath(path, 'docs')}{place})"
    return ""


def site_text(text: str, folder: str, headings: int = 0) -> str:
    """Return the text of a page as the site shows it.

    Args:
        text: The Markdown text. An `{include}` of a file of the repository is replaced by its text.
        folder: Its folder in the repository, to which its links are relative.
        headings: How many levels to lower its headings.

    Example:
        >>> site_text("See [the examples](../examples/README.md#a) and [this](#b).", "docs")
        'See [the examples](/examples.md#a) and [this](#b).'
    """

    def link(match: re.Match[str]) -> str:
        path = posixpath.normpath(posixpath.join(folder, match[1]))
        return site_link(path, match[2] or "")

    def shown(match: re.Match[str]) -> str:
        content = (ROOT / match[1]).read_text()
        return site_text(content, posixpath.dirname(match[1]), int(match[2] or 0))

    # Every other part is a block of code.
    parts = re.split(r"(^```.*?^```$)", text, flags=re.DOTALL | re.MULTILINE)
    for place, part in enumerate(parts):
        if place % 2:
            parts[place] = _SHOWN.sub(shown, part)
        else:
            parts[place] = re.sub(r"^#", "#" * (headings + 1), _LINK.sub(link, part), flags=re.M)
    return "".join(parts)


def _read(app: Sphinx, name: str, source: list[str]) -> None:
    for shown in _SHOWN.findall(source[0]):
        app.env.note_dependency(str(ROOT / shown[0]))
    source[0] = site_text(source[0], posixpath.dirname(f"docs/{name}"))


# What docutils does not know, as far as docstrings use it.
_LATEX = (
    (r"\\rule\{[^}]*\}\{[^}]*\}", ""),
    (r"\\hspace\{[^}]*\}", r"\\quad "),
    (r"\\text(bf|it)\{", r"\\math\1{"),
    (r"\\dots(?![a-z])", r"\\ldots"),
    # One character, so that an index stands beside it, not below.
    (r"\\bar\\theta(?![a-z])", r"\\operatorname{θ̄}"),
)


def mathml(latex: str, *, block: bool = False) -> str:
    r"""Return a formula as MathML.

    Args:
        latex: The formula.
        block: Whether it is a line of its own.

    Example:
        >>> "θ̄" in mathml(r"\bar\theta_1, \dots")
        True
    """
    for pattern, replacement in _LATEX:
        latex = re.sub(pattern, replacement, latex)
    return str(latex2mathml.tex2mathml(latex, as_block=block))


def _visit_math(translator: HTML5Translator, node: nodes.math) -> None:
    translator.body.append(mathml(node.astext(), block=False))
    raise nodes.SkipNode


def _visit_math_block(translator: HTML5Translator, node: nodes.math_block) -> None:
    translator.body.append(f'<div class="math">{mathml(node.astext(), block=True)}</div>\n')
    raise nodes.SkipNode


def setup(app: Sphinx) -> dict[str, object]:
    """Register with Sphinx.

    Args:
        app: The application.
    """
    app.add_html_math_renderer("mathml", (_visit_math, None), (_visit_math_block, None))
    app.connect("source-read", _read)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
