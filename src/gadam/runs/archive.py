"""Archives: the records of a whole sweep in one file that diffs well.

An archive is a JSON document with one line per packed file, sorted by path::

    {
    "format": "gadam results 1",
    "files": {
    "experiment.json": {"name": "compare", …},
    "gadam-0/epochs.jsonl": [{"epoch": 1, …}, {"epoch": 2, …}],
    "gadam-0/run.json": {"label": "Gadam", …}
    }
    }

It holds numbers only: the `*.json` and `*.jsonl` files of a folder. Checkpoints, figures, and pages
are left out, and so are the report's `sections/`, which refer to figures.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath

from gadam.runs.files import (
    Document,
    Json,
    RunError,
    explain_os_error,
    nan_to_null,
    parse_json,
    read_json,
    read_regular_file,
    to_json,
    write_atomically,
)

__all__ = ["FORMAT", "opened", "pack", "read_archive", "unpack", "write_archive"]

FORMAT = "gadam results 1"
_SUFFIXES = (".json", ".jsonl")
_SECTIONS = "sections"


def pack(folder: str | Path) -> Document:
    """Read the records of a folder and its subfolders.

    Args:
        folder: A run's folder, or that of a sweep.

    Returns:
        The archive as plain data: its format, and the files' contents by relative path. A `.jsonl`
        file is a list of its lines.

    Raises:
        RunError: The folder does not exist, has no records, or a file is damaged.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise RunError(f"{folder} is not a folder. Pass a folder of runs.")
    files = {
        path.relative_to(folder).as_posix(): _read(path)
        for path in folder.rglob("*")
        if _is_record(path.relative_to(folder)) and path.is_file()
    }
    if not files:
        raise RunError(f"{folder} has no records. Pass a folder of runs.")
    for name in files:
        _check_name(name, str(folder))
    return {"format": FORMAT, "files": dict(sorted(files.items()))}


def write_archive(folder: str | Path, path: str | Path) -> None:
    """Write the records of a folder and its subfolders to one file, atomically.

    Args:
        folder: A run's folder, or that of a sweep.
        path: The archive to write.

    Raises:
        RunError: The folder has no records, a file is damaged, or the archive cannot be written.
    """
    archive = pack(folder)
    lines = [f"{json.dumps(name)}: {to_json(value)}" for name, value in archive["files"].items()]
    text = f'{{\n"format": {json.dumps(FORMAT)},\n"files": {{\n' + ",\n".join(lines) + "\n}\n}\n"
    write_atomically(Path(path), text.encode())


def read_archive(path: str | Path) -> dict[str, Json]:
    """Read an archive without unpacking it.

    Args:
        path: The archive.

    Returns:
        The files' contents by relative path. A `.jsonl` file is a list of its lines.

    Raises:
        RunError: The file is not an archive, is damaged, or names a file outside its folder.
    """
    try:
        content = read_json(Path(path))
    except ValueError as error:
        raise RunError(f"{path} cannot be read as an archive ({error}).") from None
    found = content.get("format")
    if found != FORMAT:
        raise RunError(
            f"{path} is not an archive that this version of gadam reads: its format is {found!r}, "
            f"not {FORMAT!r}."
        )
    files = content.get("files")
    if not isinstance(files, dict):
        raise RunError(f"{path} is damaged: it has no files.")
    for name, value in files.items():
        _check_name(name, str(path))
        if name.endswith(".jsonl") and not isinstance(value, list):
            raise RunError(f"{path} is damaged: {name} is not a list of lines.")
    return files


def unpack(path: str | Path, folder: str | Path) -> None:
    """Write the files of an archive as the program writes them.

    Args:
        path: The archive.
        folder: Where to write. It is created if it does not exist, and must be empty.

    Raises:
        RunError: The file is not an archive, names a file outside its folder, or the folder cannot
            be written or is not empty.
    """
    files, folder = read_archive(path), Path(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if any(folder.iterdir()):
            raise RunError(f"{folder} is not empty. Pass a new folder.")
        for name, value in files.items():
            target = folder / name
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(_to_bytes(name, value))
    except OSError as error:
        raise RunError(explain_os_error(error, folder)) from error


@contextmanager
def opened(path: str | Path) -> Iterator[Path]:
    """Unpack an archive into a temporary folder, and remove the folder afterwards.

    Args:
        path: The archive.

    Yields:
        A folder with the archive's name, as `gadam.runs.collect` and `gadam report` read it.

    Raises:
        RunError: As :func:`unpack` does.
    """
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / Path(path).stem
        unpack(path, folder)
        yield folder


# ------------------------------------------------------------------------------- files and names


def _is_record(path: Path) -> bool:
    hidden = any(part.startswith(".") for part in path.parts)
    return path.suffix in _SUFFIXES and not hidden and _SECTIONS not in path.parts[:-1]


def _read(path: Path) -> Json:
    try:
        text = read_regular_file(path).decode()
        if path.suffix == ".json":
            return nan_to_null(parse_json(text))
        return [nan_to_null(parse_json(line)) for line in text.split("\n") if line.strip()]
    except (OSError, ValueError) as error:
        raise RunError(f"{path} is damaged ({error}). Remove it, or run it again.") from None


def _to_bytes(name: str, value: Json) -> bytes:
    if name.endswith(".jsonl"):
        return "".join(to_json(line) + "\n" for line in value).encode()
    return (to_json(value, indent=1) + "\n").encode()


def _check_name(name: str, where: str) -> None:
    """Refuse names that could be written outside the folder, on any operating system."""
    path = PurePosixPath(name)
    inside = (
        path.as_posix() == name  # no empty or "." parts
        and not path.is_absolute()
        and ".." not in path.parts
        and name.isprintable()
        and not set(name) & set("\\:")  # separators and drives of Windows
        and path.suffix in _SUFFIXES
    )
    if not inside:
        raise RunError(
            f"{where} is not a safe archive: {name!r} is not the path of a .json or .jsonl file "
            "inside its folder."
        )
