"""The training loop on several ranks (gloo): the same numbers as one process, and exact resumption.

Sums of ranks are taken in another order than those of one process. So numbers agree to rounding
between different numbers of ranks, and to the bit between runs with the same number.
"""

from __future__ import annotations

import contextlib
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))
import rank_workers
import workers
from rank_workers import DOUBLE, NORMALIZED, own, results

import gadam
from compare_runs import numbers
from contract import same
from gadam.commands import main
from gadam.runs import Average, Data, Language, Optimizer, Recipe, RunFolder, sharded
from gadam.runs.folder import read_weights
from gadam.train import distributed
from gadam.train.distributed import ALONE
from gadam.train.tasks import with_code
from gadam.train.tasks.own import load_task

IMAGES = Recipe(
    "images",
    model="logistic",
    data=Data("fashion-mini", validation=101, examples=333, size=14),
    optimizer=Optimizer("adamw", 1e-3, 0.1),
    average=Average(1, every=1),
    epochs=5,
    batch_size=20,
)
LANGUAGE = Recipe(
    "language",
    model="awd-lstm-mini",
    data=Data("toy-language", examples=1700, augment=False),
    optimizer=Optimizer("adam", 1e-3, 1e-6),
    average=Average(1, every=1),
    language=Language(
        bptt=20,
        dropout=0,
        dropout_hidden=0,
        dropout_input=0,
        dropout_words=0,
        weight_drop=0,
    ),
    epochs=5,
    batch_size=8,
    clip_grad_norm=0.25,
)
STRATEGIES = [
    "ddp",
    pytest.param(
        "fsdp2", marks=pytest.mark.skipif(not workers.SHARDS_ON_CPU, reason="needs newer torch")
    ),
]


def run(recipes: list[Recipe], processes: int, folder: Path, strategy: str = "ddp", **options: Any):
    """Train recipes on some ranks, or with one process."""
    folder.mkdir(exist_ok=True)
    worker: Any = partial(rank_workers.observe, recipes=recipes, **options)
    if processes == 0:
        worker(ALONE, folder)
    else:
        rank_workers.run(worker, processes, folder, strategy)  # type: ignore[arg-type]


def difference(a: Any, b: Any) -> float:
    """Return the largest difference between two dicts or lists of tensors."""
    pairs = zip(a.values(), b.values()) if isinstance(a, dict) else zip(a, b)
    return max(float((x - y).abs().max()) for x, y in pairs if x.is_floating_point())


def joined(found: list[Any]) -> list[Any]:
    """Return the sequence of global batches, from the parts of the ranks."""
    steps = zip(*(rank["batches"] for rank in found), strict=True)
    return [_join([part for part in parts if part is not None]) for parts in steps]


def _join(parts: list[Any]) -> list[torch.Tensor]:
    if hasattr(parts[0], "words"):  # columns of a text
        return [torch.cat([part[i] for part in parts], dim=1) for i in (0, 1)]
    return [torch.cat(tensors) for tensors in zip(*parts)]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_two_ranks_equal_one_process_with_the_same_global_batches(strategy, tmp_path):
    check_equality([IMAGES, own(DOUBLE, "double", tmp_path)], [2], strategy, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_text_and_three_ranks(strategy, tmp_path):
    recipes = [IMAGES, LANGUAGE, own(DOUBLE, "double", tmp_path)]
    recipes += [own(DOUBLE, "accumulated", tmp_path, accumulate=3, clip_grad_norm=0.1)]
    check_equality(recipes, [2, 3], strategy, tmp_path)


def check_equality(recipes: list[Recipe], sizes: list[int], strategy: str, folder: Path) -> None:
    """Train on several ranks and with one process, and compare batches, weights and metrics."""
    run(recipes, 0, folder / "0")
    for size in sizes:
        run(recipes, size, folder / f"{size}", strategy)
    for recipe in recipes:
        tolerance = 1e-6 if recipe.task is None else 1e-12
        (alone,) = results(folder / "0", recipe.name)
        assert len(alone["batches"]) >= 50
        result, lines = numbers(folder / "0" / recipe.name)
        for size in sizes:
            found = results(folder / f"{size}", recipe.name)
            assert len(found) == size
            same(joined(found), joined([alone]))
            for rank in found:
                assert difference(rank["model"], alone["model"]) < tolerance
                assert difference(rank["state"]["average"], alone["state"]["average"]) < tolerance
                same([rank["model"], rank["state"]], [found[0]["model"], found[0]["state"]])
            # Every example counts once, so the metrics agree.
            other_result, others = numbers(folder / f"{size}" / recipe.name)
            assert other_result["epochs"] == result["epochs"]
            for line, other in zip(lines, others, strict=True):
                assert math.isclose(line["train_loss"], other["train_loss"], rel_tol=1e-5)
                for point in {"iterate", "average"} & line.keys():
                    for split, metrics in line[point].items():
                        assert other[point][split] == pytest.approx(metrics, rel=1e-5)


@pytest.mark.skipif(not workers.SHARDS_ON_CPU, reason="needs newer torch")
def test_shards_are_distributed_tensors_and_use_the_fused_kernel(tmp_path):
    run([replace(IMAGES, blocks=4)], 2, tmp_path, "fsdp2")
    for rank in results(tmp_path, "images"):
        assert rank["sharded"]
        sharded = {name for name, is_sharded in rank["kinds"] if is_sharded}
        assert {"exp_avg", "exp_avg_sq", "average"} <= sharded
        assert rank["kernels"] == len(rank["batches"])
    shards = sorted(path.name for path in (tmp_path / "images" / "blocks").glob("shard-*"))
    assert shards == ["shard-00000-of-00002", "shard-00001-of-00002"]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_refreshed_statistics_are_those_of_all_data_on_all_ranks(strategy, tmp_path):
    recipe = own(NORMALIZED, "normalized", tmp_path, epochs=2)
    run([recipe], 2, tmp_path, strategy)
    first, second = results(tmp_path, "normalized")
    assert len(first["buffers"]) > 2
    same([first["buffers"], first["model"]], [second["buffers"], second["model"]])
    assert recipe.task is not None
    task: Any = load_task(recipe.task.path)
    task.batch_size = recipe.batch_size
    task.setup(3, torch.device("cpu"))
    alone = torch.nn.Sequential(torch.nn.BatchNorm1d(6))
    gadam.refresh_batchnorm(alone, [x for x, _ in task.refresh(1)])
    for name in ("0.running_mean", "0.running_var"):
        torch.testing.assert_close(first["buffers"][-1][name], alone.state_dict()[name])


def stopped_and_whole(recipes: list[Recipe], strategy: str, folder: Path) -> dict[str, Path]:
    """Train on two ranks, once to the end, and once until a rank stops in an epoch."""
    run(recipes, 2, folder / "whole", strategy)
    run(recipes, 2, folder / "stopped", strategy, stop=8)
    saved = {recipe.name: newest(folder / "stopped" / recipe.name) for recipe in recipes}
    assert all("+" in path.name for path in saved.values())  # within an epoch
    return saved


def newest(folder: Path) -> Path:
    return max(folder.glob("checkpoint-*"))


def check_continuation(recipes: list[Recipe], processes: int, strategy: str, folder: Path) -> None:
    """Continue the stopped runs elsewhere, and compare them with undisturbed ones."""
    place = folder / f"on-{processes}"
    shutil.copytree(folder / "stopped", place)
    run(recipes, processes, place, strategy)
    for recipe in recipes:
        (found, *_), (whole, *_) = (results(p, recipe.name) for p in (place, folder / "whole"))
        if processes == 2:  # to the bit
            same([found["model"], found["state"]], [whole["model"], whole["state"]])
            assert numbers(place / recipe.name) == numbers(folder / "whole" / recipe.name)
            continue
        tolerance = 1e-6 if recipe.task is None else 1e-12
        assert difference(found["model"], whole["model"]) < tolerance
        assert difference(found["state"]["average"], whole["state"]["average"]) < tolerance


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_stopped_run_of_two_ranks_continues_to_the_same_bits(strategy, tmp_path):
    """Also its blocks, and BatchNorm statistics that are not refreshed."""
    recipes = [
        own(DOUBLE, "double", tmp_path, epochs=3, blocks=4),
        own(NORMALIZED, "normalized", tmp_path, epochs=3, refresh_batchnorm=False),
    ]
    saved = stopped_and_whole(recipes, strategy, tmp_path)
    for name, path in saved.items():
        state = read_weights(path)
        assert state is not None
        (first, second) = results(tmp_path / "stopped", name)
        same([state["model"], second["model"]], [first["model"], first["model"]])
        moments = [state["optimizer"]["state"][i]["exp_avg"] for i in range(4)]
        same(moments, first["state"]["exp_avg"][:4])
    check_continuation(recipes, 2, strategy, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_checkpoint_of_two_ranks_continues_on_any_number(strategy, tmp_path):
    recipes = [own(DOUBLE, "double", tmp_path, epochs=3), replace(LANGUAGE, epochs=2)]
    stopped_and_whole(recipes, strategy, tmp_path)
    for processes in (1, 2, 3):
        check_continuation(recipes, processes, strategy, tmp_path)


@pytest.mark.skipif(not workers.SHARDS_ON_CPU, reason="needs newer torch")
def test_checkpoints_of_one_process_and_of_ranks_convert_into_each_other(tmp_path):
    recipe = own(DOUBLE, "double", tmp_path, epochs=6)
    run([recipe], 0, tmp_path / "whole")
    (whole,) = results(tmp_path / "whole", "double")
    # One process, then two ranks with shards, then one process
    run([recipe], 0, tmp_path / "run", stop=14, seconds=0.0)
    assert newest(tmp_path / "run" / "double").suffix == ".pt"
    run([recipe], 2, tmp_path / "run", "fsdp2", stop=10, seconds=0.0)
    assert newest(tmp_path / "run" / "double").suffix == ".dcp"
    run([recipe], 0, tmp_path / "run")
    found = results(tmp_path / "run", "double")[0]
    assert difference(found["model"], whole["model"]) < 1e-12
    assert difference(found["state"]["average"], whole["state"]["average"]) < 1e-12


def test_asynchronous_checkpoints_have_the_same_content(tmp_path):
    recipe = own(DOUBLE, "double", tmp_path, epochs=2)
    for name, asynchronous in (("now", False), ("later", True)):
        run([recipe], 2, tmp_path / name, seconds=0.0, async_checkpoints=asynchronous)
    kept = [sorted((tmp_path / name / "double").glob("*.dcp")) for name in ("now", "later")]
    assert [path.name[:17] for path in kept[0]] == [path.name[:17] for path in kept[1]]
    for a, b in zip(*kept, strict=True):
        assert (sharded.verify(a), sharded.verify(b)) == ("", "")
        states = [read_weights(path) for path in (a, b)]
        for state in states:
            assert state is not None
            del state["lines"], state["header"]
        same(*states)


def test_half_written_and_mixed_checkpoints_are_never_loaded(tmp_path):
    recipe = own(DOUBLE, "double", tmp_path, epochs=4)
    run([recipe], 2, tmp_path / "whole")
    run([recipe], 2, tmp_path / "stopped", stop=14, seconds=0.0)
    folder = tmp_path / "stopped" / "double"
    older, last = sorted(folder.glob("checkpoint-*.dcp"))
    for what in ("half", "overwritten", "mixed", "renamed", "foreign"):
        place = tmp_path / what / "double"
        shutil.copytree(folder, place)
        damaged = place / last.name
        if what == "half":
            damaged.rename(place / ".checkpoint-000003.dcp.unfinished")
        elif what == "overwritten":
            shutil.copytree(older, damaged, dirs_exist_ok=True)
        elif what == "mixed":
            shutil.copy(older / "__1_0.distcp", damaged / "__1_0.distcp")
        elif what == "renamed":
            (place / older.name).rename(place / "checkpoint-000003-0123456789abcdef.dcp")
        else:
            shutil.copy(older / "__1_0.distcp", damaged / "__1_1.distcp")
        assert what in ("half", "renamed") or sharded.verify(damaged)
        run_folder = RunFolder(place, with_code(recipe), 3)
        with run_folder.locked():
            run_folder.begin(1)
            found = run_folder.find_checkpoint()[1]
        assert found == place / (last if what == "renamed" else older).name, what
        assert not list(place.glob(".checkpoint*"))
    run([recipe], 2, tmp_path / "mixed")
    (found, _), (whole, _) = (results(tmp_path / name, "double") for name in ("mixed", "whole"))
    same(found["model"], whole["model"])


# ------------------------------------------------------------------------------------ the command

SETTINGS = [
    "epochs=3",
    "examples=333",
    "validation=100",
    "data.size=14",
    "average.start=1",
    "model=logistic",
]
TRAIN = ["train", "compare-gadam", *(f"--set={setting}" for setting in SETTINGS)]


def run_command(arguments: list[str], folder: Path, **options: Any) -> tuple[list[int], list[str]]:
    """Run a command on two ranks, and return their exit codes and what they print."""
    worker = partial(rank_workers.command, arguments=arguments, **options)
    rank_workers.run(worker, 2, folder, None)
    codes = [int((folder / f"code-{rank}").read_text()) for rank in range(2)]
    return codes, [(folder / f"output-{rank}").read_text() for rank in range(2)]


def test_the_command_prints_once_and_its_runs_can_be_verified_and_averaged(tmp_path, capsys):
    out = tmp_path / "runs"
    codes, (first, second) = run_command([*TRAIN, f"--out={out}", "--seeds=2"], tmp_path)
    assert codes == [0, 0]
    assert "The runs are in" in first
    assert second == ""
    assert main(["verify", "--weights", str(out)]) == 0
    assert "2 runs: 2 match their manifest. No problems." in capsys.readouterr().out
    checkpoints = [newest(out / f"compare-gadam-{seed}") for seed in (0, 1)]
    merged = tmp_path / "merged"
    assert main(["average", *map(str, checkpoints), "--order=given", f"--out={merged}"]) == 0
    weights = [(read_weights(path) or {})["model"]["1.weight"] for path in checkpoints]
    mean = torch.stack(weights).double().mean(0).float()
    found = torch.empty_like(mean)
    with sharded.quiet():
        torch.distributed.checkpoint.state_dict_loader.load(
            {"model.1.weight": found}, storage_reader=sharded.Reader(merged)
        )
    torch.testing.assert_close(found, mean)


def test_sigterm_to_one_rank_stops_all_after_a_checkpoint(tmp_path):
    arguments = [*TRAIN, "--set=epochs=100000", f"--out={tmp_path / 'runs'}"]
    codes, (first, second) = run_command(arguments, tmp_path, terminate="runs/*/checkpoint-*")
    assert codes == [distributed.EXIT_PREEMPTED] * 2 == [143, 143]
    assert "has a checkpoint. Rerun the command to resume." in first
    assert second == ""
    assert sharded.verify(newest(tmp_path / "runs" / "compare-gadam-0")) == ""


def torchrun(arguments: list[str], log: Path, *options: str) -> subprocess.Popen[bytes]:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", *options]
    environment = {**os.environ, "GADAM_CHECKPOINT_SECONDS": "0", "OMP_NUM_THREADS": "1"}
    with log.open("wb") as output:
        return subprocess.Popen(
            [*launcher, "--nproc-per-node=2", "-m", "gadam", *arguments],
            stdout=output,
            stderr=output,
            env=environment,
            start_new_session=True,
        )


def test_a_rank_that_lost_another_one_reports_before_it_exits():
    """SIGTERM from torchrun must not end a rank that is about to report."""
    before = signal.getsignal(signal.SIGTERM)
    try:
        with pytest.raises(distributed.LostRank), distributed.Preemption():
            raise distributed.LostRank("Another process of this run died.")
        os.kill(os.getpid(), signal.SIGTERM)  # would end this process
    finally:
        signal.signal(signal.SIGTERM, before)
    with pytest.raises(ValueError, match="another error"), distributed.Preemption():
        raise ValueError("another error")
    assert signal.getsignal(signal.SIGTERM) is before


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="it looks for ranks in /proc")
def test_torchrun_restarts_a_killed_rank_and_forwards_sigterm(tmp_path):
    """The command as users start it."""
    command = [*TRAIN, "--set=epochs=60", "--set=evaluate_every=20"]
    for name in ("whole", "killed", "stopped"):
        out, log = f"--out={tmp_path / name}-runs", tmp_path / f"{name}.log"
        process = torchrun([*command, out], log, "--max-restarts=1")
        try:
            if name != "whole":
                end = time.monotonic() + rank_workers.SECONDS
                while time.monotonic() < end and not list(tmp_path.glob(f"{name}-runs/*/check*")):
                    time.sleep(0.01)
                children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text()
                victim = int(children.split()[-1]) if name == "killed" else process.pid
                os.kill(victim, signal.SIGKILL if name == "killed" else signal.SIGTERM)
            code = process.wait(rank_workers.SECONDS)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        text = (tmp_path / f"{name}.log").read_text()
        assert code == (1 if name == "stopped" else 0), text
    assert "Another process of this run died." in (tmp_path / "killed.log").read_text()
    assert "has a checkpoint. Rerun the command" in (tmp_path / "stopped.log").read_text()
    whole, killed = (tmp_path / f"{name}-runs/compare-gadam-0" for name in ("whole", "killed"))
    assert numbers(whole) == numbers(killed)
    assert not list(tmp_path.glob("stopped-runs/*/result.json"))


def test_errors_are_told_once_and_stop_all_ranks(tmp_path):
    codes, (first, second) = run_command(["train", "compare-gada"], tmp_path)
    assert codes == [2, 2]
    assert "Did you mean 'compare-gadam'?" in first
    assert second == ""


def test_strategies_need_torchrun(capsys):
    assert main([*TRAIN, "--strategy", "fsdp2"]) == 2
    assert "torchrun --nproc-per-node=2 -m gadam train" in capsys.readouterr().err


BROKEN = """
import os

import torch

from gadam.train import SupervisedTask


def batches(epoch):
    for step in range(4):
        if epoch == 1 and step == 2 and os.environ.get("RANK") == "1":
            raise FileNotFoundError("shard-7 is gone")
        yield torch.ones(4, 2), torch.zeros(4, dtype=torch.long)


def task():
    return SupervisedTask(lambda: torch.nn.Linear(2, 2), batches, batches)
"""


def fail(ranks: distributed.Ranks, folder: Path, recipe: Recipe) -> None:
    with pytest.raises(Exception) as failure:
        rank_workers.train(recipe, folder / "run", ranks)
    (folder / f"error-{ranks.rank}").write_text(repr(failure.value))


def test_an_error_of_one_rank_is_known_to_all(tmp_path):
    recipe = own(BROKEN, "broken", tmp_path, epochs=3)
    rank_workers.run(partial(fail, recipe=recipe), 2, tmp_path)
    assert "Rank 1: FileNotFoundError: shard-7 is gone" in (tmp_path / "error-0").read_text()
    assert "RankError" in (tmp_path / "error-0").read_text()
    assert "shard-7 is gone" in (tmp_path / "error-1").read_text()


def test_ranks_of_a_new_attempt_never_meet_those_of_an_old_one():
    """Torchrun keeps its store when it restarts the ranks."""
    store = torch.distributed.HashStore()
    names = []
    for attempt in range(3):
        with ThreadPoolExecutor(3) as pool:
            found = []
            for rank in range(3):
                found.append(pool.submit(distributed.meet, store, rank, 3, 60.0))
                time.sleep(0.06 * attempt)  # the first one sees the old names of the others
            (name,) = {future.result() for future in found}
        names.append(name)
    assert len(set(names)) == 3
    with pytest.raises(distributed.RankError, match="Not all 2 processes arrived"):
        distributed.meet(torch.distributed.HashStore(), 0, 2, 0.2)


def test_only_errors_of_communication_are_explained_by_other_ranks():
    ranks = distributed.Ranks(0, 2, store=torch.distributed.HashStore())
    mine = RuntimeError("expected a matrix of rank 2")
    assert ranks.explain(mine) is mine
    lost = RuntimeError("[/gloo/transport/tcp/pair.cc:553] Connection closed by peer")
    ranks.announce(lost)
    assert isinstance(ranks.explain(lost), distributed.LostRank)
    other = distributed.Ranks(1, 2, store=ranks.store)
    other.announce(mine)
    assert str(ranks.explain(lost)) == "Rank 1: RuntimeError: expected a matrix of rank 2"
