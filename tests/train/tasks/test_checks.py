"""check_task accepts tasks that work, and names every kind of fault."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gadam.runs import Average, Data, Language, Optimizer, Recipe
from gadam.train import SupervisedTask, Task, TaskError, check_task
from gadam.train.tasks import ImageTask, LanguageTask

X = torch.randn(48, 4, generator=torch.Generator().manual_seed(0))
Y = (X.sum(1) > 0).long()


class Sound(Task):
    """A task without faults, and without the help of SupervisedTask."""

    metric, mode = "accuracy", "max"

    def setup(self, seed: int, device: torch.device) -> None:
        self.seed = seed
        self.model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 2))

    def steps(self, epoch: int) -> int:
        return 6

    def batches(self, epoch: int) -> Any:
        yield from zip(*(part.split(8) for part in self.shuffled(epoch)))

    def shuffled(self, epoch: int) -> tuple[Tensor, Tensor]:
        order = torch.randperm(48, generator=torch.Generator().manual_seed(100 * self.seed + epoch))
        return X[order], Y[order]

    def loss(self, model: nn.Module, batch: Any) -> tuple[Tensor, int]:
        return F.cross_entropy(model(batch[0]), batch[1]), len(batch[1])

    def evaluate(self, model: nn.Module, split: str) -> dict[str, float]:
        model.eval()
        with torch.no_grad():
            hits = model(X).argmax(1) == Y
        model.train()
        return {"accuracy": 100 * float(hits.double().mean())}


def test_a_sound_task_is_accepted_in_any_form(tmp_path: Path) -> None:
    state = torch.get_rng_state(), random.getstate()
    forms: list[Any] = [Sound(), Sound, lambda: Sound()]
    path = tmp_path / "sound_task.py"
    path.write_text("from test_checks import Sound as task\n")
    for form in (*forms, path, str(path)):
        report = check_task(form)
        assert report.notices == ()
        assert (report.metric, report.mode, report.steps) == ("accuracy", "max", 6)
        assert report.parameters == 29
        assert set(report.initial) == {"validation", "test"}
        assert 0 <= report.initial["test"]["accuracy"] <= 100
    assert torch.get_rng_state().equal(state[0])
    assert random.getstate() == state[1]


def test_gadams_own_tasks_pass() -> None:
    images = Recipe(
        "i",
        model="vgg-mini",
        data=Data(examples=330, validation=30, size=8),
        optimizer=Optimizer("sgd", 0.1),
    )
    assert check_task(ImageTask(images)).notices == ()
    text = Recipe(
        "l",
        model="awd-lstm-mini",
        data=Data("toy-language", examples=800, augment=False),
        average=Average(1),
        language=Language(bptt=20),
        batch_size=8,
    )
    check_task(LanguageTask(text))


# ------------------------------------------------------------------------------------------ faults


def of_unseeded_weights(self: Any, seed: int, device: torch.device) -> None:
    Sound.setup(self, seed, device)
    with torch.no_grad():
        self.model[0].bias[0] = int.from_bytes(os.urandom(4), "big")


def of_kept_weights(self: Any, seed: int, device: torch.device) -> None:
    kept = getattr(self, "model", None)
    Sound.setup(self, seed, device)
    self.model = kept or self.model


def of_one_seed(self: Any, seed: int, device: torch.device) -> None:
    torch.manual_seed(0)
    Sound.setup(self, 0, device)


def reading_a_stream(self: Any, epoch: int) -> Any:
    if not hasattr(self, "stream") or self.stream[0] is not self.model:
        self.stream = self.model, torch.Generator().manual_seed(self.seed)
    for _ in range(6):
        place = torch.randint(48, (8,), generator=self.stream[1])
        yield X[place], Y[place]


def from_the_system(self: Any, epoch: int) -> Any:
    order = random.SystemRandom().sample(range(48), 48)
    for place in torch.tensor(order).split(8):
        yield X[place], Y[place]


def changing(self: Any, model: nn.Module, split: str) -> dict[str, float]:
    measured = Sound.evaluate(self, model, split)
    with torch.no_grad():
        next(model.parameters()).mul_(0.5)
    return measured


def in_training_mode(self: Any, model: nn.Module, split: str) -> dict[str, float]:
    model(X)
    return Sound.evaluate(self, model, split)


def noisy(self: Any, model: nn.Module, split: str) -> dict[str, float]:
    return {"accuracy": random.random()}


def failing(self: Any, *arguments: Any) -> Any:
    raise RuntimeError("it broke\nin two lines")


def loss_of(change: Callable[[Tensor], Any]) -> Callable[..., Any]:
    def loss(self: Any, model: nn.Module, batch: Any) -> Any:
        value, examples = Sound.loss(self, model, batch)
        return change(value), examples

    return loss


def constant(value: Any) -> Callable[..., Any]:
    return lambda self, *arguments: value


FAULTS: dict[str, tuple[dict[str, Any], str]] = {
    "weights without a seed": (
        {"setup": of_unseeded_weights},
        r"setup\(0\) gives another 0\.bias the second time",
    ),
    "weights that are kept": ({"setup": of_kept_weights}, r"setup\(0\) gives another 0\.weight"),
    "one seed": ({"setup": of_one_seed}, "Seeds 0 and 1 give the same weights and the same batch"),
    "no model": ({"setup": constant(None)}, r"setup\(\) must set self\.model to a torch\.nn\.Mod"),
    "nothing to train": (
        {"setup": lambda self, seed, device: setattr(self, "model", nn.Identity())},
        "The model has no trainable parameters",
    ),
    "too many steps": ({"steps": constant(7)}, r"steps\(0\) is 7, but batches\(0\) has 6 batches"),
    "too few steps": ({"steps": constant(5)}, r"steps\(0\) is 5, but batches\(0\) has 6 batches"),
    "far too many steps": ({"steps": constant(500)}, r"steps\(0\) is 500, but batches\(0\) has 6"),
    "no batches": ({"batches": constant(())}, r"batches\(0\) is empty"),
    "random batches": ({"batches": from_the_system}, r"batches\(0\) differs after another setup"),
    "a stream": ({"batches": reading_a_stream}, r"batches\(1\) depends on what was read before"),
    "no number of examples": ({"loss": constant(0.5)}, r"loss\(\) must return the mean loss and"),
    "a loss with dimensions": (
        {"loss": loss_of(lambda loss: loss.expand(2))},
        r"without dimensions, got shape \(2,\)",
    ),
    "a loss that is a number": ({"loss": loss_of(Tensor.item)}, r"without dimensions, got \d"),
    "a loss that is not finite": (
        {"loss": loss_of(lambda loss: loss * torch.inf)},
        "The loss of the first batch is inf",
    ),
    "a loss without gradient": ({"loss": loss_of(Tensor.detach)}, "The loss has no gradient"),
    "a loss of something else": (
        {"loss": loss_of(lambda loss: torch.ones((), requires_grad=True))},
        "No parameter of the model gets a gradient",
    ),
    "a random loss": (
        {"loss": loss_of(lambda loss: loss * random.SystemRandom().random())},
        "The loss of the same weights and batch is .*, then",
    ),
    "a gradient that is not finite": (
        {"loss": loss_of(lambda loss: (loss - loss).sqrt())},
        r"The gradient of .* is not finite",
    ),
    "shares": (
        {"micro_batches": lambda self, batch, count: [(batch, 1.0)] * count},
        r"The fractions of micro_batches\(batch, 2\) must sum to 1, got 2\.0",
    ),
    "a rate factor": ({"rate_factor": constant(-1.0)}, r"rate_factor\(\) must return a number"),
    "a metric that is missing": (
        {"evaluate": constant({"acc": 1.0})},
        r"evaluate\('validation'\) must return a dict with 'accuracy', got acc",
    ),
    "a metric that is a tensor": (
        {"evaluate": constant({"accuracy": torch.ones(())})},
        "must return floats, but accuracy is a Tensor",
    ),
    "a random metric": (
        {"evaluate": noisy},
        "returns accuracy 0.*, then 0.*, for the same weights",
    ),
    "changed weights": ({"evaluate": changing}, r"evaluate\('test'\) changes 0\.weight of the mod"),
    "changed statistics": ({"evaluate": in_training_mode}, r"changes 1\.running_mean of the model"),
    "an unknown split": (
        {"splits": ("dev",)},
        "splits must name validation, test, or both, got dev",
    ),
    "an error": ({"evaluate": failing}, r"evaluate\('test'\) raises RuntimeError: it broke\.$"),
    "an error in setup": ({"setup": failing}, r"setup\(0\) raises RuntimeError: it broke\."),
    "an error in refresh": ({"refresh": failing}, r"refresh\(\) raises RuntimeError: it broke\."),
    "a wrong mode": ({"mode": "most"}, "must have mode 'max' or 'min', got 'most'"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_each_fault_is_named(fault: str) -> None:
    members, sentence = FAULTS[fault]
    broken = type("Broken", (Sound,), members)
    with pytest.raises(TaskError, match=sentence):
        check_task(broken)


def test_all_problems_are_listed_at_once() -> None:
    members = {"steps": constant(7), "evaluate": noisy, "rate_factor": constant(-1.0)}
    with pytest.raises(TaskError) as raised:
        check_task(type("Broken", (Sound,), members))
    lines = str(raised.value).splitlines()
    assert lines[0] == "The task has 4 problems:"
    assert all(line.startswith("- ") for line in lines[1:])
    for words in ("steps(0)", "rate_factor", "evaluate('validation')", "evaluate('test')"):
        assert sum(words in line for line in lines) == 1


def unused_layer(self: Any, seed: int, device: torch.device) -> None:
    Sound.setup(self, seed, device)
    self.model.extra = nn.Linear(2, 2)
    self.model.forward = lambda x: self.model[2](self.model[1](self.model[0](x)))


def same_weights(self: Any, seed: int, device: torch.device) -> None:
    torch.manual_seed(0)
    Sound.setup(self, seed, device)


def staying_in_eval(self: Any, model: nn.Module, split: str) -> dict[str, float]:
    measured = Sound.evaluate(self, model, split)
    model.eval()
    return measured


def drawing(self: Any, model: nn.Module, split: str) -> dict[str, float]:
    torch.rand(1)
    return Sound.evaluate(self, model, split)


@pytest.mark.parametrize(
    ("members", "sentence"),
    [
        ({"setup": unused_layer}, "These parameters get no gradient: extra.weight, extra.bias."),
        ({"setup": same_weights}, "All seeds start with the same weights."),
        ({"batches": lambda self, epoch: Sound.batches(self, 0)}, "Epochs 0 and 1 have the same"),
        ({"evaluate": staying_in_eval}, "evaluate() leaves the model in another mode."),
        ({"evaluate": drawing}, "evaluate() draws from torch's global generator."),
        (
            {"evaluate": constant({"accuracy": float("nan")})},
            "accuracy on validation data is nan before training.",
        ),
        ({"notices": ("Mind the gap.",)}, "Mind the gap."),
        (
            {"evaluate": constant({"accuracy": 0.5})},
            "accuracy is 0.5, and gadam shows it in percent",
        ),
    ],
)
def test_what_works_but_may_not_be_intended_is_noticed(
    members: dict[str, Any], sentence: str
) -> None:
    notices = check_task(type("Odd", (Sound,), members)).notices
    assert any(notice.startswith(sentence) for notice in notices)


def test_faults_of_supervised_tasks_are_named() -> None:
    net = nn.Linear(4, 2)
    with pytest.raises(TaskError, match=r"setup\(0\) gives another weight the second time"):
        check_task(SupervisedTask(lambda: net, (X, Y)))
    with pytest.raises(TaskError, match="Expected more than 1 value per channel"):
        check_task(
            SupervisedTask(lambda: nn.Sequential(net, nn.BatchNorm1d(2)), (X, Y), batch_size=1)
        )
    with pytest.raises(TaskError, match=r"got a dict with the keys x"):
        check_task(SupervisedTask(lambda: nn.Linear(4, 2), [{"x": x} for x in X]))


@pytest.mark.parametrize("wrong", [3, nn.Linear(2, 2), lambda: None, {"model": None}])
def test_what_is_not_a_task_is_refused(wrong: Any) -> None:
    with pytest.raises(TaskError, match="must return a SupervisedTask or another Task"):
        check_task(wrong)
