"""Gradients between the iterate and its average."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    get_state_dict,
    set_state_dict,
)
from torch.optim import Optimizer

import gadam
from gadam.average.point import GradientPoint
from gadam.optim import cpu
from oracle import ScalarPadam

PLAN = gadam.Averaging(start=3, interpolation=0.9)
STEPS = 12


def network(dtype: torch.dtype = torch.float64) -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3)).to(dtype)


def batches(dtype: torch.dtype = torch.float64) -> list[tuple[Tensor, Tensor]]:
    torch.manual_seed(2)
    return [(torch.randn(8, 6, dtype=dtype), torch.randn(8, 3, dtype=dtype)) for _ in range(STEPS)]


def evaluate(model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor) -> Tensor:
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(model(x), y)
    loss.backward()
    return loss


def train(model: nn.Module, optimizer: Optimizer, some: list[tuple[Tensor, Tensor]]) -> None:
    for x, y in some:
        evaluate(model, optimizer, x, y)
        optimizer.step()


def weights(model: nn.Module) -> list[Tensor]:
    return [p.detach().clone() for p in model.parameters()]


def averaged(model: nn.Module, average: gadam.IterateAverage) -> list[Tensor]:
    with average.applied(model):
        return weights(model)


def iterates_of(model: nn.Module, average: gadam.IterateAverage) -> list[Tensor]:
    return [average._state.buffer(p, "average_iterate").clone() for p in model.parameters()]


def same(some: list[Tensor], others: list[Tensor]) -> bool:
    return all(map(torch.equal, some, others))


def built_in(model: nn.Module, plan: gadam.Averaging = PLAN, **options: Any) -> Any:
    optimizer = gadam.GadamX(model.parameters(), lr=0.05, average=plan, **options)
    return optimizer, optimizer.average


def beside(model: nn.Module, plan: gadam.Averaging = PLAN, **options: Any) -> Any:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.5, **options)
    return optimizer, gadam.IterateAverage(optimizer, plan)


MAKERS = pytest.mark.parametrize("make", [built_in, beside])


# ------------------------------------------------------------------------------- against references


@pytest.mark.parametrize("is_built_in", [True, False])
def test_equals_schedule_free(is_built_in: bool) -> None:
    import schedulefree

    theirs, ours = network(), network()
    rival = schedulefree.AdamWScheduleFree(theirs.parameters(), lr=0.02, weight_decay=0.0)
    rival.train()
    train(theirs, rival, batches())
    plan = gadam.Averaging(start=1, interpolation=0.9)
    options: dict[str, Any] = {"lr": 0.02, "betas": (0.0, 0.999), "weight_decay": 0.0}
    if is_built_in:
        optimizer: Any = gadam.Gadam(ours.parameters(), average=plan, **options)
        average = optimizer.average
    else:
        optimizer = torch.optim.AdamW(ours.parameters(), **options)
        average = gadam.IterateAverage(optimizer, plan)
    train(ours, optimizer, batches())
    torch.testing.assert_close(weights(ours), weights(theirs), rtol=0, atol=1e-14)
    rival.eval()
    torch.testing.assert_close(averaged(ours, average), weights(theirs), rtol=0, atol=1e-14)


@given(
    st.floats(0.0, 0.99),
    st.integers(1, 5),
    st.integers(1, 3),
    st.sampled_from([gadam.Mean(), gadam.EMA(0.7), gadam.LinearDecay(), gadam.PowerEMA(0.2)]),
    st.sampled_from([0.5, 0.125]),
)
def test_equals_the_recursion(beta, start, every, weighting, p):
    """On f(θ) = θ²/2: θ is the iterate, x the average, and y the point of the gradient."""
    plan = gadam.Averaging(start, every, weighting, interpolation=beta)
    theta = nn.Parameter(torch.tensor([2.0], dtype=torch.float64))
    optimizer = gadam.GadamX([theta], lr=0.1, weight_decay=0.1, partial=p, average=plan)
    oracle = ScalarPadam(2.0, lr=0.1, weight_decay=0.1, partial=p)
    y, x, count = 2.0, 0.0, 0
    for step in range(1, 11):
        optimizer.zero_grad()
        (theta**2 / 2).sum().backward()
        optimizer.step()
        iterate = oracle.step(y)
        if step >= start and (step - start) % every == 0:
            count += 1
            x += weighting.weight(count) * (iterate - x)
        y = iterate + beta * (x - iterate) if count else iterate
        assert theta.item() == pytest.approx(y, rel=1e-9)
    assert optimizer.average.count == count


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_kernel_equals_the_reference(dtype: torch.dtype) -> None:
    found = []
    for fused in (None, False):
        model = network(dtype)
        optimizer, average = built_in(model, fused=fused, foreach=None if fused is None else False)
        train(model, optimizer, batches(dtype))
        found.append([*weights(model), *averaged(model, average)])
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(*found, rtol=tolerance, atol=tolerance)


def test_the_kernel_moves_the_weights_in_its_own_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    if not cpu.is_available():
        pytest.skip("The kernel was not built.")
    model = network(torch.float32)
    optimizer, average = built_in(model)
    copied: list[int] = []
    to_iterate = GradientPoint.to_iterate

    def counted(self: GradientPoint, params: list[Tensor]) -> None:
        copied.append(len(params))
        to_iterate(self, params)

    monkeypatch.setattr(GradientPoint, "to_iterate", counted)
    train(model, optimizer, batches(torch.float32)[:4])  # the first two samples have a large weight
    assert average.count == 2
    copied.clear()
    train(model, optimizer, batches(torch.float32)[4:])
    assert not any(copied)


@pytest.mark.parametrize("fused", [None, False])
def test_a_sample_that_is_not_finite_does_not_move_the_average(fused: bool | None) -> None:
    model = network(torch.float32)
    optimizer, average = built_in(model, fused=fused)
    train(model, optimizer, batches(torch.float32))
    before = averaged(model, average)
    evaluate(model, optimizer, *batches(torch.float32)[0])
    states = [optimizer.state[p] for p in model.parameters()]
    next(model.parameters()).grad[0, 0] = torch.nan  # type: ignore[index]
    optimizer.step()
    assert average.skipped == 1
    after = [state["average"] for state in states]
    torch.testing.assert_close(after, before, rtol=1e-5, atol=1e-6)
    iterates = [state["average_iterate"] for state in states]
    expected = [0.1 * z + 0.9 * x for z, x in zip(iterates, after)]
    torch.testing.assert_close(weights(model), expected, rtol=1e-5, atol=1e-6, equal_nan=True)


@pytest.mark.parametrize("fused", [None, False])
def test_a_parameter_without_a_gradient_keeps_its_iterate(fused: bool | None) -> None:
    model = network(torch.float32)
    optimizer, average = built_in(model, fused=fused)
    train(model, optimizer, batches(torch.float32))
    bias = model[2].bias
    kept, count = optimizer.state[bias]["average_iterate"].clone(), average.count
    before = optimizer.state[bias]["average"].clone()
    evaluate(model, optimizer, *batches(torch.float32)[0])
    bias.grad = None
    optimizer.step()
    assert torch.equal(optimizer.state[bias]["average_iterate"], kept)
    sampled = before + (kept - before) / (count + 1)
    torch.testing.assert_close(optimizer.state[bias]["average"], sampled)


def test_zero_is_an_average_that_only_watches() -> None:
    models = [network(), network()]
    plans = (gadam.Averaging(start=3), gadam.Averaging(start=3, interpolation=0.0))
    for model, plan in zip(models, plans):
        optimizer, _ = built_in(model, plan)
        train(model, optimizer, batches())
        assert not any("iterate" in key for state in optimizer.state.values() for key in state)
    assert same(*map(weights, models))


# ---------------------------------------------------------------------------------------- training


@MAKERS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("steps", [1, 2, 7])
def test_resume_is_bitwise(make: Callable[..., Any], dtype: torch.dtype, steps: int) -> None:
    whole = network(dtype)
    optimizer, average = make(whole)
    train(whole, optimizer, batches(dtype))
    model = network(dtype)
    optimizer, _ = make(model)
    train(model, optimizer, batches(dtype)[:steps])
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    resumed = network(dtype)
    optimizer, again = make(resumed)
    optimizer.load_state_dict(saved["optimizer"])  # before the weights: the order must not matter
    resumed.load_state_dict(saved["model"])
    train(resumed, optimizer, batches(dtype)[steps:])
    assert same(weights(resumed), weights(whole))
    assert same(averaged(resumed, again), averaged(whole, average))


@MAKERS
def test_evaluation_does_not_change_training(make: Callable[..., Any]) -> None:
    quiet, watched = network(), network()
    optimizer, _ = make(quiet)
    train(quiet, optimizer, batches())
    optimizer, average = make(watched)
    for batch in batches():
        train(watched, optimizer, [batch])
        if average.count:
            averaged(watched, average)
        optimizer.state_dict()
        get_optimizer_state_dict(watched, optimizer)
    assert same(weights(quiet), weights(watched))


@pytest.mark.parametrize("steps", [0, 5])
def test_a_dry_run_changes_nothing(steps: int) -> None:
    """A distributed checkpoint runs a step with lr = 0 before every save of plain SGD."""
    quiet, checked = network(), network()
    made = []
    for model in (quiet, checked):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        gadam.IterateAverage(optimizer, PLAN)
        train(model, optimizer, batches()[:steps])
        made.append(optimizer)
    before = weights(checked)
    get_optimizer_state_dict(checked, made[1])
    assert same(weights(checked), before)
    for model, optimizer in zip((quiet, checked), made):
        train(model, optimizer, batches())
    assert same(weights(quiet), weights(checked))


@MAKERS
def test_pretrained_weights_may_be_loaded_after_the_optimizer_is_made(
    make: Callable[..., Any],
) -> None:
    torch.manual_seed(5)
    pretrained = {key: torch.randn_like(value) for key, value in network().state_dict().items()}
    early, late = network(), network()
    early.load_state_dict(pretrained)
    first, _ = make(early)
    second, _ = make(late)
    late.load_state_dict(pretrained)
    train(early, first, batches())
    train(late, second, batches())
    assert same(weights(early), weights(late))


@MAKERS
def test_a_closure_is_evaluated_at_the_point_of_the_gradient(make: Callable[..., Any]) -> None:
    plain, closed, named = network(), network(), network()
    train(plain, make(plain)[0], batches())
    for model, by_name in ((closed, False), (named, True)):
        optimizer, _ = make(model)
        for batch in batches():
            closure = partial(evaluate, model, optimizer, *batch)
            loss = optimizer.step(closure=closure) if by_name else optimizer.step(closure)
            assert loss.item() > 0
        assert same(weights(plain), weights(model))


def test_an_optimizer_that_evaluates_several_times_is_refused() -> None:
    model = network()
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=3)
    gadam.IterateAverage(optimizer, gadam.Averaging(start=1, interpolation=0.5))
    with pytest.raises(RuntimeError, match="closure once per step"):
        optimizer.step(partial(evaluate, model, optimizer, *batches()[0]))


def test_a_rejected_step_leaves_the_weights_as_they_are() -> None:
    model = network(torch.float32)
    optimizer, average = built_in(model, fused=True)
    train(model, optimizer, batches(torch.float32))
    before, count = weights(model), average.count
    optimizer.grad_scale, optimizer.found_inf = torch.tensor(1.0), torch.tensor(1.0)
    optimizer.step()
    assert same(weights(model), before)
    assert average.count == count
    del optimizer.grad_scale, optimizer.found_inf
    quiet = network(torch.float32)
    other, _ = built_in(quiet, fused=True)
    train(quiet, other, batches(torch.float32))
    train(quiet, other, batches(torch.float32)[:2])
    train(model, optimizer, batches(torch.float32)[:2])
    assert same(weights(quiet), weights(model))


def test_a_failed_step_leaves_the_point_of_the_gradient() -> None:
    model = network()
    optimizer, _ = built_in(model)
    train(model, optimizer, batches())
    before = weights(model)
    optimizer.param_groups[0]["betas"] = None
    with pytest.raises(TypeError):
        train(model, optimizer, batches()[:1])
    assert same(weights(model), before)


def test_a_manual_sample_is_the_iterate() -> None:
    by_hand, by_plan = network(), network()
    optimizer, average = beside(by_hand, gadam.Averaging(every=None, interpolation=0.8))
    for step, batch in enumerate(batches(), 1):
        train(by_hand, optimizer, [batch])
        if step >= 3:
            assert average.update()
    optimizer, other = beside(by_plan, gadam.Averaging(start=3, interpolation=0.8))
    train(by_plan, optimizer, batches())
    assert same(weights(by_hand), weights(by_plan))
    assert same(averaged(by_hand, average), averaged(by_plan, other))


def test_batchnorm_of_the_average_is_refreshed() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Linear(4, 3)).double()
    optimizer, average = built_in(model)
    train(model, optimizer, batches())
    inputs = [x for x, _ in batches()]
    with average.applied(model, batchnorm=inputs):
        hidden = model[0](torch.cat(inputs))
        torch.testing.assert_close(model[1].running_mean, hidden.mean(0))


@MAKERS
@pytest.mark.parametrize("foreach", [None, True])
def test_a_compiled_step_equals_an_eager_one(
    make: Callable[..., Any], foreach: bool | None
) -> None:
    eager, compiled = network(torch.float32), network(torch.float32)
    train(eager, make(eager)[0], batches(torch.float32))
    optimizer, _ = make(compiled, foreach=foreach)
    step = torch.compile(optimizer.step, backend="eager")
    for x, y in batches(torch.float32):
        evaluate(compiled, optimizer, x, y)
        step()
    torch.testing.assert_close(weights(compiled), weights(eager), rtol=1e-4, atol=1e-5)


# ---------------------------------------------------------------------------------- other observers


@MAKERS
@pytest.mark.parametrize("is_first", [True, False])
@pytest.mark.parametrize("every", [1, 4])
def test_another_average_sees_the_iterates(
    make: Callable[..., Any], is_first: bool, every: int, tmp_path: Path
) -> None:
    plan = gadam.Averaging(start=1, every=every, interpolation=0.9)
    model, alone = network(torch.float32), network(torch.float32)
    optimizer, average = make(alone, plan)
    iterates = []
    for batch in batches(torch.float32):
        train(alone, optimizer, [batch])
        iterates.append(
            [average._state.buffer(p, "average_iterate").clone() for p in alone.parameters()]
        )
    if make is beside and is_first:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.5)
        other = gadam.IterateAverage(optimizer, gadam.Averaging(start=1))
        gadam.IterateAverage(optimizer, plan)
    else:
        optimizer, _ = make(model, plan)
        other = gadam.IterateAverage(optimizer, gadam.Averaging(start=1))
    blocks = gadam.BlockAverages(optimizer, tmp_path, every=STEPS)
    train(model, optimizer, batches(torch.float32))
    torch.testing.assert_close(weights(model), weights(alone), rtol=1e-4, atol=1e-5)
    means = [torch.stack(ones).mean(0) for ones in zip(*iterates)]
    torch.testing.assert_close(averaged(model, other), means, rtol=1e-4, atol=1e-5)
    with blocks.applied(model):
        torch.testing.assert_close(weights(model), means, rtol=1e-4, atol=1e-5)


@MAKERS
def test_a_hook_edits_the_iterate_of_every_parameter(make: Callable[..., Any]) -> None:
    model = network()
    optimizer, average = make(model)
    bias: Any = model[2].bias
    optimizer.register_step_post_hook(lambda *_: bias.data.clamp_(max=0.01))
    train(model, optimizer, batches())
    evaluate(model, optimizer, *batches()[0])
    bias.grad = None
    optimizer.step()
    assert iterates_of(model, average)[-1].max() <= 0.01


@MAKERS
def test_health_compares_the_average_with_the_iterate(make: Callable[..., Any]) -> None:
    model = network()
    optimizer, average = make(model)
    train(model, optimizer, batches())
    iterates = torch.cat([one.flatten() for one in iterates_of(model, average)])
    mean = torch.cat([one.flatten() for one in averaged(model, average)])
    distance = (mean - iterates).norm() / iterates.norm()
    assert average.health().distance == pytest.approx(distance.item())


@MAKERS
def test_removing_the_average_leaves_the_iterate(make: Callable[..., Any]) -> None:
    model = network()
    optimizer, average = make(model)
    train(model, optimizer, batches())
    iterates = iterates_of(model, average)
    average.remove()
    assert same(weights(model), iterates)
    train(model, optimizer, batches()[:1])
    assert not any("iterate" in key for state in optimizer.state.values() for key in state)


@MAKERS
def test_a_checkpoint_restores_a_run_whose_step_has_failed(make: Callable[..., Any]) -> None:
    model = network()
    optimizer, average = make(model)
    train(model, optimizer, batches())
    saved = {key: value.clone() for key, value in model.state_dict().items()}
    state = copy.deepcopy(optimizer.state_dict())
    before = iterates_of(model, average)

    def fail(*_: object) -> None:
        raise RuntimeError("a hook")

    handle = optimizer.register_step_post_hook(fail)
    with pytest.raises(RuntimeError, match="a hook"):
        train(model, optimizer, batches()[:1])
    handle.remove()
    model.load_state_dict(saved)
    optimizer.load_state_dict(state)
    optimizer.param_groups[0].update(lr=0.0, weight_decay=0.0)
    train(model, optimizer, batches()[:1])
    assert same(before, iterates_of(model, average))


# ------------------------------------------------------------------------------------------ loading


@MAKERS
def test_a_plan_may_begin_to_interpolate_but_not_stop(make: Callable[..., Any]) -> None:
    model = network()
    optimizer, _ = make(model, gadam.Averaging(start=3))
    train(model, optimizer, batches())
    later, _ = make(model)
    later.load_state_dict(optimizer.state_dict())
    before = weights(model)
    get_optimizer_state_dict(model, later)
    assert same(weights(model), before)  # the weights are the iterate until the next step
    train(model, later, batches()[:1])
    without, _ = make(network(), gadam.Averaging(start=3))
    with pytest.raises(ValueError, match="trained with interpolation, but the plan has none"):
        without.load_state_dict(later.state_dict())


@MAKERS
@pytest.mark.parametrize("samples", [0, 1])
def test_loading_an_averaged_model_keeps_the_iterate(
    make: Callable[..., Any], samples: int
) -> None:
    model = network()
    optimizer, average = make(model)
    train(model, optimizer, batches())
    before = iterates_of(model, average)
    theirs = torch.optim.swa_utils.AveragedModel(network())
    for _ in range(samples):
        theirs.update_parameters(network())
    average.load_averaged_model(theirs.state_dict(), model)
    optimizer.param_groups[0].update(lr=0.0, weight_decay=0.0)
    train(model, optimizer, batches()[:1])
    assert same(before, iterates_of(model, average))


@MAKERS
def test_a_late_lookahead_starts_from_the_iterate(make: Callable[..., Any]) -> None:
    model = network()
    optimizer, average = make(model)
    train(model, optimizer, batches())
    before = iterates_of(model, average)
    lookahead = gadam.Lookahead(optimizer, k=2)
    lookahead.param_groups[0].update(lr=0.0, weight_decay=0.0)
    train(model, lookahead, batches()[:1])
    slow = [optimizer.state[p]["slow_param"] for p in model.parameters()]
    assert same(before, slow)


# ------------------------------------------------------------- frozen parameters, copies, watchers


@MAKERS
@pytest.mark.parametrize("frozen_from", [0, 6])
def test_the_weights_of_a_frozen_parameter_are_its_iterate(
    make: Callable[..., Any], frozen_from: int
) -> None:
    model = network()
    optimizer, average = make(model, gadam.Averaging(start=1, interpolation=0.9))
    model.load_state_dict({name: value + 5 for name, value in model.state_dict().items()})
    train(model, optimizer, batches()[:frozen_from])
    first: Any = model[0]
    first.requires_grad_(False)
    optimizer.zero_grad()
    before = weights(first)
    train(model, optimizer, batches()[frozen_from:])
    assert same(weights(first), before)
    first.requires_grad_(True)
    optimizer.param_groups[0].update(lr=0.0, weight_decay=0.0)
    train(model, optimizer, batches()[:1])
    # Its iterate was sampled while it was frozen: with a rate of zero, only the average's earlier
    # samples are elsewhere.
    assert same(iterates_of(first, average), before)


@pytest.mark.parametrize("options", [{}, {"foreach": True}, {"fused": False, "foreach": False}])
def test_a_gradient_counts_even_if_none_is_required_during_the_step(
    options: dict[str, Any],
) -> None:
    results = []
    for toggled in (False, True):
        p = nn.Parameter(torch.full((64,), 10.0))
        plan = gadam.Averaging(start=1, interpolation=0.9)
        optimizer = gadam.Gadam([p], lr=0.1, weight_decay=0, average=plan, **options)
        for step in range(STEPS):
            optimizer.zero_grad()
            (p**2 / 2).sum().backward()
            p.requires_grad_(not toggled or step < 3)
            optimizer.step()
            p.requires_grad_(True)
        results.append(p.detach())
    assert torch.equal(*results)


def test_a_distributed_checkpoint_of_plain_sgd_restores_the_iterate(tmp_path: Path) -> None:
    def make() -> tuple[nn.Module, Optimizer, gadam.IterateAverage]:
        model = network()
        sgd = torch.optim.SGD(model.parameters(), lr=0.05)
        return model, sgd, gadam.IterateAverage(sgd, PLAN)

    model, sgd, average = make()
    train(model, sgd, batches())
    saved = dict(zip(("model", "optimizer"), get_state_dict(model, sgd)))
    dcp.save(saved, checkpoint_id=tmp_path, no_dist=True)
    expected = iterates_of(model, average)
    model, sgd, average = make()
    loaded: dict[str, Any] = dict(zip(("model", "optimizer"), get_state_dict(model, sgd)))
    dcp.load(loaded, checkpoint_id=tmp_path, no_dist=True)
    set_state_dict(
        model, sgd, model_state_dict=loaded["model"], optim_state_dict=loaded["optimizer"]
    )
    assert same(iterates_of(model, average), expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_narrow_average_does_not_round_the_weights(dtype: torch.dtype) -> None:
    model = network()
    plan = gadam.Averaging(start=1, interpolation=0.5, dtype=dtype)
    optimizer, average = built_in(model, plan)
    train(model, optimizer, batches())
    for p, z in zip(model.parameters(), iterates_of(model, average)):
        torch.testing.assert_close(p.detach(), z.lerp(average._value(p).double(), 0.5))


@MAKERS
def test_a_watching_average_sees_the_iterate_between_steps(make: Callable[..., Any]) -> None:
    model = network()
    optimizer, average = make(model, gadam.Averaging(start=1, interpolation=0.9))
    manual = gadam.IterateAverage(optimizer)
    for batch in batches():
        train(model, optimizer, [batch])
        manual.update()
    torch.testing.assert_close(averaged(model, manual), averaged(model, average))
    assert manual.health().distance == pytest.approx(average.health().distance)


def test_averages_may_be_copied_in_any_order() -> None:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    first = gadam.IterateAverage(optimizer, gadam.Averaging(start=1, weighting=gadam.EMA(0.5)))
    second = gadam.IterateAverage(optimizer, PLAN)
    train(model, optimizer, batches())
    *averages, copied_model, copied = copy.deepcopy((second, first, model, optimizer))
    for average, copied_average in zip((second, first), averages):
        assert same(averaged(model, average), averaged(copied_model, copied_average))
    assert optimizer.state_dict()["state"][0].keys() == copied.state_dict()["state"][0].keys()
    for one, other in ((model, optimizer), (copied_model, copied)):
        train(one, other, batches())
    assert same(weights(model), weights(copied_model))


def test_an_average_cannot_be_removed_while_it_is_applied() -> None:
    model = network()
    optimizer, average = built_in(model)
    train(model, optimizer, batches())
    expected = iterates_of(model, average)
    with (
        average.applied(model),
        pytest.raises(RuntimeError, match="Leave the `with average"),
    ):
        average.remove()
    average.remove()
    assert same(weights(model), expected)


def test_an_average_can_be_removed_from_a_model_that_was_frozen_after_training() -> None:
    model = network()
    optimizer, average = built_in(model)
    train(model, optimizer, batches())
    expected = iterates_of(model, average)
    optimizer.zero_grad()
    model.requires_grad_(False)
    assert not same(weights(model), expected)
    average.remove()
    assert same(weights(model), expected)


def test_a_copy_of_an_optimizer_does_not_revive_its_average() -> None:
    model = network()
    optimizer, average = built_in(model)
    train(model, optimizer, batches())
    average.remove()
    copied_model, copied = copy.deepcopy((model, optimizer))
    assert copied.average.is_removed
    for one, other in ((model, optimizer), (copied_model, copied)):
        train(one, other, batches())
    assert same(weights(model), weights(copied_model))
    assert copied.average.count == average.count


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"interpolation": 1.0}, "Invalid interpolation: 1.0"),
        ({"interpolation": -0.1}, "Invalid interpolation: -0.1"),
        ({"interpolation": "half"}, "Invalid interpolation: 'half'"),
        ({"interpolation": 0.9, "device": "cpu"}, "Omit device"),
        ({"interpolation": 0.9, "weighting": gadam.Window(3)}, "one copy of the weights"),
    ],
)
def test_invalid_plans(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        gadam.Averaging(start=1, **options)


def test_one_optimizer_and_one_interpolation() -> None:
    model = network()
    first, second = (torch.optim.SGD(part.parameters(), lr=0.1) for part in (model[0], model[2]))
    with pytest.raises(ValueError, match="single optimizer"):
        gadam.IterateAverage([first, second], PLAN)
    gadam.IterateAverage(first, PLAN)
    with pytest.raises(ValueError, match="has interpolation already"):
        gadam.IterateAverage(first, PLAN)


def test_a_differentiable_step_does_not_interpolate():
    with pytest.raises(ValueError, match="does not work with differentiable=True"):
        gadam.Gadam([torch.zeros(3)], differentiable=True, average=PLAN)
