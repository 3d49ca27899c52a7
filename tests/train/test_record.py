"""A run's folder under everything that can happen to files."""

from __future__ import annotations

import errno
import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from gadam.train import record
from gadam.train.recipe import Optimizer, Recipe
from gadam.train.record import Run, RunError, read_lines, write_atomically

RECIPE = Recipe("r", model="logistic")


def started(folder: Path, epochs: int = 3) -> Run:
    run = Run(folder, RECIPE, seed=0)
    run.begin(threads=1)
    for epoch in range(1, epochs + 1):
        run.append({"epoch": epoch, "value": epoch * 1.5})
        run.save(epoch, {"weights": torch.full((4,), float(epoch))})
    return run


def reloaded(folder: Path) -> tuple[Run, int, Any]:
    run = Run(folder, RECIPE, seed=0)
    return run, *run.load()


def test_a_checkpoint_comes_back_and_two_are_kept(tmp_path):
    started(tmp_path)
    run, epochs, state = reloaded(tmp_path)
    assert epochs == 3
    assert torch.equal(state["weights"], torch.full((4,), 3.0))
    assert len(list(tmp_path.glob("checkpoint-*.pt"))) == 2
    assert [line["epoch"] for line in run.lines] == [1, 2, 3]
    assert not run.damaged


@pytest.mark.parametrize("damage", ["flip", "truncate", "empty"])
def test_a_damaged_checkpoint_is_named_and_the_one_before_serves(tmp_path, damage):
    started(tmp_path)
    newest = max(tmp_path.glob("checkpoint-*.pt"))
    content = bytearray(newest.read_bytes())
    if damage == "flip":
        content[len(content) // 2] ^= 1
    else:
        content = content[: len(content) // 2 if damage == "truncate" else 0]
    newest.write_bytes(content)
    run, epochs, state = reloaded(tmp_path)
    assert epochs == 2
    assert torch.equal(state["weights"], torch.full((4,), 2.0))
    assert [line["epoch"] for line in run.lines] == [1, 2]
    assert newest.name in run.damaged[0]


def test_with_no_whole_checkpoint_the_run_begins_anew(tmp_path):
    started(tmp_path)
    for path in tmp_path.glob("checkpoint-*.pt"):
        path.write_bytes(b"nonsense")
    run, epochs, state = reloaded(tmp_path)
    assert (epochs, state, run.lines) == (0, None, [])
    assert len(run.damaged) == 2


@pytest.mark.parametrize("tail", ['{"epoch": 4, "val', "garbage\n", '{"epoch": 9}\n', "[]\n"])
def test_a_torn_line_is_left_out_and_cut_off(tmp_path, tail):
    started(tmp_path)
    lines = tmp_path / "epochs.jsonl"
    with lines.open("a") as file:
        file.write(tail)
    assert [line["epoch"] for line in read_lines(lines)] == [1, 2, 3]
    reloaded(tmp_path)
    assert tail not in lines.read_text()


def test_a_lost_record_is_restored_from_the_checkpoint(tmp_path):
    started(tmp_path)
    (tmp_path / "epochs.jsonl").unlink()
    run, epochs, _ = reloaded(tmp_path)
    assert epochs == 3
    assert [line["value"] for line in run.lines] == [1.5, 3.0, 4.5]


def test_lines_after_the_checkpoint_are_cut_off(tmp_path):
    run = started(tmp_path)
    run.append({"epoch": 4, "value": 6.0})
    assert [line["epoch"] for line in reloaded(tmp_path)[0].lines] == [1, 2, 3]


def test_another_recipe_or_seed_is_refused(tmp_path):
    started(tmp_path)
    other = replace(RECIPE, optimizer=Optimizer("sgd", 0.2))
    with pytest.raises(RunError, match=r"another recipe \(optimizer.lr: 0.1 → 0.2\)"):
        Run(tmp_path, other, seed=0).begin(1)
    with pytest.raises(RunError, match="seed: 0 → 1"):
        Run(tmp_path, RECIPE, seed=1).begin(1)
    assert len(reloaded(tmp_path)[0].lines) == 3


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"recipe": {}}', b'{"recipe": {"x": 1}}'])
def test_a_damaged_description_is_refused_in_a_sentence(tmp_path, content):
    started(tmp_path)
    (tmp_path / "run.json").write_bytes(content)
    with pytest.raises(RunError, match=r"run\.json"):
        Run(tmp_path, RECIPE, seed=0).begin(1)


def test_a_run_keeps_the_threads_it_began_with(tmp_path):
    run = Run(tmp_path, RECIPE, 0)
    assert run.begin(threads=3) == 3
    run.append({"epoch": 1})
    assert Run(tmp_path, RECIPE, 0).begin(threads=1) == 3


def test_what_was_never_begun_may_be_asked_for_otherwise(tmp_path):
    Run(tmp_path, RECIPE, 0).begin(threads=3)
    other = replace(RECIPE, optimizer=Optimizer("sgd", 0.2))
    assert Run(tmp_path, other, 0).begin(threads=1) == 1
    assert json.loads((tmp_path / "run.json").read_text())["recipe"]["optimizer"]["lr"] == 0.2


def test_after_damage_new_checkpoints_are_kept(tmp_path):
    started(tmp_path, epochs=6)
    for path in tmp_path.glob("checkpoint-*.pt"):
        path.write_bytes(b"nonsense")
    run, _, _ = reloaded(tmp_path)
    for epoch in (1, 2, 3):
        run.append({"epoch": epoch})
        run.save(epoch, {"weights": torch.full((4,), float(epoch))})
    assert reloaded(tmp_path)[1] == 3
    assert len(list(tmp_path.glob("checkpoint-*.pt"))) == 2
    assert len(list(tmp_path.glob("*.damaged"))) == 2


def test_a_full_disk_loses_nothing(tmp_path, monkeypatch):
    run = started(tmp_path)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(record.os, "fsync", full)
    with pytest.raises(RunError, match="disk is full"):
        run.save(4, {"weights": torch.zeros(4)})
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_writing_replaces_or_leaves_alone(tmp_path, monkeypatch):
    path = tmp_path / "file"
    write_atomically(path, b"old")
    monkeypatch.setattr(record.os, "fsync", lambda _: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        write_atomically(path, b"new")
    assert path.read_bytes() == b"old"


def test_a_folder_that_cannot_be_is_refused(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(RunError, match="could not be written"):
        Run(tmp_path / "file" / "run", RECIPE, 0)


def test_two_processes_cannot_write_one_run(tmp_path, monkeypatch):
    monkeypatch.setattr(Run, "LOCK_SECONDS", 0.0)
    pytest.importorskip("fcntl")
    with Run(tmp_path, RECIPE, 0).locked():
        with pytest.raises(RunError, match="another process is at work"):
            with Run(tmp_path, RECIPE, 0).locked():
                pass
    with Run(tmp_path, RECIPE, 0).locked():
        assert True


def test_results_are_json(tmp_path):
    run = started(tmp_path)
    assert run.result is None
    run.finish({"status": "done"})
    assert json.loads((tmp_path / "result.json").read_text()) == run.result == {"status": "done"}
