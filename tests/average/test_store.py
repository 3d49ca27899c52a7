"""The average in the optimizer's state dict: frameworks save and load nothing else."""

from __future__ import annotations

import copy
import io
import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.optim.swa_utils import AveragedModel

import gadam
from average_models import fit, in_one_process, small_model
from contract import parameters, same, train

PLAN = gadam.Averaging(start=3, every=2)


def resumed(saved: dict[str, Any], params: list[nn.Parameter], make: Any, plan: Any) -> Any:
    """Resume as a framework does: through the optimizer's state dict alone."""
    file = io.BytesIO()
    torch.save(saved, file)
    file.seek(0)
    optimizer = make(params)
    average = gadam.IterateAverage(optimizer, plan)
    optimizer.load_state_dict(torch.load(file, weights_only=True))
    return optimizer, average


MAKERS = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9),
    "plain sgd": lambda params: torch.optim.SGD(params, lr=0.05),
    "adamw": lambda params: torch.optim.AdamW(params, lr=0.05),
    "gadam": lambda params: gadam.Gadam(params, lr=0.05, average=gadam.Averaging(start=2)),
    "lookahead": lambda params: gadam.Lookahead(torch.optim.AdamW(params, lr=0.05), k=2),
}


@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize(
    "weighting", [gadam.Mean(), gadam.EMA(0.9), gadam.Window(2)], ids=lambda w: type(w).__name__
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_attached_average_travels_in_the_optimizers_state_dict(name, weighting, dtype):
    make, plan = MAKERS[name], gadam.Averaging(start=3, every=2, weighting=weighting)
    params = parameters(dtype)
    optimizer = make(params)
    average = gadam.IterateAverage(optimizer, plan)
    train(optimizer, params, 8)
    saved = copy.deepcopy(optimizer.state_dict())
    others = copy.deepcopy([p.detach() for p in params])
    other, again = resumed(saved, [nn.Parameter(p) for p in others], make, plan)
    same(again.state_dict(), average.state_dict())
    assert again.count == average.count == 3
    train(optimizer, params, 5, first=9)
    train(other, other.param_groups[0]["params"], 5, first=9)
    same(again.state_dict(), average.state_dict())
    same(other.state_dict(), optimizer.state_dict())
    key = "average2" if name == "gadam" else "average"
    assert all(key not in state for state in other.state.values()), "trap 2"


def test_the_optimizers_own_state_is_what_it_would_be_without_an_average():
    plain, averaged = (torch.optim.AdamW(parameters(), lr=0.05) for _ in range(2))
    gadam.IterateAverage(averaged, PLAN)
    for optimizer in (plain, averaged):
        train(optimizer, optimizer.param_groups[0]["params"], 4)
    for a, b in zip(averaged.state.values(), plain.state.values()):
        same(a, b)
    averaged.load_state_dict(copy.deepcopy(averaged.state_dict()))
    for a, b in zip(averaged.state.values(), plain.state.values()):
        same(a, b)


def test_two_averages_of_one_optimizer_have_their_own_entries():
    def make() -> tuple[torch.optim.Optimizer, list[gadam.IterateAverage]]:
        sgd = torch.optim.SGD(parameters(), lr=0.05)
        weightings = (gadam.EMA(0.9), gadam.Mean(), gadam.Window(3))
        plans = [gadam.Averaging(start=1, weighting=weighting) for weighting in weightings]
        return sgd, [gadam.IterateAverage(sgd, plan) for plan in plans]

    sgd, averages = make()
    train(sgd, sgd.param_groups[0]["params"], 5)
    other, loaded = make()
    other.load_state_dict(copy.deepcopy(sgd.state_dict()))
    for a, b in zip(loaded, averages):
        same(a.state_dict(), b.state_dict())
    # Fewer averages than in the checkpoint: the rest does not end up in the optimizer's state.
    alone = torch.optim.SGD(parameters(), lr=0.05)
    first = gadam.IterateAverage(alone, averages[0].averaging)
    with pytest.warns(UserWarning, match="does not have: average2, average3. They are dropped"):
        alone.load_state_dict(copy.deepcopy(sgd.state_dict()))
    same(first.state_dict(), averages[0].state_dict())
    assert not alone.state


def test_attaching_after_the_checkpoint_was_loaded():
    """A callback may attach the average only when the trainer has already loaded the optimizer."""
    params = parameters()
    sgd = torch.optim.SGD(params, lr=0.05, momentum=0.9)
    average = gadam.IterateAverage(sgd, PLAN)
    train(sgd, params, 6)
    other = torch.optim.SGD(parameters(), lr=0.05, momentum=0.9)
    other.load_state_dict(copy.deepcopy(sgd.state_dict()))
    late = gadam.IterateAverage(other, PLAN)
    same(late.state_dict(), average.state_dict())
    assert all(state.keys() == {"momentum_buffer"} for state in other.state.values())


@pytest.mark.parametrize("flatten", [False, True])
@pytest.mark.parametrize("make", [torch.optim.AdamW, torch.optim.SGD])
def test_a_distributed_checkpoint_carries_an_attached_average(tmp_path, make, flatten):
    import torch.distributed.checkpoint as dcp

    options = StateDictOptions(flatten_optimizer_state_dict=flatten)

    def built() -> tuple[nn.Module, torch.optim.Optimizer, gadam.IterateAverage]:
        torch.manual_seed(0)
        model = nn.Linear(3, 2)
        optimizer = make(model.parameters(), lr=0.1)
        return model, optimizer, gadam.IterateAverage(optimizer, gadam.Averaging(start=2))

    model, optimizer, average = built()
    for _ in range(4):
        optimizer.zero_grad()
        model(torch.randn(4, 3)).square().mean().backward()
        optimizer.step()
    saved = get_optimizer_state_dict(model, optimizer, options=options)
    dcp.save(saved, checkpoint_id=tmp_path, **in_one_process())
    fresh_model, fresh, restored = built()
    target = get_optimizer_state_dict(fresh_model, fresh, options=options)
    dcp.load(target, checkpoint_id=tmp_path, **in_one_process())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        set_optimizer_state_dict(fresh_model, fresh, target, options=options)
    assert restored.count == 3
    same(restored.state_dict(), average.state_dict())

    # Once more at the same step: the numbers of the progress do not change.
    target = get_optimizer_state_dict(fresh_model, fresh, options=options)
    dcp.load(target, checkpoint_id=tmp_path, **in_one_process())
    set_optimizer_state_dict(fresh_model, fresh, target, options=options)
    same(restored.state_dict(), average.state_dict())
    # A state dict without an average is not mistaken for the one that was restored in place.
    with pytest.warns(UserWarning, match="has no average"):
        fresh.load_state_dict(make(fresh_model.parameters(), lr=0.1).state_dict())
    assert restored.count == 0


# --------------------------------------------------------------- checkpoints without an average


@pytest.mark.parametrize("kind", ["gadam", "attached"])
def test_start_counts_the_optimizers_steps_after_loading_adamw(kind):
    params = parameters()
    adamw = torch.optim.AdamW(params, lr=0.05)
    train(adamw, params, 6)
    plan = gadam.Averaging(start=9)
    if kind == "gadam":
        optimizer: Any = gadam.Gadam(params, lr=0.05, average=plan)
        average = optimizer.average
    else:
        optimizer = torch.optim.AdamW(params, lr=0.05)
        average = gadam.IterateAverage(optimizer, plan)
    optimizer.load_state_dict(adamw.state_dict())  # before the start: no warning
    iterates = train(optimizer, params, 5, first=7)
    assert average.count == 3
    with average.applied():
        expected = torch.stack([i[0] for i in iterates[2:]]).mean(0)
        torch.testing.assert_close(params[0].detach(), expected)


def test_start_counts_the_steps_before_the_average_was_attached():
    params = parameters()
    adamw = torch.optim.AdamW(params, lr=0.05)
    train(adamw, params, 6)
    average = gadam.IterateAverage(adamw, gadam.Averaging(start=9))
    train(adamw, params, 5, first=7)
    assert average.count == 3


@pytest.mark.parametrize("kind", ["gadam", "attached"])
def test_a_checkpoint_without_the_expected_average_says_so_once(kind):
    params = parameters()
    adamw = torch.optim.AdamW(params, lr=0.05)
    train(adamw, params, 6)
    saved = copy.deepcopy(adamw.state_dict())
    plan = gadam.Averaging(start=3)
    if kind == "gadam":
        optimizer: Any = gadam.Gadam(params, lr=0.05, average=plan)
        average = optimizer.average
    else:
        optimizer = torch.optim.AdamW(params, lr=0.05)
        average = gadam.IterateAverage(optimizer, plan)
    train(optimizer, params, 4)
    with pytest.warns(UserWarning, match="has no average. It starts empty, at step 6"):
        optimizer.load_state_dict(saved)
    assert (average.count, average._progress.steps) == (0, 6)
    optimizer.load_state_dict(saved)
    train(optimizer, params, 2)
    assert average.count == 2


def test_a_checkpoint_from_before_the_first_step_is_no_reason_to_warn():
    for make in (gadam.Gadam, torch.optim.AdamW):
        fresh = make(parameters(), lr=0.05).state_dict()
        optimizer = gadam.Gadam(parameters(), average=gadam.Averaging(start=1))
        optimizer.load_state_dict(fresh)


# --------------------------------------------------------------------------------- AveragedModel


def test_averaged_model_round_trip():
    model = small_model()
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    swa = AveragedModel(model)
    for _ in range(5):
        fit(model, sgd, 1)
        swa.update_parameters(model)

    average = gadam.IterateAverage(sgd, gadam.Averaging(start=1))
    average.load_averaged_model(copy.deepcopy(swa.state_dict()), model)
    assert average.count == 5
    exported = average.averaged_model_state_dict(model)
    assert exported.keys() == swa.state_dict().keys()
    same(exported, dict(swa.state_dict()))

    # Both go on with the same mean, and torch's class loads the result.
    for _ in range(3):
        fit(model, sgd, 1)
        swa.update_parameters(model)
    assert average.count == 8
    other = AveragedModel(small_model())
    other.load_state_dict(average.averaged_model_state_dict(model))
    assert other.n_averaged == 8
    torch.testing.assert_close(dict(other.state_dict()), dict(swa.state_dict()))


def test_averaged_model_state_that_does_not_fit_is_rejected():
    model = small_model()
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    saved = dict(AveragedModel(model).state_dict())
    window = gadam.IterateAverage(sgd, gadam.Averaging(start=1, weighting=gadam.Window(3)))
    with pytest.raises(ValueError, match="only their mean"):
        window.load_averaged_model(saved, model)
    average = gadam.IterateAverage(sgd, gadam.Averaging(start=1))
    with pytest.raises(ValueError, match=r"no entry 'module\.0\.weight'"):
        average.load_averaged_model({"n_averaged": torch.tensor(1)}, model)
    with pytest.raises(ValueError, match="no entry 'n_averaged'"):
        average.load_averaged_model({k: v for k, v in saved.items() if "." in k}, model)
    assert average.count == 0
