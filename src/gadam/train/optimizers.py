"""Build the optimizer and the average that a recipe names."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Literal, Protocol

import torch
from torch import nn

import gadam
from gadam.average.batchnorm import BatchNorm
from gadam.runs.folder import State
from gadam.runs.recipe import Average, Recipe, RecipeError

__all__ = ["AveragedPoint", "build"]


class AveragedPoint(Protocol):
    """The interface of an average that the training loop uses."""

    @property
    def count(self) -> int:
        """The number of samples."""
        ...

    @property
    def phase(self) -> str:
        """The phase: "waiting", "averaging" or "finished"."""
        ...

    def update(self) -> bool:
        """Sample the current iterate."""
        ...

    def applied(
        self, model: nn.Module, batchnorm: BatchNorm = None
    ) -> AbstractContextManager[object]:
        """Put the averaged weights into the model for a block."""
        ...

    def observe(self, metric: float) -> bool:
        """Report a validation metric. Return True if training should stop."""
        ...

    def state_dict(self) -> State:
        """Return the state to save."""
        ...

    def load_state_dict(self, state_dict: State) -> None:
        """Restore what :meth:`state_dict` returned."""
        ...


def build(
    recipe: Recipe,
    model: nn.Module,
    steps_before: int,
    mode: Literal["max", "min"] = "max",
) -> tuple[torch.optim.Optimizer, AveragedPoint | None]:
    """Build the optimizer of the model's parameters, and the average of its iterates if any.

    Args:
        recipe: Names them.
        model: The model to optimize.
        steps_before: Steps in the epochs before averaging: recipes count epochs, averages steps.
        mode: "max" or "min": whether more or less of the validation metric is better.

    Returns:
        The optimizer, and the average or None.
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
    # The loop itself samples once per epoch: steps that GradScaler skips would shift a stride.
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
    """Return Lookahead around RAdam with centralized gradients."""
    inner = torch.optim.RAdam(params, **kwargs)

    def centralize(*_: object) -> None:
        for p in params:
            if p.grad is not None and p.dim() > 1:
                p.grad -= p.grad.mean(dim=tuple(range(1, p.dim())), keepdim=True)

    inner.register_step_pre_hook(centralize)
    return gadam.Lookahead(inner, k, alpha)


def _schedule_free(params: list[nn.Parameter], **kwargs: Any) -> torch.optim.Optimizer:
    try:
        from schedulefree import AdamWScheduleFree
    except ImportError:
        raise RecipeError(
            "The method schedule-free needs a package: pip install schedulefree"
        ) from None
    optimizer: torch.optim.Optimizer = AdamWScheduleFree(params, **kwargs)
    optimizer.train()  # type: ignore[attr-defined]
    return optimizer


class _ScheduleFreePoint:
    """Schedule-Free's own average, which the optimizer swaps in for evaluation."""

    count = 1
    phase = "averaging"

    def __init__(self, optimizer: Any) -> None:
        self.optimizer = optimizer

    def update(self) -> bool:
        return False  # every step updates it

    @contextmanager
    def applied(self, model: nn.Module, batchnorm: BatchNorm = None) -> Iterator[None]:
        # Its own way back rounds, so training would depend on how often it is evaluated.
        kept = [(t, t.detach().clone()) for t in (*model.parameters(), *model.buffers())]
        self.optimizer.eval()
        try:
            if batchnorm is not None and batchnorm is not False:
                gadam.refresh_batchnorm(model, batchnorm)
            yield
        finally:
            self.optimizer.train()
            with torch.no_grad():
                for tensor, value in kept:
                    tensor.copy_(value)

    def observe(self, metric: float) -> bool:
        return False

    def state_dict(self) -> State:
        return {}  # the optimizer holds it

    def load_state_dict(self, state_dict: State) -> None:
        pass
