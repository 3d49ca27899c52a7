"""Means of blocks of iterates on disk: the mean over any window of them, chosen after training."""

from __future__ import annotations

import os
import secrets
import sys
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from numbers import Integral
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from gadam import _torch
from gadam._dtensor import all_reduce_min, is_dtensor, local, new_like
from gadam.average.attached import attached, free_prefix
from gadam.average.block_contents import BlockError, Contents, real
from gadam.average.block_files import Block, BlockFolder, Manifest, blocks_from, pair_to_merge
from gadam.average.block_windows import BlockWindows
from gadam.average.joint import check_disjoint
from gadam.average.loading import Loader
from gadam.average.offload import record_events
from gadam.average.plan import Averaging
from gadam.average.progress import Progress
from gadam.average.sampling import Sampler, is_dry_run
from gadam.average.state import State
from gadam.average.store import BesideOptimizer, Store, params_of
from gadam.average.wrappers import unwrapped

__all__ = ["BlockAverages"]

_CHECKPOINTS = 2  # how many of the last checkpoints a run can be resumed from, at least
_RUNS = 2**24  # numbers of runs, which float32 holds exactly


class BlockAverages(BlockWindows):
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
    half-precision weights. They are combined in float64. For float32 weights and blocks of up to
    100 samples, the result differs from the mean of the iterates in float64 by at most
    :math:`10^{-6}` of the norm of the model's weights. A single entry differs by at most
    :math:`(n / 2 + M + 8) \, 2^{-24}` of its largest iterate, for :math:`n` samples per block and
    :math:`M` merges. So use blocks of about 100 samples. A ``stride`` makes longer ones possible.

    **Resuming.** The mean of the current block is part of the optimizer's ``state_dict()``. Save
    :meth:`state_dict` beside it, which is small, and load both. Blocks after the checkpoint are
    deleted, and written again with the same bits as in a run without interruption. That works for
    the last two checkpoints. For older ones, it works unless blocks were merged across them.

    **Several processes.** With sharded parameters (FSDP2), each process writes its own shards to a
    subfolder, and nothing is gathered. Read them with the same number of processes. With replicated
    parameters (DDP), the first process writes the blocks, and all processes read them from the
    folder, which they must share.

    It needs the extra ``gadam[safetensors]``.

    Args:
        optimizer: The optimizer whose iterates to average, or a list of optimizers of one model, as
            in :class:`gadam.IterateAverage`.
        folder: Where to store the blocks. A folder belongs to one run, whose number is in the
            optimizer's state.
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
            if not isinstance(value, Integral) or isinstance(value, bool) or value < least:
                raise ValueError(
                    f"Invalid {name}: {value!r}. {name} must be an integer of at least {least}."
                )
        if every % stride:
            raise ValueError(f"stride must divide every, got stride={stride} and every={every}.")
        several = list(optimizer) if isinstance(optimizer, (list, tuple)) else [optimizer]
        self.optimizers = [unwrapped(one) for one in several]
        if not self.optimizers:
            raise ValueError("BlockAverages needs at least one optimizer.")
        check_disjoint(self.optimizers)
        every, max_blocks, stride = int(every), int(max_blocks), int(stride)
        self.every, self.max_blocks, self.stride = every, max_blocks, stride
        self._raw = {}

        self._path = Path(folder)
        self._writes = True  # False if another process writes the same weights
        self._files = self._open(self._path)
        self._manifest = self._files.read() or Manifest(every, stride)
        if (self._manifest.every, self._manifest.stride) != (every, stride):
            raise BlockError(
                f"{folder} has blocks with every={self._manifest.every} and "
                f"stride={self._manifest.stride}, got every={every} and stride={stride}. Pass the "
                "same settings, or a new folder."
            )
        self._check_shapes()
        self._thread: ThreadPoolExecutor | None = None
        self._writing: Future[Manifest] | None = None
        self._spare: dict[Tensor, Tensor] = {}
        self._ended: int | None = None  # the end of the last block that this object has finished

        prefix = free_prefix(self.optimizers, "block_mean")
        store = BesideOptimizer(
            self.optimizers,
            prefix,
            lambda: self._loader.progress,
            lambda *saved: self._loader.prepare_to_load(*saved),
            self._other_stores,
        )
        self._state = _State(self.optimizers, Averaging(start=stride, every=stride), store)
        self._loader = Loader(self._state)
        self._sampler = Sampler(self._state, self._loader)
        self._sampler.attach()
        self._sampler.on_step = self._after_step
        if self._loader.arrive() is None:
            self._loader.continue_from_the_optimizers_steps()
            self._state.allocate()
        self._trained = set(self._state.averaged())
        self._initial = {}
        self._start = self._loader.progress.steps
        # A number for the run, if this is a new one. Processes with shards agree on it.
        new = 1 + secrets.randbelow(_RUNS - 1)
        self._new_run = int(all_reduce_min(new, self._state.sharded))
        if self._writes and not self._manifest.run and not self._run:
            self._state.tracker.memory = (self._new_run,)
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

    def _open(self, path: Path) -> BlockFolder:
        """Return this process's folder."""
        if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
            return BlockFolder(path)
        rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
        if not any(map(is_dtensor, params_of(*self.optimizers))):
            self._writes = rank == 0
            return BlockFolder(path)
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
        params = [local(p) for p in params_of(*self.optimizers)]
        for block in self._manifest.blocks[-1:]:
            contents = self._files.open(block)
            for index in contents.indices:
                mean = contents.mean(index)
                if mean is None or index >= len(params) or mean.shape == real(params[index]).shape:
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
            if self._writes:
                run = self._run or self._new_run
                self._state.tracker.memory = (run,)
                self._manifest = replace(self._manifest, run=run)
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

    @property
    def _run(self) -> int:
        """The number of the run in the optimizer's state; 0 if it has none."""
        return int(self._state.tracker.memory[0])

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
        self._ended = progress.steps
        if self._writes:
            self.flush()
            index = {p: i for i, p in enumerate(self._state.params())}
            contents = Contents.of(
                {index[p]: local(mean) for p, mean in means.items()} if block.count else {},
                {index[p]: value for p, value in self._initial.items()},
            )
            if self._thread is None:
                self._thread = ThreadPoolExecutor(1, "gadam-blocks", _yield_to_others)
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
        blocks = [asdict(block) for block in self._manifest.blocks]
        if self._state.sharded:  # the same state for all processes, which have their own files
            blocks = [{**block, "sha256": ""} for block in blocks]
        return {
            "run": self._run,
            "step": self._loader.progress.steps,
            "start": self._start,
            "blocks": blocks,
            "initial": {
                index[p]: _torch.new_dtensor(value, p) if is_dtensor(p) else value
                for p, value in self._initial.items()
            },
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
                int(state_dict["run"]),
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
        self._check_run(saved.run)
        known = self._manifest.files
        lost = [block for block in saved.blocks if block.file not in known]
        if lost and self._writes:
            raise BlockError(
                f"{self._path} no longer has the block of steps {lost[0].start}–{lost[0].stop} of "
                "this checkpoint. Resume from a later checkpoint."
            )
        here = tuple(known.get(block.file, block) for block in saved.blocks)
        if any(old.sha256 not in ("", new.sha256) for old, new in zip(saved.blocks, here)):
            raise BlockError(
                f"{self._path} has blocks of a later training from an earlier checkpoint. Resume "
                "from a checkpoint of that training."
            )
        saved = replace(saved, blocks=here)
        self._saved = saved
        self._expire()

    def _check_run(self, run: int) -> None:
        """Raise an error if the folder belongs to another run than a checkpoint."""
        found = self._manifest
        if self._writes and found.run not in (0, run) and (run or found.blocks):
            raise BlockError(
                f"{self._path} has the blocks of another run than this checkpoint. Pass the folder "
                "of that run, or a new one."
            )

    def _read(self) -> Manifest:
        self.flush()
        self._settle()
        if not self._writes and self._ended is not None:
            manifest = self._files.wait_for(self._ended)
            self._manifest = replace(manifest, blocks=manifest.at(self._ended) or manifest.blocks)
        return self._manifest

    def _expire(self) -> None:
        """Note that the optimizer's state was replaced."""
        with suppress(BlockError):  # a block that could not be written may be written again
            self.flush()
        self._writing = self._ended = None
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
            self._check_run(self._run)
            blocks, start = saved.blocks, saved.start
        else:
            if manifest.blocks and not step:
                raise BlockError(
                    f"{self._path} already has blocks, up to step {manifest.blocks[-1].stop}. To "
                    "resume their run, load its checkpoint. Otherwise pass a new folder."
                )
            if step:
                self._check_run(self._run)
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


@dataclass(frozen=True)
class _Saved:
    """A state dict of block averages."""

    run: int
    step: int
    start: int
    blocks: tuple[Block, ...]
    initial: dict[int, Tensor]


class _State(State):
    """A state that also holds the number of the run, as every checkpoint of the optimizer does."""

    @property
    def initial_progress(self) -> Progress:
        """The progress before the first step."""
        return replace(super().initial_progress, memory=(0.0,))


def _yield_to_others() -> None:
    """Let other threads of this machine run before this one."""
    if sys.platform == "linux":  # elsewhere, a thread has no priority of its own
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 5)
