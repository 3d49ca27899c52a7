"""What a sample is: the weights as ``step()`` and its hooks leave them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

import gadam
from contract import parameters, same, set_gradients, train
from gadam.optim import cpu

# Each implementation of the update, and an average beside a torch optimizer
MAKE: dict[str, Callable[..., tuple[Any, gadam.IterateAverage]]] = {}


def _built_in(**flags: Any) -> Callable[..., tuple[Any, gadam.IterateAverage]]:
    def make(params: Any, plan: gadam.Averaging) -> tuple[Any, gadam.IterateAverage]:
        optimizer = gadam.GadamX(params, 0.05, average=plan, **flags)
        return optimizer, optimizer.average

    return make


def _attached(params: Any, plan: gadam.Averaging) -> tuple[Any, gadam.IterateAverage]:
    optimizer = torch.optim.SGD(params, lr=0.05, momentum=0.9)
    return optimizer, gadam.IterateAverage(optimizer, plan)


MAKE = {
    "default": _built_in(),
    "loop": _built_in(foreach=False),
    "foreach": _built_in(foreach=True),
    "attached": _attached,
}
if cpu.is_available():
    MAKE["fused"] = _built_in(fused=True)
every_backend = pytest.mark.parametrize("backend", MAKE)


def mean_of(iterates: list[list[torch.Tensor]], i: int = 0) -> torch.Tensor:
    return torch.stack([iterate[i] for iterate in iterates]).mean(0)


def clamp(params: list[nn.Parameter]) -> None:
    for p in params:
        p.data.clamp_(-0.3, 0.3)


@every_backend
def test_edits_after_a_step_do_not_enter_its_sample(backend):
    params = parameters()
    optimizer, average = MAKE[backend](params, gadam.Averaging(start=1))
    iterates = []
    for step in range(1, 41):
        iterates += train(optimizer, params, 1, first=step)
        clamp(params)
    with average.applied():
        torch.testing.assert_close(params[0].detach(), mean_of(iterates))


@every_backend
def test_edits_in_hooks_enter(backend):
    params = parameters()
    optimizer, average = MAKE[backend](params, gadam.Averaging(start=1))
    train(optimizer, params, 5)  # the kernel has folded samples in before
    optimizer.register_step_post_hook(lambda *_: clamp(params))
    average.load_state_dict({**copy.deepcopy(average.state_dict()), "progress": torch.zeros(7)})
    iterates = train(optimizer, params, 20)
    assert iterates[-1][0].abs().max() <= 0.3
    with average.applied():
        torch.testing.assert_close(params[0].detach(), mean_of(iterates))


@every_backend
def test_edits_in_global_hooks_enter(backend):
    params, others = parameters(), parameters()
    optimizer, average = MAKE[backend](params, gadam.Averaging(start=1))
    other = torch.optim.SGD(others, lr=0.1)
    handle = register_optimizer_step_post_hook(
        lambda stepped, *_: clamp(params) if stepped is optimizer else None
    )
    try:
        iterates = []
        for step in range(1, 21):
            iterates += train(optimizer, params, 1, first=step)
            train(other, others, 1, first=step)  # a step of an optimizer without average
    finally:
        handle.remove()
    iterates += train(optimizer, params, 3, first=21)
    assert average.count == 23
    assert iterates[19][0].abs().max() <= 0.3
    with average.applied():
        torch.testing.assert_close(params[0].detach(), mean_of(iterates))


@every_backend
def test_overwriting_the_weights_after_the_last_step_does_not_change_the_average(backend):
    params = parameters()
    optimizer, average = MAKE[backend](params, gadam.Averaging(start=1))
    iterates = train(optimizer, params, 20)
    best = {str(i): p for i, p in enumerate(iterates[3])}
    nn.ParameterList(params).load_state_dict(best)
    assert average.count == 20
    with average.applied():
        torch.testing.assert_close(params[0].detach(), mean_of(iterates))


@every_backend
def test_vectors_to_parameters(backend):
    """``vector_to_parameters`` replaces the parameters' memory."""
    params = parameters()
    optimizer, average = MAKE[backend](params, gadam.Averaging(start=1))
    iterates = []
    for step in range(1, 21):
        iterates += train(optimizer, params, 1, first=step)
        vector = torch.cat([p.detach().reshape(-1) for p in params])
        nn.utils.vector_to_parameters(0.9 * vector, params)
    with average.applied():
        torch.testing.assert_close(params[4].detach(), mean_of(iterates, 4))


@every_backend
def test_an_embedding_that_renormalizes_in_forward(backend):
    torch.manual_seed(0)
    model = nn.Embedding(6, 4, max_norm=0.5)
    optimizer, average = MAKE[backend](list(model.parameters()), gadam.Averaging(start=1))
    iterates = []
    for _ in range(20):
        optimizer.zero_grad()
        (model(torch.arange(6)) - 3.0).square().mean().backward()
        optimizer.step()
        iterates.append([model.weight.detach().clone()])
    with average.applied():
        torch.testing.assert_close(model.weight.detach(), mean_of(iterates))


@every_backend
@pytest.mark.parametrize("set_to_none", [True, False])
def test_steps_without_gradients_neither_count_nor_are_sampled(backend, set_to_none):
    """Lightning calls step() even if ``training_step`` returns None."""
    params = parameters()
    optimizer, average = MAKE[backend](params, gadam.Averaging(start=5, every=2))
    iterates = []
    for step in range(1, 25):
        if step % 3 == 0:
            optimizer.zero_grad(set_to_none=True)
            optimizer.step()
        else:
            iterates += train(optimizer, params, 1, first=step)
    assert average._progress.steps == len(iterates) == 16
    assert average.count == 6
    with average.applied():
        torch.testing.assert_close(params[0].detach(), mean_of(iterates[4::2]))


# ---------------------------------------------------------------------- observing changes nothing

OBSERVE: dict[str, Callable[[Any, gadam.IterateAverage, list[nn.Parameter]], object]] = {
    "count": lambda o, a, p: (a.count, a.skipped, a.phase),
    "repr": lambda o, a, p: repr(a),
    "state_dict": lambda o, a, p: (o.state_dict(), a.state_dict()),
    "applied": lambda o, a, p: _enter_and_leave(a),
    "model_state_dict": lambda o, a, p: a.model_state_dict(nn.ParameterList(p)),
    "copy": lambda o, a, p: copy.deepcopy(o),
}


def _replace_memory(params: list[nn.Parameter]) -> None:
    for p in params:
        p.data = p.data.clone()


EDITS: dict[str, Callable[[list[nn.Parameter]], object]] = {
    "clamp": clamp,
    "noise": lambda params: [p.data.mul_(1.01) for p in params],
    "replace": _replace_memory,
}


def _enter_and_leave(average: gadam.IterateAverage) -> bool:
    if average.count:
        with average.applied():
            pass
    return True


@every_backend
@settings(max_examples=15)
@given(
    plan=st.sampled_from(
        [
            gadam.Averaging(start=2),
            gadam.Averaging(start=3, every=2),
            gadam.Averaging(start=1, weighting=gadam.EMA(0.8)),
            gadam.Averaging(start=1, weighting=gadam.Window(3)),
        ]
    ),
    script=st.lists(
        st.tuples(
            st.sampled_from([*EDITS, "", "", "nan", "no gradient"]),
            st.lists(st.sampled_from([*OBSERVE, "resume"]), max_size=3),
        ),
        min_size=3,
        max_size=14,
    ),
)
def test_observing_and_resuming_do_not_change_the_average(backend, plan, script):
    """Two runs with the same edits, one of them watched and resumed: the same bits."""
    results = []
    for watched in (False, True):
        params = parameters()
        optimizer, average = MAKE[backend](params, plan)
        for step, (edit, observers) in enumerate(script, 1):
            set_gradients(params, step)
            raw = [p.detach().clone() for p in params]
            if edit == "no gradient":
                optimizer.zero_grad()
            elif edit == "nan":
                params[0].grad[0, 0] = float("nan")  # type: ignore[index]
            elif edit:
                EDITS[edit](params)
            optimizer.step()
            if edit == "nan":
                for p, value in zip(params, raw):
                    p.data.copy_(value)
                for state in optimizer.state.values():
                    for name in ("exp_avg", "exp_avg_sq", "momentum_buffer"):
                        if name in state:
                            state[name].nan_to_num_()
            for name in observers if watched else []:
                if name == "resume":
                    saved = copy.deepcopy((optimizer.state_dict(), [p.detach() for p in params]))
                    params = parameters()
                    optimizer, average = MAKE[backend](params, plan)
                    for p, value in zip(params, saved[1]):
                        p.data.copy_(value)
                    optimizer.load_state_dict(saved[0])
                else:
                    OBSERVE[name](optimizer, average, params)
        results.append((average.state_dict(), [p.detach() for p in params], average.skipped))
    same(results[1], results[0])


def test_averages_of_one_optimizer_share_one_finite_check(monkeypatch):
    from gadam.average import sampling

    calls = []

    def check(tensors: list[torch.Tensor], original=sampling.finite_flag) -> torch.Tensor:
        calls.append(len(tensors))
        return original(tensors)

    monkeypatch.setattr(sampling, "finite_flag", check)
    params = parameters(torch.float64)
    sgd = torch.optim.SGD(params, lr=0.1)
    weightings = [gadam.Mean(), gadam.EMA(0.9), gadam.EMA(0.99), gadam.LinearDecay()]
    averages = [
        gadam.IterateAverage(sgd, gadam.Averaging(start=1, weighting=w)) for w in weightings
    ]
    iterates = train(sgd, params, 6)
    assert len(calls) == 6
    params[0].grad[0, 0] = float("nan")  # type: ignore[index]
    sgd.step()
    assert [(a.count, a.skipped) for a in averages] == [(6, 1)] * 4
    for average, weighting in zip(averages, weightings):
        expected = torch.zeros_like(params[0])
        for count, iterate_ in enumerate(iterates, 1):
            expected.lerp_(iterate_[0], weighting.weight(count))
        torch.testing.assert_close(average._value(params[0]), expected.detach())
