"""One average of several optimizers: when all of them have stepped, and what was loaded of each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from gadam.average.progress import Progress

__all__ = ["JointStep", "LoadedParts", "Part", "check_disjoint", "position"]


def position(optimizers: Sequence[Optimizer], optimizer: Optimizer) -> int:
    """Return the index of an optimizer.

    Args:
        optimizers: The optimizers.
        optimizer: One of them.
    """
    return next(i for i, one in enumerate(optimizers) if one is optimizer)


def check_disjoint(optimizers: Sequence[Optimizer]) -> None:
    """Raise if two optimizers share a parameter.

    Args:
        optimizers: The optimizers.

    Raises:
        ValueError: If they do.
    """
    seen: set[Tensor] = set()
    for p in (p for one in optimizers for group in one.param_groups for p in group["params"]):
        if p in seen:
            raise ValueError(
                f"A parameter of shape {tuple(p.shape)} belongs to more than one of the "
                "optimizers. Give each parameter to one optimizer only."
            )
        seen.add(p)


class Part(NamedTuple):
    """The step of one optimizer, or of all of them.

    Attributes:
        trained: Whether there was a gradient.
        found_inf: GradScaler's verdict, or None if it has none.
    """

    trained: bool
    found_inf: Tensor | None


class JointStep:
    """Decides which steps of several optimizers are one step of their average.

    The optimizers step one after the other, in any order. A step belongs to the gradients that it
    used: if an optimizer misses one, for example because GradScaler skips it, the steps of the
    others must not wait for its next step. They are dropped as soon as there are new gradients.

    Args:
        optimizers: The optimizers.
    """

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        self._optimizers = optimizers
        self._parts: dict[int, Part] = {}

    def add(self, optimizer: Optimizer, part: Part) -> Part | None:
        """Add the step of an optimizer.

        Args:
            optimizer: The optimizer. If it has stepped since the last joint step, this step counts.
            part: Its step.

        Returns:
            The joint step, or None if it is not complete.
        """
        if len(self._optimizers) == 1:
            return part
        for index in [
            index for index in self._parts if _has_new_gradients(self._optimizers[index])
        ]:
            del self._parts[index]
        self._parts[position(self._optimizers, optimizer)] = part
        _mark_gradients(optimizer)
        if len(self._parts) < len(self._optimizers):
            return None
        parts = [*self._parts.values()]
        self._parts = {}
        return Part(any(one.trained for one in parts), _largest([one.found_inf for one in parts]))


_USED = "_gadam_used"  # the attribute of a gradient that an optimizer has stepped with


def _mark_gradients(optimizer: Optimizer) -> None:
    gradient = _first_gradient(optimizer)
    if gradient is not None:
        setattr(gradient, _USED, True)


def _has_new_gradients(optimizer: Optimizer) -> bool:
    """Return True if there are other gradient tensors than in the optimizer's last step.

    ``zero_grad()`` without another backward pass leaves none. Gradients that are zeroed or added to
    in place stay the same tensors.
    """
    gradient = _first_gradient(optimizer)
    return gradient is not None and not hasattr(gradient, _USED)


def _first_gradient(optimizer: Optimizer) -> Tensor | None:
    params = (p for group in optimizer.param_groups for p in group["params"])
    return next((p.grad for p in params if p.grad is not None), None)


def _largest(verdicts: Sequence[Tensor | None]) -> Tensor | None:
    found = [one for one in verdicts if one is not None]
    if not found:
        return None
    return torch.stack([one.squeeze().to(found[-1].device) for one in found]).max()


class LoadedParts:
    """The parts of an average that were loaded, each with the state dict of an optimizer.

    Args:
        optimizers: The optimizers of the average.
    """

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        self._optimizers = optimizers
        self._loaded: dict[int, tuple[int, int] | None] = {}  # steps and samples of each part
        self._untrained: set[int] = set()  # the optimizers that were saved without any state

    def note(self, optimizer: Optimizer, progress: Progress | None, has_state: bool) -> None:
        """Note what was loaded with an optimizer.

        Args:
            optimizer: The optimizer.
            progress: The progress of its part, or None if its state dict has no average.
            has_state: Whether its state dict has any state.
        """
        if len(self._optimizers) == 1:
            return
        index = position(self._optimizers, optimizer)
        self._untrained.discard(index)
        self._loaded[index] = None if progress is None else (progress.steps, progress.count)
        if progress is None and not has_state:
            self._untrained.add(index)

    @property
    def has_samples(self) -> bool:
        """Whether a part with samples was loaded."""
        return any(part is not None and part[1] > 0 for part in self._loaded.values())

    def clear(self) -> None:
        """Forget what was loaded: the average is whole."""
        self._loaded, self._untrained = {}, set()

    def check(self) -> None:
        """Raise if the parts are not of one average.

        Raises:
            RuntimeError: If some parts are missing, or come from another step.
        """
        if not self._loaded:
            return
        found = {part for part in self._loaded.values() if part is not None}
        if self.has_samples and (len(found) > 1 or any(map(self._is_missing, self._indices()))):
            parts = ", ".join(self._described(index) for index in self._indices())
            raise RuntimeError(
                f"The loaded parts of the average do not match: {parts}. Load the state dicts of "
                "all optimizers, from the same checkpoint."
            )
        self.clear()

    def _indices(self) -> range:
        return range(len(self._optimizers))

    def _is_missing(self, index: int) -> bool:
        groups = self._optimizers[index].param_groups
        is_trained = any(p.requires_grad for group in groups for p in group["params"])
        return is_trained and self._loaded.get(index) is None and index not in self._untrained

    def _described(self, index: int) -> str:
        name, part = type(self._optimizers[index]).__name__, self._loaded.get(index)
        if part is None:
            return f"{name} has none"
        return f"{name} has {part[1]} samples at step {part[0]}"
