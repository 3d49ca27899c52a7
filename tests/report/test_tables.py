"""Tables on the page and in files."""

from __future__ import annotations

import csv

import made
from gadam.report import series, tables
from gadam.runs import collect, summary


def test_html_is_escaped_and_the_best_cell_is_marked():
    html = tables.html_table(["a", "<b>"], [["x", "<1>"], ["y", "2"]], "c & d", best=[(1, 1)])
    assert '<td data-label="&lt;b&gt;"><span>&lt;1&gt;</span></td>' in html
    assert '<tr class=best><th scope="row">y</th><td data-label="&lt;b&gt;" class="best">' in html
    assert "c &amp; d" in html


def test_rows_stand_below_the_headings_of_their_groups():
    html = tables.html_table(["a"], [["x"], ["y"], ["z"]], groups={0: "<one>", 2: "two"})
    assert html.count("<tbody>") == html.count("</tbody>") == 2
    places = [html.index(f">{text}<") for text in ("&lt;one&gt;", "x", "y", "two", "z")]
    assert places == sorted(places)


def test_the_results_table_marks_the_best_method(tmp_path):
    html = tables.results_table(collect([made.sweep(tmp_path)]))
    assert "75.73" in html
    assert "over AdamW" in html
    assert html.count("<tr class=best>") == 1
    assert '<tr class=best><th scope="row">Gadam</th>' in html


def test_the_results_table_without_results(tmp_path):
    made.run(tmp_path / "adamw-0", "AdamW", 0, epochs=1)
    assert "No run has finished yet." in tables.results_table(collect([tmp_path]))


def test_the_other_tables_have_a_row_per_curve_and_method(tmp_path):
    collection = collect([made.sweep(tmp_path)])
    groups = summary.task_groups(collection.experiment)
    curves, costs = series.curves(collection), series.costs(collection)
    html = tables.curves_table(curves, groups)
    assert html.count("<tr>") == 1 + len(curves)
    assert "<span>last iterate</span>" in html
    html = tables.costs_table(costs, groups)
    assert html.count("<tr>") == 1 + len(costs)
    assert "<span>1,234</span>" in html
    assert "<span>3 MB</span>" in html


def test_files_hold_the_numbers_of_the_summary(tmp_path):
    collection = collect([made.sweep(tmp_path / "runs")])
    tables.write_tables(collection, tmp_path / "out")
    rows = list(csv.DictReader((tmp_path / "out" / "table.csv").read_text().splitlines()))
    table = summary.summarize(collection.experiment, collection.results)
    assert [row["method"] for row in rows] == ["AdamW", "Gadam"]
    assert table[1].average is not None
    assert float(rows[1]["average_mean"]) == table[1].average.mean
    latex = (tmp_path / "out" / "table.tex").read_text()
    assert r"95\% interval" in latex
    assert latex.count(r"\\") == 3
    markdown = (tmp_path / "out" / "table.md").read_text()
    assert markdown == summary.to_markdown(collection.experiment, table) + "\n"
