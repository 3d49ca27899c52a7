"""BatchNorm statistics for weights that have not seen a forward pass, such as an average."""

from __future__ import annotations

import inspect
import pickle
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from gadam import _torch
from gadam._dtensor import is_dtensor
from gadam._modes import preserved_modes

__all__ = [
    "STALE",
    "BatchNorm",
    "Batches",
    "has_statistics_in_use",
    "refresh_batchnorm",
    "wrapped_module",
]

Batches = Iterable[Any] | Callable[..., object]
BatchNorm = Batches | Literal[False] | None  # the batchnorm= argument of an average's methods
STALE = (
    "The model's BatchNorm statistics are those of the raw weights and do not fit the averaged "
    "ones. Pass batchnorm=loader to recompute them, or batchnorm=False to keep them."
)


def refresh_batchnorm(
    model: nn.Module,
    batches: Batches,
    *,
    forward: Callable[[nn.Module, Any], object] | None = None,
    max_batches: int | None = None,
    process_group: Any = None,
) -> None:
    r"""Recompute the running statistics of every BatchNorm layer from these batches.

    Each layer normalizes a batch with the batch's own statistics, as in training. The layer's
    running mean and variance become those of all inputs it has seen, exactly as if they had come
    in one batch. For batches of :math:`n_i` inputs with mean :math:`\mu_i` and biased variance
    :math:`\sigma_i^2`, :math:`n = \sum_i n_i`,

    .. math::
        \mu = \tfrac1n \sum_i n_i \mu_i, \qquad
        \sigma^2 = \tfrac1{n-1} \sum_i n_i \bigl(\sigma_i^2 + (\mu_i - \mu)^2\bigr).

    So a short last batch has its correct weight, and the variance *between* batches is included.
    Dropout is off during the refresh. Each module gets its own mode back. If the refresh fails,
    the model is unchanged. A layer that no batch reaches keeps its statistics.

    With several processes, all ranks end with the statistics of all their batches together. They
    may have different numbers of batches, or none. The forward pass itself may be collective, as
    in FSDP2: the ranks agree before every forward pass, and a rank that has no batch left repeats
    its last one (or one of another rank) without counting it. If a rank cannot load or prepare a
    batch, all ranks raise an error together. Only an error inside a forward pass of sharded
    weights cannot be announced, because the other ranks are waiting for those weights: it is
    raised on its own rank at once, and the others end when that process exits.

    Args:
        model: The model to refresh. Wrappers such as DistributedDataParallel are allowed.
        batches: Tensors; tuples or lists that begin with the input; or dicts, of which the entries
            that the model's ``forward`` names are passed as keywords. They are moved to the model's
            device. Or a callable that runs the forward passes; it receives the model if it takes an
            argument.
        forward: A function of the model and a batch that runs the forward pass instead.
        max_batches: The maximum number of batches to use.
        process_group: The processes to pool over, so that all of them end with the same statistics.
            The default is the group of a DistributedDataParallel model, or all processes that
            share an FSDP2 model. With tensor parallelism, pass the data-parallel group: the other
            processes see the same data. Pass it for any other replicated or sharded model.

    Raises:
        ValueError: If no batch reaches a BatchNorm layer.
        RuntimeError: If another rank failed. The message names the rank and its error.

    Example:
        >>> import torch, gadam
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8))
        >>> gadam.refresh_batchnorm(model, [torch.randn(32, 4), torch.randn(7, 4)])
    """
    if callable(batches) and (forward is not None or max_batches is not None):
        raise ValueError(
            "Pass forward= and max_batches= only with an iterable of batches, not with a callable."
        )
    if not _layers(model):
        return
    with _pooled_statistics(model, process_group) as inner:
        if callable(batches):
            batches(*([inner] if _takes_an_argument(batches) else []))
            return
        run = forward if forward is not None else _default_forward(inner)
        for batch in islice(batches, max_batches):
            run(inner, batch)


def _takes_an_argument(function: Callable[..., object]) -> bool:
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return any(
        parameter.kind in positional and parameter.default is parameter.empty
        for parameter in inspect.signature(function).parameters.values()
    )


@contextmanager
def _pooled_statistics(model: nn.Module, process_group: Any = None) -> Iterator[nn.Module]:
    """Pool the inputs of every BatchNorm layer over the forward passes inside the block.

    Gradients are off inside. Yields the model without wrappers: DistributedDataParallel's forward
    would wait for processes that have fewer batches, and every wrapper hides the signature of the
    model's own forward.
    """
    groups = _groups_of(model, process_group)
    inner = _unwrapped(model)
    layers = _layers(inner)
    saved = {layer: [(b, b.clone()) for b in _statistics(layer)] for layer in layers}
    moments = {layer: _Moments(layer) for layer in layers}
    rounds = _Rounds(model, groups.agree, next(iter(moments.values())).count.device)

    def normalize_by_batch(layer: Any, args: tuple[Tensor, ...], kwargs: dict[str, Tensor]) -> None:
        # A layer in eval mode normalizes with its running statistics: set them to this batch's.
        # Unlike train mode, this accepts a last batch of one and leaves no trace.
        inputs = args[0] if args else kwargs["input"]
        mean, var = moments[layer].add(inputs, count_it=not rounds.repeating)
        layer.running_mean.copy_(mean)
        layer.running_var.copy_(var)

    def restore(layer: nn.Module) -> None:
        for buffer, value in saved[layer]:
            buffer.copy_(value)

    handles = [
        layer.register_forward_pre_hook(normalize_by_batch, with_kwargs=True) for layer in layers
    ]
    with preserved_modes(inner), rounds.hooks():
        try:
            # Some modules override eval() to do more than this.
            for module in inner.modules():
                module.training = False
            # Compiled code does not run hooks that were registered later.
            with torch.no_grad(), torch.compiler.set_stance("force_eager"):
                try:
                    yield inner
                    rounds.finish()
                except BaseException as error:
                    rounds.fail(error)
                    raise
                if not any(_pool(list(moments.values()), groups.pool)):
                    raise ValueError(
                        "No batch reached a BatchNorm layer. Check that the loader is not empty "
                        "and not an exhausted iterator."
                    )
                for layer, seen in moments.items():
                    seen.write() if seen.count else restore(layer)
        except BaseException:
            with torch.no_grad():
                for layer in layers:
                    restore(layer)
            raise
        finally:
            for handle in handles:
                handle.remove()


class _Rounds:
    """Keeps the ranks in step, one forward pass per round.

    Before every outermost call of the model, a rank tells the others that it is about to run it. A
    rank that has finished takes part in the remaining rounds by repeating a call, so that the
    collective operations of the forward pass find all ranks. The last round is the one that no rank
    has a call for.

    Only one exchange may be under way at a time: after an error within an exchange, or inside the
    forward pass of a sharded model, another one would mix with what the other ranks wait for.

    Args:
        model: The model, with its wrappers.
        groups: The process groups that must agree, in turn. Without any, this class does nothing.
        device: The device of the tensors that the ranks exchange.
    """

    def __init__(self, model: nn.Module, groups: Sequence[Any], device: torch.device) -> None:
        self.groups, self.device = groups, device
        wrappers = list(_wrappers(model))
        self.modules = [m for m in model.modules() if m in wrappers or _is_fsdp(m)]
        self.sharded = any(map(_is_fsdp, model.modules())) or any(
            map(is_dtensor, model.parameters())
        )
        self.calls: dict[int, _Call] = {}  # the last call of each module, by its index
        self.running: nn.Module | None = None
        self.repeating = False
        self.failed_inside = False
        self.over = not groups

    @contextmanager
    def hooks(self) -> Iterator[None]:
        handles: list[Any] = []
        for module in self.modules if self.groups else ():
            # Before the hooks of FSDP2, which gather the weights
            handles += (
                module.register_forward_pre_hook(self._enter, prepend=True, with_kwargs=True),
                module.register_forward_hook(self._leave, always_call=True),
            )
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self.running is not None:
            return  # part of an outer call
        if self.over:
            raise RuntimeError("The model was called after refresh_batchnorm failed.")
        index = self.modules.index(module)
        self.calls[index] = _Call(args, kwargs)
        self._exchange(index)
        self.running, self.failed_inside = module, False

    def _leave(self, module: nn.Module, args: tuple[Any, ...], output: object) -> None:
        if module is self.running:
            self.running, self.failed_inside = None, output is None  # None also after an error

    def finish(self) -> None:
        """Take part in the rounds of the ranks that still have batches."""
        while not self.over:
            index = self._exchange(None)
            if index is None:
                self.over = True
                return
            call = self.calls[index]
            self.running, self.repeating = self.modules[index], True
            try:
                self.running(*call.args, **call.kwargs)
            finally:
                self.repeating = False

    def fail(self, error: BaseException) -> None:
        """Tell the other ranks about this rank's error, unless they wait for something else."""
        inside = self.running is not None or self.failed_inside
        if not self.over and not (self.sharded and inside):
            self._exchange(None, error)

    def _exchange(self, index: int | None, error: BaseException | None = None) -> int | None:
        """Agree on this round.

        Args:
            index: The index of the module that this rank is about to run, or None.
            error: The error that ended this rank's work, if any.

        Returns:
            The index of the module to run, or None if there is nothing left to do.

        Raises:
            RuntimeError: If another rank failed.
        """
        self.over = True
        count, idle = len(self.modules), index is None
        failed, any_idle, highest, lowest = self._max(
            [error is not None, idle, *((0, 0) if index is None else (index + 1, count - index))]
        )
        if failed:
            self._raise_together(None if error is None else f"{type(error).__name__}: {error}")
            return None
        if highest and highest != count + 1 - lowest:
            raise RuntimeError(
                "The ranks call different modules of the model at the same time. Make every rank "
                "call the same ones in the same order for each batch."
            )
        if highest and any_idle:
            self._lend(highest - 1)
        self.over = False
        return highest - 1 if highest else None

    def _max(self, values: Sequence[int]) -> list[int]:
        import torch.distributed as dist

        shared = torch.tensor(values, dtype=torch.int64, device=self.device)
        for group in self.groups:
            dist.all_reduce(shared, dist.ReduceOp.MAX, group=group)
        return [int(value) for value in shared.tolist()]

    def _raise_together(self, problem: str | None) -> None:
        """Collect the problems of all ranks. Raises them on the ranks that have none themselves."""
        import torch.distributed as dist

        problems = {} if problem is None else {dist.get_rank(): problem}
        for group in self.groups:
            gathered: list[Any] = [None] * dist.get_world_size(group)
            dist.all_gather_object(gathered, problems, group=group)
            problems = {rank: text for found in gathered for rank, text in found.items()}
        if problem is None:
            ranks = "; ".join(f"rank {rank}: {text}" for rank, text in sorted(problems.items()))
            raise RuntimeError(
                "refresh_batchnorm failed on another rank, so the BatchNorm statistics are "
                f"unchanged on all of them. {ranks}"
            )

    def _lend(self, index: int) -> None:
        """Give a call of this module to the ranks that have never called it."""
        if not self._max([index not in self.calls])[0]:
            return
        import torch.distributed as dist

        problem: str | None = None
        for group in self.groups:
            have: list[Any] = [None] * dist.get_world_size(group)
            dist.all_gather_object(have, index in self.calls, group=group)
            if all(have) or not any(have):
                continue
            source, sent = have.index(True), [b""]
            if dist.get_rank(group) == source:
                try:
                    sent = [pickle.dumps(self.calls[index].packed())]
                except Exception as error:
                    problem = f"Its batch cannot be sent: {type(error).__name__}: {error}"
            dist.broadcast_object_list(sent, group=group, group_src=source)
            if index not in self.calls and sent[0]:
                try:
                    self.calls[index] = pickle.loads(sent[0]).unpacked(self.device)
                except Exception as error:
                    problem = f"It cannot read a batch: {type(error).__name__}: {error}"
        if self._max([problem is not None])[0]:
            self._raise_together(problem)
            raise RuntimeError(
                f"This rank cannot share a batch with a rank that has none. {problem} Make sure "
                "that every rank has a batch."
            )


@dataclass
class _Call:
    """The arguments of a call of a module."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def packed(self) -> _Call:
        """Return the call with its tensors on the host, as another process can read them."""

        def pack(value: Any) -> Any:
            if isinstance(value, Tensor):
                # A copy: pickling a view sends all of its base.
                return _Packed(value.detach().to("cpu", copy=True), value.device.type == "cpu")
            return value

        return _Call(_torch.tree_map(pack, self.args), _torch.tree_map(pack, self.kwargs))

    def unpacked(self, device: torch.device) -> _Call:
        def unpack(value: Any) -> Any:
            if isinstance(value, _Packed):
                return value.tensor if value.on_host else value.tensor.to(device)
            return value

        return _Call(_torch.tree_map(unpack, self.args), _torch.tree_map(unpack, self.kwargs))


@dataclass
class _Packed:
    tensor: Tensor
    on_host: bool


def has_statistics_in_use(model: nn.Module) -> bool:
    """Return True if a BatchNorm layer has running statistics that training has updated.

    Args:
        model: The model.
    """
    counts = [getattr(layer, "num_batches_tracked", None) for layer in _layers(model)]
    return any(count is None or bool(count) for count in counts)


def _layers(model: nn.Module) -> list[nn.Module]:
    return [
        module
        for module in model.modules()
        if isinstance(module, _torch.BATCHNORM_TYPES) and module.running_mean is not None
    ]


def _statistics(layer: Any) -> list[Tensor]:
    buffers = (layer.running_mean, layer.running_var, layer.num_batches_tracked)
    return [buffer for buffer in buffers if buffer is not None]


class _Moments:
    """Count, mean and sum of squared deviations of a layer's inputs, merged batch by batch."""

    def __init__(self, layer: Any) -> None:
        self.layer = layer
        self.clear()

    def clear(self) -> None:
        mean = self.layer.running_mean
        wide = torch.float32 if mean.device.type == "mps" else torch.float64
        self.batches = 0
        self.count = torch.zeros((), dtype=wide, device=mean.device)
        self.mean = torch.zeros_like(mean, dtype=wide)
        self.deviations = torch.zeros_like(self.mean)

    def add(self, inputs: Tensor, count_it: bool) -> tuple[Tensor, Tensor]:
        """Add a batch if it counts. Returns the mean and biased variance of the batch alone."""
        inputs = inputs.detach()
        inputs = inputs if inputs.dtype == torch.float64 else inputs.float()
        dims = [d for d in range(inputs.dim()) if d != 1]
        var, mean = torch.var_mean(inputs, dim=dims, correction=0)
        count = inputs.numel() // inputs.shape[1]
        if count and count_it:
            self.merge(count, mean.to(self.mean.dtype), var.to(self.mean.dtype) * count)
            self.batches += 1
        return mean, var

    def merge(self, count: Tensor | int, mean: Tensor, deviations: Tensor) -> None:
        total = self.count + count
        delta = mean - self.mean
        self.deviations += deviations + delta.square() * (self.count * count / total)
        self.mean += delta * (count / total)
        self.count = total

    def write(self) -> None:
        layer = self.layer
        layer.running_mean.copy_(self.mean)
        # BatchNorm's running variance is the unbiased one.
        layer.running_var.copy_(self.deviations / (self.count - 1).clamp(min=1))
        if layer.num_batches_tracked is not None:
            layer.num_batches_tracked.fill_(self.batches)


def _pool(moments: list[_Moments], groups: Sequence[Any]) -> list[bool]:
    """Merge the moments of all processes, in the same order everywhere.

    Returns, for each layer, whether any batch reached it.
    """
    for group in groups:
        import torch.distributed as dist

        own = torch.cat(
            [
                torch.cat([m.count[None], m.count.new_tensor([m.batches]), m.mean, m.deviations])
                for m in moments
            ]
        )
        gathered = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
        dist.all_gather(gathered, own, group=group)
        for m in moments:
            m.clear()
        for flat in gathered:
            for m in moments:
                size = m.mean.numel()
                count, batches, mean, deviations, flat = torch.split(
                    flat, [1, 1, size, size, flat.numel() - 2 - 2 * size]
                )
                if count:
                    m.merge(count[0], mean, deviations)
                    m.batches += int(batches)
    return [bool(m.count) for m in moments]


def _wrappers(model: nn.Module) -> Iterator[nn.Module]:
    """Yield the model, then what it wraps, down to the user's own module."""
    yield model
    while (inner := wrapped_module(model)) is not None:
        model = inner
        yield model


def _unwrapped(model: nn.Module) -> nn.Module:
    return list(_wrappers(model))[-1]


def wrapped_module(module: nn.Module) -> nn.Module | None:
    """Return the module inside the wrapper of DDP or ``torch.compile``, or None without one.

    Args:
        module: The module.
    """
    if isinstance(module, (DistributedDataParallel, nn.DataParallel)):
        inner: nn.Module = module.module
        return inner
    return _torch.unwrap_compiled(module)


@dataclass
class _Groups:
    pool: list[Any]  # the process groups to pool over, one after the other
    agree: list[Any]  # those that must run the same forward passes: at least as many processes


def _groups_of(model: nn.Module, process_group: Any) -> _Groups:
    sharded = [module for module in model.modules() if _is_fsdp(module)]
    for module in sharded:
        module.reshard()  # type: ignore[operator]  # gathered weights do not know their mesh
    parameters: Iterable[Any] = model.parameters()
    meshes = list(dict.fromkeys(p.device_mesh for p in parameters if is_dtensor(p)))
    meshes.sort(key=lambda mesh: -mesh.size())
    replicated = [m.process_group for m in model.modules() if _is_ddp(m)]
    if process_group is not None:
        pool = [process_group]
    elif replicated:
        pool = replicated[:1]
    elif sharded:
        pool = _groups_of_mesh(meshes[0]) if meshes else _world()
    else:
        pool = []
    agree = list(pool)
    for mesh in meshes:
        agree += [group for group in _groups_of_mesh(mesh) if group not in agree]
    return _Groups(pool, agree)


def _groups_of_mesh(mesh: Any) -> list[Any]:
    """Return groups that reach all processes of a mesh, one after the other."""
    import torch.distributed as dist

    if mesh.size() == dist.get_world_size():
        return _world()
    return list(mesh.get_all_groups())


def _world() -> list[Any]:
    import torch.distributed as dist

    return [dist.group.WORLD]


def _is_ddp(module: nn.Module) -> bool:
    return isinstance(module, DistributedDataParallel)


def _is_fsdp(module: nn.Module) -> bool:
    return hasattr(module, "unshard") and hasattr(module, "reshard")


def _default_forward(model: nn.Module) -> Callable[[nn.Module, Any], object]:
    device = next((t.device for t in (*model.parameters(), *model.buffers())), None)
    accepted = inspect.signature(model.forward).parameters

    def to_device(batch: Any) -> Any:
        if isinstance(batch, Tensor):
            return batch.to(device)
        if isinstance(batch, Mapping):
            return {key: to_device(value) for key, value in batch.items()}
        return batch

    def run(model: nn.Module, batch: Any) -> object:
        if isinstance(batch, Mapping):
            takes_all = any(p.kind is p.VAR_KEYWORD for p in accepted.values())
            keywords = {k: v for k, v in batch.items() if takes_all or k in accepted}
            if not keywords:
                raise TypeError(
                    f"The model's forward takes none of the batch's entries {sorted(batch)}. Pass "
                    "forward=lambda model, batch: … to run a batch."
                )
            return model(**to_device(keywords))
        if isinstance(batch, (tuple, list)):
            batch = batch[0]
        if not isinstance(batch, Tensor):
            raise TypeError(
                "A batch must be a tensor, a dict, or a tuple or list that begins with a tensor, "
                f"not {type(batch).__name__}. Pass forward=lambda model, batch: … to run a batch."
            )
        return model(to_device(batch))

    return run
