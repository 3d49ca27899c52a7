"""The fused step on accelerators: the update as a Triton kernel, for the exponents that torch's own
fused Adam does not know.

It has been tested against the reference under Triton's interpreter. Its speed has not been measured
on a GPU.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
from torch import Tensor

__all__ = ["describe", "supports", "step"]

_DEVICES = ("cuda", "xpu")
_TYPES = (torch.float32, torch.bfloat16, torch.float16)


@functools.cache
def _triton() -> Any:
    """Triton, or None."""
    try:
        import triton
    except ImportError:
        return None
    return triton


def describe() -> str:
    """What there is for accelerators here."""
    own = "torch's fused Adam (partial=0.5, form='official')"
    if _triton() is None:
        return f"{own}; Triton is not installed, for the rest"
    return f"{own}; a Triton kernel for the rest"


def supports(params: list[Tensor]) -> bool:
    """Whether the kernel knows these tensors' place and type."""
    return _triton() is not None and all(
        p.device.type in _DEVICES and p.dtype in _TYPES for p in params
    )


@functools.cache
def _kernel() -> Any:
    """Compile nothing yet: only where it is wanted is Triton imported."""
    import triton
    import triton.language as tl

    @triton.jit
    def padam_kernel(
        param_ptr,
        grad_ptr,
        exp_avg_ptr,
        exp_avg_sq_ptr,
        max_exp_avg_sq_ptr,
        step_ptr,
        lr_ptr,
        grad_scale_ptr,
        found_inf_ptr,
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
        SCALED: tl.constexpr,
        WATCHED: tl.constexpr,
        LR_TENSOR: tl.constexpr,
        BLOCK: tl.constexpr,
    ):
        offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        end = numel
        if WATCHED:  # GradScaler's verdict, read where it is: a step it forbids writes nothing
            end = tl.where(tl.load(found_inf_ptr) == 0.0, numel, 0)
        mask = offsets < end
        # These in double precision: 1 - 0.999^t would lose four digits.
        t = tl.load(step_ptr).to(tl.float64)
        correction1 = (1.0 - tl.exp(t * log_beta1)).to(tl.float32)
        correction2 = (1.0 - tl.exp(t * log_beta2)).to(tl.float32)
        lr = lr_number
        if LR_TENSOR:
            lr = tl.load(lr_ptr).to(tl.float32)
        size = lr / correction1

        p = tl.load(param_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
        g = tl.load(grad_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
        if SCALED:
            g = g / tl.load(grad_scale_ptr).to(tl.float32)
        if MAXIMIZE:
            g = -g
        if DECOUPLED:
            p = p * (1.0 - lr * weight_decay)
        else:
            g = g + weight_decay * p
        m = tl.load(exp_avg_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
        v = tl.load(exp_avg_sq_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
        # as torch's lerp, which keeps the gradient's digits where beta1 is small
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
        elif FLAT:  # p = 0: the power is one, of infinity and NaN too
            update = m
        elif PAPER:
            update = m * tl.exp2(exponent * tl.log2(second + eps))
        else:
            update = m * tl.exp2(exponent * tl.log2(tl.sqrt(second) + eps))
        if not PAPER and not HALF:
            size = size * tl.sqrt(correction2)
        p = p - size * update
        tl.store(param_ptr + offsets, p.to(param_ptr.dtype.element_ty), mask=mask)

    return padam_kernel


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
    """One step, a launch per parameter, without a look at anything from the host.

    The arguments are those of the reference, GradScaler's ``grad_scale`` and ``found_inf`` besides.
    Tensors must be laid out alike, parameter by parameter.
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
    torch._foreach_add_(state_steps, 1)
    block = 1024
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
            p.numel(),
            *numbers,
            DECOUPLED=decoupled_weight_decay,
            AMSGRAD=amsgrad,
            MAXIMIZE=maximize,
            PAPER=form == "paper",
            HALF=form == "official" and partial == 0.5,
            FLAT=partial == 0.0,
            SCALED=grad_scale is not None,
            WATCHED=found_inf is not None,
            LR_TENSOR=rate is not None,
            BLOCK=block,
        )
    if found_inf is not None:
        torch._foreach_sub_(state_steps, [found_inf] * len(state_steps))
    torch.autograd.graph.increment_version(params)
