"""The catalog: every table and figure of the paper, with the settings of the paper."""

from __future__ import annotations

from gadam.runs.recipe import Average, Language, Recipe
from gadam.train.catalog import BASES, PAPER, bases_in, side_by_side
from gadam.train.experiments import get, names

# The tables and figures of the paper.
PUBLISHED = [
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


def test_the_catalog_is_complete():
    assert set(PUBLISHED) <= set(PAPER) <= set(names())


def test_image_recipes_have_the_settings_of_the_paper():
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


def test_language_recipes_have_the_settings_of_the_paper():
    rows = get("tab-ptb", "paper").recipes
    assert list(rows) == ["ASGD", "Adam", "Padam", "Gadam", "GadamX"]
    for recipe in rows.values():
        assert (recipe.epochs, recipe.batch_size, recipe.clip_grad_norm) == (200, 20, 0.25)
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


def test_rows_are_compared_with_the_same_optimizer_without_averaging():
    rows = {f"VGG-16 {method}": Recipe("", "vgg16") for method in ("SGD", "SWA", "Gadam")}
    assert bases_in(rows) == {"VGG-16 SWA": "VGG-16 SGD"}  # there is no AdamW
    assert side_by_side("Title", rows).bases == bases_in(rows)
    assert BASES == {"SWA": "SGD", "Gadam": "AdamW", "GadamX": "PadamW"}
