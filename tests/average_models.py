"""A small network with BatchNorm, and a function to train it."""

from __future__ import annotations

import copy
import inspect

import torch
from torch import nn


def small_model(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 4, 3, bias=False),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(144, 2),
    ).to(dtype)


def fit(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int, seed: int = 0) -> None:
    generator = torch.Generator().manual_seed(seed)
    model.train()
    for _ in range(steps):
        data = torch.randn(8, 3, 8, 8, generator=generator)
        optimizer.zero_grad()
        model(data).square().mean().backward()
        optimizer.step()


def in_one_process() -> dict[str, bool]:
    """Return the option of torch's distributed checkpoints. Old versions find out themselves."""
    import torch.distributed.checkpoint.state_dict_saver as dcp

    return {"no_dist": True} if "no_dist" in inspect.signature(dcp.save).parameters else {}


def snapshot(model: nn.Module) -> dict[str, torch.Tensor]:
    return copy.deepcopy(model.state_dict())


BATCHES = [torch.randn(8, 3, 8, 8, generator=torch.Generator().manual_seed(i)) for i in range(3)]
