"""`gadam theory`: figures with their numbers and a page, and advice for a run."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import numpy as np
import pytest

import made
from gadam.commands import main
from gadam.runs.files import to_json
from gadam.runs.record import EpochRecord


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


@pytest.fixture
def long_run(tmp_path: Path) -> Path:
    """Return a run with a decaying loss of 40 epochs, then four at a lower learning rate."""
    folder = tmp_path / "run-0"
    made.run(folder, "Gadam", 0)
    rng = np.random.default_rng(0)
    lines = []
    for epoch in range(1, 45):
        loss = float(0.5 + 2 * np.exp(-epoch / 4) + 0.01 * rng.standard_normal())
        record = EpochRecord(
            epoch,
            lr=0.1 if epoch <= 40 else 0.01,
            train_loss=loss,
            iterate={"test": {"accuracy": 50.0, "loss": loss}},
            average={"test": {"accuracy": 50.0, "loss": loss - 0.25}},
        )
        lines.append(to_json(record.to_dict()) + "\n")
    (folder / "epochs.jsonl").write_text("".join(lines))
    return folder


def test_a_plan_from_a_run(long_run, capsys):
    assert main(["theory", "plan", str(long_run)]) == 0
    text = capsys.readouterr().out
    assert "Gadam, seed 0:" in text
    assert "Average from epoch" in text
    assert "the loss of the average is 0.25 below that of the last iterate" in text
    assert main(["theory", "plan", str(long_run), "--json"]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    printed = json.loads(line)
    assert (printed["event"], printed["run"], printed["seed"]) == ("plan", "Gadam", 0)
    assert printed["observed_gain"] == pytest.approx(0.25)
    advice = printed["advice"]
    # average.start counts the epochs before the first sampled one.
    assert f"set average.start={advice['first'] - 1}." in text
    assert 8 < advice["first"] < 30
    assert advice["time_constant"] == pytest.approx(4, rel=0.2)


def test_the_plan_prefers_the_validation_loss(long_run, capsys):
    path = long_run / "epochs.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    for line in lines:
        for point, loss in (("iterate", 0.7), ("average", 0.6)):
            line[point]["validation"] = {"loss": loss}
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    main(["theory", "plan", str(long_run), "--json"])
    printed = json.loads(capsys.readouterr().out)
    assert printed["observed_gain"] == pytest.approx(0.1)


def test_a_short_run_gets_no_advice(tmp_path, capsys):
    made.run(tmp_path / "short-0", "Gadam", 0)
    assert main(["theory", "plan", str(tmp_path / "short-0")]) == 0
    assert "No advice: There are fewer than 8 evaluations before the learning rate changes" in (
        capsys.readouterr().out
    )
    assert main(["theory", "plan", str(tmp_path / "short-0"), "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["advice"] is None
    assert "fewer than 8 evaluations" in printed["reason"]


def test_a_folder_without_runs_is_refused(tmp_path, capsys):
    assert main(["theory", "plan", str(tmp_path)]) == 2
    assert f"There are no runs in {tmp_path}." in capsys.readouterr().err
