"""Tables: in HTML for the page, and the main one as Markdown, LaTeX and CSV files."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path

from gadam.report.series import Cost, Curve
from gadam.report.style import COST_COLORS
from gadam.runs import Collection, Experiment, more_is_better, summary
from gadam.runs.files import write_atomically
from gadam.runs.summary import Row, SeedMean

__all__ = ["costs_table", "curves_table", "html_table", "results_table", "write_tables"]


def html_table(
    header: Sequence[str],
    rows: Iterable[Sequence[str]],
    caption: str = "",
    best: Iterable[tuple[int, int]] = (),
) -> str:
    """Return an HTML table. All text is escaped.

    Args:
        header: The column titles.
        rows: The cells, row by row. The first cell of a row is its title.
        caption: What the table shows.
        best: The (row, column) of cells to highlight.
    """
    highlighted = set(best)

    def cell(text: str, row: int, column: int) -> str:
        if column == 0:
            return f'<th scope="row">{escape(text)}</th>'
        if (row, column) in highlighted:
            return f"<td class=best>{escape(text)}<span class=hidden> (best)</span></td>"
        return f"<td>{escape(text)}</td>"

    head = "".join(f'<th scope="col">{escape(title)}</th>' for title in header)
    body = "".join(
        f"<tr>{''.join(cell(text, i, j) for j, text in enumerate(row))}</tr>"
        for i, row in enumerate(rows)
    )
    title = f"<caption>{escape(caption)}</caption>" if caption else ""
    return (
        f'<div class="scroll"><table>{title}<thead><tr>{head}</tr></thead>'
        f"<tbody>{body}</tbody></table></div>"
    )


# ------------------------------------------------------------------------------------ on the page


def results_table(collection: Collection) -> str:
    """Return the page's main table: each method's test metric and its gain.

    Args:
        collection: The runs.
    """
    experiment = collection.experiment
    table = summary.summarize(experiment, collection.results)
    rows = [row for row in table if row.runs or row.failed]
    if not rows:
        return "<p>No run has finished yet.</p>"
    published = any(row.published is not None for row in rows)
    several_metrics = len(experiment.metrics) > 1
    header = ["method", "last iterate", "average", "gain over base", "validation", "seeds"]
    header += ["paper, at full scale"] if published else []
    header += ["metric"] if several_metrics else []
    texts = []
    for row in rows:
        cells = [
            summary.row_title(row),
            summary.mean_text(row.iterate, row),
            summary.mean_text(row.average, row),
            _gain(row),
            summary.mean_text(row.validation, row),
            str(row.runs),
        ]
        cells += ["–" if row.published is None else f"{row.published:g}"] if published else []
        cells += [row.metric] if several_metrics else []
        texts.append(cells)
    caption = (
        f"Test {summary.with_units(experiment.metrics)}: mean ± standard error over seeds. Gains "
        "are paired by seed and shown with their 95 % confidence interval; a positive gain is an "
        "improvement. A method with an average is rated by its average. The best value of each "
        "column is highlighted, per task."
    )
    return html_table(header, texts, caption, _best_cells(experiment, rows))


def _gain(row: Row) -> str:
    if row.difference is None:
        return "–"
    mean, half = row.difference.mean, row.difference.interval
    bounds = "" if half is None else f" ({mean - half:+.2f} to {mean + half:+.2f})"
    return f"{mean:+.2f}{bounds} over {row.base}"


def _best_cells(experiment: Experiment, rows: list[Row]) -> list[tuple[int, int]]:
    """Find the best of each column among the rows of a task, if it has several."""
    position = {row.label: i for i, row in enumerate(rows)}
    found = []
    for column, name in ((1, "iterate"), (2, "average"), (4, "validation")):
        for members in summary.by_task(experiment, rows):
            means: dict[str, float] = {}
            for row in members:
                mean: SeedMean | None = getattr(row, name)
                if mean is not None:
                    means[row.label] = mean.mean
            pick = max if more_is_better(members[0].metric) else min
            if len(means) > 1:
                found.append((position[pick(means, key=means.__getitem__)], column))
    return found


def curves_table(curves: Iterable[Curve], metric: str) -> str:
    """Return the table of each learning curve's last value.

    Args:
        curves: The curves.
        metric: The title of their values.
    """
    rows = [
        (c.label, c.point, str(c.epoch[-1]), f"{c.value[-1]:.2f}", str(c.seeds[-1])) for c in curves
    ]
    return html_table(("method", "point", "epoch", metric, "seeds"), rows)


def costs_table(costs: Iterable[Cost]) -> str:
    """Return the table of what each method costs.

    Args:
        costs: The costs.
    """
    rows = []
    for cost in costs:
        total = sum(cost.seconds.values()) or 1.0
        shares = [f"{100 * cost.seconds.get(a, 0.0) / total:.0f} %" for a in COST_COLORS]
        rows.append(
            (
                cost.label,
                f"{total:.2f}",
                *shares,
                "–" if cost.parameters is None else f"{cost.parameters:,}",
                "–" if cost.peak_memory is None else f"{cost.peak_memory:,} MB",
            )
        )
    header = (
        "method",
        "seconds per epoch",
        "training",
        "BatchNorm refresh",
        "evaluation",
        "parameters",
        "peak memory of the process",
    )
    return html_table(header, rows)


# --------------------------------------------------------------------------------------- in files


def write_tables(collection: Collection, folder: Path) -> list[Path]:
    """Write the main table as table.md, table.tex and table.csv.

    Args:
        collection: The runs.
        folder: Where to write; created if it does not exist.

    Returns:
        The files.
    """
    folder.mkdir(parents=True, exist_ok=True)
    table = summary.summarize(collection.experiment, collection.results)
    rows = [row for row in table if row.runs]
    texts = {
        "table.md": summary.to_markdown(collection.experiment, rows) + "\n",
        "table.tex": _to_latex(rows),
        "table.csv": _to_csv(rows),
    }
    for name, text in texts.items():
        write_atomically(folder / name, text.encode())
    return [folder / name for name in texts]


_LATEX = {
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    **{character: f"\\{character}" for character in "&%$#_{}"},
    "±": r"$\pm$",
    "–": "--",
}


def _to_latex(rows: list[Row]) -> str:
    def line(cells: Iterable[str]) -> str:
        escaped = ("".join(_LATEX.get(character, character) for character in c) for c in cells)
        return " & ".join(escaped) + r" \\"

    return "\n".join(
        [
            r"\begin{tabular}{lrrrrr}",
            r"\toprule",
            line(summary.HEADER),
            r"\midrule",
            *(line(summary.cells(row)) for row in rows),
            r"\bottomrule",
            r"\end{tabular}",
            "",
        ]
    )


def _to_csv(rows: list[Row]) -> str:
    """Format in full precision, with one number per column."""
    names = ("iterate", "average", "validation", "difference")
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    columns = [f"{name}_{statistic}" for name in names for statistic in ("mean", "error")]
    writer.writerow(["method", "base", "runs", *columns, "published", "seconds"])
    for row in rows:
        numbers: list[float | str | None] = []
        for name in names:
            mean: SeedMean | None = getattr(row, name)
            numbers += ["", ""] if mean is None else [mean.mean, mean.error]
        writer.writerow([row.label, row.base, row.runs, *numbers, row.published, row.seconds])
    return out.getvalue()
