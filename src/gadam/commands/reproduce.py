"""`gadam reproduce`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import tyro

from gadam.commands.options import SweepOptions, Text, option, parse
from gadam.commands.sweeps import Scale, run_experiment

__all__ = ["run"]


@dataclass(frozen=True, kw_only=True)
class _Options(SweepOptions):
    """Reproduce a table or a figure of the paper."""

    name: Annotated[tyro.conf.Positional[str], option("NAME")]
    """The experiment, such as tab-cifar. `gadam list` prints all names."""
    scale: Scale = "mini"
    """mini takes minutes per run on one core; paper is full scale."""
    rows: Text = ""
    """Train only rows with these words in their label, such as LSTM."""


def run(arguments: list[str]) -> int:
    """Run the command.

    Args:
        arguments: The command line after `gadam reproduce`.

    Returns:
        The exit code.
    """
    options = parse(_Options, "reproduce", arguments)
    return run_experiment(options.name, options.scale, options.rows, options)
