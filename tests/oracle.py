"""The authors' update and averages, written from the formulas alone.

The oracle uses Python floats, scalar by scalar, and no torch. Tests compare every implementation
with it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence


class ScalarPadam:
    """The update of a single scalar parameter."""

    def __init__(
        self,
        theta: float,
        *,
        lr: float,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        partial: float = 0.5,
        decoupled: bool = True,
        form: str = "official",
        maximize: bool = False,
    ) -> None:
        self.theta = theta
        self.lr, self.betas, self.eps, self.weight_decay = lr, betas, eps, weight_decay
        self.amsgrad, self.p, self.decoupled, self.form = amsgrad, partial, decoupled, form
        self.sign = -1.0 if maximize else 1.0
        self.m = self.v = self.v_max = 0.0
        self.t = 0

    def step(self, gradient: float) -> float:
        self.t += 1
        beta1, beta2 = self.betas
        g = self.sign * gradient
        if self.decoupled:
            self.theta *= 1 - self.lr * self.weight_decay
        else:
            g += self.weight_decay * self.theta
        self.m = beta1 * self.m + (1 - beta1) * g
        self.v = beta2 * self.v + (1 - beta2) * g * g
        correction1, correction2 = 1 - beta1**self.t, 1 - beta2**self.t
        if self.form == "paper":
            v_hat = self.v / correction2
            if self.amsgrad:
                v_hat = self.v_max = max(self.v_max, v_hat)
            self.theta -= self.lr * (self.m / correction1) / (v_hat + self.eps) ** self.p
            return self.theta
        v = self.v
        if self.amsgrad:
            v = self.v_max = max(self.v_max, v)
        if self.p == 0.5:
            root = math.sqrt(v) / math.sqrt(correction2)
            self.theta -= self.lr / correction1 * self.m / (root + self.eps)
        else:
            rate = self.lr * math.sqrt(correction2) / correction1
            self.theta -= rate * self.m / (math.sqrt(v) + self.eps) ** (2 * self.p)
        return self.theta


def mean(samples: Sequence[float]) -> float:
    return math.fsum(samples) / len(samples)


def ema(samples: Sequence[float], decay: float) -> float:
    weights = [decay ** (len(samples) - 1 - i) for i in range(len(samples))]
    return math.fsum(w * s for w, s in zip(weights, samples)) / math.fsum(weights)


def power_ema(samples: Sequence[float], gamma: float) -> float:
    """Weigh each sample by its part of the profile t^γ, integrated in closed form."""
    n = len(samples)
    upper = [(i / n) ** (gamma + 1) for i in range(n + 1)]
    return math.fsum((upper[i + 1] - upper[i]) * s for i, s in enumerate(samples))


def linear_decay(samples: Sequence[float]) -> float:
    n = len(samples)
    return math.fsum(i * s for i, s in enumerate(samples, 1)) * 2 / (n * (n + 1))


def window(samples: Sequence[float], size: int) -> float:
    return mean(samples[-size:])


def sampled_steps(total: int, start: int, every: int) -> list[int]:
    """Return the sampled steps. Steps count 1, 2, …; the initial weights never enter."""
    return [
        t for t in range(1, total + 1) if t >= max(start, 1) and (t - max(start, 1)) % every == 0
    ]
