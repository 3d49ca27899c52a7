"""Writing a report to disk."""

from __future__ import annotations

import errno
import os

import pytest

import made
from gadam.report import ReportError, write
from gadam.runs import RunError, files


def test_writes_the_page_figures_and_tables(tmp_path):
    runs = made.sweep(tmp_path / "runs")
    assert write([runs], tmp_path / "out") == tmp_path / "out" / "report.html"
    written = {path.name for path in (tmp_path / "out" / "figures").iterdir()}
    assert written == {
        *(
            f"{name}.{end}"
            for name in ("gains", "curves", "rates", "costs")
            for end in ("png", "svg")
        ),
        *(f"table.{end}" for end in ("md", "tex", "csv")),
    }


def test_problems_are_printed(tmp_path, capsys):
    made.sweep(tmp_path)
    (tmp_path / "gadam-1" / "result.json").write_text("{")
    write([tmp_path], tmp_path, figures=False)
    assert "note: " in capsys.readouterr().err


def test_nothing_to_report_is_an_error(tmp_path):
    with pytest.raises(ReportError, match=r"Nothing to report in .* There are no runs"):
        write([tmp_path], tmp_path)
    with pytest.raises(ReportError, match="is not a folder"):
        write([tmp_path / "missing"], tmp_path)


def test_an_output_folder_that_cannot_be_created_is_an_error(tmp_path):
    runs = made.sweep(tmp_path / "runs")
    (tmp_path / "file").write_text("")
    with pytest.raises(ReportError, match="Use a different --out"):
        write([runs], tmp_path / "file" / "out")


def test_a_folder_that_cannot_be_written_is_an_error(tmp_path, monkeypatch):
    made.sweep(tmp_path)
    (tmp_path / "figures").touch()  # in place of the folder
    with pytest.raises(ReportError, match="figures could not be created: File exists"):
        write([tmp_path], tmp_path)

    def refuse(*_: object, **__: object) -> int:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    (tmp_path / "figures").unlink()
    monkeypatch.setattr(files.os, "open", refuse)  # the superuser may write to any folder
    with pytest.raises(RunError, match="could not be written: Permission denied"):
        write([tmp_path], tmp_path)
