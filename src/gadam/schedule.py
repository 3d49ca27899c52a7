r"""Learning-rate schedules of the paper, as pure functions and as resumable ``LRScheduler`` s.

A function returns the factor of the initial learning rate at a time :math:`t`, counted in epochs
from 0; fractions are allowed. A scheduler multiplies each parameter group's initial learning rate
by that factor. Its unit of time is one call of ``step()``; the paper's runs call it once per epoch.

Example:
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
from numbers import Real
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
    """Return 1 at all times, as for language models and GadamAuto.

    Args:
        t: The time in epochs.
    """
    return 1.0


def linear(t: float, total: float, final: float = 0.01) -> float:
    r"""Return the factor of the paper's linear schedule.

    .. math::
        \begin{cases}
            1 & t/T \le 0.5 \\
            1 - (1 - r)\,(t/T - 0.5)/0.4 & 0.5 < t/T < 0.9 \\
            r & t/T \ge 0.9
        \end{cases}

    Args:
        t: The time in epochs.
        total: The budget :math:`T` in epochs.
        final: The last factor :math:`r`.
    """
    _check_positive(total=total)
    progress = t / total
    if progress <= 0.5:
        return 1.0
    if progress >= 0.9:
        return final
    return 1.0 - (1.0 - final) * (progress - 0.5) / 0.4


def linear_for_averaging(t: float, start: float, final: float = 0.5) -> float:
    r"""Return :func:`linear` with the start of averaging :math:`T_{avg}` in place of the budget.

    The factor reaches ``final`` at :math:`0.9\,T_{avg}` and stays there. The paper prints
    :math:`t/T` in the middle branch; with it, the learning rate would jump.

    Args:
        t: The time in epochs.
        start: The start of averaging :math:`T_{avg}` in epochs.
        final: The factor while averaging.
    """
    _check_positive(start=start)
    return linear(t, start, final)


def step(t: float, milestones: Sequence[float], gamma: float = 0.1) -> float:
    """Return ``gamma`` to the power of the number of milestones reached.

    Args:
        t: The time in epochs.
        milestones: The times in epochs at which to multiply the learning rate by ``gamma``.
        gamma: The factor per milestone.
    """
    return gamma ** bisect_right(sorted(milestones), t)


def frozen_linear(t: float, total: float, freeze: float, final: float = 0.01) -> float:
    """Return :func:`linear`, frozen at the value it has when averaging starts.

    Args:
        t: The time in epochs.
        total: The budget in epochs.
        freeze: The time in epochs at which to freeze the factor.
        final: The last factor of the schedule that is not frozen.
    """
    return linear(min(t, freeze), total, final)


def _check_positive(**values: float) -> None:
    for name, value in values.items():
        if not isinstance(value, Real):
            raise TypeError(f"Invalid {name}: {value!r}. {name} must be a number.")
        if not value > 0:
            raise ValueError(f"Invalid {name}: {value}. {name} must be positive.")


class _Factor(LRScheduler):
    """A scheduler that applies one of the functions above.

    Its state consists of plain values, so it resumes from a ``state_dict``.
    """

    function: Callable[..., float]

    def __init__(self, optimizer: Optimizer, last_epoch: int, **arguments: Any) -> None:
        self.arguments = arguments
        type(self).function(0, **arguments)  # reject bad arguments before training starts
        super().__init__(optimizer, last_epoch)

    def get_lr(self) -> list[Any]:
        """Return the learning rate of each parameter group at the current time."""
        factor = type(self).function(self.last_epoch, **self.arguments)
        return [base_lr * factor for base_lr in self.base_lrs]


class Constant(_Factor):
    """Keep the initial learning rate: :func:`constant` as a scheduler.

    Args:
        optimizer: The optimizer to schedule.
        last_epoch: The index of the last epoch, as in torch's schedulers.

    Example:
        >>> import torch
        >>> optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
        >>> Constant(optimizer).get_last_lr()
        [0.1]
    """

    function = staticmethod(constant)

    def __init__(self, optimizer: Optimizer, last_epoch: int = -1) -> None:
        super().__init__(optimizer, last_epoch)


class Linear(_Factor):
    """Decay the learning rate linearly: :func:`linear` as a scheduler.

    Args:
        optimizer: The optimizer to schedule.
        total: The budget :math:`T` in calls of ``step()``.
        final: The last factor :math:`r`.
        last_epoch: The index of the last epoch, as in torch's schedulers.

    Example:
        >>> import torch
        >>> optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
        >>> scheduler = Linear(optimizer, total=10)
        >>> for _ in range(9):
        ...     optimizer.step()
        ...     scheduler.step()
        >>> scheduler.get_last_lr()
        [0.001]
    """

    function = staticmethod(linear)

    def __init__(
        self, optimizer: Optimizer, total: float, final: float = 0.01, last_epoch: int = -1
    ) -> None:
        super().__init__(optimizer, last_epoch, total=total, final=final)


class LinearForAveraging(_Factor):
    """Decay until averaging starts: :func:`linear_for_averaging` as a scheduler.

    Args:
        optimizer: The optimizer to schedule.
        start: The start of averaging :math:`T_{avg}` in calls of ``step()``.
        final: The factor while averaging.
        last_epoch: The index of the last epoch, as in torch's schedulers.

    Example:
        >>> import torch
        >>> optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
        >>> scheduler = LinearForAveraging(optimizer, start=10)
        >>> for _ in range(9):
        ...     optimizer.step()
        ...     scheduler.step()
        >>> scheduler.get_last_lr()
        [0.05]
    """

    function = staticmethod(linear_for_averaging)

    def __init__(
        self, optimizer: Optimizer, start: float, final: float = 0.5, last_epoch: int = -1
    ) -> None:
        super().__init__(optimizer, last_epoch, start=start, final=final)


class Step(_Factor):
    """Multiply the learning rate at milestones: :func:`step` as a scheduler.

    Args:
        optimizer: The optimizer to schedule.
        milestones: The calls of ``step()`` at which to multiply the learning rate by ``gamma``.
        gamma: The factor per milestone.
        last_epoch: The index of the last epoch, as in torch's schedulers.

    Example:
        >>> import torch
        >>> optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
        >>> Step(optimizer, milestones=[150, 250]).get_last_lr()
        [0.1]
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
    """Decay, then freeze when averaging starts: :func:`frozen_linear` as a scheduler.

    Args:
        optimizer: The optimizer to schedule.
        total: The budget :math:`T` in calls of ``step()``.
        freeze: The call of ``step()`` at which to freeze the learning rate.
        final: The last factor :math:`r` of the schedule that is not frozen.
        last_epoch: The index of the last epoch, as in torch's schedulers.

    Example:
        >>> import torch
        >>> optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
        >>> FrozenLinear(optimizer, total=50, freeze=30).get_last_lr()
        [0.1]
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
