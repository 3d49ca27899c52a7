"""The error of this package, and the import of optional packages."""

from __future__ import annotations

from importlib import import_module
from types import ModuleType

from gadam._errors import UserError

__all__ = ["DataError", "import_extra"]


class DataError(UserError):
    """Data is unknown, missing or damaged. The message says what is wrong, and what to do."""


def import_extra(module: str) -> ModuleType:
    """Import a module that the extra ``gadam[train]`` installs.

    Args:
        module: The module, for example ``PIL.Image``.

    Raises:
        DataError: The package is not installed.
    """
    try:
        return import_module(module)
    except ImportError as error:
        package = module.split(".")[0].replace("PIL", "pillow")
        raise DataError(f"{package} is not installed. Run `pip install 'gadam[train]'`.") from error
