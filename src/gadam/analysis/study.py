"""What is measured of a finished run, from its checkpoints. Each value is written down as soon as it is known.

The run's folder gets

======================  ==========================================================================
`analysis.jsonl`        a line for each value: what it is, of which weights, by which settings
`predictions/*.pt`      what each point says of the test data; a cache, to be removed at will
======================  ==========================================================================

so that an analysis that was stopped goes on where it was, and one that is asked for again is there at once.
"""

from __future__ import annotations

import hashlib
import io
import json
import math
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

import gadam
from gadam.analysis import spectra
from gadam.analysis.curvature import Curvature
from gadam.analysis.gradient_noise import measure_noise
from gadam.analysis.landscape import Plane, along_line, over_plane
from gadam.analysis.predictions import MEASURES, diversity, ensemble
from gadam.analysis.weights import distances
from gadam.train import optimizers, task
from gadam.train.loop import Stopped
from gadam.train.recipe import Recipe
from gadam.train.record import Run, RunError, read_weights, to_json, write_atomically

__all__ = ["PARTS", "Notebook", "Plan", "StudyJob", "measure", "network_predictions"]

PARTS = {
    "diversity": "how different the iterates' predictions and weights are",
    "ensemble": "an ensemble of the iterates, beside the average of their weights",
    "networks": "an ensemble of the networks of several seeds",
    "rate": "the effective learning rate along training",
    "parameters": "what averaging gains, against the number of parameters",
    "curvature": "norm and trace of the loss's Hessian, and the noise of gradients",
    "density": "the density of the Hessian's spectrum",
    "landscape": "the loss along the line and in the plane through iterates and average",
}
NEEDS = {
    "diversity": "iterates that were kept, by --set keep=N",
    "ensemble": "iterates that were kept, by --set keep=N",
    "networks": "runs of several seeds",
    "rate": "norms in the runs' lines, as this version writes them",
    "parameters": "averaged methods beside their bases",
    "landscape": "an average",
}
OF_RECORDS = ("rate", "parameters")  # made of a run's lines and result alone
OF_ITERATES = ("diversity", "ensemble")
_STORED_NUMBERS = 2**23  # of a point's predictions, where each is over a whole vocabulary


@dataclass(frozen=True)
class Plan:
    """What to measure, and how closely.

    Args:
        parts: of :data:`PARTS`
        examples: training examples for curvature and noise; None is all
        kind: of curvature: "hessian", or "ggn" (generalised Gauss-Newton)
        batchnorm: for curvature: "eval" (running statistics) or "train" (each batch's)
        probes: random vectors, for traces
        tolerance: of the spectral norm, relative
        steps: of Lanczos' method, for the density
        grid: places along each side of the plane
    """

    parts: tuple[str, ...]
    examples: int | None = None
    kind: Literal["hessian", "ggn"] = "hessian"
    batchnorm: Literal["eval", "train"] = "eval"
    probes: int = 20
    tolerance: float = 1e-3
    steps: int = 40
    grid: int = 13

    def __post_init__(self) -> None:
        for part in self.parts:
            if part not in PARTS:
                raise ValueError(f"there is no part {part!r}: there are {', '.join(PARTS)}")
        least = {"probes": 2, "steps": 2, "grid": 3}
        for name, low in least.items():
            if getattr(self, name) < low:
                raise ValueError(f"{name} must be at least {low}, not {getattr(self, name)}")
        if self.examples is not None and self.examples < 1:
            raise ValueError(f"examples must be at least 1, not {self.examples}")
        if not 0 < self.tolerance < 1:
            raise ValueError(f"tolerance must lie between 0 and 1, not {self.tolerance}")


class Notebook:
    """Values by what they are of, in a file to which lines are added.

    Attributes:
        newest: The newest value of each name, whatever it is of: all there is where weights are gone.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.newest: dict[str, Any] = {}
        self._values: dict[str, Any] = {}
        if path.exists():
            for text in path.read_text(errors="replace").splitlines():
                try:
                    line = json.loads(text)
                    value = _with_nans(line["value"])
                    self._values[to_json(line["key"])] = self.newest[line["name"]] = value
                except (ValueError, KeyError, TypeError):
                    continue  # torn by a process that was killed: it is measured again

    def find(self, key: dict[str, Any]) -> Any:
        """The value, or None where it is not known."""
        return self._values.get(to_json(key))

    def note(self, name: str, key: dict[str, Any], value: Any, seconds: float) -> Any:
        """Write a value down; gives it as it will be read."""
        line = {"name": name, "key": key, "value": value, "seconds": round(seconds, 3)}
        text = to_json(line)
        # A torn last line must not take this one with it.
        whole = not self.path.exists() or self.path.read_bytes()[-1:] in (b"\n", b"")
        try:
            with self.path.open("a") as file:
                file.write(("" if whole else "\n") + text + "\n")
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise RunError(f"{self.path} could not be written: {error.strerror}") from error
        found = self._values[to_json(key)] = _with_nans(json.loads(text)["value"])
        return found


def _with_nans(value: Any) -> Any:
    """JSON has no number for what is none: it was written as null."""
    if isinstance(value, dict):
        return {name: _with_nans(v) for name, v in value.items()}
    if isinstance(value, list):
        return [_with_nans(v) for v in value]
    return math.nan if value is None else value


class _Unit(NamedTuple):
    """Something to measure: its name, what decides its value, and how it is computed."""

    name: str
    key: dict[str, Any]
    compute: Callable[[], Any]
    is_good: Callable[[Any], bool] = lambda noted: True  # whether what was noted can still be used


class _Points:
    """The points of weight space that a run has left: iterates, the last of them, the average."""

    def __init__(self, run: Run, data_dir: str | None, device: torch.device) -> None:
        self.run, self.recipe = run, run.recipe
        self._where = (data_dir, device)
        self._name, self._state = run.final_state()
        result = run.result or {}
        self.epochs = int(result["epochs"])
        self.has_average = bool(result.get("average"))
        self._paths = dict(sorted(run.iterates().items()))

    @property
    def kept(self) -> list[int]:
        """The epochs of the iterates that were kept, and in which samples were taken if there is an average.

        Of an average over a window of epochs those in it; of an exponential one all count, later ones more.
        """
        if not self.has_average:
            return list(self._paths)
        counts = {0: 0} | {line["epoch"]: line["samples"] for line in self.run.lines}
        found = [e for e in self._paths if counts.get(e, 0) > counts.get(e - 1, 0)]
        plan = self.recipe.average
        if plan is not None and plan.weighting == "window" and plan.every == "epoch":
            found = found[-plan.size :]
        return found

    @property
    def final(self) -> str:
        """What the run is used for."""
        return "average" if self.has_average else "iterate"

    @cached_property
    def problem(self) -> task.Task:
        data_dir, device = self._where
        return task.build(self.recipe, self.run.seed, device, data_dir)

    @property
    def model(self) -> nn.Module:
        return self.problem.model

    @cached_property
    def names(self) -> list[str]:
        return [name for name, _ in self.model.named_parameters()]

    def identity(self, point: int | str) -> str:
        """Names the weights: by the file that they are in, whose name tells its content."""
        if isinstance(point, int):
            return self._paths[point].stem
        return f"{point}-{self._name.removeprefix('checkpoint-')}"

    def weights(self, point: int | str) -> dict[str, Tensor]:
        """The tensors of a point: of the iterate after so many epochs, of the last "iterate", or of the "average"."""
        if point == "iterate":
            state: dict[str, Tensor] = self._state["model"]
            return state
        if point == "average":
            return self._average
        assert isinstance(point, int)
        found = read_weights(self._paths[point])
        if found is None:
            raise RunError(
                f"{self._paths[point]} is damaged: remove it, and the analysis goes on without it"
            )
        return found

    @cached_property
    def _average(self) -> dict[str, Tensor]:
        before = task.steps_before_averaging(self.recipe, self.problem)
        optimizer, average = optimizers.build(self.recipe, self.model, before, self.problem.mode)
        assert average is not None
        self.model.load_state_dict(self._state["model"])
        optimizer.load_state_dict(self._state["optimizer"])
        average.load_state_dict(self._state["average"])
        with average.applied(self.model):
            return {name: t.detach().cpu().clone() for name, t in self.model.state_dict().items()}

    def mapped(self, epoch: int) -> dict[str, Tensor]:
        """An iterate's weights, once their content is checked, read from the disk where they are looked at."""
        self.weights(epoch)
        state: dict[str, Tensor] = torch.load(
            self._paths[epoch], weights_only=True, map_location="cpu", mmap=True
        )
        return state

    def put(self, point: int | str) -> nn.Module:
        """The model at this point, with BatchNorm statistics as in the run's own evaluations."""
        self.model.load_state_dict(self.weights(point))
        self.refresh(point if isinstance(point, int) else self.epochs)
        return self.model

    def refresh(self, epoch: int) -> None:
        """Give the model's BatchNorm layers statistics of the weights that are in it."""
        if self.recipe.refresh_batchnorm:
            gadam.refresh_batchnorm(self.model, self.problem.refresh(epoch - 1))


@dataclass(frozen=True)
class StudyJob:
    """The analysis of one run, for :func:`gadam.train.sweep.sweep`."""

    label: str
    recipe: Recipe
    seed: int
    folder: Path
    plan: Plan
    data_dir: str | None = None
    device: str = "cpu"
    threads: int = 1

    total = 1.0

    def told(self, line: dict[str, Any]) -> str:
        return str(line["what"])

    def outcome(self, result: dict[str, Any]) -> str:
        failed = result.get(FAILED, [])
        wrong = f", but not {', '.join(failed)}" if failed else ""
        return f"measured {len(result) - bool(failed)} values{wrong}"

    def run(
        self,
        progress: Callable[[float, dict[str, Any] | None], None],
        notice: Callable[[str], None],
        should_stop: Callable[[], bool],
    ) -> dict[str, Any]:
        """Measure what the plan says; gives the values by their names."""
        torch.set_num_threads(self.threads)
        run = Run(self.folder, self.recipe, self.seed, self.label)
        with run.locked():
            return measure(
                run,
                self.plan,
                data_dir=self.data_dir,
                device=self.device,
                progress=progress,
                notice=notice,
                should_stop=should_stop,
            )


def measure(
    run: Run,
    plan: Plan,
    *,
    data_dir: str | None = None,
    device: str | torch.device = "cpu",
    progress: Callable[[float, dict[str, Any] | None], None] = lambda done, line: None,
    notice: Callable[[str], None] = lambda sentence: None,
    should_stop: Callable[[], bool] = lambda: False,
) -> dict[str, Any]:
    """Measure a finished run; what is in its notebook is not measured again. Gives the values by their names."""
    if set(plan.parts) <= set(OF_RECORDS):
        return {}
    study = _Study(run, plan, torch.device(device), data_dir, should_stop)
    units = study.units(notice)
    notebook = Notebook(run.folder / "analysis.jsonl")
    if any(notebook.find(unit.key) is None for unit in units):
        _ = study.points.problem  # data that are not there are not there for any of them
    values: dict[str, Any] = {}
    for done, unit in enumerate(units):
        if should_stop():
            raise Stopped
        value = notebook.find(unit.key)
        if value is None or not unit.is_good(value):
            began = time.perf_counter()
            try:
                computed = unit.compute()
            except (ValueError, RuntimeError, OSError) as error:
                # The others may be measured all the same.
                notice(f"{unit.name} could not be measured: {error}")
                values.setdefault(FAILED, []).append(unit.name)
                continue
            value = notebook.note(unit.name, unit.key, computed, time.perf_counter() - began)
        values[unit.name] = value
        progress((done + 1) / len(units), {"what": unit.name})
    return values


FAILED = "failed"  # among values: the names of those that there are not


@dataclass
class _Study:
    run: Run
    plan: Plan
    device: torch.device
    data_dir: str | None
    should_stop: Callable[[], bool]
    points: _Points = field(init=False)

    def __post_init__(self) -> None:
        self.points = _Points(self.run, self.data_dir, self.device)

    # ----------------------------------------------------------------------------------- the list

    def units(self, notice: Callable[[str], None]) -> list[_Unit]:
        """All that the plan asks for, in order."""
        parts, points = self.plan.parts, self.points
        wanted = [part for part in parts if part in OF_ITERATES]
        if self.run.result and self.run.result["status"] == "diverged":
            notice("it diverged: there is nothing to measure")
            return []
        curved = "curvature" in parts or "density" in parts
        if curved and self.plan.kind == "ggn" and self.run.recipe.language is not None:
            raise RunError("the Gauss-Newton matrix is of networks whose output is one tensor")
        found: list[_Unit] = []
        if wanted and len(points.kept) < 2:
            if points.has_average:
                notice(
                    f"it kept {len(points.kept)} iterates, too few for {' and '.join(wanted)}: train it with "
                    "--set keep=N to keep those of the last N epochs"
                )
            wanted = []
        if wanted:
            found += [self._predicted(epoch) for epoch in points.kept]
        if "diversity" in wanted:
            iterates = [points.identity(epoch) for epoch in points.kept]
            found.append(_Unit("diversity", {"what": "diversity", "of": iterates}, self._diversity))
            found.append(_Unit("distances", {"what": "distances", "of": iterates}, self._distances))
        if "ensemble" in wanted:
            everything: list[int | str] = [
                *points.kept,
                *(["average"] if points.has_average else []),
            ]
            found += [self._predicted(point) for point in everything if point == "average"]
            of = [points.identity(point) for point in everything]
            found.append(_Unit("ensemble", {"what": "ensemble", "of": of}, self._ensemble))
        if "networks" in parts:
            found.append(self._predicted(points.final)._replace(name="network"))
        for point in ["iterate", *(["average"] if points.has_average else [])]:
            found += self._curvature_units(point)
        if "landscape" in parts:
            found += self._landscape_units(notice)
        return found

    # ------------------------------------------------------------------------------- predictions

    def _file(self, point: int | str) -> Path:
        return self.run.folder / "predictions" / f"{self.points.identity(point)}.pt"

    def _predicted(self, point: int | str) -> _Unit:
        """What a point says of the test data, in a file."""
        path = self._file(point)
        rows = self._rows
        key = {"what": "predictions", "of": self.points.identity(point), "rows": rows}

        def compute() -> Any:
            model = self.points.put(point)
            logs, targets, count = [], [], 0
            for scores, true in self.points.problem.scores(model, "test"):
                logs.append(scores.log_softmax(-1).cpu())
                targets.append(true.cpu())
                count += len(true)
                if rows is not None and count >= rows:
                    break
            found = {"logs": torch.cat(logs)[:rows], "true": torch.cat(targets)[:rows]}
            path.parent.mkdir(exist_ok=True)
            buffer = io.BytesIO()
            torch.save(found, buffer)
            write_atomically(path, buffer.getvalue())
            return {"file": path.name, "examples": len(found["true"]), "sha256": _digest(path)}

        def is_good(noted: Any) -> bool:
            return path.exists() and noted.get("sha256") == _digest(path)

        return _Unit(f"predictions/{point}", key, compute, is_good)

    @property
    def _rows(self) -> int | None:
        """As many test examples as there is room for the predictions of: of a text the first words; None is all."""
        problem = self.points.problem if self.run.recipe.language is not None else None
        return (
            _STORED_NUMBERS // len(problem.corpus.words)
            if isinstance(problem, task.Language)
            else None
        )

    def _read(self, points: list[Any]) -> tuple[list[Tensor], Tensor]:
        found = [network_predictions(self._file(point)) for point in points]
        return [logs for logs, _ in found], found[0][1]

    def _diversity(self) -> dict[str, Any]:
        found = diversity(self._read(list(self.points.kept))[0])
        return {
            "points": len(found.kl),
            "examples": found.examples,
            **{
                name: {
                    "mean": found.mean(name),
                    "thousands": found.thousands(name),
                    "by_distance": found.by_distance(name),
                }
                for name in MEASURES
            },
        }

    def _distances(self) -> dict[str, Any]:
        found = distances(
            [self.points.mapped(epoch) for epoch in self.points.kept], self.points.names
        )
        return {
            "mean": found.mean,
            "relative": found.relative,
            "consecutive": found.consecutive,
            "norm": float(found.norms.mean()),
            "by_distance": found.by_distance(),
        }

    def _ensemble(self) -> dict[str, Any]:
        logs, true = self._read(list(self.points.kept))
        alone, together = ensemble(logs, true)
        value: dict[str, Any] = {
            "alone": [list(score) for score in alone],
            "together": [list(score) for score in together],
        }
        if self.points.has_average:
            (averaged,), _ = ensemble([self._read(["average"])[0][0]], true)
            value["average"] = list(averaged)
        return value

    # --------------------------------------------------------------------------------- curvature

    def _curvature_units(self, point: str) -> list[_Unit]:
        plan = self.plan
        common = {
            "of": self.points.identity(point),
            "examples": plan.examples,
            "kind": plan.kind,
            "batchnorm": plan.batchnorm,
        }

        def unit(what: str, compute: Callable[[Curvature], Any], **settings: Any) -> _Unit:
            key = {"what": what, **common, **settings}
            return _Unit(f"{what}/{point}", key, lambda: self._at(point, compute))

        found = []
        if "curvature" in plan.parts:
            metrics = {"what": "metrics", "of": common["of"]}
            found += [
                _Unit(f"metrics/{point}", metrics, lambda: self._metrics(self.points.put(point))),
                unit("norm", self._norm, tolerance=plan.tolerance),
                unit("moments", self._moments, probes=plan.probes),
                unit("noise", self._noise),
            ]
        if "density" in plan.parts:
            found.append(unit("density", self._density, steps=plan.steps))
        return found

    def _at(self, point: str, compute: Callable[[Curvature], Any]) -> Any:
        model = self.points.put(point)
        # cuDNN's recurrent layers have no second derivatives, and none in evaluation mode.
        with torch.backends.cudnn.flags(enabled=self.run.recipe.language is None):
            at = Curvature(
                model,
                _Again(self.points.problem, self.plan.examples, self.should_stop),
                self.points.problem.loss,
                kind=self.plan.kind,
                batchnorm=self.plan.batchnorm,
            )
            return compute(at)

    def _norm(self, at: Curvature) -> dict[str, Any]:
        found = spectra.top(at, tolerance=self.plan.tolerance, products=200)
        return {
            "value": float(found.values[0]),
            "error": float(found.errors[0]),
            "products": found.products,
        }

    def _moments(self, at: Curvature) -> dict[str, Any]:
        trace, squared = spectra.moments(at, probes=self.plan.probes)
        return {"trace": list(trace), "squared_norm": list(squared), "dimension": at.dimension}

    def _noise(self, at: Curvature) -> dict[str, Any]:
        alone = self.run.recipe.language is None and self.plan.batchnorm == "eval"
        found = measure_noise(at, per="example" if alone else "batch")
        return {
            "trace": found.trace,
            "error": found.error,
            "squared_gradient": found.squared_gradient,
            "scale": found.scale,
            "per_parameter": found.per_parameter,
        }

    def _density(self, at: Curvature) -> dict[str, Any]:
        found = spectra.density(at, probes=1, steps=self.plan.steps)
        return {"nodes": found.nodes.tolist(), "weights": found.weights.tolist()}

    # --------------------------------------------------------------------------------- landscape

    def _metrics(self, model: nn.Module) -> dict[str, dict[str, float]]:
        return {part: self.points.problem.evaluate(model, part) for part in ("train", "test")}

    def _measured(self, model: nn.Module) -> dict[str, float]:
        if self.should_stop():
            raise Stopped
        self.points.refresh(self.points.epochs)
        found = self._metrics(model)
        return {f"{part} {name}": v for part, values in found.items() for name, v in values.items()}

    def _landscape_units(self, notice: Callable[[str], None]) -> list[_Unit]:
        points = self.points
        if not points.has_average:
            return []
        of = [points.identity("iterate"), points.identity("average")]
        at = [
            round(-0.5 + 2 * i / (2 * self.plan.grid - 2), 6) for i in range(2 * self.plan.grid - 1)
        ]

        def line() -> Any:
            ends = (points.weights("iterate"), points.weights("average"))
            return {"at": at, "values": along_line(points.model, *ends, self._measured, at)}

        found = [_Unit("line", {"what": "line", "of": of, "at": at}, line)]
        iterates = [epoch for epoch in points.kept if epoch != points.epochs]
        if not iterates:
            notice("it kept no iterates: there is a line but no plane")
            return found
        names = [points.identity(epoch) for epoch in points.kept]
        frame = {"of": [*of, *names], "grid": self.plan.grid}
        found.append(_Unit("plane", {"what": "plane", **frame}, self._frame))
        for row in range(self.plan.grid):
            key = {"what": "plane row", **frame, "row": row}
            found.append(_Unit(f"plane/{row}", key, partial(self._plane_row, row)))
        return found

    @cached_property
    def _plane(self) -> Plane:
        """Through the first and the last iterate that were kept, and the average."""
        weights = self.points.weights
        ends = weights(self.points.kept[0]), weights("iterate")
        return Plane.through(*ends, weights("average"), self.points.names)

    def _frame(self) -> dict[str, Any]:
        """Where the points are in the plane, and the places of a grid around them; none where they lie on a line."""
        try:
            _ = self._plane
        except ValueError:
            return {"points": {}, "x": [], "y": []}
        where = {str(e): self._plane.coordinates(self.points.weights(e)) for e in self.points.kept}
        where["average"] = self._plane.coordinates(self.points.weights("average"))
        sides = []
        ends = [(min(values), max(values)) for values in zip(*where.values())]
        margin = 0.25 * max(high - low for low, high in ends)
        for low, high in ends:
            step = (high - low + 2 * margin) / (self.plan.grid - 1)
            sides.append([low - margin + i * step for i in range(self.plan.grid)])
        return {
            "points": {name: list(p) for name, p in where.items()},
            "x": sides[0],
            "y": sides[1],
        }

    @cached_property
    def _places(self) -> dict[str, Any]:
        return self._frame()

    def _plane_row(self, row: int) -> list[dict[str, float]]:
        if not self._places["x"]:
            return []
        at = [(x, self._places["y"][row]) for x in self._places["x"]]
        return over_plane(self.points.model, self._plane, self._measured, at)


class _Again:
    """The training data, as often as it is asked for; asked to stop, it does."""

    KEPT_NUMBERS = 2**26

    def __init__(
        self, problem: task.Task, examples: int | None, should_stop: Callable[[], bool]
    ) -> None:
        self.problem, self.examples, self.should_stop = problem, examples, should_stop
        self._kept: list[Any] | None = None

    def __iter__(self) -> Iterator[Any]:
        if self._kept is not None:
            for batch in self._kept:
                if self.should_stop():
                    raise Stopped
                yield batch
            return
        kept: list[Any] | None = [] if isinstance(self.problem, task.Images) else None
        numbers = 0
        for batch in self.problem.training_data(self.examples):
            if self.should_stop():
                raise Stopped
            if kept is not None:
                kept.append(batch)
                numbers += batch[0].numel()
                kept = kept if numbers <= self.KEPT_NUMBERS else None
            yield batch
        self._kept = kept


def _digest(path: Path) -> str:
    found = hashlib.sha256()
    with path.open("rb") as file:
        while content := file.read(2**20):
            found.update(content)
    return found.hexdigest()


def network_predictions(path: Path) -> tuple[Tensor, Tensor]:
    """What was written of a point: log-probabilities, read from the disk as they are looked at, and what is true."""
    found = torch.load(path, weights_only=True, map_location="cpu", mmap=True)
    return found["logs"], found["true"]
