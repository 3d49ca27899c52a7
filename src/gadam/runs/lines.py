"""The lines of `epochs.jsonl`: each one carries a hash of itself and of all lines before it.

The chain starts at the hash of `run.json`, so the lines also vouch for the recipe they come from::

    {"epoch": 1, "lr": 0.1, …, "hash": "5f70bf18a086007a"}
    {"epoch": 2, "lr": 0.1, …, "hash": "c1f2e9d60b3a5d8e"}

Lines of older versions have no hash. They are read, but nothing can verify them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from gadam.runs.files import RunError, parse_json, read_regular_file, sha256, to_json
from gadam.runs.record import FORMAT, EpochRecord

__all__ = [
    "Lines",
    "chained",
    "has_hashes",
    "hash_of",
    "is_beginning",
    "is_intact",
    "read_epochs",
    "read_header_bytes",
    "read_lines",
    "with_hash",
    "without_hash",
]

_HASHED = re.compile(r'(\{.*), "hash": "([0-9a-f]{16})"\}')


@dataclass(frozen=True)
class Lines:
    """What `epochs.jsonl` contains.

    Args:
        records: The intact lines, up to the first damaged one.
        damaged: How many lines follow.
        hashed: True if the lines carry hashes, and the intact ones match them.
    """

    records: tuple[EpochRecord, ...] = ()
    damaged: int = 0
    hashed: bool = False


def hash_of(previous: str, body: str) -> str:
    """Return the hash of a line.

    Args:
        previous: The hash of the line before it.
        body: The line without its hash.
    """
    return sha256(f"{previous}\n{body}".encode())[:16]


def with_hash(body: str, previous: str = "") -> str:
    """Return a line of JSON with its hash as the last item.

    Args:
        body: A JSON object with at least one item, as :func:`gadam.runs.files.to_json` writes it.
        previous: The hash of the line before it, in a file of chained lines.
    """
    return f'{body[:-1]}, "hash": "{hash_of(previous, body)}"}}'


def without_hash(line: str) -> tuple[str, str]:
    """Return a line without its hash, and the hash; it is empty if there is none.

    Args:
        line: The line.
    """
    found = _HASHED.fullmatch(line)
    return (line, "") if found is None else (found[1] + "}", found[2])


def is_intact(line: str) -> bool:
    """Return True if a line of an analysis matches its hash, or was written by an older version.

    Args:
        line: A line of `analysis.jsonl`.
    """
    body, found = without_hash(line)
    if found:
        return found == hash_of("", body)
    try:
        return bool(parse_json(body).keys() <= {"name", "key", "value", "seconds"})
    except (ValueError, AttributeError):
        return False


def is_beginning(text: str) -> bool:
    """Return True if a text may be the part of a line that a killed analysis has written.

    Args:
        text: What follows the last end of a line in `analysis.jsonl`.
    """
    first = '{"name": '
    begins = text.startswith(first) or first.startswith(text)
    return begins and text.isprintable() and _HASHED.match(text) is None


def chained(records: Iterable[EpochRecord], header: bytes) -> str:
    """Return the content of `epochs.jsonl`.

    Args:
        records: One per epoch.
        header: The content of `run.json`.
    """
    previous, lines = sha256(header), []
    for record in records:
        lines.append(with_hash(to_json(record.to_dict()), previous) + "\n")
        previous = without_hash(lines[-1][:-1])[1]
    return "".join(lines)


def read_header_bytes(folder: Path) -> bytes:
    """Return the content of `run.json`; empty if it is missing.

    Args:
        folder: The run's folder.

    Raises:
        OSError: The file exists but cannot be read.
    """
    path = folder / "run.json"
    return read_regular_file(path) if path.exists() else b""


def has_hashes(header: bytes) -> bool:
    """Return True if a header says that the lines of its run carry hashes.

    Args:
        header: The content of `run.json`.
    """
    try:
        version = parse_json(header).get("format", 1)
    except (ValueError, AttributeError):
        return False
    return isinstance(version, int) and version >= FORMAT


def read_lines(path: Path) -> Lines:
    """Read `epochs.jsonl`, and verify its hashes.

    Args:
        path: The file, beside its `run.json`. A missing file has no lines.

    Raises:
        OSError: A file exists but cannot be read.
    """
    if not path.exists():
        return Lines()
    text = read_regular_file(path).decode(errors="replace")
    header = read_header_bytes(path.parent)
    previous = sha256(header)
    split = [without_hash(line) for line in text.split("\n")]
    hashed = has_hashes(header) or any(found for _, found in split)
    records: list[EpochRecord] = []
    for body, found in split:
        if bool(found) != hashed or (hashed and found != hash_of(previous, body)):
            break
        try:
            record = EpochRecord.from_dict(parse_json(body))
        except (ValueError, RunError):
            break
        if record.epoch != len(records) + 1:
            break
        records.append(record)
        previous = found
    damaged = max(0, text.count("\n") - len(records))
    return Lines(tuple(records), damaged, hashed)


def read_epochs(path: Path) -> list[EpochRecord]:
    """Read the intact lines of `epochs.jsonl`, up to the first damaged one.

    Args:
        path: The file, beside its `run.json`. A missing file has no lines. A killed process may
            leave a torn last line.
    """
    return list(read_lines(path).records)
