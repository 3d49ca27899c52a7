"""`gadam theory`: figures with their numbers and a page, and advice for a run."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

import made
from gadam.commands import main
from gadam.runs.recipe import Data, Optimizer, Recipe
from gadam.train.loop import train


def test_writes_figures_numbers_and_a_page(tmp_path, capsys):
    assert main(["theory", "stride", "--out", str(tmp_path)]) == 0
    text = capsys.readouterr().out
    assert "increases the variance by only about 10%" in text
    assert f"The figures are in {tmp_path}. The page is {tmp_path / 'report.html'}." in text
    assert (tmp_path / "stride.png").read_bytes().startswith(b"\x89PNG")
    ElementTree.parse(tmp_path / "stride.svg")
    assert "mathdefault" not in (tmp_path / "stride.svg").read_text()
    numbers = json.loads((tmp_path / "stride.json").read_text())
    assert {s["kind"] for s in numbers["series"]} == {"prediction", "simulation", "printed"}
    section = json.loads((tmp_path / "sections" / "theory-stride.json").read_text())
    assert section["blocks"][0]["kind"] == "chart"
    page = (tmp_path / "report.html").read_text()
    assert section["title"] in page
    assert "Learning curves" not in page
    assert 'class="problems"' not in page


def test_json_has_the_numbers_of_the_file(tmp_path, capsys):
    assert main(["theory", "ema", "--json", "--seed", "3", "--out", str(tmp_path)]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    printed = json.loads(line)
    assert printed.pop("event") == "figure"
    assert printed == json.loads((tmp_path / "ema.json").read_text())


def test_a_section_joins_the_runs_of_a_folder(tmp_path):
    made.run(tmp_path / "gadam-0", "Gadam", 0)
    assert main(["theory", "stride", "--out", str(tmp_path)]) == 0
    page = (tmp_path / "report.html").read_text()
    section = json.loads((tmp_path / "sections" / "theory-stride.json").read_text())
    assert "Learning curves" in page
    assert section["title"] in page


def test_a_folder_that_cannot_be_written_is_refused_before_any_work(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    assert main(["theory", "ema", "--out", str(tmp_path / "file")]) == 2
    captured = capsys.readouterr()
    assert "could not be written" in captured.err
    assert captured.out == ""


# ------------------------------------------------------------------------------------------ plan


def test_a_plan_needs_a_measurement(tmp_path, capsys):
    made.run(tmp_path / "run-0", "Gadam", 0)
    assert main(["theory", "plan", str(tmp_path / "run-0")]) == 2
    assert "Nothing has been measured in" in (printed := capsys.readouterr().err)
    assert "Pass --measure." in printed


@pytest.mark.slow
def test_a_measured_plan_gives_advice_and_resumes(trained, capsys):
    """The first command measures. The others only read what it measured."""
    command = ["theory", "plan", str(trained), "--measure", "--epochs", "2", "--workers", "1"]
    assert main(command) == 0
    text = capsys.readouterr().out
    assert "The lowest is that of the" in text
    assert "average.start=" in text
    lines = (trained / "analysis.jsonl").read_text()
    assert main(command) == 0
    assert (trained / "analysis.jsonl").read_text() == lines
    assert main(["theory", "plan", str(trained)]) == 0
    assert "The lowest is that of the" in capsys.readouterr().out.rsplit("Report:", 1)[-1]
    assert main(["theory", "plan", str(trained), "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["event"] == "plan"
    assert {"last iterate", "average", "EMA", "decayed rate"} < set(printed["points"])
    for point in printed["points"].values():
        assert len(point["measured"]) == 2
        assert point["interval"] > 0
    section = json.loads((trained / "sections" / "analysis-prediction.json").read_text())
    charts = [block for block in section["blocks"] if block["kind"] == "chart"]
    assert len(charts) == 2


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    """Return a run of logistic regression, which the theory describes well."""
    folder = tmp_path_factory.mktemp("runs") / "logistic-0"
    recipe = Recipe(
        "logistic",
        "logistic",
        Data(examples=400, augment=False),
        Optimizer("sgd", 0.01),
        epochs=4,
        batch_size=50,
        evaluate_every=4,
    )
    train(recipe, folder)
    return folder


def test_a_folder_without_runs_is_refused(tmp_path, capsys):
    assert main(["theory", "plan", str(tmp_path)]) == 2
    assert f"There are no runs in {tmp_path}." in capsys.readouterr().err
