"""Language modeling: reading, training and evaluation."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

from gadam.runs import summary
from gadam.runs.experiment import Experiment
from gadam.runs.lines import read_epochs
from gadam.runs.recipe import (
    Average,
    Data,
    Language,
    Optimizer,
    Recipe,
    RecipeError,
    override,
)
from gadam.runs.record import RunResult
from gadam.train import loop, lstm, optimizers, tasks
from gadam.train.tasks import LanguageTask
from gadam.train.tasks.language import mean_negative_log_likelihood

CPU = torch.device("cpu")
RECIPE = Recipe(
    "r",
    model="awd-lstm-mini",
    data=Data("toy-language", examples=900, augment=False),
    optimizer=Optimizer("sgd", 0.5, 1e-4, momentum=0.0),
    language=Language(bptt=20),
    epochs=2,
    batch_size=6,
    clip_grad_norm=0.25,
)
DETERMINISTIC = Language(20, True, 0.0, 0.0, 0.0, 0.0, 0.0, ar_alpha=0.0, tar_beta=0.0)


def build(recipe: Recipe = RECIPE, seed: int = 0) -> LanguageTask:
    task = LanguageTask(recipe)
    task.setup(seed, CPU)
    return task


# ---------------------------------------------------------------------------------- evaluation


class Unigram(nn.Module):
    """Predicts word frequencies, and counts the words it reads."""

    def __init__(self, scores: Tensor) -> None:
        super().__init__()
        self.scores, self.seen = scores, 0

    def forward(self, words: Tensor, state: Any = None) -> lstm.Output:
        self.seen += words.numel()
        scores = self.scores.expand(*words.shape, -1)
        return lstm.Output(scores, (), scores, scores)


@given(st.integers(2, 400), st.integers(1, 40), st.integers(0, 9))
def test_every_word_is_scored_once_for_any_number_of_columns(length, columns, seed):
    generator = torch.Generator().manual_seed(seed)
    words = torch.randint(5, (length,), generator=generator)
    scores = torch.randn(5, generator=generator)
    expected = -scores.log_softmax(0)[words[1:]].double().mean().item()
    model = Unigram(scores)
    assert mean_negative_log_likelihood(model, words, columns) == pytest.approx(expected, rel=1e-5)
    assert model.seen < length + columns


@pytest.mark.parametrize("columns", [1, 3])
def test_loss_matches_word_by_word_evaluation(columns):
    """Carry the state from word to word, and reset it where a column begins."""
    torch.manual_seed(0)
    model = lstm.AWDLSTM(13, 6, (8,)).double()
    words = torch.randint(13, (2402 if columns == 1 else 302,))
    length = math.ceil((len(words) - 1) / columns)
    total, state = 0.0, None
    model.eval()
    with torch.no_grad():
        for i in range(len(words) - 1):
            out = model(words[i].view(1, 1), None if i % length == 0 else state)
            state = out.state
            total -= float(out.scores[0, 0].log_softmax(0)[words[i + 1]])
    expected = total / (len(words) - 1)
    assert mean_negative_log_likelihood(model.train(), words, columns) == pytest.approx(
        expected, rel=1e-6
    )


def test_evaluation_follows_the_usual_protocol():
    problem = build()
    model, test = problem.model.eval(), problem.corpus.test
    with torch.no_grad():  # the whole test text at once
        scores = model(test[:-1, None]).scores[:, 0]
        expected = float(F.cross_entropy(scores, test[1:]))
    metrics = problem.evaluate(model, "test")
    assert metrics["loss"] == pytest.approx(expected, rel=1e-5)
    assert metrics["perplexity"] == math.exp(metrics["loss"])
    words = problem.corpus.validation
    length = -(-(len(words) - 1) // 10)
    total = 0.0
    with torch.no_grad():  # ten independent pieces of the validation text
        for start in range(0, len(words) - 1, length):
            piece = words[start : start + length + 1]
            scores = model(piece[:-1, None]).scores[:, 0]
            total += float(F.cross_entropy(scores, piece[1:], reduction="sum"))
    validation = problem.evaluate(model, "validation")
    assert validation["loss"] == pytest.approx(total / (len(words) - 1), rel=1e-5)
    assert (problem.metric, problem.mode) == ("perplexity", "min")


def test_overflowing_perplexity_is_infinite():
    problem = build()
    with torch.no_grad():
        problem.model.get_parameter("bias")[0] = 1e6
    assert problem.evaluate(problem.model, "test")["perplexity"] == math.inf


def test_text_of_one_word_raises():
    with pytest.raises(RecipeError, match="at least two words"):
        mean_negative_log_likelihood(Unigram(torch.ones(3)), torch.tensor([1]))


# ------------------------------------------------------------------------------------- reading


@given(
    st.integers(1, 90), st.integers(1, 40), st.integers(12, 900), st.booleans(), st.integers(0, 5)
)
def test_an_epoch_reads_every_word_of_every_column_once(bptt, batch_size, words, vary, epoch):
    vary = vary and bptt >= 10
    if words < 2 * batch_size or bptt >= 2 * (words // batch_size):
        return
    problem = build(
        replace(
            RECIPE,
            data=replace(RECIPE.data, examples=words),
            language=Language(bptt=bptt, vary_bptt=vary),
            batch_size=batch_size,
        )
    )
    passages = list(problem.batches(epoch))
    assert len(passages) == problem.steps(epoch)
    length = words // batch_size
    columns = problem.corpus.train[: length * batch_size].view(batch_size, length).t()
    assert torch.equal(torch.cat([p.words for p in passages]), columns[:-1])
    assert torch.equal(torch.cat([p.following for p in passages]), columns[1:])
    lengths = [len(p.words) for p in passages]
    shortest = min(5, bptt)
    assert len(lengths) == 1 or min(lengths) >= shortest
    if vary:
        assert [problem.rate_factor(p) for p in passages] == [n / bptt for n in lengths]
    else:
        assert all(n == bptt for n in lengths[:-1])
        assert lengths[-1] < bptt + shortest or len(lengths) == 1
        assert {problem.rate_factor(p) for p in passages} == {1.0}


def test_lengths_follow_meritys_distribution():
    """Mean bptt, or half of it once in twenty; std 5; different for each epoch and seed."""
    recipe = replace(
        RECIPE,
        data=Data("toy-language", augment=False),
        batch_size=1,
        language=Language(bptt=70),
    )
    problem = build(recipe)
    lengths = torch.tensor([n for e in range(5) for n in list(problem._lengths(e))[:-1]]).double()
    halved = lengths < 52
    count = len(lengths)
    assert count > 4000
    assert abs(halved.double().mean() - 0.05) < 4 * math.sqrt(0.05 * 0.95 / count)
    whole = lengths[~halved]
    # int() rounds down by half a word on average.
    assert abs(whole.mean() - 69.5) < 4 * 5 / math.sqrt(len(whole))
    assert abs(lengths[halved].mean() - 34.5) < 4 * 5 / math.sqrt(int(halved.sum()))
    assert 4.5 < whole.std() < 5.5
    assert list(problem._lengths(0)) != list(problem._lengths(1))
    assert list(problem._lengths(0)) != list(build(recipe, seed=1)._lengths(0))
    assert list(problem._lengths(0)) == list(build(recipe)._lengths(0))


# ------------------------------------------------------------------------------------ training


@pytest.mark.usefixtures("short_texts")
def test_training_matches_a_plain_loop(tmp_path):
    """The plain loop has the state, clipping, regularizers and a rate per length."""
    recipe = replace(RECIPE, language=Language(20, ar_alpha=2.0, tar_beta=1.0))
    result = loop.train(recipe, tmp_path, seed=3)
    problem = build(recipe, seed=3)
    model = problem.model
    columns = problem.corpus.train[:900].view(6, 150).t()
    for epoch in range(2):
        torch.manual_seed(tasks.seed_for(3, epoch, "noise in the network"))
        model.train()
        state, start = None, 0
        for length in list(problem._lengths(epoch)):
            out = model(columns[start : start + length], state)
            state = [(h.detach(), c.detach()) for h, c in out.state]
            words = columns[start + 1 : start + length + 1]
            loss = F.cross_entropy(out.scores.view(-1, 574), words.reshape(-1))
            loss = loss + 2 * (out.dropped**2).mean()
            loss = loss + ((out.raw[1:] - out.raw[:-1]) ** 2).mean()
            model.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.25)
            with torch.no_grad():
                for p in model.parameters():
                    assert p.grad is not None
                    p.sub_(0.5 * length / 20 * (p.grad + 1e-4 * p))
            start += length
    expected = problem.evaluate(model, "test")["perplexity"]
    assert result.metric("perplexity", "iterate") == pytest.approx(expected, rel=1e-4)
    assert expected < 400  # a uniform guess has 574


@pytest.mark.usefixtures("short_texts")
def test_micro_batches_match_the_whole_batch(tmp_path):
    whole = replace(RECIPE, language=DETERMINISTIC)
    divided = replace(whole, accumulate=4)  # columns 2, 2, 2
    a, b = (
        loop.train(r, tmp_path / str(r.accumulate), seed=1).metric("loss", "iterate")
        for r in (whole, divided)
    )
    assert a == pytest.approx(b, rel=1e-5)


@pytest.mark.usefixtures("short_texts")
def test_averaging_starts_at_its_epoch_if_epochs_differ_in_steps(tmp_path):
    for every, expected in ((1, None), (10, None), ("epoch", 2)):
        recipe = replace(RECIPE, data=replace(RECIPE.data, examples=2400), epochs=4)
        recipe = replace(recipe, average=Average(2, every=every))  # type: ignore[arg-type]
        result = loop.train(recipe, tmp_path / str(every), seed=5)
        problem = build(recipe, seed=5)
        later = problem.steps(2) + problem.steps(3)
        assert len({problem.steps(epoch) for epoch in range(4)}) > 1
        assert result.samples == (expected or later // int(every))
        history = read_epochs(tmp_path / str(every) / "epochs.jsonl")
        assert [bool(record.samples) for record in history] == [False, False, True, True]


@pytest.mark.usefixtures("short_texts")
def test_non_monotone_trigger_uses_perplexity(tmp_path):
    """At a rate that is too high to improve, NT-ASGD starts averaging where it should."""
    recipe = replace(
        RECIPE,
        optimizer=Optimizer("asgd", 60.0),
        average=Average("non-monotone", every=1, patience=1),
        epochs=8,
        clip_grad_norm=0.5,
    )
    result = loop.train(recipe, tmp_path, seed=1)
    assert recipe.method == "NT-ASGD"
    assert result.samples > 0
    history = read_epochs(tmp_path / "epochs.jsonl")
    measured = [record.metric("perplexity", "iterate", "validation") for record in history]
    values = [value for value in measured if value is not None]
    assert len(values) == len(history)
    # Merity's rule: worse than the best of those more than `patience` checks ago.
    begun = next(i for i, v in enumerate(values) if i > 1 and v > min(values[: i - 1]))
    assert [bool(record.samples) for record in history] == [i > begun for i in range(len(history))]
    assert result.average is not None
    assert result.average["test"] != result.iterate["test"]


@pytest.mark.parametrize("name", ["adam", "padam"])
def test_gadam_uses_l2_for_language_models(name):
    """The averaged run has the same update as the run without an average."""
    torch.manual_seed(0)
    given = [torch.randn(5, 3) for _ in range(4)]

    def trained(optimizer: Optimizer, average: Average | None = None) -> Tensor:
        model = nn.Linear(3, 5, bias=False)
        with torch.no_grad():
            model.weight.fill_(0.3)
        recipe = replace(RECIPE, optimizer=optimizer, average=average)
        built, point = optimizers.build(recipe, model, 0, "min")
        assert (point is None) == (average is None)
        for gradient in given:
            model.weight.grad = gradient.clone()
            built.step()
        return model.weight.detach()

    plain = trained(Optimizer(name, 0.1, 0.5))
    torch.testing.assert_close(trained(Optimizer(name, 0.1, 0.5), Average(0, every=1)), plain)
    decoupled = trained(Optimizer(f"{name}w", 0.1, 0.5))  # type: ignore[arg-type]
    assert not torch.allclose(decoupled, plain, atol=1e-3)


# ------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("setting", "sentence"),
    [
        ("data.label_noise=0.1", r"label_noise applies to images"),
        ("data.validation=10", r"validation applies to images"),
        ("language.weight_drop=1", r"weight_drop must be at least 0 and less than 1"),
        ("language.bptt=5", r"bptt must be at least 10.*vary_bptt=false"),
        ("data.augment=true", r"augment applies to images"),
        ("data.words=1", r"words must be at least 2"),
        ("language.tar_beta=-1", r"tar_beta must be non-negative"),
        ("compile=true", r"vary_bptt=false"),
        ("language.bpt=3", r"Did you mean 'language.bptt'"),
    ],
)
def test_invalid_setting_raises(setting, sentence):
    with pytest.raises(RecipeError, match=sentence):
        override(RECIPE, [setting])


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        ({"model": "vgg16"}, "Unknown language model 'vgg16'"),
        ({"batch_size": 500}, "too few for batch_size=500"),
        ({"data": replace(RECIPE.data, examples=70_000)}, r"has 6\d{4} training words"),
        ({"language": Language(bptt=5000)}, "too long for columns of 150 words"),
        ({"language": None}, "is a language model"),
        ({"language": None, "model": "vgg-mini"}, "toy-language is a text"),
    ],
)
def test_check_rejects_what_cannot_be_trained(changed, sentence):
    with pytest.raises((RecipeError, ValueError), match=sentence):
        tasks.check(replace(RECIPE, **changed), None)


def test_interval_that_never_samples_raises(tmp_path):
    with pytest.raises(RecipeError, match="takes no sample: only"):
        loop.train(replace(RECIPE, average=Average(1, every=10_000)), tmp_path)


def test_overflowing_perplexity_means_divergence(tmp_path):
    recipe = replace(RECIPE, optimizer=Optimizer("adam", 1e4), clip_grad_norm=None)
    result = loop.train(recipe, tmp_path)
    assert result.status == "diverged"
    assert result.metric("perplexity", "iterate") is None
    experiment = Experiment("x", "x", {"a": recipe})
    good = RunResult("done", 2, {"test": {"perplexity": 20.0}}, seconds={"train": 1.0})
    stored = RunResult.from_dict(json.loads((tmp_path / "result.json").read_text()))
    (row,) = summary.summarize(experiment, {("a", 0): good, ("a", 1): stored})
    assert row.diverged == 1
    assert "1 diverged" in summary.row_title(row)


# --------------------------------------------------------------------------------- user's texts


def test_user_text(tmp_path):
    folder: Path = tmp_path / "mine"
    folder.mkdir()
    for split in ("train", "valid", "test"):
        (folder / f"{split}.txt").write_text("the cat sat on the mat\n" * 40)
    recipe = replace(RECIPE, data=Data(str(folder), augment=False), epochs=15, average=Average(8))
    recipe = replace(recipe, optimizer=Optimizer("adam", 0.01), language=DETERMINISTIC)
    sentences: list[str] = []
    result = loop.train(
        recipe, tmp_path / "run", data_dir=str(tmp_path), on_notice=sentences.append
    )
    assert not sentences
    perplexity = result.metric("perplexity", "average")
    assert perplexity is not None
    assert perplexity < 2  # the text repeats one sentence


def test_notice_if_unknown_words_are_never_seen_in_training(tmp_path):
    folder: Path = tmp_path / "mine"
    folder.mkdir()
    for split, word in (("train", "mat"), ("valid", "hat"), ("test", "mat")):
        (folder / f"{split}.txt").write_text(f"the cat sat on the {word}\n" * 40)
    sentences: list[str] = []
    recipe = replace(RECIPE, data=Data("mine", augment=False), epochs=1)
    loop.train(recipe, tmp_path / "run", data_dir=str(tmp_path), on_notice=sentences.append)
    assert len(sentences) == 1
    assert "never learns to predict <unk>" in sentences[0]
