"""How closely `gadam analyze` measures."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Literal

from gadam._errors import UserError
from gadam.runs.files import Document

__all__ = ["Settings", "StudyError"]


class StudyError(UserError, ValueError):
    """An analysis that cannot be done as requested. The message says why, and what to do."""


@dataclass(frozen=True)
class Settings:
    """How closely to measure.

    Args:
        examples: Training examples for curvature and gradient noise; None uses all.
        kind: The curvature matrix: "hessian", or "ggn" for the generalized Gauss-Newton matrix.
        batchnorm: BatchNorm statistics for curvature: "eval" (running) or "train" (per batch).
        probes: Random vectors per trace estimate.
        tolerance: Relative tolerance of the spectral norm.
        steps: Lanczos steps for the spectral density.
        grid: Grid points along each side of the plane.
        epoch: Predict from the iterate that was kept after this epoch. None predicts from the
            earliest one, or from the last iterate if none was kept.
        horizon: Epochs to predict; None predicts to the end of the run, or half of its length.
        continuations: Times to continue the run, to compare its losses with the predictions.

    Raises:
        StudyError: A value is out of range.
    """

    examples: int | None = None
    kind: Literal["hessian", "ggn"] = "hessian"
    batchnorm: Literal["eval", "train"] = "eval"
    probes: int = 20
    tolerance: float = 1e-3
    steps: int = 40
    grid: int = 13
    epoch: int | None = None
    horizon: int | None = None
    continuations: int = 2

    def __post_init__(self) -> None:
        for name, value, low in (
            ("probes", self.probes, 2),
            ("steps", self.steps, 2),
            ("grid", self.grid, 3),
            ("examples", self.examples, 1),
            ("epoch", self.epoch, 1),
            ("horizon", self.horizon, 1),
            ("continuations", self.continuations, 0),
        ):
            if value is not None and value < low:
                raise StudyError(f"{name} must be at least {low}, got {value}.")
        if not 0 < self.tolerance < 1:
            raise StudyError(f"tolerance must be between 0 and 1, got {self.tolerance}.")

    def to_dict(self) -> Document:
        """Return the settings as plain data, for `analysis.json`."""
        return asdict(self)
