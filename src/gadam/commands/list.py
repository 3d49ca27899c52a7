"""`gadam list`."""

from __future__ import annotations

from dataclasses import dataclass

from gadam.commands import console
from gadam.commands.options import Flag, parse
from gadam.runs.files import to_json
from gadam.train import experiments

__all__ = ["run"]


@dataclass(frozen=True)
class _Options:
    """List the experiments and recipes, and what they cost."""

    recipes: Flag = False
    """Also list the recipes of each experiment."""
    json: Flag = False
    """Print one JSON object per line."""


def run(arguments: list[str]) -> int:
    """Run the command.

    Args:
        arguments: The command line after `gadam list`.

    Returns:
        The exit code.
    """
    options = parse(_Options, "list", arguments)
    found = [
        (name, experiments.get(name), experiments.get(name, "paper"))
        for name in experiments.names()
    ]
    if not options.json:
        console.print_list(found, options.recipes)
        return 0
    for name, small, large in found:
        content = {
            "event": "experiment",
            "name": name,
            "title": small.title,
            "recipes": [r.name for r in small.recipes.values()],
            "seeds": {"mini": small.seeds, "paper": large.seeds},
            "hours": {"mini": experiments.hours(small), "paper": experiments.hours(large)},
            "data": sorted({r.data.name for r in large.recipes.values()}),
            "analysis": list(large.analysis),
        }
        print(to_json(content))
    return 0
