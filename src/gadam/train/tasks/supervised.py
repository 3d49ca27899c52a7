"""Supervised learning on a user's own model and data."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol, SupportsIndex, TypeAlias, cast

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset, TensorDataset
from torch.utils.data import default_collate as collate_tensors
from typing_extensions import override

from gadam._modes import preserved_modes
from gadam.runs.recipe import Mode
from gadam.train.tasks import batch as batches_of
from gadam.train.tasks import metrics
from gadam.train.tasks.randomness import Generators, isolated, seed_all
from gadam.train.tasks.task import (
    Part,
    Purpose,
    Task,
    TaskError,
    normalizes_batches,
    part_of,
    seed_for,
)

__all__ = ["SupervisedTask"]

Split: TypeAlias = "tuple[Any, ...] | Dataset[Any] | Sequence[Any] | Callable[..., Iterable[Any]]"


class SupervisedTask(Task[Any]):
    """Learn to predict targets from inputs, with your own model and data.

    **Data.** Each of ``train``, ``validation`` and ``test`` is one of

    - a pair ``(x, y)`` of tensors or NumPy arrays;
    - a map-style :class:`torch.utils.data.Dataset`, whose samples ``collate`` joins to batches;
    - a function that returns an iterable of batches. gadam calls it for every pass over the data,
      with those of ``epoch``, ``seed`` and ``generator`` that it accepts. It must return the same
      number of batches in every epoch. It must depend only on these arguments and on the global
      generators of torch, ``random`` and NumPy, which are seeded before each call.

    **Batches.** A batch is a pair ``(x, y)``: gadam computes ``loss(model(x), y)`` and
    ``metric(model(x), y)``. For any other batch, such as a dict, pass ``forward``: a function of
    the model and the batch that returns the outputs and the targets. Inputs keep their dtype.

    **Order.** Tensors and datasets are shuffled in every epoch. The order and all random numbers
    that a dataset draws are functions of the seed and the epoch. The last batch of an epoch may be
    smaller. If it has one example, models with BatchNorm, which cannot normalize it, skip it.

    **Metrics.** All metrics are of a whole split. "loss" is always reported: the mean over batches,
    weighted by their examples. The built-in metrics are means over all examples. A function gets
    the outputs and the targets of the whole split, joined in one tensor each, on the CPU.

    Args:
        model: A function that returns the model, such as the model's class. It is called after
            seeding, once per run.
        train: The training data.
        validation: The data that settings are chosen on. The default splits 10% off the training
            data, the same examples for all seeds. They go through the same augmentation as the
            training data, if there is any.
        test: The data that results are reported on. The default reports the validation data.
        loss: A function of the outputs and the targets that returns the mean loss of a batch. The
            default is the cross-entropy.
        metric: "accuracy" (in percent, from logits), "top5", "loss", "perplexity", "mse", "rmse" or
            "mae". Or a function of the outputs and the targets that returns a number; its name is
            the metric's name.
        mode: Whether a larger ("max") or smaller ("min") metric is better. Required for a function.
        batch_size: Examples per step. Functions choose their own.
        epochs: The epochs that ``gadam compare`` trains for by default.
        forward: For batches that are not pairs.
        collate: Joins a list of samples of a dataset to a batch. The default is torch's.
        workers: Processes that load the samples of a dataset.

    Raises:
        TaskError: An argument is invalid.

    Example:
        >>> import torch
        >>> from gadam.train import SupervisedTask, check_task
        >>> x = torch.randn(500, 10, generator=torch.Generator().manual_seed(0))
        >>> task = SupervisedTask(
        ...     model=lambda: torch.nn.Sequential(torch.nn.Linear(10, 32), torch.nn.ReLU(),
        ...                                       torch.nn.Linear(32, 2)),
        ...     train=(x[:400], x[:400].norm(dim=1).gt(3).long()),
        ...     test=(x[400:], x[400:].norm(dim=1).gt(3).long()),
        ...     loss=torch.nn.functional.cross_entropy,
        ...     epochs=5,
        ... )
        >>> check_task(task).notices
        ()
        >>> task.setup(seed=0, device=torch.device("cpu"))
        >>> task.steps(epoch=0), sorted(task.evaluate(task.model, "validation"))
        (3, ['accuracy', 'loss'])
    """

    def __init__(
        self,
        model: Callable[[], nn.Module],
        train: Split,
        validation: Split | None = None,
        test: Split | None = None,
        loss: Callable[[Any, Any], Tensor] = nn.functional.cross_entropy,
        metric: str | Callable[[Any, Any], float] = "accuracy",
        mode: Mode | None = None,
        *,
        batch_size: int = 128,
        epochs: int = 20,
        forward: Callable[[nn.Module, Any], tuple[Any, Any]] | None = None,
        collate: Callable[[list[Any]], Any] | None = None,
        workers: int = 0,
    ) -> None:
        problems: list[str] = []
        if isinstance(model, nn.Module) or not callable(model):
            problems.append(
                "model must be a function that returns a new model, such as model=lambda: MyNet(), "
                f"got a {type(model).__name__}. Each seed draws its own initial weights."
            )
        if not callable(loss):
            problems.append(f"loss must be a function of (outputs, targets), got {loss!r}.")
        for name, value, least in (
            ("batch_size", batch_size, 1),
            ("epochs", epochs, 1),
            ("workers", workers, 0),
        ):
            if isinstance(value, bool) or not isinstance(value, SupportsIndex):
                problems.append(f"{name} must be a whole number, got {value!r}.")
            elif value.__index__() < least:
                problems.append(f"{name} must be at least {least}, got {value}.")
        with _gathered(problems):
            self.metric, self.mode = _described(metric, mode)
        given = {"train": train, "validation": validation, "test": test}
        self._data: dict[str, _Samples | _Function] = {}
        for name, split in given.items():
            if split is not None:
                with _gathered(problems):
                    self._data[name] = _checked(split, name)
        if problems:
            raise TaskError(*problems)
        self.batch_size, self.epochs = int(batch_size), int(epochs)
        self._metric, self._loss, self._build = metric, loss, model
        self._forward = forward or _forward_pair
        self._collate, self._workers = collate or collate_tensors, int(workers)
        if validation is None:
            self._data["train"], self._data["validation"] = _held_out(self._data["train"])
        if test is None:
            self._data["test"] = self._data["validation"]
            self.notices: tuple[str, ...] = (
                "There is no test data, so test results are of the validation data, on which "
                "settings may have been chosen.",
            )

    @override
    def setup(self, seed: int, device: torch.device) -> None:
        self.seed, self.device = seed, device
        self._steps: int | None = None  # of a function, once its batches are counted
        seed_all(seed_for(seed, 0, "model"))
        model = self._build()
        if not isinstance(model, nn.Module):
            raise TaskError(f"model() must return a torch.nn.Module, got {type(model).__name__}.")
        self.model: nn.Module = model.to(device)
        if isinstance(self._loss, nn.Module):  # it may have class weights
            self._loss.to(device)

    # ------------------------------------------------------------------------------------ data

    @override
    def steps(self, epoch: int) -> int:
        data = self._data["train"]
        if not isinstance(data, _Function):
            return len(self._training_places(torch.arange(len(data))))
        if self._steps is None:
            self._steps = data.count(self.seed)
        return self._steps

    @override
    def batches(self, epoch: int) -> Iterator[Any]:
        return self._shuffled("order", epoch)

    @override
    def refresh(self, epoch: int) -> Iterator[Any]:
        return self._shuffled("refresh", epoch)

    @override
    def training_data(self, examples: int | None = None) -> Iterator[Any]:
        seen = 0
        for batch in self._in_order("train"):
            if examples is not None and seen >= examples:
                return
            yield batch
            seen += batches_of.size(batch)

    def _shuffled(self, purpose: Purpose, epoch: int) -> Iterator[Any]:
        """Iterate over the training data in an order that depends on the seed and the epoch."""
        data, seed = self._data["train"], seed_for(self.seed, epoch, purpose)
        if isinstance(data, _Function):
            expected, count = self.steps(epoch), 0
            for count, batch in enumerate(data.batches(epoch, self.seed, seed), 1):
                if count <= expected:
                    yield batches_of.moved(batch, self.device)
            if count != expected:
                raise TaskError(
                    f"train returned {count} batches in epoch {epoch}, but {expected} in epoch 0. "
                    "Return the same number in every epoch."
                )
            return
        order = torch.randperm(len(data), generator=torch.Generator().manual_seed(seed))
        yield from self._load(data, self._training_places(order), seed)

    def _in_order(self, split: str) -> Iterator[Any]:
        """Iterate over a split in a fixed order."""
        data = self._data[split]
        if not isinstance(data, _Function):
            order = torch.arange(len(data))
            yield from self._load(data, torch.split(order, self.batch_size), 0)
            return
        empty = True
        for batch in data.batches(0, 0, 0):
            empty = False
            yield batches_of.moved(batch, self.device)
        if empty:
            raise TaskError(f"{split} returned no batches. Return at least one.")

    def _training_places(self, order: Tensor) -> Sequence[Tensor]:
        """Divide an order of the training data into batches."""
        places = torch.split(order, self.batch_size)
        alone = len(places) > 1 and len(places[-1]) == 1 < self.batch_size
        return places[:-1] if alone and normalizes_batches(self.model) else places

    def _load(self, data: _Samples, places: Sequence[Tensor], seed: int) -> Iterator[Any]:
        """Iterate over batches of the examples at these places."""
        if isinstance(data, TensorDataset):
            for place in places:
                yield batches_of.moved(tuple(t[place] for t in data.tensors), self.device)
            return
        loader: DataLoader[Any] = DataLoader(
            cast("Dataset[Any]", data),
            batch_sampler=[place.tolist() for place in places],
            collate_fn=self._collate,
            num_workers=self._workers,
            generator=torch.Generator().manual_seed(seed),
        )
        for batch in isolated(lambda: loader, seed):
            yield batches_of.moved(batch, self.device)

    # ------------------------------------------------------------------------- loss and metrics

    @override
    def loss(self, model: nn.Module, batch: Any) -> tuple[Tensor, int]:
        outputs, targets = self._forward(model, batch)
        return self._mean_loss(outputs, targets), batches_of.size(batch)

    def _mean_loss(self, outputs: Any, targets: Any) -> Tensor:
        value = self._loss(outputs, targets)
        if not isinstance(value, Tensor) or value.numel() != 1:
            got = f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else repr(value)
            raise TaskError(
                f"loss must return the mean loss of a batch, a tensor with one element, got {got}."
            )
        return value.squeeze()

    def _predictions(
        self, model: nn.Module, split: str, *, whole: bool = True
    ) -> Iterator[tuple[Part[Any], Any, Any]]:
        """Iterate over the batches of a split with the model's outputs and the targets.

        Unless ``whole``, each rank predicts its part of each batch.
        """
        with preserved_modes(model):
            model.eval()
            for batch in self._in_order(split):
                piece, share = (batch, 1.0) if whole else part_of(self, batch, self.micro_batches)
                with torch.no_grad():
                    outputs, targets = self._forward(model, piece)
                yield Part(piece, share), outputs, targets

    @override
    def scores(self, model: nn.Module, split: str) -> Iterator[tuple[Tensor, Tensor]]:
        for _, outputs, targets in self._predictions(model, split):
            if not (
                isinstance(outputs, Tensor)
                and isinstance(targets, Tensor)
                and (outputs.ndim, targets.ndim) == (2, 1)
                and not targets.is_floating_point()
            ):
                raise TaskError(
                    "Only classification, with outputs (examples, classes), has class scores. "
                    "Use --parts to leave out those that compare predictions."
                )
            yield outputs.float(), targets

    @override
    def evaluate(self, model: nn.Module, split: str) -> dict[str, float]:
        # A function needs the outputs for the whole split, so every rank predicts all of it.
        whole = not isinstance(self._metric, str)
        totals = torch.zeros(4, dtype=torch.float64)  # losses, examples, metric, its terms
        outputs_of_all, targets_of_all = [], []
        built_in = metrics.find(self._metric) if isinstance(self._metric, str) else None
        for part, outputs, targets in self._predictions(model, split, whole=whole):
            if not part.share:
                continue  # another rank counts these examples
            size = batches_of.size(part.batch)
            totals[0] += float(self._mean_loss(outputs, targets)) * size
            totals[1] += size
            if built_in is None:
                outputs_of_all.append(batches_of.moved(outputs, torch.device("cpu")))
                targets_of_all.append(batches_of.moved(targets, torch.device("cpu")))
            elif built_in.sums is not None:
                value, terms = built_in.sums(outputs, targets)
                totals[2] += float(value)
                totals[3] += terms
        losses, examples, total, count = (totals if whole else self.ranks.sum(totals)).tolist()
        measured = {"loss": losses / examples}
        if built_in is None:
            assert not isinstance(self._metric, str)
            outputs = batches_of.concatenated(outputs_of_all)
            targets = batches_of.concatenated(targets_of_all)
            measured[self.metric] = _number(self._metric(outputs, targets), self.metric)
        else:
            mean = measured["loss"] if built_in.sums is None else total / max(count, 1)
            measured[self.metric] = built_in.finish(mean)
        return measured


# --------------------------------------------------------------------------------------- arguments


class _Samples(Protocol):
    """Samples with random access, such as a map-style dataset."""

    def __len__(self) -> int: ...

    def __getitem__(self, place: int, /) -> Any: ...


@contextmanager
def _gathered(problems: list[str]) -> Iterator[None]:
    """Add the problems that a block reports to a list."""
    try:
        yield
    except TaskError as error:
        problems += error.problems


def _forward_pair(model: nn.Module, batch: Any) -> tuple[Any, Any]:
    if not isinstance(batch, tuple | list) or len(batch) != 2:
        keys = f" with the keys {', '.join(map(str, batch))}" if isinstance(batch, Mapping) else ""
        raise TaskError(
            f"A batch must be a pair of inputs and targets, got a {type(batch).__name__}{keys}. "
            "Pass forward=, a function of (model, batch) that returns (outputs, targets)."
        )
    inputs, targets = batch
    return model(inputs), targets


def _described(metric: str | Callable[[Any, Any], float], mode: Mode | None) -> tuple[str, Mode]:
    """Return a metric's name and mode."""
    if mode not in (None, "max", "min"):
        raise TaskError(f"mode must be 'max' or 'min', got {mode!r}.")
    if isinstance(metric, str):
        known = metrics.find(metric).mode
        if mode not in (None, known):
            raise TaskError(f"The mode of {metric} is {known!r}. Leave out mode={mode!r}.")
        return metric, known
    if not callable(metric):
        raise TaskError(
            f"metric must be a name or a function of (outputs, targets), got {metric!r}."
        )
    name = str(getattr(metric, "__name__", type(metric).__name__))
    if mode is None:
        raise TaskError(
            f"Pass mode='max' if a larger {name} is better, or mode='min' if a smaller one is."
        )
    return ("metric" if name in ("<lambda>", "loss") else name), mode


def _number(value: object, name: str) -> float:
    try:
        return float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, RuntimeError):
        raise TaskError(
            f"The metric {name} must return a number, got {type(value).__name__}."
        ) from None


def _checked(split: Any, name: str) -> _Samples | _Function:
    """Return a split as samples with random access, or as a function of batches."""
    samples: _Samples
    is_mapping = isinstance(split, Mapping)  # such as {"x": …, "y": …}
    if isinstance(split, tuple) or (isinstance(split, list) and split and _is_array(split[0])):
        if not split or not all(map(_is_array, split)):
            kinds = ", ".join(type(part).__name__ for part in split)
            raise TaskError(f"{name} must be a pair (x, y) of tensors, got a tuple of ({kinds}).")
        parts = [torch.as_tensor(part) for part in split]
        lengths = [len(part) if part.ndim else 0 for part in parts]
        if len(set(lengths)) > 1:
            raise TaskError(
                f"{name} has parts of {' and '.join(map(str, lengths))} examples. They must have "
                "the same length."
            )
        samples = TensorDataset(*parts)
    elif isinstance(split, DataLoader):
        raise TaskError(
            f"{name} is a DataLoader, whose order gadam cannot repeat. Pass its dataset, or a "
            f"function that returns a new DataLoader, such as {name}=lambda generator: "
            "DataLoader(…, generator=generator)."
        )
    elif isinstance(split, IterableDataset):
        raise TaskError(
            f"{name} has no random access. Pass a function that returns batches, such as "
            f"{name}=lambda: DataLoader(dataset, batch_size=…)."
        )
    elif hasattr(split, "__getitem__") and hasattr(split, "__len__") and not is_mapping:
        samples = split
    elif callable(split):
        return _Function(split, name)
    else:
        raise TaskError(
            f"{name} must be a pair (x, y) of tensors, a Dataset, or a function that returns "
            f"batches, got {type(split).__name__}."
        )
    if len(samples) == 0:
        raise TaskError(f"{name} is empty. Pass at least one example.")
    return samples


def _is_array(value: object) -> bool:
    return isinstance(value, Tensor) or type(value).__module__ == "numpy"


def _held_out(train: _Samples | _Function) -> tuple[_Samples, _Samples]:
    """Split 10% off the training data."""
    if isinstance(train, _Function):
        raise TaskError(
            "train is a function, so validation data cannot be split off. Pass validation=."
        )
    total = len(train)
    if total < 2:
        raise TaskError("train has one example, so none can be split off. Pass validation=.")
    order = torch.randperm(total, generator=torch.Generator().manual_seed(0))
    count = max(1, round(total / 10))
    places = order[count:].sort().values, order[:count].sort().values
    if isinstance(train, TensorDataset):
        rest, held = (TensorDataset(*(t[place] for t in train.tensors)) for place in places)
        return rest, held
    kept, picked = (Subset[Any](cast("Dataset[Any]", train), p.tolist()) for p in places)
    return kept, picked


class _Function:
    """A user's function that returns batches."""

    ARGUMENTS = ("epoch", "seed", "generator")

    def __init__(self, function: Callable[..., Iterable[Any]], name: str) -> None:
        self._function, self._name = function, name
        parameters = inspect.signature(function).parameters.values()
        required = [
            p.name
            for p in parameters
            if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
        ]
        if unknown := [each for each in required if each not in self.ARGUMENTS]:
            raise TaskError(
                f"{name} takes {', '.join(unknown)}, which gadam does not pass. A function of "
                f"batches may take {', '.join(self.ARGUMENTS)}."
            )
        self._accepted = [p.name for p in parameters if p.name in self.ARGUMENTS]

    def _call(self, epoch: int, seed: int, own_seed: int) -> Iterable[Any]:
        generator = torch.Generator().manual_seed(own_seed)
        given = {"epoch": epoch, "seed": seed, "generator": generator}
        batches = self._function(**{name: given[name] for name in self._accepted})
        if not isinstance(batches, Iterable):
            raise TaskError(
                f"{self._name} must return an iterable of batches, got {type(batches).__name__}."
            )
        return batches

    def batches(self, epoch: int, seed: int, own_seed: int) -> Iterator[Any]:
        """Iterate over the batches of an epoch.

        Args:
            epoch: Counted from 0.
            seed: The run's seed.
            own_seed: The seed of all random numbers that the function draws.
        """
        return isolated(lambda: self._call(epoch, seed, own_seed), own_seed)

    def count(self, seed: int) -> int:
        """Return the number of batches of the first epoch.

        Args:
            seed: The run's seed.

        Raises:
            TaskError: There are none.
        """
        own_seed = seed_for(seed, 0, "order")
        with Generators(own_seed).active():
            batches = self._call(0, seed, own_seed)
            try:
                count = len(batches)  # type: ignore[arg-type]
            except TypeError:
                count = sum(1 for _ in batches)
        if count == 0:
            raise TaskError(f"{self._name} returned no batches. Return at least one.")
        return count
