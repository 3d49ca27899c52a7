"""From a recipe to an optimiser, its learning rates and its average."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal, Protocol

import torch
from torch import nn

import gadam
from gadam import schedule
from gadam.average.batchnorm import Batches
from gadam.train.recipe import Average, Recipe, RecipeError

__all__ = ["AveragedPoint", "build", "rate_factor"]


class AveragedPoint(Protocol):
    """What the loop wants of an average, whoever keeps it."""

    @property
    def count(self) -> int: ...

    @property
    def phase(self) -> str: ...

    def update(self) -> bool: ...

    def applied(self, model: nn.Module, batchnorm: Batches | None = None) -> Any: ...

    def observe(self, metric: float) -> bool: ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> None: ...


def rate_factor(recipe: Recipe, epoch: int) -> float:
    """By what the initial rate is multiplied in this epoch (from 0)."""
    plan, total = recipe.schedule, recipe.epochs
    given = {} if plan.final is None else {"final": plan.final}
    start = recipe.average.start if recipe.average is not None else None
    if plan.name == "linear":
        return schedule.linear(epoch, total, **given)
    if plan.name == "linear-ia":
        # Before its start an average that starts at once leaves nothing to decay.
        return schedule.linear_for_averaging(epoch, max(int(start or 0), 1), **given)
    if plan.name == "frozen-linear":
        return schedule.frozen_linear(epoch, total, int(start or 0), **given)
    if plan.name == "step":
        return schedule.step(epoch, plan.milestones)
    if plan.name == "cosine":
        final = plan.final or 0.0
        return final + (1 - final) * (1 + math.cos(math.pi * epoch / total)) / 2
    return schedule.constant(epoch)


def build(
    recipe: Recipe,
    model: nn.Module,
    steps_before: int,
    mode: Literal["max", "min"] = "max",
) -> tuple[torch.optim.Optimizer, AveragedPoint | None]:
    """The optimiser of the model's parameters, and the average of its iterates if there is one.

    Args:
        recipe: names them
        model: whose parameters
        steps_before: those in the epochs before averaging: a recipe counts epochs, an average steps
        mode: whether more or less of the validation metric is better, for triggers
    """
    plan = _averaging(recipe.average, steps_before, mode) if recipe.average else None
    optimizer = _base(recipe, [p for p in model.parameters() if p.requires_grad], plan)
    average: AveragedPoint | None = getattr(optimizer, "average", None) if plan else None
    if recipe.optimizer.name == "schedule-free":
        average = _ScheduleFreePoint(optimizer)
    elif plan is not None and average is None:
        average = gadam.IterateAverage(optimizer, plan)
    if recipe.optimizer.lookahead:
        optimizer = gadam.Lookahead(
            optimizer,
            recipe.optimizer.lookahead_k,
            recipe.optimizer.lookahead_alpha,
            until_average=isinstance(optimizer, gadam.Gadam | gadam.GadamX),
        )
    return optimizer, average


def _averaging(average: Average, steps_before: int, mode: Literal["max", "min"]) -> gadam.Averaging:
    # Once an epoch the loop samples itself: steps that a GradScaler skips would shift a fixed stride.
    every = None if average.every == "epoch" else average.every
    start: Any = {
        "plateau": gadam.Plateau(average.patience, mode),
        "non-monotone": gadam.NonMonotone(average.patience, mode),
    }.get(str(average.start))
    if isinstance(average.start, int):
        start = steps_before + (every or 1)
    weighting: Any = {
        "mean": gadam.Mean(),
        "ema": gadam.EMA(average.decay),
        "window": gadam.Window(average.size),
    }[average.weighting]
    return gadam.Averaging(start=start, every=every, weighting=weighting)


def _base(recipe: Recipe, params: list[nn.Parameter], plan: Any) -> torch.optim.Optimizer:
    o = recipe.optimizer
    common: dict[str, Any] = {"lr": o.lr, "weight_decay": o.weight_decay}
    adam: dict[str, Any] = {**common, "betas": o.betas, "eps": o.eps, "amsgrad": o.amsgrad}
    fused: dict[str, Any] = {"fused": True} if params[0].device.type in ("cpu", "cuda") else {}
    padam: dict[str, Any] = {**adam, "partial": o.partial, "form": o.form}
    makers: dict[str, Callable[[], torch.optim.Optimizer]] = {
        "sgd": lambda: torch.optim.SGD(params, momentum=o.momentum, **common),
        "asgd": lambda: torch.optim.SGD(params, **common),
        "adam": lambda: (
            gadam.Gadam(params, **adam, decoupled_weight_decay=False, average=plan)
            if plan
            else torch.optim.Adam(params, **adam, **fused)
        ),
        "adamw": lambda: (
            gadam.Gadam(params, **adam, form=o.form, average=plan)
            if plan
            else torch.optim.AdamW(params, **adam, **fused)
            if o.form == "official"
            else gadam.PadamW(params, **adam, partial=0.5, form=o.form)
        ),
        "padam": lambda: (
            gadam.GadamX(params, **padam, decoupled_weight_decay=False, average=plan)
            if plan
            else gadam.Padam(params, **padam)
        ),
        "padamw": lambda: (
            gadam.GadamX(params, **padam, average=plan) if plan else gadam.PadamW(params, **padam)
        ),
        "ranger": lambda: _ranger(
            params, o.lookahead_k, o.lookahead_alpha, **common, betas=o.betas
        ),
        "schedule-free": lambda: _schedule_free(params, **common, betas=o.betas, eps=o.eps),
    }
    return makers[o.name]()


def _ranger(
    params: list[nn.Parameter], k: int, alpha: float, **kwargs: Any
) -> torch.optim.Optimizer:
    """Lookahead around RAdam, with gradients centralised."""
    inner = torch.optim.RAdam(params, **kwargs)

    def centralise(*_: object) -> None:
        for p in params:
            if p.grad is not None and p.dim() > 1:
                p.grad -= p.grad.mean(dim=tuple(range(1, p.dim())), keepdim=True)

    inner.register_step_pre_hook(centralise)
    return gadam.Lookahead(inner, k, alpha)


def _schedule_free(params: list[nn.Parameter], **kwargs: Any) -> torch.optim.Optimizer:
    try:
        from schedulefree import AdamWScheduleFree
    except ImportError:
        raise RecipeError(
            "the method schedule-free needs its package: pip install schedulefree"
        ) from None
    optimizer: torch.optim.Optimizer = AdamWScheduleFree(params, **kwargs)
    optimizer.train()  # type: ignore[attr-defined]
    return optimizer


class _ScheduleFreePoint:
    """Schedule-Free's own average, which it swaps in for evaluation."""

    count = 1
    phase = "averaging"

    def __init__(self, optimizer: Any) -> None:
        self.optimizer = optimizer

    def update(self) -> bool:
        return False  # it is in every step

    @contextmanager
    def applied(self, model: nn.Module, batchnorm: Batches | None = None) -> Iterator[None]:
        # Its own way back rounds: who evaluates more often would train to other weights.
        kept = [(t, t.detach().clone()) for t in (*model.parameters(), *model.buffers())]
        self.optimizer.eval()
        try:
            if batchnorm is not None:
                gadam.refresh_batchnorm(model, batchnorm)
            yield
        finally:
            self.optimizer.train()
            with torch.no_grad():
                for tensor, value in kept:
                    tensor.copy_(value)

    def observe(self, metric: float) -> bool:
        return False

    def state_dict(self) -> dict[str, Any]:
        return {}  # it is the optimiser's

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        pass
