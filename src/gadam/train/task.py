"""What is learnt: a model, its data, its loss and how well it does. The loop knows no more of it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import lru_cache
from random import Random
from typing import Any, ClassVar, Literal, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gadam.train import data, lstm, models, optimizers, text
from gadam.train.recipe import Data, Recipe, RecipeError

__all__ = ["Images", "Language", "Task", "build", "check", "seed_for", "steps_before_averaging"]

Batch = Any
_CPU = torch.device("cpu")  # where networks are drawn: the same weights whatever computes with them


class Task(Protocol):
    """One learning problem, as the loop sees it."""

    model: nn.Module
    parts: tuple[str, ...]  # what is evaluated: "validation" where there is one, "test"
    metric: str  # what it is judged by
    mode: Literal["max", "min"]  # whether more of it is better
    notices: tuple[str, ...]  # what the user should know of the data, in sentences

    def steps(self, epoch: int) -> int:
        """How many training batches the epoch has."""
        ...

    def batches(self, epoch: int) -> Iterator[Batch]:
        """The training batches of an epoch: a function of the seed and the epoch alone."""
        ...

    def rate_factor(self, batch: Batch) -> float:
        """By what the learning rate is multiplied at this batch."""
        ...

    def split(self, batch: Batch, parts: int) -> list[tuple[Batch, float]]:
        """The batch in parts, for gradient accumulation, and each part's share of it."""
        ...

    def loss(self, model: nn.Module, batch: Batch) -> tuple[Tensor, int]:
        """The mean loss, and over how many examples."""
        ...

    def refresh(self, epoch: int) -> Iterator[Any]:
        """Inputs from which BatchNorm statistics are taken: the training data, augmented."""
        ...

    def training_data(self, examples: int | None = None) -> Iterator[Batch]:
        """All of it once, or so many examples, in an order of its own, not augmented."""
        ...

    def scores(self, model: nn.Module, part: str) -> Iterator[tuple[Tensor, Tensor]]:
        """What the model says of a part of the data: logits, and which is true, some rows at a time."""
        ...

    def evaluate(self, model: nn.Module, part: str) -> dict[str, float]:
        """How well the model does on a part, "train" being one too, by several measures."""
        ...


def seed_for(seed: int, epoch: int, purpose: str) -> int:
    """A seed of its own for each use of randomness, so that an epoch needs no memory of another."""
    purposes = ("model", "order", "refresh", "noise in the network")
    return (seed * 1_000_003 + epoch) * len(purposes) + purposes.index(purpose)


def build(recipe: Recipe, seed: int, device: torch.device, data_dir: str | None) -> Task:
    """The task of a recipe."""
    kind: type[Images | Language] = Images if recipe.language is None else Language
    return kind(recipe, seed, device, data_dir)


def steps_before_averaging(recipe: Recipe, problem: Task) -> int:
    """How many steps there are in the epochs before averaging starts, where that is said in epochs.

    Refuses a stride that is longer than what is left.
    """
    plan = recipe.average
    if plan is None or not isinstance(plan.start, int):
        return 0
    left = sum(map(problem.steps, range(plan.start, recipe.epochs)))
    if isinstance(plan.every, int) and plan.every > left:
        raise RecipeError(
            f"average.every={plan.every} takes no sample in the {left} steps from epoch {plan.start} on"
        )
    return sum(map(problem.steps, range(plan.start)))


@lru_cache(maxsize=2)  # a worker trains many runs on the same data
def _prepared(plan: Data, data_dir: str | None) -> tuple[data.Dataset, dict[str, Any]]:
    """The data set and its parts. Which examples are held out or mislabelled depends on no seed."""
    dataset = data.load(plan.name, data_dir)
    train, test = dataset.train, dataset.test
    if plan.size is not None:
        if not isinstance(train, data.Images) or not isinstance(test, data.Images):
            raise RecipeError(f"data.size cannot be set for {plan.name}")
        train, test = data.resized(train, plan.size), data.resized(test, plan.size)
    if (plan.examples or 0) > len(train) or plan.validation >= len(train):
        raise RecipeError(
            f"{plan.name} has {len(train)} training examples: data.examples and data.validation must be fewer"
        )
    if plan.examples is not None:
        train = data.subset(train, plan.examples)
    parts: dict[str, Any] = {"test": test}
    if plan.validation:
        train, parts["validation"] = data.held_out(train, plan.validation)
    if plan.label_noise:  # in what is trained on: validation labels stay true
        train = data.with_label_noise(train, plan.label_noise, dataset.num_classes)
    parts["train"] = train
    return dataset, parts


def check(recipe: Recipe, data_dir: str | None) -> None:
    """Refuse what cannot be trained, before anything is: data, network, optimiser and average."""
    build_network = _classifier if recipe.language is None else _language_model
    network = build_network(recipe, data_dir, torch.device("meta"))
    optimizers.build(recipe, network, 0)


def _classifier(recipe: Recipe, data_dir: str | None, device: torch.device) -> nn.Module:
    if lstm.canonical(recipe.model) is not None:
        raise RecipeError(
            f"{recipe.model} is a language model: derive it from a recipe that has one, as lm-mini"
        )
    if text.canonical(recipe.data.name) is not None:
        raise RecipeError(
            f"{recipe.data.name} is a text: derive it from a recipe for texts, as lm-mini"
        )
    dataset, _ = _prepared(recipe.data, data_dir)
    with device:
        return models.build(recipe.model, dataset.num_classes, _input_shape(recipe, dataset))


def _input_shape(recipe: Recipe, dataset: data.Dataset) -> tuple[int, int, int]:
    channels, height, width = dataset.input_shape
    return (channels, recipe.data.size or height, recipe.data.size or width)


class Images:
    """Classification of pictures."""

    metric = "accuracy"
    mode: Literal["max", "min"] = "max"
    notices: tuple[str, ...] = ()

    def __init__(
        self, recipe: Recipe, seed: int, device: torch.device, data_dir: str | None
    ) -> None:
        self.recipe, self.seed, self.device = recipe, seed, device
        self.dataset, self._parts = _prepared(recipe.data, data_dir)
        self.parts: tuple[str, ...] = (
            ("validation", "test") if "validation" in self._parts else ("test",)
        )
        torch.manual_seed(seed_for(seed, 0, "model"))
        network = _classifier(recipe, data_dir, _CPU)
        # Convolutions are faster so; what they compute is the same.
        self.model = network.to(device).to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    def _read(self, part: str, batch_size: int, **kwargs: Any) -> Iterator[tuple[Tensor, Tensor]]:
        for x, y in data.batches(
            self._parts[part],
            batch_size,
            mean=self.dataset.mean,
            std=self.dataset.std,
            device=self.device,
            workers=self.recipe.data.workers,
            **kwargs,
        ):
            yield x.contiguous(memory_format=torch.channels_last), y

    def _in_order_of(self, purpose: str, epoch: int) -> Iterator[tuple[Tensor, Tensor]]:
        generator = torch.Generator().manual_seed(seed_for(self.seed, epoch, purpose))
        return self._read(
            "train",
            self.recipe.batch_size,
            augment=self.recipe.data.augment,
            pad=self.recipe.data.pad,
            shuffle=generator,
        )

    def steps(self, epoch: int) -> int:
        return -(-len(self._parts["train"]) // self.recipe.batch_size)

    def batches(self, epoch: int) -> Iterator[Batch]:
        return self._in_order_of("order", epoch)

    def rate_factor(self, batch: Batch) -> float:
        return 1.0

    def split(self, batch: Batch, parts: int) -> list[tuple[Batch, float]]:
        if parts == 1:
            return [(batch, 1.0)]
        x, y = batch
        return [((a, b), len(b) / len(y)) for a, b in zip(x.chunk(parts), y.chunk(parts))]

    def loss(self, model: nn.Module, batch: Batch) -> tuple[Tensor, int]:
        x, y = batch
        return F.cross_entropy(model(x), y), len(y)

    def refresh(self, epoch: int) -> Iterator[Any]:
        return self._in_order_of("refresh", epoch)

    def training_data(self, examples: int | None = None) -> Iterator[Batch]:
        left = len(self._parts["train"]) if examples is None else examples
        for x, y in self._read("train", self.recipe.batch_size):
            if left <= 0:
                return
            yield x[:left], y[:left]
            left -= len(y)

    @torch.no_grad()
    def scores(self, model: nn.Module, part: str) -> Iterator[tuple[Tensor, Tensor]]:
        model.eval()
        for x, y in self._read(part, max(self.recipe.batch_size, 250)):
            yield model(x).float(), y

    @torch.no_grad()
    def evaluate(self, model: nn.Module, part: str) -> dict[str, float]:
        top = min(5, self.dataset.num_classes)
        totals = torch.zeros(3, dtype=torch.float64, device=self.device)
        for scores, y in self.scores(model, part):
            hits = scores.topk(top).indices == y[:, None]
            loss = F.cross_entropy(scores, y, reduction="sum").double()
            totals += torch.stack([loss, hits[:, 0].sum(), hits.sum()])
        loss_, first, among = (totals / len(self._parts[part])).tolist()
        return {"accuracy": 100 * first, "top5": 100 * among, "loss": loss_}


# ----------------------------------------------------------------------------------------- language


@lru_cache(maxsize=2)
def _corpus(plan: Data, data_dir: str | None) -> text.Corpus:
    corpus = text.load(plan.name, data_dir, plan.examples, plan.words)
    if (plan.examples or 0) > len(corpus.train):
        raise RecipeError(
            f"{plan.name} has {len(corpus.train)} words to train on: data.examples must be fewer"
        )
    return corpus


def _language_model(recipe: Recipe, data_dir: str | None, device: torch.device) -> nn.Module:
    corpus = _corpus(recipe.data, data_dir)
    assert recipe.language is not None
    length = len(corpus.train) // recipe.batch_size
    if length < 2:
        raise RecipeError(
            f"{recipe.data.name} has {len(corpus.train)} words to train on: too few to be read at "
            f"batch_size={recipe.batch_size} places at a time"
        )
    if recipe.language.bptt >= 2 * length:
        raise RecipeError(
            f"language.bptt={recipe.language.bptt} is far more than the {length} words at each of "
            f"batch_size={recipe.batch_size} places: make one of them smaller"
        )
    with device:
        return lstm.build(recipe.model, len(corpus.words), **recipe.language.dropouts)


class Passage(NamedTuple):
    """Some lines of the text's columns, each a place where it is read.

    Attributes:
        words: What is read, (time, column).
        following: The word after each.
        first: The number of the first column.
    """

    words: Tensor
    following: Tensor
    first: int


class Language:
    """Prediction of the next word of a text.

    The text is cut into ``batch_size`` columns of equal length (what is left over is dropped, as is usual),
    and these are read side by side. The network's state goes on from passage to passage, gradients do
    not; each epoch begins with a blank one.
    """

    metric = "perplexity"
    mode: Literal["max", "min"] = "min"
    parts: tuple[str, ...] = ("validation", "test")

    # The usual protocol's: the test text is read from its beginning to its end.
    EVALUATED_AT: ClassVar[dict[str, int]] = {"train": 10, "validation": 10, "test": 1}
    SHORTEST, DEVIATION, HALVED = 5, 5.0, 0.05  # of the lengths: Merity's

    def __init__(
        self, recipe: Recipe, seed: int, device: torch.device, data_dir: str | None
    ) -> None:
        assert recipe.language is not None
        self.recipe, self.plan, self.seed = recipe, recipe.language, seed
        torch.manual_seed(seed_for(seed, 0, "model"))
        self.model = _language_model(recipe, data_dir, _CPU).to(device)
        self.corpus = _corpus(recipe.data, data_dir)
        self._parts = {part: self.corpus.part(part).to(device) for part in self.EVALUATED_AT}
        unknown = self.corpus.unknown
        if not unknown["train"] and unknown["test"] + unknown["validation"] > 0:
            self.notices: tuple[str, ...] = (
                f"{100 * unknown['test']:.1f} % of the test words are not in the training text, and none of that "
                "is unknown: what <unk> means is never learnt",
            )
        else:
            self.notices = ()
        length = len(self.corpus.train) // recipe.batch_size
        used = self.corpus.train[: length * recipe.batch_size]
        self._columns = used.view(recipe.batch_size, length).t().contiguous().to(device)
        self._states: dict[int, lstm.State] = {}  # by the first column that it is of

    def _lengths(self, epoch: int) -> Iterator[int]:
        chance = Random(seed_for(self.seed, epoch, "order"))
        shortest = min(self.SHORTEST, self.plan.bptt)
        left = len(self._columns) - 1  # nothing follows the last word
        while left > 0:
            length = self.plan.bptt
            if self.plan.vary_bptt:
                mean = length / 2 if chance.random() < self.HALVED else length
                length = max(shortest, int(chance.gauss(mean, self.DEVIATION)))
            if left - length < shortest:  # the end would make a step of next to nothing
                length = left
            yield length
            left -= length

    def steps(self, epoch: int) -> int:
        return sum(1 for _ in self._lengths(epoch))

    def batches(self, epoch: int) -> Iterator[Batch]:
        self._states = {}
        start = 0
        for length in self._lengths(epoch):
            end = start + length
            yield Passage(self._columns[start:end], self._columns[start + 1 : end + 1], 0)
            start = end

    def rate_factor(self, batch: Batch) -> float:
        # The mean over a short passage weighs its words more: a smaller step makes up for it.
        return len(batch.words) / self.plan.bptt if self.plan.vary_bptt else 1.0

    def split(self, batch: Batch, parts: int) -> list[tuple[Batch, float]]:
        words, following = (columns.chunk(parts, dim=1) for columns in batch[:2])
        pieces, first = [], 0
        for a, b in zip(words, following):
            pieces.append((Passage(a, b, first), a.shape[1] / batch.words.shape[1]))
            first += a.shape[1]
        return pieces

    def loss(self, model: nn.Module, batch: Batch) -> tuple[Tensor, int]:
        out: lstm.Output = model(batch.words, self._states.get(batch.first))
        self._states[batch.first] = lstm.detached(out.state)
        loss = F.cross_entropy(out.scores.flatten(0, 1), batch.following.flatten())
        if self.plan.activation:
            loss = loss + self.plan.activation * out.dropped.square().mean()
        if self.plan.slowness and len(out.raw) > 1:
            loss = loss + self.plan.slowness * out.raw.diff(dim=0).square().mean()
        return loss, batch.words.numel()

    def refresh(self, epoch: int) -> Iterator[Any]:
        return iter(())  # there is no BatchNorm

    def training_data(self, examples: int | None = None) -> Iterator[Batch]:
        seen = 0
        for passage in self.batches(0):
            if examples is not None and seen >= examples:
                return
            yield passage
            seen += passage.words.numel()

    def scores(self, model: nn.Module, part: str) -> Iterator[tuple[Tensor, Tensor]]:
        for scores, following in _read_through(model, *self._reading(part)):
            real = following != IGNORED
            yield scores[real], following[real]

    def _reading(self, part: str) -> tuple[Tensor, int, int]:
        at_a_time = min(1000, 10**7 // len(self.corpus.words))  # ten million scores
        return self._parts[part], self.EVALUATED_AT[part], at_a_time

    def evaluate(self, model: nn.Module, part: str) -> dict[str, float]:
        loss = mean_surprise(model, *self._reading(part))
        return {"perplexity": math.exp(loss) if loss < 700 else math.inf, "loss": loss}


@torch.no_grad()
def mean_surprise(
    model: nn.Module, words: Tensor, columns: int = 1, at_a_time: int = 1000
) -> float:
    """The mean of −log p over every word of a text but the first, each once, in nats.

    Args:
        model: a language model as :class:`gadam.train.lstm.AWDLSTM`
        words: the text
        columns: places at which it is read side by side, from a blank state at each
        at_a_time: words for which there are scores at a time: they take room
    """
    total = torch.zeros((), dtype=torch.float64, device=words.device)
    for scores, following in _read_through(model, words, columns, at_a_time):
        total += F.cross_entropy(scores, following, ignore_index=IGNORED, reduction="sum").double()
    return float(total) / (len(words) - 1)


IGNORED = -100  # as a target: what no word follows


@torch.no_grad()
def _read_through(
    model: nn.Module, words: Tensor, columns: int, at_a_time: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """The text's scores and following words, for some words at a time; see :func:`mean_surprise`."""
    model.eval()
    count = len(words) - 1  # nothing precedes the first
    if count < 1:
        raise RecipeError("a text of fewer than two words has nothing to predict")
    columns = min(columns, count)
    length = -(-count // columns)
    place = torch.arange(length * columns, device=words.device).view(columns, length).t()
    following = torch.where(place < count, words[(place + 1).clamp(max=count)], IGNORED)
    read = words[place.clamp(max=count)]
    state = None
    rows = at_a_time // columns + 1
    for a, b in zip(read.split(rows), following.split(rows)):
        out: lstm.Output = model(a, state)
        state = out.state
        yield out.scores.flatten(0, 1).float(), b.flatten()
