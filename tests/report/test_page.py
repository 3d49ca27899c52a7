"""What the report says of whole, partial, damaged and hostile folders."""

from __future__ import annotations

import csv
import json
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from html.parser import HTMLParser
from typing import Any

import pytest

import made
from gadam import cli
from gadam.report import figures, page, series
from gadam.report.records import collect
from gadam.train import summary


def data_of(html: str) -> dict:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', html, re.DOTALL)
    assert found
    return json.loads(found[1])


def test_the_numbers_are_the_records(tmp_path):
    collection = collect([made.sweep(tmp_path)])
    html = page.render(collection)
    for row in summary.rows(collection.experiment, collection.results):
        assert str(row.iterate) in html
        assert row.average is None or str(row.average) in html
    curve = next(
        c for c in data_of(html)["curves"] if (c["label"], c["point"]) == ("Gadam", "average")
    )
    assert curve["epoch"] == [3, 4, 5, 6]
    assert curve["seeds"] == [3] * 4
    last = [
        run.lines[-1]["average"]["test"]["accuracy"]
        for run in collection.runs
        if run.label == "Gadam"
    ]
    assert curve["value"][-1] == pytest.approx(100 - sum(last) / 3, abs=1e-3)
    assert "75.73" in html
    assert "gadam reproduce made" in html
    assert not collection.problems


def test_averaging_starts_where_it_is_marked(tmp_path):
    rates = {r["label"]: r for r in series.rates(collect([made.sweep(tmp_path)]))}
    assert rates["Gadam"]["start"] == 2
    assert rates["AdamW"]["start"] is None
    assert rates["AdamW"]["rate"][0] == pytest.approx(0.01)
    assert rates["AdamW"]["rate"][-1] < 0.01


def test_a_running_sweep_says_what_is_missing(tmp_path):
    made.sweep(tmp_path)
    shutil.rmtree(tmp_path / "gadam-2")
    shutil.rmtree(tmp_path / "gadam-1")
    made.run(tmp_path / "gadam-1", "Gadam", 1, epochs=2)
    collection = collect([tmp_path])
    assert any("1 of 6 runs have not begun" in p for p in collection.problems)
    assert any("1 runs are not finished" in p for p in collection.problems)
    html = page.render(collection)
    assert "at epoch 2 of 6" in html
    assert "4 of 6 runs are finished" in html


@pytest.mark.parametrize("name", ["run.json", "result.json"])
@pytest.mark.parametrize(
    "content", ["", "{", "[]", "{}", '{"recipe": 3, "seed": 1}', '{"status": 1}']
)
def test_a_damaged_record_is_named_and_passed_over(tmp_path, name, content):
    made.sweep(tmp_path)
    (tmp_path / "gadam-1" / name).write_text(content)
    collection = collect([tmp_path])
    assert any("gadam-1" in problem for problem in collection.problems)
    html = page.render(collection)
    assert "damaged" in html
    assert "AdamW" in html


def test_a_failed_run_is_named_with_its_reason(tmp_path):
    made.sweep(tmp_path)
    (tmp_path / "gadam-1" / "result.json").unlink()
    (tmp_path / "gadam-1" / "failure.json").write_text(json.dumps({"reason": "no <memory>"}))
    html = page.render(collect([tmp_path]))
    assert "Gadam, seed 1 failed: no &lt;memory&gt;" in html


def test_a_torn_line_is_named(tmp_path):
    made.sweep(tmp_path)
    with (tmp_path / "gadam-1" / "epochs.jsonl").open("a") as file:
        file.write("torn\n")
    assert any("1 damaged lines" in problem for problem in collect([tmp_path]).problems)


@pytest.mark.parametrize(
    ("file", "change"),
    [
        ("result.json", {"iterate": {"test": {"accuracy": None}}}),
        ("result.json", {"iterate": {"test": {}}}),
        ("result.json", {"seconds": 3}),
        ("result.json", {"status": "diverged"}),
        ("run.json", {"label": "$\\frac{$ \ud800 " + "x" * 5000}),
        ("run.json", {"label": "_hidden|\n"}),
    ],
)
def test_odd_values_do_not_take_the_report_with_them(tmp_path, file, change):
    made.sweep(tmp_path)
    path = tmp_path / "gadam-1" / file
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    collection = collect([tmp_path])
    assert "AdamW" in page.render(collection)
    page.render(collection).encode()
    figures.write_figures(collection, tmp_path / "out")
    figures.write_tables(collection, tmp_path / "out")
    if change == {"status": "diverged"}:
        assert "Gadam (1 diverged)" in page.render(collection)


def test_the_same_folder_twice_counts_once_and_experiments_are_told_apart(tmp_path):
    one, two = made.sweep(tmp_path / "one"), made.sweep(tmp_path / "two")
    assert len(collect([one, tmp_path / "one", one / "gadam-0"]).runs) == 6
    description = json.loads((two / "experiment.json").read_text())
    changed = {**description, "title": "Another", "command": "gadam reproduce other"}
    (two / "experiment.json").write_text(json.dumps(changed))
    both = collect([one, two])
    assert len(both.labels) == 4
    assert both.experiment.bases["Another: Gadam"] == "Another: AdamW"
    assert "gadam reproduce other" in page.render(both)
    assert "gadam reproduce made" in page.render(both)


def test_nothing_at_all(tmp_path):
    assert "there are no runs here" in page.render(collect([tmp_path]))
    assert "is not a folder" in collect([tmp_path / "gone"]).problems[0]
    assert cli.main(["report", str(tmp_path)]) == 2


class Tags(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self.found.append(tag)


def test_text_from_recipes_is_only_text(tmp_path):
    evil = "</script><img src=x onerror=alert(1)>&@@data@@"
    recipe = replace(made.RECIPES["AdamW"], model=evil)
    made.run(tmp_path / "evil-0", evil, 0, recipe=recipe)
    odd = [{"kind": evil}, 3, {"kind": "table", "rows": [3]}, {"kind": "image", "file": "\0"}]
    section = {"title": evil, "blocks": [{"kind": "text", "text": evil}, *odd]}
    (tmp_path / "sections").mkdir()
    (tmp_path / "sections" / "x.json").write_text(json.dumps(section))
    html = page.render(collect([tmp_path]))
    tags = Tags()
    tags.feed(html)
    assert "img" not in tags.found
    assert html.count("<script") == 3
    assert data_of(html)["curves"][0]["label"] == evil


def test_sections_come_from_other_parts(tmp_path):
    made.sweep(tmp_path)
    folder = tmp_path / "sections"
    folder.mkdir()
    (folder / "picture.png").write_bytes(b"\x89PNG")
    (tmp_path / "secret.png").write_bytes(b"secret")
    blocks: list[dict[str, Any]] = [
        {"kind": "text", "text": "Iterates are far apart."},
        {"kind": "table", "header": ["a", "b"], "rows": [["x", 1.5]]},
        {"kind": "chart", "spec": {"mark": "bar", "data": {"values": []}}, "caption": "bars"},
        {"kind": "image", "file": "picture.png", "caption": "a picture"},
        {"kind": "image", "file": "../secret.png"},
    ]
    (folder / "diversity.json").write_text(json.dumps({"title": "Diversity", "blocks": blocks}))
    html = page.render(collect([tmp_path]))
    assert "<h2>Diversity</h2>" in html
    assert "Iterates are far apart." in html
    assert "data:image/png" in html
    assert "cannot be shown" in html
    assert data_of(html)["sections"] == [blocks[2]["spec"]]
    assert "connect-src 'none'" in html


def test_a_hundred_runs_stay_below_5_mb_and_need_no_network(tmp_path):
    long = replace(made.RECIPES["Gadam"], epochs=300)
    for i in range(34):
        for seed in range(3):
            made.run(tmp_path / f"{i}-{seed}", f"method {i}", seed, recipe=long)
    html = page.render(collect([tmp_path]))
    assert len(html.encode()) < 5e6
    assert not re.search(r'(src|href)="(https?:)?//', html)
    styles = series.styles([f"method {i}" for i in range(24)])
    looks = {(s.colour, p, s.dashes[p]) for s in styles.values() for p in series.POINTS}
    assert len(looks) == 48


def test_figures_and_tables_are_written(tmp_path):
    collection = collect([made.sweep(tmp_path / "runs")])
    paths = figures.write_figures(collection, tmp_path / "out")
    assert {p.name for p in paths} == {
        f"{n}.{e}" for n in ("curves", "rates", "costs") for e in ("png", "svg")
    }
    assert (tmp_path / "out" / "curves.png").read_bytes().startswith(b"\x89PNG")
    again = figures.write_figures(collection, tmp_path / "again")
    assert all(a.read_bytes() == b.read_bytes() for a, b in zip(paths, again))
    figures.write_tables(collection, tmp_path / "out")
    rows = list(csv.DictReader((tmp_path / "out" / "table.csv").read_text().splitlines()))
    table = summary.rows(collection.experiment, collection.results)
    assert [row["method"] for row in rows] == ["AdamW", "Gadam"]
    assert table[1].average is not None
    assert float(rows[1]["average_mean"]) == table[1].average.mean
    latex = (tmp_path / "out" / "table.tex").read_text()
    assert r"95 \% interval" in latex
    assert latex.count(r"\\") == 3


def test_the_command_writes_and_says_where(tmp_path, capsys):
    made.sweep(tmp_path / "runs")
    assert cli.main(["report", str(tmp_path / "runs"), "--out", str(tmp_path / "out")]) == 0
    assert str(tmp_path / "out" / "report.html") in capsys.readouterr().out
    assert (tmp_path / "out" / "figures" / "curves.svg").exists()
    assert not (tmp_path / "runs" / "report.html").exists()


def test_a_missing_extra_is_named(tmp_path):
    made.sweep(tmp_path)
    program = (
        "import sys; sys.modules['vl_convert'] = None; from gadam import cli;"
        f"sys.exit(cli.main(['report', {str(tmp_path)!r}]))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 2
    assert "pip install 'gadam[report]'" in done.stderr
