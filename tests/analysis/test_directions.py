"""Check curvature, slope and noise per direction against full matrices."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gadam.analysis import Curvature, measure_directions, measure_noise, ritz, top_eigenvalues
from small_hessian import DATA, full_hessian, network


def example_gradients(model: nn.Module) -> Tensor:
    model.eval()
    found = []
    for x, y in DATA:
        for i in range(len(y)):
            loss = F.cross_entropy(model(x[i : i + 1]), y[i : i + 1])
            grads = torch.autograd.grad(loss, list(model.parameters()))
            found.append(torch.cat([g.flatten() for g in grads]))
    return torch.stack(found)


@pytest.fixture(scope="module")
def exact() -> tuple[Tensor, Tensor, Tensor]:
    """Return the full Hessian, the mean gradient and the noise covariance."""
    model = network()
    gradients = example_gradients(model)
    mean = gradients.mean(0)
    deviations = gradients - mean
    return full_hessian(model, "eval"), mean, deviations.T @ deviations / len(gradients)


FUNCTIONS = {
    "one": lambda x: torch.ones_like(x),
    "first": lambda x: x,
    "cube": lambda x: x**3,
    "exponential": lambda x: torch.exp(-3 * x),
}


def applied(function, matrix: Tensor) -> Tensor:
    values, vectors = torch.linalg.eigh(matrix)
    return vectors @ torch.diag(function(values)) @ vectors.T


@pytest.mark.parametrize("name", FUNCTIONS)
def test_noise_and_slope_of_any_function_of_the_hessian(exact, name):
    """Everything that predictions need is Tr Σf(H) and gᵀf(H)g."""
    hessian, mean, noise = exact
    found = measure_directions(Curvature(network(), DATA), per="example", steps=53, probes=200)
    values = FUNCTIONS[name](found.eigenvalues) * found.counts
    matrix = applied(FUNCTIONS[name], hessian)
    expected = float(mean @ matrix @ mean)
    assert float(values @ found.gradient**2) == pytest.approx(expected, rel=1e-6)
    expected = float((noise @ matrix).trace())
    assert float(values @ found.noise) == pytest.approx(expected, rel=0.02)
    assert float(found.counts.sum()) == pytest.approx(53)


def test_few_steps_keep_the_moments_of_the_slope_and_the_trace_of_the_noise(exact):
    hessian, mean, noise = exact
    found = measure_directions(Curvature(network(), DATA), per="example", steps=6, probe_steps=4)
    for power in range(12):
        expected = float(mean @ torch.linalg.matrix_power(hessian, power) @ mean)
        moment = float((found.eigenvalues**power * found.counts) @ found.gradient**2)
        assert moment == pytest.approx(expected, rel=1e-6)
    assert float(found.noise @ found.counts) == pytest.approx(float(noise.trace()), rel=1e-9)
    assert 0 < found.resolved_noise <= 1
    # The first moment of the noise over the spectrum depends only on the few probes.
    expected = float((noise @ hessian).trace())
    assert float((found.noise * found.counts) @ found.eigenvalues) == pytest.approx(
        expected, rel=0.5
    )


def test_resolved_directions_are_eigenvectors_with_their_own_noise(exact):
    hessian, _, noise = exact
    at = Curvature(network(), DATA)
    found = measure_directions(at, per="example", steps=53)
    values, vectors = torch.linalg.eigh(hessian)
    largest = int(found.eigenvalues[: found.resolved].argmax())
    assert float(found.eigenvalues[largest]) == pytest.approx(float(values[-1]), rel=1e-6)
    expected = float(vectors[:, -1] @ noise @ vectors[:, -1])
    assert float(found.noise[largest]) == pytest.approx(expected, rel=1e-6)
    top = top_eigenvalues(at).vectors
    assert measure_noise(at, directions=top).along[0] == pytest.approx(expected, rel=1e-5)
    with pytest.raises(ValueError, match="rows of length 53"):
        measure_noise(at, directions=torch.ones(2, 7))


def test_a_preconditioner_is_a_change_of_coordinates(exact):
    hessian, mean, noise = exact
    scale = torch.linspace(0.5, 2.0, 53).double()
    model = network()
    offset = 0.1 * torch.randn(53, generator=torch.Generator().manual_seed(0)).double()
    found = measure_directions(
        Curvature(model, DATA),
        per="example",
        steps=53,
        probes=100,
        scale=scale,
        offset=offset,
        velocity=mean,
    )
    scaled = torch.diag(scale) @ hessian @ torch.diag(scale)
    start = scale * (mean + hessian @ offset)
    for power in (0, 1, 3):
        expected = float(start @ torch.linalg.matrix_power(scaled, power) @ start)
        moment = float((found.eigenvalues**power * found.counts) @ found.gradient**2)
        assert moment == pytest.approx(expected, rel=1e-5)
    covariance = torch.diag(scale) @ noise @ torch.diag(scale)
    assert found.total.trace == pytest.approx(float(covariance.trace()), rel=1e-9)
    moment = float((found.eigenvalues * found.counts) @ found.noise)
    assert moment == pytest.approx(float((covariance @ scaled).trace()), rel=0.05)
    # The loss of the quadratic does not depend on the coordinates.
    assert found.rise == pytest.approx(float(mean @ offset + offset @ hessian @ offset / 2))
    weights = torch.cat([p.detach().flatten() for p in model.parameters()]) + offset
    assert float(found.position @ found.gradient) == pytest.approx(
        float((weights / scale) @ start), rel=1e-5
    )
    assert float(found.velocity @ found.gradient) == pytest.approx(
        float((scale * mean) @ start), rel=1e-5
    )


def test_given_gradients_replace_the_noise():
    at = Curvature(network(), DATA)
    draws = torch.randn(400, 53, generator=torch.Generator().manual_seed(0)).double()
    found = measure_directions(at, gradients=lambda: ((row, 4) for row in draws), steps=20)
    assert found.total.trace == pytest.approx(4 * 53, rel=0.02)
    assert found.total.error == pytest.approx(4 * (2 * 53 / 400) ** 0.5, rel=0.2)
    assert torch.allclose(
        found.noise[: found.resolved], torch.full((found.resolved,), 4.0).double(), rtol=0.4
    )


def test_negative_curvature_is_reported(exact):
    hessian, _, _ = exact
    found = measure_directions(Curvature(network(), DATA), per="example", steps=53, probes=20)
    assert bool((torch.linalg.eigvalsh(hessian)[0] < 0) == (found.eigenvalues.min() < -1e-6))
    assert 0 < found.negative_noise < 0.5
    convex = nn.Linear(4, 3).double()
    found = measure_directions(Curvature(convex, DATA), per="example", steps=15)
    assert found.negative_noise == found.negative_gradient == 0.0
    assert float(found.counts.sum()) == pytest.approx(15)


def test_ritz_pairs_of_a_diagonal_matrix():
    class Diagonal:
        dimension = 30

        def __matmul__(self, vector: Tensor) -> Tensor:
            return vector * torch.arange(30.0, dtype=torch.float64)

    start = torch.ones(30, dtype=torch.float64)
    found = ritz(Diagonal(), start, steps=10)
    for power in range(20):
        moment = float(found.components**2 @ found.values**power)
        assert moment == pytest.approx(
            float((torch.arange(30.0).double() ** power).sum()), rel=1e-9
        )
    full = ritz(Diagonal(), start, steps=50)
    assert torch.allclose(full.values, torch.arange(29.0, -1, -1).double(), atol=1e-8)
    assert float(full.errors.max()) < 1e-8
    with pytest.raises(ValueError, match="not zero"):
        ritz(Diagonal(), 0 * start)
    with pytest.raises(ValueError, match="at least 1"):
        ritz(Diagonal(), start, steps=0)
