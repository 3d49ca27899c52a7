"""Keep two processes from writing to one folder, and remove what a killed process left there."""

from __future__ import annotations

import errno
import os
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from gadam.runs.files import RunError, explain_os_error

__all__ = ["LOCK_SECONDS", "locked", "remove_temporary_files"]

LOCK_SECONDS = 5.0  # orphans of a killed sweep need a moment to notice and exit

# As write_atomically names them: .NAME.PID
_TEMPORARY = re.compile(
    r"\.(?:.+\.(?:jsonl?|pt|md|html|csv|png|svg|pdf|tex)|iterate-.+)\.(\d+)",
)


@contextmanager
def locked(folder: Path, name: str = ".lock") -> Iterator[None]:
    """Hold a lock of a folder. The operating system releases the locks of dead processes.

    The lock is a file that exists while it is held. A file with content is not removed.

    Args:
        folder: An existing folder.
        name: The name of the file that is locked.

    Raises:
        RunError: Another process holds the lock, or the folder cannot be written.
    """
    path = folder / name
    descriptor = _acquire(path)
    try:
        yield
    finally:
        # While this process holds the lock: nobody else can own the file that it removes.
        if os.fstat(descriptor).st_size == 0:
            with suppress(OSError):
                path.unlink()
        os.close(descriptor)


def _acquire(path: Path) -> int:
    """Return the descriptor of the lock file, once this process holds its lock."""
    deadline = time.monotonic() + LOCK_SECONDS
    while True:
        descriptor = _open(path)
        try:
            if _try_lock(descriptor, path) and _is_at(path, descriptor):
                return descriptor
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)
        if time.monotonic() > deadline:
            raise RunError(
                f"Another process is using {path.parent}. Wait for it to finish, or pass a "
                "different --out."
            )
        time.sleep(0.1)


def _open(path: Path) -> int:
    # Neither follow a link nor truncate: the file may not be ours.
    flags = os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_CLOEXEC", 0)
    try:
        return os.open(path, flags, 0o666)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise RunError(f"{path} is a symbolic link. Remove it.") from None
        raise RunError(explain_os_error(error, path)) from None


def _try_lock(descriptor: int, path: Path) -> bool:
    try:
        import fcntl
    except ImportError:  # Windows
        return True
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EAGAIN, errno.EACCES):
            return False
        raise RunError(explain_os_error(error, path.parent)) from None
    return True


def _is_at(path: Path, descriptor: int) -> bool:
    """Return False if the process that held the lock before has removed the file meanwhile."""
    try:
        return os.path.samestat(os.stat(path, follow_symlinks=False), os.fstat(descriptor))
    except OSError:
        return False


def remove_temporary_files(folder: Path, *, of_dead_processes: bool = False) -> None:
    """Remove the temporary files that killed processes left in a folder.

    Args:
        folder: A folder. The caller holds its lock, or that of the folder around it.
        of_dead_processes: Keep the files of processes that are alive, because some programs write
            here without the lock.
    """
    with suppress(OSError):
        for path in folder.glob(".*"):
            found = _TEMPORARY.fullmatch(path.name)
            if found and not (of_dead_processes and _is_alive(int(found[1]))):
                path.unlink(missing_ok=True)


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except OSError:
        return True
    return True
