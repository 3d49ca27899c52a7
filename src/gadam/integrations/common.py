"""What the integrations share: which average a trainer uses, and errors."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.optim import Optimizer

from gadam._errors import UserError
from gadam.average import Averaging, IterateAverage, average_of
from gadam.average.wrappers import unwrapped

__all__ = [
    "FrameworkError",
    "attach",
    "check_average",
    "continue_at",
    "count_from_zero",
    "missing",
    "preserved_rng",
]


class FrameworkError(UserError):
    """The framework and the average do not work together as they are set up."""


def missing(package: str, extra: str) -> ImportError:
    """Return the error for a framework that is not installed.

    Args:
        package: The package that cannot be imported.
        extra: The extra of gadam that installs it.
    """
    return ImportError(
        f"gadam.integrations.{extra} needs {package}, which is not installed. Run "
        f"`pip install 'gadam[{extra}]'`."
    )


def check_average(average: object) -> None:
    """Refuse what is not an average, such as its optimizer.

    Args:
        average: What the user passed as the average.

    Raises:
        FrameworkError: If it is not an :class:`gadam.IterateAverage`.
    """
    if isinstance(average, IterateAverage):
        return
    if isinstance(getattr(average, "average", None), IterateAverage):
        hint = "Pass optimizer.average."
    else:
        hint = "Create one: gadam.IterateAverage(optimizer, plan)."
    raise FrameworkError(
        f"average must be a gadam.IterateAverage, got {type(average).__name__}. {hint}"
    )


def attach(
    optimizer: Optimizer | list[Optimizer], averaging: Averaging | None, steps: int
) -> IterateAverage:
    """Return the average that a trainer uses: the optimizer's own, or a new one.

    An average of only some of several optimizers is not used, but its plan is.

    Args:
        optimizer: The optimizer of the trainer, which may be wrapped, or all of them.
        averaging: The plan. None means the plan of the optimizer's own average, or
            :meth:`gadam.Averaging.for_budget` if it has none or never got a plan.
        steps: The number of optimizer steps of the whole training.

    Example:
        >>> import torch, gadam
        >>> params = list(torch.nn.Linear(4, 1).parameters())
        >>> optimizer = gadam.Gadam(params, average=gadam.Averaging(start=5))
        >>> attach(optimizer, None, steps=100) is optimizer.average
        True
        >>> attach(torch.optim.SGD(params, lr=0.1), None, steps=100).averaging.start
        75
    """
    own = average_of(optimizer)
    if own is not None:
        planned = own.averaging != Averaging() or own.phase != "waiting" or own.count > 0
        if averaging is None and planned:
            averaging = own.averaging
        several = optimizer if isinstance(optimizer, list) else [optimizer]
        is_whole = len(several) == 1 or set(map(unwrapped, several)) == set(own.optimizers)
        if averaging == own.averaging and is_whole:
            return own
    return IterateAverage(optimizer, averaging or Averaging.for_budget(max(steps, 1)))


def continue_at(average: IterateAverage, steps: int) -> None:
    """Tell an average about the steps before it was attached, unless it has counted them.

    Training may continue from a checkpoint without an average. The states of some optimizers, such
    as Adam, have the number of their steps. Those of others, such as SGD, have not.

    Args:
        average: The average.
        steps: The number of optimizer steps so far.

    Example:
        >>> import torch, gadam
        >>> weight = torch.nn.Parameter(torch.ones(3))
        >>> sgd = torch.optim.SGD([weight], lr=0.1)
        >>> average = gadam.IterateAverage(sgd, gadam.Averaging(start=100))
        >>> continue_at(average, 120)
        >>> weight.sum().backward()
        >>> sgd.step()
        >>> average.count
        1
    """
    clock = average._state.tracker.clock
    phase, known, begun = clock.get()
    if not known:
        clock.set((phase, steps, begun))


def count_from_zero(average: IterateAverage) -> None:
    """Let an empty average count steps from 0, although its optimizer has already trained.

    Args:
        average: The average.

    Example:
        >>> import torch, gadam
        >>> weight = torch.nn.Parameter(torch.ones(3))
        >>> adamw = torch.optim.AdamW([weight])
        >>> weight.grad = torch.ones(3)
        >>> adamw.step()
        >>> average = gadam.IterateAverage(adamw, gadam.Averaging(start=2))
        >>> count_from_zero(average)
        >>> adamw.step()  # the first step of another training
        >>> average.count
        0
    """
    average._state.tracker.progress = average._state.initial_progress


@contextmanager
def preserved_rng() -> Iterator[None]:
    """Restore the random states of torch, numpy, and Python when the block ends.

    An extra pass over the training data draws random numbers. Without this, training would
    continue with other ones.

    Example:
        >>> import torch
        >>> state = torch.get_rng_state()
        >>> with preserved_rng():
        ...     noise = torch.randn(3)
        >>> torch.equal(torch.get_rng_state(), state)
        True
    """
    numpy: Any = sys.modules.get("numpy")
    device: Any = torch.get_device_module()  # of the current accelerator, or torch.cpu
    python, host = random.getstate(), torch.get_rng_state()
    on_device = device.get_rng_state() if hasattr(device, "get_rng_state") else None
    in_numpy = numpy.random.get_state() if numpy is not None else None
    try:
        yield
    finally:
        random.setstate(python)
        torch.set_rng_state(host)
        if on_device is not None:
            device.set_rng_state(on_device)
        if in_numpy is not None:
            numpy.random.set_state(in_numpy)
