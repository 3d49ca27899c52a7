"""The page: one HTML file that needs no network."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import cache
from html import escape
from importlib import resources

from gadam.report import series, vega_specs
from gadam.report.errors import ReportError
from gadam.report.sections import render_sections
from gadam.report.style import Style, styles
from gadam.report.tables import costs_table, curves_table, results_table
from gadam.runs import Collection
from gadam.runs.files import Json, nan_to_null

__all__ = ["render"]


def render(collection: Collection, *, live: str = "") -> str:
    """Return the page.

    Args:
        collection: What to show.
        live: For a served page, the server's version of this content. The page reloads when the
            version changes.

    Raises:
        ReportError: The extra ``gadam[report]`` is not installed.
    """
    preferred = collection.experiment.split
    by_split = {
        split: curves
        for split in sorted(("test", "validation"), key=lambda split: split != preferred)
        if (curves := series.curves(collection, split))
    }
    shown_split = next(iter(by_split), "test")
    shown = by_split.get(shown_split, [])
    method_styles = styles(collection.labels)
    metrics = collection.experiment.metrics
    costs = series.costs(collection)
    floors = {split: series.floors(collection, split) for split in by_split}
    sections, charts = render_sections(collection.sections)
    data = {
        "curves": [asdict(curve) for curves in by_split.values() for curve in curves],
        "titles": {s: {m: series.axis_title(m, s) for m in metrics} for s in by_split},
        "floors": floors,
        "rates": [asdict(rate) for rate in series.rates(collection)],
        "costs": [asdict(cost) for cost in costs],
        "specs": {
            "curves": vega_specs.curves_spec(shown, method_styles),
            "rates": vega_specs.rates_spec(method_styles),
            "costs": vega_specs.costs_spec(method_styles),
        },
        "sections": charts,
        "live": live,
    }
    metric = " or ".join(series.axis_title(m, shown_split) for m in metrics)
    curves_caption = (
        f"{metric[0].upper()}{metric[1:]}: mean over seeds, with a band of one standard error. "
        "Hover for values."
        + (" The dotted line marks the best possible value." if any(floors.values()) else "")
    )
    values = {
        "title": escape(collection.title),
        "lead": escape(_lead(collection)),
        "problems": _problems(collection),
        "table": results_table(collection),
        "methods": "".join(_checkbox(label, style) for label, style in method_styles.items()),
        "split": _radio_buttons("split", "Data", list(by_split)),
        "metric": _radio_buttons("metric", "Metric", metrics),
        "curves-label": escape(f"{metric} by epoch of {', '.join(collection.labels)}"),
        "curves-caption": escape(curves_caption),
        "curves-table": curves_table(shown, metric),
        "costs-table": costs_table(costs),
        "sections": sections,
        "how": _how_to_reproduce(collection),
        "data": _json_for_html(data),
        "css": _file("page.css"),
        "js": _file("page.js"),
        "vega": _vega(),
        "connect": "'self'" if live else "'none'",
    }
    return _fill(_file("page.html"), values, has_runs=bool(collection.runs))


def _fill(template: str, values: Mapping[str, str], *, has_runs: bool) -> str:
    """Replace each ``@@name@@``; keep what is between ``@@?runs@@`` and ``@@?end@@`` if asked."""
    before, _, rest = template.partition("@@?runs@@")
    for_runs, _, after = rest.partition("@@?end@@")
    template = before + (for_runs if has_runs else "") + after
    # Split once instead of replacing name by name, because a value may contain "@@" itself.
    pieces = template.split("@@")
    return "".join(piece if i % 2 == 0 else values[piece] for i, piece in enumerate(pieces))


def _file(name: str) -> str:
    return resources.files("gadam.report").joinpath(name).read_text()


@cache
def _vega() -> str:
    try:
        import vl_convert
    except ImportError:
        raise ReportError(
            "The report needs vl-convert. Install it with: pip install 'gadam[report]'"
        ) from None
    bundle: str = vl_convert.javascript_bundle("window.vegaEmbed = vegaEmbed;")
    return bundle.replace("</script", "<\\/script")


def _json_for_html(data: Json) -> str:
    """Return JSON that cannot end the script element it is in."""
    text = json.dumps(nan_to_null(data), separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")


# ------------------------------------------------------------------------------------------ pieces


def _lead(collection: Collection) -> str:
    finished = sum(run.result is not None for run in collection.runs)
    total = max(len(collection.runs), collection.expected)
    if not total:
        return ""
    methods = _count(len(collection.labels), "method")
    seeds = _count(len({run.seed for run in collection.runs}), "seed")
    note = collection.experiment.note
    return f"{finished} of {total} runs are finished: {methods}, {seeds}. {note}".strip()


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _problems(collection: Collection) -> str:
    if not collection.problems and (collection.runs or collection.sections):
        return ""
    sentences = collection.problems or ("There are no runs in these folders.",)
    items = "".join(f"<li>{escape(sentence)}</li>" for sentence in sentences)
    return f'<div class="problems" role="status"><strong>Warnings</strong><ul>{items}</ul></div>'


def _radio_buttons(name: str, title: str, values: Sequence[str]) -> str:
    """Return radio buttons with the first one selected, or nothing if there is no choice."""
    if len(values) < 2:
        return ""
    buttons = "".join(
        f'<label><input type="radio" name="{name}" value="{escape(value)}"{" checked" * (i == 0)}> '
        f"{escape(value)}</label>"
        for i, value in enumerate(values)
    )
    return f"<fieldset><legend>{title}</legend>{buttons}</fieldset>"


def _checkbox(label: str, style: Style) -> str:
    return (
        f'<label><input type="checkbox" name="method" value="{escape(label)}" checked>'
        f'<span class="{style.swatch}" style="border-color:{style.color}"></span>'
        f"{escape(label)}</label>"
    )


def _how_to_reproduce(collection: Collection) -> str:
    parts = []
    if collection.experiment.command:
        command = escape(collection.experiment.command)
        parts.append(f"<p>Command:</p><pre>{command}</pre>")
    headers = [run.header for run in collection.runs]
    for title, found in (
        ("Versions", [header.versions for header in headers]),
        ("Machine", [header.machine for header in headers]),
    ):
        distinct = sorted({json.dumps(dict(each), sort_keys=True) for each in found})
        for text in distinct:
            shown = "; ".join(f"{name} {value}" for name, value in json.loads(text).items())
            parts.append(f"<p>{title}: {escape(shown)}</p>")
    for label in collection.labels:
        runs = collection.runs_of(label)
        recipe = json.dumps(runs[0].recipe.to_dict(), indent=1)
        states = "; ".join(f"seed {run.seed}: {run.status}" for run in runs)
        parts.append(
            f"<details><summary>{escape(label)}: {escape(states)}</summary>"
            f"<pre>{escape(recipe)}</pre></details>"
        )
    return "".join(parts)
