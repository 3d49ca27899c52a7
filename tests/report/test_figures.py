"""Figures in files."""

from __future__ import annotations

import made
from gadam.report import figures
from gadam.runs import collect


def test_the_same_numbers_make_the_same_files(tmp_path):
    collection = collect([made.sweep(tmp_path / "runs")])
    paths = figures.write_figures(collection, tmp_path / "out")
    assert {path.name for path in paths} == {
        f"{name}.{end}" for name in ("gains", "curves", "rates", "costs") for end in ("png", "svg")
    }
    assert (tmp_path / "out" / "curves.png").read_bytes().startswith(b"\x89PNG")
    again = figures.write_figures(collection, tmp_path / "again")
    assert all(a.read_bytes() == b.read_bytes() for a, b in zip(paths, again))


def test_each_task_has_its_own_panel(tmp_path):
    made.sweep(tmp_path / "images", seeds=1)
    one = figures.write_figures(collect([tmp_path]), tmp_path / "one")
    made.run(tmp_path / "text" / "lm-0", "LSTM", 0, recipe=made.LANGUAGE)
    two = figures.write_figures(collect([tmp_path]), tmp_path / "two")
    text = {path.name: path.read_text() for path in one if path.suffix == ".svg"}
    assert "test accuracy, %" in text["curves.svg"]
    assert "test perplexity" not in text["curves.svg"]
    assert "Gadam over AdamW" in text["gains.svg"]
    (curves,) = (path.read_text() for path in two if path.name == "curves.svg")
    assert "test perplexity" in curves
    assert "awd-lstm-mini on toy-language" in curves
