"""Language models on the command line."""

from __future__ import annotations

import json
import re

import pytest

from gadam.commands import main, recipes
from gadam.runs.experiment import Experiment
from gadam.runs.recipe import RecipeError, override
from gadam.train import experiments
from gadam.train.data import text

pytestmark = pytest.mark.usefixtures("quick_workers")


def test_settings_change_only_the_rows_that_have_them():
    mixed = experiments.get("fig-frequency").recipes
    settings = ["language.bptt=20", "data.label_noise=0.1", "epochs=25"]
    rows, problems = recipes.apply(mixed, settings, everywhere=False)
    assert problems == []
    for row, recipe in rows.items():
        assert recipe.epochs == 25
        if row.startswith("LSTM"):
            assert recipe.language is not None
            assert recipe.language.bptt == 20
        else:
            assert (recipe.language, recipe.data.label_noise) == (None, 0.1)
    images = experiments.get("tab-cifar").recipes
    assert recipes.apply(images, ["language.bptt=20"], everywhere=False)[1] == [
        "--set language.bptt=20 applies to none of the rows."
    ]
    with pytest.raises(RecipeError, match=r"trains on images\. It has no language settings"):
        override(next(iter(images.values())), ["language.bptt=20"])


def test_published_numbers_need_the_same_task(tmp_path, capsys):
    arguments = ["lm-mini", "--rows", "Adam", "--seeds", "1", "--out", str(tmp_path)]
    arguments += ["--set", "epochs=2", "--set", "data.examples=3000", "--workers", "1"]
    assert main(["reproduce", *arguments]) == 0
    described = json.loads((tmp_path / "experiment.json").read_text())
    experiment = Experiment.from_dict(described)
    assert list(experiment.recipes) == ["Adam"]
    assert (experiment.metrics, experiment.published) == (["perplexity"], {})
    assert "--rows Adam" in experiment.command
    page = (tmp_path / "report.html").read_text()
    best = text.best_perplexity("toy-language")
    floors = re.search(r'"floors":(\{[^}]*\})', page)
    assert floors is not None
    assert json.loads(floors[1])["test"] == best["test"]
    assert main(["reproduce", "tab-ptb", "--rows", "nothing"]) == 2
    assert "no row matching 'nothing'" in capsys.readouterr().err


def test_missing_text_ends_the_command_with_instructions(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["reproduce", "tab-ptb", "--data-dir", str(tmp_path)]) == 2
    assert "penn/train.txt is missing. Run `gadam data ptb`" in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()


def test_lm_mini_needs_no_data(tmp_path, capsys):
    arguments = ["lm-mini", "--out", str(tmp_path), "--data-dir", str(tmp_path / "nothing")]
    arguments += ["--set", "epochs=2", "--set", "average.start=1", "--set", "data.examples=4000"]
    assert main(["train", *arguments]) == 0
    shown = capsys.readouterr().out
    assert "validation perplexity: iterate" in shown
    assert "test perplexity" in shown
    result = json.loads((tmp_path / "lm-mini-0" / "result.json").read_text())
    floor = text.best_perplexity("toy-language")["test"]
    assert floor < result["average"]["test"]["perplexity"] < 574
    assert main(["list", "--recipes"]) == 0
    assert "lm-mini-gadam" in capsys.readouterr().out
