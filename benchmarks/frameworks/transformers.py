"""Averages for Transformers users, on the same criteria: gadam, TRL, diffusers, ema-pytorch, timm.

Run `python -m benchmarks.frameworks.transformers`. A tool whose import fails is left out, with the
reason. Install them with `pip install trl datasets diffusers ema-pytorch timm`.
Every tool gets the same network, data, and steps, and is used as its documentation shows.
"""

from __future__ import annotations

import copy
import gc
import importlib
import re
import tempfile
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing
import transformers
from torch import Tensor, nn
from torch.multiprocessing import ProcessExitedException, ProcessRaisedException
from transformers import PretrainedConfig, PreTrainedModel, Trainer, TrainingArguments

import gadam
from benchmarks.frameworks import Verdict, write_results
from gadam.integrations.transformers import AVERAGE_FOLDER, AveragedTrainer

Weights = dict[str, Tensor]
STEPS, START, DECAY = 8, 5, 0.999


# ------------------------------------------------------------------------------------ the problem


class _Config(PretrainedConfig):
    """The configuration of the network."""

    model_type = "normalized"


class _Network(PreTrainedModel):
    """A small network with BatchNorm."""

    config_class = _Config

    def __init__(self, config: _Config) -> None:
        super().__init__(config)
        self.inner = nn.Sequential(nn.Linear(4, 128), nn.Tanh(), nn.Linear(128, 128))
        self.norm = nn.BatchNorm1d(128)
        self.outer = nn.Linear(128, 1)
        self.post_init()

    def forward(self, x: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        """Return the predictions, and the loss if there are labels."""
        out = self.outer(self.norm(self.inner(x)).relu()).squeeze(1)
        return {"logits": out} if labels is None else {"loss": (out - labels).square().mean()}


def network(dtype: torch.dtype = torch.float32) -> Any:
    torch.manual_seed(0)
    model: Any = _Network(_Config())
    return model.to(dtype)


def rows(count: int = 32) -> list[dict[str, Tensor]]:
    xs = 3 + 2 * torch.randn(count, 4, generator=torch.Generator().manual_seed(0))
    return [{"x": x, "labels": x.sum().sin()} for x in xs]


def batch(step: int) -> dict[str, Tensor]:
    chosen = rows()[8 * (step % 4) :][:8]
    return {name: torch.stack([row[name] for row in chosen]) for name in chosen[0]}


def values(model: nn.Module) -> Weights:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def same(a: Weights, b: Weights) -> bool:
    return all(torch.equal(a[name], b[name]) for name in b)


def close(a: Weights, b: Weights) -> bool:
    return all(torch.allclose(a[name].float(), b[name].float(), atol=1e-6) for name in b)


# ------------------------------------------------------------------------------------------ tools


class _Tool(ABC):
    """A tool in a plain training loop, used as its documentation shows.

    Args:
        model: The model.
        optimizer: Its optimizer.
        start: The first step to average.
    """

    package: str

    def __init__(self, model: Any, optimizer: torch.optim.Optimizer, start: int) -> None:
        self.model, self.optimizer, self.start = model, optimizer, start
        self.open()

    @abstractmethod
    def open(self) -> None:
        """Create the average before the first step."""

    @abstractmethod
    def step(self, number: int) -> None:
        """Update the average after a step of the optimizer."""

    @abstractmethod
    def average(self) -> Weights:
        """Return the average."""

    @abstractmethod
    def validate(self, run: Callable[[Any], object]) -> None:
        """Run a validation of the model, as this tool does it."""

    def final(self) -> Weights:
        """Return the state dict of the averaged model, as this tool provides it."""
        return validated(self)

    def state(self) -> Any:
        """Return what a checkpoint holds of the tool."""
        return None

    def load(self, state: Any) -> None:
        """Restore it."""
        raise NotImplementedError

    def export(self, folder: str) -> bool:
        """Write the average as a model in the middle of training. Returns False if it cannot."""
        return False


class _Gadam(_Tool):
    """This library."""

    package = "gadam"

    def open(self) -> None:
        plan = gadam.Averaging(start=self.start, weighting=gadam.EMA(DECAY))
        self.iterates = gadam.IterateAverage(self.optimizer, plan)

    def step(self, number: int) -> None:
        pass  # the average hooks into the optimizer

    def average(self) -> Weights:
        average = self.iterates.model_state_dict(self.model)
        return {name: average[name] for name, _ in self.model.named_parameters()}

    def validate(self, run: Callable[[Any], object]) -> None:
        data = [batch(i) for i in range(4)]
        with self.iterates.applied(self.model, data) if self.iterates.count else _nothing():
            run(self.model)

    def state(self) -> Any:
        return self.iterates.state_dict()

    def load(self, state: Any) -> None:
        self.iterates.load_state_dict(state)

    def export(self, folder: str) -> bool:
        with self.iterates.applied(self.model, batchnorm=False):
            self.model.save_pretrained(folder)
        return True


class _BEMA(_Tool):
    """TRL's callback, with the calls that the Trainer makes."""

    package = "trl"

    def open(self) -> None:
        from trl import BEMACallback

        # Without its bias correction, which is another method and not an average.
        self.callback = BEMACallback(update_freq=1, update_after=self.start, bias_power=8.0)
        self.callback.on_train_begin(None, SimpleNamespace(global_step=0), None, self.model)

    def step(self, number: int) -> None:
        state = SimpleNamespace(global_step=number)
        self.callback.on_step_end(None, state, None, self.model)

    def average(self) -> Weights:
        return values(self.callback.running_model)

    def validate(self, run: Callable[[Any], object]) -> None:
        run(self.model)

    def final(self) -> Weights:
        return dict(self.callback.running_model.state_dict())


class _Diffusers(_Tool):
    """EMAModel of diffusers."""

    package = "diffusers"

    def open(self) -> None:
        from diffusers.training_utils import EMAModel

        self.ema = EMAModel(
            self.model.parameters(),
            decay=DECAY,
            update_after_step=self.start,
            model_cls=_Network,
            model_config=self.model.config,
        )

    def step(self, number: int) -> None:
        self.ema.step(self.model.parameters())

    def average(self) -> Weights:
        names = [name for name, _ in self.model.named_parameters()]
        return dict(zip(names, (p.clone() for p in self.ema.shadow_params)))

    def validate(self, run: Callable[[Any], object]) -> None:
        self.ema.store(self.model.parameters())
        self.ema.copy_to(self.model.parameters())
        run(self.model)
        self.ema.restore(self.model.parameters())

    def state(self) -> Any:
        return copy.deepcopy(self.ema.state_dict())

    def load(self, state: Any) -> None:
        self.ema.load_state_dict(state)

    def export(self, folder: str) -> bool:
        self.ema.store(self.model.parameters())
        self.ema.copy_to(self.model.parameters())
        self.model.save_pretrained(folder)
        self.ema.restore(self.model.parameters())
        return True


class _EmaPytorch(_Tool):
    """EMA of ema-pytorch."""

    package = "ema_pytorch"

    def open(self) -> None:
        from ema_pytorch import EMA

        self.ema = EMA(self.model, beta=DECAY, update_after_step=self.start, update_every=1)

    def step(self, number: int) -> None:
        self.ema.update()

    def average(self) -> Weights:
        return values(self.ema.ema_model)

    def validate(self, run: Callable[[Any], object]) -> None:
        run(self.ema.ema_model)

    def state(self) -> Any:
        return copy.deepcopy(self.ema.state_dict())

    def load(self, state: Any) -> None:
        self.ema.load_state_dict(state)

    def export(self, folder: str) -> bool:
        self.ema.ema_model.save_pretrained(folder)
        return True


class _Timm(_Tool):
    """ModelEmaV3 of timm."""

    package = "timm"

    def open(self) -> None:
        from timm.utils import ModelEmaV3

        self.ema = ModelEmaV3(self.model, decay=DECAY, update_after_step=self.start)

    def step(self, number: int) -> None:
        self.ema.update(self.model, step=number)

    def average(self) -> Weights:
        return values(self.ema.module)

    def validate(self, run: Callable[[Any], object]) -> None:
        run(self.ema.module)

    def state(self) -> Any:
        return copy.deepcopy(self.ema.module.state_dict())

    def load(self, state: Any) -> None:
        self.ema.module.load_state_dict(state)

    def export(self, folder: str) -> bool:
        self.ema.module.save_pretrained(folder)
        return True


TOOLS: dict[str, type[_Tool]] = {
    "gadam": _Gadam,
    "TRL BEMACallback": _BEMA,
    "diffusers EMAModel": _Diffusers,
    "ema-pytorch EMA": _EmaPytorch,
    "timm ModelEmaV3": _Timm,
}


@contextmanager
def _nothing() -> Iterator[None]:
    yield


def made(kind: type[_Tool], model: Any = None, start: int = 1, lr: float = 0.05) -> _Tool:
    model = network() if model is None else model
    return kind(model, torch.optim.SGD(model.parameters(), lr=lr), start)


def train(tool: _Tool, steps: range) -> None:
    for step in steps:
        tool.model.train()
        tool.optimizer.zero_grad()
        tool.model(**batch(step))["loss"].backward()
        tool.optimizer.step()
        tool.step(step + 1)


def validated(tool: _Tool) -> Weights:
    """Return the weights that a validation sees, and the BatchNorm statistics."""
    seen: Weights = {}

    def run(model: Any) -> None:
        model.eval()
        seen.update({name: value.clone() for name, value in model.state_dict().items()})

    tool.validate(run)
    return seen


# --------------------------------------------------------------------------------------- criteria


def validation(kind: type[_Tool]) -> Verdict:
    tool = made(kind)
    train(tool, range(STEPS))
    averaged = same(validated(tool), tool.average())
    return Verdict(averaged, "the average" if averaged else "the raw weights")


def delayed_start(kind: type[_Tool]) -> Verdict:
    tool = made(kind, start=START)
    train(tool, range(3))
    right = close(validated(tool), values(tool.model))  # one copies them by a formula that rounds
    return Verdict(right, "the raw weights" if right else "other weights")


def resume(kind: type[_Tool]) -> Verdict:
    whole = made(kind)
    train(whole, range(STEPS))
    first = made(kind)
    train(first, range(STEPS // 2))
    second = made(kind, copy.deepcopy(first.model))
    state = first.state()
    if state is not None:
        second.load(state)
    train(second, range(STEPS // 2, STEPS))
    a, b = whole.average(), second.average()
    if same(b, a):
        return Verdict(True, "bitwise", 0.0)
    off = max(float((a[n] - b[n]).abs().max()) for n in values(whole.model))
    return Verdict(False, f"{'no state to save; ' if state is None else ''}off by {off:.1g}", off)


def bfloat16(kind: type[_Tool]) -> Verdict:
    """Compare with the average of the same weights in float32: they ramp from 1 to 2."""
    averages = []
    for dtype in (torch.bfloat16, torch.float32):
        model = network(dtype)
        with torch.no_grad():
            for p in model.parameters():
                p.fill_(1.0)
        tool = made(kind, model, lr=1.0)
        for step in range(1, 2049):  # many steps, because some tools average little in the first
            for p in model.parameters():
                p.grad = torch.full_like(p, 0.0 if step % 16 else -(2.0**-7))
            tool.optimizer.step()
            tool.step(step)
        averages.append(float(tool.average()["inner.2.weight"].float().mean()) - 1)
    moved = averages[0] / averages[1]
    return Verdict(abs(moved - 1) < 0.05, f"moves {100 * moved:.0f}% as far as in float32", moved)


def batchnorm(kind: type[_Tool]) -> Verdict:
    tool = made(kind)
    train(tool, range(40))
    seen = tool.final()
    right = network()
    right.load_state_dict({**right.state_dict(), **seen})
    gadam.refresh_batchnorm(right, [batch(i) for i in range(4)])
    off = (seen["norm.running_mean"] - right.norm.running_mean).norm()
    ratio = float(off / right.norm.running_mean.norm())
    text = "exact" if ratio < 1e-6 else f"the mean is off by {100 * ratio:.0f}%"
    return Verdict(ratio < 1e-3, text, ratio)


def exception(kind: type[_Tool]) -> Verdict:
    tool = made(kind)
    train(tool, range(STEPS))
    raw = values(tool.model)

    def run(model: Any) -> None:
        raise KeyboardInterrupt

    try:
        tool.validate(run)
    except KeyboardInterrupt:
        kept = same(values(tool.model), raw)
    return Verdict(kept, "raw weights kept" if kept else "the model is left with the average")


def extra_memory(kind: type[_Tool]) -> Verdict:
    model = network()
    size = sum(p.numel() for p in model.parameters())
    before = _floats()
    tool = made(kind, model)
    train(tool, range(2))
    tool.optimizer.zero_grad()
    held = (_floats() - before) / size
    peak = 0.0

    def run(model: Any) -> None:
        nonlocal peak
        peak = (_floats() - before) / size

    tool.validate(run)
    return Verdict(None, f"{held:.1f}, and {max(peak, held):.1f} in validation", held)


def _floats() -> int:
    """Return the number of floats in all tensors that are alive."""
    gc.collect()
    storages = {}
    for value in gc.get_objects():
        if type(value) in (Tensor, nn.Parameter):
            storage = value.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes() // 4
    return sum(storages.values())


def saved_weights(kind: type[_Tool]) -> Verdict:
    with tempfile.TemporaryDirectory() as folder:
        if kind in (_Gadam, _BEMA):
            return _saved_by_the_trainer(kind, Path(folder))
        tool = made(kind)
        train(tool, range(STEPS))
        raw = values(tool.model)
        tool.export(folder)
        right = same(values(_Network.from_pretrained(folder)), tool.average())
        return Verdict(
            right and same(values(tool.model), raw),
            "the average, by a call of your own" if right else "other weights",
        )


def _saved_by_the_trainer(kind: type[_Tool], folder: Path) -> Verdict:
    seen: list[Weights] = []

    class Keep(transformers.TrainerCallback):
        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            seen.append(values(kwargs["model"]))

    args = TrainingArguments(
        str(folder),
        max_steps=STEPS,
        save_steps=STEPS // 2,
        lr_scheduler_type="constant",
        learning_rate=0.01,
        per_device_train_batch_size=8,
        report_to="none",
        disable_tqdm=True,
        logging_strategy="no",
        use_cpu=True,
        dataloader_pin_memory=False,
    )
    options: dict[str, Any] = {"train_dataset": rows(), "callbacks": [Keep()]}
    trainer: Any
    if kind is _Gadam:
        trainer = AveragedTrainer(
            network(), args, averaging=gadam.Averaging(start=1), batchnorm=True, **options
        )
    else:
        from trl import BEMACallback

        options["callbacks"].append(BEMACallback(update_freq=1, update_after=1, bias_power=8.0))
        trainer = Trainer(network(), args, **options)
    trainer.train()
    checkpoint = folder / f"checkpoint-{STEPS // 2}"
    raw = same(values(_Network.from_pretrained(checkpoint)), seen[STEPS // 2 - 1])
    average = False
    if (checkpoint / AVERAGE_FOLDER).is_dir():
        found = values(_Network.from_pretrained(checkpoint / AVERAGE_FOLDER))
        mean = {n: torch.stack([w[n] for w in seen[: STEPS // 2]]).mean(0) for n in seen[0]}
        average = close(found, mean)
    at_the_end = "; the average at the end" if (folder / "bema").is_dir() else ""
    return Verdict(raw and average, ("both" if average else "the raw weights") + at_the_end)


def sharding(kind: type[_Tool]) -> Verdict:
    alone = made(kind)
    train(alone, range(STEPS))
    with tempfile.TemporaryDirectory() as folder:
        context: Any = torch.multiprocessing.spawn(
            _shard, (kind, folder), nprocs=2, join=False, daemon=True
        )
        try:
            while not context.join(timeout=120):
                pass
        except (ProcessRaisedException, ProcessExitedException) as error:
            named = re.findall(r"^(?:\w+\.)*(\w+Error)\b", str(error), re.MULTILINE)
            return Verdict(False, f"raises {named[-1]}" if named else "raises an error")
        if not (Path(folder) / "average.pt").exists():
            return Verdict(False, "ends the process")
        found = torch.load(Path(folder) / "average.pt", weights_only=True)
    expected = alone.average()
    off = max(float((found[n] - expected[n]).abs().max()) for n in found)
    return Verdict(off < 1e-5, "equals one process" if off < 1e-5 else f"off by {off:.1g}")


def _shard(rank: int, kind: type[_Tool], folder: str) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=2)
    model = network()
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    tool = made(kind, model)
    train(tool, range(STEPS))
    average = {name: tool.average()[name] for name, _ in model.named_parameters()}
    full = {n: v.full_tensor() if hasattr(v, "full_tensor") else v for n, v in average.items()}
    if rank == 0:
        torch.save(full, Path(folder) / "average.pt")
    dist.destroy_process_group()


FUNCTIONS: dict[str, Callable[[type[_Tool]], Verdict]] = {
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


def main() -> None:
    """Run every tool on every criterion, and write the verdicts."""
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    verdicts: dict[str, dict[str, Verdict]] = {}
    versions = {"transformers": transformers.__version__}
    for title, kind in TOOLS.items():
        if kind is not _Gadam:
            versions[kind.package] = version(kind.package.replace("_", "-"))
        try:
            importlib.import_module(kind.package)
        except Exception as error:
            reason = f"{type(error).__name__}: {error}".splitlines()[0]
            versions[kind.package] += f" (not run here, its import fails: {reason})"
            continue
        verdicts[title] = {}
        for name, run in FUNCTIONS.items():
            verdict = verdicts[title][name] = run(kind)
            print(f"{name:15} {title:20} {verdict}", flush=True)
    write_results("transformers", verdicts, versions)


if __name__ == "__main__":
    main()
