"""`gadam data`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import tyro

from gadam.commands.options import Flag, Folder, option, parse
from gadam.runs.files import to_json
from gadam.runs.recipe import RecipeError
from gadam.train.data import text
from gadam.train.data.download import fetch

__all__ = ["run"]


@dataclass(frozen=True, kw_only=True)
class _Options:
    """Download a data set, check it, and put it where the other commands look for it."""

    name: Annotated[tyro.conf.Positional[str], option("NAME")]
    """cifar10, cifar100, mnist, fashion-mnist or ptb."""
    data_dir: Folder = None
    """Where to put it. Default: $GADAM_DATA, then ~/.cache/gadam/data."""
    json: Flag = False
    """Print one JSON object per line."""


def run(arguments: list[str]) -> int:
    """Run the command.

    Args:
        arguments: The command line after `gadam data`.

    Returns:
        The exit code.
    """
    options = parse(_Options, "data", arguments)
    try:
        root = fetch(options.name, options.data_dir, progress=not options.json)
    except ValueError as error:  # an unknown name
        raise RecipeError(str(error)) from None
    if options.json:
        print(to_json({"event": "data", "name": options.name, "folder": str(root)}))
    elif text.canonical(options.name) != text.TOY_LANGUAGE:
        print(f"{options.name} is in {root}.")
    return 0
