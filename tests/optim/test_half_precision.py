"""The kernel's float16 and bfloat16 steps, compared with one float64 step that is rounded once.

The bounds are those of docs/precision.md. An ulp is the distance between neighbors of the storage
type.
"""

from __future__ import annotations

import math
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

import gadam
from gadam.optim import cpu
from oracle import BFLOAT16, FLOAT16, Half, ScalarPadam

if not cpu.is_available():
    pytest.skip(f"no CPU kernel: {cpu.describe()}", allow_module_level=True)

TYPES = {torch.float16: FLOAT16, torch.bfloat16: BFLOAT16}
# An error is at most 1/2 ulp of the exact result, plus this many ulp of the largest term. float32
# arithmetic adds at most 22 roundings of 2^-24, which are 22 · 2^-13 or 22 · 2^-16 ulp.
EXCESS = {torch.float16: 0.003, torch.bfloat16: 0.0005}

DOCUMENT = Path(__file__).parents[2] / "docs" / "precision.md"


def is_close(stored: float, exact: float, extra: float, half: Half) -> bool:
    """Return True if the error is at most 1/2 ulp of the exact value plus an extra amount."""
    if math.isinf(stored):
        overflow = half.largest + half.ulp(half.largest) / 2
        return math.copysign(1.0, stored) * exact + extra >= overflow
    return abs(stored - exact) <= half.ulp(exact) / 2 + extra


# ------------------------------------------------------------------------------------- values


def any_bits(n: int, dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    """Return finite numbers of all magnitudes, zeros and subnormal numbers included."""
    bits = torch.randint(-32768, 32768, (n,), generator=generator).to(torch.int16)
    values = bits.view(dtype)
    # Differences must not overflow float32 on the way.
    return torch.where(values.double().abs() < 2.0**126, values, torch.zeros_like(values))


def values(
    n: int, dtype: torch.dtype, generator: torch.Generator, exponent: float, spread: float
) -> torch.Tensor:
    """Return numbers around a power of two. Some are zero."""
    size = torch.randn(n, generator=generator, dtype=torch.float64) * spread + exponent
    size = size.clamp(-49, 49).exp2()
    drawn = torch.randn(n, generator=generator, dtype=torch.float64).sign() * size
    drawn *= torch.rand(n, generator=generator, dtype=torch.float64) + 0.5
    drawn[torch.rand(n, generator=generator) < 0.05] = 0.0
    largest = TYPES[dtype].largest
    return drawn.clamp(-largest, largest).to(dtype)


SIZES = (1, 0, 128, 5, 131, 32)  # blocks of the kernel have 128 elements
LAYOUTS = ("contiguous", "transposed", "channels last", "unaligned", "other gradient")


def laid_out(flat: torch.Tensor, layout: str) -> torch.Tensor:
    """Return the same elements in another shape and order in memory."""
    n = flat.numel()
    if layout == "unaligned":
        return torch.cat([flat.new_zeros(1), flat])[1:]
    if layout == "transposed" and n % 2 == 0:
        return flat.reshape(2, n // 2).t()
    if layout == "channels last" and n % 32 == 0 and n:
        return flat.reshape(n // 32, 4, 4, 2).contiguous(memory_format=torch.channels_last)
    return flat.clone()


# ---------------------------------------------------------------------------------- one step


class Step:
    """One step of the kernel from a given stored state, and the inputs of it."""

    def __init__(
        self,
        dtype: torch.dtype,
        theta: torch.Tensor,
        grad: torch.Tensor,
        m: torch.Tensor,
        v: torch.Tensor,
        v_max: torch.Tensor,
        *,
        steps: int,
        optimizer: type[gadam.Padam] = gadam.Padam,
        layout: str = "contiguous",
        hyper: dict[str, Any],
    ) -> None:
        self.dtype, self.half, self.hyper, self.steps = dtype, TYPES[dtype], hyper, steps
        inputs = {"theta": theta, "grad": grad, "m": m, "v": v, "v_max": v_max}
        self.before: dict[str, list[float]] = {name: [] for name in inputs}
        self.after: dict[str, list[float]] = {"theta": [], "m": [], "v": [], "v_max": []}
        params: list[torch.nn.Parameter] = []
        states = []
        sizes = SIZES if theta.numel() > sum(SIZES) else ()
        for part in torch.arange(theta.numel()).split([*sizes, theta.numel() - sum(sizes)]):
            pieces = {name: laid_out(x[part], layout) for name, x in inputs.items()}
            for name, piece in pieces.items():
                self.before[name] += piece.flatten().tolist()
            p = torch.nn.Parameter(pieces["theta"].detach())
            p.grad = pieces["grad"]
            if layout == "other gradient" and p.numel() % 2 == 0:
                p = torch.nn.Parameter(p.detach().reshape(2, -1))
                p.grad = pieces["grad"].reshape(2, -1).t().contiguous().t()
                pieces = {name: piece.reshape(2, -1) for name, piece in pieces.items()}
            params.append(p)
            states.append(
                {
                    "step": torch.tensor(float(steps)),
                    "exp_avg": pieces["m"],
                    "exp_avg_sq": pieces["v"],
                    **({"max_exp_avg_sq": pieces["v_max"]} if hyper["amsgrad"] else {}),
                }
            )
        keywords = dict(hyper)
        if optimizer is gadam.Gadam:  # it has p = 1/2
            self.hyper = {**hyper, "partial": 0.5}
            del keywords["partial"]
        made = optimizer(params, fused=True, **keywords)
        made.state.update(zip(params, states))
        made.step()
        assert made._finite is not None  # the kernel ran, not the reference
        for p, state in zip(params, states):
            self.after["theta"] += p.detach().flatten().tolist()
            self.after["m"] += state["exp_avg"].flatten().tolist()
            self.after["v"] += state["exp_avg_sq"].flatten().tolist()
            self.after["v_max"] += state.get("max_exp_avg_sq", p.detach()).flatten().tolist()

    def oracle(self, i: int) -> ScalarPadam:
        hyper = dict(self.hyper)
        decoupled = hyper.pop("decoupled_weight_decay")
        oracle = ScalarPadam(self.before["theta"][i], decoupled=decoupled, **hyper)
        oracle.m, oracle.v = self.before["m"][i], self.before["v"][i]
        oracle.v_max, oracle.t = self.before["v_max"][i], self.steps
        return oracle

    def check(self, *, moments_only: bool = False) -> None:
        for i in range(len(self.before["theta"])):
            self._check(i, moments_only)

    def _check(self, i: int, moments_only: bool) -> None:
        half, excess, hyper = self.half, EXCESS[self.dtype], self.hyper
        before = {name: x[i] for name, x in self.before.items()}
        after = {name: x[i] for name, x in self.after.items()}
        beta1, beta2 = hyper["betas"]
        oracle = self.oracle(i)
        oracle.update_moments(before["grad"])

        def close(name: str, exact: float, extra: float) -> None:
            assert is_close(after[name], exact, extra, half), (
                f"{name}: stored {after[name]!r}, exact {exact!r}, extra {extra!r}, {before}"
            )

        # The gradient with L2 decay: terms of the size `grad` may cancel.
        l2 = 0.0 if hyper["decoupled_weight_decay"] else hyper["weight_decay"]
        sign = -1.0 if hyper["maximize"] else 1.0
        g = sign * before["grad"] + l2 * before["theta"]
        grad = abs(before["grad"]) + abs(l2 * before["theta"])
        m_terms = abs(before["m"]), (1 - beta1) * max(grad, abs(before["m"]))
        if beta1 <= 0.5:  # the other form of lerp
            m_terms = grad, beta1 * max(grad, abs(before["m"]))
        v_terms = beta2 * before["v"], (1 - beta2) * grad * grad
        close("m", oracle.m, excess * half.ulp(max(m_terms)))
        close("v", oracle.v, excess * half.ulp(max(v_terms)))
        if moments_only:
            return

        cancellation = grad / abs(g) if g else (math.inf if grad else 1.0)
        if cancellation > 1e6 or not math.isfinite(after["m"]):
            return
        exact_m, theta = oracle.m, oracle.theta
        oracle.m = after["m"]
        exact = oracle.update_parameter()
        if hyper["amsgrad"]:
            close("v_max", oracle.v_max, cancellation * excess * half.ulp(oracle.v_max))
        kept = theta * (1 - hyper["lr"] * hyper["weight_decay"]) if not l2 else theta
        update = abs(exact - kept)
        largest = max(abs(theta), update)
        close("theta", exact, cancellation * excess * half.ulp(largest))

        # The whole step in float64, where the first moment is not rounded either. An error of x ulp
        # of the moment becomes at most 2x ulp of the update.
        if abs(exact_m) >= math.ldexp(1.0, half.smallest):
            exact = self.oracle(i).step(before["grad"])
            update = abs(exact - kept)
            rounding = 1 + 2 * excess * half.ulp(max(m_terms)) / half.ulp(exact_m)
            extra = cancellation * excess * half.ulp(max(abs(theta), update))
            close("theta", exact, rounding * half.ulp(update) + extra)


HYPER = st.fixed_dictionaries(
    {
        "lr": st.floats(-6, 1).map(lambda x: 10.0**x),
        "betas": st.tuples(
            st.one_of(st.sampled_from([0.9, 0.5, 0.0, 0.99]), st.floats(1e-6, 0.999)),
            st.one_of(st.sampled_from([0.999, 0.9, 0.0]), st.floats(1e-6, 0.99999)),
        ),
        "eps": st.floats(-12, 0).map(lambda x: 10.0**x),
        "weight_decay": st.one_of(st.just(0.0), st.floats(-5, 0).map(lambda x: 10.0**x)),
        "partial": st.one_of(st.sampled_from([0.0, 0.125, 0.2, 0.5]), st.floats(0, 0.5)),
        "form": st.sampled_from(["official", "paper"]),
        "amsgrad": st.booleans(),
        "maximize": st.booleans(),
        "decoupled_weight_decay": st.booleans(),
    }
)
STEPS = st.one_of(st.integers(0, 20), st.integers(0, 10**6))
ADAMW = {
    "lr": 1e-3,
    "betas": (0.9, 0.999),
    "eps": 1e-8,
    "weight_decay": 0.01,
    "partial": 0.5,
    "form": "official",
    "amsgrad": False,
    "maximize": False,
    "decoupled_weight_decay": True,
}


def draw_step(
    dtype: torch.dtype,
    hyper: dict[str, Any],
    steps: int,
    seed: int,
    exponents: tuple[float, float] = (0.0, -3.0),
    spread: float = 3.0,
    cancel: bool = False,
    **keywords: Any,
) -> Step:
    generator = torch.Generator().manual_seed(seed)
    n = sum(SIZES) + 40
    weight_exponent, exponent = exponents
    theta = values(n, dtype, generator, weight_exponent, spread)
    grad = values(n, dtype, generator, exponent, spread)
    m = values(n, dtype, generator, exponent, spread)
    beta1 = hyper["betas"][0]
    if cancel:
        largest = TYPES[dtype].largest
        grad = (-m.double() * beta1 / (1 - beta1)).clamp(-largest, largest).to(dtype)
    v, v_max = (
        values(n, dtype, generator, exponent, spread).double().square().clamp(max=6e4).to(dtype)
        for _ in range(2)
    )
    return Step(dtype, theta, grad, m, v, v_max, steps=steps, hyper=hyper, **keywords)


# --------------------------------------------------------------------------------- properties


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@settings(max_examples=4 * settings().max_examples)
@given(
    hyper=HYPER,
    steps=STEPS,
    seed=st.integers(0, 2**32),
    exponents=st.tuples(st.floats(-12, 6), st.floats(-24, 12)),
    spread=st.sampled_from([0.0, 1.0, 5.0]),
    cancel=st.booleans(),
    layout=st.sampled_from(LAYOUTS),
    optimizer=st.sampled_from([gadam.Padam, gadam.Gadam, gadam.GadamX]),
)
@example(ADAMW, 0, 0, (-5.0, -10.0), 3.0, False, "contiguous", gadam.Gadam)
@example({**ADAMW, "partial": 0.125}, 1000, 1, (-5.0, -10.0), 3.0, True, "transposed", gadam.GadamX)
@example({**ADAMW, "amsgrad": True}, 10, 2, (0.0, 12.0), 5.0, False, "unaligned", gadam.Padam)
def test_a_step_is_correctly_rounded(
    dtype, hyper, steps, seed, exponents, spread, cancel, layout, optimizer
):
    draw_step(
        dtype, hyper, steps, seed, exponents, spread, cancel, layout=layout, optimizer=optimizer
    ).check()


@settings(max_examples=2 * settings().max_examples)
@given(hyper=HYPER, steps=STEPS, seed=st.integers(0, 2**32))
def test_any_float16_numbers(hyper, steps, seed):
    """Every finite bit pattern may occur, subnormal numbers and those close to overflow too."""
    generator = torch.Generator().manual_seed(seed)
    theta, grad, m, v, v_max = (any_bits(400, torch.float16, generator) for _ in range(5))
    inputs = (theta, grad, m, v.abs(), v_max.abs())
    Step(torch.float16, *inputs, steps=steps, hyper=hyper).check()


@settings(max_examples=2 * settings().max_examples)
@given(hyper=HYPER, steps=STEPS, seed=st.integers(0, 2**32))
def test_moments_of_any_bfloat16_numbers(hyper, steps, seed):
    generator = torch.Generator().manual_seed(seed)
    theta, grad, m, v, v_max = (any_bits(400, torch.bfloat16, generator) for _ in range(5))
    decoupled = {**hyper, "decoupled_weight_decay": True}
    inputs = (theta, grad, m, v.abs(), v_max.abs())
    Step(torch.bfloat16, *inputs, steps=steps, hyper=decoupled).check(moments_only=True)


@settings(max_examples=4 * settings().max_examples)
@given(
    dtype=st.sampled_from(list(TYPES)),
    theta=st.floats(-100, 100),
    grad=st.floats(-100, 100),
    m=st.floats(-100, 100),
    v=st.floats(0, 1e4),
    hyper=HYPER,
    steps=STEPS,
)
def test_single_numbers(dtype, theta, grad, m, v, hyper, steps):
    """Let hypothesis choose, and shrink, the numbers themselves."""
    numbers = [torch.tensor([x], dtype=torch.float64) for x in (theta, grad, m, v, v)]
    smallest = 2.0**-49
    inputs = [torch.where(x.abs() < smallest, 0.0, x).to(dtype) for x in numbers]
    Step(dtype, *inputs, steps=steps, hyper=hyper).check()


@pytest.mark.parametrize("capability", ["baseline", "avx2"])
def test_every_instruction_set(capability):
    program = (
        "import sys; sys.path[:0] = sys.argv[1:3]; import test_half_precision as t\n"
        "for seed in range(12):\n"
        "    for dtype in t.TYPES:\n"
        "        for partial in (0.0, 0.125, 0.2, 0.3, 0.5):\n"
        "            form = 'paper' if seed % 4 == 0 else 'official'\n"
        "            hyper = {**t.ADAMW, 'partial': partial, 'form': form}\n"
        "            t.draw_step(dtype, hyper, seed, seed).check()\n"
        "print(t.cpu.describe())"
    )
    here = Path(__file__).parent
    done = subprocess.run(
        [sys.executable, "-c", program, str(here), str(here.parent)],
        env={**os.environ, "GADAM_CPU_CAPABILITY": capability},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    if capability == "baseline":
        assert not done.stdout.startswith("avx")


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_the_oracle_rounds_as_torch_does(dtype):
    half = TYPES[dtype]
    assert half.largest == torch.finfo(dtype).max
    generator = torch.Generator().manual_seed(0)
    stored = any_bits(3000, dtype, generator).double()
    ulps = torch.tensor([half.ulp(x) for x in stored.tolist()], dtype=torch.float64)
    for share in (0.0, 0.25, 0.5, 0.75):  # with ties
        x = stored + share * ulps
        expected = x.to(dtype).double().tolist()
        assert [half.nearest(value) for value in x.tolist()] == expected


def test_the_document_states_the_bounds():
    text = DOCUMENT.read_text()
    for dtype, excess in EXCESS.items():
        name = str(dtype).removeprefix("torch.")
        rows = re.findall(rf"^\| `\w+` \| {name} \| (\d\.\d+) ulp", text, re.MULTILINE)
        assert [float(row) for row in rows] == pytest.approx([0.5 + excess] * 3)
