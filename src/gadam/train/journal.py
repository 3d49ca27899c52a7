"""The record of a run that several ranks train: only the first one touches the folder."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import torch
from torch import nn

from gadam._dtensor import whole
from gadam.runs.folder import RunFolder, State
from gadam.runs.recipe import Recipe
from gadam.runs.record import EpochRecord, RunResult
from gadam.train import sharded_checkpoint
from gadam.train.distributed import Ranks

__all__ = ["Journal", "whole_state"]


class Journal:
    """A run's folder, as all ranks see it.

    Every method but :meth:`fail` is collective. If the folder cannot be read or written, all ranks
    raise an error.

    Args:
        folder: The run's folder, on storage that all ranks share.
        recipe: What to train.
        seed: The run's seed.
        ranks: The processes that train it.
        label: The run's name beside other runs.
        accept_changed_code: Continue a run although the user's own code has changed since.
        asynchronous: Write checkpoints of several ranks while training continues.
        on_notice: Called on the first rank, with sentences about damaged files.
    """

    def __init__(
        self,
        folder: str | Path,
        recipe: Recipe,
        seed: int,
        ranks: Ranks,
        *,
        label: str = "",
        accept_changed_code: bool = False,
        asynchronous: bool = False,
        on_notice: Callable[[str], None] = lambda sentence: None,
    ) -> None:
        self.path, self.recipe, self.seed, self.ranks = Path(folder), recipe, seed, ranks
        self._on_notice, self._asynchronous = on_notice, asynchronous
        self._run: RunFolder | None = None
        self._saver: sharded_checkpoint.Saver | None = None
        if ranks.is_distributed:
            self._saver = sharded_checkpoint.Saver(ranks, self.path, asynchronous=asynchronous)

        def open_folder() -> None:
            self._run = RunFolder(
                folder, recipe, seed, label, accept_changed_code=accept_changed_code
            )

        ranks.first(open_folder)

    @property
    def _folder(self) -> RunFolder:
        assert self._run is not None, "only the first rank has the folder"
        return self._run

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Keep other processes from writing to the folder."""
        with ExitStack() as stack:

            def enter() -> None:
                stack.enter_context(self._folder.locked())

            self.ranks.first(enter)
            yield

    def begin(self, threads: int) -> tuple[int, RunResult | None]:
        """Start or continue the run.

        Args:
            threads: CPU threads to use.

        Returns:
            The number of threads to use, and the result if the run has ended.
        """
        return self.ranks.first(lambda: (self._folder.begin(threads), self._folder.result))

    def load(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[int, State | None]:
        """Return the epochs done, and the state after them if there is a checkpoint.

        Args:
            model: The model to load it into.
            optimizer: The model's optimizer.
        """
        if not self.ranks.is_distributed:
            found = self._folder.load()
            self._tell()
            return found
        done, path = self.ranks.first(lambda: self._folder.find_checkpoint())
        self._tell()
        if path is None:
            return done, None
        return done, sharded_checkpoint.load(path, model, optimizer, self.ranks)

    def first_epoch(self) -> EpochRecord | None:
        """Return the record of the first epoch, if there is one."""
        return self.ranks.first(lambda: next(iter(self._folder.history), None))

    def append(self, record: EpochRecord) -> None:
        """Append a line for an epoch.

        Args:
            record: The epoch's record.
        """
        self.ranks.first(lambda: self._folder.append(record))

    def keep_iterate(self, epochs: int, weights: State, last: int) -> None:
        """Keep the weights after an epoch; see :meth:`RunFolder.keep_iterate`.

        Args:
            epochs: Epochs done.
            weights: The model's state dict, on the first rank.
            last: How many iterates to keep.
        """
        self.ranks.first(lambda: self._folder.keep_iterate(epochs, weights, last))

    def save(self, epochs: int, state: State, steps: int = 0) -> None:
        """Write a checkpoint.

        Args:
            epochs: Epochs done.
            state: What to restore.
            steps: Steps done of the next epoch.
        """
        if self._saver is None:
            self._folder.save(epochs, state)
            return
        name = f"checkpoint-{epochs:06d}" + (f"+{steps:09d}" if steps else "")
        record = self._folder.record() if self.ranks.is_first else {}

        def commit(path: Path) -> None:
            self._folder.remove_older((epochs, steps))

        self._saver.save(name, state, record, commit)

    def finish(self, result: Callable[[list[EpochRecord]], RunResult]) -> RunResult:
        """Record how the run ended.

        Args:
            result: Returns it, from the record.
        """
        if self._saver is not None:
            self._saver.wait()

        def finish() -> RunResult:
            found = result(self._folder.history)
            self._folder.finish(found)
            return found

        found = self.ranks.first(finish)
        self._tell()
        return found

    def fail(self, reason: str) -> None:
        """Record why the run stopped, if this is the first rank.

        Args:
            reason: The error.
        """
        if self._run is not None:
            self._run.fail(reason)

    def close(self) -> None:
        """Stop writing. Not collective."""
        if self._saver is not None:
            self._saver.close()

    def _tell(self) -> None:
        while self._run is not None and self._run.damaged:
            self._on_notice(self._run.damaged.pop(0))


def whole_state(model: nn.Module) -> State:
    """Return a model's state dict with whole tensors. Collective if the model is sharded.

    Args:
        model: The model.
    """
    return {name: whole(value) for name, value in model.state_dict().items()}
