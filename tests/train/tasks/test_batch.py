"""Batches of any structure."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gadam.train.tasks import batch as batches_of


class Pair(NamedTuple):
    x: Any
    y: Any


def structures(rows: int) -> st.SearchStrategy[Any]:
    """Return batches with this many examples, nested in any way."""
    tensors = st.sampled_from([(), (1,), (2, 3)]).map(lambda shape: torch.randn(rows, *shape))
    return st.recursive(
        tensors,
        lambda inner: (
            st.lists(inner, min_size=1, max_size=3)
            | st.lists(inner, min_size=1, max_size=3).map(tuple)
            | st.dictionaries(st.sampled_from("abc"), inner, min_size=1)
            | st.builds(Pair, inner, inner)
        ),
        max_leaves=4,
    )


@given(st.data(), st.integers(1, 9), st.integers(1, 5))
def test_pieces_make_up_the_batch(data: st.DataObject, rows: int, count: int) -> None:
    batch = data.draw(structures(rows))
    pieces = batches_of.divided(batch, count)
    assert 1 <= len(pieces) <= count
    assert sum(share for _, share in pieces) == pytest.approx(1.0)
    for piece, share in pieces:
        assert type(piece) is type(batch)
        assert batches_of.size(piece) == pytest.approx(share * rows)
    assert batches_of.same(batches_of.concatenated([piece for piece, _ in pieces]), batch)


@given(st.data(), st.integers(1, 4))
def test_applying_a_function_keeps_the_structure(data: st.DataObject, rows: int) -> None:
    batch = data.draw(structures(rows))
    assert batches_of.same(batches_of.apply(torch.clone, batch), batch)
    assert not batches_of.same(batches_of.apply(lambda x: x + 1, batch), batch)
    assert batches_of.same(batches_of.moved(batch, torch.device("cpu")), batch)


def test_what_is_not_a_tensor_is_divided_by_example_or_kept() -> None:
    batch = {"x": torch.arange(4), "names": ["a", "b", "c", "d"], "scale": torch.tensor(2.0)}
    (first, _), (second, _) = batches_of.divided(batch, 2)
    assert (first["names"], second["names"]) == (["a", "b"], ["c", "d"])
    assert first["scale"] == second["scale"] == 2.0


def test_a_batch_that_cannot_be_divided_is_refused() -> None:
    with pytest.raises(ValueError, match="parts of 4 and 3 examples"):
        batches_of.divided((torch.zeros(4), torch.zeros(3)), 2)
    with pytest.raises(ValueError, match="at least one tensor"):
        batches_of.size({"names": ["a"]})
