"""Tables: in HTML for the page, and the main one as Markdown, LaTeX and CSV files."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from html import escape
from pathlib import Path
from typing import TypeVar

from gadam.report.series import Cost, Curve
from gadam.report.style import COST_NAMES, POINT_NAMES
from gadam.runs import Collection, summary
from gadam.runs.files import write_atomically
from gadam.runs.summary import Row, SeedMean, TaskGroup

__all__ = ["costs_table", "curves_table", "html_table", "results_table", "write_tables"]


def html_table(
    header: Sequence[str],
    rows: Iterable[Sequence[str]],
    caption: str = "",
    best: Iterable[tuple[int, int]] = (),
    groups: Mapping[int, str] | None = None,
) -> str:
    """Return an HTML table. All text is escaped.

    Args:
        header: The column titles.
        rows: The cells, row by row. The first cell of a row is its title.
        caption: What the table shows.
        best: The (row, column) of cells to highlight, with their row.
        groups: Headings of groups, by the position of the row that each group begins with.
    """
    best_cells = set(best)
    best_rows = {row for row, _ in best_cells}

    def cell(text: str, row: int, column: int) -> str:
        if column == 0:
            return f'<th scope="row">{escape(text)}</th>'
        label = escape(header[column]) if column < len(header) else ""
        classes = [name for name, on in (("best", (row, column) in best_cells),) if on]
        classes += ["empty"] if text in ("", "–") else []
        attributes = f' class="{" ".join(classes)}"' if classes else ""
        note = "<span class=hidden> (best)</span>" if "best" in classes else ""
        # The content is one element, because narrow screens show it beside its label.
        return f'<td data-label="{label}"{attributes}><span>{escape(text)}{note}</span></td>'

    head = "".join(f'<th scope="col">{escape(title)}</th>' for title in header)
    body = ""
    for i, row in enumerate(rows):
        if groups and i in groups:
            heading = f'<th scope="rowgroup" colspan="{len(header)}">{escape(groups[i])}</th>'
            body += f'{"</tbody>" if body else ""}<tbody><tr class="group">{heading}</tr>'
        cells = "".join(cell(text, i, j) for j, text in enumerate(row))
        body += f"<tr class=best>{cells}</tr>" if i in best_rows else f"<tr>{cells}</tr>"
    title = f"<caption>{escape(caption)}</caption>" if caption else ""
    body = f"{body}</tbody>" if body.startswith("<tbody>") else f"<tbody>{body}</tbody>"
    return f'<div class="scroll"><table>{title}<thead><tr>{head}</tr></thead>{body}</table></div>'


def _headings(labels: Sequence[str], groups: Sequence[TaskGroup]) -> dict[int, str]:
    """Return the headings of rows that are ordered by task, by position."""
    return {
        min(members): group.title
        for group in groups
        if (members := [i for i, label in enumerate(labels) if label in group.names])
    }


def _names(groups: Sequence[TaskGroup]) -> dict[str, str]:
    return {label: name for group in groups for label, name in group.names.items()}


T = TypeVar("T", Row, Curve, Cost)


def _by_task(items: Iterable[T], groups: Sequence[TaskGroup]) -> list[T]:
    """Order items by task, so that a heading can stand above each task."""
    items = list(items)
    return [item for group in groups for item in items if item.label in group.names]


# ------------------------------------------------------------------------------------ on the page


def results_table(collection: Collection) -> str:
    """Return the page's main table: each method's test metric and its gain, by task.

    Args:
        collection: The runs.
    """
    experiment = collection.experiment
    groups = summary.task_groups(experiment)
    table = summary.summarize(experiment, collection.results)
    rows = _by_task((row for row in table if row.runs or row.failed), groups)
    if not rows:
        return "<p>No run has finished yet.</p>"
    names = _names(groups)
    published = any(row.published is not None for row in rows)
    several_metrics = len(experiment.metrics) > 1
    header = ["method", "last iterate", "average", "gain over base", "validation", "seeds"]
    header += ["paper, at full scale"] if published else []
    header += ["metric"] if several_metrics else []
    texts = []
    for row in rows:
        named = replace(row, label=names[row.label], base=names.get(row.base or "", row.base))
        cells = [
            summary.row_title(named),
            summary.mean_text(row.iterate, row),
            summary.mean_text(row.average, row),
            summary.gain_text(named) or "–",
            summary.mean_text(row.validation, row),
            str(row.runs),
        ]
        cells += ["–" if row.published is None else f"{row.published:g}"] if published else []
        cells += [row.metric] if several_metrics else []
        texts.append(cells)
    caption = (
        f"Test {summary.with_units(experiment.metrics)}: mean ± standard error over seeds. Gains "
        "are paired by seed and shown with their 95% confidence interval; a positive gain is an "
        "improvement. A method with an average is rated by its average. The best method of each "
        "task is highlighted; it is chosen on validation data if there is any."
    )
    leaders = summary.best(experiment, rows)
    best = [(i, 2 if row.average else 1) for i, row in enumerate(rows) if row.label in leaders]
    return html_table(header, texts, caption, best, _headings([r.label for r in rows], groups))


def curves_table(curves: Iterable[Curve], groups: Sequence[TaskGroup]) -> str:
    """Return the table of each learning curve's last value.

    Args:
        curves: The curves, all of one split.
        groups: The tasks.
    """
    ordered, names = _by_task(curves, groups), _names(groups)
    rows = [
        (
            names[c.label],
            POINT_NAMES[c.point],
            str(c.epoch[-1]),
            c.metric,
            f"{c.value[-1]:.{summary.decimals(c.value[-1])}f}",
            str(c.seeds[-1]),
        )
        for c in ordered
    ]
    split = ordered[0].split if ordered else "test"
    header = ("method", "point", "epoch", "metric", split, "seeds")
    return html_table(header, rows, groups=_headings([c.label for c in ordered], groups))


def costs_table(costs: Iterable[Cost], groups: Sequence[TaskGroup]) -> str:
    """Return the table of what each method costs.

    Args:
        costs: The costs.
        groups: The tasks.
    """
    ordered, names = _by_task(costs, groups), _names(groups)
    rows = []
    for cost in ordered:
        total = sum(cost.seconds.values()) or 1.0
        shares = [f"{100 * cost.seconds.get(a, 0.0) / total:.0f}%" for a in COST_NAMES]
        rows.append(
            (
                names[cost.label],
                f"{total:.2f}",
                *shares,
                "–" if cost.parameters is None else f"{cost.parameters:,}",
                "–" if cost.peak_memory is None else f"{cost.peak_memory:,} MB",
            )
        )
    header = (
        "method",
        "seconds per epoch",
        *COST_NAMES.values(),
        "parameters",
        "peak memory of the process",
    )
    return html_table(header, rows, groups=_headings([cost.label for cost in ordered], groups))


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
