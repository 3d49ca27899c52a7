"""Experiments and recipes by name: the comparison, the paper's tables and figures.

:mod:`gadam.train.catalog` has the paper's experiments at full scale. :func:`get` shrinks one to
``mini`` scale, where a run takes minutes on one core: a small network of the same kind, noisy
labels on small images or part of a text, and proportionally fewer epochs.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Literal

from gadam._names import did_you_mean, is_path
from gadam.runs.experiment import Experiment
from gadam.runs.recipe import Average, Data, Language, Optimizer, Recipe, RecipeError
from gadam.train.catalog import BASES, LINEAR, LINEAR_IA, PAPER, bases_in, side_by_side

__all__ = ["COMPARE", "GFLOP", "get", "hours", "in_proportion", "mini", "names", "recipes", "slug"]

Scale = Literal["mini", "paper"]

# -------------------------------------------------------------------------------------- mini scale

_MINI_MODELS = {
    "vgg16": "vgg-mini-nobn",
    "vgg16-bn": "vgg-mini",
    "preresnet110": "preresnet-mini",
    "resnext29": "preresnet-mini",
    "wrn28-10": "wrn-mini",
    "resnet18": "preresnet-mini",
    "resnet50": "preresnet-mini",
    "resnet101": "wrn-mini",
    "logistic": "logistic",
}
MINI_DATA = Data("fashion-mini", validation=1500, label_noise=0.3, size=14, augment=False)
MINI_EPOCHS = 20
MINI_EPOCHS_WITHOUT_BATCHNORM = 60  # they train more slowly: before that nothing overfits
# The paper's usual learning rate and weight decay, and their equivalents on the small task. Those
# of sgd, adamw and padamw are near the best of the grid that tuned the comparison; the others are
# guesses.
_MINI_SETTINGS: dict[str, tuple[tuple[float, float], tuple[float, float]]] = {
    "sgd": ((0.1, 5e-4), (0.1, 5e-3)),
    "adam": ((1e-3, 1e-4), (1e-2, 1e-3)),
    "adamw": ((1e-3, 0.1), (1e-2, 1.0)),
    "padam": ((0.1, 5e-4), (0.3, 1e-3)),
    "padamw": ((0.1, 2.5e-3), (0.3, 0.03)),
    "ranger": ((1e-3, 1e-2), (1e-2, 1e-2)),
}


MINI_LANGUAGE = Language(
    bptt=35,
    dropout=0.2,
    dropout_hidden=0.1,
    dropout_input=0.2,
    dropout_words=0.05,
    weight_drop=0.2,
    ar_alpha=1.0,
    tar_beta=0.5,
)
MINI_LANGUAGE_EPOCHS = 30
# The paper's learning rate, and its equivalent on part of the text.
_MINI_LANGUAGE_RATES = {"asgd": (30.0, 10.0), "adam": (1e-3, 1e-2), "padam": (1.0, 1.0)}


def mini(recipe: Recipe, epochs: int = MINI_EPOCHS) -> Recipe:
    """Return the recipe at mini scale, with all proportions kept.

    Args:
        recipe: At full scale.
        epochs: Epochs of image recipes. Language recipes have a fixed number.
    """
    return _mini_language(recipe) if recipe.language is not None else _mini_images(recipe, epochs)


def in_proportion(recipe: Recipe, epochs: int) -> Recipe:
    """Return a recipe with another number of epochs, and scale all that is counted in epochs.

    Args:
        recipe: The recipe.
        epochs: The new number of epochs.
    """
    share = epochs / recipe.epochs
    average = recipe.average
    if average is not None and isinstance(average.start, int):
        average = replace(average, start=round(average.start * share))
    elif average is not None:
        average = replace(average, patience=max(2, round(average.patience * share)))
    milestones = tuple(round(m * share) for m in recipe.schedule.milestones)
    return replace(
        recipe,
        epochs=epochs,
        average=average,
        keep_iterates=round(recipe.keep_iterates * share),
        schedule=replace(recipe.schedule, milestones=milestones),
    )


def _mini_language(recipe: Recipe) -> Recipe:
    usual, small = _MINI_LANGUAGE_RATES[recipe.optimizer.name]
    recipe = in_proportion(recipe, MINI_LANGUAGE_EPOCHS)
    return replace(
        recipe,
        model="awd-lstm-mini",
        data=replace(recipe.data, name="ptb-mini"),
        language=MINI_LANGUAGE,
        optimizer=replace(recipe.optimizer, lr=recipe.optimizer.lr * small / usual),
        batch_size=10,
    )


def _mini_images(recipe: Recipe, epochs: int) -> Recipe:
    o = recipe.optimizer
    (usual_lr, usual_decay), (lr, decay) = _MINI_SETTINGS[o.name]
    recipe = in_proportion(recipe, epochs)
    average = recipe.average
    return replace(
        recipe,
        model=_MINI_MODELS[recipe.model],
        data=replace(MINI_DATA, label_noise=0.0 if recipe.model == "logistic" else 0.3),
        # A large eps needs a large learning rate: keep the paper's own.
        optimizer=replace(
            o, lr=o.lr * lr / usual_lr, weight_decay=o.weight_decay * decay / usual_decay
        )
        if o.eps <= 1e-4
        else o,
        batch_size=128,
        evaluate_every=1 if average and isinstance(average.start, str) else epochs // 10,
    )


def _over_widths(experiment: Experiment) -> dict[str, Recipe]:
    """Use three widths of one network: the mini networks are all of about the same size."""
    models = {"narrow": "vgg-mini-narrow", "middle": "vgg-mini", "wide": "vgg-mini-wide"}
    return {
        f"{width} {row.removeprefix('VGG-16 ')}": replace(mini(r), model=model)
        for width, model in models.items()
        for row, r in experiment.recipes.items()
        if row.startswith("VGG-16 ")
    }


# ------------------------------------------------------------------------------------------- costs

# Billions of operations per image (14x14 for mini networks) or word in a forward pass.
GFLOP = {
    "logistic": 4e-5,
    "vgg16": 0.63,
    "vgg16-bn": 0.63,
    "preresnet110": 0.33,
    "resnext29": 10.8,
    "wrn28-10": 10.5,
    "resnet18": 3.6,
    "resnet50": 8.2,
    "resnet101": 15.6,
    "vgg-mini": 0.0033,
    "vgg-mini-narrow": 0.00085,
    "vgg-mini-wide": 0.0132,
    "vgg-mini-nobn": 0.0033,
    "preresnet-mini": 0.0051,
    "wrn-mini": 0.0113,
    "awd-lstm": 0.048,
    "awd-lstm-mini": 0.00055,
}
_EXAMPLES = {"fashion-mini": 5_000, "cifar10": 50_000, "cifar100": 50_000, "mnist": 60_000}
_EXAMPLES |= {"ptb": 929_589, "ptb-mini": 80_000, "toy-language": 60_000}
_IMAGENET_EXAMPLES = 1_281_167
_CORE, _GPU = 30.0, 10_000.0  # billions of operations per second that networks achieve


def hours(experiment: Experiment) -> float:
    """Estimate the cost: hours of one core at mini scale, of one GPU at full scale.

    Args:
        experiment: With its number of seeds.

    Returns:
        The estimate, or NaN if the network, data or task is the user's own.
    """
    total = 0.0
    for r in experiment.recipes.values():
        if r.model not in GFLOP or is_path(r.data.name) or r.task is not None:
            return math.nan
        examples = r.data.examples or _EXAMPLES.get(r.data.name, _IMAGENET_EXAMPLES)
        # A backward pass costs two forward passes; refresh and evaluation are forward passes.
        passes = r.epochs * (3 + 1.5 * (2 if r.average else 1) / r.evaluate_every)
        held_out = r.data.validation * (examples if r.data.validation < 1 else 1)
        total += (examples - held_out) * passes * GFLOP[r.model] * experiment.seeds
    small = all(
        "mini" in r.model or r.data.name == "fashion-mini" for r in experiment.recipes.values()
    )
    return total / (_CORE if small else _GPU) / 3600


# -------------------------------------------------------------------------------------- comparison

COMPARE = "compare"


# The learning rate and weight decay of each method that were best on the validation split, from a
# grid around the paper's settings at this scale (results/compare-tuning.json).
_COMPARED = {
    "SGD": Optimizer("sgd", 0.3, 0.003),
    "SWA": Optimizer("sgd", 0.1, 0.01),
    "AdamW": Optimizer("adamw", 0.01, 3.0),
    "Gadam": Optimizer("adamw", 0.003, 3.0),
    "PadamW": Optimizer("padamw", 1.0, 0.03),
    "GadamX": Optimizer("padamw", 1.0, 0.01),
}


def _compare() -> Experiment:
    """Compare six optimizers, each at its own best setting, on noisy and true labels."""

    def run(method: str, noise: float) -> Recipe:
        averaged = method in BASES
        return Recipe(
            name="",
            model="vgg-mini",
            data=replace(MINI_DATA, examples=4000, label_noise=noise),
            optimizer=_COMPARED[method],
            schedule=LINEAR_IA if averaged else LINEAR,
            average=Average(MINI_EPOCHS // 2) if averaged else None,
            epochs=MINI_EPOCHS,
            evaluate_every=MINI_EPOCHS // 10,
            refresh_batches=5,  # of 20: the comparison takes minutes
        )

    rows = {method: run(method, 0.3) for method in _COMPARED}
    rows |= {f"true labels: {method}": run(method, 0.0) for method in _COMPARED}
    return side_by_side(
        "What iterate averaging does",
        rows,
        note="30% of the training labels are redrawn at random, except in rows with true labels.",
    )


# ------------------------------------------------------------------------- a synthetic language

LM_MINI = "lm-mini"


def _lm_mini() -> Experiment:
    """Train the small language models on a synthetic language with a known best perplexity."""
    experiment = PAPER["tab-ptb"]()
    rows = {
        row: replace(in_proportion(mini(r), 20), data=replace(r.data, name="toy-language"))
        for row, r in experiment.recipes.items()
    }
    title = "Language models of a synthetic language with a known best perplexity"
    return replace(experiment, title=title, recipes=rows, published={})


# ----------------------------------------------------------------------------------------- by name


def names() -> list[str]:
    """Return the names that :func:`get` accepts."""
    return [COMPARE, LM_MINI, *PAPER]


def get(name: str, scale: Scale = "mini") -> Experiment:
    """Return an experiment by name.

    Args:
        name: "compare", "lm-mini", or the name of a table or figure of the paper.
        scale: "mini" (minutes on one core) or "paper" (full scale).

    Raises:
        RecipeError: There is no such experiment or scale.
    """
    if name not in names():
        if name in recipes(scale):
            raise RecipeError(f"{name} is a recipe, not an experiment. Use `gadam train {name}`.")
        near = did_you_mean(name, names())
        hint = f"Did you mean {near!r}?" if near else "Run `gadam list` for the names."
        raise RecipeError(f"There is no experiment {name!r}. {hint}")
    if scale not in ("mini", "paper"):
        raise RecipeError(f"scale must be mini or paper, got {scale!r}.")
    if name in _OWN:
        experiment, small = _OWN[name](), False
    else:
        experiment, small = PAPER[name](), scale == "mini"
    if small and name in _OVER_WIDTHS:
        rows = _over_widths(experiment)
        experiment = replace(experiment, recipes=rows, bases=bases_in(rows))
    elif small:
        slow = any(r.model == "vgg16" for r in experiment.recipes.values())
        epochs = MINI_EPOCHS_WITHOUT_BATCHNORM if slow else MINI_EPOCHS
        rows = {row: mini(r, epochs) for row, r in experiment.recipes.items()}
        experiment = replace(experiment, recipes=rows)
    recipes_ = {
        row: replace(r, name=f"{name}-{slug(row)}") for row, r in experiment.recipes.items()
    }
    seeds, note = experiment.seeds, experiment.note
    if small:  # more seeds where the paper has more: an ensemble needs members
        seeds = 3 if experiment.seeds <= 3 else 5
    if small and any(r.language is not None for r in experiment.recipes.values()):
        note = f"{note} {_MINI_LANGUAGE_NOTE}".strip()
    return replace(experiment, name=name, recipes=recipes_, seeds=seeds, note=note)


_OVER_WIDTHS = ("fig3d", "fig-iaprevious")
_OWN = {COMPARE: _compare, LM_MINI: _lm_mini}
_MINI_LANGUAGE_NOTE = (
    "The mini language models have a vocabulary of 2,000 words: a fifth of the text is <unk>, "
    "which makes it easier to predict than the paper's."
)


def slug(label: str) -> str:
    """Return a label as a file name.

    Args:
        label: Any text.
    """
    words = "".join(c.lower() if c.isalnum() or c == "." else " " for c in label).split()
    return "-".join(words)


def recipes(scale: Scale = "mini") -> dict[str, Recipe]:
    """Return every recipe by name.

    Args:
        scale: "mini" or "paper".
    """
    found = {r.name: r for name in names() for r in get(name, scale).recipes.values()}
    gadam = get(LM_MINI).recipes["Gadam"]
    return {LM_MINI: replace(gadam, name=LM_MINI), **found}
