"""The command line."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable

__all__ = ["main"]

_HELP = """gadam: train with iterate averaging, compare, reproduce

Begin here (no data or settings needed):
  gadam compare             six optimisers side by side on data that comes with gadam: five minutes

Train:
  gadam train RECIPE        one run; `--set lr=0.05` changes any of its settings
  gadam reproduce NAME      a table or figure of the paper: `--scale mini` (minutes to an hour on
                            this machine) or `--scale paper` (the true settings)
  gadam list                what NAME and RECIPE can be, and what they cost
  gadam data NAME           download a data set

Look:
  gadam report DIR          runs as one page, figures and tables; --serve shows them while they run

Understand:
  gadam analyse RUN         measure finished runs: diversity of iterates, ensembles, effective learning
                            rates, curvature, landscapes; into their report
  gadam theory NAME         what the theory predicts, beside a simulation of it; `all` draws everything
  gadam theory plan RUN     from when on to average, by a run's own loss curve

Measure:
  gadam bench               how long an optimiser's step takes here, beside others

Every command tells more with --help. A run that was stopped, by Ctrl-C or a power cut, goes on when
the same command is given again. Exit codes: 0 done; 1 a run failed; 2 the command was wrong;
130 stopped by Ctrl-C.
"""


_EXTRAS = {"report": "report", "analyse": "report", "theory": "theory"}


def _command(name: str) -> Callable[[list[str]], int]:
    if name == "bench":
        from gadam import bench

        return bench.main
    try:
        if name == "report":
            from gadam.report import command

            return command.run
        if name == "analyse":
            from gadam.analysis import command as analysis

            return analysis.run
        if name == "theory":
            from gadam.theory.command import main

            return main
        from gadam.train import commands
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("gadam"):
            raise
        raise SystemExit(
            f"gadam: `gadam {name}` needs {error.name}: pip install "
            f"'gadam[{_EXTRAS.get(name, 'train')}]'"
        ) from None
    return lambda arguments: commands.run(name, arguments)


def main(arguments: list[str] | None = None) -> int:
    """Run the command that the first argument names."""
    name, *rest = (sys.argv[1:] if arguments is None else arguments) or ["--help"]
    if name in ("-h", "--help", "help"):
        print(_HELP, end="")
        return 0
    if name == "--version":
        import gadam

        print(gadam.__version__)
        return 0
    names = (
        "compare",
        "train",
        "reproduce",
        "list",
        "data",
        "report",
        "analyse",
        "theory",
        "bench",
    )
    if name not in names:
        from gadam._names import did_you_mean

        near = did_you_mean(name, names)
        hint = f": did you mean {near!r}?" if near else " (see `gadam --help`)"
        print(f"gadam: there is no command {name!r}{hint}", file=sys.stderr)
        return 2
    try:
        return _command(name)(rest)
    except BrokenPipeError:  # who was reading has left
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 (nothing to be said when Python closes it)
        return 1
