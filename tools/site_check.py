"""Check the built documentation site: `python -m tools.site_check build/site`.

- It loads nothing from a network, so it works from disk.
- Every link inside the site leads to a page and a place that exist.
- Every picture has a text for readers who cannot see it.
- Every public name of the library is documented.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

from tools import ROOT

__all__ = ["Page", "check", "main", "public_names"]

SOURCE = ROOT / "src"

# Attributes that make a browser load something, by tag. A `link` does so for some relations only.
_LOADING = {
    "script": ("src",),
    "img": ("src", "srcset"),
    "iframe": ("src",),
    "source": ("src", "srcset"),
    "video": ("src", "poster"),
    "audio": ("src",),
    "embed": ("src",),
    "object": ("data",),
    "link": ("href",),
    "input": ("src",),
    "use": ("href", "xlink:href"),
    "image": ("href", "xlink:href"),
}
_PASSIVE = {"canonical", "index", "search", "next", "prev", "author", "copyright", "help"}
_REMOTE = re.compile(r"\s*(https?:|//|wss?:)", re.IGNORECASE)


class Page(HTMLParser):
    """What a page loads, links to, and contains.

    Args:
        text: The HTML text.

    Attributes:
        ids: The ids of its elements.
        links: The targets of its links.
        loads: What a browser loads for it.
        unnamed: Pictures without a text.
    """

    def __init__(self, text: str) -> None:
        super().__init__()
        self.ids: set[str] = set()
        self.links: list[str] = []
        self.loads: list[str] = []
        self.unnamed: list[str] = []
        self._styled = False
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Note what an element says.

        Args:
            tag: Its tag.
            attrs: Its attributes.
        """
        values = {name: value or "" for name, value in attrs}
        if "id" in values:
            self.ids.add(values["id"])
        if tag == "a" and "href" in values:
            self.links.append(values["href"])
        passive = tag == "link" and set(values.get("rel", "").split()) <= _PASSIVE
        if not passive:
            self.loads += [values[name] for name in _LOADING.get(tag, ()) if name in values]
        self.loads += _styles(values.get("style", ""))
        if tag == "img" and not values.get("alt", "").strip():
            self.unnamed.append(values.get("src", "a picture"))
        self._styled = tag == "style"

    def handle_data(self, data: str) -> None:
        """Note what a style sheet in the page loads.

        Args:
            data: The text of an element.
        """
        if self._styled:
            self.loads += _styles(data)
            self._styled = False


def _styles(text: str) -> list[str]:
    """Return what CSS loads."""
    found = re.findall(r"url\(\s*['\"]?([^'\")]+)|@import\s+['\"]([^'\"]+)", text)
    return [first or second for first, second in found]


def check(site: Path, names: dict[str, str] | None = None) -> list[str]:
    """Return what is wrong with a site, one sentence per problem.

    Args:
        site: The folder of the site.
        names: The documented object of every public name, as :func:`public_names` returns it.
    """
    pages = {path: Page(path.read_text()) for path in sorted(site.rglob("*.html"))}
    if not pages:
        return [f"{site} has no pages. Build them with `make docs`."]
    problems = []
    for path, page in pages.items():
        name = path.relative_to(site)
        problems += [f"{name} loads {url}." for url in page.loads if _REMOTE.match(url)]
        problems += [f"{name}: {picture} has no alt text." for picture in page.unnamed]
        problems += [f"{name}: {problem}" for problem in _broken(site, path, pages)]
    for path in sorted([*site.rglob("*.css"), *site.rglob("*.svg")]):
        loads = _styles(path.read_text()) + (Page(path.read_text()).loads if _is_svg(path) else [])
        problems += [
            f"{path.relative_to(site)} loads {url}." for url in loads if _REMOTE.match(url)
        ]
    ids = {identifier for page in pages.values() for identifier in page.ids}
    return problems + _undocumented(ids, names or {})


def _is_svg(path: Path) -> bool:
    return path.suffix == ".svg"


def _broken(site: Path, path: Path, pages: dict[Path, Page]) -> Iterator[str]:
    """Yield the links of a page that lead nowhere."""
    for link in dict.fromkeys(pages[path].links):
        parts = urlsplit(link)
        if parts.scheme or parts.netloc:
            continue
        target = (path.parent / unquote(parts.path)).resolve() if parts.path else path.resolve()
        if not target.is_relative_to(site.resolve()) or not target.is_file():
            yield f"the link {link} leads nowhere."
        elif parts.fragment and target.suffix == ".html":
            page = pages.get(site / target.relative_to(site.resolve()))
            if page is not None and unquote(parts.fragment) not in page.ids:
                yield f"the link {link} leads to a place that does not exist."


def _undocumented(ids: set[str], names: dict[str, str]) -> list[str]:
    documented = {origin for name, origin in names.items() if ids & {name, f"module-{name}"}}
    return [
        f"{name} is public but not documented. Add it to docs/reference/."
        for name, origin in names.items()
        if origin not in documented and f"module-{origin}" not in ids
    ]


# ----------------------------------------------------------------------------------- public names


def public_names(package: str = "gadam") -> dict[str, str]:
    """Return the names that `gadam` and its public packages export, without importing them.

    Args:
        package: The package to start from.

    Returns:
        By public name, where the object is defined: `gadam.EMA` and `gadam.average.EMA` are both
        `gadam.average.plan.EMA`.
    """
    modules = [package]
    for path in sorted(_file(package).parent.iterdir()):
        if not path.name.startswith("_") and (path.is_dir() or path.suffix == ".py"):
            modules.append(f"{package}.{path.stem}")
    found = {}
    for module in modules:
        if module == f"{package}.commands":  # a program, not a library
            continue
        for name in _exports(module):
            found[f"{module}.{name}"] = _origin(module, name)
            if _file(f"{module}.{name}").is_file() and module.endswith(".integrations"):
                inner = f"{module}.{name}"
                found |= {f"{inner}.{each}": _origin(inner, each) for each in _exports(inner)}
    return found


def _file(module: str) -> Path:
    path = SOURCE.joinpath(*module.split("."))
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


@cache
def _tree(module: str) -> ast.Module:
    path = _file(module)
    return ast.parse(path.read_text() if path.is_file() else "")


def _exports(module: str) -> list[str]:
    for node in _tree(module).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            names: list[str] = ast.literal_eval(node.value)
            return names
    return []


def _origin(module: str, name: str) -> str:
    """Return where an object is defined that a module may only import."""
    for node in ast.walk(_tree(module)):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("gadam"):
            for alias in node.names:
                if (alias.asname or alias.name) == name:
                    if _file(f"{node.module}.{alias.name}").is_file():
                        return f"{node.module}.{alias.name}"
                    return _origin(node.module, alias.name)
    return f"{module}.{name}"


def main(arguments: list[str] | None = None) -> int:
    """Print what is wrong with a site.

    Args:
        arguments: The folder of the site. Default: that of the command line.

    Returns:
        The exit status: 1 if there is a problem.
    """
    (folder,) = sys.argv[1:] if arguments is None else arguments
    problems = check(Path(folder), public_names())
    print("\n".join(problems) if problems else f"{folder}: links, assets, and names are complete.")
    return int(bool(problems))


if __name__ == "__main__":
    sys.exit(main())
