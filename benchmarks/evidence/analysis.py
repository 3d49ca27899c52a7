"""From the records of all tasks to one summary: `python -m benchmarks.evidence analyze`.

Every choice is made on validation data. The test metrics of seeds that tuned nothing are compared
in pairs: runs with the same seed share their initial weights and the order of their data.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from statistics import fmean, quantiles

from benchmarks.evidence import averages, equal_time, tuning
from benchmarks.evidence.claims import Evidence, judge
from benchmarks.evidence.contenders import (
    CHAMPIONS,
    CONTENDERS,
    Contender,
    Reading,
    champions,
    champions_by_base,
    read,
    value,
)
from benchmarks.evidence.harness import Record
from benchmarks.evidence.interpolation import VARIANTS
from benchmarks.evidence.methods import OWN_KNOB, Knobs
from benchmarks.evidence.statistics import Paired, holm, mean_and_error
from benchmarks.evidence.tasks import TASKS, Workload
from gadam.runs.files import Document

__all__ = ["ABLATION", "readings_of", "summarize"]

ABLATION = "ablation"


def summarize(
    read_records: Callable[[str], list[Record]],
    costs: Mapping[str, Document],
    confirmed: Document | None = None,
) -> Document:
    """Return everything that the documentation says about the evidence.

    Args:
        read_records: Returns the records of a task.
        costs: The costs of tasks, as :func:`benchmarks.evidence.costs.measure` returns them.
        confirmed: What :func:`benchmarks.evidence.confirmation.compare` returns.
    """
    records = {name: read_records(name) for name in TASKS}
    compared = {name: task for name, task in TASKS.items() if name != ABLATION}
    readings = {name: readings_of(task, records[name]) for name, task in compared.items()}
    evidence = Evidence(compared, records, readings)
    return {
        "tasks": {name: _task(compared[name], records[name], readings[name]) for name in compared},
        "claims": [asdict(claim) for claim in judge(evidence)],
        "untuned": _untuned(compared, records, readings),
        "averages": averages.compare(compared, records),
        "equal time": {
            name: equal_time.compare(compared[name], records[name], readings[name], cost)
            for name, cost in costs.items()
            if name in compared
        },
        "ablation": _ablation(TASKS[ABLATION], records[ABLATION]),
        "confirmation": confirmed or {},
    }


def readings_of(workload: Workload, records: list[Record]) -> dict[str, Reading]:
    """Return what the records of a task say about its contenders.

    Args:
        workload: The task.
        records: Its records.
    """
    trained = [one for one in CONTENDERS.values() if one.method in workload.methods]
    found = {one.label: read(one, workload, records) for one in trained}
    return {label: reading for label, reading in found.items() if reading is not None}


def _sign(workload: Workload) -> int:
    return 1 if workload.mode == "max" else -1


# ------------------------------------------------------------------------------------------- tasks


def _task(workload: Workload, records: list[Record], readings: dict[str, Reading]) -> Document:
    rows: list[Document] = []
    for label, reading in readings.items():
        row: Document = {
            "label": label,
            "knobs": asdict(reading.knobs),
            "has own knob": CONTENDERS[label].method.split()[0] in OWN_KNOB,
            "point": reading.point,
            "averaged": CONTENDERS[label].is_averaged,
            "validation": reading.validation,
            "settings": reading.settings,
            "tuned": reading.is_tuned,
            "seeds": len(reading.test),
            "mean": None,
            "error": None,
            "differences": {},
        }
        if reading.test:
            row["mean"], row["error"] = mean_and_error(list(reading.test.values()))
        rows.append(row)
    for reference in (*CHAMPIONS, "Gadam, last quarter"):
        _compare(rows, readings, reference, _sign(workload))
    rows.sort(key=lambda row: _rank(row, _sign(workload)))
    trained = [method for method in workload.methods if _is_begun(method, records)]
    return {
        "title": workload.title,
        "metric": workload.metric,
        "mode": workload.mode,
        "parameters": max((record.parameters for record in records), default=0),
        "examples": _examples(workload),
        "steps": max((record.steps for record in records), default=0),
        "records": len(records),
        "core hours": sum(sum(r.seconds.values()) for r in records if _is_paid(r)) / 3600,
        "commits": _versions("harness", records),
        "torch": _versions("torch", records),
        "machines": _versions("machine", records),
        "remaining runs": round(tuning.expected_runs(workload, records)),
        "missing methods": [method for method in workload.methods if method not in trained],
        "seeds": len(workload.seeds),
        "champions": champions(workload, readings),
        "champions by base": champions_by_base(workload, readings),
        "rows": rows,
        "grids": _grids(workload, records),
    }


def _versions(name: str, records: Iterable[Record]) -> list[str]:
    return sorted({record.versions.get(name, f"an unrecorded {name}") for record in records})


def _rank(row: Document, sign: int) -> tuple[bool, float]:
    """Sort final results first, and the best first."""
    number = row["validation"] if row["mean"] is None else row["mean"]
    return row["mean"] is None, -sign * number


def _compare(rows: list[Document], readings: dict[str, Reading], reference: str, sign: int) -> None:
    """Add the paired differences to a reference. Positive is better than the reference."""
    if reference not in readings:
        return
    oriented = {
        label: {seed: sign * number for seed, number in reading.test.items()}
        for label, reading in readings.items()
    }
    found = {
        row["label"]: Paired.of(oriented[row["label"]], oriented[reference])
        for row in rows
        if row["label"] != reference
    }
    compared = {label: paired for label, paired in found.items() if paired is not None}
    corrected = holm([paired.p_value for paired in compared.values()])
    by_label = {row["label"]: row for row in rows}
    for (label, paired), p_value in zip(compared.items(), corrected):
        by_label[label]["differences"][reference] = {
            "mean": paired.mean,
            "interval": list(paired.interval()),
            "pairs": paired.count,
            "p": paired.p_value,
            "holm p": p_value,
        }


def _is_begun(method: str, records: Iterable[Record]) -> bool:
    return any(record.trial.method == method for record in records)


def _is_paid(record: Record) -> bool:
    return record.trial.schedule != "wsd"  # it shares the run at a held rate


def _examples(workload: Workload) -> int | None:
    data = workload.recipe.data
    return None if data.examples is None else int(data.examples - data.validation)


# ------------------------------------------------------------------------------------ less tuning


def _first_grid(workload: Workload, method: str) -> list[Knobs]:
    base = method.split()[0]
    default = OWN_KNOB.get(base, (Knobs(0, 0).beta,))[0]
    lr, decay = workload.centers[base]
    return [
        Knobs(tuning.level(lr, i), tuning.level(decay, j), default)
        for i in (0, 1, -1)
        for j in workload.decays
    ]


def _over_grid(
    contender: Contender, workload: Workload, records: Sequence[Record]
) -> dict[Knobs, float]:
    """Return the test metric at each setting of the first grid, on seed 0.

    A run that diverged has none; the average is the one that is best on validation data.
    """
    grid = _first_grid(workload, contender.method)
    found = {}
    for record in records:
        trial = record.trial
        if trial.method != contender.recorded or trial.seed != 0 or trial.knobs not in grid:
            continue
        point = tuning.best_point([record], contender.target[1], workload.mode)
        number = None if point is None else value(record, point, workload.metric)
        found[trial.knobs] = math.nan if number is None else number
    return found


def _grids(workload: Workload, records: list[Record]) -> dict[str, Document]:
    """Return quartiles over the first grid, for contenders whose grid is complete."""
    found: dict[str, Document] = {}
    sign = _sign(workload)
    for label, contender in CONTENDERS.items():
        if contender.method not in workload.methods or not contender.is_tuned_separately:
            continue
        over = _over_grid(contender, workload, records)
        if len(over) < len(_first_grid(workload, contender.method)):
            continue
        filled = sorted(
            (workload.chance if math.isnan(v) else v for v in over.values()), reverse=sign > 0
        )
        low, middle, high = quantiles(filled, n=4, method="inclusive")
        found[label] = {
            "median": middle,
            "quartiles": [low, high] if sign > 0 else [high, low],  # the worse one first
            "best": filled[0],
            "area": fmean(abs(filled[0] - v) for v in filled),
            "diverged": sum(math.isnan(v) for v in over.values()),
        }
    return found


def _untuned(
    workloads: dict[str, Workload],
    records: dict[str, list[Record]],
    readings: dict[str, dict[str, Reading]],
) -> dict[str, Document]:
    """Return what each contender loses at the center of its grid, which was fixed beforehand.

    Both the center and the best setting are read on seed 0. The loss is relative for perplexities.
    """
    found: dict[str, Document] = {}
    for label, contender in CONTENDERS.items():
        losses = {}
        for name, workload in workloads.items():
            reading = readings[name].get(label)
            if reading is None or not contender.is_tuned_separately or not reading.is_tuned:
                continue
            if contender.target[0] in tuning.FOLLOWS:  # the center of its grid is chosen by results
                continue
            grid = _over_grid(contender, workload, records[name])
            center = grid.get(_first_grid(workload, contender.method)[0])
            best = _on_seed_zero(contender, workload, records[name], reading)
            if center is None or best is None:
                continue
            center = workload.chance if math.isnan(center) else center
            loss = _sign(workload) * (best - center)
            losses[name] = 100 * loss / best if workload.metric == "perplexity" else loss
        if losses:
            found[label] = {"losses": losses, "mean": fmean(losses.values())}
    return found


def _on_seed_zero(
    contender: Contender, workload: Workload, records: Sequence[Record], reading: Reading
) -> float | None:
    for record in records:
        trial = record.trial
        if (trial.method, trial.knobs, trial.seed) == (contender.recorded, reading.knobs, 0):
            return value(record, reading.point, workload.metric)
    return None


# ---------------------------------------------------------------------------------------- ablation


def _ablation(workload: Workload, records: list[Record]) -> Document:
    """Return the cells of the ablation, and the effect of each switch over matched cells."""
    sign = _sign(workload)
    test: dict[str, dict[int, float]] = {}
    cells = []
    for method in workload.methods:
        contender = Contender(method, method, tuning.targets(method)[0])
        reading = read(contender, workload, records)
        if reading is None:
            continue
        test[method] = {seed: sign * number for seed, number in reading.test.items()}
        mean, error = mean_and_error([*reading.test.values()]) if reading.test else (None, None)
        cells.append(
            {
                "variant": method,
                "knobs": asdict(reading.knobs),
                "validation": reading.validation,
                "tuned": reading.is_tuned,
                "seeds": len(reading.test),
                "mean": mean,
                "error": error,
            }
        )
    # The switches interact: each effect is given for both positions of another switch.
    between, plain = "gradient between iterate and average", "without momentum"
    switches = {
        f"{between}, {plain}": ("between/", "iterate/", "/plain/"),
        f"{between}, with momentum": ("between/", "iterate/", "/momentum/"),
        "momentum, gradient at the iterate": ("/momentum/", "/plain/", "iterate/"),
        "momentum, gradient between": ("/momentum/", "/plain/", "between/"),
        f"weight on late iterates, gradient at the iterate, {plain}": (
            *("/late", "/uniform"),
            "iterate/plain",
        ),
        f"weight on late iterates, gradient between, {plain}": (
            *("/late", "/uniform"),
            "between/plain",
        ),
    }
    effects: dict[str, Document] = {}
    for switch, (on, off, condition) in switches.items():
        pairs = [(v, v.replace(on, off)) for v in VARIANTS if on in v and condition in v]
        effects[switch] = _effect([(test.get(a, {}), test.get(b, {})) for a, b in pairs])
    first = "between/plain/uniform"
    effects["warm-up"] = _effect([(test.get(first, {}), test.get(f"{first} cold", {}))])
    return {"cells": cells, "effects": effects, "records": len(records)}


def _effect(pairs: list[tuple[dict[int, float], dict[int, float]]]) -> Document:
    """Return the mean effect of a switch over matched cells and their shared seeds."""
    on = {(i, seed): number for i, (a, _) in enumerate(pairs) for seed, number in a.items()}
    off = {(i, seed): number for i, (_, b) in enumerate(pairs) for seed, number in b.items()}
    keys = {key: index for index, key in enumerate(sorted(on.keys() & off.keys()))}
    paired = Paired.of(
        {index: on[key] for key, index in keys.items()},
        {index: off[key] for key, index in keys.items()},
    )
    if paired is None:
        return {"pairs": len(keys), "mean": None, "interval": None, "p": None}
    return {
        "pairs": paired.count,
        "mean": paired.mean,
        "interval": list(paired.interval()),
        "p": paired.p_value,
    }
