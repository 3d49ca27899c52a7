"""The documentation says what the committed results say."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from gadam.runs.archive import FORMAT, opened, read_archive
from gadam.runs.collect import collect
from gadam.runs.files import to_json
from gadam.runs.summary import summarize, to_dict

ROOT = Path(__file__).parents[1]
SWEEPS = [
    path
    for path in sorted((ROOT / "results").glob("*.json"))
    if path.name != "theory.json" and json.loads(path.read_text()).get("format") == FORMAT
]


@pytest.fixture
def tables(monkeypatch):
    monkeypatch.syspath_prepend(ROOT)
    from tools import tables

    return tables


def test_tables_match_the_results():
    command = [sys.executable, "-m", "tools.tables", "--check"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, f"{done.stdout}{done.stderr}Run: python -m tools.tables"


def test_a_changed_number_is_found(tables):
    text = (ROOT / "README.md").read_text()
    changed = text.replace("82.68 ± 0.21", "82.69 ± 0.21")
    assert changed != text
    assert tables.rendered(changed) == text


def test_every_table_is_shown_and_every_marker_is_a_table(tables):
    pages = [(ROOT / name).read_text() for name in tables.PAGES]
    markers = [name for page in pages for name in re.findall(r"<!-- ([\w-]+) -->", page)]
    assert sorted(markers) == sorted(tables.TABLES)


def test_a_table_without_an_end_is_refused(tables):
    with pytest.raises(ValueError, match="has no end"):
        tables.rendered("<!-- errata -->\n| a |\n")


@pytest.mark.parametrize("path", SWEEPS, ids=lambda path: path.stem)
def test_committed_runs_load_and_have_the_committed_summary(path):
    summary = read_archive(path)["summary.json"]
    with opened(path) as folder:
        runs = collect([folder])
    assert len(runs.runs) == runs.expected
    assert [problem for problem in runs.problems if "diverged" not in problem] == []
    assert runs.experiment.command == summary["command"]
    table = json.loads(
        to_json(to_dict(runs.experiment, summarize(runs.experiment, runs.results))["rows"])
    )
    for row, committed in zip(table, summary["rows"], strict=True):
        assert {name: row[name] for name in committed} == committed


def test_the_tasks_of_the_documentation_work():
    """Run the Python blocks of docs/tasks.md in order, and check each task that they define."""
    from gadam.train import check_task

    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "tasks.md").read_text(), re.DOTALL)
    names: dict[str, object] = {}
    checked = 0
    for block in blocks:
        exec(block, names)
        if re.search(r"^(def task|task =)", block, re.MULTILINE):
            assert check_task(names["task"]).notices == ()
            checked += 1
    assert checked == 4
