"""A run's folder: checkpoints, the record and the header, whatever happens to the files."""

from __future__ import annotations

import errno
import hashlib
import io
import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import made
from gadam.runs import files, lock
from gadam.runs.files import RunError, to_json, write_json
from gadam.runs.folder import RunFolder
from gadam.runs.lines import read_epochs, read_lines
from gadam.runs.recipe import Optimizer, Recipe
from gadam.runs.record import EpochRecord, RunResult

RECIPE = Recipe("r", model="logistic")


def record(epoch: int) -> EpochRecord:
    return EpochRecord(epoch, lr=0.1, train_loss=epoch * 1.5)


def started(folder: Path, epochs: int = 3) -> RunFolder:
    run = RunFolder(folder, RECIPE, seed=0)
    with run.locked():
        run.begin(threads=1)
        run.load()
        train(run, epochs)
    return run


def train(run: RunFolder, epochs: int) -> None:
    for epoch in range(len(run.history) + 1, epochs + 1):
        run.append(record(epoch))
        run.save(epoch, {"weights": torch.full((4,), float(epoch))})


RESULT = RunResult("done", 3, {"test": {"accuracy": 81.5}}, seconds={"train": 2.0})


def finished(folder: Path) -> RunFolder:
    run = RunFolder(folder, RECIPE, seed=0)
    with run.locked():
        run.begin(threads=1)
        run.load()
        train(run, epochs=3)
        run.finish(RESULT)
    return run


def begun(folder: Path, recipe: Recipe = RECIPE, seed: int = 0, threads: int = 1) -> int:
    run = RunFolder(folder, recipe, seed)
    with run.locked():
        return run.begin(threads)


def reloaded(folder: Path) -> tuple[RunFolder, int, Any]:
    run = RunFolder(folder, RECIPE, seed=0)
    with run.locked():
        run.begin(threads=1)
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
    train(run, epochs=3)
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
    with pytest.raises(RunError, match="is not finished"):
        started(tmp_path).final_state()
    run = finished(tmp_path)
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
    run = started(tmp_path, epochs=0)
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
        begun(tmp_path, other)
    with pytest.raises(RunError, match="seed: 0 → 1"):
        begun(tmp_path, seed=1)
    assert len(reloaded(tmp_path)[0].epochs) == 3


HEADERS = [
    (b"", "is damaged"),
    (b"{", "is damaged"),
    (b"[]", "is not a run's header: A JSON object is needed"),
    (b"\xff", "is damaged"),
    (b"[" * 500 + b"]" * 500, "is damaged .it is nested too deeply"),
    (b"{}", "is not a run's header: It has no label"),
    (b'{"label": "r", "seed": 0, "threads": 1, "recipe": {}}', "The recipe has no name"),
    (b'{"label": "r", "seed": 0, "threads": 1, "recipe": {"x": 1}}', "another version"),
    (b'{"label": "r", "seed": 0, "threads": 1, "recipe": 3}', "not what gadam writes"),
]


@pytest.mark.parametrize(("content", "reason"), HEADERS)
def test_a_damaged_header_without_a_checkpoint_is_refused(tmp_path, content, reason):
    started(tmp_path)
    (tmp_path / "run.json").write_bytes(content)
    for path in tmp_path.glob("checkpoint-*.pt"):
        path.unlink()
    with pytest.raises(RunError, match=rf"run\.json .*{reason}") as refused:
        begun(tmp_path)
    sentence = str(refused.value)
    assert sentence.endswith("ass a different --out.")
    assert sentence.count("run.json") == 1
    with pytest.raises(RunError, match=rf"run\.json .*{reason}"):
        RunFolder(tmp_path, RECIPE, 0).check()


@pytest.mark.parametrize("content", [content for content, _ in HEADERS])
def test_a_damaged_header_is_restored_from_the_checkpoint(tmp_path, content):
    started(tmp_path)
    header = tmp_path / "run.json"
    before = header.read_bytes()
    header.write_bytes(content)
    RunFolder(tmp_path, RECIPE, 0).check()
    run, epochs, _ = reloaded(tmp_path)
    assert (epochs, header.read_bytes()) == (3, before)
    assert run.damaged == [f"{header} was changed. It was restored."]
    header.unlink()
    assert reloaded(tmp_path)[1] == 3
    assert header.read_bytes() == before


@pytest.mark.parametrize("threads", ['"two"', "0", "-3", "1e3", "999999999999999999999", "null"])
def test_damaged_threads_are_restored_from_the_checkpoint(tmp_path, threads):
    started(tmp_path)
    header = tmp_path / "run.json"
    damaged = header.read_text().replace('"threads": 1', f'"threads": {threads}')
    header.write_text(damaged)
    assert begun(tmp_path) == 1
    for path in tmp_path.glob("checkpoint-*.pt"):
        path.unlink()
    header.write_text(damaged)
    with pytest.raises(RunError, match="threads must be a whole number"):
        begun(tmp_path)


def test_the_checkpoint_knows_the_recipe_of_a_changed_header(tmp_path):
    """An edited header must not pass the results of one recipe off as those of another."""
    started(tmp_path)
    other = replace(RECIPE, optimizer=Optimizer("sgd", 0.2))
    header = tmp_path / "run.json"
    header.write_text(header.read_text().replace('"lr": 0.1', '"lr": 0.2'))
    with pytest.raises(RunError, match=r"another recipe \(optimizer.lr: 0.1 → 0.2\)"):
        begun(tmp_path, other)
    assert read_epochs(tmp_path / "epochs.jsonl") == []  # the lines belong to another header
    assert epochs_of(reloaded(tmp_path)[0]) == [1, 2, 3]


def test_a_run_keeps_the_number_of_threads_of_its_checkpoint(tmp_path):
    run = RunFolder(tmp_path, RECIPE, 0)
    with run.locked():
        assert run.begin(threads=3) == 3
        run.load()
        run.append(record(1))
    assert begun(tmp_path, threads=2) == 2  # there is no checkpoint: it starts over
    run = RunFolder(tmp_path, RECIPE, 0)
    with run.locked():
        assert run.begin(threads=3) == 3
        run.load()
        train(run, epochs=1)
    assert begun(tmp_path, threads=1) == 3


def test_a_run_that_never_produced_anything_may_be_replaced(tmp_path):
    begun(tmp_path, threads=3)
    other = replace(RECIPE, optimizer=Optimizer("sgd", 0.2))
    assert begun(tmp_path, other) == 1
    assert json.loads((tmp_path / "run.json").read_text())["recipe"]["optimizer"]["lr"] == 0.2


def test_a_folder_that_cannot_be_created_is_refused(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(RunError, match="could not be written"):
        RunFolder(tmp_path / "file" / "run", RECIPE, 0)


def test_two_processes_cannot_write_one_run(tmp_path, monkeypatch):
    monkeypatch.setattr(lock, "LOCK_SECONDS", 0.0)
    pytest.importorskip("fcntl")
    with RunFolder(tmp_path, RECIPE, 0).locked():
        with pytest.raises(RunError, match="Another process is using"):
            with RunFolder(tmp_path, RECIPE, 0).locked():
                pass
    with RunFolder(tmp_path, RECIPE, 0).locked():
        assert True


# ---------------------------------------------------------------------------------------- result


def test_the_result_is_json(tmp_path):
    assert started(tmp_path / "a").result is None
    assert finished(tmp_path).result == RESULT
    assert json.loads((tmp_path / "result.json").read_text()) == RESULT.to_dict()


@pytest.mark.parametrize("content", ["", "{", "{}", "[" * 500 + "]" * 500, "changed"])
def test_a_changed_result_is_refused_by_readers_and_restored_by_the_next_run(tmp_path, content):
    finished(tmp_path)
    path = tmp_path / "result.json"
    before = path.read_text()
    path.write_text(before.replace("81.5", "91.5") if content == "changed" else content)
    with pytest.raises(RunError, match=r"result.json does not match manifest.json") as refused:
        RunFolder(tmp_path, RECIPE, 0).result  # noqa: B018
    assert str(refused.value).endswith("Rerun the command that trains it to restore it.")
    run = finished(tmp_path)
    assert path.read_text() == before
    assert "It is restored from the last checkpoint." in run.damaged[0]
    assert run.result == RESULT


@pytest.mark.parametrize("name", ["result.json", "epochs.jsonl", "manifest.json", "run.json"])
@pytest.mark.parametrize("change", ["flip", "remove", "empty", "cut"])
def test_every_file_of_a_finished_record_is_restored(tmp_path, name, change):
    finished(tmp_path)
    path = tmp_path / name
    before = {p.name: p.read_bytes() for p in tmp_path.iterdir()}
    content = bytearray(before[name])
    content[len(content) // 2] ^= 1
    if change == "remove":
        path.unlink()
    else:
        path.write_bytes(
            {"flip": content, "empty": b"", "cut": content[: len(content) // 2]}[change]
        )
    finished(tmp_path)
    after = {p.name: p.read_bytes() for p in tmp_path.iterdir() if p.suffix != ".damaged"}
    assert after == before


def test_a_damaged_record_without_checkpoints_is_refused(tmp_path):
    finished(tmp_path)
    for path in tmp_path.glob("checkpoint-*.pt"):
        path.unlink()
    assert begun(tmp_path) == 1  # reports and tables do not need the checkpoints
    before = (tmp_path / "epochs.jsonl").read_text()
    (tmp_path / "epochs.jsonl").write_text(before.replace("4.5", "0.5"))
    with pytest.raises(RunError, match=r"no checkpoint to restore it from\. .*epochs.jsonl does"):
        begun(tmp_path)
    assert (tmp_path / "result.json").exists()


def test_a_run_killed_before_its_manifest_writes_its_result_again(tmp_path):
    finished(tmp_path)
    before = (tmp_path / "manifest.json").read_bytes()
    (tmp_path / "manifest.json").unlink()
    run = RunFolder(tmp_path, RECIPE, 0)
    assert run.result is None
    assert finished(tmp_path).damaged == []
    assert (tmp_path / "manifest.json").read_bytes() == before


def test_records_of_older_versions_are_accepted(tmp_path):
    """They have no manifest and no hashes."""
    folder = tmp_path / "run"
    made.run(folder, "Gadam", 0)
    run = RunFolder(folder, made.RECIPES["Gadam"], 0)
    assert run.result is not None
    with run.locked():
        assert run.begin(threads=3) == 1
    result = json.loads((folder / "result.json").read_text())
    result["iterate"]["test"]["accuracy"] += 1
    write_json(folder / "result.json", result)
    with pytest.raises(RunError, match=r"does not match the last line of epochs\.jsonl"):
        run.result  # noqa: B018


def test_checkpoints_of_older_versions_are_resumed(tmp_path):
    """They contain no header, and the lines have no hashes."""
    started(tmp_path)
    lines = tmp_path / "epochs.jsonl"
    lines.write_text("".join(to_json(record(e).to_dict()) + "\n" for e in (1, 2, 3)))
    for path in tmp_path.glob("checkpoint-*.pt"):
        state = torch.load(path, weights_only=True)
        del state["header"]
        torch.save(state, path)
        digest = hashlib.sha256(path.read_bytes()).hexdigest()[:16]
        path.rename(path.with_name(f"{path.name[:18]}{digest}.pt"))
    run, epochs, _ = reloaded(tmp_path)
    assert (epochs, run.damaged) == (3, [])
    assert read_lines(lines).hashed
    assert epochs_of(run) == [1, 2, 3]


# ------------------------------------------------------------------------- damage while it runs


@pytest.mark.parametrize("damage", ["flip", "remove", "empty"])
def test_a_run_does_not_read_its_own_lines(tmp_path, damage):
    run = RunFolder(tmp_path, RECIPE, seed=0)
    lines = tmp_path / "epochs.jsonl"
    with run.locked():
        run.begin(threads=1)
        run.load()
        train(run, epochs=2)
        content = bytearray(lines.read_bytes())
        content[-20] ^= 1
        lines.unlink()
        if damage != "remove":
            lines.write_bytes(content if damage == "flip" else b"")
        (tmp_path / "run.json").write_text("{}")
        train(run, epochs=3)
        run.finish(RESULT)
    assert [line.train_loss for line in read_epochs(lines)] == [1.5, 3.0, 4.5]
    assert RunFolder(tmp_path, RECIPE, 0).result == RESULT
    restored = f"{lines} was damaged or changed. It was restored."
    assert run.damaged == [f"{tmp_path / 'run.json'} was changed. It was restored.", restored]


@pytest.mark.parametrize("content", [b"nonsense", b"", "pickle", "no lines", "too few", "list"])
def test_an_unreadable_checkpoint_with_a_matching_name_is_damaged(tmp_path, content):
    started(tmp_path)
    if isinstance(content, str):
        buffer = io.BytesIO()
        lines = json.dumps([record(1).to_dict()])
        states: dict[str, Any] = {
            "pickle": Path(tmp_path),
            "no lines": {"model": {}},
            "too few": {"lines": lines},
            "list": [lines],
        }
        torch.save(states[content], buffer)
        content = buffer.getvalue()
    digest = hashlib.sha256(content).hexdigest()[:16]
    (tmp_path / f"checkpoint-000004-{digest}.pt").write_bytes(content)
    run, epochs, _ = reloaded(tmp_path)
    assert epochs == 3
    assert "is damaged. It was set aside" in run.damaged[0]


def test_a_damaged_iterate_is_not_in_the_manifest(tmp_path):
    run = started(tmp_path, epochs=2)
    run.keep_iterate(1, {"w": torch.zeros(2)}, last=3)
    run.keep_iterate(2, {"w": torch.ones(2)}, last=3)
    damaged = run.iterates()[1]
    damaged.write_bytes(b"")
    resumed = finished(tmp_path)
    assert resumed.damaged == [f"{damaged} is damaged. It was set aside."]
    files = json.loads((tmp_path / "manifest.json").read_text())["files"]
    weights = [name for name in files if name.endswith(".pt")]
    assert sorted(name.split("-")[0] for name in weights) == ["checkpoint", "iterates/iterate"]


def test_a_failure_is_recorded_and_cleared_on_the_next_attempt(tmp_path):
    run = started(tmp_path)
    run.fail("no memory")
    assert json.loads((tmp_path / "failure.json").read_text()) == {"reason": "no memory"}
    reloaded(tmp_path)
    assert not (tmp_path / "failure.json").exists()
