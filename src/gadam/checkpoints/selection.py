"""A user's task on averaged weights: BatchNorm statistics, and greedy soups."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gadam import refresh_batchnorm
from gadam.average.batchnorm import has_statistics_in_use
from gadam.checkpoints.errors import CheckpointError, enumerated
from gadam.checkpoints.formats import Checkpoint
from gadam.checkpoints.merge import Merge, statistics_of
from gadam.train.tasks import Task, seed_all, seed_for
from gadam.train.tasks.own import as_task, load_task

__all__ = ["Evaluator", "Soup", "greedy_soup", "refreshed"]


class Evaluator:
    """Loads weights into the model of a task, and measures them on its validation data.

    Args:
        task: A task, or the file that defines it.
    """

    def __init__(self, task: Task | str | os.PathLike[str]) -> None:
        if isinstance(task, str | os.PathLike):
            self.task = load_task(os.fspath(task))
        else:
            self.task = as_task(task)
        seed_all(seed_for(0, 0, "model"))
        self.task.setup(0, torch.device("cpu"))
        self.model = self.task.model
        self._prefix = ""

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Load weights into the model, and recompute its BatchNorm statistics.

        Args:
            tensors: By the names of the checkpoint, which may begin with a prefix, such as
                "module.", that the model's own names lack.

        Raises:
            CheckpointError: They do not fit the model.
        """
        state = self.model.state_dict()
        self._prefix = _prefix(list(state), tensors)
        found = {n: tensors[self._prefix + n] for n in state if self._prefix + n in tensors}
        known = {state[name].data_ptr() for name in found}  # tied weights may have one name
        missing = [n for n, v in state.items() if n not in found and v.data_ptr() not in known]
        wrong = [n for n, v in found.items() if v.shape != state[n].shape]
        if missing or wrong:
            what = f"lack {enumerated(missing)}" if missing else f"differ in {enumerated(wrong)}"
            raise CheckpointError(
                f"The checkpoints do not fit the model of the task: they {what}. Use the task that "
                "they were trained with."
            )
        self.model.load_state_dict(found, strict=False)
        if has_statistics_in_use(self.model):
            refresh_batchnorm(self.model, self.task.refresh(0), forward=self.task.loss)

    def statistics(self, names: Sequence[str]) -> dict[str, Tensor]:
        """Return the BatchNorm statistics in the model.

        Args:
            names: Their names in the checkpoint.
        """
        state = self.model.state_dict()
        return {
            name: state[name.removeprefix(self._prefix)].clone()
            for name in names
            if name.removeprefix(self._prefix) in state
        }

    def score(self) -> float:
        """Return the metric of the loaded weights on the validation data.

        Raises:
            CheckpointError: The task has no validation data.
        """
        if "validation" not in self.task.splits:
            raise CheckpointError(
                "The task has no validation data to select checkpoints on. Add the split "
                '"validation".'
            )
        return self.task.evaluate(self.model, "validation")[self.task.metric]

    def is_better(self, score: float, than: float) -> bool:
        """Return True if a score is better than another one. A NaN is worse than anything.

        Args:
            score: The score.
            than: The other score.
        """
        if math.isnan(score) or math.isnan(than):
            return math.isnan(than) and not math.isnan(score)
        return score > than if self.task.mode == "max" else score < than


def _prefix(names: Sequence[str], tensors: Mapping[str, Tensor]) -> str:
    """Return what the names in a checkpoint have before the names of the model."""
    if any(name in tensors for name in names):
        return ""
    longest = max(names, key=len, default="")
    ends = [name.removesuffix(longest) for name in tensors if name.endswith(f".{longest}")]
    return ends[0] if len(ends) == 1 else ""


@dataclass(frozen=True)
class Soup:
    """The checkpoints of a greedy soup.

    Attributes:
        scores: The validation metric of each checkpoint alone.
        kept: Whether each one is in the soup.
        score: The validation metric of their mean.
    """

    scores: tuple[float, ...]
    kept: tuple[bool, ...]
    score: float


def greedy_soup(checkpoints: Sequence[Checkpoint], evaluator: Evaluator) -> Soup:
    """Select checkpoints: add one after the other, and keep those that improve the mean.

    The best checkpoint comes first, then the others in the order of their own validation metrics.

    Args:
        checkpoints: The checkpoints, the oldest first.
        evaluator: Measures weights.
    """
    count = len(checkpoints)

    def measured(kept: Sequence[bool]) -> float:
        evaluator.load(Merge(checkpoints, [float(each) for each in kept]).tensors())
        return evaluator.score()

    scores = [measured([i == each for each in range(count)]) for i in range(count)]
    sign = -1.0 if evaluator.task.mode == "max" else 1.0
    worst = [math.inf if math.isnan(score) else sign * score for score in scores]
    ranks = sorted(range(count), key=lambda i: (worst[i], -i))
    kept = [i == ranks[0] for i in range(count)]
    best = scores[ranks[0]]
    for i in ranks[1:]:
        candidate = [each or i == j for j, each in enumerate(kept)]
        score = measured(candidate)
        if evaluator.is_better(score, best):
            kept, best = candidate, score
    return Soup(tuple(scores), tuple(kept), best)


def refreshed(merge: Merge, evaluator: Evaluator) -> dict[str, Tensor]:
    """Return the BatchNorm statistics of an average, recomputed on the task's training data.

    Args:
        merge: The average.
        evaluator: With the task.
    """
    evaluator.load(merge.tensors())
    return evaluator.statistics(statistics_of(merge.last.tensors))
