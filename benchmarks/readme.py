"""Write the README's tables from the committed results: `python benchmarks/readme.py`.

With --check it changes nothing, and fails where the README is not what the results say.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
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


def compare(report: dict[str, Any]) -> str:
    """The table of `gadam compare`."""

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
        f"{min(seconds):.0f} to {max(seconds):.0f} s a run on one core) to `results/compare`.",
    ]
    return "\n".join(lines)


STUDENT_3_SEEDS = 4.303  # the 97.5 % quantile of Student's t with two degrees of freedom
TABLES = {"step-time": step_time, "compare": compare}
RESULTS = {"step-time": "step-time.json", "compare": "compare/summary.json"}


def rendered(readme: str) -> str:
    """The README with its tables made anew."""
    for name, table in TABLES.items():
        begin, end = f"<!-- {name} -->\n", f"\n<!-- /{name} -->"
        before, _, rest = readme.partition(begin)
        _, _, after = rest.partition(end)
        path = ROOT / "results" / RESULTS[name]
        report = json.loads(path.read_text())
        readme = before + begin + table(report) + end + after
    return readme


def main() -> int:
    """Write, or with --check compare."""
    path = ROOT / "README.md"
    text = path.read_text()
    new = rendered(text)
    if "--check" in sys.argv:
        return int(new != text)
    path.write_text(new)
    return 0


if __name__ == "__main__":
    sys.exit(main())
