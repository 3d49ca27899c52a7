"""The contract table: every optimizer is a row, and all rows pass the same tests.

To add an optimizer, add a row.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.optim import Optimizer

import gadam
from gadam.optim import cpu


@dataclass(frozen=True)
class Row:
    """An optimizer, how to construct it, and what it supports."""

    name: str
    make: Callable[..., Optimizer]  # (params, **keywords)
    keywords: dict[str, Any] = field(default_factory=dict)
    averages: bool = False  # takes average=
    flags: bool = True  # takes foreach=, differentiable=, maximize=, tensor lr

    def __call__(self, params: Any, **keywords: Any) -> Any:
        return self.make(params, **{**self.keywords, **keywords})

    def __str__(self) -> str:
        return self.name


def _lookahead(inner: Callable[..., Optimizer]) -> Callable[..., Optimizer]:
    def make(params: Any, k: int = 3, until_average: bool = False, **keywords: Any) -> Optimizer:
        return gadam.Lookahead(inner(params, **keywords), k=k, until_average=until_average)

    return make


ROWS = [
    Row("Padam", gadam.Padam, {"lr": 0.02}),
    Row("Padam-L2-amsgrad", gadam.Padam, {"lr": 0.02, "weight_decay": 0.1, "amsgrad": True}),
    Row("Padam-half", gadam.Padam, {"lr": 0.01, "partial": 0.5, "weight_decay": 0.1}),
    Row("Padam-zero", gadam.Padam, {"lr": 0.01, "partial": 0.0}),
    Row("Padam-paper", gadam.Padam, {"lr": 0.02, "form": "paper", "amsgrad": True}),
    Row("PadamW", gadam.PadamW, {"lr": 0.02, "weight_decay": 0.1}),
    Row("PadamW-paper", gadam.PadamW, {"lr": 0.02, "weight_decay": 0.1, "form": "paper"}),
    Row("Gadam", gadam.Gadam, {"lr": 0.01}, averages=True),
    Row("Gadam-amsgrad", gadam.Gadam, {"lr": 0.01, "amsgrad": True}, averages=True),
    Row("Gadam-L2", gadam.Gadam, {"lr": 0.01, "decoupled_weight_decay": False}, averages=True),
    Row("Gadam-paper", gadam.Gadam, {"lr": 0.01, "form": "paper"}, averages=True),
    Row("GadamX", gadam.GadamX, {"lr": 0.02}, averages=True),
    Row(
        "GadamX-language",
        gadam.GadamX,
        {"lr": 0.02, "partial": 0.2, "amsgrad": True},
        averages=True,
    ),
    Row("Gadam-fused", gadam.Gadam, {"lr": 0.01, "fused": True}, averages=True, flags=False),
    Row("Lookahead-SGD", _lookahead(torch.optim.SGD), {"lr": 0.02, "momentum": 0.9}, flags=False),
    Row("Lookahead-AdamW", _lookahead(torch.optim.AdamW), {"lr": 0.01}, flags=False),
    Row("Lookahead-Gadam", _lookahead(gadam.Gadam), {"lr": 0.01}, averages=True, flags=False),
    Row(
        "Gadam-LH",
        _lookahead(gadam.Gadam),
        {"lr": 0.01, "until_average": True},
        averages=True,
        flags=False,
    ),
]
if cpu.is_available():  # otherwise there is only torch's fused kernel, for Gadam
    ROWS += [
        Row("Padam-fused", gadam.Padam, {"lr": 0.02, "fused": True, "amsgrad": True}, flags=False),
        Row("GadamX-fused", gadam.GadamX, {"lr": 0.02, "fused": True}, averages=True, flags=False),
    ]
BY_NAME = {row.name: row for row in ROWS}
FLAGGED = [row for row in ROWS if row.flags]
AVERAGING = [row for row in ROWS if row.averages]


def parameters(dtype: torch.dtype = torch.float32, seed: int = 0) -> list[torch.nn.Parameter]:
    """Return shapes that break naive code: a transposed matrix, a 0-dim and an empty tensor."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)

    tensors = [draw(4, 3), draw(3, 5).t(), draw(), draw(0, 2), draw(7)]
    return [torch.nn.Parameter(t) for t in tensors]


def set_gradients(params: list[torch.nn.Parameter], step: int) -> None:
    """Set gradients that depend on the step and on the weights, as in training."""
    generator = torch.Generator().manual_seed(1000 + step)
    for p in params:
        noise = torch.randn(p.shape, generator=generator, dtype=torch.float64)
        p.grad = (noise + 0.5 * p.detach().double()).to(p.dtype)


def train(
    optimizer: Optimizer, params: list[torch.nn.Parameter], steps: int, first: int = 1
) -> list[list[torch.Tensor]]:
    """Run the steps first, first + 1, … and return the iterates."""
    iterates = []
    for step in range(first, first + steps):
        set_gradients(params, step)
        optimizer.step()
        iterates.append([p.detach().clone() for p in params])
    return iterates


def same(a: Any, b: Any) -> None:
    """Assert bitwise equality, types included, of nested dicts, lists and tuples."""
    if isinstance(a, torch.Tensor):
        assert (a.dtype, a.device) == (b.dtype, b.device)
        torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)
    elif isinstance(a, dict):
        assert a.keys() == b.keys()
        for key in a:
            same(a[key], b[key])
    elif isinstance(a, (list, tuple)):
        assert type(a) is type(b)
        assert len(a) == len(b)
        for x, y in zip(a, b):
            same(x, y)
    else:
        assert a == b
