from __future__ import annotations

import json
import math
import tempfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gadam._errors import UserError
from gadam.runs import archive
from gadam.runs.files import RunError, to_json, write_json

SCALARS = (
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
) | st.text()
VALUES = st.recursive(
    SCALARS, lambda v: st.lists(v, max_size=3) | st.dictionaries(st.text(), v, max_size=3)
)
PARTS = st.text("abcXYZ012-_ é", min_size=1, max_size=8).map(lambda text: f"x{text}x")
NAMES = st.lists(PARTS, min_size=1, max_size=3).map("/".join)
FILES = st.dictionaries(NAMES.map(lambda n: f"{n}.json"), VALUES, max_size=4)
LINES = st.dictionaries(NAMES.map(lambda n: f"{n}.jsonl"), st.lists(VALUES, max_size=4), max_size=4)


def write(folder: Path, files: dict[str, object]) -> Path:
    """Write files as the program writes them."""
    for name, value in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if name.endswith(".jsonl"):
            assert isinstance(value, list)
            path.write_text("".join(to_json(line) + "\n" for line in value))
        else:
            write_json(path, value)
    return folder


def contents(folder: Path) -> dict[str, bytes]:
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


@given(FILES, LINES, NAMES)
def test_unpacked_files_are_byte_identical(files, lines, always):
    written = {**files, **lines, f"{always}.json": {"seed": 0}}
    with tempfile.TemporaryDirectory() as temporary:
        folder = write(Path(temporary) / "sweep", written)
        path = Path(temporary) / "sweep.json"
        archive.write_archive(folder, path)
        assert archive.read_archive(path) == written
        assert len(path.read_text().split("\n")) == 3 + len(written) + 3
        with archive.opened(path) as copy:
            assert copy.name == "sweep"
            assert contents(copy) == contents(folder)
        assert not copy.exists()
        archive.write_archive(folder, again := Path(temporary) / "again.json")
        assert again.read_bytes() == path.read_bytes()


def test_only_records_are_packed(tmp_path):
    folder = write(tmp_path / "runs", {"a-0/run.json": {}, "a-0/sections/curves.json": {}})
    for name in ("a-0/checkpoint-000001-0.pt", "report.html", "a-0/.run.json.123", ".lock"):
        (folder / name).write_text("not a record")
    (folder / ".hidden").mkdir()
    (folder / ".hidden" / "run.json").write_text("{}")
    assert archive.pack(folder) == {"format": archive.FORMAT, "files": {"a-0/run.json": {}}}


def test_numbers_that_json_cannot_represent_become_null(tmp_path):
    (tmp_path / "epochs.jsonl").write_text('{"train_loss": NaN}\n')
    (tmp_path / "result.json").write_text(json.dumps({"loss": math.inf}))
    files = archive.pack(tmp_path)["files"]
    assert files == {"epochs.jsonl": [{"train_loss": None}], "result.json": {"loss": None}}


@pytest.mark.parametrize(
    "name",
    [
        "../stolen.json",
        "a/../../stolen.json",
        "a/../b.json",
        "/stolen.json",
        "//stolen.json",
        "./a.json",
        "a//b.json",
        "a\\..\\..\\stolen.json",
        "C:/stolen.json",
        "C:stolen.json",
        "a\0.json",
        "\ud800.json",
        "run.sh",
        "..",
        "",
        ".json",
    ],
)
def test_paths_that_leave_the_folder_are_refused(tmp_path, name):
    path = tmp_path / "archive.json"
    path.write_text(json.dumps({"format": archive.FORMAT, "files": {"fine.json": {}, name: {}}}))
    with pytest.raises(UserError, match="is not a safe archive"):
        archive.unpack(path, tmp_path / "deep" / "folder")
    assert contents(tmp_path) == {"archive.json": path.read_bytes()}


def test_a_folder_with_files_is_refused(tmp_path):
    """Otherwise an archive could follow a symbolic link out of it, or overwrite a run."""
    archive.write_archive(write(tmp_path / "runs", {"a/run.json": {}}), tmp_path / "runs.json")
    target = tmp_path / "target"
    target.mkdir()
    (target / "a").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(RunError, match="is not empty"):
        archive.unpack(tmp_path / "runs.json", target)


def test_a_file_that_is_also_a_folder_is_refused(tmp_path):
    files: dict[str, object] = {"a.json": {}, "a.json/b.json": {}}
    (tmp_path / "archive.json").write_text(json.dumps({"format": archive.FORMAT, "files": files}))
    with pytest.raises(RunError, match="could not be written"):
        archive.unpack(tmp_path / "archive.json", tmp_path / "folder")


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("{", "cannot be read as an archive"),
        ("[]", "not a JSON object"),
        ('{"format": "gadam results 2", "files": {}}', "not 'gadam results 1'"),
        ('{"format": "gadam results 1"}', "it has no files"),
        ('{"format": "gadam results 1", "files": {"a.jsonl": {}}}', "not a list of lines"),
    ],
)
def test_damaged_archives_are_refused(tmp_path, text, sentence):
    (tmp_path / "archive.json").write_text(text)
    with pytest.raises(RunError, match=sentence):
        archive.read_archive(tmp_path / "archive.json")


def test_missing_archives_are_refused(tmp_path):
    with pytest.raises(RunError, match="cannot be read"):
        archive.read_archive(tmp_path / "none.json")


def test_damaged_and_missing_folders_are_refused(tmp_path):
    with pytest.raises(RunError, match="is not a folder"):
        archive.pack(tmp_path / "none")
    with pytest.raises(RunError, match="has no records"):
        archive.pack(tmp_path)
    (tmp_path / "epochs.jsonl").write_text('{"epoch": 1}\n{"epoch"')
    with pytest.raises(RunError, match="is damaged"):
        archive.pack(tmp_path)
