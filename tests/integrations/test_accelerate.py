"""register() against the real Accelerator."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from safetensors.torch import load_file
from torch import Tensor, nn

import gadam
from gadam._errors import UserError
from gadam.integrations.accelerate import register

PLAN = gadam.Averaging(start=2)


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Dropout(0.2), nn.Linear(5, 1))


class Setup:
    """A model and an optimizer of an accelerator, and their average."""

    def __init__(self, optimizer: str = "adamw", attach: str = "after", **options: Any) -> None:
        self.accelerator = Accelerator(cpu=True, **options)
        model: Any = network()
        own: Any = (
            gadam.Gadam(model.parameters(), lr=0.01, average=PLAN)
            if optimizer == "gadam"
            else torch.optim.AdamW(model.parameters(), lr=0.01)
        )
        average = gadam.IterateAverage(own, PLAN) if attach == "before" else None
        self.model, self.optimizer = self.accelerator.prepare(model, own)
        if average is None:
            average = (
                own.average if optimizer == "gadam" else gadam.IterateAverage(self.optimizer, PLAN)
            )
        self.average: gadam.IterateAverage = average
        self.registration = register(self.accelerator, self.average)
        self.seen = [self.weights()]

    def weights(self) -> dict[str, Tensor]:
        return {name: value.clone() for name, value in self.model.state_dict().items()}

    def train(self, steps: int, first: int = 0) -> None:
        for step in range(first, first + steps):
            x = torch.randn(8, 3, generator=torch.Generator().manual_seed(step))
            with self.accelerator.accumulate(self.model):
                self.accelerator.backward(self.model(x).square().mean())
                self.optimizer.step()
                self.optimizer.zero_grad()
            self.seen.append(self.weights())


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize("inside", [False, True], ids=["outside", "applied"])
@pytest.mark.parametrize(
    ("optimizer", "attach"), [("adamw", "after"), ("adamw", "before"), ("gadam", "after")]
)
def test_checkpoints_have_raw_weights_and_restore_the_average(tmp_path, optimizer, attach, inside):
    whole = Setup(optimizer, attach)
    whole.train(4)
    if inside:
        with whole.average.applied(whole.model, batchnorm=[torch.randn(16, 3)]):
            shown = whole.weights()
            whole.accelerator.save_state(str(tmp_path))
            assert same(whole.weights(), shown)
    else:
        whole.accelerator.save_state(str(tmp_path))
    assert same(load_file(tmp_path / "model.safetensors"), whole.seen[4])
    assert same(whole.weights(), whole.seen[4])

    resumed = Setup(optimizer, attach)
    resumed.accelerator.load_state(str(tmp_path))
    assert resumed.average.count == 3
    for setup in (whole, resumed):
        setup.accelerator.load_state(str(tmp_path))  # the random state, too
        setup.train(3, first=4)
    assert same(resumed.weights(), whole.weights())
    assert resumed.average.count == 6
    for one, other in zip(*(s.average.state_dict()["state"].values() for s in (whole, resumed))):
        assert same(one, other)


def test_two_averages_may_be_applied_at_once(tmp_path):
    accelerator = Accelerator(cpu=True)
    first, second = nn.Linear(3, 2), nn.Sequential(nn.Linear(2, 4), nn.BatchNorm1d(4))
    models: Any = accelerator.prepare(first, second)
    sgd, adam = accelerator.prepare(
        torch.optim.SGD(first.parameters(), lr=0.1), torch.optim.Adam(second.parameters(), lr=0.1)
    )
    averages = [gadam.IterateAverage(optimizer, PLAN) for optimizer in (sgd, adam)]
    for average in averages:
        register(accelerator, average)
    for _ in range(4):
        accelerator.backward(models[1](models[0](torch.randn(8, 3))).square().mean())
        for optimizer in (sgd, adam):
            optimizer.step()
            optimizer.zero_grad()
    raw = [{n: v.clone() for n, v in model.state_dict().items()} for model in models]
    with (
        averages[0].applied(models[0]),
        averages[1].applied(models[1], batchnorm=[torch.randn(8, 2)]),
    ):
        accelerator.save_state(str(tmp_path))
    assert same(load_file(tmp_path / "model.safetensors"), raw[0])
    assert same(load_file(tmp_path / "model_1.safetensors"), raw[1])


def test_accumulated_batches_are_one_step(tmp_path):
    setup = Setup(gradient_accumulation_steps=2)
    setup.train(8)
    assert setup.average.count == 3  # steps 2, 3 and 4
    expected = torch.stack([setup.seen[2 * step]["0.weight"] for step in (2, 3, 4)]).mean(0)
    with setup.average.applied(setup.model, batchnorm=False):
        torch.testing.assert_close(setup.model[0].weight.detach(), expected)


def test_steps_that_the_scaler_skips_do_not_count():
    model = network()
    own = torch.optim.AdamW(model.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=16.0)
    optimizer = AcceleratedOptimizer(own, scaler=scaler)
    average = gadam.IterateAverage(optimizer, gadam.Averaging(start=1))
    for step in range(4):
        optimizer.zero_grad()
        loss = model(torch.randn(8, 3)).square().mean()
        scaler.scale(loss * (float("inf") if step == 1 else 1.0)).backward()
        optimizer.step()
        assert optimizer.step_was_skipped == (step == 1)
    assert (average.count, average.skipped) == (3, 0)


def test_remove_stops_it(tmp_path):
    setup = Setup()
    setup.train(3)
    setup.registration.remove()
    with setup.average.applied(setup.model, batchnorm=False):
        setup.accelerator.save_state(str(tmp_path))
    assert not same(load_file(tmp_path / "model.safetensors"), setup.seen[3])


def test_an_unknown_optimizer_and_loading_while_applied_are_refused(tmp_path):
    setup = Setup()
    setup.train(3)
    setup.accelerator.save_state(str(tmp_path / "good"))
    with setup.average.applied(setup.model, batchnorm=False):
        with pytest.raises(UserError, match="Leave"):
            setup.accelerator.load_state(str(tmp_path / "good"))
    assert same(setup.weights(), setup.seen[3])

    own = torch.optim.SGD(network().parameters(), lr=0.1)
    register(setup.accelerator, gadam.IterateAverage(own, PLAN))
    with pytest.raises(UserError, match=r"accelerator\.prepare\(\) first"):
        setup.accelerator.save_state(str(tmp_path / "bad"))
    assert not list(Path(tmp_path / "bad").iterdir())


def test_what_is_not_an_average_is_refused_at_once():
    accelerator = Setup().accelerator
    own = gadam.Gadam(network().parameters(), lr=0.1)
    for wrong, hint in [(own, r"Pass optimizer\.average"), (None, r"Create one"), (PLAN, "Create")]:
        with pytest.raises(UserError, match=hint):
            register(accelerator, wrong)  # type: ignore[arg-type]
