"""The measured values of a run, in a file that only grows."""

from __future__ import annotations

import json
import os
from contextlib import suppress
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
    write_atomically,
)
from gadam.runs.lines import is_intact, with_hash, without_hash

__all__ = ["Notebook"]


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
        text = content.decode(errors="replace")
        intact = [line for line in text.split("\n") if is_intact(line)]
        for line in intact:
            with suppress(KeyError, TypeError):
                entry = parse_json(without_hash(line)[0])
                value = null_to_nan(entry["value"])
                self._values[to_json(entry["key"])] = self.newest[entry["name"]] = value
        # Drop lines that are damaged, or torn by a killed process. Their values are measured again.
        whole = "".join(f"{line}\n" for line in intact)
        self._repaired = None if whole == text else whole

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
        if self._repaired is not None:
            write_atomically(self.path, self._repaired.encode())
            self._repaired = None
        try:
            with self.path.open("a") as file:
                file.write(with_hash(text) + "\n")
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise RunError(explain_os_error(error, self.path)) from error
        written = null_to_nan(json.loads(text)["value"])
        self._values[to_json(key)] = self.newest[name] = written
        return written
