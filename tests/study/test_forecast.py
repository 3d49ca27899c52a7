"""Forecasts: exact where the model holds, and no prediction where it does not."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from gadam import theory
from gadam.study.forecast import Forecast, Measurement

LAM, NOISE, SLOPE = np.array([2.0, 0.2]), np.array([4.0, 0.5]), np.array([1.0, 0.1])
STEPS, RATE = 20, 0.1


def measured(**changed: Any) -> Measurement:
    """Return what would be measured on a quadratic, around the average of the first epoch."""
    model = theory.Quadratic(theory.Spectrum(LAM), NOISE, start=SLOPE / LAM)
    center = theory.average(model, theory.Segment(STEPS, RATE, 10.0, epoch=STEPS)).mean
    start = float(0.5 * LAM @ (SLOPE / LAM) ** 2)
    loss = float(0.5 * LAM @ center**2)
    found: dict[str, Any] = {
        "epoch": 3,
        "steps": STEPS,
        "batch_size": 10.0,
        "rate": RATE,
        "dimension": 2,
        "loss": 1 + loss,
        "start_loss": 1 + start,
        "rise": start - loss,
        "fitted_rise": start - loss,
        "eigenvalues": LAM.tolist(),
        "counts": [1.0, 1.0],
        "noise": NOISE.tolist(),
        "gradient": SLOPE.tolist(),
        "position": (SLOPE / LAM).tolist(),
        "velocity": [0.0, 0.0],
        "noise_trace": float(NOISE.sum()),
        "noise_error": 0.0,
        "resolved": 2,
        "resolved_noise": 1.0,
        "negative_noise": 0.0,
        "negative_gradient": 0.0,
        "reshuffled": 1.0,
        "method": {"momentum": 0.0, "dampening": 0.0, "weight_decay": 0.0, "decoupled": False},
    }
    return {**found, **changed}  # type: ignore[typeddict-item]


def test_a_quadratic_is_predicted_exactly():
    forecast = Forecast(measured(), horizon=5)
    model = theory.Quadratic(theory.Spectrum(LAM), NOISE, start=SLOPE / LAM)
    segment = theory.Segment(5 * STEPS, RATE, 10.0, epoch=STEPS)
    last = theory.last_iterate(model, segment)
    assert forecast.last().loss == pytest.approx(1 + last.loss)
    assert forecast.average(41).loss == pytest.approx(1 + theory.average(model, segment, 41).loss)
    decay = Forecast.ema_decay(STEPS)
    assert forecast.ema().loss == pytest.approx(1 + theory.ema(model, segment, decay).loss)
    assert forecast.problem is None
    assert forecast.misfit == pytest.approx(0, abs=1e-12)
    # Only the randomness of a run is left in the interval.
    assert forecast.last().error == pytest.approx(2 * last.loss_std, rel=1e-6)
    gain = forecast.gain()
    assert gain is not None
    assert gain.loss == pytest.approx(forecast.last().loss - forecast.ema().loss)


def test_intervals_hold_what_the_model_misses():
    exact = Forecast(measured(), horizon=5)
    found = measured()
    rise = found["fitted_rise"]
    misfit = Forecast(measured(fitted_rise=0.98 * rise, rise=0.98 * rise), horizon=5)
    slopes = Forecast(measured(rise=1.05 * rise), horizon=5)
    assert misfit.misfit == pytest.approx(0.02)
    assert slopes.slope_difference == pytest.approx(0.05 / 1.05)
    for other in (misfit, slopes):
        assert other.problem is None
        assert other.average(41).error > exact.average(41).error
    # The misfit counts more, the farther the prediction is from where it was measured.
    near, far = (replace(misfit, horizon=h)._model_error(misfit._moments(h)) for h in (1, 20))
    assert far > near


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"rate": 1.1}, "the quadratic diverges from 1 on"),
        ({"loss": 5.0, "start_loss": 4.0}, "The quadratic misses"),
        ({"fitted_rise": -1.0}, "not quadratic over such distances"),
    ],
)
def test_no_prediction_where_the_model_does_not_hold(changed, message):
    forecast = Forecast(measured(**changed), horizon=5)
    assert message in (forecast.problem or "")


def test_the_noise_that_an_ema_removes_is_predicted_without_the_slope():
    """The gain is that of noise alone if the model does not hold."""
    forecast = Forecast(measured(fitted_rise=-1.0), horizon=5)
    gain = forecast.gain()
    assert gain is not None
    model = theory.Quadratic(theory.Spectrum(LAM), NOISE, start=0.0)
    segment = theory.Segment(5 * STEPS, RATE, 10.0, epoch=STEPS)
    decay = Forecast.ema_decay(STEPS)
    removed = theory.last_iterate(model, segment).loss - theory.ema(model, segment, decay).loss
    assert gain.loss == pytest.approx(removed)
    assert Forecast(measured(rate=1.1), horizon=5).gain() is None


def test_advice_says_what_noise_it_used():
    cautions = " ".join(Forecast(measured(), horizon=5).advice.cautions)
    assert "the noise that was measured in each direction" in cautions
    assert "100% of the noise was measured along 2 eigenvectors" in cautions
    assert "100% of the noise cancels over an epoch" in cautions
