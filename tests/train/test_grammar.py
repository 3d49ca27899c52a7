"""The made-up language: its entropy is what it is said to be."""

from __future__ import annotations

import math
from collections import Counter
from functools import cache

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gadam.train.grammar import END, Grammar, toy


def derivations(language: Grammar, sentence: tuple[str, ...]) -> tuple[int, float]:
    """How many there are, and the sum of their probabilities: by trying all of them."""

    @cache
    def ends(symbol: str, start: int) -> dict[int, tuple[int, float]]:
        """Where a symbol that starts here can end: how many ways, and how probable."""
        if symbol not in language.rules:
            fits = start < len(sentence) and sentence[start] == symbol
            return {start + 1: (1, 1.0)} if fits else {}
        found: dict[int, tuple[int, float]] = {}
        for p, right in language.rules[symbol]:
            reached = {start: (1, p)}
            for part in right:
                further: dict[int, tuple[int, float]] = {}
                for place, (ways, chance) in reached.items():
                    for end, (more, likely) in ends(part, place).items():
                        a, b = further.get(end, (0, 0.0))
                        further[end] = (a + ways * more, b + chance * likely)
                reached = further
            for end, (ways, chance) in reached.items():
                a, b = found.get(end, (0, 0.0))
                found[end] = (a + ways, b + chance)
        return found

    return ends(language.start, 0).get(len(sentence), (0, 0.0))


def sentences(words: list[str]) -> list[tuple[str, ...]]:
    found: list[tuple[str, ...]] = []
    last: list[str] = []
    for word in words:
        if word == END:
            found.append(tuple(last))
            last = []
        else:
            last.append(word)
    return found


@given(st.floats(0.05, 0.95))
def test_the_entropy_of_a_geometric_length(p):
    """S → a S with probability p, else a: as many words as tosses of a coin until it falls."""
    language = Grammar({"S": ((1 - p, ("a",)), (p, ("a", "S")))})
    tosses = 1 / (1 - p)
    coin = -p * math.log(p) - (1 - p) * math.log(1 - p)
    assert language.entropy == pytest.approx(tosses * coin / (tosses + 1), rel=1e-9)
    assert language.best_perplexity == pytest.approx(math.exp(language.entropy))


@given(st.lists(st.floats(0.1, 1.0), min_size=2, max_size=6))
def test_the_entropy_of_words_drawn_at_random(weights):
    total = math.fsum(weights)
    rules = tuple((w / total, (f"w{i}", f"v{i}")) for i, w in enumerate(weights))
    expected = -sum(p * math.log(p) for p, _ in rules) / 3
    assert Grammar({"S": rules}).entropy == pytest.approx(expected, rel=1e-9)


def test_an_endless_grammar_is_refused():
    endless = Grammar({"S": ((0.5, ("a",)), (0.5, ("S", "S")))})
    with pytest.raises(ValueError, match="no end"):
        _ = endless.entropy
    with pytest.raises(ValueError, match="sum 1"):
        Grammar({"S": ((0.5, ("a",)), (0.6, ("b",)))})


def test_no_sentence_of_the_toy_language_has_two_readings():
    language = toy()
    drawn = sentences(language.text(6_000, seed=3)[0])
    assert max(map(len, drawn)) > 25
    for sentence in set(drawn):
        ways, _ = derivations(language, sentence)
        assert ways == 1, sentence


def test_the_entropy_is_that_of_the_text():
    """−log p of each sentence, from all of its derivations, has the mean that was solved for."""
    language = toy()
    surprise = [
        (-math.log(derivations(language, s)[1]), len(s) + 1)
        for s in sentences(language.text(20_000, seed=4)[0])
    ]
    # A ratio of means: its error is that of (surprise − entropy · length), which has mean zero.
    residuals = [a - language.entropy * b for a, b in surprise]
    mean = math.fsum(residuals) / len(residuals)
    error = math.sqrt(math.fsum((r - mean) ** 2 for r in residuals)) / len(residuals)
    assert abs(mean) < 4 * error
    assert error < 0.02 * language.entropy * 8  # which could tell it from others


def test_each_word_is_of_one_kind():
    kinds = Counter(
        word
        for symbol, expansions in toy().rules.items()
        for word in {w for _, right in expansions for w in right if w not in toy().rules}
        if not symbol.startswith(("VP", "After"))
    )
    assert [word for word, count in kinds.items() if count > 1] == ["the"]


def test_a_text_comes_with_its_own_surprise():
    """The sum of −log p of its sentences, from all of their derivations."""
    language = toy()
    words, surprise = language.text(3_000, seed=5)
    assert words[-1] == END
    assert len(words) >= 3_000
    expected = -math.fsum(math.log(derivations(language, s)[1]) for s in sentences(words))
    assert surprise == pytest.approx(expected, rel=1e-9)


def test_the_text_is_a_function_of_the_seed():
    one, again, other = (toy().text(200, seed=seed)[0] for seed in (1, 1, 2))
    assert one == again
    assert one != other
    assert set(toy().text(5_000, seed=1)[0]) <= {END, *toy().words}
