"""AveragedTrainer and AveragedMixin against the real Trainer."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import IterableDataset

import gadam

os.environ["HF_HUB_OFFLINE"] = "1"

import transformers
from safetensors.torch import load_file
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

from gadam._errors import UserError
from gadam.integrations.transformers import AVERAGE_FOLDER, AveragedMixin, AveragedTrainer

transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()

PLAN = gadam.Averaging(start=3)


def small_gpt(dtype: torch.dtype = torch.float32) -> GPT2LMHeadModel:
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=16,
        n_positions=8,
        n_embd=8,
        n_layer=2,
        n_head=2,
        bos_token_id=0,
        eos_token_id=0,
    )
    model: Any = GPT2LMHeadModel(config)  # with dropout, and with tied embeddings
    return model.to(dtype)


def sentences(count: int = 16, seed: int = 0) -> list[dict[str, Tensor]]:
    tokens = torch.randint(16, (count, 8), generator=torch.Generator().manual_seed(seed))
    labels = tokens.clone()
    labels[:, 0] = -100  # the trainer divides by the number of labels, this one included otherwise
    return [{"input_ids": row, "labels": label} for row, label in zip(tokens, labels)]


def arguments(folder: Path, **changes: Any) -> TrainingArguments:
    settings: dict[str, Any] = {
        "max_steps": 8,
        "per_device_train_batch_size": 4,
        "learning_rate": 0.01,
        "lr_scheduler_type": "constant",
        "save_strategy": "no",
        "use_cpu": True,
        "report_to": "none",
        "disable_tqdm": True,
        "logging_strategy": "no",
        "dataloader_pin_memory": False,
    }
    return TrainingArguments(str(folder), **{**settings, **changes})


class Iterates(TrainerCallback):
    """Collects the raw weights after each optimizer step."""

    def __init__(self, model: nn.Module) -> None:
        self.model, self.seen = model, [weights(model)]

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        self.seen.append(weights(self.model))

    def mean(self, start: int, stop: int | None = None) -> dict[str, Tensor]:
        chosen = self.seen[start:stop]
        return {name: torch.stack([w[name].double() for w in chosen]).mean(0) for name in chosen[0]}


def weights(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}


def same(a: dict[str, Any], b: dict[str, Any]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def close(a: dict[str, Any], b: dict[str, Any], atol: float = 1e-6) -> bool:
    return all(torch.allclose(a[n].double(), b[n].double(), atol=atol, rtol=1e-5) for n in b)


def trained(folder: Path, model: Any = None, **changes: Any) -> Any:
    """Return an AveragedTrainer after training, with its iterates."""
    model = small_gpt() if model is None else model
    own = {
        name: changes.pop(name)
        for name in ("averaging", "batchnorm", "finish", "observe", "optimizers", "callbacks")
        if name in changes
    }
    data: dict[str, Any] = {"train_dataset": sentences(), "eval_dataset": sentences(8, seed=1)}
    data = {name: changes.pop(name, value) for name, value in data.items()}
    resume = changes.pop("resume", None)
    iterates = Iterates(model)
    own["callbacks"] = [iterates, *own.get("callbacks", [])]
    trainer: Any = AveragedTrainer(
        model, arguments(folder, **changes), **{"averaging": PLAN, **own}, **data
    )
    trainer.iterates = iterates
    trainer.train(resume)
    return trainer


def loss_at(values: dict[str, Tensor], data: list[dict[str, Tensor]]) -> float:
    other = small_gpt()
    with torch.no_grad():
        for name, p in other.named_parameters():
            p.copy_(values[name])
    other.eval()
    batch = {name: torch.stack([row[name] for row in data]) for name in data[0]}
    with torch.no_grad():
        return float(other(**batch).loss)


# ------------------------------------------------------------------------------------- training


def test_training_is_that_of_the_trainer_and_the_model_ends_as_the_mean_of_its_iterates(tmp_path):
    settings = {"gradient_accumulation_steps": 2, "weight_decay": 0.1, "adam_beta2": 0.9}
    plain = small_gpt()
    Trainer(plain, arguments(tmp_path, **settings), train_dataset=sentences()).train()
    trainer = trained(tmp_path, **settings)

    assert len(trainer.iterates.seen) == 1 + 8  # optimizer steps, not batches
    assert same(trainer.iterates.seen[-1], weights(plain))
    assert trainer.average.count == 6
    assert close(weights(trainer.model), trainer.iterates.mean(3))
    group = trainer.average.optimizer.param_groups[0]
    assert (group["lr"], group["betas"], group["weight_decay"]) == (0.01, (0.9, 0.9), 0.1)


def test_finish_false_leaves_the_raw_weights(tmp_path):
    trainer = trained(tmp_path, finish=False)
    assert same(weights(trainer.model), trainer.iterates.seen[-1])
    with trainer.average.applied(trainer.model):
        assert close(weights(trainer.model), trainer.iterates.mean(3))


def test_no_plan_means_that_of_the_optimizer_or_half_of_the_steps(tmp_path):
    assert trained(tmp_path, averaging=None).average.averaging == gadam.Averaging.for_budget(8)
    for own, expected in (
        (gadam.Averaging(start=2, every=2), gadam.Averaging(start=2, every=2)),
        (None, gadam.Averaging.for_budget(8)),  # an optimizer without a plan would average nothing
    ):
        model = small_gpt()
        optimizer = gadam.Gadam(model.parameters(), lr=0.01, average=own)
        trainer = trained(tmp_path, model, averaging=None, optimizers=(optimizer, None))
        assert trainer.average.averaging == expected
        assert (trainer.average is optimizer.average) is (own is not None)
        assert close(weights(model), trainer.iterates.mean(expected.start, None)) or own is not None


def test_a_second_training_has_an_average_of_its_own(tmp_path):
    trainer = trained(tmp_path)
    first = trainer.average
    start = first.averaging.start
    trainer.train()  # with the same optimizer
    assert first.is_removed
    assert trainer.average.averaging == first.averaging
    assert trainer.average.count == 8 - start + 1 == first.count


def test_a_training_after_an_interrupted_one_has_an_average_of_its_own(tmp_path):
    class Interrupt(TrainerCallback):
        is_on = True

        def on_step_end(self, args, state, control, **kwargs):
            if self.is_on and state.global_step == 6:
                raise KeyboardInterrupt

    trainer: Any = AveragedTrainer(
        small_gpt(),
        arguments(tmp_path),
        train_dataset=sentences(),
        averaging=gadam.Averaging(start=3),
        callbacks=[Interrupt()],
    )
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    Interrupt.is_on = False
    trainer.train()
    assert trainer.average.count == 6


def test_the_default_plan_follows_the_number_of_steps(tmp_path):
    trainer = trained(tmp_path, averaging=None)
    assert trainer.average.averaging == gadam.Averaging.for_budget(8)
    trainer.args.max_steps = 16
    trainer.train()
    assert trainer.average.averaging == gadam.Averaging.for_budget(16)
    assert trainer.average.count == 16 - trainer.average.averaging.start + 1


def test_a_second_training_continues_an_average_of_the_users(tmp_path):
    model = small_gpt()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    average = gadam.IterateAverage(optimizer, gadam.Averaging(start=3))
    trainer = trained(tmp_path, model, averaging=None, optimizers=(optimizer, None))
    trainer.train()
    assert trainer.average is average
    assert average.count == 6 + 8


def test_an_average_of_bfloat16_weights_is_float32_and_moves(tmp_path):
    plan = gadam.Averaging(start=1, weighting=gadam.EMA(0.999))
    trainer = trained(tmp_path, small_gpt(torch.bfloat16), averaging=plan, max_steps=4)
    values = trainer.average.model_state_dict(trainer.model).values()
    assert {v.dtype for v in values} == {torch.float32}
    seen = trainer.iterates.seen[1:]
    norm = sum(0.999**i for i in range(4))
    name = "transformer.wpe.weight"
    expected = sum(w[name].double() * 0.999 ** (3 - i) / norm for i, w in enumerate(seen))
    found = trainer.average.model_state_dict(trainer.model)[name]
    torch.testing.assert_close(found.double(), expected, atol=1e-7, rtol=1e-5)
    assert (found != seen[0][name].float()).any()
    assert {p.dtype for p in trainer.model.parameters()} == {torch.bfloat16}


# ----------------------------------------------------------------------------------- evaluation


def test_evaluations_of_several_sets_and_predictions_see_the_average(tmp_path):
    sets = {"a": sentences(8, seed=1), "b": sentences(8, seed=2)}
    found: list[dict[str, float]] = []

    class Predict(TrainerCallback):
        trainer: Any = None

        def on_epoch_end(self, *args: Any, **kwargs: Any) -> None:
            before = weights(self.trainer.model)
            metrics = self.trainer.predict(sets["a"]).metrics
            found.append({"loss": metrics["test_loss"]})
            assert same(weights(self.trainer.model), before)

    model, predict = small_gpt(), Predict()
    iterates = Iterates(model)
    trainer = predict.trainer = AveragedTrainer(
        model,
        arguments(tmp_path, eval_strategy="steps", eval_steps=2),
        train_dataset=sentences(),
        eval_dataset=sets,
        averaging=PLAN,
        callbacks=[iterates, predict],
    )
    trainer.train()

    logged: dict[tuple[Any, str], float] = {
        (entry["step"], name): entry[f"eval_{name}_loss"]
        for entry in trainer.state.log_history
        for name in sets
        if f"eval_{name}_loss" in entry
    }
    assert len(logged) == 4 * 2
    for (step, name), loss in logged.items():
        # No sample yet at step 2: the raw weights, not the initial ones.
        point = iterates.seen[2] if step == 2 else iterates.mean(3, step + 1)
        point = {key: value.float() for key, value in point.items()}
        assert loss == pytest.approx(loss_at(point, sets[name]), rel=1e-5)
    assert [entry["loss"] for entry in found] == [logged[4, "a"], logged[8, "a"]]
    # After training, the model holds the average, and is evaluated as it is.
    assert trainer.evaluate()["eval_a_loss"] == logged[8, "a"]


def test_an_exception_in_an_evaluation_restores_the_raw_weights(tmp_path):
    class Broken(AveragedTrainer):
        def prediction_step(self, *args: Any, **kwargs: Any) -> Any:
            raise RuntimeError("no room")

    model = small_gpt()
    iterates = Iterates(model)
    trainer = Broken(
        model,
        arguments(tmp_path, eval_strategy="steps", eval_steps=6),
        train_dataset=sentences(),
        eval_dataset=sentences(8),
        averaging=PLAN,
        callbacks=[iterates],
    )
    with pytest.raises(RuntimeError, match="no room"):
        trainer.train()
    assert len(iterates.seen) == 1 + 6
    assert same(weights(model), iterates.seen[-1])
    # The training was interrupted, so this is still the average.
    trainer.save_model(str(tmp_path / "saved"))
    assert close(load_file(tmp_path / "saved" / "model.safetensors"), exported(iterates.mean(3)))


def test_a_metric_starts_and_stops_the_average(tmp_path):
    plan = gadam.Averaging(start=gadam.Plateau(patience=1, mode="min"))
    schedule = {"eval_strategy": "steps", "eval_steps": 1}
    # At a learning rate of zero, no evaluation is better than the first one.
    trainer = trained(tmp_path, averaging=plan, observe="loss", learning_rate=0.0, **schedule)
    # 1 is the best, 2 begins, 3 is the best again, and 4 finishes.
    assert trainer.state.global_step == 4
    assert (trainer.average.phase, trainer.average.count) == ("finished", 2)


def test_a_trigger_without_a_metric_is_refused_before_training(tmp_path):
    plan = gadam.Averaging(start=gadam.Plateau())
    with pytest.raises(UserError, match="observe="):
        trained(tmp_path, averaging=plan)
    with pytest.raises(UserError, match="eval_strategy"):
        trained(tmp_path, averaging=plan, observe="eval_loss")
    schedule = {"eval_strategy": "steps", "eval_steps": 1}
    with pytest.raises(UserError, match="no metric 'accuracy'"):
        trained(tmp_path, averaging=plan, observe="accuracy", **schedule)
    with pytest.raises(UserError, match=r"gadam\.Averaging"):
        trained(tmp_path, averaging=3)
    with pytest.raises(UserError, match="the plan has no trigger"):
        trained(tmp_path, observe="eval_loss", **schedule)


@pytest.mark.parametrize("observe", ["a_b_loss", "eval_a_b_loss", "a_b_accuracy", "loss"])
def test_a_metric_of_one_of_several_sets(tmp_path, observe):
    plan = gadam.Averaging(start=gadam.Plateau(patience=1, mode="min"))
    sets = {"a": sentences(8, seed=1), "a_b": sentences(8, seed=2)}
    options = {"learning_rate": 0.0, "eval_strategy": "steps", "eval_steps": 1}

    def run() -> Any:
        return trained(tmp_path, averaging=plan, observe=observe, eval_dataset=sets, **options)

    if observe.endswith("a_b_loss"):
        assert run().state.global_step == 4
    else:
        with pytest.raises(UserError, match=f"no metric '{observe}'"):
            run()


# ---------------------------------------------------------------------------------- checkpoints


def exported(values: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return values by the names in a file of ``save_pretrained``: tied weights have one."""
    return {name: value for name, value in values.items() if name != "lm_head.weight"}


def test_checkpoints_have_raw_weights_and_the_average_in_a_folder_of_its_own(tmp_path):
    trainer = trained(tmp_path, save_strategy="steps", save_steps=2)
    for step in (2, 4, 6, 8):
        folder = tmp_path / f"checkpoint-{step}"
        assert same(load_file(folder / "model.safetensors"), exported(trainer.iterates.seen[step]))
        average = folder / AVERAGE_FOLDER
        if step == 2:
            assert not (folder / "gadam").exists()  # no sample yet
            continue
        assert average == folder / "gadam" / "average"
        loaded = GPT2LMHeadModel.from_pretrained(average)
        assert loaded.lm_head.weight is loaded.transformer.wte.weight
        assert close(weights(loaded), trainer.iterates.mean(3, step + 1))
        state = torch.load(folder / "optimizer.pt", weights_only=True)["state"]
        assert close(state[0], {"average": trainer.iterates.mean(3, step + 1)[first_name()]})
    trainer.save_model(str(tmp_path / "final"))
    assert same(weights(GPT2LMHeadModel.from_pretrained(tmp_path / "final")), weights(loaded))


def first_name() -> str:
    """Return the first parameter of the trainer's first group: those with weight decay."""
    return next(iter(weights(small_gpt())))


@pytest.mark.parametrize("finish", [True, False])
def test_the_best_model_is_the_average_of_the_best_checkpoint(tmp_path, finish):
    seen: list[dict[str, Tensor]] = []

    class AtTheEnd(TrainerCallback):
        def on_train_end(self, *args: Any, **kwargs: Any) -> None:
            seen.append(weights(kwargs["model"]))

    schedule = {"eval_strategy": "steps", "save_strategy": "steps", "eval_steps": 2}
    trainer = trained(
        tmp_path,
        save_steps=2,
        metric_for_best_model="eval_loss",
        greater_is_better=True,  # on random labels, so that the best is not the last
        load_best_model_at_end=True,
        save_total_limit=1,
        finish=finish,
        callbacks=[AtTheEnd()],
        learning_rate=0.03,
        **schedule,
    )
    best = int(trainer.state.best_model_checkpoint.rpartition("-")[2])
    losses = {e["step"]: e["eval_loss"] for e in trainer.state.log_history if "eval_loss" in e}
    assert losses[best] == max(losses.values())
    iterates = trainer.iterates
    expected = iterates.seen[2] if best == 2 else iterates.mean(3, best + 1)
    assert close(weights(trainer.model), expected)
    assert same(seen[0], weights(trainer.model))
    assert trainer.evaluate()["eval_loss"] == losses[best]


def test_without_a_best_checkpoint_other_callbacks_see_the_average_at_the_end(tmp_path):
    seen: list[dict[str, Tensor]] = []

    class AtTheEnd(TrainerCallback):
        def on_train_end(self, *args: Any, **kwargs: Any) -> None:
            seen.append(weights(kwargs["model"]))

    trainer = trained(tmp_path, callbacks=[AtTheEnd()])
    assert close(seen[0], trainer.iterates.mean(3))


@pytest.mark.parametrize("case", ["adamw", "gadam", "bfloat16", "window"])
def test_resuming_in_the_middle_of_an_epoch_is_bitwise(tmp_path, case):
    def run(folder: Path, **changes: Any) -> Any:
        model = small_gpt(torch.bfloat16 if case == "bfloat16" else torch.float32)
        options: dict[str, Any] = {"averaging": gadam.Averaging(start=3, every=2)}
        if case == "window":
            options["averaging"] = gadam.Averaging(start=2, weighting=gadam.Window(2))
        if case == "gadam":
            optimizer = gadam.Gadam(model.parameters(), lr=0.01, average=options["averaging"])
            options = {"averaging": None, "optimizers": (optimizer, None)}
        return trained(folder, model, save_strategy="steps", save_steps=3, **options, **changes)

    whole = run(tmp_path / "whole", max_steps=9)
    start = str(tmp_path / "whole" / "checkpoint-6")  # epochs have 4 steps
    resumed = run(tmp_path / "resumed", max_steps=9, resume=start)
    assert resumed.state.global_step == 9
    assert len(resumed.iterates.seen) == 1 + 3
    for name in ("model.safetensors", "gadam/average/model.safetensors"):
        files = [tmp_path / run / "checkpoint-9" / name for run in ("whole", "resumed")]
        assert same(*map(load_file, files))
    assert same(weights(resumed.model), weights(whole.model))
    assert resumed.average.count == whole.average.count
    states = [trainer.average.state_dict() for trainer in (whole, resumed)]
    assert torch.equal(states[0]["progress"], states[1]["progress"])
    for index, slots in states[0]["state"].items():
        assert same(slots, states[1]["state"][index])


def test_checkpoints_of_the_trainer_continue_here_and_the_other_way_round(tmp_path):
    def plain(folder: str, **changes: Any) -> GPT2LMHeadModel:
        model, resume = small_gpt(), changes.pop("resume", None)
        settings = arguments(tmp_path / folder, save_strategy="steps", save_steps=4, **changes)
        Trainer(model, settings, train_dataset=sentences()).train(resume)
        return model

    whole = plain("plain")
    saves = {"save_strategy": "steps", "save_steps": 4}
    with pytest.warns(UserWarning, match="has no average"):
        trainer = trained(tmp_path / "a", resume=str(tmp_path / "plain" / "checkpoint-4"), **saves)
    assert same(trainer.iterates.seen[-1], weights(whole))
    assert trainer.average.count == 4
    trained(tmp_path / "b", **saves)
    resumed = plain("c", resume=str(tmp_path / "b" / "checkpoint-4"))
    assert same(weights(resumed), weights(whole))

    plain("sgd", optim="sgd")  # does not count its own steps
    resume = str(tmp_path / "sgd" / "checkpoint-4")
    assert trained(tmp_path / "d", optim="sgd", resume=resume).average.count == 4


def test_a_checkpoint_inside_applied_is_refused(tmp_path):
    trainer = trained(tmp_path, finish=False)
    with trainer.average.applied(trainer.model):
        with pytest.raises(UserError, match="raw weights"):
            trainer._save_checkpoint(trainer.model, None)


def test_an_exported_state_dict_survives_save_pretrained(tmp_path):
    trainer = trained(tmp_path, finish=False)
    expected = trainer.average.model_state_dict(trainer.model)
    state_dict = trainer.average.model_state_dict(trainer.model)
    trainer.model.save_pretrained(tmp_path / "saved", state_dict=state_dict)
    assert not state_dict  # Transformers empties what it is given
    assert same(trainer.average.model_state_dict(trainer.model), expected)
    loaded = GPT2LMHeadModel.from_pretrained(tmp_path / "saved")
    assert close(weights(loaded), trainer.iterates.mean(3))


@pytest.mark.parametrize("strategy", ["every_save", "checkpoint", "all_checkpoints", "end"])
def test_pushes_to_the_hub_upload_the_average(tmp_path, monkeypatch, strategy):
    import huggingface_hub
    import transformers.trainer as module

    uploads: list[tuple[str, str | None, dict[str, Tensor]]] = []

    class Done:
        def done(self) -> bool:
            return True

        def result(self) -> None: ...

    class Api:
        def create_repo(self, name: str, **options: Any) -> Any:
            return type("Repo", (), {"repo_id": name})()

        def upload_folder(self, **options: Any) -> Done:
            folder = Path(options["folder_path"])
            # Copies: the file is mapped into memory, and the next push writes to it.
            saved = {n: v.clone() for n, v in load_file(folder / "model.safetensors").items()}
            uploads.append((folder.name, options.get("path_in_repo"), saved))
            return Done()

    monkeypatch.setattr(module, "hf_api", Api)
    monkeypatch.setattr(huggingface_hub, "upload_folder", Api().upload_folder)
    trainer = trained(
        tmp_path / "out",
        push_to_hub=True,
        hub_model_id="someone/model",
        hub_strategy=strategy,
        save_strategy="steps",
        save_steps=4,
    )
    means = [exported(trainer.iterates.mean(3, step + 1)) for step in (4, 8)]
    raw = [exported(trainer.iterates.seen[step]) for step in (4, 8)]
    models = [saved for name, path, saved in uploads if path is None]
    others = [(path, saved) for name, path, saved in uploads if path is not None]
    assert len(models) == (0 if strategy == "end" else 2)
    assert all(map(close, models, means))
    assert len(others) == (2 if "checkpoint" in strategy else 0)
    assert all(same(saved, expected) for (_, saved), expected in zip(others, raw))
    names = {
        "checkpoint": ["last-checkpoint"] * 2,
        "all_checkpoints": ["checkpoint-4", "checkpoint-8"],
    }
    assert [path for path, _ in others] == names.get(strategy, [])
    uploads.clear()
    trainer.push_to_hub()
    assert close(uploads[0][2], means[1])


# ------------------------------------------------------------------------- adapters, BatchNorm


def lora() -> Any:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=2, target_modules=["c_attn"], fan_in_fan_out=True)
    return peft.get_peft_model(small_gpt(), config)


def test_only_the_adapter_is_averaged_and_it_is_exported_as_an_adapter(tmp_path):
    model = lora()
    frozen = {n: p.detach().clone() for n, p in model.named_parameters() if not p.requires_grad}
    saves = {"save_strategy": "steps", "save_steps": 3, "max_steps": 6}
    trainer = trained(tmp_path / "a", model, **saves)
    averaged = trainer.iterates.mean(3)
    assert len(averaged) == 4
    assert all("lora_" in name for name in averaged)
    assert close(weights(model), averaged)
    assert all(torch.equal(dict(model.named_parameters())[n], p) for n, p in frozen.items())

    def adapter(folder: Path) -> dict[str, Tensor]:
        assert not (folder / "model.safetensors").exists()
        saved = load_file(folder / "adapter_model.safetensors")
        return {n.replace(".weight", ".default.weight"): v for n, v in saved.items()}

    checkpoint = tmp_path / "a" / "checkpoint-6"
    assert same(adapter(checkpoint), trainer.iterates.seen[6])
    assert close(adapter(checkpoint / AVERAGE_FOLDER), averaged)
    from peft import PeftModel

    loaded = PeftModel.from_pretrained(
        small_gpt(), checkpoint, subfolder=AVERAGE_FOLDER, is_trainable=True
    )
    assert same(weights(loaded), weights(model))

    # The folder of the average is not taken for another adapter.
    resumed = trained(tmp_path / "b", lora(), resume=str(tmp_path / "a" / "checkpoint-3"), **saves)
    assert list(resumed.model.peft_config) == ["default"]
    assert same(resumed.iterates.seen[-1], trainer.iterates.seen[-1])
    assert same(weights(resumed.model), weights(model))


class Normalized(nn.Module):
    """A network with BatchNorm that takes and returns what the trainer expects."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, 1))

    def forward(self, x: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        out = self.body(x).squeeze(1)
        return {} if labels is None else {"loss": nn.functional.mse_loss(out, labels)}


def rows(count: int, seed: int = 0) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    xs = 3 + 2 * torch.randn(count, 3, generator=generator)
    return [{"x": x, "labels": x.sum().sin()} for x in xs]


def test_batchnorm_is_refreshed_and_training_does_not_notice(tmp_path):
    data = rows(16)
    runs = {}
    for name, source in {
        "none": False,
        "training": True,
        "loader": [{"x": torch.stack([row["x"] for row in data])}],
    }.items():
        runs[name] = trained(
            tmp_path / name,
            Normalized(),
            batchnorm=source,
            train_dataset=data,
            eval_dataset=rows(8, seed=1),
            eval_strategy="steps",
            eval_steps=2,
            save_strategy="steps",
            save_steps=8,
        )
    raw = [trainer.iterates.seen for trainer in runs.values()]
    assert all(same(a, b) and same(a, c) for a, b, c in zip(*raw))

    expected: Any = Normalized()
    mean = runs["none"].iterates.mean(3)
    expected.load_state_dict({**expected.state_dict(), **{n: v.float() for n, v in mean.items()}})
    gadam.refresh_batchnorm(expected, [{"x": torch.stack([row["x"] for row in data])}])
    for name in ("training", "loader"):
        found = runs[name].model.state_dict()
        torch.testing.assert_close(found["body.1.running_mean"], expected.body[1].running_mean)
        torch.testing.assert_close(found["body.1.running_var"], expected.body[1].running_var)
        saved = load_file(tmp_path / name / "checkpoint-8" / AVERAGE_FOLDER / "model.safetensors")
        assert torch.equal(saved["body.1.running_mean"], found["body.1.running_mean"])
    at_root = load_file(tmp_path / "training" / "checkpoint-8" / "model.safetensors")
    plain = load_file(tmp_path / "none" / "checkpoint-8" / "model.safetensors")
    assert same(at_root, plain)
    stale = runs["none"].model.state_dict()["body.1.running_mean"]
    assert not torch.allclose(stale, expected.body[1].running_mean)


def test_a_refresh_leaves_no_loader_behind(tmp_path):
    """The accelerator keeps every loader that it prepares, and so the loader's workers."""
    options: dict[str, Any] = {"train_dataset": rows(16), "eval_dataset": rows(8, seed=1)}
    options |= {"eval_strategy": "steps", "eval_steps": 4}
    kept = [
        len(trained(tmp_path, Normalized(), batchnorm=source, **options).accelerator._dataloaders)
        for source in (False, True)
    ]
    assert kept[0] == kept[1]


class Endless(IterableDataset[Any]):
    def __iter__(self) -> Any:
        while True:
            yield from rows(16)


def test_a_refresh_with_data_without_an_end_is_refused_before_training(tmp_path):
    data: Any = {"train_dataset": Endless(), "eval_dataset": rows(8)}
    with pytest.raises(UserError, match="known length"):
        trained(tmp_path, Normalized(), batchnorm=True, **data)
    source = [{"x": torch.stack([row["x"] for row in rows(16)])}]
    assert trained(tmp_path, Normalized(), batchnorm=source, **data).average.count == 6


# -------------------------------------------------------------------------------------- classes


def test_the_mixin_works_with_other_trainers_and_must_come_first(tmp_path):
    from transformers import Seq2SeqTrainer, Seq2SeqTrainingArguments

    class Averaged(AveragedMixin, Seq2SeqTrainer):
        pass

    model = small_gpt()
    iterates = Iterates(model)
    settings = arguments(tmp_path).to_dict()
    wanted = ("max_steps", "learning_rate", "use_cpu", "report_to", "disable_tqdm", "save_strategy")
    args = Seq2SeqTrainingArguments(
        str(tmp_path), lr_scheduler_type="constant", **{name: settings[name] for name in wanted}
    )
    trainer = Averaged(model, args, train_dataset=sentences(), averaging=PLAN, callbacks=[iterates])
    trainer.train()
    assert close(weights(model), iterates.mean(3))
    with pytest.raises(TypeError, match="List it first"):

        class Wrong(Trainer, AveragedMixin):  # type: ignore[misc]
            pass


def test_the_mixin_works_with_sft_of_trl(tmp_path):
    trl = pytest.importorskip("trl")
    datasets = pytest.importorskip("datasets")

    class Averaged(AveragedMixin, trl.SFTTrainer):  # type: ignore[name-defined]
        pass

    model = small_gpt()
    model.config.pad_token_id = 0
    iterates = Iterates(model)
    tokens = [row["input_ids"].tolist() for row in sentences()]
    settings = arguments(tmp_path).to_dict()
    wanted = ("max_steps", "learning_rate", "use_cpu", "report_to", "disable_tqdm")
    args = trl.SFTConfig(
        str(tmp_path),
        lr_scheduler_type="constant",
        save_strategy="steps",
        save_steps=4,
        eval_strategy="steps",
        eval_steps=4,
        bf16=False,
        max_length=8,
        gradient_checkpointing=False,
        **{name: settings[name] for name in wanted},
    )
    trainer = Averaged(
        model,
        args,
        train_dataset=datasets.Dataset.from_dict({"input_ids": tokens}),
        eval_dataset=datasets.Dataset.from_dict({"input_ids": tokens[:8]}),
        processing_class=tiny_tokenizer(),
        averaging=PLAN,
        callbacks=[iterates],
    )
    trainer.train()
    assert close(weights(model), iterates.mean(3))
    logged: list[dict[str, Any]] = [e for e in trainer.state.log_history if "eval_loss" in e]
    assert [entry["step"] for entry in logged] == [4, 8]
    data = [{"input_ids": torch.tensor(row), "labels": torch.tensor(row)} for row in tokens[:8]]
    for entry in logged:
        point = {n: v.float() for n, v in iterates.mean(3, entry["step"] + 1).items()}
        assert entry["eval_loss"] == pytest.approx(loss_at(point, data), rel=1e-4)
    saved = load_file(tmp_path / "checkpoint-4" / AVERAGE_FOLDER / "model.safetensors")
    assert close(saved, exported(iterates.mean(3, 5)))


def tiny_tokenizer() -> Any:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    words = WordLevel({str(i): i for i in range(16)}, unk_token="0")
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(words), eos_token="0", pad_token="0", unk_token="0"
    )


@pytest.mark.parametrize("name", ["transformers", "accelerate"])
def test_a_missing_package_is_named(monkeypatch, name):
    import importlib

    monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.delitem(sys.modules, f"gadam.integrations.{name}", raising=False)
    with pytest.raises(ImportError, match=rf"pip install 'gadam\[{name}\]'"):
        importlib.import_module(f"gadam.integrations.{name}")


@pytest.mark.filterwarnings("default")
def test_the_documentation_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    page = (Path(__file__).parents[2] / "docs" / "frameworks.md").read_text()
    sections = [part for part in page.split("\n## ") if not part.startswith("Lightning")]
    blocks = re.findall(r"```python\n(.*?)```", "\n".join(sections), re.DOTALL)
    assert len(blocks) >= 3
    for block in blocks:
        exec(compile(block, "docs/frameworks.md", "exec"), {})
