from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import gadam
from gadam.checkpoints import CheckpointError
from gadam.checkpoints.finding import Found, choose, find, steps_in_names


def made(folder: Path, *names: str) -> None:
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()


def names(folder: Path, *patterns: str, **options) -> list[str]:
    found = find([folder / pattern for pattern in patterns], **options)
    return [each.path.relative_to(folder).as_posix() for each in found]


@pytest.mark.parametrize(
    "ordered",
    [
        ["checkpoint-9", "checkpoint-80", "checkpoint-700"],
        ["epoch=0-step=99.ckpt", "epoch=1-step=100.ckpt", "epoch=2-step=1000-v1.ckpt"],
        ["epoch=9-val_loss=0.71.ckpt", "epoch=10-val_loss=0.52.ckpt"],
        ["model_v2_900.pt", "model_v2_1000.pt"],
        ["iter_0000900/a.pt", "iter_0001000/a.pt"],
        ["global_step900.pt", "global_step1000.pt"],
        ["9.safetensors", "10.safetensors"],
        ["iterate-000009-0123456789abcdef.pt", "iterate-000010-0023456789abcdef.pt"],
    ],
)
def test_checkpoints_are_in_the_order_of_their_steps(tmp_path, ordered):
    made(tmp_path, *ordered)
    assert names(tmp_path, *sorted(ordered)) == ordered


@given(st.lists(st.integers(0, 10**9), unique=True, min_size=2))
def test_any_numbers_are_found(steps):
    assert steps_in_names([f"/a/b-3/checkpoint-{step}" for step in steps]) == steps


@pytest.mark.parametrize(
    ("ambiguous", "reason"),
    [
        (["a.pt", "b.pt"], "no single number"),
        (["last.ckpt", "epoch=1.ckpt"], "no single number"),
        (["v1-20.pt", "v2-10.pt"], "no single number"),
        (["step-10.pt", "step-010.pt"], "both are of step 10"),
        (["run1/checkpoint-5", "run2/checkpoint-5"], "both are of step 5"),
    ],
)
def test_an_ambiguous_order_is_refused_unless_it_is_given(tmp_path, ambiguous, reason):
    made(tmp_path, *ambiguous)
    with pytest.raises(CheckpointError, match=f"ambiguous: {reason}.*--order given"):
        names(tmp_path, *ambiguous)
    backwards = ambiguous[::-1]
    assert names(tmp_path, *backwards, order="given") == backwards


def test_a_checkpoint_that_matches_twice_counts_once(tmp_path):
    made(tmp_path, "step-1.pt", "step-2.pt")
    assert names(tmp_path, "step-*.pt", "step-2.pt") == ["step-1.pt", "step-2.pt"]


def test_a_glob_leaves_out_earlier_results(tmp_path):
    made(tmp_path, "checkpoint-9/x", "checkpoint-10/x", "checkpoint-avg/gadam-average.json")
    assert names(tmp_path, "checkpoint-*") == ["checkpoint-9", "checkpoint-10"]
    made(tmp_path, "mean-1/gadam-average.json", "mean-2/gadam-average.json")
    assert names(tmp_path, "mean-*") == ["mean-1", "mean-2"]  # averages of averages


def test_the_folder_of_a_trainer_stands_for_its_checkpoints(tmp_path):
    made(tmp_path, "out/checkpoint-9/x", "out/checkpoint-10/x", "out/model.safetensors")
    assert names(tmp_path, "out") == ["out/checkpoint-9", "out/checkpoint-10"]


def test_a_run_stands_for_its_iterates_or_else_its_checkpoints(tmp_path):
    saved = [f"run/checkpoint-{epoch:06d}-{'a' * 16}.pt" for epoch in (9, 10)]
    made(tmp_path, "run/run.json", *saved)
    assert names(tmp_path, "run") == saved
    kept = [f"run/iterates/iterate-{epoch:06d}-{'b' * 16}.pt" for epoch in (8, 9, 10)]
    made(tmp_path, *kept)
    assert names(tmp_path, "run") == kept


def test_an_empty_run_says_how_to_keep_iterates(tmp_path):
    made(tmp_path, "run/run.json")
    with pytest.raises(CheckpointError, match="keep_iterates"):
        names(tmp_path, "run")


def test_a_folder_of_blocks_is_recognized(tmp_path):
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    blocks = gadam.BlockAverages(optimizer, tmp_path / "blocks", every=2)
    for _ in range(4):
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
    blocks.flush()
    with pytest.raises(CheckpointError, match=r"is a folder of gadam.BlockAverages"):
        names(tmp_path, "blocks")
    blocks.remove()


def test_nothing_found(tmp_path):
    with pytest.raises(CheckpointError, match="does not exist or matches nothing"):
        find([str(tmp_path / "checkpoint-*")])


FOUND = [Found(Path(f"checkpoint-{step}"), step) for step in range(10, 110, 10)]


@pytest.mark.parametrize(
    ("options", "steps"),
    [
        ({}, range(10, 110, 10)),
        ({"last": 3}, [80, 90, 100]),
        ({"last": "3"}, [80, 90, 100]),
        ({"last": "20%"}, [90, 100]),
        ({"last": "25%"}, [80, 90, 100]),
        ({"last": "100%"}, range(10, 110, 10)),
        ({"from_step": 85}, [90, 100]),
        ({"to_step": 20}, [10, 20]),
        ({"from_step": 20, "to_step": 60, "last": 2}, [50, 60]),
    ],
)
def test_windows(options, steps):
    assert [each.step for each in choose(FOUND, **options)] == list(steps)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"last": "10%"}, "--last 10% of 10 checkpoints is 1. An average needs at least two"),
        ({"last": 0}, "--last must be a number"),
        ({"last": "many"}, "--last must be a number"),
        ({"last": "0%"}, "--last must be a number"),
        ({"last": "120%"}, "--last must be a number"),
        ({"last": 11}, "--last 11 is more than 10 checkpoints"),
        ({"from_step": 1000}, "No checkpoint is in the range of steps. There are 10, 20"),
        ({"from_step": 100}, "at least two"),
    ],
)
def test_windows_that_cannot_work(options, message):
    with pytest.raises(CheckpointError, match=message):
        choose(FOUND, **options)


def test_a_range_of_steps_needs_steps():
    with pytest.raises(CheckpointError, match="need step numbers"):
        choose([Found(Path("a"), None)] * 3, from_step=1)


@pytest.mark.parametrize(
    "unread",
    [
        ["step-500.pt", "step-1k.pt"],
        ["step-900.pt", "step-1,000.pt"],
        ["step-1000M.pt", "step-2B.pt"],
        ["epoch-1.75.pt", "epoch-2.5.pt"],
        ["step-5e2.pt", "step-1e3.pt"],
    ],
)
def test_numbers_that_are_not_whole_are_ambiguous(unread):
    with pytest.raises(CheckpointError, match="is ambiguous"):
        steps_in_names([f"/a/{name}" for name in unread])


def test_a_percentage_that_is_no_number_is_refused():
    found = [Found(Path(f"checkpoint-{step}"), step) for step in (10, 20)]
    with pytest.raises(CheckpointError, match="--last must be a number"):
        choose(found, last="1/0%")
