"""Checkpoints of other frameworks, loaded by them again."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import torch
from torch import nn

from gadam.checkpoints import average

TOKENS = torch.arange(12).reshape(2, 6)


@pytest.fixture(autouse=True)
def _offline(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


def gpt2():
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        vocab_size=32, n_positions=16, n_embd=8, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0
    )
    return transformers.GPT2LMHeadModel(config).eval()


def mean(models: list[nn.Module]) -> dict[str, torch.Tensor]:
    states = [model.state_dict() for model in models]
    return {
        name: torch.stack([state[name].double() for state in states]).mean(0).float()
        for name in states[0]
    }


@pytest.mark.parametrize("shard_size", ["50GB", "3KB"])
def test_from_pretrained_loads_the_average(shard_size, tmp_path):
    models = [gpt2() for _ in range(3)]
    for step, model in enumerate(models):
        model.save_pretrained(tmp_path / f"checkpoint-{step}", max_shard_size=shard_size)
    average(str(tmp_path / "checkpoint-*"), tmp_path / "averaged")
    shards = list((tmp_path / "averaged").glob("model*.safetensors"))
    assert (len(shards) > 2) == (shard_size == "3KB")
    loaded = type(models[0]).from_pretrained(tmp_path / "averaged").eval()
    by_hand = gpt2()
    by_hand.load_state_dict(mean(models))
    torch.testing.assert_close(loaded(TOKENS).logits, by_hand(TOKENS).logits)
    assert loaded.lm_head.weight is loaded.transformer.wte.weight


def test_an_adapter_is_averaged_without_its_model(tmp_path):
    peft = pytest.importorskip("peft")
    base = gpt2()
    base.save_pretrained(tmp_path / "base")
    config = peft.LoraConfig(r=2, target_modules=["c_attn"], fan_in_fan_out=True)
    adapters = []
    for step in range(2):
        model = peft.get_peft_model(type(base).from_pretrained(tmp_path / "base"), config)
        for name, parameter in model.named_parameters():
            if "lora" in name:
                nn.init.normal_(parameter)
        model.save_pretrained(tmp_path / f"checkpoint-{step}")
        adapters.append(peft.get_peft_model_state_dict(model))
    average(str(tmp_path / "checkpoint-*"), tmp_path / "averaged")
    loaded = peft.PeftModel.from_pretrained(
        type(base).from_pretrained(tmp_path / "base"), tmp_path / "averaged"
    )
    found = peft.get_peft_model_state_dict(loaded)
    for name, value in found.items():
        torch.testing.assert_close(value, (adapters[0][name] + adapters[1][name]) / 2)


def test_load_from_checkpoint_loads_the_average_of_lightning_checkpoints(tmp_path):
    pytest.importorskip("lightning")
    from lightning.pytorch import LightningModule, Trainer
    from lightning.pytorch.callbacks import ModelCheckpoint

    class Net(LightningModule):
        def __init__(self, width: int = 3) -> None:
            super().__init__()
            self.save_hyperparameters()
            self.layer = nn.Linear(width, 1)

        def training_step(self, batch, index):
            return self.layer(batch[0]).square().mean()

        def configure_optimizers(self):
            return torch.optim.Adam(self.parameters(), lr=0.1)

    data = torch.utils.data.TensorDataset(torch.randn(16, 4))
    loader = torch.utils.data.DataLoader(data, batch_size=4)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = Trainer(
            max_epochs=3,
            accelerator="cpu",
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            callbacks=[ModelCheckpoint(tmp_path, every_n_epochs=1, save_top_k=-1)],
        )
        trainer.fit(Net(width=4), loader)
        paths = sorted(tmp_path.glob("*.ckpt"))
        provenance = average(paths, tmp_path / "averaged.ckpt", last=2)
        loaded = Net.load_from_checkpoint(tmp_path / "averaged.ckpt")
    assert [Path(each.path).name for each in provenance.inputs] == [p.name for p in paths[-2:]]
    assert "optimizer_states" in provenance.left_out
    weights = [torch.load(path)["state_dict"]["layer.weight"] for path in paths[-2:]]
    torch.testing.assert_close(loaded.layer.weight.detach(), (weights[0] + weights[1]) / 2)
    assert loaded.hparams["width"] == 4


def test_the_iterates_of_a_run_of_gadam(tmp_path):
    from gadam.runs import Recipe
    from gadam.runs.folder import RunFolder

    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "run.json").write_text("{}")
    folder = RunFolder(tmp_path / "run", Recipe("a", "vgg-mini"), 0)
    for epoch in range(1, 5):
        folder.keep_iterate(epoch, {"w": torch.full((2,), float(epoch))}, last=3)
    provenance = average(tmp_path / "run", tmp_path / "averaged.pt")
    assert [each.step for each in provenance.inputs] == [2, 3, 4]
    assert torch.load(tmp_path / "averaged.pt")["w"].tolist() == [3, 3]
