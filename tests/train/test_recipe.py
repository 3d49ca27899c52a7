"""Recipes as values, and their overriding by name."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gadam.train.recipe import (
    Average,
    Data,
    Optimizer,
    Recipe,
    RecipeError,
    Schedule,
    differences,
    from_dict,
    override,
    to_dict,
)

RECIPE = Recipe("r", model="vgg-mini")
AVERAGED = replace(RECIPE, average=Average(3), schedule=Schedule("linear-ia"))


@given(
    lr=st.floats(0, 10),
    betas=st.tuples(st.floats(0, 0.9), st.floats(0, 0.9)),
    milestones=st.lists(st.integers(1, 100), max_size=3).map(tuple),
    average=st.sampled_from([None, Average(3), Average(0, every=7), Average(2, weighting="ema")]),
)
def test_survives_json(lr, betas, milestones, average):
    recipe = Recipe(
        "r",
        model="vgg-mini",
        optimizer=Optimizer("adamw", lr, betas=betas),
        schedule=Schedule("step", milestones=milestones),
        average=average,
    )
    assert from_dict(to_dict(recipe)) == recipe


def test_a_recipe_of_another_version_is_refused():
    with pytest.raises(RecipeError, match="another version"):
        from_dict({**to_dict(RECIPE), "gone": 1})


@pytest.mark.parametrize(
    ("setting", "path", "value"),
    [
        ("lr=0.25", "optimizer.lr", 0.25),
        ("optimizer.lr=1e-3", "optimizer.lr", 1e-3),
        ("epochs=7", "epochs", 7),
        ("data.augment=no", "data.augment", False),
        ("compile=True", "compile", True),
        ("amp=bf16", "amp", "bf16"),
        ("clip=none", "clip", None),
        ("clip=0.5", "clip", 0.5),
        ("betas=0.8,0.9", "optimizer.betas", (0.8, 0.9)),
        ("milestones=3,5,7", "schedule.milestones", (3, 5, 7)),
        ("optimizer.name=padamw", "optimizer.name", "padamw"),
        ("average.start=4", "average.start", 4),
        ("average.every=10", "average.every", 10),
        ("average=none", "average", None),
    ],
)
def test_override(setting, path, value):
    found = override(RECIPE, [setting])
    for part in path.split("."):
        found = getattr(found, part)
    assert found == value
    assert type(found) is type(value)


@pytest.mark.parametrize(
    ("setting", "sentence"),
    [
        ("lr", "key=value"),
        ("lrr=1", "did you mean 'lr'"),
        ("optimizer.weight_decy=1", "did you mean 'optimizer.weight_decay'"),
        ("size=5", "could be any of data.size, average.size"),
        ("lr=fast", "lr must be a number, not 'fast'"),
        ("lr=nan", "lr must be a number"),
        ("epochs=2.5", "epochs must be a whole number"),
        ("epochs=0", "epochs must be at least 1"),
        ("optimizer.name=adamww", "did you mean 'adamw'"),
        ("betas=0.9", "numbers separated by commas"),
        ("augment=maybe", "true or false"),
        ("label_noise=2", r"label_noise must lie in \[0, 1\]"),
        ("lr=-1", "must not be negative"),
        ("schedule.name=linear-ia", "needs an average with a fixed start"),
        ("average.start=plateau", "needs a validation metric"),
        ("optimizer.name=asgd", "say when it starts"),
        ("zzzzzz=1", "there are name, model"),
    ],
)
def test_override_refuses_in_a_sentence(setting, sentence):
    with pytest.raises(RecipeError, match=sentence):
        override(RECIPE, [setting])


def test_the_order_of_settings_matters_only_where_it_must():
    settings = ["average.start=plateau", "data.validation=100"]
    with pytest.raises(RecipeError, match="validation"):
        override(RECIPE, settings[:1])
    assert override(RECIPE, settings) == override(RECIPE, settings[::-1])


def test_differences_names_what_changed():
    other = replace(AVERAGED, optimizer=Optimizer("sgd", 0.2), average=None, schedule=Schedule())
    assert "optimizer.lr: 0.1 → 0.2" in differences(AVERAGED, other)
    assert differences(AVERAGED, AVERAGED) == []
    assert any(d.startswith("average") for d in differences(AVERAGED, other))


@pytest.mark.parametrize(
    ("optimizer", "average", "method"),
    [
        (Optimizer("sgd"), Average(1), "SWA"),
        (Optimizer("adamw"), Average(1), "Gadam"),
        (Optimizer("padamw"), Average(1), "GadamX"),
        (Optimizer("adam"), Average(1), "Adam-IA"),
        (Optimizer("adamw"), None, "AdamW"),
        (Optimizer("adamw", lookahead=True), Average(1), "Gadam + LH"),
        (Optimizer("sgd"), Average("plateau"), "SWA-Auto"),
        (Optimizer("adamw"), Average(1, weighting="ema"), "AdamW + EMA"),
        (Optimizer("adamw"), Average(1, weighting="window"), "AdamW + LAWA"),
    ],
)
def test_methods_have_the_papers_names(optimizer, average, method):
    data = Data(validation=10)
    assert Recipe("r", "vgg-mini", data, optimizer, average=average).method == method
