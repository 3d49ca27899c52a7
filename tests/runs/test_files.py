"""Atomic writes, and JSON that any reader accepts."""

from __future__ import annotations

import errno
import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gadam._errors import UserError
from gadam.runs import files
from gadam.runs.files import (
    RunError,
    explain_os_error,
    nan_to_null,
    null_to_nan,
    read_json,
    to_json,
    write_atomically,
    write_json,
)

NUMBERS = st.floats() | st.integers(-(10**9), 10**9)
PLAIN = st.recursive(
    NUMBERS | st.text() | st.booleans(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=10,
)


def refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")


def as_text(value: object) -> str:
    """Compare values in which NaN equals NaN."""
    return repr(value)


# ---------------------------------------------------------------------------------- NaN and null


@given(PLAIN)
def test_json_has_no_nan_or_infinity(value):
    assert json.loads(to_json(value), parse_constant=refuse) == nan_to_null(value)


@given(PLAIN.filter(lambda value: "inf" not in repr(value)))
def test_null_becomes_nan_again(value):
    assert as_text(null_to_nan(json.loads(to_json(value)))) == as_text(value)


def test_infinities_become_nan():
    for infinity in (math.inf, -math.inf):
        assert nan_to_null({"loss": [infinity, 1.0]}) == {"loss": [None, 1.0]}
        assert math.isnan(null_to_nan(nan_to_null(infinity)))


def test_tuples_become_lists():
    assert nan_to_null((1.0, (math.nan,))) == [1.0, [None]]


# ----------------------------------------------------------------------------------------- files


def test_a_failed_write_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "file"
    write_atomically(path, b"old")
    monkeypatch.setattr(files.os, "fsync", lambda _: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        write_atomically(path, b"new")
    assert path.read_bytes() == b"old"


def test_an_error_of_the_system_removes_the_temporary_file(tmp_path, monkeypatch):
    path = tmp_path / "file"
    write_atomically(path, b"old")

    def fail(_: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(files.os, "fsync", fail)
    with pytest.raises(RunError, match="file could not be written: Input/output error"):
        write_atomically(path, b"new")
    assert path.read_bytes() == b"old"
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


def test_written_json_is_read_back(tmp_path):
    path = tmp_path / "file.json"
    write_json(path, {"a": (1, math.nan), "b": "ü"})
    assert path.read_text().endswith("\n")
    assert read_json(path) == {"a": [1, None], "b": "ü"}


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"3", b"\xff\xfe", b"[" * 100_000])
def test_damaged_json_is_refused_with_a_reason(tmp_path, content):
    path = tmp_path / "file.json"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r".+"):
        read_json(path)


def test_a_missing_file_is_refused_with_a_reason(tmp_path):
    with pytest.raises(ValueError, match="No such file"):
        read_json(tmp_path / "gone.json")


def test_a_full_disk_is_explained(tmp_path):
    sentence = explain_os_error(OSError(errno.ENOSPC, "No space left"), tmp_path)
    assert sentence.startswith("The disk is full")
    assert "rerun the command" in sentence


def test_errors_are_for_users():
    assert issubclass(RunError, UserError)
    assert issubclass(RunError, RuntimeError)
