"""The page: one file of HTML that needs no network.

A part of the library that wants a section of its own leaves ``sections/NAME.json`` in a run's or a
sweep's folder: ``{"title": …, "blocks": [block, …]}``, with these blocks:

=====================================================  ==========================================
``{"kind": "text", "text": …}``                        a paragraph
``{"kind": "table", "header": […], "rows": [[…], …]}``  a table
``{"kind": "chart", "spec": …, "caption": …}``         a Vega-Lite figure
``{"kind": "image", "file": …, "caption": …}``         a PNG or SVG file beside the JSON file
=====================================================  ==========================================
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterable, Sequence
from functools import cache
from html import escape
from importlib import resources
from pathlib import Path
from typing import Any

from gadam.report import series
from gadam.report.records import Collection
from gadam.train import summary
from gadam.train.recipe import to_dict
from gadam.train.record import to_json

__all__ = ["ReportError", "render"]


class ReportError(RuntimeError):
    """A report that cannot be written: the message says why, and what to do."""


def render(collection: Collection, *, live: str = "") -> str:
    """The page.

    Args:
        collection: what is on it
        live: for a page that is served: what the server will call this state of things
    """
    drawn = collection.experiment.part
    by_part = {
        part: curves
        for part in sorted(("test", "validation"), key=lambda part: part != drawn)
        if (curves := series.curves(collection, part))
    }
    shown = next(iter(by_part.values()), [])
    styles = series.styles(collection.labels)
    charts: list[dict[str, Any]] = []
    sections = "".join(_section(section, charts) for section in collection.sections)
    metrics = collection.experiment.metrics
    data: dict[str, Any] = {
        "curves": [vars(curve) for curves in by_part.values() for curve in curves],
        "titles": {p: {m: series.axis_title(m, p) for m in metrics} for p in by_part},
        "floors": {p: series.floors(collection, p) for p in by_part},
        "rates": series.rates(collection),
        "costs": series.costs(collection),
        "specs": _specs(shown, styles),
        "sections": charts,
        "live": live,
    }
    part = next(iter(by_part), "test")
    metric = " or ".join(series.axis_title(m, part) for m in metrics)
    values = {
        "title": escape(collection.title),
        "lead": escape(_lead(collection)),
        "problems": _problems(collection),
        "table": _headline(collection),
        "methods": "".join(_method(label, i, styles) for i, label in enumerate(collection.labels)),
        "part": _choice(
            "part", "On", {"test": "test data", "validation": "validation data"}, list(by_part)
        ),
        "metric": _choice("metric", "Of", {m: m for m in metrics}, metrics),
        "curves-label": escape(f"{metric} by epoch of {', '.join(collection.labels)}"),
        "curves-caption": escape(
            f"{metric[0].upper()}{metric[1:]}: means over seeds, bands of one standard error. Hover for "
            f"values.{' A dotted line marks what the true probabilities have.' * any(data['floors'].values())}"
        ),
        "curves-table": _curves_table(shown, metric),
        "costs-table": _costs_table(data["costs"]),
        "sections": sections,
        "how": _how(collection),
        "data": _json_for_html(data),
        "css": _file("page.css"),
        "js": _file("page.js"),
        "vega": _vega(),
        "connect": "'self'" if live else "'none'",
    }
    page = _file("page.html")
    before, _, rest = page.partition("@@?runs@@")
    of_runs, _, after = rest.partition("@@?end@@")
    page = before + (of_runs if collection.runs else "") + after
    # By position, not by replacing: what is filled in must not be looked through again.
    pieces = page.split("@@")
    return "".join(piece if i % 2 == 0 else values[piece] for i, piece in enumerate(pieces))


def _file(name: str) -> str:
    return resources.files("gadam.report").joinpath(name).read_text()


@cache
def _vega() -> str:
    try:
        import vl_convert
    except ImportError:
        raise ReportError("the report needs vl-convert: pip install 'gadam[report]'") from None
    bundle: str = vl_convert.javascript_bundle("window.vegaEmbed = vegaEmbed;")
    return bundle.replace("</script", "<\\/script")


def _json_for_html(data: Any) -> str:
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")


def table(
    header: Sequence[str],
    rows: Iterable[Sequence[str]],
    caption: str = "",
    best: Iterable[tuple[int, int]] = (),
) -> str:
    """A table of texts; ``best`` are (row, column) to mark."""
    marked = set(best)
    head = "".join(f'<th scope="col">{escape(cell)}</th>' for cell in header)
    body = ""
    for i, row in enumerate(rows):
        cells = "".join(
            f'<th scope="row">{escape(cell)}</th>'
            if j == 0
            else f"<td class=best>{escape(cell)}<span class=hidden> (best)</span></td>"
            if (i, j) in marked
            else f"<td>{escape(cell)}</td>"
            for j, cell in enumerate(row)
        )
        body += f"<tr>{cells}</tr>"
    title = f"<caption>{escape(caption)}</caption>" if caption else ""
    return (
        f'<div class="scroll"><table>{title}<thead><tr>{head}</tr></thead>'
        f"<tbody>{body}</tbody></table></div>"
    )


# ------------------------------------------------------------------------------------------- words


def _lead(collection: Collection) -> str:
    done = sum(run.result is not None for run in collection.runs)
    total = max(len(collection.runs), collection.expected)
    seeds = len({run.seed for run in collection.runs})
    if not total:
        return ""
    words = f"{done} of {total} runs are finished: {len(collection.labels)} methods"
    return f"{words}, {seeds} seed{'s' if seeds != 1 else ''}. {collection.experiment.note}".strip()


def _problems(collection: Collection) -> str:
    if not collection.problems and (collection.runs or collection.sections):
        return ""
    sentences = list(collection.problems) or ["there are no runs here"]
    items = "".join(f"<li>{escape(sentence)}</li>" for sentence in sentences)
    return f'<div class="problems" role="status"><strong>Not all is here.</strong><ul>{items}</ul></div>'


def _headline(collection: Collection) -> str:
    experiment = collection.experiment
    rows = summary.rows(experiment, collection.results)
    rows = [row for row in rows if row.runs or row.failed]
    if not rows:
        return "<p>No run is finished yet.</p>"
    published = any(row.published is not None for row in rows)
    header = ["method", "last iterate", "average", "gain over its base", "validation", "seeds"]
    header += ["the paper, at full scale"] if published else []
    several = len(experiment.metrics) > 1
    header += ["metric"] if several else []
    texts, best = [], []
    for row in rows:
        gain = ""
        if row.difference is not None:
            mean, half = row.difference.mean, row.difference.interval
            bounds = "" if half is None else f" ({mean - half:+.2f} to {mean + half:+.2f})"
            gain = f"{mean:+.2f}{bounds} over {row.base}"
        cells = [
            summary.titled(row),
            summary.of_runs(row.iterate, row),
            summary.of_runs(row.average, row),
            gain or "–",
            summary.of_runs(row.validation, row),
            str(row.runs),
        ]
        cells += ["–" if row.published is None else f"{row.published:g}"] if published else []
        cells += [row.metric] if several else []
        texts.append(cells)
    place = {row.label: i for i, row in enumerate(rows)}
    for column, name in ((1, "iterate"), (2, "average"), (4, "validation")):
        for members in summary.by_task(experiment, rows):
            means = {r.label: e.mean for r in members if (e := getattr(r, name)) is not None}
            pick = max if summary.more_is_better(members[0].metric) else min
            if len(means) > 1:
                best.append((place[pick(means, key=means.__getitem__)], column))
    caption = (
        f"Test {summary.described(experiment.metrics)}: mean ± standard error over seeds; gains are paired by seed, positive where "
        "better, with their 95 % confidence interval. A method with an average is used at its average. The best of "
        "each column is marked, for each task."
    )
    return table(header, texts, caption, best)


def _choice(name: str, title: str, texts: dict[str, str], values: list[str]) -> str:
    """Radio buttons, the first of them chosen; nothing where there is no choice."""
    if len(values) < 2:
        return ""
    buttons = "".join(
        f'<label><input type="radio" name="{name}" value="{escape(value)}"{" checked" * (i == 0)}> '
        f"{escape(texts[value])}</label>"
        for i, value in enumerate(values)
    )
    return f"<fieldset><legend>{title}</legend>{buttons}</fieldset>"


def _method(label: str, index: int, styles: dict[str, series.Style]) -> str:
    turn = ("", " second", " third")[(index // len(series.COLOURS)) % 3]
    return (
        f'<label><input type="checkbox" name="method" value="{escape(label)}" checked>'
        f'<span class="swatch{turn}" style="border-color:{styles[label].colour}"></span>'
        f"{escape(label)}</label>"
    )


def _curves_table(curves: list[series.Curve], metric: str) -> str:
    rows = [
        (c.label, c.point, str(c.epoch[-1]), f"{c.value[-1]:.2f}", str(c.seeds[-1])) for c in curves
    ]
    return table(("method", "point", "epoch", metric, "seeds"), rows)


def _costs_table(costs: list[dict[str, Any]]) -> str:
    rows = []
    for cost in costs:
        seconds = cost["seconds"]
        total = sum(seconds.values()) or 1.0
        rows.append(
            (
                cost["label"],
                f"{total:.2f}",
                *(
                    f"{100 * seconds.get(w, 0.0) / total:.0f} %"
                    for w in ("train", "refresh", "evaluate")
                ),
                "–" if cost["parameters"] is None else f"{cost['parameters']:,}",
                "–" if cost["memory"] is None else f"{cost['memory']:,} MB",
            )
        )
    header = (
        "method",
        "seconds an epoch",
        "training",
        "refreshing",
        "evaluating",
        "parameters",
        "peak memory of the process",
    )
    return table(header, rows)


def _how(collection: Collection) -> str:
    parts = []
    if collection.command:
        parts.append(f"<p>The command:</p><pre>{escape(collection.command)}</pre>")
    versions = sorted({json.dumps(r.versions, sort_keys=True) for r in collection.runs})
    machines = sorted({json.dumps(r.machine, sort_keys=True) for r in collection.runs})
    for title, found in (("Versions", versions), ("Machine", machines)):
        texts = ["; ".join(f"{k} {v}" for k, v in json.loads(text).items()) for text in found]
        parts += [f"<p>{title}: {escape(text)}</p>" for text in texts]
    for label in collection.labels:
        runs = [run for run in collection.runs if run.label == label]
        recipe = json.dumps(to_dict(runs[0].recipe), indent=1)
        states = "; ".join(f"seed {run.seed}: {run.status}" for run in runs)
        parts.append(
            f"<details><summary>{escape(label)}: {escape(states)}</summary>"
            f"<pre>{escape(recipe)}</pre></details>"
        )
    return "".join(parts)


# ---------------------------------------------------------------------------------------- sections


def _section(section: dict[str, Any], charts: list[dict[str, Any]]) -> str:
    blocks = ""
    for block in section["blocks"]:
        try:
            blocks += _block(block, Path(section["folder"]), charts)
        except (OSError, TypeError, ValueError, AttributeError) as error:
            blocks += (
                f'<p class="note">A block of this section cannot be shown: {escape(str(error))}</p>'
            )
    return f"<section><h2>{escape(str(section.get('title', '')))}</h2>{blocks}</section>"


def _block(block: Any, folder: Path, charts: list[dict[str, Any]]) -> str:
    kind = block.get("kind") if isinstance(block, dict) else None
    if kind == "text":
        return f"<p>{escape(str(block.get('text', '')))}</p>"
    if kind == "table":
        rows = [[str(cell) for cell in row] for row in block.get("rows", [])]
        return table(
            [str(cell) for cell in block.get("header", [])], rows, str(block.get("caption", ""))
        )
    caption = f"<figcaption>{escape(str(block.get('caption', '')))}</figcaption>" if kind else ""
    label = escape(str(block.get("caption", "figure"))) if kind else ""
    if kind == "chart" and isinstance(block.get("spec"), dict):
        spec = {key: value for key, value in block["spec"].items() if key != "usermeta"}
        charts.append(json.loads(to_json(spec)))
        name = f"section-chart-{len(charts) - 1}"
        return f'<figure><div class="chart" id="{name}" role="img" aria-label="{label}"></div>{caption}</figure>'
    if kind == "image":
        path = (folder / str(block.get("file", ""))).resolve()
        types = {".png": "image/png", ".svg": "image/svg+xml"}
        if path.is_file() and path.suffix in types and path.is_relative_to(folder.resolve()):
            content = base64.b64encode(path.read_bytes()).decode()
            source = f"data:{types[path.suffix]};base64,{content}"
            return f'<figure><img src="{source}" alt="{label}">{caption}</figure>'
    return '<p class="note">A block of this section cannot be shown.</p>'


# ------------------------------------------------------------------------------------------ figures


def _specs(curves: list[series.Curve], styles: dict[str, series.Style]) -> dict[str, Any]:
    """Vega-Lite's description of each figure; the page fills in the data."""
    labels = list(styles)
    colour = {
        "field": "label",
        "type": "nominal",
        "legend": None,
        "scale": {"domain": labels, "range": [styles[label].colour for label in labels]},
    }
    averaged = {c.label for c in curves if c.point == "average"}
    lines = [
        (f"{c.label} {c.point}", styles[c.label].dashes[series.drawn_as(c, averaged)])
        for c in curves
    ]
    dash = {
        "field": "style",
        "type": "nominal",
        "legend": None,
        "scale": {
            "domain": [name for name, _ in lines],
            "range": [list(d) or [1, 0] for _, d in lines],
        },
    }
    whole = {"tickMinStep": 1, "format": "d"}
    x = {"field": "epoch", "type": "quantitative", "title": "epoch", "axis": whole}
    value = {"field": "value", "type": "quantitative", "scale": {"zero": False}}
    # Around the nearest point Vega-Lite finds only values that it formats: texts have to be, too.
    text = {"format": "", "formatType": "toString"}
    tooltip = [
        {"field": "label", "type": "nominal", "title": "method", **text},
        {"field": "point", "type": "nominal", **text},
        {"field": "epoch", "type": "quantitative"},
        {"field": "seconds", "type": "quantitative", "format": ",.0f"},
        {"field": "value", "type": "quantitative", "format": ".2f"},
        {"field": "low", "type": "quantitative", "title": "less one s.e.", "format": ".2f"},
        {"field": "high", "type": "quantitative", "title": "plus one s.e.", "format": ".2f"},
        {"field": "seeds", "type": "quantitative"},
    ]
    common = {"$schema": "https://vega.github.io/schema/vega-lite/v6.json", "width": "container"}
    hover = {
        "name": "hover",
        "select": {"type": "point", "on": "pointerover", "nearest": True, "clear": "pointerout"},
    }
    band = {"x": x, "y": {**value, "field": "low"}, "y2": {"field": "high"}, "color": colour}
    return {
        "curves": {
            **common,
            "height": 380,
            "config": {"customFormatTypes": True},
            "data": {"name": "curves"},
            "layer": [
                {
                    "mark": {"type": "area", "opacity": 0.15, "tooltip": False},
                    "encoding": {**band, "detail": {"field": "point"}},
                },
                {
                    "mark": {"type": "line", "strokeWidth": 2},
                    "encoding": {"x": x, "y": value, "color": colour, "strokeDash": dash},
                },
                {
                    "mark": {"type": "point", "filled": True, "size": 70},
                    "params": [hover],
                    "encoding": {
                        "x": x,
                        "y": value,
                        "color": colour,
                        "opacity": {
                            "condition": {"param": "hover", "empty": False, "value": 1},
                            "value": 0,
                        },
                        "tooltip": tooltip,
                    },
                },
                {
                    "data": {"name": "floor"},
                    "mark": {"type": "rule", "strokeDash": [2, 3], "strokeWidth": 1.5},
                    "encoding": {
                        "y": value,
                        "color": {"value": "#8a939c"},
                        "tooltip": [{"field": "value", "title": "best possible", "format": ".2f"}],
                    },
                },
            ],
        },
        "rates": {
            **common,
            "height": 220,
            "layer": [
                {
                    "data": {"name": "rates"},
                    "mark": {"type": "line", "interpolate": "step-after", "strokeWidth": 2},
                    "encoding": {
                        "x": x,
                        "y": {
                            "field": "rate",
                            "type": "quantitative",
                            "title": "learning rate",
                            "scale": {"type": "log"},
                            "axis": {"format": "~g"},
                        },
                        "color": colour,
                        "strokeDash": {
                            "field": "label",
                            "type": "nominal",
                            "legend": None,
                            "scale": {
                                "domain": labels,
                                "range": [
                                    list(styles[n].dashes["average"]) or [1, 0] for n in labels
                                ],
                            },
                        },
                        "tooltip": [{"field": "label"}, {"field": "epoch"}, {"field": "rate"}],
                    },
                },
                {
                    "data": {"name": "starts"},
                    "mark": {"type": "rule", "strokeDash": [6, 4], "strokeWidth": 1.5},
                    "encoding": {
                        "x": x,
                        "color": colour,
                        "tooltip": [
                            {"field": "label"},
                            {"field": "epoch", "title": "averaging from"},
                        ],
                    },
                },
            ],
        },
        "costs": {
            **common,
            "data": {"name": "costs"},
            "mark": "bar",
            "encoding": {
                "y": {
                    "field": "label",
                    "type": "nominal",
                    "title": None,
                    "sort": labels,
                    "axis": {"labelLimit": 220},
                },
                "x": {
                    "field": "seconds",
                    "type": "quantitative",
                    "aggregate": "sum",
                    "title": "seconds an epoch",
                },
                "color": {
                    "field": "what",
                    "type": "nominal",
                    "title": None,
                    "sort": ["train", "refresh", "evaluate"],
                    "scale": {
                        "domain": ["train", "refresh", "evaluate"],
                        "range": ["#0072B2", "#E69F00", "#8a939c"],
                    },
                    "legend": {"orient": "top"},
                },
                "tooltip": [
                    {"field": "label"},
                    {"field": "what"},
                    {"field": "seconds", "format": ".2f"},
                ],
            },
        },
    }
