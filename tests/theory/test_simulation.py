"""Tests of the simulators: they agree with the predictions, by z-score."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gadam import theory
from gadam.theory import Quadratic, Segment, Spectrum

REPLICAS = 4000


def z_of_mean(samples: np.ndarray, expected: np.ndarray) -> np.ndarray:
    error = samples.std(0, ddof=1) / np.sqrt(len(samples))
    return (samples.mean(0) - expected) / error


def z_of_variance(samples: np.ndarray, mean: np.ndarray, variance: np.ndarray) -> np.ndarray:
    squares = (samples - mean) ** 2
    return z_of_mean(squares, variance)


def agree(samples, moments: theory.Moments, sigmas: float = 5.0) -> None:
    """Compare means and variances per direction, the distance and the loss."""
    counts = moments.model.spectrum.counts.astype(int)
    mean, variance = np.repeat(moments.mean, counts), np.repeat(moments.variance, counts)
    assert np.abs(z_of_mean(samples, mean)).max() < sigmas
    assert np.abs(z_of_variance(samples, mean, variance)).max() < sigmas
    away = samples - np.repeat(np.asarray(moments.model.minimum), counts)
    squares = (away**2).sum(1)
    assert abs(z_of_mean(squares, np.array(moments.squared_distance))) < sigmas
    assert abs(z_of_mean(np.sqrt(squares), np.array(moments.distance))) < sigmas
    losses = 0.5 * away**2 @ moments.model.spectrum.expanded()
    assert abs(z_of_mean(losses, np.array(moments.loss))) < sigmas
    # Standard deviations of sums of squares, within the precision of 4,000 replicas.
    assert losses.std() == pytest.approx(moments.loss_std, rel=0.15)
    assert squares.std() == pytest.approx(moments.squared_distance_std, rel=0.15)


@settings(max_examples=12, derandomize=True)
@given(
    st.floats(0.02, 1.2),
    st.floats(0.05, 1.5),
    st.integers(2, 60),
    st.integers(1, 7),
    st.floats(0.3, 0.98),
    st.integers(0, 10**6),
)
def test_simulation_and_prediction_agree(rate, lam, steps, every, decay, seed):
    """Compare random (α, λ, n, κ, ρ): within five standard errors, in a few hundred comparisons."""
    model = Quadratic(
        Spectrum([lam, lam / 3], [2, 3]), noise=0.8, start=[1.0, -0.5], minimum=[0.0, 0.4]
    )
    segments = [Segment(steps, rate, 2.0), Segment(steps // 2, rate / 3)]
    result = theory.simulate(
        model, segments, replicas=REPLICAS, first=every, every=every, decay=decay, seed=seed
    )
    agree(result.last, theory.last_iterate(model, segments))
    if result.average is None:
        assert every > steps + steps // 2
        return
    agree(result.average, theory.average(model, segments, every, every))
    agree(result.ema, theory.ema(model, segments, decay, every, every))


def test_adaptive_methods_and_weight_decay_agree():
    lam = np.array([0.05, 1.0])
    model = Quadratic(
        Spectrum(lam, [2, 2]),
        noise=0.1,
        start=0.0,
        minimum=[1.0, 2.0],
        weight_decay=0.3,
        preconditioner=lam + 0.02,
    )
    result = theory.simulate(model, Segment(80, 0.3), replicas=REPLICAS, first=40, seed=2)
    agree(result.last, theory.last_iterate(model, Segment(80, 0.3)))
    assert result.average is not None
    agree(result.average, theory.average(model, Segment(80, 0.3), 40))


def test_recorded_values_match_final_points():
    model = Quadratic(theory.power_law(50), noise=1.0, start=1.0, minimum=0.2)
    result = theory.simulate(
        model, Segment(30, 0.5), replicas=3, first=10, decay=0.8, record=[30, 5, 10]
    )
    assert result.recorded_steps == (5, 10, 30)
    lam = model.spectrum.expanded()
    for name, point in (("last", result.last), ("average", result.average), ("ema", result.ema)):
        assert point is not None
        away = (point - 0.2) ** 2
        np.testing.assert_allclose(result.squared_distance[name][-1], away.sum(1))
        np.testing.assert_allclose(result.loss[name][-1], 0.5 * away @ lam)
    assert np.isnan(result.loss["average"][0]).all()
    np.testing.assert_allclose(result.loss["average"][1], result.loss["last"][1])  # one sample


def test_result_does_not_depend_on_threads_and_blocks_agree(monkeypatch):
    model = Quadratic(theory.power_law(300), noise=1.0)
    results = [
        theory.simulate(model, Segment(20, 0.3), replicas=2, seed=7, threads=threads)
        for threads in (1, 3)
    ]
    assert np.array_equal(results[0].last, results[1].last)
    monkeypatch.setattr("gadam.theory.simulation.BLOCK", 100)  # six blocks
    blocks = theory.simulate(model, Segment(400, 0.3), replicas=2, record=[400], seed=7)
    assert blocks.last.shape == (2, 300)
    expected = theory.last_iterate(model, Segment(400, 0.3))
    z = (blocks.loss["last"][0] - expected.loss) / expected.loss_std
    assert np.abs(z).max() < 4


def test_unsampled_points_are_none():
    result = theory.simulate(Quadratic(Spectrum([1.0])), Segment(5, 0.1), first=9)
    assert result.average is None
    assert result.ema is None


def test_fractional_counts_raise():
    with pytest.raises(ValueError, match="integer counts"):
        theory.simulate(Quadratic(Spectrum([1.0], [1.5])), Segment(5, 0.1))


def test_single_precision_preserves_statistics():
    model = Quadratic(Spectrum([1.0], [20_000]), noise=1.0, start=0.0)
    result = theory.simulate(model, Segment(200, 0.2), dtype=np.float32, seed=3)
    assert result.last.dtype == np.float32
    variance = theory.last_iterate(model, Segment(200, 0.2)).variance[0]
    z = ((result.last.astype(float) ** 2).mean() / variance - 1) * np.sqrt(20_000 / 2)
    assert abs(z) < 4


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"every": 0}, "at least 1"),
        ({"replicas": 0}, "replicas must be at least 1"),
        ({"decay": 1.5}, "decay must be in"),
        ({"record": [99]}, "between 1 and 5"),
    ],
)
def test_invalid_arguments_raise(arguments, message):
    with pytest.raises(ValueError, match=message):
        theory.simulate(Quadratic(Spectrum([1.0])), Segment(5, 0.1), **arguments)


MILLION = """
import resource, numpy as np
from gadam import theory
from gadam.theory import Segment, Quadratic, Spectrum

model = Quadratic(Spectrum([1.0, 0.1], [500_000, 500_000]), noise=1.0, start=1.0)
result = theory.simulate(model, Segment(10_000, 0.1), first=5001, dtype=np.float32, seed=1)
for samples, moments in (
    (result.last, theory.last_iterate(model, Segment(10_000, 0.1))),
    (result.average, theory.average(model, Segment(10_000, 0.1), 5001)),
):
    for i in range(2):
        x = samples[0, i * 500_000 : (i + 1) * 500_000].astype(float)
        print((((x - moments.mean[i]) ** 2).mean() / moments.variance[i] - 1) * np.sqrt(250_000))
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""


@pytest.mark.slow
def test_million_directions_and_ten_thousand_steps():
    """Run in a separate process to measure memory: below 2 GB, including torch."""
    process = subprocess.run(
        [sys.executable, "-c", MILLION], capture_output=True, text=True, check=True
    )
    *scores, kilobytes = map(float, process.stdout.split())
    assert len(scores) == 4
    assert max(map(abs, scores)) < 5
    assert kilobytes < 2e6
