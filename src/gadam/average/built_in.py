"""The average that an optimiser carries in its own state."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from operator import attrgetter, is_
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from gadam._dtensor import local, all_reduce_min
from gadam.average.iterate import IterateAverage, is_slot
from gadam.average.progress import Progress

__all__ = ["PROGRESS", "BuiltInAverage"]

PROGRESS = "average_progress"  # the key in the first parameter group


class BuiltInAverage(IterateAverage):
    """The average of an optimiser that keeps it in its own state: ``Gadam.average``.

    Buffers live in ``optimizer.state``, progress in the first of ``optimizer.param_groups``: so both
    travel in the optimiser's ``state_dict``, through distributed checkpoints too.
    """

    HOLD_BACK_AFTER = 8  # samples that nobody has looked at

    def _open_store(self) -> None:
        self._pending = False  # a sample is held back
        self._folding: list[Tensor] | None = None  # parameters taken in by the step under way
        self._versions: list[int] = []  # of the parameters, as the average last saw them
        self._unseen = 0
        self._may_hold_back = True
        blank = self._initial_progress()
        self._seen = (blank, blank.pack())
        self.optimizer.param_groups[0][PROGRESS] = self._seen[1]

    # A step of the compiled kernel is one pass over memory, and says only at its end whether the
    # weights are finite. So in a run of steps in which nobody looks at the average a sample is held
    # back, and taken in by the next step's pass, which reads those weights anyway; or as soon as
    # anyone looks. Where it shows that somebody changes the weights between steps, no sample is held
    # back any more.

    def _changed(self, by: int) -> bool:
        """Whether a parameter was written to other than ``by`` times since versions were noted."""
        return _versions(self._averaged()) != [version + by for version in self._versions]

    def _note_versions(self) -> None:
        self._versions = _versions(self._averaged())

    def _take_due_sample(self) -> None:
        params = self._averaged()
        finite: bool | None = getattr(self.optimizer, "_finite", None)
        # The kernel's word counts where it looked at all of the parameters, and last.
        looked = not any(p.grad is None for p in params) and not self._changed(by=1)
        word = None if finite is None or not looked else finite
        agreed = all_reduce_min({None: 0, False: 1, True: 2}[word], params)
        if agreed == 0:
            self._sample()
            return
        self._unseen += 1
        if agreed == 1:
            self._progress = replace(self._progress, skipped=self._progress.skipped + 1)
        elif (
            self._may_hold_back
            and self._unseen > self.HOLD_BACK_AFTER
            and self.averaging.weighting.copies == 1
        ):
            self._pending = True
            self._note_versions()
        else:
            self._sample(known_finite=True)

    @torch._disable_dynamo
    def _before_step(self, *arguments: Any) -> None:
        super()._before_step(*arguments)
        if self._folding:  # the last step failed on its way: take in what it had not come to
            done = set(self._folding)
            weight = self.averaging.weighting.weight(self._progress.count + 1)
            for p in self._averaged():
                if p not in done:
                    average = local(self._state[p]["average"])
                    average.lerp_(local(p).detach().to(average.device, average.dtype), weight)
            self._progress = replace(self._progress, count=self._progress.count + 1)
            self._pending = False
        if self._pending and self._changed(by=0):
            self._may_hold_back = False
            self.flush()
        self._folding = [] if self._pending else None
        self._note_versions()
        self.optimizer._finite = None  # type: ignore[attr-defined]

    def to_fold(self, params: list[Tensor]) -> tuple[list[Tensor] | None, float]:
        """What the step under way has to take these parameters into, and with what weight."""
        if self._folding is None:
            return None, 0.0
        if not self._folding:  # before the first group, with all gradients there
            with_gradient = [p for p in self._params() if p.grad is not None]
            averaged = self._averaged()  # in the same order
            if len(with_gradient) != len(averaged) or not all(map(is_, with_gradient, averaged)):
                # the kernel will not walk through all
                self._folding = None
                self.flush()
                return None, 0.0
        self._folding += params
        weight = self.averaging.weighting.weight(self._progress.count + 1)
        return [self._state[p]["average"] for p in params], weight

    @torch._disable_dynamo
    def _after_step(self, *arguments: Any) -> None:
        found_inf = getattr(self.optimizer, "found_inf", None)
        if self._folding and not (found_inf is not None and bool(found_inf)):
            self._progress = replace(self._progress, count=self._progress.count + 1)
            self._pending = False
        self._folding = None
        super()._after_step(*arguments)

    @torch.no_grad()
    def flush(self) -> None:
        """Take in the sample that is held back: somebody looks."""
        self._unseen = 0
        if self._pending:
            self._pending = False
            self._sample()

    def _install(self, *arguments: Any) -> None:
        self._pending, self._folding = False, None
        super()._install(*arguments)

    def reopen_store(self) -> None:
        """After the optimiser's groups were replaced, perhaps by those of another optimiser."""
        if PROGRESS not in self.optimizer.param_groups[0]:
            self._open_store()

    # The numbers are wanted several times a step: unpack them only where they have been replaced.

    @property
    def _progress(self) -> Progress:
        packed = self.optimizer.param_groups[0][PROGRESS]
        if packed is not self._seen[1]:
            self._seen = (Progress.unpack(packed), packed)
        return self._seen[0]

    @_progress.setter
    def _progress(self, progress: Progress) -> None:
        # New tensors, not changed ones: state dicts handed out earlier refer to the old.
        self._seen = (progress, progress.pack(*self._seen))
        self.optimizer.param_groups[0][PROGRESS] = self._seen[1]

    def __reduce__(self) -> Any:  # a copy is the copied optimiser's own
        return getattr, (self.optimizer, "average")

    @property
    def _state(self) -> defaultdict[Tensor, dict[str, Any]]:
        return self.optimizer.state

    def take_from(self, state_dict: dict[str, Any]) -> tuple[dict[str, Any], Callable[[], None]]:
        """Lead the average around ``Optimizer.load_state_dict``.

        That casts state to the parameter's dtype and device: a float32 average of bfloat16 weights
        would come out rounded, and one kept on the host would visit the accelerator.

        Args:
            state_dict: of the optimiser

        Returns:
            the state dict without the average's buffers, and a function that restores them once the
            rest is loaded
        """
        groups, states = state_dict["param_groups"], state_dict["state"]
        packed = groups[0].get(PROGRESS) if groups else None
        progress = self._fit(Progress.unpack(packed) if packed else Progress())
        ids = [i for group in groups for i in group["params"]]
        saved = {
            p: {name: value for name, value in states.get(i, {}).items() if is_slot(name)}
            for p, i in zip(self._params(), ids)
        }
        # Where the parameters are other ones, torch's own check has better words.
        alike = len(ids) == len(self._params())
        prepared = self._prepare(progress, saved) if alike else {}

        def restore() -> None:
            self._install(progress, prepared, any(saved.values()))

        rest = {
            i: {name: value for name, value in state.items() if not is_slot(name)}
            if isinstance(state, dict)
            else state
            for i, state in states.items()
        }
        return {**state_dict, "state": rest}, restore


_version = attrgetter("_version")


def _versions(params: list[Tensor]) -> list[int]:
    """How often each parameter's memory has been written to, as far as autograd knows."""
    plain = set(map(type, params)) <= {Parameter}
    return list(map(_version, params if plain else map(local, params)))
