"""Training and evaluation modes of a model's modules."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

__all__ = ["preserved_modes"]


@contextmanager
def preserved_modes(model: nn.Module) -> Iterator[None]:
    """Restore the training mode of every module of the model when the block ends.

    Modules are restored one by one: a model may mix modes, for example with frozen BatchNorm
    layers, and ``model.train()`` would overwrite them.

    Args:
        model: The model, wrappers and submodules included.

    Example:
        >>> from torch import nn
        >>> model = nn.Sequential(nn.Dropout(), nn.BatchNorm1d(3).eval())
        >>> with preserved_modes(model):
        ...     _ = model.eval()
        >>> [module.training for module in model]
        [True, False]
    """
    modes = [(module, module.training) for module in model.modules()]
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training
