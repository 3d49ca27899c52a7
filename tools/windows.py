"""The tables of docs/blocks.md and docs/after-training.md: windows chosen after training.

`python -m tools.tables` writes them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable

from gadam.runs.archive import read_archive
from gadam.runs.files import Document
from gadam.runs.summary import SeedMean
from tools import RESULTS

__all__ = ["TABLES"]

_MEASURE = "gadam bench resnet50 --threads 2 --repetitions 15 --blocks 10"
_USES = {
    "blocks": "training, a block is written",
    "merging": "training, two blocks are merged",
    "applied": "`applied`, a window of 3 blocks",
}


def exactness() -> str:
    """Return the largest errors of windows, relative to the mean of the iterates in float64."""
    report = _read("block-exactness")
    rows = [
        [label, f"{row['blocks']} ({row['merged']})", *(f"{row[key]:.1e}" for key in _LARGEST)]
        for label, row in report["errors"].items()
    ]
    seeds, first = report["seeds"], next(iter(report["errors"].values()))
    caption = (
        f"The largest of {first['windows']} random windows of each of {len(seeds)} runs with "
        f"{report['steps']:,} steps in float32, seeds {seeds[0]}–{seeds[-1]}. A tensor's own norm "
        "may be close to zero, such as that of a single bias. With a steady drift, all roundings "
        "of an entry go in one direction. "
        f"{_source(report, 'block-exactness')}"
    )
    header = [
        "training",
        "blocks (merged)",
        "error / norm of the weights",
        "of a tensor's own norm",
    ]
    return _table(header, rows, caption)


_LARGEST = ("largest", "largest of a tensor")
# The paper's test results with the default start, and with the best one.
_PAPER = {
    "LSTM Gadam": (58.77, 58.61),
    "VGG-16 Gadam": (75.73, 76.11),
    "VGG-16 GadamX": (76.85, 77.22),
    "PRN-110 Gadam": (77.37, 77.41),
    "PRN-110 GadamX": (77.90, 79.41),
}


def memory() -> str:
    """Return the memory that block averages take, in copies of the weights."""
    report = _read("block-exactness")
    found = report["memory"]
    mapped = found["copies with mapped files"]
    rows = [
        [use, f"{found['copies'][mode]:.1f}", f"{mapped[mode]:.1f}"] for mode, use in _USES.items()
    ]
    caption = (
        f"The peak of a process, minus that of one without block averages, for weights of "
        f"{found['weights_mib']} MiB in tensors of {found['tensor_mib']} MiB. Blocks are read from "
        "mapped files, whose pages the system can drop at any time. `applied` also holds the raw "
        f"weights. {_source(report, 'block-exactness')}"
    )
    header = ["peak while", "copies of the weights", "with pages of mapped files"]
    return _table(header, rows, caption)


def post_hoc_ema() -> str:
    """Return the errors of EMAs chosen after training, beside those of ema-pytorch."""
    report = _read("post-hoc-ema")
    problem = report["problems"]["quadratic"]
    widths = problem["widths"]
    rows = [
        [f"`{label}`", str(copies), *(f"{_error(row, label):.1e}" for row in widths.values())]
        for label, copies in problem["copies"].items()
    ]
    bounds = [row["stated weighting error"] for row in widths.values()]
    rows.append(["`weighting_error`", "", *(f"{bound:.1e}" for bound in bounds)])
    caption = (
        f"The error of the power-EMA of all {problem['steps']:,} iterates of SGD on a quadratic "
        "with known curvature and noise, relative to the norm of the true one in float64. "
        f"BlockAverages has every={report['every']}; PostHocEMA tracks the widths "
        f"{' and '.join(map(str, report['tracked']))}. By default, PostHocEMA updates every 100 "
        "steps with the decay of one step, and stores half precision. "
        f"{_source(report, 'post-hoc-ema')}"
    )
    return _table(["", "copies on disk", *(f"width {width}" for width in widths)], rows, caption)


def _error(row: Document, label: str) -> float:
    found: float = row["results"][label]["relative error"]
    return found


def starts() -> str:
    """Return the paper's figure of starts from one run per seed."""
    report = _read("starts")
    rows = []
    trained = {
        row["label"]: row for row in read_archive(RESULTS / "fig-tavg.json")["summary.json"]["rows"]
    }
    for label, workload in report["workloads"].items():
        runs = workload["runs"]
        for start in runs[0]["starts"]:
            found = [run["starts"][start] for run in runs]
            separate = trained.get(f"{label} from {start}")
            rows.append(
                [
                    f"{label} from {start}",
                    str(len(runs)),
                    _mean(each["validation"] for each in found),
                    _mean(each["test"] for each in found),
                    "" if separate is None else _average_of(separate),
                ]
            )
    lstm = report["workloads"]["LSTM Gadam"]["runs"]
    away = max(
        abs(run["trained-in average"]["test"]["perplexity"] - run["test"][str(run["default"])])
        for run in lstm
    )
    caption = (
        "Perplexity of LSTMs, accuracy in % of the others, mean ± standard error over seeds. The "
        "starts are epochs of the paper's runs, scaled to mini scale. The last column trained one "
        "run per start and seed, on another machine, where roundings lead to other iterates. In "
        "the same runs of LSTMs, the test perplexity of the average that was trained with the "
        f"recipe's start differs from that of the closest window by at most {away:.1g}. "
        f"{_source(report, 'starts')}"
    )
    header = ["average", "runs", "validation", "test", "test, a run per start (`fig-tavg`)"]
    return _table(header, rows, caption)


def choice() -> str:
    """Return what the choice of the start after training gains on each task."""
    report = _read("starts")
    rows = []
    for label, workload in report["workloads"].items():
        runs, metric = workload["runs"], workload["metric"]
        sign = 1 if workload["mode"] == "max" else -1
        default = [run["test"][str(run["default"])] for run in runs]
        chosen = [run["test"][str(run["chosen"])] for run in runs]
        soups = [run["greedy"]["test"] for run in runs if "greedy" in run]
        rows.append(
            [
                label,
                str(len(runs)),
                _mean(run["last iterate"]["test"][metric] for run in runs),
                _mean(default),
                _mean(chosen),
                _mean(sign * (one - other) for one, other in zip(chosen, default)),
                _mean(soups) if soups else "",
                _mean(run["chosen"] / run["steps"] for run in runs),
                " → ".join(f"{value:.2f}" for value in _PAPER.get(label, ())),
            ]
        )
    caption = (
        "Test accuracy in %, or perplexity of LSTMs and `lm-mini`, mean ± standard error over "
        "seeds. Every start is chosen on validation data. A positive gain is an improvement. "
        "The recipe's start is at about half of the steps. A greedy soup of blocks was measured "
        "for one task. The paper's results are at full scale, and its runs have no validation "
        "data. "
        f"{_source(report, 'starts')}"
    )
    header = [
        "task",
        "runs",
        "last iterate",
        "recipe's start",
        "chosen start",
        "gain",
        "greedy soup",
        "chosen start / steps",
        "paper: default → best",
    ]
    return _table(header, rows, caption)


def cost() -> str:
    """Return the time of steps with block averages."""
    if not (RESULTS / "block-cost.json").exists():
        return f"Measure the cost on your machine with `{_MEASURE}`."
    report = _read("block-cost")
    network, machine = report["networks"][0], report["machine"]
    found = network["blocks"]
    rows = []
    for name, row in found["results"].items():
        added = row["added by the end of a block"]
        share = "" if added is None else f"{100 * added:+.1f}%"
        rows.append([name, f"{row['milliseconds']:.1f}", f"{row['ratio']:.2f}", share])
    caption = (
        f"Steps on the shapes of {network['network']}, without forward and backward passes. "
        f"Medians of {found['blocks']} interleaved rounds of {found['steps per block']} steps on "
        f"{machine['threads']} threads ({machine['processor']}, {machine['kernel']}), with torch "
        f"{report['versions']['torch']}. A round ends when its block is on disk. Command: "
        f"`{_MEASURE} --out results/block-cost.json`. Source: `results/block-cost.json`."
    )
    header = ["", "mean step, ms", "ratio", "added by the end of a block"]
    return _table(header, rows, caption)


def _average_of(row: Document) -> str:
    return str(SeedMean(**row["average"]))


def _mean(values: Iterable[float]) -> str:
    return str(SeedMean.of(list(values)))


def _source(report: Document, name: str) -> str:
    machine, versions = report["machine"], report["versions"]
    others = [f"{key} {value}" for key, value in versions.items() if key != "gadam"]
    return (
        f"Command: `{report['command']}` ({', '.join(others)}, {machine['system'].split('-')[0]}, "
        f"Python {machine['python']}). Source: `results/{name}.json`."
    )


def _read(name: str) -> Document:
    content: Document = json.loads((RESULTS / f"{name}.json").read_text())
    return content


def _table(header: list[str], rows: list[list[str]], caption: str) -> str:
    lines = [f"| {' | '.join(cells)} |" for cells in (header, *rows)]
    lines.insert(1, "|---|" + "---:|" * (len(header) - 1))
    return "\n".join([*lines, "", caption])


TABLES: dict[str, Callable[[], str]] = {
    "block-exactness": exactness,
    "block-memory": memory,
    "block-cost": cost,
    "post-hoc-ema": post_hoc_ema,
    "starts": starts,
    "chosen-starts": choice,
}
