"""Apply settings to recipes, and check everything before anything is trained."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

from torch import nn

from gadam._errors import UserError
from gadam.commands.options import SweepOptions
from gadam.runs.recipe import Recipe, RecipeError, applies_to, override
from gadam.train import models, optimizers, tasks

__all__ = ["apply", "changed"]


def changed(
    recipes: Mapping[str, Recipe], options: SweepOptions, *, everywhere: bool = True
) -> dict[str, Recipe]:
    """Return the recipes with the settings of the command line, after a check of everything.

    Args:
        recipes: The recipes by row.
        options: The settings, and how to run the recipes.
        everywhere: Apply every setting to every recipe. If False, apply each to the recipes that
            have it; at least one must.

    Raises:
        RecipeError: Options, settings, data sets, networks or optimizers are wrong. It lists all
            problems.
    """
    made, problems = apply(recipes, options.settings, everywhere=everywhere)
    problems += _error_of(options.check)
    for recipe in made.values():
        problems += _problems(recipe, options.data_path)
    if problems:
        raise RecipeError(*dict.fromkeys(problems))
    return made


def apply(
    recipes: Mapping[str, Recipe], settings: Sequence[str], *, everywhere: bool = True
) -> tuple[dict[str, Recipe], list[str]]:
    """Apply settings to recipes.

    Args:
        recipes: The recipes by row.
        settings: Each is ``key=value``.
        everywhere: As for :func:`changed`.

    Returns:
        The new recipes, and the problems with the settings. If there are problems, the recipes have
        only the settings without any.
    """
    problems: list[str] = []
    chosen = {row: list(settings) for row in recipes}
    if not everywhere:
        for setting in settings:
            try:
                with_it = {row for row, recipe in recipes.items() if applies_to(setting, recipe)}
            except RecipeError:
                continue  # `override` explains it
            if not with_it:
                problems.append(f"--set {setting} applies to none of the rows.")
            for row in recipes.keys() - with_it:
                chosen[row].remove(setting)
    made: dict[str, Recipe] = {}
    for row, recipe in recipes.items():
        try:
            made[row] = override(recipe, chosen[row])
        except RecipeError as error:
            problems += error.problems
            with suppress(RecipeError):
                made[row] = override(recipe, [s for s in chosen[row] if _is_valid(s, recipe)])
    return made, problems


def _is_valid(setting: str, recipe: Recipe) -> bool:
    try:
        override(recipe, [setting])
    except RecipeError:
        return False
    return True


def _problems(recipe: Recipe, data_dir: str | None) -> list[str]:
    """Return what prevents a recipe from being trained."""
    found = _error_of(lambda: tasks.check(recipe, data_dir))
    if found:  # it stops at the first problem
        if recipe.language is None and recipe.task is None:
            found += _error_of(lambda: models.check_name(recipe.model))
        found += _error_of(lambda: optimizers.build(recipe, nn.Linear(1, 1), 0))
    return found


def _error_of(check: Callable[[], object]) -> list[str]:
    try:
        check()
    except RecipeError as error:
        return list(error.problems)
    except (UserError, ValueError) as error:  # ValueError: an unknown name, an invalid beta
        return [str(error)]
    return []
