"""The update, compared with the formulas, with torch's AdamW, and between its own paths."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import gadam
from contract import parameters, train
from gadam import _torch
from oracle import ScalarPadam, mean

HYPERPARAMETERS = st.fixed_dictionaries(
    {
        "lr": st.floats(1e-5, 1.0),
        # Below 0.5, torch's lerp loses digits of a moment that is far from the gradient.
        "betas": st.tuples(
            st.just(0.0) | st.floats(0.5, 0.99), st.just(0.0) | st.floats(0.5, 0.9999)
        ),
        "eps": st.sampled_from([1e-8, 1e-4, 1.0]),
        "weight_decay": st.sampled_from([0.0, 1e-4, 0.3]),
        "amsgrad": st.booleans(),
        "partial": st.sampled_from([0.0, 0.1, 0.125, 0.2, 0.25, 0.4, 0.5]),
        "form": st.sampled_from(["official", "paper"]),
        "maximize": st.booleans(),
    }
)


def against_oracle(gradients: list[list[float]], foreach: bool, decoupled: bool, **kw: Any) -> None:
    entries = len(gradients[0])
    start = [0.5 - 0.3 * i for i in range(entries)]
    p = torch.nn.Parameter(torch.tensor(start, dtype=torch.float64))
    optimizer = gadam.Padam([p], decoupled_weight_decay=decoupled, foreach=foreach, **kw)
    oracles = [ScalarPadam(x, decoupled=decoupled, **kw) for x in start]
    for gradient in gradients:
        p.grad = torch.tensor(gradient, dtype=torch.float64)
        optimizer.step()
        expected = [oracle.step(g) for oracle, g in zip(oracles, gradient)]
        torch.testing.assert_close(
            p.detach(), torch.tensor(expected, dtype=torch.float64), rtol=1e-12, atol=1e-12
        )


@given(
    HYPERPARAMETERS,
    st.lists(st.lists(st.floats(-10, 10), min_size=3, max_size=3), min_size=1, max_size=12),
    st.booleans(),
    st.booleans(),
)
def test_equals_the_formulas(hyper, gradients, foreach, decoupled):
    # eps > 0, so no gradient leads to a division by zero.
    against_oracle(gradients, foreach, decoupled, **hyper)


CASES: dict[str, tuple[Any, dict[str, Any], dict[str, Any]]] = {
    "gadam": (gadam.Gadam, {"lr": 1e-3, "weight_decay": 0.25}, {"partial": 0.5}),
    "gadam-amsgrad": (
        gadam.Gadam,
        {"lr": 1e-3, "weight_decay": 0.25, "amsgrad": True},
        {"partial": 0.5},
    ),
    "gadam-l2": (
        gadam.Gadam,
        {"lr": 1e-3, "weight_decay": 1.2e-6, "decoupled_weight_decay": False},
        {"partial": 0.5, "decoupled": False},
    ),
    "gadamx": (gadam.GadamX, {"lr": 0.1, "weight_decay": 2.5e-3}, {"partial": 0.125}),
    "gadamx-amsgrad": (
        gadam.GadamX,
        {"lr": 0.1, "weight_decay": 2.5e-3, "amsgrad": True},
        {"partial": 0.125},
    ),
    "gadamx-l2": (
        gadam.GadamX,
        {"lr": 1.0, "weight_decay": 1.2e-6, "partial": 0.2, "decoupled_weight_decay": False},
        {"partial": 0.2, "decoupled": False},
    ),
}


@pytest.mark.parametrize("foreach", [False, True], ids=["loop", "foreach"])
@pytest.mark.parametrize("case", CASES)
def test_sixty_steps_and_their_average_equal_the_authors_update(case, foreach):
    cls, keywords, oracle_extra = CASES[case]
    oracle_keywords = {
        **{k: v for k, v in keywords.items() if k not in ("decoupled_weight_decay", "partial")},
        **oracle_extra,
    }
    target = torch.tensor([1.0, -2.0, 0.5, 3.0], dtype=torch.float64)
    p = torch.nn.Parameter(torch.zeros(4, dtype=torch.float64))
    optimizer = cls([p], average=gadam.Averaging(start=31, every=3), foreach=foreach, **keywords)
    oracles = [ScalarPadam(0.0, **oracle_keywords) for _ in range(4)]
    samples: list[list[float]] = []
    for t in range(1, 61):
        noise = torch.sin(torch.arange(4, dtype=torch.float64) * 7 + t)
        p.grad = (p.detach() - target) + noise
        gradient = p.grad.tolist()
        optimizer.step()
        expected = [oracle.step(g) for oracle, g in zip(oracles, gradient)]
        torch.testing.assert_close(p.tolist(), expected, rtol=1e-12, atol=1e-12)
        if t >= 31 and (t - 31) % 3 == 0:
            samples.append(expected)
    assert optimizer.average.count == len(samples) == 10
    with optimizer.average.applied():
        torch.testing.assert_close(
            p.tolist(), [mean(column) for column in zip(*samples)], rtol=1e-12, atol=1e-12
        )


@pytest.mark.parametrize("foreach", [False, True], ids=["loop", "foreach"])
@pytest.mark.parametrize("amsgrad", [False, True])
@pytest.mark.parametrize("maximize", [False, True])
@pytest.mark.parametrize("decoupled", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_equals_torchs_adam_bitwise_at_one_half(dtype, decoupled, maximize, amsgrad, foreach):
    # On the CPU, torch's foreach rounds scalars to bfloat16; gadam's does not.
    foreach = foreach and dtype != torch.bfloat16
    flags = {"amsgrad": amsgrad, "maximize": maximize, "foreach": foreach}
    ours, theirs = parameters(dtype), parameters(dtype)
    train(
        gadam.Gadam(ours, 0.01, weight_decay=0.1, decoupled_weight_decay=decoupled, **flags),
        ours,
        8,
    )
    torchs = torch.optim.AdamW if decoupled else torch.optim.Adam
    train(torchs(theirs, 0.01, weight_decay=0.1, **flags), theirs, 8)
    for a, b in zip(ours, theirs):
        assert torch.equal(a, b)


def test_defaults_of_gadam_are_those_of_adamw():
    ours, theirs = parameters(torch.float64), parameters(torch.float64)
    train(gadam.Gadam(ours), ours, 5)
    train(torch.optim.AdamW(theirs), theirs, 5)
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs))


@pytest.mark.parametrize("decoupled", [False, True])
def test_fused_equals_the_loop(decoupled):
    ours, theirs = parameters(), parameters()
    keywords: dict[str, Any] = {"weight_decay": 0.1, "decoupled_weight_decay": decoupled}
    train(gadam.Gadam(ours, 0.01, fused=True, **keywords), ours, 8)
    train(gadam.Gadam(theirs, 0.01, foreach=False, **keywords), theirs, 8)
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


def test_fused_with_gaps_and_with_gradients_in_another_layout():
    """On the CPU, torch's fused AdamW silently computes both wrong."""
    results = []
    for fused in (False, True):
        torch.manual_seed(3)
        with_gaps = torch.nn.Parameter(torch.randn(6, 4)[:, ::2])
        transposed = torch.nn.Parameter(torch.randn(3, 5).t())
        optimizer = gadam.Gadam([with_gaps, transposed], 0.01, amsgrad=True, fused=fused)
        for _ in range(4):
            with_gaps.grad = torch.randn(6, 2)
            transposed.grad = torch.randn(5, 3)
            optimizer.step()
        results.append([with_gaps.detach(), transposed.detach()])
    torch.testing.assert_close(results[1], results[0], rtol=1e-5, atol=1e-6)


def test_warm_up_factor_of_the_official_form():
    """A first unit gradient moves θ by lr·(1−β2)^(½−p): 0.075 at p = 1/8."""
    p = torch.nn.Parameter(torch.zeros(1, dtype=torch.float64))
    p.grad = torch.ones_like(p)
    gadam.Padam([p], lr=1.0).step()
    assert p.item() == pytest.approx(-(0.001 ** (0.5 - 0.125)), rel=1e-6)
    assert p.item() == pytest.approx(-0.075, abs=1e-3)


@pytest.mark.parametrize(("form", "floor"), [("official", 0.01), ("paper", 0.1)])
def test_floor_of_the_denominator(form, floor):
    """As v → 0, the denominator is ε^2p or ε^p: 0.01 or 0.1 at ε = 1e-8, p = 1/8."""
    p = torch.nn.Parameter(torch.zeros(1, dtype=torch.float64))
    p.grad = torch.full_like(p, 1e-30)
    gadam.Padam([p], lr=1.0, betas=(0.0, 0.0), form=form).step()
    assert -p.item() / 1e-30 == pytest.approx(1 / floor, rel=1e-6)


@pytest.mark.parametrize("beta_tensors", [False, True])
@pytest.mark.parametrize("form", ["official", "paper"])
@pytest.mark.parametrize("partial", [0.125, 0.5])
@pytest.mark.parametrize("amsgrad", [False, True])
def test_differentiable(partial, form, amsgrad, beta_tensors):
    """Differentiate three steps with respect to start, gradient, lr and betas."""

    def after_three_steps(start, gradient, lr, beta1, beta2):
        p = start.clone()
        betas = (beta1, beta2) if beta_tensors else (0.9, 0.99)
        optimizer = gadam.Padam(
            [p],
            lr,
            betas,
            weight_decay=0.1,
            amsgrad=amsgrad,
            partial=partial,
            form=form,
            differentiable=True,
        )
        for k in range(1, 4):
            p.grad = gradient * k
            optimizer.step()
        return p

    def leaf(*values: float) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.float64, requires_grad=True)

    scalars = [
        torch.tensor(value, dtype=torch.float64, requires_grad=True) for value in (0.1, 0.9, 0.99)
    ]
    assert torch.autograd.gradcheck(
        after_three_steps, (leaf(0.3, -0.7), leaf(0.2, -1.1), *scalars), atol=1e-4
    )


def test_differentiable_l2_and_decoupled_decay_as_tensors():
    for decoupled in (False, True):
        p = torch.tensor([0.5, -1.0], dtype=torch.float64, requires_grad=True).clone()
        decay = torch.tensor(0.1, dtype=torch.float64, requires_grad=True)
        optimizer = gadam.Padam(
            [p],
            weight_decay=decay,  # type: ignore[arg-type]
            decoupled_weight_decay=decoupled,
            differentiable=True,
        )
        for _ in range(2):
            p.grad = torch.ones_like(p)
            optimizer.step()
        p.sum().backward()
        assert decay.grad is not None
        assert torch.isfinite(decay.grad)
        assert decay.grad != 0


@pytest.mark.parametrize("capturable", [False, True])
def test_multi_tensor_capturable_branch_equals_the_reference(capturable, monkeypatch):
    """Run the branch that keeps the step on the device, here on the CPU.

    There the step is a float32, as in torch, and so is 1 - 0.999^t: it is accurate to 1e-4.
    """
    monkeypatch.setattr(_torch, "capturable_devices", lambda: ["cpu"])
    for kw in ({}, {"amsgrad": True}, {"form": "paper"}, {"partial": 0.5}):
        reference, loop, multi = (parameters(torch.float64) for _ in range(3))
        train(gadam.Padam(reference, 0.1, weight_decay=0.1, **kw), reference, 6)
        train(
            gadam.Padam(loop, 0.1, weight_decay=0.1, capturable=capturable, foreach=False, **kw),
            loop,
            6,
        )
        train(
            gadam.Padam(
                multi,
                torch.tensor(0.1, dtype=torch.float64) if capturable else 0.1,
                weight_decay=0.1,
                capturable=capturable,
                foreach=True,
                **kw,
            ),
            multi,
            6,
        )
        torch.testing.assert_close(loop, reference, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(multi, reference, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("foreach", [False, True])
def test_nan_and_inf_propagate_as_in_adam(foreach):
    for bad in (float("nan"), float("inf")):
        ours, theirs = parameters(), parameters()
        for cls, params in ((gadam.Gadam, ours), (torch.optim.AdamW, theirs)):
            optimizer = cls(params, foreach=foreach)
            train(optimizer, params, 2)
            params[0].grad[0, 0] = bad  # type: ignore[index]
            optimizer.step()
        for a, b in zip(ours, theirs):
            assert torch.equal(torch.isnan(a), torch.isnan(b))
        assert not torch.isfinite(ours[0][0, 0])


def test_padam_at_different_partials_differs():
    """The exponent has an effect."""
    a, b = parameters(), parameters()
    train(gadam.Padam(a, 0.01, partial=0.5), a, 3)
    train(gadam.Padam(b, 0.01, partial=0.125), b, 3)
    assert not torch.allclose(a[0], b[0])


def test_groups_may_differ_in_partial_and_form():
    params = parameters(torch.float64)
    alone = copy.deepcopy(params)
    groups: list[Any] = [
        {"params": params[:2], "partial": 0.5},
        {"params": params[2:], "form": "paper"},
    ]
    train(gadam.Padam(groups, lr=0.1), params, 4)
    cases: list[tuple[slice, Any]] = [
        (slice(0, 2), {"partial": 0.5}),
        (slice(2, None), {"form": "paper"}),
    ]
    for subset, kw in cases:
        expected = copy.deepcopy(alone)
        train(gadam.Padam(expected, 0.1, **kw), expected, 4)
        assert torch.equal(params[subset][0], expected[subset][0])
