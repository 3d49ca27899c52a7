"""Draw the figures of docs/analysis.md from the results: `python -m tools.analysis_figures`."""

from __future__ import annotations

from gadam.runs.archive import opened
from gadam.runs.collect import collect
from gadam.study import Notebook, Settings, build_sections
from tools import DOCS, RESULTS

# The experiment, the part of the analysis, and the figures to draw: the beginnings of file names.
FIGURES = (
    ("fig1b", "diversity", ("error-decay", "diversity-decay", "diversity")),
    ("fig1d", "ensemble", ("ensemble",)),
    ("fig2d", "rate", ("rate",)),
    ("fig3d", "parameters", ("parameters",)),
    ("fig1b", "landscape", ("line", "plane")),
    ("fig1b", "density", ("density",)),
)


def main() -> None:
    """Draw all figures as PNG files in docs/analysis."""
    out = DOCS / "analysis"
    out.mkdir(exist_ok=True)
    for experiment, part, figures in FIGURES:
        files = _draw(experiment, part)
        for figure in figures:
            # There is one plane per method; the last one is shown.
            drawn = [
                content
                for name, content in files.items()
                if name == f"{figure}.png" or (figure == "plane" and name.startswith("plane-"))
            ]
            (out / f"{experiment}-{figure}.png").write_bytes(drawn[-1])


def _draw(experiment: str, part: str) -> dict[str, bytes]:
    with opened(RESULTS / f"{experiment}.json") as folder:
        runs = collect([folder])
        values = {
            (run.label, run.seed): Notebook(run.folder / "analysis.jsonl").newest
            for run in runs.runs
        }
    (section,) = build_sections(runs, values, [part], Settings())
    return {name: content for name, content in section.files.items() if name.endswith(".png")}


if __name__ == "__main__":
    main()
