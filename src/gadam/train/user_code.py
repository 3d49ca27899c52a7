"""Import a user's own Python code: a file with a task, or a module with a network."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

from gadam.runs.code import code_hash, find_file, local_modules

__all__ = ["first_on_path", "import_code"]

# The modules of users' files, with the hash of their code.
_loaded: dict[Path, tuple[str, ModuleType]] = {}


def import_code(path: str | Path) -> ModuleType:
    """Import a file or module, or return it if neither it nor what it imports has changed.

    Otherwise, the modules beside it that it imports are imported again, too. Its folder is first
    on Python's path meanwhile, as if the file were run as a script. Installed modules are never
    replaced: a file such as random.py gets another name.

    Args:
        path: The file, or an importable module such as "package.module".

    Returns:
        The module.

    Raises:
        CodeError: There is no such file, or it is not valid Python.
        Exception: Whatever the code raises.
    """
    file, root, name = find_file(path)
    code, local = code_hash(path), local_modules(path)
    if (known := _loaded.get(file)) is not None and known[0] == code and _are_current(local):
        return known[1]
    for each in local:
        if not _is_installed(each):
            sys.modules.pop(each, None)
    importlib.invalidate_caches()
    with first_on_path(root):
        if "." in name or file.name == "__init__.py":
            module = importlib.import_module(name)
        else:
            hidden = not name.isidentifier() or _is_installed(name)
            module = _execute(f"gadam_user_{code[:16]}" if hidden else name, file)
    _loaded[file] = code, module
    return module


@contextmanager
def first_on_path(folder: Path) -> Iterator[None]:
    """Put a folder first on Python's path for a block.

    Args:
        folder: The folder.
    """
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        sys.path.remove(str(folder))


def _execute(name: str, file: Path) -> ModuleType:
    spec = spec_from_file_location(name, file)
    assert spec is not None, "a .py file has a loader"
    assert spec.loader is not None
    module = sys.modules[name] = module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _are_current(local: Mapping[str, Path]) -> bool:
    """Return True if no module of these names was imported from another place."""
    return all(
        str(file) == getattr(sys.modules[name], "__file__", None)
        for name, file in local.items()
        if name in sys.modules and not _is_installed(name)
    )


def _is_installed(name: str) -> bool:
    """Return True if a module of this name must not be replaced by a user's."""
    top = name.split(".")[0]
    place = getattr(sys.modules.get(top), "__file__", None) or ""
    parts = Path(place).parts
    installed = "site-packages" in parts or "dist-packages" in parts
    return installed or top == "gadam" or top in sys.stdlib_module_names
