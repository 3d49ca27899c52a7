"""The running average of an optimiser's iterates."""

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

from gadam._dtensor import all_finite, any_nonzero, local, new_like
from gadam.average.plan import Averaging, Trigger
from gadam.average.progress import Phase, Progress

if TYPE_CHECKING:
    from gadam.average.batchnorm import Batches

__all__ = ["IterateAverage", "is_dry_run", "is_slot"]


class IterateAverage:
    """Averages the iterates of any torch optimiser. On SGD it is SWA; it is ``Gadam.average``.

    It listens to the optimiser's steps and keeps its own copy of the average: the optimiser and the
    model are not changed, except inside :meth:`applied` and by :meth:`copy_to`.

    Args:
        optimizer: the optimiser whose iterates to average
        averaging: the plan; None is ``Averaging()``, which waits for :meth:`begin` or :meth:`update`

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
    """

    def __init__(self, optimizer: Optimizer, averaging: Averaging | None = None) -> None:
        if not isinstance(optimizer, Optimizer):
            raise TypeError(
                f"IterateAverage needs a torch optimizer, not {type(optimizer).__name__}"
            )
        self.optimizer = optimizer
        self.averaging = averaging if averaging is not None else Averaging()
        if not isinstance(self.averaging, Averaging):
            raise TypeError(f"averaging must be a gadam.Averaging, not {averaging!r}")
        self._raw: dict[Tensor, Tensor] = {}  # parameters and buffers, while applied
        self._warned = False
        self._allocated: tuple[list[bool], int] = ([], 0)  # for whom, in a state of what size
        self._with_buffers: list[Tensor] | None = None
        self._open_store()
        self._attach()

    # ---------------------------------------------------------------- where the state is kept

    def _open_store(self) -> None:
        self._own_progress = self._initial_progress()
        self._own_state: defaultdict[Tensor, dict[str, Tensor]] = defaultdict(dict)
        # At once, not with the first step: a distributed checkpoint restores only what is there.
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
        """Names of the buffers that a parameter has: one, or the ring of a sliding window."""
        copies = self.averaging.weighting.copies
        return ["average"] if copies == 1 else [f"average_{i}" for i in range(copies)]

    def _params(self) -> list[Tensor]:
        return [p for group in self.optimizer.param_groups for p in group["params"]]

    def _averaged(self) -> list[Tensor]:
        """The parameters that have buffers: all that have been open to training."""
        if self._with_buffers is None:
            state, first = self._state, self._slots()[0]
            self._with_buffers = [p for p in self._params() if p in state and first in state[p]]
        return self._with_buffers

    @torch.inference_mode(False)
    @torch.no_grad()
    def _allocate(self) -> None:
        """Give a buffer to each parameter that is open to training and has none."""
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
                # Frozen, or in no group, until now: the mean of what it has been is what it is.
                if count:
                    local(buffer).copy_(local(p))
                state[p][name] = buffer
        self._allocated = (trainable, len(state))
        self._with_buffers = None

    # ------------------------------------------------------------------------------- stepping

    def _attach(self) -> None:
        self._handles = [
            self.optimizer.register_step_pre_hook(self._before_step),
            self.optimizer.register_step_post_hook(self._after_step),
        ]

    def remove(self) -> None:
        """Stop listening to the optimiser. What has been averaged stays."""
        for handle in self._handles:
            handle.remove()

    @property
    def _applied(self) -> IterateAverage | None:
        """Whose averaged weights are in the parameters: this average's, or another's of the same
        optimiser.
        """
        return self.optimizer.__dict__.get("_applied_average")

    @torch._disable_dynamo
    def _before_step(self, *_: object) -> None:
        if self._applied is not None:
            raise RuntimeError(
                "step() was called while the averaged weights are applied: leave the "
                "`with average.applied():` block first"
            )
        # Last of the hooks, so that the sample is what they leave: a projection, a pruning mask.
        hooks = self.optimizer._optimizer_step_post_hooks
        hooks.move_to_end(self._handles[1].id)  # type: ignore[attr-defined]
        progress = self._progress
        if self.averaging.start is not None or progress.phase != "waiting" or progress.count:
            self._allocate()

    @torch._disable_dynamo
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
        # GradScaler steps an optimiser that handles scaling itself even where it found an inf.
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
        """Take in what is pending: here nothing ever is."""

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
            torch._foreach_lerp_(averages, samples, weight)
        self._progress = replace(progress, count=count)
        return True

    def _value(self, p: Tensor) -> Tensor:
        """This process's shard of the parameter's average, in the average's type and place."""
        buffers = [local(self._state[p][name]) for name in self._slots()]
        if len(buffers) == 1:
            return buffers[0]
        filled = buffers[: self._progress.count]
        return torch.stack(filled).mean(0)  # of one parameter at a time

    # ------------------------------------------------------------------------------ controlling

    @property
    def count(self) -> int:
        """How many samples have been taken (a window holds the last of them)."""
        self.flush()
        return self._progress.count

    @property
    def skipped(self) -> int:
        """How many samples were due but not finite, and did not enter."""
        return self._progress.skipped

    @property
    def phase(self) -> Phase:
        """``"waiting"`` for its start, ``"averaging"``, or ``"finished"`` by its trigger."""
        return self._progress.phase

    @property
    def _begun_by_this_step(self) -> bool:
        """For a step hook that runs before this average's: do samples start here, or earlier?"""
        first_step = self.averaging.first_step
        return (
            self.phase != "waiting"
            or self.count > 0
            or (first_step is not None and self._progress.steps + 1 >= first_step)
        )

    def begin(self) -> None:
        """Sample from the next step on: a waiting average begins, a finished one goes on.

        No effect while averaging.
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
        """Sample the weights as they are now, for loops that average once an epoch.

        It neither waits for the plan's start nor switches automatic sampling on. Returns whether the sample entered: one that is not
        finite does not (it is counted in :attr:`skipped`), nor does any once :attr:`phase` is
        ``"finished"``.
        """
        if self._applied is not None:
            raise RuntimeError(
                "update() was called while the averaged weights are applied: they are no iterate"
            )
        if self.phase == "finished":
            return False
        self.flush()
        self._allocate()
        return self._sample()

    def observe(self, metric: float) -> bool:
        """Tell the plan's trigger a validation metric, once an epoch, taken inside :meth:`applied`.

        Returns True once training should stop. A plan without a trigger never says so. Under
        distributed training every process must pass the same number.
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

    # ------------------------------------------------------------------------------------ using

    @contextmanager
    def applied(
        self, model: nn.Module | None = None, batchnorm: Batches | None = None
    ) -> Iterator[None]:
        """The averaged weights inside the block; on leaving it, however, the raw ones bit for bit.

        With no sample yet it is the raw weights (said once in a warning, unless a trigger is to find
        the start). It costs one copy of the parameters while it lasts. The optimiser's ``state_dict()`` is the
        same inside as outside; the *model's* holds the averaged weights inside, see
        :meth:`raw_state_dict`.

        Args:
            model: the model that holds the parameters; its buffers are restored too. Needed for
                ``batchnorm``, and under FSDP2
            batchnorm: refresh the BatchNorm statistics at the averaged weights, by
                :func:`gadam.refresh_batchnorm`: an iterable of batches, or a callable that runs
                forwards (it is given the model if it takes an argument)
        """
        self._warn_if_empty(stacklevel=4)
        with self._swapped(model, batchnorm):
            yield

    def copy_to(self, model: nn.Module | None = None, batchnorm: Batches | None = None) -> None:
        """Make the averaged weights (and refreshed BatchNorm statistics) the model's own, for good.

        The arguments are those of :meth:`applied`. If the refresh fails, nothing has changed.
        """
        self._warn_if_empty(stacklevel=3)
        with self._swapped(model, batchnorm) as keep:
            keep()

    def _warn_if_empty(self, stacklevel: int) -> None:
        # A trigger's metric is to be taken inside applied() from the first epoch on.
        triggered = isinstance(self.averaging.start, Trigger)
        if not self.count and not triggered and not self._warned:
            self._warned = True
            warnings.warn(
                "the average has no sample yet: the raw weights stand in for it",
                stacklevel=stacklevel,
            )

    @contextmanager
    def _swapped(
        self, model: nn.Module | None, batchnorm: Batches | None
    ) -> Iterator[Callable[[], None]]:
        if self._applied is not None:
            raise RuntimeError("averaged weights are already applied: applied() does not nest")
        if batchnorm is not None and model is None:
            raise ValueError("batchnorm needs the model whose statistics to refresh: pass model=")
        # What another average of this optimiser holds back must not see these weights.
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
                from gadam.average.batchnorm import refresh_batchnorm  # not everybody wants it

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
        """The state dict of the averaged model, on its own memory; the model is not touched.

        Its BatchNorm statistics are those of the raw weights: for fresh ones save
        ``model.state_dict()`` inside :meth:`applied` with ``batchnorm=``.
        """
        averaged = set(self._averaged()) & set(model.parameters()) if self.count else set()
        if self.count and not averaged:
            raise ValueError("none of the averaged parameters is this model's")
        state_dict = model.state_dict(keep_vars=True)
        missing = averaged - {value for value in state_dict.values() if isinstance(value, Tensor)}
        if missing:
            raise RuntimeError(
                f"{len(missing)} averaged parameters are not in the model's state_dict(), which hands "
                "out copies or leaves them out: take it inside applied() instead"
            )
        return _copied(state_dict, {p: self._value(p) for p in averaged})

    def raw_state_dict(self, model: nn.Module) -> dict[str, Any]:
        """The state dict of the raw model, on its own memory, even inside :meth:`applied`.

        For code that writes checkpoints and cannot know whether the averaged weights are applied.
        """
        return _copied(model.state_dict(keep_vars=True), self._raw)

    # ------------------------------------------------------------------------- saving, restoring

    def state_dict(self) -> dict[str, Any]:
        """The average and how far it has come, as tensors."""
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
        """Restore what :meth:`state_dict` gave, in the plan's own dtype and device."""
        try:
            progress, state = (
                self._fit(Progress.unpack(state_dict["progress"])),
                state_dict["state"],
            )
        except (KeyError, TypeError, AttributeError, IndexError) as error:
            raise ValueError(
                "this is not the state of an iterate average: it needs the entries 'progress' and "
                f"'state' that state_dict() gives ({type(error).__name__}: {error})"
            ) from error
        params = self._params()
        unknown = [i for i in state if int(i) not in range(len(params))]
        if unknown:
            raise ValueError(
                f"the saved average has a parameter {unknown[0]}, the optimizer only {len(params)}"
            )
        saved = {params[int(i)]: buffers for i, buffers in state.items()}
        self._install(progress, self._prepare(progress, saved), bool(saved))

    def _fit(self, progress: Progress) -> Progress:
        """The saved progress under the present plan, whose trigger may be a new one, or none."""
        blank = self._initial_progress().memory
        if not progress.memory or not blank:
            return replace(progress, memory=blank)
        if len(progress.memory) != len(blank):
            raise ValueError(
                f"the saved average has the memory of another trigger than {self.averaging.start!r}"
            )
        return progress

    @torch.no_grad()
    def _prepare(
        self, progress: Progress, saved: dict[Tensor, dict[str, Tensor]]
    ) -> dict[Tensor, dict[str, Tensor]]:
        """The saved buffers on fresh memory, in the plan's dtype and device. Changes nothing yet."""
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
                        f"the saved average has no buffer {name!r}, which the weighting "
                        f"{self.averaging.weighting} needs: was it saved with another one?"
                    )
                if buffers[name].shape != p.shape:
                    raise ValueError(
                        f"the saved average has shape {tuple(buffers[name].shape)} where the "
                        f"parameter has {tuple(p.shape)}"
                    )
                buffer = new_like(p, self.averaging.dtype_for(p), self.averaging.device_for(p))
                local(buffer).copy_(local(buffers[name], like=p))
                prepared[p][name] = buffer
        if not prepared:
            raise ValueError(
                f"the checkpoint tells of an average of {progress.count} samples but their mean was "
                "not restored: a distributed checkpoint restores only what the new optimizer already "
                "has, so give it the plan (average=Averaging(start=…)) or call average.begin() before "
                "loading"
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
        # Room that was there is there again. Values wait for the next step: the weights may not have
        # been loaded yet.
        if allocate and not progress.count:
            self._allocate()

    def __getstate__(self) -> dict[str, Any]:
        if self._applied is not None:
            raise RuntimeError("an average cannot be copied or pickled while it is applied")
        return {name: value for name, value in self.__dict__.items() if name != "_handles"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._attach()  # a copied optimizer comes without hooks

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}({self.averaging}, phase={self.phase!r}, count={self.count}, "
            f"optimizer={type(self.optimizer).__name__})"
        )


def _copied(state_dict: dict[str, Any], values: dict[Tensor, Tensor]) -> dict[str, Any]:
    """The state dict on memory of its own, with these values in place of some of its tensors."""
    copies: dict[Tensor, Tensor] = {}  # a tensor under two names stays one
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
    """Whether this is the name of a buffer of an average."""
    return str(name).partition("_")[0] == "average"


def is_dry_run(optimizer: Optimizer) -> bool:
    """Whether this was no step of training: lr = 0 and zero gradients.

    It is how torch.distributed.checkpoint makes an optimiser create its state.
    """
    groups = optimizer.param_groups
    if any("lr" not in group or bool(group["lr"] != 0) for group in groups):
        return False
    grads = [p.grad for group in groups for p in group["params"] if p.grad is not None]
    return bool(grads) and not any_nonzero(grads)


class _Buffers:
    """A model's buffers as they are now, those that are None included."""

    def __init__(self, model: nn.Module | None) -> None:
        modules = list(model.modules()) if model is not None else []
        self.tables = [(module._buffers, dict(module._buffers)) for module in modules]
        self.values = {
            buffer: local(buffer).detach().clone()
            for _, table in self.tables
            for buffer in table.values()
            if buffer is not None
        }

    def restore(self) -> None:
        for buffer, value in self.values.items():
            local(buffer).copy_(value)
        for present, table in self.tables:
            present.clear()
            present.update(table)


def _reshard(model: nn.Module | None) -> None:
    """Let FSDP2 forget gathered parameters.

    It keeps the root's after a forward without backward, and the next forward would not see that the
    shards have changed.
    """
    for module in model.modules() if model is not None else ():
        reshard = getattr(module, "reshard", None)
        if callable(reshard) and hasattr(module, "unshard"):
            reshard()
