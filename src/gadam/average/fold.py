"""A sample that an optimizer's kernel takes in its own pass over the weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from gadam._dtensor import local

__all__ = ["Fold"]


@dataclass
class Fold:
    """A request to fold updated parameters into their averages, and what came of it.

    A kernel folds each parameter as it is after the update, rounded to its own type. It leaves out
    entries that are not finite, because they could not be taken out again, and reports them.

    Attributes:
        params: The parameters.
        averages: Their averages, in the same order.
        host_weight: A function that returns the weight of the sample, or None if kernels must not
            fold it.
        device_weight: A function that returns the weight on a device, without waiting for it.
        folded: The indices of the parameters that the kernel has folded in.
        finite: Whether all of these are finite, if the host knows.
        not_finite: An integer tensor that is nonzero if one of these is not finite, if only the
            device knows.
        weight: The weight that the kernel has used.
        kernel_undo_if: A function that takes the sample out again if a flag on the device is set.
        iterates: Where a kernel may step from, instead of the parameters. It then writes points
            between the new iterates and their averages into the parameters.
        interpolation: Where these points are: 0 at the iterates, 1 at the averages.
        is_pointed: Whether the kernel has done so for the parameters that it has folded in.
        is_undone: Whether the sample was taken out again.
    """

    params: list[Tensor]
    averages: list[Tensor]
    host_weight: Callable[[], float | None]
    device_weight: Callable[[torch.device], Tensor]
    folded: list[int] = field(default_factory=list)
    finite: bool = True
    not_finite: Tensor | None = None
    weight: float | Tensor = 0.0
    kernel_undo_if: Callable[[Tensor], None] | None = None
    iterates: list[Tensor] | None = None
    interpolation: float = 0.0
    is_pointed: bool = False
    is_undone: bool = False

    @torch.no_grad()
    def undo(self) -> None:
        """Take the sample out again. The averages are what they were, up to rounding.

        The parameters must still be those that were folded in.
        """
        if self.not_finite is not None:
            self.undo_if(torch.ones_like(self.not_finite, dtype=torch.bool))
        elif isinstance(self.weight, float):
            ratio = self.weight / (1 - self.weight)
            for i in self.folded:
                sample = self.params[i]
                if self.iterates is not None and self.is_pointed:
                    sample = self.iterates[i]
                average, p = local(self.averages[i]), local(sample).detach()
                p = p.to(average.dtype)
                before = average + (average - p) * ratio
                average.copy_(torch.where(torch.isfinite(p), before, average))
        self.folded = []
        self.is_undone = True

    def undo_if(self, flag: Tensor) -> None:
        """Take the sample out again if a flag is set, without waiting for the flag's device.

        Args:
            flag: A 0-dim boolean tensor.
        """
        if self.kernel_undo_if is not None:
            self.kernel_undo_if(flag)
