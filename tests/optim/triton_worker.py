"""Compare the Triton kernel with the reference, under Triton's interpreter.

Run as a program: Triton chooses the interpreter when it is imported.
"""

from __future__ import annotations

import itertools
import os
import sys
from pathlib import Path
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"
sys.path.insert(0, str(Path(__file__).parents[1]))

import torch

import gadam
from contract import parameters, set_gradients
from gadam.average.fold import Fold
from gadam.optim import accelerator
from gadam.optim.update import padam

Lists = list[list[torch.Tensor]]


def lists_for(dtype: torch.dtype) -> tuple[list[torch.nn.Parameter], Lists]:
    params = [p for p in parameters(dtype) if p.is_contiguous()]
    moments: Lists = [[torch.zeros_like(p) for p in params] for _ in range(3)]
    return params, [*moments, [torch.zeros(()) for _ in params]]


def options(**changes: Any) -> dict[str, Any]:
    return {
        "beta1": 0.9,
        "beta2": 0.99,
        "lr": 0.05,
        "weight_decay": 0.1,
        "decoupled_weight_decay": True,
        "eps": 1e-8,
        "amsgrad": False,
        "maximize": False,
        "partial": 0.125,
        "form": "official",
        **changes,
    }


@torch.no_grad()
def run(
    dtype: torch.dtype, triton: bool, steps: int = 4, scale: float = 1.0, **changes: Any
) -> Lists:
    params, (m, v, v_max, counts) = lists_for(dtype)
    chosen = options(**changes)
    for step in range(steps):
        set_gradients(params, step)
        grads: Any = [p.grad for p in params]
        if triton:
            grads = [grad * scale for grad in grads]
        maxima = v_max if chosen["amsgrad"] else []
        if triton:
            accelerator.step(
                params,  # type: ignore[arg-type]
                grads,
                m,
                v,
                maxima,
                counts,
                grad_scale=torch.tensor(scale) if scale != 1.0 else None,
                found_inf=torch.tensor(0.0) if scale != 1.0 else None,
                **chosen,
            )
        else:
            padam(params, grads, m, v, maxima, counts, foreach=False, fused=False, **chosen)  # type: ignore[arg-type]
    return [[p.detach() for p in params], m, v, v_max, counts]


def fold_of(params: list[Any], averages: list[torch.Tensor], weight: float) -> Fold:
    return Fold(params, averages, lambda: None, lambda _: torch.tensor(weight))


@torch.no_grad()
def check_folds() -> None:
    """The kernel folds the updated parameters in as they are stored, and can take them out."""
    for dtype, weight, bad, rejected in itertools.product(
        [torch.float32, torch.bfloat16], [0.0, 0.2, 0.5, 1.0], [0.0, float("nan")], [0.0, 1.0]
    ):
        params, (m, v, _, counts) = lists_for(dtype)
        set_gradients(params, 1)
        params[0].grad[0, 0] += bad  # type: ignore[index]
        averages = [torch.randn(p.shape) for p in params]
        if weight == 1.0:  # the first sample
            averages = [torch.zeros(p.shape) for p in params]
        before = [average.clone() for average in averages]
        fold = fold_of(params, averages, weight)
        accelerator.step(
            params,  # type: ignore[arg-type]
            [p.grad for p in params],  # type: ignore[misc]
            m,
            v,
            [],
            counts,
            grad_scale=torch.tensor(1.0),
            found_inf=torch.tensor(rejected),
            fold=fold,
            indices=list(range(len(params))),
            **options(),
        )
        assert fold.folded == list(range(len(params)))
        assert fold.not_finite is not None
        assert bool(fold.not_finite) == (bad != 0.0 and not rejected)
        expected = [b.clone() for b in before]
        for p, average in zip(params, expected):
            new = p.detach().float()
            folded = torch.lerp(average, new, weight)
            if not rejected:
                average.copy_(torch.where(torch.isfinite(new), folded, average))
        torch.testing.assert_close(averages, expected, rtol=1e-6, atol=1e-6)
        if not rejected:
            fold.undo_if(torch.tensor(False))
            torch.testing.assert_close(averages, expected, rtol=1e-6, atol=1e-6)
            fold.undo_if(torch.tensor(True))
            torch.testing.assert_close(averages, before, rtol=1e-5, atol=1e-5)


def check_averages() -> None:
    """GadamX with the kernel has the same average as without it, and skips the same samples."""
    from gadam.optim import cpu

    supports, note = (cpu.supports, accelerator.supports), accelerator._note
    notes: list[int] = []
    accelerator._note = lambda *arguments: notes.append(1) or note(*arguments)  # type: ignore[func-returns-value]
    for weighting in (gadam.Mean(), gadam.EMA(0.7)):
        results = []
        for triton in (False, True):
            if triton:
                cpu.supports = lambda params: False
                accelerator.supports = lambda params: True
            params = [p for p in parameters() if p.is_contiguous()]
            plan = gadam.Averaging(start=2, weighting=weighting)
            flags: dict[str, Any] = {"fused": True} if triton else {"foreach": True}
            optimizer = gadam.GadamX(params, 0.05, average=plan, **flags)
            try:
                for step in range(1, 9):
                    set_gradients(params, step)
                    if step in (2, 6):
                        params[0].grad[0, 0] = float("nan")  # type: ignore[index]
                    weights = [p.detach().clone() for p in params]
                    optimizer.step()
                    if step in (2, 6):  # as a user who skips the batch
                        for p, value in zip(params, weights):
                            p.data.copy_(value)
                            for name in ("exp_avg", "exp_avg_sq"):
                                optimizer.state[p][name].nan_to_num_()
            finally:
                cpu.supports, accelerator.supports = supports
            assert (optimizer.average.count, optimizer.average.skipped) == (5, 2)
            results.append([optimizer.state[p]["average"] for p in params])
        torch.testing.assert_close(results[1], results[0], rtol=1e-5, atol=1e-5)
    accelerator._note = note
    assert len(notes) == 2 * 7  # one per due step


def main() -> None:
    cases = 0
    for form, partial, amsgrad, decoupled, maximize in itertools.product(
        ["official", "paper"], [0.0, 0.125, 0.2, 0.5], [False, True], [False, True], [False, True]
    ):
        changes: dict[str, Any] = {
            "form": form,
            "partial": partial,
            "amsgrad": amsgrad,
            "decoupled_weight_decay": decoupled,
            "maximize": maximize,
        }
        reference = run(torch.float32, triton=False, **changes)
        kernel = run(torch.float32, triton=True, **changes)
        torch.testing.assert_close(kernel, reference, rtol=2e-5, atol=1e-6)
        cases += 1
    # Tensor learning rate, GradScaler's scale, half precision
    reference = run(torch.float32, triton=False)
    torch.testing.assert_close(
        run(torch.float32, triton=True, lr=torch.tensor(0.05)), reference, rtol=2e-5, atol=1e-6
    )
    torch.testing.assert_close(
        run(torch.float32, triton=True, scale=64.0), reference, rtol=2e-5, atol=1e-6
    )
    for dtype in (torch.bfloat16, torch.float16):
        torch.testing.assert_close(
            run(dtype, triton=True, eps=1e-2)[0],
            run(dtype, triton=False, eps=1e-2)[0],
            rtol=4e-2,
            atol=4e-2,
        )
    # A step that GradScaler rejects changes nothing, the step count included
    params, (m, v, _, counts) = lists_for(torch.float32)
    before = [p.detach().clone() for p in params]
    set_gradients(params, 1)
    with torch.no_grad():
        accelerator.step(
            params,  # type: ignore[arg-type]
            [p.grad for p in params],  # type: ignore[misc]
            m,
            v,
            [],
            counts,
            grad_scale=torch.tensor(2.0),
            found_inf=torch.tensor(1.0),
            **options(),
        )
    torch.testing.assert_close([p.detach() for p in params], before, rtol=0, atol=0)
    assert all(not moment.any() for moment in (*m, *v, *counts))
    # Zeros, infinities and NaN propagate as in the reference
    for bad in (0.0, float("inf"), float("nan"), 1e30):
        results = []
        for triton in (False, True):
            p = torch.nn.Parameter(torch.ones(3))
            state = [[torch.zeros(3)], [torch.zeros(3)], [], [torch.zeros(())]]
            with torch.no_grad():
                gradient = [torch.tensor([1.0, bad, -1.0])]
                if triton:
                    accelerator.step(
                        [p], gradient, *state, grad_scale=None, found_inf=None, **options()
                    )
                else:
                    padam([p], gradient, *state, foreach=False, fused=False, **options())
            results.append(p.detach())
        torch.testing.assert_close(results[1], results[0], rtol=2e-5, atol=1e-6, equal_nan=True)
    check_folds()
    check_averages()
    print(f"{cases} combinations equal the reference")


if __name__ == "__main__":
    main()
