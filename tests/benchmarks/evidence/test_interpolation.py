"""One update is Schedule-Free AdamW, GPA-AdamW, and AdamW with an average, by its switches."""

from __future__ import annotations

import pytest
import torch
from benchmarks.evidence.interpolation import VARIANTS, Interpolated
from benchmarks.evidence.methods import Knobs
from torch import Tensor, nn
from torch.optim import Optimizer

from benchmarks.evidence import methods

STEPS = 40


def trained(optimizer: Optimizer, model: nn.Module, warm_up: int = 0) -> list[Tensor]:
    """Train on fixed data, and return the weights at the point of evaluation."""
    x = torch.randn(32, 5, generator=torch.Generator().manual_seed(1))
    y = x.sin().sum(1, keepdim=True)
    lr = optimizer.param_groups[0]["lr"]
    for step in range(1, STEPS + 1):
        if warm_up:
            for group in optimizer.param_groups:
                group["lr"] = lr * min(1.0, step / warm_up)
        optimizer.zero_grad()
        (model(x) - y).square().mean().backward()
        optimizer.step()
    optimizer.eval()  # type: ignore[attr-defined]
    return [p.detach().clone() for p in model.parameters()]


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 1))


@pytest.mark.parametrize("decay", [0.0, 0.3])
def test_the_first_variant_is_schedule_free_adamw(decay: float) -> None:
    knobs = Knobs(0.02, decay)
    total = STEPS * 2
    a, b = model(), model()
    theirs = trained(methods.build("schedule-free-adamw", a, knobs, total), a)
    ours = trained(
        methods.build("between/plain/uniform", b, knobs, total), b, warm_up=round(0.05 * total)
    )
    for mine, peer in zip(ours, theirs):
        torch.testing.assert_close(mine, peer, atol=2e-5, rtol=2e-4)


def test_gpa_follows_its_published_update() -> None:
    """x, y, and z in float64, written as in the paper."""
    lr, decay, mu_x, mu_y, beta1, beta2 = 0.05, 0.1, 0.95, 0.7, 0.9, 0.999
    p = nn.Parameter(torch.tensor([1.0, -2.0], dtype=torch.float64))
    holder = nn.Module()
    holder.p = p
    optimizer = methods.build("gpa", holder, Knobs(lr, decay, mu_x), STEPS)
    x, z = p.detach().clone(), p.detach().clone()
    m, v = torch.zeros_like(x), torch.zeros_like(x)
    for t in range(1, STEPS + 1):
        y = mu_y * x + (1 - mu_y) * z
        torch.testing.assert_close(p.detach(), y)
        gradient = 4 * y**3 - 1
        p.grad = gradient.clone()
        optimizer.step()
        m = beta1 * m + (1 - beta1) * gradient
        v = beta2 * v + (1 - beta2) * gradient**2
        step = m / (1 - beta1**t) / ((v / (1 - beta2**t)).sqrt() + 1e-8)
        z = z - lr * decay * y - lr * step
        x = mu_x * x + (1 - mu_x) * z
    with methods.own_point("gpa", optimizer).applied(holder):
        torch.testing.assert_close(p.detach(), x)
    torch.testing.assert_close(p.detach(), mu_y * x + (1 - mu_y) * z)


def test_without_interpolation_the_average_only_watches() -> None:
    a, b = model(), model()
    adamw = torch.optim.AdamW(a.parameters(), 0.02, weight_decay=0.0)
    inner = torch.optim.AdamW(b.parameters(), 0.02, weight_decay=0.0)
    watching = Interpolated(inner, 0.0, 0.0)
    x = torch.ones(4, 5)
    iterates = []
    for _ in range(5):
        for net, optimizer in ((a, adamw), (b, watching)):
            optimizer.zero_grad()
            net(x).square().sum().backward()
            optimizer.step()
        iterates.append([p.detach().clone() for p in a.parameters()])
        for p, q in zip(a.parameters(), b.parameters()):
            assert torch.equal(p, q)
    for average, *points in zip(watching.x, *iterates):
        torch.testing.assert_close(average, torch.stack(points).mean(0))


def test_late_variants_forget() -> None:
    assert VARIANTS["between/plain/late"].late
    a, b = model(), model()
    uniform = methods.build("iterate/plain/uniform", a, Knobs(0.02, 0.0), STEPS)
    late = methods.build("iterate/plain/late", b, Knobs(0.02, 0.0), STEPS)
    trained(uniform, a)
    trained(late, b)
    assert isinstance(uniform, Interpolated)
    assert isinstance(late, Interpolated)
    for mean, ema, z in zip(uniform.x, late.x, late.z):
        assert (ema - z).norm() < (mean - z).norm()
