"""A run's folder: checkpoints, the record and the header, whatever happens to the files."""

from __future__ import annotations

import errno
import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from gadam.runs import files
from gadam.runs.files import RunError
from gadam.runs.folder import RunFolder, read_epochs
from gadam.runs.recipe import Optimizer, Recipe
from gadam.runs.record import EpochRecord, RunResult

RECIPE = Recipe("r", model="logistic")


def record(epoch: int) -> EpochRecord:
    return EpochRecord(epoch, lr=0.1, train_loss=epoch * 1.5)


def started(folder: Path, epochs: int = 3) -> RunFolder:
    run = RunFolder(folder, RECIPE, seed=0)
    run.begin(threads=1)
    for epoch in range(1, epochs + 1):
        run.append(record(epoch))
        run.save(epoch, {"weights": torch.full((4,), float(epoch))})
    return run


def reloaded(folder: Path) -> tuple[RunFolder, int, Any]:
    run = RunFolder(folder, RECIPE, seed=0)
    return run, *run.load()


def epochs_of(run: RunFolder) -> list[int]:
    return [line.epoch for line in run.epochs]


# ----------------------------------------------------------------------------------- checkpoints


def test_a_checkpoint_is_restored_and_two_are_kept(tmp_path):
    started(tmp_path)
    run, epochs, state = reloaded(tmp_path)
    assert epochs == 3
    assert torch.equal(state["weights"], torch.full((4,), 3.0))
    assert len(list(tmp_path.glob("checkpoint-*.pt"))) == 2
    assert epochs_of(run) == [1, 2, 3]
    assert not run.damaged


@pytest.mark.parametrize("damage", ["flip", "truncate", "empty"])
def test_a_damaged_checkpoint_is_named_and_the_previous_one_is_used(tmp_path, damage):
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
    assert epochs_of(run) == [1, 2]
    assert newest.name in run.damaged[0]


def test_without_an_intact_checkpoint_the_run_starts_over(tmp_path):
    started(tmp_path)
    for path in tmp_path.glob("checkpoint-*.pt"):
        path.write_bytes(b"nonsense")
    run, epochs, state = reloaded(tmp_path)
    assert (epochs, state, run.epochs) == (0, None, [])
    assert len(run.damaged) == 2


def test_new_checkpoints_are_kept_after_damage(tmp_path):
    started(tmp_path, epochs=6)
    for path in tmp_path.glob("checkpoint-*.pt"):
        path.write_bytes(b"nonsense")
    run, _, _ = reloaded(tmp_path)
    for epoch in (1, 2, 3):
        run.append(record(epoch))
        run.save(epoch, {"weights": torch.full((4,), float(epoch))})
    assert reloaded(tmp_path)[1] == 3
    assert len(list(tmp_path.glob("checkpoint-*.pt"))) == 2
    assert len(list(tmp_path.glob("*.damaged"))) == 2


def test_a_full_disk_loses_nothing(tmp_path, monkeypatch):
    run = started(tmp_path)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(files.os, "fsync", full)
    with pytest.raises(RunError, match=r"The disk is full: .* Existing files are intact"):
        run.save(4, {"weights": torch.zeros(4)})
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_the_final_state_needs_a_finished_run_and_its_last_checkpoint(tmp_path):
    run = started(tmp_path)
    with pytest.raises(RunError, match="is not finished"):
        run.final_state()
    run.finish(RunResult("done", 3, {}))
    name, state = run.final_state()
    assert name.startswith("checkpoint-000003-")
    assert torch.equal(state["weights"], torch.full((4,), 3.0))
    max(tmp_path.glob("checkpoint-*.pt")).unlink()
    with pytest.raises(RunError, match="has no intact last checkpoint"):
        run.final_state()


# ---------------------------------------------------------------------------------------- record


@pytest.mark.parametrize(
    "tail",
    [
        '{"epoch": 4, "lr',
        "garbage\n",
        '{"epoch": 9, "lr": 0.1, "train_loss": 1}\n',
        '{"epoch": 4, "lr": 0.1}\n',
        '{"epoch": 4, "lr": "x", "train_loss": 1}\n',
        '{"epoch": 1e999, "lr": 0.1, "train_loss": 1}\n',
        "[]\n",
        "3\n",
        '"epoch"\n',
        "[" * 100_000 + "\n",
    ],
)
def test_a_damaged_line_is_skipped_and_cut_off(tmp_path, tail):
    started(tmp_path)
    lines = tmp_path / "epochs.jsonl"
    with lines.open("a") as file:
        file.write(tail)
    assert [line.epoch for line in read_epochs(lines)] == [1, 2, 3]
    reloaded(tmp_path)
    assert tail not in lines.read_text()


def test_a_lost_record_is_restored_from_the_checkpoint(tmp_path):
    started(tmp_path)
    (tmp_path / "epochs.jsonl").unlink()
    run, epochs, _ = reloaded(tmp_path)
    assert epochs == 3
    assert [line.train_loss for line in run.epochs] == [1.5, 3.0, 4.5]


def test_lines_after_the_checkpoint_are_cut_off(tmp_path):
    run = started(tmp_path)
    run.append(record(4))
    assert epochs_of(reloaded(tmp_path)[0]) == [1, 2, 3]


def test_resuming_does_not_rewrite_an_intact_record(tmp_path):
    started(tmp_path)
    before = (tmp_path / "epochs.jsonl").stat()
    reloaded(tmp_path)
    after = (tmp_path / "epochs.jsonl").stat()
    assert (after.st_ino, after.st_mtime_ns) == (before.st_ino, before.st_mtime_ns)


def test_fields_of_a_newer_version_survive_a_checkpoint(tmp_path):
    run = RunFolder(tmp_path, RECIPE, seed=0)
    run.begin(threads=1)
    run.append(replace(record(1), extra={"gradient_noise": [1, None]}))
    run.save(1, {})
    (tmp_path / "epochs.jsonl").unlink()
    run, _, _ = reloaded(tmp_path)
    assert run.epochs[0].extra == {"gradient_noise": [1, None]}


# ---------------------------------------------------------------------------------------- header


def test_another_recipe_or_seed_is_refused(tmp_path):
    started(tmp_path)
    other = replace(RECIPE, optimizer=Optimizer("sgd", 0.2))
    with pytest.raises(RunError, match=r"another recipe \(optimizer.lr: 0.1 → 0.2\)"):
        RunFolder(tmp_path, other, seed=0).begin(1)
    with pytest.raises(RunError, match="seed: 0 → 1"):
        RunFolder(tmp_path, RECIPE, seed=1).begin(1)
    assert len(reloaded(tmp_path)[0].epochs) == 3


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "is damaged"),
        (b"{", "is damaged"),
        (b"[]", "is damaged .it is not a JSON object"),
        (b"\xff", "is damaged"),
        (b"{}", "is not a run's header: It has no label"),
        (b'{"label": "r", "seed": 0, "threads": 1, "recipe": {}}', "The recipe has no name"),
        (b'{"label": "r", "seed": 0, "threads": 1, "recipe": {"x": 1}}', "another version"),
        (b'{"label": "r", "seed": 0, "threads": 1, "recipe": 3}', "not what gadam writes"),
    ],
)
def test_a_damaged_header_is_refused_with_a_sentence(tmp_path, content, reason):
    started(tmp_path)
    (tmp_path / "run.json").write_bytes(content)
    with pytest.raises(RunError, match=rf"run\.json .*{reason}") as refused:
        RunFolder(tmp_path, RECIPE, seed=0).begin(1)
    sentence = str(refused.value)
    assert sentence.endswith("ass a different --out.")
    assert sentence.count("run.json") == 1


def test_a_missing_header_beside_checkpoints_is_refused(tmp_path):
    started(tmp_path)
    (tmp_path / "run.json").unlink()
    with pytest.raises(RunError, match="is missing, but there are checkpoints"):
        RunFolder(tmp_path, RECIPE, seed=0).begin(1)


def test_a_run_keeps_the_number_of_threads_it_began_with(tmp_path):
    run = RunFolder(tmp_path, RECIPE, 0)
    assert run.begin(threads=3) == 3
    run.append(record(1))
    assert RunFolder(tmp_path, RECIPE, 0).begin(threads=1) == 3


def test_a_run_that_never_produced_anything_may_be_replaced(tmp_path):
    RunFolder(tmp_path, RECIPE, 0).begin(threads=3)
    other = replace(RECIPE, optimizer=Optimizer("sgd", 0.2))
    assert RunFolder(tmp_path, other, 0).begin(threads=1) == 1
    assert json.loads((tmp_path / "run.json").read_text())["recipe"]["optimizer"]["lr"] == 0.2


def test_a_folder_that_cannot_be_created_is_refused(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(RunError, match="could not be written"):
        RunFolder(tmp_path / "file" / "run", RECIPE, 0)


def test_two_processes_cannot_write_one_run(tmp_path, monkeypatch):
    monkeypatch.setattr(RunFolder, "LOCK_SECONDS", 0.0)
    pytest.importorskip("fcntl")
    with RunFolder(tmp_path, RECIPE, 0).locked():
        with pytest.raises(RunError, match="Another process is using"):
            with RunFolder(tmp_path, RECIPE, 0).locked():
                pass
    with RunFolder(tmp_path, RECIPE, 0).locked():
        assert True


# ---------------------------------------------------------------------------------------- result


def test_the_result_is_json(tmp_path):
    run = started(tmp_path)
    assert run.result is None
    result = RunResult("done", 3, {"test": {"accuracy": 81.5}}, seconds={"train": 2.0})
    run.finish(result)
    assert run.result == result
    assert json.loads((tmp_path / "result.json").read_text()) == result.to_dict()


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("{", r"is damaged \("),
        ("{}", "is damaged: It has no status and no epochs and no iterate"),
        ('{"status": "gone", "epochs": 1, "iterate": {}}', "status must be done or diverged"),
    ],
)
def test_a_damaged_result_is_refused_with_a_sentence(tmp_path, content, reason):
    run = started(tmp_path)
    (tmp_path / "result.json").write_text(content)
    with pytest.raises(RunError, match=reason) as refused:
        run.result  # noqa: B018
    assert str(refused.value).count("result.json") == 1
    assert "Remove it" in str(refused.value)


def test_a_failure_is_recorded_and_cleared_on_the_next_attempt(tmp_path):
    run = started(tmp_path)
    run.fail("no memory")
    assert json.loads((tmp_path / "failure.json").read_text()) == {"reason": "no memory"}
    run.load()
    assert not (tmp_path / "failure.json").exists()
