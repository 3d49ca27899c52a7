"""Heavy-ball momentum and Adam, against simulations and torch's own optimizers."""

from __future__ import annotations

import copy
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gadam import theory
from gadam.theory import Quadratic, Segment, Spectrum

SEGMENTS = st.lists(
    st.builds(Segment, st.integers(0, 10), st.floats(0.01, 0.8), st.floats(0.5, 20)),
    min_size=1,
    max_size=3,
).filter(lambda segments: any(s.steps for s in segments))
METHODS = st.one_of(
    st.fixed_dictionaries({"momentum": st.floats(0.05, 0.95), "dampening": st.floats(0, 0.9)}),
    st.fixed_dictionaries({"momentum": st.floats(0.05, 0.95), "nesterov": st.just(True)}),
)


def torch_iterates(
    model: Quadratic, segments: list[Segment], noise: np.ndarray
) -> list[torch.Tensor]:
    """Run torch.optim.SGD, or decoupled decay on top of it, with the given noise.

    Args:
        noise: Standard normal draws, of shape (steps, replicas, K).
    """
    w = torch.nn.Parameter(torch.tensor(np.broadcast_to(model.start, noise.shape[1:]).copy()))
    optimizer = torch.optim.SGD(
        [w],
        lr=1.0,
        momentum=model.momentum,
        dampening=model.dampening,
        nesterov=model.nesterov,
        weight_decay=0.0 if model.decoupled else model.weight_decay,
    )
    lam, minimum = torch.tensor(model.spectrum.eigenvalues), torch.tensor(model.minimum.copy())
    iterates, t = [], 0
    for segment in segments:
        optimizer.param_groups[0]["lr"] = segment.rate
        for _ in range(segment.steps):
            spread = torch.tensor(np.sqrt(model.noise / segment.batch_size))
            w.grad = lam * (w.detach() - minimum) + spread * torch.tensor(noise[t])
            before = w.detach().clone()
            optimizer.step()
            if model.decoupled:
                w.data -= segment.rate * model.weight_decay * before
            iterates.append(w.detach().clone())
            t += 1
    return iterates


@given(SEGMENTS, METHODS, st.integers(1, 12), st.integers(1, 5), st.floats(0, 0.4), st.booleans())
def test_moments_equal_those_of_torch_sgd(segments, method, first, every, gamma, decoupled):
    """Every point is linear in the noise, so unit noise at each step gives its exact moments."""
    model = Quadratic(
        Spectrum([0.0, 0.3, 1.0]),
        noise=[0.7, 0.2, 1.1],
        start=[1.0, -2.0, 0.5],
        minimum=[0.3, 1.0, -1.0],
        weight_decay=gamma,
        decoupled=decoupled,
        **method,
    )
    steps = sum(s.steps for s in segments)
    # Replica 0 has no noise. Replica i has unit noise at step i only.
    noise = np.zeros((steps, steps + 1, 3))
    noise[range(steps), range(1, steps + 1)] = 1.0
    points = torch.stack(torch_iterates(model, segments, noise)).numpy()
    sampled = list(range(first, steps + 1, every))
    weights = {"last": np.eye(steps)[-1]}
    found = {"last": theory.last_iterate(model, segments)}
    if sampled:
        uniform, moving = np.zeros(steps), np.zeros(steps)
        uniform[np.array(sampled) - 1] = 1 / len(sampled)
        moving[np.array(sampled) - 1] = 0.8 ** np.arange(len(sampled))[::-1]
        weights |= {"average": uniform, "ema": moving / moving.sum()}
        found["average"] = theory.average(model, segments, first, every)
        found["ema"] = theory.ema(model, segments, 0.8, first, every)
    for name, moments in found.items():
        point = np.einsum("t,trk->rk", weights[name], points)
        np.testing.assert_allclose(moments.mean, point[0], rtol=1e-9, atol=1e-11)
        variance = ((point[1:] - point[0]) ** 2).sum(0)
        np.testing.assert_allclose(moments.variance, variance, rtol=1e-8, atol=1e-12)


@given(METHODS, st.integers(1, 15), st.integers(0, 15), st.floats(0.05, 0.8))
def test_separation_with_momentum(method, steps, later, rate):
    model = Quadratic(Spectrum([0.2, 1.0], [2, 3]), noise=0.5, start=[1.0, 2.0], **method)
    total = steps + later
    noise = np.zeros((total, total + 1, 2))
    noise[range(total), range(1, total + 1)] = 1.0
    points = torch.stack(torch_iterates(model, [Segment(total, rate)], noise)).numpy()
    moved = points[-1] - points[steps - 1]
    expected = model.spectrum.counts @ (moved[0] ** 2 + ((moved[1:] - moved[0]) ** 2).sum(0))
    found = theory.squared_separation(model, Segment(steps, rate), later)
    assert found == pytest.approx(expected, rel=1e-8, abs=1e-12)


@pytest.mark.parametrize(
    "method",
    [{"momentum": 0.9}, {"momentum": 0.9, "nesterov": True}, {"momentum": 0.8, "dampening": 0.8}],
)
def test_simulation_agrees(method):
    """All four estimators: last iterate, average, EMA, and the last iterate of a decay."""
    model = Quadratic(
        Spectrum([1.0, 0.1, 0.01], [40, 40, 40]),
        noise=[1.0, 0.5, 2.0],
        start=2.0,
        minimum=0.5,
        weight_decay=0.01,
        decoupled=False,
        **method,
    )
    constant = [Segment(250, 0.1, 2.0)]
    decayed = [Segment(150, 0.1, 2.0), Segment(50, 0.05, 2.0), Segment(50, 0.01, 2.0)]
    for segments in (constant, decayed):
        result = theory.simulate(
            model, segments, replicas=60, first=120, every=3, decay=0.9, record=[250], seed=2
        )
        for name, moments in {
            "last": theory.last_iterate(model, segments),
            "average": theory.average(model, segments, 120, 3),
            "ema": theory.ema(model, segments, 0.9, 120, 3),
        }.items():
            z = (result.loss[name][0].mean() - moments.loss) / (moments.loss_std / np.sqrt(60))
            assert abs(z) < 4, (name, z)


@given(METHODS, st.floats(0, 0.5), st.booleans())
def test_stability_limit_is_sharp(method, gamma, decoupled):
    model = Quadratic(
        Spectrum([0.1, 3.0]), noise=0.0, weight_decay=gamma, decoupled=decoupled, **method
    )
    limit = model.stable_below()
    start = theory.last_iterate(model, Segment(0, 1.0)).loss
    assert theory.last_iterate(model, Segment(1000, 0.98 * limit)).loss < 1e-3 * start
    assert theory.last_iterate(model, Segment(150, 1.02 * limit)).loss > 1e3 * start
    with pytest.raises(ValueError, match=f"stable only at rates below {limit:.4g}, got"):
        theory.last_iterate(model, Segment(10**6, 1.02 * limit))


def test_iterate_settles_where_the_model_says():
    for decoupled in (True, False):
        model = Quadratic(
            Spectrum([0.5, 2.0]),
            minimum=3.0,
            weight_decay=0.2,
            momentum=0.9,
            preconditioner=[0.5, 2.0] if decoupled else None,
            decoupled=decoupled,
        )
        settled = theory.last_iterate(model, Segment(20_000, 0.05)).mean
        np.testing.assert_allclose(settled, model.settling_point, rtol=1e-9)


def test_slow_directions_see_an_effective_rate():
    """Where αλ is small, momentum μ acts as the rate α/(1 − μ): the same mean and variance."""
    lam, rate, mu = 0.01, 0.05, 0.9
    heavy = Quadratic(Spectrum([lam]), start=1.0, momentum=mu)
    plain = Quadratic(Spectrum([lam]), start=1.0)
    for n in (20_000, 200_000):
        a = theory.average(heavy, Segment(n, rate), n // 2)
        b = theory.average(plain, Segment(n, rate / (1 - mu)), n // 2)
        assert a.variance[0] == pytest.approx(b.variance[0], rel=0.01)
    a = theory.last_iterate(heavy, Segment(20_000, rate))
    b = theory.last_iterate(plain, Segment(20_000, rate / (1 - mu)))
    assert a.variance[0] == pytest.approx(b.variance[0], rel=0.01)


def test_long_averages_do_not_depend_on_momentum():
    """n·Var of the average goes to s²/λ² for any method that weights all gradients equally."""
    for momentum, nesterov in ((0.0, False), (0.9, False), (0.9, True)):
        model = Quadratic(Spectrum([2.0]), start=0.0, momentum=momentum, nesterov=nesterov)
        n = 10**6
        assert theory.average(model, Segment(n, 0.05)).variance[0] * n == pytest.approx(
            0.25, rel=1e-3
        )


# Linear regression, with torch's own optimizers.


class Regression:
    """Least squares with fresh label noise at each step: an exact quadratic with known noise.

    The replicas are rows of one parameter. SGD and AdamW treat all entries alike, so one optimizer
    trains all replicas independently.
    """

    def __init__(self, replicas: int) -> None:
        generator = torch.Generator().manual_seed(5)
        x = torch.randn(64, 8, generator=generator, dtype=torch.float64)
        self.x = x * torch.linspace(0.3, 1.5, 8, dtype=torch.float64)
        self.truth = torch.randn(8, generator=generator, dtype=torch.float64)
        self.generator, self.replicas = generator, replicas
        self.hessian = (self.x.T @ self.x / 64).numpy()
        self.noise = self.hessian / 64  # of the gradient, for labels with unit noise

    def loss(self, w: torch.Tensor) -> torch.Tensor:
        labels = self.x @ self.truth + torch.randn(
            self.replicas, 64, generator=self.generator, dtype=torch.float64
        )
        return ((w @ self.x.T - labels) ** 2).mean(1).sum() / 2

    def excess(self, w: torch.Tensor) -> np.ndarray:
        away = w - self.truth
        return (((away @ self.x.T) ** 2).mean(1) / 2).numpy()

    def train(
        self,
        w: torch.nn.Parameter,
        optimizer: torch.optim.Optimizer,
        steps: int,
        first: int,
        factor: Callable[[int], float] = lambda t: 1.0,
    ) -> dict[str, np.ndarray]:
        total, moving, rate = torch.zeros_like(w), torch.zeros_like(w), None
        for t in range(1, steps + 1):
            group = optimizer.param_groups[0]
            rate = group["lr"] if rate is None else rate
            group["lr"] = rate * factor(t - 1)
            optimizer.zero_grad()
            self.loss(w).backward()
            optimizer.step()
            if t >= first:
                total += w.detach()
                moving = 0.95 * moving + 0.05 * w.detach()
        count = steps - first + 1
        return {
            "last": self.excess(w.detach()),
            "average": self.excess(total / count),
            "ema": self.excess(moving / (1 - 0.95**count)),
        }


def check_losses(losses: dict[str, np.ndarray], model: Quadratic, segments, first, slack=0.0):
    predicted = {
        "last": theory.last_iterate(model, segments).loss,
        "average": theory.average(model, segments, first).loss,
        "ema": theory.ema(model, segments, 0.95, first).loss,
    }
    for name, values in losses.items():
        error = values.std(ddof=1) / np.sqrt(len(values))
        assert abs(values.mean() - predicted[name]) < 4 * error + slack * predicted[name], name


@pytest.mark.parametrize("nesterov", [False, True])
def test_regression_with_torch_sgd(nesterov):
    problem = Regression(replicas=400)
    arguments = {"momentum": 0.9, "nesterov": nesterov, "weight_decay": 0.01}
    model = theory.from_hessian(
        problem.hessian,
        problem.noise,
        start=0.0,
        minimum=problem.truth.numpy(),
        decoupled=False,
        **arguments,
    )
    halves = {"constant": lambda t: 1.0, "decay": lambda t: 1.0 if t < 150 else 0.1}
    for name, factor in halves.items():
        w = torch.nn.Parameter(torch.zeros(problem.replicas, 8, dtype=torch.float64))
        optimizer = torch.optim.SGD([w], lr=0.02, **arguments)
        losses = problem.train(w, optimizer, 300, 100, factor)
        last = 0.02 if name == "constant" else 0.002
        check_losses(losses, model, [Segment(150, 0.02), Segment(150, last)], 100)


def test_regression_with_torch_adamw():
    """Freeze the measured second moments: the rest is heavy-ball SGD in rescaled weights."""
    problem = Regression(replicas=400)
    w = torch.nn.Parameter(torch.zeros(problem.replicas, 8, dtype=torch.float64))
    optimizer = torch.optim.AdamW([w], lr=0.01, betas=(0.9, 0.999), weight_decay=0.01)
    problem.train(w, optimizer, 1500, 1500)  # until the second moments have converged
    state = optimizer.state[w]
    moments = state["exp_avg_sq"].mean(0) / (1 - 0.999 ** int(state["step"]))
    # Continue from the same weights in all replicas, with the optimizer's state.
    w.data.copy_(w.detach().mean(0).expand_as(w) + 0.02)
    state["exp_avg"].zero_()
    model = theory.from_hessian(
        problem.hessian,
        problem.noise,
        start=w.detach()[0].numpy(),
        minimum=problem.truth.numpy(),
        divisor=moments.sqrt().numpy() + 1e-8,
        momentum=0.9,
        dampening=0.9,
        weight_decay=0.01,
        buffer=0.0,
    )
    before = problem.excess(w.detach())[0]
    assert theory.last_iterate(model, Segment(0, 0.01)).loss == pytest.approx(before)
    # The second moments fluctuate by 3% around their mean, which is not in the model.
    halves = {"constant": lambda t: 1.0, "decay": lambda t: 1.0 if t < 150 else 0.1}
    continued, weights = copy.deepcopy(optimizer.state_dict()), w.detach().clone()
    for name, factor in halves.items():
        w.data.copy_(weights)
        optimizer.load_state_dict(copy.deepcopy(continued))
        losses = problem.train(w, optimizer, 300, 100, factor)
        last = 0.01 if name == "constant" else 0.001
        check_losses(losses, model, [Segment(150, 0.01), Segment(150, last)], 100, slack=0.02)
