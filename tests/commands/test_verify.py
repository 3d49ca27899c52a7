"""`gadam verify`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import made
from gadam.commands import main

RESULTS = Path(__file__).parents[2] / "results"


def test_an_intact_sweep(tmp_path, capsys):
    made.sweep(tmp_path, sealed=True)
    assert main(["verify", str(tmp_path)]) == 0
    assert capsys.readouterr().out == "6 runs: 6 match their manifest. No problems.\n"


def test_a_changed_file_is_named_and_ends_with_code_1(tmp_path, capsys):
    made.sweep(tmp_path, sealed=True)
    made.run(tmp_path / "new", "Gadam", 7, epochs=2, sealed=True)
    made.run(tmp_path / "old", "Gadam", 8)
    path = tmp_path / "gadam-1" / "result.json"
    path.write_text(path.read_text().replace("9", "8"))
    assert main(["verify", str(tmp_path)]) == 1
    captured = capsys.readouterr()
    assert captured.out == (
        f"{path} does not match manifest.json: it was changed after the run finished.\n"
    )
    assert captured.err == (
        "8 runs: 5 match their manifest, 1 is not finished, 1 was written by a version without "
        "manifests, 1 does not match. 1 problem.\n"
    )


def test_json_prints_one_object_per_line(tmp_path, capsys):
    made.sweep(tmp_path, seeds=1, sealed=True)
    (tmp_path / "adamw-0" / "epochs.jsonl").unlink()
    (tmp_path / "experiment.json").write_text("{")
    assert main(["verify", str(tmp_path), "--json"]) == 1
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["event"] for line in lines] == ["run", "run", "file", "summary"]
    assert [len(line["problems"]) for line in lines[:3]] == [1, 0, 1]
    assert lines[1] == {
        "event": "run",
        "folder": str(tmp_path / "gadam-0"),
        "state": "finished",
        "problems": [],
    }
    counts = {"finished": 1, "unfinished": 0, "unverified": 0, "wrong": 1, "problems": 2}
    assert lines[3] == {"event": "summary", **counts}


@pytest.mark.parametrize("name", ["compare", "tab-ptb"])
def test_committed_results_have_no_problems(tmp_path, capsys, name):
    from gadam.runs.archive import opened

    with opened(RESULTS / f"{name}.json") as folder:
        assert main(["verify", str(folder)]) == 0
    assert "No problems." in capsys.readouterr().out


def test_nothing_to_check_is_an_error(tmp_path, capsys):
    assert main(["verify", str(tmp_path)]) == 2
    assert main(["verify", str(tmp_path / "missing")]) == 2
    errors = capsys.readouterr().err
    assert "There are no runs in" in errors
    assert "is not a folder" in errors
