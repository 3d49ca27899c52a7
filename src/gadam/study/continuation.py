"""Continue a run from one of its points, as the run itself would, without touching its folder."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from gadam._torch import tree_leaves
from gadam.study.part import Study
from gadam.study.points import Point
from gadam.study.settings import StudyError
from gadam.train import optimizers, tasks
from gadam.train.tasks import batch as batches_of

__all__ = ["Continuation", "EpochData", "Method"]

_MAX_ELEMENTS = 2**26  # of batches that are kept in memory


class Method(NamedTuple):
    """The optimizer of a run, as the theory sees it.

    Args:
        momentum: μ, or β₁ of Adam.
        dampening: 0 for SGD, β₁ for Adam.
        weight_decay: γ.
        decoupled: The weight decay is not part of the gradient.
        scale: The square root of the factor that multiplies each gradient; None for SGD.
        velocity: The momentum buffer; None if there is none.
    """

    momentum: float
    dampening: float
    weight_decay: float
    decoupled: bool
    scale: Tensor | None
    velocity: Tensor | None


class EpochData:
    """The training batches of an epoch, the same ones each time. Small ones stay in memory.

    Args:
        study: The run.
        epoch: Counted from 0.
        examples: Stop after this many examples, rounded up to whole batches. None for all.
    """

    def __init__(self, study: Study, epoch: int, examples: int | None = None) -> None:
        self._study, self._epoch, self._examples = study, epoch, examples
        self._batches: list[Any] | None = None

    def __iter__(self) -> Iterator[Any]:
        if self._batches is not None:
            for batch in self._batches:
                self._study.check_stop()
                yield batch
            return
        kept: list[Any] | None = []
        elements = seen = 0
        for batch in _batches(self._study, self._epoch):
            if self._examples is not None and seen >= self._examples:
                break
            self._study.check_stop()
            seen += batches_of.size(batch)
            elements += sum(leaf.numel() for leaf in tree_leaves(batch) if torch.is_tensor(leaf))
            if kept is not None:
                kept = [*kept, batch] if elements <= _MAX_ELEMENTS else None
            yield batch
        self._batches = kept


def _batches(study: Study, epoch: int) -> Iterator[Any]:
    """Iterate over the batches of an epoch as the training loop does."""
    tasks.seed_all(tasks.seed_for(study.run.seed, epoch, "noise in the network"))
    yield from study.points.task.batches(epoch)


class Continuation:
    """A run that continues from a point.

    Args:
        study: The run.
        point: The point: the last iterate, or an iterate that was kept. The optimizer's state is
            that of the last checkpoint. From an earlier iterate, momentum starts from zero.

    Attributes:
        epoch: The epochs before the point.
        steps: Steps per epoch.
        model: The run's model.

    Raises:
        StudyError: The run's optimizer is not one that the theory describes.
    """

    def __init__(self, study: Study, point: Point) -> None:
        self.study, self.point = study, point
        points, recipe = study.points, study.points.recipe
        name = recipe.optimizer.name
        if name in ("ranger", "schedule-free") or recipe.optimizer.lookahead:
            raise StudyError(f"There are no predictions for {name} or for Lookahead.")
        self.epoch = points.epochs if point == "iterate" else int(point)
        self.task, self.model = points.task, points.model
        self.steps = self.task.steps(self.epoch)
        self._weights = copy.deepcopy(points.weights(point))
        before = tasks.steps_before_averaging(recipe, self.task)
        self._optimizer, _ = optimizers.build(recipe, self.model, before, self.task.mode)
        self._state = points.optimizer_state
        self._params = [p for p in self.model.parameters() if p.requires_grad]
        if point != "iterate":
            for state in self._state["state"].values():
                for key in ("momentum_buffer", "exp_avg"):
                    if torch.is_tensor(state.get(key)):
                        state[key] = torch.zeros_like(state[key])

    def reset(self) -> None:
        """Return to the point."""
        self.model.load_state_dict(self._weights)
        self._optimizer.load_state_dict(copy.deepcopy(self._state))

    def flat(self) -> Tensor:
        """Return the weights as one vector."""
        return torch.cat([p.detach().flatten() for p in self._params]).double()

    def gradient(self) -> Tensor:
        """Return the gradient of the last step as one vector."""
        grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in self._params]
        return torch.cat([g.flatten() for g in grads]).double()

    def load(self, weights: Tensor) -> None:
        """Write a vector of weights into the model.

        Args:
            weights: What :meth:`flat` returned, or an average of it.
        """
        with torch.no_grad():
            sizes = [p.numel() for p in self._params]
            for p, value in zip(self._params, torch.split(weights, sizes)):
                p.copy_(value.view_as(p))

    def method(self) -> Method:
        """Return the optimizer as the theory sees it."""
        self.reset()
        settings = self.study.points.recipe.optimizer
        states = [self._optimizer.state[p] for p in self._params]

        def flat(key: str) -> Tensor | None:
            if any(not torch.is_tensor(state.get(key)) for state in states):
                return None
            return torch.cat([state[key].flatten() for state in states])

        if settings.name in ("sgd", "asgd"):
            momentum = settings.momentum if settings.name == "sgd" else 0.0
            return Method(
                momentum, 0.0, settings.weight_decay, False, None, flat("momentum_buffer")
            )
        second = flat("max_exp_avg_sq") if settings.amsgrad else flat("exp_avg_sq")
        if second is None:
            raise StudyError("The checkpoint has no second moments of the gradients.")
        beta1, beta2 = settings.betas
        correction = 1 - beta2 ** float(states[0]["step"])
        exponent = settings.partial if settings.name.startswith("padam") else 0.5
        if settings.form == "paper" and settings.name != "adam":
            corrected = second if settings.amsgrad else second / correction
            divisor = (corrected + settings.eps).pow(exponent)
        elif exponent == 0.5:
            divisor = (second / correction).sqrt() + settings.eps
        else:
            divisor = (second.sqrt() + settings.eps).pow(2 * exponent) / correction**0.5
        decoupled = settings.name.endswith("w")
        return Method(
            beta1,
            beta1,
            settings.weight_decay,
            decoupled,
            divisor.pow(-0.5),
            flat("exp_avg"),
        )

    def run(
        self,
        epochs: Iterable[tuple[int, float]],
        before_step: Callable[[nn.Module, Any], None] = lambda model, batch: None,
    ) -> Iterator[int]:
        """Train from the point, and yield the number of steps done after each.

        Args:
            epochs: The number of each epoch, counted from 0, and its learning rate.
            before_step: Called with the model in training mode and the batch that follows this one
                in the epoch, before each step.
        """
        self.reset()
        recipe = self.study.points.recipe
        done = 0
        for epoch, rate in epochs:
            for batch, following in _with_next(_batches(self.study, epoch)):
                self.study.check_stop()
                self.model.train()
                before_step(self.model, following)
                for group in self._optimizer.param_groups:
                    group["lr"] = rate * self.task.rate_factor(batch)
                self._optimizer.zero_grad()
                for micro_batch, share in self.task.micro_batches(batch, recipe.accumulate):
                    loss, _ = self.task.loss(self.model, micro_batch)
                    (loss * share).backward()  # type: ignore[no-untyped-call]
                if recipe.clip_grad_norm is not None:
                    nn.utils.clip_grad_norm_(self._params, recipe.clip_grad_norm)
                self._optimizer.step()
                done += 1
                yield done

    def noise(self, epoch: int, rate: float) -> Iterator[tuple[Tensor, int]]:
        """Train for an epoch, and yield (g − g')/√2 for pairs of batches at the same weights.

        Each has the variance of a batch gradient, with augmentation and dropout as in training.

        Args:
            epoch: Counted from 0.
            rate: The learning rate.

        Yields:
            The difference, and the number of examples per batch.
        """
        previous: list[tuple[Tensor, int]] = []

        def gradient(model: nn.Module, batch: Any) -> None:
            loss, size = self.task.loss(model, batch)
            grads = torch.autograd.grad(loss, self._params, allow_unused=True)
            flat = [torch.zeros_like(p) if g is None else g for g, p in zip(grads, self._params)]
            previous[:] = [(torch.cat([g.flatten() for g in flat]), size)]

        for _ in self.run([(epoch, rate)], gradient):
            other, size = previous[0]
            yield (self.gradient() - other) / 2**0.5, size


def _with_next(batches: Iterator[Any]) -> Iterator[tuple[Any, Any]]:
    """Yield each batch with the one after it, and the last one with the first."""
    first = current = next(batches, None)
    if first is None:
        return
    for following in batches:
        yield current, following
        current = following
    yield current, first
