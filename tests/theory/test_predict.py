"""Tests of predictions against explicit recursions, closed forms and each other."""

from __future__ import annotations

import math
from decimal import Decimal, localcontext

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from scipy import special, stats

from gadam import theory
from gadam.theory import Quadratic, Segment, Spectrum

RATE = st.floats(0.01, 1.5)
SEGMENTS = st.lists(
    st.builds(Segment, st.integers(1, 12), RATE, st.floats(0.5, 20)), min_size=1, max_size=3
)


def explicit_moments(model: Quadratic, segments: list[Segment], weights: np.ndarray):
    """Compute the mean and variance of Σ weights·w_t by explicit recursion."""
    steps = [(p.rate, p.batch_size) for p in segments for _ in range(p.steps)]
    n = len(steps)
    means, variances = [], []
    for k, lam in enumerate(model.spectrum.eigenvalues):
        h, pull = model.gradient_scale[k], model.contraction[k]
        reach = np.zeros((n + 1, n))
        mean = np.zeros(n + 1)
        mean[0] = model.start[k]
        for t, (rate, batch) in enumerate(steps):
            # w ← (1 − αγ − αλh)·w + αλh·w* − αh·ε
            mean[t + 1] = (1 - rate * pull) * mean[t]
            mean[t + 1] += rate * lam * h * model.minimum[k]
            reach[t + 1] = (1 - rate * pull) * reach[t]
            reach[t + 1, t] = -rate * h * math.sqrt(model.noise[k] / batch)
        means.append(weights @ mean)
        variances.append(float(((weights @ reach) ** 2).sum()))
    return np.array(means), np.array(variances)


@given(
    SEGMENTS,
    st.integers(1, 20),
    st.integers(1, 6),
    st.floats(0.1, 0.99),
    st.floats(0, 0.5),
    st.booleans(),
)
def test_points_match_explicit_recursion(segments, first, every, decay, gamma, adaptive):
    model = Quadratic(
        Spectrum([0.0, 0.3, 1.0], [1, 2, 3]),
        noise=0.7,
        start=[1.0, -2.0, 0.5],
        minimum=[0.3, 1.0, -1.0],
        weight_decay=gamma,
        preconditioner=[0.5, 0.7, 1.3] if adaptive else None,
    )
    total = sum(p.steps for p in segments)
    sampled = list(range(first, total + 1, every))
    last = np.zeros(total + 1)
    last[-1] = 1.0
    expected = {"last": (theory.last_iterate(model, segments), last)}
    if sampled:
        mean, moving = np.zeros(total + 1), np.zeros(total + 1)
        mean[sampled] = 1 / len(sampled)
        for i, t in enumerate(reversed(sampled)):
            moving[t] = decay**i
        expected["average"] = (theory.average(model, segments, first, every), mean)
        expected["ema"] = (
            theory.ema(model, segments, decay, first, every),
            moving / moving.sum(),
        )
    else:
        with pytest.raises(ValueError, match="No step is sampled"):
            theory.average(model, segments, first, every)
    for found, weights in expected.values():
        means, variances = explicit_moments(model, segments, weights)
        np.testing.assert_allclose(found.mean, means, rtol=1e-8, atol=1e-10)
        np.testing.assert_allclose(found.variance, variances, rtol=1e-8, atol=1e-12)


@given(st.floats(0.01, 0.9), st.floats(0.05, 2), st.integers(20, 3000), st.integers(1, 15))
def test_closed_forms_match_exact_predictions(rate, lam, steps, every):
    assume(0.02 < rate * lam < 0.95)
    model = Quadratic(Spectrum([lam]), noise=1.3, start=0.0)
    segment = Segment(steps, rate)
    last = theory.last_iterate(model, segment).variance[0]
    assert theory.last_variance(rate, lam, 1.3, steps) == pytest.approx(last, rel=1e-6)
    average = theory.average(model, segment, every, every).variance[0]
    assert theory.average_variance(rate, lam, 1.3, steps, every) == pytest.approx(average, rel=1e-5)
    long = Segment(20_000, rate)
    settled = theory.ema(model, long, 0.9).variance[0]
    assert theory.ema_variance(rate, lam, 1.3, 0.9) == pytest.approx(settled, rel=1e-8)
    moved = Quadratic(Spectrum([lam]), noise=1.3, start=2.0)
    mean = theory.average(moved, segment).mean[0]
    assert 2 * theory.average_mean(rate, lam, steps) == pytest.approx(mean, rel=1e-7)
    assert 2 * theory.average_mean(rate, lam, 10**6, leading=True) == pytest.approx(
        theory.average(moved, Segment(10**6, rate)).mean[0], rel=1e-6
    )
    leading = theory.average_variance(rate, lam, 1.3, 10**7, every, leading=True)
    exact = theory.average(model, Segment(10**7, rate), every, every).variance[0]
    assert leading == pytest.approx(exact, rel=1e-3)


# αλ from a millionth of a millionth of a step to just below the limit, where q is near −1.
X = st.one_of(st.floats(-13, 0).map(lambda e: 10**e), st.floats(-9, 0).map(lambda e: 2 - 10**e))


@given(X, st.integers(1, 300), st.integers(1, 7))
def test_closed_forms_keep_full_precision(x, steps, every):
    """Compare with the formulas in 120 digits."""
    assume(steps >= every)
    with localcontext() as context:
        context.prec = 120
        rate = Decimal(x)  # λ = 1
        q = 1 - rate
        average_mean = q * (1 - q**steps) / (rate * steps)
        last = rate / (2 - rate) * (1 - q ** (2 * steps))
        m, big = steps // every, q**every
        unit = rate**2 * (1 - big**2) / (1 - q**2) / (1 - big) ** 2
        bracket = m - 2 * big * (1 - big**m) / (1 - big)
        bracket += big**2 * (1 - big ** (2 * m)) / (1 - big**2)
        strided = unit * bracket / m**2
        leading = unit * every / steps
        rho = Decimal(1 - 2**-30)
        ema = rate / (2 - rate) * (1 - rho) / (1 + rho) * (1 + rho * q) / (1 - rho * q)
        factor = every * (1 - big**2) / (1 - q**2) * (rate / (1 - big)) ** 2
    assert float(theory.average_mean(x, 1.0, steps)) == pytest.approx(
        float(average_mean), rel=1e-12, abs=1e-15
    )
    assert float(theory.last_variance(x, 1.0, 1.0, steps)) == pytest.approx(float(last), rel=1e-12)
    found = float(theory.average_variance(x, 1.0, 1.0, steps, every))
    assert found == pytest.approx(float(strided), rel=1e-10)
    found = float(theory.average_variance(x, 1.0, 1.0, steps, every, leading=True))
    assert found == pytest.approx(float(leading), rel=1e-12)
    assert float(theory.ema_variance(x, 1.0, 1.0, 1 - 2**-30)) == pytest.approx(
        float(ema), rel=1e-12
    )
    assert theory.ERRATA["stride-factor"].corrected(x, 1.0, every) == pytest.approx(
        float(factor), rel=1e-12
    )


def test_variances_of_tiny_rates_are_positive():
    """For tiny nαλ, the variance is s²α²·(n+1)(2n+1)/6n. The printed bracket cancels to noise."""
    for n, rate, lam in ((10, 1e-7, 1.0), (1000, 0.1, 1e-12), (10**6, 1e-3, 1e-15)):
        expected = rate**2 * (n + 1) * (2 * n + 1) / (6 * n)
        model = Quadratic(Spectrum([lam]), noise=1.0, start=0.0)
        exact = theory.average(model, Segment(n, rate)).variance[0]
        assert exact == pytest.approx(expected, rel=max(1e-12, n * rate * lam))
        assert theory.average_variance(rate, lam, 1.0, n) == pytest.approx(exact, rel=1e-12)
    found = theory.average_variance(0.1, [[1e-9, 0.5], [1.0, 3.0]], 1.0, 10)
    assert found.shape == (2, 2)
    assert (found > 0).all()


def test_small_separations_keep_precision():
    """Without noise, the iterate moves by αλk·w_0 to leading order."""
    model = Quadratic(Spectrum([1e-12]), noise=0.0, start=2.0)
    found = theory.squared_separation(model, Segment(5, 0.1), np.array([1, 100]))
    assert found == pytest.approx([(2e-13) ** 2, (2e-11) ** 2], rel=1e-3)


def test_values_verified_by_simulation():
    one = Quadratic(Spectrum([2.0]), noise=1.0, start=0.0)
    assert theory.average(one, Segment(4000, 0.05)).variance[0] * 4000 == pytest.approx(
        0.25, abs=2e-3
    )
    two = Quadratic(Spectrum([1.0]), noise=1.0, start=0.0)
    assert theory.average(two, Segment(200, 0.01), 10, 10).variance[0] == pytest.approx(
        0.002009, abs=1e-6
    )
    assert theory.ema_variance(0.05, 2.0, 1.0, 0.9) == pytest.approx(0.00660, abs=1e-5)


def test_noise_may_differ_between_directions():
    model = Quadratic(Spectrum([1.0, 1.0]), noise=[1.0, 4.0], start=0.0)
    for moments in (
        theory.last_iterate(model, Segment(30, 0.2)),
        theory.average(model, Segment(30, 0.2)),
    ):
        assert moments.variance[1] == pytest.approx(4 * moments.variance[0])


@given(st.integers(1, 40), st.integers(0, 30), st.floats(0.05, 1.2))
def test_squared_separation(steps, later, rate):
    model = Quadratic(
        Spectrum([0.2, 1.0], [2, 3]), noise=0.5, start=[1.0, 2.0], minimum=[0.0, -1.0]
    )
    total = steps + later
    weights = np.zeros(total + 1)
    weights[total] += 1.0
    weights[steps] -= 1.0
    mean, variance = explicit_moments(model, [Segment(total, rate)], weights)
    expected = model.spectrum.counts @ (mean**2 + variance)
    found = theory.squared_separation(model, Segment(steps, rate), later)
    assert found == pytest.approx(expected, rel=1e-8, abs=1e-12)


@given(st.integers(1, 300), st.floats(0.1, 3), st.floats(0, 5))
def test_expected_distance_matches_chi_distribution(dimension, std, bias):
    moments = theory.Moments(
        Quadratic(Spectrum([1.0], [dimension])), np.array([bias]), np.array([std**2])
    )
    scaled = dimension * (bias / std) ** 2
    if bias == 0:
        expected = std * stats.chi(dimension).mean()
    else:  # E√X of a noncentral χ², by the Laguerre function
        expected = (
            std
            * math.sqrt(2)
            * math.exp(special.gammaln((dimension + 1) / 2) - special.gammaln(dimension / 2))
            * special.hyp1f1(-0.5, dimension / 2, -scaled / 2)
        )
    assume(math.isfinite(expected))  # hyp1f1 overflows for some arguments
    assert moments.distance == pytest.approx(expected, rel=1e-6)
    assert moments.distance <= math.sqrt(moments.squared_distance) * (1 + 1e-9)


def test_tail_bound_holds_in_any_dimension():
    random = np.random.default_rng(0)
    for dimension in (10, 1000):
        moments = theory.last_iterate(
            Quadratic(Spectrum([1.0], [dimension]), noise=1.0), Segment(50, 0.2)
        )
        spread = np.sqrt(moments.variance[0])
        draws = moments.mean[0] + spread * random.standard_normal((20_000, dimension))
        away = np.abs(np.linalg.norm(draws, axis=1) - moments.distance)
        for t in (0.5 * spread, spread, 2 * spread, 3 * spread):
            assert (away >= t).mean() <= moments.tail_bound(t) + 1e-3
        assert moments.tail_bound(3 * spread) == pytest.approx(2 * math.exp(-4.5))
        assert moments.tail_bound(-1.0) == 1.0


@given(st.integers(1, 60), st.integers(1, 50), st.floats(0.05, 3), st.floats(0.3, 3))
def test_ball_lemma_matches_incomplete_gamma_function(dimension, points, radius, std):
    x = points ** (2 / dimension) * radius**2 / (2 * std**2)
    expected = special.gammainc(dimension / 2, x)
    found = math.exp(theory.log_ball_probability(dimension, points, radius, std))
    assert found == pytest.approx(expected, rel=1e-8)


def test_ball_lemma_does_not_underflow():
    found = float(theory.log_ball_probability(25_000_000, 10**6, 1.0, 1.0))
    a, x = 12_500_000.0, 0.5 * math.exp(math.log(10**6) / 12_500_000)
    assert found == pytest.approx(a * math.log(x) - x - special.gammaln(a + 1), rel=1e-9)
    assert theory.far_apart(25_000_000, 10**6, 100.0, 1.0) == 1.0
    assert theory.far_apart(2, 1000, 1.0, 1.0) == 0.0
    assert theory.far_apart(2, 1, 1.0, 1.0) == 1.0


def test_far_apart_is_a_lower_bound():
    dimension, points, distance = 30, 40, 3.0
    random = np.random.default_rng(1)
    apart = []
    for _ in range(2000):
        x = random.standard_normal((points, dimension))
        d2 = ((x[:, None] - x[None]) ** 2).sum(-1)
        apart.append(d2[np.triu_indices(points, 1)].min() > distance**2)
    bound = theory.far_apart(dimension, points, distance, 1.0)
    assert 0.5 < bound <= np.mean(apart) + 4 * math.sqrt(0.25 / 2000)


@given(st.floats(0.01, 0.5), st.integers(10, 2000), st.floats(0, 3))
def test_average_satisfies_regret_bound(rate, steps, noise):
    model = Quadratic(Spectrum([1.0, 0.1, 0.01]), noise=noise, start=[1.0, 2.0, 3.0])
    average = theory.average(model, Segment(steps, rate), first=1)
    bound = theory.regret_bound(14.0, rate, steps, noise * 3, smoothness=1.0)
    assert average.loss <= bound


def test_regret_bound_raises_outside_its_range():
    model = Quadratic(Spectrum([1.0]), noise=0.0, start=1.0)
    assert theory.average(model, Segment(1, 1.9)).loss > 1 / (
        2 * 1.9
    )  # the bound would be violated
    for rate in (1.9, 0.0):
        with pytest.raises(ValueError, match="at most 1/β = 1"):
            theory.regret_bound(1.0, rate, 1, 0.0, smoothness=1.0)


def test_best_rate_makes_the_bound_small():
    beta, sigma, distance = 1.0, 2.0, 3.0
    for steps in (100, 10_000):
        rate = theory.best_rate(beta, sigma, steps, distance)
        assert rate < 1 / beta
        bound = theory.regret_bound(distance**2, rate, steps, sigma**2, beta)
        assert bound <= beta * distance**2 / (2 * steps) + 1.5 * sigma * distance / math.sqrt(steps)


def test_rate_drops_and_batch_growth_reach_stationary_variance():
    model = Quadratic(Spectrum([1.0]), noise=1.0, start=1.0)
    for segment in (Segment(5000, 0.01), Segment(5000, 0.1, 10.0)):
        end = theory.last_iterate(model, [Segment(100, 0.1), segment]).variance[0]
        settled = theory.last_variance(segment.rate, 1.0, 1.0 / segment.batch_size)
        assert end == pytest.approx(settled, rel=1e-9)


def test_weight_decay_and_preconditioning():
    lam, gamma, eps = np.array([0.1, 1.0]), 0.2, 0.05
    model = Quadratic(
        Spectrum(lam), minimum=[3.0, -1.0], weight_decay=gamma, preconditioner=lam + eps
    )
    end = theory.last_iterate(model, Segment(10_000, 0.1))
    h = 1 / (lam + eps)
    np.testing.assert_allclose(end.mean, lam * h * [3.0, -1.0] / (gamma + lam * h))
    q = 1 - 0.1 * (gamma + lam * h)
    np.testing.assert_allclose(end.variance, (0.1 * h) ** 2 / (1 - q**2))
    # If the noise is preconditioned too, n·Var of the average still converges to s²/λ².
    perfect = Quadratic(Spectrum(lam), start=0.0, preconditioner=lam)
    average = theory.average(perfect, Segment(10**6, 0.1))
    np.testing.assert_allclose(1e6 * average.variance, 1 / lam**2, rtol=1e-3)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Segment(-1, 0.1), "steps must be a non-negative integer"),
        (lambda: Segment(1, 0.1, 0), "batch_size must be positive"),
        (lambda: Quadratic(Spectrum([1.0]), noise=-1), "must be non-negative"),
        (lambda: Quadratic(Spectrum([1.0]), preconditioner=0.0), "must be positive"),
        (lambda: theory.last_iterate(Quadratic(Spectrum([1.0])), []), "at least one segment"),
        (lambda: theory.average(Quadratic(Spectrum([1.0])), Segment(5, 0.1), 0), "at least 1"),
        (lambda: theory.ema(Quadratic(Spectrum([1.0])), Segment(5, 0.1), 0.5, 1, -1), "at least 1"),
        (lambda: theory.average_variance(0.1, 1.0, 1.0, 5, 9), "No step is sampled"),
        (lambda: theory.last_variance(1.0, 3.0, 1.0), "0 < αλ < 2"),
        (lambda: theory.ema_variance(1.0, 0.0, 1.0, 0.9), "0 < αλ < 2"),
        (lambda: Segment(10.5, 0.1), "steps must be a non-negative integer"),  # type: ignore[arg-type]
        (lambda: Quadratic(Spectrum([1.0]), momentum=1.0), r"in \[0, 1\), got 1\.0"),
        (lambda: Quadratic(Spectrum([1.0]), nesterov=True), "need momentum"),
        (lambda: Quadratic(Spectrum([1.0]), momentum=0.9, dampening=0.1, nesterov=True), "zero"),
        (lambda: Quadratic(Spectrum([1.0, 2.0]), noise=[1.0]), r"one per eigenvalue \(2\)"),
        (lambda: theory.average_mean(0.1, 1.0, 0), "steps must be an integer of at least 1"),
        (lambda: theory.from_hessian(np.eye(2), np.eye(3), start=0.0), "of the same size"),
        (lambda: theory.from_hessian(-np.eye(2), np.eye(2), start=0.0), "positive semi-definite"),
        (
            lambda: theory.from_hessian(
                np.eye(2), np.eye(2), start=0.0, divisor=1.0, weight_decay=0.1, decoupled=False
            ),
            "Use decoupled weight decay",
        ),
        (
            lambda: theory.average(Quadratic(Spectrum([1.0])), Segment(5000, 3.0)),
            r"The iterate diverges: the method is stable only at rates below 2, got 3\.",
        ),
        (
            lambda: theory.squared_separation(Quadratic(Spectrum([1.0])), Segment(5000, 3.0), 1),
            "The iterate diverges",
        ),
        (
            lambda: theory.simulate(Quadratic(Spectrum([1.0])), Segment(5000, 3.0)),
            "The iterate diverges",
        ),
        (
            lambda: theory.dependent(
                Quadratic(Spectrum([1.0])), Segment(600, 9.0), theory.Absolute()
            ),
            "The iterate diverges",
        ),
        (
            lambda: theory.dependent(
                Quadratic(Spectrum([1.0]), momentum=0.9), Segment(6, 0.1), theory.Absolute()
            ),
            "without momentum",
        ),
        (lambda: Segment(3, -0.1), "rate"),
        (lambda: Segment(10, math.nan), "rate"),
        (lambda: Quadratic(Spectrum([1.0]), noise=math.nan), "noise must be finite"),
        (
            lambda: theory.ema(Quadratic(Spectrum([1.0])), Segment(5, 0.1), 1.0),
            r"must be in \(0, 1\)",
        ),
    ],
)
def test_invalid_arguments_raise(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Quadratic([1.0, 2.0]), r"spectrum must be a Spectrum, got \[1\.0, 2\.0\]\. Wrap"),  # type: ignore[arg-type]
        (
            lambda: theory.last_iterate(Quadratic(Spectrum([1.0])), (100, 0.1)),  # type: ignore[arg-type]
            r"segments must be Segment objects, got \(100, 0\.1\)\. Write Segment",
        ),
        (
            lambda: theory.average(Quadratic(Spectrum([1.0])), [(100, 0.1)]),  # type: ignore[list-item]
            r"segments must be Segment objects, got \[\(100, 0\.1\)\]\. Write Segment",
        ),
        (
            lambda: theory.simulate(Quadratic(Spectrum([1.0])), 100),  # type: ignore[arg-type]
            "segments must be Segment objects, got 100",
        ),
    ],
)
def test_wrong_types_raise(make, message):
    with pytest.raises(TypeError, match=message):
        make()
