"""A run's folder: its header, a line per epoch, and checkpoints that survive any interruption.

======================================  =======================================================
`run.json`                              the recipe, the seed, versions and machine
`epochs.jsonl`                          one line of JSON per epoch
`checkpoint-<epochs>-<hash>.pt`         the last two checkpoints; the hash is of the content
`iterates/iterate-<epochs>-<hash>.pt`   the weights after an epoch, if the recipe keeps them
`result.json`                           how the run ended; absent until it has
`failure.json`                          why it stopped, until it is tried again
======================================  =======================================================

Every file but `epochs.jsonl` is written beside its target, synced and renamed, so the folder never
holds half of one. A resumed run cuts `epochs.jsonl` back to the checkpoint it continues from.
"""

from __future__ import annotations

import hashlib
import io
import json
import platform
import re
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TextIO, TypeAlias

import torch

import gadam
from gadam._errors import UserError
from gadam.runs.files import (
    RunError,
    explain_os_error,
    read_json,
    to_json,
    write_atomically,
    write_json,
)
from gadam.runs.recipe import Recipe, differences
from gadam.runs.record import EpochRecord, RunHeader, RunResult

__all__ = ["RunFolder", "State", "read_epochs", "read_weights", "versions"]

State: TypeAlias = dict[str, Any]  # a state dict, as torch.save takes it

_CHECKPOINT = re.compile(r"(checkpoint|iterate)-\d{6}-[0-9a-f]{16}\.pt")


def versions() -> dict[str, str]:
    """Return the versions that results depend on."""
    return {"gadam": gadam.__version__, "torch": torch.__version__}


def read_epochs(path: Path) -> list[EpochRecord]:
    """Read the intact lines of `epochs.jsonl`, up to the first damaged one.

    Args:
        path: The file. A missing file has no lines. A killed process may leave a torn last line.
    """
    records: list[EpochRecord] = []
    for text in _read_text(path).splitlines():
        try:
            record = EpochRecord.from_dict(json.loads(text))
        except (ValueError, RunError, RecursionError):
            break
        if record.epoch != len(records) + 1:
            break
        records.append(record)
    return records


def read_weights(path: Path) -> State | None:
    """Read a checkpoint or a kept iterate.

    Args:
        path: The file; its name holds the hash of its content.

    Returns:
        Its content, or None if it does not match the hash.
    """
    content = path.read_bytes()
    if hashlib.sha256(content).hexdigest()[:16] != path.stem.split("-")[2]:
        return None
    state: State = torch.load(io.BytesIO(content), weights_only=True, map_location="cpu")
    return state


def _write(folder: Path, kind: str, epochs: int, state: State) -> Path:
    buffer = io.BytesIO()
    torch.save(state, buffer)
    content = buffer.getvalue()
    digest = hashlib.sha256(content).hexdigest()[:16]
    path = folder / f"{kind}-{epochs:06d}-{digest}.pt"
    write_atomically(path, content)
    return path


def _saved(folder: Path, kind: str) -> list[Path]:
    found = folder.glob(f"{kind}-*.pt")
    return sorted(path for path in found if _CHECKPOINT.fullmatch(path.name))


def _epochs(path: Path) -> int:
    return int(path.stem.split("-")[1])


def _read_text(path: Path) -> str:
    return path.read_text(errors="replace") if path.exists() else ""


class RunFolder:
    """A run's folder, opened by one process.

    Args:
        folder: Created if it does not exist.
        recipe: What to train. A folder that holds a run of another recipe is refused.
        seed: The run's seed. A folder that holds a run of another seed is refused.
        label: The run's name beside other runs. Default: the paper's name for the method.

    Attributes:
        damaged: Sentences about damaged files that were skipped.
    """

    LOCK_SECONDS = 5.0  # orphans of a killed sweep need a moment to notice and exit

    def __init__(self, folder: str | Path, recipe: Recipe, seed: int, label: str = "") -> None:
        self.folder, self.recipe, self.seed = Path(folder), recipe, seed
        self.label = label or recipe.method
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise RunError(explain_os_error(error, self.folder)) from error
        self.damaged: list[str] = []

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Keep other processes from writing here. The operating system releases dead locks."""
        try:
            lock = (self.folder / ".lock").open("w")
        except OSError as error:
            raise RunError(explain_os_error(error, self.folder / ".lock")) from None
        with lock:
            self._acquire(lock)
            yield

    def _acquire(self, lock: TextIO) -> None:
        try:
            import fcntl
        except ImportError:  # Windows
            return
        deadline = time.monotonic() + self.LOCK_SECONDS
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except OSError:
                if time.monotonic() > deadline:
                    raise RunError(
                        f"Another process is using {self.folder}. Wait for it to finish, or pass a "
                        "different --out."
                    ) from None
            time.sleep(0.1)

    # ------------------------------------------------------------------------------ beginning

    def begin(self, threads: int) -> int:
        """Write the run's header, or check that the run found here is the same.

        Args:
            threads: CPU threads to use.

        Returns:
            The number of threads to use. A resumed run keeps the number it began with, because
            the last bits of sums depend on it.
        """
        path = self.folder / "run.json"
        # A run that never produced anything may be replaced by another.
        if path.exists() and (self._checkpoints() or self.epochs or self.result):
            content = self._read(path)
            try:
                found = RunHeader.from_dict(content)
            except UserError as error:
                raise RunError(
                    f"{path} is not a run's header: {error} Pass a different --out."
                ) from None
            changed = differences(found.recipe, self.recipe)
            changed += [f"seed: {found.seed} → {self.seed}"] if found.seed != self.seed else []
            if changed:
                raise RunError(
                    f"{self.folder} holds a run of another recipe ({'; '.join(changed)}). Pass a "
                    "different --out, or remove the folder."
                )
            return found.threads
        if self._checkpoints() and not path.exists():
            raise RunError(
                f"{path} is missing, but there are checkpoints. Pass a different --out, or remove "
                "them."
            )
        machine = {
            "python": platform.python_version(),
            "system": platform.platform(),
            "processor": platform.machine(),
        }
        header = RunHeader(self.label, self.recipe, self.seed, threads, versions(), machine)
        write_json(path, header.to_dict())
        return threads

    def _read(self, path: Path) -> dict[str, Any]:
        try:
            return read_json(path)
        except ValueError as error:
            raise RunError(
                f"{path} is damaged ({error}). Remove it, or pass a different --out."
            ) from None

    @property
    def result(self) -> RunResult | None:
        """How the run ended, or None if it has not."""
        path = self.folder / "result.json"
        if not path.exists():
            return None
        content = self._read(path)
        try:
            return RunResult.from_dict(content)
        except RunError as error:
            raise RunError(f"{path} is damaged: {error} Remove it to train again.") from None

    # --------------------------------------------------------------------------------- epochs

    @property
    def _epochs_path(self) -> Path:
        return self.folder / "epochs.jsonl"

    @property
    def epochs(self) -> list[EpochRecord]:
        """The record so far."""
        return read_epochs(self._epochs_path)

    def append(self, record: EpochRecord) -> None:
        """Append a line for an epoch.

        Args:
            record: The epoch's record.
        """
        try:
            with self._epochs_path.open("a") as file:
                file.write(to_json(record.to_dict()) + "\n")
        except OSError as error:
            raise RunError(explain_os_error(error, self._epochs_path)) from error

    def _rewrite_epochs(self, lines: Iterable[dict[str, Any]]) -> None:
        text = "".join(to_json(line) + "\n" for line in lines)
        if _read_text(self._epochs_path) != text:
            write_atomically(self._epochs_path, text.encode())

    # ---------------------------------------------------------------------------- checkpoints

    def _checkpoints(self) -> list[Path]:
        """Return the checkpoints, newest first."""
        return _saved(self.folder, "checkpoint")[::-1]

    def save(self, epochs: int, state: State) -> None:
        """Write a checkpoint with the record so far, and keep the previous one.

        Args:
            epochs: Epochs done.
            state: What to restore.
        """
        lines = json.dumps([json.loads(to_json(record.to_dict())) for record in self.epochs])
        _write(self.folder, "checkpoint", epochs, {**state, "lines": lines})
        older = [p for p in self._checkpoints() if _epochs(p) < epochs]
        for old in older[1:]:
            old.unlink(missing_ok=True)

    def keep_iterate(self, epochs: int, weights: State, last: int) -> None:
        """Keep the weights after an epoch, and drop those older than the last ones.

        Args:
            epochs: Epochs done.
            weights: The model's state dict.
            last: How many iterates to keep.
        """
        folder = self.folder / "iterates"
        try:
            folder.mkdir(exist_ok=True)
        except OSError as error:
            raise RunError(explain_os_error(error, folder)) from error
        written = _write(folder, "iterate", epochs, weights)
        for path in _saved(folder, "iterate"):
            if path != written and not epochs - last < _epochs(path) < epochs:
                path.unlink(missing_ok=True)

    def _forget_iterates(self, after: int) -> None:
        """Remove iterates that a killed process wrote after its last checkpoint."""
        for path in _saved(self.folder / "iterates", "iterate"):
            if _epochs(path) > after:
                path.unlink(missing_ok=True)

    def iterates(self) -> dict[int, Path]:
        """Return the files of the kept iterates by epoch; :func:`read_weights` reads one."""
        return {_epochs(path): path for path in _saved(self.folder / "iterates", "iterate")}

    def load(self) -> tuple[int, State | None]:
        """Load the newest intact checkpoint, and cut the record back to it.

        Returns:
            The epochs done and the state after them, or (0, None) if there is no checkpoint.
            Damaged checkpoints are set aside and named in :attr:`damaged`.
        """
        (self.folder / "failure.json").unlink(missing_ok=True)
        for torn in self.folder.glob(".checkpoint-*"):  # left by a killed process
            torn.unlink(missing_ok=True)
        for path in self._checkpoints():
            state = read_weights(path)
            if state is None:
                self.damaged.append(
                    f"{path} is damaged. It was set aside, and the checkpoint before it is used."
                )
                path.replace(path.with_suffix(".damaged"))
                continue
            self._rewrite_epochs(json.loads(state.pop("lines")))
            self._forget_iterates(after=_epochs(path))
            return _epochs(path), state
        self._rewrite_epochs([])
        self._forget_iterates(after=0)
        return 0, None

    def final_state(self) -> tuple[str, State]:
        """Return the name and content of a finished run's last checkpoint, without side effects."""
        result = self.result
        if result is None:
            raise RunError(f"{self.folder} is not finished. Rerun the command that trains it.")
        for path in self._checkpoints():
            if _epochs(path) == result.epochs and (state := read_weights(path)) is not None:
                return path.stem, state
        raise RunError(
            f"{self.folder} has no intact last checkpoint. Remove its result.json and rerun the "
            "command that trains it."
        )

    def fail(self, reason: str) -> None:
        """Record why the run stopped, if the disk allows it.

        Args:
            reason: The error.
        """
        with suppress(RunError):
            write_json(self.folder / "failure.json", {"reason": reason})

    def finish(self, result: RunResult) -> None:
        """Record how the run ended.

        Args:
            result: The run's result.
        """
        write_json(self.folder / "result.json", result.to_dict())
