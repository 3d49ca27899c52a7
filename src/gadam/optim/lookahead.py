"""Lookahead around any optimizer, and the paper's Gadam + LH."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from gadam import _torch
from gadam._dtensor import local
from gadam.average.attached import iterate_of
from gadam.average.iterate import IterateAverage
from gadam.average.sampling import is_dry_run

__all__ = ["Lookahead"]


class Lookahead(Optimizer):
    r"""Lookahead: k steps forward, one step back.

    Every :math:`k` steps of the inner optimizer, its *fast* weights :math:`\theta` and a copy, the
    *slow* weights :math:`\phi`, are synchronized:

    .. math::
        \phi \leftarrow \phi + \alpha(\theta - \phi), \qquad \theta \leftarrow \phi.

    The slow weights start at the initial weights. The inner optimizer's state and parameter groups
    hold them and the step count, so both are part of its ``state_dict``. An iterate average of the
    inner optimizer samples *after* the synchronization.

    Args:
        optimizer: The inner optimizer. Lookahead shares its ``param_groups``, ``state`` and
            ``average``.
        k: The number of steps between synchronizations.
        alpha: The slow step size :math:`\alpha` in (0, 1].
        until_average: Stop once the inner optimizer's average starts, so that it samples plain
            iterates. Around :class:`gadam.Gadam` this is the paper's Gadam + LH.

    Attributes:
        optimizer: The inner optimizer.
        average: The inner optimizer's average.

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
            raise TypeError(f"Lookahead needs a torch optimizer, not {type(optimizer).__name__}.")
        if isinstance(k, bool) or not isinstance(k, int) or k < 1:
            raise ValueError(f"Invalid k: {k!r}. k must be a positive integer.")
        if not 0.0 < alpha <= 1.0:
            raise ValueError(f"Invalid alpha: {alpha}. alpha must be in (0, 1].")
        if until_average and not isinstance(getattr(optimizer, "average", None), IterateAverage):
            raise ValueError(
                "until_average=True needs an optimizer with a built-in average, such as Gadam, "
                f"not {type(optimizer).__name__}."
            )
        hooks = _torch.optimizer_hooks(optimizer, "step_post").values()
        if any(isinstance(getattr(hook, "__self__", None), Lookahead) for hook in hooks):
            raise ValueError("This optimizer already has a Lookahead around it.")
        # Without slow weights, the count is a leftover of another optimizer with the same groups.
        if not any("slow_param" in state for state in optimizer.state.values()):
            optimizer.param_groups[0]["lookahead_steps"] = 0
        # Not Optimizer.__init__: the groups and the state are the inner optimizer's.
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
        self._with_gradient: set[Tensor] = set()  # of these, before the current step
        self.optimizer.register_step_pre_hook(self._before_step)
        # Run first, so that averages sample after the synchronization, whenever they were attached.
        handle = self.optimizer.register_step_post_hook(self._after_step)
        _torch.optimizer_hooks(self.optimizer, "step_post").move_to_end(handle.id, last=False)

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """The inner optimizer's parameter groups."""
        return self.optimizer.param_groups

    @property
    def state(self) -> defaultdict[Tensor, Any]:  # type: ignore[override]
        """The inner optimizer's state."""
        return self.optimizer.state

    @property
    def average(self) -> IterateAverage:
        """The inner optimizer's average."""
        average: IterateAverage = self.optimizer.average  # type: ignore[attr-defined]
        return average

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Perform a single step of the inner optimizer, and synchronize after every k of them.

        Args:
            closure: A closure that reevaluates the model and returns the loss.

        Returns:
            The result of the inner optimizer's ``step``.
        """
        return self.optimizer.step(closure)

    @_torch.disable_dynamo
    @torch.no_grad()
    def _before_step(self, *_: object) -> None:
        untrained = self.param_groups[0].get("lookahead_steps", 0) == 0
        for group in self.param_groups:
            for p in group["params"]:
                slow = self.state.get(p, {}).get("slow_param")
                if slow is None and p.requires_grad and p not in self._initial:
                    slow = p.detach().clone(memory_format=torch.preserve_format)
                    self._initial[p] = slow
                elif slow is None or not untrained:
                    continue
                # The slow weights are new, or a dry run created them, and weights may have been
                # loaded since.
                iterate = iterate_of([self.optimizer], p)
                local(slow).copy_(local(p) if iterate is None else iterate)
        self._with_gradient = {p for p in self._initial if p.grad is not None}

    def edits_weights_after_this_step(self) -> bool:
        """Return whether the step that begins ends with a synchronization."""
        steps = self.param_groups[0].get("lookahead_steps", 0)
        return (steps + 1) % self.k == 0 and not (
            self.until_average and self.average._begun_by_this_step
        )

    @_torch.disable_dynamo
    @torch.no_grad()
    def _after_step(self, *_: object) -> None:
        if _torch.is_nested_step(self.optimizer):
            return
        # Not before the step: optimizers initialize a parameter's state only if it is empty, and
        # only if the parameter has a gradient.
        for p in [p for p in self._initial if self._was_trained(p)]:
            self.state[p]["slow_param"] = self._initial.pop(p)

        first = self.param_groups[0]
        steps = first.setdefault("lookahead_steps", 0)
        found_inf = getattr(self.optimizer, "found_inf", None)
        if (found_inf is not None and bool(found_inf)) or (
            steps == 0 and is_dry_run(self.optimizer)
        ):
            return
        synchronize = self.edits_weights_after_this_step()
        first["lookahead_steps"] = steps + 1
        if synchronize:
            self._synchronize()

    def _was_trained(self, p: Tensor) -> bool:
        """Return whether the last step had a gradient, which it may have removed at its end."""
        return p.grad is not None or p in self._with_gradient

    def _synchronize(self) -> None:
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
            _torch.foreach_lerp_(slow, fast, self.alpha)
            _torch.foreach_copy_(fast, slow)

    # Everything below delegates to the inner optimizer.

    def state_dict(self) -> dict[str, Any]:
        """Return the inner optimizer's state dict, which includes the slow weights."""
        for pre_hook in _torch.optimizer_hooks(self, "state_dict_pre").values():
            pre_hook(self)
        state_dict = self.optimizer.state_dict()
        for post_hook in _torch.optimizer_hooks(self, "state_dict_post").values():
            state_dict = post_hook(self, state_dict) or state_dict
        return state_dict

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state dict of this optimizer, or of the inner optimizer alone.

        Args:
            state_dict: The result of :meth:`state_dict`.
        """
        state_dict = state_dict.copy()
        for pre_hook in _torch.optimizer_hooks(self, "load_state_dict_pre").values():
            state_dict = pre_hook(self, state_dict) or state_dict
        self.optimizer.load_state_dict(state_dict)
        self._initial.clear()
        for post_hook in _torch.optimizer_hooks(self, "load_state_dict_post").values():
            post_hook(self)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a parameter group to the inner optimizer.

        Args:
            param_group: The parameters, under the key "params", and their options.
        """
        self.optimizer.add_param_group(param_group)
