"""Lookahead, compared with its definition, and Gadam + LH."""

from __future__ import annotations

import pytest
import torch

import gadam
from contract import parameters, same, set_gradients, train


def by_hand(make_inner, steps: int, k: int, alpha: float, until: int | None = None) -> list:
    """Return the iterates of Lookahead by its definition, plain ones from step ``until`` on."""
    params = parameters(torch.float64)
    inner = make_inner(params)
    slow = [p.detach().clone() for p in params]
    iterates = []
    for t in range(1, steps + 1):
        set_gradients(params, t)
        inner.step()
        if t % k == 0 and (until is None or t < until):
            for p, s in zip(params, slow):
                s.add_(p.detach() - s, alpha=alpha)
                p.data.copy_(s)
        iterates.append([p.detach().clone() for p in params])
    return iterates


INNER = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9),
    "adamw": lambda params: torch.optim.AdamW(params, lr=0.05),
    "gadamx": lambda params: gadam.GadamX(params, lr=0.1),
}


@pytest.mark.parametrize("inner", INNER)
@pytest.mark.parametrize(("k", "alpha"), [(5, 0.5), (1, 0.3), (3, 1.0)])
def test_equals_its_definition(inner, k, alpha):
    expected = by_hand(INNER[inner], 13, k, alpha)
    params = parameters(torch.float64)
    optimizer = gadam.Lookahead(INNER[inner](params), k=k, alpha=alpha)
    torch.testing.assert_close(train(optimizer, params, 13), expected, rtol=1e-12, atol=1e-12)


def test_samples_are_taken_after_the_synchronization():
    params = parameters(torch.float64)
    inner = gadam.Gadam(params, 0.05, average=gadam.Averaging(start=3, every=3))
    optimizer = gadam.Lookahead(inner, k=3)
    iterates = train(optimizer, params, 9)
    expected = torch.stack([iterates[t - 1][0] for t in (3, 6, 9)]).mean(0)
    assert optimizer.average is inner.average
    with optimizer.average.applied():
        torch.testing.assert_close(params[0].detach(), expected, rtol=1e-13, atol=1e-13)
    torch.testing.assert_close(
        iterates, by_hand(lambda p: gadam.Gadam(p, 0.05), 9, 3, 0.5), rtol=1e-12, atol=1e-12
    )


@pytest.mark.parametrize("attach_to", ["inner before", "inner after", "outer"])
def test_attached_averages_sample_after_the_synchronization(attach_to):
    params = parameters(torch.float64)
    inner = torch.optim.SGD(params, lr=0.05)
    plan = gadam.Averaging(start=2, every=2)
    average = gadam.IterateAverage(inner, plan) if attach_to == "inner before" else None
    optimizer = gadam.Lookahead(inner, k=2)
    if average is None:
        average = gadam.IterateAverage(inner if attach_to == "inner after" else optimizer, plan)
    iterates = train(optimizer, params, 6)
    with average.applied():
        expected = torch.stack([iterates[t - 1][0] for t in (2, 4, 6)]).mean(0)
        torch.testing.assert_close(params[0].detach(), expected, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("start", [4, 5, 6, 7])
def test_gadam_lh_averages_plain_iterates(start):
    expected = by_hand(lambda p: torch.optim.AdamW(p, 0.05), 12, 3, 0.5, until=start)
    params = parameters(torch.float64)
    inner = gadam.Gadam(params, 0.05, average=gadam.Averaging(start=start))
    iterates = train(gadam.Lookahead(inner, k=3, until_average=True), params, 12)
    torch.testing.assert_close(iterates, expected, rtol=1e-12, atol=1e-12)
    with inner.average.applied():
        mean = torch.stack([i[0] for i in expected[start - 1 :]]).mean(0)
        torch.testing.assert_close(params[0].detach(), mean, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("how", ["begin", "update"])
def test_gadam_lh_stops_when_averaging_is_started_manually(how):
    expected = by_hand(lambda p: torch.optim.AdamW(p, 0.05), 9, 2, 0.5, until=6)
    params = parameters(torch.float64)
    inner = gadam.Gadam(params, 0.05)
    optimizer = gadam.Lookahead(inner, k=2, until_average=True)
    iterates = train(optimizer, params, 5)
    getattr(optimizer.average, how)()
    iterates += train(optimizer, params, 4, first=6)
    torch.testing.assert_close(iterates, expected, rtol=1e-12, atol=1e-12)


def test_complex_parameters():
    z = torch.nn.Parameter(torch.randn(3, dtype=torch.complex128))
    start = z.detach().clone()
    optimizer = gadam.Lookahead(torch.optim.SGD([z], lr=1.0), k=1, alpha=0.25)
    z.grad = torch.ones_like(z)
    optimizer.step()
    torch.testing.assert_close(z.detach(), start - 0.25)


def test_groups_and_state_are_shared_with_the_inner_optimizer():
    inner = torch.optim.SGD(parameters(), lr=0.1)
    optimizer = gadam.Lookahead(inner)
    assert isinstance(optimizer, torch.optim.Optimizer)
    assert optimizer.param_groups is inner.param_groups
    optimizer.param_groups[0]["lr"] = 0.2
    assert inner.param_groups[0]["lr"] == 0.2
    assert not hasattr(optimizer, "average")
    optimizer.zero_grad()


def test_loads_a_state_dict_of_the_inner_optimizer_alone():
    params = parameters()
    inner = torch.optim.AdamW(params)
    train(inner, params, 3)
    optimizer = gadam.Lookahead(torch.optim.AdamW(params), k=2)
    optimizer.load_state_dict(inner.state_dict())
    before = params[0].detach().clone()
    train(optimizer, params, 1, first=4)
    same(optimizer.state[params[0]]["slow_param"], before)


@pytest.mark.parametrize(
    ("kwargs", "error", "message"),
    [
        ({"k": 0}, ValueError, "Invalid k: 0"),
        ({"k": 2.5}, ValueError, "Invalid k: 2.5"),
        ({"alpha": 0.0}, ValueError, "Invalid alpha: 0.0"),
        ({"alpha": 1.5}, ValueError, "Invalid alpha: 1.5"),
        ({"until_average": True}, ValueError, "needs an optimizer with a built-in average"),
    ],
)
def test_invalid_arguments_are_rejected(kwargs, error, message):
    with pytest.raises(error, match=message):
        gadam.Lookahead(torch.optim.SGD(parameters(), lr=0.1), **kwargs)
    with pytest.raises(TypeError, match="needs a torch optimizer"):
        gadam.Lookahead(parameters())  # type: ignore[arg-type]


def test_a_second_lookahead_is_rejected():
    inner = torch.optim.SGD(parameters(), lr=0.1)
    gadam.Lookahead(inner)
    with pytest.raises(ValueError, match="already has a Lookahead around it"):
        gadam.Lookahead(inner)


def test_slow_weights_follow_weights_loaded_after_a_dry_run():
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

    model = torch.nn.Linear(3, 2)
    optimizer = gadam.Lookahead(torch.optim.SGD(model.parameters(), lr=0.0), k=1)
    get_optimizer_state_dict(model, optimizer)
    with torch.no_grad():
        model.weight.fill_(5.0)
    model(torch.randn(4, 3)).square().mean().backward()
    optimizer.step()
    assert torch.equal(model.weight, torch.full((2, 3), 5.0))
