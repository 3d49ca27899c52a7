"""Lines with hashes: any change is found, and older lines are accepted."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from gadam.runs.files import to_json
from gadam.runs.lines import chained, is_beginning, read_lines, with_hash, without_hash
from gadam.runs.record import EpochRecord

RECORDS = [EpochRecord(e, 0.1, 1 / e, norms={"weight": e / 3}) for e in range(1, 6)]
HEADER = b'{"label": "r", "format": 2}'


def written(folder: Path) -> Path:
    (folder / "run.json").write_bytes(HEADER)
    path = folder / "epochs.jsonl"
    path.write_text(chained(RECORDS, HEADER))
    return path


def test_lines_are_read_back(tmp_path):
    found = read_lines(written(tmp_path))
    assert (list(found.records), found.damaged, found.hashed) == (RECORDS, 0, True)


def test_a_line_with_its_hash():
    line = with_hash('{"epoch": 1}', "before")
    assert without_hash(line) == ('{"epoch": 1}', line[-18:-2])
    assert without_hash('{"epoch": 1}') == ('{"epoch": 1}', "")
    assert line != with_hash('{"epoch": 1}', "other")


def test_every_flipped_byte_is_found(tmp_path):
    path = written(tmp_path)
    content = path.read_bytes()
    ends = [i for i, byte in enumerate(content) if byte == ord("\n")]
    for at in range(0, len(content), 3):
        damaged = bytearray(content)
        damaged[at] ^= 1
        path.write_bytes(damaged)
        intact = sum(end < at for end in ends)
        assert list(read_lines(path).records) == RECORDS[:intact]


@pytest.mark.parametrize("change", ["remove", "swap", "duplicate", "insert"])
def test_changed_lines_are_found(tmp_path, change):
    path = written(tmp_path)
    lines = path.read_text().splitlines()
    if change == "remove":
        del lines[2]
    elif change == "swap":
        lines[2], lines[3] = lines[3], lines[2]
    else:
        lines.insert(2, lines[2] if change == "duplicate" else to_json(RECORDS[2].to_dict()))
    path.write_text("\n".join(lines) + "\n")
    found = read_lines(path)
    intact = 3 if change == "duplicate" else 2
    assert (len(found.records), found.damaged) == (intact, len(lines) - intact)


def test_lines_of_another_header_are_found(tmp_path):
    path = written(tmp_path)
    (tmp_path / "run.json").write_bytes(HEADER + b" ")
    found = read_lines(path)
    assert (found.records, found.damaged) == ((), 5)


def test_lines_without_hashes_are_not_verified(tmp_path):
    path = tmp_path / "epochs.jsonl"
    path.write_text("".join(to_json(record.to_dict()) + "\n" for record in RECORDS))
    found = read_lines(path)
    assert (list(found.records), found.hashed) == (RECORDS, False)
    assert read_lines(tmp_path / "missing.jsonl").records == ()


def test_a_torn_last_line_is_not_counted(tmp_path):
    path = written(tmp_path)
    content = path.read_bytes()
    for cut in random.Random(0).sample(range(len(content)), 20):
        path.write_bytes(content[:cut])
        found = read_lines(path)
        assert list(found.records) == RECORDS[: len(found.records)]
        assert found.damaged == 0


def test_what_a_killed_analysis_leaves_is_the_beginning_of_a_line():
    line = with_hash('{"name": "trace", "value": 1.5}')
    assert all(is_beginning(line[:length]) for length in range(len(line)))
    damaged = [
        line[:20] + "\0" * 8,  # a lost block of the disk
        line + "J",  # the end of the line, changed
        line,
        "9",
        line[5:20],
    ]
    assert not any(map(is_beginning, damaged))
