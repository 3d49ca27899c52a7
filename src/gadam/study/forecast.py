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
        largest = max(abs(seen), abs(self.measured["rise"]))
        return min(1.0, abs(seen - self.measured["rise"]) / largest) if largest else 0.0

    def _predicted(self, moments: theory.Moments) -> Predicted:
        """Return the loss of a point, with its interval.

        The quadratic is anchored at the loss of the average that it was measured at.
        """
        found = self.measured
        before = theory.last_iterate(self.model, self._segment(0)).loss
        loss = found["loss"] + found["rise"] - before + moments.loss
        weights = 0.5 * self.model.spectrum.counts * self.model.spectrum.eigenvalues
        by_noise = float(weights @ moments.variance)
        relative = found["noise_error"] / found["noise_trace"] if found["noise_trace"] else 0.0
        random = float(np.hypot(moments.loss_std, relative * by_noise))
        return Predicted(loss, 2 * random + self.misfit * abs(loss - found["loss"]))

    def last(self, epochs: int | None = None) -> Predicted:
        """Predict the last iterate at the constant rate.

        Args:
            epochs: Epochs after the point. The default is the horizon.
        """
        segment = self._segment(self.horizon if epochs is None else epochs)
        return self._predicted(theory.last_iterate(self.model, segment))

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
