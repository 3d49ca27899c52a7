"""`gadam compare`."""

from __future__ import annotations

from dataclasses import dataclass

from gadam.commands.options import SweepOptions, parse
from gadam.commands.sweeps import run_experiment
from gadam.train import experiments

__all__ = ["run"]


@dataclass(frozen=True)
class _Options(SweepOptions):
    """Compare six optimizers on data that comes with gadam, with and without averaging.

    SGD, AdamW and PadamW decay their learning rate. SWA, Gadam and GadamX average the iterates of
    the same optimizers at a learning rate that stays high. Takes about five minutes on two cores.
    """


def run(arguments: list[str]) -> int:
    """Run the command.

    Args:
        arguments: The command line after `gadam compare`.

    Returns:
        The exit code.
    """
    return run_experiment(experiments.COMPARE, "mini", "", parse(_Options, "compare", arguments))
