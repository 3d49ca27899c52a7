"""Image classification: splits, batches and evaluation."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch.nn import functional as F

from gadam.runs.recipe import Data, Optimizer, Recipe, RecipeError
from gadam.train import tasks
from gadam.train.tasks import ImageTask

RECIPE = Recipe(
    "r",
    model="vgg-mini",
    data=Data(examples=330, validation=30, size=8),
    optimizer=Optimizer("sgd", 0.1),
    epochs=2,
    batch_size=64,
)


@pytest.fixture(scope="module")
def task() -> ImageTask:
    return set_up(RECIPE)


def set_up(recipe: Recipe, seed: int = 0) -> ImageTask:
    task = ImageTask(recipe)
    task.setup(seed, torch.device("cpu"))
    return task


def test_splits(task: ImageTask) -> None:
    assert task.splits == ("validation", "test")
    assert {name: len(split) for name, split in task._splits.items()} == {
        "train": 300,
        "validation": 30,
        "test": 2000,
    }
    without = replace(RECIPE, data=replace(RECIPE.data, validation=0))
    assert ImageTask(without).splits == ("test",)


def test_epoch_is_a_function_of_the_seed_and_its_number(task: ImageTask) -> None:
    def first(seed: int, epoch: int) -> torch.Tensor:
        return next(set_up(RECIPE, seed).batches(epoch))[0]

    assert len(list(task.batches(0))) == task.steps(0) == 5
    assert first(0, 1).equal(first(0, 1))
    assert not first(0, 1).equal(first(0, 0))
    assert not first(0, 1).equal(first(1, 1))
    assert not next(task.refresh(0))[0].equal(next(task.batches(0))[0])


@pytest.mark.parametrize(("model", "steps"), [("vgg-mini", 4), ("logistic", 5)])
def test_batchnorm_skips_a_last_batch_of_one_image(model: str, steps: int) -> None:
    alone = replace(RECIPE, model=model, data=replace(RECIPE.data, examples=287))  # 4 x 64 + 1
    task = set_up(alone)
    assert task.steps(0) == steps
    for batches in (task.batches(0), task.refresh(0)):
        assert [len(y) for _, y in batches] == [64, 64, 64, 64, 1][:steps]


@pytest.mark.parametrize("count", [1, 3, 5])
def test_micro_batches_are_the_whole_batch(task: ImageTask, count: int) -> None:
    batch = next(task.batches(0))
    pieces = task.micro_batches(batch, count)
    assert sum(fraction for _, fraction in pieces) == pytest.approx(1.0)
    for place in (0, 1):
        assert torch.cat([piece[place] for piece, _ in pieces]).equal(batch[place])


@pytest.mark.parametrize("examples", [None, 0, 64, 100])
def test_training_data_is_ordered_and_not_augmented(task: ImageTask, examples: int | None) -> None:
    labels = [y for _, y in task.training_data(examples)]
    expected = task._splits["train"].labels[:examples]
    assert (torch.cat(labels) if labels else torch.tensor([])).tolist() == expected.tolist()
    assert all(a[0].equal(b[0]) for a, b in zip(task.training_data(100), task.training_data(100)))


def test_metrics_match_the_scores(task: ImageTask) -> None:
    scores, y = map(torch.cat, zip(*task.scores(task.model, "validation")))
    metrics = task.evaluate(task.model, "validation")
    assert metrics["loss"] == pytest.approx(float(F.cross_entropy(scores, y)), rel=1e-5)
    assert metrics["accuracy"] == pytest.approx(
        100 * float((scores.argmax(1) == y).double().mean())
    )
    top5 = (scores.argsort(descending=True)[:, :5] == y[:, None]).any(1)
    assert metrics["top5"] == pytest.approx(100 * float(top5.double().mean()))


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        ({"data": Data(examples=5001)}, "fashion-mini has 5000 training examples. Use fewer"),
        ({"data": Data(validation=5000)}, "fashion-mini has 5000 training examples. Use fewer"),
        ({"data": Data("toy-language")}, "toy-language is a text. Use a recipe for texts"),
        ({"model": "awd-lstm-mini"}, "awd-lstm-mini is a language model. Use a recipe for texts"),
    ],
)
def test_check_rejects_what_cannot_be_trained(changed: dict[str, object], sentence: str) -> None:
    with pytest.raises(RecipeError, match=sentence):
        tasks.check(replace(RECIPE, **changed), None)  # type: ignore[arg-type]


def test_image_files_are_decoded_at_the_size_of_the_recipe(tmp_path: Path) -> None:
    for folder in ("train", "val"):
        place = tmp_path / "imagenet" / folder / "n01"
        place.mkdir(parents=True)
        Image.fromarray(np.zeros((8, 8, 3), np.uint8)).save(place / "a.png")
    recipe = replace(RECIPE, data=Data("imagenet", size=8, workers=0))
    tasks.check(recipe, str(tmp_path))
    assert ImageTask(recipe, str(tmp_path)).dataset.input_shape == (3, 8, 8)
