"""What is compared: base optimizers, learning-rate schedules, and averages along a run.

A method is a base with a schedule, such as "adamw cosine". Many averages are measured along one run
of it: they watch the iterates and do not change them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import gadam
from benchmarks.evidence.interpolation import VARIANTS, Interpolated, ema_coefficient
from gadam import schedule
from gadam.average.batchnorm import Batches

__all__ = [
    "AVERAGES",
    "BASES",
    "BEMA",
    "CURVES",
    "FORMS",
    "OWN_KNOB",
    "SCHEDULES",
    "Applied",
    "EvaluationPoint",
    "Knobs",
    "Muon",
    "averages_itself",
    "build",
    "own_point",
    "rate_factor",
]

Mode = Literal["max", "min"]
WARM_UP = 0.05  # of the steps, for every method
WSD_TAIL = 0.2  # of the steps

# ------------------------------------------------------------------------------------------- rates

SCHEDULES = ("cosine", "held", "eased", "wsd", "annealed", "linear", "cold")
EASED_START = 0.75  # where the average starts


def rate_factor(name: str, step: int, total: int) -> float:
    """Return the factor of the learning rate in a step.

    Every schedule but "cold" begins with a linear warm-up. A "held" rate stays at 1. "wsd" is the
    same and decays linearly to 0 at the end; it branches off a held rate, and "annealed" is a whole
    run. "linear" is the paper's: 1 for half of the run, then a linear decay to 0.01. "eased" is the
    paper's schedule for averaging, for an average of the last quarter: 1 at first, then a linear
    decay to half of the rate, which stays until the end. "cold" is 1 from the first step on.

    Args:
        name: One of :data:`SCHEDULES`.
        step: Counted from 1.
        total: The number of steps.
    """
    if name == "cold":
        return 1.0
    progress = (step - 1) / total
    warm = min(1.0, step / max(1.0, WARM_UP * total))
    if name == "cosine":
        return warm * (1 + math.cos(math.pi * progress)) / 2
    if name in ("wsd", "annealed"):
        return warm * min(1.0, (1 - progress) / WSD_TAIL)
    if name == "eased":
        return warm * schedule.linear_for_averaging(progress, EASED_START)
    if name == "linear":
        return warm * schedule.linear(progress, total=1)
    return warm


# ------------------------------------------------------------------------------------------- bases


@dataclass(frozen=True)
class Knobs:
    """The settings of a base that are tuned.

    Args:
        lr: The learning rate.
        weight_decay: L2 for SGD and "adam-l2", decoupled for the others.
        beta: The own knob of a base: see :data:`OWN_KNOB`. Others ignore it.
    """

    lr: float
    weight_decay: float
    beta: float = 0.9


BASES = (
    *("sgd", "adamw", "padamw", "muon", "adam-l2", "gadam-lookahead"),
    *("schedule-free-adamw", "schedule-free-sgd", "gpa", "gadam-between", "gadamx-between"),
)
INTERPOLATED = ("gadam-between", "gadamx-between")  # ours, with gradients toward the average
FORMS = ("padamw-amsgrad", "padamw-paper")  # PadamW with another update, to choose the default
# Own knobs, the authors' default first: the interpolation of Schedule-Free and of ours, and the
# decay of GPA's average (its authors recommend 0.9934 to 0.9984).
OWN_KNOB: dict[str, tuple[float, ...]] = {
    "schedule-free-adamw": (0.9, 0.95, 0.98),
    "schedule-free-sgd": (0.9, 0.95, 0.98),
    "gpa": (0.9967, 0.9934, 0.9984),
    **dict.fromkeys(INTERPOLATED, (0.9, 0.95, 0.98)),
}
GPA_INTERPOLATION = 0.7  # the authors' default


def averages_itself(base: str) -> bool:
    """Return True if a base is evaluated at an average of its own.

    Args:
        base: One of :data:`BASES`, or a variant of the ablation.
    """
    return base.startswith("schedule-free") or base in ("gpa", *INTERPOLATED, *VARIANTS)


def has_own_warm_up(base: str) -> bool:
    """Return True if a base warms up without a schedule.

    Args:
        base: One of :data:`BASES`, or a variant of the ablation.
    """
    return base.startswith("schedule-free")


def build(base: str, model: nn.Module, knobs: Knobs, total: int) -> Optimizer:
    """Build a base optimizer with the settings that its authors recommend.

    Args:
        base: One of :data:`BASES` or :data:`FORMS`, or a variant of the ablation.
        model: The model to optimize.
        knobs: The tuned settings.
        total: The number of steps.
    """
    params = [p for p in model.parameters() if p.requires_grad]
    lr, decay = knobs.lr, knobs.weight_decay
    warm_up = round(WARM_UP * total)
    if has_own_warm_up(base):
        import schedulefree
    if base in VARIANTS:
        variant = VARIANTS[base]
        inner = torch.optim.AdamW(
            params, lr, betas=(variant.momentum, 0.999), weight_decay=0.0, fused=True
        )
        least = ema_coefficient(total) if variant.late else 0.0
        return Interpolated(inner, variant.interpolation, decay, least=least)

    # The average starts after the warm-up. Interpolation takes the place of momentum.
    plan = gadam.Averaging(start=max(1, warm_up), interpolation=knobs.beta)
    # The reference implementation: a record does not depend on whether the kernel was built.
    reference: dict[str, Any] = {"weight_decay": decay, "foreach": False, "fused": False}
    between: dict[str, Any] = {"betas": (0.0, 0.999), "average": plan, **reference}
    makers: dict[str, Callable[[], Optimizer]] = {
        "gadam-between": lambda: gadam.Gadam(params, lr, **between),
        "gadamx-between": lambda: gadam.GadamX(params, lr, **between),
        "sgd": lambda: torch.optim.SGD(params, lr, momentum=0.9, weight_decay=decay),
        "adamw": lambda: torch.optim.AdamW(params, lr, weight_decay=decay, fused=True),
        "adam-l2": lambda: torch.optim.Adam(params, lr, weight_decay=decay, fused=True),
        "padamw": lambda: gadam.PadamW(params, lr, **reference),
        "padamw-amsgrad": lambda: gadam.PadamW(params, lr, amsgrad=True, **reference),
        "padamw-paper": lambda: gadam.PadamW(params, lr, form="paper", **reference),
        "muon": lambda: Muon(model, lr, decay),
        # The paper's Gadam + LH: Lookahead until the average starts.
        "gadam-lookahead": lambda: gadam.Lookahead(
            gadam.Gadam(
                params, lr, average=gadam.Averaging(start=_tail_start(total, 50)), **reference
            ),
            until_average=True,
        ),
        "gpa": lambda: Interpolated(
            torch.optim.AdamW(params, lr, weight_decay=0.0, fused=True),
            GPA_INTERPOLATION,
            decay,
            coefficient=1 - knobs.beta,
        ),
        "schedule-free-adamw": lambda: schedulefree.AdamWScheduleFree(
            params, lr, betas=(knobs.beta, 0.999), weight_decay=decay, warmup_steps=warm_up
        ),
        "schedule-free-sgd": lambda: schedulefree.SGDScheduleFree(
            params, lr, momentum=knobs.beta, weight_decay=decay, warmup_steps=warm_up
        ),
    }
    optimizer = makers[base]()
    if averages_itself(base) and base not in INTERPOLATED:
        optimizer.train()  # type: ignore[attr-defined]
    return optimizer


class Muon(Optimizer):
    """Muon for the weights of hidden layers, and AdamW for everything else, at one learning rate.

    The update of a hidden matrix is scaled to the usual size of AdamW's (Liu et al., 2025,
    arXiv 2502.16982), so that both share a rate. torch.optim.Muon takes only matrices: here, a
    convolution is one row per output. The orthogonalization is in float32, which is faster on a CPU
    than torch's bfloat16.

    Args:
        model: The model. Embeddings, the last linear layer, and vectors go to AdamW.
        lr: The learning rate.
        weight_decay: Decoupled, for all parameters.
        momentum: Nesterov momentum of the hidden matrices.
    """

    def __init__(
        self, model: nn.Module, lr: float, weight_decay: float, momentum: float = 0.95
    ) -> None:
        linear = [module for module in model.modules() if isinstance(module, nn.Linear)]
        embeddings = [module for module in model.modules() if isinstance(module, nn.Embedding)]
        # With tied embeddings, the last linear layer is a hidden one.
        outside = {id(module.weight) for module in embeddings or linear[-1:]}
        hidden: list[nn.Parameter] = []
        others: list[nn.Parameter] = []
        for p in model.parameters():
            (hidden if p.dim() >= 2 and id(p) not in outside else others).append(p)
        groups = [{"params": params} for params in (hidden, others) if params]
        super().__init__(groups, {"lr": lr, "weight_decay": weight_decay, "momentum": momentum})
        self.hidden = hidden
        self.adamw = torch.optim.AdamW(others, lr, weight_decay=weight_decay, fused=True)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Take a step.

        Args:
            closure: Not supported.
        """
        group = self.param_groups[0]
        lr, momentum = group["lr"], group["momentum"]
        for p in self.hidden:
            if p.grad is None:
                continue
            buffer = self.state[p].setdefault("momentum", torch.zeros_like(p))
            buffer.lerp_(p.grad, 1 - momentum)
            update = p.grad.lerp(buffer, momentum).flatten(1)
            scale = 0.2 * math.sqrt(max(update.shape))
            p.mul_(1 - lr * group["weight_decay"])
            p.add_(orthogonalized(update).view(p.shape), alpha=-lr * scale)
        for inner in self.adamw.param_groups:
            inner["lr"] = lr
        self.adamw.step()


def orthogonalized(matrix: Tensor) -> Tensor:
    """Return the matrix with all singular values moved near 1, by five Newton–Schulz iterations.

    Args:
        matrix: Any matrix.
    """
    wide = matrix if matrix.shape[0] <= matrix.shape[1] else matrix.t()
    x = wide / wide.norm().clamp(min=1e-7)
    for _ in range(5):
        gram = x @ x.t()
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return x if wide is matrix else x.t()


# ---------------------------------------------------------------------------------------- averages


class Applied(Protocol):
    """A point along a run other than the iterate."""

    @contextmanager
    def applied(self, model: nn.Module, batchnorm: Batches | None = None) -> Iterator[None]:
        """Put the point's weights into the model for a block.

        Args:
            model: The model.
            batchnorm: Data to recompute the BatchNorm statistics with.
        """
        ...


def _tail(percent: float) -> Callable[[int, Mode], gadam.Averaging]:
    """Average every iterate of the last steps."""
    return lambda total, _: gadam.Averaging(start=_tail_start(total, percent))


def _tail_start(total: int, percent: float) -> int:
    return total - max(1, round(total * percent / 100)) + 1


def _ema(decay: Callable[[int], float]) -> Callable[[int, Mode], gadam.Averaging]:
    return lambda total, _: gadam.Averaging(start=1, weighting=gadam.EMA(decay(total)))


def _lawa(total: int, _: Mode) -> gadam.Averaging:
    every = max(1, total // 100)
    return gadam.Averaging(start=every, every=every, weighting=gadam.Window(10))


# The average of each name: a function of the number of steps, and of whether more is better.
AVERAGES: dict[str, Callable[[int, Mode], gadam.Averaging]] = {
    "tail 0.3%": _tail(0.3),
    "tail 1%": _tail(1),
    "tail 3%": _tail(3),
    "tail 10%": _tail(10),
    "tail 25%": _tail(25),
    "half": _tail(50),
    "tail 75%": _tail(75),
    "half, paper's stride": lambda total, _: gadam.Averaging.for_budget(total, last=0.5),
    "half, linear weights": lambda total, _: gadam.Averaging(
        start=_tail_start(total, 50), weighting=gadam.LinearDecay()
    ),
    "ema 0.99": _ema(lambda _: 0.99),
    "ema 0.999": _ema(lambda _: 0.999),
    "ema 5%": _ema(lambda total: 1 - ema_coefficient(total)),  # its half-life
    "power ema": lambda *_: gadam.Averaging(start=1, weighting=gadam.PowerEMA(0.1)),
    "lawa": _lawa,
    "auto": lambda _, mode: gadam.Averaging(start=gadam.Plateau(2, mode)),
}
CURVES = ("half", "ema 5%", "auto")  # measured along the run, the others at its end


class BEMA:
    """Bias-corrected EMA (Block and Zhang, 2025, arXiv 2508.00180), from a step on.

    With the steps n since the start, the EMA takes each iterate with the weight (ρ + n)^-κ, and the
    point is the EMA plus (ρ + n)^-η times the way from the first iterate to the last.

    Args:
        optimizer: The optimizer whose iterates to average.
        start: The first step.
        kappa: The power κ of the EMA.
        eta: The power η of the correction.
        rho: The lag ρ.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        start: int,
        kappa: float = 0.5,
        eta: float = 0.2,
        rho: float = 10.0,
    ) -> None:
        self.params = [p for group in optimizer.param_groups for p in group["params"]]
        self.start, self.kappa, self.eta, self.rho = start, kappa, eta, rho
        self.steps = 0
        self.first: list[Tensor] = []
        self.ema: list[Tensor] = []
        optimizer.register_step_post_hook(self._after_step)

    @torch.no_grad()
    def _after_step(self, *_: object) -> None:
        self.steps += 1
        since = self.steps - self.start
        if since == 0:
            self.first = [p.clone() for p in self.params]
            self.ema = [p.clone() for p in self.params]
        elif since > 0:
            weight = (self.rho + since) ** -self.kappa
            torch._foreach_lerp_(self.ema, self.params, weight)

    @contextmanager
    def applied(self, model: nn.Module, batchnorm: Batches | None = None) -> Iterator[None]:
        """Put the point's weights into the model for a block.

        Args:
            model: The model.
            batchnorm: Data to recompute the BatchNorm statistics with.
        """
        alpha = (self.rho + self.steps - self.start) ** -self.eta
        with _restored(model), torch.no_grad():
            for p, ema, first in zip(self.params, self.ema, self.first):
                p.copy_(ema + alpha * (p - first))
            _refresh(model, batchnorm)
            yield


class EvaluationPoint:
    """The average that an optimizer keeps itself and swaps in for evaluation.

    Args:
        optimizer: Schedule-Free, or :class:`Interpolated`.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer

    @contextmanager
    def applied(self, model: nn.Module, batchnorm: Batches | None = None) -> Iterator[None]:
        """Put the point's weights into the model for a block.

        Args:
            model: The model.
            batchnorm: Data to recompute the BatchNorm statistics with.
        """
        # Its own way back rounds, so training would depend on how often it is evaluated.
        with _restored(model):
            self.optimizer.eval()  # type: ignore[attr-defined]
            try:
                _refresh(model, batchnorm)
                yield
            finally:
                self.optimizer.train()  # type: ignore[attr-defined]


class _Iterate:
    """The current weights, with refreshed BatchNorm statistics."""

    @contextmanager
    def applied(self, model: nn.Module, batchnorm: Batches | None = None) -> Iterator[None]:
        with _restored(model):
            _refresh(model, batchnorm)
            yield


def own_point(base: str, optimizer: Optimizer) -> Applied:
    """Return the point that a base itself ends at: the iterate, or its own average.

    Args:
        base: One of :data:`BASES`, or a variant of the ablation.
        optimizer: Its optimizer.
    """
    if base in INTERPOLATED:
        average: Applied = optimizer.average  # type: ignore[attr-defined]
        return average
    return EvaluationPoint(optimizer) if averages_itself(base) else _Iterate()


@contextmanager
def _restored(model: nn.Module) -> Iterator[None]:
    kept = [(t, t.detach().clone()) for t in (*model.parameters(), *model.buffers())]
    try:
        yield
    finally:
        with torch.no_grad():
            for tensor, value in kept:
                tensor.copy_(value)


def _refresh(model: nn.Module, batchnorm: Batches | None) -> None:
    if batchnorm is not None:
        gadam.refresh_batchnorm(model, batchnorm)
