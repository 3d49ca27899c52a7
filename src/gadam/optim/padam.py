"""Padam and PadamW: the Adam-family update as a torch optimiser."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import (
    Optimizer,
    ParamsT,
    _device_dtype_check_for_fused,
    _get_scalar_dtype,
    _to_scalar,
    _use_grad_for_differentiable,
)

from gadam.optim.cpu import CachedLaunch, counts_steps, laid_out_alike
from gadam.optim.update import FORMS, Form, check_tensor_arguments, padam

__all__ = ["Padam", "PadamW"]


class Padam(Optimizer):
    r"""Partially adaptive Adam: Adam with its denominator raised to the power :math:`2p`.

    .. math::
       \begin{aligned}
         &\textbf{if } \textit{decoupled}: \theta \leftarrow (1 - \gamma\lambda)\,\theta,
          \quad \textbf{else } g_t \leftarrow g_t + \lambda\theta                            \\
         &m_t \leftarrow \beta_1 m_{t-1} + (1-\beta_1)\, g_t                                 \\
         &v_t \leftarrow \beta_2 v_{t-1} + (1-\beta_2)\, g_t^2                               \\
         &\theta \leftarrow \theta - s_t \, m_t / d_t
       \end{aligned}

    with step size :math:`s_t` and denominator :math:`d_t` by ``form`` and :math:`p` = ``partial``:

    ==========================  =============================================  ==================================================
    form                        :math:`s_t`                                    :math:`d_t`
    ==========================  =============================================  ==================================================
    official, :math:`p = 1/2`   :math:`\gamma/(1-\beta_1^t)`                   :math:`\sqrt{v_t}/\sqrt{1-\beta_2^t} + \epsilon`
    official, otherwise         :math:`\gamma\sqrt{1-\beta_2^t}/(1-\beta_1^t)` :math:`(\sqrt{v_t} + \epsilon)^{2p}`
    paper                       :math:`\gamma/(1-\beta_1^t)`                   :math:`(v_t/(1-\beta_2^t) + \epsilon)^p`
    ==========================  =============================================  ==================================================

    ``amsgrad`` puts the running maximum in place of :math:`v_t` (official) or of
    :math:`v_t/(1-\beta_2^t)` (paper).

    **What ε means changes at p = 1/2.** In the official form ε stands beside the *corrected* root at
    ``partial=0.5`` (torch's Adam) and beside the *uncorrected* root inside the power elsewhere, so
    its floor under the denominator is :math:`\epsilon^{2p}` (0.01 at the defaults); in the paper form
    it stands beside the corrected :math:`v` and the floor is :math:`\epsilon^p` (0.1). The official
    form also starts slowly: it carries an implicit warm-up factor :math:`(1-\beta_2^t)^{1/2-p}`.

    Args:
        params: parameters or named parameters to optimise, or dicts that define parameter groups
        lr: learning rate :math:`\gamma`; a 1-element tensor where torch's Adam takes one
        betas: decay rates :math:`\beta_1, \beta_2` of the moments
        eps: :math:`\epsilon`, see above
        weight_decay: :math:`\lambda`
        amsgrad: use the running maximum of the second moment
        partial: :math:`p` in [0, 0.5]; 0.5 is Adam, towards 0 SGD with momentum
        decoupled_weight_decay: decay the weights themselves (AdamW) instead of adding to the gradient
        form: ``"official"``, the update of the authors' released code, behind every number they
            print; or ``"paper"``, their Algorithm 1 with its misprints mended
        maximize: maximise the objective instead
        foreach: use the multi-tensor implementation; None chooses it where torch's Adam would
        fused: one pass over memory for the whole update: a compiled kernel on the CPU; on accelerators
            torch's own at ``partial=0.5``, ``form="official"``, and a Triton kernel (never timed on a
            GPU) otherwise. None chooses it on the CPU where it can serve, except in float64; see
            :func:`gadam.backends`
        capturable: keep the step count on the device, for CUDA graphs
        differentiable: let autograd run through the step

    Example:
        >>> import torch, gadam
        >>> model = torch.nn.Linear(4, 1)
        >>> optimizer = gadam.Padam(model.parameters(), lr=0.1, partial=0.125)
        >>> model(torch.randn(8, 4)).square().mean().backward()
        >>> optimizer.step()

    Reference: Chen et al., *Closing the Generalization Gap of Adaptive Gradient Methods in Training
    Deep Neural Networks* (arXiv 1806.06763). The "PADAM" of arXiv 2505.22085 is another method.
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
        decoupled_weight_decay: bool = False,
        form: Form = "official",
        maximize: bool = False,
        foreach: bool | None = None,
        fused: bool | None = None,
        capturable: bool = False,
        differentiable: bool = False,
    ) -> None:
        check_tensor_arguments(lr, betas, capturable, foreach)
        if not lr >= 0.0:
            raise ValueError(f"Invalid learning rate: {lr}")
        if not eps >= 0.0:
            raise ValueError(f"Invalid epsilon value: {eps}")
        for index, beta in enumerate(betas):
            if not 0.0 <= beta < 1.0:
                raise ValueError(f"Invalid beta parameter at index {index}: {beta}")
        if not weight_decay >= 0.0:
            raise ValueError(f"Invalid weight_decay value: {weight_decay}")
        if isinstance(betas[0], Tensor) != isinstance(betas[1], Tensor):
            raise ValueError("betas must be either both floats or both Tensors")
        super().__init__(
            params,
            {
                "lr": lr,
                "betas": tuple(map(_to_scalar, betas)),
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
        self._cached: dict[int, CachedLaunch] = {}  # by the group's id
        if fused:
            if differentiable:
                raise RuntimeError("`fused` does not support `differentiable`")
            if foreach:
                raise RuntimeError("`fused` and `foreach` cannot be `True` together.")
            # GradScaler then hands over its scale and its verdict instead of unscaling first.
            self._step_supports_amp_scaling = True

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a parameter group, as of any torch optimiser.

        Args:
            param_group: the parameters, under "params", and their options
        """
        partial = param_group.get("partial", self.defaults["partial"])
        form = param_group.get("form", self.defaults["form"])
        if not 0.0 <= partial <= 0.5:
            raise ValueError(f"Invalid partial value: {partial} (it must lie in [0, 0.5])")
        if form not in FORMS:
            raise ValueError(f"Invalid form: {form!r} (it must be 'official' or 'paper')")
        super().add_param_group(param_group)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._cached = {}
        for group in self.param_groups:
            # A checkpoint of an older version, or of torch's Adam(W), has no notion of these.
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
                        dtype=_get_scalar_dtype(is_fused=fused),
                        device=p.device if on_device else "cpu",
                    )
        if any(group["fused"] for group in self.param_groups):
            self._step_supports_amp_scaling = True

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
            # Not `len(state) == 0`: an average may already live there.
            if "step" not in state:
                if group["fused"]:
                    _device_dtype_check_for_fused(p)
                on_device = group["capturable"] or group["fused"]
                dtype = _get_scalar_dtype(is_fused=group["fused"])
                state["step"] = (
                    torch.zeros((), dtype=dtype, device=p.device)
                    if on_device
                    else torch.tensor(0.0, dtype=dtype, device="cpu")  # known even to fake tensors
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

    @_use_grad_for_differentiable
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Perform a single optimisation step.

        Args:
            closure: re-evaluates the model and returns the loss (optional)
        """
        self._accelerator_graph_capture_health_check()

        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()

        # Whether all parameters are finite, where every group's kernel has looked.
        finite: bool | None = True
        for group in self.param_groups:
            looked = self._step_kept(group)
            if looked is not None:
                finite = None if finite is None else finite and looked
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

            averages, fold_weight = self._to_fold(params_with_grad)
            looked = padam(
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
                averages=averages,
                fold_weight=fold_weight,
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
                finite = None if finite is None or looked is None else finite and looked
            if looked is not None:
                self._keep(group)
        self._finite = finite
        return loss

    @torch._disable_dynamo
    def _keep(self, group: dict[str, Any]) -> None:
        """After the kernel has served a group: keep what it needs for the next step."""
        params: list[Tensor] = group["params"]
        states = [self.state.get(p, {}) for p in params]
        names = ("exp_avg", "exp_avg_sq", *(["max_exp_avg_sq"] if group["amsgrad"] else []), "step")
        tensors = [state.get(name) for state in states for name in names]
        grads = [p.grad for p in params if p.grad is not None]
        if any(type(t) is not Tensor for t in tensors) or len(grads) != len(params):
            return  # missing, or a DTensor
        types = {(p.dtype, state["step"].dtype) for p, state in zip(params, states)}
        if len(types) == 1 and all(
            counts_steps(state["step"])
            and laid_out_alike(p, (grad, *(state[name] for name in names[:-1])))
            for p, grad, state in zip(params, grads, states)
        ):
            self._cached[id(group)] = CachedLaunch(list(params), states, names, grads)

    def _step_kept(self, group: dict[str, Any]) -> bool | None:
        """Step a group whose addresses are at hand; None where that cannot be."""
        if torch.compiler.is_compiling():
            return None
        cached = self._cached.get(id(group))
        if (
            cached is None
            or group["foreach"] is not None
            or group["fused"] is False
            or group["capturable"]
            or group["differentiable"]
            or getattr(self, "found_inf", None) is not None
            or getattr(self, "grad_scale", None) is not None
            or len(cached.names) != (4 if group["amsgrad"] else 3)
            or isinstance(group["betas"][0], Tensor)
            or not 0.0 <= group["partial"] <= 0.5
        ):
            return None
        params = group["params"]
        grads = [p.grad for p in params]
        if not cached.is_valid(params, grads, self.state):
            del self._cached[id(group)]
            return None
        averages, fold_weight = self._to_fold(params)
        if averages is not None and not cached.fit_averages(averages):
            return None
        return cached.step(
            grads,
            averages,
            fold_weight=fold_weight,
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

    def _to_fold(self, params: list[Tensor]) -> tuple[list[Tensor] | None, float]:
        """Averages to take these parameters into, as they are before the step, and their weight."""
        return None, 0.0


class PadamW(Padam):
    r""":class:`Padam` with decoupled weight decay: the iterates that GadamX averages.

    Args and algorithm are those of :class:`Padam`.

    Example:
        >>> import torch, gadam
        >>> model = torch.nn.Linear(4, 1)
        >>> optimizer = gadam.PadamW(model.parameters(), lr=0.1, weight_decay=2.5e-3)
        >>> optimizer.param_groups[0]["decoupled_weight_decay"]
        True
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
