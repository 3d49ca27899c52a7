"""The points in weight space that a run leaves behind: kept iterates, the last one, the average."""

from __future__ import annotations

import copy
from functools import cached_property
from typing import Literal, TypeAlias

import torch
from torch import Tensor, nn

import gadam
from gadam.runs.files import RunError
from gadam.runs.folder import RunFolder, State, read_weights
from gadam.train import optimizers, tasks

__all__ = ["Point", "Points"]

Point: TypeAlias = int | Literal["iterate", "average"]
"""The iterate after that many epochs, the last iterate, or the average."""


class Points:
    """The points of a finished run, loaded on demand.

    Args:
        run: The run's folder.
        data_dir: Where the data sets are; None uses the default.
        device: Where to compute.

    Attributes:
        epochs: Epochs trained.
        has_average: True if the run has an average.

    Raises:
        RunError: The run is not finished, or its last checkpoint is damaged.
    """

    def __init__(self, run: RunFolder, data_dir: str | None, device: torch.device) -> None:
        self.run, self.recipe = run, run.recipe
        self._data_dir, self._device = data_dir, device
        self._name, self._state = run.final_state()
        result = run.result
        assert result is not None  # or final_state would have raised
        self.epochs = result.epochs
        self.has_average = bool(result.average)
        self._paths = dict(sorted(run.iterates().items()))

    @cached_property
    def kept(self) -> list[int]:
        """The epochs of the kept iterates. If there is an average, only of those that entered it.

        An average over a window of epochs holds only the last ones. An exponential average holds
        all, with larger weights for later ones.
        """
        if not self.has_average:
            return list(self._paths)
        counts = {0: 0} | {record.epoch: record.samples for record in self.run.epochs}
        sampled = [e for e in self._paths if counts.get(e, 0) > counts.get(e - 1, 0)]
        average = self.recipe.average
        if average is not None and average.weighting == "window" and average.every == "epoch":
            sampled = sampled[-average.size :]
        return sampled

    @property
    def final(self) -> Literal["iterate", "average"]:
        """The point a user would deploy: the average if there is one."""
        return "average" if self.has_average else "iterate"

    @property
    def ends(self) -> list[Literal["iterate", "average"]]:
        """The last iterate, and the average if there is one."""
        return ["iterate", "average"] if self.has_average else ["iterate"]

    @cached_property
    def task(self) -> tasks.Task:
        """The run's task, with its data and its model."""
        return tasks.build(self.recipe, self.run.seed, self._device, self._data_dir)

    @property
    def model(self) -> nn.Module:
        """The task's model. It holds the weights of the last point that was loaded."""
        return self.task.model

    @cached_property
    def names(self) -> list[str]:
        """The names of the model's parameters."""
        return [name for name, _ in self.model.named_parameters()]

    def identity(self, point: Point) -> str:
        """Return a name for the weights of a point that changes if the weights change.

        Args:
            point: The point. The name comes from its file, which is named by its content.
        """
        if isinstance(point, int):
            return self._paths[point].stem
        return f"{point}-{self._name.removeprefix('checkpoint-')}"

    def weights(self, point: Point) -> dict[str, Tensor]:
        """Return the state dict of a point.

        Args:
            point: The point.

        Raises:
            RunError: The file of the iterate is damaged.
        """
        if point == "iterate":
            state: dict[str, Tensor] = self._state["model"]
            return state
        if point == "average":
            return self._average
        found = read_weights(self._paths[point])
        if found is None:
            raise RunError(
                f"{self._paths[point]} is damaged. Remove it to continue without this iterate."
            )
        return found

    @property
    def optimizer_state(self) -> State:
        """A copy of the optimizer's state in the last checkpoint."""
        return copy.deepcopy(self._state["optimizer"])

    @cached_property
    def _average(self) -> dict[str, Tensor]:
        before = tasks.steps_before_averaging(self.recipe, self.task)
        optimizer, average = optimizers.build(self.recipe, self.model, before, self.task.mode)
        assert average is not None
        self.model.load_state_dict(self._state["model"])
        optimizer.load_state_dict(self._state["optimizer"])
        average.load_state_dict(self._state["average"])
        with average.applied(self.model, batchnorm=False):
            return {name: t.detach().cpu().clone() for name, t in self.model.state_dict().items()}

    def mapped(self, epoch: int) -> dict[str, Tensor]:
        """Return the weights of a kept iterate, memory-mapped after their content was checked.

        Args:
            epoch: The epoch of the iterate.
        """
        self.weights(epoch)
        state: dict[str, Tensor] = torch.load(
            self._paths[epoch], weights_only=True, map_location="cpu", mmap=True
        )
        return state

    def load(self, point: Point) -> nn.Module:
        """Load a point into the model, with BatchNorm statistics as in the run's evaluations.

        Args:
            point: The point.

        Returns:
            The model.
        """
        self.model.load_state_dict(self.weights(point))
        self.refresh(point if isinstance(point, int) else self.epochs)
        return self.model

    def refresh(self, epoch: int) -> None:
        """Recompute the BatchNorm statistics for the weights in the model.

        Args:
            epoch: The epoch that determines the order of the data.
        """
        if self.recipe.refresh_batchnorm:
            gadam.refresh_batchnorm(self.model, self.task.refresh(epoch - 1))

    def metrics(self) -> dict[str, dict[str, float]]:
        """Evaluate the weights in the model. Returns metrics by split ("train", "test")."""
        return {split: self.task.evaluate(self.model, split) for split in ("train", "test")}
