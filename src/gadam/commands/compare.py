"""`gadam compare`."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Annotated

import tyro

from gadam.commands.options import MaybeInt, SweepOptions, option, parse
from gadam.commands.sweeps import run_experiment
from gadam.commands.tuned import Request, chosen_methods, run_tuned
from gadam.train import experiments

__all__ = ["run"]


@dataclass(frozen=True)
class _Options(SweepOptions):
    """Compare optimizers with and without iterate averaging.

    SGD, AdamW and PadamW decay their learning rate. SWA, Gadam and GadamX average the iterates of
    the same optimizers at a learning rate that stays high.

    Without arguments, compares them on data that comes with gadam, with settings that were tuned
    for it. Takes about five minutes on two cores.

    With FILE, which defines `task()`, tunes every method on validation data with the same number
    of trials, runs the best settings on several seeds, and ends with a verdict and its code. So
    does --trials or --budget without FILE, on the data and the network of --set.
    """

    task: Annotated[tyro.conf.Positional[str | None], option("[FILE]")] = None
    """Your task: a Python file with a function task() that returns a SupervisedTask."""
    budget: Annotated[str | None, option("TIME")] = None
    """Choose trials, seeds and epochs that fit into a time, such as 2h, 90m or 1h30m."""
    trials: MaybeInt = None
    """Settings to try per method. Default: 12, or what fits into the budget."""
    methods: Annotated[tuple[str, ...], option("NAME")] = ()
    """Compare only these methods, such as AdamW Gadam. Default: all six."""


def run(arguments: list[str]) -> int:
    """Run the command.

    Args:
        arguments: The command line after `gadam compare`.

    Returns:
        The exit code.
    """
    options = parse(_Options, "compare", arguments)
    methods = chosen_methods(options.methods)
    if options.task is not None or options.budget is not None or options.trials is not None:
        request = Request(options.task, options.budget, options.trials, methods)
        return run_tuned(request, options)
    code = run_experiment(experiments.COMPARE, "mini", "", options, methods)
    if any(s.split("=")[0].strip() in ("model", "data.name") for s in options.settings):
        print(
            "note: The settings were tuned for another network or other data. Add --trials 12 or "
            "--budget 1h to tune them for yours.",
            file=sys.stderr,
        )
    return code
