"""The running average of an optimizer's iterates: its public class."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from gadam._dtensor import all_reduce_min, is_dtensor, local
from gadam.average.attached import (
    Applied,
    applied_average,
    attached,
    free_prefix,
    iterate_of,
)
from gadam.average.health import Health, measure
from gadam.average.joint import check_disjoint
from gadam.average.loading import Loader
from gadam.average.plan import Averaging, Trigger
from gadam.average.progress import Phase, Progress
from gadam.average.sampling import Sampler
from gadam.average.state import State
from gadam.average.store import (
    BesideOptimizer,
    InOptimizer,
    Store,
    calls_state_dict_hooks,
)
from gadam.average.swap import applied_weights, copied_state_dict, swapped
from gadam.average.wrappers import is_partitioned, unwrapped

if TYPE_CHECKING:
    from gadam.average.batchnorm import BatchNorm

__all__ = ["IterateAverage"]


class IterateAverage:
    r"""Average the iterates of any torch optimizer.

    On SGD this is SWA. ``Gadam.average`` is an average of this kind, stored in the optimizer. With
    the weights :math:`\theta_{t_1}, \theta_{t_2}, \dots` that the plan samples, and the weight
    :math:`w_n` of its weighting (:math:`1/n` for the plain mean),

    .. math::
        \bar\theta_n = \bar\theta_{n-1} + w_n (\theta_{t_n} - \bar\theta_{n-1}).

    **A due sample is the weights as** ``step()`` **and its hooks leave them**, for every optimizer
    and every implementation of its update. Later changes of the weights do not enter, and reading
    the average does not change it. A step in which no parameter has a gradient is not a step: it
    neither counts nor is sampled. A sample that is not finite does not enter. If a kernel has
    already folded it in, it is taken out again, and the average is what it was up to rounding.

    The average hooks into the optimizer's steps and stores a copy of its own, which is part of the
    optimizer's ``state_dict()``. The optimizer and the model do not change, except inside
    :meth:`applied` and by :meth:`copy_to`. On accelerators, a step does not wait for the device:
    :attr:`count` and :attr:`skipped` are read back only when someone asks. (A :class:`Window` reads
    one number per sample.) No GPU has timed this.

    **Gradients between the iterate and its average.** With ``interpolation`` :math:`\beta` in the
    plan, the optimizer steps from the iterate :math:`\theta_t`, but the weights of the model, where
    gradients are taken, are

    .. math::
        y_t = (1 - \beta) \, \theta_t + \beta \, \bar\theta.

    So the average leads the training instead of following it. AdamW with ``betas=(0.0, 0.999)``, a
    constant rate, no weight decay, ``start=1`` and :math:`\beta = 0.9` is Schedule-Free AdamW; here
    it works for any optimizer, with any start and weighting. Interpolation takes the place of
    momentum: use a small :math:`\beta_1`, or none. It costs one more copy of the weights. It needs
    a single optimizer that evaluates the model once per step. Every step starts from the stored
    iterate, so changes of the weights between steps, such as clipping them or :meth:`copy_to`, do
    not last. Change them in a post-hook of the step. If a step of an ordinary optimizer raises, the
    weights are left at the iterate.

    Args:
        optimizer: The optimizer whose iterates to average. It may be inside a wrapper of
            Accelerate, Lightning, Fabric or ZeroRedundancyOptimizer. Or a list of optimizers of one
            model: a joint step is complete, and a sample may be due, when the last of them has
            stepped with the same gradients.
        averaging: The plan. None means ``Averaging()``, which waits for :meth:`begin` or
            :meth:`update`.

    Attributes:
        optimizer: The optimizer, or the first of them, without wrappers.
        optimizers: All optimizers, without wrappers.
        averaging: The plan.

    Example:
        >>> import torch, gadam
        >>> model = torch.nn.Linear(4, 1)
        >>> sgd = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        >>> swa = gadam.IterateAverage(sgd, gadam.Averaging(start=3))
        >>> for _ in range(5):
        ...     sgd.zero_grad()
        ...     model(torch.randn(8, 4)).square().mean().backward()
        ...     sgd.step()
        >>> swa.count
        3
        >>> with swa.applied(model):
        ...     loss = model(torch.randn(8, 4)).square().mean()

    Reference: Izmailov et al., *Averaging Weights Leads to Wider Optima and Better Generalization*
    (arXiv 1803.05407). For interpolation: Defazio et al., *The Road Less Scheduled* (arXiv
    2405.15682).
    """

    optimizer: Optimizer
    optimizers: list[Optimizer]
    averaging: Averaging
    _is_partitioned = False  # by a ZeroRedundancyOptimizer

    def __init__(
        self,
        optimizer: Optimizer | Sequence[Optimizer],
        averaging: Averaging | None = None,
    ) -> None:
        several = list(optimizer) if isinstance(optimizer, (list, tuple)) else [optimizer]
        self._open([unwrapped(one) for one in several], averaging, built_in=False)
        self._is_partitioned = any(map(is_partitioned, several))

    @classmethod
    def built_into(cls, optimizer: Optimizer, averaging: Averaging | None) -> IterateAverage:
        """Return an average that is stored in the optimizer's own state, such as ``Gadam.average``.

        Args:
            optimizer: The optimizer. Its ``step`` may fold samples in
                (:func:`gadam.average.attached.fold_into`), and its ``state_dict`` and
                ``load_state_dict`` must call :meth:`publish` and :meth:`take_from`.
            averaging: The plan.
        """
        average = cls.__new__(cls)
        average._open([optimizer], averaging, built_in=True)
        return average

    def _open(
        self, optimizers: list[Optimizer], averaging: Averaging | None, built_in: bool
    ) -> None:
        if not optimizers:
            raise ValueError("IterateAverage needs at least one optimizer.")
        check_disjoint(optimizers)
        averaging = averaging if averaging is not None else Averaging()
        if isinstance(averaging, Optimizer):
            raise TypeError(
                f"averaging must be a gadam.Averaging, got {type(averaging).__name__}. Pass "
                "several optimizers as a list: IterateAverage([first, second], averaging)."
            )
        if not isinstance(averaging, Averaging):
            raise TypeError(
                f"averaging must be a gadam.Averaging, got {averaging!r}. Pass a plan, such as "
                "gadam.Averaging(start=100)."
            )
        if averaging.interpolation and len(optimizers) > 1:
            raise ValueError(
                "interpolation needs a single optimizer, because the weights of one step must be "
                f"the iterate of all of them. Got {len(optimizers)} optimizers. Use one optimizer "
                "class for all parameters, or a plan without interpolation."
            )
        if averaging.interpolation and any(
            one.averaging.interpolation for one in attached(optimizers[0]).averages
        ):
            raise ValueError("Another average of the optimizer has interpolation already.")
        self._attach(optimizers, averaging, built_in)
        if not built_in:
            self._warn_if_not_saved()
        if self._loader.arrive() is None:
            self._loader.continue_from_the_optimizers_steps()
            # Allocate now, not at the first step: a distributed checkpoint restores only existing
            # keys. In the optimizer's own state, a buffer would stop that from being initialized.
            if not built_in and averaging.start is not None:
                self._state.allocate()

    def _warn_if_not_saved(self) -> None:
        """Warn about optimizers whose state dicts would not have the average."""
        for optimizer in self.optimizers:
            if not calls_state_dict_hooks(optimizer):
                self._state.warn_once(
                    f"{type(optimizer).__name__}.state_dict() does not call torch's hooks, so its "
                    "checkpoints would not have the average. Average the optimizers inside it "
                    "instead, IterateAverage([first, second], averaging), or save "
                    "average.state_dict(), too.",
                    5,
                )

    def _attach(
        self,
        optimizers: list[Optimizer],
        averaging: Averaging,
        built_in: bool,
        prefix: str | None = None,
    ) -> None:
        """Open a store, and register hooks with the optimizers."""
        self.optimizers, self.optimizer, self.averaging = optimizers, optimizers[0], averaging
        self._raw: dict[Tensor, Tensor] = {}  # raw parameters and buffers while applied
        prefix = free_prefix(optimizers, wanted=prefix)
        store: Store = (
            InOptimizer(optimizers, prefix)
            if built_in
            else BesideOptimizer(
                optimizers,
                prefix,
                lambda: self._progress,
                lambda *saved: self._loader.prepare_to_load(*saved),
                self._other_stores,
            )
        )
        self._state = State(optimizers, averaging, store)
        self._loader = Loader(self._state)
        self._sampler = Sampler(self._state, self._loader)
        self._sampler.attach(self)

    def _other_stores(self, optimizer: Optimizer) -> list[Store]:
        """Return the stores of the optimizer's other averages."""
        samplers = attached(optimizer).samplers
        return [sampler.state.store for sampler in samplers if sampler is not self._sampler]

    def remove(self) -> None:
        """Detach from the optimizer. The average keeps its samples.

        If the plan interpolates, the weights become the iterate.

        Raises:
            RuntimeError: If the plan interpolates, and averaged weights are applied.
        """
        if self.averaging.interpolation and self._applied is not None:
            raise RuntimeError(
                "remove() was called while the averaged weights are applied. Leave the "
                "`with average.applied():` block first."
            )
        self._sampler.point.remove()
        self._detach()

    def _detach(self) -> None:
        self._sampler.detach(self)
        self._state.store.close()

    @property
    def is_removed(self) -> bool:
        """Whether :meth:`remove` was called."""
        return self._sampler not in attached(self.optimizer).samplers

    @property
    def _progress(self) -> Progress:
        return self._loader.progress

    def _averaged(self) -> list[Tensor]:
        return self._state.averaged()

    def _value(self, p: Tensor) -> Tensor:
        return self._state.value(p)

    @property
    def _applied(self) -> Applied | None:
        """What is applied: this average, or another one of the same optimizer."""
        return applied_average(self.optimizers)

    # -------------------------------------------------------------------------------------- control

    @property
    def count(self) -> int:
        """The number of samples taken. A window holds only the last of them."""
        return self._progress.count

    @property
    def skipped(self) -> int:
        """The number of samples that were due but not finite. They did not enter the average."""
        return self._progress.skipped

    @property
    def phase(self) -> Phase:
        """``"waiting"`` for the start, ``"averaging"``, or ``"finished"`` by the trigger."""
        return self._progress.phase

    @property
    def _begun_by_this_step(self) -> bool:
        """Whether sampling starts at this step or earlier.

        For step hooks that run before this average's own hook.
        """
        first_step = self.averaging.first_step
        return (
            self.phase != "waiting"
            or self.count > 0
            or (first_step is not None and self._progress.steps + 1 >= first_step)
        )

    def begin(self) -> None:
        """Start sampling at the next step. A finished average resumes.

        This has no effect while averaging.
        """
        if self.phase != "averaging":
            progress = self._progress
            self._state.tracker.progress = replace(
                progress,
                phase="averaging",
                begun=progress.steps + 1,
                memory=self._state.initial_progress.memory,
            )

    def update(self) -> bool:
        """Sample the current weights, for loops that average once per epoch.

        This neither waits for the plan's start nor turns automatic sampling on.

        Returns:
            True if the sample entered the average. A sample that is not finite does not enter and
            counts in :attr:`skipped`. No sample enters once :attr:`phase` is ``"finished"``.
        """
        if self._applied is not None:
            raise RuntimeError(
                "update() was called while the averaged weights are applied. Leave the "
                "`with average.applied():` block first."
            )
        if self.phase == "finished":
            return False
        return self._sampler.sample_now()

    def observe(self, metric: float) -> bool:
        """Pass a validation metric to the plan's trigger, once per epoch.

        Measure the metric inside :meth:`applied`. In distributed training, every process must pass
        the same number.

        Args:
            metric: The validation metric.

        Returns:
            True once training should stop. A plan without a trigger never stops training.
        """
        progress = self._progress
        trigger = self.averaging.start
        if isinstance(trigger, Trigger) and progress.phase != "finished":
            averaging = progress.phase == "averaging"
            memory, verdict = trigger.update(progress.memory, float(metric), averaging)
            self._state.tracker.progress = replace(progress, memory=memory)
            if verdict == "begin":
                self.begin()
            elif verdict == "finish":
                self._state.tracker.progress = replace(self._progress, phase="finished")
        return self.phase == "finished"

    # ------------------------------------------------------------------------------------- swapping

    @contextmanager
    def applied(
        self, model: nn.Module | None = None, batchnorm: BatchNorm = None
    ) -> Iterator[None]:
        """Swap the averaged weights in for the block, and restore the raw weights bit for bit.

        The raw weights come back even if the block raises. Without a sample, the weights inside
        are the raw ones; a warning says so once, unless a trigger is to find the start. The swap
        costs one copy of the parameters. The optimizer's ``state_dict()`` is the same inside and
        outside. The *model's* ``state_dict()`` holds the averaged weights inside; see
        :meth:`raw_state_dict`.

        Args:
            model: The model that holds the parameters. Its buffers are restored too. Required for
                ``batchnorm`` and for FSDP2.
            batchnorm: Data to recompute the BatchNorm statistics for the averaged weights with, as
                in :func:`gadam.refresh_batchnorm`: an iterable of batches, or a callable that runs
                forward passes and receives the model if it takes an argument. None keeps the
                statistics of the raw weights, which do not fit the averaged ones: a warning says so
                once if the model has any. False keeps them without a warning.

        Example:
            >>> import torch, gadam
            >>> model = torch.nn.Linear(4, 1)
            >>> optimizer = gadam.Gadam(model.parameters(), average=gadam.Averaging(start=1))
            >>> model(torch.randn(8, 4)).square().mean().backward()
            >>> optimizer.step()
            >>> with optimizer.average.applied(model):
            ...     loss = model(torch.randn(8, 4)).square().mean()
        """
        self._warn_if_unfit(model, batchnorm, stacklevel=4)
        with self._swapped(model, batchnorm):
            yield

    @contextmanager
    def suspended(self, model: nn.Module | None = None) -> Iterator[None]:
        """Swap the raw weights back in for a block inside :meth:`applied`.

        Use this to write a checkpoint of the raw weights in code that takes the model, not its
        state dict. Outside of :meth:`applied`, this has no effect.

        Args:
            model: The model that holds the parameters. Required for FSDP2.

        Example:
            >>> import torch, gadam
            >>> model = torch.nn.Linear(4, 1)
            >>> optimizer = gadam.Gadam(model.parameters(), average=gadam.Averaging(start=1))
            >>> for _ in range(2):
            ...     model(torch.randn(8, 4)).square().mean().backward()
            ...     optimizer.step()
            >>> raw = model.weight.detach().clone()
            >>> with optimizer.average.applied(model):
            ...     assert not torch.equal(model.weight, raw)
            ...     with optimizer.average.suspended(model):
            ...         assert torch.equal(model.weight, raw)
        """
        raw = self._applied._raw if self._applied is not None else {}
        with swapped(model, list(raw), raw.__getitem__, {}):
            yield

    def copy_to(self, model: nn.Module | None = None, batchnorm: BatchNorm = None) -> None:
        """Overwrite the model's weights with the averaged ones, permanently.

        If the BatchNorm refresh fails, nothing changes.

        Args:
            model: The model, as in :meth:`applied`.
            batchnorm: Data for the BatchNorm statistics, as in :meth:`applied`.
        """
        self._warn_if_unfit(model, batchnorm, stacklevel=3)
        with self._swapped(model, batchnorm) as keep:
            keep()

    def _warn_if_unfit(
        self, model: nn.Module | None, batchnorm: BatchNorm, stacklevel: int
    ) -> None:
        """Warn if the average is not what its user expects: empty, broken, or without BatchNorm."""
        # A trigger's metric is measured inside applied() from the first epoch on.
        triggered = isinstance(self.averaging.start, Trigger)
        if self._applied is not None:
            return
        if not self.count and not triggered:
            self._state.warn_once(
                "The average has no sample yet. The raw weights are used instead.", stacklevel + 1
            )
        if self.count and model is not None and batchnorm is None:
            from gadam.average.batchnorm import STALE, has_statistics_in_use  # optional

            if STALE not in self._state.warned and has_statistics_in_use(model):
                self._state.warn_once(STALE, stacklevel + 1)
        if "health" not in self._state.warned:
            problems = self._measure_health(reduce=False).problems
            if problems:
                self._state.warn_once(" ".join(problems), stacklevel + 1, kind="health")

    def health(self) -> Health:
        """Measure whether the average is still one of these weights, and whether it still moves.

        :meth:`applied`, :meth:`copy_to` and :meth:`save_model` warn once if something is clearly
        broken, by the rules of :attr:`gadam.average.Health.problems`. With sharded parameters, this
        method is a collective operation with one reduction; that check is local to each process.

        Example:
            >>> import torch, gadam
            >>> model = torch.nn.Linear(4, 1)
            >>> optimizer = gadam.Gadam(model.parameters(), average=gadam.Averaging(start=1))
            >>> model(torch.randn(8, 4)).square().mean().backward()
            >>> optimizer.step()
            >>> health = optimizer.average.health()
            >>> (health.samples, health.distance, health.problems)
            (1, 0.0, ())
        """
        return self._measure_health(reduce=True)

    def _measure_health(self, reduce: bool) -> Health:
        progress = self._progress
        weight = self.averaging.weighting.weight(progress.count + 1)
        raw = self._applied._raw if self._applied is not None else {}

        def iterate(p: Tensor) -> Tensor:
            found = iterate_of(self.optimizers, p)
            return found if found is not None else raw[p] if p in raw else local(p).detach()

        return measure(
            self._averaged(),
            iterate,
            self._value,
            weight,
            progress.count,
            progress.skipped,
            reduce=reduce,
        )

    def _swapped(
        self, model: nn.Module | None, batchnorm: BatchNorm
    ) -> AbstractContextManager[Callable[[], None]]:
        self._refuse_parts()
        params = self._averaged() if self.count else []
        return applied_weights(self, self.optimizers, model, params, self._value, batchnorm)

    def _refuse_parts(self) -> None:
        """Raise if this process has the average of only a part of the model."""
        self._loader.parts.check()
        if self._is_partitioned:
            raise RuntimeError(
                "Each process of a ZeroRedundancyOptimizer averages only its own part of the "
                "parameters. Call its consolidate_state_dict(), and load its state_dict() into an "
                "ordinary optimizer with an average, which has all of it."
            )

    # -------------------------------------------------------------------------------------- exports

    def model_state_dict(
        self, model: nn.Module, dtype: torch.dtype | None = None, full: bool = False
    ) -> dict[str, Any]:
        """Return a copy of the model's state dict with the averaged weights.

        The model does not change. The BatchNorm statistics are those of the raw weights. To save
        fresh ones, use :meth:`save_model` with ``batchnorm=``.

        The names are those of ``model.state_dict()``. Pass the model without the wrapper of
        ``torch.compile`` for names without its prefix.

        Args:
            model: The model that holds the parameters.
            dtype: Cast all floating-point tensors to this type. None leaves the averages in their
                own precision, such as float32 for bfloat16 weights, and the rest in the model's.
            full: For a sharded model (FSDP2), gather every tensor instead of returning shards. This
                is a collective operation: all processes must call it. The first one receives the
                tensors, on the host, and the other ones an empty dict.
        """
        from gadam.average.export import exported

        return exported(model, self._averages(), dtype, full)

    def _averages(self) -> dict[Tensor, Callable[[], Tensor]]:
        """Return functions that return the values of the averaged parameters, one at a time."""
        self._refuse_parts()
        params = self._averaged() if self.count else []
        return {p: partial(self._value, p) for p in params}

    def save_model(
        self,
        model: nn.Module,
        path: str | os.PathLike[str],
        dtype: torch.dtype | None = None,
        batchnorm: BatchNorm = None,
    ) -> None:
        """Write the averaged model to a safetensors file that says which weights it holds.

        :func:`gadam.average.read_provenance` returns that: the point (the average, or the iterate
        without a sample), the samples and their first and last step, the weighting, the plan and
        the versions. The file has all entries of ``model.state_dict()``, with the names of the
        model without the wrappers of DDP and ``torch.compile``. It appears complete or not at all.

        A sharded model (FSDP2) is gathered: all processes must call this, and the first one writes
        the file. Otherwise call it in one process. It needs the extra ``gadam[safetensors]``.

        Args:
            model: The model that holds the parameters. It does not change.
            path: The file to write.
            dtype: The type of the tensors, as in :meth:`model_state_dict`.
            batchnorm: Data for the BatchNorm statistics, as in :meth:`applied`.

        Raises:
            FileExistsError: If the file exists. It is not overwritten.
            ImportError: If safetensors is not installed.
        """
        from gadam.average import export

        export.import_safetensors()
        self._warn_if_unfit(model, batchnorm, stacklevel=3)
        free = all_reduce_min(not os.path.lexists(path), model.parameters())
        if not free:  # in all processes, so that none waits for the others
            raise export.overwrite_error(path)
        refresh = batchnorm is not None and batchnorm is not False
        with self._swapped(model, batchnorm) if refresh else nullcontext():
            tensors = export.exported(model, self._averages(), dtype, True, torch.device("cpu"))
        provenance = export.Provenance.of(self._progress, self.averaging)
        if tensors or not any(is_dtensor(p) for p in model.parameters()):
            export.write_file(path, export.bare_names(model, tensors), provenance)

    def raw_state_dict(self, model: nn.Module) -> dict[str, Any]:
        """Return a copy of the model's state dict with the raw weights.

        The weights are the raw ones even inside :meth:`applied`. Use this to write checkpoints in
        code that cannot know if the average is applied.

        Args:
            model: The model that holds the parameters.
        """
        raw = self._applied._raw if self._applied is not None else {}
        return copied_state_dict(model.state_dict(keep_vars=True), raw)

    # ------------------------------------------------------------------------- saving and restoring

    def state_dict(self) -> dict[str, Any]:
        """Return the average and its progress as tensors.

        The optimizer's own ``state_dict()`` contains the same. Use this one for an average alone.
        """
        progress = self._progress
        params = self._state.params()
        return {
            "progress": progress.pack(),
            # An empty entry is a parameter without an average. None is left out.
            "state": {i: self._state.store.slots(p) for i, p in enumerate(params)},
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the average, in the plan's own dtype and on the plan's own device.

        Args:
            state_dict: The result of :meth:`state_dict`.

        Raises:
            ValueError: If the state is damaged or does not match the optimizer and the plan. The
                average does not change then.
        """
        self._loader.load(state_dict)

    def averaged_model_state_dict(self, model: nn.Module) -> dict[str, Any]:
        """Return the state dict of a ``torch.optim.swa_utils.AveragedModel`` with this average.

        Args:
            model: The model that holds the parameters.
        """
        averaged = self.model_state_dict(model)
        count = torch.tensor(self.count, dtype=torch.long)
        return {"n_averaged": count, **{f"module.{name}": v for name, v in averaged.items()}}

    def load_averaged_model(self, state_dict: Mapping[str, Any], model: nn.Module) -> None:
        """Continue the average of a ``torch.optim.swa_utils.AveragedModel``.

        The optimizer's steps keep their count, and the plan still decides which of them to sample.

        Args:
            state_dict: The state dict of the AveragedModel.
            model: The model that holds the parameters.

        Raises:
            ValueError: If the state dict does not match the model or the plan. The average does not
                change then.
        """
        self._loader.load_averaged_model(state_dict, model)

    def __reduce_ex__(self, protocol: Any) -> Any:
        if self._state.built_in:  # a copy belongs to the copied optimizer
            return getattr, (self.optimizer, "average")
        return super().__reduce_ex__(protocol)

    def __getstate__(self) -> dict[str, Any]:
        if self._applied is not None:
            raise RuntimeError("An average cannot be copied or pickled while it is applied.")
        return {
            "optimizers": self.optimizers,
            "averaging": self.averaging,
            "prefix": self._state.store.prefix,
            "progress": self._progress,
            "slots": {p: self._state.store.slots(p) for p in self._averaged()},
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        # a copied optimizer has no hooks
        before = state.get("prefix", "average")  # older pickles have none
        self._attach(state["optimizers"], state["averaging"], False, before)
        now = self._state.store.prefix
        slots = {
            p: {now + name.removeprefix(before): buffer for name, buffer in buffers.items()}
            for p, buffers in state["slots"].items()
        }
        self._loader.install(state["progress"], slots, True, self._state.params())

    # ------------------------------------------------------- for optimizers with a built-in average

    def copy_removed(self, state_dict: dict[str, Any]) -> None:
        """Become the copy of a removed average, without changing the weights.

        Args:
            state_dict: The result of its :meth:`state_dict`.
        """
        self.load_state_dict(state_dict)
        self._detach()

    def publish(self, create: bool = False) -> None:
        """Write the progress to the optimizer's state, for an optimizer with a built-in average.

        Args:
            create: Write it to the state of parameters that have none yet, too.
        """
        self._loader.publish(create)

    def add_to(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Return a state dict with the progress as it is now, which later steps do not change.

        Args:
            state_dict: The state dict of an optimizer with a built-in average.
        """
        return self._state.store.insert(self.optimizer, state_dict, self._progress)

    def take_from(self, state_dict: dict[str, Any]) -> tuple[dict[str, Any], Callable[[], None]]:
        """Take the average out of a state dict before ``Optimizer.load_state_dict`` sees it.

        Args:
            state_dict: The state dict of an optimizer with a built-in average.

        Returns:
            The state dict without the average, and a function that restores the average after the
            rest is loaded.
        """
        return self._loader.take_from(state_dict, self._other_stores(self.optimizer))

    def __repr__(self) -> str:
        names = ", ".join(type(optimizer).__name__ for optimizer in self.optimizers)
        return (
            f"{type(self).__name__}({self.averaging}, phase={self.phase!r}, count={self.count}, "
            f"optimizer={names})"
        )
