"""Known pitfalls of other libraries, each next to the naive version that fails."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.optim.swa_utils import AveragedModel, update_bn

import gadam
from average_models import in_one_process
from contract import parameters, same, set_gradients, train
from gadam import _torch

# 1. Optimizer.load_state_dict casts state to the parameter's dtype


@pytest.mark.parametrize("plan", [{}, {"dtype": torch.float64}, {"device": "cpu"}], ids=str)
def test_loading_preserves_the_averages_dtype(plan):
    params = parameters(torch.bfloat16)
    optimizer = gadam.Gadam(params, 0.1, average=gadam.Averaging(start=1, **plan))
    train(optimizer, params, 5)
    expected = optimizer.state[params[0]]["average"]
    assert expected.dtype == plan.get("dtype", torch.float32)
    assert not torch.equal(expected, expected.bfloat16().to(expected.dtype))
    other = gadam.Gadam(parameters(torch.bfloat16), average=gadam.Averaging(start=1, **plan))
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    same(other.state[other.param_groups[0]["params"][0]]["average"], expected)

    naive = torch.optim.AdamW(parameters(torch.bfloat16))
    naive.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert "average" in naive.state[naive.param_groups[0]["params"][0]]
    assert naive.state[naive.param_groups[0]["params"][0]]["average"].dtype == torch.bfloat16


def test_loading_preserves_the_averages_device():
    """The meta device stands in for the host of an accelerator: it only has to be another one."""
    plan = gadam.Averaging(start=100, device="meta")
    params = parameters()
    optimizer = gadam.Gadam(params, average=plan)
    train(optimizer, params, 2)
    assert optimizer.state[params[0]]["average"].device.type == "meta"
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert optimizer.state[params[0]]["average"].device.type == "meta"


# 2. State written before the first step defeats lazy initialization


def test_update_before_the_first_step():
    params = parameters()
    optimizer = gadam.Gadam(params)
    optimizer.average.update()
    optimizer.load_state_dict(optimizer.state_dict())
    train(optimizer, params, 2)
    assert optimizer.state[params[0]]["step"] == 2
    naive = torch.optim.AdamW(parameters())
    naive_params = naive.param_groups[0]["params"]
    naive.state[naive_params[0]]["average"] = torch.zeros(4, 3)
    set_gradients(naive_params, 1)
    with pytest.raises(KeyError):
        naive.step()


@pytest.mark.parametrize("inner", [torch.optim.AdamW, torch.optim.SGD, torch.optim.RMSprop])
def test_lookahead_lets_the_inner_optimizer_initialize_its_state(inner):
    params = parameters()
    optimizer = gadam.Lookahead(inner(params, lr=0.01), k=2)
    set_gradients(params, 1)
    params[0].grad = None
    optimizer.step()
    assert "slow_param" not in optimizer.state.get(params[0], {})
    start = params[0].detach().clone()
    fast = train(optimizer, params, 1, first=2)[0][0]
    slow = optimizer.state[params[0]]["slow_param"]
    same(slow, fast)
    assert not torch.equal(slow, start)


# 3. State must hold only tensors, and groups must load with weights_only (see test_contract too)


def test_a_state_dict_holds_only_tensors_and_plain_values():
    params = parameters()
    optimizer = gadam.Gadam(params, average=gadam.Averaging(start=gadam.Plateau(3)))
    train(optimizer, params, 2)
    for state in optimizer.state_dict()["state"].values():
        assert all(type(value) is torch.Tensor for value in state.values())
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    torch.load(file, weights_only=True)


# 4. GradScaler calls step() on optimizers that handle scaling, even after it found an inf


@pytest.mark.parametrize("fused", [False, True])
def test_a_step_skipped_by_gradscaler_neither_counts_nor_enters(fused):
    params = parameters()
    optimizer = gadam.Gadam(params, 0.1, average=gadam.Averaging(start=2), fused=fused)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    scaler.scale(torch.ones(()))
    iterates = []
    for step in range(1, 7):
        set_gradients(params, step)
        for p in params:
            assert p.grad is not None
            p.grad = p.grad * 4.0
        if step in (2, 4):
            params[0].grad[0, 0] = float("inf")  # type: ignore[index]
        scaler.step(optimizer)
        scaler.update(4.0)
        if step not in (2, 4):
            iterates.append([p.detach().clone() for p in params])
    average = optimizer.average
    assert optimizer.state[params[0]]["step"] == 4
    assert average.count == 3  # steps 2, 3 and 4 of those that were not skipped
    assert average.skipped == (2 if fused else 0)  # otherwise GradScaler does not call step()
    with average.applied():
        torch.testing.assert_close(
            params[0].detach(), torch.stack([i[0] for i in iterates[1:]]).mean(0)
        )


def test_lookahead_does_not_count_a_skipped_step():
    params = parameters()
    inner = torch.optim.AdamW(params, fused=True)
    optimizer = gadam.Lookahead(inner, k=2)
    for step, inf in enumerate([0.0, 1.0, 0.0]):
        set_gradients(params, step)
        inner.found_inf, inner.grad_scale = torch.tensor(inf), torch.tensor(1.0)  # type: ignore[attr-defined]
        optimizer.step()
        assert optimizer.param_groups[0]["lookahead_steps"] == [1, 1, 2][step]


@pytest.mark.parametrize("weighting", [gadam.Mean(), gadam.Window(2)], ids=str)
def test_iterates_that_are_not_finite_do_not_enter(weighting):
    p = nn.Parameter(torch.zeros(3))
    sgd = torch.optim.SGD([p], lr=1.0)
    average = gadam.IterateAverage(sgd, gadam.Averaging(start=1, weighting=weighting))
    for value in (1.0, float("nan"), 2.0, float("inf"), 3.0):
        with torch.no_grad():
            p.zero_()
        p.grad = torch.tensor([0.0, -value, 0.0])
        sgd.step()
    assert (average.count, average.skipped) == (3, 2)
    with average.applied():
        assert p[1].item() == (2.0 if isinstance(weighting, gadam.Mean) else 2.5)
    with torch.no_grad():
        p.fill_(float("nan"))
    assert not average.update()
    assert (average.count, average.skipped) == (3, 3)


# 5. Distributed checkpoints create state with a step at lr = 0 and zero gradients


@pytest.mark.parametrize("make", [gadam.Gadam, torch.optim.SGD])
def test_a_dry_run_does_not_count_as_a_step(make):
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    plan = gadam.Averaging(start=1)
    if make is gadam.Gadam:
        optimizer: Any = gadam.Gadam(model.parameters(), average=plan)
        average = optimizer.average
    else:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        average = gadam.IterateAverage(optimizer, plan)
    lookahead = gadam.Lookahead(optimizer)
    get_optimizer_state_dict(model, lookahead)
    assert (average.count, average.phase) == (0, "waiting")
    assert lookahead.param_groups[0]["lookahead_steps"] == 0
    assert all("slow_param" in optimizer.state[p] for p in model.parameters())
    model(torch.randn(4, 3)).square().mean().backward()
    lookahead.step()
    assert average.count == 1
    assert lookahead.param_groups[0]["lookahead_steps"] == 1


def test_checkpoints_of_an_optimizer_without_state_do_not_count_as_steps():
    """Plain SGD has no state, so every distributed checkpoint runs a step with lr = 0."""
    model = nn.Linear(3, 1)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    average = gadam.IterateAverage(sgd, gadam.Averaging(start=1))
    steps: list[None] = []
    sgd.register_step_post_hook(lambda *_: steps.append(None))
    for _ in range(3):
        model(torch.randn(4, 3)).square().mean().backward()
        sgd.step()
        sgd.zero_grad()
        get_optimizer_state_dict(model, sgd)
    assert len(steps) == 6
    assert average.count == 3


def test_a_first_step_with_lr_zero_and_gradients_counts():
    """Warm-up from lr = 0 is training."""
    params = parameters()
    optimizer = gadam.Gadam(params, lr=0.0, average=gadam.Averaging(start=1))
    train(optimizer, params, 1)
    assert optimizer.average.count == 1


# 6. Wrappers that round-trip the state, and checkpoints written while swapped in


def test_a_round_trip_before_training_changes_nothing():
    """The library accelerate does this in the constructor of its optimizer."""
    params, others = parameters(), parameters()
    plan = gadam.Averaging(start=2)
    optimizer, wrapped = gadam.Gadam(params, average=plan), gadam.Gadam(others, average=plan)
    wrapped.load_state_dict(wrapped.state_dict())
    train(optimizer, params, 4)
    train(wrapped, others, 4)
    same(wrapped.state_dict(), optimizer.state_dict())


def test_a_checkpoint_written_inside_applied_resumes_bitwise():
    straight, params, resumed = parameters(), parameters(), parameters()
    plan = gadam.Averaging(start=2)
    whole = gadam.Gadam(straight, average=plan)
    train(whole, straight, 8)
    optimizer = gadam.Gadam(params, average=plan)
    train(optimizer, params, 4)
    model = nn.ParameterList(params)
    with optimizer.average.applied(model):
        saved = copy.deepcopy(
            {"raw": optimizer.average.raw_state_dict(model), "optimizer": optimizer.state_dict()}
        )
        naive = copy.deepcopy(model.state_dict())
    assert not torch.equal(naive["0"], saved["raw"]["0"])
    nn.ParameterList(resumed).load_state_dict(saved["raw"])
    again = gadam.Gadam(resumed, average=plan)
    again.load_state_dict(saved["optimizer"])
    train(again, resumed, 4, first=5)
    same(resumed, straight)


# 7. AveragedModel deep-copies the model


class _CannotBeCopied(nn.Linear):
    def __deepcopy__(self, memo: Any) -> None:
        raise RuntimeError("This module cannot be copied.")


def test_the_model_is_not_copied():
    model = _CannotBeCopied(3, 2)
    with pytest.raises(RuntimeError, match="cannot be copied"):
        AveragedModel(model)
    optimizer = gadam.Gadam(model.parameters(), average=gadam.Averaging(start=1))
    model(torch.randn(4, 3)).square().mean().backward()
    optimizer.step()
    with optimizer.average.applied(model):
        pass
    optimizer.average.model_state_dict(model)
    optimizer.average.copy_to(model)


# 8. update_bn fails on dict batches and leaves momentum=None behind (see test_batchnorm too)


def test_dict_batches_and_momentum():
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(3, momentum=0.3)

        def forward(self, image: torch.Tensor) -> torch.Tensor:
            return self.norm(image)

    batches = [{"image": torch.randn(5, 3), "label": torch.zeros(5)} for _ in range(2)]
    naive = Model()
    with pytest.raises(Exception):  # noqa: B017
        update_bn(batches, naive)
    assert naive.norm.momentum is None
    model = Model()
    gadam.refresh_batchnorm(model, batches)
    assert model.norm.momentum == 0.3
    pooled = torch.cat([batch["image"] for batch in batches])
    torch.testing.assert_close(model.norm.running_mean, pooled.mean(0))


# 9. Averages in bfloat16 stop moving


def test_averages_of_bfloat16_weights_keep_moving():
    p = nn.Parameter(torch.ones(64, dtype=torch.bfloat16))
    sgd = torch.optim.SGD([p], lr=1.0)
    plan = gadam.Averaging(start=1, weighting=gadam.EMA(0.999))
    average = gadam.IterateAverage(sgd, plan)
    p.grad = torch.zeros_like(p)
    for _ in range(1000):
        sgd.step()
    naive = torch.ones(64, dtype=torch.bfloat16)
    with torch.no_grad():
        p.fill_(1.5)
    for _ in range(1000):
        sgd.step()
        naive.lerp_(p.detach(), 0.001)
    assert torch.equal(naive, torch.ones_like(naive))
    # the first value has the debiased weight ρ^1000 / (1 + ρ^1000)
    share = 0.999**1000 / (1 + 0.999**1000)
    with average.applied():
        assert p[0].item() == pytest.approx(share * 1.0 + (1 - share) * 1.5, rel=1e-2)


# 11. A distributed checkpoint restores only the keys that the new optimizer already has


def _trained(plan: gadam.Averaging | None, steps: int = 4) -> tuple[nn.Module, gadam.Gadam]:
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    optimizer = gadam.Gadam(model.parameters(), 0.1, average=plan)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(4, 3)).square().mean().backward()
        optimizer.step()
    return model, optimizer


@pytest.mark.parametrize("flatten", [False, True])
@pytest.mark.parametrize(
    "plan",
    [
        gadam.Averaging(start=2),
        gadam.Averaging(start=gadam.Plateau(2)),
        gadam.Averaging(start=gadam.NonMonotone(3)),
        gadam.Averaging(start=2, weighting=gadam.Window(2)),
    ],
    ids=["start", "plateau", "non-monotone", "window"],
)
def test_a_distributed_checkpoint_restores_the_average(tmp_path, plan, flatten):
    import torch.distributed.checkpoint as dcp

    options = StateDictOptions(flatten_optimizer_state_dict=flatten)
    model, optimizer = _trained(plan)
    optimizer.average.observe(0.5)
    dcp.save(
        {"optimizer": get_optimizer_state_dict(model, optimizer, options=options)},
        checkpoint_id=tmp_path,
        **in_one_process(),
    )
    fresh_model, fresh = _trained(plan, steps=0)
    target = {"optimizer": get_optimizer_state_dict(fresh_model, fresh, options=options)}
    dcp.load(target, checkpoint_id=tmp_path, **in_one_process())
    set_optimizer_state_dict(fresh_model, fresh, target["optimizer"], options=options)
    assert fresh.average.count == optimizer.average.count == (3 if plan.first_step else 0)
    same(fresh.state_dict(), optimizer.state_dict())


def test_an_average_that_was_not_restored_raises(tmp_path):
    import torch.distributed.checkpoint as dcp

    model, optimizer = _trained(None)
    optimizer.average.update()
    dcp.save(get_optimizer_state_dict(model, optimizer), checkpoint_id=tmp_path, **in_one_process())
    for prepared in (False, True):
        fresh_model, fresh = _trained(None, steps=0)
        if prepared:
            fresh.average.begin()
        target = get_optimizer_state_dict(fresh_model, fresh)
        dcp.load(target, checkpoint_id=tmp_path, **in_one_process())
        if not prepared:
            before = copy.deepcopy(fresh.state_dict())
            with pytest.raises(ValueError, match=r"call average.begin\(\) before loading"):
                set_optimizer_state_dict(fresh_model, fresh, target)
            same(fresh.state_dict()["state"], before["state"])
        else:
            set_optimizer_state_dict(fresh_model, fresh, target)
            assert (fresh.average.count, fresh.average.phase) == (1, "waiting")


def test_buffers_exist_from_the_first_step_on():
    _, optimizer = _trained(gadam.Averaging(start=1000), steps=1)
    assert all("average" in state for state in optimizer.state.values())
    sgd = torch.optim.SGD(parameters(), lr=0.1)
    average = gadam.IterateAverage(sgd, gadam.Averaging(start=1000))
    assert len(average.state_dict()["state"]) == 5


# 12. torch calls the hooks of step() twice if a subclass calls super().step()


def _calls_super(base: Any) -> Any:
    class Subclass(base):
        def step(self, closure: Any = None) -> Any:
            loss = super().step(closure)
            with torch.no_grad():
                for p in self.param_groups[0]["params"]:
                    p.clamp_(-1, 1)
            return loss

    return Subclass


def _clamped_after_step(optimizer: torch.optim.Optimizer) -> None:
    @torch.no_grad()
    def clamp(*_: object) -> None:
        for p in optimizer.param_groups[0]["params"]:
            p.clamp_(-1, 1)

    handle = optimizer.register_step_post_hook(clamp)
    _torch.optimizer_hooks(optimizer, "step_post").move_to_end(handle.id, last=False)


@pytest.mark.parametrize("plan", [{"start": 3}, {"start": 2, "interpolation": 0.9}], ids=str)
@pytest.mark.parametrize("lookahead", [False, True])
@pytest.mark.parametrize("base", [gadam.Gadam, torch.optim.AdamW, torch.optim.SGD])
def test_a_subclass_that_calls_super_counts_each_step_once(base, lookahead, plan):
    """It has the same iterates and average as the base class with a hook that does the same."""
    base(parameters(), lr=0.1)  # from now on, torch calls hooks in the step of the base class
    found = []
    for is_subclass in (True, False):
        params = parameters()
        optimizer = (_calls_super(base) if is_subclass else base)(params, lr=0.1)
        calls: list[int] = []
        optimizer.register_step_post_hook(lambda *_, calls=calls: calls.append(1))
        trained = gadam.Lookahead(optimizer, k=2) if lookahead else optimizer
        if not is_subclass:
            _clamped_after_step(optimizer)
        average = gadam.IterateAverage(optimizer, gadam.Averaging(**plan))
        iterates = train(trained, params, 6)
        assert len(calls) == (12 if is_subclass else 6)
        assert average.count == 6 - plan["start"] + 1
        with average.applied():
            found.append((iterates, [p.detach().clone() for p in params]))
    same(*found)


def test_a_subclass_that_calls_super_is_sampled_after_global_hooks():
    from torch.optim.optimizer import register_optimizer_step_post_hook

    base = torch.optim.SGD
    base(parameters(), lr=0.1)
    handle = register_optimizer_step_post_hook(lambda *_: None)
    try:
        params = parameters()
        optimizer = _calls_super(base)(params, lr=0.1)
        average = gadam.IterateAverage(optimizer, gadam.Averaging(start=1))
        iterates = train(optimizer, params, 4)
    finally:
        handle.remove()
    assert average.count == 4
    with average.applied():
        mean = torch.stack([iterate[0] for iterate in iterates]).mean(0)
        torch.testing.assert_close(params[0].detach(), mean)


def test_a_step_that_fails_does_not_hide_the_next_one():
    class Fails(torch.optim.SGD):
        fail = False

        def step(self, closure: Any = None) -> Any:
            super().step(closure)
            if self.fail:
                raise RuntimeError("failed")

    torch.optim.SGD(parameters(), lr=0.1)
    params = parameters()
    optimizer = Fails(params, lr=0.1)
    average = gadam.IterateAverage(optimizer, gadam.Averaging(start=1))
    for optimizer.fail in (False, True, False):
        set_gradients(params, 1)
        if optimizer.fail:
            with pytest.raises(RuntimeError, match="failed"):
                optimizer.step()
        else:
            optimizer.step()
    assert average.count == 2


# 13. A step() of a subclass does more than the update


class _ZeroesGradients(gadam.Gadam):
    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        self.zero_grad()
        return loss


@pytest.mark.parametrize("closure", [False, True])
@pytest.mark.parametrize("by_hook", [False, True])
def test_a_step_that_removes_its_gradients_counts(by_hook, closure):
    params = parameters()
    optimizer = (gadam.Gadam if by_hook else _ZeroesGradients)(
        params, lr=0.1, average=gadam.Averaging(start=2)
    )
    if by_hook:
        optimizer.register_step_post_hook(lambda *_: optimizer.zero_grad())

    def evaluate() -> float:
        set_gradients(params, 1)
        return 0.0

    for _ in range(5):
        if not closure:
            evaluate()
        optimizer.step(evaluate if closure else None)
    assert optimizer.average.count == 4


def test_a_closure_without_gradients_does_not_count():
    """As in Lightning, if training_step() returns None."""
    params = parameters()
    optimizer = gadam.Gadam(params, lr=0.1, average=gadam.Averaging(start=1))
    train(optimizer, params, 2)
    for p in params:
        p.grad = None
    optimizer.step(lambda: None)
    assert optimizer.average.count == 2


def test_lookahead_synchronizes_a_step_that_removes_its_gradients():
    found = []
    for removes in (True, False):
        params = parameters()
        inner = (_ZeroesGradients if removes else gadam.Gadam)(params, lr=0.1)
        found.append(train(gadam.Lookahead(inner, k=2), params, 4))
    same(*found)


@pytest.mark.parametrize("base", [gadam.Gadam, torch.optim.AdamW])
def test_a_sample_is_what_the_whole_step_leaves(base: Any) -> None:
    """A kernel has seen the update only. Here the step breaks, or repairs, a weight after it."""

    class Subclass(base):
        value: float | None = None

        def step(self, closure: Any = None) -> Any:
            super().step(closure)
            if self.value is not None:
                with torch.no_grad():
                    self.param_groups[0]["params"][0][0] = self.value

    params = parameters()
    optimizer = Subclass(params, lr=0.1)
    average = gadam.IterateAverage(optimizer, gadam.Averaging(start=1))
    train(optimizer, params, 3)
    for value, gradient in ((float("inf"), 1.0), (0.5, float("nan"))):
        optimizer.value = value
        set_gradients(params, 4)
        assert params[0].grad is not None
        params[0].grad[0] = gradient
        optimizer.step()
    assert (average.count, average.health().skipped) == (4, 1)
    with average.applied():
        assert torch.isfinite(params[0]).all()


@pytest.mark.parametrize("before", [True, False])
def test_an_interpolating_step_keeps_what_a_subclass_edits(before):
    """The built-in average moves the weights as one beside any other optimizer does."""

    def edited(base: Any) -> Any:
        class Subclass(base):
            def step(self, closure: Any = None) -> Any:
                loss = None if before else super().step(closure)
                with torch.no_grad():
                    for p in self.param_groups[0]["params"]:
                        p.mul_(0.9)
                return super().step(closure) if before else loss

        return Subclass

    found = []
    for base in (gadam.Gadam, torch.optim.AdamW):
        params = parameters(torch.float64)
        optimizer = edited(base)(params, lr=0.1, weight_decay=0.0)
        average = gadam.IterateAverage(optimizer, gadam.Averaging(start=2, interpolation=0.9))
        train(optimizer, params, 3)
        params[1].grad = None  # this one is edited, but not updated
        optimizer.step()
        with average.applied():
            values = [p.detach().clone() for p in params]
        average.remove()
        found.append(values + [p.detach().clone() for p in params])
    for ours, theirs in zip(*found):
        torch.testing.assert_close(ours, theirs)


def test_another_average_sees_the_iterate_of_a_parameter_without_gradient():
    found = []
    for base in (gadam.Gadam, torch.optim.AdamW):
        params = parameters(torch.float64)
        optimizer: torch.optim.Optimizer = base(params, lr=0.1, weight_decay=0.0)
        plan = gadam.Averaging(start=2, interpolation=0.9)
        gadam.IterateAverage(optimizer, plan)
        watching = gadam.IterateAverage(optimizer, gadam.Averaging(start=1))
        train(optimizer, params, 3)
        params[1].grad = None
        optimizer.step()
        with watching.applied():
            found.append([p.detach().clone() for p in params])
    for ours, theirs in zip(*found):
        torch.testing.assert_close(ours, theirs)


# 14. The model or its parameters change


@pytest.mark.parametrize("name", ["copy_to", "applied"])
def test_another_model_is_refused(name):
    model = nn.Linear(3, 2)
    optimizer = gadam.Gadam(model.parameters(), lr=0.1, average=gadam.Averaging(start=1))
    train(optimizer, [*model.parameters()], 3)
    other = copy.deepcopy(model)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ValueError, match="does not hold the optimizer's parameters"):
        if name == "copy_to":
            optimizer.average.copy_to(other)
        else:
            with optimizer.average.applied(other):
                pass
    same(model.state_dict(), before)
    other.load_state_dict(optimizer.average.model_state_dict(model))  # as the message says


@pytest.mark.parametrize("change", ["unfreeze", "freeze"])
def test_a_copy_keeps_the_average_of_partly_frozen_parameters(change):
    body, head = parameters(), parameters(seed=1)
    for p in body:
        p.requires_grad_(False)
    optimizer = gadam.Gadam([*body, *head], lr=0.1, average=gadam.Averaging(start=1))
    train(optimizer, head, 4)
    for p in body if change == "unfreeze" else head:
        p.requires_grad_(change == "unfreeze")
    for again in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
        assert (again.average.count, again.average.phase) == (4, "averaging")


@pytest.mark.parametrize("base", [gadam.Gadam, torch.optim.AdamW])
def test_a_parameter_that_is_replaced_is_averaged_from_then_on(base):
    """As when points are added to a scene, or rows to an embedding."""
    old, other = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(2))
    optimizer = base([old, other], lr=0.1, weight_decay=0.0)
    average = gadam.IterateAverage(optimizer, gadam.Averaging(start=1))
    train(optimizer, [old, other], 2)
    new = nn.Parameter(torch.full((5,), 2.0))
    optimizer.param_groups[0]["params"][0] = new
    optimizer.state.pop(old, None)
    first = new.detach().clone()
    iterates = train(optimizer, [new, other], 2)
    assert average.count == 4
    with average.applied():
        # It is taken to have been constant before.
        expected = (2 * first + iterates[0][0] + iterates[1][0]) / 4
        torch.testing.assert_close(new.detach(), expected)
