"""The compiled kernel, compared with the reference in common and in unusual cases."""

from __future__ import annotations

import copy
import ctypes
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

import gadam
from contract import parameters, same, set_gradients, train
from gadam.optim import cpu
from gadam.optim.padam import Padam

if not cpu.is_available():
    pytest.skip(f"no CPU kernel: {cpu.describe()}", allow_module_level=True)


# --------------------------------------------------------------------------------------- powers


def power(x: torch.Tensor, exponent: float) -> torch.Tensor:
    library = cpu._library()[0]
    call = library.gadam_power_f64 if x.dtype == torch.float64 else library.gadam_power_f32
    result = torch.empty_like(x)
    call(
        ctypes.c_void_p(x.data_ptr()),
        ctypes.c_void_p(result.data_ptr()),
        ctypes.c_int64(x.numel()),
        ctypes.c_double(exponent),
    )
    return result


@pytest.mark.parametrize("exponent", [-0.8, -0.5, -0.4, -0.25, -0.2, -0.125, -1e-3, -0.0])
def test_power_is_accurate_to_three_ulp_over_all_floats(exponent):
    """Check a fine grid over all positive float32 numbers, subnormal ones included."""
    bits = torch.arange(1, 0x7F800000, 1021, dtype=torch.int32)
    x = bits.view(torch.float32)
    exact = x.double().pow(exponent)
    got = power(x, exponent)
    normal = exact.abs() < torch.finfo(torch.float32).max
    error = ((got.double() - exact).abs() / exact)[normal].max().item()
    assert error < 3 * torch.finfo(torch.float32).eps


@given(
    st.floats(min_value=0, exclude_min=True, allow_infinity=False, allow_nan=False),
    st.floats(-0.5, 0),
)
def test_power_in_float64(x, exponent):
    got = power(torch.tensor([x], dtype=torch.float64), exponent).item()
    assert got == pytest.approx(math.pow(x, exponent), rel=2e-15)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_power_of_zero_infinity_and_nan(dtype):
    x = torch.tensor([0.0, math.inf, math.nan], dtype=dtype)
    assert power(x, -0.25).tolist()[:2] == [math.inf, 0.0]
    assert math.isnan(power(x, -0.25).tolist()[2])
    same(power(x, 0.0), torch.ones(3, dtype=dtype))


@pytest.mark.parametrize("partial", [0.125, 0.2, 0.21])
def test_the_step_divides_by_a_power_accurate_to_four_ulp(partial):
    """The roots at p = 1/8 and p = 1/5 have their own code, which only a step reaches."""
    x = torch.arange(0x00800000, 0x7F000000, 4099, dtype=torch.int32).view(torch.float32)
    p = torch.nn.Parameter(torch.zeros_like(x))
    p.grad = torch.zeros_like(x)
    optimizer = gadam.Padam([p], lr=1.0, partial=partial, eps=0.0, fused=True)
    optimizer.state[p] = {
        "step": torch.tensor(1e9),
        "exp_avg": torch.ones_like(x),
        "exp_avg_sq": x.clone(),
    }
    optimizer.step()
    v = optimizer.state[p]["exp_avg_sq"].double()
    exact = -optimizer.state[p]["exp_avg"].double() * v.sqrt().pow(-2 * partial)
    assert ((p.detach() - exact) / exact).abs().max() < 4 * torch.finfo(torch.float32).eps


# ------------------------------------------------------------------------- against the reference

FLOATS = st.one_of(
    st.floats(-10, 10, width=32),
    st.floats(width=32, allow_nan=True, allow_infinity=True),
    st.sampled_from(
        [0.0, -0.0, 1e-45, 1e-38, 1e-30, 1e18, 1e30, 3e38, math.inf, -math.inf, math.nan]
    ),
)


def run_both(
    gradients: list[list[float]], dtype: torch.dtype, **kw: Any
) -> list[dict[str, torch.Tensor]]:
    results = []
    for fused in (False, True):
        p = torch.nn.Parameter(torch.linspace(-1, 2, len(gradients[0])).to(dtype))
        optimizer = gadam.Padam([p], foreach=False if not fused else None, fused=fused, **kw)
        for gradient in gradients:
            p.grad = torch.tensor(gradient, dtype=torch.float64).to(dtype)
            optimizer.step()
        results.append({"p": p.detach(), **optimizer.state[p]})
    return results


@given(
    gradients=st.lists(st.lists(FLOATS, min_size=11, max_size=11), min_size=1, max_size=4),
    partial=st.sampled_from([0.0, 0.05, 0.125, 0.2, 0.3, 0.5]),
    form=st.sampled_from(["official", "paper"]),
    eps=st.sampled_from([0.0, 1e-8, 1e-4, 1.0]),
    amsgrad=st.booleans(),
    decoupled=st.booleans(),
    maximize=st.booleans(),
    weight_decay=st.sampled_from([0.0, 0.1]),
    dtype=st.sampled_from([torch.float32, torch.float64]),
    beta1=st.sampled_from([0.9, 0.5, 0.3, 0.0]),
)
@example([[0.0] * 11], 0.125, "official", 0.0, False, True, False, 0.0, torch.float32, 0.9)
@example([[1e-45] * 11] * 2, 0.2, "paper", 0.0, True, False, True, 0.1, torch.float32, 0.9)
@example([[1e30] * 11] * 2, 0.125, "official", 1e-8, True, True, False, 0.1, torch.float32, 0.0)
def test_equals_the_reference_for_any_gradients(
    gradients, partial, form, eps, amsgrad, decoupled, maximize, weight_decay, dtype, beta1
):
    """The relative error is below 1e-5 (float32) or 1e-12 (float64), and NaN and inf match."""
    reference, fused = run_both(
        gradients,
        dtype,
        lr=0.01,
        partial=partial,
        form=form,
        eps=eps,
        amsgrad=amsgrad,
        decoupled_weight_decay=decoupled,
        maximize=maximize,
        weight_decay=weight_decay,
        betas=(beta1, 0.999),
    )
    tolerance = 1e-5 if dtype == torch.float32 else 1e-12
    for name, expected in reference.items():
        got = fused[name]
        # A product that overflows in one order of its factors may be finite in another: compare
        # only where the reference is far from the largest number.
        calm = (expected.abs() < torch.finfo(dtype).max / 1e6) | ~torch.isfinite(expected)
        calm &= ~(torch.isinf(got) & torch.isinf(expected)) | (got == expected)
        if name == "p":
            huge = torch.tensor(gradients, dtype=torch.float64).abs() > 1e15
            calm &= ~huge.any(0)
        torch.testing.assert_close(
            got[calm] if got.dim() else got,
            expected[calm] if expected.dim() else expected,
            rtol=tolerance,
            atol=torch.finfo(dtype).tiny,
            equal_nan=True,
        )


@pytest.mark.parametrize("partial", [0.125, 0.2, 0.3, 0.5])
@pytest.mark.parametrize("beta1", [0.0, 0.9])
@pytest.mark.parametrize("amsgrad", [False, True])
def test_a_step_leaves_the_x87_unit_usable(partial, beta1, amsgrad):
    """A compiler that uses MMX registers would break `long double` for the whole process."""
    numpy = pytest.importorskip("numpy")
    run_both(
        [[0.5, -2.0] * 100] * 3, torch.float32, partial=partial, betas=(beta1, 0.9), amsgrad=amsgrad
    )
    run_both([[0.5, -2.0] * 100] * 3, torch.float32, partial=partial, form="paper", amsgrad=amsgrad)
    assert float(numpy.longdouble(-1) / numpy.longdouble(10)) == -0.1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("partial", [0.125, 0.2, 0.5])
def test_half_precision_equals_the_reference_up_to_rounding(dtype, partial):
    torch.manual_seed(0)
    gradients = torch.randn(5, 200).tolist()
    # The reference computes in half precision, so avoid underflow of the second moment.
    safe: dict[str, Any] = {"betas": (0.9, 0.9), "eps": 1e-2}
    reference, fused = run_both(
        gradients, dtype, lr=0.01, partial=partial, weight_decay=0.1, **safe
    )
    ulp = torch.finfo(dtype).eps
    for name in ("exp_avg", "exp_avg_sq", "p"):
        torch.testing.assert_close(fused[name], reference[name], rtol=4 * ulp, atol=4 * ulp)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_half_precision_number_round_trips(dtype):
    """With lr = 0 and no decay, save must invert load, for subnormal numbers too."""
    every = torch.arange(-32768, 32768, dtype=torch.int32).to(torch.int16).view(dtype)
    p = torch.nn.Parameter(every[torch.isfinite(every)].clone())
    before = p.detach().clone()
    p.grad = torch.zeros_like(p)
    gadam.Padam([p], lr=0.0, fused=True).step()
    same(p.detach().view(torch.int16), before.view(torch.int16))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_rounds_to_nearest_even(dtype):
    torch.manual_seed(0)
    g = torch.cat([torch.randn(5000), torch.randn(5000) * 1e-6, torch.randn(5000) * 1e4]).to(dtype)
    p = torch.nn.Parameter(torch.zeros_like(g))
    p.grad = g
    optimizer = gadam.Padam([p], lr=0.0, betas=(0.5, 0.0), fused=True)
    optimizer.step()
    same(optimizer.state[p]["exp_avg"], (0.5 * g.float()).to(dtype))
    same(optimizer.state[p]["exp_avg_sq"], (g.float() * g.float()).to(dtype))


def test_results_do_not_depend_on_the_number_of_threads():
    shapes = [(300_000,), (3,), (50, 70), (1,), (0,), (133_333,)]
    results = []
    before = torch.get_num_threads()
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            torch.manual_seed(0)
            params = [torch.nn.Parameter(torch.randn(shape)) for shape in shapes]
            train(gadam.GadamX(params, fused=True, partial=0.2), params, 3)
            results.append([p.detach() for p in params])
    finally:
        torch.set_num_threads(before)
    same(results[1], results[0])
    same(results[2], results[0])


@pytest.mark.parametrize("capability", ["baseline", "avx2"])
def test_instruction_sets_agree(capability, tmp_path):
    program = (
        "import sys, torch; sys.path.insert(0, sys.argv[1]);"
        "from contract import parameters, train; import gadam;"
        "p = parameters(); train(gadam.GadamX(p, partial=0.2, fused=True), p, 8);"
        "torch.save([q.detach() for q in p], sys.argv[2]); print(gadam.backends()['cpu'])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(Path(__file__).parents[1]), str(tmp_path / "p.pt")],
        env={**os.environ, "GADAM_CPU_CAPABILITY": capability},
        capture_output=True,
        text=True,
        check=True,
    )
    if capability == "baseline":
        assert not done.stdout.startswith("avx")
    params = parameters()
    train(gadam.GadamX(params, partial=0.2, foreach=False), params, 8)
    got = torch.load(tmp_path / "p.pt", weights_only=True)
    torch.testing.assert_close(got, [p.detach() for p in params], rtol=1e-5, atol=1e-6)


def test_safe_after_fork():
    """A forked child, such as a DataLoader's worker, has no threads of its parent."""
    params = [torch.nn.Parameter(torch.randn(100_000)) for _ in range(4)]
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        optimizer = gadam.GadamX(params, fused=True)
        train(optimizer, params, 2)
        set_gradients(params, 3)
        read, write = os.pipe()
        child = os.fork()
        if child == 0:
            optimizer.step()
            os.write(write, str(float(params[0].detach()[0])).encode())
            os._exit(0)
        os.close(write)
        assert os.waitpid(child, 0)[1] == 0
        optimizer.step()
        assert float(os.read(read, 100).decode()) == float(params[0].detach()[0])
    finally:
        torch.set_num_threads(before)


def test_autograd_sees_that_the_weights_changed():
    w = torch.nn.Parameter(torch.ones(3))
    loss = (w * w).sum()
    w.grad = torch.ones(3)
    gadam.Gadam([w], fused=True).step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_channels_last_and_mixed_types_in_one_group():
    torch.manual_seed(0)
    results = []
    for fused in (False, True):
        torch.manual_seed(0)
        params = [
            torch.nn.Parameter(torch.randn(4, 3, 5, 5).to(memory_format=torch.channels_last)),
            torch.nn.Parameter(torch.randn(6, dtype=torch.float64)),
            torch.nn.Parameter(torch.randn(6, 4)[:, ::2]),
            torch.nn.Parameter(torch.randn(3).to(torch.float16)),
        ]
        optimizer = gadam.GadamX(params, fused=fused, average=gadam.Averaging(start=1))
        train(optimizer, params, 12)
        with optimizer.average.applied():
            results.append([p.detach().clone() for p in params])
    torch.testing.assert_close(results[1][:3], results[0][:3], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(results[1][3], results[0][3], rtol=2e-2, atol=2e-2)


def test_is_the_default_in_float32_but_not_in_float64():
    for dtype, chosen in ((torch.float32, True), (torch.float64, False)):
        params = parameters(dtype)
        optimizer = gadam.GadamX(params)
        train(optimizer, params, 1)
        assert (optimizer._finite is not None) == chosen


def test_backends_describe_the_kernel(monkeypatch):
    assert "OpenMP" in gadam.backends()["cpu"] or "one thread" in gadam.backends()["cpu"]
    cpu._library.cache_clear()
    monkeypatch.setattr(cpu, "__file__", "/nowhere/optim/cpu.py")
    assert "not built" in gadam.backends()["cpu"]
    monkeypatch.undo()
    cpu._library.cache_clear()


# ------------------------------------------------------------ samples that the kernel folds in


def sampled(plan: gadam.Averaging | None = None, **kw: Any) -> tuple[list, gadam.Gadam, list]:
    """Return an optimizer after 20 steps, from the third on with a sample."""
    params = parameters()
    optimizer = gadam.Gadam(
        params, 0.05, average=plan or gadam.Averaging(start=3), fused=True, **kw
    )
    return params, optimizer, train(optimizer, params, 20)


def folds_of(optimizer: Any, monkeypatch) -> list[int]:
    """Record how many parameters the kernel folds in at each step."""
    folded = []
    finish = optimizer.average._sampler.finish_step

    def record(*arguments: Any) -> None:
        folded.append(sum(len(fold.folded) for fold in optimizer.average._sampler.folds))
        finish(*arguments)

    monkeypatch.setattr(optimizer.average._sampler, "finish_step", record)
    return folded


@pytest.mark.parametrize("weighting", [gadam.Mean(), gadam.EMA(0.8)], ids=str)
@pytest.mark.parametrize("partial", [0.125, 0.2, 0.3, 0.5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_the_kernel_folds_in_the_weights_as_they_are_stored(weighting, partial, dtype, monkeypatch):
    """The same as a pass of its own, bit for bit, on machines with fused multiply-adds."""
    plan = gadam.Averaging(start=3, weighting=weighting)
    params = parameters(dtype)
    optimizer = gadam.GadamX(params, 0.05, partial=partial, average=plan, fused=True)
    folded = folds_of(optimizer, monkeypatch)
    iterates = train(optimizer, params, 20)
    # The first two samples of a mean have weights of 1/2 and more: those get a pass of their own.
    assert folded[-15:] == [5] * 15
    assert folded[2] == 0
    for i, p in enumerate(params):
        expected = torch.zeros_like(p, dtype=plan.dtype_for(p))
        for count, iterate in enumerate(iterates[2:], 1):
            expected.lerp_(iterate[i].to(expected.dtype), weighting.weight(count))
        tolerance = 4 * torch.finfo(expected.dtype).eps
        torch.testing.assert_close(
            optimizer.state[p]["average"], expected, rtol=tolerance, atol=tolerance
        )


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_sample_that_is_not_finite_is_taken_out_again(bad, dtype):
    params = parameters(dtype)
    optimizer = gadam.Gadam(params, 0.05, average=gadam.Averaging(start=3), fused=True)
    train(optimizer, params, 20)
    before = [optimizer.state[p]["average"].clone() for p in params]
    set_gradients(params, 21)
    with torch.no_grad():
        params[0][1, 1] = bad
    optimizer.step()
    assert not torch.isfinite(params[0]).all()
    assert (optimizer.average.count, optimizer.average.skipped) == (18, 1)
    after = [optimizer.state[p]["average"] for p in params]
    torch.testing.assert_close(after, before, rtol=1e-6, atol=1e-7)
    same(after[0][1, 1], before[0][1, 1])  # this entry was never folded in


def test_a_parameter_without_gradient_is_sampled_too():
    params, optimizer, iterates = sampled()
    set_gradients(params, 21)
    params[0].grad = None
    optimizer.step()
    assert optimizer.average.count == 19
    expected = torch.stack([*[i[0] for i in iterates[2:]], iterates[-1][0]]).mean(0)
    torch.testing.assert_close(optimizer.state[params[0]]["average"], expected)


def test_a_parameter_without_gradient_that_is_not_finite_is_noticed():
    params, optimizer, _ = sampled()
    before = [optimizer.state[p]["average"].clone() for p in params]
    set_gradients(params, 21)
    params[0].grad = None
    with torch.no_grad():
        params[0][0, 0] = math.nan
    optimizer.step()
    assert (optimizer.average.count, optimizer.average.skipped) == (18, 1)
    torch.testing.assert_close([optimizer.state[p]["average"] for p in params], before)


def test_a_step_skipped_by_gradscaler_is_not_folded_in():
    params, optimizer, iterates = sampled()
    before = copy.deepcopy(optimizer.state[params[0]]["average"])
    set_gradients(params, 21)
    vars(optimizer).update(found_inf=torch.tensor(1.0), grad_scale=torch.tensor(2.0))
    optimizer.step()
    del vars(optimizer)["found_inf"], vars(optimizer)["grad_scale"]
    same([p.detach() for p in params], iterates[-1])
    same(optimizer.state[params[0]]["average"], before)
    assert (optimizer.average.count, optimizer.average.skipped) == (18, 1)


def test_wide_averages_are_sampled_outside_the_kernel():
    params, optimizer, iterates = sampled(gadam.Averaging(start=3, dtype=torch.float64))
    iterates += train(optimizer, params, 1, first=21)
    got = optimizer.state_dict()["state"][0]["average"]
    assert got.dtype == torch.float64
    torch.testing.assert_close(
        got, torch.stack([i[0] for i in iterates[2:]]).double().mean(0), rtol=1e-12, atol=1e-12
    )


def test_the_kernel_folds_nothing_in_if_a_hook_may_edit_the_weights(monkeypatch):
    params = parameters()
    optimizer = gadam.Gadam(params, 0.05, average=gadam.Averaging(start=1))
    folded = folds_of(optimizer, monkeypatch)
    train(optimizer, params, 5)
    handle = optimizer.register_step_post_hook(lambda *_: None)
    train(optimizer, params, 1)
    handle.remove()
    gadam.IterateAverage(optimizer)  # averages do not edit weights
    train(optimizer, params, 1)
    gadam.Lookahead(optimizer, k=2)  # every second step
    train(optimizer, params, 4)
    assert folded == [0, 0, 5, 5, 5, 0, 5, 5, 0, 5, 0]


def test_the_kernel_folds_nothing_in_if_a_subclass_overrides_step(monkeypatch):
    class Clamped(gadam.Gadam):
        def step(self, closure=None):
            loss = Padam.step.__wrapped__(self, closure)  # type: ignore[attr-defined]
            for group in self.param_groups:
                for p in group["params"]:
                    p.data.clamp_(-0.1, 0.1)
            return loss

    params = parameters()
    optimizer = Clamped(params, 0.05, average=gadam.Averaging(start=1))
    folded = folds_of(optimizer, monkeypatch)
    iterates = train(optimizer, params, 6)
    assert folded == [0] * 6
    with optimizer.average.applied():
        torch.testing.assert_close(
            params[0].detach(), torch.stack([i[0] for i in iterates]).mean(0)
        )


# ----------------------------------------------------- tensors that must not reach the kernel


def trained(**kw: Any) -> tuple[torch.nn.Parameter, gadam.Gadam]:
    torch.manual_seed(0)
    p = torch.nn.Parameter(torch.randn(4, 4))
    optimizer = gadam.Gadam([p], 0.1, **kw)
    for _ in range(3):
        p.grad = torch.randn(4, 4)
        optimizer.step()
    return p, optimizer


def test_a_checkpoint_of_another_size_is_refused():
    _, small = trained()
    q = torch.nn.Parameter(torch.randn(1000, 1000))
    other = gadam.Gadam([q])
    with pytest.raises(ValueError, match="must have the shape"):
        other.load_state_dict(small.state_dict())
    assert not other.state
    q.grad = torch.randn(1000, 1000)
    other.step()


def test_a_parameter_that_shrinks_in_place_is_detected():
    memory = torch.randn(1000)
    p = torch.nn.Parameter(memory)
    optimizer = gadam.Gadam([p], 0.1)
    for _ in range(2):
        p.grad = torch.randn(1000)
        optimizer.step()
    p.data = p.data[:10]
    p.grad = torch.randn(10)
    for name in ("exp_avg", "exp_avg_sq"):
        optimizer.state[p][name].data = optimizer.state[p][name].data[:10]
    outside = memory[10:].clone()
    optimizer.step()
    same(memory[10:], outside)


@pytest.mark.parametrize(
    "how", ["transpose", "negative", "zeros", "state", "replaced", "bf16 step"]
)
def test_changes_between_steps_do_not_affect_the_result(how):
    results = []
    for fused in (False, None):
        torch.manual_seed(1)
        p, optimizer = trained(fused=fused, foreach=None)
        p.grad = torch.randn(4, 4)
        if how == "transpose":
            p.data = p.data.t()
        elif how == "negative":
            p.grad = torch._neg_view(p.grad)
        elif how == "zeros":
            p.grad = torch._efficientzerotensor(4, 4)
        elif how == "state":
            optimizer.state.clear()
        elif how == "replaced":
            moments = {k: v * 0.5 for k, v in optimizer.state[p].items() if "average" not in k}
            optimizer.state[p] = {**optimizer.state[p], **moments}
        else:
            optimizer.state[p]["step"] = optimizer.state[p]["step"].bfloat16()
        optimizer.step()
        results.append({"p": p.detach().clone(), **optimizer.state[p]})
    torch.testing.assert_close(results[1], results[0], rtol=1e-5, atol=1e-6)


def test_fake_tensors_do_not_reach_the_kernel():
    from torch._subclasses.fake_tensor import FakeTensorMode

    for make in (torch.optim.AdamW, gadam.GadamX):
        with FakeTensorMode():
            model = torch.nn.Linear(3, 3)
            optimizer = make(model.parameters())
            model(torch.randn(2, 3)).sum().backward()
            optimizer.step()
            assert optimizer.state[model.weight]["step"].item() == 1


def test_a_small_beta1_keeps_the_gradients_digits():
    p = torch.nn.Parameter(torch.zeros(9))
    optimizer = gadam.Gadam([p], betas=(0.0, 0.9), fused=True)
    for value in (1e8, 1.0):
        p.grad = torch.full((9,), value)
        optimizer.step()
    same(optimizer.state[p]["exp_avg"], torch.ones(9))


def test_large_gradients_overflow_only_where_the_reference_does():
    reference, fused = run_both([[2e19] * 9], torch.float32, lr=0.1, partial=0.125)
    same(torch.isfinite(fused["exp_avg_sq"]), torch.isfinite(reference["exp_avg_sq"]))


def test_a_post_hook_that_breaks_the_weights_is_detected():
    params, optimizer, _ = sampled()

    def destroy(*_: object) -> None:
        with torch.no_grad():
            params[0].mul_(math.nan)

    optimizer.register_step_post_hook(destroy)
    train(optimizer, params, 1, first=21)
    assert (optimizer.average.count, optimizer.average.skipped) == (18, 1)


def test_a_step_that_fails_midway_is_not_sampled():
    params = parameters()
    optimizer = gadam.Gadam(
        [{"params": params[:2]}, {"params": params[2:]}], 0.05, average=gadam.Averaging(start=1)
    )
    iterates = train(optimizer, params, 20)
    set_gradients(params, 21)
    params[4].grad = params[4].grad.to_sparse()  # type: ignore[union-attr]
    with pytest.raises(RuntimeError, match="sparse"):
        optimizer.step()
    iterates += train(optimizer, params, 1, first=21)
    assert optimizer.average.count == 21
    for i in (0, 4):
        torch.testing.assert_close(
            optimizer.state[params[i]]["average"],
            torch.stack([iterate[i] for iterate in iterates]).mean(0),
        )


def test_another_average_does_not_end_up_in_the_built_in_one():
    params = parameters()
    optimizer = gadam.Gadam(params, 0.05, average=gadam.Averaging(start=1))
    attached = gadam.IterateAverage(optimizer, gadam.Averaging(start=1))
    iterates = train(optimizer, params, 20)
    with attached.applied():
        state = optimizer.state_dict()["state"][0]["average"].clone()
    torch.testing.assert_close(state, torch.stack([i[0] for i in iterates]).mean(0))


def test_a_gradient_of_a_parameter_without_average():
    params = parameters()
    optimizer = gadam.Gadam(params, 0.05)
    train(optimizer, params, 3)
    params[0].requires_grad_(False)
    optimizer.average.begin()
    for step in range(4, 20):
        set_gradients(params, step)  # params[0] still gets one
        optimizer.step()
    assert optimizer.average.count == 16
