"""Supervised tasks on a user's model and data: forms of data, order, loss, metrics, errors."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from gadam.train import SupervisedTask, TaskError
from gadam.train.tasks import batch as batches_of

CPU = torch.device("cpu")
X = torch.randn(60, 4, generator=torch.Generator().manual_seed(0))
Y = (X.sum(1) > 0).long()


class Pairs(Dataset[Any]):
    def __len__(self) -> int:
        return len(X)

    def __getitem__(self, place: int) -> tuple[Tensor, Tensor]:
        return X[place], Y[place]


class Records(Pairs):
    """Samples that are dicts, with noise from all three global generators."""

    def __getitem__(self, place: int) -> Any:
        noise = torch.rand(()) + random.random() + np.random.rand()  # noqa: NPY002
        return {"input": X[place], "noise": noise, "label": Y[place], "name": str(place)}


def make(
    model: Callable[[], nn.Module] = lambda: nn.Linear(4, 2), **changes: Any
) -> SupervisedTask:
    arguments: dict[str, Any] = {"train": (X, Y), "test": (X[:7], Y[:7]), "batch_size": 8}
    task = SupervisedTask(model, **{**arguments, **changes})
    task.setup(0, CPU)
    return task


def inputs(task: SupervisedTask, epoch: int = 0) -> list[list[float]]:
    return [x.flatten().tolist() for x, _ in task.batches(epoch)]


def function_of_batches(generator: torch.Generator, epoch: int, seed: int) -> Iterator[Any]:
    for place in torch.split(torch.randperm(len(X), generator=generator), 8):
        yield X[place] + epoch + 10 * seed, Y[place]


FORMS = {
    "tensors": (X, Y),
    "arrays": (X.numpy(), Y.numpy()),
    "list of tensors": [X, Y],
    "tensor dataset": TensorDataset(X, Y),
    "dataset": Pairs(),
    "list of samples": [(x, y) for x, y in zip(X, Y)],
    "function": lambda generator: DataLoader(Pairs(), 8, shuffle=True, generator=generator),
}


@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_data_gives_all_examples_in_an_order_of_seed_and_epoch(form: str) -> None:
    task = make(train=FORMS[form], validation=(X[:5], Y[:5]))
    assert task.steps(0) == 8
    x, y = batches_of.concatenated([tuple(batch) for batch in task.batches(0)])
    order = [X.tolist().index(row) for row in x.tolist()]
    assert sorted(order) == [*range(60)] != order
    assert y.equal(Y[order])
    first, second = inputs(task, 0), inputs(task, 1)
    assert first != second
    assert inputs(task, 0) == first  # whatever was read before
    assert next(iter(task.refresh(0)))[0].flatten().tolist() != first[0]
    task.setup(1, CPU)
    assert inputs(task, 0) != first
    task.setup(0, CPU)
    assert inputs(task, 1) == second
    ordered = [x for x, _ in task.training_data(10)]
    assert form == "function" or torch.cat(ordered).equal(X[:16])


def test_a_function_of_batches_gets_what_it_names() -> None:
    task = make(train=function_of_batches, validation=(X, Y))
    task.setup(2, CPU)
    x = torch.cat([x for x, _ in task.batches(3)])
    assert x.mean().item() == pytest.approx(X.mean().item() + 23, rel=1e-5)
    assert len(inputs(task, 3)) == task.steps(3) == 8


def test_reading_data_leaves_the_global_generators_alone() -> None:
    task = make(train=Records(), forward=lambda model, b: (model(b["input"]), b["label"]))

    def noise() -> list[float]:
        batches = [*task.batches(0), *task.refresh(0), *task.training_data()]
        task.evaluate(task.model, "validation")
        return [value for batch in batches for value in batch["noise"].tolist()]

    def states() -> tuple[Any, ...]:
        numpy = np.random.get_state()  # noqa: NPY002
        return torch.get_rng_state().tolist(), random.getstate(), str(numpy)

    first = noise()
    torch.manual_seed(5)
    before = states()
    assert noise() == first
    assert states() == before


def test_validation_data_is_split_off_for_all_seeds_alike() -> None:
    for data in ((X, Y), Pairs()):
        task = make(train=data)
        held = torch.cat([x for x, _ in task._in_order("validation")]).tolist()
        kept = torch.cat([x for x, _ in task._in_order("train")]).tolist()
        assert len(held) == 6
        assert sorted(held + kept) == sorted(X.tolist())
        task.setup(1, CPU)
        assert torch.cat([x for x, _ in task._in_order("validation")]).tolist() == held


def test_without_test_data_the_validation_data_is_reported_and_it_is_said() -> None:
    task = make(test=None)
    assert task.splits == ("validation", "test")
    assert task.evaluate(task.model, "test") == task.evaluate(task.model, "validation")
    assert "no test data" in task.notices[0]
    assert make().notices == ()


# ------------------------------------------------------------------------------------------- loss


def test_the_model_is_drawn_from_the_seed() -> None:
    task = make()
    weight = task.model.weight.clone()  # type: ignore[operator]
    torch.rand(3)
    task.setup(1, CPU)
    assert not task.model.weight.equal(weight)  # type: ignore[operator]
    task.setup(0, CPU)
    assert task.model.weight.equal(weight)  # type: ignore[operator]


def test_the_loss_is_of_the_models_outputs() -> None:
    task = make()
    x, y = next(iter(task.batches(0)))
    loss, examples = task.loss(task.model, (x, y))
    assert examples == 8
    assert loss.equal(F.cross_entropy(task.model(x), y))
    assert loss.requires_grad


@pytest.mark.parametrize(
    ("batch_size", "normalized", "sizes"),
    [
        (20, True, [20, 20, 14]),
        (53, True, [53]),
        (53, False, [53, 1]),
        (1, False, [1] * 54),
        (100, True, [54]),
    ],
)
def test_a_last_batch_of_one_example_is_left_out_for_batchnorm(
    batch_size: int, normalized: bool, sizes: list[int]
) -> None:
    layers = [nn.Linear(4, 2), nn.BatchNorm1d(2)] if normalized else [nn.Linear(4, 2)]
    task = make(lambda: nn.Sequential(*layers), batch_size=batch_size)
    for batches in (task.batches(0), task.refresh(0)):
        assert [len(y) for _, y in batches] == sizes
    assert task.steps(0) == len(sizes)
    assert sum(len(y) for _, y in task._in_order("train")) == 54  # evaluation needs all


def test_a_batch_of_any_form_goes_through_forward() -> None:
    task = make(train=Records(), test=Records(), forward=lambda m, b: (m(b["input"]), b["label"]))
    batch = next(iter(task.batches(0)))
    assert batch["name"][0] == str(X.tolist().index(batch["input"][0].tolist()))
    expected = F.cross_entropy(task.model(batch["input"]), batch["label"])
    assert task.loss(task.model, batch)[0].equal(expected)
    pieces = task.micro_batches(batch, 2)
    assert [len(piece["name"]) for piece, _ in pieces] == [4, 4]
    assert task.evaluate(task.model, "test")["loss"] == pytest.approx(
        F.cross_entropy(task.model(X), Y).item(), rel=1e-6
    )


def test_inputs_keep_their_type() -> None:
    images = torch.randint(0, 256, (20, 4), dtype=torch.uint8)
    task = make(
        train=(images, torch.randn(20, 1, dtype=torch.float64)),
        test=None,
        forward=lambda model, batch: (model(batch[0].double() / 255), batch[1]),
        model=lambda: nn.Linear(4, 1).double(),
        loss=F.mse_loss,
        metric="mse",
    )
    x, y = next(iter(task.batches(0)))
    assert (x.dtype, y.dtype) == (torch.uint8, torch.float64)
    assert task.evaluate(task.model, "test")["mse"] > 0


# ---------------------------------------------------------------------------------------- metrics


def agreement(outputs: Tensor, targets: Tensor) -> float:
    return float((outputs.argmax(1) == targets).double().mean())


@given(st.integers(1, 60), st.integers(1, 61))
def test_metrics_do_not_depend_on_the_batch_size(examples: int, batch_size: int) -> None:
    task = make(metric=agreement, mode="max", test=(X[:examples], Y[:examples]))
    task.batch_size = batch_size
    measured = task.evaluate(task.model, "test")
    outputs = task.model(X[:examples])
    assert measured["agreement"] == agreement(outputs, Y[:examples])
    expected = F.cross_entropy(outputs, Y[:examples]).item()
    assert measured["loss"] == pytest.approx(expected, rel=1e-5)
    task._metric, task.metric = "accuracy", "accuracy"
    assert task.evaluate(task.model, "test")["accuracy"] == pytest.approx(
        100 * measured["agreement"]
    )


def test_built_in_metrics() -> None:
    outputs = torch.tensor([[2.0, 1.0, 0.0], [0.0, 3.0, 1.0], [0.0, 0.5, 1.0]])

    def measure(metric: str, x: Tensor, y: Tensor, loss: Any = F.mse_loss) -> float:
        task = make(
            nn.Identity,
            train=(x, y),
            validation=(x, y),
            test=(x, y),
            metric=metric,
            loss=loss,
            batch_size=2,
        )
        return task.evaluate(task.model, "test")[metric]

    y = torch.tensor([0, 2, 2])
    third = pytest.approx(200 / 3)
    assert measure("accuracy", outputs, y, F.cross_entropy) == third
    assert measure("accuracy", outputs, torch.tensor([0, -100, 0]), F.cross_entropy) == 50
    assert measure("accuracy", outputs, F.one_hot(y, 3).float(), F.cross_entropy) == third
    assert measure("top5", outputs, y, F.cross_entropy) == 100
    logits, labels = torch.tensor([-1.0, 2.0, 3.0]), torch.tensor([0.0, 1.0, 0.0])
    binary = F.binary_cross_entropy_with_logits
    assert measure("accuracy", logits, labels, binary) == third
    assert measure("accuracy", logits[:, None], labels[:, None], binary) == third
    segments = torch.zeros(3, 2, 4, 4)
    segments[:, 1, 0] = 1
    assert measure("accuracy", segments, torch.zeros(3, 4, 4).long(), F.cross_entropy) == 75
    a, b = torch.tensor([[1.0], [2.0], [4.0]]), torch.tensor([[1.0], [0.0], [1.0]])
    assert measure("mse", a, b) == pytest.approx(13 / 3)
    assert measure("rmse", a, b) == pytest.approx((13 / 3) ** 0.5)
    assert measure("mae", a, b) == pytest.approx(5 / 3)
    assert measure("loss", a, b) == pytest.approx(13 / 3)
    assert measure("perplexity", a, b) == pytest.approx(np.exp(13 / 3))


def test_evaluation_leaves_the_model_as_it_was() -> None:
    task = make(lambda: nn.Sequential(nn.Linear(4, 2), nn.BatchNorm1d(2), nn.Dropout(0.5)))
    task.model[1].eval()  # type: ignore[index]
    before = {name: value.clone() for name, value in task.model.state_dict().items()}
    first = task.evaluate(task.model, "test")
    assert task.evaluate(task.model, "test") == first
    assert [module.training for module in task.model.modules()] == [True, True, False, True]
    assert all(value.equal(before[name]) for name, value in task.model.state_dict().items())


def test_class_scores_are_those_of_the_model() -> None:
    task = make()
    scores, y = batches_of.concatenated(list(task.scores(task.model, "test")))
    assert scores.equal(task.model(X[:7]))
    assert y.equal(Y[:7])
    regression = make(
        lambda: nn.Linear(4, 4), train=(X, X), test=(X, X), metric="mse", loss=F.mse_loss
    )
    with pytest.raises(TaskError, match="Only classification"):
        next(regression.scores(regression.model, "test"))


@pytest.mark.parametrize(
    ("metric", "mode", "name"),
    [
        ("accuracy", None, ("accuracy", "max")),
        ("loss", None, ("loss", "min")),
        ("mse", "min", ("mse", "min")),
        (agreement, "max", ("agreement", "max")),
        (lambda outputs, targets: 0.0, "min", ("metric", "min")),
    ],
)
def test_the_name_and_mode_of_a_metric(metric: Any, mode: Any, name: tuple[str, str]) -> None:
    task = make(metric=metric, mode=mode)
    assert (task.metric, task.mode) == name


# ----------------------------------------------------------------------------------------- errors


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter([(X[0], Y[0])])


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"model": nn.Linear(4, 2)}, "model must be a function that returns a new model"),
        ({"model": lambda: 3}, r"model\(\) must return a torch.nn.Module, got int"),
        ({"train": (X, Y[:3])}, "train has parts of 60 and 3 examples"),
        ({"train": (X[:0], Y[:0])}, "train is empty"),
        ({"validation": []}, "validation is empty"),
        ({"train": (X[:1], Y[:1])}, "train has one example, so none can be split off"),
        ({"train": ("x", "y")}, r"train must be a pair \(x, y\) of tensors"),
        ({"train": 3}, "train must be a pair .* got int"),
        ({"train": {"x": X, "y": Y}}, "train must be a pair .* got dict"),
        ({"test": DataLoader(Pairs())}, "test is a DataLoader, whose order gadam cannot repeat"),
        ({"test": Stream()}, "test has no random access. Pass a function"),
        ({"train": lambda: iter(())}, "validation data cannot be split off. Pass validation="),
        ({"train": lambda place: []}, "train takes place, which gadam does not pass"),
        ({"metric": "acuracy"}, "There is no metric 'acuracy'. Did you mean 'accuracy'?"),
        ({"metric": agreement}, "Pass mode='max' if a larger agreement is better"),
        ({"metric": 3}, "metric must be a name or a function"),
        ({"mode": "up"}, "mode must be 'max' or 'min', got 'up'"),
        ({"mode": "min"}, "The mode of accuracy is 'max'"),
        ({"batch_size": 0}, "batch_size must be at least 1, got 0"),
        ({"epochs": 0}, "epochs must be at least 1, got 0"),
        ({"epochs": None}, "epochs must be a whole number, got None"),
        ({"batch_size": "128"}, "batch_size must be a whole number, got '128'"),
        ({"batch_size": 12.5}, r"batch_size must be a whole number, got 12\.5"),
        ({"batch_size": True}, "batch_size must be a whole number, got True"),
        ({"workers": -1}, "workers must be at least 0, got -1"),
        ({"loss": "mse"}, "loss must be a function of"),
    ],
)
def test_wrong_arguments_are_refused_with_a_sentence(changes: Any, sentence: str) -> None:
    with pytest.raises(TaskError, match=sentence):
        make(**changes)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        (
            {"train": Records()},
            "must be a pair of inputs and targets, got a dict with the keys input",
        ),
        ({"train": [(x, x, y) for x, y in zip(X, Y)]}, "must be a pair of inputs and targets"),
        ({"loss": lambda x, y: F.cross_entropy(x, y, reduction="none")}, r"got shape \(8,\)"),
        ({"loss": lambda x, y: 0.5}, "got 0.5"),
        ({"train": lambda: iter(()), "validation": (X, Y)}, "train returned no batches"),
    ],
)
def test_wrong_batches_and_losses_are_refused_with_a_sentence(changes: Any, sentence: str) -> None:
    task = make(**changes)
    with pytest.raises(TaskError, match=sentence):
        task.loss(task.model, next(iter(task.batches(0))))


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"test": lambda: iter(())}, "test returned no batches"),
        ({"test": lambda: 3}, "test must return an iterable of batches, got int"),
        ({"metric": lambda x, y: None, "mode": "max"}, "metric must return a number, got NoneType"),
        ({"test": (X, X)}, "accuracy needs class indices as targets"),
        ({"metric": "mse"}, "mse and mae need outputs and targets of the same shape"),
    ],
)
def test_wrong_metrics_are_refused_with_a_sentence(changes: Any, sentence: str) -> None:
    task = make(**changes, loss=lambda x, y: x.mean())
    with pytest.raises(TaskError, match=sentence):
        task.evaluate(task.model, "test")


def test_epochs_of_different_lengths_are_refused() -> None:
    task = make(train=lambda epoch: [(X, Y)] * (2 + epoch), validation=(X, Y))
    assert len(list(task.batches(0))) == 2
    with pytest.raises(TaskError, match="train returned 3 batches in epoch 1, but 2 in epoch 0"):
        list(task.batches(1))


def test_worker_processes_load_the_same_batches() -> None:
    alone, helped = make(train=Pairs()), make(train=Pairs(), workers=1)
    assert inputs(helped) == inputs(alone)


def test_all_mistakes_of_the_arguments_are_reported_at_once():
    with pytest.raises(TaskError) as error:
        SupervisedTask(
            model=nn.Linear(4, 2),
            train=(torch.zeros(10, 4), torch.zeros(9)),
            metric="acuracy",
            batch_size=0,
        )
    first, *listed = str(error.value).splitlines()
    assert first == "The task has 4 problems:"
    for line, part in zip(listed, ("model must be", "batch_size must be", "acuracy", "train")):
        assert part in line
