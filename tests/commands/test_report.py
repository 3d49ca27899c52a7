"""The command `gadam report`."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

import made
from gadam.commands import main
from gadam.commands.report import run
from gadam.report import ReportError


def test_writes_the_report_and_prints_its_path(tmp_path, capsys):
    made.sweep(tmp_path / "runs")
    assert run([str(tmp_path / "runs"), "--out", str(tmp_path / "out")]) == 0
    assert str(tmp_path / "out" / "report.html") in capsys.readouterr().out
    assert (tmp_path / "out" / "figures" / "curves.svg").exists()
    assert not (tmp_path / "runs" / "report.html").exists()


def test_says_what_it_found_and_writes_only_into_the_folder(tmp_path, capsys):
    made.sweep(tmp_path / "mine" / "sweep")
    made.run(tmp_path / "mine" / "too" / "far" / "below" / "run", "Gadam", 9)
    made.sweep(tmp_path / "other")
    before = set(tmp_path.rglob("*"))
    assert run([str(tmp_path / "mine"), "--no-figures"]) == 0
    assert f"Found 6 runs (all finished) in {tmp_path / 'mine'}.\n" in capsys.readouterr().out
    assert set(tmp_path.rglob("*")) - before == {tmp_path / "mine" / "report.html"}


def test_json_prints_one_object_per_line(tmp_path, capsys):
    made.sweep(tmp_path)
    assert run([str(tmp_path), "--json", "--no-figures"]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    assert json.loads(line) == {"event": "report", "page": str(tmp_path / "report.html")}
    assert not (tmp_path / "figures").exists()


def test_help_names_the_arguments(capsys):
    with pytest.raises(SystemExit) as stopped:
        run(["--help"])
    assert stopped.value.code == 0
    shown = capsys.readouterr().out
    assert "DIR [DIR ...]" in shown
    assert "None" not in shown


def test_a_folder_is_required():
    with pytest.raises(ReportError, match="Name at least one folder"):
        run([])


def test_serving_a_missing_folder_is_an_error(tmp_path):
    with pytest.raises(ReportError, match="is not a folder"):
        run([str(tmp_path / "missing"), "--serve"])


def test_errors_exit_with_2(tmp_path, capsys):
    assert main(["report", str(tmp_path)]) == 2
    assert "Nothing to report" in capsys.readouterr().err


def test_a_missing_extra_is_named(tmp_path):
    made.sweep(tmp_path)
    program = (
        "import sys; sys.modules['vl_convert'] = None; from gadam.commands import main;"
        f"sys.exit(main(['report', {str(tmp_path)!r}]))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 2
    assert "pip install 'gadam[report]'" in done.stderr
