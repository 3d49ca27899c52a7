"""Every experiment and recipe there is."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

import synthetic
from gadam.train import experiments, loop, lstm, models
from gadam.train.experiments import get, hours, names, recipes
from gadam.train.recipe import Average, Language, Recipe, RecipeError

# The paper, name by name.
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
    "tab-ptb",
    "fig-ptb",
    "tab-ptb-nt",
    "fig-ptb-nt",
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
    assert len(recipes(scale)) == count + 1  # lm-mini is lm-mini-gadam
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


def test_the_papers_language_settings_are_the_papers():
    rows = get("tab-ptb", "paper").recipes
    assert list(rows) == ["ASGD", "Adam", "Padam", "Gadam", "GadamX"]
    for recipe in rows.values():
        assert (recipe.epochs, recipe.batch_size, recipe.clip) == (200, 20, 0.25)
        assert recipe.optimizer.weight_decay == 1.2e-6
        assert recipe.language == Language(70, True, 0.4, 0.25, 0.65, 0.1, 0.5, 2.0, 1.0)
        assert (recipe.model, recipe.data.name) == ("awd-lstm", "ptb")
    assert rows["ASGD"].optimizer.lr == 30
    assert (rows["Padam"].optimizer.partial, rows["Padam"].schedule.milestones) == (0.2, (100, 150))
    assert rows["GadamX"].schedule.name == rows["Gadam"].schedule.name == "constant"
    assert {rows[r].average for r in ("ASGD", "Gadam", "GadamX")} == {Average(100, every=1)}
    assert [rows[r].method for r in rows] == list(rows)
    triggered = get("tab-ptb-nt", "paper").recipes["NT-ASGD"]
    assert triggered.average == Average("non-monotone", every=1, patience=10)
    assert triggered.method == "NT-ASGD"
    often = get("fig-frequency", "paper").recipes
    averages = [r.average for row, r in often.items() if row.startswith("LSTM")]
    assert [a.every for a in averages if a is not None] == [1, 10, 100, "epoch"]
    assert any(row.startswith("LSTM") for row in get("fig-tavg", "paper").recipes)


def test_experiments_of_both_kinds_are_judged_row_by_row():
    experiment = get("fig-frequency")
    assert experiment.metrics == ["perplexity", "accuracy"]
    assert experiment.metric_of("LSTM every 10") == "perplexity"
    assert get("fig3c").metrics == ["top5"]


def test_mini_recipes_hold_out_a_validation_split_and_pictures_need_no_download():
    for recipe in recipes("mini").values():
        if recipe.language is not None:
            made_up = recipe.name.startswith("lm-mini")
            assert recipe.data.name == ("toy-language" if made_up else "ptb-mini")
            assert recipe.model == "awd-lstm-mini"
            continue
        assert recipe.data.name == "fashion-mini"
        assert recipe.data.validation > 0
        assert "mini" in recipe.model or recipe.model == "logistic"


@pytest.mark.parametrize(
    ("name", "sentence"),
    [("tab-cifra", "did you mean 'tab-cifar'"), ("x", "gadam list")],
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
        if recipe.language is not None:
            built: nn.Module = lstm.build(recipe.model, synthetic.WORDS[recipe.data.name])
        else:
            shape, classes = synthetic.SHAPES[recipe.data.name]
            built = models.build(recipe.model, classes, shape)
    assert result["parameters"] == sum(p.numel() for p in built.parameters())


def test_costs_are_of_the_networks_as_they_are():
    from torch.utils.flop_counter import FlopCounterMode

    for name, words in (("awd-lstm", 10_000), ("awd-lstm-mini", 2_000)):
        with torch.device("meta"):
            matrices = [p for p in lstm.build(name, words).parameters() if p.dim() == 2]
        multiplied = 2 * sum(p.numel() for p in matrices) / 1e9
        assert multiplied == pytest.approx(experiments.GFLOP[name], rel=0.05), name
    for name, expected in experiments.GFLOP.items():
        if name in lstm.names():
            continue
        shape = (3, 224, 224) if re.match(r"resnet\d", name) else (3, 32, 32)
        shape = (1, 14, 14) if "mini" in name or name == "logistic" else shape
        with torch.device("meta"), FlopCounterMode(display=False) as counter:
            models.build(name, 100, shape).eval()(torch.zeros(1, *shape, device="meta"))
        assert counter.get_total_flops() / 1e9 == pytest.approx(expected, rel=0.05), name


def test_labels_make_file_names():
    assert experiments.slug("Gadam, lr 0.5, eps 1") == "gadam-lr-0.5-eps-1"
    assert Path(experiments.slug("../../etc")).name == "..-..-etc"
