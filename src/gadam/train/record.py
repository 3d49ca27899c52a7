"""A run's folder: what was asked for, a line per epoch, checkpoints that survive anything.

======================================  ==========================================================
`run.json`                              the recipe, the seed, versions and machine
`epochs.jsonl`                          a line of JSON per epoch
`checkpoint-<epochs>-<hash>.pt`         the last two; the hash is of the content
`iterates/iterate-<epochs>-<hash>.pt`   the weights after so many epochs, where the recipe keeps them
`result.json`                           how it ended; only when it has
`failure.json`                          why it did not, until it is tried again
======================================  ==========================================================

Every file but the lines is written beside, synced and renamed: at any moment the folder holds a whole
one. The lines are cut back to the checkpoint that a run continues from.
"""

from __future__ import annotations

import errno
import hashlib
import io
import json
import math
import os
import platform
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch

import gadam
from gadam.train.recipe import Recipe, RecipeError, differences, from_dict, to_dict

__all__ = [
    "Run",
    "RunError",
    "read_lines",
    "read_weights",
    "to_json",
    "write_atomically",
    "write_json",
]

_CHECKPOINT = re.compile(r"(checkpoint|iterate)-\d{6}-[0-9a-f]{16}\.pt")


class RunError(RuntimeError):
    """A run folder that cannot be used: the message says why, and what to do."""


def write_atomically(path: Path, content: bytes) -> None:
    """Write beside, sync, rename: the old file or the new one is there at any moment."""
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with beside.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        beside.replace(path)
        _sync_folder(path.parent)
    except OSError as error:
        beside.unlink(missing_ok=True)
        raise RunError(_explain(error, path)) from error


def write_json(path: Path, content: Any) -> None:
    """The same for plain data."""
    write_atomically(path, (to_json(content, indent=1) + "\n").encode())


def _sync_folder(folder: Path) -> None:
    if os.name == "posix":
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _explain(error: OSError, path: Path) -> str:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return (
            f"the disk is full: {path} could not be written. What was there before is whole: make room "
            "and give the same command again"
        )
    return f"{path} could not be written: {error.strerror or error}"


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The lines of a record that are whole; a torn last one (a killed process) is left out."""
    lines = []
    for number, text in enumerate(_read_text(path).splitlines()):
        try:
            line = json.loads(text)
        except ValueError:
            break
        if not isinstance(line, dict) or line.get("epoch") != number + 1:
            break
        lines.append(line)
    return lines


def _write(folder: Path, kind: str, epochs: int, state: dict[str, Any]) -> Path:
    buffer = io.BytesIO()
    torch.save(state, buffer)
    content = buffer.getvalue()
    digest = hashlib.sha256(content).hexdigest()[:16]
    path = folder / f"{kind}-{epochs:06d}-{digest}.pt"
    write_atomically(path, content)
    return path


def _kept(folder: Path, kind: str) -> list[Path]:
    found = folder.glob(f"{kind}-*.pt")
    return sorted(path for path in found if _CHECKPOINT.fullmatch(path.name))


def _epochs(path: Path) -> int:
    return int(path.stem.split("-")[1])


def read_weights(path: Path) -> dict[str, Any] | None:
    """What a checkpoint or a kept iterate holds; None where its content is not what was written."""
    content = path.read_bytes()
    if hashlib.sha256(content).hexdigest()[:16] != path.stem.split("-")[2]:
        return None
    state: dict[str, Any] = torch.load(io.BytesIO(content), weights_only=True, map_location="cpu")
    return state


def _finite(value: Any) -> Any:
    """With null for what JSON has no number for."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(v) for key, v in value.items()}
    return [_finite(v) for v in value] if isinstance(value, list | tuple) else value


def to_json(content: Any, indent: int | None = None) -> str:
    """As any reader of JSON takes it."""
    return json.dumps(_finite(content), indent=indent, allow_nan=False)


def _read_text(path: Path) -> str:
    return path.read_text(errors="replace") if path.exists() else ""


class Run:
    """A run's folder, opened for one process.

    Args:
        folder: made if it is not there
        recipe: what is asked for; a folder that holds another recipe's run is refused
        seed: likewise
        label: what the run is called beside others; by default as the paper calls its method
    """

    LOCK_SECONDS = 5.0  # the orphans of a sweep that was killed take some time to notice

    def __init__(self, folder: str | Path, recipe: Recipe, seed: int, label: str = "") -> None:
        self.folder, self.recipe, self.seed = Path(folder), recipe, seed
        self.label = label or recipe.method
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise RunError(_explain(error, self.folder)) from error
        self.damaged: list[str] = []  # what was found broken, and passed over

    @contextmanager
    def locked(self) -> Iterator[None]:
        """No other process may write here meanwhile; the operating system lifts it at any death."""
        try:
            lock = (self.folder / ".lock").open("w")
        except OSError as error:
            raise RunError(_explain(error, self.folder / ".lock")) from None
        with lock:
            self._acquire(lock)
            yield

    def _acquire(self, lock: Any) -> None:
        try:
            import fcntl
        except ImportError:  # not on Windows
            return
        deadline = time.monotonic() + self.LOCK_SECONDS
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except OSError:
                if time.monotonic() > deadline:
                    raise RunError(
                        f"another process is at work in {self.folder}: wait for it (or, to train, say another "
                        "--out)"
                    ) from None
            time.sleep(0.1)

    # --------------------------------------------------------------------------------- beginning

    def begin(self, threads: int) -> int:
        """Note what is run, or see that the run which is there is this one.

        Gives the number of threads to run on: where a run goes on, that which it began with, for
        the last bits of a sum depend on it.
        """
        path = self.folder / "run.json"
        # What was never begun may be asked for anew in another way.
        if path.exists() and (self._checkpoints() or self.lines or self.result):
            there = self._parse(path)
            try:
                recipe, seed = from_dict(there["recipe"]), there["seed"]
            except (RecipeError, KeyError, TypeError) as error:
                raise RunError(f"{path} is not a run's: {error}; say another --out") from None
            changed = differences(recipe, self.recipe)
            changed += [f"seed: {seed} → {self.seed}"] if seed != self.seed else []
            if changed:
                raise RunError(
                    f"{self.folder} holds a run of another recipe ({'; '.join(changed)}): say another "
                    "--out, or remove it"
                )
            return int(there["threads"])
        if self._checkpoints() and not path.exists():
            raise RunError(
                f"{path} is missing beside checkpoints: say another --out, or remove them"
            )
        content = {
            "label": self.label,
            "recipe": to_dict(self.recipe),
            "seed": self.seed,
            "threads": threads,
            "versions": {"gadam": gadam.__version__, "torch": torch.__version__},
            "machine": {
                "python": platform.python_version(),
                "system": platform.platform(),
                "processor": platform.machine(),
            },
        }
        write_json(path, content)
        return threads

    def _parse(self, path: Path) -> dict[str, Any]:
        try:
            content = json.loads(path.read_text())
        except (OSError, ValueError) as error:
            raise RunError(
                f"{path} is damaged ({error}): remove it, or say another --out"
            ) from None
        if not isinstance(content, dict):
            raise RunError(f"{path} is damaged: remove it, or say another --out")
        return content

    @property
    def result(self) -> dict[str, Any] | None:
        """How the run ended, or None where it has not."""
        path = self.folder / "result.json"
        return self._parse(path) if path.exists() else None

    # ------------------------------------------------------------------------------------- lines

    @property
    def _lines_path(self) -> Path:
        return self.folder / "epochs.jsonl"

    @property
    def lines(self) -> list[dict[str, Any]]:
        """The record so far."""
        return read_lines(self._lines_path)

    def append(self, line: dict[str, Any]) -> None:
        """One more epoch."""
        try:
            with self._lines_path.open("a") as file:
                file.write(to_json(line) + "\n")
        except OSError as error:
            raise RunError(_explain(error, self._lines_path)) from error

    # ------------------------------------------------------------------------------- checkpoints

    def _checkpoints(self) -> list[Path]:
        """The newest first."""
        return _kept(self.folder, "checkpoint")[::-1]

    def save(self, epochs: int, state: dict[str, Any]) -> None:
        """Keep the state after so many epochs, its lines with it, and the one before it."""
        _write(self.folder, "checkpoint", epochs, {**state, "lines": json.dumps(self.lines)})
        older = [p for p in self._checkpoints() if _epochs(p) < epochs]
        for old in older[1:]:
            old.unlink(missing_ok=True)

    def keep_iterate(self, epochs: int, weights: dict[str, Any], last: int) -> None:
        """Keep the weights after so many epochs, and those of the ``last`` so many alone."""
        folder = self.folder / "iterates"
        try:
            folder.mkdir(exist_ok=True)
        except OSError as error:
            raise RunError(_explain(error, folder)) from error
        written = _write(folder, "iterate", epochs, weights)
        for path in _kept(folder, "iterate"):
            if path != written and not epochs - last < _epochs(path) < epochs:
                path.unlink(missing_ok=True)

    def _forget_iterates(self, after: int) -> None:
        """Those after so many epochs are of a process that was killed, and will be written again."""
        for path in _kept(self.folder / "iterates", "iterate"):
            if _epochs(path) > after:
                path.unlink(missing_ok=True)

    def iterates(self) -> dict[int, Path]:
        """Where the weights that were kept are, by epochs; :func:`read_weights` reads one."""
        return {_epochs(path): path for path in _kept(self.folder / "iterates", "iterate")}

    def load(self) -> tuple[int, dict[str, Any] | None]:
        """The epochs done and the state after them, from the newest checkpoint that is whole.

        Cuts the lines back to it. With no whole checkpoint the run begins anew; what was broken is
        set aside and named in :attr:`damaged`.
        """
        (self.folder / "failure.json").unlink(missing_ok=True)
        for torn in self.folder.glob(".checkpoint-*"):  # of a process that was killed
            torn.unlink(missing_ok=True)
        for path in self._checkpoints():
            state = read_weights(path)
            if state is None:
                self.damaged.append(
                    f"{path} was damaged: it is set aside, and the one before it serves"
                )
                path.replace(path.with_suffix(".damaged"))
                continue
            self._keep_lines(json.loads(state.pop("lines")))
            self._forget_iterates(after=_epochs(path))
            return _epochs(path), state
        self._keep_lines([])
        self._forget_iterates(after=0)
        return 0, None

    def final_state(self) -> tuple[str, dict[str, Any]]:
        """The name and content of the checkpoint that a finished run ended with; nothing is changed."""
        result = self.result
        if result is None:
            raise RunError(f"{self.folder} is not finished: give the command that trains it again")
        for path in self._checkpoints():
            if _epochs(path) == result["epochs"] and (state := read_weights(path)) is not None:
                return path.stem, state
        raise RunError(
            f"{self.folder} has lost its last checkpoint: remove result.json there, and give the command that "
            "trains it again"
        )

    def _keep_lines(self, lines: list[dict[str, Any]]) -> None:
        text = "".join(to_json(line) + "\n" for line in lines)
        if _read_text(self._lines_path) != text:
            write_atomically(self._lines_path, text.encode())

    def fail(self, reason: str) -> None:
        """The run could not go on: leave word of it, if that can be."""
        with suppress(RunError):
            write_json(self.folder / "failure.json", {"reason": reason})

    def finish(self, result: dict[str, Any]) -> None:
        """The run is over."""
        write_json(self.folder / "result.json", result)
