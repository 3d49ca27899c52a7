"""Write the tables in README.md and docs/ from the committed results: `python -m tools.tables`.

A table goes between `<!-- NAME -->` and `<!-- /NAME -->`. With `--check`, no page is changed, and
the exit status is 1 if a page differs from what the results say.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from statistics import fmean, median, stdev

from benchmarks.evidence.statistics import correlated

from gadam.runs.archive import opened, read_archive
from gadam.runs.collect import collect
from gadam.runs.files import Document, Json
from gadam.runs.record import POINTS, RunResult
from gadam.runs.summary import SeedMean
from gadam.runs.verdict import verdicts
from tools import RESULTS, ROOT, evidence, reproduction, windows

PAGES = (
    "README.md",
    "docs/after-training.md",
    "docs/analysis.md",
    "docs/blocks.md",
    "docs/checkpoints.md",
    "docs/evidence.md",
    "docs/frameworks.md",
    "docs/language.md",
    "docs/performance.md",
    "docs/records.md",
    "docs/reproducing.md",
    "docs/scale.md",
    "docs/theory.md",
)

# The rows of the step-time table.
CONTENDERS = (
    "torch AdamW fused",
    "Gadam",
    "GadamX p=1/8",
    "GadamX p=0.2",
    "Gadam, a sample every step",
    "torch AdamW fused + AveragedModel",
    "schedulefree AdamW",
    "pytorch_optimizer PAdam",
)
# The rows of the table about gradients between the iterate and its average.
INTERPOLATED = (
    "torch AdamW fused",
    "Gadam, a sample every step",
    "Gadam, interpolated",
    "schedulefree AdamW",
)

_OUTCOMES = ("tried", "lost", "wrong")

# Column titles by name in analysis.json.
DIVERSITY = {
    "kl": "KL, nats",
    "total_variation": "total variation",
    "disagreement": "disagreement, %",
    "squared_distance": "‖p−q‖²",
    "kl in thousands": "KL, thousands",
    "total_variation in thousands": "total variation, thousands",
    "distance": "distance",
    "relative distance": "relative distance",
    "drop": "ΔE",
}
NETWORKS = {
    "networks": "networks",
    "one": "single network: test error, %",
    "ensemble": "ensemble",
    "gain": "gain",
}
ENSEMBLE = {
    "mean of the iterates": "mean over iterates: test error, %",
    "ensemble of iterates": "ensemble of iterates",
    "average of weights": "average of weights",
}
RATE = {"first": "first epoch", "middle": "halfway", "last": "last epoch"}
PARAMETERS = {"parameters": "parameters", "gain": "gain in test accuracy, points"}
SHARPNESS = {
    "train": "train accuracy, %",
    "test": "test accuracy, %",
    "spectral norm": "spectral norm",
    "squared norm a parameter": "‖H‖²_F/P",
    "trace a parameter": "Tr H/P",
    "noise a parameter": "noise, Tr Σ/P",
    "noise scale": "noise scale",
}


# ------------------------------------------------------------------------------------- benchmarks


def step_time(name: str, contenders: Sequence[str]) -> str:
    """Return the time of a step relative to torch's fused AdamW, with a column per network.

    Args:
        name: The name of the results file.
        contenders: The rows.
    """
    report = _read(name)
    networks, machine, versions = report["networks"], report["machine"], report["versions"]
    first = networks[0]
    rows = []
    for row in contenders:
        ratios = [f"{network['results'][row]['ratio']:.2f}" for network in networks]
        state = first["results"][row]["state bytes per parameter"]
        rows.append([row, *ratios, f"{state:.0f}"])
    base = ", ".join(
        f"{network['results']['torch AdamW fused']['milliseconds']:.1f} ms" for network in networks
    )
    header = [
        "step time relative to torch's fused AdamW",
        *(network["network"] for network in networks),
        "state, bytes per parameter",
    ]
    packages = [f"{package} {versions[package]}" for package in versions if versions[package]]
    packages = [one for one in packages if not one.startswith("gadam ")]
    caption = (
        f"Medians of {first['repetitions']} interleaved repetitions in float32 on "
        f"{machine['threads']} threads ({machine['processor']}, {machine['kernel']}), with "
        f"{', '.join(packages)}. A step of torch's fused AdamW takes "
        f"{base}. Source: `results/{name}.json`, written by `gadam bench --threads "
        f"{machine['threads']} --repetitions {first['repetitions']} --out results/{name}.json`. "
        "The machine is shared: memory bandwidth and clock speed vary by a third within minutes, "
        "and ratios by a tenth."
    )
    return _table(header, rows, caption)


def language_step() -> str:
    """Return the time of a language model's training step, compared with a plain LSTM's."""
    report = _read("language-step")
    times = "; ".join(
        f"`{name}` {row['gadam']:.3g} s vs. {row['plain']:.3g} s "
        f"({row['speed, relative to plain']:.2f}× the speed)"
        for name, row in report["seconds per step"].items()
    )
    return (
        "A training step with weight drop, locked dropout, word dropout, and both regularizers, "
        "compared with the same network built from plain `nn.LSTM` and `nn.Dropout`: "
        f"{times}. Medians of interleaved repetitions on {report['threads']} threads with torch "
        f"{report['torch']}, measured by `python benchmarks/language.py --out "
        "results/language-step.json`. The machine is shared, and ratios vary by a tenth."
    )


def curvature() -> str:
    """Return the cost of curvature, compared with other libraries."""
    report = _read("curvature")
    rows = []
    for name, row in report["libraries"].items():
        norm = "" if row["norm"] is None else f"{row['norm']:.2f}"
        error = "" if row["off"] is None else f"{row['off']:.1e}"
        rows.append([name, f"{row['product']:.3f}", f"{row['gradients']:.2f}", norm, error])
    header = [
        "library",
        "Hessian-vector product, s",
        "in gradients",
        "spectral norm, s",
        "relative error",
    ]
    versions = ", ".join(f"{name} {v}" for name, v in report["versions"].items() if v)
    caption = (
        f"`vgg-mini` ({report['parameters']:,} parameters) on {report['examples']:,} images, one "
        f"thread; a gradient takes {report['gradient']:.3f} s. The requested tolerance of the "
        f"spectral norm is {report['tolerance']:g}, which each library interprets in its own way; "
        f"the last column is the largest error. Medians of {report['repetitions']} interleaved "
        f"repetitions with torch {report['machine']['torch']}, {versions}, measured by "
        "`python benchmarks/curvature.py --out results/curvature.json`."
    )
    return _table(header, rows, caption)


def frameworks(name: str) -> str:
    """Return how the averaging tools of a framework do on every criterion.

    Args:
        name: The name of the framework.
    """
    report = _read(f"frameworks-{name}")
    marks = {True: "✓ ", False: "✗ ", None: ""}
    rows = []
    for criterion, title in report["criteria"].items():
        found = [verdicts[criterion] for verdicts in report["tools"].values()]
        cells = [marks[verdict["right"]] + verdict["text"] for verdict in found]
        rows.append([f"{criterion}: {title}", *cells])
    versions = ", ".join(f"{package} {v}" for package, v in report["versions"].items())
    caption = (
        f"Measured with {versions}, by `python -m benchmarks.frameworks.{name}`. "
        f"Source: `results/frameworks-{name}.json`."
    )
    header = ["criterion", *report["tools"]]
    return _table(header, rows, caption, left=len(header))


def chaos() -> str:
    """Return how often faults were injected, and what came of them."""
    report = _read("chaos")
    verified = report["seconds to verify 100 runs"]
    rows = [[name, *map(str, tally.values())] for name, tally in report["faults"].items()]
    total = [sum(tally[key] for tally in report["faults"].values()) for key in _OUTCOMES]
    rows.append(["**all**", *(f"**{number}**" for number in total)])
    caption = (
        f"Command: `{report['command']}` (seed {report['seed']}, {report['seconds'] / 60:.0f} "
        f"minutes on {report['machine']['cores']} cores, torch {report['versions']['torch']}). "
        f"In the same run, checking 100 finished runs of the size of `results/compare.json` took "
        f"{verified['records']:.2f} s, and {verified['with weights']:.2f} s with `--weights` for "
        "checkpoints of 2.5 MB, without the start of Python. Source: `results/chaos.json`."
    )
    return _table(["fault", *_OUTCOMES], rows, caption)


def chaos_scale() -> str:
    """Return how often faults were injected into ranks and Ray clusters, and what came of them."""
    report = _read("chaos-scale")
    rows = [[name, *map(str, tally.values())] for name, tally in report["faults"].items()]
    total = [sum(tally[key] for tally in report["faults"].values()) for key in _OUTCOMES]
    rows.append(["**all**", *(f"**{number}**" for number in total)])
    machine = report["machine"]
    caption = (
        f"Command: `{report['command']}` (seed {report['seed']}, {report['seconds'] / 60:.0f} "
        f"minutes on {machine['cores']} cores, torch {report['versions']['torch']}, gloo). Source: "
        "`results/chaos-scale.json`."
    )
    return _table(["fault", *_OUTCOMES], rows, caption)


def checkpoint_memory() -> str:
    """Return how much memory averages of checkpoints take."""
    report = _read("checkpoint-memory")
    names = {"safetensors": "Hugging Face, sharded", "torch": "`.pt`", "dcp": "DCP"}
    rows = [
        [
            names[row["layout"]],
            f"{row['checkpoints']} × {row['model_mib']}",
            *(str(row[key]) for key in ("shard_mib", "tensor_mib", "peak_mib", "limit_mib")),
        ]
        for row in report["rows"]
    ]
    caption = (
        f"In MiB, with torch {report['torch']} on {report['system']}, by `python -m "
        "benchmarks.checkpoint_memory`. Source: `results/checkpoint-memory.json`."
    )
    header = ["checkpoints", "size", "shard", "largest tensor", "peak", "two shards + one tensor"]
    return _table(header, rows, caption)


def capacity_memory() -> str:
    """Return what a rank of a large run holds."""
    report = _read("capacity")
    rows = []
    for row in report["predictions"]:
        memory = row["memory"]
        training = sum(memory[kind] for kind in ("weights", "gradients", "moments"))
        passing = memory["gathered"] + memory["activations"]
        parts = (training, passing, memory["average"], memory["blocks"], memory["applied"])
        cells = [f"{size / 1e9:,.2f}" for size in parts]
        rows.append([row["network"], f"{row['ranks']:,}", *cells])
    header = [
        *("parameters", "GPUs", "weights, gradients, moments", "gathered units, activations"),
        *("average", "blocks", "while applied"),
    ]
    costs, checks = report["costs"]["gadam"], report["checks"]
    caption = (
        f"GB per GPU with Gadam and FSDP2. Per parameter: {report['settings']['weight_bytes']} "
        f"bytes of weights, as many of gradients, {costs['moments']} of moments, and "
        f"{costs['average']} of the average, measured with torch {report['torch']}. The same code "
        f"predicts runs on {_list(checks['ranks'])} ranks ({'; '.join(checks['cases'])}): "
        f"{checks['wrong']} of {checks['compared']} numbers differ from what was measured. Source: "
        "`results/capacity.json`, written by `python -m benchmarks.capacity`."
    )
    return _table(header, rows, caption)


def capacity_time() -> str:
    """Return what a rank of a large run sends, how long a step takes, and what breaks first."""
    report = _read("capacity")
    rows = []
    for row in report["predictions"]:
        traffic, seconds = row["traffic"], row["seconds"]
        rows.append(
            [
                row["network"],
                f"{row['ranks']:,}",
                f"{traffic['step'] / 1e9:,.1f} GB",
                f"{traffic['average']} B",
                f"{traffic['refresh'] / 1e9:,.0f} GB",
                f"{seconds['step']:.2f} s",
                f"{100 * seconds['average'] / seconds['step']:.3f}%",
                f"{seconds['refresh']:,.0f} s",
                "; ".join(row["problems"]) or "nothing",
            ]
        )
    header = [
        *("parameters", "GPUs", "sent per step", "per sample", "per refresh", "step"),
        *("average, of a step", "refresh", "what breaks"),
    ]
    machine, settings = report["machine"], report["settings"]
    caption = (
        f"Per GPU, with {settings['examples']:,} tokens per GPU and step, a refresh of "
        f"{settings['refresh_batches']} batches, and assumed speeds: "
        f"{machine['flops'] / 1e12:.0f} TFLOP/s, {machine['memory_bandwidth'] / 1e12:.2f} TB/s of "
        f"memory, {machine['link'] / 1e9:.0f} GB/s within nodes of {machine['gpus_per_node']}, "
        f"{machine['network'] / 1e9:.0f} GB/s per GPU between nodes, and "
        f"{machine['latency'] * 1e6:.0f} µs per collective and hop. No GPU has timed this. Source: "
        "`results/capacity.json`."
    )
    return _table(header, rows, caption)


def capacity_seconds() -> str:
    """Return predicted and measured times of a step on 1, 2 and 3 ranks."""
    found = _read("capacity").get("seconds", [])
    source = "Source: `results/capacity.json`, written by `python -m benchmarks.capacity`."
    if not found:
        return f"Not measured yet on an idle machine. {source}"
    rows = [
        [
            str(row["ranks"]),
            *(f"{1000 * row[key]:.1f}" for key in ("measured", "predicted", "communication")),
            f"{row['predicted'] / row['measured']:.2f}",
        ]
        for row in found
    ]
    caption = (
        "Milliseconds per step with FSDP2 (gloo, one thread per rank), median of 7 steps. Ranks "
        f"share the cores and the memory of one machine. {source}"
    )
    header = ["ranks", "measured", "predicted", "of it, communication", "predicted / measured"]
    return _table(header, rows, caption)


def capacity_storage() -> str:
    """Return what the file system of a large run holds."""
    report = _read("capacity")
    sizes = {row["network"]: row["storage"] for row in report["predictions"]}
    rows = [
        [name, *(f"{size[kind] / 1e9:,.0f}" for kind in ("checkpoint", "block", "blocks"))]
        for name, size in sizes.items()
    ]
    count = report["settings"]["max_blocks"]
    header = ["parameters", "checkpoint with the average", "one block", f"{count} blocks"]
    return _table(header, rows, "GB, from all ranks together. Source: `results/capacity.json`.")


def _list(numbers: Iterable[int]) -> str:
    *first, last = map(str, numbers)
    return f"{', '.join(first)} and {last}" if first else last


# ------------------------------------------------------------------------------------ experiments


def verdict(name: str) -> str:
    """Return the answer of a sweep, one sentence per task.

    Args:
        name: The archive of an experiment.
    """
    with opened(RESULTS / f"{name}.json") as folder:
        runs = collect([folder])
    found = verdicts(runs.experiment, runs.results)
    return "\n".join(f"- {verdict.task}: **{verdict.sentence()}**" for verdict in found)


def compare(name: str, *, answer: bool = False) -> str:
    """Return the accuracy of both points and the paired gains of a sweep.

    Args:
        name: The archive of an image experiment.
        answer: Begin with the verdicts.
    """
    summary = _read_files(name)["summary.json"]
    rows = []
    for row in summary["rows"]:
        optimizer = summary["recipes"][row["label"]]["optimizer"]
        gain = _seed_mean(row["difference"])
        rows.append(
            [
                row["label"],
                f"{optimizer['lr']:g}, {optimizer['weight_decay']:.2g}",
                _text(_seed_mean(row["iterate"])),
                _text(_seed_mean(row["average"])),
                "" if gain is None else _with_bounds(gain),
            ]
        )
    header = [
        "method",
        "learning rate, weight decay",
        "last iterate",
        "average",
        "gain over base (95% interval)",
    ]
    caption = (
        f"Test accuracy in %, mean ± standard error over {summary['seeds']} seeds. "
        + _provenance(name, _seconds(row["seconds"] for row in summary["rows"]))
    )
    table = _table(header, rows, caption, left=2)
    return f"{verdict(name)}\n\n{table}" if answer else table


def _with_bounds(gain: SeedMean) -> str:
    """Return a gain with its interval, if there is one."""
    bounds = gain.bounds
    interval = "" if bounds is None else f" ({bounds[0]:+.2f} to {bounds[1]:+.2f})"
    return f"{gain.mean:+.2f}{interval}"


def language(name: str) -> str:
    """Return the perplexity of both points on both splits of a sweep of language models.

    Args:
        name: The archive of a language experiment.
    """
    files = _read_files(name)
    summary = files["summary.json"]
    results: dict[str, list[RunResult]] = {}
    for path, content in files.items():
        folder, _, file = path.rpartition("/")
        if file == "result.json":
            label = files[f"{folder}/run.json"]["label"]
            results.setdefault(label, []).append(RunResult.from_dict(content))
    rows = []
    for row in summary["rows"]:
        runs = results[row["label"]]
        cells = [row["label"], f"{summary['recipes'][row['label']]['optimizer']['lr']:g}"]
        for split in ("validation", "test"):
            for point in POINTS:
                mean = SeedMean.of(run.metric("perplexity", point, split) for run in runs)
                few = f" ({mean.count} of {len(runs)})" if mean and mean.count < len(runs) else ""
                cells.append(_text(mean) + few)
        cells.append("" if row["published"] is None else f"{row['published']:g}")
        rows.append(cells)
    header = [
        "method",
        "learning rate",
        "validation: last iterate",
        "average",
        "test: last iterate",
        "average",
        "paper",
    ]
    seconds = _seconds(run.total_seconds for runs in results.values() for run in runs)
    caption = (
        f"Perplexity, mean ± standard error over {summary['seeds']} seeds. The paper's numbers are "
        "test perplexities at full scale. " + _provenance(name, seconds)
    )
    return _table(header, rows, caption, left=2)


def place() -> str:
    """Return the perplexity of averages by the position in the text at which they are sampled."""
    report = _read("language-place")
    rows = []
    for row in report["rows"]:
        every = row["every"] if row["every"] == "epoch" else f"{row['every']} steps"
        rows.append([every, str(row["samples"]), f"{row['validation']:.2f}", f"{row['test']:.2f}"])
    caption = f"One seed. Command: `{report['command']}`. Source: `results/language-place.json`."
    return _table(["sampled every", "samples", "validation", "test"], rows, caption)


# --------------------------------------------------------------------------------------- analysis


def measured(name: str, part: str, columns: dict[str, str]) -> str:
    """Return what `gadam analyze` measured of a sweep, with a row per method.

    Args:
        name: The archive of the experiment.
        part: The part of the analysis.
        columns: Titles by name of the value.
    """
    found = _read_files(name)["analysis.json"]["parts"][part]
    rows = [
        [label, *(_rounded(values.get(key)) for key in columns)]
        for label, values in found["values"].items()
        if isinstance(values, dict)
    ]
    seeds = _read_files(name)["summary.json"]["seeds"]
    caption = f"Means ± standard errors over {seeds} seeds. {_provenance(name)}"
    return _table(["method", *columns.values()], rows, caption)


def sharpness(name: str) -> str:
    """Return the paper's table: values at the average, and in parentheses at the last iterate.

    Args:
        name: The archive of the experiment.
    """
    files = _read_files(name)
    seeds = files["summary.json"]["seeds"]
    rows = []
    for label, points in files["analysis.json"]["parts"]["curvature"]["values"].items():
        runs = min(point[key]["runs"] for point in points.values() for key in SHARPNESS)
        cells = [label + (f" ({runs} of {seeds} seeds)" if runs < seeds else "")]
        for key in SHARPNESS:
            first, *others = [_rounded(point[key]) for point in points.values()]
            cells.append(first + "".join(f" ({other})" for other in others))
        rows.append(cells)
    caption = f"Means ± standard errors over {seeds} seeds. {_provenance(name)}"
    return _table(["method", *SHARPNESS.values()], rows, caption)


def flatness(name: str) -> str:
    """Return how curvature and test accuracy are correlated over the rows of the table.

    Args:
        name: The archive of the experiment.
    """
    values = _read_files(name)["analysis.json"]["parts"]["curvature"]["values"]
    points = [next(iter(found.values())) for found in values.values()]
    texts = []
    for key in ("spectral norm", "squared norm a parameter", "trace a parameter"):
        accuracies = [point["test"]["mean"] for point in points]
        r, low, high = correlated([point[key]["mean"] for point in points], accuracies)
        texts.append(f"{r:.2f} for {SHARPNESS[key]} (95% interval {low:.2f} to {high:.2f})")
    return (
        f"Over the {len(points)} rows, the correlation of test accuracy with the curvature at the "
        f"final point is {', '.join(texts)}."
    )


def predictions() -> str:
    """Return predicted and measured losses, with a row per run and point."""
    report = _read("predictions")
    rows, inside, total, low, widths = [], 0, 0, 0, []
    for row in report["rows"]:
        names = [row["problem"].replace("_", " "), row["optimizer"], row["run"].rsplit("-", 1)[1]]
        for point, found in row["points"].items():
            mean, error = fmean(found["measured"]), stdev(found["measured"])
            text = "–"
            if found["predicted"] is not None:
                text = f"{found['predicted']:.4f} ± {found['interval']:.4f}"
                inside, total = inside + found["within"], total + 1
                low += found["predicted"] < mean
                if point == "average":
                    widths.append(found["interval"] / abs(row["start_loss"] - mean))
            shown = f"{mean:.4f} ± {error / len(found['measured']) ** 0.5:.4f}"
            within = {None: "no prediction", True: "yes", False: "no"}[found["within"]]
            rows.append([*names, point, text, shown, within])
    versions, machine = report["versions"], report["machine"]
    caption = (
        f"Training losses. {inside} of {total} intervals hold the mean of the measurements. "
        f"{low} of {total} predictions are too low. The interval of the average is ± "
        f"{100 * median(widths):.0f}% of the change of the loss in the median, and "
        f"± {100 * max(widths):.0f}% at most. "
        f"Measured: means ± standard errors over continuations. Command: `{report['command']}` "
        f"(torch {versions['torch']}, {machine['cores']} cores). Source: "
        "`results/predictions.json`."
    )
    header = ["problem", "optimizer", "seed", "point", "predicted", "measured", "within"]
    return _table(header, rows, caption, left=4)


def errata() -> str:
    """Return the errors in the paper."""
    from gadam.theory import ERRATA

    rows = [[e.where, e.printed_as, e.correction] for e in ERRATA.values()]
    return _table(["location", "printed", "correct"], rows, left=3)


# ------------------------------------------------------------------------------------- formatting


def _table(header: list[str], rows: list[list[str]], caption: str = "", left: int = 1) -> str:
    """Return a Markdown table with numbers to the right, and a caption below."""
    lines = [f"| {' | '.join(cells)} |" for cells in (header, *rows)]
    lines.insert(1, "|" + "---|" * left + "---:|" * (len(header) - left))
    return "\n".join([*lines, *(["", caption] if caption else [])])


def _text(mean: SeedMean | None) -> str:
    return "" if mean is None else str(mean)


def _seed_mean(content: Document | None) -> SeedMean | None:
    return None if content is None else SeedMean(**content)


def _rounded(value: Json) -> str:
    """Return a number, or a mean with its standard error, with three digits."""
    if value is None:
        return ""
    if isinstance(value, dict):
        if value["mean"] is None:
            return ""
        error = "" if value["error"] is None else f" ± {float(format(value['error'], '.1g')):g}"
        return f"{value['mean']:.3g}{error}"
    return f"{value:,}" if isinstance(value, int) else f"{value:.3g}"


def _seconds(values: Iterable[float]) -> str:
    seconds = list(values)
    return f"{min(seconds):.0f}–{max(seconds):.0f} s per run on one core"


def _provenance(name: str, *more: str) -> str:
    summary = _read_files(name)["summary.json"]
    machine = [f"torch {summary['versions']['torch']}", f"{summary['machine']['cores']} cores"]
    return (
        f"Command: `{summary['command']}` ({', '.join([*machine, *more])}). Source: "
        f"`results/{name}.json`."
    )


def _read(name: str) -> Document:
    content: Document = json.loads((RESULTS / f"{name}.json").read_text())
    return content


@cache
def _read_files(name: str) -> dict[str, Json]:
    return read_archive(RESULTS / f"{name}.json")


# ------------------------------------------------------------------------------------------ pages

TABLES: dict[str, Callable[[], str]] = {
    "experiments": reproduction.index,
    "reproduced": reproduction.results,
    "step-time": lambda: step_time("step-time", CONTENDERS),
    "step-time-interpolated": lambda: step_time("step-time-interpolated", INTERPOLATED),
    "compare": lambda: compare("compare", answer=True),
    "fig2c": lambda: compare("fig2c"),
    "errata": errata,
    "predictions": predictions,
    "language-step": language_step,
    "place": place,
    "tab-ptb": lambda: language("tab-ptb"),
    "tab-ptb-nt": lambda: language("tab-ptb-nt"),
    "fig-frequency": lambda: language("fig-frequency"),
    "fig-tavg": lambda: language("fig-tavg"),
    "curvature": curvature,
    "chaos": chaos,
    "chaos-scale": chaos_scale,
    "checkpoint-memory": checkpoint_memory,
    "capacity-memory": capacity_memory,
    "capacity-time": capacity_time,
    "capacity-seconds": capacity_seconds,
    "capacity-storage": capacity_storage,
    "frameworks-lightning": lambda: frameworks("lightning"),
    "frameworks-transformers": lambda: frameworks("transformers"),
    "fig1b": lambda: measured("fig1b", "diversity", DIVERSITY),
    "fig2b": lambda: measured("fig2b", "diversity", DIVERSITY),
    "fig1c": lambda: measured("fig1c", "networks", NETWORKS),
    "fig1d": lambda: measured("fig1d", "ensemble", ENSEMBLE),
    "fig2d": lambda: measured("fig2d", "rate", RATE),
    "fig3d": lambda: measured("fig3d", "parameters", PARAMETERS),
    "tab-sharpness": lambda: sharpness("tab-sharpness"),
    "flatness": lambda: flatness("tab-sharpness"),
    **evidence.TABLES,
    **windows.TABLES,
}


def rendered(page: str) -> str:
    """Return a page with its tables written again from the results.

    Args:
        page: The page's text.

    Raises:
        ValueError: A table has no end.
    """
    for name, table in TABLES.items():
        begin, end = f"<!-- {name} -->\n", f"\n<!-- /{name} -->"
        before, found, rest = page.partition(begin)
        if found:
            _, closed, after = rest.partition(end)
            if not closed:
                raise ValueError(f"<!-- {name} --> has no end. Add <!-- /{name} -->.")
            page = before + begin + table() + end + after
    return page


def main(arguments: list[str] | None = None) -> int:
    """Write the pages, or check them.

    Args:
        arguments: The command line. Default: that of the process.

    Returns:
        The exit status: 1 if `--check` found a page that differs.
    """
    parser = argparse.ArgumentParser(prog="python -m tools.tables", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--check", action="store_true", help="change nothing; fail on a difference")
    check = parser.parse_args(arguments).check
    outdated = []
    for name in PAGES:
        path = ROOT / name
        text = path.read_text()
        new = rendered(text)
        if new != text:
            outdated.append(name)
            if not check:
                path.write_text(new)
    if outdated:
        print(f"{'Outdated' if check else 'Updated'}: {', '.join(outdated)}.")
    return int(check and bool(outdated))


if __name__ == "__main__":
    sys.exit(main())
