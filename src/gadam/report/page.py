"""The page: one HTML file that needs no network."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from functools import cache
from html import escape
from importlib import resources
from typing import TypeAlias

from gadam.report import series, vega_specs
from gadam.report.errors import ReportError
from gadam.report.sections import render_sections
from gadam.report.style import COST_NAMES, POINT_NAMES, Style
from gadam.report.tables import costs_table, curves_table, results_table
from gadam.report.vega_specs import Spec
from gadam.runs import Collection
from gadam.runs.files import Json, nan_to_null
from gadam.runs.summary import TaskGroup, task_groups
from gadam.runs.verdict import Verdict, verdicts

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
    charts = _Charts(collection)
    sections, section_charts = render_sections(collection.sections)
    panels = {
        "gains": charts.gains(),
        "curves": charts.curves(),
        "rates": charts.rates(),
        "costs": charts.costs(),
    }
    data = {
        "panels": {kind: [panel for _, panel in found] for kind, found in panels.items()},
        "splits": list(charts.by_split),
        "sections": section_charts,
        "live": live,
    }
    values = {
        "title": escape(collection.title),
        "lead": escape(_lead(collection)),
        "answer": _answer(collection),
        "problems": _problems(collection),
        "table": results_table(collection),
        "methods": "".join(_checkbox(name, style) for name, style in charts.styles.items()),
        "split": _radio_buttons("split", list(charts.by_split)),
        "gains": _gains_section(panels["gains"]),
        "curves": _panels("curves", panels["curves"], "Learning curves", tall=True),
        "rates": _panels("rates", panels["rates"], "Learning rate by epoch"),
        "costs": _panels("costs", panels["costs"], "Seconds per epoch by method"),
        "curves-note": escape(charts.curves_note),
        "curves-table": curves_table(charts.shown_curves, charts.groups),
        "costs-table": costs_table(charts.all_costs, charts.groups),
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


# ------------------------------------------------------------------------------------------ charts

Panel: TypeAlias = tuple[str, Spec]  # the title of a task, and what page.js draws


class _Charts:
    """The charts of a collection, as small multiples: one panel per task."""

    def __init__(self, collection: Collection) -> None:
        self.collection = collection
        self.groups = [
            group
            for group in task_groups(collection.experiment)
            if set(group.names) & set(collection.labels)
        ]
        self.names = series.method_names(collection)
        self.styles = series.method_styles(collection)
        preferred = collection.experiment.split
        self.by_split = {
            split: curves
            for split in sorted(("test", "validation"), key=lambda split: split != preferred)
            if (curves := series.curves(collection, split))
        }
        self.shown_curves = next(iter(self.by_split.values()), [])
        self.all_costs = series.costs(collection)
        self.floors = {split: series.floors(collection, split) for split in self.by_split}

    @property
    def curves_note(self) -> str:
        """How to read the learning curves."""
        return (
            "Mean over seeds, with a band of one standard error. Solid lines with filled markers "
            "show the average of the iterates, dotted lines with open markers the last iterate. "
            "Hover for values."
            + (
                " The gray dotted line marks the best possible value."
                if any(self.floors.values())
                else ""
            )
        )

    def gains(self) -> list[Panel]:
        """Return the forest plots. Those with the same metric share their horizontal axis."""
        gains = series.gains(self.collection)
        metric_of = self.collection.experiment.metric_of
        found = []
        for group in self.groups:
            rows = [gain for gain in gains if gain.label in group.names]
            if not rows:
                continue
            metric = metric_of(rows[0].label)
            alike = [gain for gain in gains if metric_of(gain.label) == metric]
            domain = (
                min(0.0, *(gain.low for gain in alike)),
                max(0.0, *(gain.high for gain in alike)),
            )
            title = series.gain_title(metric)
            spec = vega_specs.gains_spec(rows, self.names, self.styles, title, domain)
            found.append((group.title, {"spec": spec}))
        return found

    def curves(self) -> list[Panel]:
        """Return the learning curves of both points."""
        found = []
        for group in self.groups:
            curves = [
                curve
                for by_split in self.by_split.values()
                for curve in by_split
                if curve.label in group.names
            ]
            metric = self.collection.experiment.metric_of(next(iter(group.names)))
            longest = max((len(curve.epoch) for curve in curves), default=0)
            panel = {
                "spec": vega_specs.curves_spec(self._methods(group), self.styles, longest),
                "titles": {split: series.axis_title(metric, split) for split in self.by_split},
                "floors": {
                    split: floors[metric]
                    for split, floors in self.floors.items()
                    if metric in floors
                },
                "curves": [
                    {
                        **asdict(curve),
                        "name": self.names[curve.label],
                        "point": POINT_NAMES[curve.point],
                    }
                    for curve in curves
                ],
            }
            found.append((group.title, panel))
        return found

    def rates(self) -> list[Panel]:
        """Return the learning rates. Tasks with the same ones share a panel."""
        rates = series.rates(self.collection)
        found: list[Panel] = []
        for group in self.groups:
            panel = {
                "spec": vega_specs.rates_spec(self._methods(group), self.styles),
                "rates": [
                    {"name": self.names[rate.label], "rate": rate.rate, "start": rate.start}
                    for rate in rates
                    if rate.label in group.names
                ],
            }
            found.append((group.title, panel))
        if len(found) > 1 and all(panel == found[0][1] for _, panel in found):
            return [("All tasks", found[0][1])]
        return found

    def costs(self) -> list[Panel]:
        """Return the costs."""
        found = []
        for group in self.groups:
            panel = {
                "spec": vega_specs.costs_spec(self._methods(group)),
                "costs": [
                    {
                        "name": self.names[cost.label],
                        "seconds": {
                            COST_NAMES.get(activity, activity): seconds
                            for activity, seconds in cost.seconds.items()
                        },
                    }
                    for cost in self.all_costs
                    if cost.label in group.names
                ],
            }
            found.append((group.title, panel))
        return found

    def _methods(self, group: TaskGroup) -> list[str]:
        return list(dict.fromkeys(self.names[row] for row in group.names if row in self.names))


def _panels(kind: str, panels: Sequence[Panel], what: str, *, tall: bool = False) -> str:
    """Return the boxes that page.js draws into: ``#KIND-0``, ``#KIND-1``, …."""
    figures = "".join(
        f"<figure><h3>{escape(title)}</h3>"
        f'<div class="chart{" tall" * tall}" id="{kind}-{i}" role="img" '
        f'aria-label="{escape(f"{what}: {title}")}"></div></figure>'
        for i, (title, _) in enumerate(panels)
    )
    return f'<div class="panels">{figures}</div>'


def _gains_section(panels: Sequence[Panel]) -> str:
    if not panels:
        return ""
    return (
        '<section aria-labelledby="gains-heading"><h2 id="gains-heading">What averaging gains</h2>'
        + _panels("gains", panels, "Gains")
        + '<p class="note">Gain of each method over its base on test data, paired by seed, with '
        "its 95% confidence interval. To the right of zero, the method is better than its base. A "
        "filled marker means that the interval excludes zero.</p></section>"
    )


# ------------------------------------------------------------------------------------------ pieces


def _answer(collection: Collection) -> str:
    """Return one sentence per task."""
    found = _verdicts(collection)
    if not found:
        return ""
    sentences = "".join(
        f'<h3>{escape(verdict.task)}</h3><p class="verdict">{escape(verdict.sentence())}</p>'
        for verdict in found
    )
    on_validation = any(verdict.chosen_on == "validation" for verdict in found)
    note = (
        "The best method is chosen on validation data. All numbers here are from test data."
        if on_validation
        else "All numbers here are from test data."
    )
    return (
        '<section id="answer" aria-labelledby="answer-heading">'
        f'<h2 id="answer-heading">Answer</h2>{sentences}<p class="note">{note}</p></section>'
    )


def _verdicts(collection: Collection) -> list[Verdict]:
    """Return the verdicts. If all runs have started, count those that have not ended."""
    experiment = collection.experiment
    found = verdicts(experiment, collection.results)
    if collection.expected > len(collection.runs):
        return found
    groups = {group.title: group.names for group in task_groups(experiment)}
    return [
        replace(
            verdict,
            missing=sum(
                run.result is None and not run.failure
                for run in collection.runs
                if run.label in groups[verdict.task]
            ),
        )
        for verdict in found
    ]


def _lead(collection: Collection) -> str:
    finished = sum(run.result is not None for run in collection.runs)
    total = max(len(collection.runs), collection.expected)
    if not total:
        return ""
    methods = _count(len(set(series.method_names(collection).values())), "method")
    tasks = _count(len(task_groups(collection.experiment)), "task")
    seeds = _count(len({run.seed for run in collection.runs}), "seed")
    runs = "1 run is" if total == 1 else f"{total} runs are"
    note = collection.experiment.note
    return f"{finished} of {runs} finished: {methods}, {tasks}, {seeds}. {note}".strip()


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _problems(collection: Collection) -> str:
    if not collection.problems and (collection.runs or collection.sections):
        return ""
    sentences = collection.problems or ("There are no runs in these folders.",)
    items = "".join(f"<li>{escape(sentence)}</li>" for sentence in sentences)
    return f'<div class="problems" role="status"><strong>Warnings</strong><ul>{items}</ul></div>'


def _radio_buttons(name: str, values: Sequence[str]) -> str:
    """Return radio buttons with the first one selected, or nothing if there is no choice."""
    if len(values) < 2:
        return ""
    buttons = "".join(
        f'<label><input type="radio" name="{name}" value="{escape(value)}"{" checked" * (i == 0)}> '
        f"{escape(value)}</label>"
        for i, value in enumerate(values)
    )
    return f"<fieldset><legend>{name}</legend>{buttons}</fieldset>"


def _checkbox(name: str, style: Style) -> str:
    return (
        f'<label><input type="checkbox" name="method" value="{escape(name)}" checked>'
        f'<span class="swatch {style.shape}" style="background:{style.color}"></span>'
        f"{escape(name)}</label>"
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
            f'<details data-keep="recipe of {escape(label)}">'
            f"<summary>{escape(label)}: {escape(states)}</summary>"
            f"<pre>{escape(recipe)}</pre></details>"
        )
    return "".join(parts)
