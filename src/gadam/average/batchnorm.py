"""BatchNorm statistics for weights that no forward pass has seen: those of an average."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DistributedDataParallel

__all__ = ["Batches", "refresh_batchnorm"]

Batches = Iterable[Any] | Callable[..., object]


def refresh_batchnorm(
    model: nn.Module,
    batches: Batches,
    *,
    forward: Callable[[nn.Module, Any], object] | None = None,
    max_batches: int | None = None,
    process_group: Any = None,
) -> None:
    """Set every BatchNorm layer's running statistics to the pooled ones of these batches.

    Each batch is normalised by its own statistics on its way through, as in training. The mean and
    variance of all inputs that a layer has seen are then exact, as if they had come in one batch:
    a short last batch counts for what it holds, and the variance *between* batches is in. Dropout is
    off, and each module is back in its own mode afterwards. If anything goes wrong midway, the model
    is as it was. A layer that no batch reached keeps its statistics.

    Args:
        model: its BatchNorm layers are refreshed; a DistributedDataParallel wrapper is looked through
        batches: tensors, tuples or lists (the first entry is the input), or dicts (the entries that
            the model's ``forward`` names, as keywords); they are moved to the model's device.
            Or a callable that runs the forwards itself (given the model, if it takes an argument)
        forward: runs the model on a batch instead, which it gets as it comes
        max_batches: look at no more than these
        process_group: pool over its processes, so that all of them end equal; they may see different
            numbers of batches. Taken from a DistributedDataParallel or FSDP2 model if not given

    Example:
        >>> import torch, gadam
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8))
        >>> gadam.refresh_batchnorm(model, [torch.randn(32, 4), torch.randn(7, 4)])
    """
    if callable(batches) and (forward is not None or max_batches is not None):
        raise ValueError(
            "forward= and max_batches= go with batches, not with a callable that runs them"
        )
    if not _layers(model):
        return
    with _pooled_statistics(model, process_group) as inner:
        if callable(batches):
            batches(*([inner] if _takes_an_argument(batches) else []))
            return
        run = forward if forward is not None else _forward_by_kind(inner)
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
    """Pool the inputs of every BatchNorm layer over the forwards inside the block, without gradients.

    Yields the model to run, without wrappers: DistributedDataParallel's forward would wait for
    processes that have fewer batches, and all of them hide what the model's own forward takes.
    """
    group = process_group if process_group is not None else _group_of(model)
    inner = _unwrapped(model)
    layers = _layers(inner)
    modes = [(module, module.training) for module in inner.modules()]
    saved = {layer: [(b, b.clone()) for b in _statistics(layer)] for layer in layers}
    moments = {layer: _Moments(layer) for layer in layers}

    def normalise_by_batch(layer: Any, args: tuple[Tensor, ...], kwargs: dict[str, Tensor]) -> None:
        # In eval mode a layer normalises by its running statistics: give it this batch's. Unlike
        # train mode this takes a last batch of one, and leaves no trace of its own.
        mean, var = moments[layer].add(args[0] if args else kwargs["input"])
        layer.running_mean.copy_(mean)
        layer.running_var.copy_(var)

    def restore(layer: _BatchNorm) -> None:
        for buffer, value in saved[layer]:
            buffer.copy_(value)

    handles = [
        layer.register_forward_pre_hook(normalise_by_batch, with_kwargs=True) for layer in layers
    ]
    try:
        # Not eval(), which some modules override to do more than that.
        for module, _ in modes:
            module.training = False
        # Eager: compiled code does not see hooks that came after it.
        with torch.no_grad(), torch.compiler.set_stance("force_eager"):
            yield inner
            if not any(_pool(list(moments.values()), group)):
                raise ValueError(
                    "no batch reached a BatchNorm layer, so there are no statistics to take over: is "
                    "the loader empty, or an iterator that has run out?"
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
        for module, training in modes:
            module.training = training


def _layers(model: nn.Module) -> list[_BatchNorm]:
    return [
        module
        for module in model.modules()
        if isinstance(module, _BatchNorm) and module.running_mean is not None
    ]


def _statistics(layer: _BatchNorm) -> list[Tensor]:
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
        """Take a batch in; gives its own mean and (biased) variance."""
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
        # The running variance is the unbiased one, as BatchNorm's own.
        layer.running_var.copy_(self.deviations / (self.count - 1).clamp(min=1))
        if layer.num_batches_tracked is not None:
            layer.num_batches_tracked.fill_(self.batches)


def _pool(moments: list[_Moments], group: Any) -> list[bool]:
    """Merge the processes' moments, in the same order everywhere; gives which layers saw any."""
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
                (count, batches, mean, deviations), flat = (
                    flat[: 2 + 2 * size].split([1, 1, size, size]),
                    flat[2 + 2 * size :],
                )
                if count:
                    m.merge(count[0], mean, deviations)
                    m.batches += int(batches)
    return [bool(m.count) for m in moments]


def _unwrapped(model: nn.Module) -> nn.Module:
    while True:
        if isinstance(model, (DistributedDataParallel, nn.DataParallel)):
            model = model.module
        elif isinstance(compiled := getattr(model, "_orig_mod", None), nn.Module):
            model = compiled
        else:
            return model


def _group_of(model: nn.Module) -> Any:
    for module in model.modules():
        if isinstance(module, DistributedDataParallel):
            return module.process_group
    if any(hasattr(module, "unshard") and hasattr(module, "reshard") for module in model.modules()):
        import torch.distributed as dist

        return dist.group.WORLD
    return None


def _forward_by_kind(model: nn.Module) -> Callable[[nn.Module, Any], object]:
    place = next((t.device for t in (*model.parameters(), *model.buffers())), None)
    accepted = inspect.signature(model.forward).parameters

    def to_device(batch: Any) -> Any:
        if isinstance(batch, Tensor):
            return batch.to(place)
        if isinstance(batch, Mapping):
            return {key: to_device(value) for key, value in batch.items()}
        return batch

    def run(model: nn.Module, batch: Any) -> object:
        if isinstance(batch, Mapping):
            takes_all = any(p.kind is p.VAR_KEYWORD for p in accepted.values())
            keywords = {k: v for k, v in batch.items() if takes_all or k in accepted}
            if not keywords:
                raise TypeError(
                    f"the model's forward takes none of the batch's entries {sorted(batch)}: say how "
                    "to run a batch, with forward=lambda model, batch: …"
                )
            return model(**to_device(keywords))
        if isinstance(batch, (tuple, list)):
            batch = batch[0]
        if not isinstance(batch, Tensor):
            raise TypeError(
                "a batch is a tensor, a dict, or a tuple or list that begins with a tensor, not "
                f"{type(batch).__name__}: say how to run it, with forward=lambda model, batch: …"
            )
        return model(to_device(batch))

    return run
