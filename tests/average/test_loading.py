"""Saved state that does not fit is refused as a whole."""

from __future__ import annotations

import copy
import io
import random
from typing import Any

import pytest
import torch

import gadam
from contract import parameters, same, set_gradients, train
from gadam.average.plan import same_trigger, same_weighting
from gadam.average.progress import Progress


def trained(plan: gadam.Averaging, steps: int = 5) -> tuple[list[Any], gadam.Gadam]:
    params = parameters()
    optimizer = gadam.Gadam(params, 0.05, average=plan)
    train(optimizer, params, steps)
    return params, optimizer


def saved_state(plan: gadam.Averaging) -> dict[str, Any]:
    file = io.BytesIO()
    torch.save(trained(plan)[1].state_dict(), file)
    file.seek(0)
    state: dict[str, Any] = torch.load(file, weights_only=True)
    return state


WEIGHTINGS = [
    gadam.Mean(),
    gadam.EMA(0.9),
    gadam.EMA(0.99),
    gadam.PowerEMA(0.1),
    gadam.LinearDecay(),
    gadam.Window(1),
    gadam.Window(2),
    gadam.Window(3),
]


@pytest.mark.parametrize("other", WEIGHTINGS, ids=str)
@pytest.mark.parametrize("weighting", [gadam.Mean(), gadam.Window(3)], ids=str)
def test_the_state_of_another_weighting_is_rejected(weighting, other):
    state = saved_state(gadam.Averaging(start=1, weighting=weighting))
    _, optimizer = trained(gadam.Averaging(start=1, weighting=other), 2)
    before = copy.deepcopy(optimizer.state_dict())
    if other == weighting:
        optimizer.load_state_dict(state)
        assert optimizer.average.count == 5
        return
    with pytest.raises(ValueError, match="another weighting"):
        optimizer.load_state_dict(state)
    same(optimizer.state_dict(), before)


def test_another_weighting_is_accepted_without_samples():
    state = saved_state(gadam.Averaging(start=100))
    _, optimizer = trained(gadam.Averaging(start=100, weighting=gadam.EMA(0.9)), 2)
    optimizer.load_state_dict(state)
    assert optimizer.average._progress.steps == 5


@pytest.mark.parametrize(
    "other", [gadam.NonMonotone(1, mode="max"), gadam.Plateau(3), gadam.Plateau(2, mode="min")]
)
def test_the_state_of_another_trigger_of_the_same_size_is_rejected(other):
    state = saved_state(gadam.Averaging(start=gadam.Plateau(2)))
    _, optimizer = trained(gadam.Averaging(start=other), 2)
    with pytest.raises(ValueError, match="state of another trigger"):
        optimizer.load_state_dict(state)


def test_a_plan_without_the_trigger_drops_its_observations_with_a_warning():
    _, optimizer = trained(gadam.Averaging(start=gadam.Plateau(2)))
    optimizer.average.observe(0.7)
    _, other = trained(gadam.Averaging(start=None), 2)
    with pytest.warns(UserWarning, match="they are dropped"):
        other.load_state_dict(optimizer.state_dict())


def test_states_without_a_fingerprint_are_accepted():
    state = saved_state(gadam.Averaging(start=1))
    for entry in state["state"].values():
        entry["average_progress"] = entry["average_progress"].floor()
    _, optimizer = trained(gadam.Averaging(start=1, weighting=gadam.EMA(0.9)), 2)
    optimizer.load_state_dict(state)
    assert optimizer.average.count == 5


def test_fingerprints_tell_weightings_and_triggers_apart():
    triggers = [None, gadam.Plateau(2), gadam.Plateau(3), gadam.NonMonotone(2)]
    plans = [gadam.Averaging(t, weighting=w) for t in triggers for w in WEIGHTINGS]
    for a in plans:
        packed = Progress("finished", 7, plan=a.fingerprint).pack()
        assert Progress.unpack(packed) == Progress("finished", 7, plan=a.fingerprint)
        assert Progress.unpack(packed.bfloat16()) == Progress("finished", 7)  # after a cast
        for b in plans:
            found = a.fingerprint, b.fingerprint
            assert same_weighting(*found) == (a.weighting == b.weighting)
            assert same_trigger(*found) == (a.start == b.start)


BAD = [-1.0, 0.5, float("nan"), float("inf"), -float("inf"), 1e300]


def damage(state: dict[str, Any], rng: random.Random) -> str:
    """Damage a state dict at random, and return how."""
    group = state["param_groups"][0]
    entry = state["state"][rng.randrange(len(state["state"]))]
    bad, unknown = rng.choice(BAD), rng.choice([-1, 3, 1.25])
    kind = rng.choice(["progress", "phase", "cut", "average", "moment", "step", "group", "shape"])
    if kind in ("progress", "phase", "cut"):
        for one in state["state"].values():
            vector = one["average_progress"].clone()
            vector[0 if kind == "phase" else 3] = unknown if kind == "phase" else bad
            one["average_progress"] = vector[: rng.randrange(7)] if kind == "cut" else vector
    elif kind == "average":
        del entry["average"]
    elif kind == "moment":
        del entry[rng.choice(["exp_avg", "exp_avg_sq", "step"])]
    elif kind == "step":
        entry["step"] = torch.tensor(rng.choice([-1.0, 0.5, float("nan"), float("inf")]))
    elif kind == "shape":
        entry[rng.choice(["exp_avg", "exp_avg_sq", "average"])] = torch.zeros(2, 9)
    else:
        name, value = rng.choice(
            [
                ("lr", -1.0),
                ("lr", float("nan")),
                ("betas", (0.9, 1.0)),
                ("betas", (0.9,)),
                ("betas", None),
                ("eps", -1e-8),
                ("weight_decay", -1.0),
                ("partial", 0.7),
                ("form", "other"),
            ]
        )
        group[name] = value
        kind = f"{name}={value}"
    return kind


@pytest.mark.parametrize("seed", range(60))
def test_a_damaged_state_is_refused_as_a_whole(seed):
    """The optimizer does not change, and its continuation is the same bit for bit."""
    rng = random.Random(seed)
    plan = gadam.Averaging(start=2)
    state = saved_state(plan)
    kind = damage(state, rng)
    params, optimizer = trained(plan, 3)
    twins, twin = trained(plan, 3)
    with pytest.raises(ValueError, match=r"\w"):
        optimizer.load_state_dict(state)
        pytest.fail(f"accepted: {kind}")
    same(optimizer.state_dict(), twin.state_dict())
    train(optimizer, params, 2, first=4)
    train(twin, twins, 2, first=4)
    same(optimizer.state_dict(), twin.state_dict())
    same(params, twins)


def test_an_undamaged_state_continues_bit_for_bit():
    plan = gadam.Averaging(start=2)
    params, optimizer = trained(plan, 5)
    others, other = trained(plan, 3)
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for p, q in zip(others, params):
        p.data.copy_(q.data)
    train(optimizer, params, 3, first=6)
    train(other, others, 3, first=6)
    same(other.state_dict(), optimizer.state_dict())


def test_an_entry_without_an_average_is_refused_if_nothing_else_is_in_it():
    params = parameters()
    sgd = torch.optim.SGD(params, lr=0.1)  # has no state of its own
    gadam.IterateAverage(sgd, gadam.Averaging(start=1))
    train(sgd, params, 3)
    before = copy.deepcopy(sgd.state_dict())
    damaged = copy.deepcopy(before)
    damaged["state"][0].clear()
    with pytest.raises(ValueError, match="average of parameter 0 is missing"):
        sgd.load_state_dict(damaged)
    same(sgd.state_dict(), before)


def test_an_attached_average_is_refused_before_anything_changes():
    params = parameters()
    sgd = torch.optim.SGD(params, lr=0.1, momentum=0.9)
    average = gadam.IterateAverage(sgd, gadam.Averaging(start=1))
    train(sgd, params, 3)
    before = copy.deepcopy(sgd.state_dict())
    state = copy.deepcopy(before)
    del state["state"][1]["average"]
    state["param_groups"][0]["lr"] = 0.7
    with pytest.raises(ValueError, match="average of parameter 1 is missing"):
        sgd.load_state_dict(state)
    same(sgd.state_dict(), before)
    own = copy.deepcopy(average.state_dict())
    del own["state"][1]
    with pytest.raises(ValueError, match="average of parameter 1 is missing"):
        average.load_state_dict(own)
    same(sgd.state_dict(), before)


def test_an_interpolating_average_must_be_attached_before_loading():
    params = parameters()
    optimizer = torch.optim.AdamW(params, 0.05)
    gadam.IterateAverage(optimizer, gadam.Averaging(start=1))
    gadam.IterateAverage(optimizer, gadam.Averaging(start=1, interpolation=0.9))
    train(optimizer, params, 5)
    lacking = torch.optim.AdamW(parameters(), 0.05)
    gadam.IterateAverage(lacking, gadam.Averaging(start=1))
    with pytest.raises(ValueError, match="another average, 'average2', that was trained with inte"):
        lacking.load_state_dict(optimizer.state_dict())


@pytest.mark.parametrize("kind", ["built-in", "beside"])
def test_parameters_that_were_frozen_may_be_trainable_when_they_are_loaded(kind):
    """They have state of the optimizer from before, but no average."""

    def make() -> tuple[list[Any], Any, gadam.IterateAverage]:
        params = parameters()
        if kind == "beside":
            adamw = torch.optim.AdamW(params, lr=0.1)
            return params, adamw, gadam.IterateAverage(adamw)
        optimizer = gadam.Gadam(params, lr=0.1)
        return params, optimizer, optimizer.average

    params, optimizer, average = make()
    train(optimizer, params, 3)
    params[0].requires_grad_(False)
    average.begin()
    for step in (4, 5, 6):
        set_gradients(params, step)
        params[0].grad = None
        optimizer.step()
    saved = copy.deepcopy(optimizer.state_dict())

    others, other, loaded = make()
    with torch.no_grad():
        for mine, theirs in zip(params, others):
            theirs.copy_(mine)
    loaded.begin()
    other.load_state_dict(saved)
    assert loaded.count == average.count > 0
    params[0].requires_grad_(True)
    train(optimizer, params, 2, first=7)
    train(other, others, 2, first=7)
    same(other.state_dict(), optimizer.state_dict())


class LooksUpAgain(torch.optim.AdamW):
    """Reads each entry of a loaded state dict in its state, as pytorch_optimizer's base does."""

    def load_state_dict(self, state_dict):
        super().load_state_dict(state_dict)
        for group, saved in zip(self.param_groups, state_dict["param_groups"]):
            for p, i in zip(group["params"], saved["params"]):
                if i in state_dict["state"]:
                    self.state[p] = {key: self.state[p][key] for key in state_dict["state"][i]}


@pytest.mark.parametrize("steps", [1, 4])
def test_optimizers_that_look_up_what_they_have_loaded(steps):
    def build():
        params = parameters()
        several = [LooksUpAgain(params[:2], lr=0.05), torch.optim.AdamW(params[2:], lr=0.05)]
        plan = gadam.Averaging(start=3, weighting=gadam.Window(2))
        return params, several, gadam.IterateAverage(several, plan)

    def advance(params, several, steps):
        for step in steps:
            set_gradients(params, step)
            for optimizer in several:
                optimizer.step()

    params, several, average = build()
    advance(params, several, range(steps))
    saved = copy.deepcopy([optimizer.state_dict() for optimizer in several])
    others, resumed, continued = build()
    for p, other in zip(params, others):
        other.data.copy_(p.data)
    for optimizer, state in zip(resumed, saved):
        optimizer.load_state_dict(state)
    for arguments in ((params, several), (others, resumed)):
        advance(*arguments, range(steps, 6))
    assert continued.count == 4
    same(continued.state_dict(), average.state_dict())
    for optimizer in resumed:
        assert all(
            state.keys() <= {"step", "exp_avg", "exp_avg_sq"} for state in optimizer.state.values()
        )
        same(optimizer.state_dict(), several[resumed.index(optimizer)].state_dict())
