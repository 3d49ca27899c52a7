"""The authors' update and averages, written from the formulas alone.

The oracle uses Python floats, scalar by scalar, and no torch. Tests compare every implementation
with it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


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
        self.update_moments(gradient)
        return self.update_parameter()

    def update_moments(self, gradient: float) -> None:
        self.t += 1
        beta1, beta2 = self.betas
        g = self.sign * gradient
        if not self.decoupled:
            g += self.weight_decay * self.theta
        self.m = beta1 * self.m + (1 - beta1) * g
        self.v = beta2 * self.v + (1 - beta2) * g * g

    def update_parameter(self) -> float:
        beta1, beta2 = self.betas
        correction1, correction2 = 1 - beta1**self.t, 1 - beta2**self.t
        if self.decoupled:
            self.theta *= 1 - self.lr * self.weight_decay
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


@dataclass(frozen=True)
class Half:
    """A storage type of 16 bits."""

    digits: int  # binary digits of the significand, the leading one included
    smallest: int  # the exponent of the smallest normal number
    largest: float

    def ulp(self, x: float) -> float:
        """Return the distance between the stored numbers around x."""
        exponent = max(math.frexp(x)[1] - 1, self.smallest) if x else self.smallest
        return math.ldexp(1.0, exponent - self.digits + 1)

    def nearest(self, x: float) -> float:
        """Round once, to the nearest stored number, ties to even."""
        if math.isnan(x) or math.isinf(x):
            return x
        unit = self.ulp(x)
        rounded = math.copysign(round(x / unit) * unit, x)
        return math.copysign(math.inf, x) if abs(rounded) > self.largest else rounded


FLOAT16 = Half(11, -14, 65504.0)
BFLOAT16 = Half(8, -126, float.fromhex("0x1.fep127"))


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
