"""Averages with copies, wrappers, hooks and partially loaded models."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import gadam
from average_models import BATCHES, fit, small_model, snapshot
from contract import parameters, same, train


def test_progress_is_on_the_parameters_device_for_any_default_device():
    """A full state dict loads only if all tensors with dimensions are on one device."""
    with torch.device("meta"):
        p = nn.Parameter(torch.zeros(3, device="cpu"))
        optimizer = gadam.Gadam([p], average=gadam.Averaging(start=gadam.Plateau(3)))
        optimizer.average.observe(0.5)
        p.grad = torch.ones(3, device="cpu")
        optimizer.step()
    assert optimizer.average.phase == "waiting"
    assert optimizer.state_dict()["state"][0]["average_progress"].device.type == "cpu"


def test_copying_the_optimizer_with_its_average_yields_one_average():
    params = parameters()
    optimizer = gadam.Gadam(params, average=gadam.Averaging(start=1))
    train(optimizer, params, 3)
    together: dict[str, Any] = {"optimizer": optimizer, "average": optimizer.average}
    twin = copy.deepcopy(together)
    assert twin["optimizer"].average is twin["average"]
    train(twin["optimizer"], twin["optimizer"].param_groups[0]["params"], 2)
    assert twin["average"].count == 5
    assert copy.copy(optimizer.average) is optimizer.average


def test_an_optimizer_built_from_another_ones_groups_starts_fresh():
    params = parameters()
    plan = gadam.Averaging(start=1)
    first = gadam.Lookahead(gadam.Gadam(params, average=plan))
    train(first, params, 3)
    second = gadam.Lookahead(gadam.Gadam(first.param_groups, average=plan))
    assert second.average.count == 0
    train(second, params, 1)
    assert (second.average.count, second.param_groups[0]["lookahead_steps"]) == (1, 1)


def test_the_optimizer_may_be_loaded_before_the_model():
    def make(seed: int, frozen: bool) -> tuple[nn.Module, gadam.Gadam]:
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
        model[0].requires_grad_(not frozen)
        return model, gadam.Gadam(model.parameters(), average=gadam.Averaging(start=1))

    model, optimizer = make(0, frozen=True)
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.randn(8, 4)).square().mean().backward()
        optimizer.step()
    other, fresh = make(1, frozen=False)
    fresh.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    other.load_state_dict(model.state_dict())
    same(fresh.average.model_state_dict(other), optimizer.average.model_state_dict(model))


def test_applied_undoes_new_buffers_and_buffers_that_were_none():
    class Cached(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 1)
            self.register_buffer("cache", None)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.cache = self.layer.weight.detach().clone()
            self.register_buffer("late", torch.zeros(1))
            return self.layer(x)

    model = Cached()
    optimizer = gadam.Gadam(model.parameters(), average=gadam.Averaging(start=1))
    model.layer(torch.randn(4, 3)).square().mean().backward()
    optimizer.step()
    with optimizer.average.applied(model):
        model(torch.randn(2, 3))
        assert model.cache is not None
    assert model.cache is None
    assert "late" not in dict(model.named_buffers())


def test_raw_state_dict_includes_the_raw_statistics():
    model = small_model()
    optimizer = gadam.Gadam(model.parameters(), 0.1, average=gadam.Averaging(start=1))
    fit(model, optimizer, 4)
    before = snapshot(model)
    with optimizer.average.applied(model, batchnorm=BATCHES):
        assert not torch.equal(model.state_dict()["1.running_mean"], before["1.running_mean"])
        same(dict(optimizer.average.raw_state_dict(model)), dict(before))


def test_an_optimizer_cannot_be_copied_while_applied():
    params = parameters()
    optimizer = gadam.Gadam(params, average=gadam.Averaging(start=1))
    train(optimizer, params, 2)
    with (
        optimizer.average.applied(),
        pytest.raises(RuntimeError, match="while its average is applied"),
    ):
        copy.deepcopy(optimizer)
    copy.deepcopy(optimizer)


def test_samples_are_taken_after_post_hooks():
    params = parameters()
    optimizer = gadam.Gadam(params, 0.5, average=gadam.Averaging(start=1))

    def project(*_: object) -> None:
        for p in params:
            p.data.clamp_(-0.1, 0.1)

    optimizer.register_step_post_hook(project)
    train(optimizer, params, 4)
    with optimizer.average.applied():
        assert params[0].abs().max() <= 0.1


def test_update_in_inference_mode():
    params = parameters()
    optimizer = gadam.Gadam(params)
    with torch.inference_mode():
        optimizer.average.update()
    optimizer.average.begin()
    train(optimizer, params, 2)
    assert optimizer.average.count == 3


def test_averages_of_one_optimizer_do_not_interfere():
    params = parameters()
    sgd = torch.optim.SGD(params, lr=0.1)
    one, other = (gadam.IterateAverage(sgd, gadam.Averaging(start=1)) for _ in range(2))
    train(sgd, params, 2)
    with one.applied():
        with pytest.raises(RuntimeError, match="update"):
            other.update()
        with pytest.raises(RuntimeError, match="does not nest"):
            with other.applied():
                pass


def test_model_state_dict_rejects_unsuitable_models():
    model = nn.Linear(3, 2)
    optimizer = gadam.Gadam(model.parameters(), average=gadam.Averaging(start=1))
    model(torch.randn(4, 3)).square().mean().backward()
    optimizer.step()
    with pytest.raises(ValueError, match="None of the averaged parameters belongs to this model"):
        optimizer.average.model_state_dict(nn.Linear(3, 2))
    model._register_state_dict_hook(
        lambda module, state, *_: state.update({k: v.clone() for k, v in state.items()})
    )
    with pytest.raises(RuntimeError, match="copies or omits"):
        optimizer.average.model_state_dict(model)


def test_remove_stops_sampling():
    params = parameters()
    sgd = torch.optim.SGD(params, lr=0.1)
    average = gadam.IterateAverage(sgd, gadam.Averaging(start=1))
    train(sgd, params, 2)
    average.remove()
    train(sgd, params, 2)
    assert average.count == 2


def test_another_average_may_follow_a_removed_one():
    model = small_model()
    optimizer = gadam.Gadam(model.parameters(), average=gadam.Averaging(start=1))
    fit(model, optimizer, 3)
    removed = optimizer.average
    names = [name for name, _ in model.named_parameters()]

    def average(average: gadam.IterateAverage, model: nn.Module) -> dict[str, torch.Tensor]:
        found = average.model_state_dict(model)
        return {name: found[name] for name in names}

    expected = average(removed, model)
    removed.remove()
    assert not any("average" in state for state in optimizer.state.values())
    assert "average" not in str(optimizer.state_dict()["state"][0].keys())
    other = gadam.IterateAverage(optimizer, gadam.Averaging(start=1, weighting=gadam.EMA(0.5)))
    fit(model, optimizer, 3)
    saved = copy.deepcopy(optimizer.state_dict())
    assert other.count == 3
    same(average(removed, model), expected)

    # A copy has both, and does not go back to the weights of the removal.
    twin_model, twin, twin_other = copy.deepcopy((model, optimizer, other))
    assert (twin.average.count, twin_other.count) == (3, 3)
    same(average(twin.average, twin_model), expected)
    same(snapshot(twin_model), snapshot(model))

    # A checkpoint is loaded into the attached average only.
    fit(model, optimizer, 3)
    optimizer.load_state_dict(saved)
    assert (removed.count, other.count) == (3, 3)
    same(average(removed, model), expected)
    other.remove()
    with pytest.warns(UserWarning, match="averages that the optimizer does not have: average"):
        optimizer.load_state_dict(saved)
    assert not any("average" in state for state in optimizer.state.values())


@pytest.mark.parametrize("interpolation", [0.0, 0.9])
@pytest.mark.parametrize("start", [1, 8])
def test_state_that_is_moved_keeps_the_average(interpolation, start):
    """As by `state[p][name] = tensor.to(device)`: a new tensor is not a loaded one."""
    plan = gadam.Averaging(start=start, interpolation=interpolation)
    pairs = []
    for is_moved in (False, True):
        params = parameters()
        optimizer = gadam.Gadam(params, average=plan)
        train(optimizer, params, 3)
        saved = copy.deepcopy(optimizer.state_dict())
        train(optimizer, params, 3, first=4)
        for state in optimizer.state.values() if is_moved else ():
            state.update({name: tensor.clone() for name, tensor in state.items()})
        assert optimizer.average.count == (6 if start == 1 else 0)
        train(optimizer, params, 4, first=7)
        pairs.append((params, optimizer, saved))
    (plain, one, _), (moved, other, saved) = pairs
    assert other.average.count == (10 if start == 1 else 3)
    same([p.detach() for p in plain], [p.detach() for p in moved])
    same(one.state_dict(), other.state_dict())
    # State of a checkpoint that is written in the same way is loaded, even if it has the numbers
    # that were last published.
    for i, p in enumerate(moved):
        other.state[p] = {name: tensor.clone() for name, tensor in saved["state"][i].items()}
    assert other.average.count == (3 if start == 1 else 0)


def test_cleared_state_empties_the_average():
    model = small_model()
    optimizer = gadam.Gadam(model.parameters(), average=gadam.Averaging(start=1))
    fit(model, optimizer, 3)
    optimizer.state.clear()
    with pytest.warns(UserWarning, match="state was cleared"):
        assert optimizer.average.count == 0
    fit(model, optimizer, 1)
    assert optimizer.average.count == 1
    same(optimizer.average.model_state_dict(model), dict(model.state_dict()))
