"""Parse the fields of records, and refuse wrong ones with a sentence."""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, field, fields
from typing import Any, TypeAlias, TypeVar

from gadam.runs.files import Json, RunError, null_to_nan

__all__ = [
    "Parser",
    "Record",
    "WrongField",
    "between",
    "mapping_of",
    "number",
    "number_or_null",
    "one_of",
    "optional",
    "parse",
    "sequence_of",
    "text",
    "whole",
]

T = TypeVar("T")
Parser: TypeAlias = Callable[[Json], T]


@dataclass(frozen=True)
class Record:
    """Base class of records that newer versions may extend.

    Args:
        extra: Fields written by a newer version, kept as they are.
    """

    extra: Mapping[str, Json] = field(default_factory=dict, kw_only=True)


R = TypeVar("R", bound=Record)


class WrongField(Exception):
    """A field has the wrong type or value. The message says what was expected."""


def parse(cls: type[R], values: Json, parsers: Mapping[str, Parser[Any]]) -> R:
    """Build a record from plain data. Unknown fields are kept in :attr:`Record.extra`.

    Args:
        cls: The record's class.
        values: Plain data.
        parsers: By field. A parser raises :class:`WrongField`, or a complete error of its own.

    Raises:
        RunError: The data is not a JSON object, lacks a field, or has a wrong one.
    """
    if not isinstance(values, dict):
        raise RunError(f"A JSON object is needed, got {reprlib.repr(values)}.")
    required = {
        f.name for f in fields(cls) if f.default is MISSING and f.default_factory is MISSING
    }
    missing = [name for name in parsers if name in required and name not in values]
    if missing:
        raise RunError(f"It has no {' and no '.join(missing)}.")
    parsed = {}
    for name, parser in parsers.items():
        if name in values:
            try:
                parsed[name] = parser(values[name])
            except WrongField as error:
                got = reprlib.repr(values[name])
                raise RunError(f"{name} must be {error}, got {got}.") from None
    unknown = {name: value for name, value in values.items() if name not in parsers}
    return cls(**parsed, extra=unknown)


def text(value: Json) -> str:
    """Accept a string.

    Args:
        value: Plain data.
    """
    if not isinstance(value, str):
        raise WrongField("a string")
    return value


def whole(value: Json) -> int:
    """Accept a whole number.

    Args:
        value: Plain data.
    """
    if isinstance(value, bool) or not isinstance(value, int):
        raise WrongField("a whole number")
    return value


def between(lowest: int, highest: int) -> Parser[int]:
    """Accept a whole number within bounds.

    Args:
        lowest: The lower bound.
        highest: The upper bound.
    """

    def check(value: Json) -> int:
        if not lowest <= whole(value) <= highest:
            raise WrongField(f"a whole number from {lowest} to {highest}")
        return whole(value)

    return check


def number(value: Json) -> float:
    """Accept a number.

    Args:
        value: Plain data.
    """
    try:
        if not isinstance(value, bool) and isinstance(value, int | float):
            return float(value)
    except OverflowError:
        pass
    raise WrongField("a number")


def number_or_null(value: Json) -> float:
    """Accept a number, or null for one that JSON cannot represent: it becomes NaN.

    Args:
        value: Plain data.
    """
    return number(null_to_nan(value))


def optional(parser: Parser[T]) -> Parser[T | None]:
    """Accept null, or what another parser accepts.

    Args:
        parser: The other parser.
    """
    return lambda value: None if value is None else parser(value)


def one_of(*options: str) -> Parser[str]:
    """Accept one of some strings.

    Args:
        *options: The strings.
    """

    def choose(value: Json) -> str:
        if value not in options:
            raise WrongField(" or ".join(options))
        return str(value)

    return choose


def mapping_of(parser: Parser[T]) -> Parser[dict[str, T]]:
    """Accept a JSON object with values that another parser accepts.

    Args:
        parser: The other parser.
    """

    def build(values: Json) -> dict[str, T]:
        if not isinstance(values, dict):
            raise WrongField("a JSON object")
        try:
            return {str(name): parser(value) for name, value in values.items()}
        except WrongField as error:
            raise WrongField(f"a JSON object with each value {error}") from None

    return build


def sequence_of(parser: Parser[T]) -> Parser[tuple[T, ...]]:
    """Accept a list with items that another parser accepts.

    Args:
        parser: The other parser.
    """

    def build(values: Json) -> tuple[T, ...]:
        if not isinstance(values, list | tuple):
            raise WrongField("a list")
        try:
            return tuple(parser(value) for value in values)
        except WrongField as error:
            raise WrongField(f"a list with each item {error}") from None

    return build
