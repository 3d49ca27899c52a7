"""Measuring solutions: the curvature of the loss at them."""

from gadam.analysis.curvature import Curvature
from gadam.analysis.spectra import Density, Eigen, Estimate, density, squared_norm, top, trace

__all__ = [
    "Curvature",
    "Density",
    "Eigen",
    "Estimate",
    "density",
    "squared_norm",
    "top",
    "trace",
]
