"""Every experiment and recipe there is."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import synthetic
from gadam.train import experiments, loop, models
from gadam.train.experiments import get, hours, names, recipes
from gadam.train.recipe import Recipe, RecipeError

# The images' part of the paper, name by name.
PAPER = [
    "fig1a",
    "fig1b",
    "fig1c",
    "fig1d",
    "fig2a",
    "fig2b",
    "fig2c",
    "fig2d",
    "fig3a",
    "fig3b",
    "fig3c",
    "fig3d",
    "tab-imagenet",
    "fig-imagenet",
    "tab-cifar",
    "tab-c10",
    "fig-c10",
    "tab-resnext",
    "tab-imagenet32",
    "fig-lookahead",
    "fig-frequency",
    "fig-tavg",
    "tab-tavg",
    "tab-auto",
    "fig-imagenet-lr",
    "fig-tradeoff",
    "tab-linear-step",
    "tab-sharpness",
    "tab-baselines",
    "fig-iaprevious",
    "mnist-logistic",
]


def distinct(scale: experiments.Scale) -> dict[str, Recipe]:
    """Recipes that differ in more than their name, as two steps see them."""
    found: dict[Recipe, str] = {}
    for name, recipe in recipes(scale).items():
        found.setdefault(replace(synthetic.two_steps(recipe), name=""), name)
    return {name: recipe for recipe, name in found.items()}


def test_all_of_the_paper_is_there():
    assert set(PAPER) <= set(names())


@pytest.mark.parametrize("scale", ["mini", "paper"])
def test_names_are_unique_and_labels_have_bases(scale):
    count = sum(len(get(name, scale).recipes) for name in names())
    assert len(recipes(scale)) == count
    for name in names():
        experiment = get(name, scale)
        assert set(experiment.bases) <= set(experiment.recipes)
        assert set(experiment.bases.values()) <= set(experiment.recipes)
        assert set(experiment.published) <= set(experiment.recipes)
        assert all(row != base for row, base in experiment.bases.items())
        assert hours(experiment) > 0


def test_the_papers_settings_are_the_papers():
    rows = get("tab-cifar", "paper").recipes
    gadam = rows["VGG-16 C-100 Gadam"]
    assert (gadam.optimizer.lr, gadam.optimizer.weight_decay) == (5e-4, 0.25)
    assert (gadam.epochs, gadam.batch_size, gadam.data.validation) == (300, 128, 0)
    assert gadam.average is not None
    assert gadam.average.start == 161
    assert rows["PRN-110 C-10 SWA"].optimizer.weight_decay == 5e-4
    assert rows["PRN-110 C-10 PadamW"].optimizer.amsgrad
    wide = get("tab-imagenet32", "paper").recipes["GadamX"]
    assert wide.schedule.name == "frozen-linear"
    assert (wide.epochs, wide.optimizer.lr, wide.optimizer.weight_decay) == (50, 0.03, 3e-4)


def test_mini_recipes_hold_out_a_validation_split_and_need_no_download():
    for recipe in recipes("mini").values():
        assert recipe.data.name == "fashion-mini"
        assert recipe.data.validation > 0
        assert "mini" in recipe.model or recipe.model == "logistic"


@pytest.mark.parametrize(
    ("name", "sentence"),
    [("tab-cifra", "did you mean 'tab-cifar'"), ("tab-ptb", "language"), ("x", "gadam list")],
)
def test_unknown_names_are_refused(name, sentence):
    with pytest.raises(RecipeError, match=sentence):
        get(name)


@pytest.mark.parametrize("name", distinct("mini"))
def test_every_mini_recipe_takes_two_steps(name, tmp_path, monkeypatch):
    synthetic.install(monkeypatch)
    result = loop.train(distinct("mini")[name], tmp_path)
    assert result["status"] == "done"
    assert math.isfinite(result["iterate"]["test"]["loss"])


@pytest.mark.slow
@pytest.mark.parametrize("name", distinct("paper"))
def test_every_paper_recipe_takes_two_true_steps(name, tmp_path, monkeypatch):
    synthetic.install(monkeypatch)
    recipe = distinct("paper")[name]
    result = loop.train(recipe, tmp_path, threads=torch.get_num_threads())
    assert result["status"] in ("done", "diverged")
    with torch.device("meta"):
        classes = synthetic.SHAPES[recipe.data.name][1]
        built = models.build(recipe.model, classes, synthetic.SHAPES[recipe.data.name][0])
    assert result["parameters"] == sum(p.numel() for p in built.parameters())


def test_costs_are_of_the_networks_as_they_are():
    from torch.utils.flop_counter import FlopCounterMode

    for name, expected in experiments.GFLOP.items():
        shape = (3, 224, 224) if re.match(r"resnet\d", name) else (3, 32, 32)
        shape = (1, 14, 14) if "mini" in name or name == "logistic" else shape
        with torch.device("meta"), FlopCounterMode(display=False) as counter:
            models.build(name, 100, shape).eval()(torch.zeros(1, *shape, device="meta"))
        assert counter.get_total_flops() / 1e9 == pytest.approx(expected, rel=0.05), name


def test_labels_make_file_names():
    assert experiments.slug("Gadam, lr 0.5, eps 1") == "gadam-lr-0.5-eps-1"
    assert Path(experiments.slug("../../etc")).name == "..-..-etc"
