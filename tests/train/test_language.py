"""Language modelling: how a text is read, trained on and judged."""

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

from gadam.train import commands, experiments, loop, lstm, optimizers, summary, task, text
from gadam.train.catalogue import Experiment
from gadam.train.recipe import (
    Average,
    Data,
    Language,
    Optimizer,
    Recipe,
    RecipeError,
    override,
)

CPU = torch.device("cpu")
RECIPE = Recipe(
    "r",
    model="awd-lstm-mini",
    data=Data("toy-language", examples=900, augment=False),
    optimizer=Optimizer("sgd", 0.5, 1e-4, momentum=0.0),
    language=Language(bptt=20),
    epochs=2,
    batch_size=6,
    clip=0.25,
)
QUIET = Language(20, True, 0.0, 0.0, 0.0, 0.0, 0.0, activation=0.0, slowness=0.0)


def build(recipe: Recipe = RECIPE, seed: int = 0) -> task.Language:
    return task.Language(recipe, seed, CPU, None)


# ---------------------------------------------------------------------------------------- evaluation


class Unigram(nn.Module):
    """Knows how frequent each word is, and notes what it is shown."""

    def __init__(self, scores: Tensor) -> None:
        super().__init__()
        self.scores, self.seen = scores, 0

    def forward(self, words: Tensor, state: Any = None) -> lstm.Output:
        self.seen += words.numel()
        scores = self.scores.expand(*words.shape, -1)
        return lstm.Output(scores, (), scores, scores)


@given(st.integers(2, 400), st.integers(1, 40), st.integers(0, 9))
def test_every_word_is_judged_once_in_any_number_of_columns(length, columns, seed):
    generator = torch.Generator().manual_seed(seed)
    words = torch.randint(5, (length,), generator=generator)
    scores = torch.randn(5, generator=generator)
    expected = -scores.log_softmax(0)[words[1:]].double().mean().item()
    model = Unigram(scores)
    assert task.mean_surprise(model, words, columns) == pytest.approx(expected, rel=1e-5)
    assert model.seen < length + columns


@pytest.mark.parametrize("columns", [1, 3])
def test_it_is_the_brute_force_perplexity(columns):
    """Word by word, the state handed on, from a blank one where a column begins."""
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
    assert task.mean_surprise(model.train(), words, columns) == pytest.approx(expected, rel=1e-6)


def test_a_task_judges_by_the_usual_protocol():
    problem = build()
    model, test = problem.model.eval(), problem.corpus.test
    with torch.no_grad():  # the whole text at once, from its beginning to its end
        scores = model(test[:-1, None]).scores[:, 0]
        surprise = float(F.cross_entropy(scores, test[1:]))
    judged = problem.evaluate(model, "test")
    assert judged["loss"] == pytest.approx(surprise, rel=1e-5)
    assert judged["perplexity"] == math.exp(judged["loss"])
    text_ = problem.corpus.validation
    length = -(-(len(text_) - 1) // 10)
    total = 0.0
    with torch.no_grad():  # and ten pieces of a text, each by itself
        for start in range(0, len(text_) - 1, length):
            piece = text_[start : start + length + 1]
            scores = model(piece[:-1, None]).scores[:, 0]
            total += float(F.cross_entropy(scores, piece[1:], reduction="sum"))
    validation = problem.evaluate(model, "validation")
    assert validation["loss"] == pytest.approx(total / (len(text_) - 1), rel=1e-5)
    assert (problem.metric, problem.mode) == ("perplexity", "min")


def test_hopeless_scores_make_no_exception():
    problem = build()
    with torch.no_grad():
        problem.model.get_parameter("bias")[0] = 1e6
    assert problem.evaluate(problem.model, "test")["perplexity"] == math.inf


def test_a_text_with_nothing_to_predict_is_refused():
    with pytest.raises(RecipeError, match="fewer than two words"):
        task.mean_surprise(Unigram(torch.ones(3)), torch.tensor([1]))


# ------------------------------------------------------------------------------------------ reading


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


def test_lengths_are_drawn_as_meritys():
    """Around bptt with a deviation of 5, one in twenty around half of it; others each epoch and seed."""
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
    # int() takes half a word off, in the mean.
    assert abs(whole.mean() - 69.5) < 4 * 5 / math.sqrt(len(whole))
    assert abs(lengths[halved].mean() - 34.5) < 4 * 5 / math.sqrt(int(halved.sum()))
    assert 4.5 < whole.std() < 5.5
    assert list(problem._lengths(0)) != list(problem._lengths(1))
    assert list(problem._lengths(0)) != list(build(recipe, seed=1)._lengths(0))
    assert list(problem._lengths(0)) == list(build(recipe)._lengths(0))


# ------------------------------------------------------------------------------------------ training


def test_it_is_plain_training(tmp_path):
    """Against a loop written out: state, clipping, regularisers, and the rate of each length."""
    recipe = replace(RECIPE, language=Language(20, activation=2.0, slowness=1.0))
    result = loop.train(recipe, tmp_path, seed=3)
    problem = build(recipe, seed=3)
    model = problem.model
    columns = problem.corpus.train[:900].view(6, 150).t()
    for epoch in range(2):
        torch.manual_seed(task.seed_for(3, epoch, "noise in the network"))
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
    assert result["iterate"]["test"]["perplexity"] == pytest.approx(expected, rel=1e-4)
    assert expected < 400  # from 574 words


def test_a_batch_in_parts_is_the_whole_batch(tmp_path):
    whole = replace(RECIPE, language=QUIET)
    parts = replace(whole, accumulate=4)  # columns 2, 2, 2
    a, b = (loop.train(r, tmp_path / str(r.accumulate), seed=1) for r in (whole, parts))
    assert a["iterate"]["test"]["loss"] == pytest.approx(b["iterate"]["test"]["loss"], rel=1e-5)


def test_averaging_starts_at_its_epoch_though_epochs_differ_in_steps(tmp_path):
    for every, expected in ((1, None), (10, None), ("epoch", 2)):
        recipe = replace(RECIPE, data=replace(RECIPE.data, examples=2400), epochs=4)
        recipe = replace(recipe, average=Average(2, every=every))  # type: ignore[arg-type]
        result = loop.train(recipe, tmp_path / str(every), seed=5)
        problem = build(recipe, seed=5)
        later = problem.steps(2) + problem.steps(3)
        assert len({problem.steps(epoch) for epoch in range(4)}) > 1
        assert result["samples"] == (expected or later // int(every))
        lines = (tmp_path / str(every) / "epochs.jsonl").read_text().splitlines()
        assert [bool(json.loads(line)["samples"]) for line in lines] == [False, False, True, True]


def test_the_non_monotone_trigger_watches_perplexity(tmp_path):
    """NT-ASGD at a rate so high that it gets no better: averaging begins where it should."""
    recipe = replace(
        RECIPE,
        optimizer=Optimizer("asgd", 60.0),
        average=Average("non-monotone", every=1, patience=1),
        epochs=8,
        clip=0.5,
    )
    result = loop.train(recipe, tmp_path, seed=1)
    assert recipe.method == "NT-ASGD"
    assert result["samples"] > 0
    lines = [json.loads(line) for line in (tmp_path / "epochs.jsonl").read_text().splitlines()]
    values = [line["iterate"]["validation"]["perplexity"] for line in lines]
    # Merity's rule: worse than the best of those more than `patience` checks ago.
    begun = next(i for i, v in enumerate(values) if i > 1 and v > min(values[: i - 1]))
    assert [bool(line["samples"]) for line in lines] == [i > begun for i in range(len(lines))]
    assert result["average"]["test"] != result["iterate"]["test"]


@pytest.mark.parametrize("name", ["adam", "padam"])
def test_gadam_has_l2_here(name):
    """The update of the averaged run is that of the run without an average."""
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


# ---------------------------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("setting", "sentence"),
    [
        ("data.label_noise=0.1", r"label_noise is of pictures"),
        ("data.validation=10", r"validation is of pictures"),
        ("language.weight_drop=1", r"weight_drop must lie in \[0, 1\)"),
        ("language.bptt=5", r"bptt must be at least 10.*vary_bptt=false"),
        ("data.augment=true", r"augment is of pictures"),
        ("data.words=1", r"words must be at least 2"),
        ("language.slowness=-1", r"slowness must not be negative"),
        ("compile=true", r"vary_bptt=false"),
        ("language.bpt=3", r"did you mean 'language.bptt'"),
    ],
)
def test_settings_that_cannot_be(setting, sentence):
    with pytest.raises(RecipeError, match=sentence):
        override(RECIPE, [setting])


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        ({"model": "vgg16"}, "Unknown language model 'vgg16'"),
        ({"batch_size": 500}, "too few to be read at batch_size=500 places"),
        ({"data": replace(RECIPE.data, examples=70_000)}, r"has 6\d{4} words to train on"),
        ({"language": Language(bptt=5000)}, "far more than the 150 words at each"),
        ({"language": None}, "is a language model"),
        ({"language": None, "model": "vgg-mini"}, "toy-language is a text"),
    ],
)
def test_what_cannot_be_trained_is_refused_before_it_is(changed, sentence):
    with pytest.raises((RecipeError, ValueError), match=sentence):
        task.check(replace(RECIPE, **changed), None)


def test_a_stride_that_never_samples_is_refused(tmp_path):
    with pytest.raises(RecipeError, match="takes no sample in the"):
        loop.train(replace(RECIPE, average=Average(1, every=10_000)), tmp_path)


def test_a_perplexity_beyond_numbers_has_diverged(tmp_path):
    recipe = replace(RECIPE, optimizer=Optimizer("adam", 1e4), clip=None)
    result = loop.train(recipe, tmp_path)
    assert result["status"] == "diverged"
    assert result["iterate"]["test"]["perplexity"] is None or result["iterate"]["test"][
        "perplexity"
    ] == float("inf")
    experiment = Experiment("x", "x", {"a": recipe})
    good = {
        "status": "done",
        "iterate": {"test": {"perplexity": 20.0}},
        "average": None,
        "seconds": {"train": 1.0},
    }
    stored = json.loads((tmp_path / "result.json").read_text())
    (row,) = summary.rows(experiment, {("a", 0): good, ("a", 1): stored})
    assert row.diverged == 1
    assert "1 diverged" in summary.titled(row)


def test_settings_reach_the_rows_that_they_concern():
    mixed = experiments.get("fig-frequency").recipes
    rows = commands._overridden(mixed, ["language.bptt=20", "data.label_noise=0.1", "epochs=25"])
    for row, recipe in rows.items():
        assert recipe.epochs == 25
        if row.startswith("LSTM"):
            assert recipe.language is not None
            assert recipe.language.bptt == 20
        else:
            assert (recipe.language, recipe.data.label_noise) == (None, 0.1)
    pictures = experiments.get("tab-cifar").recipes
    with pytest.raises(RecipeError, match="concerns none of the rows"):
        commands._overridden(pictures, ["language.bptt=20"])
    with pytest.raises(RecipeError, match="learns from pictures: it has no language settings"):
        override(next(iter(pictures.values())), ["language.bptt=20"])


def test_published_numbers_stand_beside_their_own_task_only(tmp_path, capsys):
    arguments = ["lm-mini", "--rows", "Adam", "--seeds", "1", "--out", str(tmp_path)]
    arguments += ["--set", "epochs=2", "--set", "data.examples=3000", "--workers", "1"]
    assert commands.run("reproduce", arguments) == 0
    described = json.loads((tmp_path / "experiment.json").read_text())
    assert described["rows"] == ["Adam"]
    assert (described["metric"], described["published"]) == ("perplexity", {})
    assert "--rows Adam" in described["command"]
    page = (tmp_path / "report.html").read_text()
    best = text.best_perplexity("toy-language")
    assert f'"floors":{{"test":{{"perplexity":{best["test"]!r}' in page
    assert commands.run("reproduce", ["tab-ptb", "--rows", "nothing"]) == 2
    assert "no row with 'nothing'" in capsys.readouterr().err


def test_a_missing_text_ends_the_command_with_a_sentence(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert commands.run("reproduce", ["tab-ptb", "--data-dir", str(tmp_path)]) == 2
    said = capsys.readouterr().err
    assert "penn/train.txt is missing: run `gadam data ptb`" in said
    assert not (tmp_path / "runs").exists()


# ------------------------------------------------------------------------------------- as it is used


def test_lm_mini_needs_no_data(tmp_path, capsys):
    arguments = ["lm-mini", "--out", str(tmp_path), "--data-dir", str(tmp_path / "nothing")]
    arguments += ["--set", "epochs=2", "--set", "average.start=1", "--set", "data.examples=4000"]
    assert commands.run("train", arguments) == 0
    shown = capsys.readouterr().out
    assert "validation perplexity: iterate" in shown
    assert "test perplexity" in shown
    result = json.loads((tmp_path / "lm-mini-0" / "result.json").read_text())
    floor = text.best_perplexity("toy-language")["test"]
    assert floor < result["average"]["test"]["perplexity"] < 574
    assert commands.run("list", ["--recipes"]) == 0
    assert "lm-mini-gadam" in capsys.readouterr().out


def test_a_text_of_ones_own(tmp_path):
    folder: Path = tmp_path / "mine"
    folder.mkdir()
    for part in ("train", "valid", "test"):
        (folder / f"{part}.txt").write_text("the cat sat on the mat\n" * 40)
    recipe = replace(RECIPE, data=Data(str(folder), augment=False), epochs=15, average=Average(8))
    recipe = replace(recipe, optimizer=Optimizer("adam", 0.01), language=QUIET)
    sentences: list[str] = []
    result = loop.train(recipe, tmp_path / "run", data_dir=str(tmp_path), notice=sentences.append)
    assert not sentences
    assert result["average"]["test"]["perplexity"] < 2  # a text that says always the same


def test_words_that_are_never_learnt_are_said(tmp_path):
    folder: Path = tmp_path / "mine"
    folder.mkdir()
    for part, word in (("train", "mat"), ("valid", "hat"), ("test", "mat")):
        (folder / f"{part}.txt").write_text(f"the cat sat on the {word}\n" * 40)
    sentences: list[str] = []
    recipe = replace(RECIPE, data=Data("mine", augment=False), epochs=1)
    loop.train(recipe, tmp_path / "run", data_dir=str(tmp_path), notice=sentences.append)
    assert len(sentences) == 1
    assert "what <unk> means is never learnt" in sentences[0]
