"""The test-set predictions of a point, cached in a file of the run's folder."""

from __future__ import annotations

import hashlib
import io
from collections.abc import Sequence
from pathlib import Path
from typing import TypedDict

import torch
from torch import Tensor

from gadam.runs.files import write_atomically
from gadam.study.part import Study, Unit
from gadam.study.points import Point
from gadam.train.tasks import LanguageTask

__all__ = [
    "PredictionsValue",
    "iterate_units",
    "load_predictions",
    "predictions_file",
    "predictions_unit",
    "read_predictions",
]

_MAX_STORED = 2**23  # numbers per point, for predictions over a whole vocabulary


class PredictionsValue(TypedDict):
    """Where predictions are.

    Attributes:
        file: The name of the file.
        examples: The number of test examples in it.
        sha256: The hash of its content.
    """

    file: str
    examples: int
    sha256: str


def predictions_file(folder: Path, name: str) -> Path:
    """Return the path of a predictions file.

    Args:
        folder: The run's folder.
        name: The name of the file.
    """
    return folder / "predictions" / name


def _path(study: Study, point: Point) -> Path:
    return predictions_file(study.run.folder, f"{study.points.identity(point)}.pt")


def predictions_unit(study: Study, point: Point, name: str | None = None) -> Unit:
    """Return the unit that predicts the test set at a point.

    Args:
        study: The run.
        point: The point.
        name: The name of the unit. Default: ``predictions/POINT``.
    """
    path = _path(study, point)
    rows = _max_rows(study)

    def compute() -> PredictionsValue:
        model = study.points.load(point)
        logs, targets, count = [], [], 0
        for scores, true in study.points.task.scores(model, "test"):
            logs.append(scores.log_softmax(-1).cpu())
            targets.append(true.cpu())
            count += len(true)
            if rows is not None and count >= rows:
                break
        content = {"logs": torch.cat(logs)[:rows], "true": torch.cat(targets)[:rows]}
        path.parent.mkdir(exist_ok=True)
        buffer = io.BytesIO()
        torch.save(content, buffer)
        write_atomically(path, buffer.getvalue())
        return {"file": path.name, "examples": len(content["true"]), "sha256": _sha256(path)}

    def is_valid(value: PredictionsValue) -> bool:
        return path.exists() and value.get("sha256") == _sha256(path)

    key = {"what": "predictions", "of": study.points.identity(point), "rows": rows}
    return Unit(name or f"predictions/{point}", key, compute, is_valid)


def iterate_units(study: Study) -> list[Unit]:
    """Return the units that predict the test set at each kept iterate.

    Args:
        study: The run.

    Returns:
        The units, or an empty list if there are fewer than two iterates. If the run has an
        average, a notice says how to keep more.
    """
    kept = study.points.kept
    if len(kept) < 2:
        if study.points.has_average:
            study.notice(
                f"Too few iterates to compare ({len(kept)} kept). Train the run with "
                "--set keep_iterates=N to keep those of the last N epochs."
            )
        return []
    return [predictions_unit(study, epoch) for epoch in kept]


def _max_rows(study: Study) -> int | None:
    """Return how many test words of a text to predict, from the first; None for all examples."""
    task = study.points.task if study.is_language else None
    return _MAX_STORED // len(task.corpus.words) if isinstance(task, LanguageTask) else None


def read_predictions(study: Study, points: Sequence[Point]) -> tuple[list[Tensor], Tensor]:
    """Read the predictions of several points of a run.

    Args:
        study: The run. The units of the points have been computed.
        points: The points.

    Returns:
        The log-probabilities of each point, and the true classes.
    """
    found = [load_predictions(_path(study, point)) for point in points]
    return [logs for logs, _ in found], found[0][1]


def load_predictions(path: Path) -> tuple[Tensor, Tensor]:
    """Load a predictions file.

    Args:
        path: The file.

    Returns:
        The log-probabilities, memory-mapped, and the true classes.
    """
    content = torch.load(path, weights_only=True, map_location="cpu", mmap=True)
    return content["logs"], content["true"]


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while content := file.read(2**20):
            digest.update(content)
    return digest.hexdigest()
