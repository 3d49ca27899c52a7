"""Averaging plans: which iterates enter the average, and with what weight.

Everything here is a small frozen value. :class:`gadam.IterateAverage` carries a plan out.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from numbers import Integral
from typing import ClassVar, Literal, TypeGuard

import torch

__all__ = ["EMA", "Averaging", "Mean", "NonMonotone", "Plateau", "Trigger", "Window"]


# ------------------------------------------------------------------------------------ weightings


@dataclass(frozen=True)
class Mean:
    r"""Weight all samples equally: the paper's iterate averaging, and the default.

    .. math::
        \bar\theta_n = \bar\theta_{n-1} + \tfrac1n (\theta_n - \bar\theta_{n-1})

    Attributes:
        copies: The number of copies of the weights that the average stores.

    Example:
        >>> import gadam
        >>> gadam.Averaging(start=100, weighting=gadam.Mean()).weighting.weight(4)
        0.25
    """

    copies: ClassVar[int] = 1

    def weight(self, count: int) -> float:
        """Return the weight of the last of ``count`` samples; the others keep their proportions.

        Args:
            count: The number of samples, the new one included.
        """
        return 1 / count


@dataclass(frozen=True)
class EMA:
    r"""Weight samples exponentially, without bias toward the start.

    Sample :math:`i` of :math:`n` has the weight :math:`\rho^{n-i} / \sum_j \rho^{n-j}`. The common
    EMA gives its initial value the weight :math:`\rho^n`. This one does not have an initial value:
    after one sample, the average is that sample.

    Args:
        decay: The decay :math:`\rho` in (0, 1), per sample. A sample is not a step unless the plan
            has ``every=1``.

    Attributes:
        copies: The number of copies of the weights that the average stores.

    Example:
        >>> import gadam
        >>> plan = gadam.Averaging(start=1, weighting=gadam.EMA(0.999))
        >>> plan.weighting.weight(1)
        1.0
    """

    decay: float = 0.999
    copies: ClassVar[int] = 1

    def __post_init__(self) -> None:
        if not 0.0 < self.decay < 1.0:
            raise ValueError(f"Invalid decay: {self.decay}. decay must be in (0, 1).")

    def weight(self, count: int) -> float:
        """Return the weight of the last of ``count`` samples; the others keep their proportions.

        Args:
            count: The number of samples, the new one included.
        """
        # (1 - ρ) / (1 - ρ^n), without cancellation as ρ → 1
        log_decay = math.log(self.decay)
        return math.expm1(log_decay) / math.expm1(count * log_decay)


@dataclass(frozen=True)
class Window:
    r"""Weight the last samples equally and drop the older ones (LAWA).

    .. math::
        \bar\theta_n = \tfrac1k \sum_{i=n-k+1}^{n} \theta_i

    Args:
        size: The number of samples :math:`k`. The average stores this many copies of the weights.

    Example:
        >>> import gadam
        >>> gadam.Averaging(start=1, every=100, weighting=gadam.Window(6)).weighting.copies
        6

    Reference: Kaddour, *Stop Wasting My Time! Saving Days of ImageNet and BERT Training with Latest
    Weight Averaging* (arXiv 2209.14981).
    """

    size: int

    def __post_init__(self) -> None:
        if not _is_int(self.size) or self.size < 1:
            raise ValueError(
                f"Invalid window size: {self.size!r}. size must be a positive integer."
            )

    @property
    def copies(self) -> int:
        """The number of copies of the weights that the average stores."""
        return self.size

    def weight(self, count: int) -> float:
        """Return 1: a sample replaces the oldest copy.

        Args:
            count: The number of samples, the new one included.
        """
        return 1.0


Weighting = Mean | EMA | Window


# -------------------------------------------------------------------------------------- triggers

TriggerState = tuple[float, ...]
Verdict = Literal["begin", "finish"] | None


@dataclass(frozen=True)
class Plateau:
    """Start averaging, and later stop, when a metric no longer improves: GadamAuto, SWA-Auto.

    Averaging starts after ``patience`` observations without a new best. The trigger then forgets
    the best. The average is finished after ``patience`` further observations without a new best,
    now of the averaged weights.

    Args:
        patience: The number of observations without improvement to wait for.
        mode: ``"max"`` if a larger metric is better (accuracy), ``"min"`` if a smaller one is.

    Example:
        >>> import torch, gadam
        >>> model = torch.nn.Linear(4, 1)
        >>> plan = gadam.Averaging(start=gadam.Plateau(patience=2))
        >>> optimizer = gadam.Gadam(model.parameters(), average=plan)
        >>> for accuracy in (0.7, 0.6, 0.6):
        ...     stop = optimizer.average.observe(accuracy)
        >>> optimizer.average.phase
        'averaging'
    """

    patience: int = 10
    mode: Literal["max", "min"] = "max"

    def __post_init__(self) -> None:
        if not _is_int(self.patience) or self.patience < 1:
            raise ValueError(
                f"Invalid patience: {self.patience!r}. patience must be a positive integer."
            )
        _check_mode(self.mode)

    @property
    def initial_state(self) -> TriggerState:
        """The state before any observation: the best metric and the observations since."""
        return (_worst(self.mode), 0.0)

    def update(
        self, state: TriggerState, metric: float, averaging: bool
    ) -> tuple[TriggerState, Verdict]:
        """Process one observation.

        Args:
            state: The state after the previous observation.
            metric: The new observation.
            averaging: Whether averaging has started.

        Returns:
            The new state, and what to do.
        """
        best, waited = state
        if _better(metric, best, self.mode):
            return (metric, 0.0), None
        if waited + 1 < self.patience:
            return (best, waited + 1), None
        return self.initial_state, "finish" if averaging else "begin"


@dataclass(frozen=True)
class NonMonotone:
    """Start averaging by the rule of NT-ASGD.

    Averaging starts when the metric is worse than the best of all observations except the last
    ``interval``. It does not stop.

    Args:
        interval: The non-monotone interval n.
        mode: ``"min"`` if a smaller metric is better (perplexity), ``"max"`` if a larger one is.

    Example:
        >>> import torch, gadam
        >>> model = torch.nn.Linear(4, 1)
        >>> plan = gadam.Averaging(start=gadam.NonMonotone(interval=2))
        >>> optimizer = gadam.Gadam(model.parameters(), average=plan)
        >>> for perplexity in (90.0, 80.0, 85.0, 91.0):
        ...     stop = optimizer.average.observe(perplexity)
        >>> optimizer.average.phase
        'averaging'

    Reference: Merity, Keskar, Socher, *Regularizing and Optimizing LSTM Language Models*
    (arXiv 1708.02182).
    """

    interval: int = 5
    mode: Literal["max", "min"] = "min"

    def __post_init__(self) -> None:
        if not _is_int(self.interval) or self.interval < 1:
            raise ValueError(
                f"Invalid interval: {self.interval!r}. interval must be a positive integer."
            )
        _check_mode(self.mode)

    @property
    def initial_state(self) -> TriggerState:
        """The state before any observation.

        The state is the best of all observations except the last ``interval``, then those.
        """
        return (_worst(self.mode),) * (1 + self.interval)

    def update(
        self, state: TriggerState, metric: float, averaging: bool
    ) -> tuple[TriggerState, Verdict]:
        """Process one observation.

        Args:
            state: The state after the previous observation.
            metric: The new observation.
            averaging: Whether averaging has started.

        Returns:
            The new state, and what to do.
        """
        best, oldest, *newer = state
        if averaging:
            return self.initial_state, None
        if _better(best, metric, self.mode):
            return self.initial_state, "begin"
        return (oldest if _better(oldest, best, self.mode) else best, *newer, metric), None


Trigger = Plateau | NonMonotone


def _worst(mode: str) -> float:
    return -math.inf if mode == "max" else math.inf


def _better(a: float, b: float, mode: str) -> bool:
    return a > b if mode == "max" else a < b


def _check_mode(mode: object) -> None:
    if mode not in ("max", "min"):
        raise ValueError(f"Invalid mode: {mode!r}. mode must be 'max' or 'min'.")


# ------------------------------------------------------------------------------------------ plan


@dataclass(frozen=True)
class Averaging:
    """A plan: which iterates enter the average, and with what weight.

    Args:
        start: The first step to sample. Steps count 1, 2, …; 0 means 1, because the initial weights
            never enter. Or a trigger (:class:`Plateau`, :class:`NonMonotone`) that finds the start
            from the metrics passed to ``observe()``. None waits for ``begin()``.
        every: Sample every ``every``-th step from the start on. None leaves sampling to
            ``update()``, which samples at every call, before the start too.
        weighting: :class:`Mean` (default), :class:`EMA` or :class:`Window`.
        dtype: The type of the average. None means float32 for half-precision weights and the
            weights' own type otherwise. A float32 mean of float32 weights stops resolving new
            samples after about 10⁵ of them: sample less often, or use float64.
        device: The device of the average. None means the weights' own device.

    Example:
        >>> import gadam
        >>> gadam.Averaging(start=60_000, every=391)
        Averaging(start=60000, every=391, weighting=Mean(), dtype=None, device=None)
    """

    start: int | Trigger | None = None
    every: int | None = 1
    weighting: Weighting = field(default_factory=Mean)
    dtype: torch.dtype | None = None
    device: torch.device | str | None = None

    def __post_init__(self) -> None:
        if not (
            self.start is None
            or isinstance(self.start, Trigger)
            or (_is_int(self.start) and self.start >= 0)
        ):
            raise ValueError(
                f"Invalid start: {self.start!r}. start must be a step number, a trigger such as "
                "Plateau(), or None."
            )
        if not (self.every is None or (_is_int(self.every) and self.every >= 1)):
            raise ValueError(
                f"Invalid every: {self.every!r}. every must be a positive integer or None."
            )
        if not isinstance(self.weighting, Weighting):
            raise ValueError(
                f"Invalid weighting: {self.weighting!r}. weighting must be Mean(), EMA() or "
                "Window()."
            )
        if self.device is not None:
            torch.device(self.device)  # raises if it is not a device
        if self.dtype is not None and not self.dtype.is_floating_point:
            raise ValueError(
                f"Invalid dtype: {self.dtype}. The average needs a floating-point type."
            )

    @property
    def first_step(self) -> int | None:
        """The first step to sample, or None if the plan does not fix it."""
        return max(int(self.start), 1) if _is_int(self.start) else None

    def dtype_for(self, param: torch.Tensor) -> torch.dtype:
        """Return the type of this parameter's average.

        Args:
            param: The parameter.
        """
        real = param.dtype.to_real()
        if self.dtype is not None:
            real = self.dtype
        elif real.itemsize < 4:
            real = torch.float32
        return real.to_complex() if param.is_complex() else real

    def device_for(self, param: torch.Tensor) -> torch.device:
        """Return the device of this parameter's average.

        Args:
            param: The parameter.
        """
        return torch.device(self.device) if self.device is not None else param.device


def _is_int(value: object) -> TypeGuard[int]:
    return isinstance(value, Integral) and not isinstance(value, bool)
