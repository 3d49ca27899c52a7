"""Check curvature against other libraries, on a small VGG."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from gadam.analysis import Curvature, top_eigenvalues, trace


def small_vgg() -> nn.Module:
    def stage(inputs: int, outputs: int) -> list[nn.Module]:
        layers: list[nn.Module] = []
        for channels in (inputs, outputs):
            convolution = nn.Conv2d(channels, outputs, 3, padding=1, bias=False)
            layers += [convolution, nn.BatchNorm2d(outputs), nn.ReLU()]
        return layers

    model = nn.Sequential(
        *stage(1, 16),
        nn.MaxPool2d(2),
        *stage(16, 32),
        nn.MaxPool2d(2),
        *stage(32, 64),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(64, 10),
    )
    for layer in model:
        if isinstance(layer, nn.Conv2d):
            nn.init.kaiming_normal_(layer.weight, mode="fan_out", nonlinearity="relu")
    return model


@pytest.fixture(scope="module")
def problem() -> tuple[nn.Module, list[Any]]:
    torch.manual_seed(0)
    model = small_vgg()
    generator = torch.Generator().manual_seed(1)
    data = [
        (torch.randn(n, 1, 8, 8, generator=generator), torch.randint(10, (n,), generator=generator))
        for n in (40, 24)
    ]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for _ in range(5):  # Move away from the nearly flat start.
        for x, y in data:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
    optimizer.zero_grad()
    return model.eval(), data


@pytest.mark.filterwarnings("ignore")  # PyHessian warns about reference cycles.
def test_matches_pyhessian(problem):
    pyhessian = pytest.importorskip("pyhessian")
    model, data = problem
    theirs = pyhessian.hessian(model, nn.CrossEntropyLoss(), dataloader=data, cuda=False)
    curvature = Curvature(model, data)
    torch.manual_seed(2)
    v = torch.randn(curvature.dimension)
    v /= v.norm()  # PyHessian expects a unit vector.
    _, products = theirs.dataloader_hv_product(curvature.shaped(v))
    torch.testing.assert_close(curvature @ v, curvature.flat(products), rtol=1e-3, atol=1e-5)
    (largest,), _ = theirs.eigenvalues(maxIter=500, tol=1e-6)
    assert float(top_eigenvalues(curvature).values[0]) == pytest.approx(largest, rel=1e-3)
    traces = torch.tensor(theirs.trace(maxIter=60, tol=0.0), dtype=torch.float64)
    ours = trace(curvature, probes=60)
    theirs_error = float(traces.std()) / len(traces) ** 0.5
    assert abs(ours.value - float(traces.mean())) < 4 * (ours.error**2 + theirs_error**2) ** 0.5
    for p in model.parameters():  # PyHessian leaves its graphs attached to the gradients.
        p.grad = None


def test_matches_curvlinops(problem):
    curvlinops = pytest.importorskip("curvlinops")
    model, data = problem
    params = list(model.parameters())
    torch.manual_seed(2)
    for kind, name in (("hessian", "HessianLinearOperator"), ("ggn", "GGNLinearOperator")):
        curvature = Curvature(model, data, kind=kind)  # type: ignore[arg-type]
        v = torch.randn(curvature.dimension)
        theirs = getattr(curvlinops, name)(model, nn.CrossEntropyLoss(), params, data)
        torch.testing.assert_close(curvature @ v, theirs @ v, rtol=1e-3, atol=1e-4)
