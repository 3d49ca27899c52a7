"""The plan of an average: which iterates enter it, and with what weight.

Everything here is a small frozen value. What runs is :class:`gadam.IterateAverage`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from numbers import Integral
from typing import ClassVar, Literal, TypeGuard

import torch

__all__ = ["EMA", "Averaging", "Mean", "NonMonotone", "Plateau", "Trigger", "Window"]


# ------------------------------------------------------------------------------------- weighting


@dataclass(frozen=True)
class Mean:
    """The plain arithmetic mean of the samples: the paper's iterate averaging, and the default."""

    copies: ClassVar[int] = 1  # of the weights that are kept

    def weight(self, count: int) -> float:
        """The weight of the newest of ``count`` samples; the rest keep their proportions."""
        return 1 / count


@dataclass(frozen=True)
class EMA:
    r"""Exponential moving average, debiased: sample i of n weighs :math:`\rho^{n-i}`, over their sum.

    Unlike the usual EMA it owes nothing to where it was started: after one sample it is that sample.

    Args:
        decay: :math:`\rho` in (0, 1), per sample (not per step, where ``every`` is not 1)
    """

    decay: float = 0.999
    copies: ClassVar[int] = 1

    def __post_init__(self) -> None:
        if not 0.0 < self.decay < 1.0:
            raise ValueError(f"Invalid decay: {self.decay} (it must lie in (0, 1))")

    def weight(self, count: int) -> float:
        # (1 - ρ) / (1 - ρ^n), without the cancellation as ρ → 1
        log_decay = math.log(self.decay)
        return math.expm1(log_decay) / math.expm1(count * log_decay)


@dataclass(frozen=True)
class Window:
    """The plain mean of the last ``size`` samples (LAWA). Keeps ``size`` copies of the weights."""

    size: int

    def __post_init__(self) -> None:
        if not _is_int(self.size) or self.size < 1:
            raise ValueError(f"Invalid window size: {self.size!r} (it must be a positive integer)")

    @property
    def copies(self) -> int:
        return self.size

    def weight(self, count: int) -> float:
        return 1.0  # in a copy of its own


Weighting = Mean | EMA | Window


# -------------------------------------------------------------------------------------- triggers

Memory = tuple[float, ...]
Verdict = Literal["begin", "finish"] | None


@dataclass(frozen=True)
class Plateau:
    """Begin averaging, and later stop, when the metric no longer improves: GadamAuto, SWA-Auto.

    Averaging begins after ``patience`` observations without a new best. The best is then forgotten,
    and after ``patience`` observations of the averaged weights without a new best the average is
    finished.

    Args:
        patience: observations without improvement to wait for
        mode: ``"max"`` where a larger metric is better (accuracy), ``"min"`` where a smaller one is
    """

    patience: int = 10
    mode: Literal["max", "min"] = "max"

    def __post_init__(self) -> None:
        if not _is_int(self.patience) or self.patience < 1:
            raise ValueError(f"Invalid patience: {self.patience!r} (it must be a positive integer)")
        _check_mode(self.mode)

    @property
    def initial_state(self) -> Memory:
        """What it remembers before any observation: the best, and observations since."""
        return (_worst(self.mode), 0.0)

    def update(self, memory: Memory, metric: float, averaging: bool) -> tuple[Memory, Verdict]:
        """Take in one more observation; gives what to remember, and what to do."""
        best, waited = memory
        if _better(metric, best, self.mode):
            return (metric, 0.0), None
        if waited + 1 < self.patience:
            return (best, waited + 1), None
        return self.initial_state, "finish" if averaging else "begin"


@dataclass(frozen=True)
class NonMonotone:
    """Begin averaging as NT-ASGD does: the metric is worse than its best of ``interval`` checks ago.

    Precisely, when it is worse than the best of all observations but the last ``interval``. There is
    no stop.

    Args:
        interval: the non-monotone interval n
        mode: ``"min"`` where a smaller metric is better (perplexity), ``"max"`` where a larger one is
    """

    interval: int = 5
    mode: Literal["max", "min"] = "min"

    def __post_init__(self) -> None:
        if not _is_int(self.interval) or self.interval < 1:
            raise ValueError(f"Invalid interval: {self.interval!r} (it must be a positive integer)")
        _check_mode(self.mode)

    @property
    def initial_state(self) -> Memory:
        """What it remembers before any observation: the best of all but the last ``interval``
        observations, and those.
        """
        return (_worst(self.mode),) * (1 + self.interval)

    def update(self, memory: Memory, metric: float, averaging: bool) -> tuple[Memory, Verdict]:
        """Take in one more observation; gives what to remember, and what to do."""
        best, oldest, *newer = memory
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
        raise ValueError(f"Invalid mode: {mode!r} (it must be 'max' or 'min')")


# ------------------------------------------------------------------------------------------ plan


@dataclass(frozen=True)
class Averaging:
    """Which iterates enter the average, and with what weight.

    Args:
        start: the first step whose iterate is sampled, steps counting 1, 2, … (0 means 1: the
            initial weights never enter); or a trigger (:class:`Plateau`, :class:`NonMonotone`) that
            finds it from the metrics given to ``observe()``; None leaves it to ``begin()``
        every: sample each ``every``-th step from there on; None leaves sampling to ``update()``, which
            samples whenever it is called, before the start too
        weighting: :class:`Mean` (default), :class:`EMA` or :class:`Window`
        dtype: of the average; None is float32 for half-precision weights, the weights' own otherwise.
            A float32 mean of float32 weights stops resolving new samples beyond some 10⁵ of them:
            sample less often, or ask for float64
        device: where the average is kept; None is beside the weights

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
                f"Invalid start: {self.start!r} (it must be a step number, a trigger such as "
                "Plateau(), or None)"
            )
        if not (self.every is None or (_is_int(self.every) and self.every >= 1)):
            raise ValueError(
                f"Invalid every: {self.every!r} (it must be a positive integer or None)"
            )
        if not isinstance(self.weighting, Weighting):
            raise ValueError(
                f"Invalid weighting: {self.weighting!r} (it must be Mean(), EMA() or Window())"
            )
        if self.device is not None:
            torch.device(self.device)  # refuses what is none
        if self.dtype is not None and not self.dtype.is_floating_point:
            raise ValueError(
                f"Invalid dtype: {self.dtype} (an average needs a floating-point type)"
            )

    @property
    def first_step(self) -> int | None:
        """The first step to sample, where the plan fixes it."""
        return max(int(self.start), 1) if _is_int(self.start) else None

    def dtype_for(self, param: torch.Tensor) -> torch.dtype:
        """The type in which this parameter's average is kept."""
        real = param.dtype.to_real()
        if self.dtype is not None:
            real = self.dtype
        elif real.itemsize < 4:
            real = torch.float32
        return real.to_complex() if param.is_complex() else real

    def device_for(self, param: torch.Tensor) -> torch.device:
        """Where this parameter's average is kept."""
        return torch.device(self.device) if self.device is not None else param.device


def _is_int(value: object) -> TypeGuard[int]:
    return isinstance(value, Integral) and not isinstance(value, bool)
