"""Gadam and GadamX: the Adam-family update with the iterate average built in."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.optim.optimizer import Optimizer, ParamsT

from gadam.average.iterate import IterateAverage
from gadam.average.plan import Averaging
from gadam.optim.padam import Padam
from gadam.optim.update import Form

__all__ = ["Gadam", "GadamX"]


class _Averaged(Padam):
    """Padam that stores the average of its iterates in its own state."""

    def __init__(
        self, params: ParamsT, *args: Any, average: Averaging | None, **kwargs: Any
    ) -> None:
        if kwargs.get("differentiable") and average is not None and average.interpolation:
            raise ValueError(
                "interpolation does not work with differentiable=True: gradients would miss the "
                "moves between the iterate and the average. Remove one of them."
            )
        super().__init__(params, *args, **kwargs)
        self._average = IterateAverage.built_into(self, average)

    @property
    def average(self) -> IterateAverage:
        """The running average of the iterates."""
        return self._average

    @property
    def _interpolates(self) -> bool:
        return self._average.averaging.interpolation > 0

    def state_dict(self) -> dict[str, Any]:
        """Return the optimizer's state, its average included."""
        self._average.publish()
        return self._average.add_to(super().state_dict())

    def __getstate__(self) -> dict[str, Any]:
        if self.__dict__.get("_applied_average") is not None:
            raise RuntimeError(
                "An optimizer cannot be copied or pickled while its average is applied."
            )
        self._average.publish()
        removed = self._average.state_dict() if self._average.is_removed else None
        plan = {"_averaging": self._average.averaging, "_removed": removed}
        return {**super().__getstate__(), **plan}

    def __setstate__(self, state: dict[str, Any]) -> None:
        state = dict(state)
        averaging, removed = state.pop("_averaging", None), state.pop("_removed", None)
        super().__setstate__(state)
        if "_average" not in self.__dict__:  # in a copy, or after unpickling
            self._average = IterateAverage.built_into(self, averaging)
            if removed:
                self._average.copy_removed(removed)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the optimizer's state, its average included.

        The state may be that of torch's AdamW. The average then starts empty, and the plan's
        ``start`` counts the steps that AdamW has taken.

        Args:
            state_dict: The result of :meth:`state_dict`.

        Raises:
            ValueError: If the state is damaged, or does not match the optimizer and plan. Nothing
                changes then.
        """
        restore: list[Callable[[], None]] = []

        def take_average(_: Optimizer, final: dict[str, Any]) -> dict[str, Any]:
            self._check_state_dict(final)
            rest, restore_average = self._average.take_from(final)
            restore.append(restore_average)
            return rest

        # Last of the pre-hooks and first of the post-hooks: it sees the state dict as users' hooks
        # leave it, and users' hooks see the restored average.
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
    r"""AdamW with iterate averaging.

    The update is that of :class:`gadam.Padam` at :math:`p = 1/2`, which is torch's AdamW. From step
    :math:`T_{avg}` on, the optimizer also stores the mean of its iterates:

    .. math::
        \bar\theta_n = \tfrac1n \sum_{i=1}^{n} \theta_{t_i}, \qquad t_1 = T_{avg}.

    Keep the learning rate high during training, and use :math:`\bar\theta` at the end.

    Args:
        params: The parameters or named parameters to optimize, or dicts that define parameter
            groups.
        lr: The learning rate :math:`\gamma`.
        betas: The decay rates :math:`\beta_1, \beta_2` of the moments.
        eps: The term :math:`\epsilon` in the denominator.
        weight_decay: The weight decay :math:`\lambda`.
        amsgrad: Use the running maximum of the second moment.
        average: The plan: which iterates to average. None waits for ``average.begin()`` or
            ``average.update()``.
        decoupled_weight_decay: Decay the weights (AdamW). False adds Adam's L2 penalty to the
            gradient instead, which the paper uses for its LSTM. Keep True for transformers.
        form: ``"official"`` or ``"paper"``, as in :class:`gadam.Padam`.
        maximize: Maximize the objective instead of minimizing it.
        foreach: Use the multi-tensor implementation, as in :class:`gadam.Padam`.
        fused: Run the update in one pass over memory, as in :class:`gadam.Padam`.
        capturable: Keep the step count on the device, for CUDA graphs.
        differentiable: Let autograd differentiate the step.

    Attributes:
        average: The running average, a :class:`gadam.IterateAverage`.

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
    r"""PadamW with iterate averaging: Gadam with the partially adaptive update.

    The update is that of :class:`gadam.PadamW`, and the average is that of :class:`Gadam`:

    .. math::
        \theta_t \leftarrow (1 - \gamma \lambda) \, \theta_{t-1} - s_t \, m_t / d_t, \qquad
        \bar\theta_n = \tfrac1n \sum_{i=1}^{n} \theta_{t_i}.

    It needs learning rates like SGD's, not like Adam's. The default rate and decay are better than
    the paper's for VGG-16 (0.1, 0.0025) on all seven tasks of ``docs/evidence.md``. Small networks
    prefer even higher rates, up to 3.

    Args:
        params: The parameters or named parameters to optimize, or dicts that define parameter
            groups.
        lr: The learning rate :math:`\gamma`.
        betas: The decay rates :math:`\beta_1, \beta_2` of the moments.
        eps: The term :math:`\epsilon` in the denominator.
        weight_decay: The weight decay :math:`\lambda`.
        amsgrad: Use the running maximum of the second moment.
        partial: The exponent :math:`p`. The paper uses 0.125 for images and 0.2 for text.
        average: The plan: which iterates to average. None waits for ``average.begin()`` or
            ``average.update()``.
        decoupled_weight_decay: Decay the weights instead of adding to the gradient.
        form: ``"official"`` or ``"paper"``, as in :class:`gadam.Padam`.
        maximize: Maximize the objective instead of minimizing it.
        foreach: Use the multi-tensor implementation, as in :class:`gadam.Padam`.
        fused: Run the update in one pass over memory, as in :class:`gadam.Padam`.
        capturable: Keep the step count on the device, for CUDA graphs.
        differentiable: Let autograd differentiate the step.

    Attributes:
        average: The running average, a :class:`gadam.IterateAverage`.

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

    Reference: Granziol, Baskerville, Wan, Albanie, Roberts, *Iterative Averaging in the Quest for
    Best Test Error* (arXiv 2003.01247).
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 0.3,
        betas: tuple[float | Tensor, float | Tensor] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-3,
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
