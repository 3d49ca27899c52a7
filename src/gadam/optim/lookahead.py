"""Lookahead around any optimiser, and with it the paper's Gadam + LH."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from gadam._dtensor import local
from gadam.average.iterate import IterateAverage, is_dry_run

__all__ = ["Lookahead"]


class Lookahead(Optimizer):
    r"""k steps forward, one step back: every k steps of the inner optimiser its *fast* weights
    :math:`\theta` and a copy, the *slow* weights :math:`\phi`, meet:

    .. math::
        \phi \leftarrow \phi + \alpha(\theta - \phi), \qquad \theta \leftarrow \phi.

    The slow weights start at the weights before the first step. They and the count of steps are kept
    in the inner optimiser's state and parameter groups, so they travel in its ``state_dict``. An
    iterate average of the inner optimiser samples *after* such a move.

    Args:
        optimizer: the inner optimiser. Its ``param_groups``, ``state`` and ``average`` are this one's
        k: steps between moves
        alpha: :math:`\alpha` in (0, 1]
        until_average: stop once the inner optimiser's average begins, and leave it plain iterates:
            around :class:`gadam.Gadam` this is the paper's Gadam + LH

    Example:
        >>> import torch, gadam
        >>> model = torch.nn.Linear(4, 1)
        >>> inner = gadam.Gadam(model.parameters(), average=gadam.Averaging(start=50))
        >>> optimizer = gadam.Lookahead(inner, k=5, alpha=0.5, until_average=True)
        >>> model(torch.randn(8, 4)).square().mean().backward()
        >>> optimizer.step()
        >>> optimizer.average.phase
        'waiting'

    Reference: Zhang, Lucas, Hinton, Ba, *Lookahead Optimizer: k steps forward, 1 step back*
    (arXiv 1907.08610).
    """

    optimizer: Optimizer
    k: int
    alpha: float
    until_average: bool

    def __init__(
        self, optimizer: Optimizer, k: int = 5, alpha: float = 0.5, until_average: bool = False
    ) -> None:
        if not isinstance(optimizer, Optimizer):
            raise TypeError(f"Lookahead needs a torch optimizer, not {type(optimizer).__name__}")
        if isinstance(k, bool) or not isinstance(k, int) or k < 1:
            raise ValueError(f"Invalid k: {k!r} (it must be a positive integer)")
        if not 0.0 < alpha <= 1.0:
            raise ValueError(f"Invalid alpha: {alpha} (it must lie in (0, 1])")
        if until_average and not isinstance(getattr(optimizer, "average", None), IterateAverage):
            raise ValueError(
                "until_average=True needs an optimizer with an average of its own, such as Gadam, "
                f"not {type(optimizer).__name__}"
            )
        hooks = optimizer._optimizer_step_post_hooks.values()
        if any(isinstance(getattr(hook, "__self__", None), Lookahead) for hook in hooks):
            raise ValueError("this optimizer has a Lookahead around it already")
        # Steps that an earlier optimiser left in a group it shares; with slow weights they are ours.
        if not any("slow_param" in state for state in optimizer.state.values()):
            optimizer.param_groups[0]["lookahead_steps"] = 0
        # Not Optimizer.__init__: groups and state are the inner optimiser's, there is no second set.
        self.__setstate__(
            {
                "optimizer": optimizer,
                "k": k,
                "alpha": alpha,
                "until_average": until_average,
                "defaults": dict(optimizer.defaults),
            }
        )

    def __getstate__(self) -> dict[str, Any]:
        names = ("optimizer", "k", "alpha", "until_average", "defaults")
        return {name: self.__dict__[name] for name in names}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._initial: dict[Tensor, Tensor] = {}
        self.optimizer.register_step_pre_hook(self._before_step)
        # First of all, so that every average, attached before or after this, samples after the move.
        handle = self.optimizer.register_step_post_hook(self._after_step)
        hooks = self.optimizer._optimizer_step_post_hooks
        hooks.move_to_end(handle.id, last=False)  # type: ignore[attr-defined]

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        return self.optimizer.param_groups

    @property
    def state(self) -> defaultdict[Tensor, Any]:  # type: ignore[override]
        return self.optimizer.state

    @property
    def average(self) -> IterateAverage:
        """The inner optimiser's average."""
        return self.optimizer.average  # type: ignore[attr-defined]

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Perform a single step of the inner optimiser, and every k of them a move.

        Args:
            closure: re-evaluates the model and returns the loss (optional)
        """
        return self.optimizer.step(closure)

    @torch._disable_dynamo
    @torch.no_grad()
    def _before_step(self, *_: object) -> None:
        untrained = self.param_groups[0].get("lookahead_steps", 0) == 0
        for group in self.param_groups:
            for p in group["params"]:
                slow = self.state.get(p, {}).get("slow_param")
                if (
                    slow is not None and untrained
                ):  # made by a rehearsal; weights may be loaded since
                    local(slow).copy_(local(p))
                elif slow is None and p.requires_grad and p not in self._initial:
                    self._initial[p] = p.detach().clone(memory_format=torch.preserve_format)

    @torch._disable_dynamo
    @torch.no_grad()
    def _after_step(self, *_: object) -> None:
        # Only now: optimisers take a parameter whose state is not empty for initialised, and one
        # without a gradient has not been.
        for p in [p for p in self._initial if p.grad is not None]:
            self.state[p]["slow_param"] = self._initial.pop(p)

        first = self.param_groups[0]
        steps = first.setdefault("lookahead_steps", 0)
        found_inf = getattr(self.optimizer, "found_inf", None)
        if (found_inf is not None and bool(found_inf)) or (
            steps == 0 and is_dry_run(self.optimizer)
        ):
            return
        first["lookahead_steps"] = steps + 1
        if (steps + 1) % self.k == 0 and not (
            self.until_average and self.average._begun_by_this_step
        ):
            self._move()

    def _move(self) -> None:
        pairs = [
            (local(self.state[p]["slow_param"]), local(p).detach())
            for group in self.param_groups
            for p in group["params"]
            if "slow_param" in self.state.get(p, ())
        ]
        pairs = [
            (torch.view_as_real(slow), torch.view_as_real(fast))
            if slow.is_complex()
            else (slow, fast)
            for slow, fast in pairs
        ]
        if pairs:
            slow, fast = map(list, zip(*pairs))
            torch._foreach_lerp_(slow, fast, self.alpha)
            torch._foreach_copy_(fast, slow)

    # Everything else is the inner optimiser's.

    def state_dict(self) -> dict[str, Any]:
        """Give the inner optimiser's state dict, which holds the slow weights too."""
        for pre_hook in self._optimizer_state_dict_pre_hooks.values():
            pre_hook(self)
        state_dict = self.optimizer.state_dict()
        for post_hook in self._optimizer_state_dict_post_hooks.values():
            state_dict = post_hook(self, state_dict) or state_dict
        return state_dict

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what :meth:`state_dict` returned, or a state dict of the inner optimiser alone.

        Args:
            state_dict: the optimiser's state
        """
        state_dict = state_dict.copy()
        for pre_hook in self._optimizer_load_state_dict_pre_hooks.values():
            state_dict = pre_hook(self, state_dict) or state_dict
        self.optimizer.load_state_dict(state_dict)
        self._initial.clear()
        for post_hook in self._optimizer_load_state_dict_post_hooks.values():
            post_hook(self)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a parameter group to the inner optimiser.

        Args:
            param_group: the parameters, under "params", and their options
        """
        self.optimizer.add_param_group(param_group)
