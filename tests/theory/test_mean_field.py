"""Tests of mean-field predictions against simulations with noise that depends on the weights."""

from __future__ import annotations

import numpy as np
import pytest

from gadam import theory
from gadam.theory import Absolute, ExactNoise, FourierNoise, Quadratic, Relative, Segment, Spectrum


def z(samples: np.ndarray, expected: float, systematic: float) -> float:
    """Return the z-score of a mean over replicas, given a relative error of the prediction."""
    error = samples.std(ddof=1) / np.sqrt(len(samples))
    return float((samples.mean() - expected) / np.hypot(error, systematic * expected))


@pytest.mark.parametrize("length_scale", [1.0, 2.5, 5.0, 12.0, 40.0])
def test_theorem_2(length_scale):
    """At P = 200, allow errors of 1/P (mean field) and P/M (Fourier features)."""
    size, segment = 200, Segment(100, 0.2)
    kernel = Absolute(1.0, length_scale)
    model = Quadratic(Spectrum([1.0], [size]), start=0.0)
    predicted = theory.dependent(model, segment, kernel)
    result = theory.simulate_dependent(
        model,
        segment,
        lambda seed: FourierNoise(kernel, size, 8000, seed=seed, structured=True),
        replicas=10,
    )
    assert result.average is not None
    systematic = 1 / size + size / 8000
    for point, moments in ((result.average, predicted.average), (result.last, predicted.last)):
        assert abs(z((point**2).mean(1), moments.variance[0], systematic)) < 4


def test_limits_are_independent_and_identical_noise():
    model = Quadratic(Spectrum([1.0, 0.3], [500, 500]), noise=1.0, start=1.0)
    segment = Segment(80, 0.2)
    short = theory.dependent(model, segment, Absolute(1.0, 0.01), first=20, every=3)
    for found, expected in (
        (short.last, theory.last_iterate(model, segment)),
        (short.average, theory.average(model, segment, 20, 3)),
    ):
        np.testing.assert_allclose(found.variance, expected.variance, rtol=1e-6)
        np.testing.assert_allclose(found.mean, expected.mean, rtol=1e-6)
    long = theory.dependent(model, segment, Absolute(1.0, 1e6))
    q = 1 - 0.2 * np.array([1.0, 0.3])
    np.testing.assert_allclose(
        long.last.variance, ((1 - q**80) / np.array([1.0, 0.3])) ** 2, rtol=1e-4
    )
    far = np.abs(np.subtract.outer(np.arange(80), np.arange(80)))
    independent = theory.squared_separation(model, Segment(79, 0.2), 0)
    assert independent == 0
    assert (short.squared_separation[far > 0] > 0).all()
    assert np.allclose(np.diagonal(short.noise_covariance), 1.0)


def test_response_of_the_noise_matters():
    """Without the response, the predicted variance of the average is four times too small."""
    size, ell, n = 200, 4.7, 100
    model = Quadratic(Spectrum([1.0], [size]), start=0.0)
    kernel = Absolute(1.0, ell)
    predicted = theory.dependent(model, Segment(n, 0.2), kernel)
    noise = np.zeros((n, n))
    reach = np.array(
        [[-0.2 * 0.8 ** (t - 1 - s) if s < t else 0.0 for s in range(n)] for t in range(n + 1)]
    )
    for _ in range(2 * n):  # causal, so it converges within n iterations
        gram = size * reach @ noise @ reach.T
        squares = np.diagonal(gram)
        d2 = squares[:, None] + squares[None] - 2 * gram
        noise = kernel.trace(np.maximum(d2[:n, :n], 0.0), size) / size
    mean = reach[1:].mean(0)
    without_response = mean @ noise @ mean
    result = theory.simulate_dependent(
        model, Segment(n, 0.2), lambda seed: FourierNoise(kernel, size, 8000, seed=seed), replicas=4
    )
    assert result.average is not None
    simulated = (result.average**2).mean()
    assert simulated == pytest.approx(predicted.average.variance[0], rel=0.08)
    assert without_response < simulated / 3


@pytest.mark.parametrize("length_scale", [0.1, 0.3, 1.0, 3.0])
@pytest.mark.parametrize("strength", [30.0, 600.0])
def test_theorem_3_with_a_valid_kernel(length_scale, strength):
    """Compare means and variances, including cases where noise shifts the mean off the minimum."""
    size, segment = 600, Segment(60, 0.2)
    kernel = Relative(strength, length_scale)
    model = Quadratic(Spectrum([1.0, 0.3], [size // 2, size // 2]), start=1.0, minimum=2.0)
    predicted = theory.dependent(model, segment, kernel)
    result = theory.simulate_dependent(
        model,
        segment,
        lambda seed: FourierNoise(kernel, size, 20 * size, seed=seed, structured=True),
        replicas=6,
    )
    systematic = 2 * (1 / size + 1 / 20)
    for point, moments in ((result.average, predicted.average), (result.last, predicted.last)):
        assert point is not None
        for i in range(2):
            group = point[:, i * size // 2 : (i + 1) * size // 2]
            # Error of the mean over directions, plus the error of the features in the response.
            spread = np.sqrt(group.var() / group.size)
            away = abs(moments.mean[i] - 2.0)
            error = np.hypot(spread, systematic * away + 0.002)
            assert abs(group.mean() - moments.mean[i]) < 4 * error
            variances = group.var(1)
            assert abs(z(variances, moments.variance[i], systematic)) < 4


def test_norm_of_the_weights_shifts_the_mean():
    """For a large relative length scale, ε = J(w)ᵀg with constant g, which grows as ‖w‖ shrinks."""
    size, kernel, segment = 600, Relative(600.0, 50.0), Segment(40, 0.2)
    model = Quadratic(Spectrum([1.0], [size]), start=1.0, minimum=2.0)
    predicted = theory.dependent(model, segment, kernel)
    random = np.random.default_rng(0)
    means = []
    for _ in range(40):
        g, w = np.sqrt(kernel.noise) * random.standard_normal(size + 1), np.ones(size)
        for _ in range(40):
            w = w - 0.2 * (w - 2.0) - 0.2 * kernel.pull_back(w, g)
        means.append(w.mean())
    error = np.std(means, ddof=1) / np.sqrt(40)
    assert abs(np.mean(means) - predicted.last.mean[0]) < 4 * error + 0.005
    assert abs(np.mean(means) - 2.0) > 20 * error  # not explained by the distance alone


def test_fourier_features_agree_with_exact_draws():
    """Compare moments over many draws in three dimensions, where exact draws are affordable."""
    kernel, segment = Absolute(1.0, 1.0), Segment(25, 0.3)
    model = Quadratic(Spectrum([1.0, 0.5, 0.2]), start=[1.0, -1.0, 0.5])
    exact = theory.simulate_dependent(
        model, segment, lambda seed: ExactNoise(kernel, seed), replicas=300
    )
    features = theory.simulate_dependent(
        model,
        segment,
        lambda seed: FourierNoise(kernel, 3, 400, seed=seed, structured=False),
        replicas=300,
    )
    for a, b in ((exact.last, features.last), (exact.average, features.average)):
        assert a is not None
        assert b is not None
        for f in (lambda x: x, np.square):
            x, y = f(a), f(b)
            error = np.sqrt((x.var(0) + y.var(0)) / 300)
            assert (np.abs(x.mean(0) - y.mean(0)) / error).max() < 4.5


def test_invalid_arguments_raise():
    model = Quadratic(Spectrum([1.0], [10]), start=0.0)
    with pytest.raises(ValueError, match="undefined at w = 0"):
        theory.dependent(model, Segment(3, 0.1), Relative())
    with pytest.raises(ValueError, match="No step is sampled"):
        theory.dependent(model, Segment(3, 0.1), Absolute(), first=9)
    with pytest.raises(ValueError, match="at least 1"):
        theory.dependent(model, Segment(3, 0.1), Absolute(), first=-5)
    many = Quadratic(Spectrum(np.ones(10_000)))
    with pytest.raises(ValueError, match="too much memory"):
        theory.dependent(many, Segment(1000, 0.1), Absolute())


@pytest.mark.slow
def test_ten_thousand_directions_and_a_thousand_steps():
    size, segment = 10_000, Segment(1000, 0.1)
    kernel = Absolute(1.0, 30.0)
    model = Quadratic(Spectrum([1.0], [size]), start=0.0)
    result = theory.simulate_dependent(
        model, segment, lambda seed: FourierNoise(kernel, size, seed=seed)
    )
    predicted = theory.dependent(model, segment, kernel)
    assert (result.last**2).mean() == pytest.approx(predicted.last.variance[0], rel=0.15)
