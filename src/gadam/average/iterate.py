"""The running average of an optimizer's iterates."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from operator import is_
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from gadam import _torch
from gadam._dtensor import (
    agree,
    all_finite,
    all_reduce_min,
    any_nonzero,
    finite_flag,
    is_dtensor,
    local,
    new_like,
)
from gadam.average.fold import Fold
from gadam.average.health import Health, measure
from gadam.average.plan import Averaging, Trigger
from gadam.average.progress import Phase, Progress, Tracker
from gadam.average.store import BesideOptimizer, InOptimizer, Saved, Store, params_of
from gadam.average.swap import copied_state_dict, swapped
from gadam.average.wrappers import AVERAGES, unwrapped

if TYPE_CHECKING:
    from gadam.average.batchnorm import BatchNorm
    from gadam.average.export import Provenance
    from gadam.average.offload import OverlappedFold

__all__ = ["IterateAverage", "is_dry_run"]


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

    Args:
        optimizer: The optimizer whose iterates to average. It may be inside a wrapper of
            Accelerate, Lightning, Fabric or ZeroRedundancyOptimizer. Or a list of optimizers of one
            model: a joint step is complete, and a sample may be due, when the last of them has
            stepped since the previous joint step.
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
    (arXiv 1803.05407).
    """

    optimizer: Optimizer
    optimizers: list[Optimizer]
    averaging: Averaging

    def __init__(
        self,
        optimizer: Optimizer | Sequence[Optimizer],
        averaging: Averaging | None = None,
    ) -> None:
        several = list(optimizer) if isinstance(optimizer, (list, tuple)) else [optimizer]
        self._open([unwrapped(one) for one in several], averaging, built_in=False)

    @classmethod
    def built_into(cls, optimizer: Optimizer, averaging: Averaging | None) -> IterateAverage:
        """Return an average that is stored in the optimizer's own state, such as ``Gadam.average``.

        Args:
            optimizer: The optimizer. Its ``step`` may fold samples in with :meth:`fold_into`, and
                its ``state_dict`` and ``load_state_dict`` must call :meth:`publish` and
                :meth:`take_from`.
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
        if len(set(map(id, params_of(*optimizers)))) < len(params_of(*optimizers)):
            raise ValueError("A parameter belongs to more than one of the optimizers.")
        self.optimizers, self.optimizer = optimizers, optimizers[0]
        self.averaging = averaging if averaging is not None else Averaging()
        if not isinstance(self.averaging, Averaging):
            raise TypeError(f"averaging must be a gadam.Averaging, got {averaging!r}.")
        self._built_in = built_in
        self._tracker = Tracker(self._initial_progress())
        self._attach()
        if self._arrived() is None:
            self._continue_from_the_optimizers_steps()
            # Allocate now, not at the first step: a distributed checkpoint restores only existing
            # keys. In the optimizer's own state, a buffer would stop that from being initialized.
            if not built_in and self.averaging.start is not None:
                self._allocate()

    def _attach(self) -> None:
        """Register hooks with the optimizers, and open a store."""
        self._raw: dict[Tensor, Tensor] = {}  # raw parameters and buffers while applied
        self._warnings: set[str] = set()  # that were shown
        self._allocated: tuple[list[bool], int] = ([], 0)  # who was trainable; size of the state
        self._with_buffers: list[Tensor] | None = None
        self._sharded: list[Tensor] = []
        self._stepped: set[int] = set()  # ids of the optimizers that have stepped
        self._trained = False  # whether one of them had a gradient
        self._rejected: Tensor | None = None  # GradScaler's verdict on their steps
        self._folds: list[Fold] = []
        self._foldable = False
        self._edited = False  # whether other hooks may edit the weights after this step
        self._overlap: OverlappedFold | None = None
        if self.averaging.overlap:
            from gadam.average.offload import OverlappedFold  # optional

            self._overlap = OverlappedFold()
        self._after_global_hooks = False
        registries = [_attached(optimizer) for optimizer in self.optimizers]
        taken = {a._store.prefix for registry in registries for a in registry.averages}
        number = 1
        while (prefix := f"average{number}" if number > 1 else "average") in taken:
            number += 1
        self._store: Store = (
            InOptimizer(self.optimizers, prefix)
            if self._built_in
            else BesideOptimizer(
                self.optimizers,
                prefix,
                lambda: self._progress,
                self._prepare_to_load,
                lambda optimizer: [
                    a._store for a in _attached(optimizer).averages if a is not self
                ],
            )
        )
        self._slots = self._store.slot_names(self.averaging.weighting.copies)
        self._handles = []
        for optimizer, registry in zip(self.optimizers, registries):
            registry.averages.append(self)
            self._handles += [
                optimizer.register_step_pre_hook(self._before_step),
                optimizer.register_step_post_hook(self._after_step),
            ]

    def remove(self) -> None:
        """Detach from the optimizer. The average keeps its samples."""
        for handle in self._handles:
            handle.remove()
        self._store.close()
        for optimizer in self.optimizers:
            averages = _attached(optimizer).averages
            if self in averages:
                averages.remove(self)

    # ------------------------------------------------------------------------------------ storage

    def _initial_progress(self) -> Progress:
        trigger = self.averaging.start
        return Progress(memory=trigger.initial_state if isinstance(trigger, Trigger) else ())

    def _wait(self) -> None:
        """Wait until the last sample is in the average."""
        if self._overlap is not None:
            self._overlap.wait()

    @property
    def _progress(self) -> Progress:
        self._wait()  # every reader of the average reads its progress, too
        self._arrived()
        return self._tracker.progress

    @_progress.setter
    def _progress(self, progress: Progress) -> None:
        self._tracker.progress = progress

    def _params(self) -> list[Tensor]:
        return params_of(*self.optimizers)

    def _averaged(self) -> list[Tensor]:
        """Return the parameters that have buffers: all that have ever been trainable."""
        if self._with_buffers is None:
            table, first = self._store.table, self._slots[0]
            self._with_buffers = [p for p in self._params() if first in table.get(p, ())]
            # One parameter per device mesh: the processes of a mesh agree on a sample.
            self._sharded = list(
                {p.device_mesh: p for p in self._with_buffers if is_dtensor(p)}.values()  # type: ignore[attr-defined]
            )
        return self._with_buffers

    @torch.inference_mode(False)
    @torch.no_grad()
    def _allocate(self) -> None:
        """Allocate buffers for the trainable parameters that have none."""
        params = self._params()
        trainable = [p.requires_grad for p in params]
        table = self._store.table
        if (trainable, len(table)) == self._allocated:
            return
        count = int(self._tracker.counters.get()[0])
        for p in params:
            if not p.requires_grad or self._slots[0] in table.get(p, ()):
                continue
            slots = {}
            for name in self._slots:
                buffer = new_like(p, self.averaging.dtype_for(p), self.averaging.device_for(p))
                # The parameter was frozen, or in no group, while the samples so far were taken: it
                # was constant, so its mean is its value.
                if count:
                    local(buffer).copy_(local(p))
                slots[name] = buffer
            table.setdefault(p, {}).update(slots)
        self._allocated = (trainable, len(table))
        self._with_buffers = None

    def _buffer(self, p: Tensor, name: str) -> Tensor:
        buffer: Tensor = self._store.table[p][name]
        return local(buffer)

    def _value(self, p: Tensor) -> Tensor:
        """Return this process's shard of a parameter's average, in the average's own type."""
        buffers = [self._buffer(p, name) for name in self._slots]
        if len(buffers) == 1:
            return buffers[0]
        filled = buffers[: self._progress.count]
        return torch.stack(filled).mean(0)  # one parameter at a time

    # ----------------------------------------------------------------------------------- stepping

    @property
    def _applied(self) -> IterateAverage | None:
        """The average that is applied: this one, or another one of the same optimizer."""
        for optimizer in self.optimizers:
            average: IterateAverage | None = optimizer.__dict__.get("_applied_average")
            if average is not None:
                return average
        return None

    @_torch.disable_dynamo
    def _before_step(self, optimizer: Optimizer, *_: object) -> None:
        if self._applied is not None:
            raise RuntimeError(
                "step() was called while the averaged weights are applied. Leave the "
                "`with average.applied():` block first."
            )
        self._arrived()
        _attached(optimizer).finite = None
        self._edited = self._move_hooks_to_the_end(optimizer)
        if self.averaging.start is not None or self._is_in_use():
            self._allocate()
        if isinstance(self._store, InOptimizer) and not self._store.is_published():
            self.publish(create=True)
        self._folds = []
        self._foldable = (
            self._built_in
            and self._overlap is None
            and not self._edited
            and len(self._slots) == 1
            and self._may_be_due(optimizer)
        )

    def _is_in_use(self) -> bool:
        return self._tracker.clock.known[0] != 0 or self._tracker.counters.known[0] > 0

    def _move_hooks_to_the_end(self, optimizer: Optimizer) -> bool:
        """Make the sample include what other hooks do: a projection, a pruning mask.

        Returns:
            Whether other hooks may edit the weights after this step.
        """
        hooks = _torch.optimizer_hooks(optimizer, "step_post")
        averages = _attached(optimizer).averages
        edits = False
        if len(hooks) > len(averages):
            for handle in self._handles:
                if handle.id in hooks:
                    hooks.move_to_end(handle.id)
            edits = any(_may_edit(hook) for hook in hooks.values())
        others = _torch.global_step_post_hooks()
        self._after_global_hooks = any(hook is not _finish_steps for hook in others.values())
        if self._after_global_hooks:
            edits = True
            own = next((key for key, hook in others.items() if hook is _finish_steps), None)
            if own is None:
                register_optimizer_step_post_hook(_finish_steps)
            else:
                others.move_to_end(own)
        return edits

    def _may_be_due(self, optimizer: Optimizer) -> bool:
        """Return whether the step that begins may end with a sample, as far as the host knows."""
        if self.averaging.every is None:
            return False
        phase, steps, begun = self._tracker.clock.known
        first_step = self.averaging.first_step
        if not self._tracker.clock.on_host:  # the device counts the steps: an upper bound
            steps += self._tracker.clock.unread
            return bool(
                phase == 1 or (phase == 0 and first_step is not None and steps + 1 >= first_step)
            )
        if steps == 0 and not _has_rate(optimizer):
            return False  # this may be a dry run
        if phase == 0 and first_step is not None and steps + 1 >= first_step:
            phase, begun = 1, first_step
        return bool(phase == 1 and (steps + 1 - begun) % self.averaging.every == 0)

    @_torch.disable_dynamo
    def _after_step(self, optimizer: Optimizer, *_: object) -> None:
        if not self._after_global_hooks:
            self._finish_step(optimizer)

    @torch.no_grad()
    def _finish_step(self, optimizer: Optimizer) -> None:
        clock = self._tracker.clock
        if clock.on_host and clock.known[1] == 0 and is_dry_run(optimizer):
            return
        found_inf: Tensor | None = getattr(optimizer, "found_inf", None)
        if found_inf is not None and self._rejected is not None:
            found_inf = torch.maximum(found_inf, self._rejected.to(found_inf.device))
        self._trained = self._trained or _has_gradient(optimizer)
        if len(self.optimizers) > 1:
            self._stepped.add(id(optimizer))
            self._rejected = found_inf if found_inf is not None else self._rejected
            if len(self._stepped) < len(self.optimizers):
                return
            found_inf = self._rejected
        trained = self._trained
        self._stepped, self._trained, self._rejected = set(), False, None
        if not trained:
            return
        if found_inf is not None and not _torch.is_on_host(found_inf):
            self._count_on_device(found_inf)
            return
        phase, steps, begun = clock.get()
        step, first_step, every = steps + 1, self.averaging.first_step, self.averaging.every
        if phase == 0 and first_step is not None and step >= first_step:
            phase, begun = 1, first_step
        due = phase == 1 and every is not None and (step - begun) % every == 0
        # If the optimizer handles scaling, GradScaler calls step() even after it found an inf.
        if found_inf is not None and bool(found_inf):
            if due:
                self._skip()
            return
        clock.set((phase, step, begun))
        if due:
            self._take_sample()

    def _count_on_device(self, found_inf: Tensor) -> None:
        """Count a step that GradScaler may have rejected, without waiting for its verdict."""
        may_be_due = self._may_be_due(self.optimizer)
        clock = self._tracker.clock
        before = clock.on(found_inf.device)
        after, due = self._next(before)
        accepted = found_inf.squeeze() == 0
        clock.replace(torch.where(accepted, after, before))
        if may_be_due:
            self._take_sample(due, accepted)

    def _next(self, clock: Tensor) -> tuple[Tensor, Tensor]:
        """Return the clock after one more step, and whether a sample is due then."""
        phase, steps, begun = clock.unbind()
        first_step, every = self.averaging.first_step, self.averaging.every
        if first_step is not None:
            starts = (phase == 0) & (steps + 1 >= first_step)
            phase = torch.where(starts, torch.ones_like(phase), phase)
            begun = torch.where(starts, torch.full_like(begun, first_step), begun)
        due = (phase == 1) & ((steps + 1 - begun) % (every or 1) == 0)
        return torch.stack([phase, steps + 1, begun]), due

    # ------------------------------------------------------------------------------------ sampling

    def _take_sample(self, due: Tensor | None = None, accepted: Tensor | None = None) -> None:
        """Sample the weights after a step.

        Args:
            due: Whether the sample is due, if only the device knows.
            accepted: Whether GradScaler has accepted the step, if only the device knows.
        """
        params = self._averaged()
        folds = [fold for fold in self._folds if fold.folded]
        self._folds = []
        if any(fold.not_finite is None for fold in folds):
            self._settle_on_host(folds, params)
            return
        known = self._kernels_verdict(params) if not folds and due is None else None
        if known is not None:
            self._settle_on_host([], params, known)
            return
        finite = self._finite_flag(params, folds)
        if len(self._slots) > 1:  # which copy to replace depends on the number of samples
            if due is None or bool(due):
                good = bool(finite) and (accepted is None or bool(accepted))
                self._sample(params) if good else self._skip()
            return
        self._sample_on_device(params, folds, finite, due, accepted)

    def _kernels_verdict(self, params: list[Tensor]) -> bool | None:
        """Return whether the parameters are finite, if the optimizer's kernel has seen them all."""
        if not self._built_in or self._edited:
            return None
        finite: bool | None = getattr(self.optimizer, "_finite", None)
        return None if any(p.grad is None for p in params) else finite

    def _finite_flag(self, params: list[Tensor], folds: list[Fold]) -> Tensor:
        """Return whether a sample is finite, on the device. All averages share one check."""
        registry = _attached(self.optimizers[-1])
        if registry.finite is not None and _are_same(registry.finite[0], params):
            found = registry.finite[1]
            return found if isinstance(found, Tensor) else torch.tensor(found, device="cpu")
        flag = finite_flag(_rest(params, folds) if folds else params)
        for fold in folds:
            assert fold.not_finite is not None
            flag = flag & (fold.not_finite == 0).squeeze().to(flag.device)
        flag = agree(flag, self._sharded)
        registry.finite = params, flag
        return flag

    def _settle_on_host(
        self, folds: list[Fold], params: list[Tensor], known: bool | None = None
    ) -> None:
        """Finish a sample that a kernel has checked, and maybe folded in.

        Args:
            folds: What it has folded in. It is taken out again if the sample is not finite.
            params: All parameters of the sample.
            known: Whether all of these are finite in this process, if the kernel has seen them all.
        """
        rest = _rest(params, folds)
        if known is None:
            known = all(fold.finite for fold in folds) and (not rest or bool(finite_flag(rest)))
        finite = bool(all_reduce_min(known, self._sharded))
        _attached(self.optimizer).finite = params, finite
        if finite:
            self._sample(rest)
            return
        for fold in folds:
            fold.undo()
        self._skip()

    @torch.no_grad()
    def _sample(self, params: list[Tensor]) -> None:
        """Fold these parameters into the average, and count the sample."""
        count, skipped, first, _ = map(int, self._tracker.counters.get())
        count += 1
        name = self._slots[(count - 1) % len(self._slots)]
        weight = self.averaging.weighting.weight(count)
        if self._overlap is not None:
            self._start_overlapped(params, name, weight)
            params = []
        averages, samples = [], []
        for p in params:
            average, sample = self._buffer(p, name), local(p).detach()
            if weight == 1.0:
                average.copy_(sample)
                continue
            if average.is_complex():
                average, sample = torch.view_as_real(average), torch.view_as_real(sample)
            averages.append(average)
            samples.append(sample.to(average.device, average.dtype))
        if averages:
            _torch.foreach_lerp_(averages, samples, weight)
        step = int(self._tracker.clock.get()[1])
        self._tracker.counters.set((count, skipped, first if count > 1 else step, step))

    def _start_overlapped(self, params: list[Tensor], name: str, weight: float | Tensor) -> None:
        """Fold these parameters into the average on the host, while the device continues."""
        assert self._overlap is not None
        averages = [_real(self._buffer(p, name)) for p in params]
        samples = [_real(local(p).detach()) for p in params]
        self._overlap.start(averages, samples, weight)

    def _skip(self) -> None:
        count, skipped, first, last = self._tracker.counters.get()
        self._tracker.counters.set((count, skipped + 1, first, last))

    def _sample_on_device(
        self,
        params: list[Tensor],
        folds: list[Fold],
        finite: Tensor,
        due: Tensor | None,
        accepted: Tensor | None,
    ) -> None:
        """Fold these parameters into the average, without waiting for the device."""
        yes = torch.ones_like(finite)
        due = due.to(finite.device) if due is not None else yes
        accepted = accepted.to(finite.device) if accepted is not None else yes
        for fold in folds:
            fold.undo_if(accepted & ~finite)
        count, skipped, first, last = self._tracker.counters.on(finite.device).unbind()
        good = finite & accepted
        take = good & due
        weight = self.averaging.weighting.weight(count + 1)
        on_device: dict[torch.device, tuple[Tensor, Tensor]] = {}
        rest = _rest(params, folds)
        if self._overlap is not None:
            share = torch.where(take, weight, torch.zeros_like(weight))
            self._start_overlapped(rest, self._slots[0], share)
            rest = []
        for p in rest:
            average, sample = self._buffer(p, self._slots[0]), local(p).detach()
            if average.is_complex():
                average, sample = torch.view_as_real(average), torch.view_as_real(sample)
            device = average.device
            if device not in on_device:
                on_device[device] = (
                    take.to(device, non_blocking=True),
                    weight.to(device, non_blocking=True),
                )
            taken, share = on_device[device]
            sample = sample.to(device, average.dtype)
            # Even at weight 0, lerp would turn the average into NaN: replace the sample by it.
            average.lerp_(torch.where(taken, sample, average), share.to(average.dtype))
        clock = self._tracker.clock
        step = torch.full_like(last, clock.get()[1]) if clock.on_host else clock.on(last.device)[1]
        self._tracker.counters.replace(
            torch.stack(
                [
                    count + take,
                    skipped + (due & ~good),
                    torch.where(take & (count == 0), step, first),
                    torch.where(take, step, last),
                ]
            )
        )

    def fold_into(
        self, params: list[Tensor], states: Sequence[Mapping[str, Tensor]] | None = None
    ) -> Fold | None:
        """Return where the current step may fold these parameters in, after it has updated them.

        Args:
            params: The parameters of a group that the step updates.
            states: Their entries in ``optimizer.state``, if the caller has them.

        Returns:
            The averages and the weight, for the kernel to note what it has folded in. None if no
            sample is due, or if other hooks may still change the weights.
        """
        if not self._foldable:
            return None
        name = self._slots[0]
        found = states if states is not None else [self._store.table.get(p, {}) for p in params]
        try:
            averages = [state[name] for state in found]
        except KeyError:  # a parameter that is not averaged
            return None
        fold = Fold(params, averages, self._host_weight, self._device_weight)
        self._folds.append(fold)
        return fold

    def cancel_folds(self) -> None:
        """Take out what a step has folded in before it failed."""
        for fold in self._folds:
            fold.undo()
        self._folds = []

    def _host_weight(self) -> float | None:
        if self._rejection_is_on_device():
            return None
        weight = self.averaging.weighting.weight(int(self._tracker.counters.get()[0]) + 1)
        # Taking out a sample of a larger weight again would cost digits.
        return weight if weight < 0.5 else None

    def _rejection_is_on_device(self) -> bool:
        """Return True if only the device knows whether a sample is due: GradScaler decides."""
        found_inf: Tensor | None = getattr(self.optimizer, "found_inf", None)
        return not self._tracker.clock.on_host or (
            found_inf is not None and not _torch.is_on_host(found_inf)
        )

    def _device_weight(self, device: torch.device) -> Tensor:
        weight = self.averaging.weighting.weight(self._tracker.counters.on(device)[0] + 1)
        if not self._rejection_is_on_device():
            return weight
        due = self._next(self._tracker.clock.on(device))[1]
        return torch.where(due, weight, torch.zeros_like(weight))

    # ------------------------------------------------------------------------------------ control

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
        self._arrived()
        self._allocate()
        params = self._averaged()
        if not all_finite(params):
            self._skip()
            return False
        self._sample(params)
        return True

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
            self._warn_once(
                "The average has no sample yet. The raw weights are used instead.", stacklevel + 1
            )
        if self.count and model is not None and batchnorm is None:
            from gadam.average.batchnorm import STALE, has_statistics_in_use  # optional

            if STALE not in self._warnings and has_statistics_in_use(model):
                self._warn_once(STALE, stacklevel + 1)
        if "health" not in self._warnings:
            problems = self._measure_health(reduce=False).problems
            if problems:
                self._warn_once(" ".join(problems), stacklevel + 1, kind="health")

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
        return measure(
            self._averaged(),
            lambda p: raw[p] if p in raw else local(p).detach(),
            self._value,
            weight,
            progress.count,
            progress.skipped,
            reduce=reduce,
        )

    def _warn_once(self, message: str, stacklevel: int, kind: str | None = None) -> None:
        kind = message if kind is None else kind
        if kind not in self._warnings:
            self._warnings.add(kind)
            warnings.warn(message, stacklevel=stacklevel)

    @contextmanager
    def _swapped(
        self, model: nn.Module | None, batchnorm: BatchNorm
    ) -> Iterator[Callable[[], None]]:
        if self._applied is not None:
            raise RuntimeError("Averaged weights are already applied. applied() does not nest.")
        if isinstance(batchnorm, bool) and batchnorm:
            raise ValueError("batchnorm must be batches, a callable, False or None, got True.")
        refreshes = batchnorm is not None and batchnorm is not False
        if refreshes and model is None:
            raise ValueError("batchnorm= needs the model to refresh: pass model=.")
        params = self._averaged() if self.count else []
        for optimizer in self.optimizers:
            optimizer.__dict__["_applied_average"] = self
        try:
            with swapped(model, params, self._value, self._raw) as keep:
                if batchnorm is not None and batchnorm is not False and model is not None:
                    from gadam.average.batchnorm import refresh_batchnorm  # optional

                    refresh_batchnorm(model, batchnorm)
                yield keep
        finally:
            for optimizer in self.optimizers:
                del optimizer.__dict__["_applied_average"]

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
        if tensors or not any(is_dtensor(p) for p in model.parameters()):
            export.write_file(path, export.bare_names(model, tensors), self._provenance())

    def _provenance(self) -> Provenance:
        from gadam.average.export import Provenance, gadam_version

        progress = self._progress
        return Provenance(
            point="average" if progress.count else "iterate",
            samples=progress.count,
            skipped=progress.skipped,
            first_step=progress.first or None,
            last_step=progress.last or None,
            step=progress.steps,
            weighting=repr(self.averaging.weighting),
            plan=repr(self.averaging),
            gadam_version=gadam_version(),
            torch_version=torch.__version__,
        )

    def raw_state_dict(self, model: nn.Module) -> dict[str, Any]:
        """Return a copy of the model's state dict with the raw weights.

        The weights are the raw ones even inside :meth:`applied`. Use this to write checkpoints in
        code that cannot know if the average is applied.

        Args:
            model: The model that holds the parameters.
        """
        return copied_state_dict(model.state_dict(keep_vars=True), self._raw)

    # ------------------------------------------------------------------------ saving and restoring

    def state_dict(self) -> dict[str, Any]:
        """Return the average and its progress as tensors.

        The optimizer's own ``state_dict()`` contains the same. Use this one for an average alone.
        """
        index = {p: i for i, p in enumerate(self._params())}
        return {
            "progress": self._progress.pack(),
            "state": {index[p]: self._store.slots(p) for p in self._averaged()},
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
            packed, state = state_dict["progress"], state_dict["state"]
        except (KeyError, TypeError) as error:
            raise ValueError(
                "This is not the state of an iterate average. Pass the result of state_dict(), "
                f"with the entries 'progress' and 'state' ({type(error).__name__}: {error})."
            ) from error
        progress = self._unpack(packed)
        params = self._params()
        unknown = [i for i in state if int(i) not in range(len(params))]
        if unknown:
            raise ValueError(
                f"The saved average has a parameter {unknown[0]}, but the optimizer has only "
                f"{len(params)}."
            )
        saved = {params[int(i)]: buffers for i, buffers in state.items()}
        self._install(progress, self._prepare(progress, saved), bool(saved), params)

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
        if len(self._slots) > 1:
            raise ValueError(
                f"The weighting {self.averaging.weighting} needs the last samples, but an "
                "AveragedModel has only their mean."
            )
        wanted = {p for p in self._params() if p.requires_grad} | set(self._averaged())
        names: dict[Tensor, str] = {p: n for n, p in model.named_parameters() if p in wanted}
        missing = [name for name in names.values() if f"module.{name}" not in state_dict]
        if "n_averaged" not in state_dict or missing or not names:
            raise ValueError(
                "This is not the state of an AveragedModel of this model: it has no entry "
                f"{('module.' + missing[0]) if missing else 'n_averaged'!r}."
            )
        now = self._progress
        count = int(state_dict["n_averaged"])
        progress = replace(now, count=count, skipped=0, first=0, last=now.steps if count else 0)
        saved = {p: {self._slots[0]: state_dict[f"module.{name}"]} for p, name in names.items()}
        self._install(progress, self._prepare(progress, saved), True, self._params())

    def publish(self, create: bool = False) -> None:
        """Write the progress to the optimizer's state, for an optimizer with a built-in average.

        Args:
            create: Write it to the state of parameters that have none yet, too.
        """
        params = self._averaged() or self._params()
        device = params[0].device if params else "cpu"
        self._store.publish(self._progress.pack(device), create)

    def add_to(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Return a state dict with the progress as it is now, which later steps do not change.

        Args:
            state_dict: The state dict of an optimizer with a built-in average.
        """
        return self._store.insert(self.optimizer, state_dict, self._progress)

    def take_from(self, state_dict: dict[str, Any]) -> tuple[dict[str, Any], Callable[[], None]]:
        """Take the average out of a state dict before ``Optimizer.load_state_dict`` sees it.

        Args:
            state_dict: The state dict of an optimizer with a built-in average.

        Returns:
            The state dict without the average, and a function that restores the average after the
            rest is loaded.
        """
        others = [a._store for a in _attached(self.optimizer).averages if a is not self]
        rest, saved = self._store.extract(self.optimizer, state_dict, others)
        return rest, self._prepare_to_load(self.optimizer, rest, saved)

    def _prepare_to_load(
        self, optimizer: Optimizer, state_dict: dict[str, Any], saved: Saved
    ) -> Callable[[], None]:
        """Return a function that installs a saved average, or raise before anything changes."""
        params = params_of(optimizer)
        if saved.progress is not None:
            progress = self._unpack(saved.progress)
        elif saved.slots:
            raise ValueError(
                "The checkpoint has an average but not its progress. Use the optimizer's own "
                "state_dict()."
            )
        elif (in_place := self._store.restored_in_place()) is not None:
            progress = self._unpack(in_place)
            slots = {p: self._store.slots(p) for p in params}
            return lambda: self._install(progress, slots, True, params)
        else:
            return lambda: self._start_empty(bool(state_dict["state"]))
        # If the parameters do not match, torch's own check has the better error message.
        matches = len(params) == sum(len(group["params"]) for group in state_dict["param_groups"])
        prepared = self._prepare(progress, saved.slots) if matches else {}
        return lambda: self._install(progress, prepared, bool(saved.slots), params)

    def _start_empty(self, has_state: bool) -> None:
        """Reset the average after a checkpoint without one was loaded."""
        steps = self._tracker.clock.get()[1] if not self._built_in else 0
        self._install(
            replace(self._initial_progress(), steps=int(steps)), {}, False, self._params()
        )
        self._continue_from_the_optimizers_steps()
        steps, first_step = self._tracker.clock.get()[1], self.averaging.first_step
        expected = self.averaging.start is not None and (first_step is None or steps >= first_step)
        if expected and (has_state or not self._built_in):
            self._warn_once(
                f"The loaded checkpoint has no average. It starts empty, at step {int(steps)}.", 5
            )

    def _continue_from_the_optimizers_steps(self) -> None:
        """Count the steps that the optimizers have already taken, if their state says so."""
        counts = [
            float(state["step"])
            for optimizer in self.optimizers
            for state in optimizer.state.values()
            if isinstance(state, dict) and isinstance(state.get("step"), (Tensor, int, float))
        ]
        if counts:
            phase, _, begun = self._tracker.clock.get()
            self._tracker.clock.set((phase, int(max(counts)), begun))

    def _arrived(self) -> Saved | None:
        """Install state that was written to ``optimizer.state`` directly, if there is any."""
        saved = self._store.arrived()
        if saved is not None and saved.progress is not None:
            progress = self._unpack(saved.progress)
            prepared = self._prepare(progress, saved.slots)
            self._install(progress, prepared, bool(saved.slots), self._params())
        return saved

    def _unpack(self, packed: Tensor) -> Progress:
        try:
            progress = Progress.unpack(packed)
        except (TypeError, ValueError, IndexError) as error:
            raise ValueError(
                f"This is not the state of an iterate average: its progress is damaged ({error})."
            ) from error
        return self._match_trigger(progress)

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
            for name in self._slots:
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
        self,
        progress: Progress,
        prepared: dict[Tensor, dict[str, Tensor]],
        allocate: bool,
        params: list[Tensor],
    ) -> None:
        self._wait()
        for p in params:
            self._store.replace(p, prepared.get(p, {}))
        self._tracker.progress = progress
        self._allocated = ([], 0)
        self._with_buffers = None
        # Recreate buffers that existed. Values wait for the next step, because the weights may not
        # be loaded yet.
        if allocate and not progress.count:
            self._allocate()
        self.publish()

    def __reduce_ex__(self, protocol: Any) -> Any:
        if self._built_in:  # a copy belongs to the copied optimizer
            return getattr, (self.optimizer, "average")
        return super().__reduce_ex__(protocol)

    def __getstate__(self) -> dict[str, Any]:
        if self._applied is not None:
            raise RuntimeError("An average cannot be copied or pickled while it is applied.")
        return {
            "optimizers": self.optimizers,
            "averaging": self.averaging,
            "progress": self._progress,
            "slots": {p: self._store.slots(p) for p in self._averaged()},
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.optimizers, self.averaging = state["optimizers"], state["averaging"]
        self.optimizer, self._built_in = self.optimizers[0], False
        self._tracker = Tracker(state["progress"])
        self._attach()  # a copied optimizer has no hooks
        self._install(state["progress"], state["slots"], True, self._params())

    def __repr__(self) -> str:
        names = ", ".join(type(optimizer).__name__ for optimizer in self.optimizers)
        return (
            f"{type(self).__name__}({self.averaging}, phase={self.phase!r}, count={self.count}, "
            f"optimizer={names})"
        )


class _Attached:
    """The averages of an optimizer, and what they share.

    Attributes:
        averages: The averages.
        finite: The parameters that were checked after the current step, and whether they are finite
            in all processes.
    """

    def __init__(self) -> None:
        self.averages: list[IterateAverage] = []
        self.finite: tuple[list[Tensor], Tensor | bool] | None = None


def _attached(optimizer: Optimizer) -> _Attached:
    found: _Attached | None = optimizer.__dict__.get(AVERAGES)
    if found is None:
        found = optimizer.__dict__[AVERAGES] = _Attached()
    return found


@_torch.disable_dynamo
def _finish_steps(optimizer: Optimizer, *_: object) -> None:
    """Sample after all global hooks: a hook of torch.optim.optimizer, registered on demand."""
    registry: _Attached | None = optimizer.__dict__.get(AVERAGES)
    for average in registry.averages if registry is not None else ():
        if average._after_global_hooks:
            average._finish_step(optimizer)


def _may_edit(hook: Callable[..., object]) -> bool:
    """Return whether a step post-hook may edit the weights after the step that begins."""
    owner = getattr(hook, "__self__", None)
    if isinstance(owner, IterateAverage):
        return False
    edits: Callable[[], bool] | None = getattr(owner, "edits_weights_after_this_step", None)
    return edits is None or edits()


def _real(tensor: Tensor) -> Tensor:
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def _are_same(some: list[Tensor], others: list[Tensor]) -> bool:
    return len(some) == len(others) and all(map(is_, some, others))


def _rest(params: list[Tensor], folds: list[Fold]) -> list[Tensor]:
    """Return the parameters that no kernel has folded in."""
    done = sum(len(fold.folded) for fold in folds)
    if not done:
        return params
    if done == len(params):
        return []
    folded = {fold.params[i] for fold in folds for i in fold.folded}
    return [p for p in params if p not in folded]


def _has_gradient(optimizer: Optimizer) -> bool:
    return any(p.grad is not None for group in optimizer.param_groups for p in group["params"])


def _has_rate(optimizer: Optimizer) -> bool:
    """Return True unless all learning rates are known to be zero."""
    for group in optimizer.param_groups:
        lr = group.get("lr")
        if lr is None or (isinstance(lr, Tensor) and not _torch.is_on_host(lr)) or bool(lr != 0):
            return True
    return False


def is_dry_run(optimizer: Optimizer) -> bool:
    """Return True if the last step was not training: lr = 0 and all gradients zero.

    torch.distributed.checkpoint runs such a step to make an optimizer create its state.
    """
    if _has_rate(optimizer):
        return False
    grads = [p.grad for p in params_of(optimizer) if p.grad is not None]
    return bool(grads) and not any_nonzero(grads)
