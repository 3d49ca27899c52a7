"""The fused step on accelerators, as a Triton kernel.

It covers the exponents that torch's own fused Adam does not support. It has been tested against the
reference under Triton's interpreter. Its speed has not been measured on a GPU.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
from torch import Tensor

from gadam import _torch
from gadam._dtensor import local
from gadam.average.fold import Fold

__all__ = ["describe", "step", "supports"]

_DEVICES = ("cuda", "xpu")
_TYPES = (torch.float32, torch.bfloat16, torch.float16)


@functools.cache
def _triton() -> Any:
    """Return the module triton, or None if it is not installed."""
    try:
        import triton
    except ImportError:
        return None
    return triton


def describe() -> str:
    """Describe the fused kernels for accelerators."""
    own = "torch's fused Adam (partial=0.5, form='official')"
    if _triton() is None:
        return f"{own}; other updates need Triton, which is not installed"
    return f"{own}; a Triton kernel for other updates"


def supports(params: list[Tensor]) -> bool:
    """Return True if the kernel supports the device and dtype of these tensors.

    Args:
        params: The tensors.
    """
    return _triton() is not None and all(
        p.device.type in _DEVICES and p.dtype in _TYPES for p in params
    )


@functools.cache
def _kernel() -> Any:
    """Return the kernel. Imports Triton on the first call; compiles nothing yet."""
    import triton
    import triton.language as tl

    @triton.jit  # type: ignore[untyped-decorator]
    def padam_kernel(  # type: ignore[no-untyped-def]
        param_ptr,
        grad_ptr,
        exp_avg_ptr,
        exp_avg_sq_ptr,
        max_exp_avg_sq_ptr,
        step_ptr,
        lr_ptr,
        grad_scale_ptr,
        found_inf_ptr,
        average_ptr,
        fold_weight_ptr,
        not_finite_ptr,
        numel,
        lr_number,
        log_beta1,
        log_beta2,
        one_minus_beta1,
        beta2,
        one_minus_beta2,
        eps,
        weight_decay,
        exponent,
        DECOUPLED: tl.constexpr,
        AMSGRAD: tl.constexpr,
        MAXIMIZE: tl.constexpr,
        PAPER: tl.constexpr,
        HALF: tl.constexpr,
        FLAT: tl.constexpr,
        HAS_GRAD_SCALE: tl.constexpr,
        HAS_FOUND_INF: tl.constexpr,
        LR_TENSOR: tl.constexpr,
        FOLD: tl.constexpr,
        BLOCK: tl.constexpr,
    ):
        offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        end = numel
        if HAS_FOUND_INF:  # read on the device: a step that GradScaler rejects writes nothing
            end = tl.where(tl.load(found_inf_ptr) == 0.0, numel, 0)
        mask = offsets < end
        # In double precision: 1 - 0.999^t would lose four digits in single.
        t = tl.load(step_ptr).to(tl.float64)
        correction1 = (1.0 - tl.exp(t * log_beta1)).to(tl.float32)
        correction2 = (1.0 - tl.exp(t * log_beta2)).to(tl.float32)
        lr = lr_number
        if LR_TENSOR:
            lr = tl.load(lr_ptr).to(tl.float32)
        size = lr / correction1

        p = tl.load(param_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
        g = tl.load(grad_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
        if HAS_GRAD_SCALE:
            g = g / tl.load(grad_scale_ptr).to(tl.float32)
        if MAXIMIZE:
            g = -g
        if DECOUPLED:
            p = p * (1.0 - lr * weight_decay)
        else:
            g = g + weight_decay * p
        m = tl.load(exp_avg_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
        v = tl.load(exp_avg_sq_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
        # like torch's lerp, which keeps the gradient's digits if beta1 is small
        near = m + one_minus_beta1 * (g - m)
        far = g - (1.0 - one_minus_beta1) * (g - m)
        m = tl.where(one_minus_beta1 < 0.5, near, far)
        v = v * beta2 + one_minus_beta2 * g * g
        tl.store(exp_avg_ptr + offsets, m.to(exp_avg_ptr.dtype.element_ty), mask=mask)
        tl.store(exp_avg_sq_ptr + offsets, v.to(exp_avg_sq_ptr.dtype.element_ty), mask=mask)
        second = v
        if PAPER:
            second = v / correction2
        if AMSGRAD:
            before = tl.load(max_exp_avg_sq_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
            second = tl.where(before > second, before, second)
            second = tl.where(before != before, before, second)  # NaN wins
            tl.store(
                max_exp_avg_sq_ptr + offsets,
                second.to(max_exp_avg_sq_ptr.dtype.element_ty),
                mask=mask,
            )
        if HALF:
            update = m / (tl.sqrt(second) / tl.sqrt(correction2) + eps)
        elif FLAT:  # p = 0: the power is 1 even for infinity and NaN
            update = m
        elif PAPER:
            update = m * tl.exp2(exponent * tl.log2(second + eps))
        else:
            update = m * tl.exp2(exponent * tl.log2(tl.sqrt(second) + eps))
        if not PAPER and not HALF:
            size = size * tl.sqrt(correction2)
        p = p - size * update
        stored = p.to(param_ptr.dtype.element_ty)
        tl.store(param_ptr + offsets, stored, mask=mask)
        if FOLD:
            # the parameter as it is stored; entries that are not finite are left out and reported
            new = stored.to(tl.float32)
            finite = tl.abs(new) < float("inf")  # False for NaN
            average = tl.load(average_ptr + offsets, mask=mask, other=0.0)
            weight = tl.load(fold_weight_ptr)
            # like torch's lerp
            close = average + weight * (new - average)
            distant = new - (1.0 - weight) * (new - average)
            folded = tl.where(weight < 0.5, close, distant)
            tl.store(average_ptr + offsets, folded, mask=mask & finite)
            bad = tl.max(tl.where(mask & (finite == 0), 1, 0), axis=0)
            tl.atomic_max(not_finite_ptr, bad)

    return padam_kernel


@functools.cache
def _undo_kernel() -> Any:
    """Return the kernel that takes a folded sample out again if a flag on the device is set."""
    import triton
    import triton.language as tl

    @triton.jit  # type: ignore[untyped-decorator]
    def undo_kernel(  # type: ignore[no-untyped-def]
        param_ptr, average_ptr, weight_ptr, flag_ptr, numel, BLOCK: tl.constexpr
    ):
        offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        end = tl.where(tl.load(flag_ptr) != 0, numel, 0)  # without the flag, nothing is read
        mask = offsets < end
        p = tl.load(param_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
        average = tl.load(average_ptr + offsets, mask=mask, other=0.0)
        weight = tl.load(weight_ptr)
        before = average + (average - p) * (weight / (1.0 - weight))
        before = tl.where(weight == 1.0, 0.0, before)  # the first sample
        tl.store(average_ptr + offsets, before, mask=mask & (tl.abs(p) < float("inf")))

    return undo_kernel


def step(
    params: list[Tensor],
    grads: list[Tensor],
    exp_avgs: list[Tensor],
    exp_avg_sqs: list[Tensor],
    max_exp_avg_sqs: list[Tensor],
    state_steps: list[Tensor],
    *,
    grad_scale: Tensor | None,
    found_inf: Tensor | None,
    fold: Fold | None = None,
    indices: list[int] | None = None,
    beta1: float,
    beta2: float,
    lr: float | Tensor,
    weight_decay: float,
    decoupled_weight_decay: bool,
    eps: float,
    amsgrad: bool,
    maximize: bool,
    partial: float,
    form: str,
) -> None:
    """Perform one step: one launch per parameter, without synchronizing with the host.

    A parameter, its gradient and its moments must have the same layout.

    Args:
        params: The parameters.
        grads: Their gradients.
        exp_avgs: Their first moments.
        exp_avg_sqs: Their second moments.
        max_exp_avg_sqs: The running maxima of the second moments. Empty without ``amsgrad``.
        state_steps: Their step counts.
        grad_scale: GradScaler's scale, which the gradients still contain.
        found_inf: GradScaler's verdict. If it is nonzero, the step changes nothing.
        fold: Averages to fold the updated parameters into. They are folded in if they are in
            float32, on the device and in the layout of the parameters.
        indices: The parameters' indices in ``fold``.
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
    """
    kernel = _kernel()
    rate = lr.to(params[0].device) if isinstance(lr, Tensor) else None
    numbers = (
        0.0 if rate is not None else float(lr),
        math.log(beta1) if beta1 else -math.inf,
        math.log(beta2) if beta2 else -math.inf,
        1 - beta1,
        beta2,
        1 - beta2,
        eps,
        weight_decay,
        -partial if form == "paper" else -2 * partial,
    )
    _torch.foreach_add_(state_steps, 1)
    block = 1024
    averages: list[Tensor] = []
    weight = not_finite = params[0]
    if fold is not None and indices is not None:
        averages = [local(fold.averages[i]) for i in indices]
        if _fits(averages, params):
            weight, not_finite = _note(fold, indices, params, averages)
        else:
            averages = []
    for i, p in enumerate(params):
        if not p.numel():
            continue
        kernel[((p.numel() + block - 1) // block,)](
            p,
            grads[i],
            exp_avgs[i],
            exp_avg_sqs[i],
            max_exp_avg_sqs[i] if amsgrad else p,
            state_steps[i],
            rate if rate is not None else p,
            grad_scale if grad_scale is not None else p,
            found_inf if found_inf is not None else p,
            averages[i] if averages else p,
            weight,
            not_finite,
            p.numel(),
            *numbers,
            DECOUPLED=decoupled_weight_decay,
            AMSGRAD=amsgrad,
            MAXIMIZE=maximize,
            PAPER=form == "paper",
            HALF=form == "official" and partial == 0.5,
            FLAT=partial == 0.0,
            HAS_GRAD_SCALE=grad_scale is not None,
            HAS_FOUND_INF=found_inf is not None,
            LR_TENSOR=rate is not None,
            FOLD=bool(averages),
            BLOCK=block,
        )
    if found_inf is not None:
        _torch.foreach_sub_(state_steps, [found_inf] * len(state_steps))
    torch.autograd.graph.increment_version([*params, *averages])


def _fits(averages: list[Tensor], params: list[Tensor]) -> bool:
    return all(
        average.dtype == torch.float32
        and average.device == p.device
        and average.shape == p.shape
        and average.stride() == p.stride()
        for average, p in zip(averages, params)
    )


def _note(
    fold: Fold, indices: list[int], params: list[Tensor], averages: list[Tensor]
) -> tuple[Tensor, Tensor]:
    """Note what the kernel folds in, and how to undo it. Returns the weight and the flag."""
    device = params[0].device
    if isinstance(fold.weight, float):
        fold.weight = fold.device_weight(device).to(torch.float32)
    if fold.not_finite is None:
        fold.not_finite = torch.zeros((), dtype=torch.int32, device=device)
    weight, before = fold.weight, fold.kernel_undo_if
    fold.folded += indices

    def undo_if(flag: Tensor) -> None:
        if before is not None:  # the parameters of another type
            before(flag)
        kernel, block = _undo_kernel(), 1024
        flag = flag.to(device, torch.int32)
        for p, average in zip(params, averages):
            if p.numel():
                grid = ((p.numel() + block - 1) // block,)
                kernel[grid](p, average, weight, flag, p.numel(), BLOCK=block)

    fold.kernel_undo_if = undo_if
    return weight, fold.not_finite
