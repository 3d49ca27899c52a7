"""BatchNorm statistics for weights that have not seen a forward pass, such as an average."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import islice
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from gadam import _torch
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

    Args:
        model: The model to refresh. Wrappers such as DistributedDataParallel are allowed.
        batches: Tensors; tuples or lists that begin with the input; or dicts, of which the entries
            that the model's ``forward`` names are passed as keywords. They are moved to the model's
            device. Or a callable that runs the forward passes; it receives the model if it takes an
            argument.
        forward: A function of the model and a batch that runs the forward pass instead.
        max_batches: The maximum number of batches to use.
        process_group: The processes to pool over, so that all of them end with the same statistics.
            They may see different numbers of batches. The default is the group of a
            DistributedDataParallel or FSDP2 model.

    Raises:
        ValueError: If no batch reaches a BatchNorm layer.

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
    group = process_group if process_group is not None else _group_of(model)
    inner = _unwrapped(model)
    layers = _layers(inner)
    saved = {layer: [(b, b.clone()) for b in _statistics(layer)] for layer in layers}
    moments = {layer: _Moments(layer) for layer in layers}

    def normalize_by_batch(layer: Any, args: tuple[Tensor, ...], kwargs: dict[str, Tensor]) -> None:
        # A layer in eval mode normalizes with its running statistics: set them to this batch's.
        # Unlike train mode, this accepts a last batch of one and leaves no trace.
        mean, var = moments[layer].add(args[0] if args else kwargs["input"])
        layer.running_mean.copy_(mean)
        layer.running_var.copy_(var)

    def restore(layer: nn.Module) -> None:
        for buffer, value in saved[layer]:
            buffer.copy_(value)

    handles = [
        layer.register_forward_pre_hook(normalize_by_batch, with_kwargs=True) for layer in layers
    ]
    with preserved_modes(inner):
        try:
            # Some modules override eval() to do more than this.
            for module in inner.modules():
                module.training = False
            # Compiled code does not run hooks that were registered later.
            with torch.no_grad(), torch.compiler.set_stance("force_eager"):
                yield inner
                if not any(_pool(list(moments.values()), group)):
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

    def add(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        """Add a batch. Returns the mean and the biased variance of the batch alone."""
        inputs = inputs.detach()
        inputs = inputs if inputs.dtype == torch.float64 else inputs.float()
        dims = [d for d in range(inputs.dim()) if d != 1]
        var, mean = torch.var_mean(inputs, dim=dims, correction=0)
        count = inputs.numel() // inputs.shape[1]
        if count:
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


def _pool(moments: list[_Moments], group: Any) -> list[bool]:
    """Merge the moments of all processes, in the same order everywhere.

    Returns, for each layer, whether any batch reached it.
    """
    if group is not None:
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


def _unwrapped(model: nn.Module) -> nn.Module:
    while (inner := wrapped_module(model)) is not None:
        model = inner
    return model


def wrapped_module(module: nn.Module) -> nn.Module | None:
    """Return the module inside the wrapper of DDP or ``torch.compile``, or None without one.

    Args:
        module: The module.
    """
    if isinstance(module, (DistributedDataParallel, nn.DataParallel)):
        inner: nn.Module = module.module
        return inner
    return _torch.unwrap_compiled(module)


def _group_of(model: nn.Module) -> Any:
    for module in model.modules():
        if isinstance(module, DistributedDataParallel):
            return module.process_group
    if any(hasattr(module, "unshard") and hasattr(module, "reshard") for module in model.modules()):
        import torch.distributed as dist

        return dist.group.WORLD
    return None


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
