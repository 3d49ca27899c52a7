"""Check the gradient noise against the gradients of each example."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gadam.analysis import Curvature, measure_noise
from small_hessian import DATA, network


def example_gradients(model: nn.Module) -> Tensor:
    model.eval()
    found = []
    for x, y in DATA:
        for i in range(len(y)):
            loss = F.cross_entropy(model(x[i : i + 1]), y[i : i + 1])
            grads = torch.autograd.grad(loss, list(model.parameters()))
            found.append(torch.cat([g.flatten() for g in grads]))
    return torch.stack(found)


@pytest.mark.parametrize("max_elements", [1, 200, 2**26])
def test_noise_is_the_covariance_of_example_gradients(max_elements):
    model = network()
    noise = measure_noise(Curvature(model, DATA), max_elements=max_elements)
    gradients = example_gradients(model)
    mean = gradients.mean(0)
    trace = float((gradients - mean).square().sum(1).mean())
    assert noise.trace == pytest.approx(trace, rel=1e-9)
    assert noise.error == 0.0
    assert noise.squared_gradient == pytest.approx(float(mean.square().sum()), rel=1e-9)
    assert noise.scale == pytest.approx(trace / float(mean.square().sum()))
    assert noise.per_parameter == pytest.approx(trace / 53)


def linear(rows: Tensor, sizes: list[int]) -> Curvature:
    """Build a problem where the gradient of each example is a given row."""
    model = nn.Linear(rows.shape[1], 1, bias=False).double()

    def loss(model: nn.Module, batch: Tensor) -> tuple[Tensor, int]:
        return (model.weight * batch).sum() / len(batch), len(batch)  # type: ignore[operator]

    return Curvature(model, list(rows.split(sizes)), loss)


@pytest.mark.parametrize("mean", [0.0, 5.0])
def test_batch_estimate_and_its_standard_error(mean):
    generator = torch.Generator().manual_seed(0)
    found = []
    for _ in range(200):
        rows = mean + torch.randn(200, 5, generator=generator).double()
        found.append(measure_noise(linear(rows, [16] * 12 + [8]), per="batch"))
    traces = torch.tensor([n.trace for n in found])
    assert float(traces.mean()) == pytest.approx(5.0, rel=0.05)
    # The stated error is the error of the trace, regardless of the mean gradient.
    stated = sum(n.error for n in found) / len(found)
    assert stated == pytest.approx(float(traces.std()), rel=0.2)


def test_identical_examples_have_no_noise():
    noise = measure_noise(linear(torch.ones(72, 3).double(), [32, 32, 8]), per="batch")
    assert noise.trace == pytest.approx(0.0, abs=1e-20)
    assert noise.error == pytest.approx(0.0, abs=1e-20)
    assert noise.squared_gradient == pytest.approx(3.0)


def test_unsupported_requests_raise():
    at = Curvature(network(), DATA, batchnorm="train")
    with pytest.raises(ValueError, match='per="batch"'):
        measure_noise(at)
    assert measure_noise(at, per="batch").trace > 0
    with pytest.raises(ValueError, match="at least two batches"):
        measure_noise(Curvature(network(), DATA[:1]), per="batch")
    with pytest.raises(ValueError, match="per must be 'example' or 'batch'"):
        measure_noise(at, per="x")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="no data"):
        measure_noise(Curvature(network(), []))
