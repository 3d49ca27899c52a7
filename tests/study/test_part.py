"""Parts are found by themselves: one file adds one."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path

import pytest

import gadam.study
from gadam import commands
from gadam.commands import analyze
from gadam.runs import Average, Data, Optimizer, Recipe, Schedule
from gadam.study import find, parts
from gadam.train.loop import train

DUMMY = '''
from gadam.study.part import Part, Unit


class DummyPart(Part):
    """Count the parameters of the last iterate."""

    name = "dummy"
    order = 15
    title = "Number of parameters, as a dummy"

    def units(self, study):
        def count():
            return {"count": sum(p.numel() for p in study.points.load("iterate").parameters())}

        key = {"what": "dummy", "of": study.points.identity("iterate")}
        return [Unit("dummy", key, count)]

    def report(self, measured, section):
        values = measured.by_row("dummy")
        if values:
            section.table(["method", "count"], [[r, str(v[0]["count"])] for r, v in values.items()])
            section.summary = {row: v[0] for row, v in values.items()}
'''
RECIPE = Recipe(
    "small",
    model="vgg-mini",
    data=Data("fashion-mini", examples=200, validation=50, size=8, augment=False),
    optimizer=Optimizer("adamw", 0.01, 0.1),
    schedule=Schedule("constant"),
    average=Average(0),
    epochs=1,
)


def sweep_in_this_process(jobs, listener, workers):
    return {job: job.run(lambda *_: None, print, lambda: False) for job in jobs}


@pytest.fixture
def dummy(tmp_path, monkeypatch):
    """Add a part with one file, in a folder that the package searches too."""
    folder = tmp_path / "more_parts"
    folder.mkdir()
    (folder / "dummy.py").write_text(DUMMY)
    monkeypatch.setattr(gadam.study, "__path__", [*gadam.study.__path__, str(folder)])
    # Other processes do not search the folder.
    monkeypatch.setattr(analyze, "sweep", sweep_in_this_process)
    importlib.invalidate_caches()
    yield
    sys.modules.pop("gadam.study.dummy", None)
    vars(gadam.study).pop("dummy", None)


def test_parts_are_complete_and_in_order():
    found = parts()
    assert list(found) == [
        "diversity",
        "ensemble",
        "networks",
        "rate",
        "parameters",
        "curvature",
        "density",
        "landscape",
        "prediction",
    ]
    for name, part in found.items():
        assert part.name == name
        assert type(part).__module__ == f"gadam.study.{name}"
        assert part.title[0].isupper()
        assert not part.title.endswith(".")
    assert len({part.order for part in found.values()}) == len(found)


def test_parts_are_found_by_name_each_once():
    assert [part.name for part in find(["rate", "density", "rate"])] == ["rate", "density"]


def test_one_file_adds_a_part(dummy, tmp_path: Path, capsys):
    assert list(parts())[:3] == ["diversity", "dummy", "ensemble"]
    with pytest.raises(SystemExit):
        commands.main(["analyze", "--help"])
    assert "Number of parameters, as a dummy" in capsys.readouterr().out
    train(RECIPE, tmp_path / "run", label="Gadam")
    assert commands.main(["analyze", str(tmp_path / "run"), "--parts", "dummy", "--quiet"]) == 0
    assert "72666" in capsys.readouterr().out
    content = json.loads((tmp_path / "run" / "analysis.json").read_text())
    assert content["parts"]["dummy"]["values"] == {"Gadam": {"count": 72666}}
    (line,) = (tmp_path / "run" / "analysis.jsonl").read_text().splitlines()
    assert json.loads(line)["value"] == {"count": 72666}
    assert "Number of parameters, as a dummy" in (tmp_path / "run" / "report.html").read_text()


def test_a_removed_file_removes_its_part():
    assert "dummy" not in parts()
