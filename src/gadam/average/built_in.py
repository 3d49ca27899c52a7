"""The average that an optimizer stores in its own state."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from operator import is_
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from gadam import _torch
from gadam._dtensor import all_reduce_min, local
from gadam.average.iterate import IterateAverage, is_slot
from gadam.average.progress import Progress

__all__ = ["PROGRESS", "BuiltInAverage"]

PROGRESS = "average_progress"  # the key in the first parameter group


class BuiltInAverage(IterateAverage):
    """The average of an optimizer that stores it in its own state: ``Gadam.average``.

    The buffers are in ``optimizer.state`` and the progress is in the first of
    ``optimizer.param_groups``. So both are part of the optimizer's ``state_dict``, in distributed
    checkpoints too.

    Attributes:
        DEFER_AFTER: The number of samples in a row that nobody reads before sampling is deferred.
    """

    DEFER_AFTER = 8

    def _open_store(self) -> None:
        self._pending = False  # a sample is deferred
        self._folding: list[Tensor] | None = None  # parameters that the current step has folded in
        self._versions: list[int] | None = None  # of the parameters, as the average last saw them
        self._unread = 0
        self._may_defer = True
        initial = self._initial_progress()
        self._seen = (initial, initial.pack())
        self.optimizer.param_groups[0][PROGRESS] = self._seen[1]

    # The compiled kernel makes one pass over memory, and knows only at its end if the weights are
    # finite. So while nobody reads the average, a sample is deferred: the next step folds it in
    # during its own pass, which reads those weights anyway. Reading the average folds it in at
    # once. If weights change between steps, sampling is not deferred anymore.

    def _changed(self, by: int) -> bool:
        """Return True unless each parameter was written ``by`` times since the last note."""
        versions = _versions(self._averaged())
        if versions is None or self._versions is None:
            return True
        return versions != [version + by for version in self._versions]

    def _note_versions(self) -> None:
        self._versions = _versions(self._averaged())

    def _take_due_sample(self) -> None:
        params = self._averaged()
        finite: bool | None = getattr(self.optimizer, "_finite", None)
        # The kernel's verdict counts if it saw all parameters, and nothing wrote to them since.
        complete = not any(p.grad is None for p in params) and not self._changed(by=1)
        verdict = None if finite is None or not complete else finite
        agreed = all_reduce_min({None: 0, False: 1, True: 2}[verdict], params)
        if agreed == 0:
            self._sample()
            return
        self._unread += 1
        if agreed == 1:
            self._progress = replace(self._progress, skipped=self._progress.skipped + 1)
        elif (
            self._may_defer
            and self._unread > self.DEFER_AFTER
            and self.averaging.weighting.copies == 1
        ):
            self._pending = True
            self._note_versions()
        else:
            self._sample(known_finite=True)

    @_torch.disable_dynamo
    def _before_step(self, *arguments: Any) -> None:
        super()._before_step(*arguments)
        if self._folding:  # the last step raised midway: fold in the parameters it did not reach
            done = set(self._folding)
            weight = self.averaging.weighting.weight(self._progress.count + 1)
            for p in self._averaged():
                if p not in done:
                    average = local(self._state[p]["average"])
                    average.lerp_(local(p).detach().to(average.device, average.dtype), weight)
            self._progress = replace(self._progress, count=self._progress.count + 1)
            self._pending = False
        if self._pending and self._changed(by=0):
            self._may_defer = False
            self.flush()
        self._folding = [] if self._pending else None
        self._note_versions()
        self.optimizer._finite = None  # type: ignore[attr-defined]

    def fold_targets(self, params: list[Tensor]) -> tuple[list[Tensor] | None, float]:
        """Return where the current step has to fold these parameters in.

        Args:
            params: The parameters of a group, as they are before the step.

        Returns:
            Their averages, or None if no sample is deferred, and the weight of the sample.
        """
        if self._folding is None:
            return None, 0.0
        if not self._folding:  # at the first group, when all gradients exist
            with_gradient = [p for p in self._params() if p.grad is not None]
            averaged = self._averaged()  # in the same order
            if len(with_gradient) != len(averaged) or not all(map(is_, with_gradient, averaged)):
                # the step will not reach all parameters
                self._folding = None
                self.flush()
                return None, 0.0
        self._folding += params
        weight = self.averaging.weighting.weight(self._progress.count + 1)
        return [self._state[p]["average"] for p in params], weight

    @_torch.disable_dynamo
    def _after_step(self, *arguments: Any) -> None:
        found_inf = getattr(self.optimizer, "found_inf", None)
        if self._folding and not (found_inf is not None and bool(found_inf)):
            self._progress = replace(self._progress, count=self._progress.count + 1)
            self._pending = False
        self._folding = None
        super()._after_step(*arguments)

    @torch.no_grad()
    def flush(self) -> None:
        """Take the deferred sample, if there is one. Every read of the average calls this."""
        self._unread = 0
        if self._pending:
            self._pending = False
            self._sample()

    def _install(self, *arguments: Any) -> None:
        self._pending, self._folding = False, None
        super()._install(*arguments)

    def reopen_store(self) -> None:
        """Reset the average if the optimizer's groups were replaced by another optimizer's."""
        if PROGRESS not in self.optimizer.param_groups[0]:
            self._open_store()

    # The progress is read several times per step: unpack it only if it has been replaced.

    @property
    def _progress(self) -> Progress:
        packed = self.optimizer.param_groups[0][PROGRESS]
        if packed is not self._seen[1]:
            self._seen = (Progress.unpack(packed), packed)
        return self._seen[0]

    @_progress.setter
    def _progress(self, progress: Progress) -> None:
        # New tensors, not modified ones: state dicts from before refer to the old ones.
        self._seen = (progress, progress.pack(*self._seen))
        self.optimizer.param_groups[0][PROGRESS] = self._seen[1]

    def __reduce__(self) -> Any:  # a copy belongs to the copied optimizer
        return getattr, (self.optimizer, "average")

    @property
    def _state(self) -> defaultdict[Tensor, dict[str, Any]]:
        return self.optimizer.state

    def take_from(self, state_dict: dict[str, Any]) -> tuple[dict[str, Any], Callable[[], None]]:
        """Take the average out of a state dict before ``Optimizer.load_state_dict`` sees it.

        That method casts state to the parameter's dtype and device. A float32 average of bfloat16
        weights would be rounded, and one on the host would move to the accelerator and back.

        Args:
            state_dict: The optimizer's state dict.

        Returns:
            The state dict without the average's buffers, and a function that restores them after
            the rest is loaded.
        """
        groups, states = state_dict["param_groups"], state_dict["state"]
        packed = groups[0].get(PROGRESS) if groups else None
        progress = self._match_trigger(Progress.unpack(packed) if packed else Progress())
        ids = [i for group in groups for i in group["params"]]
        saved = {
            p: {name: value for name, value in states.get(i, {}).items() if is_slot(name)}
            for p, i in zip(self._params(), ids)
        }
        # If the parameters do not match, torch's own check has the better error message.
        matches = len(ids) == len(self._params())
        prepared = self._prepare(progress, saved) if matches else {}

        def restore() -> None:
            self._install(progress, prepared, any(saved.values()))

        rest = {
            i: {name: value for name, value in state.items() if not is_slot(name)}
            if isinstance(state, dict)
            else state
            for i, state in states.items()
        }
        return {**state_dict, "state": rest}, restore


def _versions(params: list[Tensor]) -> list[int] | None:
    """Return how often each parameter's memory was written, as far as autograd knows."""
    plain = set(map(type, params)) <= {Parameter}
    return _torch.versions(params if plain else list(map(local, params)))
