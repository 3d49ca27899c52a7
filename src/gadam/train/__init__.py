"""Training: data, models, tasks, the training loop, sweeps and the catalog of experiments.

Needs the extra ``gadam[train]``. To train your own model on your own data, write a
:class:`SupervisedTask`, or implement :class:`Task`.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gadam.train.tasks.checks import TaskReport, check_task
    from gadam.train.tasks.supervised import SupervisedTask
    from gadam.train.tasks.task import Task, TaskError

__all__ = ["SupervisedTask", "Task", "TaskError", "TaskReport", "check_task"]

# Import optional modules lazily.
_LAZY = {
    "SupervisedTask": "gadam.train.tasks.supervised",
    "Task": "gadam.train.tasks.task",
    "TaskError": "gadam.train.tasks.task",
    "TaskReport": "gadam.train.tasks.checks",
    "check_task": "gadam.train.tasks.checks",
}


def __getattr__(name: str) -> object:
    from importlib import import_module

    if name in _LAZY:
        value = globals()[name] = getattr(import_module(_LAZY[name]), name)
        return value
    raise AttributeError(f"module 'gadam.train' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
