"""Predicted costs of large runs, against torch's sharding and against runs on 1, 2 and 3 ranks."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import quick_processes
from benchmarks import capacity as benchmark
from gadam.train.capacity import (
    NETWORKS,
    Costs,
    Machine,
    Network,
    Settings,
    measure,
    predict,
    shard_rows,
)

COSTS = Costs(moments=8, average=4, per_tensor=4, fixed=56)


def test_memory_and_traffic_are_exact_on_1_2_and_3_ranks():
    start_method = quick_processes.context().get_start_method()
    rows = benchmark.on_ranks(benchmark.check, start_method)
    assert len(rows) == len(benchmark.CASES) * (1 + 2 + 3)
    for row in rows:
        assert row["observed"] == row["expected"], row["case"]
    # Not only zeros
    last = next(r for r in rows if r["case"] == "fsdp2, float32" and r["ranks"] == 3)
    assert all(last["observed"]["memory"].values())
    assert min(last["observed"]["traffic"][name] for name in ("step", "average", "refresh")) > 0


@pytest.mark.slow
def test_times_are_predicted_and_measured_on_the_same_ranks():
    """Without a comparison: times on a shared machine are not for tests."""
    rows = benchmark.on_ranks(benchmark.time_step, quick_processes.context().get_start_method())
    assert [row["ranks"] for row in rows] == [1, 2, 2, 3, 3, 3]
    for row in rows:
        assert 0 < row["predicted"] < 60
        assert 0 < row["measured"] < 60
        assert (row["communication"] > 0) == (row["ranks"] > 1)


@given(rows=st.integers(1, 500), ranks=st.integers(1, 64))
def test_rows_per_rank_are_those_of_chunk(rows, ranks):
    chunks = [len(chunk) for chunk in torch.arange(rows).chunk(ranks)]
    chunks += [0] * (ranks - len(chunks))
    assert [shard_rows(rows, rank, ranks) for rank in range(ranks)] == chunks


def test_measured_costs():
    assert measure("gadam") == measure("gadamx") == COSTS
    assert measure("adamw") == replace(COSTS, average=0, fixed=0)
    assert measure("sgd") == Costs(moments=4, average=0)
    assert measure("gadam", torch.bfloat16) == replace(COSTS, moments=4)


def test_networks_have_the_published_numbers_of_parameters():
    published = {"1B": 1_235_814_400, "8B": 8_030_261_248, "70B": 70_553_706_496}
    assert {name: network.parameters for name, network in NETWORKS.items()} == published


@given(ranks=st.integers(1, 40))
def test_all_ranks_together_hold_everything_once(ranks):
    network = Network("", (((7, 3), (5,)), ((1,), (64, 2))), ((9, 4),), channels=(3,))
    found = [predict(network, ranks, COSTS, rank=rank) for rank in range(ranks)]
    for kind, cost in (("weights", 4), ("moments", 8), ("average", 4), ("blocks", 8)):
        assert sum(f.memory[kind] for f in found) == cost * network.parameters
    replicated = Settings("ddp")
    alone = predict(network, 1, COSTS, replicated).memory
    assert predict(network, ranks, COSTS, replicated).memory == alone


@given(
    ranks=st.sampled_from([1, 2, 8, 64, 1024]),
    network=st.sampled_from(list(NETWORKS.values())),
    speed=st.floats(1e9, 1e12),
    strategy=st.sampled_from(["fsdp2", "ddp"]),
)
def test_a_step_takes_at_least_its_longest_part_and_at_most_all_of_them(
    ranks, network, speed, strategy
):
    machine = Machine(link=speed, network=speed)
    settings = Settings(strategy)
    seconds = predict(network, ranks, COSTS, settings, machine).seconds
    one_by_one = predict(network, ranks, COSTS, settings, replace(machine, overlaps=False)).seconds
    parts = seconds["compute"], seconds["communication"]
    rest = seconds["update"] + seconds["average"]
    assert (1 - 1e-9) * max(parts) <= seconds["step"] - rest <= (1 + 1e-9) * sum(parts)
    assert one_by_one["step"] == pytest.approx(sum(parts) + rest)


def test_what_breaks_first():
    small, large = NETWORKS["1B"], NETWORKS["70B"]
    assert predict(small, 8, COSTS).problems == ()
    assert predict(large, 8, COSTS).problems[0].startswith("memory: 272 GB per GPU")
    slow = Machine(network=1e9)
    assert "network: GPUs wait" in predict(small, 64, COSTS, machine=slow).problems[0]
    disk = Machine(storage=1e9)
    problems = predict(small, 8, COSTS, Settings(blocks_every=10), disk).problems
    assert [problem.split(":")[0] for problem in problems] == ["blocks", "checkpoints"]
    full = predict(small, 8, COSTS)
    tight = Machine(memory=sum(full.memory.values()) - 1)
    assert "while the average is applied" in predict(small, 8, COSTS, machine=tight).problems[0]


def test_the_committed_predictions_are_those_of_the_code():
    content = json.loads(Path(benchmark.RESULT).read_text())
    assert content["predictions"] == json.loads(json.dumps(benchmark.predictions()))
    assert content["checks"]["wrong"] == 0
