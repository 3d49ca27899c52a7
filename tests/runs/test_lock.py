"""Locks of folders, and temporary files of killed processes."""

from __future__ import annotations

import os
import subprocess
import sys
import threading

import pytest

from gadam.runs import lock
from gadam.runs.files import RunError, write_atomically
from gadam.runs.folder import RunFolder
from gadam.runs.recipe import Recipe

pytest.importorskip("fcntl")


def test_a_link_in_place_of_the_lock_is_refused_and_its_target_is_intact(tmp_path):
    target = tmp_path / "precious"
    target.write_text("content")
    (tmp_path / ".lock").symlink_to(target)
    with pytest.raises(RunError, match=r"\.lock is a symbolic link"):
        with lock.locked(tmp_path):
            pass
    assert target.read_text() == "content"


def test_the_lock_file_is_not_truncated(tmp_path):
    (tmp_path / ".lock").write_text("content")
    with lock.locked(tmp_path):
        pass
    assert (tmp_path / ".lock").read_text() == "content"


def test_no_lock_file_stays_behind(tmp_path):
    with lock.locked(tmp_path):
        assert [path.name for path in tmp_path.iterdir()] == [".lock"]
    with pytest.raises(ZeroDivisionError):
        with lock.locked(tmp_path, ".other.lock"):
            1 / 0  # noqa: B018
    (tmp_path / ".lock").touch()  # of a killed process
    with lock.locked(tmp_path):
        pass
    assert list(tmp_path.iterdir()) == []


def test_one_holder_at_a_time_although_the_file_comes_and_goes(tmp_path, monkeypatch):
    """Locks belong to open files, so threads exclude each other as processes do."""
    monkeypatch.setattr(lock, "LOCK_SECONDS", 600.0)
    monkeypatch.setattr(lock.time, "sleep", lambda _: None)
    inside: list[None] = []
    total: list[None] = []
    most: list[int] = []

    def work() -> None:
        for _ in range(200):
            with lock.locked(tmp_path):
                inside.append(None)
                os.stat(tmp_path)  # let other threads run
                most.append(len(inside))
                inside.pop()
            total.append(None)

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (len(total), max(most)) == (600, 1)
    assert not (tmp_path / ".lock").exists()


def test_a_lock_that_is_held_is_refused_and_stays(tmp_path, monkeypatch):
    monkeypatch.setattr(lock, "LOCK_SECONDS", 0.0)
    with lock.locked(tmp_path):
        with pytest.raises(RunError, match="Another process is using"):
            with lock.locked(tmp_path):
                pass
        assert (tmp_path / ".lock").exists()
        with pytest.raises(RunError, match="Another process is using"):
            with lock.locked(tmp_path):
                pass


@pytest.mark.parametrize("kind", ["folder", "missing"])
def test_a_lock_that_cannot_be_opened_is_explained(tmp_path, kind):
    if kind == "folder":
        (tmp_path / ".lock").mkdir()
    with pytest.raises(RunError, match="could not be written"):
        with lock.locked(tmp_path if kind == "folder" else tmp_path / "missing"):
            pass


def test_temporary_files_of_killed_processes_are_removed(tmp_path):
    (tmp_path / "iterates").mkdir()
    strays = [".run.json.123", ".checkpoint-000001-0123456789abcdef.pt.9", ".result.json.77"]
    strays += ["iterates/.iterate-000001-0123456789abcdef.pt.9", ".manifest.json.5", ".iterate-3.7"]
    kept = [".lock", ".notes", ".run.json", "run.json.123", ".run.json.x", ".cache.1"]
    for name in (*strays, *kept):
        (tmp_path / name).write_text("half")
    with RunFolder(tmp_path, Recipe("r", model="logistic"), 0).locked():
        assert not [name for name in strays if (tmp_path / name).exists()]
    assert all((tmp_path / name).exists() for name in kept)


def test_temporary_files_of_other_programs_that_are_alive_are_kept(tmp_path):
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    alive, gone = tmp_path / f".report.html.{os.getpid()}", tmp_path / f".report.html.{dead.pid}"
    alive.touch()
    gone.touch()
    lock.remove_temporary_files(tmp_path, of_dead_processes=True)
    assert (alive.exists(), gone.exists()) == (True, False)
    lock.remove_temporary_files(tmp_path / "missing")


def test_a_link_in_place_of_a_temporary_file_is_refused(tmp_path):
    target = tmp_path / "precious"
    target.write_text("content")
    (tmp_path / f".new.json.{os.getpid()}").symlink_to(target)
    with pytest.raises(RunError, match="could not be written"):
        write_atomically(tmp_path / "new.json", b"other")
    assert target.read_text() == "content"
