"""BatchNorm statistics and greedy soups, with a user's task."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import torch
from torch import nn

import gadam
from gadam.checkpoints import CheckpointError, average
from gadam.train import SupervisedTask, Task

X = torch.randn(64, 3, generator=torch.Generator().manual_seed(0))
TASK = """
import torch
from torch import nn
from gadam.train import SupervisedTask

def task():
    x = torch.randn(64, 3, generator=torch.Generator().manual_seed(0))
    return SupervisedTask(
        model=lambda: nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)),
        train=(x, x.sum(1, keepdim=True)),
        validation=(x, x.sum(1, keepdim=True)),
        loss=nn.functional.mse_loss,
        metric="mse",
        batch_size=16,
    )
"""


class Distance(Task):
    """The metric is the distance of one weight to 1. It has no data."""

    metric, mode = "distance", "min"
    splits: tuple[str, ...] = ("validation", "test")

    def setup(self, seed, device):
        self.model = nn.Linear(1, 1, bias=False)

    def steps(self, epoch):
        return 1

    def batches(self, epoch):
        yield torch.ones(1, 1)

    def loss(self, model, batch):
        return model(batch).mean(), 1

    def evaluate(self, model, split):
        assert split == "validation"
        return {"distance": abs(float(model.weight.detach()) - 1)}


def weights_at(folder: Path, *values: float, prefix: str = "") -> list[Path]:
    for step, value in enumerate(values):
        torch.save({f"{prefix}weight": torch.tensor([[value]])}, folder / f"step-{step}.pt")
    return [folder / f"step-{step}.pt" for step in range(len(values))]


def networks(folder: Path, prefix: str = "") -> str:
    for step in range(3):
        torch.manual_seed(step)
        model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
        model(X)
        state = {prefix + name: value for name, value in model.state_dict().items()}
        torch.save(state, folder / f"step-{step}.pt")
    return str(folder / "step-*.pt")


# -------------------------------------------------------------------------------------- BatchNorm


def test_statistics_are_flagged_as_stale(tmp_path):
    with pytest.warns(UserWarning, match="BatchNorm statistics .* do not fit"):
        provenance = average(networks(tmp_path), tmp_path / "out.pt")
    assert provenance.batchnorm == "stale"
    assert "1.num_batches_tracked" in provenance.copied


@pytest.mark.parametrize("prefix", ["", "model."])
def test_a_task_refreshes_the_statistics(prefix, tmp_path):
    (tmp_path / "my_task.py").write_text(TASK)
    provenance = average(
        networks(tmp_path, prefix), tmp_path / "out.pt", refresh=tmp_path / "my_task.py"
    )
    assert provenance.batchnorm == "refreshed"
    result = torch.load(tmp_path / "out.pt")
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    model.load_state_dict({name.removeprefix(prefix): value for name, value in result.items()})
    found = {name: value.clone() for name, value in model[1].named_buffers()}
    gadam.refresh_batchnorm(model, [X])
    for name in ("running_mean", "running_var"):
        torch.testing.assert_close(found[name], model[1].get_buffer(name))


def test_a_task_with_another_model_is_refused(tmp_path):
    (tmp_path / "my_task.py").write_text(TASK.replace("nn.Linear(4, 1))", "nn.Linear(4, 2))"))
    with pytest.raises(
        CheckpointError, match=r"do not fit the model of the task: they differ in 2"
    ):
        average(networks(tmp_path), tmp_path / "out.pt", refresh=tmp_path / "my_task.py")
    longer = TASK.replace("nn.Linear(4, 1))", "nn.Linear(4, 1), nn.Linear(1, 1))")
    (tmp_path / "my_task.py").write_text(longer)
    with pytest.raises(CheckpointError, match=r"they lack 3.weight, 3.bias"):
        average(networks(tmp_path), tmp_path / "out.pt", refresh=tmp_path / "my_task.py")


def test_weights_without_batchnorm_need_no_refresh(tmp_path):
    paths = weights_at(tmp_path, 1.0, 2.0)
    assert average(paths, tmp_path / "out.pt", refresh=Distance()).batchnorm == "none"


# ---------------------------------------------------------------------------------- greedy soups


def test_a_checkpoint_is_kept_only_if_validation_improves(tmp_path):
    paths = weights_at(tmp_path, 5.0, 0.5, 1.7, 1.4)
    # 1.4 is the best, then 0.5: their mean 0.95 is better. 1.7 makes it 1.2, and 5 makes it 2.3.
    provenance = average(paths, tmp_path / "out.pt", select="greedy", task=Distance())
    assert [each.weight for each in provenance.inputs] == [0, 0.5, 0, 0.5]
    assert [each.score for each in provenance.inputs] == pytest.approx([4, 0.5, 0.7, 0.4])
    assert provenance.score == pytest.approx(0.05)
    assert provenance.metric == "distance"
    assert torch.load(tmp_path / "out.pt")["weight"].item() == pytest.approx(0.95)


def test_a_soup_of_one_says_so(tmp_path):
    paths = weights_at(tmp_path, 1.0, 2.0, float("inf"))
    with pytest.warns(UserWarning, match=r"No other checkpoint improves .*step-0.pt"):
        provenance = average(paths, tmp_path / "out.pt", select="greedy", task=Distance())
    assert [each.weight for each in provenance.inputs] == [1, 0, 0]


def test_a_soup_of_a_network_with_batchnorm_has_fitting_statistics(tmp_path):
    (tmp_path / "my_task.py").write_text(TASK)
    pattern = networks(tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the soup may be of one checkpoint
        provenance = average(
            pattern, tmp_path / "out.pt", select="greedy", task=tmp_path / "my_task.py"
        )
    assert provenance.batchnorm == "refreshed"
    task = SupervisedTask(
        model=lambda: nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)),
        train=(X, X.sum(1, keepdim=True)),
        validation=(X, X.sum(1, keepdim=True)),
        loss=nn.functional.mse_loss,
        metric="mse",
    )
    task.setup(0, torch.device("cpu"))
    task.model.load_state_dict(torch.load(tmp_path / "out.pt"))
    assert task.evaluate(task.model, "validation")["mse"] == pytest.approx(provenance.score)
    assert provenance.score is not None
    assert provenance.score <= min(each.score or 0 for each in provenance.inputs)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"select": "greedy"}, "needs validation data. Pass --task"),
        ({"task": Distance()}, "Did you mean --refresh"),
        ({"select": "best", "task": Distance()}, "select must be greedy, got 'best'"),
        ({"select": "greedy", "task": Distance(), "weights": "ema"}, "Remove --weights"),
    ],
)
def test_selections_that_cannot_work(options, message, tmp_path):
    with pytest.raises(CheckpointError, match=message):
        average(weights_at(tmp_path, 1.0, 2.0), tmp_path / "out.pt", **options)


def test_the_test_split_is_never_used_to_select(tmp_path):
    task = Distance()
    task.splits = ("test",)
    with pytest.raises(CheckpointError, match="no validation data"):
        average(weights_at(tmp_path, 1.0, 2.0), tmp_path / "o.pt", select="greedy", task=task)
