"""Tests of advice: optimal under the model, from measurements, with caveats."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import gadam
from gadam import theory
from gadam.theory import Quadratic, Segment, Spectrum

MODEL = Quadratic(Spectrum([1.0, 0.01], counts=[10, 1000]), noise=1.0, start=20.0)


def test_no_other_start_is_better():
    advice = theory.plan(MODEL, rate=0.5, steps=5000)
    segment = Segment(5000, 0.5)
    losses = [theory.average(MODEL, segment, first).loss for first in range(1, 5001, 7)]
    assert advice.average_loss <= min(losses) * (1 + 1e-3)
    assert advice.average_loss == pytest.approx(
        theory.average(MODEL, segment, advice.first).loss, rel=1e-9
    )
    assert advice.last_loss == pytest.approx(theory.last_iterate(MODEL, segment).loss)
    assert 0.5 < advice.gain < 1
    assert advice.average_loss < advice.decayed_loss < advice.last_loss


def test_stride_stays_within_slack():
    segment = Segment(5000, 0.5)
    for slack in (0.01, 0.2):
        advice = theory.plan(MODEL, 0.5, 5000, slack=slack)
        loss = theory.average(MODEL, segment, advice.first, advice.every).loss
        assert loss <= (1 + slack) * advice.average_loss * (1 + 1e-9)
        assert advice.every > 5
    assert theory.plan(MODEL, 0.5, 5000, slack=0.2).every > theory.plan(MODEL, 0.5, 5000).every / 3


def test_simulation_matches_advice():
    model = Quadratic(Spectrum([1.0, 0.05], [50, 200]), noise=1.0, start=5.0)
    advice = theory.plan(model, rate=0.3, steps=2000, batch_size=4.0)
    result = theory.simulate(
        model,
        Segment(2000, 0.3, 4.0),
        replicas=40,
        first=advice.first,
        every=advice.every,
        record=[2000],
        seed=1,
    )
    loss = result.loss["average"][0]
    error = loss.std(ddof=1) / np.sqrt(40)
    assert abs(loss.mean() - advice.average_loss) < 5 * error + 0.06 * advice.average_loss
    assert abs(result.loss["last"][0].mean() - advice.last_loss) < 0.1 * advice.last_loss


def test_cautions():
    steep = Quadratic(Spectrum([1.0, 1e-5], [10, 1000]), start=10.0)
    text = str(theory.plan(steep, rate=1.5, steps=1000))
    assert "overshoots" in text
    assert "99% of the directions do not converge" in text
    calm = Quadratic(Spectrum([1.0, 1e-3], [10, 1000]), noise=1e-6, start=10.0)
    assert "barely helps" in str(theory.plan(calm, rate=0.5, steps=1000))
    with pytest.raises(ValueError, match=r"below 2, got 2\.5"):
        theory.plan(steep, rate=2.5, steps=10)


def test_from_measurements_matches_measurements():
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
    with pytest.raises(ValueError, match="Pass either spectrum, or both"):
        theory.from_measurements(parameters=10, noise_trace=1.0, excess_loss=1.0)
    with pytest.raises(ValueError, match="but not both"):
        theory.from_measurements(
            parameters=10,
            noise_trace=1.0,
            spectrum=Spectrum([1.0], [10]),
            hessian_trace=1.0,
            excess_loss=1.0,
        )
    with pytest.raises(ValueError, match="7 directions, but the network has 100"):
        theory.from_measurements(
            parameters=100, noise_trace=1.0, spectrum=Spectrum([1.0], [7]), excess_loss=1.0
        )
    with pytest.raises(ValueError, match="must be between"):
        theory.from_measurements(
            parameters=10, noise_trace=1.0, hessian_trace=1.0, largest_eigenvalue=2.0, excess_loss=1
        )


def test_first_and_every_match_averaging():
    """T_avg and stride sample the same iterates as start and every of gadam.Averaging."""
    weight = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    average = gadam.IterateAverage(optimizer, gadam.Averaging(start=5, every=3))
    for step in range(1, 13):
        weight.grad = torch.full_like(weight, -1.0)  # w_t = t
        optimizer.step()
        assert float(weight.detach()) == step
    with average.applied():
        assert float(weight.detach()) == np.mean([5, 8, 11])
