from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gadam.checkpoints import CheckpointError, relative_weights
from gadam.checkpoints.weighting import Shape

FACTORS = {
    "1-sqrt": lambda t: 1 - math.sqrt(t),
    "cosine": lambda t: (1 + math.cos(math.pi * t)) / 2,
    "linear": lambda t: 1 - t,
}


@pytest.mark.parametrize("shape", FACTORS)
def test_wsm_equals_sgd_with_a_decayed_learning_rate_on_the_same_gradients(shape: Shape):
    every, k, lr = 5, 6, 0.1
    gradients = torch.randn(k, every, 3, dtype=torch.float64)
    start = torch.randn(3, dtype=torch.float64)
    checkpoints, point = [start], start
    decayed = start
    for i, interval in enumerate(gradients, 1):
        factor = FACTORS[shape](i / (k + 1))
        for gradient in interval:
            point = point - lr * gradient
            decayed = decayed - factor * lr * gradient
        checkpoints.append(point)
    weights = relative_weights("wsm", k + 1, shape=shape)
    merged = sum(w * c for w, c in zip(weights, checkpoints))
    assert torch.is_tensor(merged)
    torch.testing.assert_close(merged, decayed, rtol=1e-12, atol=1e-12)


@given(
    count=st.integers(2, 50),
    gaps=st.lists(st.integers(1, 1000), min_size=49, max_size=49),
    shape=st.sampled_from(sorted(FACTORS)),
)
def test_wsm_weights_are_a_distribution_for_any_spacing(count, gaps, shape):
    steps = [sum(gaps[:i]) for i in range(count)]
    weights = relative_weights("wsm", count, steps=steps, shape=shape)
    assert min(weights) > 0
    assert sum(weights) == pytest.approx(1)


def test_the_linear_decay_of_evenly_spaced_checkpoints_is_the_mean():
    weights = relative_weights("wsm", 5, steps=[100, 200, 300, 400, 500], shape="linear")
    assert weights == pytest.approx([0.2] * 5)


def test_a_checkpoint_after_a_longer_interval_has_a_larger_weight_in_a_linear_decay():
    weights = relative_weights("wsm", 4, steps=[0, 10, 20, 60], shape="linear")
    assert weights == pytest.approx([0.125, 0.125, 0.5, 0.25])  # t = 0, 1/8, 1/4, 3/4


def test_ema_equals_the_recursion_without_bias():
    values, decay = [3.0, -1.0, 4.0, 1.0], 0.7
    total = norm = 0.0
    for value in values:
        total = decay * total + (1 - decay) * value
        norm = decay * norm + (1 - decay)
    weights = relative_weights("ema", 4, decay=decay)
    mean = sum(w * v for w, v in zip(weights, values)) / sum(weights)
    assert mean == pytest.approx(total / norm)


def test_the_default_decay_halves_the_weight_every_fifth_of_the_checkpoints():
    weights = relative_weights("ema", 20)
    assert weights[-5] == pytest.approx(weights[-1] / 2)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"weighting": "maen"}, "Did you mean 'mean'?"),
        ({"weighting": "ema", "decay": 1.0}, "between 0 and 1, got 1.0"),
        ({"weighting": "mean", "decay": 0.5}, "only to the weights ema, not to mean"),
        ({"weighting": "wsm", "shape": "step"}, "shape must be 1-sqrt, cosine, linear"),
        ({"weighting": [1, 2]}, "2 weights for 3 checkpoints"),
        ({"weighting": [1, -2, 3]}, "non-negative"),
        ({"weighting": [0, 0, 0]}, "not all zero"),
    ],
)
def test_invalid_weights(arguments, message):
    with pytest.raises(CheckpointError) as caught:
        relative_weights(count=3, **arguments)
    assert message in str(caught.value)
