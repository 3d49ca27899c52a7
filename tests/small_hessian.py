"""A network small enough to build its full Hessian."""

from __future__ import annotations

import copy
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

BatchNorm = Literal["eval", "train"]


def network() -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Tanh(), nn.Dropout(0.5), nn.Linear(5, 3)
    ).double()
    model(torch.randn(50, 4).double())  # Give the running statistics non-default values.
    return model


DATA = [
    (
        torch.randn(n, 4, generator=torch.Generator().manual_seed(n)).double(),
        torch.arange(n) % 3,
    )
    for n in (7, 5, 9)
]


def full_hessian(model: nn.Module, batchnorm: BatchNorm) -> Tensor:
    """Build the Hessian of the mean loss with ``torch.autograd.functional.hessian``."""
    model = copy.deepcopy(model).eval()
    for module in model.modules():
        if isinstance(module, nn.BatchNorm1d) and batchnorm == "train":
            module.train()
            module.momentum = 0.0
    names = [name for name, _ in model.named_parameters()]
    shapes = [p.shape for p in model.parameters()]

    def loss(flat: Tensor) -> Tensor:
        parts = flat.split([s.numel() for s in shapes])
        params = {n: v.view(s) for n, v, s in zip(names, parts, shapes)}
        total = sum(
            F.cross_entropy(torch.func.functional_call(model, params, x), y, reduction="sum")
            for x, y in DATA
        )
        assert isinstance(total, Tensor)
        return total / 21

    return torch.autograd.functional.hessian(
        loss, torch.cat([p.detach().flatten() for p in model.parameters()])
    )
