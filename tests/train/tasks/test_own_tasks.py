"""Tasks in users' files: loading, errors, training, exact resumption, and changed code."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from compare_runs import assert_same_run, stop_after
from gadam._errors import UserError
from gadam.runs import Average, Optimizer, OwnTask, Recipe, RecipeError, RunError, RunFolder
from gadam.runs.code import code_hash
from gadam.runs.lines import read_epochs
from gadam.runs.manifest import check_run
from gadam.train import Task, TaskError, loop, tasks
from gadam.train.tasks.own import as_task, describe, load_task

NET = """
from torch import nn

def net():
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.2),
                         nn.Linear(8, 2))
"""
HEAD = """
import random
import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from gadam.train import SupervisedTask, Task
from mynet import net

X = torch.randn(100, 4, generator=torch.Generator().manual_seed(0))
Y = (X.sum(1) > 0).long()

class Records(torch.utils.data.Dataset):
    def __len__(self):
        return 70

    def __getitem__(self, place):
        noise = torch.rand(()) + random.random() + np.random.rand()
        return {"x": X[place] + 0.1 * noise.float(), "y": Y[place]}
"""
BODIES = {
    "batchnorm, tensors": """
def task():
    return SupervisedTask(net, train=(X[:70], Y[:70]), test=(X[70:], Y[70:]), batch_size=23)
""",
    "dicts": """
def task():
    return SupervisedTask(net, train=Records(), test=Records(), batch_size=23,
                          forward=lambda model, batch: (model(batch["x"]), batch["y"]))
""",
    "regression": """
def spread(outputs, targets):
    return (outputs - targets).abs().max()

def task():
    return SupervisedTask(lambda: nn.Linear(4, 1), train=(X[:70], X[:70, :1] ** 2),
                          test=(X[70:], X[70:, :1] ** 2), loss=F.mse_loss, metric=spread,
                          mode="min", batch_size=23)
""",
    "function": """
def batches(generator):
    for place in torch.randperm(70, generator=generator).split(24):
        yield X[place] + 0.1 * torch.randn(len(place), 4), Y[place]

def task():
    return SupervisedTask(net, batches, (X[:9], Y[:9]), (X[70:], Y[70:]), batch_size=23)
""",
    "own class": """
class Means(Task):
    metric, mode, splits = "distance", "min", ("test",)

    def setup(self, seed, device):
        self.model = nn.Linear(4, 1)

    def steps(self, epoch):
        return 3

    def batches(self, epoch):
        yield from torch.utils.data.DataLoader(X, 40, shuffle=True)

    def loss(self, model, batch):
        return (model(batch) - random.random() - np.random.rand()).square().mean(), len(batch)

    def evaluate(self, model, split):
        model.eval()
        return {"distance": float(model(X).detach().square().mean())}

def task():
    return Means()
""",
}
FIRST = HEAD.count("\n") + 1  # the line of a task's body


@pytest.fixture
def write(tmp_path: Path) -> Callable[[str], Path]:
    """Return a function that writes a task, with its network beside it, and returns its path."""

    def write(body: str) -> Path:
        (tmp_path / "mynet.py").write_text(NET)
        (tmp_path / "my_task.py").write_text(HEAD + body)
        return tmp_path / "my_task.py"

    return write


def recipe_of(path: Path, **changes: Any) -> Recipe:
    recipe = Recipe(
        "mine",
        model="my_task",
        task=describe(path),
        optimizer=Optimizer("adamw", 1e-2, 0.1),
        average=Average(1),
        epochs=4,
        batch_size=23,
    )
    return replace(recipe, **changes)


# ---------------------------------------------------------------------------------------- loading


def test_a_file_is_described(write: Callable[[str], Path]) -> None:
    path = write(BODIES["regression"])
    own = describe(path)
    assert own == OwnTask(str(path), "task", "spread", "min", code_hash(path))
    recipe = recipe_of(path)
    assert (recipe.metric, recipe.mode) == ("spread", "min")
    assert Recipe.from_dict(json.loads(json.dumps(recipe.to_dict()))) == recipe


def test_changed_code_is_loaded_again(write: Callable[[str], Path], tmp_path: Path) -> None:
    path = write(BODIES["batchnorm, tensors"])
    assert load_task(path).batch_size == 23  # type: ignore[attr-defined]
    (tmp_path / "my_task.py").write_text(path.read_text().replace("=23", "=24"))
    (tmp_path / "mynet.py").write_text(
        "from torch import nn\n\ndef net():\n    return nn.Identity()\n"
    )
    task = load_task(path)
    assert task.batch_size == 24  # type: ignore[attr-defined]
    task.setup(0, torch.device("cpu"))
    assert isinstance(task.model, nn.Identity)


def test_files_of_the_same_name_in_two_folders(tmp_path: Path) -> None:
    for folder, value in (("a", 1), ("b", 2), ("a", 1)):
        (tmp_path / folder).mkdir(exist_ok=True)
        (tmp_path / folder / "helper.py").write_text(f"value = {value}\n")
        path = tmp_path / folder / "same.py"
        path.write_text(
            "from gadam.train import Task\nimport helper\n"
            "class T(Task):\n    metric, mode = str(helper.value), 'max'\n"
            "    def setup(self, seed, device): ...\n    def steps(self, epoch): ...\n"
            "    def batches(self, epoch): ...\n    def loss(self, model, batch): ...\n"
            "    def evaluate(self, model, split): ...\ntask = T\n"
        )
        assert load_task(path).metric == str(value)


@pytest.mark.parametrize("name", ["my-task.py", "random.py", "torch.py"])
def test_a_file_may_have_any_name(name: str, write: Callable[[str], Path], tmp_path: Path) -> None:
    content = write(BODIES["regression"]).read_text()
    (tmp_path / name).write_text(content.replace("import random\n", ""))
    assert load_task(tmp_path / name).metric == "spread"
    assert sys.modules["random"].__name__ == "random"
    assert sys.modules["torch"] is torch


def test_a_module_is_loaded_from_the_working_directory(
    write: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = write(BODIES["regression"]).read_text()
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "problem.py").write_text(content)
    monkeypatch.chdir(tmp_path)
    own = describe("package.problem")
    assert (own.path, own.metric) == ("package.problem", "spread")
    monkeypatch.delitem(sys.modules, "package.problem")


@pytest.mark.parametrize(
    ("body", "sentence"),
    [
        ("def task(:\n", rf"my_task\.py, line {FIRST}: "),
        ("1 / 0\n", rf"my_task\.py, line {FIRST}: ZeroDivisionError: division by zero\. Fix the"),
        ("def task():\n    return X[1000]\n", rf"my_task\.py, line {FIRST + 1}: IndexError: "),
        ("import no_such_package\n", "ModuleNotFoundError: No module named 'no_such_package'"),
        ("exit(3)\n", f"line {FIRST}: SystemExit: 3"),
        ("def tasks(): ...\n", r"has no function task\(\).* Did you mean 'tasks'\?"),
        ("task = 3\n", r"has no function task\(\)"),
        ("def task():\n    return 3\n", r"task\(\) in my_task.py must return .* got int"),
        ("def task():\n    return SupervisedTask\n", "must return .* got SupervisedTask"),
        ("class T(Task): mode = 'max'\ntask = T\n", "has no setup, no metric, no steps, no batch"),
        ("def task():\n    return SupervisedTask(net(), (X, Y))\n", "model must be a function"),
    ],
)
def test_what_is_wrong_with_a_file_is_said(
    body: str, sentence: str, write: Callable[[str], Path]
) -> None:
    with pytest.raises(UserError, match=sentence):
        load_task(write(body))


def test_an_error_in_a_module_beside_the_file_is_located(
    write: Callable[[str], Path], tmp_path: Path
) -> None:
    path = write(BODIES["regression"])
    (tmp_path / "mynet.py").write_text("\nraise RuntimeError('broken')\n")
    with pytest.raises(TaskError, match=r"mynet\.py, line 2: RuntimeError: broken"):
        load_task(path)


def test_a_missing_file_is_said() -> None:
    with pytest.raises(UserError, match=r"There is no file no_such\.py"):
        load_task("no_such.py")


def test_a_task_need_not_be_a_subclass() -> None:
    class Plain:
        metric, mode = "m", "max"

        def setup(self, seed: int, device: torch.device) -> None: ...
        def steps(self, epoch: int) -> int: ...  # type: ignore[empty-body]
        def batches(self, epoch: int) -> Any:
            return iter([torch.zeros(4), torch.ones(4)])

        def loss(self, model: Any, batch: Any) -> Any: ...
        def evaluate(self, model: Any, split: str) -> Any: ...

    task = as_task(Plain())
    assert task.splits == ("validation", "test")
    assert task.epochs == Task.epochs
    assert [share for _, share in task.micro_batches(torch.zeros(4), 2)] == [0.5, 0.5]
    assert len(list(task.refresh(0))) == len(list(task.training_data())) == 2
    assert len(list(task.training_data(3))) == 1
    assert task.rate_factor(None) == 1.0
    with pytest.raises(TaskError, match=r"Plain has no class scores\. Implement scores"):
        task.scores(nn.Identity(), "test")
    Plain.mode = "up"
    with pytest.raises(TaskError, match="must have mode 'max' or 'min', got 'up'"):
        as_task(Plain())


# --------------------------------------------------------------------------------------- training


@pytest.mark.parametrize("body", BODIES)
def test_a_stopped_run_resumes_to_the_same_bits(
    body: str, write: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(BODIES[body])
    recipe = recipe_of(path)
    if body == "own class":
        recipe = replace(recipe, batch_size=Recipe.batch_size)
    tasks.check(recipe, None)
    result = loop.train(recipe, tmp_path / "whole", seed=3)
    assert result.status == "done"
    assert result.metric(recipe.metric, "average") is not None
    monkeypatch.setattr(loop, "CHECKPOINT_SECONDS", 0.0)
    for steps in (4, 2):
        with pytest.raises(loop.Stopped):
            loop.train(recipe, tmp_path / "torn", seed=3, should_stop=stop_after(steps))
        torch.manual_seed(steps)
    loop.train(recipe, tmp_path / "torn", seed=3)
    assert_same_run(tmp_path / "whole", tmp_path / "torn")


@pytest.mark.slow
def test_a_killed_process_resumes_to_the_same_bits(
    write: Callable[[str], Path], tmp_path: Path
) -> None:
    recipe = recipe_of(write(BODIES["dicts"]), epochs=6)
    loop.train(recipe, tmp_path / "whole")
    script = (
        "import json, os, sys\nfrom gadam.runs import Recipe\nfrom gadam.train import loop\n"
        "loop.CHECKPOINT_SECONDS = 0.0\nrecipe = Recipe.from_dict(json.loads(sys.argv[1]))\n"
        "def die(done, record):\n    if record and record.epoch == 3: os.kill(os.getpid(), 9)\n"
        "loop.train(recipe, sys.argv[2], on_progress=die)\n"
    )
    arguments = [json.dumps(recipe.to_dict()), str(tmp_path / "torn")]
    killed = subprocess.run([sys.executable, "-c", script, *arguments])
    assert killed.returncode == -9
    loop.train(recipe, tmp_path / "torn")
    assert_same_run(tmp_path / "whole", tmp_path / "torn")


def test_the_batch_size_is_the_recipes(write: Callable[[str], Path]) -> None:
    recipe = replace(recipe_of(write(BODIES["batchnorm, tensors"])), batch_size=9)
    assert tasks.build(recipe, 0, torch.device("cpu"), None).steps(0) == 7


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"batch_size": 64}, "chooses its own batch size. Leave batch_size at 128"),
        ({"evaluate_on": ("validation",)}, "has only the splits test"),
        ({"average": Average("plateau")}, "needs a validation metric, but .* has no validation"),
        ({"task": OwnTask("my_task.py")}, r"has the metric 'distance' \(mode 'min'\), but"),
    ],
)
def test_a_recipe_that_does_not_fit_the_task_is_refused(
    changes: dict[str, Any],
    sentence: str,
    write: Callable[[str], Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path = write(BODIES["own class"])
    monkeypatch.chdir(path.parent)
    recipe = replace(recipe_of(path, batch_size=128), **changes)
    with pytest.raises(RecipeError, match=sentence):
        tasks.check(recipe, None)


# ----------------------------------------------------------------------------------- changed code


def test_changed_code_is_refused_or_accepted(
    write: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop, "CHECKPOINT_SECONDS", 0.0)
    path, folder = write(BODIES["batchnorm, tensors"]), tmp_path / "run"
    with pytest.raises(loop.Stopped):
        loop.train(recipe_of(path), folder, should_stop=stop_after(8))
    before = {name: (folder / name).read_bytes() for name in ("run.json", "epochs.jsonl")}
    first = json.loads(before["run.json"])["code"]
    assert [set(files) for files in first] == [{"my_task.py", "mynet.py"}]

    (tmp_path / "mynet.py").write_text(NET.replace("0.2", "0.3"))
    changed = recipe_of(path)
    sentence = r"mynet\.py changed after .*run was started\. Undo the change, pass --accept-changed"
    with pytest.raises(RunError, match=sentence):
        loop.train(changed, folder)
    with pytest.raises(RunError, match=sentence):
        RunFolder(folder, changed, 0).check()
    assert all((folder / name).read_bytes() == content for name, content in before.items())

    notices: list[str] = []
    result = loop.train(changed, folder, accept_changed_code=True, on_notice=notices.append)
    assert (result.status, result.epochs) == ("done", 4)
    assert len(notices) == 1
    assert notices[0].startswith("mynet.py changed. The run continues with the new code")
    header = json.loads((folder / "run.json").read_text())
    assert header["code"][0] == first[0]
    assert header["code"][1]["mynet.py"] != first[0]["mynet.py"]
    assert header["recipe"]["task"]["code"] == changed.task.code  # type: ignore[union-attr]
    assert len(read_epochs(folder / "epochs.jsonl")) == 4
    assert not check_run(folder).problems
    assert loop.train(changed, folder) == result


def test_accepted_code_survives_another_stop(
    write: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop, "CHECKPOINT_SECONDS", 0.0)
    path, folder = write(BODIES["regression"]), tmp_path / "run"
    with pytest.raises(loop.Stopped):
        loop.train(recipe_of(path), folder, should_stop=stop_after(4))
    path.write_text(path.read_text() + "# changed\n")
    for steps in (0, 4):  # before and after the next checkpoint
        with pytest.raises(loop.Stopped):
            loop.train(
                recipe_of(path), folder, accept_changed_code=True, should_stop=stop_after(steps)
            )
    notices: list[str] = []
    loop.train(recipe_of(path), folder, on_notice=notices.append)  # it was accepted before
    assert notices == []
    assert len(json.loads((folder / "run.json").read_text())["code"]) == 2
    assert not check_run(folder).problems


def test_a_finished_run_of_other_code_is_not_passed_off(
    write: Callable[[str], Path], tmp_path: Path
) -> None:
    path, folder = write(BODIES["regression"]), tmp_path / "run"
    result = loop.train(recipe_of(path), folder)
    path.write_text(path.read_text() + "# changed\n")
    with pytest.raises(RunError, match=r"my_task\.py changed after"):
        loop.train(recipe_of(path), folder)
    assert loop.train(recipe_of(path), folder, accept_changed_code=True) == result
    assert len(json.loads((folder / "run.json").read_text())["code"]) == 1


def test_a_copied_project_continues_its_runs(
    write: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, folder = write(BODIES["regression"]), tmp_path / "run"
    result = loop.train(recipe_of(path), folder)
    monkeypatch.chdir(tmp_path)
    assert loop.train(recipe_of(Path("my_task.py")), folder) == result


def test_code_that_changes_during_a_sweep_is_refused(
    write: Callable[[str], Path], tmp_path: Path
) -> None:
    path = write(BODIES["regression"])
    recipe = recipe_of(path)
    path.write_text(path.read_text() + "# changed\n")
    with pytest.raises(RecipeError, match="changed while it was in use"):
        loop.train(recipe, tmp_path / "run")
