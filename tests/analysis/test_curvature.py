"""Check Hessian and Gauss-Newton products against the full matrices."""

from __future__ import annotations

import copy
import gc
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gadam.analysis import Curvature, measure_noise
from small_hessian import DATA, full_hessian, network


def to_matrix(curvature: Curvature) -> Tensor:
    return torch.stack([curvature @ e for e in torch.eye(curvature.dimension).double()])


@pytest.mark.parametrize("batchnorm", ["eval", "train"])
@pytest.mark.parametrize("method", ["reverse", "forward"])
def test_hessian_matches_full_matrix(batchnorm, method):
    model = network().train()
    state = copy.deepcopy(model.state_dict())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.simplefilter("ignore", DeprecationWarning)  # Raised inside torch.
        found = to_matrix(Curvature(model, DATA, batchnorm=batchnorm, method=method))
    torch.testing.assert_close(found, full_hessian(model, batchnorm), rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(found, found.T)
    # The model is unchanged.
    assert all(module.training for module in model.modules())
    assert all(torch.equal(v, state[k]) for k, v in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())


def test_cached_graphs_match_until_weights_change():
    model = network()
    seen: list[int] = []

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, int]:
        seen.append(len(batch[1]))
        return F.cross_entropy(model(batch[0]), batch[1]), len(batch[1])

    cached, plain = Curvature(model, DATA, loss), Curvature(model, DATA, graph_memory=0)
    torch.testing.assert_close(to_matrix(cached), to_matrix(plain), rtol=0, atol=0)
    # One call to estimate the memory and one per batch, for all 53 products.
    assert seen == [7, 7, 5, 9]
    with torch.no_grad():
        next(model.parameters()).add_(0.1)
    torch.testing.assert_close(to_matrix(cached), to_matrix(plain), rtol=0, atol=0)
    # In evaluation mode the running statistics matter as much as the weights.
    bn = next(module for module in model.modules() if isinstance(module, nn.BatchNorm1d))
    assert bn.running_var is not None
    bn.running_var.mul_(2.0)
    torch.testing.assert_close(to_matrix(cached), to_matrix(plain), rtol=0, atol=0)


class Doubled(nn.BatchNorm1d):
    """A user-defined BatchNorm layer."""

    def forward(self, input: Tensor) -> Tensor:
        return 2 * super().forward(input)


@pytest.mark.parametrize("affine", [True, False])
def test_batchnorm_replacement_computes_the_same_function(affine):
    """The replacement for stock BatchNorm is exact, and other BatchNorm layers are left alone."""
    torch.manual_seed(0)
    stock = nn.BatchNorm1d(5, affine=affine)
    patched = nn.BatchNorm1d(5)
    patched.forward = lambda x: 3 * x  # type: ignore[method-assign, assignment]
    layers = [nn.Linear(4, 5), stock, nn.Tanh(), Doubled(5), patched, nn.Linear(5, 3)]
    model = nn.Sequential(*layers, nn.BatchNorm1d(3, track_running_stats=False)).double()
    model(torch.randn(50, 4).double())
    found = {}
    for method in ("reverse", "forward"):
        found[method] = to_matrix(Curvature(model, DATA, method=method))
    torch.testing.assert_close(found["reverse"], found["forward"])
    model.eval()

    def loss(*params: Tensor) -> Tensor:
        named = dict(zip([name for name, _ in model.named_parameters()], params))
        losses = [
            F.cross_entropy(torch.func.functional_call(model, named, x), y, reduction="sum")
            for x, y in DATA
        ]
        return torch.stack(losses).sum() / 21

    blocks = torch.autograd.functional.hessian(loss, tuple(model.parameters()))
    sizes = [p.numel() for p in model.parameters()]
    expected = torch.cat(
        [
            torch.cat([b.reshape(m, n) for b, n in zip(row, sizes)], dim=1)
            for row, m in zip(blocks, sizes)
        ]
    )
    torch.testing.assert_close(found["reverse"], expected)
    assert "forward" not in stock.__dict__
    assert "forward" in patched.__dict__


def test_graphs_over_the_memory_limit_are_not_cached():
    model = network()
    small = Curvature(model, DATA, graph_memory=1000)
    torch.testing.assert_close(to_matrix(small), to_matrix(Curvature(model, DATA)), rtol=0, atol=0)
    assert not small._graphs


def test_gradient_and_loss_cover_all_data():
    model = network()
    curvature = Curvature(model, DATA)
    model.eval()
    x, y = (torch.cat(parts) for parts in zip(*DATA))
    loss = F.cross_entropy(model(x), y)
    expected = torch.autograd.grad(loss, list(model.parameters()))
    torch.testing.assert_close(curvature.gradient(), torch.cat([g.flatten() for g in expected]))
    assert curvature.mean_loss() == pytest.approx(loss.item())


def test_gauss_newton_matches_explicit_jacobians():
    model = network().eval()
    names = [name for name, _ in model.named_parameters()]
    total = torch.zeros(())
    for x, _ in DATA:
        params = {k: v.detach() for k, v in model.named_parameters()}
        jacobian = torch.func.jacrev(lambda p, x=x: torch.func.functional_call(model, p, x))(params)
        j = torch.cat([jacobian[n].flatten(2) for n in names], dim=2)  # (example, class, parameter)
        p = model(x).softmax(1)
        h = torch.diag_embed(p) - p[:, :, None] * p[:, None, :]
        total = total + torch.einsum("nap,nab,nbq->pq", j, h, j) / 21
    found = to_matrix(Curvature(model, DATA, kind="ggn"))
    torch.testing.assert_close(found, total.detach(), rtol=1e-10, atol=1e-12)
    assert torch.linalg.eigvalsh(found).min() > -1e-12


def test_hessian_and_gauss_newton_agree_for_linear_model():
    torch.manual_seed(0)
    model = nn.Linear(4, 3).double()
    both = [to_matrix(Curvature(model, DATA, kind=kind)) for kind in ("hessian", "ggn")]
    torch.testing.assert_close(both[0], both[1])


def test_custom_loss_with_frozen_and_unused_parameters():
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used = nn.Linear(4, 1).double()
            self.frozen = nn.Linear(4, 1).double().requires_grad_(False)
            self.unused = nn.Parameter(torch.zeros(2, dtype=torch.float64))

        def forward(self, x: Tensor) -> Tensor:
            return self.used(x) * self.frozen(x)

    model = Model()

    def squares(model: nn.Module, batch: Any) -> tuple[Tensor, int]:
        x, y = batch
        return ((model(x)[:, 0] - y) ** 2).mean(), len(y)

    hessian = Curvature(model, DATA, squares)
    assert hessian.names == ["unused", "used.weight", "used.bias"]
    found = to_matrix(hessian)
    assert not found[:2].any()
    x = torch.cat([x for x, _ in DATA])
    features = torch.cat([x, torch.ones(21, 1)], dim=1) * model.frozen(x)
    expected = 2 * features.T @ features / 21
    torch.testing.assert_close(found[2:, 2:], expected.detach())


def test_memory_stays_flat_and_graphs_are_freed():
    model = network()
    curvature = Curvature(model, DATA, batchnorm="train")
    v = torch.ones(curvature.dimension).double()

    def tensors() -> int:
        gc.collect()
        return sum(type(o) is Tensor for o in gc.get_objects())

    _ = curvature @ v
    before = tensors()
    for _ in range(5):
        _ = curvature @ v
    assert tensors() <= before


def test_invalid_arguments_raise():
    model = network()
    for keyword in ("kind", "batchnorm", "method"):
        with pytest.raises(ValueError, match=f"{keyword} must be .* got 'x'"):
            Curvature(model, DATA, **{keyword: "x"})  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="iterated many times"):
        Curvature(model, iter(DATA))
    with pytest.raises(ValueError, match="no data"):
        _ = Curvature(model, []) @ torch.zeros(Curvature(model, []).dimension)
    with pytest.raises(ValueError, match=r"a vector of shape \(53,\)"):
        _ = Curvature(model, DATA) @ torch.zeros(3)
    with pytest.raises(ValueError, match="no parameters that require a gradient"):
        Curvature(model.requires_grad_(False), DATA)


def test_edits_of_data_rebuild_the_graphs():
    """Writes to p.data do not change its version: only the values show them."""
    model = network()
    cached, plain = Curvature(model, DATA), Curvature(model, DATA, graph_memory=0)
    v = torch.randn(cached.dimension, dtype=torch.float64)
    before = cached @ v
    for parameter in model.parameters():
        parameter.data.mul_(2.0)
    torch.testing.assert_close(cached @ v, plain @ v, rtol=0, atol=0)
    assert not torch.allclose(cached @ v, before, rtol=0.1)
    for parameter in model.parameters():
        parameter.data = parameter.data / 2.0
    torch.testing.assert_close(cached @ v, plain @ v, rtol=0, atol=0)
    torch.testing.assert_close(cached @ v, before)


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (lambda m, b: F.cross_entropy(m(b[0]), b[1]), "number of examples.*got a Tensor"),
        (
            lambda m, b: (F.cross_entropy(m(b[0]), b[1], reduction="none"), len(b[1])),
            r"scalar tensor first, got shape \(7,\)",
        ),
        (lambda m, b: (1.5, len(b[1])), r"scalar tensor first, got 1\.5"),
    ],
)
@pytest.mark.parametrize("use", ["product", "gradient", "mean_loss", "noise"])
def test_wrong_losses_raise(loss, message, use):
    curvature = Curvature(network(), DATA, loss)
    with pytest.raises(TypeError, match=message.replace("7", "[17]")):
        if use == "product":
            curvature @ torch.ones(curvature.dimension, dtype=torch.float64)
        elif use == "noise":
            measure_noise(curvature)
        else:
            getattr(curvature, use)()
