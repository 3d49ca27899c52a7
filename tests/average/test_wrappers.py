"""Several optimizers with one average, and optimizers inside the wrappers of frameworks."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import gadam
from contract import parameters, same, set_gradients, train

# ----------------------------------------------------------------------------- several optimizers


def pair(params: list[nn.Parameter]) -> list[torch.optim.Optimizer]:
    return [
        torch.optim.SGD(params[:2], lr=0.05, momentum=0.9),
        torch.optim.AdamW(params[2:], lr=0.05),
    ]


def train_both(optimizers: list[Any], params: list[nn.Parameter], steps: range) -> list[list]:
    iterates = []
    for step in steps:
        set_gradients(params, step)
        for optimizer in optimizers:
            optimizer.step()
        iterates.append([p.detach().clone() for p in params])
    return iterates


def test_two_optimizers_one_average():
    params = parameters(torch.float64)
    optimizers = pair(params)
    average = gadam.IterateAverage(optimizers, gadam.Averaging(start=3, every=2))
    iterates = train_both(optimizers, params, range(1, 10))
    assert (average.count, average._progress.steps) == (4, 9)
    sampled = [iterates[t - 1] for t in (3, 5, 7, 9)]
    before = [p.detach().clone() for p in params]
    with average.applied():
        for i, p in enumerate(params):
            torch.testing.assert_close(p.detach(), torch.stack([s[i] for s in sampled]).mean(0))
        for optimizer in optimizers:
            with pytest.raises(RuntimeError, match=r"step\(\) was called while"):
                optimizer.step()
    same([p.detach() for p in params], before)
    assert "optimizer=SGD, AdamW" in repr(average)


def test_a_joint_step_is_complete_when_the_last_optimizer_has_stepped():
    params = parameters()
    first, second = pair(params)
    average = gadam.IterateAverage([first, second], gadam.Averaging(start=1))
    set_gradients(params, 1)
    for optimizer, count in ((second, 0), (second, 0), (first, 1), (first, 1), (second, 2)):
        optimizer.step()
        assert average.count == count
    for optimizer in (first, second):  # a joint step without gradients is none
        optimizer.zero_grad()
        optimizer.step()
    assert average.count == 2
    set_gradients(params[:2], 2)
    for optimizer in (first, second):
        optimizer.step()
    assert average.count == 3


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_each_optimizers_state_dict_carries_its_part(order):
    plan = gadam.Averaging(start=2)
    params = parameters()
    optimizers = pair(params)
    average = gadam.IterateAverage(optimizers, plan)
    train_both(optimizers, params, range(1, 6))
    saved = copy.deepcopy([optimizer.state_dict() for optimizer in optimizers])
    others = [nn.Parameter(p.detach().clone()) for p in params]
    resumed = pair(others)
    again = gadam.IterateAverage(resumed, plan)
    for i in order:
        resumed[i].load_state_dict(saved[i])
    same(again.state_dict(), average.state_dict())
    train_both(optimizers, params, range(6, 9))
    train_both(resumed, others, range(6, 9))
    same(again.state_dict(), average.state_dict())
    assert again.count == 7


def test_a_copied_joint_average():
    params = parameters()
    optimizers = pair(params)
    average = gadam.IterateAverage(optimizers, gadam.Averaging(start=1))
    train_both(optimizers, params, range(1, 4))
    twin = copy.deepcopy(average)
    twins = [p for o in twin.optimizers for g in o.param_groups for p in g["params"]]
    train_both(twin.optimizers, twins, range(4, 6))
    assert (average.count, twin.count) == (3, 5)


def test_optimizers_that_cannot_share_an_average():
    params = parameters()
    with pytest.raises(ValueError, match="more than one of the optimizers"):
        gadam.IterateAverage([torch.optim.SGD(params, 0.1), torch.optim.SGD(params, 0.1)])
    with pytest.raises(ValueError, match="at least one optimizer"):
        gadam.IterateAverage([])


# -------------------------------------------------------------------------------------- wrappers


class AcceleratedOptimizer(torch.optim.Optimizer):
    """Like Accelerate's: an optimizer that holds another one."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        optimizer.load_state_dict(optimizer.state_dict())

    @property
    def param_groups(self):  # type: ignore[override]
        return self.optimizer.param_groups

    @property
    def state(self):  # type: ignore[override]
        return self.optimizer.state

    def step(self, closure=None):
        return self.optimizer.step(closure)


class _FabricOptimizer:
    """Like Fabric's: a class made for each optimizer, with the optimizer's own as a base."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self.__class__ = type("Fabric", (self.__class__, type(optimizer)), {})

    @property
    def optimizer(self):
        return self._optimizer

    def step(self, closure=None):
        return self._optimizer.step()


class LightningOptimizer:
    """Like Lightning's: not an optimizer."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer

    @property
    def optimizer(self):
        return self._optimizer

    def step(self, closure=None, **kwargs: Any):
        return self._optimizer.step()


AcceleratedOptimizer.__module__ = "accelerate.optimizer"
_FabricOptimizer.__module__ = "lightning.fabric.wrappers"
LightningOptimizer.__module__ = "lightning.pytorch.core.optimizer"


@pytest.mark.parametrize(
    "wrap",
    [
        AcceleratedOptimizer,
        _FabricOptimizer,
        LightningOptimizer,
        gadam.Lookahead,
        lambda o: LightningOptimizer(AcceleratedOptimizer(o)),
    ],
)
def test_wrapped_optimizers(wrap):
    params = parameters()
    sgd = torch.optim.SGD(params, lr=0.05)
    wrapper = wrap(sgd)
    assert gadam.average_of(wrapper) is None
    average = gadam.IterateAverage(wrapper, gadam.Averaging(start=2))
    assert average.optimizer is sgd
    train(wrapper, params, 4)
    assert average.count == 3
    assert gadam.average_of(wrapper) is gadam.average_of(sgd) is average
    average.remove()
    assert gadam.average_of(wrapper) is None


def test_average_of_a_built_in_average_and_of_several_wrappers():
    optimizer = gadam.Gadam(parameters())
    gadam.IterateAverage(optimizer)
    assert gadam.average_of(optimizer) is optimizer.average
    assert gadam.average_of([None, LightningOptimizer(optimizer)]) is optimizer.average
    assert gadam.average_of(object()) is None
