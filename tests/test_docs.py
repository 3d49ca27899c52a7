"""The documentation says what the committed results say."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

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


def readme_commands() -> set[str]:
    """Return the commands in README.md, with `make` targets as the Makefile runs them."""
    blocks = re.findall(r"^```\w*\n(.*?)^```", (ROOT / "README.md").read_text(), re.DOTALL | re.M)
    lines = {line.partition("#")[0].strip() for block in blocks for line in block.splitlines()}
    makefile = (ROOT / "Makefile").read_text()
    ours = dict(re.findall(r"^([\w-]+):.*\n\t\$\(BIN\)/(gadam .*?) \$\(ARGS\)$", makefile, re.M))
    return lines | {ours.get(line.removeprefix("make "), line) for line in lines}


def archives_in_readme() -> list[str]:
    """Return the archives whose tables README.md shows."""
    shown = re.findall(r"<!-- ([\w-]+) -->", (ROOT / "README.md").read_text())
    return [name for name in shown if ROOT / "results" / f"{name}.json" in SWEEPS]


def test_tables_in_the_readme_come_from_its_own_commands():
    """What a reader gets from a command is what the page shows."""
    archives = archives_in_readme()
    assert "compare" in archives
    for name in archives:
        command = read_archive(ROOT / "results" / f"{name}.json")["summary.json"]["command"]
        assert command in readme_commands(), f"{name} was made by {command!r}. Run it again."


def test_pictures_in_the_readme_come_from_its_own_commands(tables):
    from tools import report_screenshot

    text = (ROOT / "README.md").read_text()
    pictures = [ROOT / path for path in re.findall(r"!\[[^]]*\]\(([^)]+\.png)\)", text)]
    assert report_screenshot.PICTURE in pictures
    for picture in pictures:
        if picture.parent.name == "theory":  # drawn from results/theory.json and formulas
            continue
        assert picture == report_screenshot.PICTURE, f"{picture} has no known source."
        with Image.open(picture) as image:
            labels = {name: image.info.get(name) for name in ("Command", "Archive")}
        assert labels["Command"] in readme_commands(), f"{picture} was made by {labels['Command']}."
        assert labels == report_screenshot.source(report_screenshot.ARCHIVE), (
            "The picture is older than the results. Run: python -m tools.report_screenshot"
        )


def test_the_readme_commands_are_read_from_code_and_the_makefile():
    commands = readme_commands()
    assert {"make compare", "gadam compare"} <= commands
    assert not any("$(" in command for command in commands)


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
    names: dict[str, Any] = {}
    checked = 0
    for block in blocks:
        exec(block, names)
        if re.search(r"^(def task|task =)", block, re.MULTILINE):
            assert check_task(names["task"]).notices == ()
            checked += 1
    assert checked == 4
