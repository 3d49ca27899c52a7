"""Modules, data and trainers of the Lightning tests, and the processes of the distributed ones."""

from __future__ import annotations

import os
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import gadam
from gadam.integrations.lightning import AveragedWeights

FEATURES = 4
BATCH = 4
STEPS = 6  # batches per epoch


def dataset(size: int = BATCH * STEPS, seed: int = 0) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(size, FEATURES, generator=generator)
    return TensorDataset(inputs, inputs.sum(1, keepdim=True).sin())


def loader(shuffle: bool = False, **kwargs: Any) -> DataLoader[Any]:
    return DataLoader(dataset(), BATCH, shuffle=shuffle, **kwargs)


def network(batchnorm: bool = False) -> nn.Sequential:
    torch.manual_seed(0)
    middle: nn.Module = nn.BatchNorm1d(8) if batchnorm else nn.Tanh()
    return nn.Sequential(nn.Linear(FEATURES, 8), middle, nn.Linear(8, 1))


class Module(pl.LightningModule):
    """A regression. It records the weights that validation sees."""

    def __init__(self, batchnorm: bool = False, gadam_plan: gadam.Averaging | None = None) -> None:
        super().__init__()
        self.net = network(batchnorm)
        self.plan = gadam_plan
        self.validated: list[list[Tensor]] = []
        self.batches: list[Tensor] = []

    def forward(self, inputs: Tensor) -> Any:
        return self.net(inputs)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        inputs, targets = batch
        self.batches.append(inputs.clone())
        loss = (self.net(inputs) - targets).square().mean()
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        inputs, targets = batch
        self.log("val_loss", (self.net(inputs) - targets).square().mean())

    def on_validation_epoch_start(self) -> None:
        if not self.trainer.sanity_checking:
            self.validated.append(weights(self))

    def configure_optimizers(self) -> Any:
        if self.plan is not None:
            return gadam.Gadam(self.parameters(), lr=0.05, average=self.plan)
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


class NoForward(Module):
    """A module whose batches only ``training_step`` understands."""

    forward = pl.LightningModule.forward

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step(batch["data"], batch_idx)


class Adversarial(pl.LightningModule):
    """Two networks with an optimizer each, stepped by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.generator, self.critic = network(), nn.Linear(1, 1)

    def training_step(self, batch: Any, batch_idx: int) -> None:
        for optimizer, sign in zip(self.optimizers(), (1, -1)):
            optimizer.zero_grad()
            loss = sign * self.critic(self.generator(batch[0])).mean()
            self.manual_backward(loss)
            optimizer.step()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.critic(self.generator(batch[0])).mean())

    def configure_optimizers(self) -> Any:
        return (
            torch.optim.SGD(self.generator.parameters(), lr=0.01),
            torch.optim.Adam(self.critic.parameters(), lr=0.01),
        )


def weights(module: nn.Module) -> list[Tensor]:
    return [p.detach().clone() for p in module.parameters()]


def trainer(*callbacks: Any, epochs: int = 3, **kwargs: Any) -> pl.Trainer:
    options: dict[str, Any] = {
        "accelerator": "cpu",
        "devices": 1,
        "logger": False,
        "enable_checkpointing": any(isinstance(c, pl.callbacks.Checkpoint) for c in callbacks),
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "max_epochs": epochs,
        "num_sanity_val_steps": 0,
    }
    return pl.Trainer(callbacks=list(callbacks), **{**options, **kwargs})


class Recorder(pl.Callback):
    """Records the raw weights after every optimizer step, and their average as it is computed."""

    def __init__(self) -> None:
        self.iterates: list[list[Tensor]] = []

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        if trainer.global_step > len(self.iterates):
            self.iterates.append(weights(trainer.lightning_module))

    def mean(self, start: int, stop: int | None = None) -> list[Tensor]:
        """Return the mean of the iterates of steps start, start + 1, …, stop."""
        taken = self.iterates[start - 1 : stop]
        return [torch.stack(values).double().mean(0) for values in zip(*taken)]


# --------------------------------------------------------------------------------------- processes


def launch(rank: int, world: int, folder: str, port: int, names: Sequence[str]) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    os.environ.update(
        GLOO_SOCKET_IFNAME="lo",
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        WORLD_SIZE=str(world),
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        GROUP_RANK="0",
        TORCHELASTIC_RUN_ID="test",  # Lightning takes the processes of torchrun as they are
        LOCAL_WORLD_SIZE=str(world),
    )
    for name in names:
        globals()[name](rank, Path(folder, name))
        dist.barrier()
    dist.destroy_process_group()
    os._exit(0)  # gloo's threads sometimes abort the shutdown of the interpreter


def gathered(tensor: Tensor) -> list[Tensor]:
    every = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(every, tensor.contiguous())
    return every


def ddp_batchnorm(rank: int, folder: Path) -> None:
    """All ranks end with the statistics of all their data, and resume continues bit for bit."""
    module, callback, recorder = Module(batchnorm=True), _callback(batchnorm=True), Recorder()
    options: dict[str, Any] = {"strategy": "ddp", "devices": 2}
    keep = pl.callbacks.ModelCheckpoint(folder, "{epoch}", save_top_k=-1)
    trainer(callback, recorder, keep, **options).fit(module, loader(), loader())
    assert callback.average.count == len(recorder.iterates) - 2 == 7
    for p, mean in zip(module.parameters(), recorder.mean(3)):
        torch.testing.assert_close(p.double(), mean, rtol=1e-5, atol=1e-6)
    hidden = module.net[0](dataset().tensors[0])
    layer: Any = module.net[1]
    torch.testing.assert_close(layer.running_mean, hidden.mean(0))
    torch.testing.assert_close(layer.running_var, hidden.var(0))
    for value in gathered(layer.running_mean):
        assert torch.equal(value, layer.running_mean)
    resumed, again = Module(batchnorm=True), _callback(batchnorm=True)
    trainer(again, **options).fit(
        resumed, loader(), loader(), ckpt_path=folder / "epoch=1.ckpt", weights_only=True
    )
    for a, b in zip(module.state_dict().values(), resumed.state_dict().values()):
        assert torch.equal(a, b)


def ddp_observe(rank: int, folder: Path) -> None:
    """Ranks that log different numbers still agree on the start and the end."""

    class Disagreeing(Module):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("val_loss", torch.tensor(float(self.current_epoch * (rank - 0.4))))

    plan = gadam.Averaging(start=gadam.Plateau(patience=1, mode="min"))
    callback = AveragedWeights(plan, observe="val_loss")
    run = trainer(callback, epochs=9, strategy="ddp", devices=2)
    run.fit(Disagreeing(), loader(), loader())
    for value in gathered(torch.tensor([run.current_epoch, callback.average.count])):
        assert value.tolist() == [4, 6]
    assert callback.average.phase == "finished"


class Sharded(Module):
    def configure_model(self) -> None:
        from torch.distributed.fsdp import fully_shard

        mesh = self.device_mesh["data_parallel"]  # type: ignore[index]
        if not isinstance(self.net[0].weight, torch.distributed.tensor.DTensor):
            for layer in self.net:
                fully_shard(layer, mesh=mesh)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.05)

    def on_validation_epoch_start(self) -> None:
        self.validated.append([_full(p) for p in self.parameters()])


def _full(p: Any) -> Tensor:
    whole: Tensor = p.full_tensor() if hasattr(p, "full_tensor") else p
    return whole.detach().clone()


def fsdp2(rank: int, folder: Path) -> None:
    _fsdp2(folder, distributed=False)


def fsdp2_distributed_checkpoint(rank: int, folder: Path) -> None:
    _fsdp2(folder, distributed=True)


def _fsdp2(folder: Path, distributed: bool) -> None:
    """Sharded weights: the average is exact, BatchNorm is pooled, and resume is bitwise."""
    from lightning.pytorch.strategies import ModelParallelStrategy

    def run(epochs: int, **kwargs: Any) -> tuple[Module, AveragedWeights, list[list[Tensor]]]:
        module, callback = Sharded(batchnorm=True), _callback(batchnorm=True)
        iterates: list[list[Tensor]] = []

        class Full(pl.Callback):
            def on_train_batch_end(self, *args: Any) -> None:
                iterates.append([_full(p) for p in module.parameters()])

        strategy = ModelParallelStrategy(
            data_parallel_size=2, tensor_parallel_size=1, save_distributed_checkpoint=distributed
        )
        keep = pl.callbacks.ModelCheckpoint(folder, "{epoch}", save_top_k=-1)
        options: dict[str, Any] = {"strategy": strategy, "devices": 2, "epochs": epochs}
        trainer(callback, Full(), keep, **options).fit(module, loader(), loader(), **kwargs)
        return module, callback, iterates

    module, callback, iterates = run(3)
    assert callback.average.count == 7
    means = [torch.stack(taken).mean(0) for taken in zip(*iterates[2:])]
    for p, validated, mean in zip(module.parameters(), module.validated[-1], means):
        torch.testing.assert_close(_full(p), mean)
        assert torch.equal(_full(p), validated)
    first: Any = module.net[0]
    hidden = nn.functional.linear(dataset().tensors[0], _full(first.weight), _full(first.bias))
    layer: Any = module.net[1]
    torch.testing.assert_close(layer.running_mean, hidden.mean(0))
    torch.testing.assert_close(layer.running_var, hidden.var(0))
    if not distributed:
        saved = torch.load(folder / "epoch=2.ckpt", weights_only=True)
        for (name, p), raw in zip(module.named_parameters(), iterates[-1]):
            assert torch.equal(saved["state_dict"][name], _full(p))
            assert torch.equal(saved["current_model_state"][name], raw)
    resumed, _, rest = run(3, ckpt_path=folder / "epoch=1.ckpt")
    for before, after in zip(iterates[6:], rest, strict=True):
        assert all(map(torch.equal, before, after))
    for p, q in zip(module.parameters(), resumed.parameters()):
        assert torch.equal(_full(p), _full(q))


def _callback(**kwargs: Any) -> AveragedWeights:
    return AveragedWeights(gadam.Averaging(start=3), **kwargs)
