"""Parsers of fields: what they accept, and the sentence with which they refuse the rest."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import pytest

from gadam.runs.fields import (
    Record,
    WrongField,
    mapping_of,
    number,
    number_or_null,
    one_of,
    optional,
    parse,
    sequence_of,
    text,
    whole,
)
from gadam.runs.files import RunError


@dataclass(frozen=True)
class Example(Record):
    count: int
    name: str
    sizes: Mapping[str, float] = field(default_factory=dict)


PARSERS = {"count": whole, "name": text, "sizes": mapping_of(number_or_null)}


@pytest.mark.parametrize(
    ("parser", "value", "expected"),
    [
        (text, "a", "a"),
        (whole, 3, 3),
        (number, 3, 3.0),
        (number, 0.5, 0.5),
        (number_or_null, 0.5, 0.5),
        (optional(whole), None, None),
        (optional(whole), 2, 2),
        (one_of("a", "b"), "b", "b"),
        (mapping_of(whole), {"x": 1}, {"x": 1}),
        (sequence_of(text), ["a", "b"], ("a", "b")),
        (sequence_of(text), (), ()),
    ],
)
def test_right_values_are_accepted(parser, value, expected):
    assert parser(value) == expected
    assert type(parser(value)) is type(expected)


def test_null_becomes_nan():
    assert math.isnan(number_or_null(None))


@pytest.mark.parametrize(
    ("parser", "value", "expected"),
    [
        (text, 3, "a string"),
        (text, None, "a string"),
        (whole, 3.0, "a whole number"),
        (whole, True, "a whole number"),
        (whole, "3", "a whole number"),
        (whole, math.inf, "a whole number"),
        (number, "0.5", "a number"),
        (number, False, "a number"),
        (number, None, "a number"),
        (number, 10**400, "a number"),
        (one_of("a", "b"), "c", "a or b"),
        (one_of("a", "b"), ["a"], "a or b"),
        (mapping_of(whole), [], "a JSON object"),
        (mapping_of(whole), {"x": "1"}, "a JSON object with each value a whole number"),
        (sequence_of(text), "ab", "a list"),
        (sequence_of(text), [1], "a list with each item a string"),
    ],
)
def test_wrong_values_are_refused(parser, value, expected):
    with pytest.raises(WrongField) as refused:
        parser(value)
    assert str(refused.value) == expected


def test_unknown_fields_are_kept():
    found = parse(Example, {"count": 1, "name": "a", "new": [None]}, PARSERS)
    assert found == Example(1, "a", extra={"new": [None]})


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({}, "It has no count and no name."),
        ({"count": 1}, "It has no name."),
        ({"count": "1", "name": "a"}, "count must be a whole number, got '1'."),
        ([1], "A JSON object is needed, got [1]."),
        (None, "A JSON object is needed, got None."),
    ],
)
def test_wrong_records_are_refused_with_a_sentence(values, sentence):
    with pytest.raises(RunError) as refused:
        parse(Example, values, PARSERS)
    assert str(refused.value) == sentence


def test_long_values_are_shortened():
    with pytest.raises(RunError) as refused:
        parse(Example, {"count": "x" * 10_000, "name": "a"}, PARSERS)
    assert len(str(refused.value)) < 100
