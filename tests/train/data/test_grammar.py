"""The entropy of a grammar, and the toy language."""

from __future__ import annotations

import math
from collections import Counter
from functools import cache

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gadam.train.data.grammar import END, Grammar, toy


def derivations(language: Grammar, sentence: tuple[str, ...]) -> tuple[int, float]:
    """Return the number of derivations and their total probability, by exhaustive search."""

    @cache
    def ends(symbol: str, start: int) -> dict[int, tuple[int, float]]:
        """Return where the symbol can end: the number of derivations and their probability."""
        if symbol not in language.rules:
            fits = start < len(sentence) and sentence[start] == symbol
            return {start + 1: (1, 1.0)} if fits else {}
        found: dict[int, tuple[int, float]] = {}
        for p, right in language.rules[symbol]:
            reached = {start: (1, p)}
            for inner in right:
                further: dict[int, tuple[int, float]] = {}
                for place, (ways, chance) in reached.items():
                    for end, (more, likely) in ends(inner, place).items():
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
def test_entropy_of_a_geometric_length(p):
    """S → a S with probability p, else a: the number of words is geometric."""
    language = Grammar({"S": ((1 - p, ("a",)), (p, ("a", "S")))})
    tosses = 1 / (1 - p)
    coin = -p * math.log(p) - (1 - p) * math.log(1 - p)
    assert language.entropy == pytest.approx(tosses * coin / (tosses + 1), rel=1e-9)
    assert language.best_perplexity == pytest.approx(math.exp(language.entropy))


@given(st.lists(st.floats(0.1, 1.0), min_size=2, max_size=6))
def test_entropy_of_random_words(weights):
    total = math.fsum(weights)
    rules = tuple((w / total, (f"w{i}", f"v{i}")) for i, w in enumerate(weights))
    expected = -sum(p * math.log(p) for p, _ in rules) / 3
    assert Grammar({"S": rules}).entropy == pytest.approx(expected, rel=1e-9)


def test_invalid_grammar_raises():
    endless = Grammar({"S": ((0.5, ("a",)), (0.5, ("S", "S")))})
    with pytest.raises(ValueError, match="infinite expected length"):
        _ = endless.entropy
    with pytest.raises(ValueError, match="sum to 1"):
        Grammar({"S": ((0.5, ("a",)), (0.6, ("b",)))})


def test_sentences_of_the_toy_language_have_one_derivation():
    language = toy()
    drawn = sentences(language.text(6_000, seed=3)[0])
    assert max(map(len, drawn)) > 25
    for sentence in set(drawn):
        ways, _ = derivations(language, sentence)
        assert ways == 1, sentence


def test_entropy_matches_the_text():
    """The mean −log p of sentences, from all derivations, matches the linear system."""
    language = toy()
    values = [
        (-math.log(derivations(language, s)[1]), len(s) + 1)
        for s in sentences(language.text(20_000, seed=4)[0])
    ]
    # For a ratio of means, (−log p − entropy · length) has mean zero and gives the error.
    residuals = [a - language.entropy * b for a, b in values]
    mean = math.fsum(residuals) / len(residuals)
    error = math.sqrt(math.fsum((r - mean) ** 2 for r in residuals)) / len(residuals)
    assert abs(mean) < 4 * error
    assert error < 0.02 * language.entropy * 8  # precise enough to reject other values


def test_each_word_belongs_to_one_kind():
    kinds = Counter(
        word
        for symbol, expansions in toy().rules.items()
        for word in {w for _, right in expansions for w in right if w not in toy().rules}
        if not symbol.startswith(("VP", "After"))
    )
    assert [word for word, count in kinds.items() if count > 1] == ["the"]


def test_text_comes_with_its_negative_log_likelihood():
    """It is the sum of −log p of the sentences, from all derivations."""
    language = toy()
    words, negative_log_likelihood = language.text(3_000, seed=5)
    assert words[-1] == END
    assert len(words) >= 3_000
    expected = -math.fsum(math.log(derivations(language, s)[1]) for s in sentences(words))
    assert negative_log_likelihood == pytest.approx(expected, rel=1e-9)


def test_text_is_a_function_of_the_seed():
    one, again, other = (toy().text(200, seed=seed)[0] for seed in (1, 1, 2))
    assert one == again
    assert one != other
    assert set(toy().text(5_000, seed=1)[0]) <= {END, *toy().words}
