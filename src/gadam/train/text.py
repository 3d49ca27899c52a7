"""Texts to learn a language from: words in files, as Penn Treebank and WikiText-2 have them.

A corpus is a folder of three texts, to train, validate and test on. Words stand between blanks, and each
line ends with a token of its own, ``<eos>``. The vocabulary is that of the training text; what else
occurs in the others is ``<unk>``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from math import exp
from pathlib import Path

import torch
from torch import Tensor

from gadam._names import find
from gadam.train import grammar
from gadam.train.data import DataError, folder_of

__all__ = ["PARTS", "UNKNOWN", "Corpus", "best_perplexity", "canonical", "load", "names"]

UNKNOWN = "<unk>"
PARTS = ("train", "validation", "test")


@dataclass(frozen=True, eq=False)
class Corpus:
    """A text in three parts, as numbers.

    Attributes:
        name: What it is called.
        words: The vocabulary: the word that each number stands for.
        train, validation, test: The parts, int64.
        best: The perplexity of the true probabilities on each part, where they are known: no model can be
            expected to be better.
    """

    name: str
    words: tuple[str, ...]
    train: Tensor
    validation: Tensor
    test: Tensor
    best: Mapping[str, float] = field(default_factory=dict)

    def part(self, name: str) -> Tensor:
        """One of :data:`PARTS`."""
        found: Tensor = getattr(self, name)
        return found

    @property
    def unknown(self) -> dict[str, float]:
        """The share of :data:`UNKNOWN` in each part."""
        if UNKNOWN not in self.words:
            return dict.fromkeys(PARTS, 0.0)
        number = self.words.index(UNKNOWN)
        return {name: (self.part(name) == number).double().mean().item() for name in PARTS}


@dataclass(frozen=True)
class _Source:
    """Where a corpus lies below the data folder, how its files are called, and how much to take.

    In the data folder itself only files that bear the corpus's name are taken for it.
    """

    folders: tuple[str, ...]
    files: tuple[tuple[str, str, str], ...]
    named: tuple[str, str, str] | None = None
    counts: tuple[int, int, int, int] | None = None  # the words, and the tokens of each part
    tokens: tuple[int | None, int | None, int | None] = (None, None, None)  # the first of each part
    words: int | None = None  # the most frequent ones


_TXT = ("train.txt", "valid.txt", "test.txt")
_PTB = ("ptb.train.txt", "ptb.valid.txt", "ptb.test.txt")
_TOKENS = ("wiki.train.tokens", "wiki.valid.tokens", "wiki.test.tokens")
_PENN = _Source(("penn", "ptb"), (_TXT, _PTB), named=_PTB, counts=(10_000, 929_589, 73_760, 82_430))

_SOURCES = {
    "ptb": _PENN,
    # What a slow core gets through in minutes.
    "ptb-mini": replace(_PENN, tokens=(80_000, 15_000, 15_000), words=2_000),
    "wikitext-2": _Source(("wikitext-2",), (_TOKENS, _TXT), named=_TOKENS),
}
MADE_UP = "toy-language"
_MADE_UP_SIZES = {"train": 60_000, "validation": 15_000, "test": 15_000}


def names() -> list[str]:
    """The corpora that :func:`load` knows; it takes a folder of one's own too."""
    return [MADE_UP, *_SOURCES]


def canonical(name: str) -> str | None:
    """The name as :func:`names` spells it; None if it is none of them, as a path is."""
    if name.startswith((".", "~")) or Path(name).name != name:
        return None
    return find(name, {known: known for known in names()})[0]


def best_perplexity(name: str) -> Mapping[str, float]:
    """That of the true probabilities on each part of this corpus, where they are known."""
    return _made_up().best if canonical(name) == MADE_UP else {}


def load(
    name: str,
    data_dir: str | Path | None = None,
    examples: int | None = None,
    words: int | None = None,
) -> Corpus:
    """Read a corpus.

    Args:
        name: One of :func:`names` (case and punctuation do not matter), or a folder with train.txt,
            valid.txt and test.txt: a path, or its name below ``data_dir``.
        data_dir: Where the files are; else the environment variable ``GADAM_DATA`` says it, else
            they are in ``~/.cache/gadam/data``. toy-language needs none.
        examples: Take only so many words to train on, and their vocabulary (toy-language has the same always).
        words: Know only so many different words, the most frequent of those.

    Example:
        >>> corpus = load("toy-language")
        >>> len(corpus.train), len(corpus.words), round(corpus.best["test"], 2)
        (60005, 574, 18.69)
        >>> " ".join(corpus.words[i] for i in corpus.test[:10])
        'the suns rek the dans <eos> some dans bak <eos>'
    """
    known = canonical(name)
    if known == MADE_UP:
        if words is not None:
            raise DataError(f"data.words cannot be set for {MADE_UP}: its words are few already")
        corpus = _made_up()
        return replace(corpus, train=corpus.train[:examples])
    root = folder_of("texts", data_dir)
    if known is None:
        known, source = Path(name).name, _own(name, root)
    else:
        source = _SOURCES[known]
    files = _find(known, source, root)
    texts = [_read(file) for file in files]
    found = (len(set(texts[0])), *map(len, texts))
    if source.counts not in (None, found):
        raise DataError(
            f"{files[0].parent} is not what {known} is ({found[1]:,} words to train on, {found[0]:,} of them "
            "different): to train on a text of your own, say its folder by data.name"
        )
    texts = [text[:size] for text, size in zip(texts, source.tokens)]
    texts[0] = texts[0][:examples]
    return _numbered(known, texts, words or source.words)


def how_to_get(name: str, root: Path) -> str:
    """What to do for a corpus to be there, as the second half of a sentence."""
    elsewhere = "or say where it is by --data-dir or GADAM_DATA"
    folder = root / _SOURCES[name].folders[0]
    if name == "wikitext-2":
        return f"put {', '.join(_TOKENS)} into {folder}, {elsewhere}"
    return f"run `gadam data ptb`, or put {', '.join(_TXT)} into {folder}, {elsewhere}"


def _own(name: str, root: Path) -> _Source:
    """A folder of the user's."""
    for folder in (root / name, Path(name).expanduser()):
        if folder.is_dir():
            return _Source((str(folder.absolute()),), (_TXT, _TOKENS))
    near = find(name, {known: known for known in names()})[1]
    hint = f"did you mean {near}?" if near else f"there are {', '.join(names())}"
    raise DataError(
        f"there is no text {name!r}: {hint}, and a folder of your own with {', '.join(_TXT)} can be "
        f"named by its path or below {root}"
    )


def _find(name: str, source: _Source, root: Path) -> list[Path]:
    lacking: list[tuple[int, Path]] = []
    places = [(root / folder, files) for folder in source.folders for files in source.files]
    places += [(root, source.named)] if source.named else []
    for folder, files in places:
        paths = [folder / file for file in files]
        missing = [path for path in paths if not path.is_file()]
        if not missing:
            return paths
        lacking.append((len(missing), missing[0]))
    # The place where most of it is tells best what is lacking; min keeps the first of equals.
    missing_file = min(lacking, key=lambda lack: lack[0])[1]
    advice = how_to_get(name, root) if name in _SOURCES else "put it there"
    raise DataError(f"{missing_file} is missing: {advice}")


def _read(file: Path) -> list[str]:
    try:
        text = file.read_text(encoding="utf-8-sig")  # with or without a mark of its byte order
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(
            f"{file} cannot be read ({error}): it must be text in UTF-8, words between blanks"
        ) from None
    if not text.strip():
        raise DataError(f"{file} is empty: it must have words, between blanks")
    return tokens(text)


def tokens(text: str) -> list[str]:
    r"""The words, with an ``<eos>`` for the end of each line, blank ones too.

    >>> tokens("no it was n't\n\nblack monday\n")
    ['no', 'it', 'was', "n't", '<eos>', '<eos>', 'black', 'monday', '<eos>']
    """
    ended = text if text.endswith("\n") else text + "\n"
    return ended.replace("\n", f" {grammar.END} ").split()


def _numbered(name: str, texts: list[list[str]], most: int | None) -> Corpus:
    counted = Counter(texts[0])  # in the order of first occurrence, as are equals in most_common
    words = list(counted) if most is None else [word for word, _ in counted.most_common(most)]
    number = {word: i for i, word in enumerate(words)}
    if any(word not in number for text in texts for word in text):
        number.setdefault(UNKNOWN, len(number))
    unknown = number.get(UNKNOWN, -1)
    train, validation, test = (
        torch.tensor([number.get(word, unknown) for word in text]) for text in texts
    )
    return Corpus(name, tuple(number), train, validation, test)


@cache
def _made_up() -> Corpus:
    language = grammar.toy()
    words = (grammar.END, *language.words)
    number = {word: i for i, word in enumerate(words)}
    texts: list[Tensor] = []
    best: dict[str, float] = {}
    for seed, (part, size) in enumerate(_MADE_UP_SIZES.items()):
        drawn, surprise = language.text(size, seed)
        texts.append(torch.tensor([number[word] for word in drawn]))
        best[part] = exp(surprise / len(drawn))
    train, validation, test = texts
    return Corpus(MADE_UP, words, train, validation, test, best)
