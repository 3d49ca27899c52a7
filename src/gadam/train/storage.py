"""Run folders in a storage that is not a file system, such as s3://bucket/runs.

A worker trains in a temporary folder. It begins with the files of the storage, and copies what is
new to the storage after every checkpoint. So the storage always holds a run that can be resumed
anywhere. URLs are those of fsspec, which comes with torch: s3://, gs://, abfs://, sftp://, ….
Most of them need a package, such as s3fs.
"""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import Any

from gadam.runs.files import RunError

__all__ = ["Storage", "stored_folder"]

LOOK_SECONDS = 1.0  # between two looks for a new checkpoint
_PIECE = 2**22  # bytes
# What says that a run has ended comes last, and what it is about comes first.
_ORDER = (".pt", "run.json", "epochs.jsonl", "failure.json", "result.json", "manifest.json")


class Storage:
    """A folder in a storage.

    Args:
        url: The folder, such as s3://bucket/runs/compare.

    Raises:
        RunError: The URL is wrong, or its storage needs a package that is not installed.

    Example:
        >>> import tempfile
        >>> storage = Storage("memory://runs/example")
        >>> with tempfile.TemporaryDirectory() as place:
        ...     path = Path(place) / "sections" / "notes.json"
        ...     path.parent.mkdir()
        ...     _ = path.write_text("{}")
        ...     storage.push(Path(place))
        >>> storage.files()
        {'sections/notes.json': 2}
    """

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        with self._explained("used"):
            from fsspec.core import url_to_fs

            self._system, root = url_to_fs(self.url)
        self._root = PurePosixPath(root)
        self._pushed: dict[str, tuple[int, int]] = {}  # size and time of what was copied

    @contextmanager
    def _explained(self, what: str) -> Iterator[None]:
        try:
            yield
        except RunError:
            raise
        # Each storage raises errors of its own package: of the network, of permissions, ….
        except Exception as error:
            reason = str(error).strip().splitlines()[0] if str(error).strip() else repr(error)
            raise RunError(f"{self.url} cannot be {what}: {reason}") from error

    def files(self) -> dict[str, int]:
        """Return the sizes of the files by name. A folder that does not exist has none."""
        with self._explained("read"):
            self._system.invalidate_cache()
            if not self._system.exists(str(self._root)):
                return {}
            found: dict[str, Any] = self._system.find(str(self._root), detail=True)
        prefix = str(self._root).lstrip("/") + "/"
        return {
            path.lstrip("/").removeprefix(prefix): int(entry["size"] or 0)
            for path, entry in sorted(found.items())
        }

    def pull(self, folder: Path, ignore: Callable[[str], bool] = lambda name: False) -> None:
        """Make a local folder equal to this one.

        Args:
            folder: Created if it does not exist. Files that are not in the storage are removed.
            ignore: Returns True for names to leave alone, here and there.
        """
        known = [name for name in self.files() if not ignore(name)]
        folder.mkdir(parents=True, exist_ok=True)
        for path in _files(folder):
            name = path.relative_to(folder).as_posix()
            if name not in known and not ignore(name):
                path.unlink()
        for name in known:
            target = folder / name
            target.parent.mkdir(parents=True, exist_ok=True)
            with (
                self._explained("read"),
                self._system.open(str(self._root / name)) as source,
                open(target, "wb") as file,
            ):
                shutil.copyfileobj(source, file, _PIECE)
            self._pushed[name] = _stamp(target)

    def push(self, folder: Path, ignore: Callable[[str], bool] = lambda name: False) -> None:
        """Copy new and changed files of a local folder here, and remove those that are gone.

        The files appear when all of them are complete. Weights come before the records that name
        them, and old weights go last.

        Args:
            folder: The local folder. Nothing may write to it meanwhile.
            ignore: Returns True for names to leave alone, here and there.
        """
        local = {path.relative_to(folder).as_posix(): path for path in _files(folder)}
        names = sorted((name for name in local if not ignore(name)), key=_rank)
        new = {name: _stamp(local[name]) for name in names}
        with self._explained("written"):
            with self._system.transaction:
                for name in names:
                    if self._pushed.get(name) != new[name]:
                        path = self._root / name
                        self._system.makedirs(str(path.parent), exist_ok=True)
                        with (
                            open(local[name], "rb") as source,
                            self._system.open(str(path), "wb") as file,
                        ):
                            shutil.copyfileobj(source, file, _PIECE)
            self._pushed.update(new)
            for name in self.files():
                if name not in local and not ignore(name):
                    self._system.rm_file(str(self._root / name))


def _files(folder: Path) -> list[Path]:
    """Return the files of a folder, without locks and temporary files."""
    found = sorted(path for path in folder.rglob("*") if path.is_file())
    return [path for path in found if not path.name.startswith(".")]


def _stamp(path: Path) -> tuple[int, int]:
    found = path.stat()
    return found.st_size, found.st_mtime_ns


def _rank(name: str) -> tuple[int, str]:
    ranks = [i for i, ending in enumerate(_ORDER) if name.endswith(ending)]
    return (ranks[0] if ranks else 0), name


@contextmanager
def stored_folder(url: str) -> Iterator[tuple[Path, Callable[[], None]]]:
    """Work on a run of a storage in a temporary folder.

    Args:
        url: The run's folder in the storage.

    Yields:
        The temporary folder, and a function to call often: it copies the folder to the storage if
        there is a new checkpoint. At the end of the block, what is new is copied, too.
    """
    storage, looked = Storage(url), time.monotonic()
    seen: set[str] = set()

    def look() -> None:
        nonlocal looked
        if time.monotonic() - looked >= LOOK_SECONDS:
            looked = time.monotonic()
            found = {path.name for path in folder.glob("checkpoint-*")}
            if not found <= seen:
                seen.update(found)
                storage.push(folder)

    with tempfile.TemporaryDirectory(prefix="gadam-run-") as place:
        folder = Path(place)
        storage.pull(folder)
        seen.update(path.name for path in folder.glob("checkpoint-*"))
        try:
            yield folder, look
        finally:
            storage.push(folder)
