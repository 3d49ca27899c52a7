"""Records of epochs and runs: round trips, metrics, and what they refuse."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gadam.runs.files import RunError, to_json
from gadam.runs.recipe import Average, Optimizer, Recipe, RecipeError
from gadam.runs.record import EpochRecord, RunHeader, RunResult

NAMES = st.text(min_size=1, max_size=8)
NUMBERS = st.floats(allow_infinity=False)  # with NaN
COUNTS = st.integers(0, 10**9)
BY_NAME = st.dictionaries(NAMES, NUMBERS, max_size=3)
METRICS = st.dictionaries(st.sampled_from(["validation", "test"]), BY_NAME, max_size=2)
STRINGS = st.dictionaries(NAMES, st.text(max_size=8), max_size=3)
EXTRA = st.dictionaries(
    NAMES.map(lambda name: f"new {name}"),
    st.none() | st.integers() | st.text(max_size=5) | st.lists(st.none(), max_size=2),
    max_size=2,
)

EPOCHS = st.builds(
    EpochRecord,
    epoch=st.integers(1, 10**6),
    lr=st.floats(allow_nan=False, allow_infinity=False),
    train_loss=NUMBERS,
    samples=COUNTS,
    iterate=st.none() | METRICS,
    average=st.none() | METRICS,
    seconds=BY_NAME,
    norms=BY_NAME,
    extra=EXTRA,
)
RESULTS = st.builds(
    RunResult,
    status=st.sampled_from(["done", "diverged"]),
    epochs=COUNTS,
    iterate=METRICS,
    average=st.none() | METRICS,
    samples=COUNTS,
    parameters=st.none() | COUNTS,
    seconds=BY_NAME,
    peak_memory=st.none() | COUNTS,
    extra=EXTRA,
)
HEADERS = st.builds(
    RunHeader,
    label=st.text(max_size=20),
    recipe=st.sampled_from(
        [
            Recipe("r", "vgg-mini"),
            Recipe("r", "vgg-mini", optimizer=Optimizer("adamw", 0.01), average=Average(3)),
        ]
    ),
    seed=COUNTS,
    threads=st.integers(1, 64),
    versions=STRINGS,
    machine=STRINGS,
    extra=EXTRA,
)

EPOCH = EpochRecord(
    3,
    lr=0.1,
    train_loss=0.5,
    samples=2,
    iterate={"test": {"accuracy": 80.0, "loss": math.nan}, "validation": {"accuracy": 79.0}},
    average={"test": {"accuracy": 82.0}},
    seconds={"train": 1.0},
)
RESULT = RunResult("done", 3, {"test": {"accuracy": 80.0}}, seconds={"train": 2.0, "refresh": 1.0})
HEADER = RunHeader("Gadam", Recipe("r", "vgg-mini"), seed=1, threads=2)


# ------------------------------------------------------------------------------------ plain data


@given(st.one_of(EPOCHS, RESULTS, HEADERS))
def test_survives_json(record):
    text = to_json(record.to_dict())
    again = type(record).from_dict(json.loads(text))
    assert repr(again) == repr(record)  # repr, because NaN differs from itself
    assert to_json(again.to_dict()) == text


@given(EPOCHS)
def test_an_epoch_is_one_line(record):
    assert "\n" not in to_json(record.to_dict())


def test_points_that_were_not_evaluated_are_left_out():
    plain = EpochRecord(1, 0.1, 0.5).to_dict()
    assert plain == {"epoch": 1, "lr": 0.1, "train_loss": 0.5, "samples": 0, "seconds": {}}


def test_numbers_that_json_cannot_represent_become_null():
    plain = json.loads(to_json(replace(EPOCH, train_loss=math.inf).to_dict()))
    assert plain["train_loss"] is None
    assert plain["iterate"]["test"]["loss"] is None
    assert math.isnan(EpochRecord.from_dict(plain).train_loss)


@pytest.mark.parametrize("record", [EPOCH, RESULT, HEADER])
def test_unknown_fields_of_a_newer_version_are_written_back(record):
    values = {**record.to_dict(), "tomorrow": {"a": [1, None]}}
    again = type(record).from_dict(values)
    assert again.extra == {"tomorrow": {"a": [1, None]}}
    assert again.to_dict() == values
    assert replace(again, extra={}) == type(record).from_dict(record.to_dict())


@pytest.mark.parametrize(
    ("record", "required"),
    [
        (EPOCH, ["epoch", "lr", "train_loss"]),
        (RESULT, ["status", "epochs", "iterate"]),
        (HEADER, ["label", "recipe", "seed", "threads"]),
    ],
)
def test_missing_fields_are_named(record, required):
    full = record.to_dict()
    for name in full:
        values = {key: value for key, value in full.items() if key != name}
        if name in required:
            with pytest.raises(RunError, match=rf"^It has no {name}\.$"):
                type(record).from_dict(values)
        else:
            type(record).from_dict(values)


@pytest.mark.parametrize(
    ("record", "name", "wrong", "sentence"),
    [
        (EPOCH, "epoch", "3", "epoch must be a whole number, got '3'."),
        (EPOCH, "epoch", 2.5, "epoch must be a whole number, got 2.5."),
        (EPOCH, "epoch", True, "epoch must be a whole number, got True."),
        (EPOCH, "epoch", math.inf, "epoch must be a whole number, got inf."),
        (EPOCH, "lr", None, "lr must be a number, got None."),
        (EPOCH, "train_loss", "low", "train_loss must be a number, got 'low'."),
        (EPOCH, "iterate", 3, "iterate must be a JSON object, got 3."),
        (EPOCH, "average", {"test": [1]}, "average must be a JSON object"),
        (EPOCH, "seconds", {"train": "1"}, "seconds must be a JSON object with each value a numb"),
        (RESULT, "status", "gone", "status must be done or diverged, got 'gone'."),
        (RESULT, "iterate", None, "iterate must be a JSON object, got None."),
        (RESULT, "parameters", 1.5, "parameters must be a whole number, got 1.5."),
        (HEADER, "label", 3, "label must be a string, got 3."),
        (HEADER, "seed", None, "seed must be a whole number, got None."),
        (HEADER, "machine", [], "machine must be a JSON object, got []."),
    ],
)
def test_wrong_fields_are_refused_with_a_sentence(record, name, wrong, sentence):
    with pytest.raises(RunError) as refused:
        type(record).from_dict({**record.to_dict(), name: wrong})
    assert str(refused.value).startswith(sentence)


@pytest.mark.parametrize("values", [None, 3, "epoch", [], ["epoch", "lr", "train_loss"]])
@pytest.mark.parametrize("kind", [EpochRecord, RunResult, RunHeader])
def test_data_that_is_not_an_object_is_refused(kind, values):
    with pytest.raises(RunError, match="A JSON object is needed"):
        kind.from_dict(values)


@pytest.mark.parametrize("recipe", [3, [], {}, {"x": 1}, {"name": "r", "model": "m", "epochs": 0}])
def test_a_header_with_a_wrong_recipe_is_refused(recipe):
    with pytest.raises(RecipeError):
        RunHeader.from_dict({**HEADER.to_dict(), "recipe": recipe})


# --------------------------------------------------------------------------------------- metrics


@pytest.mark.parametrize(
    ("name", "point", "split", "expected"),
    [
        ("accuracy", "iterate", "test", 80.0),
        ("accuracy", "average", "test", 82.0),
        ("accuracy", "iterate", "validation", 79.0),
        ("accuracy", "average", "validation", None),
        ("loss", "iterate", "test", None),  # NaN
        ("perplexity", "iterate", "test", None),
    ],
)
def test_metric(name, point, split, expected):
    assert EPOCH.metric(name, point, split) == expected
    if split == "test":
        assert EPOCH.metric(name, point) == expected


def test_no_metric_of_a_point_that_was_not_evaluated():
    record = EpochRecord(1, 0.1, 0.5)
    assert record.metric("accuracy", "iterate") is None
    assert record.metric("accuracy", "average") is None
    assert record.used is None


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_metric_that_is_not_finite_is_none(value):
    result = RunResult("diverged", 3, {"test": {"perplexity": value}})
    assert result.metric("perplexity", "iterate") is None


@given(RESULTS)
def test_metrics_are_the_finite_numbers_of_the_record(result):
    nested: dict[str, Any] = {"iterate": result.iterate, "average": result.average or {}}
    for point, splits in nested.items():
        for split, metrics in splits.items():
            for name, value in metrics.items():
                expected = value if math.isfinite(value) else None
                assert result.metric(name, point, split) == expected


def test_the_average_is_used_if_there_is_one():
    assert (EPOCH.used_point, EPOCH.used) == ("average", EPOCH.average)
    without = replace(EPOCH, average=None)
    assert (without.used_point, without.used) == ("iterate", EPOCH.iterate)


def test_status_and_time_of_a_result():
    assert RESULT.total_seconds == 3.0
    assert not RESULT.diverged
    assert replace(RESULT, status="diverged").diverged
