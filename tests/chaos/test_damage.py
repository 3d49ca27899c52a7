"""Any file of a run, damaged in any way: a sentence or the right numbers, never anything else."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chaos.damage import (
    KINDS,
    check_report,
    check_training,
    choose,
    damage,
    fresh_copy,
    undetected,
)
from compare_runs import stop_after
from gadam.runs import Average, Data, Optimizer, Recipe, collect
from gadam.train import loop

RECIPE = Recipe(
    "r",
    model="logistic",
    data=Data("fashion-mini", validation=50, examples=200, size=8, augment=False),
    optimizer=Optimizer("adamw", 1e-2, 0.1),
    average=Average(1),
    epochs=4,
    batch_size=25,
    keep_iterates=2,
)


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> Path:
    """Return a folder with a finished run, and one that was stopped in its last epoch."""
    folder = tmp_path_factory.mktemp("runs")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "CHECKPOINT_SECONDS", 0.0)
        loop.train(RECIPE, folder / "finished")
        with pytest.raises(loop.Stopped):
            loop.train(RECIPE, folder / "stopped", should_stop=stop_after(20))
    return folder


@settings(max_examples=2 * settings().max_examples)
@given(
    state=st.sampled_from(["finished", "stopped"]),
    kind=st.sampled_from(sorted(KINDS)),
    times=st.integers(1, 3),
    seed=st.integers(0, 2**32),
)
def test_a_damaged_file_never_leads_to_wrong_numbers(runs, state, kind, times, seed):
    rng = random.Random(seed)
    folder = fresh_copy(runs / state, runs.parent / "damaged")
    expected = collect([folder])
    pattern = KINDS[kind]
    if kind != "lock" and not list(folder.glob(pattern)):
        return
    before = {p: p.read_bytes() for p in folder.rglob("*") if p.is_file()}
    what = []
    for _ in range(times):
        path = choose(folder, pattern, rng)
        what.append(damage(path, rng))
        if not path.exists():
            break
    assert check_report(folder, expected) == [], what
    if state == "finished" and kind != "lock" and (kind != "checkpoint" or "000004" in path.name):
        assert undetected(folder, {path: before[path]}) == [], what
    _, wrong = check_training(folder, RECIPE, runs / "finished")
    assert wrong == [], what


def test_another_recipe_in_a_damaged_header_is_never_believed(runs):
    other = replace(RECIPE, optimizer=Optimizer("adamw", 2e-2, 0.1))
    for state in ("finished", "stopped"):
        folder = fresh_copy(runs / state, runs.parent / "damaged")
        header = folder / "run.json"
        header.write_text(header.read_text().replace('"lr": 0.01', '"lr": 0.02'))
        sentence, _ = check_training(folder, other, runs / "finished")
        assert "holds a run of another recipe (optimizer.lr: 0.01 → 0.02)" in sentence
