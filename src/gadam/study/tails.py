"""The start of the average, chosen after training: `gadam tails`.

A run that was trained with ``blocks=N`` has the mean of its iterates over every tail that starts at
a block boundary. :class:`Tails` evaluates these on validation data, coarse to fine, and reports the
test metric of the best one only.
"""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path

import torch
from torch import Tensor, nn

import gadam
from gadam._names import count
from gadam.average.batchnorm import BatchNorm
from gadam.average.progress import Progress
from gadam.runs.files import RunError
from gadam.runs.folder import RunFolder
from gadam.study.notebook import Notebook
from gadam.study.points import Points
from gadam.train import optimizers, tasks

__all__ = ["Soup", "Tails", "next_starts"]

NOTEBOOK = "tails.jsonl"


@dataclass(frozen=True)
class Soup:
    """A greedy soup of blocks.

    Attributes:
        blocks: The first and last step of each block in it.
        value: Its validation metric.
    """

    blocks: list[tuple[int, int]]
    value: float


def next_starts(
    candidates: list[int], best: int | None, known: list[int], coarse: int
) -> list[int]:
    """Return which starts to evaluate next: a coarse grid, then the middles beside the best one.

    Args:
        candidates: All starts, in order.
        best: The best start so far; None before the first evaluation.
        known: The starts that were evaluated.
        coarse: The size of the grid.

    Returns:
        The starts. None are left when both neighbors of the best start were evaluated.

    Example:
        >>> next_starts(list(range(0, 900, 100)), None, [], 3)
        [0, 400, 800]
        >>> next_starts(list(range(0, 900, 100)), 400, [0, 400, 800], 3)
        [200, 600]
        >>> next_starts([0, 100], 100, [0, 100], 3)
        []
    """
    last = len(candidates) - 1
    if best is None:
        parts = max(coarse - 1, 1)
        return [candidates[i] for i in sorted({round(k * last / parts) for k in range(parts + 1)})]
    done = sorted(candidates.index(start) for start in known)
    place = done.index(candidates.index(best))
    middles = [
        (done[side] + done[side + 1]) // 2
        for side in (place - 1, place)
        if 0 <= side < len(done) - 1 and done[side + 1] - done[side] > 1
    ]
    return [candidates[i] for i in middles]


class Tails:
    """The tail averages of a finished run.

    Args:
        run: The run's folder.
        data_dir: Where the data sets are; None uses the default.
        device: Where to compute.

    Raises:
        RunError: The run is not finished, has no blocks, or has no validation data.
        gadam.average.BlockError: The blocks are damaged, or belong to another run.
    """

    def __init__(self, run: RunFolder, data_dir: str | None, device: torch.device) -> None:
        self.run, self.recipe = run, run.recipe
        if not self.recipe.blocks:
            raise RunError(f"{run.folder} has no blocks. Train with --set blocks=100.")
        self.points = Points(run, data_dir, device)
        if "validation" not in self.points.task.splits:
            raise RunError(
                f"{run.folder} has no validation data, and the test data must not choose the "
                "start. Train with --set data.validation=0.1."
            )
        state = run.final_state()[1]
        self.model.load_state_dict(state["model"])
        self._average_state = state["average"]
        before = tasks.steps_before_averaging(self.recipe, self.points.task)
        optimizer, _ = optimizers.build(self.recipe, self.model, before, self.points.task.mode)
        self.blocks = gadam.BlockAverages(
            optimizer, run.folder / "blocks", every=self.recipe.blocks
        )
        optimizer.load_state_dict(state["optimizer"])  # checks that the blocks belong to this run
        self.blocks.load_state_dict(state["blocks"])
        self.notebook = Notebook(run.folder / NOTEBOOK)

    @property
    def model(self) -> nn.Module:
        """The run's model, with its last iterate."""
        return self.points.model

    @cached_property
    def starts(self) -> list[int]:
        """The steps at which a tail may start."""
        return self.blocks.boundaries[:-1]

    @property
    def stop(self) -> int:
        """The last step of the run."""
        return self.blocks.boundaries[-1]

    @property
    def trained_in(self) -> tuple[int, float] | None:
        """The start of the run's own average, and its validation metric, if it has one."""
        result = self.run.result
        if result is None or not result.average or "validation" not in result.average:
            return None
        first = Progress.unpack(self._average_state["progress"]).first
        return max(first - 1, 0), result.average["validation"][self.recipe.metric]

    @property
    def last_iterate(self) -> float | None:
        """The validation metric of the last iterate, if the run measured it."""
        result = self.run.result
        measured = result.iterate.get("validation") if result is not None else None
        return None if measured is None else measured[self.recipe.metric]

    @property
    def tested(self) -> list[str]:
        """What was ever evaluated on the run's test data, by this command or earlier ones."""
        names = [name.partition(" ") for name in self.notebook.newest]
        return [what for split, _, what in names if split == "test"]

    def better(self, value: float, other: float) -> bool:
        """Return True if a metric is better than another one. NaN is never better.

        Args:
            value: The metric.
            other: The other one.
        """
        if other != other:
            return value == value
        return value > other if self.recipe.mode == "max" else value < other

    def refresh(self, model: nn.Module) -> None:
        """Pass the training data through the model, for its BatchNorm statistics.

        Args:
            model: The model.
        """
        for batch in self.points.task.refresh(self.points.epochs - 1):
            self.points.task.loss(model, batch)

    @property
    def _batchnorm(self) -> BatchNorm:
        return self.refresh if self.recipe.refresh_batchnorm else False

    def value(self, split: str, start: int) -> float:
        """Return the metric of a tail. It is measured only once.

        Args:
            split: The split to evaluate.
            start: A boundary.
        """
        return self._measured(
            f"{split} start {start}",
            {"start": start, "stop": self.stop},
            split,
            lambda: self._evaluate_tail(split, start),
        )

    def _evaluate_tail(self, split: str, start: int) -> float:
        with self.blocks.applied(self.model, start, batchnorm=self._batchnorm):
            return self.points.task.evaluate(self.model, split)[self.recipe.metric]

    def _measured(
        self, name: str, what: dict[str, object], split: str, measure: Callable[[], float]
    ) -> float:
        key = {**what, "split": split, "metric": self.recipe.metric, "blocks": self._identity}
        known = self.notebook.find(key)
        if known is None:
            begun = time.monotonic()
            known = self.notebook.add(name, key, measure(), time.monotonic() - begun)
        return float(known)

    @cached_property
    def _identity(self) -> str:
        """A name of the blocks that changes if they do."""
        manifest = self.run.folder / "blocks" / "blocks.json"
        return hashlib.sha256(manifest.read_bytes()).hexdigest()

    def search(
        self, coarse: int = 9, on_value: Callable[[int, float], None] = lambda start, value: None
    ) -> dict[int, float]:
        """Evaluate starts on validation data, first far apart, then close to the best one.

        Args:
            coarse: The number of starts to begin with.
            on_value: Receives each start and its metric.

        Returns:
            The metrics by start, in order.
        """
        values: dict[int, float] = {}
        while wanted := next_starts(
            self.starts, self.best(values) if values else None, list(values), coarse
        ):
            for start in wanted:
                values[start] = self.value("validation", start)
                on_value(start, values[start])
        return dict(sorted(values.items()))

    def best(self, values: dict[int, float]) -> int:
        """Return the best start. Of equal ones, it is the earliest, which averages the most.

        Args:
            values: Metrics by start.
        """
        chosen = min(values)
        for start in sorted(values):
            if self.better(values[start], values[chosen]):
                chosen = start
        return chosen

    def greedy(self) -> Soup:
        """Return the greedy soup: add blocks, best first, as long as validation improves."""
        alone = {pair: self._soup([pair]) for pair in pairwise(self.blocks.boundaries)}
        finite = [pair for pair in alone if math.isfinite(alone[pair])]
        if not finite:
            raise RunError(f"No block of {self.run.folder} has a finite validation metric.")
        ranked = sorted(finite, key=alone.__getitem__, reverse=self.recipe.mode == "max")
        chosen, value = ranked[:1], alone[ranked[0]]
        for pair in ranked[1:]:
            tried = self._soup([*chosen, pair])
            if self.better(tried, value):
                chosen, value = [*chosen, pair], tried
        return Soup(sorted(chosen), value)

    def soup_test(self, soup: Soup) -> float:
        """Return the test metric of a soup.

        Args:
            soup: The soup.
        """
        return self._soup(soup.blocks, "test")

    def _soup(self, pairs: list[tuple[int, int]], split: str = "validation") -> float:
        pairs = sorted(pairs)
        return self._measured(
            f"{split} soup of {count(len(pairs), 'block')}",
            {"soup": [list(pair) for pair in pairs]},
            split,
            lambda: self._evaluate_soup(pairs, split),
        )

    def _evaluate_soup(self, pairs: list[tuple[int, int]], split: str) -> float:
        """Evaluate the mean of the iterates of some blocks."""
        names = [name for name, _ in self.model.named_parameters()]
        raw = {name: t.clone() for name, t in self.model.state_dict().items()}
        total: dict[str, Tensor] = {}
        steps = sum(stop - start for start, stop in pairs)
        for start, stop in pairs:
            found = self.blocks.model_state_dict(self.model, start, stop, torch.float64)
            for name in names:
                part = found[name] * ((stop - start) / steps)
                total[name] = part if name not in total else total[name].add_(part)
        try:
            self.model.load_state_dict({**raw, **total})
            if self.recipe.refresh_batchnorm:
                gadam.refresh_batchnorm(self.model, self.refresh)
            return self.points.task.evaluate(self.model, split)[self.recipe.metric]
        finally:
            self.model.load_state_dict(raw)

    def save(self, start: int) -> Path:
        """Write the weights of a tail, with its BatchNorm statistics, unless they are written.

        Args:
            start: A boundary.

        Returns:
            The safetensors file, which says which weights it holds.
        """
        folder = self.run.folder / "tails"
        folder.mkdir(exist_ok=True)
        path = folder / f"{start:012d}-{self.stop:012d}-{self._identity[:8]}.safetensors"
        if not path.exists():
            self.blocks.save_model(self.model, path, start, batchnorm=self._batchnorm)
        return path
