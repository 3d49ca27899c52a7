"""`gadam train`: own data and networks by flag, and hints for near misses."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from gadam.commands import main, sweeps
from gadam.commands.options import SweepOptions, check_device
from gadam.commands.recipes import changed
from gadam.runs.files import RunError
from gadam.runs.recipe import Recipe, RecipeError
from gadam.train import experiments
from gadam.train.loop import Stopped, train
from gadam.train.tasks import ImageTask

NET = """
from torch import nn

class Net(nn.Module):
    def __init__(self, num_classes):
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU())
        self.out = nn.Linear(4 * 36, num_classes)

    def forward(self, x):
        x = self.body(x)
        return self.out(x.view(x.size(0), -1))
"""


def run(*arguments: str) -> int:
    return main(list(arguments))


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a working directory with a folder of images and a network."""
    rng = np.random.default_rng(0)
    for label, name in enumerate(("rose", "tulip", "daisy")):
        (tmp_path / "flowers" / name).mkdir(parents=True)
        for index in range(10):
            pixels = rng.integers(60 * label, 60 * label + 90, size=(8, 8, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(tmp_path / "flowers" / name / f"{index}.png")
    (tmp_path / "flower_net.py").write_text(NET)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def recipe_for(*settings: str) -> Recipe:
    """Return what `gadam train compare-gadam` trains with these settings."""
    listed = ("model=flower_net:Net", "average.start=1", "epochs=3", *settings)
    options = SweepOptions(settings=("data.name=flowers", *listed))
    return changed({"": experiments.recipes()["compare-gadam"]}, options)[""]


# ---------------------------------------------------------------------------- own data and network


def test_own_folder_and_network_are_trained(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = ("data.name=flowers", "model=flower_net:Net", "average.start=0", "epochs=1")
    words = [word for setting in settings for word in ("--set", setting)]
    assert run("train", "compare-gadam", *words, "--out", "out") == 0
    printed = capsys.readouterr().err
    assert "6 of its 30 training images are held out for the test" in printed
    assert "3 of the 24 training images are held out for validation." in printed
    folder = project / "out" / "compare-gadam-0"
    header = json.loads((folder / "run.json").read_text())
    assert header["recipe"]["data"]["name"] == "flowers"
    assert header["recipe"]["data"]["label_noise"] == 0
    assert header["recipe"]["model"] == "flower_net:Net"
    assert list(header["code"][0]) == ["flower_net.py"]
    line = json.loads((folder / "epochs.jsonl").read_text())
    assert len(line["data"]) == 64
    assert set(line["iterate"]) == {"validation", "test"}


def test_resumed_run_notices_changed_data_and_refuses_changed_code(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gadam.train.loop.CHECKPOINT_SECONDS", -1)
    recipe, steps = recipe_for(), iter([False, True])  # one step per epoch
    with pytest.raises(Stopped):
        train(recipe, "run", should_stop=lambda: next(steps))
    (project / "flower_net.py").write_text(NET + "\n# edited\n")
    with pytest.raises(RunError, match=r"flower_net.py changed after .* --accept-changed-code"):
        train(recipe, "run")
    (project / "flower_net.py").write_text(NET)
    notices: list[str] = []
    (project / "flowers" / "rose" / "0.png").unlink()
    result = train(recipe, "run", on_notice=notices.append)
    assert "flowers changed after run was started." in notices
    assert result.status == "done"


def test_resumed_run_equals_an_undisturbed_one(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gadam.train.loop.CHECKPOINT_SECONDS", -1)
    recipe, steps = recipe_for(), iter([False, True])
    with pytest.raises(Stopped):
        train(recipe, "stopped", should_stop=lambda: next(steps))
    resumed, whole = train(recipe, "stopped"), train(recipe, "whole")
    assert (resumed.iterate, resumed.average) == (whole.iterate, whole.average)


def test_validation_folder_is_the_validation_split(project: Path) -> None:
    (project / "split").mkdir()
    (project / "flowers").rename(project / "split" / "train")
    for name in ("rose", "tulip", "daisy"):
        place = project / "split" / "val" / name
        place.mkdir(parents=True)
        (project / "split" / "train" / name / "0.png").rename(place / "0.png")
    for validation in (0, 4):
        recipe = recipe_for("data.name=split", f"data.validation={validation}")
        task = ImageTask(recipe)
        assert task.splits == ("validation", "test")
        assert len(task._splits["validation"]) == 3
        ignored = "split has its own validation images. data.validation=4 is not used."
        assert (ignored in task.notices) is (validation == 4)
        assert not any("held out for validation" in notice for notice in task.notices)


def test_rows_that_own_data_makes_equal_are_trained_once(project: Path) -> None:
    settings = ("data.name=flowers", "model=flower_net:Net")
    experiment = sweeps._described(experiments.get("compare"), SweepOptions(settings=settings))
    assert list(experiment.recipes) == ["SGD", "SWA", "AdamW", "Gadam", "PadamW", "GadamX"]
    assert {recipe.data.label_noise for recipe in experiment.recipes.values()} == {0.0}
    assert experiment.note == ""


def test_costs_of_own_problems_are_unknown(project: Path) -> None:
    experiment = experiments.get("compare")
    options = SweepOptions(settings=("data.name=flowers",))
    recipes = changed(experiment.recipes, options, everywhere=False)
    assert np.isnan(experiments.hours(experiment.restricted_to(recipes)))


# ---------------------------------------------------------------------------------- near misses


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        (
            "train compare",
            "compare is an experiment with 12 recipes. Use `gadam compare`, or name a recipe: "
            "compare-sgd, compare-swa, compare-adamw, …",
        ),
        ("train tab-cifar", "Use `gadam reproduce tab-cifar`, or name a recipe: tab-cifar-vgg"),
        ("train gadam", "There is no recipe 'gadam'. Did you mean 'compare-gadam'?"),
        ("train ./compare", "./compare is a path. Name a recipe"),
        ("train my_task.py", "my_task.py is a file. Use `gadam compare my_task.py`"),
        ("reproduce compare-gadam", "compare-gadam is a recipe, not an experiment. Use `gadam tr"),
        ("train compare-gadam --set lr 0.1", "--set takes KEY=VALUE, got 'lr'. Use --set lr=0.1."),
        ("train compare-gadam --set lr", "--set takes KEY=VALUE, got 'lr'."),
        ("train compare-gadam --lr 0.1", "has no option --lr. Use --set lr=0.1."),
        ("train compare-gadam --lr=0.1", "has no option --lr. Use --set lr=0.1."),
        ("train compare-gadam --learning-rate 1", "no option --learning-rate. Use --set lr=1."),
        ("compare --optimizer adamw", "Use --set optimizer.name=adamw."),
        ("compare lr=0.1 --seeds 1", "Settings need --set before each. Use --set lr=0.1."),
        ("compare --set optimizer=adamw", "Did you mean optimizer.name=adamw?"),
        ("compare --set average=10", "Did you mean average.start=10?"),
        ("train compare-gadam --set model=nets:Net", "There is no module 'nets'"),
        ("train compare-gadam --set model=vgg", "or name your own: package.module:factory."),
        ("train compare-gadam --set data.name=gone/x", "There is no file or folder gone/x."),
        ("compare --set data.name=rans", "Unknown data set 'rans'. Did you mean runs?"),
        ("compare --set data.name=xyz", "imagenet, or the path of your own images."),
        ("train lm-mini --set model=nets:Net", "nets:Net is a network for images."),
        ("compare-gadam", "Did you mean `gadam train compare-gadam`?"),
        ("tab-cifar", "Did you mean `gadam reproduce tab-cifar`?"),
        ("my_task.py", "Did you mean `gadam compare my_task.py`?"),
        ("plot", "Did you mean 'report'?"),
        ("--seeds 3 compare", "Put the command first, then its options."),
        ("report compare", "compare is not a folder. Did you mean runs/compare?"),
        ("verify runs/compare/run.json", "run.json is not a folder. Did you mean runs/compare?"),
        ("compare --device foo", "--device foo is not a device. Use cpu, cuda, cuda:1 or mps."),
        ("compare --device meta", "--device meta is not available here. Use --device cpu."),
    ],
)
def test_near_misses_get_a_hint_and_code_2(
    line: str,
    sentence: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "runs" / "compare").mkdir(parents=True)
    (tmp_path / "runs" / "compare" / "run.json").touch()
    monkeypatch.chdir(tmp_path)
    assert run(*line.split()) == 2
    captured = capsys.readouterr()
    assert sentence in captured.err
    assert len(captured.err.strip().splitlines()) == 1
    assert captured.out == ""


def test_all_problems_of_a_command_are_reported_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    settings = ["lrr=1", "epochs=0", "model=vgg-minni", "data.name=cifar1000", "betas=0.9,1.5"]
    words = [word for setting in settings for word in ("--set", setting)]
    assert run("train", "compare-gadam", *words, "--seeds", "0") == 2
    first, *lines = capsys.readouterr().err.splitlines()
    assert first.startswith("gadam train: Fix 6 settings:")
    for word in ("'lrr'", "epochs", "vgg-minni", "cifar1000", "1.5", "--seeds"):
        assert sum(word in line for line in lines) == 1, word
    assert not list(tmp_path.iterdir())


def test_problems_of_own_data_and_of_an_own_network_are_reported_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    words = ("--set", "data.name=gone/x", "--set", "model=gone_net:Net", "--trials", "3")
    assert run("compare", *words) == 2
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "gadam compare: Fix 2 settings:"
    assert "There is no file or folder gone/x." in lines[1]
    assert "There is no module 'gone_net'" in lines[2]


# ---------------------------------------------------------------------------------------- devices


@pytest.mark.parametrize(
    ("device", "gpus", "sentence"),
    [
        ("cuda", 0, "--device cuda is not available: torch finds no GPU. Use --device cpu."),
        ("cuda:9", 2, "--device cuda:9 does not exist. The last GPU is cuda:1."),
        ("mps", 0, "--device mps needs a Mac with Apple silicon. Use --device cpu."),
        ("cuda:x", 0, "--device cuda:x is not a device."),
    ],
)
def test_devices_that_do_not_exist(
    device: str, gpus: int, sentence: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    with pytest.raises(RecipeError) as error:
        check_device(device)
    assert sentence in str(error.value)
    check_device("cpu")
