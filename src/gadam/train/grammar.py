"""A small made-up language whose best possible perplexity is known.

Its sentences come from a probabilistic context-free grammar with number agreement, relative clauses and
clauses within clauses. No sentence has two derivations, so the entropy of the derivations, which is the
solution of a linear system, is the entropy of the text: no predictor, however good, does better on it.

>>> language = Grammar({"S": ((0.5, ("a",)), (0.5, ("b", "S")))})
>>> round(language.best_perplexity, 12)  # "bba<eos>bba<eos>a<eos>…": a coin where no sentence has ended
1.587401051968
"""

from __future__ import annotations

import math
from bisect import bisect
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from random import Random

import torch

__all__ = ["END", "Grammar", "toy"]

END = "<eos>"

Expansion = tuple[str, ...]


@dataclass(frozen=True, eq=False)
class Grammar:
    """Sentences drawn one after the other, each followed by :data:`END`.

    Args:
        rules: the expansions of each symbol with their probabilities; what has none is a word. For
            :attr:`best_perplexity` to be true no sentence may have two derivations
        start: the symbol of a sentence
    """

    rules: Mapping[str, tuple[tuple[float, Expansion], ...]]
    start: str = "S"

    def __post_init__(self) -> None:
        for symbol, expansions in self.rules.items():
            total = math.fsum(p for p, _ in expansions)
            if min(p for p, _ in expansions) <= 0 or not math.isclose(total, 1.0):
                raise ValueError(f"the probabilities of {symbol!r} are not positive with sum 1")

    @property
    def words(self) -> list[str]:
        """Every word there is, without :data:`END`."""
        used = (s for expansions in self.rules.values() for _, right in expansions for s in right)
        return list(dict.fromkeys(symbol for symbol in used if symbol not in self.rules))

    @cached_property
    def _moments(self) -> tuple[float, float]:
        """The entropy (nats) and the number of words of a sentence, in expectation."""
        symbols = list(self.rules)
        place = {symbol: i for i, symbol in enumerate(symbols)}
        # What a symbol is worth is what its rule is worth and what the symbols in it are: x = Mx + y.
        mean = torch.zeros(len(symbols), len(symbols), dtype=torch.float64)
        own = torch.zeros(len(symbols), 2, dtype=torch.float64)
        for symbol, expansions in self.rules.items():
            i = place[symbol]
            for p, right in expansions:
                own[i, 0] -= p * math.log(p)
                for part in right:
                    if part in place:
                        mean[i, place[part]] += p
                    else:
                        own[i, 1] += p
        if torch.linalg.eigvals(mean).abs().max() >= 1:
            raise ValueError("sentences of this grammar have no end, in expectation")
        solved = torch.linalg.solve(torch.eye(len(symbols), dtype=torch.float64) - mean, own)
        entropy, length = solved[place[self.start]].tolist()
        return entropy, length

    @property
    def entropy(self) -> float:
        """Nats a token, :data:`END` being one: that of a sentence over its length, both expected."""
        entropy, length = self._moments
        return entropy / (length + 1)

    @property
    def best_perplexity(self) -> float:
        """What the true probabilities have on a long text."""
        return math.exp(self.entropy)

    def text(self, tokens: int, seed: int) -> tuple[list[str], float]:
        """Sentences of at least so many tokens in all, and the sum of −log p over them, in nats."""
        bounds = {s: list(accumulate(p for p, _ in e))[:-1] for s, e in self.rules.items()}
        chance = Random(seed).random
        text: list[str] = []
        surprise = 0.0
        while len(text) < tokens:
            stack = [END, self.start]
            while stack:
                symbol = stack.pop()
                if symbol in self.rules:
                    p, right = self.rules[symbol][bisect(bounds[symbol], chance())]
                    surprise -= math.log(p)
                    stack += reversed(right)
                else:
                    text.append(symbol)
        return text, surprise


# ------------------------------------------------------------------------------- the one that is used


def _stem(number: int) -> str:
    """A syllable or two that no other number has."""
    consonants, vowels = "bdfgklmprstvz", "aeiou"
    more, syllable = divmod(number, len(consonants) * len(vowels))
    spelt = consonants[syllable // len(vowels)] + vowels[syllable % len(vowels)]
    return spelt if not more else _stem(more - 1) + spelt


def _words(count: int, first: int, ending: str) -> tuple[tuple[float, Expansion], ...]:
    """Words of a kind: the r-th most frequent one with probability in proportion to 1/r (Zipf)."""
    weights = [1 / rank for rank in range(1, count + 1)]
    total = math.fsum(weights)
    return tuple((w / total, (_stem(first + i) + ending,)) for i, w in enumerate(weights))


def toy() -> Grammar:
    """The language of `gadam train lm-mini`.

    Subjects and verbs agree in number over whatever stands between them; nouns, verbs and adjectives are
    told apart by their endings, in which the numbers differ too.
    """
    rules: dict[str, tuple[tuple[float, Expansion], ...]] = {
        "S": ((0.6, ("NP.sg", "VP.sg")), (0.4, ("NP.pl", "VP.pl"))),
        "NP": ((0.6, ("NP.sg",)), (0.4, ("NP.pl",))),
        "Adjectives": ((0.7, ()), (0.3, ("Adjective", "Adjectives"))),
        "Adjective": _words(60, 0, "ig"),
        "Preposition": _words(8, 0, "ap"),
        "Name": _words(40, 20, "l"),
        "The.sg": ((0.6, ("the",)), (0.4, ("a",))),
        "The.pl": ((0.7, ("the",)), (0.3, ("some",))),
    }
    for number, (noun, verb) in {"sg": ("n", "t"), "pl": ("ns", "k")}.items():
        plain = ("The." + number, "Adjectives", "Noun." + number, "After." + number)
        rules |= {
            "NP." + number: ((0.75, plain), (0.25, ("Name",)))
            if number == "sg"
            else ((1.0, plain),),
            # Neither a preposition nor a relative clause can follow a noun phrase from outside it, so that
            # what follows a noun belongs to that noun: there is no second way to read a sentence.
            "After." + number: (
                (0.75, ()),
                (0.15, ("Preposition", "NP")),
                (0.1, ("who", "VP." + number)),
            ),
            "VP." + number: (
                (0.35, ("Sleeps." + number,)),
                (0.5, ("Sees." + number, "NP")),
                (0.15, ("Says." + number, "that", "S")),
            ),
            "Noun." + number: _words(120, 0, noun),
            "Sleeps." + number: _words(40, 0, verb),
            "Sees." + number: _words(60, 40, verb),
            "Says." + number: _words(10, 100, verb),
        }
    return Grammar(rules)
