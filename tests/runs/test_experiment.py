"""Experiments: round trips, metrics of rows, renaming and restriction."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gadam.runs.experiment import Experiment, more_is_better
from gadam.runs.files import RunError, to_json
from gadam.runs.recipe import Average, Data, Language, Optimizer, OwnTask, Recipe, RecipeError

IMAGES = Recipe("i", "vgg-mini")
TEXT = Recipe("t", "awd-lstm-mini", Data("toy-language", augment=False), language=Language())
BOTH = Experiment(
    "e",
    "Title",
    {"AdamW": IMAGES, "Gadam": replace(IMAGES, average=Average(3)), "SGD": IMAGES},
    bases={"Gadam": "AdamW"},
    published={"Gadam": 75.73, "SGD": 70.0},
)

LABELS = st.text(min_size=1, max_size=8)
NUMBERS = st.floats(allow_nan=False, allow_infinity=False)
RECIPES = st.sampled_from(
    [IMAGES, TEXT, replace(IMAGES, optimizer=Optimizer("adamw", 0.01), average=Average(3))]
)
EXPERIMENTS = st.builds(
    Experiment,
    name=LABELS,
    title=LABELS,
    recipes=st.dictionaries(LABELS, RECIPES, max_size=3),
    bases=st.dictionaries(LABELS, LABELS, max_size=2),
    published=st.dictionaries(LABELS, NUMBERS, max_size=2),
    metric=st.sampled_from(["accuracy", "top5"]),
    split=st.sampled_from(["validation", "test"]),
    seeds=st.integers(1, 10),
    note=st.text(max_size=8),
    analysis=st.lists(LABELS, max_size=2).map(tuple),
    command=st.text(max_size=8),
    floors=st.dictionaries(LABELS, st.dictionaries(LABELS, NUMBERS, max_size=2), max_size=2),
    extra=st.dictionaries(LABELS.map(lambda name: f"new {name}"), st.integers(), max_size=2),
)


# ------------------------------------------------------------------------------------ plain data


@given(EXPERIMENTS)
def test_survives_json(experiment):
    text = to_json(experiment.to_dict())
    again = Experiment.from_dict(json.loads(text))
    assert again == experiment
    assert list(again.recipes) == list(experiment.recipes)  # the order of rows
    assert to_json(again.to_dict()) == text


def test_unknown_fields_of_a_newer_version_are_written_back():
    values = {**BOTH.to_dict(), "tomorrow": [1, None]}
    again = Experiment.from_dict(values)
    assert again.extra == {"tomorrow": [1, None]}
    assert again.to_dict() == values


def test_missing_fields_have_defaults_or_are_named():
    full = BOTH.to_dict()
    for name in full:
        values = {key: value for key, value in full.items() if key != name}
        if name in ("name", "title", "recipes"):
            with pytest.raises(RunError, match=rf"^It has no {name}\.$"):
                Experiment.from_dict(values)
        else:
            default = getattr(Experiment("", "", {}), name)
            assert getattr(Experiment.from_dict(values), name) == default


@pytest.mark.parametrize(
    ("name", "wrong", "sentence"),
    [
        ("title", 3, "title must be a string, got 3."),
        ("recipes", [], "recipes must be a JSON object, got []."),
        ("bases", {"a": 1}, "bases must be a JSON object with each value a string"),
        ("published", {"a": "x"}, "published must be a JSON object with each value a number"),
        ("published", {"a": None}, "published must be a JSON object with each value a number"),
        ("split", "train", "split must be validation or test, got 'train'."),
        ("seeds", "three", "seeds must be a whole number, got 'three'."),
        ("analysis", "density", "analysis must be a list, got 'density'."),
        ("floors", {"perplexity": 3}, "floors must be a JSON object"),
    ],
)
def test_wrong_fields_are_refused_with_a_sentence(name, wrong, sentence):
    with pytest.raises(RunError) as refused:
        Experiment.from_dict({**BOTH.to_dict(), name: wrong})
    assert str(refused.value).startswith(sentence)


@pytest.mark.parametrize("values", [None, 3, "name", []])
def test_data_that_is_not_an_object_is_refused(values):
    with pytest.raises(RunError, match="A JSON object is needed"):
        Experiment.from_dict(values)


def test_a_wrong_recipe_is_refused():
    with pytest.raises(RecipeError, match="another version"):
        Experiment.from_dict({**BOTH.to_dict(), "recipes": {"a": {"x": 1}}})


# --------------------------------------------------------------------------------------- metrics


def test_each_row_has_its_own_metric():
    mixed = Experiment("e", "Title", {"LSTM": TEXT, "VGG": IMAGES, "LSTM 2": TEXT}, metric="top5")
    assert [mixed.metric_of(row) for row in mixed.recipes] == ["perplexity", "top5", "perplexity"]
    assert mixed.metrics == ["perplexity", "top5"]
    assert Experiment("e", "Title", {}).metrics == ["accuracy"]


def test_each_row_has_its_own_mode():
    own = replace(IMAGES, task=OwnTask("my_task.py", metric="accuracy", mode="min"))
    rows = {"LSTM": TEXT, "VGG": IMAGES, "own": own}
    modes = {
        metric: [Experiment("e", "Title", rows, metric=metric).mode_of(row) for row in rows]
        for metric in ("accuracy", "loss")
    }
    assert modes == {"accuracy": ["min", "max", "min"], "loss": ["min", "min", "min"]}
    mixed = Experiment("e", "Title", rows, metric="top5")
    assert [mixed.metric_of(row) for row in rows] == ["perplexity", "top5", "accuracy"]
    assert [recipe.mode for recipe in rows.values()] == ["min", "max", "min"]
    assert Experiment.from_dict(mixed.to_dict()) == mixed


def test_which_metrics_are_better_when_larger():
    better = [name for name in ("accuracy", "top5", "perplexity", "loss") if more_is_better(name)]
    assert better == ["accuracy", "top5"]


# ------------------------------------------------------------------------------------------ rows


def test_restricted_to_some_rows():
    kept = BOTH.restricted_to({"Gadam": BOTH.recipes["Gadam"], "SGD": IMAGES})
    assert list(kept.recipes) == ["Gadam", "SGD"]
    assert kept.bases == {}  # AdamW is gone
    assert kept.published == {"Gadam": 75.73, "SGD": 70.0}
    assert BOTH.restricted_to({"SGD": IMAGES}).published == {"SGD": 70.0}
    assert BOTH.restricted_to(BOTH.recipes) == BOTH


def test_renamed_rows():
    renamed = BOTH.renamed({"Gadam": "G", "AdamW": "A", "no such row": "N"})
    assert list(renamed.recipes) == ["A", "G", "SGD"]
    assert renamed.recipes["G"] == BOTH.recipes["Gadam"]
    assert renamed.bases == {"G": "A"}
    assert renamed.published == {"G": 75.73, "SGD": 70.0}
    assert renamed.renamed({"G": "Gadam", "A": "AdamW"}) == BOTH


@given(EXPERIMENTS)
def test_renaming_and_restricting_keep_references_inside_the_experiment(experiment):
    kept = experiment.restricted_to(experiment.recipes)
    assert {*kept.bases, *kept.bases.values(), *kept.published} <= set(kept.recipes)
    names = {row: f"renamed {row}" for row in kept.recipes}
    renamed = kept.renamed(names)
    assert list(renamed.recipes) == list(names.values())
    assert {*renamed.bases, *renamed.bases.values(), *renamed.published} <= set(renamed.recipes)
