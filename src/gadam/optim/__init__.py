"""Optimizers: the Adam-family update, alone and with a built-in iterate average."""

from gadam.optim import cpu
from gadam.optim.gadam import Gadam, GadamX
from gadam.optim.padam import Padam, PadamW

__all__ = ["Gadam", "GadamX", "Padam", "PadamW", "backends"]


def backends() -> dict[str, str]:
    """Describe the fused kernels that are available here.

    Returns:
        A sentence per kind of device: the instruction set and the threading of the kernel, or the
        reason why there is none.

    Example:
        >>> import gadam
        >>> sorted(gadam.backends())
        ['accelerator', 'cpu']
    """
    from gadam.optim import accelerator

    return {
        "cpu": cpu.describe(),
        "accelerator": accelerator.describe(),
    }
