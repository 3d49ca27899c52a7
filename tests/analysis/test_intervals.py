"""Check the confidence intervals of means over few samples by simulation."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from gadam.analysis import Estimate, trace_and_frobenius
from gadam.analysis.gradient_noise import NoiseSums
from gadam.analysis.intervals import confidence_interval, student_quantile


@given(st.integers(1, 3000), st.floats(0.01, 0.999))
def test_quantiles_equal_those_of_scipy(freedom, confidence):
    expected = stats.t.ppf((1 + confidence) / 2, freedom)
    assert student_quantile(freedom, confidence) == pytest.approx(expected, rel=2e-3)
    if freedom <= 1000:
        assert student_quantile(freedom, confidence) == pytest.approx(expected, rel=1e-9)


class Dense:
    """A matrix with eigenvalues 1/√i in a random basis, as wide as the spectra of networks."""

    def __init__(self, dimension: int, exponent: float) -> None:
        random = np.random.default_rng(0)
        basis = np.linalg.qr(random.standard_normal((dimension, dimension)))[0]
        self.eigenvalues = np.arange(1.0, dimension + 1) ** -exponent
        self.matrix = torch.tensor(basis * self.eigenvalues @ basis.T)
        self.dimension = dimension

    def __matmul__(self, vector: torch.Tensor) -> torch.Tensor:
        return self.matrix @ vector


@pytest.mark.parametrize("probes", [4, 6])
def test_few_probes_cover_as_often_as_stated(probes):
    matrix = Dense(100, 0.5)
    true = {"trace": matrix.eigenvalues.sum(), "norm": (matrix.eigenvalues**2).sum()}
    covered = {"trace": 0, "norm": 0, "two errors": 0}
    repetitions = 1500
    for seed in range(repetitions):
        found = dict(zip(true, trace_and_frobenius(matrix, probes=probes, seed=seed)))
        for name, estimate in found.items():
            low, high = estimate.interval()
            covered[name] += low <= true[name] <= high
        covered["two errors"] += (
            abs(found["trace"].value - true["trace"]) <= 2 * found["trace"].error
        )
    share = {name: count / repetitions for name, count in covered.items()}
    assert 0.925 < share["trace"] < 0.975
    assert 0.915 < share["norm"] < 0.975
    assert share["two errors"] < 0.9  # which is why they are not the interval


@pytest.mark.parametrize("batches", [3, 4, 8])
def test_few_batches_cover_as_often_as_stated(batches):
    random = torch.Generator().manual_seed(0)
    spread = torch.arange(1.0, 61.0, dtype=torch.float64) ** -0.25
    true, repetitions, covered, errors = float(spread.square().sum()), 1500, 0, []
    traces = []
    for _ in range(repetitions):
        gradients = spread * torch.randn(batches, 60, generator=random, dtype=torch.float64)
        sums = NoiseSums(gradients.mean(0))
        sums.add(gradients, 1)
        noise = sums.result(exact=False)
        low, high = noise.interval()
        covered += low <= true <= high
        errors.append(noise.error**2)
        traces.append(noise.trace)
    assert covered / repetitions > 0.93
    assert np.mean(errors) == pytest.approx(np.var(traces), rel=0.15)  # unbiased


def test_two_batches_say_nothing_about_their_error():
    sums = NoiseSums(torch.zeros(2))
    sums.add(torch.tensor([[1.0, 0.0], [-1.0, 0.0]]), 1)
    noise = sums.result(exact=False)
    assert math.isnan(noise.error)
    assert noise.interval() == (0.0, math.inf)


def test_interval_of_an_exact_value_is_the_value():
    assert Estimate(3.0, 0.0).interval() == (3.0, 3.0)
    assert confidence_interval(3.0, 1.0, 0) == (-math.inf, math.inf)


@pytest.mark.parametrize(("freedom", "confidence"), [(0, 0.95), (3, 1.0)])
def test_invalid_arguments_raise(freedom, confidence):
    with pytest.raises(ValueError, match="freedom must be at least 1"):
        student_quantile(freedom, confidence)
