"""Rows of the paper that stand in several tables come from one archive."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from benchmarks.evidence.paper import experiment_of
from tools import reproduction

from gadam.runs.archive import FORMAT

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def no_results(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Start with an empty folder of results."""
    monkeypatch.setattr(reproduction, "RESULTS", tmp_path)
    _forget()
    yield
    _forget()


def _forget() -> None:
    for function in (reproduction._rows, reproduction._trained, reproduction._archive):
        function.cache_clear()


def _write_archive(name: str, folder: Path) -> dict[str, float]:
    """Write an archive of an experiment in which every row has another accuracy."""
    experiment = experiment_of(name)
    accuracies = {row: 50.0 + i for i, row in enumerate(experiment.recipes)}
    rows = [
        {"label": row, "iterate": {"mean": mean, "error": 0.5, "count": 3}, "average": None}
        for row, mean in accuracies.items()
    ]
    summary = {"rows": rows, "command": experiment.command, "seeds": 3, "versions": {"torch": "2"}}
    files = {"experiment.json": experiment.to_dict(), "summary.json": summary}
    (folder / f"{name}.json").write_text(json.dumps({"format": FORMAT, "files": files}))
    return accuracies


def test_rows_are_found_in_other_tables(tmp_path: Path) -> None:
    expected = _write_archive("tab-cifar", tmp_path)
    for name, prefix, count in (("fig3a", "VGG-16 C-100 ", 6), ("tab-c10", None, 12)):
        rows = reproduction._rows(name)
        assert len(rows) == count
        for row in rows:
            assert row.source == "tab-cifar"
            same = f"{prefix}{row.label}" if prefix else row.label.replace(" ", " C-10 ", 1)
            assert row.result["iterate"]["mean"] == expected[same]
    # Of this one, half is in tab-cifar, but not what to compare it with.
    assert reproduction._rows("tab-linear-step") == []


def test_the_page_names_the_command_and_the_source(tmp_path: Path) -> None:
    _write_archive("tab-cifar", tmp_path)
    assert "[fig3a](#fig3a) | VGG-16 on CIFAR-100 |" in reproduction.index()
    section = reproduction.results().split("### fig3a\n")[1].split("###")[0]
    assert "`python -m benchmarks.evidence.paper run tab-cifar`" in section
    assert "Source: `results/tab-cifar.json`." in section


def test_a_table_is_not_made_of_a_few_rows_of_another_one(tmp_path: Path) -> None:
    assert reproduction._rows("fig-ptb") == []
    shutil.copy(ROOT / "results" / "tab-ptb.json", tmp_path)
    _forget()
    assert {row.source for row in reproduction._rows("fig-ptb")} == {"tab-ptb"}
    assert reproduction._rows("fig-ptb-nt") == []  # two of its four rows
