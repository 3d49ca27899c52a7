"""Averaged weights in the Trainer of Transformers.

The raw weights train, and the average is what the trainer evaluates and saves. During training:

- ``evaluate`` and ``predict`` see the average. Until the first sample, they see the raw weights.
- ``checkpoint-N/`` has the raw weights, where every Trainer resumes from. Its ``optimizer.pt`` has
  the state of the average. ``checkpoint-N/gadam/average/`` is the averaged model, for
  ``from_pretrained``. It is also what ``load_best_model_at_end`` loads and what a push to the Hub
  uploads.
- ``save_model`` saves the average.

After training, the model holds the average, and the trainer uses the model as it is.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.optim import Optimizer

from gadam import _torch
from gadam.average.attached import applied_average
from gadam.average.plan import Averaging, Trigger
from gadam.average.wrappers import average_of, unwrapped
from gadam.integrations.common import (
    FrameworkError,
    attach,
    continue_at,
    count_from_zero,
    missing,
    preserved_rng,
)

try:
    from transformers import (
        Trainer,
        TrainerCallback,
        TrainerControl,
        TrainerState,
        TrainingArguments,
    )
    from transformers.trainer_utils import EvalLoopOutput, HubStrategy, has_length
except ImportError as error:
    raise missing("transformers", "transformers") from error

if TYPE_CHECKING:
    from gadam.average import IterateAverage
    from gadam.average.batchnorm import BatchNorm

    _Base = Trainer
else:
    _Base = object

__all__ = ["AVERAGE_FOLDER", "AveragedMixin", "AveragedTrainer"]

# In a checkpoint's folder. Not one level up: a folder with an adapter directly inside a checkpoint
# is an adapter of the model to Transformers.
AVERAGE_FOLDER = os.path.join("gadam", "average")


class AveragedMixin(_Base):
    """Averages the iterates of any subclass of Trainer.

    List it before the trainer::

        class AveragedSFTTrainer(AveragedMixin, SFTTrainer):
            pass

    The optimizer is the trainer's own: ``args.optim`` with the learning rate, betas, and weight
    decay of ``args``, or the one in ``optimizers=``. Training itself does not change: the raw
    weights are bit for bit those of the trainer without the mixin. Steps are optimizer steps,
    however many batches ``gradient_accumulation_steps`` puts into one.

    Args:
        *args: The arguments of the trainer.
        averaging: The plan. None means the optimizer's own average, if it has one with a plan (such
            as :class:`gadam.Gadam`), and otherwise :meth:`gadam.Averaging.for_budget` of the
            trainer's steps.
        batchnorm: How to refresh BatchNorm statistics for the averaged weights: False for models
            without BatchNorm, True for a pass over the training data, or a loader, as in
            :meth:`gadam.IterateAverage.applied`. The refresh runs before every evaluation and every
            save. It does not change the order of the training data.
        finish: Leave the average in the model when training ends. False leaves the raw weights,
            unless ``load_best_model_at_end`` loads the best average.
        observe: The metric of an evaluation to pass to the plan's trigger, such as ``"eval_loss"``.
            Training stops when the trigger says so.
        **kwargs: The keyword arguments of the trainer.

    Attributes:
        average: The :class:`gadam.IterateAverage`. None before training.

    Raises:
        FrameworkError: If the plan has a trigger but ``observe`` names no metric, or if training is
            set up with DeepSpeed or FSDP 1, whose parameters are not the model's own tensors.
    """

    average: IterateAverage | None

    def __init__(
        self,
        *args: Any,
        averaging: Averaging | None = None,
        batchnorm: Iterable[Any] | bool = False,
        finish: bool = True,
        observe: str | None = None,
        **kwargs: Any,
    ) -> None:
        if averaging is not None and not isinstance(averaging, Averaging):
            raise FrameworkError(f"averaging must be a gadam.Averaging or None, got {averaging!r}.")
        self.average = None
        self._averaging, self._batchnorm, self._observe = averaging, batchnorm, observe
        self._finish_training = finish
        self._owns_average = False  # False if the optimizer or its user has created it
        self._averages_now = False  # from the start of training until it ends
        super().__init__(*args, **kwargs)
        # First, so that other callbacks find the average in the model when training ends.
        self.callback_handler.callbacks.insert(0, _Events(self))

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        order = cls.__mro__
        if Trainer in order and order.index(Trainer) < order.index(AveragedMixin):
            raise TypeError(
                f"{cls.__name__} lists AveragedMixin after the trainer, so it has no effect. List "
                "it first."
            )

    # ------------------------------------------------------------------------------------ training

    def create_scheduler(self, num_training_steps: int, optimizer: Optimizer | None = None) -> Any:
        """Create the scheduler, and the average.

        This is the first method that knows the final optimizer and the number of steps, and the
        last one before a checkpoint's optimizer is loaded, which restores the average.

        Args:
            num_training_steps: The number of optimizer steps.
            optimizer: The optimizer. None means the trainer's own.
        """
        scheduler = super().create_scheduler(num_training_steps, optimizer)
        self._refuse_unsupported()
        inner = unwrapped(self.optimizer if optimizer is None else optimizer)
        average = self.average
        trains_again = average is not None and average.optimizer is inner
        if average is not None and self._owns_average:
            average.remove()  # of an earlier training
            average = None
        if average is None or not trains_again:
            found = average_of(inner)
            average = attach(inner, self._averaging, num_training_steps)
            self._owns_average = average is not found
            if trains_again:
                count_from_zero(average)
        self.average = average
        self._refuse_blind_trigger(average.averaging)
        self._averages_now = True
        return scheduler

    def _refuse_blind_trigger(self, plan: Averaging) -> None:
        if not isinstance(plan.start, Trigger):
            if self._observe is None:
                return
            raise FrameworkError(
                f"observe={self._observe!r} has no effect, because the plan has no trigger. Pass "
                'averaging=Averaging(start=Plateau(mode="min")), or remove observe.'
            )
        if self._observe is None:
            raise FrameworkError(
                f"The plan starts with {plan.start}, which needs a metric. Pass "
                "observe='eval_loss', or the name of another metric of the evaluation."
            )
        if self.args.eval_strategy == "no":
            raise FrameworkError(
                f"The plan starts with {plan.start}, but nothing is evaluated. Set eval_strategy "
                "in the training arguments."
            )

    def _refuse_unsupported(self) -> None:
        plugin = getattr(self.accelerator.state, "fsdp_plugin", None)
        sharded = self.is_fsdp_enabled and getattr(plugin, "fsdp_version", 1) == 1
        if self.is_deepspeed_enabled or sharded:
            name = "DeepSpeed" if self.is_deepspeed_enabled else "FSDP 1"
            raise FrameworkError(
                f"{name} flattens the parameters, so their average is not the model's. Use FSDP 2 "
                "(fsdp_config={'version': 2}) or DDP."
            )
        parts = self.model_wrapped.modules()
        normalized = any(isinstance(part, _torch.BATCHNORM_TYPES) for part in parts)
        endless = self.train_dataset is not None and not has_length(self.train_dataset)
        if self._batchnorm is True and normalized and endless:
            raise FrameworkError(
                "batchnorm=True needs training data of a known length. Pass batchnorm=loader."
            )

    def _finish(self) -> None:
        """Leave the average in the model, once."""
        if self._averages_now and self.average is not None and self._finish_training:
            self.average.copy_to(self.model_wrapped, self._batchnorm_source())
        self._averages_now = False

    @contextmanager
    def _averaged(self) -> Iterator[bool]:
        """Apply the average for the block, during training and from the first sample on.

        Yields:
            True if the weights inside are the averaged ones.
        """
        average = self.average
        if not self._averages_now or average is None or not average.count:
            yield False
        elif applied_average(average.optimizers) is not None:
            yield True
        else:
            with average.applied(self.model_wrapped, self._batchnorm_source()):
                yield True

    def _batchnorm_source(self) -> BatchNorm:
        return self._run_training_data if self._batchnorm is True else self._batchnorm or False

    def _run_training_data(self, model: nn.Module) -> None:
        """Run the model on the training data, for its BatchNorm statistics."""
        prepared = self.accelerator._dataloaders
        known = len(prepared)
        try:
            with preserved_rng():
                for inputs in self.get_train_dataloader():
                    with self.compute_loss_context_manager():
                        self.compute_loss(model, self._prepare_inputs(inputs))
        finally:
            del prepared[known:]  # The accelerator would keep the loader, and its workers.

    # ---------------------------------------------------------------------------------- evaluation

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> EvalLoopOutput:
        """Evaluate the average, for ``evaluate`` with one or several data sets and ``predict``.

        Args:
            *args: The arguments of the trainer's method.
            **kwargs: Its keyword arguments.
        """
        with self._averaged():
            return super().evaluation_loop(*args, **kwargs)

    # ---------------------------------------------------------------------------------- checkpoints

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save the average, for ``from_pretrained``.

        A training checkpoint gets the raw weights, with the average in a folder inside.

        Args:
            output_dir: The folder. None means ``args.output_dir``.
            _internal_call: Whether the trainer itself calls this.
        """
        if not (_internal_call and output_dir is not None):  # not a training checkpoint
            with self._averaged():
                return super().save_model(output_dir, _internal_call)
        if self.average is not None and applied_average(self.average.optimizers) is not None:
            raise FrameworkError(
                "A training checkpoint needs the raw weights, but the average is applied. Leave "
                "the `with average.applied():` block first."
            )
        super().save_model(output_dir, _internal_call)
        with self._averaged() as averaged:
            if averaged:
                folder = os.path.join(output_dir, AVERAGE_FOLDER)
                super().save_model(folder, _internal_call)
                if self.is_fsdp_enabled:
                    from accelerate.utils import save_fsdp_model

                    os.makedirs(folder, exist_ok=True)
                    plugin = self.accelerator.state.fsdp_plugin
                    save_fsdp_model(plugin, self.accelerator, self.model, folder)
        return None

    def _load_best_model(self) -> None:
        """Load the average of the best checkpoint. It is what the metric was measured on."""
        self._finish()
        best = self.state.best_model_checkpoint
        if best is not None and os.path.isdir(average := os.path.join(best, AVERAGE_FOLDER)):
            self.state.best_model_checkpoint = average
        try:
            super()._load_best_model()
        finally:
            self.state.best_model_checkpoint = best

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        """Upload the average, and beside it the training checkpoint if the strategy says so."""
        average = os.path.join(checkpoint_folder, AVERAGE_FOLDER)
        strategy = self.args.hub_strategy
        resumable = strategy in (HubStrategy.CHECKPOINT, HubStrategy.ALL_CHECKPOINTS)
        if not os.path.isdir(average) or not resumable:
            folder = average if os.path.isdir(average) else checkpoint_folder
            return super()._push_from_checkpoint(folder)
        before = getattr(self, "push_in_progress", None)
        jobs = None if before is None else list(before.jobs)
        self.args.hub_strategy = HubStrategy.EVERY_SAVE
        try:
            super()._push_from_checkpoint(average)
        finally:
            self.args.hub_strategy = strategy
        now = self.push_in_progress
        if now is None or (now is before and now.jobs == jobs):
            return None  # skipped: the last push has not finished
        from huggingface_hub import upload_folder

        name = Path(checkpoint_folder).name
        now.jobs.append(
            upload_folder(
                repo_id=self.hub_model_id,
                folder_path=checkpoint_folder,
                path_in_repo="last-checkpoint" if strategy == HubStrategy.CHECKPOINT else name,
                commit_message=f"Training in progress, {name}",
                token=self.args.hub_token,
                revision=self.args.hub_revision,
                run_as_future=True,
            )
        )
        return None


class _Events(TrainerCallback):
    """Passes metrics to the trigger, and finishes before other callbacks see the end of training.

    Args:
        trainer: The trainer.
    """

    def __init__(self, trainer: AveragedMixin) -> None:
        self.trainer = trainer

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: Any,
    ) -> None:
        if self.trainer.average is not None:
            continue_at(self.trainer.average, state.global_step)

    def on_evaluate(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: Any,
    ) -> None:
        trainer, metrics = self.trainer, kwargs.get("metrics") or {}
        average, name = trainer.average, trainer._observe
        if name is None or average is None or not trainer._averages_now:
            return
        full = name if name.startswith("eval_") else f"eval_{name}"  # as metric_for_best_model
        if name in metrics or full in metrics:
            if average.observe(metrics[name if name in metrics else full]):
                control.should_training_stop = True
            return
        # With several data sets, each has metrics of its own.
        sets = trainer.eval_dataset
        prefixes = [f"eval_{key}_" for key in sets] if isinstance(sets, dict) else ["eval_"]
        own = max((p for p in prefixes if full.startswith(p)), key=len, default=None)
        if any(f"{p}loss" in metrics for p in prefixes if own in (None, p)):
            raise FrameworkError(
                f"The evaluation has no metric {trainer._observe!r}. Pass one of these as "
                f"observe=: {', '.join(sorted(metrics))}."
            )

    def on_train_end(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: Any,
    ) -> None:
        self.trainer._finish()


class AveragedTrainer(AveragedMixin, Trainer):
    """Trainer that evaluates, saves, and ends with the average of its iterates.

    Args:
        model: The model, as in Trainer.
        args: The training arguments. The optimizer, its learning rate, betas, and weight decay come
            from here, unless ``optimizers=`` is given. Averaging needs a learning rate that stays
            high: Trainer's default decays to zero, so pass ``lr_scheduler_type="constant"``, or
            ``"constant_with_warmup"``.
        averaging: The plan, as in :class:`AveragedMixin`.
        batchnorm: How to refresh BatchNorm statistics, as in :class:`AveragedMixin`.
        finish: Leave the average in the model when training ends.
        observe: The metric to pass to the plan's trigger.
        **kwargs: The other arguments of Trainer.

    Example:
        >>> import tempfile, torch, gadam
        >>> from transformers import GPT2Config, GPT2LMHeadModel, TrainingArguments
        >>> from gadam.integrations.transformers import AveragedTrainer
        >>> config = GPT2Config(vocab_size=8, n_positions=4, n_embd=8, n_layer=1, n_head=1)
        >>> tokens = torch.arange(4)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     trainer = AveragedTrainer(
        ...         GPT2LMHeadModel(config),
        ...         TrainingArguments(
        ...             folder, max_steps=3, use_cpu=True, disable_tqdm=True, logging_steps=9,
        ...             report_to="none", save_strategy="no", lr_scheduler_type="constant"
        ...         ),
        ...         train_dataset=[{"input_ids": tokens, "labels": tokens}] * 8,
        ...         averaging=gadam.Averaging(start=2),
        ...     )
        ...     output = trainer.train()  # doctest: +ELLIPSIS
        {'train_runtime': ...}
        >>> trainer.average.count
        2
    """

    def __init__(
        self,
        model: Any = None,
        args: TrainingArguments | None = None,
        *others: Any,
        averaging: Averaging | None = None,
        batchnorm: Iterable[Any] | bool = False,
        finish: bool = True,
        observe: str | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(
            model,
            args,
            *others,
            averaging=averaging,
            batchnorm=batchnorm,
            finish=finish,
            observe=observe,
            **kwargs,
        )
