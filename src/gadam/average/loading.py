"""Loading: check saved state against the optimizer and the plan, and install it.

A saved average arrives in one of four ways: in the optimizer's state dict, in the average's own, in
that of a ``torch.optim.swa_utils.AveragedModel``, or written to ``optimizer.state`` directly. The
loader checks all of it before anything changes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from gadam._dtensor import local, new_like
from gadam.average.attached import samplers_of
from gadam.average.joint import LoadedParts
from gadam.average.plan import Plateau, same_trigger, same_weighting
from gadam.average.progress import Progress
from gadam.average.state import State
from gadam.average.store import Saved, Store, params_of

__all__ = ["Loader"]


class Loader:
    """Replace an average by a saved one.

    Args:
        state: The average's buffers and progress.

    Attributes:
        parts: What was loaded with each of several optimizers.
    """

    def __init__(self, state: State) -> None:
        self.state = state
        self.parts = LoadedParts(state.optimizers)

    @property
    def progress(self) -> Progress:
        """The progress, of the state that was last written to ``optimizer.state`` if there is any.

        Every reader of the average reads this first, so it also waits for the last sample.
        """
        self.state.wait()
        self.arrive()
        return self.state.tracker.progress

    def arrive(self) -> Saved | None:
        """Install state that was written to ``optimizer.state`` directly, if there is any."""
        if self.state.store.was_cleared():
            progress = self.state.tracker.progress
            empty = replace(progress, count=0, skipped=0, first=0, last=0)
            self.install(empty, {}, False, self.state.params())
            if progress.count:
                self.state.warn_once(
                    "The optimizer's state was cleared, and its average with it. It starts empty.",
                    4,
                )
        saved = self.state.store.arrived()
        if saved is not None and saved.progress is not None:
            progress = self._unpack(saved.progress)
            prepared = self._prepare(progress, saved.slots)
            self.install(progress, prepared, bool(saved.slots), self.state.params())
        return saved

    def publish(self, create: bool = False) -> None:
        """Write the progress to the optimizer's state, for an optimizer with a built-in average.

        Args:
            create: Write it to the state of parameters that have none yet, too.
        """
        self._publish(self.progress, create)

    def _publish(self, progress: Progress, create: bool = False) -> None:
        params = self.state.averaged() or self.state.params()
        device = params[0].device if params else "cpu"
        self.state.store.publish(progress.pack(device, live=True), create)

    def load(self, state_dict: dict[str, Any]) -> None:
        """Install an average's own state dict.

        Args:
            state_dict: The result of :meth:`gadam.IterateAverage.state_dict`.

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
        params = self.state.params()
        indices = {i: _index(i) for i in state} if isinstance(state, Mapping) else {None: -1}
        unknown = [i for i, index in indices.items() if index not in range(len(params))]
        # States from before there was a fingerprint do not list parameters without an average.
        missing = set(range(len(params))) - set(indices.values())
        if _has_plan(packed) and progress.count and state and missing and not unknown:
            raise ValueError(_missing(f"parameter {min(missing)}"))
        if unknown:
            raise ValueError(
                f"The saved average has a parameter {unknown[0]}, but the optimizer has only "
                f"{len(params)}."
            )
        saved = {params[index]: state[i] for i, index in indices.items()}
        prepared = self._prepare(progress, saved)
        self.install(progress, prepared, any(saved.values()), params)
        self.parts.clear()

    def load_averaged_model(self, state_dict: Mapping[str, Any], model: nn.Module) -> None:
        """Install the average of a ``torch.optim.swa_utils.AveragedModel``.

        Args:
            state_dict: The state dict of the AveragedModel.
            model: The model that holds the parameters.

        Raises:
            ValueError: If the state dict does not match the model or the plan. The average does not
                change then.
        """
        if len(self.state.slots) > 1:
            raise ValueError(
                f"The weighting {self.state.averaging.weighting} needs the last samples, but an "
                "AveragedModel has only their mean."
            )
        wanted = {p for p in self.state.params() if p.requires_grad} | set(self.state.averaged())
        names: dict[Tensor, str] = {p: n for n, p in model.named_parameters() if p in wanted}
        missing = [name for name in names.values() if f"module.{name}" not in state_dict]
        if "n_averaged" not in state_dict or missing or not names:
            raise ValueError(
                "This is not the state of an AveragedModel of this model: it has no entry "
                f"{('module.' + missing[0]) if missing else 'n_averaged'!r}."
            )
        now = self.progress
        try:
            count = int(state_dict["n_averaged"])
        except (TypeError, ValueError, RuntimeError):
            count = -1
        if count < 0:
            raise ValueError(
                f"n_averaged must be a non-negative integer, got {state_dict['n_averaged']!r}."
            )
        progress = replace(now, count=count, skipped=0, first=0, last=now.steps if count else 0)
        saved = {
            p: {self.state.slots[0]: state_dict[f"module.{name}"]} for p, name in names.items()
        }
        key = self.state.store.iterate_key
        iterates = {p: z for p in saved if (z := self.state.iterate_of(p)) is not None}
        for p in iterates:
            saved[p][key] = self.state.store.slots(p)[key]
        prepared = self._prepare(progress, saved)
        if not count:  # without a sample, the weights must be the iterates
            for p, iterate in iterates.items():
                local(p).detach().copy_(iterate)
        self.install(progress, prepared, True, self.state.params())
        self.parts.clear()

    def take_from(
        self, state_dict: dict[str, Any], others: Sequence[Store]
    ) -> tuple[dict[str, Any], Callable[[], None]]:
        """Take the average out of a state dict before ``Optimizer.load_state_dict`` sees it.

        Args:
            state_dict: The state dict of an optimizer with a built-in average.
            others: The stores of the optimizer's other averages.

        Returns:
            The state dict without the average, and a function that restores the average after the
            rest is loaded.
        """
        optimizer = self.state.optimizers[0]
        rest, saved = self.state.store.extract(optimizer, state_dict, others)
        if self.state.store.is_closed:  # the checkpoint's average belongs to nobody
            names = {name for slots in saved.slots.values() for name in slots}
            if saved.progress is not None:
                names.add(self.state.store.progress_key)
            self._check_others(saved.others | names)
            return rest, lambda: None
        return rest, self.prepare_to_load(optimizer, rest, saved)

    def prepare_to_load(
        self, optimizer: Optimizer, state_dict: dict[str, Any], saved: Saved
    ) -> Callable[[], None]:
        """Return a function that installs a saved average, or raise before anything changes.

        Args:
            optimizer: The optimizer.
            state_dict: Its state dict without the average.
            saved: The saved average.
        """
        self._check_others(saved.others)
        # Read it in any case: it is good for one load.
        in_place = self.state.store.restored_in_place(optimizer)
        params = params_of(optimizer)
        has_state = bool(state_dict["state"])
        if saved.progress is not None:
            progress = self._unpack(saved.progress)
        elif saved.slots:
            raise ValueError(
                "The checkpoint has an average but not its progress. Use the optimizer's own "
                "state_dict()."
            )
        elif in_place is not None:
            progress = self._unpack(in_place)
            slots = {p: self.state.store.slots(p) for p in params}
            return lambda: self._install_part(optimizer, progress, slots, True)
        else:
            return lambda: self._start_empty(optimizer, has_state)
        # If the parameters do not match, torch's own check has the better error message.
        matches = len(params) == sum(len(group["params"]) for group in state_dict["param_groups"])
        absent = [p for p in saved.bare if p.requires_grad]
        if matches and progress.count and saved.slots and absent:
            index = next(i for i, p in enumerate(params) if p is absent[0])
            raise ValueError(_missing(f"parameter {index}"))
        prepared = self._prepare(progress, saved.slots) if matches else {}
        return lambda: self._install_part(optimizer, progress, prepared, bool(saved.slots))

    def _install_part(
        self,
        optimizer: Optimizer,
        progress: Progress,
        prepared: dict[Tensor, dict[str, Tensor]],
        allocate: bool,
    ) -> None:
        """Replace an optimizer's part of the average."""
        now = self.state.tracker.progress
        is_same = (now.steps, now.count) == (progress.steps, progress.count)
        self.install(progress, prepared, allocate, params_of(optimizer))
        if not is_same or self.parts.has_samples:  # wrappers load what they have just saved
            self.parts.note(optimizer, progress, True)

    def _check_others(self, others: Collection[str]) -> None:
        """Warn about averages that the optimizer does not have, or refuse to drop one.

        The unfinished mean of a block is no loss: the blocks themselves are in files.
        """
        iterates = [name for name in others if name.endswith("_iterate")]
        if iterates:
            raise ValueError(
                f"The checkpoint has another average, {iterates[0].removesuffix('_iterate')!r}, "
                "that was trained with interpolation. Attach it before loading: without it, the "
                "weights are not the iterate."
            )
        saved = [name.removesuffix("_progress") for name in others if name.endswith("_progress")]
        names = sorted(name for name in saved if not name.startswith("block_mean"))
        if names:
            self.state.warn_once(
                f"The checkpoint has averages that the optimizer does not have: {', '.join(names)}."
                " They are dropped. To keep them, attach all averages before loading.",
                8,
            )

    def _start_empty(self, optimizer: Optimizer, has_state: bool) -> None:
        """Reset the average after a checkpoint without one was loaded."""
        self.parts.note(optimizer, None, has_state)
        if self.parts.has_samples:  # this is one of several optimizers
            return
        steps = self.state.tracker.clock.get()[1] if not self.state.built_in else 0
        self.install(
            replace(self.state.initial_progress, steps=int(steps)), {}, False, self.state.params()
        )
        self.continue_from_the_optimizers_steps()
        steps, first_step = self.state.tracker.clock.get()[1], self.state.averaging.first_step
        expected = self.state.averaging.start is not None and (
            first_step is None or steps >= first_step
        )
        if expected and (has_state or not self.state.built_in):
            self.state.warn_once(
                f"The loaded checkpoint has no average. It starts empty, at step {int(steps)}.", 5
            )

    def continue_from_the_optimizers_steps(self) -> None:
        """Count the steps that the optimizers have already taken, if their state says so."""
        counts = [
            float(state["step"])
            for optimizer in self.state.optimizers
            for state in optimizer.state.values()
            if isinstance(state, dict) and isinstance(state.get("step"), (Tensor, int, float))
        ]
        if counts:
            phase, _, begun = self.state.tracker.clock.get()
            self.state.tracker.clock.set((phase, int(max(counts)), begun))

    def _unpack(self, packed: Tensor) -> Progress:
        try:
            progress = Progress.unpack(packed)
        except (TypeError, ValueError, IndexError) as error:
            raise ValueError(
                f"This is not the state of an iterate average: its progress is damaged ({error})."
            ) from error
        return self._match_plan(progress)

    def _match_plan(self, progress: Progress) -> Progress:
        """Return the saved progress for the current plan, which may have a new trigger or none.

        Another weighting is an error if there are samples, because their mean and their count mean
        something else to it. So is another trigger, because its memory does. A plan may drop its
        trigger, or get one. Progress from before there was a fingerprint is accepted as it is.
        """
        plan = self.state.averaging
        fingerprint = progress.plan or plan.fingerprint
        if progress.count and not same_weighting(fingerprint, plan.fingerprint):
            raise ValueError(
                f"The saved average has another weighting than {plan.weighting!r}. Use the "
                "weighting that the average was saved with."
            )
        is_one_of_several = len(samplers_of(self.state.optimizers[0])) > 1
        is_earlier = plan.first_step is not None and 0 < progress.first < plan.first_step
        if is_one_of_several and is_earlier:
            self.state.warn_once(
                f"The saved average has samples from step {progress.first} on, before the plan's "
                f"start at step {plan.first_step}. Attach several averages in the order in which "
                "they were attached when the checkpoint was saved.",
                8,
            )
        initial = self.state.initial_progress.memory
        if progress.memory and initial:
            same = same_trigger(fingerprint, plan.fingerprint)
            if not same or len(progress.memory) != len(initial):
                raise ValueError(
                    "The saved average has the state of another trigger than "
                    f"{plan.start!r}. Use the plan that the average was saved with."
                )
            if isinstance(plan.start, Plateau) and not _is_count(progress.memory[1]):
                raise ValueError(
                    "This is not the state of an iterate average: its trigger has waited for "
                    f"{progress.memory[1]} observations."
                )
            return replace(progress, plan=plan.fingerprint)
        if any(number and math.isfinite(number) for number in progress.memory):
            self.state.warn_once(
                "The average was saved with a trigger that had observed metrics. The plan has no "
                "trigger, so they are dropped.",
                2,
            )
        return replace(progress, memory=initial, plan=plan.fingerprint)

    @torch.no_grad()
    def _prepare(
        self, progress: Progress, saved: dict[Tensor, dict[str, Tensor]]
    ) -> dict[Tensor, dict[str, Tensor]]:
        """Copy the saved buffers, in the plan's dtype and on its device. Installs nothing yet."""
        if not progress.count:
            return {}
        prepared: dict[Tensor, dict[str, Tensor]] = {}
        weighting = self.state.averaging.weighting
        for p, buffers in saved.items():
            if not isinstance(buffers, Mapping):
                raise ValueError(f"The saved average of a parameter is {type(buffers).__name__}.")
            if not buffers:
                continue
            prepared[p] = {}
            iterate = self.state.store.iterate_key
            samples = len(buffers.keys() - {iterate})
            if samples > len(self.state.slots):
                raise ValueError(
                    f"The saved average has {samples} buffers, but the weighting {weighting} needs "
                    f"{len(self.state.slots)}. Use the weighting that the average was saved with."
                )
            # A plan may begin to interpolate: the weights are the iterate then. It may not stop,
            # because the weights in the checkpoint are not the iterate.
            if iterate in buffers and self.state.iterate is None:
                raise ValueError(
                    "The saved average was trained with interpolation, but the plan has none. Use "
                    "the plan that the average was saved with."
                )
            for name in (*self.state.slots, *([iterate] if iterate in buffers else [])):
                if name not in buffers:
                    raise ValueError(
                        f"The saved average has no buffer {name!r}, which the weighting "
                        f"{weighting} needs. Use the weighting that the average was saved with."
                    )
                found = buffers[name]
                if not isinstance(found, Tensor) or not (
                    found.is_floating_point() or found.is_complex()
                ):
                    raise ValueError(
                        "The saved average must be a floating-point tensor, got "
                        f"{found.dtype if isinstance(found, Tensor) else type(found).__name__}."
                    )
                if found.is_complex() != p.is_complex():
                    raise ValueError(
                        f"The saved average has dtype {found.dtype}, but the parameter has "
                        f"{p.dtype}."
                    )
                if buffers[name].shape != p.shape:
                    raise ValueError(
                        f"The saved average has shape {tuple(buffers[name].shape)}, but the "
                        f"parameter has {tuple(p.shape)}."
                    )
                dtype = p.dtype if name == iterate else self.state.averaging.dtype_for(p)
                buffer = new_like(p, dtype, self.state.averaging.device_for(p))
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

    def install(
        self,
        progress: Progress,
        prepared: dict[Tensor, dict[str, Tensor]],
        allocate: bool,
        params: list[Tensor],
    ) -> None:
        """Replace the average.

        Args:
            progress: The new progress.
            prepared: The new buffers by parameter and name.
            allocate: Whether to create buffers if there is no sample yet.
            params: The parameters. Those without new buffers lose theirs.
        """
        self.state.replace(progress, prepared, params)
        # Recreate buffers that existed. Values wait for the next step, because the weights may not
        # be loaded yet.
        if allocate and not progress.count:
            self.state.allocate()
        self._publish(progress)


def _index(key: object) -> int:
    """Return the index of a parameter in a state dict, or -1 if it is not one."""
    try:
        return int(str(key))  # other formats turn the keys into text
    except ValueError:
        return -1


def _is_count(number: float) -> bool:
    return number >= 0 and number == math.floor(number) if math.isfinite(number) else False


def _has_plan(packed: Tensor) -> bool:
    return Progress.unpack(packed).plan != 0


def _missing(name: str) -> str:
    return (
        f"The saved average of {name} is missing, but other parameters have theirs. The "
        "state is damaged: restore it from another checkpoint."
    )
