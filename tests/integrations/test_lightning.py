"""AveragedWeights inside real Lightning trainers."""

from __future__ import annotations

import random
import runpy
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import (
    EarlyStopping,
    GradientAccumulationScheduler,
    ModelCheckpoint,
    WeightAveraging,
)
from torch.utils.data import DataLoader, IterableDataset
from torchmetrics import SumMetric

import gadam
from gadam._errors import UserError
from gadam.integrations.lightning import AveragedWeights

sys.path.insert(0, str(Path(__file__).parent))
from lightning_workers import (
    BATCH,
    STEPS,
    Adversarial,
    Module,
    NoForward,
    Recorder,
    dataset,
    loader,
    trainer,
    weights,
)

pytestmark = [
    pytest.mark.filterwarnings(
        "ignore::lightning.fabric.utilities.warnings.PossibleUserWarning",
        "ignore:.*Checkpoint directory.*exists:UserWarning",
        "ignore:.*LeafSpec:FutureWarning",  # Lightning's use of torch.utils
        "ignore:Be aware that when using `ckpt_path`:UserWarning",
    )
]
PLAN = gadam.Averaging(start=8)  # the second step of the second epoch


def same(some: Any, others: Any) -> bool:
    some, others = list(some), list(others)
    return len(some) == len(others) and all(map(torch.equal, some, others))


def close(some: Any, others: Any) -> None:
    for a, b in zip(some, others, strict=True):
        torch.testing.assert_close(a.double(), b.double(), rtol=1e-5, atol=1e-6)


def fit(callback: Any, *others: Any, module: Any = None, data: Any = None, **kwargs: Any) -> Any:
    """Return the module, the trainer and the recorded iterates."""
    module = module if module is not None else Module()
    recorder = Recorder()
    ckpt = {k: kwargs.pop(k) for k in ("ckpt_path", "weights_only") if k in kwargs}
    run = trainer(callback, recorder, *others, **kwargs)
    run.fit(module, loader() if data is None else data, loader(), **ckpt)
    return module, run, recorder


def parameters_of(state: dict[str, Any]) -> list[torch.Tensor]:
    names = [name for name, _ in Module(batchnorm=True).named_parameters() if name in state]
    return [state[name] for name in names]


# -------------------------------------------------------------------------------------- validation


def test_validation_sees_the_average_and_before_the_first_sample_the_raw_weights():
    callback = AveragedWeights(PLAN)
    module, _, recorder = fit(callback)
    first, second, third = module.validated
    assert same(first, recorder.iterates[STEPS - 1])
    close(second, recorder.mean(8, 2 * STEPS))
    close(third, recorder.mean(8))
    assert callback.average.count == 3 * STEPS - 7
    assert same(weights(module), third)  # finish=True


def test_training_is_the_same_as_without_the_callback():
    runs = []
    for callback in (pl.Callback(), AveragedWeights(batchnorm=True)):
        torch.manual_seed(0)
        module = Module(batchnorm=True)
        _, _, recorder = fit(callback, module=module, data=loader(shuffle=True))
        runs.append((torch.cat(module.batches), recorder.iterates))
    (alone, iterates), (averaged, others) = runs
    assert torch.equal(alone, averaged)
    assert all(same(a, b) for a, b in zip(iterates, others, strict=True))


def test_validate_false_and_finish_false_leave_the_raw_weights():
    module, _, recorder = fit(AveragedWeights(PLAN, validate=False, finish=False))
    assert same(module.validated[-1], recorder.iterates[-1])
    assert same(weights(module), recorder.iterates[-1])


def test_a_later_validate_sees_the_model_as_it_is_unless_asked():
    callback = AveragedWeights(PLAN, finish=False)
    module, run, recorder = fit(callback)
    run.validate(module, loader(), verbose=False)
    assert same(module.validated[-1], recorder.iterates[-1])
    other = Module()
    run.validate(other, loader(), verbose=False)
    assert same(other.validated[-1], weights(Module()))
    with callback.average.applied(module):
        run.validate(module, loader(), verbose=False)
    close(module.validated[-1], recorder.mean(8))


class Interruption(Exception):
    pass


def test_an_exception_in_validation_restores_the_raw_weights(tmp_path):
    class Failing(Module):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            if self.current_epoch == 2:
                raise Interruption

    module, callback, recorder = Failing(), AveragedWeights(PLAN), Recorder()
    keep = ModelCheckpoint(tmp_path, "failed", save_on_exception=True)
    with pytest.raises(Interruption):
        trainer(callback, recorder, keep).fit(module, loader(), loader())
    assert same(weights(module), recorder.iterates[-1])
    saved = torch.load(tmp_path / "failed.ckpt", weights_only=True)
    close(parameters_of(saved["state_dict"]), recorder.mean(8))
    assert same(parameters_of(saved["current_model_state"]), recorder.iterates[-1])


def test_model_checkpoint_and_early_stopping_judge_the_average(tmp_path):
    best = ModelCheckpoint(tmp_path, monitor="val_loss", mode="min")
    stop = EarlyStopping("val_loss", patience=1, min_delta=10.0)  # never better by that much
    callback = AveragedWeights(gadam.Averaging(start=1))
    _, run, recorder = fit(callback, best, stop, epochs=9)
    assert run.current_epoch == 2
    loaded = Module.load_from_checkpoint(best.best_model_path, weights_only=True)
    steps = torch.load(best.best_model_path, weights_only=True)["global_step"]
    close(weights(loaded), recorder.mean(1, steps))
    inputs, targets = dataset().tensors
    loss = (loaded(inputs) - targets).square().mean()
    torch.testing.assert_close(loss.detach(), best.best_model_score)


@pytest.mark.parametrize("mode", ["min", "max"])
def test_observe_drives_the_trigger_and_stops_training(mode):
    class Scripted(Module):
        metrics = (3.0, 2.0, 2.5, 1.0, 1.5)  # begins after the third, finishes after the fifth

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            metric = self.metrics[self.current_epoch]
            self.log("metric", metric if mode == "min" else -metric)

    plan = gadam.Averaging(start=gadam.Plateau(patience=1, mode=mode))
    callback = AveragedWeights(plan, observe="metric")
    module, run, recorder = fit(callback, module=Scripted(), epochs=20)
    assert run.current_epoch == 5
    assert callback.average.phase == "finished"
    close(weights(module), recorder.mean(3 * STEPS + 1))
    assert same(module.validated[2], recorder.iterates[3 * STEPS - 1])


# -------------------------------------------------------------------------------------- checkpoints


def test_checkpoints_have_the_keys_of_weight_averaging(tmp_path):
    keep = ModelCheckpoint(tmp_path, "{epoch}", save_top_k=-1)
    callback = AveragedWeights(PLAN)
    module, _, recorder = fit(callback, keep)
    early, late = (torch.load(tmp_path / f"epoch={n}.ckpt", weights_only=True) for n in (0, 1))
    for saved, raw in ((early, STEPS), (late, 2 * STEPS)):
        assert same(parameters_of(saved["current_model_state"]), recorder.iterates[raw - 1])
        assert set(saved["state_dict"]) == set(module.state_dict())
    assert same(parameters_of(early["state_dict"]), recorder.iterates[STEPS - 1])
    close(parameters_of(late["state_dict"]), recorder.mean(8, 2 * STEPS))
    assert late["averaging_state"]["n_averaged"] == 5


def test_weights_only_checkpoints_hold_the_average(tmp_path):
    keep = ModelCheckpoint(tmp_path, save_weights_only=True, every_n_train_steps=11, save_top_k=-1)
    _, _, recorder = fit(AveragedWeights(PLAN), keep, epochs=2)
    (path,) = tmp_path.iterdir()
    loaded = Module.load_from_checkpoint(path, weights_only=True)
    close(weights(loaded), recorder.mean(8, 11))


class Stateful:
    """A loader that continues in the middle of an epoch."""

    def __init__(self) -> None:
        self.given = self.skip = 0

    def __len__(self) -> int:
        return STEPS

    def __iter__(self) -> Any:
        skip, self.skip = self.skip, 0
        for self.given, batch in enumerate(loader(), start=1):
            if self.given > skip:
                yield batch

    def state_dict(self) -> dict[str, int]:
        return {"given": self.given % STEPS}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.skip = state["given"]


@pytest.mark.parametrize(
    ("step", "batchnorm"), [(3, False), (6, False), (9, False), (12, False), (16, False), (9, True)]
)
def test_resume_is_bitwise_from_any_step(tmp_path, step, batchnorm):
    plan = gadam.Averaging(start=4, every=2, weighting=gadam.EMA(0.8))
    keep = ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=1, save_top_k=-1)
    options: dict[str, Any] = {"use_distributed_sampler": False}
    module, other = Module(batchnorm), Module(batchnorm)
    callback = AveragedWeights(plan, batchnorm)
    whole, _, recorder = fit(callback, keep, module=module, data=Stateful(), **options)
    resumed, _, rest = fit(
        callback := AveragedWeights(plan, batchnorm),
        module=other,
        data=Stateful(),
        ckpt_path=tmp_path / f"step={step}.ckpt",
        weights_only=True,
        **options,
    )
    assert same(rest.iterates[-1], recorder.iterates[-1])
    assert same(whole.validated[-1], resumed.validated[-1])
    assert same(whole.state_dict().values(), resumed.state_dict().values())
    assert callback.average.count == 8


def test_a_checkpoint_of_the_finished_model_still_resumes_bitwise(tmp_path):
    module, run, recorder = fit(AveragedWeights(PLAN), epochs=2)
    run.save_checkpoint(tmp_path / "final.ckpt")
    saved = torch.load(tmp_path / "final.ckpt", weights_only=True)
    assert same(parameters_of(saved["state_dict"]), weights(module))
    assert same(parameters_of(saved["current_model_state"]), recorder.iterates[-1])
    # So does every later checkpoint, although weights were swapped meanwhile.
    callback = next(c for c in run.callbacks if isinstance(c, AveragedWeights))
    with callback.average.applied(module):
        pass
    run.save_checkpoint(tmp_path / "again.ckpt")
    again = torch.load(tmp_path / "again.ckpt", weights_only=True)
    assert same(parameters_of(again["state_dict"]), weights(module))
    assert same(parameters_of(again["current_model_state"]), recorder.iterates[-1])
    longer, _, _ = fit(AveragedWeights(PLAN), epochs=3)
    resumed, _, _ = fit(
        AveragedWeights(PLAN), epochs=3, ckpt_path=tmp_path / "final.ckpt", weights_only=True
    )
    assert same(weights(longer), weights(resumed))
    # Nothing is left to train: the model holds the average all the same.
    ended, _, _ = fit(
        AveragedWeights(PLAN), epochs=2, ckpt_path=tmp_path / "final.ckpt", weights_only=True
    )
    assert same(weights(ended), weights(module))


def test_weights_that_the_user_sets_after_fit_are_saved(tmp_path):
    module, run, _ = fit(AveragedWeights(PLAN), epochs=2)
    with torch.no_grad():
        module.net[0].weight.fill_(2.0)
    run.save_checkpoint(tmp_path / "edited.ckpt")
    saved = torch.load(tmp_path / "edited.ckpt", weights_only=True)
    assert same(parameters_of(saved["state_dict"]), weights(module))
    assert "current_model_state" not in saved


def test_testing_a_checkpoint_takes_the_average(tmp_path):
    keep = ModelCheckpoint(tmp_path)
    _, run, recorder = fit(AveragedWeights(PLAN), keep)
    other = Module()
    run.validate(other, loader(), ckpt_path=keep.best_model_path, verbose=False, weights_only=True)
    close(other.validated[-1], recorder.mean(8))


@pytest.mark.filterwarnings("ignore:The checkpoint has no average:UserWarning")
def test_checkpoints_move_between_weight_averaging_and_this_callback(tmp_path):
    keep = ModelCheckpoint(tmp_path, "theirs")
    fit(WeightAveraging(), keep, epochs=2)
    plan = gadam.Averaging(start=1)
    options: dict[str, Any] = {"weights_only": True, "epochs": 3}
    longer, _, _ = fit(WeightAveraging(), epochs=3)
    ours, _, _ = fit(AveragedWeights(plan), ckpt_path=tmp_path / "theirs.ckpt", **options)
    close(weights(ours), weights(longer))
    callback = AveragedWeights(gadam.Averaging(start=8))  # before the checkpoint
    fit(callback, ckpt_path=tmp_path / "theirs.ckpt", **options)
    assert callback.average.count == 3 * STEPS
    keep = ModelCheckpoint(tmp_path, "ours")
    fit(AveragedWeights(plan), keep, epochs=2)
    path = tmp_path / "ours.ckpt"
    back, _, _ = fit(WeightAveraging(), ckpt_path=path, **options)
    close(weights(back), weights(longer))


@pytest.mark.parametrize("start", [8, 15])
@pytest.mark.filterwarnings("ignore:The loaded checkpoint has no average:UserWarning")
def test_a_checkpoint_without_an_average_continues_at_its_step(tmp_path, start):
    """SGD does not count its own steps."""
    fit(pl.Callback(), ModelCheckpoint(tmp_path, "plain"), epochs=2)
    callback = AveragedWeights(gadam.Averaging(start=start))
    fit(callback, ckpt_path=tmp_path / "plain.ckpt", weights_only=True)
    assert callback.average.count == 3 * STEPS - max(2 * STEPS, start - 1)


# --------------------------------------------------------------------------------------- BatchNorm


def assert_statistics_fit(module: Any, inputs: torch.Tensor) -> None:
    hidden = module.net[0](inputs)
    torch.testing.assert_close(module.net[1].running_mean, hidden.mean(0))
    torch.testing.assert_close(module.net[1].running_var, hidden.var(0))


def named() -> DataLoader[Any]:
    """Return batches that ``forward`` does not understand."""
    return DataLoader([{"data": batch} for batch in loader()], batch_size=None)  # type: ignore


@pytest.mark.parametrize("kind", ["training data", "loader", "callable", "training_step"])
def test_batchnorm_statistics_are_those_of_the_average(tmp_path, kind):
    module: Any = Module(batchnorm=True)
    data = loader(shuffle=True)
    batchnorm: Any = True
    if kind == "loader":
        batchnorm = loader()
    if kind == "callable":
        batchnorm = lambda model: [model(batch[0]) for batch in loader()]  # noqa: E731
    if kind == "training_step":
        module, data = NoForward(batchnorm=True), named()
    keep = ModelCheckpoint(tmp_path, monitor="val_loss")
    module, _, recorder = fit(AveragedWeights(PLAN, batchnorm), keep, module=module, data=data)
    close(weights(module), recorder.mean(8))
    assert_statistics_fit(module, dataset().tensors[0])
    loaded = type(module).load_from_checkpoint(
        keep.best_model_path, weights_only=True, batchnorm=True
    )
    assert_statistics_fit(loaded, dataset().tensors[0])
    saved = torch.load(keep.best_model_path, weights_only=True)
    assert saved["current_model_state"]["net.1.num_batches_tracked"] == saved["global_step"]


class Metered(NoForward):
    """A module that counts its training batches in a metric, a list, and a number."""

    def __init__(self, batchnorm: bool = True) -> None:
        super().__init__(batchnorm)
        self.metric, self.number, self.epochs = SumMetric(), 0, []  # type: ignore[var-annotated]

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.metric.update(1.0)
        self.number += 1
        return super().training_step(batch, batch_idx)

    def on_train_epoch_end(self) -> None:
        self.epochs.append((int(self.metric.compute()), self.number, len(self.batches)))
        self.metric.reset()


def test_a_refresh_through_the_training_step_leaves_no_trace_in_metrics():
    module = Metered()
    callback = AveragedWeights(gadam.Averaging(start=1), batchnorm=True)
    fit(callback, module=module, data=named(), epochs=2, val_check_interval=2)
    assert module.epochs == [(STEPS, STEPS, STEPS), (STEPS, 2 * STEPS, 2 * STEPS)]
    assert_statistics_fit(module, dataset().tensors[0])


def test_a_refresh_keeps_within_the_limits():
    module = NoForward(batchnorm=True)
    callback = AveragedWeights(gadam.Averaging(start=1), batchnorm=True)
    _, run, _ = fit(callback, module=module, data=named(), limit_train_batches=2, epochs=1)
    assert len(module.batches) == 2
    assert_statistics_fit(module, dataset().tensors[0][: 2 * BATCH])
    assert run.training is False
    assert "log" not in module.__dict__


def test_a_refresh_does_not_take_batches_from_training_or_change_their_order():
    """Persistent workers serve one iterator at a time, and generators have a state."""
    orders = []
    for batchnorm in (False, True):
        generator = torch.Generator().manual_seed(5)
        data = loader(True, generator=generator, num_workers=1, persistent_workers=True)
        module = Module(batchnorm=True)
        torch.manual_seed(0)
        callback = AveragedWeights(gadam.Averaging(start=1), batchnorm)
        fit(callback, module=module, data=data, epochs=2, val_check_interval=2)
        orders.append(torch.cat(module.batches))
    assert len(orders[0]) == 2 * STEPS * BATCH
    assert torch.equal(*orders)


class Counting(torch.utils.data.Sampler[int]):
    """A sampler whose order depends on random numbers, a counter, and a list of its own."""

    def __init__(self, size: int) -> None:
        self.rng, self.array_rng = random.Random(0), np.random.default_rng(0)
        self.epoch, self.order = 0, list(range(size))

    def __iter__(self) -> Iterator[int]:
        self.epoch += 1
        self.rng.shuffle(self.order)
        shift = self.epoch + int(self.array_rng.integers(100))
        yield from (self.order[(i + shift) % len(self.order)] for i in range(len(self.order)))

    def __len__(self) -> int:
        return len(self.order)


def test_a_refresh_does_not_change_the_state_of_a_sampler():
    orders = []
    for batchnorm in (False, True):
        data = DataLoader(dataset(), BATCH, sampler=Counting(len(dataset())))
        module = Module(batchnorm=True)
        callback = AveragedWeights(gadam.Averaging(start=1), batchnorm)
        fit(callback, module=module, data=data, epochs=2, val_check_interval=2)
        orders.append(torch.cat(module.batches))
    assert torch.equal(*orders)


def test_several_loaders_are_refreshed_together():
    class Two(Module):
        def forward(self, a: Any, b: Any) -> Any:  # type: ignore[override]
            return self.net(torch.cat([a[0], b[0]]))

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            return super().training_step(batch["a"], batch_idx)

    module, other = Two(batchnorm=True), dataset(seed=1)
    data = {"a": loader(), "b": DataLoader(other, BATCH)}
    callback = AveragedWeights(gadam.Averaging(start=1), batchnorm=True)
    fit(callback, module=module, data=data, epochs=1)
    assert_statistics_fit(module, torch.cat([dataset().tensors[0], other.tensors[0]]))


def test_hooks_that_prepare_training_batches_run_in_the_refresh():
    class Augmented(Module):
        def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
            assert self.trainer is not None
            return [2 * batch[0], batch[1]] if self.trainer.training else batch

    module = Augmented(batchnorm=True)
    fit(AveragedWeights(gadam.Averaging(start=1), batchnorm=True), module=module, epochs=1)
    assert_statistics_fit(module, 2 * dataset().tensors[0])


# ------------------------------------------------------------------------- optimizers and precision


def test_the_plan_comes_from_the_optimizer_or_from_the_number_of_steps():
    callback = AveragedWeights()
    module, _, recorder = fit(callback, accumulate_grad_batches=2)
    assert callback.average.averaging == gadam.Averaging.for_budget(9)
    close(weights(module), recorder.mean(7))
    own = gadam.Averaging(start=3, every=2)
    module, run, _ = fit(callback, module=Module(gadam_plan=own))
    assert callback.average is run.optimizers[0].average
    assert callback.average.count == 8
    module, run, _ = fit(callback, module=Module(gadam_plan=gadam.Averaging()))
    assert callback.average is not run.optimizers[0].average  # it has no plan
    assert callback.average.averaging == gadam.Averaging.for_budget(18)


def test_interpolation_equals_that_of_a_plain_loop():
    """Lightning passes a closure to step(), which must see the point of the gradient."""
    plan = gadam.Averaging(start=2, interpolation=0.8)
    callback = AveragedWeights(plan, finish=False)
    module, _, _ = fit(callback)
    plain = Module()
    optimizer = plain.configure_optimizers()
    average = gadam.IterateAverage(optimizer, plan)
    for _ in range(3):
        for inputs, targets in loader():
            optimizer.zero_grad()
            (plain.net(inputs) - targets).square().mean().backward()
            optimizer.step()
    close(weights(module), weights(plain))
    with average.applied(plain):
        close(module.validated[-1], weights(plain))


def test_the_number_of_steps_follows_a_schedule_of_accumulation():
    callback = AveragedWeights()
    _, run, _ = fit(callback, GradientAccumulationScheduler({0: 3, 2: 2}))
    assert run.global_step == 2 + 2 + 3
    assert callback.average.averaging == gadam.Averaging.for_budget(7)
    _, run, _ = fit(callback, GradientAccumulationScheduler({0: 3}), max_steps=4)
    assert callback.average.averaging == gadam.Averaging.for_budget(4)


def test_accumulation_and_clipping_count_optimizer_steps():
    callback = AveragedWeights(gadam.Averaging(start=2))
    module, run, recorder = fit(callback, accumulate_grad_batches=4, gradient_clip_val=0.1)
    assert run.global_step == len(recorder.iterates) == 6
    assert callback.average.count == 5
    close(weights(module), recorder.mean(2))


def test_manual_optimization_with_two_optimizers(tmp_path):
    keep = ModelCheckpoint(tmp_path, "{epoch}", save_top_k=-1)
    iterates: list[Any] = []

    class Record(pl.Callback):
        def on_train_batch_end(self, trainer: Any, module: Any, *args: Any) -> None:
            iterates.append(weights(module))

    callback, module = AveragedWeights(gadam.Averaging(start=3)), Adversarial()
    trainer(callback, Record(), keep).fit(module, loader(), loader())
    assert callback.average.count == 3 * STEPS - 2
    close(weights(module), [torch.stack(ts).mean(0) for ts in zip(*iterates[2:])])
    # max_steps counts the steps of both optimizers, which take 10 each here.
    default = AveragedWeights()
    trainer(default, epochs=-1, max_steps=20).fit(Adversarial(), loader(), loader())
    assert default.average.averaging == gadam.Averaging.for_budget(10)
    resumed = Adversarial()
    path = tmp_path / "epoch=0.ckpt"
    again = AveragedWeights(gadam.Averaging(start=3))
    trainer(again).fit(resumed, loader(), loader(), ckpt_path=path, weights_only=True)
    assert same(weights(module), weights(resumed))


@pytest.mark.parametrize("planned", [1, 2])
def test_all_optimizers_are_averaged_if_some_have_an_average_of_their_own(planned):
    plan = gadam.Averaging(start=3)

    class Planned(Adversarial):
        def configure_optimizers(self) -> Any:
            first, second = super().configure_optimizers()
            ours = gadam.Gadam(first.param_groups[0]["params"], 0.01, average=plan)
            if planned == 2:
                second = gadam.Gadam(second.param_groups[0]["params"], 0.01, average=plan)
            return [ours, second]

    iterates: list[Any] = []

    class Record(pl.Callback):
        def on_train_batch_end(self, trainer: Any, module: Any, *args: Any) -> None:
            iterates.append(weights(module))

    callback, module = AveragedWeights(), Planned()
    trainer(callback, Record()).fit(module, loader(), loader())
    assert callback.average.averaging == plan
    close(weights(module), [torch.stack(ts).mean(0) for ts in zip(*iterates[2:])])


@pytest.mark.parametrize("precision", ["bf16-true", "bf16-mixed", "64-true"])
def test_precision(tmp_path, precision):
    keep = ModelCheckpoint(tmp_path, "{epoch}", save_top_k=-1)
    plan = gadam.Averaging(start=1, weighting=gadam.EMA(0.99))
    module = Module(batchnorm=True)
    callback = AveragedWeights(plan, batchnorm=True)
    _, _, recorder = fit(callback, keep, module=module, precision=precision)
    weighted = [0.99 ** (18 - i) for i in range(1, 19)]
    total = sum(weighted)
    exact = [
        sum(w * p.double() for w, p in zip(weighted, ps)) / total for ps in zip(*recorder.iterates)
    ]
    exported = callback.average.model_state_dict(module)
    close(parameters_of(exported), exact)  # not rounded to bfloat16
    saved = torch.load(tmp_path / "epoch=2.ckpt", weights_only=True)
    close(parameters_of(saved["state_dict"]), exact)
    for p, e in zip(module.parameters(), parameters_of(exported)):
        assert torch.equal(p, e.to(p.dtype))
    resumed = Module(batchnorm=True)
    path = tmp_path / "epoch=1.ckpt"
    options: dict[str, Any] = {"ckpt_path": path, "weights_only": True, "precision": precision}
    fit(AveragedWeights(plan, batchnorm=True), module=resumed, **options)
    assert same(module.state_dict().values(), resumed.state_dict().values())


# ------------------------------------------------------------------------------------------- errors


class Endless(IterableDataset[Any]):
    def __iter__(self) -> Any:
        while True:
            yield from loader()


@pytest.mark.parametrize(
    ("callback", "message"),
    [
        (lambda: AveragedWeights(observe="val_loss"), "the plan has no trigger"),
        (
            lambda: AveragedWeights(gadam.Averaging(start=gadam.Plateau()), observe="val_acc"),
            "'val_acc' was not logged.*train_loss, val_loss",
        ),
        (lambda: AveragedWeights("ema"), "must be a gadam.Averaging"),  # type: ignore[arg-type]
        (lambda: AveragedWeights(batchnorm=iter(loader())), "Pass the loader instead"),
    ],
)
def test_wrong_arguments_are_refused(callback, message):
    with pytest.raises(UserError, match=message):
        fit(callback())


def test_two_callbacks_that_average_are_refused():
    with pytest.raises(UserError, match="WeightAveraging would both replace"):
        fit(AveragedWeights(PLAN), WeightAveraging())


def test_a_refresh_that_cannot_work_is_refused_before_training():
    endless = DataLoader(Endless(), batch_size=None)
    with pytest.raises(UserError, match="known length"):
        fit(AveragedWeights(PLAN, batchnorm=True), data=endless, max_steps=5)
    with pytest.raises(UserError, match="no default plan"):
        fit(AveragedWeights(), data=endless, epochs=-1)
    with pytest.raises(UserError, match="runs the optimizers"):
        trainer(AveragedWeights(PLAN, batchnorm=True)).fit(Adversarial(), loader(), loader())


def test_the_average_exists_once_fit_has_started():
    with pytest.raises(UserError, match=r"Call trainer.fit\(\) first"):
        _ = AveragedWeights().average


def test_a_missing_package_is_named(monkeypatch):
    for name in ("lightning", "lightning.pytorch", "pytorch_lightning"):
        monkeypatch.setitem(sys.modules, name, None)
    source = sys.modules[AveragedWeights.__module__].__file__
    assert source is not None
    with pytest.raises(ImportError, match=r"pip install gadam\[lightning\]"):
        runpy.run_path(source)
