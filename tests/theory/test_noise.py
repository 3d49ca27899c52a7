"""Tests of noise that depends on the weights: its covariance is ∂∂'k."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from gadam.theory import Absolute, ExactNoise, FourierNoise, Relative, summed_noise_trace

KERNELS = [Absolute(1.3, 0.8), Relative(1.3, 0.8)]
POINTS = np.array([[1.0, 0.5, -0.3], [0.8, 0.2, 0.4], [-0.6, 0.9, 1.1]])
coordinate = st.floats(-2, 2).filter(lambda x: abs(x) > 0.1)


@pytest.mark.parametrize("kernel", KERNELS, ids=repr)
@given(st.tuples(coordinate, coordinate, coordinate), st.tuples(coordinate, coordinate, coordinate))
def test_covariance_is_mixed_derivative_of_kernel(kernel, a, b):
    w, v, step = np.array(a), np.array(b), 1e-4

    def k(x, y):
        apart = kernel.map(x) - kernel.map(y)
        return kernel.value(apart @ apart)

    e = step * np.eye(3)
    expected = [
        [
            (
                k(w + e[i], v + e[j])
                - k(w + e[i], v - e[j])
                - k(w - e[i], v + e[j])
                + k(w - e[i], v - e[j])
            )
            / (4 * step**2)
            for j in range(3)
        ]
        for i in range(3)
    ]
    np.testing.assert_allclose(
        kernel.covariance(w, v), expected, atol=2e-5 / min(1, w @ w, v @ v) ** 2
    )


def joint(kernel) -> np.ndarray:
    blocks = [[kernel.covariance(a, b) for b in POINTS] for a in POINTS]
    return np.block(blocks)


@pytest.mark.parametrize("kernel", KERNELS, ids=repr)
@pytest.mark.parametrize("method", ["exact", "fourier"])
def test_draws_have_the_covariance_of_the_kernel(kernel, method):
    """Over 4,000 draws, all entries are within 5 standard errors and almost all within 3."""
    draws = []
    for seed in range(4000):
        noise = (
            ExactNoise(kernel, seed)
            if method == "exact"
            else FourierNoise(kernel, 3, 60, seed=seed)
        )
        draws.append(np.concatenate([noise(p) for p in POINTS]))
    x = np.array(draws)
    products = x[:, :, None] * x[:, None, :]
    error = products.std(0, ddof=1) / np.sqrt(len(x))
    z = (products.mean(0) - joint(kernel)) / error
    assert np.abs(z).max() < 5
    assert (np.abs(z) < 3).mean() > 0.97
    mean = x.mean(0) / (x.std(0, ddof=1) / np.sqrt(len(x)))
    assert np.abs(mean).max() < 4.5


@pytest.mark.parametrize("kernel", KERNELS, ids=repr)
def test_joint_covariance_is_positive_definite(kernel):
    assert np.linalg.eigvalsh(joint(kernel)).min() > 0


@pytest.mark.parametrize("kernel", KERNELS, ids=repr)
@pytest.mark.parametrize("structured", [False, True])
def test_fourier_draw_is_a_gradient_field(kernel, structured):
    noise = FourierNoise(kernel, 60, 120, seed=1, structured=structured)
    w = np.linspace(0.5, 1.5, 60) / np.sqrt(8)
    assert np.array_equal(noise(w), noise(w))
    near = noise(w + 1e-7)
    np.testing.assert_allclose(near, noise(w), atol=1e-4)
    # A gradient field does no work around a closed loop.
    corners = [
        w,
        w + 1e-3 * np.eye(60)[0],
        w + 1e-3 * (np.eye(60)[0] + np.eye(60)[1]),
        w + 1e-3 * np.eye(60)[1],
    ]
    work = sum(noise((a + b) / 2) @ (b - a) for a, b in zip(corners, [*corners[1:], corners[0]]))
    assert abs(work) < 1e-8


def test_structured_frequencies():
    from gadam.theory.noise import _Structured

    random = np.random.default_rng(0)
    frequencies = _Structured(random, 30, 12)
    assert frequencies.features == 36
    x, v = random.standard_normal(12), random.standard_normal(36)
    assert frequencies.forward(x) @ v == pytest.approx(x @ frequencies.adjoint(v))
    rows = np.array([frequencies.forward(unit) for unit in np.eye(12)]).T
    norms = (rows**2).sum(1)
    assert stats.kstest(norms, stats.chi2(12).cdf).pvalue > 1e-3
    first = rows[:12] / np.sqrt(norms[:12, None])
    np.testing.assert_allclose(first @ first.T, np.eye(12), atol=1e-12)


@pytest.mark.parametrize("structured", [False, True])
def test_fourier_error_is_within_its_bound(structured):
    """Check Tr Cov(ε, ε')/P over draws of the frequencies, for points at several distances."""
    dimension, features, kernel = 60, 120, Absolute(2.0, 3.0)
    random = np.random.default_rng(0)
    for scale in (0.0, 2.0, 6.0):
        a = random.standard_normal(dimension)
        b = a + scale * np.ones(dimension) / np.sqrt(dimension)
        traces = []
        for seed in range(200):
            noise = FourierNoise(kernel, dimension, features, seed=seed, structured=structured)
            # Exact given the frequencies: the amplitudes are averaged analytically.
            angles = noise._frequencies.forward(a - b) / kernel.length_scale
            norms = (
                sum(noise._frequencies.forward(unit) ** 2 for unit in np.eye(dimension))
                / kernel.length_scale**2
            )
            traces.append(
                kernel.noise * kernel.length_scale**2 * np.mean(norms * np.cos(angles)) / dimension
            )
        expected = kernel.trace(np.array(scale**2), dimension) / dimension
        error = np.std(traces, ddof=1)
        assert error <= kernel.noise * noise.error * 1.15
        assert abs(np.mean(traces) - expected) < 5 * max(error, 1e-9) / np.sqrt(200)


def test_exact_draw_is_deterministic():
    noise = ExactNoise(Absolute(), seed=0)
    first = noise(np.zeros(3))
    noise(np.ones(3))
    assert np.array_equal(noise(np.zeros(3)), first)
    assert not ExactNoise(Absolute(noise=0.0), seed=0)(np.zeros(3)).any()


def test_invalid_uses_raise():
    with pytest.raises(TypeError, match="depends on both points"):
        Relative().trace(np.array(1.0), 3)
    with pytest.raises(TypeError, match="depends on both points"):
        summed_noise_trace(Relative(), np.ones(3), POINTS)
    with pytest.raises(ValueError, match="undefined at w = 0"):
        FourierNoise(Relative(), 3, 10)(np.zeros(3))
    with pytest.raises(ValueError, match="only for dimension ≥ 50"):
        FourierNoise(Absolute(), 3, 10, structured=True)


def test_summed_noise_trace_matches_covariances():
    weights = np.array([0.5, -1.0, 2.0])
    kernel = Absolute(1.3, 0.8)
    total = sum(
        a * b * np.trace(kernel.covariance(p, q))
        for a, p in zip(weights, POINTS)
        for b, q in zip(weights, POINTS)
    )
    assert summed_noise_trace(kernel, weights, POINTS) == pytest.approx(total)


def test_too_many_exact_draws_raise(monkeypatch):
    monkeypatch.setattr(ExactNoise, "MAX_VALUES", 5)
    noise = ExactNoise(Absolute(), seed=0)
    noise(np.zeros(3))
    with pytest.raises(ValueError, match="Use FourierNoise"):
        noise(np.ones(3))
    with pytest.raises(ValueError, match="length_scale must be positive"):
        Absolute(1.0, 0.0)
