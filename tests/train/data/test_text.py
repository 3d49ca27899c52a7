"""Texts are read from every layout, and problems are named with instructions."""

from __future__ import annotations

import os
import re
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gadam.train.data import DataError, grammar, text

TEXTS = {"train": "the cat sat\nthe dog sat\n", "valid": "the cow sat\n", "test": "a dog\n"}


def write(folder: Path, pattern: str = "{}.txt", **changed: str | bytes) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for split, content in {**TEXTS, **changed}.items():
        data = content.encode() if isinstance(content, str) else content
        (folder / pattern.format(split)).write_bytes(data)
    return folder


def words_of(corpus: text.Corpus, split: str) -> str:
    return " ".join(corpus.words[i] for i in corpus.split(split))


@pytest.mark.parametrize(
    ("folder", "pattern", "name"),
    [
        ("penn", "{}.txt", "ptb"),
        ("penn", "{}.txt", "PTB"),
        ("penn", "ptb.{}.txt", "ptb"),
        ("ptb", "{}.txt", "ptb"),
        ("", "ptb.{}.txt", "ptb"),
        ("wikitext-2", "wiki.{}.tokens", "WikiText-2"),
        ("", "wiki.{}.tokens", "wikitext-2"),
        ("mine", "{}.txt", "mine"),
        ("mine", "wiki.{}.tokens", "mine"),
    ],
)
def test_vocabulary_is_that_of_the_training_text(folder, pattern, name, tmp_path, monkeypatch):
    # Pretend that Penn Treebank has eight words.
    monkeypatch.setitem(text._SOURCES, "ptb", replace(text._SOURCES["ptb"], counts=(5, 8, 4, 3)))
    write(tmp_path / folder, pattern)
    corpus = text.load(name, tmp_path)
    assert corpus.words == ("the", "cat", "sat", "<eos>", "dog", "<unk>")
    assert words_of(corpus, "train") == "the cat sat <eos> the dog sat <eos>"
    assert words_of(corpus, "validation") == "the <unk> sat <eos>"
    assert words_of(corpus, "test") == "<unk> dog <eos>"
    assert corpus.unknown == pytest.approx({"train": 0, "validation": 1 / 4, "test": 1 / 3})
    assert not corpus.best


@pytest.mark.parametrize("validation", ["validation", "val"])
def test_validation_file_has_several_names(validation, tmp_path):
    write(tmp_path / "mine")
    (tmp_path / "mine" / "valid.txt").rename(tmp_path / "mine" / f"{validation}.txt")
    corpus = text.load(str(tmp_path / "mine"))
    assert words_of(corpus, "validation") == "the <unk> sat <eos>"
    assert corpus.notices == ()


@pytest.mark.parametrize("by_folder", [True, False])
def test_single_text_is_divided(by_folder, tmp_path):
    lines = [f"word{number} and\n" for number in range(100)]
    (tmp_path / "book.txt").write_text("".join(lines))
    corpus = text.load(str(tmp_path if by_folder else tmp_path / "book.txt"))
    assert [len(corpus.split(s)) for s in text.SPLITS] == [270, 15, 15]
    assert words_of(corpus, "train").startswith("word0 and <eos> word1")
    assert words_of(corpus, "test").endswith("<unk> and <eos>")
    assert "90% of it are for training" in corpus.notices[0]
    (tmp_path / "book.txt").write_text("too short\n")
    with pytest.raises(DataError, match=r"book.txt has 3 words, too few to hold out any"):
        text.load(str(tmp_path / "book.txt"))
    (tmp_path / "book.md").write_text("words\n")
    with pytest.raises(DataError, match=r"book.md is not a .txt file"):
        text.load(str(tmp_path / "book.md"))


def test_fingerprint_changes_with_the_text(tmp_path):
    before = text.load(str(write(tmp_path / "a"))).fingerprint
    assert text.load(str(write(tmp_path / "b"))).fingerprint == before
    assert text.load(str(write(tmp_path / "b", test="a cat\n"))).fingerprint != before
    assert text.load("toy-language").fingerprint == ""


@pytest.mark.parametrize(("folder", "name"), [("penn", "ptb"), ("ptb", "ptb-mini")])
def test_other_text_in_the_folder_of_penn_treebank_raises(folder, name, tmp_path):
    write(tmp_path / folder)
    with pytest.raises(
        DataError, match=rf"{folder} does not contain {name}: .* 8 words.*data.name"
    ):
        text.load(name, tmp_path)


@pytest.mark.parametrize("name", ["ptb", "wikitext-2"])
def test_generic_file_names_directly_in_the_data_folder_are_ignored(name, tmp_path):
    write(tmp_path)
    with pytest.raises(DataError, match="is missing"):
        text.load(name, tmp_path)


@pytest.mark.parametrize("name", ["ptb", "toy-language", "wikitext-2"])
def test_path_that_ends_in_a_known_name_is_a_path(name, tmp_path, monkeypatch):
    write(tmp_path / name)
    monkeypatch.chdir(tmp_path)
    for path in (f"./{name}", str(tmp_path / name)):
        corpus = text.load(path, tmp_path / "data")
        assert len(corpus.train) == 8
        assert not text.best_perplexity(path)


def test_byte_order_mark_is_ignored(tmp_path):
    write(tmp_path / "mine", train=b"\xef\xbb\xbfthe cat\n")
    assert text.load("mine", tmp_path).words[:2] == ("the", "cat")


def test_vocabulary_size_keeps_the_most_frequent_words(tmp_path):
    write(tmp_path / "mine", train="b a a c c c\n")
    corpus = text.load("mine", tmp_path, words=2)
    assert corpus.words == ("c", "a", "<unk>")
    assert words_of(corpus, "train") == "<unk> a a c c c <unk>"
    with pytest.raises(DataError, match=r"data.words cannot be set for toy-language"):
        text.load("toy-language", words=10)


def test_user_folder_by_its_path(tmp_path, monkeypatch):
    write(tmp_path / "elsewhere" / "mine")
    monkeypatch.chdir(tmp_path)
    for name in (str(tmp_path / "elsewhere" / "mine"), "elsewhere/mine"):
        assert len(text.load(name).words) == 6


def test_no_unknown_token_if_all_words_are_known(tmp_path):
    write(tmp_path / "mine", valid="the dog", test="cat\n")
    corpus = text.load("mine", tmp_path)
    assert corpus.words == ("the", "cat", "sat", "<eos>", "dog")
    assert set(corpus.unknown.values()) == {0.0}


def test_text_that_contains_unk(tmp_path):
    write(tmp_path / "mine", train="<unk> cat\n", valid="dog\n", test="cat\n")
    corpus = text.load("mine", tmp_path)
    assert corpus.words == ("<unk>", "cat", "<eos>")
    assert words_of(corpus, "validation") == "<unk> <eos>"


def test_fewer_training_words_have_a_smaller_vocabulary(tmp_path):
    write(tmp_path / "mine")
    corpus = text.load("mine", tmp_path, examples=3)
    assert words_of(corpus, "train") == "the cat sat"
    assert words_of(corpus, "validation") == "the <unk> sat <unk>"


@given(st.lists(st.lists(st.text("abc'.", min_size=1), max_size=5), min_size=1, max_size=6))
def test_tokens_are_all_words_and_line_ends(lines):
    written = "\n".join(" ".join(line) for line in lines)
    if not written.endswith("\n"):
        expected = [word for line in lines for word in (*line, "<eos>")]
        assert text.tokens(written) == expected
        assert text.tokens(written + "\n") == expected


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        ({"valid": ""}, r"valid.txt is empty\. It must contain words"),
        ({"train": " \n \n"}, "train.txt is empty"),
        ({"test": b"caf\xe9"}, r"Cannot read .*test.txt \(.*UTF-8"),
    ],
)
def test_unreadable_file_is_named(changed, sentence, tmp_path):
    write(tmp_path / "mine", **changed)
    with pytest.raises(DataError, match=sentence):
        text.load("mine", tmp_path)


def test_missing_file_is_named_with_instructions(tmp_path):
    folder = re.escape(str(tmp_path))
    sentence = rf"{folder}/penn/train.txt is missing\. Run `gadam data ptb`, or put"
    with pytest.raises(DataError, match=sentence):
        text.load("ptb", tmp_path)
    write(tmp_path / "penn")
    (tmp_path / "penn" / "valid.txt").unlink()
    with pytest.raises(DataError, match=r"valid.txt is missing.*GADAM_DATA"):
        text.load("ptb-mini", tmp_path)
    with pytest.raises(DataError, match=r"wiki.train.tokens is missing\. Put wiki.train.tokens"):
        text.load("wikitext-2", tmp_path)
    write(tmp_path / "mine")
    (tmp_path / "mine" / "test.txt").unlink()
    with pytest.raises(DataError, match=r"mine/test.txt is missing\. Add it\.$"):
        text.load("mine", tmp_path)


def test_unknown_text_gets_a_hint(tmp_path):
    with pytest.raises(DataError, match=r"text 'wikitext-3'\. Did you mean wikitext-2\?"):
        text.load("wikitext-3", tmp_path)
    with pytest.raises(DataError, match=r"your own text, pass a folder with train.txt"):
        text.load("zzz", tmp_path)


def test_toy_language_needs_no_files_and_is_always_the_same(tmp_path):
    a, b = text.load("toy-language", tmp_path), text.load("Toy Language")
    assert a.best == text.best_perplexity("toy-language")
    assert set(a.best) == set(text.SPLITS)
    # A finite text is easier or harder by chance. The perplexity of the entropy is the limit.
    assert list(a.best.values()) == pytest.approx([grammar.toy().best_perplexity] * 3, rel=0.02)
    assert all(bool((a.split(s) == b.split(s)).all()) for s in text.SPLITS)
    assert words_of(a, "validation")[:200] != words_of(a, "test")[:200]
    assert set(a.unknown.values()) == {0.0}
    assert len(text.load("toy-language", examples=100).train) == 100
    assert not text.best_perplexity("ptb")


@pytest.mark.skipif(
    not Path(os.environ.get("GADAM_DATA", "/nowhere"), "penn").is_dir(), reason="needs PTB"
)
def test_official_penn_treebank():
    corpus = text.load("ptb")
    assert len(corpus.words) == 10_000
    assert [len(corpus.split(s)) for s in text.SPLITS] == [929_589, 73_760, 82_430]
    small = text.load("ptb-mini")
    assert len(small.words) == 2_000
    assert [len(small.split(s)) for s in text.SPLITS] == [80_000, 15_000, 15_000]
