"""The command line: a table of commands, each in a module of its own."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module

__all__ = ["COMMANDS", "Command", "main"]


@dataclass(frozen=True)
class Command:
    """A command: ``gadam.commands.<module>.run`` takes its arguments and returns the exit code.

    Args:
        name: Its name on the command line.
        argument: The positional argument that `gadam --help` shows.
        group: The heading it stands under in `gadam --help`.
        summary: What it does.
        extra: The extra of the package that it needs; empty if none.
        module: Its module in this package. Default: its name.
        aliases: Other names it accepts.
    """

    name: str
    argument: str
    group: str
    summary: str
    extra: str = "train"
    module: str = ""
    aliases: tuple[str, ...] = ()


_TABLE = (
    Command(
        "compare",
        "[FILE]",
        "Start here (needs no data or settings)",
        "compare six optimizers on data that comes with gadam, in five minutes; or tune and "
        "compare them on your own problem: `gadam compare my_task.py --budget 2h`",
    ),
    Command(
        "train", "RECIPE", "Train", "train one recipe; `--set lr=0.05` changes any of its settings"
    ),
    Command(
        "reproduce",
        "NAME",
        "Train",
        "reproduce a table or figure of the paper: `--scale mini` (minutes to an hour on this "
        "machine) or `--scale paper` (full scale)",
    ),
    Command("list", "", "Train", "list the names of experiments and recipes, and their costs"),
    Command("data", "NAME", "Train", "download a data set"),
    Command(
        "average",
        "CHECKPOINTS",
        "Average",
        "average checkpoints on disk, of any training: `gadam average 'ckpts/checkpoint-*' "
        "--last 20% --out averaged`",
    ),
    Command(
        "report",
        "DIR",
        "Look",
        "write a page, figures and tables of runs; --serve shows them while they run",
        extra="report",
    ),
    Command(
        "verify",
        "DIR",
        "Look",
        "check that the files of runs are as the runs wrote them",
    ),
    Command(
        "analyze",
        "RUN",
        "Understand",
        "measure finished runs: diversity of iterates, ensembles, effective learning rates, "
        "curvature, landscapes; add the results to their report",
        extra="report",
        aliases=("analyse",),
    ),
    Command(
        "tails",
        "RUN",
        "Average",
        "choose the start of the average after training, on validation data, for a run that was "
        "trained with `--set blocks=100`",
        extra="report",
    ),
    Command(
        "theory",
        "NAME",
        "Understand",
        "plot what the theory predicts beside a simulation; `all` plots everything; `plan RUN` "
        "measures a run and says when to start averaging",
        extra="theory",
    ),
    Command(
        "bench",
        "",
        "Measure",
        "time an optimizer step on this machine, beside other optimizers",
        extra="train",
    ),
)
COMMANDS = {command.name: command for command in _TABLE}
_BY_ALIAS = COMMANDS | {alias: c for c in _TABLE for alias in c.aliases}

_EPILOG = """Every command has --help. Rerun an interrupted command to resume it.
Exit codes: 0 done; 1 a run failed; 2 the command was wrong; 130 interrupted by Ctrl-C.
"""


def _help() -> str:
    import textwrap

    lines = ["gadam: train with iterate averaging, compare, reproduce", ""]
    for group in dict.fromkeys(command.group for command in _TABLE):
        lines.append(f"{group}:")
        for command in _TABLE:
            if command.group == group:
                usage = f"  gadam {command.name} {command.argument}".rstrip()
                first, *rest = textwrap.wrap(command.summary, 70)
                lines.append(f"{usage:<26}  {first}")
                lines += [" " * 28 + line for line in rest]
        lines.append("")
    return "\n".join(lines) + "\n" + _EPILOG


def _load(command: Command) -> Callable[[list[str]], int]:
    module = import_module(f"gadam.commands.{command.module or command.name}")
    run: Callable[[list[str]], int] = module.run
    return run


def main(arguments: list[str] | None = None) -> int:
    """Run the command that the first argument names.

    Args:
        arguments: The command line without the program's name. Default: ``sys.argv``.

    Returns:
        The exit code.
    """
    name, *rest = (sys.argv[1:] if arguments is None else arguments) or ["--help"]
    if name in ("-h", "--help", "help"):
        print(_help(), end="")
        return 0
    if name == "--version":
        import gadam

        print(gadam.__version__)
        return 0
    command = _BY_ALIAS.get(name)
    if command is None:
        print(f"gadam: there is no command {name!r}. {_hint(name)}", file=sys.stderr)
        return 2
    return _run(command, rest)


_SYNONYMS = {"benchmark": "bench", "download": "data", "plot": "report", "run": "train"}


def _hint(name: str) -> str:
    """Return a sentence about what the user may have meant by an unknown command."""
    from gadam._names import did_you_mean

    near = _SYNONYMS.get(name) or did_you_mean(name, COMMANDS)
    if name.startswith("-"):
        return "Put the command first, then its options."
    if name.endswith(".py"):
        return f"Did you mean `gadam compare {name}`?"
    if not near or "-" in name:  # names of experiments and recipes have hyphens
        from gadam.train import experiments

        for command, known in (
            ("reproduce", experiments.names()),
            ("train", experiments.recipes()),
        ):
            if name in known:
                return f"Did you mean `gadam {command} {name}`?"
    return f"Did you mean {near!r}?" if near else "Run `gadam --help` for the commands."


def _run(command: Command, arguments: list[str]) -> int:
    from gadam._errors import UserError

    try:
        return _load(command)(arguments)
    except UserError as error:
        print(f"gadam {command.name}: {error}", file=sys.stderr)
        return 2
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package in ("", "gadam"):
            raise
        raise SystemExit(
            f"gadam {command.name} needs {package}. Run: pip install 'gadam[{command.extra}]'"
        ) from None
    except KeyboardInterrupt:
        message = "\nInterrupted. Rerun the same command to resume."
        print(message, file=sys.stderr, flush=True)
        return 130
    except BrokenPipeError:  # the reader of the output closed it
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 (Python closes it at exit)
        return 1
