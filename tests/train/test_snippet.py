"""The code of a recipe trains as the recipe does."""

from __future__ import annotations

import ast
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch

from gadam.runs.recipe import Average, Data, Optimizer, Recipe, RecipeError, Schedule
from gadam.train import tasks
from gadam.train.loop import train
from gadam.train.snippet import code

BASE = Recipe(
    "r",
    "logistic",
    data=Data("fashion-mini", validation=100, examples=420, size=7, augment=False),
    optimizer=Optimizer("sgd", 0.05, 1e-3),
    schedule=Schedule("cosine"),
    epochs=5,
    evaluate_every=5,
)
AVERAGED = replace(BASE, schedule=Schedule("linear-ia"), average=Average(2))
RECIPES = {
    "SGD": BASE,
    "SWA": AVERAGED,
    "AdamW": replace(BASE, optimizer=Optimizer("adamw", 1e-2, 0.3, betas=(0.8, 0.99))),
    "Gadam": replace(
        AVERAGED, optimizer=Optimizer("adamw", 1e-2, 0.3), average=Average(2, every=2)
    ),
    "PadamW": replace(BASE, optimizer=Optimizer("padamw", 0.1, 0.01), schedule=Schedule("linear")),
    "GadamX": replace(AVERAGED, optimizer=Optimizer("padamw", 0.1, 0.01, partial=0.2)),
}


def execute(text: str, **names: Any) -> dict[str, Any]:
    """Run the code without its last block, which depends on the user."""
    tree = ast.parse(text)
    tree.body = [part for part in tree.body if not isinstance(part, ast.With)]
    exec(compile(tree, "snippet", "exec"), names)
    return names


@pytest.mark.parametrize("method", RECIPES)
def test_the_code_imports_what_it_uses(method):
    tree = ast.parse(code(RECIPES[method], 5))
    imported = [
        each.name for node in tree.body if isinstance(node, ast.Import) for each in node.names
    ]
    used = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    assert imported == sorted(used & {"gadam", "torch"})


@pytest.mark.parametrize("method", RECIPES)
def test_the_code_trains_as_the_recipe_does(method, tmp_path):
    recipe = RECIPES[method]
    assert recipe.method == method
    expected = train(recipe, tmp_path)

    task = tasks.build(recipe, 0, torch.device("cpu"), None)
    model, steps = task.model, task.steps(0)
    names = execute(code(recipe, steps), model=model)
    optimizer, scheduler = names["optimizer"], names["scheduler"]
    for epoch in range(recipe.epochs):
        assert optimizer.param_groups[0]["lr"] == pytest.approx(recipe.learning_rate(epoch))
        model.train()
        for batch in task.batches(epoch):
            optimizer.zero_grad()
            task.loss(model, batch)[0].backward()
            optimizer.step()
        scheduler.step()
    average: Any = names.get("average") or getattr(optimizer, "average", None)
    applied = nullcontext() if recipe.average is None else average.applied(model)
    with applied:
        found = task.evaluate(model, "test")
    assert expected.used is not None
    assert found == pytest.approx(expected.used["test"])
    assert expected.samples == (0 if recipe.average is None else average.count)


def test_the_whole_code_runs():
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
    loader = [torch.randn(8, 3)]
    for method, recipe in RECIPES.items():
        text = code(recipe, 3)
        assert all(len(line) <= 100 for line in text.splitlines())
        if recipe.average is None:
            exec(text, {"model": model})
            continue
        head, tail = text.split("# Train for")
        names: dict[str, Any] = {"model": model, "loader": loader}
        exec(head, names)
        for _ in range(20):
            names["optimizer"].zero_grad()
            model(loader[0]).square().sum().backward()
            names["optimizer"].step()
        exec("# " + tail, names)
        assert method in ("SWA", "Gadam", "GadamX")


@pytest.mark.parametrize(
    "recipe",
    [
        replace(AVERAGED, average=Average(2, weighting="ema")),
        replace(BASE, optimizer=Optimizer("sgd", 0.1, lookahead=True)),
        replace(BASE, optimizer=Optimizer("ranger", 0.1)),
        replace(BASE, optimizer=Optimizer("adamw", 0.1, form="paper")),
    ],
)
def test_other_methods_have_no_code(recipe):
    with pytest.raises(RecipeError, match="There is no code for"):
        code(recipe, 3)


def test_schedules_of_other_recipes():
    step = replace(BASE, schedule=Schedule("step", milestones=(2, 3)))
    frozen = replace(AVERAGED, schedule=Schedule("frozen-linear", final=0.1))
    for recipe in (step, frozen, replace(BASE, schedule=Schedule("cosine", final=0.1))):
        model = torch.nn.Linear(1, 1)
        names = execute(code(recipe, 3), model=model)
        for epoch in range(recipe.epochs):
            rate = names["optimizer"].param_groups[0]["lr"]
            assert rate == pytest.approx(recipe.learning_rate(epoch))
            names["optimizer"].step()
            names["scheduler"].step()
    constant = code(replace(BASE, schedule=Schedule("constant"), epochs=1), 1)
    assert "scheduler" not in constant
    assert "Train for 1 epoch of 1 step:" in constant
    assert isinstance(execute(constant, model=model)["optimizer"], torch.optim.SGD)
