"""Gadam and GadamX: the Adam-family update with the iterate average built in."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.optim.optimizer import Optimizer, ParamsT

from gadam.average.built_in import PROGRESS, BuiltInAverage
from gadam.average.plan import Averaging
from gadam.optim.padam import Padam
from gadam.optim.update import Form

__all__ = ["Gadam", "GadamX"]


class _Averaged(Padam):
    """Padam that carries the average of its iterates in its own state."""

    def __init__(
        self, params: ParamsT, *args: Any, average: Averaging | None, **kwargs: Any
    ) -> None:
        super().__init__(params, *args, **kwargs)
        self._average = BuiltInAverage(self, average)

    @property
    def average(self) -> BuiltInAverage:
        """The running average of the iterates."""
        return self._average

    def _to_fold(self, params: list[Tensor]) -> tuple[list[Tensor] | None, float]:
        return self._average.to_fold(params)

    def state_dict(self) -> dict[str, Any]:
        """Give the optimiser's state, its average included."""
        self._average.flush()
        return super().state_dict()

    def __getstate__(self) -> dict[str, Any]:
        self._average.flush()
        if self.__dict__.get("_applied_average") is not None:
            raise RuntimeError(
                "an optimizer cannot be copied or pickled while its average is applied"
            )
        return {**super().__getstate__(), "_averaging": self._average.averaging}

    def __setstate__(self, state: dict[str, Any]) -> None:
        state = dict(state)
        averaging = state.pop("_averaging", None)
        super().__setstate__(state)
        if "_average" in self.__dict__:  # load_state_dict; an older checkpoint has no average
            self._average.reopen_store()
        else:  # a copy, or out of a pickle
            progress = self.param_groups[0].get(PROGRESS)
            self._average = BuiltInAverage(self, averaging)
            if progress is not None:
                self.param_groups[0][PROGRESS] = progress

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the optimiser's state, its average included.

        Args:
            state_dict: what :meth:`state_dict` returned
        """
        restore: list[Callable[[], None]] = []

        def take_average(_: Optimizer, final: dict[str, Any]) -> dict[str, Any]:
            rest, restore_average = self._average.take_from(final)
            restore.append(restore_average)
            return rest

        # Last of the pre-hooks, first of the post-hooks: it sees what the user's made of the state
        # dict, and the user's see the average restored.
        handles = [
            self.register_load_state_dict_pre_hook(take_average),
            self.register_load_state_dict_post_hook(lambda _: restore[0](), prepend=True),
        ]
        try:
            super().load_state_dict(state_dict)
        finally:
            for handle in handles:
                handle.remove()


class Gadam(_Averaged):
    r"""AdamW whose iterates are averaged.

    The update is that of :class:`gadam.Padam` at :math:`p = 1/2`, which is torch's AdamW; from
    :math:`T_{avg}` on the mean of the iterates is kept beside it:

    .. math::
        \bar\theta_n = \tfrac1n \sum_{i=1}^{n} \theta_{t_i}, \qquad t_1 = T_{avg}.

    Train at a learning rate that stays high, and use :math:`\bar\theta` in the end.

    Args:
        params, lr, betas, eps, weight_decay, amsgrad: as of :class:`torch.optim.AdamW`
        average: which iterates to average; None waits for ``average.begin()`` or
            ``average.update()``
        decoupled_weight_decay: False gives Adam's L2 penalty, which language models want
        form, maximize, foreach, fused, capturable, differentiable: as of :class:`gadam.Padam`

    Example:
        >>> import torch, gadam
        >>> model = torch.nn.Linear(4, 1)
        >>> optimizer = gadam.Gadam(
        ...     model.parameters(), lr=1e-3, weight_decay=0.1, average=gadam.Averaging(start=50)
        ... )
        >>> for _ in range(100):
        ...     optimizer.zero_grad()
        ...     model(torch.randn(8, 4)).square().mean().backward()
        ...     optimizer.step()
        >>> with optimizer.average.applied(model):
        ...     loss = model(torch.randn(8, 4)).square().mean()
        >>> optimizer.average.count
        51

    Reference: Granziol, Baskerville, Wan, Albanie, Roberts, *Iterative Averaging in the Quest for
    Best Test Error* (arXiv 2003.01247).
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float | Tensor, float | Tensor] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        *,
        average: Averaging | None = None,
        decoupled_weight_decay: bool = True,
        form: Form = "official",
        maximize: bool = False,
        foreach: bool | None = None,
        fused: bool | None = None,
        capturable: bool = False,
        differentiable: bool = False,
    ) -> None:
        super().__init__(
            params,
            lr,
            betas,
            eps,
            weight_decay,
            amsgrad,
            average=average,
            partial=0.5,
            decoupled_weight_decay=decoupled_weight_decay,
            form=form,
            maximize=maximize,
            foreach=foreach,
            fused=fused,
            capturable=capturable,
            differentiable=differentiable,
        )


class GadamX(_Averaged):
    r"""PadamW whose iterates are averaged: :class:`Gadam` with the partially adaptive update.

    The update is that of :class:`gadam.Padam` with decoupled decay; the average is that of
    :class:`Gadam`. It wants SGD's learning rates (0.1), not Adam's.

    Args:
        partial: the exponent p; 0.125 for vision, 0.2 for language models
        params, lr, betas, eps, weight_decay, amsgrad, average, decoupled_weight_decay, form,
            maximize, foreach, fused, capturable, differentiable: as of :class:`Gadam`

    Example:
        >>> import torch, gadam
        >>> model = torch.nn.Linear(4, 1)
        >>> optimizer = gadam.GadamX(model.parameters(), average=gadam.Averaging(start=2, every=2))
        >>> for _ in range(6):
        ...     optimizer.zero_grad()
        ...     model(torch.randn(8, 4)).square().mean().backward()
        ...     optimizer.step()
        >>> optimizer.average.count
        3
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 0.1,
        betas: tuple[float | Tensor, float | Tensor] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 2.5e-3,
        amsgrad: bool = False,
        *,
        partial: float = 0.125,
        average: Averaging | None = None,
        decoupled_weight_decay: bool = True,
        form: Form = "official",
        maximize: bool = False,
        foreach: bool | None = None,
        fused: bool | None = None,
        capturable: bool = False,
        differentiable: bool = False,
    ) -> None:
        super().__init__(
            params,
            lr,
            betas,
            eps,
            weight_decay,
            amsgrad,
            average=average,
            partial=partial,
            decoupled_weight_decay=decoupled_weight_decay,
            form=form,
            maximize=maximize,
            foreach=foreach,
            fused=fused,
            capturable=capturable,
            differentiable=differentiable,
        )
