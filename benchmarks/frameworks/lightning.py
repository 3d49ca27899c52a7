"""Lightning's averaging callbacks and ours: `python -m benchmarks.frameworks.lightning`."""

from __future__ import annotations

import gc
import logging
import multiprocessing
import os
import socket
import tempfile
import warnings
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import (
    EMAWeightAveraging,
    ModelCheckpoint,
    StochasticWeightAveraging,
    WeightAveraging,
)
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import gadam
from benchmarks.frameworks import Verdict, write_results
from gadam.integrations.lightning import AveragedWeights

STEPS = 6  # per epoch
BATCH = 8
EPOCHS = 4
START = 2 * STEPS + 1  # the first step of the third epoch, for a delayed start
DECAY = 0.9


class _DelayedMean(WeightAveraging):
    """The documented way to delay: override should_update."""

    def __init__(self, start: int) -> None:
        super().__init__()
        self.start = start

    def should_update(self, step_idx: int | None = None, epoch_idx: int | None = None) -> bool:
        return step_idx is not None and step_idx + 1 >= self.start


@dataclass(frozen=True)
class Tool:
    """A callback that averages weights.

    Attributes:
        name: Its name.
        make: A function of the first step to sample that returns a callback.
        samples: A function of the iterates (the initial weights first) and the first step that
            returns those that enter the average.
        decay: The decay per sample of an EMA, or None for a mean.
    """

    name: str
    make: Callable[[int], Any]
    samples: Callable[[list[list[Tensor]], int], list[list[Tensor]]]
    decay: float | None = None

    def expected(self, iterates: list[list[Tensor]], start: int) -> list[Tensor]:
        """Return what the tool says it computes, in float64."""
        first, *rest = [[t.double() for t in taken] for taken in self.samples(iterates, start)]
        average = first
        for n, sample in enumerate(rest, start=2):
            keep = self.decay if self.decay is not None else 1 - 1 / n
            average = [keep * a + (1 - keep) * s for a, s in zip(average, sample)]
        return average


def _from(iterates: list[list[Tensor]], start: int) -> list[list[Tensor]]:
    return iterates[start:]


def _epochs(iterates: list[list[Tensor]], start: int) -> list[list[Tensor]]:
    """Return the weights at the start of the epochs, of which SWA averages the last ones."""
    return iterates[start - 1 : -1 : STEPS]


def _swa(start: int) -> StochasticWeightAveraging:
    return StochasticWeightAveraging(swa_lrs=0.05, swa_epoch_start=(start - 1) // STEPS + 1)


TOOLS = (
    Tool(
        "gadam AveragedWeights",
        lambda start: AveragedWeights(gadam.Averaging(start=start), batchnorm=True),
        _from,
    ),
    Tool("WeightAveraging", _DelayedMean, _from),
    Tool(
        "EMAWeightAveraging",
        lambda start: EMAWeightAveraging(decay=DECAY, update_starting_at_step=start - 1),
        _from,
        DECAY,
    ),
    Tool("StochasticWeightAveraging", _swa, _epochs),
)


class _Module(pl.LightningModule):
    """A regression. It records the weights after every step, and those that validation sees."""

    def __init__(self, lr: float = 0.05, fail: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(16, 64), nn.BatchNorm1d(64), nn.Linear(64, 1))
        self.lr, self.fail = lr, fail
        self.iterates = [parameters(self)]
        self.validated: list[list[Tensor]] = []

    def forward(self, inputs: Tensor) -> Any:
        return self.net(inputs)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss: Tensor = (self(batch[0]) - batch[1]).square().mean()
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.trainer.global_step >= len(self.iterates):
            self.iterates.append(parameters(self))

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.training_step(batch, batch_idx))
        if batch_idx == 0:
            self.validated.append(parameters(self))
        if self.fail and self.current_epoch == EPOCHS - 1:
            raise InterruptedError

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.lr)


def parameters(module: nn.Module) -> list[Tensor]:
    return [_whole(p).detach().clone() for p in module.parameters()]


def _whole(p: Any) -> Tensor:
    whole: Tensor = p.full_tensor() if hasattr(p, "full_tensor") else p
    return whole


def data() -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(BATCH * STEPS, 16, generator=generator) + 0.5
    return DataLoader(TensorDataset(inputs, inputs.sum(1, keepdim=True).sin()), BATCH)


def fit(module: _Module, *callbacks: Any, ckpt_path: Any = None, **kwargs: Any) -> pl.Trainer:
    options: dict[str, Any] = {
        "accelerator": "cpu",
        "devices": 1,
        "logger": False,
        "enable_checkpointing": any(isinstance(c, ModelCheckpoint) for c in callbacks),
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "max_epochs": EPOCHS,
        "num_sanity_val_steps": 0,
    }
    trainer = pl.Trainer(callbacks=list(callbacks), **{**options, **kwargs})
    trainer.fit(module, data(), data(), ckpt_path=ckpt_path)
    return trainer


def distance(some: list[Tensor], others: list[Tensor]) -> float:
    return float(sum((a.double() - b.double()).square().sum() for a, b in zip(some, others)) ** 0.5)


def _iterates(module: _Module) -> list[list[Tensor]]:
    """Return the initial weights and those after each step of training."""
    return module.iterates[: EPOCHS * STEPS + 1]  # SWA adds an epoch for BatchNorm


# ---------------------------------------------------------------------------------------- criteria


def validation(tool: Tool) -> Verdict:
    module = _Module()
    fit(module, tool.make(1))
    iterates = _iterates(module)
    average = tool.expected(iterates, 1)
    seen = module.validated[EPOCHS - 1]
    value = distance(seen, average) / distance(iterates[-1], average)
    right = value < 1e-3
    return Verdict(right, "the average" if right else "the raw weights", value)


def delayed_start(tool: Tool) -> Verdict:
    module = _Module()
    fit(module, tool.make(START))
    iterates = _iterates(module)
    raw, seen = iterates[STEPS], module.validated[0]
    value = distance(seen, raw) / distance(iterates[0], raw)
    untrained = distance(seen, iterates[0]) == 0
    text = "the raw weights" if value == 0 else "untrained weights" if untrained else "others"
    return Verdict(value == 0, text, value)


def resume(tool: Tool) -> Verdict:
    with tempfile.TemporaryDirectory() as folder:
        whole = _Module()
        keep = ModelCheckpoint(folder, "{epoch}", save_top_k=-1)
        fit(whole, tool.make(STEPS + 1), keep)
        worst = 0.0
        for epoch in range(EPOCHS - 1):
            resumed = _Module()
            try:
                path = Path(folder, f"epoch={epoch}.ckpt")
                fit(resumed, tool.make(STEPS + 1), ckpt_path=path)
            except Exception as error:
                return Verdict(False, f"{type(error).__name__} from epoch {epoch + 1}")
            worst = max(worst, distance(parameters(whole), parameters(resumed)))
    return Verdict(worst == 0, "bitwise" if worst == 0 else "other weights", worst)


def bfloat16(tool: Tool) -> Verdict:
    module = _Module(lr=0.002)
    trainer = fit(module, tool.make(1), precision="bf16-true", max_epochs=(epochs := 40))
    iterates = module.iterates[: epochs * STEPS + 1]
    expected = tool.expected(iterates, 1)
    with tempfile.TemporaryDirectory() as folder:
        trainer.save_checkpoint(Path(folder, "last.ckpt"))
        saved = torch.load(Path(folder, "last.ckpt"), weights_only=True)["state_dict"]
    average = [saved[name] for name, _ in module.named_parameters()]
    value = distance(average, expected) / distance(iterates[0], expected)
    return Verdict(value < 1e-3, f"off by {value:.2%} of its way", value)


def batchnorm(tool: Tool) -> Verdict:
    module = _Module()
    fit(module, tool.make(1))
    layer: Any = module.net[1]
    inputs: Any = data().dataset
    hidden = module.net[0](inputs.tensors[0]).detach()
    means = ((layer.running_mean - hidden.mean(0)).abs() / hidden.std(0)).max()
    variances = (layer.running_var / hidden.var(0) - 1).abs().max()
    value = float(max(means, variances))
    return Verdict(value < 1e-3, f"off by {value:.1%}", value)


def exception(tool: Tool) -> Verdict:
    module = _Module(fail=True)
    with suppress(InterruptedError):
        fit(module, tool.make(1))
    value = distance(parameters(module), module.iterates[-1])
    return Verdict(value == 0, "the raw weights" if value == 0 else "the average", value)


def saved_weights(tool: Tool) -> Verdict:
    found = {}
    for weights_only in (False, True):
        with tempfile.TemporaryDirectory() as folder:
            module = _Module()
            keep = ModelCheckpoint(
                folder, "{epoch}", "val_loss", save_top_k=-1, save_weights_only=weights_only
            )
            fit(module, tool.make(1), keep)
            epoch = EPOCHS - 2
            saved = torch.load(Path(folder, f"epoch={epoch}.ckpt"), weights_only=True)
        iterates = module.iterates[: (epoch + 1) * STEPS + 1]
        average, raw = tool.expected(iterates, 1), iterates[-1]
        for key in {"state_dict", "current_model_state"}.intersection(saved):
            taken = [saved[key][name] for name, _ in module.named_parameters()]
            near = distance(taken, average) < distance(taken, raw)
            found[weights_only, key] = "average" if near else "raw"
    full, only = found[False, "state_dict"], found[True, "state_dict"]
    both = full == "average" and found.get((False, "current_model_state")) == "raw"
    text = f"{'average and raw' if both else full}; save_weights_only: {only}"
    return Verdict(both and only == "average", text)


def _held() -> int:
    """Return the bytes of all tensors in memory."""
    gc.collect()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        tensors = [t for t in gc.get_objects() if isinstance(t, Tensor)]
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return sum(storages.values())


class _Big(_Module):
    """Weights that are much larger than everything else, and no record of them."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(16, 50_000), nn.Linear(50_000, 1))
        self.held: dict[str, int] = {}

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self._measure("training", batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self._measure("validation", batch_idx)

    def _measure(self, phase: str, batch_idx: int) -> None:
        if batch_idx == 0 and self.current_epoch == EPOCHS - 1:
            self.held[phase] = _held()


def extra_memory(tool: Tool) -> Verdict:
    held = []
    for callbacks in ((), (tool.make(1),)):
        module = _Big()
        fit(module, *callbacks)
        held.append(module.held)
    size = sum(p.nbytes for p in module.parameters())
    copies = {k: (held[1][k] - held[0][k]) / size for k in held[1]}
    text = f"{copies['training']:.1f}, {copies['validation']:.1f}"
    return Verdict(None, text, round(copies["training"], 3))


# ---------------------------------------------------------------------------------------- sharding


class _Sharded(_Module):
    def configure_model(self) -> None:
        from torch.distributed.fsdp import fully_shard
        from torch.distributed.tensor import DTensor

        if not any(isinstance(p, DTensor) for p in self.parameters()):
            for layer in self.net:
                mesh: Any = self.device_mesh
                fully_shard(layer, mesh=mesh["data_parallel"])


def _shard(rank: int, port: int, index: int, answers: Any) -> None:
    from lightning.pytorch.strategies import ModelParallelStrategy

    quiet()
    torch.set_num_threads(1)
    os.environ.update(
        GLOO_SOCKET_IFNAME="lo",
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        WORLD_SIZE="2",
        LOCAL_WORLD_SIZE="2",
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        GROUP_RANK="0",
        TORCHELASTIC_RUN_ID="benchmark",
    )
    tool, module = TOOLS[index], _Sharded()
    strategy = ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1)
    with tempfile.TemporaryDirectory() as folder:
        try:
            keep = ModelCheckpoint(folder)
            fit(module, tool.make(1), keep, strategy=strategy, devices=2)
            steps = STEPS // 2 * EPOCHS
            average = tool.expected(module.iterates[: steps + 1], 1)
            value = distance(parameters(module), average)
            value /= distance(module.iterates[steps], average)
            answers.put((rank, "", value))
        except Exception as error:
            answers.put((rank, f"{type(error).__name__}: {error}".partition("\n")[0], None))
    answers.close()
    answers.join_thread()
    os._exit(0)  # the other process may wait for this one


def sharding(tool: Tool) -> Verdict:
    context = multiprocessing.get_context("spawn")
    answers = context.Queue()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    index = TOOLS.index(tool)
    workers = [context.Process(target=_shard, args=(r, port, index, answers)) for r in (0, 1)]
    for worker in workers:
        worker.start()
    try:
        _, problem, value = answers.get(timeout=240)
    except Exception:
        problem, value = "no answer", None
    for worker in workers:
        worker.join(20)
        worker.kill()
    if problem:
        print(problem)
        return Verdict(False, problem.partition(":")[0])
    right = value < 1e-3
    return Verdict(right, "the average" if right else f"off by {value:.1%}", value)


FUNCTIONS = {
    "validation": validation,
    "delayed start": delayed_start,
    "resume": resume,
    "bfloat16": bfloat16,
    "BatchNorm": batchnorm,
    "exception": exception,
    "sharding": sharding,
    "saved weights": saved_weights,
    "extra memory": extra_memory,
}


def quiet() -> None:
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    logging.getLogger("lightning.fabric").setLevel(logging.ERROR)


def main() -> None:
    quiet()
    verdicts: dict[str, dict[str, Verdict]] = {tool.name: {} for tool in TOOLS}
    for criterion, run in FUNCTIONS.items():
        for tool in TOOLS:
            verdict = verdicts[tool.name][criterion] = run(tool)
            print(f"{criterion:15} {tool.name:26} {verdict}", flush=True)
    write_results("lightning", verdicts, {"lightning": pl.__version__})


if __name__ == "__main__":
    main()
