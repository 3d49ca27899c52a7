"""`gadam theory`: its figures show prediction and simulation in agreement."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import numpy as np
import pytest

import made
from gadam.cli import main
from gadam.report.theory_figures import FIGURES

WANTED = {
    "shell",
    "dimension",
    "dependence",
    "stride",
    "ema",
    "preconditioning",
    "batch-growth",
}


def test_every_figure_of_the_story_is_there():
    assert set(FIGURES) == WANTED


@pytest.mark.parametrize("name", sorted(WANTED))
def test_simulation_lies_on_its_prediction(name):
    """Each point within five standard errors of the line, which has a knot there."""
    picture = FIGURES[name](1)
    lines = {s.label: s for s in picture.series if s.kind == "prediction"}
    points = [s for s in picture.series if s.kind == "simulation"]
    assert points
    for s in points:
        line = lines[s.label]
        x, knots = (np.log(v) if picture.log_x else np.array(v) for v in (s.x, line.x))
        assert all(np.isclose(knots, at).any() for at in x)
        expected = np.exp(np.interp(x, knots, np.log(line.y)))
        # Of the mean field and the features: 1/P + P/M.
        systematic = 0.03 if name == "dependence" else 0.0
        error = np.hypot(s.error, systematic * expected)
        assert np.abs((np.array(s.y) - expected) / error).max() < 5, s.label


def test_the_command_writes_pictures_numbers_and_a_page(tmp_path, capsys):
    assert main(["theory", "stride", "--out", str(tmp_path)]) == 0
    assert "a stride of 1/αλ costs a tenth" in capsys.readouterr().out
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
    assert "Not all is here" not in page


def test_json_is_for_programs(tmp_path, capsys):
    assert main(["theory", "ema", "--json", "--seed", "3", "--out", str(tmp_path)]) == 0
    assert json.loads(capsys.readouterr().out)["name"] == "ema"


def test_a_section_joins_the_runs_of_a_folder(tmp_path):
    made.run(tmp_path / "gadam-0", "Gadam", 0)
    assert main(["theory", "stride", "--out", str(tmp_path)]) == 0
    page = (tmp_path / "report.html").read_text()
    assert "Learning curves" in page
    assert "A stride costs little" in page


def test_mistakes_get_a_sentence(tmp_path, capsys):
    assert main(["theory", "strid"]) == 2
    assert "did you mean 'stride'?" in capsys.readouterr().err
    assert main(["theory", "plan", str(tmp_path)]) == 2
    assert "holds no run" in capsys.readouterr().err
    assert main(["theory", "plan", str(tmp_path / "nowhere")]) == 2
    assert "is not a folder" in capsys.readouterr().err
    (tmp_path / "file").write_text("")
    assert main(["theory", "ema", "--out", str(tmp_path / "file")]) == 2
    assert "cannot be written to" in capsys.readouterr().err
    for wrong in (["ema", "--seed", "-1"], ["ema", "extra"], ["plan"]):
        with pytest.raises(SystemExit) as stop:
            main(["theory", *wrong])
        assert stop.value.code == 2
    made.run(tmp_path / "short-0", "Gadam", 0)
    capsys.readouterr()
    assert main(["theory", "plan", str(tmp_path / "short-0")]) == 0
    assert "No advice: there are fewer than 8 evaluations" in capsys.readouterr().out


def test_a_plan_from_a_run(tmp_path: Path, capsys):
    folder = tmp_path / "run-0"
    made.run(folder, "Gadam", 0)
    random = np.random.default_rng(0)
    lines = [json.loads((folder / "epochs.jsonl").read_text().splitlines()[0])]
    template = lines[0]
    written = []
    for epoch in range(1, 45):
        loss = 0.5 + 2 * np.exp(-epoch / 4) + 0.01 * random.standard_normal()
        line = {**template, "epoch": epoch, "lr": 0.1 if epoch <= 40 else 0.01}
        line["iterate"] = {"test": {"accuracy": 50.0, "loss": float(loss)}}
        line["average"] = {"test": {"accuracy": 50.0, "loss": float(loss) - 0.25}}
        written.append(json.dumps(line))
    (folder / "epochs.jsonl").write_text("\n".join(written) + "\n")
    assert main(["theory", "plan", str(folder)]) == 0
    said = capsys.readouterr().out
    assert "Average from epoch" in said
    assert "its average's loss is 0.25 below" in said
    assert main(["theory", "plan", str(folder), "--json"]) == 0
    advice = json.loads(capsys.readouterr().out)["advice"]
    # average.start counts the epochs before the first sampled one.
    assert f"average.start={advice['first'] - 1}." in said
    assert 8 < advice["first"] < 30
    assert advice["time_constant"] == pytest.approx(4, rel=0.2)
