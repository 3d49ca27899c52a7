"""The runs of a collection, with the values that were measured."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from gadam.runs.collect import Collection, RunRecord
from gadam.runs.experiment import Experiment
from gadam.runs.files import Json
from gadam.study.settings import Settings

__all__ = ["Measured", "RunValues"]

RunValues = Mapping[str, Json]
"""The values of a run by name."""


@dataclass(frozen=True)
class Measured:
    """The runs of a collection, with the values that were measured.

    Args:
        collection: The runs.
        values: Values by label and seed.
        settings: How they were measured.
    """

    collection: Collection
    values: Mapping[tuple[str, int], RunValues]
    settings: Settings

    @property
    def experiment(self) -> Experiment:
        """The experiment that the runs belong to."""
        return self.collection.experiment

    def runs(self, label: str) -> list[RunRecord]:
        """Return the finished runs of a row that did not diverge, one per seed.

        Args:
            label: The row. If several of its runs share a seed, the last one counts.
        """
        by_seed = {
            run.seed: run
            for run in self.collection.runs_of(label)
            if run.result is not None and not run.result.diverged
        }
        return list(by_seed.values())

    def value(self, run: RunRecord, name: str) -> Json | None:
        """Return a value of a run, or None if it was not measured.

        Args:
            run: The run.
            name: The name of the value.
        """
        return self.values.get((run.label, run.seed), {}).get(name)

    def by_row(self, name: str) -> dict[str, list[Json]]:
        """Return the values of this name by row, one per seed. Rows without any are left out.

        Args:
            name: The name of the values.
        """
        found = {
            label: [v for run in self.runs(label) if (v := self.value(run, name)) is not None]
            for label in self.collection.labels
        }
        return {label: values for label, values in found.items() if values}

    def metric(self, label: str) -> str:
        """Return the metric that rates a row.

        Args:
            label: The row.
        """
        return self.experiment.metric_of(label)
