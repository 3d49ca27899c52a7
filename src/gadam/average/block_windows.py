"""Averages over windows of blocks: what :class:`gadam.BlockAverages` can read."""

from __future__ import annotations

import os
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from numbers import Real
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from gadam._dtensor import all_reduce_min, is_dtensor, local
from gadam.average.attached import applied_average
from gadam.average.block_contents import BlockError, Contents, combined, real
from gadam.average.block_files import Block, BlockFolder, Manifest
from gadam.average.block_weights import block_weights, misplaced_weight
from gadam.average.loading import Loader
from gadam.average.plan import Mean, Weighting
from gadam.average.state import State
from gadam.average.swap import applied_weights, copied_state_dict

if TYPE_CHECKING:
    from gadam.average.batchnorm import BatchNorm

__all__ = ["BlockWindows"]


class BlockWindows(ABC):
    """The mean over any window of blocks, and other weightings of it.

    Attributes:
        optimizers: The optimizers of the parameters.
        every: The number of steps per block.
        stride: The number of steps per sample.
    """

    optimizers: list[Optimizer]
    every: int
    stride: int
    _path: Path
    _files: BlockFolder
    _manifest: Manifest
    _state: State
    _loader: Loader
    _start: int  # where the current block begins
    _initial: dict[Tensor, Tensor]  # values of parameters that joined in the current block
    _raw: dict[Tensor, Tensor]  # raw parameters and buffers while applied

    @abstractmethod
    def _read(self) -> Manifest:
        """Return the manifest of all finished blocks, whose files are on disk."""

    @property
    def boundaries(self) -> list[int]:
        """The steps at which a window may begin or end. It is empty before the first block ends."""
        return self._read().boundaries

    @property
    def skipped(self) -> int:
        """The number of iterates that were due but not finite. They are in no mean."""
        return self._loader.progress.skipped + sum(block.skipped for block in self._read().blocks)

    def _window(self, start: int | None, stop: int | None) -> list[Block]:
        """Return the blocks of a window."""
        manifest = self._read()
        boundaries = manifest.boundaries
        self._agree_on(boundaries)
        if not boundaries:
            raise BlockError(
                f"There is no finished block yet. The first one ends at step "
                f"{(self._start // self.every + 1) * self.every}."
            )
        start = boundaries[0] if start is None else start
        stop = boundaries[-1] if stop is None else stop
        for name, step in (("start", start), ("stop", stop)):
            if isinstance(step, bool) or not isinstance(step, (Real, Tensor)):
                raise TypeError(f"Invalid {name}: {step!r}. {name} must be the number of a step.")
            if step not in boundaries:
                near = sorted(sorted(boundaries, key=lambda b: abs(b - step))[:2])
                current = boundaries[-1] < step <= self._loader.progress.steps
                raise BlockError(
                    f"Step {step} is not a boundary of blocks. The nearest ones are "
                    f"{' and '.join(map(str, near))}."
                    + (" Call finish() to end the current block now." if current else "")
                )
        if start >= stop:
            raise BlockError(f"The window is empty: it starts at step {start} and stops at {stop}.")
        window = [block for block in manifest.blocks if start <= block.start < stop]
        if not sum(block.count for block in window):
            raise BlockError(f"No iterate of the steps {start + 1}–{stop} was finite.")
        return window

    def _agree_on(self, boundaries: list[int]) -> None:
        """Raise an error in all processes if they have different blocks of a sharded model."""
        number = zlib.crc32(repr(boundaries).encode()) % 2**24  # exact in float32
        smallest, largest = (
            sign * all_reduce_min(sign * number, self._state.sharded) for sign in (1, -1)
        )
        if smallest != largest:
            raise BlockError(
                f"The processes have different blocks in {self._path}. Resume the run from its "
                "last checkpoint."
            )

    def _values(
        self,
        start: int | None,
        stop: int | None,
        weighting: Weighting | None,
        wide: bool = True,
    ) -> dict[Tensor, Callable[[], Tensor]]:
        """Return functions that return the values of the parameters, one at a time."""
        window = self._window(start, stop)
        shares = block_weights([block.count for block in window], _checked(weighting))
        contents = [self._files.open(block) for block in window]
        params = {p: i for i, p in enumerate(self._state.params())}
        trained = {params[p] for p in self._state.averaged()}
        later: list[Contents] = []  # where parameters that joined after the window have a value
        if any(trained - set(found.indices) for found in contents):
            after = [b for b in self._manifest.blocks if b.start >= window[-1].stop]
            later = [self._files.open(block) for block in after]

        def value(index: int, p: Tensor) -> Tensor:
            joined = (found.initial(index) for found in later)
            before = next((v for v in joined if v is not None), None)
            if before is None and p in self._initial:
                before = real(self._initial[p]).cpu()
            mean = combined(contents, shares, index, before)
            if mean is None:  # not trained yet
                return local(p).detach()
            mean = torch.view_as_complex(mean) if p.is_complex() else mean
            return mean if wide else mean.to(self._state.averaging.dtype_for(p))

        return {p: partial(value, params[p], p) for p in self._state.averaged()}

    def model_state_dict(
        self,
        model: nn.Module,
        start: int | None = None,
        stop: int | None = None,
        dtype: torch.dtype | None = None,
        *,
        weighting: Weighting | None = None,
        full: bool = False,
    ) -> dict[str, Any]:
        """Return a copy of the model's state dict with the mean over a window of iterates.

        These are the iterates after steps ``start + 1`` … ``stop``. The model does not change, and
        its BatchNorm statistics are those of the raw weights.

        Args:
            model: The model that holds the parameters.
            start: A boundary. None means the first one.
            stop: A boundary. None means the last one. The current block does not count until it is
                finished; see :meth:`finish`.
            dtype: Cast all floating-point tensors to this type, as in
                :meth:`gadam.IterateAverage.model_state_dict`.
            weighting: Weight the iterates of the window in this way. All iterates of a block get
                the mean of their weights; :meth:`weighting_error` says how much that changes.
            full: For a sharded model, gather every tensor, as in
                :meth:`gadam.IterateAverage.model_state_dict`.

        Raises:
            gadam.average.BlockError: If a step is not a boundary, or a file is damaged.
        """
        from gadam.average.export import exported

        values = self._values(start, stop, weighting, wide=dtype == torch.float64)
        return exported(model, values, dtype, full)

    @contextmanager
    def applied(
        self,
        model: nn.Module | None = None,
        start: int | None = None,
        stop: int | None = None,
        batchnorm: BatchNorm = None,
        *,
        weighting: Weighting | None = None,
    ) -> Iterator[None]:
        """Swap the mean over a window in for the block, and restore the raw weights bit for bit.

        The rules are those of :meth:`gadam.IterateAverage.applied`.

        Args:
            model: The model that holds the parameters.
            start: A boundary, as in :meth:`model_state_dict`.
            stop: A boundary, as in :meth:`model_state_dict`.
            batchnorm: Data for the BatchNorm statistics, as in
                :meth:`gadam.IterateAverage.applied`.
            weighting: The weights of the iterates, as in :meth:`model_state_dict`.

        Raises:
            gadam.average.BlockError: If a step is not a boundary, or a file is damaged.
        """
        values = self._values(start, stop, weighting)
        if model is not None and batchnorm is None and applied_average(self.optimizers) is None:
            from gadam.average.batchnorm import STALE, has_statistics_in_use  # optional

            if STALE not in self._state.warned and has_statistics_in_use(model):
                self._state.warn_once(STALE, 4)
        params = list(values)
        with applied_weights(
            self, self.optimizers, model, params, lambda p: values[p](), batchnorm
        ):
            yield

    def save_model(
        self,
        model: nn.Module,
        path: str | os.PathLike[str],
        start: int | None = None,
        stop: int | None = None,
        dtype: torch.dtype | None = None,
        batchnorm: BatchNorm = None,
        *,
        weighting: Weighting | None = None,
    ) -> None:
        """Write the mean over a window to a safetensors file that says which weights it holds.

        As :meth:`gadam.IterateAverage.save_model`, :func:`gadam.average.read_provenance` returns
        that.

        Args:
            model: The model that holds the parameters. It does not change.
            path: The file to write.
            start: A boundary, as in :meth:`model_state_dict`.
            stop: A boundary, as in :meth:`model_state_dict`.
            dtype: The type of the tensors, as in :meth:`model_state_dict`.
            batchnorm: Data for the BatchNorm statistics, as in :meth:`applied`.
            weighting: The weights of the iterates, as in :meth:`model_state_dict`.

        Raises:
            FileExistsError: If the file exists. It is not overwritten.
        """
        from gadam.average import export

        window = self._window(start, stop)
        values = self._values(start, stop, weighting, wide=dtype == torch.float64)
        if not all_reduce_min(not os.path.lexists(path), model.parameters()):
            raise export.overwrite_error(path)
        refresh = batchnorm is not None and batchnorm is not False
        swap = self.applied(model, start, stop, batchnorm, weighting=weighting)
        with swap if refresh else nullcontext():
            tensors = export.exported(model, values, dtype, True, torch.device("cpu"))
        provenance = export.Provenance(
            point="average",
            samples=sum(block.count for block in window),
            skipped=sum(block.skipped for block in window),
            first_step=(window[0].start // self.stride + 1) * self.stride,
            last_step=window[-1].stop // self.stride * self.stride,
            step=self._loader.progress.steps,
            weighting=repr(weighting or Mean()),
            plan=repr(self),
            gadam_version=export.gadam_version(),
            torch_version=torch.__version__,
        )
        if tensors or not any(is_dtensor(p) for p in model.parameters()):
            export.write_file(path, export.bare_names(model, tensors), provenance)

    def weighting_error(
        self, weighting: Weighting, start: int | None = None, stop: int | None = None
    ) -> float:
        r"""Return how much of a weighting's weight is on the wrong iterates of the right blocks.

        Blocks hold plain means, so all iterates of a block get the mean :math:`\bar w_b` of their
        weights :math:`w_i`. The result is

        .. math::
            \delta = \tfrac12 \sum_b \sum_{i \in b} |w_i - \bar w_b|,

        between 0 and 1. The composed average differs from the exact one by at most :math:`\delta`
        times the largest distance between two iterates of one block. It is 0 for the plain mean.

        Args:
            weighting: The weighting.
            start: A boundary, as in :meth:`model_state_dict`.
            stop: A boundary, as in :meth:`model_state_dict`.
        """
        counts = [block.count for block in self._window(start, stop)]
        return misplaced_weight(counts, _checked(weighting))

    def raw_state_dict(self, model: nn.Module) -> dict[str, Any]:
        """Return a copy of the model's state dict with the raw weights, even in :meth:`applied`.

        Args:
            model: The model that holds the parameters.
        """
        applied = applied_average(self.optimizers)
        raw = applied._raw if applied is not None else {}
        return copied_state_dict(model.state_dict(keep_vars=True), raw)


def _checked(weighting: Weighting | None) -> Weighting:
    """Return a weighting, which is the plain mean by default."""
    if weighting is not None and not isinstance(weighting, Weighting):
        raise TypeError(
            f"Invalid weighting: {weighting!r}. weighting must be Mean(), EMA(), PowerEMA(), "
            "LinearDecay() or Window()."
        )
    return weighting or Mean()
