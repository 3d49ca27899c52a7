"""The one Adam-family update, as a function of lists of tensors.

Adam, AdamW, Padam, PadamW, Gadam and GadamX differ in one exponent and in where the weight decay
goes. :func:`_single_tensor_padam` is the readable reference, and every other path is tested to equal
it. The mathematics stand in :class:`gadam.Padam`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any, Literal, cast

import torch
from torch import Tensor
from torch.optim.adam import adam
from torch.optim.optimizer import (
    Optimizer,
    _default_to_fused_or_foreach,
    _disable_dynamo_if_unsupported,
    _get_capturable_supported_devices,
    _get_value,
    _stack_if_compiling,
    _to_scalar,
    _view_as_real,
)

from gadam._dtensor import local
from gadam.optim import cpu

__all__ = ["FORMS", "Form", "check_tensor_arguments", "padam"]

Form = Literal["official", "paper"]
FORMS = ("official", "paper")


def check_tensor_arguments(
    lr: Any, betas: tuple[Any, Any], capturable: bool, foreach: bool | None
) -> None:
    """Refuse tensor hyper-parameters where torch's Adam does, in torch's words."""
    for name, value in (("lr", lr), ("betas[0]", betas[0]), ("betas[1]", betas[1])):
        if isinstance(value, Tensor):
            if foreach and not capturable:
                raise ValueError(
                    f"{name} as a Tensor is not supported for capturable=False and foreach=True"
                )
            if value.numel() != 1:
                raise ValueError(f"Tensor {name} must be 1-element")


def _single_tensor_padam(
    params: list[Tensor],
    grads: list[Tensor],
    exp_avgs: list[Tensor],
    exp_avg_sqs: list[Tensor],
    max_exp_avg_sqs: list[Tensor],
    state_steps: list[Tensor],
    *,
    capturable: bool,
    differentiable: bool,
    has_complex: bool,
    beta1: float | Tensor,
    beta2: float | Tensor,
    lr: float | Tensor,
    weight_decay: float,
    decoupled_weight_decay: bool,
    eps: float,
    amsgrad: bool,
    maximize: bool,
    partial: float,
    form: Form,
) -> None:
    """The reference: one parameter after the other, one line of the algorithm after the other."""
    lr = _to_scalar(lr)
    for i, param in enumerate(params):
        grad = grads[i] if not maximize else -grads[i]
        exp_avg, exp_avg_sq = exp_avgs[i], exp_avg_sqs[i]
        max_exp_avg_sq = max_exp_avg_sqs[i] if amsgrad else None
        step_t = state_steps[i]
        if capturable and not torch.compiler.is_compiling():
            _check_capturable(param, step_t)

        step_t += 1
        if weight_decay != 0:
            if decoupled_weight_decay:
                param.mul_(1 - lr * weight_decay)
            elif isinstance(weight_decay, Tensor):
                grad = grad + weight_decay * param.clone()
            else:
                grad = grad.add(param, alpha=weight_decay)

        if torch.is_complex(param):
            param, grad = torch.view_as_real(param), torch.view_as_real(grad)
            exp_avg, exp_avg_sq = torch.view_as_real(exp_avg), torch.view_as_real(exp_avg_sq)
            if max_exp_avg_sq is not None:
                max_exp_avg_sq = torch.view_as_real(max_exp_avg_sq)

        # m and v
        weight = (1 - beta1).to(param) if isinstance(beta1, Tensor) else 1 - beta1
        exp_avg.lerp_(grad, weight)
        if differentiable and isinstance(beta2, Tensor):
            exp_avg_sq.lerp_(grad.square(), (1 - beta2).to(param))
        else:
            exp_avg_sq.mul_(beta2).addcmul_(grad, grad, value=cast(float, 1 - beta2))

        # As tensors where the step must be captured or differentiated, else as Python numbers.
        step = step_t.clone() if capturable or differentiable else _get_value(step_t)
        bias_correction1 = 1 - beta1**step
        bias_correction2 = 1 - beta2**step

        second_moment = exp_avg_sq.clone() if differentiable else exp_avg_sq
        if form == "paper":
            second_moment = second_moment / bias_correction2
        if max_exp_avg_sq is not None:
            before = max_exp_avg_sq.clone() if differentiable else max_exp_avg_sq
            max_exp_avg_sq.copy_(torch.maximum(before, second_moment))
            second_moment = max_exp_avg_sq.clone() if differentiable else max_exp_avg_sq

        step_size = lr / bias_correction1
        if form == "paper":
            denom = (second_moment + eps).pow(partial)
        elif partial == 0.5:
            denom = (second_moment.sqrt() / bias_correction2**0.5).add_(eps)
        else:
            step_size = step_size * bias_correction2**0.5
            denom = (second_moment.sqrt() + eps).pow(2 * partial)

        if capturable or differentiable:
            param.sub_(step_size * (exp_avg.clone() / denom))
        else:
            param.addcdiv_(exp_avg, denom, value=cast(float, -step_size))


def _multi_tensor_padam(
    params: list[Tensor],
    grads: list[Tensor],
    exp_avgs: list[Tensor],
    exp_avg_sqs: list[Tensor],
    max_exp_avg_sqs: list[Tensor],
    state_steps: list[Tensor],
    *,
    capturable: bool,
    differentiable: bool,
    has_complex: bool,
    beta1: float | Tensor,
    beta2: float | Tensor,
    lr: float | Tensor,
    weight_decay: float,
    decoupled_weight_decay: bool,
    eps: float,
    amsgrad: bool,
    maximize: bool,
    partial: float,
    form: Form,
) -> None:
    """The reference's lines, each over all the parameters of a device and dtype at once."""
    if not params:
        return
    if differentiable:
        raise AssertionError("_foreach ops don't support autograd")
    check_tensor_arguments(lr, (beta1, beta2), capturable, True)
    if capturable and not torch.compiler.is_compiling():
        for p, step in zip(params, state_steps):
            _check_capturable(p, step)

    lr, beta1, beta2 = _to_scalar(lr), _to_scalar(beta1), _to_scalar(beta2)
    grouped = Optimizer._group_tensors_by_device_and_dtype(
        [params, grads, exp_avgs, exp_avg_sqs, max_exp_avg_sqs, state_steps]  # type: ignore[list-item]
    )
    for lists, _ in grouped.values():
        params_, grads_, exp_avgs_, exp_avg_sqs_, max_exp_avg_sqs_, steps = cast(
            "list[list[Tensor]]", lists
        )
        if has_complex:
            states = [max_exp_avg_sqs_] if amsgrad else []
            _view_as_real(params_, grads_, exp_avgs_, exp_avg_sqs_, *states)
        if maximize:
            grads_ = list(torch._foreach_neg(grads_))

        # A Python 1 would be wrapped into a tensor once per step on the CPU's slow path.
        if steps[0].is_cpu and not torch.compiler.is_compiling():
            torch._foreach_add_(steps, torch.tensor(1.0), alpha=1.0)
        else:
            torch._foreach_add_(steps, 1)

        if weight_decay != 0:
            if decoupled_weight_decay:
                torch._foreach_mul_(params_, 1 - lr * weight_decay)
            elif maximize:  # these gradients are ours already
                torch._foreach_add_(grads_, params_, alpha=weight_decay)
            else:
                grads_ = list(torch._foreach_add(grads_, params_, alpha=weight_decay))

        weight: Any = 1 - beta1
        if isinstance(weight, Tensor):
            weight = weight.to(params_[0].device)
        torch._foreach_lerp_(exp_avgs_, grads_, weight)
        torch._foreach_mul_(exp_avg_sqs_, beta2)
        if isinstance(beta2, Tensor):
            torch._foreach_addcmul_(exp_avg_sqs_, torch._foreach_mul(grads_, 1 - beta2), grads_)
        else:
            torch._foreach_addcmul_(exp_avg_sqs_, grads_, grads_, 1 - beta2)
        del grads_  # may be temporaries

        step_size: Any  # one number or tensor per parameter
        correction2: Any
        if capturable:
            step_size, correction2 = _bias_corrections_on_device(steps, beta1, beta2, lr)
        else:
            step_size = [lr / (1 - beta1 ** _get_value(step)) for step in steps]
            correction2 = [1 - beta2 ** _get_value(step) for step in steps]
        root2: Any = [c**0.5 for c in correction2]

        second_moments = exp_avg_sqs_
        if form == "paper":
            second_moments = list(torch._foreach_div(exp_avg_sqs_, correction2))
        if amsgrad:
            torch._foreach_maximum_(max_exp_avg_sqs_, second_moments)
            second_moments = max_exp_avg_sqs_

        if form == "paper":
            denom = torch._foreach_add(second_moments, eps)
            torch._foreach_pow_(denom, partial)
        else:
            denom = torch._foreach_sqrt(second_moments)
            if partial == 0.5:
                torch._foreach_div_(denom, root2)
                torch._foreach_add_(denom, eps)
            else:
                torch._foreach_add_(denom, eps)
                torch._foreach_pow_(denom, 2 * partial)
                step_size = [s * r for s, r in zip(step_size, root2)]

        if capturable:
            torch._foreach_div_(denom, step_size)
            torch._foreach_neg_(denom)
            torch._foreach_addcdiv_(params_, exp_avgs_, denom)
        else:
            torch._foreach_addcdiv_(
                params_, exp_avgs_, denom, _stack_if_compiling([-s for s in step_size])
            )


def _bias_corrections_on_device(
    steps: list[Tensor], beta1: float | Tensor, beta2: float | Tensor, lr: float | Tensor
) -> tuple[list[Tensor], list[Tensor]]:
    """Give lr / (1 - β1^t) and 1 - β2^t without a look at t from the host."""
    correction1 = torch._foreach_pow(beta1, steps)  # type: ignore[arg-type]
    correction2 = torch._foreach_pow(beta2, steps)  # type: ignore[arg-type]
    for correction in (correction1, correction2):
        torch._foreach_sub_(correction, 1)
        torch._foreach_neg_(correction)
    return [lr / c for c in correction1], list(correction2)


def _check_capturable(param: Tensor, step: Tensor) -> None:
    devices = _get_capturable_supported_devices()
    if param.device.type != step.device.type or param.device.type not in devices:
        raise AssertionError(
            f"If capturable=True, params and state_steps must be on supported devices: {devices}."
        )


@torch._disable_dynamo
def _fused_padam(
    params: list[Tensor],
    grads: list[Tensor],
    exp_avgs: list[Tensor],
    exp_avg_sqs: list[Tensor],
    max_exp_avg_sqs: list[Tensor],
    state_steps: list[Tensor],
    *,
    averages: list[Tensor] | None,
    fold_weight: float,
    grad_scale: Tensor | None,
    found_inf: Tensor | None,
    **kwargs: Any,
) -> bool | None:
    """One pass over memory: the compiled kernel on the CPU; elsewhere torch's own fused Adam, and
    Triton's for what that does not know.

    All of them walk through memory and take a parameter, its gradient and its moments to be laid out
    alike, which nobody promises (torch's own goes wrong without a word). So gradients are laid out like
    their parameters first, and a parameter with gaps goes to the reference.
    """
    lists = [params, grads, exp_avgs, exp_avg_sqs, max_exp_avg_sqs, state_steps]
    by_kernel = cpu.supports(params) and 0.0 <= kwargs["partial"] <= 0.5
    aligned = [
        grad
        if grad.stride() == p.stride() or grad.shape != p.shape
        else torch.empty_like(p).copy_(grad)
        for p, grad in zip(params, grads)
    ]
    alike: defaultdict[Any, list[int]] = defaultdict(list)  # by types
    rest: list[int] = []
    for i, p in enumerate(params):
        moments = (exp_avgs[i], exp_avg_sqs[i], *(max_exp_avg_sqs[i : i + 1]))
        countable = not by_kernel or cpu.counts_steps(state_steps[i])
        if countable and cpu.laid_out_alike(p, (aligned[i], *moments)):
            alike[p.dtype, state_steps[i].dtype].append(i)
        else:
            rest.append(i)

    def pick(tensors: list[Tensor], indices: list[int]) -> list[Tensor]:
        return [tensors[i] for i in indices] if tensors else []

    if by_kernel or rest:
        if found_inf is not None and bool(found_inf):
            return None
        scale = 1.0 if grad_scale is None else float(grad_scale)
    finite = True
    for indices in alike.values():
        chosen = [pick(tensors, indices) for tensors in (params, aligned, *lists[2:])]
        into = pick(averages, indices) if averages is not None else None
        if by_kernel:
            finite &= _by_cpu_kernel(chosen, into, fold_weight, scale, **kwargs)
        else:
            if into is not None:
                _fold(into, chosen[0], fold_weight)
            _fused_elsewhere(chosen, grad_scale=grad_scale, found_inf=found_inf, **kwargs)
    if rest:
        chosen = [pick(tensors, rest) for tensors in lists]
        if averages is not None:
            _fold(pick(averages, rest), chosen[0], fold_weight)
        chosen[1] = [grad / scale for grad in chosen[1]]
        _single_tensor_padam(*chosen, **kwargs)
    return finite if by_kernel and not rest else None


_NOT_THE_KERNELS = ("capturable", "differentiable", "has_complex", "lr")


def _by_cpu_kernel(
    lists: list[list[Tensor]],
    averages: list[Tensor] | None,
    fold_weight: float,
    scale: float,
    **kwargs: Any,
) -> bool:
    params, grads, exp_avgs, exp_avg_sqs, max_exp_avg_sqs, state_steps = lists
    columns = {"exp_avg": exp_avgs, "exp_avg_sq": exp_avg_sqs}
    if max_exp_avg_sqs:
        columns["max_exp_avg_sq"] = max_exp_avg_sqs
    columns["step"] = state_steps
    states = [dict(zip(columns, row)) for row in zip(*columns.values())]
    prepared = cpu.Prepared(params, states, tuple(columns))
    if averages is not None and not prepared.fit_averages(averages):
        _fold(averages, params, fold_weight)
        averages = None
    options = {k: v for k, v in kwargs.items() if k not in _NOT_THE_KERNELS}
    lr = float(kwargs["lr"])
    return prepared.step(
        grads, averages, lr=lr, grad_scale=scale, fold_weight=fold_weight, **options
    )


def _fused_elsewhere(lists: list[list[Tensor]], **kwargs: Any) -> None:
    from gadam.optim import accelerator  # seldom wanted, and each module costs import time

    partial, form = kwargs["partial"], kwargs["form"]
    if partial == 0.5 and form == "official":
        torch_adam: Callable[..., None] = adam
        options = {k: v for k, v in kwargs.items() if k not in ("partial", "form")}
        torch_adam(*lists, fused=True, foreach=False, **options)
    elif accelerator.supports(lists[0]):
        options = {k: v for k, v in kwargs.items() if k not in _NOT_THE_KERNELS}
        params, grads, exp_avgs, exp_avg_sqs, max_exp_avg_sqs, state_steps = lists
        accelerator.step(
            params,
            grads,
            exp_avgs,
            exp_avg_sqs,
            max_exp_avg_sqs,
            state_steps,
            lr=kwargs["lr"],
            **options,
        )
    else:
        raise RuntimeError(
            f"`fused=True` has no kernel here for partial={partial} with form={form!r} (the CPU kernel: "
            f"{cpu.describe()}; accelerators: {accelerator.describe()}): leave `fused` out, or use "
            "`foreach=True`"
        )


def _fold(averages: list[Tensor], params: list[Tensor], weight: float) -> None:
    """Take the parameters into averages of other types, or in other places."""
    for average, p in zip(averages, params):
        average.lerp_(p.to(average.device, average.dtype), weight)


@_disable_dynamo_if_unsupported(single_tensor_fn=_single_tensor_padam)
def padam(
    params: list[Tensor],
    grads: list[Tensor],
    exp_avgs: list[Tensor],
    exp_avg_sqs: list[Tensor],
    max_exp_avg_sqs: list[Tensor],
    state_steps: list[Tensor],
    *,
    foreach: bool | None = None,
    fused: bool | None = None,
    capturable: bool = False,
    differentiable: bool = False,
    has_complex: bool = False,
    grad_scale: Tensor | None = None,
    found_inf: Tensor | None = None,
    averages: list[Tensor] | None = None,
    fold_weight: float = 0.0,
    beta1: float | Tensor,
    beta2: float | Tensor,
    lr: float | Tensor,
    weight_decay: float,
    decoupled_weight_decay: bool,
    eps: float,
    amsgrad: bool,
    maximize: bool,
    partial: float,
    form: Form,
) -> bool | None:
    """Functional form of the update: see :class:`gadam.Padam`.

    Takes the parameters, as they are before the step, into ``averages`` with ``fold_weight`` where
    those are given. Returns whether the parameters are finite after it, or None where nobody looked.
    """
    if not params:
        return None
    if not torch.compiler.is_compiling() and not all(map(torch.is_tensor, state_steps)):
        raise RuntimeError(
            "API has changed, `state_steps` argument must contain a list of singleton tensors"
        )

    # Elementwise, so a shard can be updated on its own: no DTensor dispatch, nothing gathered.
    if not differentiable:
        grads = [local(grad, like=p) for grad, p in zip(grads, params)]
        params, exp_avgs, exp_avg_sqs, max_exp_avg_sqs = (
            [local(t) for t in tensors]
            for tensors in (params, exp_avgs, exp_avg_sqs, max_exp_avg_sqs)
        )
        averages = averages and [local(t) for t in averages]

    if foreach is None and fused is None:
        # Who computes in float64 wants digits before speed, and at p = 1/2 the reference is torch's
        # AdamW to the bit: there fused=True must be asked for.
        fused = (
            not (capturable or differentiable or torch.compiler.is_compiling())
            and not isinstance(beta1, Tensor)
            and cpu.supports(params)
            and not any(p.dtype == torch.float64 for p in params)
        )
        if not fused:
            _, foreach = _default_to_fused_or_foreach(params, differentiable, use_fused=False)
            if isinstance(lr, Tensor) and not capturable:
                foreach = False
    if foreach and any(p.is_cpu and p.dtype.itemsize < 4 for p in params):
        # torch's foreach on the CPU is a loop that rounds scalars to the tensors' type: in bfloat16
        # a decay of 0.998 becomes 0.996. The reference does not.
        foreach = False

    kwargs: dict[str, Any] = {
        "capturable": capturable,
        "differentiable": differentiable,
        "has_complex": has_complex,
        "beta1": beta1,
        "beta2": beta2,
        "lr": lr,
        "weight_decay": weight_decay,
        "decoupled_weight_decay": decoupled_weight_decay,
        "eps": eps,
        "amsgrad": amsgrad,
        "maximize": maximize,
        "partial": partial,
        "form": form,
    }
    lists = (params, grads, exp_avgs, exp_avg_sqs, max_exp_avg_sqs, state_steps)
    if fused:
        return _fused_padam(
            *lists,
            averages=averages,
            fold_weight=fold_weight,
            grad_scale=grad_scale,
            found_inf=found_inf,
            **kwargs,
        )
    if grad_scale is not None or found_inf is not None:
        raise AssertionError("Expected grad_scale and found_inf to be None")
    if averages is not None:
        _fold(averages, params, fold_weight)
    if foreach:
        _multi_tensor_padam(*lists, **kwargs)
    else:
        _single_tensor_padam(*lists, **kwargs)
    return None
