"""Tasks that a user's own Python file defines."""

from __future__ import annotations

import importlib
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import MethodType, ModuleType
from typing import Any

from gadam._errors import UserError
from gadam._names import did_you_mean
from gadam.runs.code import code_hash, find_file, local_modules
from gadam.runs.recipe import OwnTask
from gadam.train.tasks.task import REQUIRED, Task, TaskError

__all__ = ["as_task", "describe", "load_task"]

# The modules of users' files, with the hash of their code.
_loaded: dict[Path, tuple[str, ModuleType]] = {}


def describe(path: str | Path, function: str = "task") -> OwnTask:
    """Return what a recipe says about a user's task.

    Args:
        path: The file, or an importable module such as "package.module".
        function: The function in it that returns the task.

    Raises:
        UserError: The file cannot be used; see :func:`load_task`.

    Example:
        >>> from pathlib import Path
        >>> from tempfile import TemporaryDirectory
        >>> code = '''
        ... import torch
        ... from gadam.train import SupervisedTask
        ...
        ... def task():
        ...     x = torch.randn(100, 4)
        ...     return SupervisedTask(
        ...         model=lambda: torch.nn.Linear(4, 1),
        ...         train=(x, x.sum(1, keepdim=True)),
        ...         loss=torch.nn.functional.mse_loss,
        ...         metric="mse",
        ...     )
        ... '''
        >>> with TemporaryDirectory() as folder:
        ...     _ = Path(folder, "my_task.py").write_text(code)
        ...     own = describe(Path(folder, "my_task.py"))
        >>> own.metric, own.mode, len(own.code)
        ('mse', 'min', 64)
    """
    task = load_task(path, function)
    return OwnTask(str(path), function, task.metric, task.mode, code_hash(path))


def load_task(path: str | Path, function: str = "task") -> Task:
    """Import a user's file and call the function that returns its task.

    The file's folder comes first on ``sys.path`` from then on, so the file can import modules
    beside it, as if it were run as a script. If the code has changed since the last call, it and
    those modules are imported again.

    Args:
        path: The file, or an importable module such as "package.module".
        function: The function. It takes no arguments and returns a :class:`Task`.

    Returns:
        The task, before :meth:`Task.setup`.

    Raises:
        CodeError: There is no such file, or it is not valid Python.
        TaskError: The file raises an error, or has no such function, or the function does not
            return a task.
    """
    file = find_file(path)[0]
    module = _import(path)
    factory = getattr(module, function, None)
    if not callable(factory):
        near = did_you_mean(function, [name for name, v in vars(module).items() if callable(v)])
        hint = f" Did you mean {near!r}?" if near else ""
        raise TaskError(
            f"{file.name} has no function {function}(). Define `def {function}():` that returns a "
            f"SupervisedTask or another Task.{hint}"
        )
    return as_task(_run(factory, file), f"{function}() in {file.name}")


def as_task(candidate: object, name: str = "") -> Task:
    """Return an object as a :class:`Task`, with the defaults of what it leaves out.

    Args:
        candidate: A task. It need not be a subclass of :class:`Task`.
        name: What returned it, for error messages.

    Raises:
        TaskError: It is not a task.
    """
    name = name or type(candidate).__name__
    if not any(base is Task for base in type(candidate).__mro__):
        # setup() creates the model
        missing = [m for m in REQUIRED if m != "model" and not hasattr(candidate, m)]
        if "setup" in missing or isinstance(candidate, type):
            got = candidate if isinstance(candidate, type) else type(candidate)
            raise TaskError(
                f"{name} must return a SupervisedTask or another Task, got {got.__name__}."
            )
    else:
        missing = [m for m in REQUIRED if m != "model" and not _defines(candidate, m)]
    if missing:
        raise TaskError(f"{name} has no {', no '.join(missing)}. See gadam.train.Task.")
    task: Any = candidate
    if task.mode not in ("max", "min"):
        raise TaskError(f"{name} must have mode 'max' or 'min', got {task.mode!r}.")
    for member, default in vars(Task).items():
        if not member.startswith("_") and not hasattr(task, member):
            setattr(task, member, MethodType(default, task) if callable(default) else default)
    result: Task = task
    return result


def _defines(task: object, member: str) -> bool:
    """Return True if a subclass of :class:`Task` has a member of its own."""
    return getattr(type(task), member, None) is not getattr(Task, member, None) or (
        member in getattr(task, "__dict__", {})
    )


def _import(path: str | Path) -> ModuleType:
    """Import a file, or return its module if neither it nor what it imports has changed."""
    file, root, name = find_file(path)
    code, local = code_hash(path), local_modules(path)
    if (known := _loaded.get(file)) is not None and known[0] == code and _are_current(local):
        return known[1]
    for each in local:
        if not _is_installed(each):
            sys.modules.pop(each, None)
    importlib.invalidate_caches()
    if "." not in name and (not name.isidentifier() or _is_installed(name)):
        name = f"gadam_task_{code[:16]}"  # the file is called my-task.py, or random.py
    with _first_on_path(str(root)):
        module: ModuleType = _run(lambda: _execute(name, file), file)
    _loaded[file] = code, module
    return module


@contextmanager
def _first_on_path(folder: str) -> Iterator[None]:
    """Put a folder first on Python's path, and last afterwards.

    Functions may import modules of the folder later. They are found at the end, where a file such
    as random.py does not hide the standard library from this process and its workers.
    """
    sys.path.insert(0, folder)
    try:
        yield
    finally:
        sys.path.remove(folder)
        if folder not in sys.path:
            sys.path.append(folder)


def _execute(name: str, file: Path) -> ModuleType:
    if "." in name or file.name == "__init__.py":
        return importlib.import_module(name)
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


def _run(function: Callable[[], Any], file: Path) -> Any:
    """Call a user's function, and explain its errors by file and line."""
    try:
        return function()
    except UserError:
        raise
    except (Exception, SystemExit) as error:
        frames = traceback.extract_tb(error.__traceback__)
        own = [frame for frame in frames if Path(frame.filename).is_relative_to(file.parent)]
        where = f"{Path(own[-1].filename).name}, line {own[-1].lineno}" if own else file.name
        if isinstance(error, SyntaxError) and error.filename:
            where = f"{Path(error.filename).name}, line {error.lineno}"
        reason = str(error).strip().splitlines()
        what = f"{type(error).__name__}: {reason[0]}" if reason else type(error).__name__
        raise TaskError(
            f"{where}: {what}. Fix the file and try again.".replace("..", ".")
        ) from error
