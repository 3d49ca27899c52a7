"""`gadam train`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated

import tyro

from gadam._names import did_you_mean, is_path
from gadam.commands import console, ranks, recipes, sweeps
from gadam.commands.options import Count, Flag, SweepOptions, option, parse
from gadam.runs import summary
from gadam.runs.experiment import Experiment
from gadam.runs.files import to_json
from gadam.runs.recipe import Recipe, RecipeError
from gadam.runs.record import RunResult
from gadam.train import experiments
from gadam.train.distributed import Ranks, Strategy
from gadam.train.sweep import TrainingJob

__all__ = ["run"]


@dataclass(frozen=True, kw_only=True)
class _Options(SweepOptions):
    """Train one recipe."""

    recipe: Annotated[tyro.conf.Positional[str], option("RECIPE")]
    """The recipe, such as compare-gadam. `gadam list --recipes` prints all names."""
    seed: Count = 0
    """The first seed. With --seeds N, also the N - 1 seeds after it."""
    scale: sweeps.Scale = "mini"
    """mini or paper."""
    strategy: Annotated[Strategy | None, option("{ddp,fsdp2}")] = None
    """With torchrun: copies of the model (ddp, the default), or shards of it (fsdp2)."""
    async_checkpoints: Flag = False
    """With torchrun: write checkpoints while training continues."""


def run(arguments: list[str]) -> int:
    """Run the command.

    Args:
        arguments: The command line after `gadam train`.

    Returns:
        The exit code.
    """
    with ranks.one_voice():
        options = parse(_Options, "train", arguments)
    return ranks.with_ranks(lambda group: _train(options, group), options, options.strategy)


def _train(options: _Options, group: Ranks) -> int:
    with group.together():
        name, recipe, jobs = _planned(options)
    if group.is_distributed:
        done = ranks.run_all(jobs, options, group, async_checkpoints=options.async_checkpoints)
    else:
        done = sweeps.run_all(jobs, options)
    if group.is_first:
        _conclude(options, name, recipe, jobs, done)
    return 1 if any(done.get(job) is None for job in jobs) else 0


def _planned(options: _Options) -> tuple[str, Recipe, list[TrainingJob]]:
    """Return the recipe's name, the recipe with the settings, and the runs."""
    name, scale, first = options.recipe, options.scale, options.seed
    known = experiments.recipes(scale)
    if name not in known:
        raise RecipeError(_no_such_recipe(name, list(known)))
    if not 0 <= first < 2**31:
        raise RecipeError(f"--seed must be at least 0 and less than 2³¹, got {first}.")
    recipe = recipes.changed({name: known[name]}, options)[name]
    folder = options.folder("train" if scale == "mini" else f"train-{scale}")
    seeds = range(first, first + (options.seeds or 1))
    jobs = [sweeps.job(name, recipe, seed, folder / f"{name}-{seed}", options) for seed in seeds]
    return name, recipe, jobs


def _conclude(
    options: _Options,
    name: str,
    recipe: Recipe,
    jobs: list[TrainingJob],
    done: Mapping[TrainingJob, RunResult | None],
) -> None:
    """Print the table of the runs."""
    sweeps.export(jobs, options)
    note = sweeps.floor_note(sweeps.known_floors([recipe]))
    experiment = Experiment(name, recipe.method, {name: recipe}, note=note, seeds=len(jobs))
    table = summary.summarize(experiment, {(name, job.seed): done.get(job) for job in jobs})
    if options.json:
        content = sweeps.summary_document(experiment, table, options.scale)
        print(to_json({"event": "summary", **content}), flush=True)
    else:
        console.print_table(experiment, table)
        print(f"The runs are in {jobs[0].folder.parent}.")


def _no_such_recipe(name: str, known: list[str]) -> str:
    """Return a sentence about a name that is not a recipe, and what to do instead."""
    if name in experiments.names():
        rows = [recipe.name for recipe in experiments.get(name).recipes.values()]
        command = "compare" if name == experiments.COMPARE else f"reproduce {name}"
        return (
            f"{name} is an experiment with {len(rows)} recipes. Use `gadam {command}`, or name a "
            f"recipe: {', '.join(rows[:3])}, …"
        )
    if name.endswith(".py"):
        return f"{name} is a file. Use `gadam compare {name}` for a task of your own."
    if is_path(name):
        return (
            f"{name} is a path. Name a recipe, and pass your own data with --set data.name={name}. "
            "To see finished runs, use `gadam report`."
        )
    ending = [each for each in known if each.endswith(f"-{name.lower()}")]
    near = ending[0] if ending else did_you_mean(name, known)
    hint = f"Did you mean {near!r}?" if near else "Run `gadam list --recipes` for the names."
    return f"There is no recipe {name!r}. {hint}"
