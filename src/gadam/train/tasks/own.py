"""Tasks that a user's own Python file defines."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import MethodType
from typing import Any

from gadam._errors import UserError
from gadam._names import did_you_mean
from gadam.runs.code import code_hash, find_file
from gadam.runs.recipe import OwnTask
from gadam.train.tasks.task import REQUIRED, Task, TaskError
from gadam.train.user_code import import_code

__all__ = ["as_task", "describe", "load_task"]


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

    The file can import modules beside it, as if it were run as a script. Its functions can, too:
    the folder stays at the end of ``sys.path``, where a file such as random.py does not hide the
    standard library from worker processes. If the code has changed since the last call, it and
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
    file, root, _ = find_file(path)
    module = _run(lambda: import_code(path), file)
    if str(root) not in sys.path:
        sys.path.append(str(root))
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
