"""`gadam tails`: the choice of the start after training."""

from __future__ import annotations

import itertools
import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import gadam
from gadam.commands import main
from gadam.runs import Average, Data, Optimizer, Recipe, RunError, RunFolder
from gadam.study.tails import Tails, next_starts
from gadam.train import tasks
from gadam.train.loop import train
from gadam.train.tasks import ImageTask

RECIPE = Recipe(
    "small",
    model="vgg-mini",
    data=Data("fashion-mini", examples=300, validation=100, size=8, augment=False),
    optimizer=Optimizer("adamw", 0.01, 0.1),
    average=Average(2, every=1),
    epochs=4,
    batch_size=50,
    blocks=2,
)
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("tails") / "run"
    train(RECIPE, folder)
    return folder


@pytest.fixture
def folder(trained, tmp_path) -> Path:
    shutil.copytree(trained, tmp_path / "run")
    return tmp_path / "run"


def directly(folder: Path, split: str, start: int) -> float:
    """Evaluate a tail without any code of the command."""
    task = tasks.build(RECIPE, 0, CPU, None)
    state = RunFolder(folder, RECIPE, 0).final_state()[1]
    task.model.load_state_dict(state["model"])
    sgd = torch.optim.SGD(task.model.parameters(), lr=0.1)
    blocks = gadam.BlockAverages(sgd, folder / "blocks", every=2)
    task.model.load_state_dict(blocks.model_state_dict(task.model, start))
    gadam.refresh_batchnorm(task.model, task.refresh(RECIPE.epochs - 1), forward=task.loss)
    return task.evaluate(task.model, split)["accuracy"]


def test_the_tail_of_the_trained_in_start_is_the_trained_in_average(folder):
    tails = Tails(RunFolder(folder, RECIPE, 0), None, CPU)
    assert tails.trained_in is not None
    start, value = tails.trained_in
    assert (start, tails.stop) == (8, 16)
    assert tails.value("validation", start) == pytest.approx(value, abs=1e-9)
    assert tails.value("test", start) == pytest.approx(directly(folder, "test", start), abs=1e-9)


def test_command(folder, capsys, monkeypatch):
    splits = []
    evaluate = ImageTask.evaluate

    def counted(self, model, split):
        splits.append(split)
        return evaluate(self, model, split)

    monkeypatch.setattr(ImageTask, "evaluate", counted)
    assert main(["tails", str(folder), "--coarse", "3", "--json"]) == 0
    events = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    found = events[-1]
    values = {int(start): value for start, value in found["values"].items()}
    best = found["best"]
    assert values[best["start"]] == max(values.values()) == best["validation"]
    assert splits.count("test") == 1
    assert splits.count("validation") == len(values) >= 3
    assert best["test"] == pytest.approx(directly(folder, "test", best["start"]))

    written = folder / best["file"]
    provenance = gadam.average.read_provenance(written)
    assert (provenance.first_step, provenance.last_step) == (best["start"] + 1, 16)
    task = tasks.build(RECIPE, 0, CPU, None)
    task.model.load_state_dict(load_file(written))
    assert task.evaluate(task.model, "test")["accuracy"] == pytest.approx(best["test"])
    assert (folder / "tails.png").read_bytes()[:4] == b"\x89PNG"
    assert (folder / "tails.svg").exists()
    assert (folder / "sections" / "tails.json").exists()

    splits.clear()  # a second command measures nothing again
    assert main(["tails", str(folder), "--coarse", "3"]) == 0
    assert not splits
    text = capsys.readouterr().out
    assert f"Best start: {best['start']}" in text
    assert f"Test data of this run was read for: start {best['start']}.\n" in text


def test_a_run_with_blocks_and_tails_verifies(folder, capsys):
    assert main(["tails", str(folder)]) == 0
    capsys.readouterr()
    assert main(["verify", str(folder)]) == 0
    assert capsys.readouterr().out.startswith("1 run: 1 matches its manifest")
    result = folder / "tails.json"
    result.write_text(result.read_text().replace('"stop":', '"stopp":', 1))
    assert main(["verify", str(folder)]) == 1
    assert "tails.json is damaged" in capsys.readouterr().out


def test_blocks_of_another_run_are_refused(folder, tmp_path, capsys):
    train(replace(RECIPE, epochs=4), tmp_path / "other", seed=1)
    shutil.rmtree(folder / "blocks")
    shutil.copytree(tmp_path / "other" / "blocks", folder / "blocks")
    assert main(["tails", str(folder)]) == 2
    error = capsys.readouterr().err
    assert "has the blocks of another run than this checkpoint" in error
    assert len(error.strip().splitlines()) == 1


def test_an_interrupted_command_resumes(folder, monkeypatch):
    tails = Tails(RunFolder(folder, RECIPE, 0), None, CPU)
    expected = {start: tails.value("validation", start) for start in tails.starts[:2]}
    again = Tails(RunFolder(folder, RECIPE, 0), None, CPU)
    monkeypatch.setattr(ImageTask, "evaluate", None)
    assert {start: again.value("validation", start) for start in expected} == expected


def test_greedy_soup(folder, capsys, monkeypatch):
    tails = Tails(RunFolder(folder, RECIPE, 0), None, CPU)
    boundaries = tails.blocks.boundaries
    raw = {name: t.clone() for name, t in tails.model.state_dict().items()}
    alone = [tails._soup([pair]) for pair in itertools.pairwise(boundaries)]
    soup = tails.greedy()
    assert soup.value >= max(alone)
    assert all(torch.equal(raw[name], t) for name, t in tails.model.state_dict().items())
    # All blocks together are the average of all steps.
    everything = tails._soup(list(itertools.pairwise(boundaries)))
    assert everything == pytest.approx(tails.value("validation", 0))
    splits = []
    evaluate = ImageTask.evaluate

    def counted(self, model, split):
        splits.append(split)
        return evaluate(self, model, split)

    monkeypatch.setattr(ImageTask, "evaluate", counted)
    for _ in range(2):  # the second command measures nothing again
        assert main(["tails", str(folder), "--coarse", "2", "--greedy"]) == 0
        text = capsys.readouterr().out
        assert f"Greedy soup of {len(soup.blocks)} block" in text
        assert re.search(r"Test data of this run was read for: start \d+, soup of \d+ block", text)
        # Once per choice, and only after the last evaluation on validation data.
        assert splits.count("test") == 2
        assert splits[-2:] == ["test", "test"]


def test_refusals(trained, tmp_path, capsys):
    without = replace(RECIPE, blocks=0, epochs=3, average=None, model="logistic")
    train(without, tmp_path / "no blocks")
    assert main(["tails", str(tmp_path / "no blocks")]) == 2
    assert "has no blocks. Train with --set blocks=100." in capsys.readouterr().err
    unsplit = replace(without, blocks=4, data=replace(RECIPE.data, validation=0))
    train(unsplit, tmp_path / "no validation")
    with pytest.raises(RunError, match=r"test data must not choose the start"):
        Tails(RunFolder(tmp_path / "no validation", unsplit, 0), None, CPU)
    assert main(["tails", str(tmp_path / "nothing")]) == 2
    assert main(["tails", str(trained), "--coarse", "0"]) == 2


def test_the_search_ends_at_a_local_optimum_with_few_evaluations():
    candidates = list(range(0, 6400, 100))
    values: dict[int, float] = {}
    while wanted := next_starts(
        candidates, min(values, key=values.__getitem__) if values else None, list(values), 9
    ):
        assert not set(wanted) & set(values)
        values |= {start: abs(start - 4230) for start in wanted}
    best = min(values, key=values.__getitem__)
    assert best == 4200
    assert {4100, 4300} <= set(values)
    assert len(values) < 20
