"""What an average holds: its buffers, its progress, and the plan that it carries out."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.optim import Optimizer

from gadam._dtensor import is_dtensor, local, new_like
from gadam.average.plan import Averaging, Trigger
from gadam.average.progress import Progress, Tracker
from gadam.average.store import InOptimizer, Store, params_of

if TYPE_CHECKING:
    from gadam.average.offload import OverlappedFold

__all__ = ["State"]


class State:
    """The buffers and the progress of an average.

    The sampler folds samples into them, the loader replaces them, and the average reads them.

    Args:
        optimizers: The optimizers of the averaged parameters.
        averaging: The plan.
        store: Where the buffers are.

    Attributes:
        optimizers: The optimizers of the averaged parameters.
        averaging: The plan.
        store: Where the buffers are.
        built_in: Whether they are in the optimizer's own state.
        slots: The names of a parameter's buffers.
        iterate: The name of the buffer for the iterate, if gradients are taken elsewhere.
        tracker: The progress.
        overlap: Folds samples in on the host while the device continues, if the plan says so.
        sharded: One averaged parameter per device mesh. Its processes agree on a sample.
        warned: The kinds of warnings that were shown.
        at_iterate: The parameters that hold the iterate during a step that interpolates.
        frozen: The parameters that needed no gradient before the last step.
    """

    def __init__(self, optimizers: list[Optimizer], averaging: Averaging, store: Store) -> None:
        self.optimizers, self.averaging, self.store = optimizers, averaging, store
        self.built_in = isinstance(store, InOptimizer)
        self.slots = store.slot_names(averaging.weighting.copies)
        self.iterate = store.iterate_key if averaging.interpolation else None
        self.tracker = Tracker(self.initial_progress)
        self.overlap: OverlappedFold | None = None
        if averaging.overlap:
            from gadam.average.offload import OverlappedFold  # optional

            self.overlap = OverlappedFold()
        self.sharded: list[Tensor] = []
        self.warned: set[str] = set()
        self.at_iterate: dict[Tensor, None] = {}
        self.frozen: list[Tensor] = []
        # Which parameters there were, who was trainable, and the size of the state.
        self._allocated: tuple[list[tuple[int, bool]], int] = ([], 0)
        self._with_buffers: list[Tensor] | None = None

    @property
    def initial_progress(self) -> Progress:
        """The progress before the first step."""
        trigger = self.averaging.start
        memory = trigger.initial_state if isinstance(trigger, Trigger) else ()
        return Progress(memory=memory, plan=self.averaging.fingerprint)

    def params(self) -> list[Tensor]:
        """Return all parameters of the optimizers, in order."""
        return params_of(*self.optimizers)

    def wait(self) -> None:
        """Wait until the last sample is in the average."""
        if self.overlap is not None:
            self.overlap.wait()

    def averaged(self) -> list[Tensor]:
        """Return the parameters that have buffers: all that have ever been trainable."""
        if self._with_buffers is None:
            table, first = self.store.table, self.slots[0]
            self._with_buffers = [p for p in self.params() if first in table.get(p, ())]
            # One parameter per device mesh: the processes of a mesh agree on a sample.
            self.sharded = list(
                {p.device_mesh: p for p in self._with_buffers if is_dtensor(p)}.values()  # type: ignore[attr-defined]
            )
        return self._with_buffers

    @torch.inference_mode(False)
    @torch.no_grad()
    def allocate(self) -> None:
        """Allocate buffers for the trainable parameters that have none."""
        params = self.params()
        trainable = [(id(p), p.requires_grad) for p in params]
        table = self.store.table
        if (trainable, len(table)) == self._allocated:
            return
        self.frozen = [p for p in params if not p.requires_grad]
        count = int(self.tracker.counters.get()[0])
        for p in params:
            if not p.requires_grad:
                continue
            slots = {}
            if self.iterate is not None and self.iterate not in table.get(p, ()):
                # Without a saved one, the weights are the iterate.
                slots[self.iterate] = new_like(p, p.dtype, p.device)
                local(slots[self.iterate]).copy_(local(p))
            for name in self.slots if self.slots[0] not in table.get(p, ()) else ():
                buffer = new_like(p, self.averaging.dtype_for(p), self.averaging.device_for(p))
                # The parameter was frozen, or in no group, while the samples so far were taken: it
                # was constant, so its mean is its value.
                if count:
                    local(buffer).copy_(local(p))
                slots[name] = buffer
            if slots:
                table.setdefault(p, {}).update(slots)
        self._allocated = (trainable, len(table))
        self._with_buffers = None

    def buffer(self, p: Tensor, name: str) -> Tensor:
        """Return this process's shard of one of a parameter's buffers.

        Args:
            p: The parameter.
            name: The name of the buffer.
        """
        buffer: Tensor = self.store.table[p][name]
        return local(buffer)

    def value(self, p: Tensor) -> Tensor:
        """Return this process's shard of a parameter's average, in the average's own type.

        Args:
            p: The parameter.
        """
        buffers = [self.buffer(p, name) for name in self.slots]
        if len(buffers) == 1:
            return buffers[0]
        self.wait()
        filled = buffers[: int(self.tracker.counters.get()[0])]
        return torch.stack(filled).mean(0)  # one parameter at a time

    def iterate_of(self, p: Tensor) -> Tensor | None:
        """Return this process's shard of a parameter's iterate, or None if the weights are it.

        Args:
            p: The parameter.
        """
        if self.iterate is None or self.iterate not in self.store.table.get(p, ()):
            return None
        return self.buffer(p, self.iterate) if self.tracker.counters.get()[0] else None

    def is_in_use(self) -> bool:
        """Return True if averaging has begun, or there are samples, as far as the host knows."""
        return self.tracker.clock.known[0] != 0 or self.tracker.counters.known[0] > 0

    def replace(
        self, progress: Progress, buffers: dict[Tensor, dict[str, Tensor]], params: list[Tensor]
    ) -> None:
        """Replace the progress, and the buffers of some parameters.

        Args:
            progress: The new progress.
            buffers: The new buffers by parameter and name.
            params: The parameters. Those without new buffers lose theirs.
        """
        self.wait()
        self.at_iterate = {}  # the weights may be loaded, too
        for p in params:
            self.store.replace(p, buffers.get(p, {}))
        self.tracker.progress = progress
        self._allocated = ([], 0)
        self._with_buffers = None

    def warn_once(self, message: str, stacklevel: int, kind: str | None = None) -> None:
        """Show a warning unless one of its kind was shown before.

        Args:
            message: The warning.
            stacklevel: The stack level of the code to blame; 2 is the caller.
            kind: The kind of the warning. None means that the message is its own kind.
        """
        kind = message if kind is None else kind
        if kind not in self.warned:
            self.warned.add(kind)
            warnings.warn(message, stacklevel=stacklevel)
