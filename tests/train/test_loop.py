"""The training loop: what it computes, exact resumption, and separation of the data splits."""

from __future__ import annotations

import errno
import json
import os
import sys
from dataclasses import replace

import pytest
import torch

import gadam
import synthetic
from compare_runs import assert_same_run, stop_after, without_times
from contract import same
from gadam.runs import (
    Average,
    Data,
    EpochRecord,
    Language,
    Optimizer,
    Recipe,
    RecipeError,
    RunError,
    RunFolder,
    RunResult,
    Schedule,
)
from gadam.runs.folder import read_weights
from gadam.runs.lines import read_epochs
from gadam.runs.record import Point
from gadam.train import loop
from gadam.train.tasks import ImageTask, images

DATA = Data("fashion-mini", validation=100, examples=400, size=14, augment=False, label_noise=0.2)
BASE = Recipe(
    "r",
    model="logistic",
    data=DATA,
    optimizer=Optimizer("sgd", 0.05),
    epochs=4,
    batch_size=100,
)
AVERAGED = replace(BASE, average=Average(1), optimizer=Optimizer("adamw", 1e-2, 0.1))

LANGUAGE = Recipe(
    "l",
    model="awd-lstm-mini",
    data=Data("toy-language", examples=800, augment=False),
    optimizer=Optimizer("adam", 1e-2, 1e-6),
    average=Average(1, every=1),
    language=Language(bptt=20),
    epochs=4,
    batch_size=8,
    clip_grad_norm=0.25,
)

METHODS = {
    "sgd": BASE,
    "swa": replace(BASE, average=Average(1)),
    "gadam": AVERAGED,
    "gadam every step": replace(AVERAGED, average=Average(1, every=1)),
    "gadamx": replace(AVERAGED, optimizer=Optimizer("padamw", 0.1, 1e-2)),
    "gadam + LH": replace(AVERAGED, optimizer=Optimizer("adamw", 1e-2, 0.1, lookahead=True)),
    "sgd + LH": replace(BASE, optimizer=Optimizer("sgd", 0.05, lookahead=True)),
    "ranger": replace(BASE, optimizer=Optimizer("ranger", 1e-2)),
    "asgd": replace(BASE, optimizer=Optimizer("asgd", 0.1), average=Average(1, every=1)),
    "padam": replace(BASE, optimizer=Optimizer("padam", 0.1, amsgrad=True)),
    "adam": replace(BASE, optimizer=Optimizer("adam", 1e-2, 1e-4)),
    "cosine": replace(BASE, optimizer=Optimizer("adamw", 1e-2), schedule=Schedule("cosine")),
    "ema": replace(AVERAGED, average=Average(1, every=1, weighting="ema", decay=0.9)),
    "blocks": replace(AVERAGED, blocks=5),
    "lawa": replace(AVERAGED, average=Average(0, weighting="window", size=2)),
    "auto": replace(AVERAGED, average=Average("plateau", patience=1), epochs=6),
    "schedule-free": replace(BASE, optimizer=Optimizer("schedule-free", 1e-2)),
    "batchnorm": replace(AVERAGED, model="vgg-mini", data=replace(DATA, size=8)),
    "accumulate, clip, augment": replace(
        AVERAGED, accumulate=3, clip_grad_norm=0.5, data=replace(DATA, augment=True, pad=1)
    ),
    "bf16": replace(AVERAGED, amp="bf16"),
    "language": LANGUAGE,
    "language, gadamx every 10": replace(
        LANGUAGE, optimizer=Optimizer("padam", 0.5, partial=0.2), average=Average(1, every=10)
    ),
    "language, nt-asgd": replace(
        LANGUAGE,
        optimizer=Optimizer("asgd", 5.0),
        average=Average("non-monotone", every=1, patience=1),
        epochs=5,
    ),
    "language, accumulate": replace(LANGUAGE, accumulate=2),
    "language, bf16": replace(LANGUAGE, amp="bf16"),
}


def loss_of(result: RunResult, point: Point = "iterate") -> float:
    """Return the test loss at a point."""
    loss = result.metric("loss", point)
    assert loss is not None
    return loss


@pytest.mark.usefixtures("short_texts")
@pytest.mark.parametrize("name", METHODS)
def test_a_stopped_run_resumes_to_the_same_bits(name, tmp_path, monkeypatch):
    """Stop in the third epoch, and again after resuming, with a checkpoint at every epoch."""
    if name == "schedule-free":
        pytest.importorskip("schedulefree")
    # Blocks carry a random number of the run, which tells them from those of other runs.
    monkeypatch.setattr("gadam.average.blocks.secrets.randbelow", lambda limit: 1)
    recipe = METHODS[name]
    loop.train(recipe, tmp_path / "whole", seed=3)
    monkeypatch.setattr(loop, "CHECKPOINT_SECONDS", 0.0)
    for steps in (7, 2):
        with pytest.raises(loop.Stopped):
            loop.train(recipe, tmp_path / "torn", seed=3, should_stop=stop_after(steps))
    loop.train(recipe, tmp_path / "torn", seed=3)
    assert_same_run(tmp_path / "whole", tmp_path / "torn")


def test_a_run_stopped_before_its_first_checkpoint_starts_over(tmp_path):
    loop.train(BASE, tmp_path / "whole")
    with pytest.raises(loop.Stopped):
        loop.train(BASE, tmp_path / "torn", should_stop=stop_after(8))
    assert (tmp_path / "torn" / "epochs.jsonl").read_text()
    loop.train(BASE, tmp_path / "torn")
    assert_same_run(tmp_path / "whole", tmp_path / "torn")


def test_seeds_differ_and_repeat(tmp_path):
    for folder, seed in (("a", 0), ("b", 0), ("c", 1)):
        loop.train(AVERAGED, tmp_path / folder, seed=seed)
    assert_same_run(tmp_path / "a", tmp_path / "b")
    assert without_times(tmp_path / "a")[0] != without_times(tmp_path / "c")[0]


def test_matches_a_plain_loop(tmp_path):
    """Compare with a loop written out: SGD with the linear schedule, averaged by hand."""
    recipe = replace(BASE, schedule=Schedule("linear-ia"), average=Average(1), epochs=5)
    result = loop.train(recipe, tmp_path, seed=1)
    task = ImageTask(recipe)
    task.setup(1, torch.device("cpu"))
    model = task.model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    samples = []
    for epoch in range(5):
        optimizer.param_groups[0]["lr"] = 0.05 * gadam.schedule.linear_for_averaging(epoch, start=1)
        for x, y in task.batches(epoch):
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
        if epoch >= 1:
            samples.append([p.detach().clone() for p in model.parameters()])
    assert result.samples == len(samples) == 4
    assert task.evaluate(model, "test")["loss"] == pytest.approx(loss_of(result), rel=1e-6)
    with torch.no_grad():
        for p, *values in zip(model.parameters(), *samples):
            p.copy_(torch.stack(values).mean(0))
    assert result.average is not None
    for split in ("validation", "test"):
        assert task.evaluate(model, split) == pytest.approx(result.average[split], rel=1e-5)


def test_accumulated_gradients_are_those_of_the_whole_batch(tmp_path):
    whole = loop.train(replace(BASE, batch_size=64), tmp_path / "a")
    accumulated = loop.train(replace(BASE, batch_size=64, accumulate=5), tmp_path / "b")
    assert loss_of(accumulated) == pytest.approx(loss_of(whole), rel=1e-4)


def test_clipping_bounds_the_step(tmp_path):
    clipped = replace(BASE, clip_grad_norm=1e-9, optimizer=Optimizer("sgd", 1.0, momentum=0.0))
    still = replace(BASE, optimizer=Optimizer("sgd", 0.0))
    a, b = loop.train(clipped, tmp_path / "a"), loop.train(still, tmp_path / "b")
    assert loss_of(a) == pytest.approx(loss_of(b), rel=1e-6)


def test_the_average_is_sampled_once_per_epoch_after_its_start(tmp_path):
    loop.train(replace(AVERAGED, epochs=10, average=Average(5)), tmp_path)
    records = read_epochs(tmp_path / "epochs.jsonl")
    assert [record.samples for record in records] == [0, 0, 0, 0, 0, 1, 2, 3, 4, 5]
    assert [record.average is not None for record in records] == [False] * 5 + [True] * 5


def test_the_authors_139_samples(tmp_path, monkeypatch):
    synthetic.install(monkeypatch)
    recipe = Recipe("r", "logistic", average=Average(161), epochs=300, evaluate_every=300)
    assert loop.train(recipe, tmp_path).samples == 139


def test_skipped_steps_do_not_shift_the_samples(tmp_path, monkeypatch):
    """GradScaler starts at a scale that is far too large, and finds overflows."""
    scaler = torch.amp.GradScaler
    monkeypatch.setattr(
        torch.amp, "GradScaler", lambda device, enabled: scaler(device, 2.0**26, enabled=enabled)
    )
    recipe = replace(AVERAGED, amp="fp16", average=Average(3), epochs=8)
    assert loop.train(recipe, tmp_path).samples == 5


def test_the_learning_rate_follows_the_schedule(tmp_path):
    recipe = replace(BASE, epochs=10, schedule=Schedule("step", milestones=(3, 7)))
    loop.train(replace(recipe, evaluate_every=10), tmp_path)
    records = read_epochs(tmp_path / "epochs.jsonl")
    factors = [1.0] * 3 + [0.1] * 4 + [0.01] * 3
    assert [record.lr for record in records] == pytest.approx([0.05 * f for f in factors])
    assert [record.lr for record in records] == [recipe.learning_rate(e) for e in range(10)]
    assert [record.iterate is not None for record in records] == [False] * 9 + [True]


def test_a_plateau_starts_averaging_and_ends_the_run(tmp_path):
    recipe = replace(METHODS["auto"], epochs=60, optimizer=Optimizer("adamw", 0.05))
    result = loop.train(recipe, tmp_path)
    assert result.epochs < 60
    assert 0 < result.samples < result.epochs


def test_a_diverged_run_is_marked_and_ends(tmp_path):
    recipe = replace(BASE, optimizer=Optimizer("sgd", 1e38), epochs=50)
    result = loop.train(recipe, tmp_path)
    assert result.status == "diverged"
    assert result.epochs < 50

    def refuse(constant: str) -> None:
        raise ValueError(f"{constant} is not JSON")

    for name in ("result.json", "epochs.jsonl"):
        for line in (tmp_path / name).read_text().splitlines() if name[0] == "e" else [None]:
            json.loads(line or (tmp_path / name).read_text(), parse_constant=refuse)


def test_the_last_iterates_are_kept(tmp_path, monkeypatch):
    recipe = replace(AVERAGED, keep_iterates=2)
    loop.train(recipe, tmp_path / "whole", seed=3)
    run = RunFolder(tmp_path / "whole", recipe, 3)
    last = recipe.epochs
    assert list(run.iterates()) == [last - 1, last]
    final = read_weights(run.iterates()[last])
    _, state = run.final_state()
    same(final, state["model"])
    # A stopped and resumed run has the same files, and none from discarded epochs.
    monkeypatch.setattr(loop, "CHECKPOINT_SECONDS", 0.0)
    stray = tmp_path / "torn" / "iterates" / f"iterate-{last:06d}-{'0' * 16}.pt"
    for steps in (7, 2):
        with pytest.raises(loop.Stopped):
            loop.train(recipe, tmp_path / "torn", seed=3, should_stop=stop_after(steps))
    stray.parent.mkdir(exist_ok=True)
    stray.write_bytes(b"other weights")
    loop.train(recipe, tmp_path / "torn", seed=3)
    names = [
        sorted(p.name for p in (tmp_path / d / "iterates").iterdir()) for d in ("whole", "torn")
    ]
    assert names[0] == names[1]


def test_the_last_iterates_are_kept_if_a_trigger_ends_the_run(tmp_path):
    recipe = replace(
        METHODS["auto"], epochs=60, optimizer=Optimizer("adamw", 0.05), keep_iterates=2
    )
    result = loop.train(recipe, tmp_path)
    kept = RunFolder(tmp_path, recipe, 0).iterates()
    assert list(kept) == [result.epochs - 1, result.epochs]


def test_a_partial_refresh_changes_only_the_points_before_the_last(tmp_path, monkeypatch):
    """Evaluation does not influence training, and the last one refreshes BatchNorm fully."""
    recipe = replace(AVERAGED, model="vgg-mini-narrow", epochs=3, batch_size=50)
    counts: list[int] = []
    refresh = gadam.refresh_batchnorm

    def counted(model, batches, **options):
        listed = list(batches)
        counts.append(len(listed))
        refresh(model, listed, **options)

    monkeypatch.setattr(gadam, "refresh_batchnorm", counted)
    full = loop.train(recipe, tmp_path / "full")
    assert counts == [6] * 5  # the iterate three times, the average twice
    counts.clear()
    partial = loop.train(replace(recipe, refresh_batches=2), tmp_path / "partial")
    assert counts == [2, 2, 2, 6, 6]
    assert (partial.iterate, partial.average) == (full.iterate, full.average)
    weights, others = (without_times(tmp_path / name)[1]["model"] for name in ("full", "partial"))
    same(weights, others)
    before, after = (
        [line.iterate for line in read_epochs(tmp_path / name / "epochs.jsonl")]
        for name in ("full", "partial")
    )
    assert before[:2] != after[:2]
    assert before[2] == after[2]


def test_a_finished_run_is_not_repeated(tmp_path):
    first = loop.train(BASE, tmp_path)
    assert loop.train(BASE, tmp_path, should_stop=lambda: True) == first


def test_validation_labels_are_correct_and_not_trained_on():
    _, noisy = images._load_splits(replace(DATA, label_noise=1.0, examples=None), None)
    _, clean = images._load_splits(replace(DATA, label_noise=0.0, examples=None), None)
    assert torch.equal(noisy["validation"].labels, clean["validation"].labels)
    assert not torch.equal(noisy["train"].labels, clean["train"].labels)
    assert len(noisy["train"]) + len(noisy["validation"]) == 5000
    assert torch.equal(noisy["test"].labels, clean["test"].labels)


def test_training_does_not_depend_on_the_test_set(tmp_path, monkeypatch):
    """Train with two test sets: the weights and the decisions of a plateau are the same."""
    recipe = METHODS["auto"]
    synthetic.install(monkeypatch, train=400, test=50)
    loop.train(recipe, tmp_path / "a")
    synthetic.install(monkeypatch, train=400, test=11)
    loop.train(recipe, tmp_path / "b")
    (_, a), (_, b) = without_times(tmp_path / "a"), without_times(tmp_path / "b")
    same(a, b)


@pytest.mark.parametrize("every", [1, 4])
def test_evaluating_schedule_free_does_not_change_it(every, tmp_path):
    pytest.importorskip("schedulefree")
    recipe = replace(METHODS["schedule-free"], evaluate_every=every)
    loop.train(recipe, tmp_path / "a")
    loop.train(replace(recipe, evaluate_every=2), tmp_path / "b")
    same(without_times(tmp_path / "a")[1]["model"], without_times(tmp_path / "b")[1]["model"])


@pytest.mark.parametrize("damage", ["flip", "remove", "empty", "header"])
def test_files_that_change_under_a_run_are_restored(tmp_path, damage, monkeypatch):
    """Damage the record after the second epoch, with a checkpoint at every epoch."""
    loop.train(AVERAGED, tmp_path / "whole")
    monkeypatch.setattr(loop, "CHECKPOINT_SECONDS", 0.0)
    folder = tmp_path / "run"
    notices: list[str] = []
    lines = folder / "epochs.jsonl"

    def change(done: float, record: EpochRecord | None) -> None:
        if record is not None and record.epoch == 2:
            if damage == "flip":
                content = bytearray(lines.read_bytes())
                content[content.index(b"\n") + 10] ^= 1  # in the second line
                lines.write_bytes(content)
            elif damage == "header":
                (folder / "run.json").write_text("{}")
            else:
                lines.unlink()
                (lines.touch if damage == "empty" else bool)()

    result = loop.train(AVERAGED, folder, on_progress=change, on_notice=notices.append)
    assert (result.status, result.epochs) == ("done", 4)
    assert_same_run(tmp_path / "whole", folder)
    assert len(notices) == 1
    assert notices[0].endswith("It was restored.")
    assert loop.train(AVERAGED, folder) == result


@pytest.mark.parametrize("content", [{}, {"model": {}}, {"model": 3}, {"model": {"x": 1}}])
def test_a_checkpoint_that_does_not_fit_is_refused_with_a_sentence(tmp_path, content):
    run = RunFolder(tmp_path, BASE, 0)
    with run.locked():
        run.begin(1)
        run.load()
        run.append(EpochRecord(1, 0.1, 0.5))
        run.save(1, content)
    with pytest.raises(RunError, match=r"The last checkpoint of .* does not fit its recipe"):
        loop.train(BASE, tmp_path)


def test_a_folder_that_cannot_be_written_is_explained(tmp_path, monkeypatch):
    loop.train(BASE, tmp_path)
    (tmp_path / "result.json").unlink()

    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), "result.json")

    monkeypatch.setattr(type(tmp_path), "unlink", refuse)  # the superuser may remove any file
    with pytest.raises(RunError, match=r"result\.json could not be written: Permission denied"):
        loop.train(BASE, tmp_path)


@pytest.mark.slow
def test_compiled_training_resumes_to_the_same_bits(tmp_path, monkeypatch):
    recipe = replace(AVERAGED, compile=True, batch_size=64)  # with a short last batch
    loop.train(recipe, tmp_path / "whole")
    monkeypatch.setattr(loop, "CHECKPOINT_SECONDS", 0.0)
    with pytest.raises(loop.Stopped):
        loop.train(recipe, tmp_path / "torn", should_stop=stop_after(12))
    loop.train(recipe, tmp_path / "torn")
    assert_same_run(tmp_path / "whole", tmp_path / "torn")


@pytest.mark.slow
def test_compiled_training_agrees_with_eager(tmp_path):
    plain = loop.train(AVERAGED, tmp_path / "a")
    compiled = loop.train(replace(AVERAGED, compile=True), tmp_path / "b")
    assert loss_of(compiled, "average") == pytest.approx(loss_of(plain, "average"), rel=1e-3)


def test_a_failure_is_recorded_until_the_run_is_tried_again(tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(ImageTask, "evaluate", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            loop.train(BASE, tmp_path)
    assert "ZeroDivisionError" in json.loads((tmp_path / "failure.json").read_text())["reason"]
    loop.train(BASE, tmp_path)
    assert not (tmp_path / "failure.json").exists()


def test_a_missing_package_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "schedulefree", None)
    with pytest.raises(RecipeError, match="pip install schedulefree"):
        loop.train(METHODS["schedule-free"], tmp_path)
