"""Hashes of a user's code: which files count, and which changes are seen."""

from __future__ import annotations

from pathlib import Path

import pytest

from gadam.runs.code import CodeError, changed_files, code_files, code_hash, find_file


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A task that imports a module, a package in three ways, and something only later."""
    files = {
        "my_task.py": "import torch, json\nimport mynet\nfrom pkg.sub import x\n"
        "def task():\n    import late\n",
        "mynet.py": "from space.deep import y\n",
        "late.py": "import my_task\n",
        "pkg/__init__.py": "",
        "pkg/sub.py": "from . import near\nfrom .nearer import *\n",
        "pkg/near.py": "",
        "pkg/nearer.py": "",
        "space/deep.py": "",  # a package without __init__.py
        "unused.py": "",
        "json.py.txt": "",
    }
    for name, content in files.items():
        place = tmp_path / name
        place.parent.mkdir(exist_ok=True)
        place.write_text(content)
    return tmp_path


USED = {
    "my_task.py",
    "mynet.py",
    "late.py",
    "pkg/__init__.py",
    "pkg/sub.py",
    "pkg/near.py",
    "pkg/nearer.py",
    "space/deep.py",
}


def test_the_file_and_what_it_imports_from_its_folder_count(project: Path) -> None:
    assert set(code_files(project / "my_task.py")) == USED


@pytest.mark.parametrize("name", sorted(USED))
def test_a_change_in_any_of_them_changes_the_hash_and_is_named(project: Path, name: str) -> None:
    path = project / "my_task.py"
    before, files = code_hash(path), code_files(path)
    (project / name).write_text((project / name).read_text() + "# changed\n")
    assert code_hash(path) != before
    assert changed_files(files, code_files(path)) == [name]


def test_other_files_do_not_count(project: Path) -> None:
    before = code_hash(project / "my_task.py")
    (project / "unused.py").write_text("import mynet\n")
    (project / "site-packages").mkdir()
    (project / "site-packages" / "torch.py").write_text("")
    assert code_hash(project / "my_task.py") == before


def test_the_hash_does_not_depend_on_the_place(project: Path, tmp_path_factory) -> None:
    copy = tmp_path_factory.mktemp("copy")
    for name in USED:
        (copy / name).parent.mkdir(exist_ok=True)
        (copy / name).write_text((project / name).read_text())
    assert code_hash(copy / "my_task.py") == code_hash(project / "my_task.py")


def test_a_new_and_a_removed_file_are_named(project: Path) -> None:
    before = code_files(project / "my_task.py")
    (project / "late.py").write_text("import unused\n")
    (project / "pkg" / "near.py").unlink()
    after = code_files(project / "my_task.py")
    assert changed_files(before, after) == ["late.py", "pkg/near.py", "unused.py"]


def test_a_module_is_found_in_the_working_directory(project: Path, monkeypatch) -> None:
    monkeypatch.chdir(project)
    assert find_file("pkg.sub") == (project / "pkg" / "sub.py", project, "pkg.sub")
    found = {"pkg/__init__.py", "pkg/sub.py", "pkg/near.py", "pkg/nearer.py"}
    assert set(code_files("pkg.sub")) == found
    assert set(code_files("my_task")) == USED


def test_installed_packages_are_not_followed() -> None:
    assert list(code_files("torch.nn")) == ["torch/nn/__init__.py"]


@pytest.mark.parametrize("path", ["no_such.py", "no/such/file", "no_such_module", "no.such"])
def test_a_missing_file_is_named(path: str) -> None:
    with pytest.raises(CodeError, match=f"There is no file .*{path}"):
        code_hash(path)


def test_a_syntax_error_is_shown_with_its_line(project: Path) -> None:
    (project / "mynet.py").write_text("x = 1\ndef f(:\n")
    with pytest.raises(CodeError, match=r"mynet\.py, line 2: invalid syntax"):
        code_hash(project / "my_task.py")
