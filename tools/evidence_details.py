"""The details of docs/evidence.md: windows, grids, costs, defaults, the pilot, and the ablation."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from statistics import fmean

from gadam.runs.files import Document
from tools import RESULTS
from tools import evidence_summary as summary
from tools.evidence_summary import POINTS, TASKS, table

__all__ = ["TABLES"]

EVALUATIONS = 12  # along a run


# ------------------------------------------------------------------------------------- less tuning


def grids() -> str:
    """Return the spread of the test metric over the first grid of each method."""
    parts = []
    for found in map(summary.task, TASKS):
        if not found["grids"]:
            continue
        better = sorted(
            found["grids"].items(),
            key=lambda item: item[1]["median"],
            reverse=found["mode"] == "max",
        )
        rows = [
            [
                f"{label} ({grid['diverged']} diverged)" if grid["diverged"] else label,
                f"{grid['median']:.2f}",
                f"{grid['quartiles'][0]:.2f}–{grid['quartiles'][1]:.2f}",
                f"{grid['best']:.2f}",
                f"{grid['area']:.2f}",
            ]
            for label, grid in better
        ]
        header = ["method", "median", "quartiles", "best", "mean shortfall"]
        parts.append(f"**{found['title']}** (test {found['metric']})\n\n{table(header, rows)}")
    return "\n\n".join(parts) or "No complete grids yet."


def untuned() -> str:
    """Return what the center of the grid loses on each task."""
    found = summary.read()["untuned"]
    if not found:
        return "No complete grids yet."
    tasks = [name for name in TASKS if any(name in one["losses"] for one in found.values())]
    rows = [
        [label, *_cells(one["losses"], tasks, ".2f"), *_means(one["losses"], tasks, ".2f")]
        for label, one in sorted(
            found.items(), key=lambda item: (-len(item[1]["losses"]), item[1]["mean"])
        )
    ]
    return table(["method", *tasks, *MEANS], rows)


# Points of accuracy and percent of the perplexity have no common mean.
MEANS = {"mean, images": "accuracy", "mean, text": "perplexity"}


def _means(values: Document, tasks: list[str], form: str) -> list[str]:
    """Return the mean over the tasks of each metric, or nothing where a task is missing."""
    means = []
    for metric in MEANS.values():
        names = [name for name in tasks if summary.task(name)["metric"] == metric]
        known = [values[name] for name in names if name in values]
        means.append(f"{fmean(known):{form}}" if known and len(known) == len(names) else "")
    return means


def _cells(values: Document, tasks: list[str], form: str) -> list[str]:
    return [f"{values[name]:{form}}" if name in values else "" for name in tasks]


# ---------------------------------------------------------------------------------------- averages


def averages(schedule: str) -> str:
    """Return how much better each average is than the reference of its schedule, on each task.

    Args:
        schedule: "held", "cosine", or "annealed" (WSD).
    """
    found = summary.read()["averages"][schedule]
    tasks = [name for name in TASKS if any(name in one["tasks"] for one in found.values())]
    rows = [
        [
            POINTS[point] or "last iterate",
            *_cells(one["tasks"], tasks, "+.2f"),
            *_means(one["tasks"], tasks, "+.2f"),
            f"{one['worst']:+.2f}",
        ]
        for point, one in sorted(found.items(), key=lambda item: -item[1]["mean"])
    ]
    return table(["average", *tasks, *MEANS, "worst"], rows) if rows else "No final runs yet."


# ------------------------------------------------------------------------------------------- pilot


def pilot() -> str:
    """Return the last iterate and averages of the pilot's runs, on validation data."""
    runs: dict[str, dict[str, Document]] = {}
    for run in json.loads((RESULTS / "evidence" / "pilot.json").read_text()):
        runs.setdefault(run["trial"]["task"], {})[run["trial"]["method"]] = run["validation"]
    columns = {
        "constant rate: iterate": ("adamw held", "own"),
        "last 10%": ("adamw held", "tail 10%"),
        "EMA, half-life 5%": ("adamw held", "ema 5%"),
        "last half": ("adamw held", "half"),
        "WSD: iterate": ("adamw wsd", "own"),
    }
    rows = []
    for name, found in runs.items():
        curve = [loss for _, _, loss in found["adamw held"]["own"]]
        best = curve.index(min(curve)) + 1
        when = "still falls" if best == len(curve) else f"lowest at {best}/{len(curve)}"
        cells = [f"{found[method][point][-1][1]:.1f}" for method, point in columns.values()]
        rows.append([name, when, *cells])
    caption = (
        "AdamW at one untuned setting, one seed, validation data: accuracy in %, or perplexity for "
        "Penn Treebank (ptb). Source: `results/evidence/pilot.json`."
    )
    return table(["candidate", "iterate's loss", *columns], rows, caption, left=2)


# ------------------------------------------------------------------------------- costs, ablation


def costs() -> str:
    """Return the CPU time of whole runs, compared with AdamW."""
    found = json.loads((RESULTS / "evidence" / "costs.json").read_text())
    measured = {name: found["tasks"][name] for name in TASKS if name in found["tasks"]}
    rows = []
    for label in next(iter(measured.values()))["run"]:
        ratios = [one["run"][label] / one["run"]["AdamW"] for one in measured.values()]
        rows.append([label, _range(ratios)])
    more = [EVALUATIONS * one["evaluation"] / one["run"]["AdamW"] for one in measured.values()]
    rows.append(["each more set of weights that is evaluated", f"+{_range(more)}"])
    steps = [one["step"]["AdamW"] for one in measured.values()]
    caption = (
        "CPU time of whole runs on one thread, relative to AdamW: the steps, with a sample of the "
        f"average in each, and {EVALUATIONS} evaluations on validation data, each with a BatchNorm "
        f"refresh. From medians of {found['measured steps']} interleaved steps; a step "
        f"of AdamW takes {min(steps):.0f} to {max(steps):.0f} ms. Measured on a quiet machine with "
        f"torch {found['torch']} and the kernel for {found['backend']}, by `python -m "
        "benchmarks.evidence costs`; ratios vary by some percent. Source: "
        "`results/evidence/costs.json`."
    )
    return table(["method", f"CPU time, range over {len(measured)} tasks"], rows, caption)


def _range(numbers: list[float]) -> str:
    low, high = f"{min(numbers):.2f}", f"{max(numbers):.2f}"
    return low if low == high else f"{low}–{high}"


def equal_time() -> str:
    """Return the gains of the best of ours at the steps that fit into the rival's time."""
    rows = []
    for name in TASKS:
        task, compared = summary.task(name), summary.read()["equal time"].get(name, {})
        final = {row["label"]: row for row in task["rows"] if summary.is_final(row, task)}
        ours = summary.best(task, [row for label, row in final.items() if label in compared])
        if ours is None:
            continue
        gains = compared[ours["label"]]
        decayed = summary.champion(task, "decayed")
        rivals = [decayed["label"] if decayed else "", "Schedule-Free AdamW"]
        cells = [_gain_at_equal_time(task, gains.get(rival)) for rival in rivals]
        if decayed is not None:
            cells[0] += f" ({decayed['label']})"
        shares = [gains[rival]["share"] for rival in rivals if rival in gains]
        lost = [gains[rival]["cost"] for rival in rivals if rival in gains]
        fewer = f"{100 * (1 - min(shares)):.1f}%" if shares else ""
        cost = f"{max(lost):.2f}" if lost else ""
        rows.append([task["title"], ours["label"], fewer, cost, *cells])
    header = ["task", "method", "fewer steps, at most", "what they cost"]
    header += ["− best decayed schedule", "− Schedule-Free AdamW"]
    caption = (
        "Validation metrics over the final seeds, in points of accuracy or in percent of the "
        "perplexity, with 95% intervals, paired by seed; positive is better. The method is an EMA "
        "with a half-life of 5% of the steps at a constant rate, or the interpolated average, "
        "because only their curves are measured along the run. Eased rates are not among them."
    )
    return table(header, rows, caption, left=2) if rows else "No final runs yet."


def _gain_at_equal_time(task: Document, one: Document | None) -> str:
    if one is None:
        return ""
    return summary.with_interval(one["mean"], one["interval"], summary.unit(task))


# ------------------------------------------------------------------------------ defaults, ablation

NAMES = {"adamw": "Gadam", "padamw": "GadamX"}
FORMS = {"padamw-amsgrad": "AMSGrad", "padamw-paper": "the paper's form"}


def defaults() -> str:
    """Return the test metrics of settings that are the same for all tasks, and of tuned ones."""
    found = summary.read().get("defaults", {}).get("settings", {})
    rows = []
    for base, settings in found.items():
        for one in settings:
            if one["tasks"]:
                name = f"{NAMES[base]}, {one['lr']:g}, {one['weight_decay']:g}"
                rows.append([name, *_cells(one["tasks"], [*TASKS], ".1f")])
        tuned = {
            name: row["mean"]
            for name in TASKS
            for row in summary.task(name)["rows"]
            if row["label"] == f"{NAMES[base]}, last quarter" and row["mean"] is not None
        }
        if rows and tuned:
            rows.append([f"{NAMES[base]}, tuned on each task", *_cells(tuned, [*TASKS], ".1f")])
    caption = (
        "Test metric of the average of the last quarter: accuracy, or perplexity for ptb. Fixed "
        "settings: learning rate, weight decay, mean over two seeds. Source: "
        "`results/evidence/defaults/`, by `python -m benchmarks.evidence defaults`."
    )
    return table(["method", *TASKS], rows, caption) if rows else "No runs yet."


def forms() -> str:
    """Return the gains of AMSGrad and of the paper's form over GadamX."""
    found = summary.read().get("defaults", {}).get("variants", {})
    rows = []
    for form, tasks in found.items():
        cells = [
            summary.with_interval(one["mean"], one["interval"], summary.unit(summary.task(name)))
            if (one := tasks.get(name)) is not None
            else ""
            for name in TASKS
        ]
        if tasks:
            rows.append([FORMS[form], *cells])
    caption = (
        "Gains in points of accuracy or in percent of the perplexity over GadamX at its own best "
        "setting, on three seeds, with 95% intervals. Each has its best of three learning rates."
    )
    return table(["GadamX with", *TASKS], rows, caption) if rows else "No runs yet."


def ablation() -> str:
    """Return the cells of the ablation and the effect of each switch."""
    found = summary.read()["ablation"]
    if not found["cells"]:
        return "No runs yet."
    rows = [
        [
            cell["variant"],
            f"{cell['knobs']['lr']:g}, {cell['knobs']['weight_decay']:g}",
            f"{cell['validation']:.2f}" + ("" if cell["tuned"] else ", not done"),
            summary.mean(cell),
            str(cell["seeds"]),
        ]
        for cell in found["cells"]
    ]
    header = ["variant", "learning rate, decay", "validation", "test accuracy", "seeds"]
    effects = []
    for switch, one in found["effects"].items():
        if one["mean"] is None:
            effects.append([switch, "", "", str(one["pairs"])])
        else:
            low, high = one["interval"]
            interval = f"{low:+.2f} to {high:+.2f}"
            effects.append([switch, f"{one['mean']:+.2f}", interval, str(one["pairs"])])
    switches = ["switch", "mean effect, points", "95% interval", "pairs"]
    return f"{table(header, rows, left=2)}\n\n{table(switches, effects)}"


TABLES: dict[str, Callable[[], str]] = {
    "evidence-grids": grids,
    "evidence-untuned": untuned,
    "evidence-costs": costs,
    "evidence-equal-time": equal_time,
    "evidence-pilot": pilot,
    "evidence-averages-held": partial(averages, "held"),
    "evidence-averages-cosine": partial(averages, "cosine"),
    "evidence-averages-wsd": partial(averages, "annealed"),
    "evidence-defaults": defaults,
    "evidence-forms": forms,
    "evidence-ablation": ablation,
}
