"""Tests of the errata: the printed formula fails and the corrected one holds."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import special

from gadam import theory
from gadam.theory import ERRATA, Absolute, Quadratic, Segment, Spectrum

SIZE = 40_000  # identical directions, each an independent draw


def variance(point: np.ndarray | None) -> tuple[float, float]:
    """Return the variance of a zero-mean point and its standard error."""
    assert point is not None
    squares = point.ravel() ** 2
    return float(squares.mean()), float(squares.std(ddof=1) / np.sqrt(squares.size))


def check(name: str, measured: tuple[float, float], *arguments, sigmas: float = 4.0) -> None:
    value, error = measured
    assert abs(ERRATA[name].corrected(*arguments) - value) < sigmas * error
    assert abs(ERRATA[name].printed(*arguments) - value) > 2 * sigmas * error


def model(lam: float, size: int = SIZE) -> Quadratic:
    return Quadratic(Spectrum([lam], [size]), noise=1.0, start=0.0)


def test_average_variance():
    result = theory.simulate(model(2.0, 10_000), Segment(8000, 0.05), seed=1)
    value, error = variance(result.average)
    # The leading order neglects terms of relative order 1/(nαλ).
    assert ERRATA["average"].corrected(0.05, 2.0, 1.0, 8000) == pytest.approx(value, rel=0.05)
    assert ERRATA["average"].printed(0.05, 2.0, 1.0, 8000) > value + 50 * error


def test_finite_sum():
    result = theory.simulate(model(1.0), Segment(10, 0.2), seed=2)
    check("finite-sum", variance(result.average), 0.2, 1.0, 1.0, 10)


def test_last_iterate_variance():
    result = theory.simulate(model(1.0), Segment(100, 0.5), seed=3)
    check("last", variance(result.last), 0.5, 1.0, 1.0)


def test_sign_in_trace():
    kernel, dimension = Absolute(1.0, 0.7), 4
    a, b = np.zeros(dimension), np.full(dimension, 0.3)
    expected = np.trace(kernel.covariance(a, b))
    d2 = float(((a - b) ** 2).sum())
    assert ERRATA["trace"].corrected(kernel, d2, dimension) == pytest.approx(expected)
    assert ERRATA["trace"].printed(kernel, d2, dimension) > 1.2 * expected


def test_relative_kernel():
    printed, corrected = ERRATA["relative-kernel"].printed, ERRATA["relative-kernel"].corrected
    a, b = np.array([1.0, 0.0]), np.array([0.0, 3.0])
    assert printed(a, b) != pytest.approx(printed(b, a), rel=0.1)
    assert corrected(a, b) == pytest.approx(corrected(b, a))
    relative = theory.Relative(noise=2.0, length_scale=np.sqrt(0.5))  # k(0) = 1

    def spherical(w: np.ndarray, other: np.ndarray) -> float:
        apart = relative.map(w) - relative.map(other)
        return float(relative.value(apart @ apart))

    # The mean of both orders is not positive semi-definite. In one dimension, points at growing
    # distances show this.
    points = np.geomspace(1, 100, 30)[:, None]
    for kernel, is_valid in ((printed, False), (corrected, True), (spherical, True)):
        assert (lowest_eigenvalue(kernel, points) > -1e-9) == is_valid
    near = a + np.array([0.01, 0.02])
    for kernel in (corrected, spherical):
        # The relative difference of both kernels is of third order in the distance.
        assert kernel(a, near) == pytest.approx(printed(a, near), rel=2e-5)


def lowest_eigenvalue(kernel, points: np.ndarray) -> float:
    gram = np.array([[kernel(x, y) for y in points] for x in points])
    return float(np.linalg.eigvalsh((gram + gram.T) / 2).min())


@given(st.integers(1, 8), st.floats(0.1, 30), st.integers(0, 2**32 - 1))
def test_kernel_with_the_mean_of_the_squared_norms_is_a_covariance(dimension, sharpness, seed):
    """exp(−2c·d²/(‖w‖² + ‖w'‖²)) is a covariance for every c, and so is any mixture of them."""
    random = np.random.default_rng(seed)
    points = random.standard_normal((25, dimension)) * np.exp(random.normal(0, 2, (25, 1)))
    corrected = ERRATA["relative-kernel"].corrected
    assert lowest_eigenvalue(lambda x, y: corrected(x, y) ** sharpness, points) > -1e-9


def test_stride():
    result = theory.simulate(model(1.0), Segment(200, 0.01), first=10, every=10, seed=4)
    check("stride", variance(result.average), 0.01, 1.0, 1.0, 200, 10)


def test_stride_factor():
    every, rate, steps = 10, 0.1, 6000
    small = model(1.0, 6000)
    full, _ = variance(theory.simulate(small, Segment(steps, rate), seed=5).average)
    strided, _ = variance(
        theory.simulate(small, Segment(steps, rate), first=every, every=every, seed=6).average
    )
    factor = strided / full
    assert ERRATA["stride-factor"].corrected(rate, 1.0, every) == pytest.approx(factor, rel=0.06)
    assert ERRATA["stride-factor"].corrected(rate, 1.0, every) == pytest.approx(1.09, abs=0.01)
    assert ERRATA["stride-factor"].printed(rate, 1.0, every) == 10


def test_ema_variance():
    result = theory.simulate(model(2.0), Segment(400, 0.05), decay=0.9, seed=7)
    check("ema", variance(result.ema), 0.05, 2.0, 1.0, 0.9)


@pytest.mark.parametrize("steps", [3, 10, 50])
def test_ema_variance_after_few_steps(steps):
    """Sum the squared weights of the noise at each step, in an EMA that starts at zero."""
    rate, lam, decay = 0.1, 1.0, 0.8
    q = 1 - rate * lam
    weights = [
        sum((1 - decay) * decay ** (steps - i) * q ** (i - j) for i in range(j, steps + 1))
        for j in range(1, steps + 1)
    ]
    exact = rate**2 * sum(weight**2 for weight in weights)
    assert ERRATA["ema"].corrected(rate, lam, 1.0, decay, steps) == pytest.approx(exact)
    m = np.arange(1, steps + 1)
    stated = (rate * (1 - decay) / (q - decay)) ** 2 * ((q**m - decay**m) ** 2).sum()
    assert stated == pytest.approx(exact)
    assert ERRATA["ema"].printed(rate, lam, 1.0, decay, steps) != pytest.approx(exact, rel=0.1)


def test_settling_point_of_theorem_4():
    lam, gamma, minimum, rate = 0.5, 0.2, 3.0, 0.1
    printed = corrected = 0.0
    for _ in range(2000):  # update (9) without noise, printed and corrected
        printed = (1 - rate * gamma - rate) * printed + rate * lam * minimum
        corrected = (1 - rate * gamma - rate) * corrected + rate * minimum
    assert ERRATA["settling-point"].printed(lam, gamma, minimum) == pytest.approx(printed)
    assert ERRATA["settling-point"].corrected(lam, gamma, minimum) == pytest.approx(corrected)
    adaptive = Quadratic(Spectrum([lam]), minimum=minimum, weight_decay=gamma, preconditioner=[lam])
    assert adaptive.settling_point[0] == pytest.approx(corrected)
    assert abs(printed - minimum) > abs(corrected - minimum)


@pytest.mark.parametrize(("a", "x"), [(50.0, 1.0), (100.0, 3.0), (150.0, 10.0)])
def test_incomplete_gamma_function(a, x):
    exact = special.gammainc(a, x)
    assert exact > 0
    assert ERRATA["ball"].corrected(a, x) == pytest.approx(exact, rel=0.1)
    assert ERRATA["ball"].printed(a, x) < 1e-10 * exact


def test_ema_mean():
    model_ = Quadratic(Spectrum([1.0]), noise=0.0, start=1.0)
    steps, decay = 4, 0.6
    debiased = theory.ema(model_, Segment(steps, 0.2), decay).mean[0]
    plain = debiased * (1 - decay**steps)  # the paper starts the EMA at zero
    assert ERRATA["ema-mean"].corrected(0.2, 1.0, decay, steps) == pytest.approx(plain)
    assert ERRATA["ema-mean"].printed(0.2, 1.0, decay, steps) < 0.9 * plain
    without_first = plain - (1 - decay) * decay ** (steps - 1) * 0.8  # of w_2, …, w_n
    assert ERRATA["ema-mean"].printed(0.2, 1.0, decay, steps) == pytest.approx(without_first)


def test_variance_of_theorem_4():
    lam = 0.5
    adaptive = Quadratic(Spectrum([lam], [SIZE]), start=0.0, preconditioner=[lam])
    result = theory.simulate(adaptive, Segment(60, 0.3), seed=8)
    check("adaptive-variance", variance(result.last), 0.3, lam, 1.0)


def test_factor_of_the_loss():
    """The gradient used everywhere, λw, is the gradient of the corrected loss."""
    lam, w, h = 0.7, 1.3, 1e-6
    for loss, matches in ((ERRATA["loss"].corrected, True), (ERRATA["loss"].printed, False)):
        slope = (loss(lam, w + h) - loss(lam, w - h)) / (2 * h)
        assert (slope == pytest.approx(lam * w)) == matches


def test_docs_list_all_errata():
    page = (Path(__file__).parents[2] / "docs" / "theory.md").read_text()
    for erratum in ERRATA.values():
        assert f"| {erratum.where} | {erratum.printed_as} | {erratum.correction} |" in page
