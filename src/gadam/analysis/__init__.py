"""Measuring solutions: curvature of the loss at them."""

from gadam.analysis.curvature import Curvature

__all__ = ["Curvature"]
