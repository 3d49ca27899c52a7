"""What there is to run by name: the comparison, the paper's tables and figures, single recipes.

:mod:`gadam.train.catalogue` has the paper's at their own scale; :func:`get` shrinks one to ``mini`` scale,
where a run takes minutes on one core: a small network of the same kind, noisy labels on small pictures or
a part of the text, the epochs in proportion.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from gadam._names import did_you_mean
from gadam.train.catalogue import (
    BASES,
    LINEAR,
    LINEAR_IA,
    PAPER,
    Experiment,
    bases_in,
    side_by_side,
)
from gadam.train.recipe import Average, Data, Language, Optimizer, Recipe, RecipeError

__all__ = ["COMPARE", "GFLOP", "Experiment", "get", "hours", "mini", "names", "recipes", "slug"]

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
MINI_EPOCHS_WITHOUT_BATCHNORM = 60  # they learn more slowly: before that nothing overfits
# The paper's usual setting, and what stands for it on the small task: near the best of the grid that
# the comparison was tuned on for sgd, adamw and padamw, a guess for the others.
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
    activation=1.0,
    slowness=0.5,
)
MINI_LANGUAGE_EPOCHS = 30
# The paper's rate, and what stands for it on a part of the text.
_MINI_LANGUAGE_RATES = {"asgd": (30.0, 10.0), "adam": (1e-3, 1e-2), "padam": (1.0, 1.0)}


def mini(recipe: Recipe, epochs: int = MINI_EPOCHS) -> Recipe:
    """The recipe at the scale of minutes on one core, all proportions kept. ``epochs`` are of pictures."""
    return _mini_language(recipe) if recipe.language is not None else _mini_pictures(recipe, epochs)


def _in_proportion(recipe: Recipe, epochs: int) -> Recipe:
    """With another number of epochs, and all that is counted in them likewise."""
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
        keep=round(recipe.keep * share),
        schedule=replace(recipe.schedule, milestones=milestones),
    )


def _mini_language(recipe: Recipe) -> Recipe:
    usual, small = _MINI_LANGUAGE_RATES[recipe.optimizer.name]
    recipe = _in_proportion(recipe, MINI_LANGUAGE_EPOCHS)
    return replace(
        recipe,
        model="awd-lstm-mini",
        data=replace(recipe.data, name="ptb-mini"),
        language=MINI_LANGUAGE,
        optimizer=replace(recipe.optimizer, lr=recipe.optimizer.lr * small / usual),
        batch_size=10,
    )


def _mini_pictures(recipe: Recipe, epochs: int) -> Recipe:
    o = recipe.optimizer
    (usual_lr, usual_decay), (lr, decay) = _MINI_SETTINGS[o.name]
    recipe = _in_proportion(recipe, epochs)
    average = recipe.average
    return replace(
        recipe,
        model=_MINI_MODELS[recipe.model],
        data=replace(MINI_DATA, label_noise=0.0 if recipe.model == "logistic" else 0.3),
        # Large eps goes with a large rate: there the paper's own rate is kept.
        optimizer=replace(
            o, lr=o.lr * lr / usual_lr, weight_decay=o.weight_decay * decay / usual_decay
        )
        if o.eps <= 1e-4
        else o,
        batch_size=128,
        evaluate_every=1 if average and isinstance(average.start, str) else epochs // 10,
    )


def _over_widths(experiment: Experiment) -> dict[str, Recipe]:
    """The networks that stand for the paper's have about as many parameters: one of three widths instead."""
    models = {"narrow": "vgg-mini-narrow", "middle": "vgg-mini", "wide": "vgg-mini-wide"}
    return {
        f"{width} {row.removeprefix('VGG-16 ')}": replace(mini(r), model=model)
        for width, model in models.items()
        for row, r in experiment.recipes.items()
        if row.startswith("VGG-16 ")
    }


# ------------------------------------------------------------------------------------------- costs

# Billions of operations that one picture takes on its way forward (the minis' at 14x14), or one word.
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
_CORE, _GPU = 30.0, 10_000.0  # billions of operations a second, as networks get them


def hours(experiment: Experiment) -> float:
    """A rough estimate of what it takes: hours of one core at mini scale, of one GPU at the paper's."""
    total = 0.0
    for r in experiment.recipes.values():
        examples = r.data.examples or _EXAMPLES.get(r.data.name, _IMAGENET_EXAMPLES)
        # Backward costs twice as much as forward; a refresh and an evaluation are forwards.
        passes = r.epochs * (3 + 1.5 * (2 if r.average else 1) / r.evaluate_every)
        total += (examples - r.data.validation) * passes * GFLOP[r.model] * experiment.seeds
    small = all(
        "mini" in r.model or r.data.name == "fashion-mini" for r in experiment.recipes.values()
    )
    return total / (_CORE if small else _GPU) / 3600


# -------------------------------------------------------------------------------------- comparison

COMPARE = "compare"


# For each method the rate and decay that were best on the validation split, of a grid around what the
# paper's settings become at this scale (results/compare-tuning.json).
_COMPARED = {
    "SGD": Optimizer("sgd", 0.3, 0.003),
    "SWA": Optimizer("sgd", 0.1, 0.01),
    "AdamW": Optimizer("adamw", 0.01, 3.0),
    "Gadam": Optimizer("adamw", 0.003, 3.0),
    "PadamW": Optimizer("padamw", 1.0, 0.03),
    "GadamX": Optimizer("padamw", 1.0, 0.01),
}


def _compare() -> Experiment:
    """Six optimisers, each at its own best setting, on noisy and on true labels."""

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
            evaluate_every=MINI_EPOCHS // 2,
        )

    rows = {method: run(method, 0.3) for method in _COMPARED}
    rows |= {f"true labels: {method}": run(method, 0.0) for method in _COMPARED}
    return side_by_side(
        "What iterate averaging does",
        rows,
        note="30 % of the training labels are redrawn at random, except in the rows of true labels.",
    )


# -------------------------------------------------------------------------------- a made-up language

LM_MINI = "lm-mini"


def _lm_mini() -> Experiment:
    """The small language models on a language that needs no data, and whose best perplexity is known."""
    experiment = PAPER["tab-ptb"]()
    rows = {
        row: replace(_in_proportion(mini(r), 20), data=replace(r.data, name="toy-language"))
        for row, r in experiment.recipes.items()
    }
    title = "Language models of a made-up language whose best perplexity is known"
    return replace(experiment, title=title, recipes=rows, published={})


# ----------------------------------------------------------------------------------------- by name


def names() -> list[str]:
    """What :func:`get` knows."""
    return [COMPARE, LM_MINI, *PAPER]


def get(name: str, scale: Scale = "mini") -> Experiment:
    """An experiment by its name.

    Args:
        name: "compare", or as the paper's list of tables and figures has it
        scale: "mini" (minutes on one core) or "paper" (the true settings)
    """
    if name not in names():
        near = did_you_mean(name, names())
        hint = f": did you mean {near!r}?" if near else ""
        raise RecipeError(f"there is nothing called {name!r} to reproduce{hint} (see `gadam list`)")
    if scale not in ("mini", "paper"):
        raise RecipeError(f"the scale is mini or paper, not {scale!r}")
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
    if small:  # more where the paper has more: an ensemble wants members
        seeds = 3 if experiment.seeds <= 3 else 5
    if small and any(r.language is not None for r in experiment.recipes.values()):
        note = f"{note} {_MINI_LANGUAGE_NOTE}".strip()
    return replace(experiment, name=name, recipes=recipes_, seeds=seeds, note=note)


_OVER_WIDTHS = ("fig3d", "fig-iaprevious")
_OWN = {COMPARE: _compare, LM_MINI: _lm_mini}
_MINI_LANGUAGE_NOTE = (
    "The small language models know 2,000 words: a fifth of the text is <unk>, and easier to predict than the "
    "paper's."
)


def slug(label: str) -> str:
    """A label as a file name."""
    words = "".join(c.lower() if c.isalnum() or c == "." else " " for c in label).split()
    return "-".join(words)


def recipes(scale: Scale = "mini") -> dict[str, Recipe]:
    """Every recipe there is, by its name."""
    found = {r.name: r for name in names() for r in get(name, scale).recipes.values()}
    gadam = get(LM_MINI).recipes["Gadam"]
    return {LM_MINI: replace(gadam, name=LM_MINI), **found}
