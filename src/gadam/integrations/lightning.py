"""Averaged weights in Lightning: a callback for ``lightning.pytorch.Trainer``."""

from __future__ import annotations

import copy
import inspect
import logging
import math
import random
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from gadam import _torch
from gadam._dtensor import is_dtensor, local
from gadam.average import Averaging, IterateAverage, average_of
from gadam.average.attached import applied_average
from gadam.average.batchnorm import (
    BatchNorm,
    has_statistics_in_use,
    refresh_batchnorm,
)
from gadam.average.plan import Trigger
from gadam.average.store import params_of
from gadam.average.swap import swapped
from gadam.integrations.common import FrameworkError, attach, continue_at

if TYPE_CHECKING:
    import lightning.pytorch as pl
    from lightning.pytorch.strategies import Strategy
    from lightning.pytorch.trainer.states import RunningStage, TrainerFn
    from lightning.pytorch.utilities import CombinedLoader
    from lightning.pytorch.utilities.model_helpers import is_overridden
    from lightning.pytorch.utilities.seed import isolate_rng
else:
    from importlib import import_module

    # Subclass the callback of the package that the user's trainer is from.
    _names = ["lightning.pytorch", "pytorch_lightning"]
    if "pytorch_lightning" in sys.modules and "lightning" not in sys.modules:
        _names.reverse()
    for _name in _names:
        try:
            pl = import_module(_name)
            break
        except ModuleNotFoundError as error:
            if error.name not in (_name, _name.partition(".")[0]):
                raise
    else:
        raise ImportError(
            "gadam.integrations.lightning needs Lightning. Install it: pip install gadam[lightning]"
        )
    Strategy = pl.strategies.Strategy
    RunningStage = import_module(f"{_name}.trainer.states").RunningStage
    TrainerFn = import_module(f"{_name}.trainer.states").TrainerFn
    CombinedLoader = import_module(f"{_name}.utilities").CombinedLoader
    is_overridden = import_module(f"{_name}.utilities.model_helpers").is_overridden
    isolate_rng = import_module(f"{_name}.utilities.seed").isolate_rng

__all__ = ["AveragedWeights"]

_log = logging.getLogger(__name__)
_UNSUPPORTED = ("FSDPStrategy", "DeepSpeedStrategy", "XLAFSDPStrategy")
_RIVALS = ("AveragedWeights", "WeightAveraging", "StochasticWeightAveraging")
_SHARDED_RAW = "raw_weights_are_optimizer_state"


class AveragedWeights(pl.Callback):
    """Validate, save, and finish with averaged weights.

    Training is not affected: the raw weights are in place whenever the optimizer steps, bit for
    bit, and the order of the training data does not change. The average is the same for every
    precision, strategy, and number of optimizers, because it follows the optimizer's own steps:

    - **Validation** inside ``fit`` sees the average, so every metric, ``ModelCheckpoint`` and
      ``EarlyStopping`` do. Before the first sample it sees the raw weights. An error during
      validation restores the raw weights. ``trainer.validate()`` and ``test()`` evaluate the
      model as it is. To evaluate the average there, call them inside
      ``with callback.average.applied(model):``.
    - **Checkpoints** have the keys of Lightning's ``WeightAveraging``: ``state_dict`` is the
      average, which ``load_from_checkpoint`` takes, and ``current_model_state`` the raw weights,
      with which ``fit(ckpt_path=...)`` continues. The average itself is part of the optimizer's
      state. A checkpoint of ``WeightAveraging`` continues here, and the other way around.
    - **After** ``fit`` the model holds the average.

    Args:
        averaging: The plan. None uses the average of the optimizer (``Gadam`` with a plan, or an
            :class:`gadam.IterateAverage` that ``configure_optimizers`` attached), or else
            :meth:`gadam.Averaging.for_budget` of the trainer's number of optimizer steps.
        batchnorm: Data to recompute the BatchNorm statistics for the averaged weights with,
            whenever they are validated, saved, or kept: True for the training data, a loader, or a
            callable that runs forward passes and receives the module if it takes an argument.
            Batches go through ``forward`` as in :func:`gadam.refresh_batchnorm`, or through
            ``training_step`` if the module has no ``forward``: what it logs or notes in attributes
            is dropped then. False keeps the statistics of the raw weights, which do not fit the
            averaged ones.
        validate: Whether validation inside ``fit`` sees the average.
        finish: Whether the model holds the average after ``fit``.
        observe: The name of a logged validation metric for the plan's trigger, such as
            ``"val_loss"`` for ``Averaging(start=Plateau(mode="min"))``. Training stops when the
            trigger says so.

    Attributes:
        average: The :class:`gadam.IterateAverage`, once ``fit`` has started.

    Example:
        >>> from lightning.pytorch import Trainer
        >>> from gadam.integrations.lightning import AveragedWeights
        >>> callback = AveragedWeights(batchnorm=True)
        >>> trainer = Trainer(callbacks=[callback], accelerator="cpu", logger=False)
    """

    def __init__(
        self,
        averaging: Averaging | None = None,
        batchnorm: BatchNorm | bool = False,
        validate: bool = True,
        finish: bool = True,
        observe: str | None = None,
    ) -> None:
        if averaging is not None and not isinstance(averaging, Averaging):
            raise FrameworkError(f"averaging must be a gadam.Averaging or None, got {averaging!r}.")
        if isinstance(batchnorm, Iterator):
            raise FrameworkError(
                "batchnorm is an iterator, which one refresh exhausts. Pass the loader instead."
            )
        self._averaging, self._batchnorm = averaging, batchnorm
        self._validate, self._finish, self._observe = validate, finish, observe
        self._average: IterateAverage | None = None
        self._module: nn.Module | None = None
        self._swap = ExitStack()  # holds the average in the model during validation
        self._statistics: dict[str, Tensor] = {}  # of BatchNorm, for the average
        self._statistics_count = 0  # the number of samples in that average
        self._raw: dict[str, Tensor] = {}  # the raw weights, if the model holds the average
        self._checksums: list[int] = []  # of the parameters, when training ended
        self._owned = False  # whether this callback has created the average
        self._over = self._failed = self._warned = False
        self._resumed: dict[str, Any] | None = None  # the raw weights of a checkpoint
        self._imported: dict[str, Any] | None = None  # the average of another callback

    @property
    def average(self) -> IterateAverage:
        """The running average."""
        if self._average is None:
            raise FrameworkError("AveragedWeights has no average yet. Call trainer.fit() first.")
        return self._average

    # ---------------------------------------------------------------------------------- training

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Check the trainer before ``fit`` loads anything.

        Args:
            trainer: The trainer.
            pl_module: The module.
            stage: What the trainer is about to do.

        Raises:
            FrameworkError: If another callback averages weights too, or if the strategy hides them.
        """
        if stage != "fit":
            return
        self._check_callbacks(trainer)
        if type(trainer.strategy).__name__ in _UNSUPPORTED:
            raise FrameworkError(
                f"AveragedWeights does not support {type(trainer.strategy).__name__}. Use "
                "ModelParallelStrategy (FSDP2) to shard the weights."
            )
        if self._average is not None and self._owned:
            self._average.remove()  # of an earlier fit
        self._swap.close()
        self._statistics, self._statistics_count = {}, 0
        self._raw = {}
        self._resumed = self._imported = self._average = None
        self._over = self._failed = False
        self._module = pl_module

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Attach an average to the optimizers.

        Args:
            trainer: The trainer.
            pl_module: The module.

        Raises:
            FrameworkError: If the plan does not fit the arguments, or if there is none and the
                number of steps is not known.
        """
        if self._resumed is not None:
            pl_module.load_state_dict(self._resumed, strict=pl_module.strict_loading)
            self._resumed = None
        own = average_of(trainer.optimizers)
        steps = _number_of_steps(trainer) if self._averaging is None else 1
        self._average = attach(trainer.optimizers, self._averaging, steps)
        self._owned = self._average is not own
        if self._owned and not steps:
            self._average.remove()
            raise FrameworkError(
                "The number of training steps is not known, so there is no default plan. Set "
                "max_steps in the trainer, or pass averaging=gadam.Averaging(start=...)."
            )
        self._check_trigger(self._average.averaging)
        # A checkpoint with save_weights_only=True calls no callback: it asks the strategy only.
        trainer.strategy.lightning_module_state_dict = (  # type: ignore[method-assign]
            lambda: self._state_dict(trainer, "average")
        )

    def _check_callbacks(self, trainer: pl.Trainer) -> None:
        callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
        for other in callbacks:
            names = {cls.__name__ for cls in type(other).__mro__}
            if other is not self and names.intersection(_RIVALS):
                raise FrameworkError(
                    f"AveragedWeights and {type(other).__name__} would both replace the weights. "
                    "Remove one of the two callbacks."
                )

    def _check_trigger(self, plan: Averaging) -> None:
        triggered = isinstance(plan.start, Trigger)
        if self._observe is not None and not triggered:
            raise FrameworkError(
                f"observe={self._observe!r} has no effect, because the plan has no trigger. Pass "
                'averaging=Averaging(start=Plateau(mode="min")), or remove observe.'
            )
        if self._observe is None and triggered and self._owned:
            _log.warning(
                "The plan waits for a metric. Pass observe= with the name of a validation metric "
                "to AveragedWeights, or call average.observe() once per epoch."
            )

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Check the data, and continue the average of another callback.

        Args:
            trainer: The trainer.
            pl_module: The module.

        Raises:
            FrameworkError: If ``batchnorm=True`` and the training data has no end, or the module
                cannot run it outside of training.
        """
        # In manual optimization, Lightning counts the steps of every optimizer.
        counted = 1 if pl_module.automatic_optimization else max(len(trainer.optimizers), 1)
        continue_at(self.average, trainer.global_step // counted)
        if self._imported is not None and not self.average.count:
            self.average.load_averaged_model(self._imported, pl_module)
        self._imported = None
        if self._batchnorm is True and math.isinf(trainer.num_training_batches):
            raise FrameworkError(
                "batchnorm=True needs training data of a known length. Set limit_train_batches, "
                "or pass batchnorm=loader."
            )
        if self._refreshes and not callable(self._batchnorm) and not _has_forward(pl_module):
            if not pl_module.automatic_optimization:
                raise FrameworkError(
                    "The module has no forward, and its training_step runs the optimizers, so the "
                    "BatchNorm refresh cannot use it. Define forward, or pass a callable as "
                    "batchnorm."
                )
            if "dataloader_iter" in inspect.signature(pl_module.training_step).parameters:
                raise FrameworkError(
                    "The module has no forward, and its training_step takes dataloader_iter, so "
                    "the BatchNorm refresh cannot use it. Define forward, or pass a callable as "
                    "batchnorm."
                )

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Leave the average in the model.

        Args:
            trainer: The trainer.
            pl_module: The module.
        """
        if self._finish and not self.average.count:
            _log.warning(
                "Training ended before the average had a sample. The model keeps the raw weights."
            )
        if self._finish and self.average.count:
            averaged = set(params_of(*self.average.optimizers))
            params = {n: p for n, p in pl_module.named_parameters() if p in averaged}
            tensors = {**params, **dict(pl_module.named_buffers())}
            # On the host, for checkpoints that are written after training.
            raw = {n: local(t).detach().to("cpu", copy=True) for n, t in tensors.items()}
            with self._weights(trainer, "average"):
                pass  # refreshes the statistics, if that is necessary
            self.average.copy_to(pl_module, batchnorm=False)
            self._write_statistics(pl_module)
            self._raw = raw
        self._checksums = _checksums(pl_module.parameters())
        self._over = True

    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Leave the average in the model if the checkpoint was already at the end of training.

        Args:
            trainer: The trainer.
            pl_module: The module.
        """
        if not self._over:
            self.on_train_end(trainer, pl_module)

    def on_exception(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException
    ) -> None:
        """Restore the raw weights.

        Args:
            trainer: The trainer.
            pl_module: The module.
            exception: The error.
        """
        self._failed = True
        self._swap.close()

    # -------------------------------------------------------------------------------- validation

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Swap the average in.

        Args:
            trainer: The trainer.
            pl_module: The module.
        """
        if self._validate and self._is_fitting(trainer):
            self._swap.enter_context(self._weights(trainer, "average"))

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Restore the raw weights, and pass the metric to the trigger.

        Args:
            trainer: The trainer.
            pl_module: The module.

        Raises:
            FrameworkError: If the metric was not logged.
        """
        if not self._is_fitting(trainer):
            return
        self._swap.close()
        if self._observe is None:
            return
        metrics = trainer.callback_metrics
        if self._observe not in metrics:
            names = ", ".join(sorted(metrics)) or "none"
            raise FrameworkError(
                f"The metric {self._observe!r} was not logged in validation. Logged metrics: "
                f"{names}. Log it in validation_step, or change observe."
            )
        # Every process must pass the same number.
        metric = trainer.strategy.reduce(metrics[self._observe].detach(), reduce_op="mean")
        if self.average.observe(float(metric)):
            trainer.should_stop = True

    def _is_fitting(self, trainer: pl.Trainer) -> bool:
        return trainer.state.fn == TrainerFn.FITTING and not trainer.sanity_checking

    # ---------------------------------------------------------------------------------- swapping

    @contextmanager
    def _weights(self, trainer: pl.Trainer, point: Literal["average", "raw"]) -> Iterator[None]:
        """Hold the averaged or the raw weights in the module for the block, whichever it has."""
        module, average = trainer.lightning_module, self.average
        applied = applied_average(average.optimizers) is not None
        if point == "raw" and applied:
            with average.suspended(module):
                yield
        elif point == "raw" and self._raw:
            tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
            values = {tensors[name]: value for name, value in self._raw.items()}
            with swapped(module, list(values), values.__getitem__, {}):
                yield
        elif point == "raw" or applied or self._raw or not average.count:
            yield
        else:
            with average.applied(module, batchnorm=False):
                self._refresh(trainer)
                yield

    @property
    def _refreshes(self) -> bool:
        return self._batchnorm is not False and self._batchnorm is not None

    def _refresh(self, trainer: pl.Trainer) -> None:
        """Give the module the BatchNorm statistics of the average, which it holds now."""
        module = trainer.lightning_module
        if not self._refreshes:
            if not self._warned and has_statistics_in_use(module):
                self._warned = True
                _log.warning(
                    "The module's BatchNorm statistics are those of the raw weights and do not fit "
                    "the averaged ones. Pass batchnorm=True or a loader to AveragedWeights."
                )
            return
        # After an error, other ranks may not answer, and the data may be the cause.
        if self._statistics_count != self.average.count and not self._failed:
            self._run_batches(trainer)
            self._statistics = {
                name: buffer.detach().clone()
                for name, buffer in module.named_buffers()
                if isinstance(module.get_submodule(name.rpartition(".")[0]), _BATCHNORM)
            }
            self._statistics_count = self.average.count
        self._write_statistics(module)

    def _write_statistics(self, module: nn.Module) -> None:
        for name, value in self._statistics.items():
            module.get_buffer(name).copy_(value)

    def _run_batches(self, trainer: pl.Trainer) -> None:
        """Refresh the BatchNorm statistics: like training, but without a trace in it."""
        module, model = trainer.lightning_module, trainer.model
        assert model is not None
        stage = trainer.state.stage
        with ExitStack() as stack:
            stack.enter_context(isolate_rng())
            stack.enter_context(_silenced(module))
            stack.enter_context(trainer.precision_plugin.train_step_context())
            try:
                trainer.state.stage = RunningStage.TRAINING  # for hooks that augment batches
                if callable(self._batchnorm):
                    refresh_batchnorm(model, self._batchnorm)
                    return
                loader: Any = self._batchnorm
                limit = None
                if loader is True:
                    loader = trainer.fit_loop._combined_loader
                    limit = int(trainer.num_training_batches)
                stack.enter_context(_kept_samplers(loader))
                batches = _on_device(trainer, islice(_fresh(loader), limit))
                if _has_forward(module):
                    refresh_batchnorm(model, (batch for _, batch in batches))
                else:
                    stack.enter_context(_kept_attributes(module))
                    refresh_batchnorm(model, batches, forward=_training_step)
            finally:
                trainer.state.stage = stage

    # ------------------------------------------------------------------------------- checkpoints

    def _state_dict(self, trainer: pl.Trainer, point: Literal["average", "raw"]) -> dict[str, Any]:
        """Return a copy of the module's state dict at this point, in the strategy's own format."""
        strategy, module = trainer.strategy, trainer.lightning_module
        own = type(strategy).lightning_module_state_dict
        if not self._is_responsible(trainer):
            return own(strategy)
        with self._weights(trainer, point):
            if own is not Strategy.lightning_module_state_dict:  # sharded
                return {name: _copied(value) for name, value in own(strategy).items()}
            if point == "raw":
                return self.average.raw_state_dict(module)
            return self.average.model_state_dict(module)

    def _is_responsible(self, trainer: pl.Trainer) -> bool:
        """Return False if the trainer has another module, or someone has set other weights."""
        if self._average is None or trainer.lightning_module is not self._module:
            return False
        if not self._over:
            return True
        is_applied = applied_average(self._average.optimizers) is not None
        return not is_applied and self._checksums == _checksums(self._module.parameters())

    def on_save_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Add the raw weights to a checkpoint. Its ``state_dict`` already holds the average.

        Args:
            trainer: The trainer.
            pl_module: The module.
            checkpoint: The checkpoint.
        """
        if not self._is_responsible(trainer):
            return
        raw = self._state_dict(trainer, "raw")
        checkpoint["averaging_state"] = {"n_averaged": torch.tensor(self.average.count)}
        if any(is_dtensor(value) for value in raw.values()):
            # A distributed checkpoint has the shards of these two entries only.
            checkpoint["averaging_state"][_SHARDED_RAW] = len(checkpoint["optimizer_states"])
            checkpoint["optimizer_states"].append(raw)
        else:
            checkpoint["current_model_state"] = raw

    def on_load_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Continue training with the raw weights of a checkpoint.

        Args:
            trainer: The trainer.
            pl_module: The module. It holds the averaged weights of the checkpoint.
            checkpoint: The checkpoint.
        """
        if trainer.state.fn != TrainerFn.FITTING:
            return
        state = checkpoint.get("averaging_state", {})
        if _SHARDED_RAW in state:
            _load_shards(trainer, f"optimizer_{state[_SHARDED_RAW]}")
        elif "current_model_state" in checkpoint:
            raw = checkpoint["current_model_state"]
            if any(is_dtensor(p) for p in pl_module.parameters()):
                from torch.distributed.checkpoint.state_dict import (
                    StateDictOptions,
                    set_model_state_dict,
                )

                set_model_state_dict(pl_module, raw, options=StateDictOptions(full_state_dict=True))
            else:  # The strategy has not converted the module to its precision yet.
                self._resumed = raw
        if int(state.get("n_averaged", 0)) and "state_dict" in checkpoint:
            averaged = {f"module.{name}": v for name, v in checkpoint["state_dict"].items()}
            self._imported = {"n_averaged": state["n_averaged"], **averaged}


_BATCHNORM = _torch.BATCHNORM_TYPES


def _number_of_steps(trainer: pl.Trainer) -> int:
    """Return the number of optimizer steps of the whole training, or 0 if it is not known."""
    steps = trainer.estimated_stepping_batches
    scheduled = _steps_by_schedule(trainer)
    if scheduled is not None:
        steps = scheduled
    if not trainer.lightning_module.automatic_optimization and trainer.max_steps > 0:
        # Lightning counts the steps of every optimizer, and the average those of all together.
        steps = min(steps, math.ceil(trainer.max_steps / max(len(trainer.optimizers), 1)))
    return max(int(steps), 0) if math.isfinite(steps) else 0


def _steps_by_schedule(trainer: pl.Trainer) -> int | None:
    """Return the steps if a callback accumulates more gradients in some epochs than in others.

    Lightning's own estimate ignores GradientAccumulationScheduler.
    """
    callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
    found = [c for c in callbacks if isinstance(c, pl.callbacks.GradientAccumulationScheduler)]
    batches, epochs = trainer.num_training_batches, trainer.max_epochs
    if not found or math.isinf(batches) or epochs is None or epochs < 0:
        return None
    per_epoch = map(found[0].get_accumulate_grad_batches, range(epochs))
    steps = sum(math.ceil(batches / accumulated) for accumulated in per_epoch)
    return min(steps, trainer.max_steps) if trainer.max_steps >= 0 else steps


def _has_forward(module: pl.LightningModule) -> bool:
    return bool(is_overridden("forward", module))


@contextmanager
def _silenced(module: nn.Module) -> Iterator[None]:
    """Make ``self.log`` and ``self.log_dict`` do nothing inside the block."""
    names = ("log", "log_dict")
    for name in names:
        module.__dict__[name] = lambda *args, **kwargs: None
    try:
        yield
    finally:
        for name in names:
            del module.__dict__[name]


@contextmanager
def _kept_attributes(module: nn.Module) -> Iterator[None]:
    """Undo what a training step notes in plain attributes: counters, outputs, states of metrics."""
    saved = [(vars(part), dict(vars(part))) for part in module.modules()]
    own = vars(nn.Module()).keys()
    values = [value for _, old in saved for name, value in old.items() if name not in own]
    tensors = [(value, value.detach().clone()) for value in values if isinstance(value, Tensor)]
    lists = [(value, list(value)) for value in values if isinstance(value, list)]
    try:
        yield
    finally:
        for attributes, old in saved:
            attributes.clear()
            attributes.update(old)
        for current, elements in lists:
            current[:] = elements
        with torch.inference_mode():  # also writes to tensors of validation
            for tensor, copied in tensors:
                if not torch.equal(tensor, copied):
                    tensor.copy_(copied)


def _loaders_of(loader: object) -> list[Any]:
    return list(loader.flattened) if isinstance(loader, CombinedLoader) else [loader]


def _fresh(loader: Any) -> Iterable[Any]:
    """Return the batches of a loader, without disturbing who else iterates over it."""
    if isinstance(loader, CombinedLoader):
        combined = CombinedLoader(loader.iterables, loader._mode)
        combined.flattened = [_fresh(one) for one in loader.flattened]
        return (batch for batch, _, _ in combined)
    batches: Iterable[Any] = loader
    if isinstance(loader, DataLoader) or hasattr(loader, "state_dict"):
        batches = copy.copy(loader)  # a loader may note its position for checkpoints
    if isinstance(loader, DataLoader):  # persistent workers serve one iterator at a time
        vars(batches)["persistent_workers"] = False
    return batches


@contextmanager
def _kept_samplers(loader: object) -> Iterator[None]:
    """Restore what decides the order of this data: random numbers, and numbers such as an epoch."""
    restore: list[Callable[[], object] | None] = []
    for one in _loaders_of(loader):
        restore.append(_restorer(getattr(one, "generator", None)))
        batch_sampler = getattr(one, "batch_sampler", None)
        inner = getattr(batch_sampler, "sampler", None)
        for sampler in (getattr(one, "sampler", None), batch_sampler, inner):
            attributes = getattr(sampler, "__dict__", {})
            restore.append(partial(_reset, attributes, dict(attributes)))
            restore += map(_restorer, attributes.values())
    try:
        yield
    finally:
        for call in filter(None, restore):
            call()


def _reset(attributes: dict[str, Any], before: dict[str, Any]) -> None:
    attributes.clear()
    attributes.update(before)


def _restorer(value: Any) -> Callable[[], object] | None:
    """Return a function that gives a generator or a list its current state again, or None."""
    numpy: Any = getattr(sys.modules.get("numpy"), "random", None)
    if isinstance(value, list):
        return partial(value.__setitem__, slice(None), list(value))
    if isinstance(value, random.Random):
        return partial(value.setstate, value.getstate())
    if isinstance(value, torch.Generator) or (numpy and isinstance(value, numpy.RandomState)):
        return partial(value.set_state, value.get_state())
    if numpy and isinstance(value, numpy.Generator):
        return partial(
            setattr, value.bit_generator, "state", copy.deepcopy(value.bit_generator.state)
        )
    return None


def _on_device(trainer: pl.Trainer, batches: Iterable[Any]) -> Iterator[tuple[int, Any]]:
    """Yield batches and their numbers, prepared as the training loop does."""
    module = trainer.lightning_module
    for index, batch in enumerate(batches):
        batch = trainer.precision_plugin.convert_input(batch)
        batch = module._on_before_batch_transfer(batch, dataloader_idx=0)
        yield index, trainer.strategy.batch_to_device(batch, dataloader_idx=0)


def _training_step(module: nn.Module, numbered: tuple[int, Any]) -> object:
    index, batch = numbered
    step: Callable[..., object] = module.training_step  # type: ignore[assignment]
    takes_index = len(inspect.signature(step).parameters) > 1
    return step(batch, index) if takes_index else step(batch)


_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _checksums(params: Iterable[Tensor]) -> list[int]:
    """Return the sum of the bit patterns of each parameter, read as integers.

    Unlike versions, they stay the same if weights are swapped in and out again.
    """
    parts = (local(p).detach() for p in params)
    real = (torch.view_as_real(part) if part.is_complex() else part for part in parts)
    return [int(part.contiguous().view(_BITS[part.element_size()]).sum()) for part in real]


def _copied(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, Tensor) else value


def _load_shards(trainer: pl.Trainer, key: str) -> None:
    """Load an entry of a distributed checkpoint into the model."""
    from torch.distributed.checkpoint.state_dict import get_model_state_dict
    from torch.distributed.checkpoint.state_dict_loader import load

    assert trainer.model is not None
    shards = get_model_state_dict(trainer.model)
    load({key: shards}, checkpoint_id=trainer.ckpt_path)
    trainer.model.load_state_dict(shards)
