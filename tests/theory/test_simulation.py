"""Simulators: they agree with the predictions, by z-scores; and they are what they say they are."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gadam import theory
from gadam.theory import Segment, Quadratic, Spectrum

REPLICAS = 4000


def z_of_mean(samples: np.ndarray, expected: np.ndarray) -> np.ndarray:
    error = samples.std(0, ddof=1) / np.sqrt(len(samples))
    return (samples.mean(0) - expected) / error


def z_of_variance(samples: np.ndarray, mean: np.ndarray, variance: np.ndarray) -> np.ndarray:
    squares = (samples - mean) ** 2
    return z_of_mean(squares, variance)


def agree(samples, moments: theory.Moments, sigmas: float = 5.0) -> None:
    """Means and variances in every direction, the distance and the loss."""
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
    # Deviations of what is a sum of squares: within what 4,000 replicas tell.
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
    """Over a grid of (α, λ, n, κ, ρ): five standard errors, in a few hundred comparisons."""
    model = Quadratic(
        Spectrum([lam, lam / 3], [2, 3]), noise=0.8, start=[1.0, -0.5], minimum=[0.0, 0.4]
    )
    segments = [Segment(steps, rate, 2.0), Segment(steps // 2, rate / 3)]
    run = theory.simulate(
        model, segments, replicas=REPLICAS, first=every, every=every, decay=decay, seed=seed
    )
    agree(run.last, theory.last_iterate(model, segments))
    if run.average is None:
        assert every > steps + steps // 2
        return
    agree(run.average, theory.average(model, segments, every, every))
    agree(run.ema, theory.ema(model, segments, decay, every, every))


def test_adaptive_methods_and_weight_decay_agree_too():
    lam = np.array([0.05, 1.0])
    model = Quadratic(
        Spectrum(lam, [2, 2]),
        noise=0.1,
        start=0.0,
        minimum=[1.0, 2.0],
        weight_decay=0.3,
        preconditioner=lam + 0.02,
    )
    run = theory.simulate(model, Segment(80, 0.3), replicas=REPLICAS, first=40, seed=2)
    agree(run.last, theory.last_iterate(model, Segment(80, 0.3)))
    assert run.average is not None
    agree(run.average, theory.average(model, Segment(80, 0.3), 40))


def test_what_is_recorded_is_what_was_there():
    model = Quadratic(theory.power_law(50), noise=1.0, start=1.0, minimum=0.2)
    run = theory.simulate(
        model, Segment(30, 0.5), replicas=3, first=10, decay=0.8, record=[30, 5, 10]
    )
    assert run.recorded_steps == (5, 10, 30)
    lam = model.spectrum.expanded()
    for name, point in (("last", run.last), ("average", run.average), ("ema", run.ema)):
        assert point is not None
        away = (point - 0.2) ** 2
        np.testing.assert_allclose(run.squared_distance[name][-1], away.sum(1))
        np.testing.assert_allclose(run.loss[name][-1], 0.5 * away @ lam)
    assert np.isnan(run.loss["average"][0]).all()
    np.testing.assert_allclose(run.loss["average"][1], run.loss["last"][1])  # of one sample


def test_blocks_and_threads_do_not_matter(monkeypatch):
    model = Quadratic(theory.power_law(300), noise=1.0)
    runs = [
        theory.simulate(model, Segment(20, 0.3), replicas=2, seed=7, threads=threads)
        for threads in (1, 3)
    ]
    assert np.array_equal(runs[0].last, runs[1].last)
    monkeypatch.setattr("gadam.theory.simulation.BLOCK", 100)  # in six blocks
    parts = theory.simulate(model, Segment(400, 0.3), replicas=2, record=[400], seed=7)
    assert parts.last.shape == (2, 300)
    expected = theory.last_iterate(model, Segment(400, 0.3))
    z = (parts.loss["last"][0] - expected.loss) / expected.loss_std
    assert np.abs(z).max() < 4


def test_a_point_that_is_never_sampled_is_none():
    run = theory.simulate(Quadratic(Spectrum([1.0])), Segment(5, 0.1), first=9)
    assert run.average is None
    assert run.ema is None


def test_counts_must_be_whole():
    with pytest.raises(ValueError, match="not whole"):
        theory.simulate(Quadratic(Spectrum([1.0], [1.5])), Segment(5, 0.1))


def test_single_precision_is_as_good_for_statistics():
    model = Quadratic(Spectrum([1.0], [20_000]), noise=1.0, start=0.0)
    run = theory.simulate(model, Segment(200, 0.2), dtype=np.float32, seed=3)
    assert run.last.dtype == np.float32
    variance = theory.last_iterate(model, Segment(200, 0.2)).variance[0]
    z = ((run.last.astype(float) ** 2).mean() / variance - 1) * np.sqrt(20_000 / 2)
    assert abs(z) < 4


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        ({"every": 0}, "at least 1"),
        ({"replicas": 0}, "at least one replica"),
        ({"decay": 1.5}, "lie in"),
        ({"record": [99]}, "between 1 and 5"),
    ],
)
def test_what_cannot_be_simulated(wrong, sentence):
    with pytest.raises(ValueError, match=sentence):
        theory.simulate(Quadratic(Spectrum([1.0])), Segment(5, 0.1), **wrong)


MILLION = """
import resource, numpy as np
from gadam import theory
from gadam.theory import Segment, Quadratic, Spectrum

model = Quadratic(Spectrum([1.0, 0.1], [500_000, 500_000]), noise=1.0, start=1.0)
run = theory.simulate(model, Segment(10_000, 0.1), first=5001, dtype=np.float32, seed=1)
for samples, moments in (
    (run.last, theory.last_iterate(model, Segment(10_000, 0.1))),
    (run.average, theory.average(model, Segment(10_000, 0.1), 5001)),
):
    for i in range(2):
        x = samples[0, i * 500_000 : (i + 1) * 500_000].astype(float)
        print((((x - moments.mean[i]) ** 2).mean() / moments.variance[i] - 1) * np.sqrt(250_000))
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""


@pytest.mark.slow
def test_a_million_directions_and_ten_thousand_steps():
    """In a process of its own, whose memory is what it takes: below two gigabytes, torch included."""
    done = subprocess.run(
        [sys.executable, "-c", MILLION], capture_output=True, text=True, check=True
    )
    *scores, kilobytes = map(float, done.stdout.split())
    assert len(scores) == 4
    assert max(map(abs, scores)) < 5
    assert kilobytes < 2e6
