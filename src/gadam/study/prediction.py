"""What averaging will give: predicted from a short measurement of a run, beside what it gave."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from statistics import fmean, stdev
from typing import TypedDict

import torch
from torch import Tensor

from gadam import schedule
from gadam._torch import BATCHNORM_TYPES
from gadam.analysis import Curvature, measure_directions
from gadam.report.chart import Chart, Series
from gadam.runs.collect import RunRecord
from gadam.runs.files import Document
from gadam.study.continuation import Continuation, EpochData, Method
from gadam.study.forecast import Forecast, Measurement, Predicted
from gadam.study.measured import Measured
from gadam.study.part import Part, Study, Unit
from gadam.study.points import Point
from gadam.study.section import SectionBuilder
from gadam.study.settings import StudyError

__all__ = ["PredictionPart"]

_STEPS, _PROBES, _PROBE_STEPS = 60, 4, 16  # Lanczos steps; see measure_directions
_CONTINUATION = "prediction/continuation-"
_POINTS = ("last iterate", "average", "EMA", "decayed rate")
_GAIN = "gain of the EMA"


class _Losses(TypedDict):
    """Losses of one continuation, one per epoch unless it says otherwise."""

    last: list[float]
    half: list[float]  # the average of the second half of the steps so far
    ema: list[float]
    decayed: list[float]
    starts: list[float]  # the average from each epoch on, at the end


class _Own(TypedDict):
    """Losses of the run itself after the point."""

    epochs: list[int]
    losses: list[float]


class PredictionPart(Part):
    """Predict the loss of the last iterate, the average, an EMA, and a decayed learning rate."""

    name = "prediction"
    order = 90
    title = "Predictions beside measurements"
    on_request = True

    def units(self, study: Study) -> Iterable[Unit]:
        """Return the measurement at a point, the run's own losses after it, and continuations.

        Args:
            study: The run.

        Raises:
            StudyError: No iterate was kept after the requested epoch.
        """
        point = _point(study)
        horizon = _horizon(study, point)
        key: Document = {
            "what": "prediction",
            "of": study.points.identity(point),
            "examples": study.settings.examples,
            "kind": study.settings.kind,
        }
        yield Unit(
            "prediction/measurement",
            {**key, "steps": [_STEPS, _PROBES, _PROBE_STEPS], "slope": "mean over the epoch"},
            partial(_measure, study, point),
        )
        if point != "iterate":
            epochs = [epoch for epoch in study.points.kept if epoch > int(point)]
            yield Unit(
                "prediction/own",
                {**key, "what": "losses after", "epochs": epochs},
                partial(_own, study, point, epochs),
            )
        for index in range(study.settings.continuations):
            yield Unit(
                f"{_CONTINUATION}{index}",
                {
                    "what": "continuation",
                    "of": study.points.identity(point),
                    "horizon": horizon,
                    "index": index,
                },
                partial(_continue, study, point, horizon, index),
            )

    def report(self, measured: Measured, section: SectionBuilder) -> None:
        """Add a table of predicted and measured losses, the advice, and charts.

        Args:
            measured: The runs and their values.
            section: The section to fill.
        """
        rows: list[list[str]] = []
        for label in measured.collection.labels:
            for run in measured.runs(label):
                rows += _report_run(measured, section, run)
        if not rows:
            return
        section.table(["run", "point", "predicted", "measured", "within"], rows)
        section.text(
            "Training losses, predicted from the curvature, the slope, and the gradient noise per "
            "direction around one point of the run. Measured losses are means over continuations "
            "of the run in other orders of the data, ± their standard errors. The interval of a "
            "prediction is two standard deviations of a single run, plus a share of the predicted "
            "change of the loss. That share is the sum of what the model misses in the epoch in "
            "which it was measured, of the difference between the slope at that epoch's average "
            "and its mean over the epoch, and of what the quadratic misses between the average "
            "and the start, in proportion to the distance."
        )


# ------------------------------------------------------------------------------------- measuring


def _point(study: Study) -> Point:
    kept = [epoch for epoch in study.points.kept if epoch < study.points.epochs]
    wanted = study.settings.epoch
    if wanted is None:
        return kept[0] if kept else "iterate"
    if wanted == study.points.epochs:
        return "iterate"
    if wanted not in kept:
        listed = ", ".join(map(str, [*kept, study.points.epochs]))
        raise StudyError(
            f"{study.run.folder} has no iterate after epoch {wanted}. Choose from {listed}, or "
            "train with --set keep_iterates=N."
        )
    return wanted


def _horizon(study: Study, point: Point) -> int:
    if study.settings.horizon is not None:
        return study.settings.horizon
    if point == "iterate":
        return max(1, study.points.epochs // 2)
    return study.points.epochs - int(point)


def _rate(study: Study, continuation: Continuation) -> float:
    """Return the learning rate at the point, which stays constant."""
    last = study.points.epochs - 1
    return float(study.points.recipe.learning_rate(min(continuation.epoch, last)))


def _curvature(study: Study, data: EpochData) -> Curvature:
    """Return the curvature of the training loss, with the BatchNorm mode of training."""
    model = study.points.model
    normalizes = any(isinstance(module, BATCHNORM_TYPES) for module in model.modules())
    return Curvature(
        model,
        data,
        study.points.task.loss,
        kind=study.settings.kind,
        batchnorm="train" if normalizes else "eval",
    )


def _measure(study: Study, point: Point) -> Measurement:
    """Train for one epoch from the point, and measure the curvature around its average.

    The slope at the average is the mean of the gradients along the way. On a quadratic, both are
    the same. Otherwise, the mean includes what the noise does to the slope: iterates scatter to
    where the loss is more curved, and that pushes them back.
    """
    run = Continuation(study, point)
    method = run.method()
    rate = _rate(study, run)
    if rate <= 0:
        raise StudyError("The learning rate at this point is 0, so nothing would move.")
    start = run.flat()
    whole = _curvature(study, EpochData(study, run.epoch))
    start_loss = whole.mean_loss()
    center, slope = torch.zeros_like(start), torch.zeros_like(start)
    for done in run.run([(run.epoch, rate)]):
        center += (run.flat() - center) / done
        slope += (run.gradient() - slope) / done

    def noise() -> Iterator[tuple[Tensor, int]]:
        yield from run.noise(run.epoch, rate)
        run.load(center)  # the products of later Lanczos steps are taken at the average

    run.load(center)
    loss, gradient = whole.mean_loss(), whole.gradient()
    other = _curvature(study, EpochData(study, run.epoch + 1)).gradient()
    at = _curvature(study, EpochData(study, run.epoch, study.settings.examples))
    sizes = [size for _, size in whole.batch_gradients()]
    found = measure_directions(
        at,
        gradient=slope,
        gradients=noise,
        scale=method.scale,
        offset=start - center,
        velocity=method.velocity,
        steps=_STEPS,
        probes=_PROBES,
        probe_steps=_PROBE_STEPS,
    )
    return {
        "epoch": run.epoch,
        "steps": len(sizes),
        "batch_size": sum(sizes) / len(sizes),
        "rate": rate,
        "dimension": at.dimension,
        "loss": loss,
        "start_loss": start_loss,
        "rise": found.rise,
        "fitted_rise": found.rise - float((slope - gradient.to(slope)) @ (start - center)),
        "eigenvalues": found.eigenvalues.tolist(),
        "counts": found.counts.tolist(),
        "noise": found.noise.tolist(),
        "gradient": found.gradient.tolist(),
        "position": found.position.tolist(),
        "velocity": found.velocity.tolist(),
        "noise_trace": found.total.trace,
        "noise_error": found.total.error,
        "resolved": found.resolved,
        "resolved_noise": found.resolved_noise,
        "negative_noise": found.negative_noise,
        "negative_gradient": found.negative_gradient,
        "reshuffled": _reshuffled(method, gradient - other, found.total.trace / sum(sizes)),
        "method": _plain(method),
    }


def _reshuffled(method: Method, difference: Tensor, independent: float) -> float:
    """Return the share of the noise that cancels over an epoch, because examples do not repeat.

    Args:
        method: The optimizer.
        difference: The difference of the mean gradients over two epochs at the same weights.
        independent: The variance of an epoch's mean gradient if all examples were independent.
    """
    scaled = difference if method.scale is None else difference * method.scale
    variance = float(scaled.double().square().sum()) / 2
    return min(1.0, max(0.0, 1 - variance / independent)) if independent > 0 else 0.0


def _plain(method: Method) -> Document:
    return {
        "momentum": method.momentum,
        "dampening": method.dampening,
        "weight_decay": method.weight_decay,
        "decoupled": method.decoupled,
        "preconditioned": method.scale is not None,
    }


def _own(study: Study, point: Point, epochs: list[int]) -> _Own:
    """Measure the run's own losses after the point."""
    whole = _curvature(study, EpochData(study, int(point)))
    losses = []
    for epoch in epochs:
        study.points.load(epoch)
        losses.append(whole.mean_loss())
    return {"epochs": epochs, "losses": losses}


def _continue(study: Study, point: Point, horizon: int, index: int) -> _Losses:
    """Continue the run with another data order, at a constant and at a decaying rate."""
    run = Continuation(study, point)
    rate = _rate(study, run)
    whole = _curvature(study, EpochData(study, run.epoch))
    # Epochs that the run itself does not have, so that each continuation has its own order.
    first = study.points.epochs + 1000 * (index + 1)
    losses: _Losses = {"last": [], "half": [], "ema": [], "decayed": [], "starts": []}

    def loss_at(weights: Tensor) -> float:
        kept = {name: value.clone() for name, value in run.model.state_dict().items()}
        run.load(weights)
        loss = whole.mean_loss()
        run.model.load_state_dict(kept)
        return loss

    blocks: list[Tensor] = []  # the mean of each epoch's iterates
    ema = torch.zeros_like(run.flat())
    decay = Forecast.ema_decay(run.steps)
    for done in run.run((first + e, rate) for e in range(horizon)):
        now = run.flat()
        step = (done - 1) % run.steps
        if step == 0:
            blocks.append(torch.zeros_like(now))
        blocks[-1] += (now - blocks[-1]) / (step + 1)
        ema += (1 - decay) * (now - ema)
        if done % run.steps == 0:
            half = torch.stack(blocks[len(blocks) // 2 :]).mean(0)
            losses["last"].append(loss_at(now))
            losses["half"].append(loss_at(half))
            losses["ema"].append(loss_at(ema / (1 - decay**done)))
    for start in range(horizon):
        losses["starts"].append(loss_at(torch.stack(blocks[start:]).mean(0)))
    decayed = ((first + 500 + e, rate * schedule.linear(e, horizon)) for e in range(horizon))
    for done in run.run(decayed):
        if done % run.steps == 0:
            losses["decayed"].append(loss_at(run.flat()))
    return losses


# ------------------------------------------------------------------------------------- reporting


def _report_run(measured: Measured, section: SectionBuilder, run: RunRecord) -> list[list[str]]:
    """Add the charts, the advice and the numbers of one run. Return its rows of the table."""
    found: Measurement | None = measured.value(run, "prediction/measurement")
    if found is None:
        return []
    losses: list[_Losses] = [
        value
        for name, value in measured.values[run.label, run.seed].items()
        if name.startswith(_CONTINUATION)
    ]
    own: _Own | None = measured.value(run, "prediction/own")
    horizon = measured.settings.horizon or (
        len(losses[0]["last"]) if losses else max(1, run.recipe.epochs - found["epoch"])
    )
    if not measured.settings.horizon and not losses and own is None:
        horizon = max(1, run.recipe.epochs // 2)
    forecast, name = Forecast(found, horizon), f"{run.label}, seed {run.seed}"
    key = f"{run.label}-{run.seed}"
    summary: Document = {"epoch": found["epoch"], "horizon": horizon, "rate": found["rate"]}
    section.summary[key] = summary
    start, predicted, cautions = _predictions(forecast, losses)
    seen = _seen(losses, start)
    rows: list[list[str]] = []
    points: Document = {}
    for point, values in seen.items():
        each = predicted.get(point)
        within = each.covers(fmean(values)) if each is not None and values else None
        points[point] = {
            "predicted": each and each.loss,
            "interval": each and each.error,
            "measured": values,
            "within": within,
        }
        text = {None: "–", True: "yes", False: "no"}[within]
        rows.append([name, point, _interval(each), _mean(values), text])
    summary |= {
        "points": points,
        "start": found["epoch"] + start,
        "start_loss": found["start_loss"],
        "every": forecast.advice.every if forecast.problem is None else None,
        "self_test": forecast.self_test,
        "slope_difference": forecast.slope_difference,
        "misfit": forecast.misfit,
        "reason": forecast.problem,
        "cautions": cautions,
        "text": _advice(forecast, predicted, found["epoch"] + start, seen),
    }
    section.text(f"{name}: {summary['text']}")
    section.text(" ".join(cautions))
    _charts(section, key, name, forecast, losses, own)
    return rows


def _predictions(
    forecast: Forecast, losses: Sequence[_Losses]
) -> tuple[int, dict[str, Predicted | None], list[str]]:
    """Return the best start, in epochs after the point, the predictions by point, and caveats.

    Where the model does not hold, the start is the best one of the continuations.
    """
    gain = {_GAIN: forecast.gain()}
    if forecast.problem is not None:
        starts = [fmean(column) for column in zip(*(each["starts"] for each in losses))]
        best = min(range(len(starts)), key=starts.__getitem__) if starts else forecast.horizon // 2
        return best, gain, []
    steps, advice = forecast.measured["steps"], forecast.advice
    start = (advice.first - 1) // steps  # whole epochs, as recipes count
    predictions = (
        forecast.last(),
        forecast.average(start * steps + 1),
        forecast.ema(),
        forecast.decayed(),
    )
    return start, {**dict(zip(_POINTS, predictions)), **gain}, list(advice.cautions)


def _seen(losses: Sequence[_Losses], start: int) -> dict[str, list[float]]:
    """Return the final losses of the continuations, by point.

    Args:
        losses: Those of each continuation.
        start: The start of the average, in epochs after the point.
    """
    final = (
        [each["last"][-1] for each in losses],
        [each["starts"][min(start, len(each["starts"]) - 1)] for each in losses],
        [each["ema"][-1] for each in losses],
        [each["decayed"][-1] for each in losses],
        [each["last"][-1] - each["ema"][-1] for each in losses],
    )
    return dict(zip((*_POINTS, _GAIN), final))


def _advice(
    forecast: Forecast,
    predicted: dict[str, Predicted | None],
    start: int,
    seen: dict[str, list[float]],
) -> str:
    """Return the advice as sentences: from predictions, or from continuations without them."""
    found = forecast.measured
    setting = (
        f"{forecast.horizon} epochs at a learning rate of {found['rate']:.3g} from epoch "
        f"{found['epoch']} on"
    )
    losses = {point: each.loss for point in _POINTS if (each := predicted.get(point)) is not None}
    if losses:
        stride = forecast.advice.every
        shown = ", ".join(f"{_interval(predicted[point])} ({point})" for point in losses)
        return (
            f"Average {'each step' if stride == 1 else f'every {stride:,} steps'} after epoch "
            f"{start} (average.start={start}). In {setting}, the training loss is predicted to be "
            f"{shown}. The lowest is that of the {min(losses, key=losses.__getitem__)}."
        )
    lines = [f"The model does not hold here. {forecast.problem}"]
    if (gain := predicted[_GAIN]) is not None:
        lines.append(
            f"Still, an EMA over an epoch is predicted to remove {_interval(gain)} of noise from "
            "the loss of the last iterate."
        )
    losses = {point: fmean(seen[point]) for point in _POINTS if seen[point]}
    if not losses:
        return " ".join([*lines, "For advice from continuations, pass --continuations 2."])
    shown = ", ".join(f"{loss:.4f} ({point})" for point, loss in losses.items())
    lines.append(
        f"Measured in continuations of {setting}, the training loss is {shown}. The lowest is "
        f"that of the {min(losses, key=losses.__getitem__)}. If you average, start after epoch "
        f"{start} (average.start={start})."
    )
    return " ".join(lines)


def _interval(predicted: Predicted | None) -> str:
    return "–" if predicted is None else f"{predicted.loss:.4f} ± {predicted.error:.4f}"


def _mean(values: Sequence[float]) -> str:
    if not values:
        return "–"
    error = f" ± {stdev(values) / len(values) ** 0.5:.4f}" if len(values) > 1 else ""
    return f"{fmean(values):.4f}{error}"


def _charts(
    section: SectionBuilder,
    key: str,
    name: str,
    forecast: Forecast,
    losses: Sequence[_Losses],
    own: _Own | None,
) -> None:
    """Add the losses over epochs, and the loss of the average over its start.

    Without predictions, the charts show only measured losses.
    """
    if forecast.problem is not None and not losses:
        return
    steps, before = forecast.measured["steps"], forecast.measured["epoch"]
    epochs = range(1, forecast.horizon + 1)
    predictions: dict[str, Callable[[int], Predicted]] = {
        "last iterate": forecast.last,
        "average of the second half": lambda e: forecast.average(e // 2 * steps + 1, e),
        "EMA over an epoch": forecast.ema,
        "decayed rate": forecast.decayed,
    }
    kinds = zip(predictions, ("last", "half", "ema", "decayed"))
    series = [
        Series(label, "prediction", [before + e for e in epochs], [at(e).loss for e in epochs])
        for label, at in predictions.items()
        if forecast.problem is None
    ]
    for label, kind in kinds:
        if losses:
            series.append(_points(label, before + 1, [each[kind] for each in losses]))  # type: ignore[literal-required]
    if own is not None and own["epochs"]:
        series.append(Series("this run", "measured", own["epochs"], own["losses"]))
    caption = (
        f"{name}: training losses after epoch {before}, predicted (lines) and measured (points, "
        "two standard errors)."
    )
    chart = Chart("Predictions", caption, "epoch", "training loss", series, False, False)
    section.chart(f"prediction-{key}", chart)
    starts = range(forecast.horizon)
    series = []
    if forecast.problem is None:
        values = [forecast.average(s * steps + 1).loss for s in starts]
        series.append(Series("average", "prediction", [before + s for s in starts], values))
    if losses:
        series.append(_points("average", before, [each["starts"] for each in losses]))
    caption = f"{name}: the loss of the average after {forecast.horizon} epochs, over its start."
    chart = Chart("Start of the average", caption, "start", "training loss", series, False, False)
    section.chart(f"prediction-start-{key}", chart)


def _points(label: str, first: int, curves: Sequence[Sequence[float]]) -> Series:
    """Return the means of curves over continuations, with their standard errors."""
    columns = list(zip(*curves))
    errors = [stdev(c) / len(c) ** 0.5 if len(c) > 1 else 0.0 for c in columns]
    positions = [first + i for i in range(len(columns))]
    return Series(label, "measured", positions, [fmean(c) for c in columns], errors)
