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
        "machine is shared: its memory and clock vary by a third within minutes, and ratios by a tenth, "
        "that of p = 0.2, which computes most, by more.",
    ]
    return "\n".join(lines)


def rendered(readme: str) -> str:
    """The README with its tables made anew."""
    begin, end = "<!-- step-time -->\n", "\n<!-- /step-time -->"
    before, _, rest = readme.partition(begin)
    _, _, after = rest.partition(end)
    report = json.loads((ROOT / "results" / "step-time.json").read_text())
    return before + begin + step_time(report) + end + after


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
