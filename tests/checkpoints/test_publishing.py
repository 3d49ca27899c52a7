"""A killed command leaves nothing, or a whole result."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from gadam.checkpoints import CheckpointError, average, publishing, read_provenance
from gadam.checkpoints.publishing import published

TARGETS = ["averaged", "averaged.safetensors"]


def made(folder: Path, size: int = 4) -> str:
    for step in range(3):
        save_file(
            {"a": torch.full((size,), float(step)), "b": torch.ones(size)},
            folder / f"step-{step}.safetensors",
        )
    return str(folder / "step-*.safetensors")


def is_whole(target: Path) -> bool:
    """Return True if there is a whole result, and False if there is none."""
    if not target.exists():
        return False
    assert len(read_provenance(target).inputs) == 3
    state = load_file(target / "model.safetensors" if target.is_dir() else target)
    assert set(state["a"].tolist()) == {1.0}
    return True


def visible(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir() if not path.name.startswith((".", "step"))}


def die_at_sync(number: int) -> None:
    """End this process at a call of fsync, as a signal would."""
    sync, before = os.fsync, iter(range(number))

    def fsync(descriptor: int) -> None:
        if next(before, None) is None:
            os._exit(9)
        sync(descriptor)

    setattr(os, "fsync", fsync)  # noqa: B010 (the child process ends soon)


@pytest.mark.parametrize("name", TARGETS)
def test_a_process_killed_at_any_sync_leaves_nothing_or_all(name, tmp_path):
    pattern, target = made(tmp_path), tmp_path / name
    outcomes = []
    for calls in range(20):
        child = os.fork()
        if child == 0:  # dies before the sync, without cleaning up
            die_at_sync(calls)
            average(pattern, target)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        outcomes.append(is_whole(target))
        assert visible(tmp_path) <= {name}
        if os.waitstatus_to_exitcode(status) == 0:
            break
        if outcomes[-1]:
            target.unlink() if target.is_file() else shutil.rmtree(target)
    assert outcomes[-1]
    assert outcomes[0] is False
    assert len(outcomes) >= 3
    assert not list(tmp_path.glob(".*"))  # the last process removed what the others left


@pytest.mark.slow
@pytest.mark.parametrize("name", TARGETS)
def test_a_command_killed_at_random_moments_leaves_nothing_or_all(name, tmp_path):
    pattern, target = made(tmp_path, size=5_000_000), tmp_path / name
    code = "from gadam.checkpoints import averaging; import sys; print('ready', flush=True)"
    code += "; averaging.average(sys.argv[1], sys.argv[2])"
    rng = random.Random(0)
    seen = set()
    for attempt in range(12):
        command = [sys.executable, "-c", code, pattern, str(target)]
        with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
            assert process.stdout is not None
            process.stdout.readline()
            # The first one at once, the last one when it is certainly done.
            time.sleep(60 if attempt == 11 else rng.uniform(0, 0.2 * attempt))
            process.send_signal(signal.SIGKILL)
        seen.add(is_whole(target))
        assert visible(tmp_path) <= {name}
        if is_whole(target):
            break
    assert seen == {True, False}


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
def test_an_error_leaves_nothing(error, tmp_path):
    with pytest.raises(error):
        with published(tmp_path / "out") as temporary:
            temporary.mkdir()
            (temporary / "file").touch()
            raise error
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", TARGETS)
def test_nothing_is_overwritten(name, tmp_path):
    pattern, target = made(tmp_path), tmp_path / name
    target.write_text("precious")
    with pytest.raises(CheckpointError, match=r"exists. Remove it, or pass a different --out"):
        average(pattern, target)
    target.unlink()
    with pytest.raises(CheckpointError, match="exists"):  # it appears meanwhile
        with published(target) as temporary:
            temporary.write_text("mine")
            target.write_text("precious")
    assert target.read_text() == "precious"


def test_an_empty_folder_may_be_the_target(tmp_path):
    (tmp_path / "averaged").mkdir()
    average(made(tmp_path), tmp_path / "averaged")
    assert is_whole(tmp_path / "averaged")


def test_a_link_is_not_followed(tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "averaged").symlink_to("elsewhere")
    with pytest.raises(CheckpointError, match="exists"):
        average(made(tmp_path), tmp_path / "averaged")


def test_a_full_disk_is_explained(tmp_path, monkeypatch):
    def full(descriptor: int) -> None:
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr(publishing.os, "fsync", full)
    with pytest.raises(CheckpointError, match="The disk is full"):
        average(made(tmp_path), tmp_path / "averaged")
    assert not (tmp_path / "averaged").exists()
    assert not list(tmp_path.glob(".*"))


def test_an_input_that_changes_meanwhile_is_refused(tmp_path):
    pattern = made(tmp_path)

    def training_goes_on(done: int, total: int) -> None:
        os.utime(tmp_path / "step-1.safetensors", (1, 1))

    with pytest.raises(CheckpointError, match=r"step-1.safetensors changed while it was read"):
        average(pattern, tmp_path / "out", on_progress=training_goes_on)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("out", "message"),
    [
        ("out.pt", "Pass --out out.safetensors, or a folder."),
        ("out.ckpt", "Pass --out out.safetensors, or a folder."),
    ],
)
def test_another_format_is_refused(out, message, tmp_path):
    with pytest.raises(CheckpointError, match=message):
        average(made(tmp_path), tmp_path / out)
