"""Optimisers: the Adam-family update, and with the average built in."""

from gadam.optim import cpu
from gadam.optim.gadam import Gadam, GadamX
from gadam.optim.padam import Padam, PadamW

__all__ = ["Gadam", "GadamX", "Padam", "PadamW", "backends"]


def backends() -> dict[str, str]:
    """Tell which fused kernels there are here, by kind of device, and what they run on.

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
