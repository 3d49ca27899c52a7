"""Tests of spectra: their moments match known values."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gadam.theory import Spectrum, marchenko_pastur, measured, power_law


@given(st.floats(0.05, 0.95), st.floats(0.1, 10))
def test_marchenko_pastur_moments(ratio, scale):
    spectrum = marchenko_pastur(5000, ratio, scale)
    assert spectrum.dimension == pytest.approx(5000)
    for power, expected in (
        (1, 1.0),
        (2, 1 + ratio),
        (-1, 1 / (1 - ratio)),
        (-2, (1 - ratio) ** -3),
    ):
        found = float(np.average(spectrum.eigenvalues**power, weights=spectrum.counts))
        assert found == pytest.approx(scale**power * expected, rel=1e-5)
    edges = scale * (1 - np.sqrt(ratio)) ** 2, scale * (1 + np.sqrt(ratio)) ** 2
    assert edges[0] <= spectrum.eigenvalues.min()
    assert spectrum.eigenvalues.max() <= edges[1]


def test_marchenko_pastur_with_more_parameters_than_examples_has_zeros():
    spectrum = marchenko_pastur(1000, 4.0)
    assert spectrum.counts[spectrum.eigenvalues == 0].sum() == pytest.approx(750)
    assert spectrum.mean(lambda x: x) == pytest.approx(1.0)
    assert spectrum.mean(lambda x: x**2) == pytest.approx(5.0)


def test_marchenko_pastur_matches_random_matrices():
    x = np.random.default_rng(0).standard_normal((400, 800))
    values = np.linalg.eigvalsh(x @ x.T / 800)
    spectrum = marchenko_pastur(400, 0.5, nodes=400)
    assert spectrum.mean(lambda v: 1 / v) == pytest.approx((1 / values).mean(), rel=0.02)
    assert np.abs(np.sort(values) - np.sort(spectrum.expanded())).max() < 0.15


@given(st.floats(0, 2), st.integers(50, 5000))
def test_grouped_power_law_approximates_full_one(exponent, dimension):
    full, grouped = power_law(dimension, exponent, 3.0), power_law(dimension, exponent, 3.0, 400)
    assert len(grouped.eigenvalues) <= 400
    assert grouped.dimension == pytest.approx(dimension)
    for f in (lambda v: v, lambda v: v**2):
        assert grouped.mean(f) == pytest.approx(full.mean(f), rel=1e-3)


def test_measured_drops_negative_nodes():
    spectrum = measured([-0.5, 0.0, 1.0], [1.0, 2.0, 1.0], dimension=40)
    assert spectrum.eigenvalues.tolist() == [0.0, 1.0]
    assert spectrum.counts.tolist() == [20.0, 10.0]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([1.0, -0.1],), "no minimum along a direction with a negative eigenvalue"),
        (([],), "non-empty"),
        (([1.0, np.nan],), "finite"),
        (([1.0, 2.0], [1.0]), "one positive number per eigenvalue"),
    ],
)
def test_invalid_spectra_raise(arguments, message):
    with pytest.raises(ValueError, match=message):
        Spectrum(*arguments)
    with pytest.raises(ValueError, match="ratio"):
        marchenko_pastur(10, -1.5)
    with pytest.raises(ValueError, match="weights non-negative"):
        measured([1.0, 2.0], [2.0, -1.0], 10)
    with pytest.raises(ValueError, match="exponent"):
        power_law(10, -1)
    with pytest.raises(ValueError, match="nodes=P"):
        Spectrum([1.0], [2.5]).expanded()
