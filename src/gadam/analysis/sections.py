"""From what was measured to the report: tables, charts and pictures, one section for each part."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean
from typing import Any

import torch

from gadam.analysis.predictions import ensemble
from gadam.analysis.spectra import Density
from gadam.analysis.study import PARTS, Plan, network_predictions
from gadam.analysis.weights import effective_rates
from gadam.report.figures import STYLE, rendered
from gadam.report.picture import Picture, Series, draw, vega
from gadam.report.records import Collection, RunRecord
from gadam.train import summary
from gadam.train.catalogue import PAPER, Experiment
from gadam.train.experiments import slug
from gadam.train.summary import Estimate, more_is_better

__all__ = ["Section", "sections"]

Values = Mapping[str, Any]


@dataclass
class Section:
    """A part of the report.

    Args:
        name: of its files
        title: what it shows
        summary: its numbers, for ``analysis.json``
        blocks: as the report's page takes them
        files: by name, what goes beside them
    """

    name: str
    title: str
    summary: Any = None
    blocks: list[dict[str, Any]] = field(default_factory=list)
    files: dict[str, bytes] = field(default_factory=dict)

    def text(self, sentence: str) -> None:
        """Add a paragraph."""
        self.blocks.append({"kind": "text", "text": sentence})

    def table(self, header: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
        """Add a table."""
        self.blocks.append({"kind": "table", "header": list(header), "rows": list(map(list, rows))})

    def picture(self, name: str, picture: Picture) -> None:
        """Add a chart, and the same as a figure for a paper."""
        self.blocks.append({"kind": "chart", "spec": vega(picture), "caption": picture.caption})
        for ending, content in draw(picture).items():
            self.files[f"{name}.{ending}"] = content

    def image(self, name: str, content: Mapping[str, bytes], caption: str) -> None:
        """Add a picture as it is."""
        for ending, data in content.items():
            self.files[f"{name}.{ending}"] = data
        self.blocks.append({"kind": "image", "file": f"{name}.png", "caption": caption})


class Measured:
    """The runs of a collection with what was measured of each."""

    def __init__(
        self, collection: Collection, values: Mapping[tuple[str, int], Values], plan: Plan
    ) -> None:
        self.collection, self.values, self.plan = collection, values, plan

    @property
    def experiment(self) -> Experiment:
        return self.collection.experiment

    def runs(self, label: str) -> list[RunRecord]:
        """Of a row, those that are over and did not diverge; where several have a seed, the last."""
        over = {
            run.seed: run
            for run in self.collection.runs
            if run.label == label and run.result is not None and run.result["status"] != "diverged"
        }
        return list(over.values())

    def each(self, name: str) -> dict[str, list[Any]]:
        """Values of this name by row, a list over seeds; rows that have none are left out."""
        found = {
            label: [
                self.values[label, run.seed][name]
                for run in self.runs(label)
                if name in self.values.get((label, run.seed), {})
            ]
            for label in self.collection.labels
        }
        return {label: values for label, values in found.items() if values}

    def metric(self, label: str) -> str:
        return self.experiment.metric_of(label)


def sections(
    collection: Collection, values: Mapping[tuple[str, int], Values], plan: Plan
) -> list[Section]:
    """What can be shown of the plan's parts; one of which nothing was measured is left out."""
    measured = Measured(collection, values, plan)
    found = []
    for part in plan.parts:
        section = Section(part, PARTS[part][0].upper() + PARTS[part][1:])
        _BUILDERS[part](measured, section)
        if section.blocks:
            found.append(section)
    return found


# --------------------------------------------------------------------------------------- numbers


def _number(value: float) -> str:
    return f"{value:.3g}" if abs(value) < 1000 else f"{value:.4g}"


def _shown(values: Iterable[float]) -> str:
    """The mean, with its standard error where there are several."""
    estimate = Estimate.of([value for value in values if math.isfinite(value)])
    if estimate is None:
        return "–"
    if estimate.error is None:
        return _number(estimate.mean)
    return f"{_number(estimate.mean)} ± {estimate.error:.1g}"


def _plain(values: Iterable[float]) -> dict[str, Any]:
    return _of(Estimate.of([value for value in values if math.isfinite(value)]))


def _of(estimate: Estimate | None) -> dict[str, Any]:
    if estimate is None:
        return {"mean": None, "error": None, "runs": 0}
    return {"mean": estimate.mean, "error": estimate.error, "runs": estimate.count}


def _worse(score: Sequence[float], metric: str) -> float:
    """A score (accuracy, loss) as something of which less is better: error in %, or perplexity."""
    accuracy, loss = score
    return 100 - accuracy if more_is_better(metric) else math.exp(min(loss, 700))


def _named(metric: str) -> str:
    return "test error, %" if more_is_better(metric) else f"test {metric}"


def _drop(run: RunRecord, metric: str) -> float | None:
    """ΔE: by how much the average's test error, or perplexity, is below the last iterate's."""
    result = run.result or {}
    points = [(result.get(p) or {}).get("test", {}).get(metric) for p in ("iterate", "average")]
    if None in points:
        return None
    iterate, average = points
    return float(average - iterate if more_is_better(metric) else iterate - average)


def _line(label: str, points: Iterable[tuple[float, float]]) -> Series:
    finite = [(float(x), float(y)) for x, y in points if math.isfinite(y)]
    return Series(label, "curve", [x for x, _ in finite], [y for _, y in finite])


def _measured(label: str, points: Iterable[tuple[float, list[float]]]) -> Series:
    """Means over seeds, with their standard errors."""
    finite = [(x, [value for value in values if math.isfinite(value)]) for x, values in points]
    estimates = [(x, e) for x, values in finite if (e := Estimate.of(values)) is not None]
    return Series(
        label,
        "measured",
        [x for x, _ in estimates],
        [e.mean for _, e in estimates],
        [e.error or 0.0 for _, e in estimates],
    )


def _mean_curve(curves: Sequence[Sequence[float]]) -> list[float]:
    """Place by place, as far as all go."""
    return [fmean(values) for values in zip(*curves)]


def _families(measured: Measured, labels: Iterable[str]) -> list[list[str]]:
    """Rows that differ in their weight decay alone, by increasing decay."""
    groups: dict[Any, list[str]] = {}
    recipes = measured.experiment.recipes
    for label in labels:
        r = recipes[label]
        same = replace(r, name="", optimizer=replace(r.optimizer, weight_decay=0.0))
        groups.setdefault(same, []).append(label)
    decay = {label: recipes[label].optimizer.weight_decay for label in recipes}
    return [
        sorted(group, key=decay.__getitem__)
        for group in groups.values()
        if len({decay[label] for label in group}) > 1
    ]


def _over_decay(
    measured: Measured,
    section: Section,
    name: str,
    title: str,
    values: Mapping[str, Mapping[str, list[float]]],
    y: str,
) -> None:
    """A chart over weight decay: for each thing measured its values by row, lists over seeds."""
    series: list[Series] = []
    for label, by_row in values.items():
        families = _families(measured, by_row)
        methods = [measured.experiment.recipes[family[0]].method for family in families]
        for family, method in zip(families, methods):
            if methods.count(method) > 1:  # then they are told apart by their first row
                method = family[0]
            points = [
                (measured.experiment.recipes[row].optimizer.weight_decay, by_row[row])
                for row in family
            ]
            found = _measured(label.format(method=method), points)
            series += [replace(found, kind="curve", error=[]), found]
    if series:
        caption = f"{title} Points are means over seeds, bars two standard errors."
        section.picture(
            name, Picture(title, caption, "weight decay", y, series, log_x=False, log_y=False)
        )


# ------------------------------------------------------------------------------------- diversity

_COLUMNS = {
    "kl": "KL, nats",
    "total_variation": "total variation",
    "disagreement": "disagreement, %",
    "squared_distance": "‖p−q‖²",
}


def _diversity(measured: Measured, section: Section) -> None:
    found, apart = measured.each("diversity"), measured.each("distances")
    if not found:
        return
    section.text(
        "Between the predictions on the test data of all pairs of iterates of a run: means over pairs and pictures, then "
        "over seeds. Summed over the test data they are in thousands, as in the paper's table. KL is symmetrised. "
        "A relative distance is over the mean norm of the weights; ΔE is what the average's error is below the last "
        "iterate's."
    )
    rows, plain = [], {}
    for label, values in found.items():
        metric = measured.metric(label)
        drops = [d for run in measured.runs(label) if (d := _drop(run, metric)) is not None]
        scale = {"disagreement": 100.0}
        cells = {
            name: [scale.get(name, 1.0) * v[name]["mean"] for v in values] for name in _COLUMNS
        }
        sums = {
            f"{name} in thousands": [v[name]["thousands"] for v in values]
            for name in ("kl", "total_variation")
        }
        lengths = {
            "distance": [d["mean"] for d in apart.get(label, [])],
            "relative distance": [d["relative"] for d in apart.get(label, [])],
        }
        everything = {**cells, **sums, **lengths, "drop": drops}
        rows.append([label, *(_shown(v) for v in everything.values())])
        plain[label] = {name: _plain(v) for name, v in everything.items() if v}
        plain[label]["iterates"] = values[0]["points"]
        plain[label]["examples"] = values[0]["examples"]
    header = ["method", *_COLUMNS.values(), "KL, thousands", "total variation, thousands"]
    section.table([*header, "distance", "relative distance", "ΔE"], rows)
    curves = [
        _line(label, enumerate(_mean_curve([v["kl"]["by_distance"] for v in values]), 1))
        for label, values in found.items()
    ]
    title = "How different predictions are by how far iterates lie apart"
    caption = (
        "The symmetrised KL between iterates, by how many places they are apart in their order (an epoch each, if all "
        "were kept): means over pairs and seeds."
    )
    section.picture(
        "diversity",
        Picture(title, caption, "places apart", "KL, nats", curves, log_x=False, log_y=False),
    )
    section.summary = plain
    _errors_over_decay(measured, section)
    normalised: dict[str, list[float]] = {}
    for family in _families(measured, found):
        unit = fmean(v["kl"]["mean"] for v in found[family[0]])
        if measured.experiment.recipes[family[0]].optimizer.weight_decay or not unit:
            continue
        normalised |= {row: [v["kl"]["mean"] / unit for v in found[row]] for row in family}
    _over_decay(
        measured,
        section,
        "diversity-decay",
        "The symmetrised KL between iterates over weight decay; without decay it is 1.",
        {"KL between iterates of {method}": normalised},
        "KL, relative",
    )


def _errors_over_decay(measured: Measured, section: Section) -> None:
    errors: dict[str, dict[str, list[float]]] = {
        "{method}": {},
        "{method}, last iterate": {},
        "{method}, average": {},
    }
    for label in measured.collection.labels:
        metric = measured.metric(label)
        for run in measured.runs(label):
            result = run.result or {}
            alone = "" if result.get("average") is None else ", last iterate"
            for point, name in (("iterate", alone), ("average", ", average")):
                value = (result.get(point) or {}).get("test", {}).get(metric)
                if value is not None:
                    by_row = errors["{method}" + name]
                    by_row.setdefault(label, []).append(
                        100 - value if more_is_better(metric) else value
                    )
    metric = next(iter(measured.experiment.metrics))
    _over_decay(
        measured,
        section,
        "error-decay",
        "Test error over weight decay, of last iterates and of averages.",
        errors,
        _named(metric),
    )


# ------------------------------------------------------------------------------------- ensembles


def _ensemble(measured: Measured, section: Section) -> None:
    found = measured.each("ensemble")
    if not found:
        return
    section.text(
        "The mean of the iterates' probabilities, which takes as many networks to predict with, beside the average of "
        "their weights, which takes one."
    )
    rows, plain, curves = [], {}, []
    gains: dict[str, dict[str, list[float]]] = {"{method}, average of weights": {}}
    gains["{method}, ensemble of iterates"] = {}
    for label, values in found.items():
        metric = measured.metric(label)
        cells = {
            "last iterate": [_worse(v["alone"][-1], metric) for v in values],
            "mean of the iterates": [fmean(_worse(s, metric) for s in v["alone"]) for v in values],
            "ensemble of iterates": [_worse(v["together"][-1], metric) for v in values],
            "average of weights": [_worse(v["average"], metric) for v in values if "average" in v],
        }
        rows.append([label, str(len(values[0]["alone"])), *(_shown(v) for v in cells.values())])
        plain[label] = {name: _plain(v) for name, v in cells.items() if v}
        singles = cells["mean of the iterates"]
        gains["{method}, ensemble of iterates"][label] = [
            a - b for a, b in zip(singles, cells["ensemble of iterates"])
        ]
        if cells["average of weights"]:
            gains["{method}, average of weights"][label] = [
                a - b for a, b in zip(singles, cells["average of weights"])
            ]
        together = _mean_curve([[_worse(s, metric) for s in v["together"]] for v in values])
        curves.append(_line(label, enumerate(together, 1)))
        if cells["average of weights"]:
            curves.append(_measured(label, [(len(together), cells["average of weights"])]))
    named = _named(measured.metric(next(iter(found))))
    points = ("last iterate", "mean of the iterates", "ensemble of iterates", "average of weights")
    section.table(["method", "iterates", *(f"{name}: {named}" for name in points)], rows)
    section.summary = plain
    caption = (
        "An ensemble of the first iterates by how many there are; a point is the average of all."
    )
    section.picture(
        "ensemble",
        Picture(
            "Ensembles of iterates", caption, "iterates", named, curves, log_x=False, log_y=False
        ),
    )
    _over_decay(
        measured,
        section,
        "ensemble-decay",
        "What averages and ensembles of iterates gain over a single iterate, over weight decay.",
        gains,
        f"gain in {named}",
    )


def _networks(measured: Measured, section: Section) -> None:
    found = measured.each("network")
    rows, plain, curves = [], {}, []
    gains: dict[str, list[float]] = {}
    named = ""
    for label in found:
        metric = measured.metric(label)
        files = [
            run.folder / "predictions" / measured.values[label, run.seed]["network"]["file"]
            for run in measured.runs(label)
            if "network" in measured.values.get((label, run.seed), {})
        ]
        if len(files) < 2:
            continue
        named = _named(metric)
        read = [network_predictions(path) for path in files]
        alone, together = ensemble([logs for logs, _ in read], read[0][1])
        singles = [_worse(score, metric) for score in alone]
        all_of_them = _worse(together[-1], metric)
        # Against each network in turn: their spread is what is uncertain.
        gains[label] = [single - all_of_them for single in singles]
        rows.append(
            [
                label,
                str(len(files)),
                _shown(singles),
                _number(all_of_them),
                _shown(gains[label]),
            ]
        )
        plain[label] = {
            "networks": len(files),
            "one": _plain(singles),
            "ensemble": all_of_them,
            "gain": _plain(gains[label]),
        }
        curves.append(_line(label, enumerate([_worse(score, metric) for score in together], 1)))
    if not rows:
        return
    section.text(
        "The mean probabilities of networks that were trained apart, one for each seed. The gain's standard error is of "
        "the networks it is over; there is one ensemble."
    )
    section.table(["method", "networks", f"one network: {named}", "ensemble", "gain"], rows)
    section.summary = plain
    caption = "An ensemble of independent networks by how many there are."
    section.picture(
        "networks",
        Picture(
            "Ensembles of networks", caption, "networks", named, curves, log_x=False, log_y=False
        ),
    )
    _over_decay(
        measured,
        section,
        "networks-decay",
        "What an ensemble of networks gains over one of them, over weight decay.",
        {"ensemble of networks, {method}": gains},
        f"gain in {named}",
    )


# ---------------------------------------------------------------------------------- effective rate


def _rate(measured: Measured, section: Section) -> None:
    by_label: dict[str, list[dict[str, list[tuple[int, float]]]]] = {}
    for label in measured.collection.labels:
        found = [rates for run in measured.runs(label) if (rates := effective_rates(run.lines))]
        if found:
            by_label[label] = found
    if not by_label:
        return
    section.text(
        "α/‖w‖², the rate at which directions turn: of all weights together over the epochs, and of each layer at the "
        "end."
    )
    curves, rows, plain = [], [], {}
    for label, runs in by_label.items():
        epochs = [epoch for epoch, _ in runs[0]["all"]]
        mean = _mean_curve([[rate for _, rate in run["all"]] for run in runs])
        curves.append(_line(label, [(e, m) for e, m in zip(epochs, mean) if m > 0]))
        places: list[Callable[[int], int]] = [lambda n: 0, lambda n: n // 2, lambda n: n - 1]
        ends = [[run["all"][at(len(run["all"]))][1] for run in runs] for at in places]
        rows.append([label, *map(_shown, ends)])
        plain[label] = {
            name: _plain(values) for name, values in zip(("first", "middle", "last"), ends)
        }
    section.table(["method", "first epoch", "half of them", "last epoch"], rows)
    title = "The effective learning rate"
    caption = "α/‖w‖² of all weights together, the mean over seeds."
    section.picture("rate", Picture(title, caption, "epoch", "α/‖w‖²", curves, log_x=False))
    layers: dict[str, dict[str, list[dict[str, list[tuple[int, float]]]]]] = {}
    for label, runs in by_label.items():
        model = measured.experiment.recipes[label].model
        layers.setdefault(model, {})[label] = runs
    for model, rows_of in layers.items():
        names = [name for name in next(iter(rows_of.values()))[0] if name != "all"]
        section.table(
            [f"layer of {model}", *rows_of],
            [
                [name, *(_shown([run[name][-1][1] for run in runs]) for runs in rows_of.values())]
                for name in names
            ],
        )
        for label, runs in rows_of.items():
            plain[label]["layers"] = {
                name: _plain([run[name][-1][1] for run in runs]) for name in names
            }
        if len(by_label) == 1:
            (runs,) = rows_of.values()
            lines = [
                _line(
                    name,
                    [(e, r) for e, r in runs[0][name] if r > 0],
                )
                for name in names
            ]
            caption = "α/‖w‖² of each layer."
            section.picture(
                "rate-layers",
                Picture("By layer", caption, "epoch", "α/‖w‖²", lines, log_x=False),
            )
    section.summary = plain


# -------------------------------------------------------------------------------------- parameters

# Test accuracy of SGD and of SWA at the same budget on CIFAR-100, as Izmailov, Podoprikhin, Garipov, Vetrov and Wilson
# (2018) print them beside their code; the paper plots their ensembles (FGE), whose numbers it does not print.
EARLIER = {
    "VGG-16": (15_291_300, 72.55, 73.91),
    "PreResNet-110": (1_169_972, 76.77, 78.75),
    "PreResNet-164": (1_726_388, 78.49, 79.77),
    "WRN-28-10": (36_546_980, 80.82, 81.46),
}


def _parameters(measured: Measured, section: Section) -> None:
    experiment = measured.experiment
    rows = [r for r in summary.rows(experiment, measured.collection.results) if r.difference]
    if not rows:
        return
    count = {
        run.label: int((run.result or {})["parameters"])
        for run in measured.collection.runs
        if run.result is not None and run.result.get("parameters")
    }
    table = []
    points: dict[str, list[tuple[int, Estimate]]] = {}
    plain: dict[str, Any] = {}
    best: dict[int, Estimate] = {}
    for row in sorted(rows, key=lambda row: count.get(row.label, 0)):
        if row.label not in count or row.difference is None:
            continue
        p = count[row.label]
        method = experiment.recipes[row.label].method
        points.setdefault(method, []).append((p, row.difference))
        table.append([row.label, f"{p:,}", f"{row.difference} over {row.base}"])
        plain[row.label] = {"parameters": p, "gain": _of(row.difference), "base": row.base}
        if p not in best or row.difference.mean > best[p].mean:
            best[p] = row.difference
    series = [
        Series(
            method,
            "measured",
            [float(p) for p, _ in found],
            [e.mean for _, e in found],
            [e.error or 0.0 for _, e in found],
        )
        for method, found in points.items()
    ]
    gains = [(p, best[p].mean) for p in sorted(best)]
    if len(gains) > 1:
        series.append(_line("best of them", gains))
    section.text(
        f"The gain of each averaged method over its base, in test {' or '.join(experiment.metrics)}, paired by seed."
    )
    section.table(["method", "parameters", "gain"], table)
    title, caption = "What averaging gains", "Means over seeds, bars two standard errors."
    section.picture(
        "parameters", Picture(title, caption, "parameters", "gain", series, log_y=False)
    )
    if len(gains) > 2:
        order = _rank_correlation(*zip(*gains))
        section.text(
            f"The best gain's rank correlation with the number of parameters is {order:+.2f}, over "
            f"{len(gains)} networks."
        )
        plain["rank correlation"] = order
    section.summary = plain
    if experiment.name == "fig-iaprevious":
        _earlier_work(section)


def _rank_correlation(a: Sequence[float], b: Sequence[float]) -> float:
    ranks = [torch.tensor(v, dtype=torch.float64).argsort().argsort().double() for v in (a, b)]
    return float(torch.corrcoef(torch.stack(ranks))[0, 1])


def _earlier_work(section: Section) -> None:
    """The paper's own numbers on CIFAR-100, and SWA's authors', against the parameters of those networks."""
    own = dict(PAPER["tab-cifar"]().published) | {
        f"ResNeXt-29 C-100 {row}": n for row, n in PAPER["tab-resnext"]().published.items()
    }
    sizes = {"VGG-16": 15_299_748, "PRN-110": 1_169_972, "ResNeXt-29": 34_518_948}
    bases = {"SWA": "SGD", "Gadam": "AdamW", "GadamX": "PadamW"}
    series, rows = [], []
    for method, base in bases.items():
        points = sorted(
            (p, own[f"{network} C-100 {method}"] - own[f"{network} C-100 {base}"])
            for network, p in sizes.items()
        )
        series.append(_line(f"{method}, the paper", points))
        rows += [[f"{method}, the paper", f"{p:,}", f"{gain:+.2f}"] for p, gain in points]
    earlier = sorted((p, swa - sgd) for p, sgd, swa in EARLIER.values())
    series.append(_measured("SWA, its authors", [(p, [gain]) for p, gain in earlier]))
    rows += [["SWA, its authors", f"{p:,}", f"{gain:+.2f}"] for p, gain in earlier]
    section.text(
        "At full scale, from print: the paper's gains on CIFAR-100, and those of SWA's authors at the same budget "
        "(the paper plots their ensembles, whose numbers it does not print)."
    )
    section.table(["whose", "parameters", "gain"], rows)
    caption = "Published gains on CIFAR-100, in points of test accuracy."
    section.picture(
        "earlier",
        Picture("Beside earlier work", caption, "parameters", "gain", series, log_y=False),
    )


# --------------------------------------------------------------------------------------- curvature


def _of_what(plan: Plan) -> str:
    """The matrix whose spectrum is shown."""
    matrix = {"hessian": "Hessian", "ggn": "generalised Gauss-Newton matrix"}[plan.kind]
    data = "the training data" if plan.examples is None else f"{plan.examples} training examples"
    modes = {"eval": "running statistics", "train": "statistics of each batch"}
    return (
        f"The {matrix} of the loss that is minimised, over {data}, dropout off, BatchNorm with "
        f"{modes[plan.batchnorm]}"
    )


def _curvature(measured: Measured, section: Section) -> None:
    points = {point: measured.each(f"norm/{point}") for point in ("average", "iterate")}
    if not any(points.values()):
        return
    section.text(
        f"{_of_what(measured.plan)}: its largest eigenvalue by magnitude, and ‖H‖²_F and Tr H for each parameter, as the "
        "paper's table has them. Numbers of the last iterate are in brackets beside the average's. The noise is of single "
        "examples' gradients: Tr Σ/P, and Tr Σ/‖ḡ‖², the batch at which it is as large as the gradient."
    )
    rough = [
        f"{label}, {point}"
        for point, by_label in points.items()
        for label, norms in by_label.items()
        if any(n["error"] > measured.plan.tolerance * abs(n["value"]) for n in norms)
    ]
    if rough:
        section.text(f"The spectral norm has not converged: {'; '.join(rough)}.")
    header = ["method", "train accuracy, %", "test accuracy, %", "spectral norm", "‖H‖²_F/P"]
    header += ["Tr H/P", "noise, Tr Σ/P", "noise scale"]
    language = not all(map(more_is_better, measured.experiment.metrics))
    if language:
        header[1:3] = ["train loss", "test loss"]
    rows = []
    plain: dict[str, Any] = {}
    for label in measured.collection.labels:
        columns: list[dict[str, list[float]]] = []
        for point in points:
            found = {
                what: measured.each(f"{what}/{point}").get(label, [])
                for what in ("metrics", "norm", "moments", "noise")
            }
            if not found["norm"]:
                continue
            metric = "loss" if language else "accuracy"
            values = {
                "train": [m["train"][metric] for m in found["metrics"]],
                "test": [m["test"][metric] for m in found["metrics"]],
                "spectral norm": [n["value"] for n in found["norm"]],
                "squared norm a parameter": [
                    m["squared_norm"][0] / m["dimension"] for m in found["moments"]
                ],
                "trace a parameter": [m["trace"][0] / m["dimension"] for m in found["moments"]],
                "noise a parameter": [n["per_parameter"] for n in found["noise"]],
                "noise scale": [n["scale"] for n in found["noise"]],
            }
            columns.append(values)
            plain.setdefault(label, {})[point] = {
                **{name: _plain(v) for name, v in values.items()},
                "trace": _plain([m["trace"][0] for m in found["moments"]]),
                "squared norm": _plain([m["squared_norm"][0] for m in found["moments"]]),
                "probes' error of the trace": _plain([m["trace"][1] for m in found["moments"]]),
                "probes' error of the squared norm": _plain(
                    [m["squared_norm"][1] for m in found["moments"]]
                ),
            }
        if columns:
            cells = []
            for name in columns[0]:
                texts = [_shown(values[name]) for values in columns]
                cells.append(texts[0] + (f" ({texts[1]})" if len(texts) > 1 else ""))
            rows.append([label, *cells])
    section.table(header, rows)
    section.summary = plain


def _density(measured: Measured, section: Section) -> None:
    series = []
    section.summary = {}
    parameters = {
        run.label: (run.result or {}).get("parameters") or 1 for run in measured.collection.runs
    }
    for point in ("iterate", "average"):
        for label, values in measured.each(f"density/{point}").items():
            nodes = torch.cat([torch.tensor(v["nodes"], dtype=torch.float64) for v in values])
            weights = torch.cat([torch.tensor(v["weights"], dtype=torch.float64) for v in values])
            weights = weights / len(values)
            low, high = float(nodes.min()), float(nodes.max())
            width = max(high - low, 1e-12) / 60
            at = torch.linspace(low - 3 * width, high + 3 * width, 200, dtype=torch.float64)
            height = Density(nodes, weights).smoothed(at, width)
            # A single eigenvalue of all must still be seen.
            least = 0.1 / (parameters[label] * width * math.sqrt(2 * math.pi))
            heights = height.clamp_min(least).tolist()
            series.append(_line(f"{label}, {point}", zip(at.tolist(), heights)))
            section.summary.setdefault(label, {})[point] = {
                "nodes": nodes.tolist(),
                "weights": weights.tolist(),
            }
    if series:
        caption = (
            f"{_of_what(measured.plan)}: the density of its eigenvalues by stochastic Lanczos quadrature, each mass "
            "spread by a normal distribution. Its height is logarithmic, for nearly all of them are near nought."
        )
        section.picture(
            "density",
            Picture("The spectrum", caption, "eigenvalue", "density", series, log_x=False),
        )


# --------------------------------------------------------------------------------------- landscape


def _landscape(measured: Measured, section: Section) -> None:
    lines = measured.each("line")
    if not lines:
        return
    section.text(
        "From the last iterate (0) through the average (1) and beyond, and in the plane through the first and last "
        "iterates and the average. BatchNorm statistics are fresh at each place."
    )
    curves = []
    for label, values in lines.items():
        at = values[0]["at"]
        for part in ("train", "test"):
            heights = _mean_curve([[p[f"{part} loss"] for p in v["values"]] for v in values])
            curves.append(_line(f"{label}, {part}", zip(at, heights)))
    caption = "The loss on training and test data along the line, the mean over seeds."
    section.picture(
        "line",
        Picture("Along the line", caption, "place", "loss, nats", curves, log_x=False, log_y=False),
    )
    for label, frames in measured.each("plane").items():
        metric = measured.metric(label)
        if not frames[0]["x"]:
            section.text(f"{label}: the first iterate, the last and the average lie on a line.")
            continue
        run = next(
            run
            for run in measured.runs(label)
            if "plane" in measured.values.get((label, run.seed), {})
        )
        seen = measured.values[label, run.seed]
        frame = seen["plane"]
        rows = [seen[f"plane/{i}"] for i in range(len(frame["y"]))]
        name = f"plane-{slug(label)[:60]}-{hashlib.sha256(label.encode()).hexdigest()[:6]}"
        caption = (
            f"{label}, seed {run.seed}: training loss and {_named(metric)} in the plane through the first iterate, the "
            "last and the average. Axes are distances in weight space; points between are iterates' projections."
        )
        section.image(name, _plane(frame, rows, metric), caption)
    section.summary = {label: values[0] for label, values in lines.items()}


def _plane(
    frame: Mapping[str, Any], rows: list[list[dict[str, float]]], metric: str
) -> dict[str, bytes]:
    import matplotlib as mpl
    from matplotlib.figure import Figure

    heights: dict[str, Callable[[dict[str, float]], float]] = {
        "training loss": lambda p: p["train loss"],
        _named(metric): lambda p: (
            100 - p[f"test {metric}"] if more_is_better(metric) else p[f"test {metric}"]
        ),
    }
    with mpl.rc_context({**STYLE, "axes.grid": False}):
        figure = Figure(figsize=(8.4, 3.6))
        for axes, (title, height) in zip(figure.subplots(1, 2), heights.items()):
            z = torch.tensor([[height(p) for p in row] for row in rows], dtype=torch.float64)
            flat = z[z.isfinite()].sort().values
            # Levels at even shares of the places: the walls do not take all of the colours.
            levels = flat[torch.linspace(0, len(flat) - 1, 14).long()].unique().tolist()
            if len(levels) < 3:
                levels = [float(flat[0]) - 1, float(flat[0]), float(flat[-1]) + 1]
            filled = axes.contourf(frame["x"], frame["y"], z.numpy(), levels, cmap="viridis")
            figure.colorbar(filled, ax=axes, format="%.3g", shrink=0.7)
            places = {k: v for k, v in frame["points"].items() if k != "average"}
            axes.plot(*zip(*places.values()), "o-", color="white", ms=3, lw=0.7, mec="black")
            first, *_, last = places.values()
            style = {"color": "white", "fontsize": 8, "textcoords": "offset points"}
            for text, place in (("first", first), ("last", last)):
                axes.annotate(text, place, xytext=(4, 4), **style)
            average = frame["points"]["average"]
            axes.plot(*average, "*", color="#D55E00", ms=11, mec="black", mew=0.6)
            axes.annotate("average", average, xytext=(6, 4), **style)
            axes.set_title(title, fontsize=9)
            axes.set_aspect("equal")
        return rendered(figure)


_BUILDERS: dict[str, Callable[[Measured, Section], None]] = {
    "diversity": _diversity,
    "ensemble": _ensemble,
    "networks": _networks,
    "rate": _rate,
    "parameters": _parameters,
    "curvature": _curvature,
    "density": _density,
    "landscape": _landscape,
}
