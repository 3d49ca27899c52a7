"""Benchmarks of windows chosen after training, in small, and what their committed results claim."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from benchmarks.windows import exactness, post_hoc_ema, starts

import gadam
from gadam.runs.files import Document

RESULTS = Path(__file__).parents[2] / "results"


def committed(name: str) -> Document:
    content: Document = json.loads((RESULTS / f"{name}.json").read_text())
    return content


@pytest.mark.parametrize("name", ["gadam", "sgd", "adamw", "drift"])
def test_windows_are_exact(name):
    found = exactness.exactness(name, every=5, max_blocks=4, seed=0, steps=60)
    assert found["blocks"] == 4
    assert found["merged"]
    assert found["largest"] <= 1e-6


def test_the_committed_errors_are_below_the_stated_one():
    report = committed("block-exactness")
    assert set(report["errors"]) == set(exactness.CASES)
    for label, (_, every, _) in exactness.CASES.items():
        row = report["errors"][label]
        assert row["largest"] <= (1e-6 if every <= 100 else (every / 2 + 8) * 2**-24)
    assert report["memory"]["copies"]["blocks"] < 2.2  # the current block, and the one on its way


def test_the_truth_is_the_power_ema_of_all_iterates(tmp_path):
    model = post_hoc_ema.Problem("quadratic", 60)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    blocks = gadam.BlockAverages(optimizer, tmp_path / "blocks", every=1)
    iterates = []
    for _ in range(60):
        model.set_gradient()
        optimizer.step()
        iterates.append(model.weight.detach().clone())
    expected = post_hoc_ema.truth(torch.stack(iterates), 0.1)
    found = blocks.model_state_dict(model, dtype=torch.float64, weighting=gadam.PowerEMA(0.1))
    torch.testing.assert_close(found["weight"], expected, rtol=1e-9, atol=1e-9)
    blocks.remove()


def test_the_committed_emas_are_within_a_thousandth_of_the_true_ones():
    for problem in committed("post-hoc-ema")["problems"].values():
        for row in problem["widths"].values():
            assert row["results"]["BlockAverages"]["relative error"] < 1e-3
            assert row["results"]["PostHocEMA, defaults"]["relative error"] > 0.5


def test_the_starts_of_the_papers_figure_are_those_of_its_recipes():
    known = starts.workloads()
    assert known["LSTM Gadam"].starts == {"0": 0, "25": 4, "50": 8, "100": 15, "150": 22}
    for workload in known.values():
        assert workload.recipe.average is not None
        assert not workload.starts or workload.recipe.average.start in workload.starts.values()
    assert starts.nearest([0, 10, 20], 17) == 10  # a window cannot start at its end


def test_the_committed_choices_are_the_best_on_validation_data():
    for label, workload in committed("starts")["workloads"].items():
        best = max if workload["mode"] == "max" else min
        for run in workload["runs"]:
            values = run["validation"]
            assert label in starts.workloads()
            searched = {start: v for start, v in values.items() if int(start) != run["default"]}
            assert values[str(run["chosen"])] == best(
                [*searched.values(), values[str(run["chosen"])]]
            )
            assert set(run["test"]) == {str(run["default"]), str(run["chosen"])}
