"""Options that several commands share, and how they are parsed."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import tyro

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

    Raises:
        RecipeError: A setting of a recipe is not written as ``--set KEY=VALUE``.
    """
    _explain_near_misses(kind, name, arguments)
    flags = (tyro.conf.FlagCreatePairsOff, tyro.conf.OmitArgPrefixes)
    return tyro.cli(kind, prog=f"gadam {name}", args=arguments, config=flags)


def _explain_near_misses(kind: Any, name: str, arguments: list[str]) -> None:
    """Raise an error with a hint for settings that are not written as ``--set KEY=VALUE``."""
    known = {f.name for f in fields(kind)}
    if "settings" not in known:
        return
    from gadam.runs.recipe import RecipeError, suggest_setting

    before = ""
    for word, after in zip(arguments, [*arguments[1:], ""]):
        key, equals, value = word.removeprefix("--").partition("=")
        key = key.replace("-", "_")
        value = value if equals or after.startswith("--") else after
        if before == "--set" and not equals:
            hint = f" Use --set {key}={value}." if value else ""
            raise RecipeError(f"--set takes KEY=VALUE, got {word!r}.{hint}")
        if word.startswith("--") and key not in known | {"set"}:
            suggestion = suggest_setting(key, value or "VALUE")
            if suggestion is not None:
                raise RecipeError(
                    f"`gadam {name}` has no option {word.partition('=')[0]}. Use --set "
                    f"{suggestion}."
                )
        if equals and not before.startswith("-") and not word.startswith("-"):
            raise RecipeError(f"Settings need --set before each. Use --set {word}.")
        before = word


@dataclass(frozen=True)
class SweepOptions:
    """Options of every command that trains."""

    out: Annotated[str | None, option("DIR")] = None
    """Folder of the runs, or a URL such as s3://bucket/runs. Default: runs/NAME."""
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
    accept_changed_code: Flag = False
    """Resume runs of your own task or network although its code has changed."""
    quiet: Flag = False
    """Print only the final table."""
    json: Flag = False
    """Print events and the final table as JSON, one object per line."""
    tensorboard: Flag = False
    """Also write the curves for TensorBoard, beside the runs."""
    launcher: Literal["local", "ray"] = "local"
    """Where to run: on this machine, or on a Ray cluster, which needs gadam[ray]."""
    address: Annotated[str | None, option("ADDRESS")] = None
    """The Ray cluster, such as auto. Default: $RAY_ADDRESS, then Ray on this machine alone."""
    cpus: Annotated[float | None, option("N")] = None
    """CPUs per run on the Ray cluster. Default: --threads."""
    gpus: Annotated[float | None, option("N")] = None
    """GPUs per run on the Ray cluster. Default: 1 if --device is cuda."""

    def folder(self, name: str) -> Path:
        """Return the folder of the runs on this machine.

        Args:
            name: The name of the default folder.
        """
        return Path("runs") / name if self.out is None or self.storage else Path(self.out)

    @property
    def storage(self) -> str | None:
        """The URL that the runs go to, if --out is one."""
        is_url = self.out is not None and "://" in self.out
        return self.out if is_url else None

    @property
    def device_here(self) -> str:
        """The device for checks on this machine, which may have no GPU if the cluster has some."""
        return self.device if self.launcher == "local" else "cpu"

    @property
    def data_path(self) -> str | None:
        """Where data sets are, if it was given."""
        return None if self.data_dir is None else str(self.data_dir)

    def check(self) -> None:
        """Raise an error for values that cannot work, before anything is trained."""
        check_positive(threads=self.threads, workers=self.workers, seeds=self.seeds)
        self._check_launcher()
        check_device(self.device_here)
        if self.tensorboard:
            from gadam.train.tensorboard import summary_writer

            summary_writer()

    def _check_launcher(self) -> None:
        from gadam.runs.recipe import RecipeError

        given = {name: getattr(self, name) for name in ("address", "cpus", "gpus")}
        given = {name: value for name, value in given.items() if value is not None}
        if self.launcher == "local":
            if given:
                raise RecipeError(f"--{next(iter(given))} needs --launcher ray.")
            return
        if self.cpus is not None and not self.cpus > 0:
            raise RecipeError(f"--cpus must be positive, got {self.cpus:g}.")
        if self.gpus is not None and not self.gpus >= 0:
            raise RecipeError(f"--gpus must be non-negative, got {self.gpus:g}.")
        from gadam.train.launchers.ray import import_ray

        import_ray()


def check_positive(**options: int | None) -> None:
    """Raise an error if an option that was given is less than 1.

    Args:
        **options: By name.
    """
    problems = [
        f"--{name} must be at least 1, got {value}."
        for name, value in options.items()
        if value is not None and value < 1
    ]
    if problems:
        from gadam.runs.recipe import RecipeError

        raise RecipeError(*problems)


def check_device(device: str) -> None:
    """Raise an error if torch cannot use a device.

    Args:
        device: As torch names it.

    Raises:
        RecipeError: There is no such device on this machine.
    """
    import torch

    from gadam.runs.recipe import RecipeError

    try:
        place = torch.device(device)
    except RuntimeError:
        raise RecipeError(
            f"--device {device} is not a device. Use cpu, cuda, cuda:1 or mps."
        ) from None
    if place.type == "mps" and not torch.backends.mps.is_available():
        raise RecipeError(f"--device {device} needs a Mac with Apple silicon. Use --device cpu.")
    if place.type == "cuda":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if not count:
            raise RecipeError(
                f"--device {device} is not available: torch finds no GPU. Use --device cpu."
            )
        if (place.index or 0) >= count:
            last = f"cuda:{count - 1}"
            raise RecipeError(f"--device {device} does not exist. The last GPU is {last}.")
    try:
        is_usable = bool((torch.zeros(1, device=place) == 0).item())
    except (RuntimeError, AssertionError, NotImplementedError):  # also of "meta"
        is_usable = False
    if not is_usable:
        raise RecipeError(f"--device {device} is not available here. Use --device cpu.")
