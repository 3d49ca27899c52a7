"""Helpers of all tasks."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from gadam.runs.recipe import Average, Data, Optimizer, Recipe, RecipeError
from gadam.train import tasks
from gadam.train.tasks.task import _PURPOSES

RECIPE = Recipe(
    "r",
    model="vgg-mini",
    data=Data(examples=100, size=8),
    optimizer=Optimizer("sgd", 0.1),
    epochs=5,
    batch_size=32,
)


def test_seeds_differ_by_run_epoch_and_purpose() -> None:
    seeds = {
        tasks.seed_for(seed, epoch, purpose)
        for seed in range(3)
        for epoch in range(300)
        for purpose in _PURPOSES
    }
    assert len(seeds) == 3 * 300 * 4


@pytest.mark.parametrize(
    ("average", "expected"),
    [(None, 0), (Average(0), 0), (Average(3), 12), (Average(3, every=8), 12)],
)
def test_steps_before_averaging(average: Average | None, expected: int) -> None:
    recipe = replace(RECIPE, average=average)
    task = tasks.build(recipe, 0, torch.device("cpu"), None)
    assert task.steps(0) == 4
    assert tasks.steps_before_averaging(recipe, task) == expected


def test_interval_longer_than_the_rest_raises() -> None:
    recipe = replace(RECIPE, average=Average(3, every=9))
    task = tasks.build(recipe, 0, torch.device("cpu"), None)
    with pytest.raises(RecipeError, match="only 8 steps remain from epoch 3 on"):
        tasks.steps_before_averaging(recipe, task)
