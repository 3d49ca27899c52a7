"""Optimisers: the Adam-family update, with the average built in, and Lookahead."""

from gadam.optim import accelerator, cpu
from gadam.optim.gadam import Gadam, GadamX
from gadam.optim.lookahead import Lookahead
from gadam.optim.padam import Padam, PadamW

__all__ = ["Gadam", "GadamX", "Lookahead", "Padam", "PadamW", "backends"]


def backends() -> dict[str, str]:
    """Tell which fused kernels there are here, by kind of device, and what they run on.

    Example:
        >>> import gadam
        >>> sorted(gadam.backends())
        ['accelerator', 'cpu']
    """
    return {
        "cpu": cpu.describe(),
        "accelerator": accelerator.describe(),
    }
