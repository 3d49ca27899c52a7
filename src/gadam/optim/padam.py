"""Padam and PadamW: the Adam-family update as a torch optimizer."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer, ParamsT

from gadam import _torch
from gadam.average.attached import cancel_folds, fold_into, step_from_iterates
from gadam.average.fold import Fold
from gadam.average.plan import Averaging
from gadam.optim.cpu import CachedLaunch, can_count_steps, same_layout
from gadam.optim.update import FORMS, Form, check_tensor_arguments, padam, to_scalar

__all__ = ["Padam", "PadamW"]

_REQUIRED = ("params", "lr", "betas", "eps", "weight_decay")


def _check_rates(
    lr: float | Tensor,
    betas: tuple[float | Tensor, float | Tensor],
    eps: float,
    weight_decay: float,
) -> None:
    if not lr >= 0.0:
        raise ValueError(f"Invalid learning rate: {lr}")
    if not eps >= 0.0:
        raise ValueError(f"Invalid epsilon value: {eps}")
    _check_pair(betas)
    for index, beta in enumerate(betas):
        if not 0.0 <= beta < 1.0:
            raise ValueError(f"Invalid beta parameter at index {index}: {beta}")
    if not weight_decay >= 0.0:
        raise ValueError(f"Invalid weight_decay value: {weight_decay}")
    if isinstance(betas[0], Tensor) != isinstance(betas[1], Tensor):
        raise ValueError("betas must be either both floats or both Tensors")


def _check_pair(betas: object) -> None:
    if not isinstance(betas, Sequence):
        hint = " Pass a plan as average=." if isinstance(betas, Averaging) else ""
        raise TypeError(f"betas must be two numbers, got {type(betas).__name__}.{hint}")
    if len(betas) != 2:
        raise ValueError(f"betas must be two numbers, got {len(betas)}.")


def _check_form(partial: float, form: object) -> None:
    if not 0.0 <= partial <= 0.5:
        raise ValueError(f"Invalid partial value: {partial}. partial must be in [0, 0.5].")
    if form not in FORMS:
        raise ValueError(f"Invalid form: {form!r}. form must be 'official' or 'paper'.")


def _check_moments(p: Tensor, state: object, amsgrad: bool, key: object) -> None:
    """Raise ValueError if a parameter's saved step or moments do not fit."""
    if not isinstance(state, dict):
        if state is not None:
            raise ValueError(f"The saved state of parameter {key!r} is {type(state).__name__}.")
        return
    moments = ("exp_avg", "exp_avg_sq", *(("max_exp_avg_sq",) if amsgrad else ()))
    names = ("step", *moments)
    if not any(name in state for name in names):
        return  # never stepped, or the state of an optimizer of another kind
    for name in names:
        if name not in state:
            raise ValueError(f"The saved state of parameter {key!r} has no {name!r}.")
    step = state["step"]
    if not (isinstance(step, Tensor) and step.is_meta):
        try:
            count = float(step)
        except (TypeError, ValueError, RuntimeError):
            count = -1.0
        if not 0.0 <= count < math.inf or count != math.floor(count):
            raise ValueError(
                f"The saved step of parameter {key!r} must be a non-negative integer, got {step}."
            )
    for name in moments:
        moment = state[name]
        if not isinstance(moment, Tensor) or moment.shape != p.shape:
            found = tuple(moment.shape) if isinstance(moment, Tensor) else type(moment).__name__
            raise ValueError(
                f"The saved {name} of parameter {key!r} must have the shape {tuple(p.shape)}, got "
                f"{found}."
            )


class Padam(Optimizer):
    r"""Partially adaptive Adam: Adam with its denominator raised to the power :math:`2p`.

    .. math::
       \begin{aligned}
            &\rule{110mm}{0.4pt}                                                                 \\
            &\textbf{input}      : \gamma \text{ (lr)}, \: \beta_1, \beta_2 \text{ (betas)}, \:
                \theta_0 \text{ (params)}, \: f(\theta) \text{ (objective)},                    \\
            &\hspace{13mm}      \lambda \text{ (weight decay)}, \: \epsilon \text{ (eps)}, \:
                p \text{ (partial)}, \: \textit{form}, \: \textit{decoupled}                    \\
            &\textbf{initialize} : m_0 \leftarrow 0, \: v_0 \leftarrow 0                       \\
            &\rule{110mm}{0.4pt}                                                                 \\
            &\textbf{for} \: t=1 \: \textbf{to} \: \ldots \: \textbf{do}                        \\
            &\hspace{5mm}g_t \leftarrow \nabla_{\theta} f_t (\theta_{t-1})                      \\
            &\hspace{5mm}\textbf{if} \: \textit{decoupled}: \:
                \theta_{t-1} \leftarrow (1 - \gamma \lambda) \, \theta_{t-1}                   \\
            &\hspace{5mm}\textbf{else}: \: g_t \leftarrow g_t + \lambda \theta_{t-1}            \\
            &\hspace{5mm}m_t \leftarrow \beta_1 m_{t-1} + (1 - \beta_1) \, g_t                 \\
            &\hspace{5mm}v_t \leftarrow \beta_2 v_{t-1} + (1 - \beta_2) \, g_t^2               \\
            &\hspace{5mm}\theta_t \leftarrow \theta_{t-1} - s_t \, m_t / d_t                   \\
            &\rule{110mm}{0.4pt}
       \end{aligned}

    The step size :math:`s_t` and the denominator :math:`d_t` depend on ``form`` and ``partial``:

    .. list-table::
       :header-rows: 1

       * - form
         - :math:`s_t`
         - :math:`d_t`
       * - official, :math:`p = 1/2`
         - :math:`\gamma/(1-\beta_1^t)`
         - :math:`\sqrt{v_t}/\sqrt{1-\beta_2^t} + \epsilon`
       * - official, otherwise
         - :math:`\gamma\sqrt{1-\beta_2^t}/(1-\beta_1^t)`
         - :math:`(\sqrt{v_t} + \epsilon)^{2p}`
       * - paper
         - :math:`\gamma/(1-\beta_1^t)`
         - :math:`(v_t/(1-\beta_2^t) + \epsilon)^p`

    ``amsgrad`` replaces :math:`v_t` (official) or :math:`v_t/(1-\beta_2^t)` (paper) by its running
    maximum.

    **The meaning of ε changes at p = 1/2.** In the official form, ε is added to the *corrected*
    root at ``partial=0.5``, as in torch's Adam. Elsewhere it is added to the *uncorrected* root
    inside the power, so the denominator is at least :math:`\epsilon^{2p}` (0.01 at the defaults).
    In the paper's form it is added to the corrected :math:`v`, and the denominator is at least
    :math:`\epsilon^p` (0.1). The official form also has an implicit warm-up factor
    :math:`(1-\beta_2^t)^{1/2-p}`.

    Args:
        params: The parameters or named parameters to optimize, or dicts that define parameter
            groups.
        lr: The learning rate :math:`\gamma`. It may be a 1-element tensor where torch's Adam
            accepts one.
        betas: The decay rates :math:`\beta_1, \beta_2` of the moments.
        eps: The term :math:`\epsilon` in the denominator; see above.
        weight_decay: The weight decay :math:`\lambda`.
        amsgrad: Use the running maximum of the second moment.
        partial: The exponent :math:`p` in [0, 0.5]. 0.5 is Adam; 0 is SGD with momentum.
        decoupled_weight_decay: Decay the weights (AdamW) instead of adding to the gradient (L2).
        form: ``"official"`` is the update of the authors' released code, which produced all of
            their results. ``"paper"`` is their Algorithm 1 with its misprints corrected.
        maximize: Maximize the objective instead of minimizing it.
        foreach: Use the multi-tensor implementation. None chooses it where torch's Adam does.
        fused: Run the whole update in one pass over memory. On the CPU this is a compiled kernel.
            On accelerators it is torch's own at ``partial=0.5`` and ``form="official"``, and
            otherwise a Triton kernel, which has not been timed on a GPU. None chooses the CPU
            kernel where it is supported, except in float64. See :func:`gadam.backends`.
        capturable: Keep the step count on the device, for CUDA graphs.
        differentiable: Let autograd differentiate the step.

    Example:
        >>> import torch, gadam
        >>> model = torch.nn.Linear(4, 1)
        >>> optimizer = gadam.Padam(model.parameters(), lr=0.1, partial=0.125)
        >>> model(torch.randn(8, 4)).square().mean().backward()
        >>> optimizer.step()

    Reference: Chen et al., *Closing the Generalization Gap of Adaptive Gradient Methods in Training
    Deep Neural Networks* (arXiv 1806.06763). The "PADAM" of arXiv 2505.22085 is another method.
    """

    _finite: bool | None = None  # the kernel's verdict on the last step
    _has_own_step: ClassVar[bool] = True

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        # A subclass with another step() could still change the weights after the kernel's pass.
        cls._has_own_step = inspect.unwrap(cls.step) is inspect.unwrap(Padam.step)

    @property
    def _interpolates(self) -> bool:
        """Whether an average in the optimizer's own state moves the weights between steps."""
        return False

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 0.1,
        betas: tuple[float | Tensor, float | Tensor] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        *,
        partial: float = 0.125,
        decoupled_weight_decay: bool = False,
        form: Form = "official",
        maximize: bool = False,
        foreach: bool | None = None,
        fused: bool | None = None,
        capturable: bool = False,
        differentiable: bool = False,
    ) -> None:
        _check_pair(betas)
        check_tensor_arguments(lr, betas, capturable, foreach)
        _check_rates(lr, betas, eps, weight_decay)
        super().__init__(
            params,
            {
                "lr": lr,
                "betas": tuple(map(to_scalar, betas)),
                "eps": eps,
                "weight_decay": weight_decay,
                "amsgrad": amsgrad,
                "partial": partial,
                "decoupled_weight_decay": decoupled_weight_decay,
                "form": form,
                "maximize": maximize,
                "foreach": foreach,
                "fused": fused,
                "capturable": capturable,
                "differentiable": differentiable,
            },
        )
        self._launches: dict[int, CachedLaunch] = {}  # by id of the group
        if fused:
            if differentiable:
                raise RuntimeError("`fused` does not support `differentiable`")
            if foreach:
                raise RuntimeError("`fused` and `foreach` cannot be `True` together.")
            _torch.enable_amp_scaling(self)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a parameter group.

        Args:
            param_group: The parameters, under the key "params", and their options.
        """
        partial = param_group.get("partial", self.defaults["partial"])
        form = param_group.get("form", self.defaults["form"])
        _check_form(partial, form)
        super().add_param_group(param_group)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the optimizer's state.

        The state may be that of torch's Adam or AdamW.

        Args:
            state_dict: The result of ``state_dict()``.

        Raises:
            ValueError: If the state is damaged or does not match. Nothing changes then.
        """

        def check(_: Optimizer, final: dict[str, Any]) -> None:
            self._check_state_dict(final)

        # Last of the pre-hooks: it sees the state dict as users' hooks leave it.
        handle = self.register_load_state_dict_pre_hook(check)
        try:
            super().load_state_dict(state_dict)
        finally:
            handle.remove()

    def _check_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Raise ValueError if a state dict would break later steps."""
        groups, states = state_dict.get("param_groups"), state_dict.get("state")
        if not isinstance(groups, list) or not isinstance(states, dict):
            raise ValueError(
                "This is not the state of an optimizer. Pass the result of state_dict(), with the "
                "entries 'param_groups' and 'state'."
            )
        sizes = [len(group["params"]) for group in self.param_groups]
        for group in groups:
            missing = [name for name in _REQUIRED if name not in group]
            if missing:
                raise ValueError(f"A saved parameter group has no {missing[0]!r}.")
        if [len(group["params"]) for group in groups] != sizes:
            return  # torch's own check has the better error message
        for own, group in zip(self.param_groups, groups):
            try:
                _check_rates(group["lr"], group["betas"], group["eps"], group["weight_decay"])
                _check_form(group.get("partial", 0.0), group.get("form", "official"))
            except (TypeError, RuntimeError) as error:
                raise ValueError(f"A saved parameter group is damaged ({error}).") from error
            for p, key in zip(own["params"], group["params"]):
                _check_moments(p, states.get(key), bool(group.get("amsgrad")), key)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._launches = {}
        for group in self.param_groups:
            # Checkpoints of older versions, and of torch's Adam and AdamW, do not have these.
            for name in ("partial", "decoupled_weight_decay", "form"):
                group.setdefault(name, self.defaults[name])
            for name in ("amsgrad", "maximize", "capturable", "differentiable"):
                group.setdefault(name, False)
            group.setdefault("foreach", None)
            fused = group.setdefault("fused", None)
            for p in group["params"]:
                step = self.state.get(p, {}).get("step")
                if step is not None and not torch.is_tensor(step):
                    on_device = group["capturable"] or fused
                    self.state[p]["step"] = torch.tensor(
                        float(step),
                        dtype=_step_dtype(fused),
                        device=p.device if on_device else "cpu",
                    )
        if any(group["fused"] for group in self.param_groups):
            _torch.enable_amp_scaling(self)

    def _init_group(
        self,
        group: dict[str, Any],
        params_with_grad: list[Tensor],
        grads: list[Tensor],
        exp_avgs: list[Tensor],
        exp_avg_sqs: list[Tensor],
        max_exp_avg_sqs: list[Tensor],
        state_steps: list[Tensor],
    ) -> bool:
        has_complex = False
        for p in group["params"]:
            if p.grad is None:
                continue
            has_complex |= torch.is_complex(p)
            if p.grad.is_sparse:
                raise RuntimeError(
                    f"{type(self).__name__} does not support sparse gradients, "
                    "please consider SparseAdam instead"
                )
            params_with_grad.append(p)
            grads.append(p.grad)

            state = self.state[p]
            # Not `len(state) == 0`: the state may already hold an average.
            if "step" not in state:
                if group["fused"]:
                    _torch.check_fused_support(p)
                on_device = group["capturable"] or group["fused"]
                dtype = _step_dtype(group["fused"])
                state["step"] = (
                    torch.zeros((), dtype=dtype, device=p.device)
                    if on_device
                    else torch.tensor(0.0, dtype=dtype, device="cpu")  # even in fake mode
                )
                state["exp_avg"] = torch.zeros_like(p, memory_format=torch.preserve_format)
                state["exp_avg_sq"] = torch.zeros_like(p, memory_format=torch.preserve_format)
                if group["amsgrad"]:
                    state["max_exp_avg_sq"] = torch.zeros_like(
                        p, memory_format=torch.preserve_format
                    )
            exp_avgs.append(state["exp_avg"])
            exp_avg_sqs.append(state["exp_avg_sq"])
            if group["amsgrad"]:
                max_exp_avg_sqs.append(state["max_exp_avg_sq"])
            if group["differentiable"] and state["step"].requires_grad:
                raise RuntimeError(
                    "`requires_grad` is not supported for `step` in differentiable mode"
                )
            if group["foreach"] and torch.is_tensor(group["lr"]) and not group["capturable"]:
                raise RuntimeError(
                    "lr as a Tensor is not supported for capturable=False and foreach=True"
                )
            state_steps.append(state["step"])
        return has_complex

    @_torch.use_grad_if_differentiable
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Perform a single optimization step.

        Args:
            closure: A closure that reevaluates the model and returns the loss.

        Returns:
            The loss that the closure returned, or None.
        """
        _torch.check_graph_capture(self)

        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()

        if torch.compiler.is_compiling():
            if self._interpolates:
                step_from_iterates(self)  # breaks the graph here, and not inside of the update
            self._step_groups()
            return loss
        try:
            self._step_groups()
        except BaseException:
            cancel_folds(self)
            raise
        return loss

    def _step_groups(self) -> None:
        # Whether all parameters are finite, or None unless the kernel has checked every group.
        finite: bool | None = True
        for group in self.param_groups:
            verdict = self._step_cached(group)
            if verdict is not None:
                finite = None if finite is None else finite and verdict
                continue
            params_with_grad: list[Tensor] = []
            grads: list[Tensor] = []
            exp_avgs: list[Tensor] = []
            exp_avg_sqs: list[Tensor] = []
            max_exp_avg_sqs: list[Tensor] = []
            state_steps: list[Tensor] = []
            beta1, beta2 = group["betas"]

            has_complex = self._init_group(
                group,
                params_with_grad,
                grads,
                exp_avgs,
                exp_avg_sqs,
                max_exp_avg_sqs,
                state_steps,
            )

            if self._interpolates and not torch.compiler.is_compiling():
                step_from_iterates(self, params_with_grad)
            verdict = padam(
                params_with_grad,
                grads,
                exp_avgs,
                exp_avg_sqs,
                max_exp_avg_sqs,
                state_steps,
                foreach=group["foreach"],
                fused=group["fused"],
                capturable=group["capturable"],
                differentiable=group["differentiable"],
                has_complex=has_complex,
                grad_scale=getattr(self, "grad_scale", None),
                found_inf=getattr(self, "found_inf", None),
                fold=self._fold_into(params_with_grad),
                beta1=beta1,
                beta2=beta2,
                lr=group["lr"],
                weight_decay=group["weight_decay"],
                decoupled_weight_decay=group["decoupled_weight_decay"],
                eps=group["eps"],
                amsgrad=group["amsgrad"],
                maximize=group["maximize"],
                partial=group["partial"],
                form=group["form"],
            )
            if params_with_grad:
                finite = None if finite is None or verdict is None else finite and verdict
            if verdict is not None:
                self._cache_launch(group)
        if not torch.compiler.is_compiling():  # torch 2.11 cannot trace the assignment
            self._finite = finite

    @_torch.disable_dynamo
    def _cache_launch(self, group: dict[str, Any]) -> None:
        """Cache the kernel's arguments for a group that it has just stepped."""
        params: list[Tensor] = group["params"]
        states = [self.state.get(p, {}) for p in params]
        names = ("exp_avg", "exp_avg_sq", *(["max_exp_avg_sq"] if group["amsgrad"] else []), "step")
        tensors = [state.get(name) for state in states for name in names]
        grads = [p.grad for p in params if p.grad is not None]
        if any(type(t) is not Tensor for t in tensors) or len(grads) != len(params):
            return  # a tensor is missing, or a DTensor
        types = {(p.dtype, state["step"].dtype) for p, state in zip(params, states)}
        if len(types) == 1 and all(
            can_count_steps(state["step"])
            and same_layout(p, (grad, *(state[name] for name in names[:-1])))
            for p, grad, state in zip(params, grads, states)
        ):
            self._launches[id(group)] = CachedLaunch(list(params), states, names, grads)

    def _step_cached(self, group: dict[str, Any]) -> bool | None:
        """Step a group from its cached launch. Returns None if that is not possible."""
        if torch.compiler.is_compiling():
            return None
        launch = self._launches.get(id(group))
        if (
            launch is None
            or group["foreach"] is not None
            or group["fused"] is False
            or group["capturable"]
            or group["differentiable"]
            or getattr(self, "found_inf", None) is not None
            or getattr(self, "grad_scale", None) is not None
            or len(launch.names) != (4 if group["amsgrad"] else 3)
            or isinstance(group["betas"][0], Tensor)
            or not 0.0 <= group["partial"] <= 0.5
        ):
            return None
        params = group["params"]
        grads = [p.grad for p in params]
        if not launch.is_valid(params, grads, self.state):
            del self._launches[id(group)]
            return None
        fold = self._fold_into(params, launch.states)
        averages, weight = None, None
        if fold is not None and launch.supports_averages(fold.averages):
            weight = fold.host_weight()
            averages = fold.averages if weight is not None else None
        iterates = fold.iterates if fold is not None and weight is not None else None
        if self._interpolates and (iterates is None or not launch.supports_iterates(iterates)):
            iterates = None
            step_from_iterates(self, params)
        finite = launch.step(
            grads,
            averages,
            iterates,
            interpolation=fold.interpolation if fold is not None else 0.0,
            fold_weight=weight or 0.0,
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            lr=float(group["lr"]),
            weight_decay=group["weight_decay"],
            decoupled_weight_decay=group["decoupled_weight_decay"],
            eps=group["eps"],
            amsgrad=group["amsgrad"],
            maximize=group["maximize"],
            partial=group["partial"],
            form=group["form"],
        )
        if fold is not None and weight is not None:
            fold.folded, fold.finite, fold.weight = list(range(len(params))), finite, weight
            fold.is_pointed = iterates is not None
        return finite

    def _fold_into(
        self, params: list[Tensor], states: list[dict[str, Tensor]] | None = None
    ) -> Fold | None:
        """Return where to fold these parameters in after their update, if a sample is due."""
        if torch.compiler.is_compiling() or not self._has_own_step:
            return None
        return fold_into(self, params, states)


def _step_dtype(fused: bool | None) -> torch.dtype:
    """Return the dtype of the step count, as in torch's Adam."""
    double = not fused and torch.get_default_dtype() == torch.float64
    return torch.float64 if double else torch.float32


class PadamW(Padam):
    r"""Padam with decoupled weight decay. GadamX averages its iterates.

    The algorithm is that of :class:`Padam` with *decoupled*:

    .. math::
        \theta_t \leftarrow (1 - \gamma \lambda) \, \theta_{t-1} - s_t \, m_t / d_t.

    Args:
        params: The parameters, as in :class:`Padam`.
        lr: The learning rate :math:`\gamma`.
        betas: The decay rates :math:`\beta_1, \beta_2` of the moments.
        eps: The term :math:`\epsilon` in the denominator.
        weight_decay: The weight decay :math:`\lambda`.
        amsgrad: Use the running maximum of the second moment.
        partial: The exponent :math:`p` in [0, 0.5].
        decoupled_weight_decay: Decay the weights instead of adding to the gradient.
        form: ``"official"`` or ``"paper"``, as in :class:`Padam`.
        maximize: Maximize the objective instead of minimizing it.
        foreach: Use the multi-tensor implementation, as in :class:`Padam`.
        fused: Run the update in one pass over memory, as in :class:`Padam`.
        capturable: Keep the step count on the device, for CUDA graphs.
        differentiable: Let autograd differentiate the step.

    Example:
        >>> import torch, gadam
        >>> model = torch.nn.Linear(4, 1)
        >>> optimizer = gadam.PadamW(model.parameters(), lr=0.1, weight_decay=2.5e-3)
        >>> optimizer.param_groups[0]["decoupled_weight_decay"]
        True

    Reference: Loshchilov, Hutter, *Decoupled Weight Decay Regularization* (arXiv 1711.05101), for
    the decay; see :class:`Padam` for the update.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 0.1,
        betas: tuple[float | Tensor, float | Tensor] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        *,
        partial: float = 0.125,
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
            partial=partial,
            decoupled_weight_decay=decoupled_weight_decay,
            form=form,
            maximize=maximize,
            foreach=foreach,
            fused=fused,
            capturable=capturable,
            differentiable=differentiable,
        )
