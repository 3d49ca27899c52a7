"""The health of an average: what is measured, and what is called broken."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from gadam.average.health import Health, measure


def of(weights: list[Tensor], averages: list[Tensor], weight: float = 0.5) -> Health:
    values = dict(zip(weights, averages))
    return measure(weights, lambda p: p, lambda p: values[p], weight, samples=3, skipped=1)


def test_distance_is_relative_to_the_norm_of_the_weights():
    weights = [torch.tensor([3.0, 0.0]), torch.tensor([[4.0]])]
    averages = [torch.tensor([3.0, 1.0]), torch.tensor([[6.0]])]
    health = of(weights, averages)
    assert health.distance == pytest.approx(math.sqrt(5) / 5)
    assert (health.samples, health.skipped, health.moving, health.moves) == (3, 1, 1.0, True)
    assert (health.finite, health.weights_finite, health.problems) == (True, True, ())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64, torch.complex64])
def test_all_types_are_measured(dtype):
    weights, average = torch.full((4,), 2.0, dtype=dtype), torch.full((4,), 1.0, dtype=dtype)
    assert of([weights], [average]).distance == pytest.approx(0.5)
    # Norms of half-precision weights do not overflow.
    big = torch.full((1000,), 6e4, dtype=dtype)
    assert of([big], [big]).distance == 0.0


def test_moving_counts_the_entries_that_the_next_sample_changes():
    weights = torch.tensor([1.0, 1.0 + 2**-7, 2.0, 0.0], dtype=torch.bfloat16)
    average = torch.tensor([1.0, 1.0, 1.0, 0.0], dtype=torch.bfloat16)
    health = of([weights], [average], weight=0.1)
    assert health.moving == 0.5  # of two entries that differ, one is too close
    assert of([average], [average]).moving == 1.0  # nothing to do is not frozen


def test_empty_and_zero_weights_are_measured():
    assert of([torch.zeros(0)], [torch.zeros(0)]).distance == 0.0
    assert of([torch.zeros(2)], [torch.zeros(2)]).distance == 0.0
    assert of([torch.zeros(2)], [torch.ones(2)]).distance == math.inf
    assert of([], []).problems == ()


def test_what_is_broken_is_named():
    one = torch.ones(8)
    assert "is far from the weights" in of([one], [4 * one]).problems[0]
    assert of([one], [2.9 * one]).problems == ()  # within 2 norms
    assert "The average is not finite" in of([one], [one * math.nan]).problems[0]
    assert "training has diverged" in of([one * math.inf], [one]).problems[0]
    frozen = of([1.1 * one.bfloat16()], [one.bfloat16()], weight=1e-4)
    assert not frozen.moves
    assert "stands still" in frozen.problems[0]
    # An average next to the weights may stand still: nothing is lost.
    assert of([one + 2**-15], [one], weight=1e-4).problems == ()
    assert Health(90, 10, 0.1, 1.0, True, True).problems == ()
    assert "10 of 99 samples were not finite" in Health(89, 10, 0.1, 1.0, True, True).problems[0]
    assert Health(0, 9, math.nan, math.nan, True, True).problems == ()
    assert "12 of 12 samples" in Health(0, 12, math.nan, math.nan, True, True).problems[0]
