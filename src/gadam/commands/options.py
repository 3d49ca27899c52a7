"""Options that several commands share, and how they are parsed."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TypeVar

import torch
import tyro

from gadam.runs.recipe import RecipeError

__all__ = ["Flag", "Folder", "MaybeInt", "SweepOptions", "check_positive", "option", "parse"]

Options = TypeVar("Options")


def option(metavar: str, **kwargs: Any) -> Any:
    """Return the annotation of an option: its placeholder in --help, and no "(default: None)".

    Args:
        metavar: The placeholder, such as DIR.
        **kwargs: Passed to :func:`tyro.conf.arg`.
    """
    return tyro.conf.arg(metavar=metavar, help_behavior_hint=_default, **kwargs)


def _default(value: str) -> str:
    return "" if value in ("None", "()", "''", "") else f"(default: {value})"


Flag = Annotated[bool, tyro.conf.arg(help_behavior_hint="")]
Folder = Annotated[Path | None, option("DIR")]
MaybeInt = Annotated[int | None, option("N")]
Count = Annotated[int, option("N")]
Text = Annotated[str, option("TEXT")]
Settings = Annotated[tyro.conf.UseAppendAction[tuple[str, ...]], option("KEY=VALUE", name="set")]


def parse(kind: type[Options], name: str, arguments: list[str]) -> Options:
    """Parse a command's arguments.

    Args:
        kind: A dataclass; its docstring is the command's description.
        name: The command.
        arguments: The command line after the command's name.
    """
    flags = (tyro.conf.FlagCreatePairsOff, tyro.conf.OmitArgPrefixes)
    return tyro.cli(kind, prog=f"gadam {name}", args=arguments, config=flags)


@dataclass(frozen=True)
class SweepOptions:
    """Options of every command that trains."""

    out: Folder = None
    """Folder of the runs. Default: runs/NAME."""
    seeds: MaybeInt = None
    """Number of seeds."""
    workers: MaybeInt = None
    """Runs at a time. Default: one per core."""
    threads: Count = 1
    """Threads per run. One thread and more workers is faster."""
    device: Annotated[str, option("DEVICE")] = "cpu"
    """Where to compute, such as cuda."""
    data_dir: Folder = None
    """Where data sets are. Default: $GADAM_DATA, then ~/.cache/gadam/data."""
    settings: Settings = ()
    """Change a setting of all recipes, such as lr=0.05. Repeatable."""
    quiet: Flag = False
    """Print only the final table."""
    json: Flag = False
    """Print events and the final table as JSON, one object per line."""
    tensorboard: Flag = False
    """Also write the curves for TensorBoard, beside the runs."""

    @property
    def data_path(self) -> str | None:
        """Where data sets are, if it was given."""
        return None if self.data_dir is None else str(self.data_dir)

    def check(self) -> None:
        """Raise an error for values that cannot work, before anything is trained."""
        check_positive(threads=self.threads, workers=self.workers, seeds=self.seeds)
        check_device(self.device)
        if self.tensorboard:
            from gadam.train.tensorboard import summary_writer

            summary_writer()


def check_positive(**options: int | None) -> None:
    """Raise an error if an option that was given is less than 1.

    Args:
        **options: By name.
    """
    for name, value in options.items():
        if value is not None and value < 1:
            raise RecipeError(f"--{name} must be at least 1, got {value}.")


def check_device(device: str) -> None:
    """Raise an error if torch cannot use a device.

    Args:
        device: As torch names it.
    """
    try:
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        raise RecipeError(f"--device {device}: {str(error).splitlines()[0]}") from None
