"""Check spectra against matrices with known eigenvalues."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from gadam import analysis, theory
from gadam.analysis import Curvature
from small_hessian import DATA, full_hessian, network


class Dense:
    """A dense matrix that counts its products."""

    def __init__(self, matrix: Tensor) -> None:
        self.matrix, self.products = matrix, 0

    @property
    def dimension(self) -> int:
        return len(self.matrix)

    def __matmul__(self, vector: Tensor) -> Tensor:
        self.products += 1
        return self.matrix @ vector


def with_eigenvalues(values: Tensor, seed: int = 0) -> Dense:
    generator = torch.Generator().manual_seed(seed)
    q = torch.linalg.qr(torch.randn(len(values), len(values), generator=generator).double()).Q
    return Dense(q @ torch.diag(values.double()) @ q.T)


@given(
    st.lists(st.integers(-40, 40).map(lambda n: n / 4), min_size=5, max_size=40, unique=True),
    st.integers(1, 4),
    st.sampled_from(["magnitude", "value"]),
)
def test_largest_eigenvalues(values, count, by):
    matrix = with_eigenvalues(torch.tensor(values))
    found = analysis.top_eigenvalues(matrix, count, by=by, tolerance=1e-9)
    key = abs if by == "magnitude" else float
    expected = sorted(values, key=key, reverse=True)[:count]
    scale = max(map(abs, values))
    assert [key(float(v)) for v in found.values] == pytest.approx(
        [key(v) for v in expected], abs=1e-7 * scale + 1e-12
    )
    for value, vector in zip(found.values, found.vectors):
        torch.testing.assert_close(
            matrix.matrix @ vector, value * vector, rtol=0, atol=1e-5 * scale + 1e-10
        )


def test_error_bounds_hold_and_products_are_counted():
    matrix = with_eigenvalues(torch.linspace(0, 1, 300) ** 3)
    rough = analysis.top_eigenvalues(matrix, 3, tolerance=0.0, products=12)
    assert rough.products == matrix.products == 12
    true = torch.linalg.eigvalsh(matrix.matrix).flip(0)
    nearest = (rough.values[:, None] - true[None]).abs().min(1).values
    assert (nearest <= rough.errors + 1e-12).all()
    assert rough.errors.max() > 1e-3
    fine = analysis.top_eigenvalues(matrix, 3, tolerance=1e-8)
    torch.testing.assert_close(fine.values, true[:3], rtol=1e-7, atol=0)


def test_rounding_creates_no_spurious_eigenvalues():
    """Without reorthogonalization, the largest eigenvalue would appear repeatedly."""
    values = torch.cat([torch.tensor([1e6, 1e3]), torch.linspace(0, 1, 198)])
    matrix = with_eigenvalues(values)
    found = analysis.top_eigenvalues(matrix, 6, tolerance=1e-10)
    assert (found.values > 10).sum() == 2
    gram = found.vectors @ found.vectors.T
    torch.testing.assert_close(gram, torch.eye(6).double(), rtol=0, atol=1e-9)


def test_density_has_the_right_moments():
    values = torch.cat([torch.linspace(0, 1, 180), torch.linspace(-3, 8, 20)]).double()
    matrix = with_eigenvalues(values)
    found = analysis.spectral_density(matrix, probes=40, steps=30, seed=1)
    assert float(found.weights.sum()) == pytest.approx(1.0)
    for power in (1, 2, 3):
        expected = float((values**power).mean())
        assert found.mean(power) == pytest.approx(expected, rel=0.1)
    at = torch.linspace(-5, 10, 2001).double()
    assert float(torch.trapezoid(found.smoothed(at, 0.1), at)) == pytest.approx(1.0, abs=1e-3)
    spectrum = theory.measured(found.nodes.numpy(), found.weights.numpy(), 200)
    assert spectrum.mean(np.square) * spectrum.dimension == pytest.approx(
        float(values[values > 0].square().sum()), rel=0.15
    )


@pytest.mark.parametrize("method", ["hutchinson", "hutch++"])
def test_trace_errors_are_calibrated(method):
    values = torch.cat([torch.tensor([50.0, -20.0, 10.0]), torch.rand(97)]).double()
    matrix = with_eigenvalues(values, seed=3)
    scores = []
    for seed in range(40):
        found = analysis.trace(matrix, probes=30, method=method, seed=seed)
        scores.append((found.value - float(values.sum())) / found.error)
    assert abs(np.mean(scores)) < 0.8
    assert np.abs(scores).max() < 6
    assert 0.5 < np.std(scores) < 2


def test_hutch_plus_plus_wins_if_few_eigenvalues_are_large():
    values = torch.cat([torch.tensor([500.0, 300.0, 100.0]), torch.full((197,), 0.1)]).double()
    matrix = with_eigenvalues(values)
    plain, better = (
        np.std([analysis.trace(matrix, probes=30, method=m, seed=s).value for s in range(15)])
        for m in ("hutchinson", "hutch++")
    )
    assert better < plain / 50
    matrix.products = 0
    analysis.trace(matrix, probes=30, method="hutch++")
    assert matrix.products == 30


def test_squared_frobenius_norm():
    values = torch.linspace(-2, 3, 120).double()
    found = analysis.squared_norm(with_eigenvalues(values), probes=200)
    assert abs(found.value - float(values.square().sum())) < 4 * found.error
    assert found.error < 0.1 * found.value


@pytest.mark.parametrize("batchnorm", ["eval", "train"])
def test_network_spectrum_matches_full_hessian(batchnorm):
    model = network()
    hessian = Curvature(model, DATA, batchnorm=batchnorm)
    matrix = full_hessian(model, batchnorm)
    true = torch.linalg.eigvalsh(matrix)
    order = true.abs().argsort(descending=True)[:3]
    found = analysis.top_eigenvalues(hessian, 3)
    torch.testing.assert_close(found.values, true[order], rtol=1e-4, atol=1e-12)
    estimate = analysis.trace(hessian, probes=60)
    assert abs(estimate.value - float(true.sum())) < 4 * estimate.error
    norm = analysis.squared_norm(hessian, probes=60)
    assert abs(norm.value - float(true.square().sum())) < 4 * norm.error
    # The first moment of the density is Hutchinson's estimate from the same probe.
    density = analysis.spectral_density(hessian, probes=1, steps=20)
    first = torch.Generator().manual_seed(0)
    signs = (2 * torch.randint(0, 2, (len(true),), generator=first) - 1).double()
    assert density.mean(1) * len(true) == pytest.approx(float(signs @ matrix @ signs), rel=1e-8)
    assert analysis.trace(hessian, probes=2).error >= 0


@pytest.mark.parametrize(
    "call",
    [
        lambda m: analysis.top_eigenvalues(m, 0),
        lambda m: analysis.spectral_density(m, probes=0),
        lambda m: analysis.trace(m, probes=1),
        lambda m: analysis.trace(m, probes=5, method="hutch++"),
        lambda m: analysis.trace(m, method="x"),  # type: ignore[arg-type]
        lambda m: analysis.squared_norm(m, probes=1),
    ],
)
def test_invalid_arguments_raise(call):
    with pytest.raises(ValueError, match=r"at least|between|method must be"):
        call(with_eigenvalues(torch.ones(5)))
