"""A run's folder: its header, a line per epoch, and checkpoints that survive any interruption.

======================================  =======================================================
`run.json`                              the recipe, the seed, versions and machine
`epochs.jsonl`                          one line of JSON per epoch, chained by hashes
`checkpoint-<epochs>-<hash>.pt`         the last two checkpoints; the hash is of the content
`checkpoint-<epochs>-<hash>.dcp/`       the same, of several processes (`sharded.py`)
`iterates/iterate-<epochs>-<hash>.pt`   the weights after an epoch, if the recipe keeps them
`result.json`                           how the run ended
`manifest.json`                         the hashes of all of these; absent until the run has ended
`failure.json`                          why it stopped, until it is tried again
======================================  =======================================================

Every file but `epochs.jsonl` is written beside its target, synced and renamed, so the folder never
holds half of one. A checkpoint contains the header and the record up to its epoch. The process that
trains a run keeps both in memory, and never reads them back: files that change under it are
restored. A resumed run restores them from the checkpoint it continues from.
"""

from __future__ import annotations

import errno
import io
import json
import os
import platform
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

import torch

import gadam
from gadam._errors import UserError
from gadam.runs import lock
from gadam.runs.code import changed_files, code_files
from gadam.runs.files import (
    RunError,
    explain_os_error,
    parse_json,
    read_json,
    read_regular_file,
    sha256,
    to_json,
    write_atomically,
    write_json,
)
from gadam.runs.lines import chained, read_epochs, with_hash, without_hash
from gadam.runs.manifest import NAME as MANIFEST
from gadam.runs.manifest import FileHash, RunCheck, check_run, write_manifest
from gadam.runs.recipe import Recipe, differences
from gadam.runs.record import FORMAT, EpochRecord, RunHeader, RunResult

__all__ = ["RunFolder", "State", "read_weights", "versions"]

State: TypeAlias = dict[str, Any]  # a state dict, as torch.save takes it

_SHARDED = ".dcp"
_RECORD = ("run.json", "epochs.jsonl", "result.json", MANIFEST)
_CHECKPOINT = re.compile(
    r"(checkpoint|iterate)-\d{6}-[0-9a-f]{16}\.pt|checkpoint-\d{6}(\+\d+)?-[0-9a-f]{16}\.dcp"
)


def versions() -> dict[str, str]:
    """Return the versions that results depend on."""
    return {"gadam": gadam.__version__, "torch": torch.__version__}


def read_weights(path: Path) -> State | None:
    """Read a checkpoint or a kept iterate.

    Args:
        path: The file, or the folder of several processes. Its name holds the hash of its content.

    Returns:
        Its content, or None if it does not match the hash or cannot be read.
    """
    if path.suffix == _SHARDED:
        from gadam.runs import sharded

        try:
            return None if sharded.verify(path) else sharded.read(path)
        except RunError:
            return None
    try:
        content = read_regular_file(path)
        if sha256(content)[:16] != path.stem.split("-")[2]:
            return None
        state = torch.load(io.BytesIO(content), weights_only=True, map_location="cpu")
    except Exception:  # unpicklers raise almost anything on a file that is not theirs
        return None
    return state if isinstance(state, dict) else None


def _saved(folder: Path, kind: str) -> list[Path]:
    found = folder.glob(f"{kind}-*")
    return sorted(
        (path for path in found if _CHECKPOINT.fullmatch(path.name)),
        key=lambda path: (_progress(path), path.name),
    )


def _progress(path: Path) -> tuple[int, int]:
    """Return the epochs done, and the steps of the next one."""
    epochs, _, steps = path.stem.split("-")[1].partition("+")
    return int(epochs), int(steps or 0)


def _epochs(path: Path) -> int:
    return _progress(path)[0]


@dataclass(frozen=True)
class _Checkpoint:
    path: Path
    header: bytes  # the content of run.json; empty in checkpoints of older versions
    history: list[EpochRecord]
    state: State  # without the tensors if several processes wrote it

    @classmethod
    def read(cls, path: Path) -> _Checkpoint | None:
        """Return the checkpoint, or None if it is damaged or has no complete record."""
        if path.suffix == _SHARDED:
            from gadam.runs import sharded

            try:
                state = None if sharded.verify(path) else sharded.read_rest(path)
            except RunError:
                state = None
        else:
            state = read_weights(path)
        if state is None:
            return None
        try:
            header = str(state.pop("header", "")).encode()
            history = [EpochRecord.from_dict(line) for line in parse_json(state.pop("lines"))]
        except (KeyError, ValueError, TypeError, AttributeError, RunError):
            return None
        complete = [record.epoch for record in history] == [*range(1, _epochs(path) + 1)]
        return cls(path, header, history, state) if complete else None


def _header_content(header: RunHeader) -> bytes:
    return (to_json(header.to_dict(), indent=1) + "\n").encode()


def _without_code(recipe: Recipe) -> Recipe:
    """Return the recipe without the place and the hash of the user's code, which has its own check.

    A copied project is the same project.
    """
    if recipe.task is None:
        return recipe
    return replace(recipe, task=replace(recipe.task, path="", code=""))


class RunFolder:
    """A run's folder, opened by one process.

    Args:
        folder: Created if it does not exist.
        recipe: What to train. A folder that holds a run of another recipe is refused.
        seed: The run's seed. A folder that holds a run of another seed is refused.
        label: The run's name beside other runs. Default: the paper's name for the method.
        accept_changed_code: Continue a run although the user's own code has changed since.

    Attributes:
        damaged: Sentences about damaged files, and what was done about them.
        history: The record so far, after :meth:`begin`.
    """

    def __init__(
        self,
        folder: str | Path,
        recipe: Recipe,
        seed: int,
        label: str = "",
        *,
        accept_changed_code: bool = False,
    ) -> None:
        self.folder, self.recipe, self.seed = Path(folder), recipe, seed
        self.label = label or recipe.method
        self.accept_changed_code = accept_changed_code
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise RunError(explain_os_error(error, self.folder)) from error
        self.damaged: list[str] = []
        self.history: list[EpochRecord] = []
        self._header = b""  # the content of run.json
        self._old_header = b""  # before changed code was accepted
        self._last_hash = ""
        self._checkpoint: _Checkpoint | None = None
        self._hashes: dict[str, FileHash] = {}  # of weights written by this process
        self._is_locked = False

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Keep other processes from writing here, and remove what killed processes left.

        Everything that writes needs the lock.

        Raises:
            RunError: Another process is using the folder, or it cannot be written.
        """
        with lock.locked(self.folder):
            for place in ("", "iterates", "predictions"):
                lock.remove_temporary_files(self.folder / place)
            for unfinished in self.folder.glob(f".checkpoint-*{_SHARDED}.*"):
                shutil.rmtree(unfinished, ignore_errors=True)
            self._is_locked = True
            try:
                yield
            finally:
                self._is_locked = False

    # ------------------------------------------------------------------------------ beginning

    def check(self) -> None:
        """Raise an error if the run found here is another one. Writes nothing.

        Raises:
            RunError: The folder holds a run of another recipe, seed or code, or its header is
                damaged.
        """
        if self._holds_something():
            try:
                self._refuse_others(self._read_header())
            except RunError:
                checkpoint = self._newest()  # the header may have been changed
                if checkpoint is None or not checkpoint.header:
                    raise
                self._refuse_others(self._parse_header(checkpoint.header))

    def begin(self, threads: int) -> int:
        """Write the run's header, or check that the run found here is the same.

        A finished run that is not as it was written loses its result: it is computed again from
        the last checkpoint.

        Args:
            threads: CPU threads to use.

        Returns:
            The number of threads to use. A resumed run keeps the number it began with, because
            the last bits of sums depend on it.

        Raises:
            RunError: The folder holds another run, or is damaged beyond repair.
        """
        assert self._is_locked, "another process may be writing"
        check = check_run(self.folder)
        if self._is_intact(check):
            header = self._read_header()
            self._refuse_others(header)
            return header.threads
        self._checkpoint = self._newest(set_aside=True)
        if self._checkpoint is not None:
            self._header = self._checkpoint.header or self._read_bytes("run.json")
            header = self._parse_header(self._header)
            self._refuse_others(header)
            self.history = self._checkpoint.history
            self._adopt_code(header)
            self._restore_header()
            self._discard_result(check)
            return header.threads
        if self._holds_something():
            self._refuse_others(self._read_header())
        if (self.folder / "result.json").exists():
            reason = check.first(*_RECORD) or f"It has no {MANIFEST}."
            raise RunError(
                f"{self.folder} is not as the run wrote it, and there is no checkpoint to restore "
                f"it from. {reason} Pass a different --out, or remove the folder to train again."
            )
        # Nothing is left of an earlier attempt that this one could continue.
        (self.folder / MANIFEST).unlink(missing_ok=True)
        machine = {
            "python": platform.python_version(),
            "system": platform.platform(),
            "processor": platform.machine(),
        }
        code = self._code()
        new = RunHeader(
            self.label,
            self.recipe,
            self.seed,
            threads,
            versions(),
            machine,
            FORMAT,
            (code,) if code else (),
        )
        self._header = _header_content(new)
        write_atomically(self.folder / "run.json", self._header)
        return threads

    def _holds_something(self) -> bool:
        """Return True if a run has produced anything here. If not, another may replace it."""
        for name in ("epochs.jsonl", "result.json", MANIFEST):
            with suppress(FileNotFoundError):
                if (self.folder / name).stat().st_size:
                    return True
        return bool(self._checkpoints())

    def _is_intact(self, check: RunCheck) -> bool:
        """Return True if the run has ended, and its result can be trusted."""
        return check.state != "unfinished" and not check.concerns(*_RECORD)

    def _read_bytes(self, name: str) -> bytes:
        path = self.folder / name
        if not path.exists():
            raise RunError(f"{path} is missing. Pass a different --out, or remove the folder.")
        try:
            return read_regular_file(path)
        except OSError as error:
            raise RunError(f"{path} cannot be read: {error.strerror or error}.") from None

    def _read_header(self) -> RunHeader:
        return self._parse_header(self._read_bytes("run.json"))

    def _parse_header(self, content: bytes) -> RunHeader:
        path = self.folder / "run.json"
        try:
            return RunHeader.from_dict(parse_json(content))
        except ValueError as error:
            raise RunError(f"{path} is damaged ({error}). Pass a different --out.") from None
        except UserError as error:
            raise RunError(
                f"{path} is not a run's header: {error} Pass a different --out."
            ) from None

    def _refuse_others(self, found: RunHeader) -> None:
        changed = differences(_without_code(found.recipe), _without_code(self.recipe))
        changed += [f"seed: {found.seed} → {self.seed}"] if found.seed != self.seed else []
        if changed:
            raise RunError(
                f"{self.folder} holds a run of another recipe ({'; '.join(changed)}). Pass a "
                "different --out, or remove the folder."
            )
        if (files := self._changed_code(found)) and not self.accept_changed_code:
            raise RunError(
                f"{' and '.join(files)} changed after {self.folder} was started. Undo the change, "
                "pass --accept-changed-code to continue with the new code, or pass a different "
                "--out."
            )

    def _code(self) -> dict[str, str]:
        """Return the hashes of the files of the user's own task or network, if there is one."""
        path = self.recipe.code_path
        return {} if path is None else code_files(path)

    def _changed_code(self, found: RunHeader) -> list[str]:
        return changed_files(found.code[-1] if found.code else {}, self._code())

    def _adopt_code(self, header: RunHeader) -> None:
        """Add changed code, which was accepted, to the header of a run that continues."""
        files = self._changed_code(header)
        if not files:
            return
        self._old_header = self._header
        code = (*header.code, self._code())
        self._header = _header_content(replace(header, recipe=self.recipe, code=code))
        write_atomically(self.folder / "run.json", self._header)
        self._restore_epochs()
        self.damaged.append(
            f"{' and '.join(files)} changed. The run continues with the new code, and "
            f"{self.folder / 'run.json'} lists both versions."
        )

    def _restore_header(self) -> None:
        path = self.folder / "run.json"
        with suppress(OSError):
            if read_regular_file(path) == self._header:
                return
        write_atomically(path, self._header)
        self.damaged.append(f"{path} was changed. It was restored.")

    def _discard_result(self, check: RunCheck) -> None:
        """Remove a result that cannot be trusted. The last checkpoint restores it."""
        for problem in check.problems:
            if problem.path.name in ("result.json", MANIFEST):
                self.damaged.append(f"{problem} It is restored from the last checkpoint.")
        for name in ("result.json", MANIFEST):
            path = self.folder / name
            if check.concerns(name) and path.exists():
                path.replace(path.with_name(f"{name}.damaged"))
            path.unlink(missing_ok=True)

    @property
    def result(self) -> RunResult | None:
        """How the run ended, or None if it has not.

        Raises:
            RunError: A file of the record is not as the run wrote it.
        """
        check = check_run(self.folder)
        if check.state == "unfinished":
            return None
        if not self._is_intact(check):
            raise RunError(
                f"{check.first(*_RECORD)} Rerun the command that trains it to restore it."
            )
        return RunResult.from_dict(read_json(self.folder / "result.json"))

    # --------------------------------------------------------------------------------- epochs

    @property
    def _epochs_path(self) -> Path:
        return self.folder / "epochs.jsonl"

    @property
    def epochs(self) -> list[EpochRecord]:
        """The record on disk, up to the first damaged line."""
        return read_epochs(self._epochs_path)

    def append(self, record: EpochRecord) -> None:
        """Append a line for an epoch.

        Args:
            record: The epoch's record.
        """
        line = with_hash(to_json(record.to_dict()), self._last_hash or sha256(self._header))
        self._last_hash = without_hash(line)[1]
        self.history.append(record)
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | getattr(os, "O_NOFOLLOW", 0)
        try:
            with open(os.open(self._epochs_path, flags, 0o666), "ab", buffering=0) as file:
                content = f"{line}\n".encode()
                if file.write(content) != len(content):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            raise RunError(explain_os_error(error, self._epochs_path)) from error

    def _restore_epochs(self) -> None:
        """Make `epochs.jsonl` what this process knows it to be."""
        expected = chained(self.history, self._header)
        self._last_hash = without_hash(expected.split("\n")[-2])[1] if expected else ""
        found, older = "", "".join(to_json(r.to_dict()) + "\n" for r in self.history)
        with suppress(OSError):
            found = read_regular_file(self._epochs_path).decode(errors="replace")
        if found == expected:
            return
        write_atomically(self._epochs_path, expected.encode())
        before = chained(self.history, self._old_header) if self._old_header else expected
        if not found.startswith((expected, older, before)):  # otherwise, it only has more lines
            self.damaged.append(f"{self._epochs_path} was damaged or changed. It was restored.")

    # ---------------------------------------------------------------------------- checkpoints

    def _checkpoints(self) -> list[Path]:
        """Return the checkpoints, newest first."""
        return _saved(self.folder, "checkpoint")[::-1]

    def _newest(self, *, set_aside: bool = False) -> _Checkpoint | None:
        """Return the newest intact checkpoint. Name the damaged ones, and rename them if asked."""
        for path in self._checkpoints():
            checkpoint = _Checkpoint.read(path)
            if checkpoint is not None:
                return checkpoint
            if set_aside:
                path.replace(path.with_suffix(".damaged"))
                self.damaged.append(
                    f"{path} is damaged. It was set aside, and the checkpoint before it is used."
                )
        return None

    def _write_weights(self, name: str, epochs: int, state: State) -> Path:
        buffer = io.BytesIO()
        torch.save(state, buffer)
        content = buffer.getvalue()
        name = f"{name}-{epochs:06d}-{sha256(content)[:16]}.pt"
        write_atomically(self.folder / name, content)
        self._hashes[name] = FileHash.of(content)
        return self.folder / name

    def save(self, epochs: int, state: State) -> None:
        """Write a checkpoint with the header and the record so far, and keep the previous one.

        Args:
            epochs: Epochs done.
            state: What to restore.
        """
        self._write_weights("checkpoint", epochs, {**state, **self.record()})
        self.remove_older((epochs, 0))

    def record(self) -> State:
        """Return what every checkpoint holds beside the state: the header and the record so far."""
        lines = json.dumps([json.loads(to_json(record.to_dict())) for record in self.history])
        return {"header": self._header.decode(), "lines": lines}

    def remove_older(self, progress: tuple[int, int]) -> None:
        """Remove all checkpoints before this one, except the last of them.

        Args:
            progress: The epochs that it has done, and the steps of the next epoch.
        """
        older = [path for path in self._checkpoints() if _progress(path) < progress]
        for old in older[1:]:
            if old.suffix == _SHARDED:
                from gadam.runs import sharded

                sharded.remove(old)
            else:
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
        written = self._write_weights("iterates/iterate", epochs, weights)
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

        Call :meth:`begin` before.

        Returns:
            The epochs done and the state after them, or (0, None) if there is no checkpoint.
            Damaged checkpoints are set aside and named in :attr:`damaged`.

        Raises:
            RunError: The checkpoint cannot be read.
        """
        done, checkpoint = self._resume()
        if checkpoint is None or checkpoint.path.suffix != _SHARDED:
            return done, checkpoint.state if checkpoint is not None else None
        from gadam.runs import sharded

        return done, sharded.read(checkpoint.path)

    def find_checkpoint(self) -> tuple[int, Path | None]:
        """Do the same as :meth:`load`, but return where the checkpoint is."""
        done, checkpoint = self._resume()
        return done, checkpoint.path if checkpoint is not None else None

    def _resume(self) -> tuple[int, _Checkpoint | None]:
        assert self._is_locked, "another process may be writing"
        assert self._header, "begin() has not been called"
        (self.folder / "failure.json").unlink(missing_ok=True)
        checkpoint, self._checkpoint = self._checkpoint, None  # it can be large
        done = len(checkpoint.history) if checkpoint is not None else 0
        self._restore_epochs()
        self._forget_iterates(after=done)
        return done, checkpoint

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

    # --------------------------------------------------------------------------------- ending

    def fail(self, reason: str) -> None:
        """Record why the run stopped, if the disk allows it.

        Args:
            reason: The error.
        """
        with suppress(RunError):
            write_json(self.folder / "failure.json", {"reason": reason})

    def finish(self, result: RunResult) -> None:
        """Record how the run ended, then write the manifest.

        Args:
            result: The run's result.
        """
        assert self._is_locked, "another process may be writing"
        self._restore_header()
        self._restore_epochs()
        write_json(self.folder / "result.json", result.to_dict())
        files = {
            "run.json": FileHash.of(self._header),
            "epochs.jsonl": FileHash.of(chained(self.history, self._header).encode()),
            "result.json": FileHash.of((to_json(result.to_dict(), indent=1) + "\n").encode()),
        }
        last = [path for path in self._checkpoints() if _epochs(path) == result.epochs]
        for path in (*last, *self.iterates().values()):
            if path.suffix == _SHARDED:
                listing = path / MANIFEST  # which lists the others
                files[listing.relative_to(self.folder).as_posix()] = FileHash.of(
                    read_regular_file(listing)
                )
                continue
            name = path.relative_to(self.folder).as_posix()
            found = self._hashes.get(name) or self._hash_weights(path)
            if found is not None:
                files[name] = found
        write_manifest(self.folder, files)

    def _hash_weights(self, path: Path) -> FileHash | None:
        """Hash weights that an earlier process wrote. Set them aside if they are damaged."""
        with suppress(OSError):
            content = read_regular_file(path)
            if sha256(content)[:16] == path.stem.split("-")[2]:
                return FileHash.of(content)
        path.replace(path.with_suffix(".damaged"))
        self.damaged.append(f"{path} is damaged. It was set aside.")
        return None
