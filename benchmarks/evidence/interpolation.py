"""Gradients between the iterate and its average: Schedule-Free, GPA, and what lies between them.

:class:`Interpolated` is one update with a few switches. At one setting it is Schedule-Free AdamW,
at another GPA-AdamW, and without interpolation it is AdamW with an average that only watches. The
ablation turns one switch at a time.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.optim import Optimizer

__all__ = ["VARIANTS", "Interpolated", "Variant", "ema_coefficient"]


class Interpolated(Optimizer):
    r"""Take gradients between the iterate and its average, and step from the iterate.

    With the iterate :math:`z`, its average :math:`x`, and a base optimizer, a step is

    .. math::
        y = (1 - \beta) z + \beta x, \quad
        z \leftarrow \mathrm{base}(z - \gamma \lambda y, \nabla f(y)), \quad
        x \leftarrow (1 - c) x + c z.

    The parameters hold :math:`y`; the model is evaluated at :math:`x`. Schedule-Free AdamW (Defazio
    et al., 2024, arXiv 2405.15682) has :math:`c` as in a mean weighted by :math:`\gamma^2`, and a
    base without momentum. GPA-AdamW (Defazio et al., 2025, arXiv 2512.17131) has a fixed
    :math:`c`, and a base with momentum.

    Args:
        base: The optimizer of the iterate, without weight decay. They share parameter groups.
        interpolation: β. Zero takes gradients at the iterate.
        weight_decay: λ, decoupled, at the point of the gradient.
        coefficient: A fixed c, or None for the mean of all iterates.
        least: The least c of the mean. A positive value makes it an EMA in the long run.
    """

    def __init__(
        self,
        base: Optimizer,
        interpolation: float,
        weight_decay: float,
        coefficient: float | None = None,
        least: float = 0.0,
    ) -> None:
        super().__init__(base.param_groups, {})
        self.base, self.param_groups = base, base.param_groups
        self.interpolation, self.weight_decay = interpolation, weight_decay
        self.coefficient, self.least = coefficient, least
        self.params = [p for group in self.param_groups for p in group["params"]]
        self.z = [p.detach().clone() for p in self.params]
        self.x = [p.detach().clone() for p in self.params]
        self.largest = 0.0  # learning rate so far
        self.weights = 0.0

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Take a step.

        Args:
            closure: Not supported.
        """
        lr = self.param_groups[0]["lr"]
        self.largest = max(self.largest, lr)
        self.weights += self.largest**2
        c = self.coefficient
        if c is None:
            c = max(self.largest**2 / self.weights, self.least)
        torch._foreach_add_(self.z, self.params, alpha=-lr * self.weight_decay)
        torch._foreach_copy_(self.params, self.z)
        self.base.step()
        torch._foreach_copy_(self.z, self.params)
        torch._foreach_lerp_(self.x, self.z, c)
        torch._foreach_lerp_(self.params, self.x, self.interpolation)

    @torch.no_grad()
    def eval(self) -> None:
        """Put the average into the parameters. Whoever calls it restores them."""
        torch._foreach_copy_(self.params, self.x)

    def train(self) -> None:
        """Do nothing: see :meth:`eval`."""


def ema_coefficient(total: int) -> float:
    """Return the weight of the newest iterate in an EMA with a half-life of 5% of the steps.

    Args:
        total: The number of steps.
    """
    return float(1 - 0.5 ** (1 / max(1.0, 0.05 * total)))


@dataclass(frozen=True)
class Variant:
    """One cell of the ablation.

    Args:
        interpolation: Where the gradient is: 0 at the iterate, 1 at the average.
        momentum: β₁ of the base.
        late: Whether late iterates have more weight (an EMA), or all the same.
    """

    interpolation: float
    momentum: float
    late: bool


# "between/plain/uniform" is Schedule-Free AdamW.
VARIANTS = {
    f"{where}/{inertia}/{weighting}": Variant(interpolation, momentum, late)
    for where, interpolation in (("between", 0.9), ("iterate", 0.0))
    for inertia, momentum in (("plain", 0.0), ("momentum", 0.9))
    for weighting, late in (("uniform", False), ("late", True))
}
