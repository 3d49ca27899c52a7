"""The page of complete, partial, damaged and hostile folders."""

from __future__ import annotations

import json
import re
import shutil
import sys
from dataclasses import replace
from html.parser import HTMLParser

import pytest

import made
from gadam.report import ReportError, figures, page, tables
from gadam.runs import Experiment, collect, summary
from gadam.runs.files import write_json
from gadam.runs.verdict import verdicts


def data_of(html: str) -> dict:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', html, re.DOTALL)
    assert found
    return json.loads(found[1])


def test_the_numbers_match_the_records(tmp_path):
    collection = collect([made.sweep(tmp_path)])
    html = page.render(collection)
    for row in summary.summarize(collection.experiment, collection.results):
        assert str(row.iterate) in html
        assert row.average is None or str(row.average) in html
    (panel,) = data_of(html)["panels"]["curves"]
    curve = next(c for c in panel["curves"] if (c["label"], c["point"]) == ("Gadam", "average"))
    assert curve["epoch"] == [3, 4, 5, 6]
    assert curve["seeds"] == [3] * 4
    last = [run.epochs[-1].metric("accuracy", "average") for run in collection.runs_of("Gadam")]
    assert curve["value"][-1] == pytest.approx(sum(v for v in last if v) / 3, abs=1e-3)
    assert "75.73" in html
    assert "gadam reproduce made" in html
    assert not collection.problems


def test_the_answer_comes_first(tmp_path):
    collection = collect([made.sweep(tmp_path)])
    html = page.render(collection)
    (verdict,) = verdicts(collection.experiment, collection.results)
    assert verdict.best == "Gadam"
    assert f'<p class="verdict">{verdict.sentence()}</p>' in html
    places = [html.index(f'id="{name}"') for name in ("answer", "gains-0", "curves-0", "results")]
    assert places == sorted(places)


def test_each_task_has_its_own_panels_and_heading(tmp_path):
    made.sweep(tmp_path)
    true = {
        f"true labels: {row}": replace(recipe, data=replace(recipe.data, label_noise=0.3))
        for row, recipe in made.RECIPES.items()
    }
    for row, recipe in true.items():
        for seed in range(3):
            made.run(tmp_path / f"{row[-5:]}-{seed}-true", row, seed, recipe=recipe)
    bases = {"Gadam": "AdamW", "true labels: Gadam": "true labels: AdamW"}
    experiment = Experiment("made", "Made up", {**made.RECIPES, **true}, bases=bases)
    write_json(tmp_path / "experiment.json", experiment.to_dict())
    html = page.render(collect([tmp_path]))
    panels = data_of(html)["panels"]
    assert [len(panels[kind]) for kind in ("gains", "curves", "costs")] == [2, 2, 2]
    assert len(panels["rates"]) == 1  # they are the same in both tasks
    first, second = ({c["name"] for c in panel["curves"]} for panel in panels["curves"])
    assert first == second == {"AdamW", "Gadam"}
    colors = [panel["spec"]["layer"][0]["encoding"]["color"]["scale"] for panel in panels["curves"]]
    assert colors[0] == colors[1]
    assert html.count('<tr class="group">') >= 2
    assert "2 methods, 2 tasks, 3 seeds" in html


def test_one_run_is_complete_without_an_experiment(tmp_path):
    made.run(tmp_path / "gadam-0", "Gadam", 0)
    html = page.render(collect([tmp_path]))
    assert "1 of 1 run is finished: 1 method, 1 task, 1 seed." in html
    assert "So far" not in html
    made.run(tmp_path / "gadam-1", "Gadam", 1, epochs=2)
    assert "So far, Gadam is best" in page.render(collect([tmp_path]))


def test_a_running_sweep_shows_what_is_missing(tmp_path):
    made.sweep(tmp_path)
    shutil.rmtree(tmp_path / "gadam-2")
    shutil.rmtree(tmp_path / "gadam-1")
    made.run(tmp_path / "gadam-1", "Gadam", 1, epochs=2)
    collection = collect([tmp_path])
    assert any("1 of 6 runs has not started" in p for p in collection.problems)
    assert any("1 run is not finished" in p for p in collection.problems)
    html = page.render(collection)
    assert "at epoch 2 of 6" in html
    assert "4 of 6 runs are finished" in html


@pytest.mark.parametrize("name", ["run.json", "result.json"])
@pytest.mark.parametrize(
    "content", ["", "{", "[]", "{}", '{"recipe": 3, "seed": 1}', '{"status": 1}']
)
def test_a_damaged_record_is_named_and_skipped(tmp_path, name, content):
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
    assert any("1 damaged line" in problem for problem in collect([tmp_path]).problems)


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
def test_odd_values_do_not_break_the_report(tmp_path, file, change):
    made.sweep(tmp_path)
    path = tmp_path / "gadam-1" / file
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    collection = collect([tmp_path])
    html = page.render(collection)
    assert "AdamW" in html
    html.encode()
    figures.write_figures(collection, tmp_path / "out")
    tables.write_tables(collection, tmp_path / "out")
    if change == {"status": "diverged"}:
        assert "Gadam (1 diverged)" in html


def test_a_time_that_is_not_a_number_does_not_break_the_page(tmp_path):
    made.sweep(tmp_path)
    path = tmp_path / "gadam-1" / "epochs.jsonl"
    path.write_text(path.read_text().replace('"refresh": 0.2', '"refresh": null'))
    assert "Gadam" in page.render(collect([tmp_path]))


def test_a_folder_passed_twice_counts_once_and_experiments_are_kept_apart(tmp_path):
    one, two = made.sweep(tmp_path / "one"), made.sweep(tmp_path / "two")
    assert len(collect([one, tmp_path / "one", one / "gadam-0"]).runs) == 6
    description = json.loads((two / "experiment.json").read_text())
    changed = {**description, "title": "Another", "command": "gadam reproduce other"}
    (two / "experiment.json").write_text(json.dumps(changed))
    both = collect([one, two])
    assert len(both.labels) == 4
    assert both.experiment.bases["Another: Gadam"] == "Another: AdamW"
    html = page.render(both)
    assert "gadam reproduce other" in html
    assert "gadam reproduce made" in html


def test_empty_and_missing_folders(tmp_path):
    assert "There are no runs in these folders." in page.render(collect([tmp_path]))
    assert "is not a folder" in collect([tmp_path / "gone"]).problems[0]


class Tags(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self.found.append(tag)


def test_text_from_records_is_escaped(tmp_path):
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
    assert data_of(html)["panels"]["curves"][0]["curves"][0]["label"] == evil


def test_sections_are_on_the_page(tmp_path):
    made.sweep(tmp_path)
    folder = tmp_path / "sections"
    folder.mkdir()
    spec = {"mark": "bar", "data": {"values": []}}
    section = {"title": "Diversity", "blocks": [{"kind": "chart", "spec": spec}]}
    (folder / "diversity.json").write_text(json.dumps(section))
    html = page.render(collect([tmp_path]))
    assert "<h2>Diversity</h2>" in html
    assert data_of(html)["sections"] == [spec]


def test_only_a_served_page_may_connect(tmp_path):
    collection = collect([made.sweep(tmp_path)])
    assert "connect-src 'none'" in page.render(collection)
    assert "connect-src 'self'" in page.render(collection, live="version")


def test_a_hundred_runs_stay_below_5_mb_and_need_no_network(tmp_path):
    long = replace(made.RECIPES["Gadam"], epochs=300)
    for i in range(34):
        for seed in range(3):
            made.run(tmp_path / f"{i}-{seed}", f"method {i}", seed, recipe=long)
    html = page.render(collect([tmp_path]))
    assert len(html.encode()) < 5e6
    assert not re.search(r'(src|href)="(https?:)?//', html)


def test_a_missing_extra_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "vl_convert", None)
    page._vega.cache_clear()
    with pytest.raises(ReportError, match=r"pip install 'gadam\[report\]'"):
        page.render(collect([made.sweep(tmp_path)]))
