"""Write files so that they are never seen half-written, and JSON that any reader accepts."""

from __future__ import annotations

import errno
import hashlib
import json
import math
import os
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeAlias

from gadam._errors import UserError

__all__ = [
    "Json",
    "RunError",
    "explain_os_error",
    "nan_to_null",
    "null_to_nan",
    "parse_json",
    "read_json",
    "read_regular_file",
    "sha256",
    "sync_folder",
    "to_json",
    "write_atomically",
    "write_json",
]

Json: TypeAlias = Any  # a value as `json.loads` returns it
Document: TypeAlias = dict[str, Json]  # a JSON object

# The key of a sealed document's hash. What gadam itself writes is a few levels deep.
_SEAL = "sha256"
_MAX_DEPTH = 64


class RunError(UserError, RuntimeError):
    """A run folder cannot be used. The message says why, and what to do."""


def write_atomically(path: Path, content: bytes) -> None:
    """Write beside the target, sync, and rename: readers see the old file or the new one.

    Args:
        path: The file to write.
        content: All of its bytes.

    Raises:
        RunError: The file cannot be written. The old one is intact.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    # A link in place of the temporary file would lead the content elsewhere.
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | getattr(os, "O_NOFOLLOW", 0)
    try:
        with open(os.open(temporary, flags, 0o666), "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
        sync_folder(path.parent)
    except OSError as error:
        with suppress(OSError):
            temporary.unlink()
        raise RunError(explain_os_error(error, path)) from error


def sync_folder(folder: Path) -> None:
    """Make sure that the names in a folder survive a power failure.

    Args:
        folder: The folder.
    """
    if os.name == "posix":
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def explain_os_error(error: OSError, path: Path) -> str:
    """Return a sentence for a failed write.

    Args:
        error: What the operating system reported.
        path: The file or folder that was to be written.
    """
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return (
            f"The disk is full: {path} could not be written. Existing files are intact. Free some "
            "space and rerun the command."
        )
    return f"{path} could not be written: {error.strerror or error}."


def nan_to_null(value: Json) -> Json:
    """Return plain data with None in place of numbers that JSON cannot represent.

    Args:
        value: Nested dicts, lists, tuples and scalars.
    """
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: nan_to_null(v) for key, v in value.items()}
    return [nan_to_null(v) for v in value] if isinstance(value, list | tuple) else value


def null_to_nan(value: Json) -> Json:
    """Return plain data with NaN in place of None: the inverse of :func:`nan_to_null`.

    Args:
        value: Nested dicts, lists and scalars in which None stands for a number.
    """
    if isinstance(value, dict):
        return {key: null_to_nan(v) for key, v in value.items()}
    if isinstance(value, list):
        return [null_to_nan(v) for v in value]
    return math.nan if value is None else value


def to_json(content: Json, indent: int | None = None) -> str:
    """Return JSON text that every reader accepts: NaN and infinities become null.

    Args:
        content: Nested dicts, lists, tuples and scalars.
        indent: Spaces per level; None writes one line.
    """
    return json.dumps(nan_to_null(content), indent=indent, allow_nan=False)


def sha256(content: bytes) -> str:
    """Return the SHA-256 hash of some bytes, in hexadecimal digits.

    Args:
        content: The bytes.
    """
    return hashlib.sha256(content).hexdigest()


def write_json(path: Path, content: Json, *, sealed: bool = False) -> None:
    """Write plain data as JSON, atomically.

    Args:
        path: The file to write.
        content: Nested dicts, lists, tuples and scalars.
        sealed: Add the hash of the content, which :func:`read_json` checks. The content is a dict.
    """
    if sealed:
        content = {key: value for key, value in content.items() if key != _SEAL}
        content[_SEAL] = sha256(to_json(content).encode())
    write_atomically(path, (to_json(content, indent=1) + "\n").encode())


def read_regular_file(path: Path) -> bytes:
    """Read a file. Refuse a device or a pipe, which may never end.

    Args:
        path: The file to read.

    Raises:
        OSError: The file does not exist or cannot be read.
    """
    if path.exists() and not path.is_file():
        raise OSError(errno.EINVAL, "it is not a regular file", str(path))
    return path.read_bytes()


def parse_json(text: str | bytes) -> Json:
    """Parse JSON of moderate depth, so that recursive code can handle the value.

    Args:
        text: The JSON text.

    Raises:
        ValueError: The text is not JSON, or is nested too deeply.
    """
    try:
        content = json.loads(text if isinstance(text, str) else text.decode())
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    level = [content]
    for _ in range(_MAX_DEPTH):
        level = [
            value
            for item in level
            if isinstance(item, dict | list)
            for value in (item.values() if isinstance(item, dict) else item)
        ]
        if not level:
            return content
    raise ValueError("it is nested too deeply")


def read_json(path: Path) -> Document:
    """Read a JSON object. If it is sealed, check its hash and remove it.

    Args:
        path: The file to read.

    Raises:
        ValueError: The file cannot be read, is not a JSON object, or was changed after it was
            sealed. The message says why.
    """
    try:
        content = parse_json(read_regular_file(path))
    except (OSError, ValueError) as error:
        raise ValueError(str(error)) from None
    if not isinstance(content, dict):
        raise ValueError("it is not a JSON object")
    seal = content.pop(_SEAL, None)
    if seal is not None and seal != sha256(to_json(content).encode()):
        raise ValueError("its content does not match its hash")
    return content
