"""The running average of an optimizer's iterates."""

from __future__ import annotations

import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from gadam import _torch
from gadam._dtensor import all_finite, any_nonzero, local, new_like
from gadam.average.plan import Averaging, Trigger
from gadam.average.progress import Phase, Progress

if TYPE_CHECKING:
    from gadam.average.batchnorm import Batches

__all__ = ["IterateAverage", "is_dry_run", "is_slot"]


class IterateAverage:
    r"""Average the iterates of any torch optimizer.

    On SGD this is SWA. ``Gadam.average`` is an average of this kind, stored in the optimizer. With
    the weights :math:`\theta_{t_1}, \theta_{t_2}, \dots` that the plan samples, and the weight
    :math:`w_n` of its weighting (:math:`1/n` for the plain mean),

    .. math::
        \bar\theta_n = \bar\theta_{n-1} + w_n (\theta_{t_n} - \bar\theta_{n-1}).

    The average hooks into the optimizer's steps and stores a copy of its own. The optimizer and the
    model do not change, except inside :meth:`applied` and by :meth:`copy_to`.

    Args:
        optimizer: The optimizer. Its iterates are averaged.
        averaging: The plan. None means ``Averaging()``, which waits for :meth:`begin` or
            :meth:`update`.

    Attributes:
        optimizer: The optimizer.
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
    (arXiv 1803.05407).
    """

    def __init__(self, optimizer: Optimizer, averaging: Averaging | None = None) -> None:
        if not isinstance(optimizer, Optimizer):
            raise TypeError(
                f"IterateAverage needs a torch optimizer, not {type(optimizer).__name__}."
            )
        self.optimizer = optimizer
        self.averaging = averaging if averaging is not None else Averaging()
        if not isinstance(self.averaging, Averaging):
            raise TypeError(f"averaging must be a gadam.Averaging, got {averaging!r}.")
        self._raw: dict[Tensor, Tensor] = {}  # raw parameters and buffers while applied
        self._warned = False
        self._allocated: tuple[list[bool], int] = ([], 0)  # who was trainable; size of the state
        self._with_buffers: list[Tensor] | None = None
        self._open_store()
        self._attach()

    # ------------------------------------------------------------------------------------ storage

    def _open_store(self) -> None:
        self._own_progress = self._initial_progress()
        self._own_state: defaultdict[Tensor, dict[str, Tensor]] = defaultdict(dict)
        # Allocate now, not at the first step: a distributed checkpoint restores only existing keys.
        if self.averaging.start is not None:
            self._allocate()

    def _initial_progress(self) -> Progress:
        trigger = self.averaging.start
        return Progress(memory=trigger.initial_state if isinstance(trigger, Trigger) else ())

    @property
    def _progress(self) -> Progress:
        return self._own_progress

    @_progress.setter
    def _progress(self, progress: Progress) -> None:
        self._own_progress = progress

    @property
    def _state(self) -> defaultdict[Tensor, dict[str, Any]]:
        return self._own_state

    def _slots(self) -> list[str]:
        """Return the names of a parameter's buffers: one, or the ring of a sliding window."""
        copies = self.averaging.weighting.copies
        return ["average"] if copies == 1 else [f"average_{i}" for i in range(copies)]

    def _params(self) -> list[Tensor]:
        return [p for group in self.optimizer.param_groups for p in group["params"]]

    def _averaged(self) -> list[Tensor]:
        """Return the parameters that have buffers: all that have ever been trainable."""
        if self._with_buffers is None:
            state, first = self._state, self._slots()[0]
            self._with_buffers = [p for p in self._params() if p in state and first in state[p]]
        return self._with_buffers

    @torch.inference_mode(False)
    @torch.no_grad()
    def _allocate(self) -> None:
        """Allocate buffers for the trainable parameters that have none."""
        params = self._params()
        trainable = [p.requires_grad for p in params]
        if (trainable, len(self._state)) == self._allocated:
            return
        state, names, count = self._state, self._slots(), self._progress.count
        for p in params:
            if not p.requires_grad or (p in state and names[0] in state[p]):
                continue
            for name in names:
                buffer = new_like(p, self.averaging.dtype_for(p), self.averaging.device_for(p))
                # The parameter was frozen, or in no group, while the samples so far were taken: it
                # was constant, so its mean is its value.
                if count:
                    local(buffer).copy_(local(p))
                state[p][name] = buffer
        self._allocated = (trainable, len(state))
        self._with_buffers = None

    # ----------------------------------------------------------------------------------- stepping

    def _attach(self) -> None:
        self._handles = [
            self.optimizer.register_step_pre_hook(self._before_step),
            self.optimizer.register_step_post_hook(self._after_step),
        ]

    def remove(self) -> None:
        """Detach from the optimizer. The average keeps its samples."""
        for handle in self._handles:
            handle.remove()

    @property
    def _applied(self) -> IterateAverage | None:
        """The average that is applied: this one, or another one of the same optimizer."""
        return self.optimizer.__dict__.get("_applied_average")

    @_torch.disable_dynamo
    def _before_step(self, *_: object) -> None:
        if self._applied is not None:
            raise RuntimeError(
                "step() was called while the averaged weights are applied. Leave the "
                "`with average.applied():` block first."
            )
        # Run last, so that the sample includes what other hooks do: a projection, a pruning mask.
        _torch.optimizer_hooks(self.optimizer, "step_post").move_to_end(self._handles[1].id)
        progress = self._progress
        if self.averaging.start is not None or progress.phase != "waiting" or progress.count:
            self._allocate()

    @_torch.disable_dynamo
    def _after_step(self, *_: object) -> None:
        progress = self._progress
        if progress.steps == 0 and is_dry_run(self.optimizer):
            return
        step = progress.steps + 1
        phase, begun = progress.phase, progress.begun
        first_step = self.averaging.first_step
        if phase == "waiting" and first_step is not None and step >= first_step:
            phase, begun = "averaging", first_step
        every = self.averaging.every
        due = phase == "averaging" and every is not None and (step - begun) % every == 0
        # If the optimizer handles scaling, GradScaler calls step() even after it found an inf.
        found_inf = getattr(self.optimizer, "found_inf", None)
        if found_inf is not None and bool(found_inf):
            if due:
                self._progress = replace(progress, skipped=progress.skipped + 1)
            return
        self._progress = replace(progress, steps=step, phase=phase, begun=begun)
        if due:
            self._take_due_sample()

    def _take_due_sample(self) -> None:
        self._sample()

    def flush(self) -> None:
        """Take the pending sample, if there is one. Only a built-in average defers samples."""

    @torch.no_grad()
    def _sample(self, known_finite: bool = False) -> bool:
        progress = self._progress
        params = self._averaged()
        if not known_finite and not all_finite(params):
            self._progress = replace(progress, skipped=progress.skipped + 1)
            return False
        count = progress.count + 1
        slots = self._slots()
        name = slots[(count - 1) % len(slots)]
        weight = self.averaging.weighting.weight(count)
        averages, samples = [], []
        for p in params:
            average, sample = local(self._state[p][name]), local(p).detach()
            if weight == 1.0:
                average.copy_(sample)
                continue
            if average.is_complex():
                average, sample = torch.view_as_real(average), torch.view_as_real(sample)
            averages.append(average)
            samples.append(sample.to(average.device, average.dtype))
        if averages:
            _torch.foreach_lerp_(averages, samples, weight)
        self._progress = replace(progress, count=count)
        return True

    def _value(self, p: Tensor) -> Tensor:
        """Return this process's shard of a parameter's average, in the average's own type."""
        buffers = [local(self._state[p][name]) for name in self._slots()]
        if len(buffers) == 1:
            return buffers[0]
        filled = buffers[: self._progress.count]
        return torch.stack(filled).mean(0)  # one parameter at a time

    # ------------------------------------------------------------------------------------ control

    @property
    def count(self) -> int:
        """The number of samples taken. A window holds only the last of them."""
        self.flush()
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
            self._progress = replace(
                progress,
                phase="averaging",
                begun=progress.steps + 1,
                memory=self._initial_progress().memory,
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
        self.flush()
        self._allocate()
        return self._sample()

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
            self._progress = replace(progress, memory=memory)
            if verdict == "begin":
                self.begin()
            elif verdict == "finish":
                self._progress = replace(self._progress, phase="finished")
        return self.phase == "finished"

    # ----------------------------------------------------------------------------------- swapping

    @contextmanager
    def applied(
        self, model: nn.Module | None = None, batchnorm: Batches | None = None
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
                forward passes and receives the model if it takes an argument.

        Example:
            >>> import torch, gadam
            >>> model = torch.nn.Linear(4, 1)
            >>> optimizer = gadam.Gadam(model.parameters(), average=gadam.Averaging(start=1))
            >>> model(torch.randn(8, 4)).square().mean().backward()
            >>> optimizer.step()
            >>> with optimizer.average.applied(model):
            ...     loss = model(torch.randn(8, 4)).square().mean()
        """
        self._warn_if_empty(stacklevel=4)
        with self._swapped(model, batchnorm):
            yield

    def copy_to(self, model: nn.Module | None = None, batchnorm: Batches | None = None) -> None:
        """Overwrite the model's weights with the averaged ones, permanently.

        If the BatchNorm refresh fails, nothing changes.

        Args:
            model: The model, as in :meth:`applied`.
            batchnorm: Data for the BatchNorm statistics, as in :meth:`applied`.
        """
        self._warn_if_empty(stacklevel=3)
        with self._swapped(model, batchnorm) as keep:
            keep()

    def _warn_if_empty(self, stacklevel: int) -> None:
        # A trigger's metric is measured inside applied() from the first epoch on.
        triggered = isinstance(self.averaging.start, Trigger)
        if not self.count and not triggered and not self._warned:
            self._warned = True
            warnings.warn(
                "The average has no sample yet. The raw weights are used instead.",
                stacklevel=stacklevel,
            )

    @contextmanager
    def _swapped(
        self, model: nn.Module | None, batchnorm: Batches | None
    ) -> Iterator[Callable[[], None]]:
        if self._applied is not None:
            raise RuntimeError("Averaged weights are already applied. applied() does not nest.")
        if batchnorm is not None and model is None:
            raise ValueError("batchnorm= needs the model to refresh: pass model=.")
        # A pending sample of the optimizer's built-in average must not see these weights.
        own = getattr(self.optimizer, "average", None)
        if isinstance(own, IterateAverage):
            own.flush()
        params = self._averaged() if self.count else []
        buffers = _Buffers(model)
        kept = False

        def keep() -> None:
            nonlocal kept
            kept = True

        self.optimizer.__dict__["_applied_average"] = self
        try:
            with torch.no_grad():
                _reshard(model)
                self._raw.update(buffers.values)
                for p in params:
                    self._raw[p] = local(p).detach().clone()
                    local(p).copy_(self._value(p))
            if batchnorm is not None and model is not None:
                from gadam.average.batchnorm import refresh_batchnorm  # optional

                refresh_batchnorm(model, batchnorm)
            yield keep
        finally:
            if not kept:
                with torch.no_grad():
                    for p in params:
                        if p in self._raw:
                            local(p).copy_(self._raw[p])
                    buffers.restore()
            _reshard(model)
            self._raw = {}
            del self.optimizer.__dict__["_applied_average"]

    def model_state_dict(self, model: nn.Module) -> dict[str, Any]:
        """Return a copy of the model's state dict with the averaged weights.

        The model does not change. The BatchNorm statistics are those of the raw weights. To save
        fresh ones, call ``model.state_dict()`` inside :meth:`applied` with ``batchnorm=``.

        Args:
            model: The model that holds the parameters.
        """
        averaged = set(self._averaged()) & set(model.parameters()) if self.count else set()
        if self.count and not averaged:
            raise ValueError("None of the averaged parameters belongs to this model.")
        state_dict = model.state_dict(keep_vars=True)
        missing = averaged - {value for value in state_dict.values() if isinstance(value, Tensor)}
        if missing:
            raise RuntimeError(
                f"The model's state_dict() copies or omits {len(missing)} averaged parameters. "
                "Call model.state_dict() inside applied() instead."
            )
        return _copied(state_dict, {p: self._value(p) for p in averaged})

    def raw_state_dict(self, model: nn.Module) -> dict[str, Any]:
        """Return a copy of the model's state dict with the raw weights.

        The weights are the raw ones even inside :meth:`applied`. Use this to write checkpoints in
        code that cannot know if the average is applied.

        Args:
            model: The model that holds the parameters.
        """
        return _copied(model.state_dict(keep_vars=True), self._raw)

    # ------------------------------------------------------------------------ saving and restoring

    def state_dict(self) -> dict[str, Any]:
        """Return the average and its progress as tensors."""
        self.flush()
        index = {p: i for i, p in enumerate(self._params())}
        return {
            "progress": self._progress.pack(),
            "state": {
                index[p]: {name: self._state[p][name] for name in self._slots()}
                for p in self._averaged()
            },
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the average, in the plan's own dtype and on the plan's own device.

        Args:
            state_dict: The result of :meth:`state_dict`.

        Raises:
            ValueError: If the state is damaged or does not match the optimizer and the plan. The
                average does not change then.
        """
        try:
            progress, state = (
                self._match_trigger(Progress.unpack(state_dict["progress"])),
                state_dict["state"],
            )
        except (KeyError, TypeError, AttributeError, IndexError) as error:
            raise ValueError(
                "This is not the state of an iterate average. Pass the result of state_dict(), "
                f"with the entries 'progress' and 'state' ({type(error).__name__}: {error})."
            ) from error
        params = self._params()
        unknown = [i for i in state if int(i) not in range(len(params))]
        if unknown:
            raise ValueError(
                f"The saved average has a parameter {unknown[0]}, but the optimizer has only "
                f"{len(params)}."
            )
        saved = {params[int(i)]: buffers for i, buffers in state.items()}
        self._install(progress, self._prepare(progress, saved), bool(saved))

    def _match_trigger(self, progress: Progress) -> Progress:
        """Return the saved progress for the current plan, which may have a new trigger or none."""
        initial = self._initial_progress().memory
        if not progress.memory or not initial:
            return replace(progress, memory=initial)
        if len(progress.memory) != len(initial):
            raise ValueError(
                "The saved average has the state of another trigger than "
                f"{self.averaging.start!r}. Use the plan that the average was saved with."
            )
        return progress

    @torch.no_grad()
    def _prepare(
        self, progress: Progress, saved: dict[Tensor, dict[str, Tensor]]
    ) -> dict[Tensor, dict[str, Tensor]]:
        """Copy the saved buffers, in the plan's dtype and on its device. Installs nothing yet."""
        if not progress.count:
            return {}
        prepared: dict[Tensor, dict[str, Tensor]] = {}
        for p, buffers in saved.items():
            if not buffers:
                continue
            prepared[p] = {}
            for name in self._slots():
                if name not in buffers:
                    raise ValueError(
                        f"The saved average has no buffer {name!r}, which the weighting "
                        f"{self.averaging.weighting} needs. Use the weighting that the average "
                        "was saved with."
                    )
                if buffers[name].shape != p.shape:
                    raise ValueError(
                        f"The saved average has shape {tuple(buffers[name].shape)}, but the "
                        f"parameter has {tuple(p.shape)}."
                    )
                buffer = new_like(p, self.averaging.dtype_for(p), self.averaging.device_for(p))
                local(buffer).copy_(local(buffers[name], like=p))
                prepared[p][name] = buffer
        if not prepared:
            raise ValueError(
                f"The checkpoint counts {progress.count} samples, but their mean was not "
                "restored. A distributed checkpoint restores only the keys that the new optimizer "
                "already has: pass the plan (average=Averaging(start=…)) or call average.begin() "
                "before loading."
            )
        return prepared

    def _install(
        self, progress: Progress, prepared: dict[Tensor, dict[str, Tensor]], allocate: bool
    ) -> None:
        for p in self._params():
            for name in [name for name in self._state.get(p, ()) if is_slot(name)]:
                del self._state[p][name]
            if p in prepared:
                self._state[p].update(prepared[p])
        self._progress = progress
        self._allocated = ([], 0)
        self._with_buffers = None
        # Recreate buffers that existed. Values wait for the next step, because the weights may not
        # be loaded yet.
        if allocate and not progress.count:
            self._allocate()

    def __getstate__(self) -> dict[str, Any]:
        if self._applied is not None:
            raise RuntimeError("An average cannot be copied or pickled while it is applied.")
        return {name: value for name, value in self.__dict__.items() if name != "_handles"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._attach()  # a copied optimizer has no hooks

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}({self.averaging}, phase={self.phase!r}, count={self.count}, "
            f"optimizer={type(self.optimizer).__name__})"
        )


def _copied(state_dict: dict[str, Any], values: dict[Tensor, Tensor]) -> dict[str, Any]:
    """Copy a state dict's tensors, with these values in place of some of them."""
    copies: dict[Tensor, Tensor] = {}  # a tensor with two names stays one tensor
    for name, tensor in state_dict.items():
        if not isinstance(tensor, Tensor):
            continue
        if tensor not in copies:
            copies[tensor] = tensor.detach().clone()
            if tensor in values:
                local(copies[tensor]).copy_(values[tensor])
        state_dict[name] = copies[tensor]
    return state_dict


def is_slot(name: object) -> bool:
    """Return True if this is the name of an average's buffer."""
    return str(name).partition("_")[0] == "average"


def is_dry_run(optimizer: Optimizer) -> bool:
    """Return True if the last step was not training: lr = 0 and all gradients zero.

    torch.distributed.checkpoint runs such a step to make an optimizer create its state.
    """
    groups = optimizer.param_groups
    if any("lr" not in group or bool(group["lr"] != 0) for group in groups):
        return False
    grads = [p.grad for group in groups for p in group["params"] if p.grad is not None]
    return bool(grads) and not any_nonzero(grads)


class _Buffers:
    """A snapshot of a model's buffers, those that are None included."""

    def __init__(self, model: nn.Module | None) -> None:
        modules = list(model.modules()) if model is not None else []
        self.tables = [(module, _torch.buffer_table(module)) for module in modules]
        self.values = {
            buffer: local(buffer).detach().clone()
            for _, table in self.tables
            for buffer in table.values()
            if buffer is not None
        }

    def restore(self) -> None:
        for buffer, value in self.values.items():
            local(buffer).copy_(value)
        for module, table in self.tables:
            _torch.restore_buffer_table(module, table)


def _reshard(model: nn.Module | None) -> None:
    """Make FSDP2 free its gathered parameters.

    It keeps the root's after a forward without a backward. The next forward would not see that the
    shards have changed.
    """
    for module in model.modules() if model is not None else ():
        reshard = getattr(module, "reshard", None)
        if callable(reshard) and hasattr(module, "unshard"):
            reshard()
