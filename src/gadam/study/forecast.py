"""Predictions of the losses of a run, from what was measured at one of its points."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import TypedDict

import numpy as np

from gadam import schedule
from gadam.runs.files import Document
from gadam.study.settings import StudyError

try:
    from gadam import theory
except ImportError:  # Only predictions need SciPy.
    theory = None  # type: ignore[assignment]

__all__ = ["Forecast", "Measurement", "Predicted"]


class Measurement(TypedDict):
    """What was measured around the average of the epoch after a point."""

    epoch: int  # epochs before the point
    steps: int  # steps per epoch
    batch_size: float
    rate: float
    dimension: int
    loss: float  # at the average
    start_loss: float  # at the point
    rise: float  # from the average to the point, on the quadratic
    fitted_rise: float  # the same with the slope at the average, instead of the mean over the epoch
    eigenvalues: list[float]
    counts: list[float]
    noise: list[float]
    gradient: list[float]
    position: list[float]
    velocity: list[float]
    noise_trace: float
    noise_error: float
    resolved: int
    resolved_noise: float
    negative_noise: float
    negative_gradient: float
    reshuffled: float
    method: Document


@dataclass(frozen=True)
class Predicted:
    """A predicted training loss.

    Args:
        loss: Its expectation.
        error: Half the width of its interval.
    """

    loss: float
    error: float

    def covers(self, loss: float) -> bool:
        """Return True if a measured loss is in the interval.

        Args:
            loss: The measured loss.
        """
        return abs(loss - self.loss) <= self.error


@dataclass(frozen=True)
class Forecast:
    """Predictions from a measurement.

    Args:
        measured: The measurement.
        horizon: The number of epochs to predict.
    """

    measured: Measurement
    horizon: int

    def __post_init__(self) -> None:
        if theory is None:
            raise StudyError("Predictions need a package: pip install 'gadam[theory]'")

    @staticmethod
    def ema_decay(steps: int) -> float:
        """Return the decay of an EMA with a window of about one epoch.

        Args:
            steps: Steps per epoch.
        """
        return 1 - 1 / max(2, steps)

    @cached_property
    def model(self) -> theory.Quadratic:
        """The quadratic that matches the measurement. Negative curvature counts as flat."""
        found, method = self.measured, self.measured["method"]
        return theory.from_measurements(
            parameters=found["dimension"],
            spectrum=theory.measured(
                found["eigenvalues"], found["counts"], found["dimension"], negative="flat"
            ),
            noise=found["noise"],
            gradient=found["gradient"],
            position=found["position"],
            velocity=found["velocity"],
            weight_decay=method["weight_decay"],
            momentum=method["momentum"],
            dampening=method["dampening"],
            decoupled=method["decoupled"],
        )

    def _segment(self, epochs: int, factor: float = 1.0) -> theory.Segment:
        found = self.measured
        return theory.Segment(
            epochs * found["steps"],
            factor * found["rate"],
            found["batch_size"],
            epoch=found["steps"],
            reshuffled=found["reshuffled"],
        )

    @property
    def steps(self) -> int:
        """The number of steps to predict."""
        return self.horizon * self.measured["steps"]

    @property
    def misfit(self) -> float:
        """What the quadratic misses between the average and the point, as a fraction."""
        seen = self.measured["start_loss"] - self.measured["loss"]
        largest = max(abs(seen), abs(self.measured["fitted_rise"]))
        return min(1.0, abs(seen - self.measured["fitted_rise"]) / largest) if largest else 0.0

    @property
    def slope_difference(self) -> float:
        """How much the slope at the average differs from its mean over the epoch, as a fraction.

        On a quadratic with noise that is the same everywhere, they are the same.
        """
        found = self.measured
        largest = max(abs(found["rise"]), abs(found["fitted_rise"]))
        return abs(found["rise"] - found["fitted_rise"]) / largest if largest else 0.0

    @cached_property
    def _first_epoch(self) -> theory.Moments:
        """The average of the epoch in which the quadratic was measured."""
        return theory.average(self.model, self._segment(1))

    @cached_property
    def self_test(self) -> float:
        """What the model misses in the epoch that it was measured in, as a fraction.

        The loss of that epoch's average is known. Two standard deviations of it are no miss.
        """
        found, moments = self.measured, self._first_epoch
        missed = abs(self._loss(moments) - found["loss"]) - 2 * moments.loss_std
        change = self._change(moments)
        return max(0.0, missed) / change if change else 0.0

    @cached_property
    def problem(self) -> str | None:
        """Why the model makes no prediction here, as a sentence, or None if it does."""
        rate, limit = self.measured["rate"], self.model.stable_below()
        if rate >= limit:
            return (
                f"The learning rate is {rate:.3g}, and the quadratic diverges from {limit:.3g} on. "
                "Training is stable only because the curvature changes along the way."
            )
        missed = self._model_error(self._moments(self.horizon))
        if max(missed, 2 * self.self_test) < 1:
            return None
        return (
            f"The quadratic misses {100 * self.self_test:.0f}% of the change of the loss in the "
            f"epoch in which it was measured, and would miss {100 * missed:.0f}% after "
            f"{self.horizon} epochs. The loss is not quadratic over such distances."
        )

    @cached_property
    def _weights(self) -> theory.spectrum.Array:
        return 0.5 * self.model.spectrum.counts * self.model.spectrum.eigenvalues

    def _loss(self, moments: theory.Moments) -> float:
        """Return the loss of a point. The quadratic is anchored where it was measured."""
        before = self._moments(0).loss
        return self.measured["loss"] + self.measured["rise"] - before + moments.loss

    def _change(self, moments: theory.Moments) -> float:
        """Return how much progress and noise change the loss from the point on, without signs."""
        model = self.model
        progress = (model.start - model.minimum) ** 2 - moments.bias**2
        return abs(float(self._weights @ progress)) + self._by_noise(moments)

    def _model_error(self, moments: theory.Moments) -> float:
        """Return the error of the model as a fraction of the change.

        It is the sum of three: what the model missed in the first epoch, the difference of the
        slopes, and the misfit of the quadratic. The misfit comes from terms of third order, so it
        grows with the distance.
        """
        center, counts = self._first_epoch.mean, self.model.spectrum.counts
        known = float(counts @ (self.model.start - center) ** 2)
        away = float(counts @ ((moments.mean - center) ** 2 + moments.variance))
        reach = max(1.0, float(np.sqrt(away / known))) if known else 1.0
        return self.self_test + self.slope_difference + self.misfit * reach

    def _by_noise(self, moments: theory.Moments) -> float:
        """Return the loss that noise adds to a point."""
        return float(self._weights @ moments.variance)

    def _random_error(self, moments: theory.Moments) -> float:
        """Return two standard deviations of the loss, and of the measured noise."""
        found = self.measured
        relative = found["noise_error"] / found["noise_trace"] if found["noise_trace"] else 0.0
        return 2 * float(np.hypot(moments.loss_std, relative * self._by_noise(moments)))

    def _predicted(self, moments: theory.Moments) -> Predicted:
        """Return the loss of a point, with its interval."""
        error = self._random_error(moments) + self._model_error(moments) * self._change(moments)
        return Predicted(self._loss(moments), error)

    def gain(self) -> Predicted | None:
        """Predict how much lower the loss of the EMA is than that of the last iterate.

        Where the model does not hold, this is only the noise that the EMA removes. It depends on
        the sharp directions, which settle within an epoch, and not on how far training gets. None
        if the quadratic diverges at this learning rate.
        """
        found = self.measured
        if found["rate"] >= self.model.stable_below():
            return None
        segment = self._segment(self.horizon)
        last = theory.last_iterate(self.model, segment)
        moving = theory.ema(self.model, segment, self.ema_decay(found["steps"]))
        gain = last.loss - moving.loss
        if self.problem is not None:
            gain = self._by_noise(last) - self._by_noise(moving)
        return Predicted(gain, self._random_error(last) + min(1.0, self.self_test) * abs(gain))

    def _moments(self, epochs: int) -> theory.Moments:
        """Return the last iterate after some epochs at the constant rate."""
        return theory.last_iterate(self.model, self._segment(epochs))

    def last(self, epochs: int | None = None) -> Predicted:
        """Predict the last iterate at the constant rate.

        Args:
            epochs: Epochs after the point. The default is the horizon.
        """
        return self._predicted(self._moments(self.horizon if epochs is None else epochs))

    def average(self, first: int, epochs: int | None = None, every: int = 1) -> Predicted:
        """Predict the average of the iterates from a step on.

        Args:
            first: The first sampled step, counted from 1.
            epochs: Epochs after the point. The default is the horizon.
            every: The stride.
        """
        segment = self._segment(self.horizon if epochs is None else epochs)
        return self._predicted(theory.average(self.model, segment, first, every))

    def ema(self, epochs: int | None = None) -> Predicted:
        """Predict an EMA of all iterates with a window of about one epoch.

        Args:
            epochs: Epochs after the point. The default is the horizon.
        """
        segment = self._segment(self.horizon if epochs is None else epochs)
        decay = self.ema_decay(self.measured["steps"])
        return self._predicted(theory.ema(self.model, segment, decay))

    def decayed(self, epochs: int | None = None) -> Predicted:
        """Predict the last iterate if the rate decays linearly over the horizon.

        Args:
            epochs: Epochs after the point. The default is the horizon.
        """
        segments = [
            self._segment(1, schedule.linear(epoch, self.horizon))
            for epoch in range(self.horizon if epochs is None else epochs)
        ]
        return self._predicted(theory.last_iterate(self.model, segments))

    @cached_property
    def advice(self) -> theory.Advice:
        """The best start and stride. Its losses are relative to the minimum of the quadratic."""
        found = self.measured
        advice = theory.plan(
            self.model,
            found["rate"],
            self.steps,
            found["batch_size"],
            epoch=found["steps"],
            reshuffled=found["reshuffled"],
        )
        return replace(advice, cautions=(*advice.cautions, *self._cautions()))

    def _cautions(self) -> list[str]:
        found = self.measured
        cautions = [
            f"{100 * found['resolved_noise']:.0f}% of the noise was measured along "
            f"{found['resolved']} eigenvectors, the rest over the spectrum as a whole."
        ]
        if found["negative_noise"] > 0.01 or found["negative_gradient"] > 0.01:
            cautions.append(
                f"{100 * found['negative_noise']:.0f}% of the noise and "
                f"{100 * found['negative_gradient']:.0f}% of the squared gradient are in "
                "directions of negative curvature, which count as flat."
            )
        if found["reshuffled"] > 0.01:
            cautions.append(
                f"{100 * found['reshuffled']:.0f}% of the noise cancels over an epoch, because "
                "each example is drawn once."
            )
        if self.misfit > 0.3:
            cautions.append(
                f"The quadratic misses the loss at the point by {100 * self.misfit:.0f}%. The loss "
                "is not quadratic at this distance, so the intervals are wide."
            )
        return cautions
