"""Texts for language models: files of words, as in Penn Treebank and WikiText-2.

A corpus is a folder of three texts: training, validation and test. A single text is divided into
these. Words are separated by spaces, and each line ends with its own token, ``<eos>``. The
vocabulary is that of the training text. Other words become ``<unk>``.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from math import exp
from pathlib import Path

import torch
from torch import Tensor

from gadam._names import find, is_written_as_path
from gadam.train.data import grammar
from gadam.train.data.errors import DataError
from gadam.train.data.sources import IF_ELSEWHERE, data_root, locate

__all__ = [
    "SPLITS",
    "TOY_LANGUAGE",
    "UNKNOWN",
    "Corpus",
    "best_perplexity",
    "canonical",
    "how_to_get",
    "load",
    "names",
    "own_path",
    "tokens",
]

UNKNOWN = "<unk>"
SPLITS = ("train", "validation", "test")
TOY_LANGUAGE = "toy-language"


@dataclass(frozen=True, eq=False)
class Corpus:
    """Three texts as word indices.

    Attributes:
        name: The corpus's name.
        words: The vocabulary. A word index is an index into it.
        train: The training text, int64.
        validation: The validation text, int64.
        test: The test text, int64.
        best: The perplexity of the true probabilities on each split, if they are known. No model
            can be expected to do better.
        notices: Sentences that tell the user how the files were understood.
        fingerprint: A hash of your own text. Empty for the other corpora.
    """

    name: str
    words: tuple[str, ...]
    train: Tensor
    validation: Tensor
    test: Tensor
    best: Mapping[str, float] = field(default_factory=dict)
    notices: tuple[str, ...] = ()
    fingerprint: str = ""

    def split(self, name: str) -> Tensor:
        """Return one of the texts.

        Args:
            name: One of :data:`SPLITS`.
        """
        found: Tensor = getattr(self, name)
        return found

    @property
    def unknown(self) -> dict[str, float]:
        """The fraction of :data:`UNKNOWN` in each split."""
        if UNKNOWN not in self.words:
            return dict.fromkeys(SPLITS, 0.0)
        index = self.words.index(UNKNOWN)
        return {name: (self.split(name) == index).double().mean().item() for name in SPLITS}


@dataclass(frozen=True)
class _Source:
    """Where a corpus is, how its files are named, and how much of it to use.

    Attributes:
        folders: The folders to search, below the folder of all data sets.
        files: The accepted names of the training, validation and test file.
        named: The names accepted in the folder of all data sets itself. They must be specific to
            the corpus.
        counts: The expected vocabulary size, and the tokens of each split.
        tokens: How many tokens of each split to use, from its beginning. None means all.
        words: How many of the most frequent words to use. None means all.
    """

    folders: tuple[str, ...]
    files: tuple[tuple[str, str, str], ...]
    named: tuple[str, str, str] | None = None
    counts: tuple[int, int, int, int] | None = None
    tokens: tuple[int | None, int | None, int | None] = (None, None, None)
    words: int | None = None


_TXT = ("train.txt", "valid.txt", "test.txt")
_OWN = tuple(("train.txt", f"{name}.txt", "test.txt") for name in ("valid", "validation", "val"))
_PTB = ("ptb.train.txt", "ptb.valid.txt", "ptb.test.txt")
_TOKENS = ("wiki.train.tokens", "wiki.valid.tokens", "wiki.test.tokens")
_PENN = _Source(("penn", "ptb"), (_TXT, _PTB), named=_PTB, counts=(10_000, 929_589, 73_760, 82_430))

_SOURCES = {
    "ptb": _PENN,
    # Small enough to train on within minutes on one slow core.
    "ptb-mini": replace(_PENN, tokens=(80_000, 15_000, 15_000), words=2_000),
    "wikitext-2": _Source(("wikitext-2",), (_TOKENS, _TXT), named=_TOKENS),
}
_TOY_SIZES = {"train": 60_000, "validation": 15_000, "test": 15_000}


def names() -> list[str]:
    """Return the names of the corpora that :func:`load` knows. It accepts folders, too."""
    return [TOY_LANGUAGE, *_SOURCES]


def canonical(name: str) -> str | None:
    """Return the name as :func:`names` spells it, or None if it is not one of them.

    Args:
        name: A name as the user typed it. A path is never one of :func:`names`.
    """
    if is_written_as_path(name):
        return None
    return find(name, {known: known for known in names()})[0]


def own_path(name: str, data_dir: str | Path | None = None) -> Path | None:
    """Return the file or folder of a text of your own, or None for one of :func:`names`.

    Args:
        name: As for :func:`load`.
        data_dir: As for :func:`load`.
    """
    return None if canonical(name) is not None else locate(name, data_root(data_dir))


def best_perplexity(name: str) -> Mapping[str, float]:
    """Return the perplexity of the true probabilities on each split, or {} if they are unknown.

    Args:
        name: The corpus, as for :func:`load`.
    """
    return _toy_language().best if canonical(name) == TOY_LANGUAGE else {}


def load(
    name: str,
    data_dir: str | Path | None = None,
    examples: int | None = None,
    words: int | None = None,
) -> Corpus:
    """Load a corpus.

    Args:
        name: One of :func:`names` (case and punctuation do not matter), or text of your own: a
            folder with train.txt, valid.txt (or validation.txt, val.txt) and test.txt, or a single
            .txt file, of which 90% are for training. A path, or a name below ``data_dir``.
        data_dir: The folder of all data sets. The default is the environment variable
            ``GADAM_DATA``, then ``~/.cache/gadam/data``. toy-language needs no files.
        examples: Use only this many training words, and their vocabulary. toy-language keeps its
            whole vocabulary.
        words: Use only this many different words, the most frequent ones.

    Returns:
        The corpus.

    Raises:
        DataError: The name is unknown, or a file is missing or is not what it should be.

    Example:
        >>> corpus = load("toy-language")
        >>> len(corpus.train), len(corpus.words), round(corpus.best["test"], 2)
        (60005, 574, 18.69)
        >>> " ".join(corpus.words[i] for i in corpus.test[:10])
        'the suns rek the dans <eos> some dans bak <eos>'
    """
    known = canonical(name)
    if known == TOY_LANGUAGE:
        if words is not None:
            raise DataError(f"data.words cannot be set for {TOY_LANGUAGE}. Leave it at none.")
        corpus = _toy_language()
        return replace(corpus, train=corpus.train[:examples])
    root = data_root(data_dir)
    if known is None:
        return _own_text(name, root, examples, words)
    source = _SOURCES[known]
    files = _find(known, source, root)
    texts = [_read(file) for file in files]
    found = (len(set(texts[0])), *map(len, texts))
    if source.counts not in (None, found):
        raise DataError(
            f"{files[0].parent} does not contain {known}: its training text has {found[1]:,} "
            f"words, {found[0]:,} of them different. To train on your own text, set data.name to "
            "its folder."
        )
    texts = [text[:size] for text, size in zip(texts, source.tokens)]
    texts[0] = texts[0][:examples]
    return _indexed(known, texts, words or source.words)


def how_to_get(name: str, root: Path) -> str:
    """Return sentences that tell the user how to get a corpus.

    Args:
        name: The canonical name.
        root: The folder of all data sets.
    """
    folder = root / _SOURCES[name].folders[0]
    if name == "wikitext-2":
        return f"Put {', '.join(_TOKENS)} into {folder}. {IF_ELSEWHERE}"
    return f"Run `gadam data ptb`, or put {', '.join(_TXT)} into {folder}. {IF_ELSEWHERE}"


def _own_text(name: str, root: Path, examples: int | None, words: int | None) -> Corpus:
    path = own_path(name, root)
    if path is None:
        near = find(name, {known: known for known in names()})[1]
        hint = f"Did you mean {near}?" if near else f"Use one of {', '.join(names())}."
        raise DataError(
            f"Unknown text {name!r}. {hint} To use your own text, pass a folder with "
            f"{', '.join(_TXT)}, or a .txt file: its path, or its name below {root}."
        )
    single = path if path.is_file() else None
    if single is None and len(listed := sorted(path.glob("*.txt"))) == 1:
        single = listed[0]
    if single is not None:
        files, texts = [single], _divided(single)
        notices: tuple[str, ...] = (
            f"{single} is one text: 90% of it are for training, 5% for validation and the last "
            "5% for the test.",
        )
    else:
        source = _Source((str(path.absolute()),), (*_OWN, _TOKENS))
        files, notices = _find(path.name, source, root), ()
        texts = [_read(file) for file in files]
    digest = hashlib.sha256()
    for file in files:
        digest.update(file.read_bytes())
    texts[0] = texts[0][:examples]
    return replace(
        _indexed(path.name, texts, words), notices=notices, fingerprint=digest.hexdigest()
    )


def _divided(file: Path) -> list[list[str]]:
    """Divide one text: its beginning is for training, its end for the test."""
    if file.suffix.lower() != ".txt":
        raise DataError(f"{file} is not a .txt file. Pass one, or a folder with {', '.join(_TXT)}.")
    words = _read(file)
    first, second = round(0.9 * len(words)), round(0.95 * len(words))
    texts = [words[:first], words[first:second], words[second:]]
    if min(map(len, texts)) < 2:
        raise DataError(
            f"{file} has {len(words)} words, too few to hold out any. Use a longer text."
        )
    return texts


def _find(name: str, source: _Source, root: Path) -> list[Path]:
    incomplete: list[tuple[int, Path]] = []
    places = [(root / folder, files) for folder in source.folders for files in source.files]
    places += [(root, source.named)] if source.named else []
    for folder, files in places:
        paths = [folder / file for file in files]
        missing = [path for path in paths if not path.is_file()]
        if not missing:
            return paths
        incomplete.append((len(missing), missing[0]))
    # Name what is missing in the most complete folder; min returns the first of equals.
    missing_file = min(incomplete, key=lambda place: place[0])[1]
    advice = how_to_get(name, root) if name in _SOURCES else "Add it."
    raise DataError(f"{missing_file} is missing. {advice}")


def _read(file: Path) -> list[str]:
    try:
        text = file.read_text(encoding="utf-8-sig")  # with or without a byte order mark
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(
            f"Cannot read {file} ({error}). It must be UTF-8 text, with words separated by spaces."
        ) from None
    if not text.strip():
        raise DataError(f"{file} is empty. It must contain words separated by spaces.")
    return tokens(text)


def tokens(text: str) -> list[str]:
    r"""Split a text into words, with an ``<eos>`` at the end of each line, blank lines included.

    Args:
        text: The text.

    Example:
        >>> tokens("no it was n't\n\nblack monday\n")
        ['no', 'it', 'was', "n't", '<eos>', '<eos>', 'black', 'monday', '<eos>']
    """
    ended = text if text.endswith("\n") else text + "\n"
    return ended.replace("\n", f" {grammar.END} ").split()


def _indexed(name: str, texts: list[list[str]], max_words: int | None) -> Corpus:
    # Counter and most_common keep words of equal count in order of first occurrence.
    counted = Counter(texts[0])
    words = (
        list(counted) if max_words is None else [word for word, _ in counted.most_common(max_words)]
    )
    index = {word: i for i, word in enumerate(words)}
    if any(word not in index for text in texts for word in text):
        index.setdefault(UNKNOWN, len(index))
    unknown = index.get(UNKNOWN, -1)
    train, validation, test = (
        torch.tensor([index.get(word, unknown) for word in text]) for text in texts
    )
    return Corpus(name, tuple(index), train, validation, test)


@cache
def _toy_language() -> Corpus:
    language = grammar.toy()
    words = (grammar.END, *language.words)
    index = {word: i for i, word in enumerate(words)}
    texts: list[Tensor] = []
    best: dict[str, float] = {}
    for seed, (split, size) in enumerate(_TOY_SIZES.items()):
        drawn, negative_log_likelihood = language.text(size, seed)
        texts.append(torch.tensor([index[word] for word in drawn]))
        best[split] = exp(negative_log_likelihood / len(drawn))
    train, validation, test = texts
    return Corpus(TOY_LANGUAGE, words, train, validation, test, best)
