"""Where an average is stored: in its optimizer's own state, or beside it.

Both stores travel in the optimizer's ``state_dict()``, inside the entries of the parameters. So
every kind of checkpoint carries them: ``torch.save``, distributed checkpoints, and the wrappers of
training frameworks.
"""

from __future__ import annotations

import math
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, MutableMapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from gadam import _torch
from gadam.average.joint import position
from gadam.average.progress import Progress, is_live

__all__ = [
    "BesideOptimizer",
    "InOptimizer",
    "Saved",
    "Store",
    "calls_state_dict_hooks",
    "params_of",
]

Slots = dict[str, Tensor]
StateDict = dict[str, Any]


class Saved(NamedTuple):
    """A saved average.

    Attributes:
        progress: The packed progress, or None if there was none.
        slots: The buffers of each parameter, by name.
        bare: The parameters that have the progress but no buffers, or an empty entry.
        others: The names of entries of averages that the optimizer does not have.
    """

    progress: Tensor | None
    slots: dict[Tensor, Slots]
    bare: list[Tensor]
    others: frozenset[str] = frozenset()


class Store(ABC):
    """The buffers of an average, per parameter, and how they enter and leave state dicts.

    Args:
        optimizers: The optimizers of the averaged parameters.
        prefix: The name of the average in the parameters' state. Averages of one optimizer have
            different names.

    Attributes:
        is_closed: Whether the average was removed from its optimizers.
    """

    def __init__(self, optimizers: Sequence[Optimizer], prefix: str) -> None:
        self.optimizers, self.prefix = list(optimizers), prefix
        self._entry = re.compile(re.escape(prefix) + _ENTRY)
        self.is_closed = False
        self._handles: list[RemovableHandle] = []
        # The progress in the last state dict of each optimizer, its numbers, and its version.
        self._exported: dict[int, tuple[Tensor, list[float], list[int] | None]] = {}

    @property
    def progress_key(self) -> str:
        """The name of the packed progress in a parameter's state."""
        return f"{self.prefix}_progress"

    @property
    def iterate_key(self) -> str:
        """The name of the iterate in a parameter's state, if gradients are taken elsewhere."""
        return f"{self.prefix}_iterate"

    def slot_names(self, copies: int) -> list[str]:
        """Return the names of a parameter's buffers: one, or the ring of a sliding window.

        Args:
            copies: The number of buffers.
        """
        return [self.prefix] if copies == 1 else [f"{self.prefix}_{i}" for i in range(copies)]

    def owns(self, key: object) -> bool:
        """Return True if this is the name of a buffer or of the progress of this average.

        Args:
            key: A key of a parameter's state.
        """
        return bool(self._entry.fullmatch(str(key)))

    @property
    @abstractmethod
    def table(self) -> MutableMapping[Tensor, Any]:
        """The state of the parameters, which holds the buffers by name."""

    def slots(self, p: Tensor) -> Slots:
        """Return a parameter's buffers by name. The result is empty if it has none.

        Args:
            p: The parameter.
        """
        progress = self.progress_key
        state = self.table.get(p, {})
        return {key: v for key, v in state.items() if self.owns(key) and key != progress}

    def replace(self, p: Tensor, slots: Slots) -> None:
        """Replace a parameter's buffers.

        Args:
            p: The parameter.
            slots: The new buffers by name. None are left if it is empty.
        """
        for key in [key for key in self.table.get(p, ()) if self.owns(key)]:
            del self.table[p][key]
        if slots:
            self.table.setdefault(p, {}).update(slots)

    @abstractmethod
    def publish(self, progress: Tensor, create: bool = False) -> None:
        """Show the progress where others look for it.

        Args:
            progress: The packed progress.
            create: Show it in parameters that have no state yet, too.
        """

    @abstractmethod
    def arrived(self) -> Saved | None:
        """Return state that was written to ``optimizer.state`` directly, or None.

        ZeroRedundancyOptimizer loads a state dict in this way, without calling any hook.
        """

    def was_cleared(self) -> bool:
        """Return True if someone has emptied ``optimizer.state``, and the buffers were there."""
        return False

    def close(self) -> None:
        """Remove all hooks. The optimizer's state dicts do not have the average any more."""
        self.is_closed = True
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    # -------------------------------------------------------------------------------- state dicts

    def insert(self, optimizer: Optimizer, state_dict: StateDict, progress: Progress) -> StateDict:
        """Return an optimizer's state dict with its part of the average.

        Args:
            optimizer: The optimizer.
            state_dict: Its state dict. It does not change.
            progress: The progress. The state dict gets a copy, which later steps do not change.
        """
        params = params_of(optimizer)
        averaged = [p for p in params if self.slots(p)]
        # There may be progress without buffers: begin() was called, or a trigger has a state.
        if not averaged and (progress.phase != "waiting" or progress.memory):
            averaged = [p for p in params if p.requires_grad]
        shown = {p for p in params if self.progress_key in self.table.get(p, ())}
        carriers = [p for p in params if p in shown or p in set(averaged)]
        if not carriers or self.is_closed:
            return state_dict
        packed = progress.pack(carriers[0].device)
        exported = packed, packed.tolist(), _torch.versions([packed])
        self._exported[position(self.optimizers, optimizer)] = exported
        states = dict(state_dict["state"])
        ids = [i for group in state_dict["param_groups"] for i in group["params"]]
        chosen = set(carriers)
        for p, i in zip(params, ids):
            if p in chosen:
                slots = self.slots(p)
                states[i] = {**states.get(i, {}), **slots, self.progress_key: packed}
                # With samples, the progress without buffers would mean that they are missing.
                if progress.count and averaged and not slots:
                    del states[i][self.progress_key]
        return {**state_dict, "state": states}

    def extract(
        self, optimizer: Optimizer, state_dict: StateDict, others: Sequence[Store]
    ) -> tuple[StateDict, Saved]:
        """Separate the average from an optimizer's state dict.

        ``Optimizer.load_state_dict`` casts state to the parameter's dtype and device. A float32
        average of bfloat16 weights would be rounded, and one on the host would move to the
        accelerator and back.

        Args:
            optimizer: The optimizer.
            state_dict: Its state dict. It does not change.
            others: The stores of the optimizer's other averages, which keep their entries.

        Returns:
            The state dict without the average, and the average.
        """

        def is_nobodys(key: object) -> bool:
            return bool(_ANY_AVERAGE.fullmatch(str(key))) and not any(
                store.owns(key) for store in (self, *others)
            )

        params = params_of(optimizer)
        ids = [i for group in state_dict["param_groups"] for i in group["params"]]
        states: dict[Any, Any] = {}
        saved = Saved(None, {}, [])
        param_of = dict(zip(ids, params))
        for i, state in state_dict["state"].items():
            if not isinstance(state, dict):
                states[i] = state
                continue
            dropped = {key for key in state if is_nobodys(key)}
            saved = saved._replace(others=saved.others | dropped)
            rest = {
                key: value
                for key, value in state.items()
                if not self.owns(key) and key not in dropped
            }
            if rest or not state:
                states[i] = rest
            progress = state.get(self.progress_key)
            if progress is not None and saved.progress is None:
                saved = saved._replace(progress=progress)
            slots = {k: v for k, v in state.items() if self.owns(k) and k != self.progress_key}
            if slots and i not in param_of:
                raise ValueError(
                    f"The saved average has a parameter {i!r}, which the optimizer does not have."
                )
            if slots:
                saved.slots[param_of[i]] = slots
            elif i in param_of and (progress is not None or not state):
                saved.bare.append(param_of[i])
        return {**state_dict, "state": states}, saved

    def restored_in_place(self, optimizer: Optimizer) -> Tensor | None:
        """Return the progress that a checkpoint has written into the last state dict, if any.

        A flattened distributed checkpoint restores the tensors of a state dict in place, and then
        passes on only those entries that ``optimizer.state`` has. The next load needs another state
        dict.

        Args:
            optimizer: The optimizer of the state dict.
        """
        exported = self._exported.pop(position(self.optimizers, optimizer), None)
        if exported is None:
            return None
        packed, numbers, version = exported
        # A checkpoint of the same step has the same numbers.
        is_written = version is not None and _torch.versions([packed]) != version
        return packed if is_written or not _same(packed.tolist(), numbers) else None


_ENTRY = r"(_\d+|_progress|_iterate)?"
_ANY_AVERAGE = re.compile(rf"(average|block_mean)\d*{_ENTRY}")


class InOptimizer(Store):
    """Buffers in the optimizer's own state, for optimizers that allow for them, such as Gadam."""

    _published: Tensor | None = None
    _entries = -1  # the number of entries of the state when the progress was last published

    @property
    def table(self) -> MutableMapping[Tensor, Any]:
        """The state of the parameters, which holds the buffers by name."""
        return self._own if self.is_closed else self.optimizers[0].state

    def close(self) -> None:
        """Take the buffers out of the optimizer's state: another average may use its names."""
        if self.is_closed:
            return
        self._own: dict[Tensor, Any] = _taken_out(self.optimizers[0], self)
        super().close()

    def publish(self, progress: Tensor, create: bool = False) -> None:
        """Show the progress in the state of every parameter that has one.

        A flattened distributed checkpoint restores only the entries that the state has.

        Args:
            progress: The packed progress.
            create: Show it in trainable parameters that have no state yet, too.
        """
        if self.is_closed:
            return
        self._published = progress
        table = self.table
        for p in params_of(self.optimizers[0]):
            if table.get(p) or (create and p.requires_grad):
                table.setdefault(p, {})[self.progress_key] = progress
        self._entries = len(table)

    def is_published(self) -> bool:
        """Return True if all entries of the state show the progress."""
        return len(self.table) == self._entries

    def was_cleared(self) -> bool:
        """Return True if someone has emptied ``optimizer.state``, and the buffers were there."""
        return self._entries > 0 and not self.is_closed and not self.optimizers[0].state

    def arrived(self) -> Saved | None:
        """Return state that was written to ``optimizer.state`` directly, or None."""
        if self.is_closed:
            return None
        optimizer = self.optimizers[0]
        found = _find_progress(optimizer, self.progress_key)
        if found is None or found is self._published or self._has_moved(found):
            return None
        params = params_of(optimizer)
        return Saved(found, {p: slots for p in params if (slots := self.slots(p))}, [])

    def _has_moved(self, found: Tensor) -> bool:
        """Return True if the state was copied, for example to another device, and not loaded.

        The numbers in checkpoints are not live ones.
        """
        if self._published is None or not is_live(found):
            return False
        if not _same(found.tolist(), self._published.tolist()):
            return False
        self._published = found
        return True


class BesideOptimizer(Store):
    """Buffers in a table of their own, for any optimizer.

    Optimizers initialize a parameter's state only if it is empty, so the buffers must not be there.
    Hooks add them to the optimizer's state dict, and take them out again before it is loaded.

    Args:
        optimizers: The optimizers of the averaged parameters.
        prefix: The name of the average in the parameters' state dicts.
        progress: A function that returns the current progress.
        load: A function that takes a saved average and returns one that installs it, or raises
            before anything changes.
        others: A function that returns the stores of an optimizer's other averages.
    """

    def __init__(
        self,
        optimizers: Sequence[Optimizer],
        prefix: str,
        progress: Callable[[], Progress],
        load: Callable[[Optimizer, StateDict, Saved], Callable[[], None]],
        others: Callable[[Optimizer], Sequence[Store]],
    ) -> None:
        super().__init__(optimizers, prefix)
        self._table: dict[Tensor, Slots] = {}
        self._install: dict[int, Callable[[], None]] = {}
        self._lent: list[Optimizer] = []

        def save(optimizer: Optimizer, state_dict: StateDict) -> StateDict:
            return self.insert(optimizer, state_dict, progress())

        def take(optimizer: Optimizer, state_dict: StateDict) -> StateDict:
            rest, saved = self.extract(optimizer, state_dict, others(optimizer))
            restore = load(optimizer, rest, saved)

            def install_saved() -> None:
                restore()
                self._lend(optimizer, saved)

            self._install[id(optimizer)] = install_saved
            return rest

        def install(optimizer: Optimizer) -> None:
            self._install.pop(id(optimizer))()

        for optimizer in self.optimizers:
            self._handles += [
                optimizer.register_state_dict_post_hook(save),
                optimizer.register_load_state_dict_pre_hook(take),
                optimizer.register_load_state_dict_post_hook(install, prepend=True),
            ]

    @property
    def table(self) -> MutableMapping[Tensor, Any]:
        """The buffers of the parameters by name."""
        return self._table

    def publish(self, progress: Tensor, create: bool = False) -> None:
        """Do nothing: the progress appears only in state dicts.

        Args:
            progress: The packed progress.
            create: Show it in parameters that have no state yet, too.
        """

    def _lend(self, optimizer: Optimizer, saved: Saved) -> None:
        """Show what was loaded in ``optimizer.state``, until someone reads the average.

        The optimizers of pytorch_optimizer look up each entry of the state dict there once more.
        """
        if type(optimizer).load_state_dict is Optimizer.load_state_dict or saved.progress is None:
            return
        for p in (*saved.slots, *saved.bare):
            entries = {**saved.slots.get(p, {}), self.progress_key: saved.progress}
            optimizer.state[p] = {**entries, **optimizer.state.get(p, {})}
        self._lent.append(optimizer)

    def arrived(self) -> Saved | None:
        """Return state that was written to ``optimizer.state`` directly, and remove it there."""
        while self._lent:
            _taken_out(self._lent.pop(), self)
        result: Saved | None = None
        for optimizer in () if self.is_closed else self.optimizers:
            found = _find_progress(optimizer, self.progress_key)
            if found is None:
                continue
            result = result if result is not None else Saved(found, {}, [])
            result.slots.update(_taken_out(optimizer, self))
        return result


def _taken_out(optimizer: Optimizer, store: Store) -> dict[Tensor, Slots]:
    """Remove the entries of an average from an optimizer's state, and return its buffers."""
    found = {}
    for p in params_of(optimizer):
        state = optimizer.state.get(p)
        if not isinstance(state, dict):
            continue
        slots = {key: state.pop(key) for key in list(state) if store.owns(key)}
        slots.pop(store.progress_key, None)
        if slots:
            found[p] = slots
        if not state:
            del optimizer.state[p]
    return found


def _same(numbers: Sequence[float], others: Sequence[float]) -> bool:
    """Return True if the numbers are equal. A trigger may have seen NaN."""
    return len(numbers) == len(others) and all(
        a == b or (math.isnan(a) and math.isnan(b)) for a, b in zip(numbers, others)
    )


def _find_progress(optimizer: Optimizer, key: str) -> Tensor | None:
    """Return the progress in the state of the first parameter that has been trained, or None.

    A parameter that was unfrozen since has no state yet. One that was frozen may have its own.
    """
    state = optimizer.state
    if not state:
        return None
    for group in optimizer.param_groups:
        for p in group["params"]:
            entry = state.get(p)
            if not entry or not isinstance(entry, dict):
                continue
            found = entry.get(key)
            if isinstance(found, Tensor):
                return found
            if p.requires_grad:
                return None
    return None


def calls_state_dict_hooks(optimizer: Optimizer) -> bool:
    """Return False if an optimizer has a ``state_dict()`` of its own without torch's hooks.

    Args:
        optimizer: The optimizer.
    """
    if type(optimizer).state_dict is Optimizer.state_dict:
        return True
    called = []
    handle = optimizer.register_state_dict_pre_hook(lambda _: called.append(True))
    try:
        optimizer.state_dict()
    except Exception:
        return True  # it needs something else first: nothing is known
    finally:
        handle.remove()
    return bool(called)


def params_of(*optimizers: Optimizer) -> list[Tensor]:
    """Return all parameters of some optimizers, in order.

    Args:
        optimizers: The optimizers.
    """
    return [
        p for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]
    ]
