"""Measure a finished run, alone or as a job of a sweep."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

import torch

from gadam.runs.files import Document, Json
from gadam.runs.folder import RunFolder
from gadam.runs.recipe import Recipe
from gadam.study.notebook import Notebook
from gadam.study.part import Study, Unit, find
from gadam.study.points import Points
from gadam.study.settings import Settings

__all__ = ["NOTEBOOK", "StudyJob", "StudyResult", "StudyUpdate", "measure"]

NOTEBOOK = "analysis.jsonl"  # in the run's folder


@dataclass(frozen=True)
class StudyUpdate:
    """Progress of an analysis.

    Args:
        what: The name of the value that is now known.
    """

    what: str

    def to_dict(self) -> Document:
        """Return the update as plain data."""
        return {"what": self.what}


@dataclass(frozen=True)
class StudyResult:
    """The measured values of a run.

    Args:
        values: The values by name.
        failed: The names of values that could not be measured.
    """

    values: Mapping[str, Json] = field(default_factory=dict)
    failed: tuple[str, ...] = ()

    def to_dict(self) -> Document:
        """Return the result as plain data. The names of failed values are under "failed"."""
        return {**self.values, **({"failed": list(self.failed)} if self.failed else {})}


_OnProgress: TypeAlias = Callable[[float, StudyUpdate | None], None]


@dataclass(frozen=True)
class StudyJob:
    """The analysis of one run, for :func:`gadam.train.sweep.sweep`.

    Args:
        label: The run's name beside other runs.
        recipe: What the run trained.
        seed: The run's seed.
        folder: The run's folder.
        parts: The names of the parts to measure.
        settings: How closely to measure.
        data_dir: Where the data sets are; None uses the default.
        device: Where to compute.
        threads: CPU threads to use.
    """

    label: str
    recipe: Recipe
    seed: int
    folder: Path
    parts: tuple[str, ...]
    settings: Settings = field(default_factory=Settings)
    data_dir: str | None = None
    device: str = "cpu"
    threads: int = 1

    event = "measured"
    total = 1.0

    def describe(self, update: StudyUpdate) -> str:
        """Return an update as text.

        Args:
            update: What ``on_progress`` received.
        """
        return update.what

    def outcome(self, result: StudyResult) -> str:
        """Return the result as text.

        Args:
            result: What :meth:`run` returned.
        """
        failed = f"; failed: {', '.join(result.failed)}" if result.failed else ""
        return f"measured {len(result.values)} values{failed}"

    def run(
        self,
        on_progress: _OnProgress,
        on_notice: Callable[[str], None],
        should_stop: Callable[[], bool],
    ) -> StudyResult:
        """Measure the run.

        Args:
            on_progress: Receives the fraction done, and each value's name.
            on_notice: Receives sentences for the user.
            should_stop: Polled often; the analysis stops if it returns True.
        """
        torch.set_num_threads(self.threads)
        run = RunFolder(self.folder, self.recipe, self.seed, self.label)
        with run.locked():
            return measure(
                run,
                self.parts,
                self.settings,
                data_dir=self.data_dir,
                device=self.device,
                on_progress=on_progress,
                on_notice=on_notice,
                should_stop=should_stop,
            )


def measure(
    run: RunFolder,
    parts: Sequence[str],
    settings: Settings = Settings(),  # noqa: B008 (immutable)
    *,
    data_dir: str | None = None,
    device: str | torch.device = "cpu",
    on_progress: _OnProgress = lambda done, update: None,
    on_notice: Callable[[str], None] = lambda sentence: None,
    should_stop: Callable[[], bool] = lambda: False,
) -> StudyResult:
    """Measure a finished run. Values that are in its notebook are not measured again.

    Args:
        run: The run's folder.
        parts: The names of the parts to measure.
        settings: How closely to measure.
        data_dir: Where the data sets are; None uses the default.
        device: Where to compute.
        on_progress: Receives the fraction done, and each value's name.
        on_notice: Receives sentences for the user.
        should_stop: Polled often; the analysis stops if it returns True.

    Returns:
        The values, and the names of those that could not be measured.

    Raises:
        RunError: The run is not finished, or its last checkpoint is damaged.
        StudyError: There is no part of that name.
        Stopped: ``should_stop`` returned True. Everything measured so far is in the notebook.
    """
    chosen = [part for part in find(parts) if part.needs_weights]
    if not chosen:
        return StudyResult()
    points = Points(run, data_dir, torch.device(device))
    study = Study(run, settings, points, should_stop, on_notice)
    if run.result is not None and run.result.diverged:
        study.notice("The run diverged. There is nothing to measure.")
        return StudyResult()
    units: dict[str, Unit] = {}
    for part in chosen:
        for unit in part.units(study):
            units.setdefault(unit.name, unit)  # parts may share units
    notebook = Notebook(run.folder / NOTEBOOK)
    if any(notebook.find(unit.key) is None for unit in units.values()):
        _ = points.task  # fail now, and once, if its data is missing
    values: dict[str, Json] = {}
    failed: list[str] = []
    for done, unit in enumerate(units.values(), 1):
        study.check_stop()
        value = notebook.find(unit.key)
        if value is None or not unit.is_valid(value):
            began = time.perf_counter()
            try:
                computed = unit.compute()
            except (ValueError, RuntimeError, OSError) as error:
                # The other values may still be measurable.
                on_notice(f"{unit.name} could not be measured: {error}")
                failed.append(unit.name)
                continue
            value = notebook.add(unit.name, unit.key, computed, time.perf_counter() - began)
        values[unit.name] = value
        on_progress(done / len(units), StudyUpdate(unit.name))
    return StudyResult(values, tuple(failed))
