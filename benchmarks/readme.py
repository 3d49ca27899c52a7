"""Write the tables of README and docs from the committed results: `python benchmarks/readme.py`.

With --check it changes nothing, and fails where a page is not what the results say.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

ROOT = Path(__file__).parents[1]
SHOWN = [
    "torch AdamW fused",
    "Gadam",
    "GadamX p=1/8",
    "GadamX p=0.2",
    "Gadam, a sample every step",
    "torch AdamW fused + AveragedModel",
    "schedulefree AdamW",
    "pytorch_optimizer PAdam",
]


def step_time(report: dict[str, Any]) -> str:
    """Ratios to torch's fused AdamW, a column a network."""
    networks = report["networks"]
    machine, versions = report["machine"], report["versions"]
    lines = [
        "| step, relative to torch's fused AdamW | "
        + " | ".join(n["network"] for n in networks)
        + " | state, bytes a parameter |",
        "|---|" + "---:|" * (len(networks) + 1),
    ]
    for name in SHOWN:
        cells = [f"{n['results'][name]['ratio']:.2f}" for n in networks]
        state = networks[0]["results"][name]["state bytes per parameter"]
        lines.append(f"| {name} | {' | '.join(cells)} | {state:.0f} |")
    base = ", ".join(
        f"{n['results']['torch AdamW fused']['milliseconds']:.1f} ms" for n in networks
    )
    lines += [
        "",
        f"Medians of {networks[0]['repetitions']} interleaved repetitions, float32, "
        f"{machine['threads']} threads of {machine['processor']} ({machine['kernel']}), torch "
        f"{versions['torch']}, schedulefree {versions['schedulefree']}, pytorch_optimizer "
        f"{versions['pytorch_optimizer']}; torch's fused AdamW takes {base}. From "
        f"`results/step-time.json`, written by `gadam bench --threads {machine['threads']} --repetitions "
        f"{networks[0]['repetitions']} --json results/step-time.json`. The "
        "machine is shared: its memory and clock vary by a third within minutes, and ratios by a tenth.",
    ]
    return "\n".join(lines)


def compare(name: str) -> str:
    """The table of a sweep: accuracies of both points, and gains."""
    report = read(f"{name}/summary.json")

    def shown(estimate: dict[str, Any] | None) -> str:
        return "" if estimate is None else f"{estimate['mean']:.2f} ± {estimate['error']:.2f}"

    lines = [
        "| method | rate, decay | last iterate | average | gain over its base (95 % interval) |",
        "|---|---|---:|---:|---:|",
    ]
    for row in report["rows"]:
        optimizer = report["recipes"][row["label"]]["optimizer"]
        difference, gain = row["difference"], ""
        if difference is not None:
            half = STUDENT_3_SEEDS * difference["error"]
            gain = f"{difference['mean']:+.2f} ± {half:.2f}"
        setting = f"{optimizer['lr']:g}, {optimizer['weight_decay']:.2g}"
        cells = [row["label"], setting, shown(row["iterate"]), shown(row["average"]), gain]
        lines.append(f"| {' | '.join(cells)} |")
    seconds = [row["seconds"] for row in report["rows"]]
    lines += [
        "",
        f"Test accuracy in %, mean ± standard error over {report['seeds']} seeds. Written by "
        f"`{report['command']}` (torch {report['versions']['torch']}, {report['machine']['cores']} cores, "
        f"{min(seconds):.0f} to {max(seconds):.0f} s a run on one core) to `results/{name}`.",
    ]
    return "\n".join(lines)


def language(folder: Path) -> str:
    """Perplexities of both points, on both parts, of a sweep of language models."""
    summary = json.loads((folder / "summary.json").read_text())
    lines = [
        "| method | rate | validation: last iterate | average | test: last iterate | average | the paper |",
        "|---|---|---:|---:|---:|---:|---:|",
    ]
    runs: dict[str, list[dict[str, Any]]] = {}
    for path in sorted(folder.glob("*/result.json")):
        label = json.loads((path.parent / "run.json").read_text())["label"]
        runs.setdefault(label, []).append(json.loads(path.read_text()))
    seconds = []
    for row in summary["rows"]:
        results = runs[row["label"]]
        cells = [row["label"], f"{summary['recipes'][row['label']]['optimizer']['lr']:g}"]
        for part in ("validation", "test"):
            for point in ("iterate", "average"):
                values = [r[point][part]["perplexity"] for r in results if r[point]]
                few = (
                    f" ({len(values)} of {len(results)})" if 0 < len(values) < len(results) else ""
                )
                cells.append(mean_and_error(values) + few)
        cells.append("" if row["published"] is None else f"{row['published']:g}")
        lines.append(f"| {' | '.join(cells)} |")
        seconds += [sum(r["seconds"].values()) for r in results]
    lines += [
        "",
        f"Perplexity, mean ± standard error over {summary['seeds']} seeds; the paper's are of the test text, "
        f"at full scale. Written by `{summary['command']}` (torch {summary['versions']['torch']}, "
        f"{summary['machine']['cores']} cores, {min(seconds):.0f} to {max(seconds):.0f} s a run on one core) "
        f"to `results/{folder.name}`.",
    ]
    return "\n".join(lines)


def place(report: dict[str, Any]) -> str:
    """Samples at the same place of the text against samples at others."""
    lines = ["| sampled every | samples | validation | test |", "|---|---:|---:|---:|"]
    for row in report["rows"]:
        every = row["every"] if row["every"] == "epoch" else f"{row['every']} steps"
        lines.append(
            f"| {every} | {row['samples']} | {row['validation']:.2f} | {row['test']:.2f} |"
        )
    lines += ["", f"One seed; `{report['command']}`, in `results/language-place.json`."]
    return "\n".join(lines)


def language_step(report: dict[str, Any]) -> str:
    """How fast a step is beside a plain one."""
    shown = "; ".join(
        f"`{name}` {row['gadam']:.3g} s against {row['plain']:.3g} s, {row['speed, relative to plain']:.2f} times as fast"
        for name, row in report["seconds of a step"].items()
    )
    return (
        "A training step with weight drop, locked dropout, dropped words and the regularisers, beside the same network from "
        f"plain `nn.LSTM` and `nn.Dropout`: {shown}. Medians of interleaved repetitions on {report['threads']} threads, torch "
        f"{report['torch']}; `python benchmarks/language.py --json results/language-step.json`. The machine is shared, and "
        "ratios vary by a tenth."
    )


def errata() -> str:
    """What is wrong in print."""
    from gadam.theory import ERRATA

    lines = ["| where | what is printed | what holds |", "|---|---|---|"]
    lines += [f"| {e.where} | {e.printed_as} | {e.correction} |" for e in ERRATA.values()]
    return "\n".join(lines)


def measured(name: str, part: str, columns: dict[str, str]) -> str:
    """What `gadam analyse` found of a sweep: a row a method, columns by their names in the result."""
    found = read(f"{name}/analysis.json")["parts"][part]
    lines = [f"| method | {' | '.join(columns.values())} |", "|---|" + "---:|" * len(columns)]
    for label, values in found["values"].items():
        if isinstance(values, dict):
            cells = [estimated(values.get(key)) for key in columns]
            lines.append(f"| {label} | {' | '.join(cells)} |")
    return "\n".join([*lines, "", origin(name, found)])


def estimated(value: Any) -> str:
    """A number, or a mean with its standard error."""
    if not isinstance(value, dict):
        return "" if value is None else f"{value:,}" if isinstance(value, int) else f"{value:.3g}"
    if value["mean"] is None:
        return ""
    error = "" if value["error"] is None else f" ± {value['error']:.1g}"
    return f"{value['mean']:.3g}{error}"


def origin(name: str, found: dict[str, Any]) -> str:
    """Where numbers are from."""
    summary = read(f"{name}/summary.json")
    return (
        f"Means ± standard errors over {summary['seeds']} seeds. Written by `{summary['command']}` (torch "
        f"{found['versions']['torch']}, {found['machine']['cores']} cores) to `results/{name}`."
    )


def sharpness(name: str) -> str:
    """The paper's table: the average's numbers, the last iterate's in brackets."""
    found = read(f"{name}/analysis.json")["parts"]["curvature"]
    columns = {
        "train": "train accuracy, %",
        "test": "test accuracy, %",
        "spectral norm": "spectral norm",
        "squared norm a parameter": "‖H‖²_F/P",
        "trace a parameter": "Tr H/P",
        "noise a parameter": "noise, Tr Σ/P",
        "noise scale": "noise scale",
    }
    lines = [f"| method | {' | '.join(columns.values())} |", "|---|" + "---:|" * len(columns)]
    for label, points in found["values"].items():
        cells = []
        for key in columns:
            means = [f"{p[key]['mean']:.3g}" for p in points.values()]
            cells.append(means[0] + (f" ({means[1]})" if len(means) > 1 else ""))
        lines.append(f"| {label} | {' | '.join(cells)} |")
    return "\n".join([*lines, "", origin(name, found)])


def curvature(report: dict[str, Any]) -> str:
    """What curvature costs beside other libraries."""
    lines = [
        "| | a product with the Hessian, s | in gradients | the spectral norm, s | off by |",
        "|---|---:|---:|---:|---:|",
    ]
    for name, row in report["libraries"].items():
        norm = "" if row["norm"] is None else f"{row['norm']:.2f}"
        off = "" if row["off"] is None else f"{row['off']:.1e}"
        cells = f"{row['product']:.3f} | {row['gradients']:.2f} | {norm} | {off}"
        lines.append(f"| {name} | {cells} |")
    versions = ", ".join(f"{name} {v}" for name, v in report["versions"].items() if v)
    lines += [
        "",
        f"`vgg-mini` ({report['parameters']:,} parameters) on {report['examples']:,} pictures, one thread; a gradient takes "
        f"{report['gradient']:.3f} s. The spectral norm is asked for to {report['tolerance']:g}, which each library takes in its "
        "own way; the last column says how far off it was at worst. Medians of "
        f"{report['repetitions']} interleaved repetitions, torch {report['machine']['torch']}, {versions}; `python "
        "benchmarks/curvature.py --json results/curvature.json`.",
    ]
    return "\n".join(lines)


def mean_and_error(values: list[float]) -> str:
    """The mean and its standard error; nothing of nothing."""
    if len(values) < 2:
        return "".join(f"{value:.2f}" for value in values)
    return f"{fmean(values):.2f} ± {stdev(values) / len(values) ** 0.5:.2f}"


def read(path: str) -> dict[str, Any]:
    """A committed result."""
    content: dict[str, Any] = json.loads((ROOT / "results" / path).read_text())
    return content


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
STUDENT_3_SEEDS = 4.303  # the 97.5 % quantile of Student's t with two degrees of freedom
TABLES: dict[str, Callable[[], str]] = {
    "step-time": lambda: step_time(read("step-time.json")),
    "compare": lambda: compare("compare"),
    "fig2c": lambda: compare("fig2c"),
    "errata": errata,
    "language-step": lambda: language_step(read("language-step.json")),
    "place": lambda: place(read("language-place.json")),
    "tab-ptb": lambda: language(ROOT / "results" / "tab-ptb"),
    "tab-ptb-nt": lambda: language(ROOT / "results" / "tab-ptb-nt"),
    "fig-frequency": lambda: language(ROOT / "results" / "fig-frequency"),
    "fig-tavg": lambda: language(ROOT / "results" / "fig-tavg"),
    "curvature": lambda: curvature(read("curvature.json")),
    "fig1b": lambda: measured("fig1b", "diversity", DIVERSITY),
    "fig2b": lambda: measured("fig2b", "diversity", DIVERSITY),
    "fig1c": lambda: measured(
        "fig1c",
        "networks",
        {
            "networks": "networks",
            "one": "one: test error, %",
            "ensemble": "ensemble",
            "gain": "gain",
        },
    ),
    "fig1d": lambda: measured(
        "fig1d",
        "ensemble",
        {
            "mean of the iterates": "mean of the iterates: test error, %",
            "ensemble of iterates": "ensemble of iterates",
            "average of weights": "average of weights",
        },
    ),
    "fig2d": lambda: measured(
        "fig2d", "rate", {"first": "first epoch", "middle": "half of them", "last": "last epoch"}
    ),
    "fig3d": lambda: measured(
        "fig3d", "parameters", {"parameters": "parameters", "gain": "gain in test accuracy, points"}
    ),
    "tab-sharpness": lambda: sharpness("tab-sharpness"),
}
PAGES = ("README.md", "docs/analysis.md", "docs/language.md", "docs/theory.md")


def rendered(page: str) -> str:
    """The page with its tables made anew."""
    for name, table in TABLES.items():
        begin, end = f"<!-- {name} -->\n", f"\n<!-- /{name} -->"
        before, found, rest = page.partition(begin)
        if found:
            _, closed, after = rest.partition(end)
            if not closed:
                raise ValueError(f"<!-- {name} --> has no end")
            page = before + begin + table() + end + after
    return page


def main() -> int:
    """Write, or with --check compare."""
    changed = 0
    for name in PAGES:
        path = ROOT / name
        text = path.read_text()
        new = rendered(text)
        changed += new != text
        if "--check" not in sys.argv:
            path.write_text(new)
    return int(changed > 0 and "--check" in sys.argv)


if __name__ == "__main__":
    sys.exit(main())
