"""Block averages under real kills and damage at random places."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import time
from collections.abc import Callable
from multiprocessing.synchronize import Event
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import gadam
import quick_processes
from gadam.average import BlockError

STEPS, EVERY, KEPT = 60, 1, 4


def no_wait(descriptor: int) -> None:
    """Do not wait for the disk: a kill loses nothing that was written, only a power failure."""


@pytest.fixture(autouse=True, scope="module")
def quick_disk():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", no_wait)
        yield


def build(folder: Path, every: int = EVERY) -> tuple[nn.Module, gadam.Gadam, gadam.BlockAverages]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 1024), nn.Tanh(), nn.Linear(1024, 128))
    optimizer = gadam.Gadam(model.parameters(), lr=1e-2)
    return model, optimizer, gadam.BlockAverages(optimizer, folder, every=every, max_blocks=KEPT)


def train(folder: Path, until: int = STEPS, on_step: Callable[[], None] = lambda: None) -> None:
    """Train in a folder, with a checkpoint every few steps, from the last one if there is any."""
    model, optimizer, blocks = build(folder / "blocks")
    done = 0
    if (folder / "checkpoint.pt").exists():
        saved = torch.load(folder / "checkpoint.pt", weights_only=True)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        blocks.load_state_dict(saved["blocks"])
        done = saved["done"]
    for number in range(done + 1, until + 1):
        generator = torch.Generator().manual_seed(number)
        optimizer.zero_grad()
        model(torch.randn(4, 64, generator=generator)).square().mean().backward()
        optimizer.step()
        on_step()
        if number % 7 == 0:
            state = {
                "done": number,
                "model": model.state_dict(),
                "optimizer": optimizer.state_dict(),
                "blocks": blocks.state_dict(),
            }
            torch.save(state, folder / ".checkpoint.pt")
            os.replace(folder / ".checkpoint.pt", folder / "checkpoint.pt")
    blocks.finish()


def victim(folder: Path, started: Event) -> None:
    torch.set_num_threads(1)
    vars(os)["fsync"] = no_wait
    train(folder, on_step=started.set)


def contents(folder: Path) -> tuple[list[int], dict[str, bytes]]:
    """Return the boundaries, and the files of the blocks that count."""
    listed = json.loads((folder / "blocks" / "blocks.json").read_text())["blocks"]
    names = [f"{b['start']:012d}-{b['stop']:012d}.safetensors" for b in listed]
    boundaries = [block["start"] for block in listed] + [listed[-1]["stop"]]
    return boundaries, {name: (folder / "blocks" / name).read_bytes() for name in names}


@pytest.mark.slow
def test_killed_runs_resume_to_the_same_blocks(tmp_path):
    """Kill a run again and again at random moments. After each kill, finish it in a copy."""
    expected_folder, folder, copy = (tmp_path / name for name in ("undisturbed", "run", "copy"))
    expected_folder.mkdir()
    train(expected_folder)
    expected = contents(expected_folder)
    generator = random.Random(0)
    kills = during_writes = 0
    while kills < 25:
        if not (folder / "checkpoint.pt").exists():
            shutil.rmtree(
                folder, ignore_errors=True
            )  # of a run that was killed too early, or ended
            folder.mkdir()
        context = quick_processes.context()
        started = context.Event()
        process = context.Process(target=victim, args=(folder, started))
        process.start()
        assert started.wait(120)
        time.sleep(generator.uniform(0, 0.15))
        if process.is_alive():
            assert process.pid is not None
            os.kill(process.pid, signal.SIGKILL)
        process.join()
        if process.exitcode != -signal.SIGKILL:
            assert process.exitcode == 0
            assert contents(folder) == expected
            shutil.rmtree(folder)  # it was faster: begin again
            continue
        kills += 1
        files = {path.name for path in (folder / "blocks").iterdir()}
        committed = json.loads((folder / "blocks" / "blocks.json").read_text())
        known = [committed["blocks"], *committed["checkpoints"].values()]
        names = {f"{b['start']:012d}-{b['stop']:012d}.safetensors" for part in known for b in part}
        during_writes += bool(files - names - {"blocks.json"})
        if (folder / "checkpoint.pt").exists():
            shutil.copytree(folder, copy)
            train(copy)
            assert contents(copy) == expected
            shutil.rmtree(copy)
    assert during_writes, "some kills hit a write, a merge, or a commit"


@pytest.fixture(scope="module")
def trained(tmp_path_factory, quick_disk) -> Path:
    folder = tmp_path_factory.mktemp("blocks")
    train(folder, until=30)
    return folder / "blocks"


def windows(folder: Path) -> dict[tuple[int, int], list[Tensor]]:
    """Return the mean over every window, read by a new process."""
    model, _, blocks = build(folder)
    return {
        (start, stop): list(blocks.model_state_dict(model, start, stop).values())
        for i, start in enumerate(blocks.boundaries)
        for stop in blocks.boundaries[i + 1 :]
    }


@pytest.mark.parametrize("kind", ["block", "manifest"])
@pytest.mark.parametrize("seed", range(15))
def test_damage_at_a_random_place_is_named_or_harmless(trained, tmp_path, kind, seed):
    """Damage never changes a mean silently: an error names the file, or every bit is the same."""
    expected = windows(trained)
    folder = tmp_path / "blocks"
    shutil.copytree(trained, folder)
    generator = random.Random(seed)
    listed = json.loads((folder / "blocks.json").read_text())["blocks"]
    block = generator.choice(listed)
    name = f"{block['start']:012d}-{block['stop']:012d}.safetensors"
    path = folder / (name if kind == "block" else "blocks.json")
    content = bytearray(path.read_bytes())
    place = generator.randrange(len(content))
    how = generator.choice(["flip", "cut", "zero", "swap", "append"])
    if how == "flip":
        content[place] ^= 1 << generator.randrange(8)
    elif how == "cut":
        del content[place:]
    elif how == "zero":
        content[place : place + 64] = bytes(len(content[place : place + 64]))
    elif how == "swap":
        content[place:] = content[place:][::-1]
    else:
        content += generator.randbytes(5)
    changed = bytes(content) != path.read_bytes()
    path.write_bytes(content)
    try:
        found = windows(folder)
    except BlockError as error:
        message = str(error)
        assert str(path) in message
        assert "\n" not in message
        assert len(message) < 100 + 3 * len(str(path))
        return
    assert kind == "manifest" or not changed
    assert found.keys() == expected.keys()
    for window, tensors in found.items():
        assert all(map(torch.equal, tensors, expected[window]))
