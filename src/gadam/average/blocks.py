"""Means of blocks of iterates on disk: the mean over any window of them, chosen after training."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from gadam._dtensor import all_reduce_min, is_dtensor, local, new_like
from gadam.average.block_files import (
    Block,
    BlockError,
    BlockFolder,
    Contents,
    Manifest,
    blocks_from,
    combined,
    pair_to_merge,
)
from gadam.average.block_weights import block_weights, misplaced_weight
from gadam.average.loading import Loader
from gadam.average.offload import record_events
from gadam.average.plan import Averaging, Mean, Weighting
from gadam.average.sampling import Sampler, applied_average, attached, free_prefix, is_dry_run
from gadam.average.state import State
from gadam.average.store import BesideOptimizer, Store, params_of
from gadam.average.swap import applied_weights, copied_state_dict
from gadam.average.wrappers import unwrapped

if TYPE_CHECKING:
    from gadam.average.batchnorm import BatchNorm

__all__ = ["BlockAverages"]

_CHECKPOINTS = 2  # how many of the last checkpoints a run can be resumed from, at least


class BlockAverages:
    r"""Keep the means of blocks of iterates on disk, to choose what to average after training.

    The mean over a window of blocks is the weighted mean of the blocks' means. So one training run
    has the averages for every start and every end at a block boundary, exactly.

    During training, this holds the running mean of the current block: all iterates, as ``step()``
    and its hooks leave them, or every ``stride``-th one. Steps count as in
    :class:`gadam.IterateAverage`: a step that GradScaler skips is not a step, and an iterate that
    is not finite does not enter. At every multiple of ``every`` steps, a thread writes the mean to
    a safetensors file, and the mean starts again in a second buffer. With the optimizers of this
    package, the kernel folds iterates in during its own pass, unless it does that for another
    average.

    **Boundaries.** If there are more than ``max_blocks``, neighboring blocks are merged, old ones
    first, so that boundaries stay geometrically spaced, counted from the end. The guarantee: with
    the first boundary :math:`T_0`, the last one :math:`T` and every step :math:`t` between them,
    there is a boundary :math:`b \le t` with

    .. math::
        T - b \;\le\; \left(\tfrac{T - T_0}{\text{every}} + 1\right)^{1/m} (T - t + \text{every}),
        \qquad m = \lfloor (\text{max\_blocks} + 1) / 2 \rfloor.

    The factor is 1.24 for 64 blocks and 1,000 blocks' worth of steps. So
    :math:`2 \ln(n + 1) / \ln c` blocks suffice for a factor :math:`c` after :math:`n` blocks' worth
    of steps.

    **Precision.** Blocks have the type of an :class:`gadam.IterateAverage`: float32 for float32 and
    half-precision weights. They are combined in float64. The result differs from the mean of the
    iterates in float64 by at most :math:`10^{-6}` of its norm, per tensor, for float32 weights and
    blocks of up to 1,000 samples.

    **Resuming.** The mean of the current block is part of the optimizer's ``state_dict()``. Save
    :meth:`state_dict` beside it, which is small, and load both. Blocks after the checkpoint are
    deleted, and written again with the same bits as in a run without interruption. That works for
    the last two checkpoints. For older ones, it works unless blocks were merged across them.

    **Several processes.** With sharded parameters (FSDP2), each process writes its own shards to a
    subfolder, and nothing is gathered. Read them with the same number of processes. With replicated
    parameters (DDP), the first process writes the blocks, and only it can read them.

    It needs the extra ``gadam[safetensors]``.

    Args:
        optimizer: The optimizer whose iterates to average, or a list of optimizers of one model, as
            in :class:`gadam.IterateAverage`.
        folder: Where to store the blocks. A folder belongs to one run.
        every: The number of steps per block.
        max_blocks: The number of blocks to keep, at least 2.
        stride: Sample every ``stride``-th step. It must divide ``every``.

    Raises:
        gadam.average.BlockError: If the folder belongs to another kind of run or is damaged.
        ImportError: If safetensors is not installed.

    Example:
        >>> import tempfile, torch, gadam
        >>> model = torch.nn.Linear(4, 1)
        >>> optimizer = gadam.Gadam(model.parameters())
        >>> folder = tempfile.TemporaryDirectory()
        >>> blocks = gadam.BlockAverages(optimizer, f"{folder.name}/blocks", every=10)
        >>> for _ in range(50):
        ...     optimizer.zero_grad()
        ...     model(torch.randn(8, 4)).square().mean().backward()
        ...     optimizer.step()
        >>> blocks.boundaries
        [0, 10, 20, 30, 40, 50]
        >>> with blocks.applied(model, start=20):
        ...     loss = model(torch.randn(8, 4)).square().mean()
        >>> tail = blocks.model_state_dict(model, start=30, stop=50)
        >>> folder.cleanup()
    """

    def __init__(
        self,
        optimizer: Optimizer | Sequence[Optimizer],
        folder: str | os.PathLike[str],
        every: int = 100,
        max_blocks: int = 64,
        stride: int = 1,
    ) -> None:
        for name, value, least in (
            ("every", every, 1),
            ("max_blocks", max_blocks, 2),
            ("stride", stride, 1),
        ):
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise ValueError(
                    f"Invalid {name}: {value!r}. {name} must be an integer of at least {least}."
                )
        if every % stride:
            raise ValueError(f"stride must divide every, got stride={stride} and every={every}.")
        several = list(optimizer) if isinstance(optimizer, (list, tuple)) else [optimizer]
        self.optimizers = [unwrapped(one) for one in several]
        if not self.optimizers:
            raise ValueError("BlockAverages needs at least one optimizer.")
        self.every, self.max_blocks, self.stride = every, max_blocks, stride
        self._raw: dict[Tensor, Tensor] = {}  # raw parameters and buffers while applied

        self._path = Path(folder)
        self._files = self._open(self._path)
        found = self._files.read() if self._files is not None else None
        self._manifest = found or Manifest(every, stride)
        if (self._manifest.every, self._manifest.stride) != (every, stride):
            raise BlockError(
                f"{folder} has blocks with every={self._manifest.every} and "
                f"stride={self._manifest.stride}, got every={every} and stride={stride}. Pass the "
                "same settings, or a new folder."
            )
        if found is not None:
            self._check_shapes()
        self._thread: ThreadPoolExecutor | None = None
        self._writing: Future[Manifest] | None = None
        self._spare: dict[Tensor, Tensor] = {}

        prefix = free_prefix(self.optimizers, "block_mean")
        store = BesideOptimizer(
            self.optimizers,
            prefix,
            lambda: self._loader.progress,
            lambda *saved: self._loader.prepare_to_load(*saved),
            self._other_stores,
        )
        self._state = State(self.optimizers, Averaging(start=stride, every=stride), store)
        self._loader = Loader(self._state)
        self._sampler = Sampler(self._state, self._loader)
        self._sampler.attach()
        self._sampler.on_step = self._after_step
        if self._loader.arrive() is None:
            self._loader.continue_from_the_optimizers_steps()
            self._state.allocate()
        self._trained = set(self._state.averaged())
        self._initial: dict[Tensor, Tensor] = {}  # values of parameters that joined in this block
        self._start = self._loader.progress.steps  # where the current block begins
        self._saved: _Saved | None = None  # what load_state_dict() has received
        self._is_current = False  # whether the blocks fit the optimizer's step
        self._is_committed = False  # whether the folder does, too
        self._handles = [
            handle
            for one in self.optimizers
            for handle in (
                one.register_step_pre_hook(self._before_step),
                one.register_state_dict_pre_hook(lambda _: self._keep_for_checkpoint()),
                one.register_load_state_dict_post_hook(lambda _: self._expire()),
            )
        ]

    def _open(self, path: Path) -> BlockFolder | None:
        """Return this process's folder, or None if another process writes the same weights."""
        if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
            return BlockFolder(path)
        rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
        if not any(map(is_dtensor, params_of(*self.optimizers))):
            return BlockFolder(path) if rank == 0 else None
        name = "shard-{:05d}-of-{:05d}"
        expected = {name.format(i, world) for i in range(world)}
        others = {shard.name for shard in path.glob("shard-*")} - expected
        if others:
            raise BlockError(
                f"{path} has shards of another number of processes ({min(others)}), but there are "
                f"{world}. Use as many processes, or pass a new folder."
            )
        return BlockFolder(path / name.format(rank, world))

    def _check_shapes(self) -> None:
        assert self._files is not None
        params = [local(p) for p in params_of(*self.optimizers)]
        for block in self._manifest.blocks[-1:]:
            contents = self._files.open(block)
            for index in contents.indices:
                mean = contents.mean(index)
                if mean is None or index >= len(params) or mean.shape == _real(params[index]).shape:
                    continue
                raise BlockError(
                    f"{self._path} has blocks of another model: parameter {index} has shape "
                    f"{tuple(mean.shape)} there. Pass a new folder."
                )

    def _other_stores(self, optimizer: Optimizer) -> list[Store]:
        samplers = attached(optimizer).samplers
        return [sampler.state.store for sampler in samplers if sampler is not self._sampler]

    def remove(self) -> None:
        """Detach from the optimizer, and wait until all blocks are on disk.

        The blocks can still be read.
        """
        self.flush()
        self._sampler.detach()
        self._state.store.close()
        for handle in self._handles:
            handle.remove()

    def __reduce__(self) -> Any:
        raise TypeError("BlockAverages cannot be copied or pickled: a folder belongs to one run.")

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}({str(self._path)!r}, every={self.every}, "
            f"max_blocks={self.max_blocks}, stride={self.stride})"
        )

    # ------------------------------------------------------------------------------------- training

    def _before_step(self, optimizer: Optimizer, *_: object) -> None:
        clock = self._state.tracker.clock
        if clock.on_host and clock.known[1] < self._start:
            self._expire()  # state was written to the optimizer directly
        if not self._is_committed and not is_dry_run(optimizer):
            self._resume()
            if self._files is not None:
                self._files.commit(self._manifest)
            self._is_committed = True
        trained = self._state.averaged()
        if len(trained) == len(self._trained):
            return
        began = self._writing or self._manifest.blocks or clock.get()[1] > self._start
        for p in trained:
            if began and p not in self._trained:
                value = local(p).detach().clone()
                self._initial[p] = value.to(self._state.averaging.dtype_for(p))
            self._trained.add(p)

    def _after_step(self) -> None:
        clock = self._state.tracker.clock
        end = (self._start // self.every + 1) * self.every
        # If only the device knows which steps counted, ask it no earlier than necessary.
        if clock.known[1] + clock.unread >= end and clock.get()[1] >= end:
            self._end_block()

    def _end_block(self) -> None:
        """Hand the mean of the current block to the writer, and start the next one."""
        progress = self._loader.progress
        block = Block(self._start, progress.steps, progress.count, progress.skipped)
        slot, params = self._state.slots[0], self._state.averaged()
        means = {p: self._state.store.table[p][slot] for p in params}
        if self._files is not None:
            self.flush()
            index = {p: i for i, p in enumerate(self._state.params())}
            contents = Contents.of(
                {index[p]: local(mean) for p, mean in means.items()} if block.count else {},
                {index[p]: value for p, value in self._initial.items()},
            )
            if self._thread is None:
                self._thread = ThreadPoolExecutor(1, thread_name_prefix="gadam-blocks")
            self._writing = self._thread.submit(
                self._write, self._manifest, block, contents, record_events(list(means.values()))
            )
            # The writer reads these means while the next block fills the spare ones.
            spare = {p: self._spare.get(p) for p in params}
            self._spare, means = (
                means,
                {
                    p: found if found is not None else new_like(p, mean.dtype, local(mean).device)
                    for (p, mean), found in zip(means.items(), spare.values())
                },
            )
        self._initial = {}
        self._start = progress.steps
        self._state.replace(
            replace(progress, count=0, skipped=0, first=0, last=0),
            {p: {slot: mean} for p, mean in means.items()},
            params,
        )

    def _write(
        self, manifest: Manifest, block: Block, contents: Contents, ready: list[Any]
    ) -> Manifest:
        """Write a block, merge older ones if there are too many, and return the new manifest."""
        assert self._files is not None
        for event in ready:
            event.synchronize()
        blocks = [*manifest.blocks, self._files.write(block, contents)]
        while len(blocks) > self.max_blocks:
            steps = [b.start for b in blocks] + [block.stop]
            first = pair_to_merge(steps, self.every)
            blocks[first : first + 2] = [self._files.merge(blocks[first], blocks[first + 1])]
        manifest = replace(manifest, blocks=tuple(blocks))
        self._files.commit(manifest)
        return manifest

    def finish(self) -> None:
        """End the current block at this step, and wait until all blocks are on disk.

        Call this at the end of training, so that the last steps are in a block even if their number
        is not a multiple of ``every``. It has no effect directly after the end of a block. Training
        may continue: the next block is shorter.
        """
        self._settle()
        if self._loader.progress.steps > self._start:
            self._end_block()
        self.flush()

    def flush(self) -> None:
        """Wait until all finished blocks are on disk.

        Raises:
            gadam.average.BlockError: If a block could not be written.
        """
        if self._writing is not None:
            self._manifest = self._writing.result()  # a failure is reported every time
            self._writing = None

    # ------------------------------------------------------------------------------------- resuming

    def state_dict(self) -> dict[str, Any]:
        """Return what to save beside the optimizer's state: which blocks there are.

        It holds numbers and text, and no weights, except the initial values of parameters that
        joined in the current block. The files that it names are kept until two later checkpoints
        were taken.
        """
        self._resume()
        self._keep_for_checkpoint()
        index = {p: i for i, p in enumerate(self._state.params())}
        return {
            "step": self._loader.progress.steps,
            "start": self._start,
            "blocks": [asdict(block) for block in self._manifest.blocks],
            "initial": {index[p]: value for p, value in self._initial.items()},
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Resume a run from a checkpoint. Load the optimizer's state, too, before or after this.

        Blocks after the checkpoint are deleted at the next step.

        Args:
            state_dict: The result of :meth:`state_dict`.

        Raises:
            gadam.average.BlockError: If the folder belongs to another run, or lacks a block of the
                checkpoint.
        """
        try:
            saved = _Saved(
                int(state_dict["step"]),
                int(state_dict["start"]),
                blocks_from(state_dict["blocks"]),
                {int(i): value for i, value in state_dict["initial"].items()},
            )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise BlockError(
                "This is not the state of block averages. Pass the result of state_dict() "
                f"({type(error).__name__}: {error})."
            ) from error
        self.flush()
        if self._files is not None:
            known = self._manifest.files
            if any(known.get(block.file, block) != block for block in saved.blocks):
                raise BlockError(
                    f"{self._path} does not belong to the run of this checkpoint: its blocks have "
                    "other hashes. Pass the folder of that run."
                )
            lost = [block for block in saved.blocks if block.file not in known]
            if lost:
                raise BlockError(
                    f"{self._path} no longer has the block of steps {lost[0].start}–{lost[0].stop} "
                    "of this checkpoint. Resume from a later checkpoint."
                )
        self._saved = saved
        self._expire()

    def _expire(self) -> None:
        """Note that the optimizer's state was replaced."""
        with suppress(BlockError):  # a block that could not be written may be written again
            self.flush()
        self._writing = None
        self._is_current = self._is_committed = False

    def _settle(self) -> None:
        """Make the blocks fit the optimizer's step, unless it has not done any."""
        if self._saved is not None or self._loader.progress.steps:
            self._resume()

    def _resume(self) -> None:
        """Find the blocks at the optimizer's step, if its state was replaced."""
        if self._is_current:
            return
        progress, manifest, saved = self._loader.progress, self._manifest, self._saved
        step = progress.steps
        if saved is not None and saved.step != step:
            raise BlockError(
                f"The blocks were saved at step {saved.step}, but the optimizer is at step {step}. "
                "Load the optimizer's state of the same checkpoint."
            )
        if saved is not None:
            blocks, start = saved.blocks, saved.start
        else:
            if manifest.blocks and not step:
                raise BlockError(
                    f"{self._path} already has blocks, up to step {manifest.blocks[-1].stop}. To "
                    "resume their run, load its checkpoint. Otherwise pass a new folder."
                )
            found = manifest.at(step)
            if found is None:
                raise BlockError(
                    f"{self._path} has merged blocks across step {step} since. Resume from a later "
                    "checkpoint, or pass a new folder."
                )
            blocks = found
            start = blocks[-1].stop if blocks else step // self.every * self.every
        samples = step // self.stride - start // self.stride
        if progress.count > samples or progress.count + progress.skipped < samples:
            if blocks or saved is not None:
                raise BlockError(
                    f"The optimizer's checkpoint has {progress.count} iterates of the steps "
                    f"{start + 1}–{step}. Load a checkpoint that was taken with these blocks, or "
                    "pass a new folder."
                )
            start = step  # attached in the middle of training
            self._state.tracker.progress = replace(progress, count=0, skipped=0, first=0, last=0)
        params = self._state.params()
        initial = saved.initial if saved is not None else {}
        self._initial = {
            params[i]: local(value).to(self._state.averaging.device_for(params[i]))
            for i, value in initial.items()
        }
        earlier = {s: b for s, b in manifest.checkpoints.items() if s < step}
        self._manifest = replace(manifest, blocks=blocks, checkpoints={**earlier, step: blocks})
        self._start, self._saved, self._is_current = start, None, True
        self._trained = set(self._state.averaged())

    def _keep_for_checkpoint(self) -> None:
        """Keep the files of the current blocks, because a checkpoint is taken."""
        self.flush()
        if self._is_current:
            step = self._loader.progress.steps
            self._manifest = self._manifest.with_checkpoint(step, _CHECKPOINTS)

    # -------------------------------------------------------------------------------------- windows

    @property
    def boundaries(self) -> list[int]:
        """The steps at which a window may begin or end. It is empty before the first block ends."""
        return self._read().boundaries

    @property
    def skipped(self) -> int:
        """The number of iterates that were due but not finite. They are in no mean."""
        return self._loader.progress.skipped + sum(block.skipped for block in self._read().blocks)

    def _read(self) -> Manifest:
        self.flush()
        self._settle()
        if self._files is None:
            raise BlockError("Only the first process has the blocks. Read them there.")
        return self._manifest

    def _window(self, start: int | None, stop: int | None) -> list[Block]:
        """Return the blocks of a window."""
        manifest = self._read()
        boundaries = manifest.boundaries
        if not boundaries:
            raise BlockError(
                f"There is no finished block yet. The first one ends at step "
                f"{(self._start // self.every + 1) * self.every}."
            )
        start = boundaries[0] if start is None else start
        stop = boundaries[-1] if stop is None else stop
        for step in (start, stop):
            if step not in boundaries:
                near = sorted(sorted(boundaries, key=lambda b: abs(b - step))[:2])
                raise BlockError(
                    f"Step {step} is not a boundary of blocks. The nearest ones are "
                    f"{' and '.join(map(str, near))}."
                )
        if start >= stop:
            raise BlockError(f"The window is empty: it starts at step {start} and stops at {stop}.")
        window = [block for block in manifest.blocks if start <= block.start < stop]
        if self._state.sharded:
            same = [all_reduce_min(sign * stop, self._state.sharded) for sign in (1, -1)]
            if same != [stop, -stop]:
                raise BlockError(
                    f"The processes have different last blocks in {self._path}. Pass stop=, or "
                    "resume the run from a checkpoint."
                )
        if not sum(block.count for block in window):
            raise BlockError(f"No iterate of the steps {start + 1}–{stop} was finite.")
        return window

    def _values(
        self,
        start: int | None,
        stop: int | None,
        weighting: Weighting | None,
        wide: bool = True,
    ) -> dict[Tensor, Callable[[], Tensor]]:
        """Return functions that return the values of the parameters, one at a time."""
        window = self._window(start, stop)
        assert self._files is not None
        shares = block_weights([block.count for block in window], weighting or Mean())
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
                before = _real(self._initial[p]).cpu()
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
            first_step=window[0].start + self.stride,
            last_step=window[-1].stop,
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
        return misplaced_weight([block.count for block in self._window(start, stop)], weighting)

    def raw_state_dict(self, model: nn.Module) -> dict[str, Any]:
        """Return a copy of the model's state dict with the raw weights, even in :meth:`applied`.

        Args:
            model: The model that holds the parameters.
        """
        return copied_state_dict(model.state_dict(keep_vars=True), self._raw)


@dataclass(frozen=True)
class _Saved:
    """A state dict of block averages."""

    step: int
    start: int
    blocks: tuple[Block, ...]
    initial: dict[int, Tensor]


def _real(tensor: Tensor) -> Tensor:
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor
