"""Averages in the checkpoints of Lightning Fabric.

An average's state is part of its optimizer's, so ``fabric.save`` and ``fabric.load`` carry it. What
they need help with is the model: inside ``average.applied()`` it holds averaged weights, and a
checkpoint needs the raw ones.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from torch import nn

from gadam.average.attached import applied_average
from gadam.integrations.common import FrameworkError, check_average

if TYPE_CHECKING:
    from lightning.fabric import Fabric

    from gadam.average import IterateAverage

__all__ = ["register"]


def register(fabric: Fabric, average: IterateAverage) -> None:
    """Make ``fabric.save`` write the raw weights, even inside ``average.applied()``.

    ``fabric.load`` then restores them and the average bit for bit, if the state has the optimizer.
    The average counts optimizer steps, not the batches of ``fabric.no_backward_sync()``.

    Args:
        fabric: The Fabric object. Its ``save`` and ``load`` are wrapped.
        average: The average. Create it with an optimizer of ``fabric.setup()``.

    Raises:
        FrameworkError: If the average is not one. From ``fabric.load`` inside
            ``average.applied()``.

    Example:
        >>> import tempfile, torch, gadam
        >>> from lightning.fabric import Fabric
        >>> from gadam.integrations.fabric import register
        >>> fabric = Fabric(accelerator="cpu", devices=1)
        >>> model = torch.nn.Linear(4, 1)
        >>> model, sgd = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
        >>> average = gadam.IterateAverage(sgd, gadam.Averaging(start=1))
        >>> register(fabric, average)
        >>> for _ in range(3):
        ...     sgd.zero_grad()
        ...     fabric.backward(model(torch.randn(8, 4)).square().mean())
        ...     sgd.step()
        >>> state = {"model": model, "optimizer": sgd}
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     with average.applied(model):
        ...         fabric.save(f"{folder}/checkpoint.ckpt", state)
        ...     rest = fabric.load(f"{folder}/checkpoint.ckpt", state, weights_only=True)
        >>> average.count
        3
    """
    check_average(average)
    save, load = fabric.save, fabric.load

    def save_raw(path: Any, state: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        models = [value for value in state.values() if isinstance(value, nn.Module)]
        with ExitStack() as stack:
            if applied_average(average.optimizers) is not None:
                stack.enter_context(average.suspended(nn.ModuleList(models)))
            save(path, state, *args, **kwargs)

    def load_outside(*args: Any, **kwargs: Any) -> dict[str, Any]:
        if applied_average(average.optimizers) is not None:
            raise FrameworkError(
                "fabric.load() was called while the averaged weights are applied. Leave the "
                "`with average.applied():` block first."
            )
        return load(*args, **kwargs)

    fabric.save, fabric.load = save_raw, load_outside  # type: ignore[method-assign]
