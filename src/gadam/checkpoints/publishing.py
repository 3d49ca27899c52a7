"""Results that appear complete or not at all."""

from __future__ import annotations

import os
import re
import shutil
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from gadam.average.export import sync
from gadam.checkpoints.errors import CheckpointError
from gadam.runs.files import explain_os_error

__all__ = ["published", "refuse_overwrite"]


def refuse_overwrite(target: Path) -> None:
    """Raise an error if a file or folder exists. An empty folder may be replaced.

    Args:
        target: The file or folder.

    Raises:
        CheckpointError: It exists.
    """
    is_empty_folder = target.is_dir() and not target.is_symlink() and not any(target.iterdir())
    if os.path.lexists(target) and not is_empty_folder:
        raise CheckpointError(f"{target} exists. Remove it, or pass a different --out.")


@contextmanager
def published(target: Path) -> Iterator[Path]:
    """Write a file or folder beside its place, and move it there at the end of the block.

    If the block fails, nothing is left. If the process is killed, at most a hidden file or folder
    is left, which the next call removes.

    Args:
        target: The file or folder. It must not exist.

    Yields:
        Where to write it.

    Raises:
        CheckpointError: It exists, or cannot be written.
    """
    refuse_overwrite(target)
    temporary = target.with_name(f".{target.name}.{_host()}.{os.getpid()}.partial")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        _remove_leftovers(target)
        yield temporary
        _sync_tree(temporary)
        refuse_overwrite(target)
        if temporary.is_dir():
            temporary.rename(target)  # fails if the target is a folder with files
        else:
            _move_file(temporary, target)
        sync(target.parent)
    except OSError as error:
        raise CheckpointError(explain_os_error(error, target)) from error
    finally:
        _remove(temporary)


def _move_file(temporary: Path, target: Path) -> None:
    with suppress(FileNotFoundError):
        target.rmdir()  # an empty folder
    try:
        os.link(temporary, target)  # unlike a rename, this fails if the target exists
    except FileExistsError:
        refuse_overwrite(target)
    except OSError:  # a file system without hard links
        temporary.rename(target)


def _host() -> str:
    return re.sub(r"[^\w-]", "-", socket.gethostname())


def _remove_leftovers(target: Path) -> None:
    """Remove what killed processes of this machine left."""
    pattern = re.compile(rf"\.{re.escape(target.name)}\.{re.escape(_host())}\.(\d+)\.partial")
    for path in target.parent.glob(".*.partial"):
        match = pattern.fullmatch(path.name)
        if match and int(match[1]) != os.getpid() and not _is_alive(int(match[1])):
            _remove(path)


def _is_alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except OSError:  # another user's
        return True
    return True


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def _sync_tree(root: Path) -> None:
    if root.is_dir():
        for path in root.iterdir():
            _sync_tree(path)
    sync(root)
