r"""The paper's learning-rate schedules: as pure functions, and as ``LRScheduler`` s that resume.

A function gives the factor of the initial rate at a time :math:`t` (epochs from 0, fractions
allowed). A scheduler multiplies each parameter group's initial rate by it; its unit of time is
whatever lies between two calls of its ``step()``. The paper's runs call it once an epoch.

>>> [round(linear(t, total=10), 3) for t in (0, 5, 7, 9, 10)]
[1.0, 1.0, 0.505, 0.01, 0.01]

>>> import torch
>>> optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
>>> scheduler = LinearForAveraging(optimizer, start=161)
>>> scheduler.get_last_lr()
[0.1]
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

__all__ = [
    "Constant",
    "FrozenLinear",
    "Linear",
    "LinearForAveraging",
    "Step",
    "constant",
    "frozen_linear",
    "linear",
    "linear_for_averaging",
    "step",
]


def constant(t: float) -> float:
    """The initial rate throughout: language models, GadamAuto."""
    return 1.0


def linear(t: float, total: float, final: float = 0.01) -> float:
    """1 until half of ``total``, then linear to ``final`` at nine tenths of it, then ``final``."""
    _check_positive(total=total)
    progress = t / total
    if progress <= 0.5:
        return 1.0
    if progress >= 0.9:
        return final
    return 1.0 - (1.0 - final) * (progress - 0.5) / 0.4


def linear_for_averaging(t: float, start: float, final: float = 0.5) -> float:
    """:func:`linear` with the start of averaging in place of the budget: ``final`` from 0.9 · start.

    The paper prints t/T in the middle branch, with which the rate would jump.
    """
    _check_positive(start=start)
    return linear(t, start, final)


def step(t: float, milestones: Sequence[float], gamma: float = 0.1) -> float:
    """``gamma`` to the number of milestones reached."""
    return gamma ** bisect_right(sorted(milestones), t)


def frozen_linear(t: float, total: float, freeze: float, final: float = 0.01) -> float:
    """:func:`linear` over ``total``, frozen at its value at ``freeze``, where averaging starts."""
    return linear(min(t, freeze), total, final)


def _check_positive(**values: float) -> None:
    for name, value in values.items():
        if not value > 0:
            raise ValueError(f"Invalid {name}: {value} (it must be positive)")


class _Factor(LRScheduler):
    """A scheduler from one of the functions above. Its state is plain values, so it resumes."""

    function: Callable[..., float]

    def __init__(self, optimizer: Optimizer, last_epoch: int, **arguments: Any) -> None:
        self.arguments = arguments
        type(self).function(0, **arguments)  # refuse bad arguments before any training
        super().__init__(optimizer, last_epoch)

    def get_lr(self) -> list[Any]:
        """The rates at the present time, in closed form."""
        factor = type(self).function(self.last_epoch, **self.arguments)
        return [base_lr * factor for base_lr in self.base_lrs]


class Constant(_Factor):
    """:func:`constant` as a scheduler.

    Args:
        optimizer: the optimiser whose rates to set
        last_epoch: as of torch's schedulers
    """

    function = staticmethod(constant)

    def __init__(self, optimizer: Optimizer, last_epoch: int = -1) -> None:
        super().__init__(optimizer, last_epoch)


class Linear(_Factor):
    """:func:`linear` as a scheduler.

    Args:
        optimizer: the optimiser whose rates to set
        total: the budget T
        final: the last factor r
        last_epoch: as of torch's schedulers
    """

    function = staticmethod(linear)

    def __init__(
        self, optimizer: Optimizer, total: float, final: float = 0.01, last_epoch: int = -1
    ) -> None:
        super().__init__(optimizer, last_epoch, total=total, final=final)


class LinearForAveraging(_Factor):
    """:func:`linear_for_averaging` as a scheduler.

    Args:
        optimizer: the optimiser whose rates to set
        start: when averaging starts, T_avg
        final: the factor while averaging
        last_epoch: as of torch's schedulers
    """

    function = staticmethod(linear_for_averaging)

    def __init__(
        self, optimizer: Optimizer, start: float, final: float = 0.5, last_epoch: int = -1
    ) -> None:
        super().__init__(optimizer, last_epoch, start=start, final=final)


class Step(_Factor):
    """:func:`step` as a scheduler.

    Args:
        optimizer: the optimiser whose rates to set
        milestones: when to multiply the rate by gamma
        gamma: that factor
        last_epoch: as of torch's schedulers
    """

    function = staticmethod(step)

    def __init__(
        self,
        optimizer: Optimizer,
        milestones: Sequence[float],
        gamma: float = 0.1,
        last_epoch: int = -1,
    ) -> None:
        super().__init__(optimizer, last_epoch, milestones=list(milestones), gamma=gamma)


class FrozenLinear(_Factor):
    """:func:`frozen_linear` as a scheduler.

    Args:
        optimizer: the optimiser whose rates to set
        total: the budget T
        freeze: when to freeze the rate
        final: the last factor r, were it not frozen
        last_epoch: as of torch's schedulers
    """

    function = staticmethod(frozen_linear)

    def __init__(
        self,
        optimizer: Optimizer,
        total: float,
        freeze: float,
        final: float = 0.01,
        last_epoch: int = -1,
    ) -> None:
        super().__init__(optimizer, last_epoch, total=total, freeze=freeze, final=final)
