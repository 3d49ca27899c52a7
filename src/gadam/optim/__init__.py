"""Optimisers: the Adam-family update, with the average built in, and Lookahead."""

from gadam.optim.gadam import Gadam, GadamX
from gadam.optim.lookahead import Lookahead
from gadam.optim.padam import Padam, PadamW

__all__ = ["Gadam", "GadamX", "Lookahead", "Padam", "PadamW"]
