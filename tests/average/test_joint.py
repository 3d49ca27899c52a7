"""Several optimizers with one average: missed steps, and checkpoints of which a part is missing."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_state_dict,
)
from torch.optim import Optimizer

import gadam

PLAN = gadam.Averaging(start=1)
NAMES = ("weight", "bias")


def make(**adamw: Any) -> tuple[nn.Linear, Optimizer, Optimizer]:
    """Return a model, Muon for its matrix, and AdamW for its vector."""
    torch.manual_seed(0)
    model = nn.Linear(4, 4)
    muon = torch.optim.Muon([model.weight], lr=0.1)
    return model, muon, torch.optim.AdamW([model.bias], lr=0.1, **adamw)


def backward(model: nn.Module, scale: float = 1.0) -> None:
    model.zero_grad()
    (scale * model(torch.randn(8, 4)).square().mean()).backward()


def train(model: nn.Module, *optimizers: Optimizer, steps: int) -> list[dict[str, Tensor]]:
    iterates = []
    for _ in range(steps):
        backward(model)
        for optimizer in optimizers:
            optimizer.step()
        iterates.append({name: p.detach().clone() for name, p in model.named_parameters()})
    return iterates


def assert_mean(average: gadam.IterateAverage, model: nn.Module, iterates: list[Any]) -> None:
    assert average.count == len(iterates)
    found = average.model_state_dict(model)
    for name in NAMES:
        mean = torch.stack([iterate[name] for iterate in iterates]).mean(0)
        torch.testing.assert_close(found[name], mean)


# ------------------------------------------------------------------------------------ missed steps


@given(st.lists(st.sampled_from(("both", "first", "second")), max_size=12), st.booleans())
def test_a_sample_is_one_point_of_both_optimizers(steps: list[str], is_reversed: bool) -> None:
    """A step of one optimizer alone never pairs with a later step of the other."""
    model, *optimizers = make()
    average = gadam.IterateAverage(optimizers, PLAN)
    if is_reversed:
        optimizers.reverse()
    joint = []
    for kind in steps:
        chosen = {"both": optimizers, "first": optimizers[:1], "second": optimizers[1:]}[kind]
        (iterate,) = train(model, *chosen, steps=1)
        joint += [iterate] if kind == "both" else []
    assert average.count == len(joint)
    if joint:
        assert_mean(average, model, joint)


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
@pytest.mark.parametrize("fused", [False, True])
def test_steps_that_gradscaler_skips(order: tuple[int, int], fused: bool) -> None:
    """Fused AdamW steps with found_inf, and Muon does not: neither may leave anything behind."""
    model, *optimizers = make(fused=fused)
    average = gadam.IterateAverage(optimizers, PLAN)
    scaler = torch.amp.GradScaler("cpu")
    good = []
    for i in range(12):
        model.zero_grad()
        scaler.scale(model(torch.randn(8, 4)).square().mean()).backward()
        if i % 4 == 0:  # the first step, too
            assert model.weight.grad is not None
            model.weight.grad.fill_(torch.inf)
            if i % 8 == 0:
                assert model.bias.grad is not None
                model.bias.grad.fill_(torch.inf)
        for index in order:
            scaler.step(optimizers[index])
        scaler.update()
        if i % 4:
            good.append({name: p.detach().clone() for name, p in model.named_parameters()})
    assert_mean(average, model, good)


def test_gradients_that_are_zeroed_after_each_step() -> None:
    """One that is zeroed is not a new gradient."""
    model, muon, adamw = make()
    average = gadam.IterateAverage([muon, adamw], PLAN)
    iterates = []
    for set_to_none in (True, False, True):
        backward(model)
        for optimizer in (muon, adamw):
            optimizer.step()
            optimizer.zero_grad(set_to_none=set_to_none)
        iterates.append({name: p.detach().clone() for name, p in model.named_parameters()})
    assert_mean(average, model, iterates)


def test_gradients_of_another_loss_are_added_in_place() -> None:
    """As in a GAN, where the generator's loss adds to the gradients of the discriminator."""
    model, muon, adamw = make()
    average = gadam.IterateAverage([muon, adamw], PLAN)
    iterates = []
    for _ in range(4):
        backward(model)
        muon.step()
        adamw.zero_grad()
        model(torch.randn(8, 4)).mean().backward()
        adamw.step()
        iterates.append({name: p.detach().clone() for name, p in model.named_parameters()})
    assert_mean(average, model, iterates)


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_an_optimizer_that_interpolates_is_sampled_at_its_iterate(order: tuple[int, int]) -> None:
    model, muon, _ = make()
    between = gadam.Averaging(start=1, interpolation=0.9)
    both = [muon, gadam.Gadam([model.bias], lr=0.1, average=between)]
    average = gadam.IterateAverage(both, PLAN)
    optimizers = [both[index] for index in order]
    iterates = []
    for _ in range(5):
        backward(model)
        for optimizer in optimizers:
            optimizer.step()
        bias = both[1].state[model.bias]["average_iterate"]
        iterates.append({"weight": model.weight.detach().clone(), "bias": bias.clone()})
    assert_mean(average, model, iterates)


# ------------------------------------------------------------------------------------- checkpoints


def trained(steps: int) -> tuple[nn.Linear, list[dict[str, Any]]]:
    model, *optimizers = make()
    gadam.IterateAverage(optimizers, PLAN)
    train(model, *optimizers, steps=steps)
    return model, copy.deepcopy([optimizer.state_dict() for optimizer in optimizers])


USES: dict[str, Callable[[gadam.IterateAverage, nn.Module, Optimizer], object]] = {
    "step": lambda average, model, optimizer: optimizer.step(),
    "copy_to": lambda average, model, optimizer: average.copy_to(model),
    "model_state_dict": lambda average, model, optimizer: average.model_state_dict(model),
    "update": lambda average, model, optimizer: average.update(),
}


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("loaded", [0, 1])
def test_a_part_alone_is_refused(loaded: int, use: str) -> None:
    """The average of the other parameters would be zeros."""
    model, saved = trained(5)
    again, *optimizers = make()
    average = gadam.IterateAverage(optimizers, PLAN)
    again.load_state_dict(model.state_dict())
    optimizers[loaded].load_state_dict(saved[loaded])
    names = ["Muon has none", "AdamW has none"]
    names[loaded] = names[loaded].replace("none", "5 samples at step 5")
    backward(again)
    with pytest.raises(RuntimeError, match=f"{', '.join(names)}. Load the state dicts of all"):
        USES[use](average, again, optimizers[0])
    optimizers[1 - loaded].load_state_dict(saved[1 - loaded])
    train(again, *optimizers, steps=1)
    assert average.count == 6


def test_parts_of_two_checkpoints_are_refused() -> None:
    _, early = trained(3)
    _, late = trained(5)
    again, muon, adamw = make()
    average = gadam.IterateAverage([muon, adamw], PLAN)
    muon.load_state_dict(early[0])
    adamw.load_state_dict(late[1])
    with pytest.raises(RuntimeError, match="Muon has 3 samples at step 3, AdamW has 5 samples at"):
        average.copy_to(again)
    average_alone = gadam.IterateAverage(make()[1:], PLAN).state_dict()
    average.load_state_dict(average_alone)  # the whole average
    assert average.count == 0
    train(again, muon, adamw, steps=1)
    assert average.count == 1


def test_one_optimizer_without_an_average_in_its_checkpoint() -> None:
    """Before the average has samples, a user may load one optimizer only."""
    _, plain, _ = make()
    model, muon, adamw = make()
    average = gadam.IterateAverage([muon, adamw], gadam.Averaging(start=3))
    muon.load_state_dict(plain.state_dict())
    train(model, muon, adamw, steps=4)
    assert average.count == 2


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_an_optimizer_that_was_frozen(order: tuple[int, int]) -> None:
    def frozen() -> tuple[nn.Linear, list[Optimizer], gadam.IterateAverage]:
        model, *optimizers = make()
        model.weight.requires_grad_(False)
        return model, optimizers, gadam.IterateAverage(optimizers, PLAN)

    model, optimizers, average = frozen()
    train(model, *optimizers, steps=4)
    saved = copy.deepcopy([optimizer.state_dict() for optimizer in optimizers])
    again, resumed, continued = frozen()
    again.load_state_dict(model.state_dict())
    for index in order:
        resumed[index].load_state_dict(saved[index])
    assert continued.count == average.count == 4
    torch.testing.assert_close(continued.model_state_dict(again), average.model_state_dict(model))
    again.weight.requires_grad_(True)
    train(again, *resumed, steps=1)
    assert continued.count == 5


@pytest.mark.parametrize("flatten", [False, True])
@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_distributed_checkpoints(order: tuple[int, int], flatten: bool, tmp_path: Any) -> None:
    options = StateDictOptions(flatten_optimizer_state_dict=flatten)

    def state_of(model: nn.Module, optimizers: list[Optimizer]) -> dict[str, Any]:
        weights, state = get_state_dict(
            model, [optimizers[index] for index in order], options=options
        )
        return {"model": weights, "optimizers": state}

    model, *optimizers = make()
    average = gadam.IterateAverage(optimizers, PLAN)
    train(model, *optimizers, steps=5)
    dcp.save(state_of(model, optimizers), checkpoint_id=tmp_path)

    again, *resumed = make()
    continued = gadam.IterateAverage(resumed, PLAN)
    state = state_of(again, resumed)
    dcp.load(state, checkpoint_id=tmp_path)
    set_state_dict(
        again,
        [resumed[index] for index in order],
        model_state_dict=state["model"],
        optim_state_dict=state["optimizers"],
        options=options,
    )
    assert continued.count == 5
    for one, others in ((model, optimizers), (again, resumed)):
        torch.manual_seed(1)
        train(one, *others, steps=2)
    expected = average.model_state_dict(model)
    for name, value in continued.model_state_dict(again).items():
        assert torch.equal(value, expected[name]), name


class Both(Optimizer):
    """A user's optimizer around two others, without torch's ``state_dict()``."""

    def __init__(self, *parts: Optimizer) -> None:
        self.parts = parts
        super().__init__([group for one in parts for group in one.param_groups], {})

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for one in self.parts:
            one.step()

    def state_dict(self) -> dict[str, Any]:
        return {"parts": [one.state_dict() for one in self.parts]}


def test_an_optimizer_whose_checkpoints_would_lack_the_average() -> None:
    _, *parts = make()
    with pytest.warns(UserWarning, match=r"Both.state_dict\(\) does not call torch's hooks"):
        gadam.IterateAverage(Both(*parts), PLAN)
    inside = gadam.IterateAverage(make()[1:], PLAN)
    assert gadam.average_of(Both(*inside.optimizers)) is inside


def test_averages_that_are_attached_in_another_order() -> None:
    """They are saved by their order."""
    plans = [gadam.Averaging.for_budget(20), gadam.Averaging.for_budget(20, last=0.5)]

    def attach(order: tuple[int, ...]) -> tuple[nn.Module, Optimizer, Optimizer]:
        model, muon, adamw = make()
        for index in order:
            gadam.IterateAverage([muon, adamw], plans[index])
        return model, muon, adamw

    model, *optimizers = attach((0, 1))
    train(model, *optimizers, steps=18)
    saved = copy.deepcopy([one.state_dict() for one in optimizers])
    _, muon, adamw = attach((0, 1))
    muon.load_state_dict(saved[0])
    adamw.load_state_dict(saved[1])
    _, muon, _ = attach((1, 0))
    with pytest.warns(UserWarning, match="from step 10 on, before the plan's start at step 15"):
        muon.load_state_dict(saved[0])


# ------------------------------------------------------------------------------------------ errors


def test_errors_say_what_to_do(tmp_path: Any) -> None:
    model, muon, adamw = make()
    other = torch.optim.SGD(model.parameters(), lr=0.1)
    shared = r"of shape \(4, 4\) belongs to more than one.*Give each parameter to one optimizer"
    with pytest.raises(ValueError, match=shared):
        gadam.IterateAverage([muon, other], PLAN)
    with pytest.raises(ValueError, match=shared):
        gadam.BlockAverages([muon, muon], tmp_path / "blocks", every=2)
    with pytest.raises(TypeError, match=r"got AdamW\. Pass several optimizers as a list"):
        gadam.IterateAverage(muon, adamw)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"not generator\. Pass an optimizer, or a list of"):
        gadam.IterateAverage((one for one in (muon, adamw)), PLAN)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="one optimizer class for all parameters, or a plan with"):
        gadam.IterateAverage([muon, adamw], gadam.Averaging(start=1, interpolation=0.9))
    with pytest.raises(TypeError, match=r"Invalid start: Plateau.* start must be a number"):
        gadam.schedule.LinearForAveraging(muon, start=gadam.Plateau(2))  # type: ignore[arg-type]
