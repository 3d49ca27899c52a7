"""Language modeling: prediction of the next word of a text."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import lru_cache
from random import Random
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from typing_extensions import override

from gadam._modes import preserved_modes
from gadam.runs.recipe import Data, Mode, Recipe, RecipeError
from gadam.train import lstm, own_network, transformer
from gadam.train.data import own, text
from gadam.train.distributed import ALONE, Ranks
from gadam.train.tasks import batch as batches_of
from gadam.train.tasks.task import Task, seed_for

__all__ = ["LanguageTask", "Passage", "build_language_model", "mean_negative_log_likelihood"]

IGNORED = -100  # the target where no word follows


class Passage(NamedTuple):
    """A batch of text: some rows of a matrix that has the text in its columns.

    Attributes:
        words: The words to read, (time, column).
        following: The word after each of them.
        first: The index of the first column.
    """

    words: Tensor
    following: Tensor
    first: int


class LanguageTask(Task[Passage]):
    """Prediction of the next word of a text.

    The text is divided into ``batch_size`` columns of equal length, which are read in parallel. The
    remainder is dropped, as usual. The network's state carries over from passage to passage;
    gradients do not. Each epoch starts with an empty state.

    Args:
        recipe: The recipe.
        data_dir: The folder of all data sets.
    """

    metric = "perplexity"
    mode: Mode = "min"

    # Columns in evaluation. By the usual protocol, the test text is read from start to end.
    EVALUATION_COLUMNS: ClassVar[dict[str, int]] = {"train": 10, "validation": 10, "test": 1}
    # Merity's lengths: the minimum, the standard deviation, and how often the mean is halved.
    MIN_LENGTH, LENGTH_STD, HALVING_PROBABILITY = 5, 5.0, 0.05

    def __init__(self, recipe: Recipe, data_dir: str | None = None) -> None:
        assert recipe.language is not None
        self.recipe, self.settings, self._data_dir = recipe, recipe.language, data_dir
        self.epochs = recipe.epochs
        self.corpus = _corpus_of(recipe, data_dir)
        self.fingerprint, self.notices = self.corpus.fingerprint, self.corpus.notices
        unknown = self.corpus.unknown
        if not unknown["train"] and unknown["test"] + unknown["validation"] > 0:
            self.notices += (
                f"{100 * unknown['test']:.1f}% of the test words are not in the training text, "
                "which has no <unk>. So the model never learns to predict <unk>.",
            )

    @override
    def setup(self, seed: int, device: torch.device) -> None:
        self.seed = seed
        torch.manual_seed(seed_for(seed, 0, "model"))
        # Weights are drawn on the CPU, so that they do not depend on the device.
        network = build_language_model(self.recipe, self._data_dir, torch.device("cpu"))
        self.model: nn.Module = network.to(device)
        self._splits = {
            split: self.corpus.split(split).to(device) for split in self.EVALUATION_COLUMNS
        }
        columns = self.recipe.batch_size
        length = len(self.corpus.train) // columns
        used = self.corpus.train[: length * columns]
        self._columns = used.view(columns, length).t().contiguous().to(device)
        self._states: dict[int, lstm.State] = {}  # by the first column of the micro-batch
        self._resumed: lstm.State = ()  # of all columns

    def _lengths(self, epoch: int) -> Iterator[int]:
        rng = Random(seed_for(self.seed, epoch, "order"))
        shortest = min(self.MIN_LENGTH, self.settings.bptt)
        left = len(self._columns) - 1  # no word follows the last one
        while left > 0:
            length = self.settings.bptt
            if self.settings.vary_bptt:
                mean = length / 2 if rng.random() < self.HALVING_PROBABILITY else length
                length = max(shortest, int(rng.gauss(mean, self.LENGTH_STD)))
            if left - length < shortest:  # do not leave a tiny last step
                length = left
            yield length
            left -= length

    @override
    def steps(self, epoch: int) -> int:
        return sum(1 for _ in self._lengths(epoch))

    @override
    def batches(self, epoch: int) -> Iterator[Passage]:
        self._states, self._resumed = {}, ()
        start = 0
        for length in self._lengths(epoch):
            end = start + length
            yield Passage(self._columns[start:end], self._columns[start + 1 : end + 1], 0)
            start = end

    @override
    def rate_factor(self, batch: Passage) -> float:
        # In the mean loss of a short passage, each word has more weight. Correct the step for it.
        return len(batch.words) / self.settings.bptt if self.settings.vary_bptt else 1.0

    @override
    def micro_batches(self, batch: Passage, count: int) -> list[tuple[Passage, float]]:
        words, following = (columns.chunk(count, dim=1) for columns in batch[:2])
        pieces, first = [], batch.first
        for a, b in zip(words, following):
            pieces.append((Passage(a, b, first), a.shape[1] / batch.words.shape[1]))
            first += a.shape[1]
        return pieces

    @override
    def loss(self, model: nn.Module, batch: Passage) -> tuple[Tensor, int]:
        if batch.first not in self._states and self._resumed:
            columns = slice(batch.first, batch.first + batch.words.shape[1])
            self._states[batch.first] = tuple(
                (h[:, columns].contiguous(), c[:, columns].contiguous()) for h, c in self._resumed
            )
        out: lstm.Output = model(batch.words, self._states.get(batch.first))
        self._states[batch.first] = lstm.detached(out.state)
        loss = F.cross_entropy(out.scores.flatten(0, 1), batch.following.flatten())
        if self.settings.ar_alpha:
            loss = loss + self.settings.ar_alpha * out.dropped.square().mean()
        if self.settings.tar_beta and len(out.raw) > 1:
            loss = loss + self.settings.tar_beta * out.raw.diff(dim=0).square().mean()
        return loss, batch.words.numel()

    @override
    def state_dict(self) -> dict[str, Any]:
        found: dict[int, lstm.State] = {}
        for states in self.ranks.gather(batches_of.moved(self._states, torch.device("cpu"))):
            found |= states  # ranks without columns of their own repeat some
        pieces = [found[first] for first in sorted(found)]
        layers = [[torch.cat(parts, dim=1) for parts in zip(*layer)] for layer in zip(*pieces)]
        return {"layers": layers}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        device = self._columns.device
        self._resumed = tuple((h.to(device), c.to(device)) for h, c in state_dict["layers"])

    @override
    def refresh(self, epoch: int) -> Iterator[Passage]:
        return iter(())  # the network has no BatchNorm

    @override
    def training_data(self, examples: int | None = None) -> Iterator[Passage]:
        seen = 0
        for passage in self.batches(0):
            if examples is not None and seen >= examples:
                return
            yield passage
            seen += passage.words.numel()

    @override
    def scores(self, model: nn.Module, split: str) -> Iterator[tuple[Tensor, Tensor]]:
        for scores, following in _predictions(model, *self._reading(split)):
            real = following != IGNORED
            yield scores[real], following[real]

    def _reading(self, split: str) -> tuple[Tensor, int, int]:
        words_at_once = min(1000, 10**7 // len(self.corpus.words))  # ten million scores
        return self._splits[split], self.EVALUATION_COLUMNS[split], words_at_once

    @override
    def evaluate(self, model: nn.Module, split: str) -> dict[str, float]:
        with preserved_modes(model):
            loss = mean_negative_log_likelihood(model, *self._reading(split), ranks=self.ranks)
        return {"perplexity": math.exp(loss) if loss < 700 else math.inf, "loss": loss}


def build_language_model(recipe: Recipe, data_dir: str | None, device: torch.device) -> nn.Module:
    """Build the network of a recipe for texts, with new weights.

    Args:
        recipe: The recipe.
        data_dir: The folder of all data sets.
        device: The device on which weights are drawn, or "meta" for none.

    Raises:
        RecipeError: The text is too short for the recipe, or the network is unknown.
    """
    corpus = _corpus_of(recipe, data_dir)
    assert recipe.language is not None
    length = len(corpus.train) // recipe.batch_size
    if length < 2:
        raise RecipeError(
            f"{recipe.data.name} has {len(corpus.train)} training words, too few for "
            f"batch_size={recipe.batch_size}. Use a smaller batch_size."
        )
    if recipe.language.bptt >= 2 * length:
        raise RecipeError(
            f"language.bptt={recipe.language.bptt} is too long for columns of {length} words "
            f"(batch_size={recipe.batch_size}). Reduce one of them."
        )
    if own_network.is_own(recipe.model):
        raise RecipeError(
            f"{recipe.model} is a network for images. For a language model of your own, write a "
            "task; see gadam.train.Task."
        )
    builders = (lstm.canonical, lstm.build), (transformer.canonical, transformer.build)
    for known, build in builders:
        if known(recipe.model):
            with device:
                return build(recipe.model, len(corpus.words), **recipe.language.dropouts)
    raise RecipeError(
        f"Unknown language model {recipe.model!r}. Choose from "
        f"{', '.join([*lstm.names(), *transformer.names()])}. Image networks do not support text."
    )


def _corpus_of(recipe: Recipe, data_dir: str | None) -> text.Corpus:
    path = text.own_path(recipe.data.name, data_dir)
    return _load_corpus(recipe.data, data_dir, "" if path is None else own.version(path))


@lru_cache(maxsize=2)  # a worker process trains many runs on the same data
def _load_corpus(settings: Data, data_dir: str | None, version: str = "") -> text.Corpus:
    """Load a corpus. The ``version`` makes own text that has changed since be loaded again."""
    corpus = text.load(settings.name, data_dir, settings.examples, settings.words)
    if (settings.examples or 0) > len(corpus.train):
        raise RecipeError(
            f"{settings.name} has {len(corpus.train)} training words. Use fewer for data.examples."
        )
    return corpus


@torch.no_grad()
def mean_negative_log_likelihood(
    model: nn.Module,
    words: Tensor,
    columns: int = 1,
    words_at_once: int = 1000,
    ranks: Ranks = ALONE,
) -> float:
    """Return the mean of −log p over every word of a text but the first, in nats.

    Args:
        model: A language model such as :class:`gadam.train.lstm.AWDLSTM`.
        words: The text.
        columns: The number of pieces that are read in parallel, each from an empty state.
        words_at_once: The number of words to score at a time, which limits memory.
        ranks: The processes that share the columns.

    Raises:
        RecipeError: The text has fewer than two words.
    """
    total = torch.zeros((), dtype=torch.float64, device=words.device)
    for scores, following in _predictions(model, words, columns, words_at_once, ranks):
        total += F.cross_entropy(scores, following, ignore_index=IGNORED, reduction="sum").double()
    return float(ranks.sum(total)) / (len(words) - 1)


@torch.no_grad()
def _predictions(
    model: nn.Module, words: Tensor, columns: int, words_at_once: int, ranks: Ranks = ALONE
) -> Iterator[tuple[Tensor, Tensor]]:
    """Iterate over scores and following words; see :func:`mean_negative_log_likelihood`."""
    model.eval()
    count = len(words) - 1  # no word precedes the first one
    if count < 1:
        raise RecipeError("A text needs at least two words. Use a longer one.")
    columns = min(columns, count)
    length = -(-count // columns)
    place = torch.arange(length * columns, device=words.device).view(columns, length).t()
    following = torch.where(place < count, words[(place + 1).clamp(max=count)], IGNORED)
    read = words[place.clamp(max=count)]
    if ranks.size > 1:
        pieces = torch.arange(columns).chunk(ranks.size)
        mine, share = ranks.part([(piece, 1.0) for piece in pieces])
        read, following = read[:, mine], following[:, mine]
        if not share:  # another rank counts this column
            following = torch.full_like(following, IGNORED)
    state = None
    rows = words_at_once // columns + 1
    for a, b in zip(torch.split(read, rows), torch.split(following, rows)):
        out: lstm.Output = model(a, state)
        state = out.state
        yield out.scores.flatten(0, 1).float(), b.flatten()
