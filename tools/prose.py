"""Check the project's prose: `python -m tools.prose`.

- Phrases in `vocabulary.txt` do not occur in Markdown or Python files.
- Links in Markdown files lead to files and headings that exist.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from tools import ROOT

__all__ = ["Phrase", "anchors", "broken_links", "main", "phrases", "unwanted"]

VOCABULARY = ROOT / "tools" / "vocabulary.txt"
_LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")
_CODE = re.compile(r"^(```|:::).*?^\1`*:*$|`[^`\n]+`", re.DOTALL | re.MULTILINE)


@dataclass(frozen=True)
class Phrase:
    """A phrase to avoid.

    Args:
        pattern: What it looks like.
        instead: What to write instead.
    """

    pattern: re.Pattern[str]
    instead: str


def phrases(text: str) -> list[Phrase]:
    """Return the phrases of a vocabulary.

    Args:
        text: Its text: a regular expression, `=>`, and the advice per line.

    Raises:
        ValueError: If a line has no advice.
    """
    found = []
    for line in text.splitlines():
        if line and not line.startswith("#"):
            pattern, arrow, instead = line.partition("=>")
            if not arrow:
                raise ValueError(f"The vocabulary has a line without =>: {line!r}.")
            found.append(Phrase(re.compile(pattern.strip(), re.IGNORECASE), instead.strip()))
    return found


def unwanted(text: str, vocabulary: Iterable[Phrase]) -> Iterator[tuple[int, str, str]]:
    """Yield the phrases that a text should not use.

    Args:
        text: The text.
        vocabulary: The phrases.

    Yields:
        The number of the line, the phrase, and what to write instead.

    Example:
        >>> list(unwanted("Utilize it.", phrases("utilize => use")))
        [(1, 'Utilize', 'use')]
    """
    for phrase in vocabulary:
        for number, line in enumerate(text.splitlines(), 1):
            match = phrase.pattern.search(line)
            if match:
                yield number, match[0].strip(), phrase.instead


def anchors(text: str) -> set[str]:
    r"""Return the anchors of a Markdown file's headings, as GitHub and the site name them.

    Args:
        text: The file's text.

    Example:
        >>> sorted(anchors("# How to add …\n## `x.py`, and others\n"))
        ['how-to-add-', 'xpy-and-others']
    """
    headings = re.findall(
        r"^#{1,6} (.+)$", re.sub(r"^```.*?^```", "", text, flags=re.S | re.M), re.M
    )
    found: set[str] = set()
    for heading in headings:
        slug = re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")
        count = 1
        while (name := slug if count == 1 else f"{slug}-{count - 1}") in found:
            count += 1
        found.add(name)
    return found


def broken_links(path: Path) -> Iterator[str]:
    """Yield the links of a Markdown file that lead to no file or heading.

    Args:
        path: The file.
    """
    for link in _LINK.findall(_CODE.sub("", path.read_text())):
        if re.match(r"\w+:", link):
            continue
        file, _, anchor = link.partition("#")
        target = (path.parent / file).resolve() if file else path.resolve()
        if not target.exists():
            yield f"{link} leads to no file"
        elif anchor and target.suffix == ".md" and anchor not in _anchors(target):
            yield f"{link} leads to no heading"


@cache
def _anchors(path: Path) -> set[str]:
    return anchors(path.read_text())


def _tracked() -> list[Path]:
    """Return the Markdown and Python files of the repository."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "*.md", "*.py"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return [ROOT / name for name in listed.stdout.splitlines() if (ROOT / name).is_file()]


def main() -> int:
    """Print what to change.

    Returns:
        The exit status: 1 if there is something to change.
    """
    vocabulary = phrases(VOCABULARY.read_text())
    problems = []
    for path in _tracked():
        name = path.relative_to(ROOT)
        if name.parts[0] != "tests" or path.name == "README.md":
            for number, found, instead in unwanted(path.read_text(), vocabulary):
                problems.append(f"{name}:{number}: “{found}”. Write: {instead}")
        if path.suffix == ".md":
            problems += [f"{name}: {problem}" for problem in broken_links(path)]
    print("\n".join(problems) if problems else "Phrases and links are in order.")
    return int(bool(problems))


if __name__ == "__main__":
    sys.exit(main())
