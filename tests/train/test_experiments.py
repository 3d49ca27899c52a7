"""Experiments by name: their rows, costs and scales, and two steps of every recipe."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

import synthetic
from gadam.runs.recipe import Recipe, RecipeError
from gadam.train import experiments, loop, lstm, models
from gadam.train.experiments import get, hours, mini, names, recipes


def distinct(scale: experiments.Scale) -> dict[str, Recipe]:
    """Return the recipes that differ in more than their name when they are cut to two steps."""
    found: dict[Recipe, str] = {}
    for name, recipe in recipes(scale).items():
        found.setdefault(replace(synthetic.two_steps(recipe), name=""), name)
    return {name: recipe for recipe, name in found.items()}


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


def test_rows_of_mixed_experiments_have_their_own_metrics():
    experiment = get("fig-frequency")
    assert experiment.metrics == ["perplexity", "accuracy"]
    assert experiment.metric_of("LSTM every 10") == "perplexity"
    assert get("fig3c").metrics == ["top5"]


def test_mini_recipes_have_a_validation_split_and_image_recipes_need_no_download():
    for recipe in recipes("mini").values():
        if recipe.language is not None:
            synthetic_text = recipe.name.startswith("lm-mini")
            assert recipe.data.name == ("toy-language" if synthetic_text else "ptb-mini")
            assert recipe.model == "awd-lstm-mini"
            continue
        assert recipe.data.name == "fashion-mini"
        assert recipe.data.validation > 0
        assert "mini" in recipe.model or recipe.model == "logistic"


@pytest.mark.parametrize(
    ("name", "sentence"),
    [("tab-cifra", "Did you mean 'tab-cifar'?"), ("x", "Run `gadam list` for the names.")],
)
def test_unknown_names_are_refused(name, sentence):
    with pytest.raises(
        RecipeError, match=re.escape(f"There is no experiment {name!r}. {sentence}")
    ):
        get(name)


def test_unknown_scales_are_refused():
    with pytest.raises(RecipeError, match="scale must be mini or paper, got 'huge'"):
        get("tab-cifar", "huge")  # type: ignore[arg-type]


def test_mini_recipes_keep_all_proportions():
    large = get("tab-cifar", "paper").recipes["VGG-16 C-100 Gadam"]
    small = mini(large)
    assert (small.epochs, large.epochs) == (20, 300)
    assert large.average is not None
    assert small.average is not None
    assert (small.average.start, large.average.start) == (11, 161)
    assert small.schedule == large.schedule


@pytest.mark.parametrize("name", distinct("mini"))
def test_every_mini_recipe_takes_two_steps(name, tmp_path, monkeypatch):
    synthetic.install(monkeypatch)
    result = loop.train(distinct("mini")[name], tmp_path)
    assert result.status == "done"
    assert result.metric("loss", "iterate") is not None


@pytest.mark.slow
@pytest.mark.parametrize("name", distinct("paper"))
def test_every_paper_recipe_takes_two_steps_at_full_size(name, tmp_path, monkeypatch):
    synthetic.install(monkeypatch)
    recipe = distinct("paper")[name]
    result = loop.train(recipe, tmp_path, threads=torch.get_num_threads())
    assert result.status in ("done", "diverged")
    with torch.device("meta"):
        if recipe.language is not None:
            built: nn.Module = lstm.build(recipe.model, synthetic.WORDS[recipe.data.name])
        else:
            shape, classes = synthetic.SHAPES[recipe.data.name]
            built = models.build(recipe.model, classes, shape)
    assert result.parameters == sum(p.numel() for p in built.parameters())


def test_costs_match_the_networks():
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
