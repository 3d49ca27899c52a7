"""The point of the gradient: weights between the iterate and its average.

Between the steps of an optimizer whose plan interpolates, the weights of the model are not the
iterate. During a step they are, so that the update, kernels that fold, hooks and samples see it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import Tensor

from gadam import _torch
from gadam._dtensor import local
from gadam.average.attached import has_own_step
from gadam.average.state import State

__all__ = ["GradientPoint", "real", "with_closure"]


class GradientPoint:
    """Move the weights to the iterate for a step, and to the point of the gradient after it.

    Without interpolation in the plan, nothing here has an effect.

    Args:
        state: The average's buffers and progress. It holds the iterates, too.
    """

    def __init__(self, state: State) -> None:
        self.state = state

    def before_step(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Make a step start from the iterate, and its closure evaluate at the gradient's point.

        An optimizer with a built-in average does so itself, unless it has another ``step()``.

        Args:
            args: The positional arguments of ``step()``, the optimizer first.
            kwargs: Its keyword arguments.

        Returns:
            New arguments of ``step()``, or None if they stay.
        """
        if self.state.iterate is None or (self.state.built_in and has_own_step(args[0])):
            return None
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        if not callable(closure):
            self.to_iterate(self.state.averaged())
            return None
        called = False

        def evaluate() -> object:
            nonlocal called
            if called:
                raise RuntimeError(
                    "Interpolation needs an optimizer that evaluates its closure once per step."
                )
            called = True
            loss = closure()
            self.to_iterate(self.state.averaged())
            return loss

        return with_closure(args, kwargs, evaluate)

    @torch.no_grad()
    def to_iterate(self, params: list[Tensor]) -> None:
        """Replace weights, which are the point of the gradient, by the iterate.

        Without a sample there is no average yet, and the weights are the iterate.

        Args:
            params: The parameters. Those that were frozen before the last step, or are not
                averaged, stay.
        """
        name, table = self.state.iterate, self.state.store.table
        frozen = {id(p) for p in self.state.frozen if _is_frozen(p)}
        params = [
            p
            for p in params
            if id(p) not in frozen and p not in self.state.at_iterate and name in table.get(p, ())
        ]
        self.state.at_iterate.update(dict.fromkeys(params))
        counters = self.state.tracker.counters
        if not params or (counters.on_host and not counters.known[0]):
            return
        weights, iterates = self._weights(params), self._iterates(params)
        if not counters.on_host:
            has_samples = counters.on(weights[0].device)[0] > 0
            iterates = [
                torch.where(has_samples.to(w.device), z, w) for w, z in zip(weights, iterates)
            ]
        _torch.foreach_copy_(weights, iterates)

    @torch.no_grad()
    def leave_iterate(self, pointed: Collection[Tensor] = (), undone: bool = False) -> None:
        """Store the iterates, and replace the weights by points between them and the average.

        Without a sample, the weights stay the iterates, and nothing is stored. The weights of a
        frozen parameter are its iterate, too, but are stored for when it is trained again.

        Args:
            pointed: Parameters for which a kernel has done both.
            undone: Whether to move these again, because the average has changed since.
        """
        if self.state.iterate is None:
            return
        params = [p for p in self.state.at_iterate if p not in pointed]
        self.state.at_iterate = {}
        counters = self.state.tracker.counters
        if counters.on_host and not counters.known[0]:
            return
        name, table = self.state.iterate, self.state.store.table
        frozen = [p for p in self.state.frozen if _is_frozen(p) and name in table.get(p, ())]
        if stored := params + frozen:
            _torch.foreach_copy_(self._iterates(stored), self._weights(stored))
        if undone and pointed:
            _torch.foreach_copy_(self._weights([*pointed]), self._iterates([*pointed]))
            params += pointed
        share: float | Tensor = self.state.averaging.interpolation
        for p, weight in zip(params, self._weights(params)):
            average = real(self.state.buffer(p, self.state.slots[0]))
            wider = torch.promote_types(weight.dtype, average.dtype)
            if not counters.on_host:
                has_samples = (counters.on(weight.device)[0] > 0).to(wider)
                share = has_samples * self.state.averaging.interpolation
            if weight.dtype == wider:
                weight.lerp_(average.to(wider), share)
            else:
                weight.copy_(weight.to(wider).lerp_(average, share))

    def remove(self) -> None:
        """Replace the weights by the iterates for good."""
        if self.state.iterate is None:
            return
        params = self.state.averaged()
        self.to_iterate(params)
        self.state.at_iterate = {}
        for p in params:
            self.state.store.table[p].pop(self.state.iterate, None)

    def _weights(self, params: list[Tensor]) -> list[Tensor]:
        return [real(local(p).detach()) for p in params]

    def _iterates(self, params: list[Tensor]) -> list[Tensor]:
        assert self.state.iterate is not None
        return [real(self.state.buffer(p, self.state.iterate)) for p in params]


def with_closure(
    args: tuple[Any, ...], kwargs: dict[str, Any], closure: Callable[[], object]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of ``step()`` with another closure.

    Args:
        args: The positional arguments, the optimizer first.
        kwargs: The keyword arguments.
        closure: The new closure.
    """
    if len(args) > 1:
        return (args[0], closure, *args[2:]), kwargs
    return args, {**kwargs, "closure": closure}


def _is_frozen(p: Tensor) -> bool:
    """Return True if steps do not update a parameter, because it is not trained."""
    return not p.requires_grad and p.grad is None


def real(tensor: Tensor) -> Tensor:
    """Return a complex tensor as pairs of real numbers, and any other tensor unchanged.

    Args:
        tensor: The tensor.
    """
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor
