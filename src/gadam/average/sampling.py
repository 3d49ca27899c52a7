"""Sampling: hooks into an optimizer's steps, when a sample is due, and how it enters the average.

A :class:`Sampler` follows the steps of the optimizers of one average and folds due samples into the
average's :class:`~gadam.average.state.State`. It shares what it knows about a step with the other
averages of the optimizer, through :mod:`gadam.average.attached`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from operator import is_
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.hooks import RemovableHandle

from gadam import _torch
from gadam._dtensor import agree, all_finite, all_reduce_min, any_nonzero, finite_flag, local
from gadam.average.attached import (
    applied_average,
    attached,
    has_own_step,
    interpolating,
    samplers_of,
)
from gadam.average.fold import Fold
from gadam.average.joint import JointStep, Part
from gadam.average.loading import Loader
from gadam.average.point import GradientPoint, real, with_closure
from gadam.average.state import State
from gadam.average.store import InOptimizer, params_of

if TYPE_CHECKING:
    from gadam.average.iterate import IterateAverage

__all__ = ["Sampler", "is_dry_run"]


class Sampler:
    """Sample the weights after the steps of the optimizers, as the plan says.

    Args:
        state: The average's buffers and progress.
        loader: Installs state that was written to ``optimizer.state`` directly, before each step.

    Attributes:
        state: The average's buffers and progress.
        folds: What kernels have folded in during the current step.
        after_global_hooks: Whether the sample of this step is taken in a global hook.
        on_step: Called after a step that counts, and its sample.
        is_edited: Whether other hooks may edit the weights after the current step.
        point: The point of the gradient, if the plan interpolates.
    """

    def __init__(self, state: State, loader: Loader) -> None:
        self.state, self._loader = state, loader
        self.point = GradientPoint(state)
        self.folds: list[Fold] = []
        self.after_global_hooks = False
        self.on_step: Callable[[], None] = _do_nothing
        self._joint = JointStep(state.optimizers)
        self._had_gradient = False  # before the step or in its closure
        self._foldable = False
        self.is_edited = False
        self._handles: list[RemovableHandle] = []

    def attach(self, average: IterateAverage | None = None) -> None:
        """Register hooks with the optimizers.

        Args:
            average: The average of this sampler, for :func:`gadam.average_of` to find.
        """
        for optimizer in self.state.optimizers:
            registry = attached(optimizer)
            registry.averages += [average] if average is not None else []
            registry.samplers.append(self)
            self._handles += [
                optimizer.register_step_pre_hook(self._before_step),
                optimizer.register_step_post_hook(self._after_step),
            ]
            for sampler in [one for one in registry.samplers if one.state.iterate is not None]:
                sampler._move_behind_the_others(optimizer)

    def _move_behind_the_others(self, optimizer: Optimizer) -> None:
        """Let the other samplers see the iterate, before the weights move away from it."""
        for kind in ("step_pre", "step_post"):
            hooks = _torch.optimizer_hooks(optimizer, kind)
            for handle in self._handles:
                if handle.id in hooks:
                    hooks.move_to_end(handle.id)
        samplers = attached(optimizer).samplers
        samplers.remove(self)
        samplers.append(self)

    def detach(self, average: IterateAverage | None = None) -> None:
        """Remove the hooks.

        Args:
            average: The average of this sampler, as in :meth:`attach`.
        """
        for handle in self._handles:
            handle.remove()
        for optimizer in self.state.optimizers:
            registry = attached(optimizer)
            if average in registry.averages:
                registry.averages.remove(average)
            if self in registry.samplers:
                registry.samplers.remove(self)

    # ------------------------------------------------------------------------------------- stepping

    @_torch.disable_dynamo
    def _before_step(
        self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        if _torch.is_nested_step(optimizer):
            return None
        if applied_average(self.state.optimizers) is not None:
            raise RuntimeError(
                "step() was called while the averaged weights are applied. Leave the "
                "`with average.applied():` block first."
            )
        self._loader.arrive()
        self._loader.parts.check()
        attached(optimizer).finite = None
        _forget_verdict(optimizer)
        self.is_edited = self._move_hooks_to_the_end(optimizer)
        if self.state.averaging.start is not None or self.state.is_in_use():
            self.state.allocate()
        if isinstance(self.state.store, InOptimizer) and not self.state.store.is_published():
            self._loader.publish(create=True)
        self.folds = []
        self._foldable = (
            len(self.state.optimizers) == 1
            and self.state.overlap is None
            and not self.is_edited
            and len(self.state.slots) == 1
            and self._may_be_due(optimizer)
        )
        # A step may end with zero_grad().
        self._had_gradient = _has_gradient(optimizer)
        noting = self._note_gradients(optimizer, args, kwargs)
        return self.point.before_step(*(noting or (args, kwargs))) or noting

    def _note_gradients(
        self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Return arguments of a step whose closure notes whether there are gradients.

        Returns:
            None without a closure.
        """
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        if not callable(closure):  # some optimizers take a loss there
            return None

        def evaluate() -> object:
            loss = closure()
            self._had_gradient = self._had_gradient or _has_gradient(optimizer)
            return loss

        return with_closure(args, kwargs, evaluate)

    def _move_hooks_to_the_end(self, optimizer: Optimizer) -> bool:
        """Make the sample include what other hooks do: a projection, a pruning mask.

        Returns:
            Whether other hooks may edit the weights after this step.
        """
        hooks = _torch.optimizer_hooks(optimizer, "step_post")
        edits = False
        if len(hooks) > len(attached(optimizer).samplers):
            for handle in self._handles:
                if handle.id in hooks:
                    hooks.move_to_end(handle.id)
            edits = any(_may_edit(hook) for hook in hooks.values())
        others = _torch.global_step_post_hooks()
        self.after_global_hooks = any(hook is not _finish_steps for hook in others.values())
        if self.after_global_hooks:
            edits = True
            own = next((key for key, hook in others.items() if hook is _finish_steps), None)
            if own is None:
                register_optimizer_step_post_hook(_finish_steps)
            else:
                others.move_to_end(own)
        return edits

    def _may_be_due(self, optimizer: Optimizer) -> bool:
        """Return whether the step that begins may end with a sample, as far as the host knows."""
        if self.state.averaging.every is None:
            return False
        phase, steps, begun = self.state.tracker.clock.known
        first_step = self.state.averaging.first_step
        if not self.state.tracker.clock.on_host:  # the device counts the steps: an upper bound
            steps += self.state.tracker.clock.unread
            return bool(
                phase == 1 or (phase == 0 and first_step is not None and steps + 1 >= first_step)
            )
        if steps == 0 and not _has_rate(optimizer):
            return False  # this may be a dry run
        if phase == 0 and first_step is not None and steps + 1 >= first_step:
            phase, begun = 1, first_step
        return bool(phase == 1 and (steps + 1 - begun) % self.state.averaging.every == 0)

    @_torch.disable_dynamo
    def _after_step(self, optimizer: Optimizer, *_: object) -> None:
        if not self.after_global_hooks and not _torch.is_nested_step(optimizer):
            self.finish_step(optimizer)

    @torch.no_grad()
    def finish_step(self, optimizer: Optimizer) -> None:
        """Count a step, and sample the weights if a sample is due.

        Args:
            optimizer: The optimizer that has stepped.
        """
        folds = self.folds
        pointed = _pointed(folds)
        self._count_and_sample(optimizer)
        # A kernel may have moved the weights toward an average that was then undone.
        self.point.leave_iterate(pointed, any(fold.is_undone for fold in folds))

    def _count_and_sample(self, optimizer: Optimizer) -> None:
        clock = self.state.tracker.clock
        first = clock.on_host and clock.known[1] == 0
        # A distributed checkpoint steps an optimizer without state, such as plain SGD, every time.
        if (first or not optimizer.state) and is_dry_run(optimizer):
            return
        trained = self._had_gradient or _has_gradient(optimizer)
        self._had_gradient = False
        step = self._joint.add(optimizer, Part(trained, getattr(optimizer, "found_inf", None)))
        if step is None or not step.trained:
            return
        # Others may have moved their weights away from the iterate when they stepped.
        with self._at_iterate([one for one in self.state.optimizers if one is not optimizer]):
            self._advance(step.found_inf)

    def _advance(self, found_inf: Tensor | None) -> None:
        """Count a step of all optimizers, and sample the weights if a sample is due."""
        clock = self.state.tracker.clock
        if found_inf is not None and not _torch.is_on_host(found_inf):
            self._count_on_device(found_inf)
            self.on_step()
            return
        phase, steps, begun = clock.get()
        step, first_step, every = (
            steps + 1,
            self.state.averaging.first_step,
            self.state.averaging.every,
        )
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
        self.on_step()

    def _count_on_device(self, found_inf: Tensor) -> None:
        """Count a step that GradScaler may have rejected, without waiting for its verdict."""
        may_be_due = self._may_be_due(self.state.optimizers[0])
        clock = self.state.tracker.clock
        before = clock.on(found_inf.device)
        after, due = self._next(before)
        accepted = found_inf.squeeze() == 0
        clock.replace(torch.where(accepted, after, before))
        if may_be_due:
            self._take_sample(due, accepted)

    def _next(self, clock: Tensor) -> tuple[Tensor, Tensor]:
        """Return the clock after one more step, and whether a sample is due then."""
        phase, steps, begun = clock.unbind()
        first_step, every = self.state.averaging.first_step, self.state.averaging.every
        if first_step is not None:
            starts = (phase == 0) & (steps + 1 >= first_step)
            phase = torch.where(starts, torch.ones_like(phase), phase)
            begun = torch.where(starts, torch.full_like(begun, first_step), begun)
        due = (phase == 1) & ((steps + 1 - begun) % (every or 1) == 0)
        return torch.stack([phase, steps + 1, begun]), due

    # ------------------------------------------------------------------------------------- sampling

    def sample_now(self) -> bool:
        """Sample the current weights, and return whether they are finite and entered."""
        self._loader.arrive()
        self._loader.parts.check()
        self.state.allocate()
        params = self.state.averaged()
        with self._at_iterate(self.state.optimizers):
            finite = all_finite(params)
            if finite:
                self._sample(params)
            else:
                self._skip()
        return finite

    @contextmanager
    def _at_iterate(self, optimizers: Sequence[Optimizer]) -> Iterator[None]:
        """Move the weights of optimizers that interpolate to the iterate for a block."""
        points = [sampler.point for sampler in interpolating(optimizers)]
        for point in points:
            point.to_iterate(self.state.averaged())
        yield
        for point in points:
            point.leave_iterate()

    def _take_sample(self, due: Tensor | None = None, accepted: Tensor | None = None) -> None:
        """Sample the weights after a step.

        Args:
            due: Whether the sample is due, if only the device knows.
            accepted: Whether GradScaler has accepted the step, if only the device knows.
        """
        params = self.state.averaged()
        folds = [fold for fold in self.folds if fold.folded]
        self.folds = []
        if self.state.iterate is not None:  # also of parameters without a gradient in this step
            pointed = _pointed(folds)
            self.point.to_iterate([p for p in params if p not in pointed])
        if any(fold.not_finite is None for fold in folds):
            self._settle_on_host(folds, params)
            return
        known = self._kernels_verdict(params) if not folds and due is None else None
        if known is not None:
            self._settle_on_host([], params, known)
            return
        finite = self._finite_flag(params, folds)
        if len(self.state.slots) > 1:  # which copy to replace depends on the number of samples
            if due is None or bool(due):
                good = bool(finite) and (accepted is None or bool(accepted))
                self._sample(params) if good else self._skip()
            return
        self._sample_on_device(params, folds, finite, due, accepted)

    def _kernels_verdict(self, params: list[Tensor]) -> bool | None:
        """Return whether the parameters are finite, if the optimizer's kernel has seen them all."""
        optimizer = self.state.optimizers[0]
        if len(self.state.optimizers) > 1 or self.is_edited or not has_own_step(optimizer):
            return None
        finite: bool | None = getattr(optimizer, "_finite", None)
        return None if any(p.grad is None for p in params) else finite

    def _finite_flag(self, params: list[Tensor], folds: list[Fold]) -> Tensor:
        """Return whether a sample is finite, on the device. All averages share one check."""
        registry = attached(self.state.optimizers[-1])
        if registry.finite is not None and _are_same(registry.finite[0], params):
            found = registry.finite[1]
            return found if isinstance(found, Tensor) else torch.tensor(found, device="cpu")
        flag = finite_flag(_rest(params, folds) if folds else params)
        for fold in folds:
            assert fold.not_finite is not None
            flag = flag & (fold.not_finite == 0).squeeze().to(flag.device)
        flag = agree(flag, self.state.sharded)
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
        finite = bool(all_reduce_min(known, self.state.sharded))
        attached(self.state.optimizers[0]).finite = params, finite
        if finite:
            self._sample(rest)
            return
        for fold in folds:
            fold.undo()
        self._skip()

    @torch.no_grad()
    def _sample(self, params: list[Tensor]) -> None:
        """Fold these parameters into the average, and count the sample."""
        count, skipped, first, _ = map(int, self.state.tracker.counters.get())
        count += 1
        name = self.state.slots[(count - 1) % len(self.state.slots)]
        weight = self.state.averaging.weighting.weight(count)
        if self.state.overlap is not None:
            self._start_overlapped(params, name, weight)
            params = []
        averages, samples = [], []
        for p in params:
            average, sample = self.state.buffer(p, name), local(p).detach()
            if weight == 1.0:
                average.copy_(sample)
                continue
            if average.is_complex():
                average, sample = torch.view_as_real(average), torch.view_as_real(sample)
            averages.append(average)
            samples.append(sample.to(average.device, average.dtype))
        if averages:
            _torch.foreach_lerp_(averages, samples, weight)
        step = int(self.state.tracker.clock.get()[1])
        self.state.tracker.counters.set((count, skipped, first if count > 1 else step, step))

    def _start_overlapped(self, params: list[Tensor], name: str, weight: float | Tensor) -> None:
        """Fold these parameters into the average on the host, while the device continues."""
        assert self.state.overlap is not None
        averages = [real(self.state.buffer(p, name)) for p in params]
        samples = [real(local(p).detach()) for p in params]
        self.state.overlap.start(averages, samples, weight)

    def _skip(self) -> None:
        count, skipped, first, last = self.state.tracker.counters.get()
        self.state.tracker.counters.set((count, skipped + 1, first, last))

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
        count, skipped, first, last = self.state.tracker.counters.on(finite.device).unbind()
        good = finite & accepted
        take = good & due
        weight = self.state.averaging.weighting.weight(count + 1)
        on_device: dict[torch.device, tuple[Tensor, Tensor]] = {}
        rest = _rest(params, folds)
        if self.state.overlap is not None:
            share = torch.where(take, weight, torch.zeros_like(weight))
            self._start_overlapped(rest, self.state.slots[0], share)
            rest = []
        for p in rest:
            average, sample = self.state.buffer(p, self.state.slots[0]), local(p).detach()
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
        clock = self.state.tracker.clock
        step = torch.full_like(last, clock.get()[1]) if clock.on_host else clock.on(last.device)[1]
        self.state.tracker.counters.replace(
            torch.stack(
                [
                    count + take,
                    skipped + (due & ~good),
                    torch.where(take & (count == 0), step, first),
                    torch.where(take, step, last),
                ]
            )
        )

    # -------------------------------------------------------------------------------------- kernels

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
        name = self.state.slots[0]
        table = self.state.store.table
        found = (
            states
            if states is not None and self.state.built_in
            else [table.get(p, {}) for p in params]
        )
        # Another average must see the iterates in the parameters.
        iterate = self.state.iterate
        alone = self.state.built_in and len(attached(self.state.optimizers[0]).samplers) == 1
        try:
            averages = [state[name] for state in found]
            iterates = [state[iterate] for state in found] if iterate and alone else None
        except KeyError:  # a parameter that is not averaged
            return None
        fold = Fold(params, averages, self._host_weight, self._device_weight)
        fold.iterates, fold.interpolation = iterates, self.state.averaging.interpolation
        self.folds.append(fold)
        return fold

    def cancel_folds(self) -> None:
        """Take out what a step has folded in before it failed."""
        pointed = _pointed(self.folds)
        for fold in self.folds:
            fold.undo()
        self.folds = []
        self.point.leave_iterate(pointed, undone=True)

    def _host_weight(self) -> float | None:
        if self._rejection_is_on_device():
            return None
        weight = self.state.averaging.weighting.weight(
            int(self.state.tracker.counters.get()[0]) + 1
        )
        # Taking out a sample of a larger weight again would cost digits.
        return weight if weight < 0.5 else None

    def _rejection_is_on_device(self) -> bool:
        """Return True if only the device knows whether a sample is due: GradScaler decides."""
        found_inf: Tensor | None = getattr(self.state.optimizers[0], "found_inf", None)
        return not self.state.tracker.clock.on_host or (
            found_inf is not None and not _torch.is_on_host(found_inf)
        )

    def _device_weight(self, device: torch.device) -> Tensor:
        weight = self.state.averaging.weighting.weight(
            self.state.tracker.counters.on(device)[0] + 1
        )
        if not self._rejection_is_on_device():
            return weight
        due = self._next(self.state.tracker.clock.on(device))[1]
        return torch.where(due, weight, torch.zeros_like(weight))


@_torch.disable_dynamo
def _finish_steps(optimizer: Optimizer, *_: object) -> None:
    """Sample after all global hooks: a hook of torch.optim.optimizer, registered on demand."""
    if _torch.is_nested_step(optimizer):
        return
    for sampler in samplers_of(optimizer):
        if sampler.after_global_hooks:
            sampler.finish_step(optimizer)


def _forget_verdict(optimizer: Optimizer) -> None:
    """Remove what a kernel has said about an earlier step: this one may not run it."""
    if getattr(optimizer, "_finite", None) is not None:
        optimizer._finite = None  # type: ignore[attr-defined]


def _do_nothing() -> None:
    pass


def _may_edit(hook: Callable[..., object]) -> bool:
    """Return whether a step post-hook may edit the weights after the step that begins."""
    owner = getattr(hook, "__self__", None)
    if isinstance(owner, Sampler):
        return False
    edits: Callable[[], bool] | None = getattr(owner, "edits_weights_after_this_step", None)
    return edits is None or edits()


def _are_same(some: list[Tensor], others: list[Tensor]) -> bool:
    return len(some) == len(others) and all(map(is_, some, others))


def _pointed(folds: list[Fold]) -> set[Tensor]:
    """Return the parameters that kernels have moved between iterate and average."""
    return {fold.params[i] for fold in folds if fold.is_pointed for i in fold.folded}


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

    Args:
        optimizer: The optimizer.
    """
    if _has_rate(optimizer):
        return False
    grads = [p.grad for p in params_of(optimizer) if p.grad is not None]
    return bool(grads) and not any_nonzero(grads)
