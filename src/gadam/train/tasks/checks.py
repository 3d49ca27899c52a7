"""Check that a task keeps its promises, before hours are spent on it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

import gadam
from gadam._errors import UserError
from gadam._modes import preserved_modes
from gadam.train.tasks import batch as batches_of
from gadam.train.tasks.own import as_task, load_task
from gadam.train.tasks.randomness import Generators, seed_all
from gadam.train.tasks.task import Task, TaskError, seed_for

__all__ = ["TaskReport", "check_task"]

COMPARED = 3  # batches whose content is compared
COUNTED = 64  # batches that are counted at most


@dataclass(frozen=True)
class TaskReport:
    """What :func:`check_task` found out about a task that works.

    Args:
        metric: The metric that rates a run.
        mode: Whether a larger ("max") or smaller ("min") metric is better.
        steps: Steps in the first epoch.
        parameters: Trainable parameters of the model.
        initial: The metrics after one step of training, by split.
        notices: Sentences about what works, but may not be intended.
    """

    metric: str
    mode: str
    steps: int
    parameters: int
    initial: Mapping[str, Mapping[str, float]]
    notices: tuple[str, ...]


def check_task(
    task: Task | Callable[[], Task] | str | Path, *, device: str | torch.device = "cpu"
) -> TaskReport:
    """Check that gadam can train a task, stop and resume it, and repeat it.

    It trains one step, reads a few batches and evaluates each split twice. It checks that

    - :meth:`Task.setup` with the same seed gives the same weights and the same batches, whatever
      was done before, and that another seed gives others;
    - the batches of an epoch do not depend on the epochs before, and there are :meth:`Task.steps`
      of them;
    - the loss is one finite number that has a gradient, and is the same if it is computed again;
    - :meth:`Task.evaluate` returns the metric on each split, the same one twice, and leaves the
      model as it was;
    - micro-batches make up the whole batch, and BatchNorm statistics can be refreshed.

    The global generators of random numbers are restored. Call :meth:`Task.setup` again before you
    use the task.

    Args:
        task: A task, a function that returns one, or the path of a file with a function ``task``.
        device: Where to compute.

    Returns:
        What is worth knowing about the task.

    Raises:
        TaskError: The task cannot be used. The message lists all problems that were found.

    Example:
        >>> import torch
        >>> from gadam.train import SupervisedTask, check_task
        >>> x = torch.randn(64, 3)
        >>> report = check_task(SupervisedTask(
        ...     model=lambda: torch.nn.Linear(3, 1),
        ...     train=(x, x.sum(1, keepdim=True)),
        ...     loss=torch.nn.functional.mse_loss,
        ...     metric="mse",
        ...     batch_size=16,
        ... ))
        >>> report.metric, report.mode, report.steps, report.parameters
        ('mse', 'min', 4, 4)
        >>> report.notices[0]
        'There is no test data, so test results are of the validation data, on which settings may \
have been chosen.'
    """
    with Generators().active():
        check = _Check(_resolved(task), torch.device(device))
        check.run()
    if check.problems:
        raise TaskError(*dict.fromkeys(check.problems))
    found = check.task
    return TaskReport(
        found.metric,
        found.mode,
        check.steps,
        sum(p.numel() for p in found.model.parameters() if p.requires_grad),
        check.initial,
        (*found.notices, *dict.fromkeys(check.notices)),
    )


def _resolved(task: Task | Callable[[], Task] | str | Path) -> Task:
    if isinstance(task, str | Path):
        return load_task(task)
    is_factory = callable(task) and not hasattr(task, "setup") and not isinstance(task, nn.Module)
    if is_factory or isinstance(task, type):
        factory = cast("Callable[[], object]", task)
        return as_task(factory(), f"{getattr(task, '__name__', 'task')}()")
    return as_task(task)


class _Check:
    def __init__(self, task: Task, device: torch.device) -> None:
        self.task, self.device = task, device
        self.problems: list[str] = []
        self.notices: list[str] = []
        self.initial: dict[str, dict[str, float]] = {}
        self.steps = 0

    def run(self) -> None:
        """Check everything. What fails does not keep the rest from being checked."""
        if (weights := self._setup(0)) is None:
            return
        batches, later = self._first_batches(0, count=True), self._first_batches(1)
        loss = self._check_training(batches[0]) if batches else None
        self._check_evaluation()
        if self._check_repetition(weights, batches, loss):
            self._check_resumption(later)
        if batches and batches_of.same(batches, later):
            self.notices.append("Epochs 0 and 1 have the same batches in the same order.")
        self._compare_seeds(weights, batches)

    @contextmanager
    def _step(self, name: str) -> Iterator[None]:
        """Turn an error of the task into a problem."""
        try:
            yield
        except UserError as error:
            self.problems.append(str(error))
        except Exception as error:
            reason = (str(error).strip() or repr(error)).splitlines()[0].rstrip(".")
            self.problems.append(f"{name} raises {type(error).__name__}: {reason}.")

    def _setup(self, seed: int) -> dict[str, Tensor] | None:
        """Set up a run, and return its initial weights."""
        with self._step(f"setup({seed})"):
            seed_all(seed_for(seed, 0, "model"))
            self.task.setup(seed, self.device)
            model = getattr(self.task, "model", None)
            if not isinstance(model, nn.Module):
                raise TaskError("setup() must set self.model to a torch.nn.Module.")
            if not any(p.requires_grad for p in model.parameters()):
                raise TaskError("The model has no trainable parameters.")
            return _snapshot(model)
        return None

    def _first_batches(self, epoch: int, *, count: bool = False) -> list[Any]:
        """Return the first batches of an epoch. Compare their number with steps() if asked."""
        kept: list[Any] = []
        with self._step(f"batches({epoch})"):
            seed_all(seed_for(0, epoch, "noise in the network"))
            iterator = iter(self.task.batches(epoch))
            kept = [batches_of.apply(torch.clone, b) for b in islice(iterator, COMPARED)]
            if not kept:
                raise TaskError(f"batches({epoch}) is empty. Return at least one batch.")
            if count:
                self.steps = self.task.steps(epoch)
                limit = max(COUNTED, COMPARED)
                found = len(kept) + sum(1 for _ in islice(iterator, limit + 1 - len(kept)))
                if found != self.steps and min(found, self.steps) <= limit:
                    number = f"more than {limit}" if found > limit else str(found)
                    self.problems.append(
                        f"steps({epoch}) is {self.steps}, but batches({epoch}) has {number} "
                        "batches. Return the same number."
                    )
        return kept

    # ------------------------------------------------------------------------------- training

    def _loss(self, batch: Any) -> Tensor:
        """Compute the loss of a batch as the training loop does."""
        self.task.model.train()
        seed_all(0)
        answer: Any = self.task.loss(self.task.model, batch)
        if not isinstance(answer, tuple) or len(answer) != 2:
            raise TaskError("loss() must return the mean loss and the number of examples.")
        loss, examples = answer
        if not isinstance(loss, Tensor) or loss.ndim:
            got = f"shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else repr(loss)
            raise TaskError(f"loss() must return a tensor without dimensions, got {got}.")
        if isinstance(examples, Tensor) or not examples > 0:
            raise TaskError(f"loss() must return a number of examples above 0, got {examples!r}.")
        if not loss.isfinite():
            raise TaskError(f"The loss of the first batch is {loss.item()}, not a finite number.")
        return loss

    def _check_training(self, batch: Any) -> Tensor | None:
        """Train one step, and return its loss."""
        model, value = self.task.model, None
        with self._step("loss()"):
            loss = self._loss(batch)
            if not loss.requires_grad:
                raise TaskError("The loss has no gradient. Do not compute it under no_grad().")
            value = loss.detach().clone()
            loss.backward()  # type: ignore[no-untyped-call]
            self._check_gradients(model)
        with self._step("rate_factor()"):
            factor = self.task.rate_factor(batch)
            if not (math.isfinite(factor) and factor >= 0):
                raise TaskError(f"rate_factor() must return a number from 0 on, got {factor!r}.")
        with self._step("micro_batches()"):
            for count in (1, 2):
                total = sum(share for _, share in self.task.micro_batches(batch, count))
                if not math.isclose(total, 1, rel_tol=1e-6):
                    raise TaskError(
                        f"The fractions of micro_batches(batch, {count}) must sum to 1, got "
                        f"{total}."
                    )
        with self._step("refresh()"), preserved_modes(model):
            batches = islice(self.task.refresh(0), 2)
            gadam.refresh_batchnorm(model, batches, forward=self.task.loss)
        return value

    def _check_gradients(self, model: nn.Module) -> None:
        trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
        without = [name for name, p in trained.items() if p.grad is None]
        if len(without) == len(trained):
            raise TaskError(
                "No parameter of the model gets a gradient. Is it another model's loss?"
            )
        if without:
            shown = ", ".join(without[:3]) + (", …" if len(without) > 3 else "")
            self.notices.append(f"These parameters get no gradient: {shown}.")
        for name, p in trained.items():
            if p.grad is not None and not p.grad.isfinite().all():
                raise TaskError(f"The gradient of {name} is not finite in the first batch.")
        with torch.no_grad():  # not the initial weights any more
            for p in trained.values():
                if p.grad is not None:
                    p.sub_(p.grad, alpha=0.01)
        model.zero_grad()

    # ----------------------------------------------------------------------------- evaluation

    def _check_evaluation(self) -> None:
        splits = self.task.splits
        if not splits or not set(splits) <= {"validation", "test"}:
            self.problems.append(
                f"splits must name validation, test, or both, got {', '.join(splits) or 'none'}."
            )
        for split in splits:
            with self._step(f"evaluate({split!r})"):
                self._check_split(split)

    def _check_split(self, split: str) -> None:
        model, metric = self.task.model, self.task.metric
        model.train()
        before = _snapshot(model)
        modes = [module.training for module in model.modules()]
        numbers = torch.get_rng_state()
        first: Any = self.task.evaluate(model, split)
        if changed := _different(before, _snapshot(model)):
            self.problems.append(
                f"evaluate({split!r}) changes {changed[0]} of the model. Leave the model as it is."
            )
        if modes != [module.training for module in model.modules()]:
            self.notices.append(
                "evaluate() leaves the model in another mode. gadam calls model.train() before "
                "each epoch."
            )
        if not torch.equal(numbers, torch.get_rng_state()):
            self.notices.append(
                "evaluate() draws from torch's global generator. gadam seeds it before each epoch."
            )
        if not isinstance(first, Mapping) or metric not in first:
            got = ", ".join(map(str, first)) if isinstance(first, Mapping) else repr(first)
            raise TaskError(f"evaluate({split!r}) must return a dict with {metric!r}, got {got}.")
        for name, value in first.items():
            if isinstance(value, bool) or not isinstance(value, int | float):
                kind = type(value).__name__
                raise TaskError(f"evaluate({split!r}) must return floats, but {name} is a {kind}.")
        if not math.isfinite(first[metric]):
            self.notices.append(f"{metric} on {split} data is {first[metric]} before training.")
        if metric in ("accuracy", "top5") and 0 < first[metric] <= 1:
            self.notices.append(
                f"{metric} is {first[metric]:.3g}, and gadam shows it in percent. If it is a "
                "fraction, return 100 times as much."
            )
        self.initial[split] = dict(first)
        second = self.task.evaluate(model, split)
        if {k: repr(v) for k, v in first.items()} != {k: repr(v) for k, v in second.items()}:
            self.problems.append(
                f"evaluate({split!r}) returns {metric} {first[metric]}, then {second[metric]}, for "
                "the same weights. Evaluate in eval() mode, without random augmentation."
            )

    # ------------------------------------------------------------------------------ repetition

    def _check_repetition(
        self, weights: dict[str, Tensor], batches: list[Any], loss: Tensor | None
    ) -> bool:
        """Compare a run with another one of the same seed. Return True if it is the same."""
        again = self._setup(0)
        if again is not None and (changed := _different(weights, again)):
            self.problems.append(
                f"setup(0) gives another {changed[0]} the second time. Create a new model from "
                "random numbers that depend only on the seed."
            )
            return False
        repeated = self._first_batches(0)
        if not batches_of.same(batches, repeated):
            self.problems.append(
                "batches(0) differs after another setup() with the same seed. Draw random numbers "
                "only from generators that setup() seeds, or from torch's global one."
            )
            return False
        if loss is not None:
            with self._step("loss()"):
                second = self._loss(repeated[0]).item()
                if second != loss.item():
                    raise TaskError(
                        f"The loss of the same weights and batch is {loss.item()}, then {second}. "
                        "Draw random numbers only from torch's global generator."
                    )
        return True

    def _check_resumption(self, later: list[Any]) -> None:
        """Compare an epoch with the same one in a run that starts with it."""
        self._setup(0)
        if not batches_of.same(later, self._first_batches(1)):
            self.problems.append(
                "batches(1) depends on what was read before, so a resumed run would differ. Let it "
                "depend only on the seed and the epoch."
            )

    def _compare_seeds(self, weights: dict[str, Tensor], batches: list[Any]) -> None:
        other = self._setup(1)
        if other is None or _different(weights, other):
            return
        seed_all(seed_for(1, 0, "noise in the network"))
        with self._step("batches(0)"):
            found = list(islice(iter(self.task.batches(0)), COMPARED))
            if batches_of.same(batches, found):
                self.problems.append(
                    "Seeds 0 and 1 give the same weights and the same batches, so runs of several "
                    "seeds would be copies. Use the seed that setup() receives."
                )
            else:
                self.notices.append("All seeds start with the same weights.")


def _snapshot(model: nn.Module) -> dict[str, Tensor]:
    """Return copies of all weights and buffers, by name."""
    named = (*model.named_parameters(), *model.named_buffers())
    return {name: tensor.detach().clone() for name, tensor in named}


def _different(a: dict[str, Tensor], b: dict[str, Tensor]) -> list[str]:
    """Return the names of tensors that differ."""
    names = dict.fromkeys([*a, *b])
    return [n for n in names if n not in a or n not in b or not batches_of.same(a[n], b[n])]
