"""Advice: it is the best under the model, it comes back from made-up runs, and it says when not to be trusted."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import gadam
from gadam import theory
from gadam.theory import Segment, Quadratic, Spectrum

MODEL = Quadratic(Spectrum([1.0, 0.01], counts=[10, 1000]), noise=1.0, start=20.0)


def test_no_other_start_is_better():
    advice = theory.plan(MODEL, rate=0.5, steps=5000)
    run = Segment(5000, 0.5)
    losses = [theory.average(MODEL, run, first).loss for first in range(1, 5001, 7)]
    assert advice.average_loss <= min(losses) * (1 + 1e-3)
    assert advice.average_loss == pytest.approx(
        theory.average(MODEL, run, advice.first).loss, rel=1e-9
    )
    assert advice.last_loss == pytest.approx(theory.last_iterate(MODEL, run).loss)
    assert 0.5 < advice.gain < 1
    assert advice.average_loss < advice.decayed_loss < advice.last_loss


def test_the_stride_costs_what_it_may():
    run = Segment(5000, 0.5)
    for slack in (0.01, 0.2):
        advice = theory.plan(MODEL, 0.5, 5000, slack=slack)
        loss = theory.average(MODEL, run, advice.first, advice.every).loss
        assert loss <= (1 + slack) * advice.average_loss * (1 + 1e-9)
        assert advice.every > 5
    assert theory.plan(MODEL, 0.5, 5000, slack=0.2).every > theory.plan(MODEL, 0.5, 5000).every / 3


def test_a_simulated_run_gains_what_was_said():
    model = Quadratic(Spectrum([1.0, 0.05], [50, 200]), noise=1.0, start=5.0)
    advice = theory.plan(model, rate=0.3, steps=2000, batch_size=4.0)
    run = theory.simulate(
        model,
        Segment(2000, 0.3, 4.0),
        replicas=40,
        first=advice.first,
        every=advice.every,
        record=[2000],
        seed=1,
    )
    loss = run.loss["average"][0]
    error = loss.std(ddof=1) / np.sqrt(40)
    assert abs(loss.mean() - advice.average_loss) < 5 * error + 0.06 * advice.average_loss
    assert abs(run.loss["last"][0].mean() - advice.last_loss) < 0.1 * advice.last_loss


def test_it_says_when_not_to_be_trusted():
    steep = Quadratic(Spectrum([1.0, 1e-5], [10, 1000]), start=10.0)
    text = str(theory.plan(steep, rate=1.5, steps=1000))
    assert "overshoots" in text
    assert "99 % of the directions have not settled" in text
    calm = Quadratic(Spectrum([1.0, 1e-3], [10, 1000]), noise=1e-6, start=10.0)
    assert "hardly helps" in str(theory.plan(calm, rate=0.5, steps=1000))
    with pytest.raises(ValueError, match="stable below 2"):
        theory.plan(steep, rate=2.5, steps=10)


def test_the_quadratic_of_measurements_has_them():
    model = theory.from_measurements(
        parameters=5000,
        noise_trace=20.0,
        hessian_trace=80.0,
        largest_eigenvalue=10.0,
        excess_loss=2.0,
    )
    spectrum = model.spectrum
    assert spectrum.dimension == pytest.approx(5000)
    assert spectrum.eigenvalues.max() == pytest.approx(10.0)
    assert spectrum.counts @ spectrum.eigenvalues == pytest.approx(80.0, rel=0.01)
    assert model.noise * 5000 == pytest.approx(20.0)
    assert theory.last_iterate(model, Segment(0, 0.1)).loss == pytest.approx(2.0)
    given = theory.from_measurements(
        parameters=10, noise_trace=1.0, spectrum=Spectrum([1.0], [10]), excess_loss=5.0
    )
    assert np.allclose(given.start, 1.0)
    with pytest.raises(ValueError, match="say the spectrum"):
        theory.from_measurements(parameters=10, noise_trace=1.0, excess_loss=1.0)
    with pytest.raises(ValueError, match="not all of them"):
        theory.from_measurements(
            parameters=10,
            noise_trace=1.0,
            spectrum=Spectrum([1.0], [10]),
            hessian_trace=1.0,
            excess_loss=1.0,
        )
    with pytest.raises(ValueError, match="7 directions, the network 100"):
        theory.from_measurements(
            parameters=100, noise_trace=1.0, spectrum=Spectrum([1.0], [7]), excess_loss=1.0
        )
    with pytest.raises(ValueError, match="must lie between"):
        theory.from_measurements(
            parameters=10, noise_trace=1.0, hessian_trace=1.0, largest_eigenvalue=2.0, excess_loss=1
        )


def curve(model: Quadratic, rate: float, steps: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    at = np.arange(20, steps + 1, 20)
    run = theory.simulate(model, Segment(steps, rate), record=at.tolist(), seed=seed)
    return at, run.loss["last"][:, 0]


def test_a_curve_tells_when_it_has_settled_and_a_bound_of_the_gain():
    """One eigenvalue: the transient of the loss falls as q^2n, and noise costs E = P·αs²/(2(2 − αλ))."""
    size, rate = 50, 0.05
    model = Quadratic(Spectrum([0.2], [size]), noise=1.0, start=5.0)
    t, losses = curve(model, rate, 6000, seed=3)
    advice = theory.from_curve(t, losses)
    expected = -1 / (2 * np.log(1 - rate * 0.2))
    assert advice.time_constant == pytest.approx(expected, rel=0.15)
    settled = theory.last_iterate(model, Segment(6000, rate)).loss
    assert advice.settled_loss == pytest.approx(settled, rel=0.1)
    assert 2 * expected < advice.first < 1000
    assert 0 < advice.noise_cost < settled
    assert 1 <= advice.every <= 2 * expected
    # With all directions alike P_eff is P, and the indication is what noise costs.
    full = theory.from_curve(t, losses, effective_dimension=size)
    assert full.noise_cost == pytest.approx(settled, rel=0.25)


def test_the_indication_supposes_that_iterates_scatter_around_the_minimum():
    """Beside it the loss fluctuates more, as the docstring says: it is no bound."""
    model = Quadratic(Spectrum([0.2], [50]), noise=1.0, start=5.0, minimum=5.0, weight_decay=1.0)
    t, losses = curve(model, 0.05, 6000, seed=3)
    indicated = theory.from_curve(t, losses).noise_cost
    run = Segment(6000, 0.05)
    true = theory.last_iterate(model, run).loss - theory.average(model, run, 3000).loss
    assert indicated > true


def test_no_advice_without_a_level():
    t = np.arange(100)
    wobble = 0.01 * np.random.default_rng(0).standard_normal(100)
    with pytest.raises(ValueError, match="has not settled in 99 steps"):
        theory.from_curve(t, 5 - 0.02 * t + wobble)
    with pytest.raises(ValueError, match=r"does not settle|has not settled"):
        theory.from_curve(t, 2 * np.exp(-t / 3) + 0.02 * t + 0.1 * wobble)


def test_advice_is_what_averaging_takes():
    """T_avg and stride are those of gadam.Averaging: the same iterates are sampled."""
    weight = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    average = gadam.IterateAverage(optimizer, gadam.Averaging(start=5, every=3))
    for step in range(1, 13):
        weight.grad = torch.full_like(weight, -1.0)  # w_t = t
        optimizer.step()
        assert float(weight.detach()) == step
    with average.applied():
        assert float(weight.detach()) == np.mean([5, 8, 11])


@pytest.mark.parametrize(
    ("steps", "losses", "sentence"),
    [
        (range(5), range(5), "at least 8"),
        (range(10), [1.0] * 9, "a loss for each step"),
        (range(10), [np.nan] * 10, "finite"),
        ([0] * 10, range(10), "increasing"),
    ],
)
def test_curves_that_cannot_be(steps, losses, sentence):
    with pytest.raises(ValueError, match=sentence):
        theory.from_curve(list(steps), list(losses))
