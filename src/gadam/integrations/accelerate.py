"""Averages in the checkpoints of Accelerate.

An average's state is part of its optimizer's, so ``save_state`` and ``load_state`` carry it. What
they need help with is the model: inside ``average.applied()`` it holds averaged weights, and a
checkpoint needs the raw ones.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from gadam.average.attached import applied_average
from gadam.average.wrappers import unwrapped
from gadam.integrations.common import FrameworkError, check_average, missing

try:
    from accelerate import Accelerator
    from accelerate.utils import DistributedType
except ImportError as error:
    raise missing("accelerate", "accelerate") from error

if TYPE_CHECKING:
    from torch.utils.hooks import RemovableHandle

    from gadam.average import IterateAverage

__all__ = ["Registration", "register"]


class Registration:
    """The hooks of an average in an accelerator.

    Args:
        *handles: The handles of the hooks.
    """

    def __init__(self, *handles: RemovableHandle) -> None:
        self._handles = handles

    def remove(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()


def register(accelerator: Accelerator, average: IterateAverage) -> Registration:
    """Make an accelerator's checkpoints hold the raw weights and the average.

    ``accelerator.save_state`` then saves the raw weights, even inside ``average.applied()``, and
    ``accelerator.load_state`` restores them and the average bit for bit. Create the average with
    the optimizer of ``accelerator.prepare()``, or with the one that you pass to it. The average
    counts optimizer steps: neither the batches of ``accelerator.accumulate()`` nor steps that a
    gradient scaler skips.

    Args:
        accelerator: The accelerator.
        average: The average. Its optimizers must be prepared by the accelerator before
            ``save_state`` or ``load_state`` is called.

    Returns:
        An object whose ``remove()`` undoes this.

    Raises:
        FrameworkError: If the average is not one, such as its optimizer.
            From ``save_state`` and ``load_state``, if the accelerator does not know the
            average's optimizer, so that the average would not be saved or restored. From
            ``load_state`` inside ``average.applied()``. From ``save_state`` inside it with FSDP,
            because Accelerate writes sharded weights before anything can replace them.

    Example:
        >>> import tempfile, torch, gadam
        >>> from accelerate import Accelerator
        >>> from gadam.integrations.accelerate import register
        >>> accelerator = Accelerator(cpu=True)
        >>> model = torch.nn.Linear(4, 1)
        >>> model, sgd = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        >>> average = gadam.IterateAverage(sgd, gadam.Averaging(start=1))
        >>> registration = register(accelerator, average)
        >>> for _ in range(3):
        ...     sgd.zero_grad()
        ...     accelerator.backward(model(torch.randn(8, 4)).square().mean())
        ...     sgd.step()
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     with average.applied(model):
        ...         path = accelerator.save_state(folder)
        ...     accelerator.load_state(folder)
        >>> average.count
        3
    """
    check_average(average)

    def check(doing: str) -> None:
        known = [unwrapped(optimizer) for optimizer in accelerator._optimizers]
        if any(all(own is not other for other in known) for own in average.optimizers):
            raise FrameworkError(
                f"accelerator.{doing} does not know the optimizer of the average, so it would "
                "ignore the average. Pass the optimizer to accelerator.prepare() first."
            )

    def on_save(models: list[nn.Module], weights: list[dict[str, Tensor]], folder: str) -> None:
        check("save_state()")
        applied = applied_average(average.optimizers)
        if applied is None:
            return
        if accelerator.distributed_type in (
            DistributedType.FSDP,
            DistributedType.DEEPSPEED,
            DistributedType.MEGATRON_LM,
        ):
            raise FrameworkError(
                f"{folder} now holds averaged weights, but a checkpoint needs the raw ones. Delete "
                "it, and call save_state() outside of `with average.applied():`."
            )
        for model, state_dict in zip(models, weights):
            raw = applied.raw_state_dict(model)
            for name, tensor in model.state_dict(keep_vars=True).items():
                # Not the others: another average may have put its raw weights there.
                if name in state_dict and isinstance(tensor, Tensor) and tensor in applied._raw:
                    state_dict[name] = raw[name]  # in the dict to be written

    def on_load(models: list[nn.Module], folder: str) -> None:
        check("load_state()")
        if applied_average(average.optimizers) is not None:
            raise FrameworkError(
                f"{Path(folder).name} cannot be loaded while averaged weights are applied. Leave "
                "the `with average.applied():` block first."
            )

    handles: list[Any] = [
        accelerator.register_save_state_pre_hook(on_save),
        accelerator.register_load_state_pre_hook(on_load),
    ]
    return Registration(*handles)
