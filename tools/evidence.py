"""The tables of docs/evidence.md, from results/evidence/summary.json."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import cache, partial

from gadam.runs.files import Document
from tools import RESULTS, ROOT

__all__ = ["TABLES"]

TASKS = (
    "fashion-noisy",
    "fashion-clean",
    "cifar100n-5k",
    "cifar100-2k",
    "imagenet32-short",
    "ptb-transformer-short",
    "ptb-lstm-short",
)
REFERENCES = ("Gadam", "GadamX")  # of the tables
EVALUATIONS = 12  # along a run
# Readers' names of points.
POINTS = {
    "own": "",
    "half": "last half",
    "half, paper's stride": "last half, stride",
    "half, linear weights": "last half, linear weights",
    "ema 5%": "EMA, half-life 5%",
    "auto": "automatic start",
    "ema 0.99": "EMA 0.99",
    "ema 0.999": "EMA 0.999",
    "power ema": "power EMA",
    "lawa": "last ten samples",
    "bema": "BEMA",
    **{f"tail {percent}%": f"last {percent}%" for percent in ("0.3", "1", "3", "10", "25", "75")},
}


# ------------------------------------------------------------------------------------------ answer


def answer() -> str:
    """Return one line per task: the best methods, and ours against the best rival."""
    lines = []
    waiting = []
    for task in map(_task, TASKS):
        final = [row for row in task["rows"] if _is_final(row, task)]
        if len(final) < 2:
            waiting.append(f"{task['title']} ({task['records']} runs so far)")
            continue
        best = final[:3]
        ranking = "; ".join(f"{row['label']} {_mean(row)}" for row in best)
        rival = _champion(task, "rival")
        lines.append(f"- **{task['title']}** (test {task['metric']}): {ranking}.")
        if rival is not None and (compared := _against(rival)):
            lines[-1] += f" {compared}"
        if task["remaining runs"]:
            lines[-1] += f" About {task['remaining runs']} runs remain."
    if waiting:
        lines.append(f"- **No final comparison yet:** {'; '.join(waiting)}.")
    return "\n".join(lines)


# Where a reader may be, and the tasks that are like it.
SITUATIONS = {
    "Labels are wrong": ("fashion-noisy", "cifar100n-5k"),
    "Labels are right, and the network overfits": ("fashion-clean", "cifar100-2k"),
    "Training is short: the loss still falls at the end": (
        "imagenet32-short",
        "ptb-transformer-short",
        "ptb-lstm-short",
    ),
}


def situations() -> str:
    """Return, per situation and task, the best average and its gains over other methods.

    It is chosen on validation data, and so is the best schedule that decays the rate.
    """
    rows = []
    for situation, names in SITUATIONS.items():
        for task in map(_task, names):
            final = {row["label"]: row for row in task["rows"] if _is_final(row, task)}
            ours, decayed = _champion(task, "average"), _champion(task, "decayed")
            if ours is None:
                continue
            compared = [final.get(label) for label in ("AdamW, cosine", "Schedule-Free AdamW")]
            cells = [_gain(task, ours, other) for other in (compared[0], decayed, compared[1])]
            if decayed is not None:
                cells[1] += f" ({decayed['label']})"
            average = POINTS.get(ours["point"], ours["point"])
            name = f"{ours['label']}, {average}" if average else ours["label"]
            rows.append([situation, task["title"], name, *cells])
            situation = ""
    header = ["situation", "task", "best average", "− AdamW, cosine"]
    header += ["− best decayed rate", "− Schedule-Free AdamW"]
    caption = (
        "Gains in points of accuracy or in percent of the perplexity, with 95% intervals, paired "
        "by seed; positive is better. Bold gains have intervals without zero."
    )
    again = [
        one["decayed"]["interval"]
        for one in _read().get("confirmation", {}).get("tasks", {}).values()
        if "decayed" in one
    ]
    if again:
        ahead = sum(low > 0 for low, _ in again)
        behind = sum(high < 0 for _, high in again)
        caption += (
            " On [new seeds](#confirmation-on-new-seeds), the best average is ahead of the best "
            f"decayed rate by more than its interval on {ahead} of {len(again)} tasks, and behind "
            f"by as much on {behind or 'none'}."
        )
    return _table(header, rows, caption, left=3) if rows else "No final runs yet."


def _gain(task: Document, ours: Document, other: Document | None) -> str:
    """Return the gain of ours over another method, with its interval."""
    one = None if other is None else other["differences"].get(ours["label"])
    if one is None or other is None:
        return ""
    scale = 100 / other["mean"] if task["metric"] == "perplexity" else 1
    unit = " %" if task["metric"] == "perplexity" else ""
    return _with_interval(-scale * one["mean"], [-scale * end for end in one["interval"]], unit)


COLUMNS = ("GadamX", "Gadam", "AdamW, cosine, average", "Schedule-Free AdamW")


def overview() -> str:
    """Return one row per task with final results: main methods, and the best average and rival.

    Both are the ones that are best on validation data.
    """
    rows: list[list[str]] = []
    behind: list[str] = []
    for task in map(_task, TASKS):
        final = {row["label"]: row for row in task["rows"] if _is_final(row, task)}
        verdict = _verdict(task)
        if verdict is None:
            continue
        cells = [_mean(final[label]) if label in final else "" for label in COLUMNS]
        decayed = _champion(task, "decayed")
        cells.append("" if decayed is None else f"{_mean(decayed)} ({decayed['label']})")
        rows.append([f"{task['title']}, {task['metric']}", *cells, verdict[0]])
        if verdict[1] < 0:
            behind.append(task["title"])
    if not rows:
        return "No task has final results yet."
    seeds = {_task(name)["seeds"] for name in TASKS}
    caption = (
        f"Test metric, mean ± standard error over {min(seeds)} seeds that tuned neither rate nor "
        "decay. Every method has its own learning rate, weight decay, and averaging window, chosen "
        "on validation data from at least nine settings. The last column is the difference between "
        "the best average at a rate that stays high and the best other method, both chosen on "
        "validation data, paired by seed, with its 95% interval. Positive favors the average. Bold "
        "intervals exclude zero. The networks are small: half a minute of training per run. "
        "Commands, versions, and all methods are in [docs/evidence.md](docs/evidence.md)."
    )
    header = ["task", *COLUMNS, "best decayed rate", "best average − best other method"]
    table = _table(header, rows, caption)
    return table.replace("---:|\n", "---|\n", 1) + f"\n\n{_summary(behind)}"


# What the README says the best average is compared with, and its role in the confirmation.
OPPONENTS = {"the best decayed rate": "decayed", "the best other method": "rival"}


def _summary(behind: list[str]) -> str:
    """Return the verdicts on the best average, and the tasks where another method is ahead."""
    found = {claim["text"]: claim for claim in _read()["claims"]}
    rows = []
    for words, role in OPPONENTS.items():
        claim = found[f"The best average beats {words}."]
        held = found[f"The best average at a held rate beats {words}."]
        again = _read().get("confirmation", {}).get("pooled", {}).get(role)
        rows.append(
            [
                f"The best average beats {words}.",
                f"**{claim['verdict']}**{_p_value(claim['pooled'])}",
                _p_value(again).strip(" ()"),
                f"{held['verdict']}{_p_value(held['pooled'])}",
            ]
        )
    seeds = _read().get("confirmation", {}).get("seeds", [])
    header = ["claim", "verdict", f"again, on {len(seeds)} new seeds", "at a held rate alone"]
    caption = (
        "Tests are paired by seed and pooled over tasks. A held rate alone leaves out eased rates "
        "and interpolation. Another method is significantly ahead of the best average on "
    )
    caption += f"{'; '.join(behind)}." if behind else "none of these tasks."
    return _table(header, rows, caption, left=4)


def _p_value(test: Document | None) -> str:
    if test is None:
        return ""
    return f" (p = {test['p']:.2g}{'' if test['in favor'] else ', against'})"


def _verdict(task: Document) -> tuple[str, int] | None:
    """Compare the best average with the best rival, or return None if one is missing.

    Returns:
        The difference in words, and the sign of a significant one: 1 if the average is better.
    """
    ours, rival = _champion(task, "average"), _champion(task, "rival")
    if ours is None or rival is None:
        return None
    one = rival["differences"][ours["label"]]
    low, high = sorted(-end for end in one["interval"])
    names = f"{ours['label']} − {rival['label']}"
    sign = (low > 0) - (high < 0)
    mean = f"**{-one['mean']:+.2f}**" if sign else f"{-one['mean']:+.2f}"
    return f"{names}: {mean} ({low:+.2f} to {high:+.2f})", sign


def _champion(task: Document, role: str) -> Document | None:
    """Return the row that is best on validation data: "average", "decayed", or "rival"."""
    label = task["champions"].get(role)
    return next((row for row in task["rows"] if row["label"] == label), None)


def _best(task: Document, rows: list[Document]) -> Document | None:
    """Return the row that is best on validation data, or None without rows."""
    sign = 1 if task["mode"] == "max" else -1
    return max(rows, key=lambda row: sign * row["validation"], default=None)


def _against(rival: Document) -> str:
    """Compare the best rival with our methods."""
    parts = []
    for reference in REFERENCES:
        if reference not in rival["differences"]:
            continue
        one = rival["differences"][reference]
        low, high = one["interval"]
        parts.append(
            f"{one['mean']:+.2f} to {reference} (95% interval {low:+.2f} to {high:+.2f}, "
            f"Holm p = {one['holm p']:.2g})"
        )
    return f"The best other method is {rival['label']}: {' and '.join(parts)}." if parts else ""


# ------------------------------------------------------------------------------------------- tasks


def task(name: str) -> str:
    """Return the methods of a task, the best first.

    Args:
        name: The task.
    """
    found = _task(name)
    if not found["rows"]:
        return "No runs yet."
    rows = []
    for row in found["rows"]:
        rows.append(
            [
                row["label"],
                _setting(row),
                POINTS.get(row["point"], row["point"]) if row["averaged"] else "",
                f"{row['settings']}" if row["tuned"] else f"{row['settings']}, not done",
                f"{row['validation']:.2f}",
                _mean(row),
                f"{row['seeds']}",
                *(_difference(row, reference) for reference in REFERENCES),
            ]
        )
    header = [
        "method",
        "learning rate, decay",
        "average",
        "settings tried",
        "validation",
        f"test {found['metric']}",
        "seeds",
        *(f"− {reference} (Holm p)" for reference in REFERENCES),
    ]
    figure = ROOT / "docs" / "evidence" / f"{name}.svg"
    picture = f"![{found['title']}](evidence/{name}.svg)\n\n" if figure.exists() else ""
    return picture + _table(header, rows, _caption(name, found), left=3)


def _caption(name: str, found: Document) -> str:
    examples = "" if found["examples"] is None else f" on {found['examples']:,} examples"
    missing = found["missing methods"]
    text = (
        f"{found['parameters']:,} parameters{examples}, {found['steps']:,} steps. Mean ± standard "
        "error over the final seeds. Differences are paired by seed; positive is better than the "
        f"reference. {found['records']} runs in {found['core hours']:.1f} core-hours with torch "
        f"{', '.join(found['torch'])} at {', '.join(found['commits'])}, on "
        f"{'; '.join(found['machines'])}. Source: "
        f"`results/evidence/{name}.jsonl`."
    )
    if missing:
        text += f" **Not begun:** {', '.join(missing)}."
    if found["remaining runs"]:
        text += f" **About {found['remaining runs']} runs remain.**"
    return text


def _setting(row: Document) -> str:
    knobs = row["knobs"]
    own = f", {knobs['beta']:g}" if row["has own knob"] else ""
    return f"{knobs['lr']:g}, {knobs['weight_decay']:g}{own}"


def _mean(row: Document) -> str:
    if row["mean"] is None:
        return ""
    error = "" if row["error"] is None else f" ± {row['error']:.2f}"
    return f"{row['mean']:.2f}{error}"


def _difference(row: Document, reference: str) -> str:
    one = row["differences"].get(reference)
    return "" if one is None else f"{one['mean']:+.2f} ({one['holm p']:.2g})"


def _is_final(row: Document, found: Document) -> bool:
    return bool(row["tuned"]) and row["seeds"] == found["seeds"]


# ------------------------------------------------------------------------------------------ claims


def claims() -> str:
    """Return every claim with its verdict."""
    rows = [
        [claim["text"], f"**{claim['verdict']}**", claim["reason"]] for claim in _read()["claims"]
    ]
    tests = [one for claim in _read()["claims"] for one in claim["comparisons"]]
    caption = (
        f"{len(tests)} tests in all, each with its difference and interval in "
        "`results/evidence/summary.json`."
    )
    return _table(["claim", "verdict", "why"], rows, caption, left=3)


def confirmation() -> str:
    """Return the best methods of each task on seeds that have chosen nothing."""
    found = _read().get("confirmation", {})
    if not found.get("tasks"):
        return "No runs yet."
    rows = []
    for name in TASKS:
        if (one := found["tasks"].get(name)) is None:
            continue
        cells = [_confirmed(one.get(opponent)) for opponent in ("decayed", "rival")]
        rows.append([f"{_task(name)['title']}, {_task(name)['metric']}", one["average"], *cells])
    pooled = []
    for opponent, words in (("decayed", "decayed rates"), ("rival", "other methods")):
        if (test := found["pooled"].get(opponent)) is not None:
            side = "in favor" if test["in favor"] else "against"
            pooled.append(
                f"against {words}, p = {test['p']:.2g} {side}, and {test['positive']} of "
                f"{test['tasks']} means are positive"
            )
    first, *_, last = found["seeds"]
    caption = (
        f"Differences of test metrics on seeds {first} to {last}, paired, with 95% intervals; "
        "positive if the average is better, bold if the interval does not contain zero. Pooled "
        f"over tasks (Stouffer, Holm's correction for two tests): {'; '.join(pooled)}. "
        "Source: `results/evidence/confirmation/`, by `python -m benchmarks.evidence confirm`."
    )
    header = ["task", "best average", "− best decayed rate", "− best other method"]
    return _table(header, rows, caption, left=4)


def _confirmed(one: Document | None) -> str:
    if one is None:
        return ""
    low, high = one["interval"]
    mean = f"{one['mean']:+.2f}"
    shown = f"**{mean}**" if low > 0 or high < 0 else mean
    wanted = len(_read()["confirmation"]["seeds"])
    seeds = "" if one["pairs"] == wanted else f", {one['pairs']} seeds so far"
    return f"{shown} ({low:+.2f} to {high:+.2f}{seeds}), {one['label']}"


# ------------------------------------------------------------------------------------- less tuning


def grids() -> str:
    """Return the spread of the test metric over the first grid of each method."""
    parts = []
    for found in map(_task, TASKS):
        if not found["grids"]:
            continue
        better = sorted(
            found["grids"].items(),
            key=lambda item: item[1]["median"],
            reverse=found["mode"] == "max",
        )
        rows = [
            [
                label,
                f"{grid['median']:.2f}",
                f"{grid['quartiles'][0]:.2f}–{grid['quartiles'][1]:.2f}",
                f"{grid['best']:.2f}",
                f"{grid['area']:.2f}",
                str(grid["diverged"]),
            ]
            for label, grid in better
        ]
        header = ["method", "median", "quartiles", "best", "mean shortfall", "diverged"]
        parts.append(f"**{found['title']}** (test {found['metric']})\n\n{_table(header, rows)}")
    return "\n\n".join(parts) or "No complete grids yet."


def untuned() -> str:
    """Return what the center of the grid loses on each task."""
    found = _read()["untuned"]
    if not found:
        return "No complete grids yet."
    tasks = [name for name in TASKS if any(name in one["losses"] for one in found.values())]
    rows = []
    # Means over other tasks would compare nothing.
    for label, one in sorted(
        found.items(), key=lambda item: (-len(item[1]["losses"]), item[1]["mean"])
    ):
        cells = [f"{one['losses'][name]:.2f}" if name in one["losses"] else "" for name in tasks]
        mean = f"{one['mean']:.2f}" if len(one["losses"]) == len(tasks) else ""
        rows.append([label, *cells, mean])
    return _table(["method", *tasks, "mean"], rows)


# ---------------------------------------------------------------------------------------- averages


def averages(schedule: str) -> str:
    """Return how much better each average is than the reference of its schedule, on each task.

    Args:
        schedule: "held" or "cosine".
    """
    found = _read()["averages"][schedule]
    tasks = [name for name in TASKS if any(name in one["tasks"] for one in found.values())]
    rows = []
    for point, one in sorted(found.items(), key=lambda item: -item[1]["mean"]):
        cells = [f"{one['tasks'][name]:+.2f}" if name in one["tasks"] else "" for name in tasks]
        label = POINTS[point] or "last iterate"
        rows.append([label, *cells, f"{one['mean']:+.2f}", f"{one['worst']:+.2f}"])
    return _table(["average", *tasks, "mean", "worst"], rows) if rows else "No final runs yet."


# ------------------------------------------------------------------------------------------- pilot


def pilot() -> str:
    """Return the last iterate and averages of the pilot's runs, on validation data."""
    runs: dict[str, dict[str, Document]] = {}
    for run in json.loads((RESULTS / "evidence" / "pilot.json").read_text()):
        runs.setdefault(run["trial"]["task"], {})[run["trial"]["method"]] = run["validation"]
    columns = {
        "held rate: iterate": ("adamw held", "own"),
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
    return _table(["candidate", "iterate's loss", *columns], rows, caption, left=2)


# ------------------------------------------------------------------------------- costs, ablation


def costs() -> str:
    """Return the CPU time of whole runs, compared with AdamW."""
    found = json.loads((RESULTS / "evidence" / "costs.json").read_text())
    measured = {name: found["tasks"][name] for name in TASKS if name in found["tasks"]}
    rows = [
        [label, *(f"{one['run'][label] / one['run']['AdamW']:.2f}" for one in measured.values())]
        for label in next(iter(measured.values()))["run"]
    ]
    more = [EVALUATIONS * one["evaluation"] / one["run"]["AdamW"] for one in measured.values()]
    rows.append(["if a second point is evaluated", *(f"+{part:.2f}" for part in more)])
    steps = [one["step"]["AdamW"] for one in measured.values()]
    caption = (
        "CPU time of whole runs on one thread, relative to AdamW: the steps, with a sample of the "
        f"average in each, and {EVALUATIONS} evaluations of one point on validation data, with a "
        f"BatchNorm refresh. From medians of {found['measured steps']} interleaved steps; a step "
        f"of AdamW takes {min(steps):.0f} to {max(steps):.0f} ms. Measured on a quiet machine with "
        f"torch {found['torch']} and the kernel for {found['backend']}, by `python -m "
        "benchmarks.evidence costs`; ratios vary by some percent. Source: "
        "`results/evidence/costs.json`."
    )
    return _table(["method", *measured], rows, caption)


def equal_time() -> str:
    """Return the gains of the best of ours at the steps that fit into the rival's time."""
    rows = []
    for name in TASKS:
        task, compared = _task(name), _read()["equal time"].get(name, {})
        final = {row["label"]: row for row in task["rows"] if _is_final(row, task)}
        ours = _best(task, [row for label, row in final.items() if label in compared])
        if ours is None:
            continue
        gains = compared[ours["label"]]
        decayed = _champion(task, "decayed")
        rivals = ["AdamW, cosine", decayed["label"] if decayed else "", "Schedule-Free AdamW"]
        cells = [_gain_at_equal_time(task, gains.get(rival)) for rival in rivals]
        if decayed is not None:
            cells[1] += f" ({decayed['label']})"
        shares = [gains[rival]["share"] for rival in rivals if rival in gains]
        lost = [gains[rival]["cost"] for rival in rivals if rival in gains]
        fewer = f"{100 * (1 - min(shares)):.1f}%" if shares else ""
        cost = f"{max(lost):.2f}" if lost else ""
        rows.append([task["title"], ours["label"], fewer, cost, *cells])
    header = ["task", "best of ours", "fewer steps, at most", "what they cost"]
    header += ["− AdamW, cosine", "− best decayed rate", "− Schedule-Free AdamW"]
    caption = (
        "Validation metrics over the final seeds, in points of accuracy or in percent of the "
        "perplexity, with 95% intervals, paired by seed; positive is better. Ours is an EMA with a "
        "half-life of 5% of the steps, or the interpolated average, read where its run has taken "
        "as long as the rival's."
    )
    return _table(header, rows, caption, left=2) if rows else "No final runs yet."


def _gain_at_equal_time(task: Document, one: Document | None) -> str:
    if one is None:
        return ""
    unit = " %" if task["metric"] == "perplexity" else ""
    return _with_interval(one["mean"], one["interval"], unit)


def _with_interval(mean: float, interval: Sequence[float], unit: str) -> str:
    """Return a gain and its interval. It is bold if the interval does not contain zero."""
    low, high = sorted(interval)
    gain = f"{mean:+.1f}{unit}"
    return f"{f'**{gain}**' if low > 0 or high < 0 else gain} ({low:+.1f} to {high:+.1f})"


def ablation() -> str:
    """Return the cells of the ablation and the effect of each switch."""
    found = _read()["ablation"]
    if not found["cells"]:
        return "No runs yet."
    rows = [
        [
            cell["variant"],
            f"{cell['knobs']['lr']:g}, {cell['knobs']['weight_decay']:g}",
            f"{cell['validation']:.2f}" + ("" if cell["tuned"] else ", not done"),
            _mean(cell),
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
    return f"{_table(header, rows, left=2)}\n\n{_table(switches, effects)}"


# ------------------------------------------------------------------------------------------ common


def _table(header: list[str], rows: list[list[str]], caption: str = "", left: int = 1) -> str:
    """Return a Markdown table with numbers to the right, and a caption below."""
    lines = [f"| {' | '.join(cells)} |" for cells in (header, *rows)]
    lines.insert(1, "|" + "---|" * left + "---:|" * (len(header) - left))
    return "\n".join([*lines, *(["", caption] if caption else [])])


def _task(name: str) -> Document:
    found: Document = _read()["tasks"][name]
    return found


@cache
def _read() -> Document:
    content: Document = json.loads((RESULTS / "evidence" / "summary.json").read_text())
    return content


TABLES: dict[str, Callable[[], str]] = {
    "evidence-situations": situations,
    "evidence-answer": answer,
    "evidence-overview": overview,
    "evidence-claims": claims,
    "evidence-confirmation": confirmation,
    "evidence-grids": grids,
    "evidence-untuned": untuned,
    "evidence-costs": costs,
    "evidence-equal-time": equal_time,
    "evidence-pilot": pilot,
    "evidence-averages-held": partial(averages, "held"),
    "evidence-averages-cosine": partial(averages, "cosine"),
    "evidence-ablation": ablation,
    **{f"evidence-{name}": partial(task, name) for name in TASKS},
}
