"""The measured values of a run, in a file that only grows."""

from __future__ import annotations

import json
import os
from pathlib import Path

from gadam.runs.files import (
    Document,
    Json,
    RunError,
    explain_os_error,
    null_to_nan,
    parse_json,
    read_regular_file,
    to_json,
)
from gadam.runs.lines import hash_of, with_hash, without_hash

__all__ = ["Notebook"]

_KEYS = {"name", "key", "value", "seconds"}


class Notebook:
    """Values by key, in a file with one line of JSON per value.

    A line ends with its hash. A line that does not match its hash is ignored. Lines of older
    versions have no hash.

    A key holds everything that determines the value: what it is, the weights it was measured at,
    and the settings. A value is written as soon as it is known, so an interrupted analysis resumes
    where it stopped.

    Args:
        path: The file. It is created with the first value.

    Attributes:
        newest: The last value of each name, whatever its key. Use it if the weights are gone.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.newest: dict[str, Json] = {}
        self._values: dict[str, Json] = {}
        try:
            content = read_regular_file(path) if path.exists() else b""
        except OSError as error:
            raise RunError(f"{path} cannot be read: {error.strerror or error}.") from None
        for text in content.decode(errors="replace").split("\n"):
            body, found = without_hash(text)
            if found and found != hash_of("", body):
                continue
            try:
                line = parse_json(body)
                if not line.keys() <= _KEYS:  # its hash may be what is damaged
                    continue
                value = null_to_nan(line["value"])
                self._values[to_json(line["key"])] = self.newest[line["name"]] = value
            except (ValueError, KeyError, TypeError, AttributeError):
                continue  # damaged, or torn by a killed process; the value is measured again

    def find(self, key: Document) -> Json | None:
        """Return the value, or None if it is not known.

        Args:
            key: The key, with its items in the order in which they were written.
        """
        return self._values.get(to_json(key))

    def add(self, name: str, key: Document, value: Json, seconds: float) -> Json:
        """Write a value.

        Args:
            name: The name of the value within the run.
            key: Everything that determines the value.
            value: Plain data.
            seconds: How long it took to measure.

        Returns:
            The value as it will be read back.

        Raises:
            RunError: The file cannot be written.
        """
        line = {"name": name, "key": key, "value": value, "seconds": round(seconds, 3)}
        text = to_json(line)
        # Start a new line if the last one is torn, or both would be lost.
        is_whole = not self.path.exists() or self.path.read_bytes()[-1:] in (b"\n", b"")
        try:
            with self.path.open("a") as file:
                file.write(("" if is_whole else "\n") + with_hash(text) + "\n")
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise RunError(explain_os_error(error, self.path)) from error
        written = self._values[to_json(key)] = null_to_nan(json.loads(text)["value"])
        return written
