"""The hash of a user's code: a file, and the modules beside it that it imports.

The files are found by reading the code, not by running it. So the hash is the same in every
process, also if a module is imported late or not at all. Imports by other means than ``import``
statements are not found. Neither is anything outside the file's folder. Installed packages are not
followed.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path

from gadam._errors import UserError
from gadam.runs.files import sha256

__all__ = ["CodeError", "changed_files", "code_files", "code_hash", "find_file", "local_modules"]


class CodeError(UserError):
    """A user's code cannot be found or read. The message says what is wrong, and what to do."""


def code_hash(path: str | Path) -> str:
    """Return one hash of a file and of the modules in its folder that it imports.

    Args:
        path: The file, or an importable module such as "package.module".

    Raises:
        CodeError: A file cannot be read, or is not valid Python.
    """
    files = code_files(path)
    return sha256("".join(f"{name} {files[name]}\n" for name in sorted(files)).encode())


def code_files(path: str | Path) -> dict[str, str]:
    """Return the hash of each file that :func:`code_hash` covers, by its path from the folder.

    Args:
        path: The file, or an importable module.

    Raises:
        CodeError: A file cannot be read, or is not valid Python.
    """
    root = find_file(path)[1]
    return {
        file.relative_to(root).as_posix(): sha256(file.read_bytes())
        for file in local_modules(path).values()
    }


def changed_files(before: Mapping[str, str], after: Mapping[str, str]) -> list[str]:
    """Return the names of files that were changed, added or removed.

    Args:
        before: What :func:`code_files` returned.
        after: What it returns now.
    """
    names = {**before, **after}
    return sorted(name for name in names if before.get(name) != after.get(name))


def find_file(path: str | Path) -> tuple[Path, Path, str]:
    """Find a file of a user's code.

    Args:
        path: The file, or an importable module such as "package.module". Modules are also looked
            for in the working directory.

    Returns:
        The file, the folder that its imports start from, and its name as a module.

    Raises:
        CodeError: There is no such file or module.
    """
    file = Path(path)
    if file.is_file():
        return file.resolve(), file.resolve().parent, file.stem
    name = str(path)
    if file.suffix == ".py" or not all(part.isidentifier() for part in name.split(".")):
        raise CodeError(f"There is no file {name}. Check the path.")
    parts = name.split(".")
    for root in (Path.cwd(), *map(Path, sys.path)):
        if (found := _module_file(root, parts)) is not None:
            return found.resolve(), root.resolve(), name
    try:
        spec = find_spec(name)  # an editable install, or a custom importer
    except (ImportError, ValueError):
        spec = None
    if spec is None or spec.origin is None or not Path(spec.origin).is_file():
        raise CodeError(f"There is no file or module {name}. Check the path.")
    found = Path(spec.origin).resolve()
    depth = len(parts) - 1 + (found.name == "__init__.py")
    return found, found.parents[depth], name


def local_modules(path: str | Path) -> dict[str, Path]:
    """Return a file and the modules in its folder that it imports, directly or not, by name.

    Args:
        path: The file, or an importable module.

    Raises:
        CodeError: A file cannot be read, or is not valid Python.
    """
    file, root, name = find_file(path)
    modules = {name: file}
    waiting = [name]
    while waiting:
        importer = waiting.pop()
        for imported in _imports(modules[importer], importer):
            parts = imported.split(".")
            for length in range(1, len(parts) + 1):  # importing a.b imports a
                outer = ".".join(parts[:length])
                found = _module_file(root, parts[:length])
                if found is None:
                    if root.joinpath(*parts[:length]).is_dir():
                        continue  # a package without __init__.py
                    break
                if _is_installed(found):
                    break
                if outer not in modules and found != file:
                    modules[outer] = found
                    waiting.append(outer)
    return modules


def _is_installed(file: Path) -> bool:
    """Return True if a file belongs to an environment, not to the user."""
    return any(part in ("site-packages", "dist-packages") for part in file.parts)


def _module_file(root: Path, parts: list[str]) -> Path | None:
    for file in (root.joinpath(*parts, "__init__.py"), root.joinpath(*parts).with_suffix(".py")):
        if file.is_file():
            return file
    return None


def _imports(file: Path, name: str) -> Iterator[str]:
    """Iterate over the absolute names of all modules that the statements of a file may import."""
    try:
        tree = ast.parse(file.read_bytes(), filename=str(file))
    except SyntaxError as error:
        raise CodeError(
            f"{file.name}, line {error.lineno}: {error.msg}. Fix the syntax of the file."
        ) from None
    except ValueError as error:
        raise CodeError(f"{file.name} is not Python ({error}).") from None
    except OSError as error:
        raise CodeError(f"{file} cannot be read: {error.strerror or error}.") from None
    package = name.split(".") if file.name == "__init__.py" else name.split(".")[:-1]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            for alias in node.names:  # each may be a module or a name in one
                yield f"{module}.{alias.name}" if module else alias.name
