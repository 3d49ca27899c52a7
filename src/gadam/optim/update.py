"""The Adam-family update, as a function of lists of tensors.

Adam, AdamW, Padam, PadamW, Gadam and GadamX differ only in one exponent and in where weight decay
goes. :func:`_single_tensor_padam` is the readable reference. Tests compare every other path with
it. See :class:`gadam.Padam` for the math.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable
from typing import Any, Literal, ParamSpec, TypeVar, cast

import torch
from torch import Tensor

from gadam import _torch
from gadam._dtensor import local
from gadam.average.fold import Fold
from gadam.optim import cpu

__all__ = ["FORMS", "Form", "check_tensor_arguments", "padam", "to_scalar"]

_P = ParamSpec("_P")
_T = TypeVar("_T")
Form = Literal["official", "paper"]
FORMS = ("official", "paper")


def check_tensor_arguments(
    lr: Any, betas: tuple[Any, Any], capturable: bool, foreach: bool | None
) -> None:
    """Reject tensor hyperparameters that torch's Adam rejects, with torch's messages.

    Args:
        lr: The learning rate.
        betas: The decay rates of the moments.
        capturable: Whether the step count is on the device.
        foreach: Whether to use the multi-tensor implementation.
    """
    for name, value in (("lr", lr), ("betas[0]", betas[0]), ("betas[1]", betas[1])):
        if isinstance(value, Tensor):
            if foreach and not capturable:
                raise ValueError(
                    f"{name} as a Tensor is not supported for capturable=False and foreach=True"
                )
            if value.numel() != 1:
                raise ValueError(f"Tensor {name} must be 1-element")


def to_scalar(value: float | Tensor) -> float | Tensor:
    """Return a 1-element tensor as a 0-dim tensor, and anything else unchanged.

    Args:
        value: A hyperparameter.
    """
    return value.squeeze() if isinstance(value, Tensor) and value.dim() != 0 else value


def _value(step: Tensor) -> Any:
    # A Python number is faster than a tensor, but the compiler must not read values.
    return step if torch.compiler.is_compiling() else step.item()


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
    """Run the reference implementation: parameter by parameter, line by line."""
    lr = to_scalar(lr)
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

        # m_t and v_t
        weight = (1 - beta1).to(param) if isinstance(beta1, Tensor) else 1 - beta1
        exp_avg.lerp_(grad, weight)
        if differentiable and isinstance(beta2, Tensor):
            exp_avg_sq.lerp_(grad.square(), (1 - beta2).to(param))
        else:
            exp_avg_sq.mul_(beta2).addcmul_(grad, grad, value=cast(float, 1 - beta2))

        # Tensors if the step must be captured or differentiated, Python numbers otherwise.
        step = step_t.clone() if capturable or differentiable else _value(step_t)
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
    """Run each line of the reference over all parameters of a device and dtype at once."""
    if not params:
        return
    if differentiable:
        raise AssertionError("_foreach ops don't support autograd")
    check_tensor_arguments(lr, (beta1, beta2), capturable, True)
    if capturable and not torch.compiler.is_compiling():
        for p, step in zip(params, state_steps):
            _check_capturable(p, step)

    lr, beta1, beta2 = to_scalar(lr), to_scalar(beta1), to_scalar(beta2)
    for group in _torch.group_by_device_and_dtype(
        [params, grads, exp_avgs, exp_avg_sqs, max_exp_avg_sqs, state_steps]
    ):
        params_, grads_, exp_avgs_, exp_avg_sqs_, max_exp_avg_sqs_, steps = group
        if has_complex:
            params_, grads_, exp_avgs_, exp_avg_sqs_, max_exp_avg_sqs_ = (
                [torch.view_as_real(t) if torch.is_complex(t) else t for t in tensors]
                for tensors in group[:-1]
            )
        if maximize:
            grads_ = list(_torch.foreach_neg(grads_))

        # On the CPU's slow path a Python 1 would become a new tensor for every parameter.
        if steps[0].is_cpu and not torch.compiler.is_compiling():
            _torch.foreach_add_(steps, torch.tensor(1.0), alpha=1.0)
        else:
            _torch.foreach_add_(steps, 1)

        if weight_decay != 0:
            if decoupled_weight_decay:
                _torch.foreach_mul_(params_, 1 - lr * weight_decay)
            elif maximize:  # the negated gradients are temporaries already
                _torch.foreach_add_(grads_, params_, alpha=weight_decay)
            else:
                grads_ = list(_torch.foreach_add(grads_, params_, alpha=weight_decay))

        weight: Any = 1 - beta1
        if isinstance(weight, Tensor):
            weight = weight.to(params_[0].device)
        _torch.foreach_lerp_(exp_avgs_, grads_, weight)
        _torch.foreach_mul_(exp_avg_sqs_, beta2)
        if isinstance(beta2, Tensor):
            _torch.foreach_addcmul_(exp_avg_sqs_, _torch.foreach_mul(grads_, 1 - beta2), grads_)
        else:
            _torch.foreach_addcmul_(exp_avg_sqs_, grads_, grads_, 1 - beta2)
        del grads_  # frees temporaries

        step_size: Any  # a number or tensor per parameter
        correction2: Any
        if capturable:
            step_size, correction2 = _bias_corrections_on_device(steps, beta1, beta2, lr)
        else:
            step_size = [lr / (1 - beta1 ** _value(step)) for step in steps]
            correction2 = [1 - beta2 ** _value(step) for step in steps]
        root2: Any = [c**0.5 for c in correction2]

        second_moments = exp_avg_sqs_
        if form == "paper":
            second_moments = list(_torch.foreach_div(exp_avg_sqs_, correction2))
        if amsgrad:
            _torch.foreach_maximum_(max_exp_avg_sqs_, second_moments)
            second_moments = max_exp_avg_sqs_

        if form == "paper":
            denom = _torch.foreach_add(second_moments, eps)
            _torch.foreach_pow_(denom, partial)
        else:
            denom = _torch.foreach_sqrt(second_moments)
            if partial == 0.5:
                _torch.foreach_div_(denom, root2)
                _torch.foreach_add_(denom, eps)
            else:
                _torch.foreach_add_(denom, eps)
                _torch.foreach_pow_(denom, 2 * partial)
                step_size = [s * r for s, r in zip(step_size, root2)]

        if capturable:
            _torch.foreach_div_(denom, step_size)
            _torch.foreach_neg_(denom)
            _torch.foreach_addcdiv_(params_, exp_avgs_, denom)
        else:
            negative: Any = [-s for s in step_size]
            if torch.compiler.is_compiling():
                negative = torch.stack(negative)
            _torch.foreach_addcdiv_(params_, exp_avgs_, denom, negative)


def _bias_corrections_on_device(
    steps: list[Tensor], beta1: float | Tensor, beta2: float | Tensor, lr: float | Tensor
) -> tuple[list[Tensor], list[Tensor]]:
    """Return lr / (1 - β1^t) and 1 - β2^t without reading t on the host."""
    correction1 = _torch.foreach_pow(beta1, steps)
    correction2 = _torch.foreach_pow(beta2, steps)
    for correction in (correction1, correction2):
        _torch.foreach_sub_(correction, 1)
        _torch.foreach_neg_(correction)
    return [lr / c for c in correction1], list(correction2)


def _check_capturable(param: Tensor, step: Tensor) -> None:
    devices = _torch.capturable_devices()
    if param.device.type != step.device.type or param.device.type not in devices:
        raise AssertionError(
            f"If capturable=True, params and state_steps must be on supported devices: {devices}."
        )


@_torch.disable_dynamo
def _fused_padam(
    params: list[Tensor],
    grads: list[Tensor],
    exp_avgs: list[Tensor],
    exp_avg_sqs: list[Tensor],
    max_exp_avg_sqs: list[Tensor],
    state_steps: list[Tensor],
    *,
    fold: Fold | None,
    grad_scale: Tensor | None,
    found_inf: Tensor | None,
    **kwargs: Any,
) -> bool | None:
    """Run the update in one pass over memory.

    On the CPU this is the compiled kernel. On accelerators it is torch's own fused Adam, or Triton
    for the updates that torch's does not support.

    All kernels walk through memory linearly and require the same layout for a parameter, its
    gradient and its moments. Nothing guarantees that, and torch's own kernel silently computes
    wrong results. So gradients are copied to their parameters' layout first, and parameters with
    gaps go to the reference.

    Returns:
        Whether all parameters are finite after the step, or None if that is unknown.
    """
    lists = [params, grads, exp_avgs, exp_avg_sqs, max_exp_avg_sqs, state_steps]
    by_kernel = cpu.supports(params) and 0.0 <= kwargs["partial"] <= 0.5
    aligned = [
        grad
        if grad.stride() == p.stride() or grad.shape != p.shape
        else torch.empty_like(p).copy_(grad)
        for p, grad in zip(params, grads)
    ]
    by_types: defaultdict[Any, list[int]] = defaultdict(list)
    rest: list[int] = []
    for i, p in enumerate(params):
        moments = (exp_avgs[i], exp_avg_sqs[i], *(max_exp_avg_sqs[i : i + 1]))
        countable = not by_kernel or cpu.can_count_steps(state_steps[i])
        if countable and cpu.same_layout(p, (aligned[i], *moments)):
            by_types[p.dtype, state_steps[i].dtype].append(i)
        else:
            rest.append(i)

    def pick(tensors: list[Tensor], indices: list[int]) -> list[Tensor]:
        return [tensors[i] for i in indices] if tensors else []

    if by_kernel or rest:
        if found_inf is not None and bool(found_inf):
            return None
        scale = 1.0 if grad_scale is None else float(grad_scale)
    finite = True
    for indices in by_types.values():
        chosen = [pick(tensors, indices) for tensors in (params, aligned, *lists[2:])]
        if by_kernel:
            finite &= _cpu_kernel_step(chosen, fold, indices, scale, **kwargs)
        else:
            _accelerator_step(
                chosen, fold, indices, grad_scale=grad_scale, found_inf=found_inf, **kwargs
            )
    if rest:
        chosen = [pick(tensors, rest) for tensors in lists]
        chosen[1] = [grad / scale for grad in chosen[1]]
        _single_tensor_padam(*chosen, **kwargs)
    return finite if by_kernel and not rest else None


_NOT_FOR_KERNELS = ("capturable", "differentiable", "has_complex", "lr")


def _cpu_kernel_step(
    lists: list[list[Tensor]],
    fold: Fold | None,
    indices: list[int],
    scale: float,
    **kwargs: Any,
) -> bool:
    params, grads, exp_avgs, exp_avg_sqs, max_exp_avg_sqs, state_steps = lists
    columns = {"exp_avg": exp_avgs, "exp_avg_sq": exp_avg_sqs}
    if max_exp_avg_sqs:
        columns["max_exp_avg_sq"] = max_exp_avg_sqs
    columns["step"] = state_steps
    states = [dict(zip(columns, row)) for row in zip(*columns.values())]
    launch = cpu.Launch(params, states, tuple(columns))
    averages, weight = None, None
    if fold is not None:
        averages = [local(fold.averages[i]) for i in indices]
        weight = fold.host_weight() if launch.supports_averages(averages) else None
    iterates = None
    # All parameters of the fold, or none: they must be of one type.
    if fold is not None and fold.iterates is not None and weight is not None:
        iterates = [local(fold.iterates[i]) for i in indices]
        if len(indices) < len(fold.params) or not launch.supports_iterates(iterates):
            iterates = None
    options = {k: v for k, v in kwargs.items() if k not in _NOT_FOR_KERNELS}
    finite = launch.step(
        grads,
        averages if weight is not None else None,
        iterates,
        lr=float(kwargs["lr"]),
        grad_scale=scale,
        fold_weight=weight or 0.0,
        interpolation=fold.interpolation if fold is not None else 0.0,
        **options,
    )
    if fold is not None and weight is not None:
        fold.folded += indices
        fold.is_pointed = iterates is not None
        fold.weight = weight
        fold.finite &= finite
    return finite


def _accelerator_step(
    lists: list[list[Tensor]], fold: Fold | None, indices: list[int], **kwargs: Any
) -> None:
    from gadam.optim import accelerator  # rarely needed, and each module costs import time

    partial, form = kwargs["partial"], kwargs["form"]
    if partial == 0.5 and form == "official":
        options = {k: v for k, v in kwargs.items() if k not in ("partial", "form")}
        _torch.fused_adam(*lists, **options)
    elif accelerator.supports(lists[0]):
        options = {k: v for k, v in kwargs.items() if k not in _NOT_FOR_KERNELS}
        params, grads, exp_avgs, exp_avg_sqs, max_exp_avg_sqs, state_steps = lists
        accelerator.step(
            params,
            grads,
            exp_avgs,
            exp_avg_sqs,
            max_exp_avg_sqs,
            state_steps,
            fold=fold,
            indices=indices,
            lr=kwargs["lr"],
            **options,
        )
    else:
        raise RuntimeError(
            f"`fused=True` has no kernel for partial={partial} with form={form!r} here (the CPU "
            f"kernel: {cpu.describe()}; accelerators: {accelerator.describe()}). Omit `fused`, or "
            "use `foreach=True`."
        )


def _eager_unless_capturable(function: Callable[_P, _T]) -> Callable[_P, _T]:
    """Keep torch.compile out of a step on an accelerator that is not capturable.

    Compiled code would use the step counts, which are on the device, as scalars.
    """
    eager = _torch.disable_dynamo(function)

    @functools.wraps(function)
    def inner(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        if torch.compiler.is_compiling() and not kwargs.get("capturable", False):
            state_steps = cast("list[Tensor]", args[5])
            if state_steps and state_steps[0].device.type in ("cuda", "xpu"):
                return eager(*args, **kwargs)
        return function(*args, **kwargs)

    return inner


@_eager_unless_capturable
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
    fold: Fold | None = None,
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
    """Perform the update of :class:`gadam.Padam` as a function.

    Args:
        params: The parameters.
        grads: Their gradients.
        exp_avgs: Their first moments.
        exp_avg_sqs: Their second moments.
        max_exp_avg_sqs: The running maxima of the second moments. Empty without ``amsgrad``.
        state_steps: Their step counts.
        foreach: Use the multi-tensor implementation. None decides.
        fused: Use a fused kernel. None decides.
        capturable: Keep the step count on the device.
        differentiable: Let autograd differentiate the step.
        has_complex: Whether any parameter is complex.
        grad_scale: GradScaler's scale, which the gradients still contain.
        found_inf: GradScaler's verdict. If it is nonzero, the step changes nothing.
        fold: Averages to fold the updated parameters into, if the kernel can do that in its own
            pass. It notes there what it has folded in.
        beta1: The decay rate of the first moments.
        beta2: The decay rate of the second moments.
        lr: The learning rate.
        weight_decay: The weight decay.
        decoupled_weight_decay: Decay the weights instead of adding to the gradients.
        eps: The term that keeps the denominator away from zero.
        amsgrad: Use the running maxima of the second moments.
        maximize: Maximize the objective.
        partial: The exponent p.
        form: The form of the update.

    Returns:
        Whether all parameters are finite after the step, or None if that is unknown.
    """
    if not params:
        return None
    if not torch.compiler.is_compiling() and not all(map(torch.is_tensor, state_steps)):
        raise RuntimeError(
            "API has changed, `state_steps` argument must contain a list of singleton tensors"
        )

    # The update is elementwise, so each process updates its own shards without DTensor dispatch.
    if not differentiable:
        grads = [local(grad, like=p) for grad, p in zip(grads, params)]
        params, exp_avgs, exp_avg_sqs, max_exp_avg_sqs = (
            [local(t) for t in tensors]
            for tensors in (params, exp_avgs, exp_avg_sqs, max_exp_avg_sqs)
        )

    if foreach is None and fused is None:
        # Users of float64 prefer precision to speed, and at p = 1/2 the reference equals torch's
        # AdamW bit for bit. So fused is opt-in for float64.
        fused = (
            not (capturable or differentiable or torch.compiler.is_compiling())
            and not isinstance(beta1, Tensor)
            and cpu.supports(params)
            and not any(p.dtype == torch.float64 for p in params)
        )
        if not fused:
            foreach = _torch.foreach_by_default(params, differentiable)
            if isinstance(lr, Tensor) and not capturable:
                foreach = False
    if foreach and any(p.is_cpu and p.dtype.itemsize < 4 for p in params):
        # On the CPU, torch's foreach functions round scalars to the tensors' type: a decay of 0.998
        # becomes 0.996 in bfloat16. The reference does not round.
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
            fold=fold,
            grad_scale=grad_scale,
            found_inf=found_inf,
            **kwargs,
        )
    if grad_scale is not None or found_inf is not None:
        raise AssertionError("Expected grad_scale and found_inf to be None")
    if foreach:
        _multi_tensor_padam(*lists, **kwargs)
    else:
        _single_tensor_padam(*lists, **kwargs)
    return None
