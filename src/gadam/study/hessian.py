"""The curvature of the training loss at a point of a run, for the parts that measure it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch

from gadam.analysis import Curvature
from gadam.runs.files import Json, RunError
from gadam.study.part import Study, Unit
from gadam.study.points import Point
from gadam.study.settings import Settings
from gadam.train.tasks import ImageTask

__all__ = ["curvature_unit", "describe_matrix"]

_T = TypeVar("_T")


def curvature_unit(
    study: Study, what: str, point: Point, compute: Callable[[Curvature], Json], **settings: Json
) -> Unit:
    """Return a unit that measures the curvature at a point.

    Args:
        study: The run.
        what: What it measures.
        point: The point.
        compute: Measures it.
        **settings: The settings it depends on, besides those of the matrix.

    Raises:
        RunError: The run trains a language model and the Gauss-Newton matrix was requested.
    """
    if study.settings.kind == "ggn" and study.is_language:
        raise RunError(
            "The Gauss-Newton matrix needs a network with a single output tensor. Use --kind "
            "hessian for language models."
        )
    key = {
        "what": what,
        "of": study.points.identity(point),
        "examples": study.settings.examples,
        "kind": study.settings.kind,
        "batchnorm": study.settings.batchnorm,
        **settings,
    }
    return Unit(f"{what}/{point}", key, lambda: _measure_at(study, point, compute))


def _measure_at(study: Study, point: Point, compute: Callable[[Curvature], _T]) -> _T:
    model = study.points.load(point)
    # cuDNN's recurrent layers have no second derivatives, and no gradients in evaluation mode.
    with torch.backends.cudnn.flags(enabled=not study.is_language):
        curvature = Curvature(
            model,
            _TrainingData(study),
            study.points.task.loss,
            kind=study.settings.kind,
            batchnorm=study.settings.batchnorm,
        )
        return compute(curvature)


class _TrainingData:
    """The training data, iterated once per product. Small sets of images stay in memory."""

    MAX_ELEMENTS = 2**26

    def __init__(self, study: Study) -> None:
        self._study = study
        self._batches: list[Any] | None = None

    def __iter__(self) -> Iterator[Any]:
        if self._batches is not None:
            for batch in self._batches:
                self._study.check_stop()
                yield batch
            return
        task = self._study.points.task
        batches: list[Any] | None = [] if isinstance(task, ImageTask) else None
        elements = 0
        for batch in task.training_data(self._study.settings.examples):
            self._study.check_stop()
            if batches is not None:
                batches.append(batch)
                elements += batch[0].numel()
                batches = batches if elements <= self.MAX_ELEMENTS else None
            yield batch
        self._batches = batches


def describe_matrix(settings: Settings) -> str:
    """Return which matrix was measured, as the start of a sentence.

    Args:
        settings: How it was measured.
    """
    matrix = {"hessian": "Hessian", "ggn": "generalized Gauss-Newton matrix"}[settings.kind]
    data = (
        "the training data"
        if settings.examples is None
        else f"{settings.examples} training examples"
    )
    modes = {"eval": "running statistics", "train": "per-batch statistics"}
    return (
        f"The {matrix} of the training objective over {data}, without dropout, BatchNorm with "
        f"{modes[settings.batchnorm]}"
    )
