"""A small synthetic language with a known best possible perplexity.

Sentences are drawn from a probabilistic context-free grammar with number agreement, relative
clauses and nested clauses. No sentence has two derivations. So the entropy of the text is the
entropy of the derivations, which solves a linear system. No predictor can do better.

>>> language = Grammar({"S": ((0.5, ("a",)), (0.5, ("b", "S")))})
>>> round(language.best_perplexity, 12)  # "bba<eos>a<eos>…": one fair coin flip per word
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
    """A probabilistic context-free grammar. A text is sentences, each followed by :data:`END`.

    Args:
        rules: The expansions of each symbol, with their probabilities. A symbol without expansions
            is a word. :attr:`best_perplexity` is valid only if no sentence has two derivations.
        start: The symbol of a sentence.

    Raises:
        ValueError: The probabilities of a symbol are not positive or do not sum to 1.
    """

    rules: Mapping[str, tuple[tuple[float, Expansion], ...]]
    start: str = "S"

    def __post_init__(self) -> None:
        for symbol, expansions in self.rules.items():
            total = math.fsum(p for p, _ in expansions)
            if min(p for p, _ in expansions) <= 0 or not math.isclose(total, 1.0):
                raise ValueError(f"The probabilities of {symbol!r} must be positive and sum to 1.")

    @property
    def words(self) -> list[str]:
        """All words, without :data:`END`."""
        used = (s for expansions in self.rules.values() for _, right in expansions for s in right)
        return list(dict.fromkeys(symbol for symbol in used if symbol not in self.rules))

    @cached_property
    def _moments(self) -> tuple[float, float]:
        """The expected entropy (nats) and number of words of a sentence."""
        symbols = list(self.rules)
        place = {symbol: i for i, symbol in enumerate(symbols)}
        # The expected value of a symbol is that of its rule plus those of the symbols in it:
        # x = Mx + y.
        mean = torch.zeros(len(symbols), len(symbols), dtype=torch.float64)
        own = torch.zeros(len(symbols), 2, dtype=torch.float64)
        for symbol, expansions in self.rules.items():
            i = place[symbol]
            for p, right in expansions:
                own[i, 0] -= p * math.log(p)
                for inner in right:
                    if inner in place:
                        mean[i, place[inner]] += p
                    else:
                        own[i, 1] += p
        if torch.linalg.eigvals(mean).abs().max() >= 1:
            raise ValueError("Sentences of this grammar have infinite expected length.")
        solved = torch.linalg.solve(torch.eye(len(symbols), dtype=torch.float64) - mean, own)
        entropy, length = solved[place[self.start]].tolist()
        return entropy, length

    @property
    def entropy(self) -> float:
        """Nats per token, :data:`END` included: a sentence's expected entropy over its length."""
        entropy, length = self._moments
        return entropy / (length + 1)

    @property
    def best_perplexity(self) -> float:
        """The perplexity of the true probabilities on a long text."""
        return math.exp(self.entropy)

    def text(self, tokens: int, seed: int) -> tuple[list[str], float]:
        """Draw whole sentences until the text is long enough.

        Args:
            tokens: The minimum number of tokens.
            seed: Determines the text.

        Returns:
            The tokens, and the sum of −log p of the sentences, in nats.
        """
        bounds = {s: list(accumulate(p for p, _ in e))[:-1] for s, e in self.rules.items()}
        chance = Random(seed).random
        text: list[str] = []
        negative_log_likelihood = 0.0
        while len(text) < tokens:
            stack = [END, self.start]
            while stack:
                symbol = stack.pop()
                if symbol in self.rules:
                    p, right = self.rules[symbol][bisect(bounds[symbol], chance())]
                    negative_log_likelihood -= math.log(p)
                    stack += reversed(right)
                else:
                    text.append(symbol)
        return text, negative_log_likelihood


# ------------------------------------------------------------------------------ the toy language


def _stem(number: int) -> str:
    """Return one or more syllables, different for every number."""
    consonants, vowels = "bdfgklmprstvz", "aeiou"
    more, syllable = divmod(number, len(consonants) * len(vowels))
    spelled = consonants[syllable // len(vowels)] + vowels[syllable % len(vowels)]
    return spelled if not more else _stem(more - 1) + spelled


def _words(count: int, first: int, ending: str) -> tuple[tuple[float, Expansion], ...]:
    """Return words of one kind. The r-th has a probability proportional to 1/r (Zipf's law)."""
    weights = [1 / rank for rank in range(1, count + 1)]
    total = math.fsum(weights)
    return tuple((w / total, (_stem(first + i) + ending,)) for i, w in enumerate(weights))


def toy() -> Grammar:
    """Return the grammar of toy-language, the text of `gadam train lm-mini`.

    Subject and verb agree in number, whatever is between them. Endings mark nouns, verbs and
    adjectives, and singular and plural.
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
            # Only a noun's own phrase can continue with a preposition or a relative clause. So what
            # follows a noun belongs to that noun, and each sentence has one reading.
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
