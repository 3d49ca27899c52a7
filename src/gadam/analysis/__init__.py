"""Measurements of trained models: diversity, distances, effective rates, and loss curvature.

All functions take models, tensors, and data loaders. Nothing here reads run folders.
"""

from gadam.analysis.curvature import Curvature
from gadam.analysis.directions import Directions, measure_directions
from gadam.analysis.gradient_noise import GradientNoise, measure_noise
from gadam.analysis.landscape import Plane, along_line, over_plane
from gadam.analysis.predictions import Diversity, Score, diversity, ensemble, log_probabilities
from gadam.analysis.spectra import (
    Density,
    Eigen,
    Estimate,
    Ritz,
    ritz,
    spectral_density,
    squared_norm,
    top_eigenvalues,
    trace,
    trace_and_frobenius,
)
from gadam.analysis.weights import Distances, distances, effective_rate, effective_rates, norms

__all__ = [
    "Curvature",
    "Density",
    "Directions",
    "Distances",
    "Diversity",
    "Eigen",
    "Estimate",
    "GradientNoise",
    "Plane",
    "Ritz",
    "Score",
    "along_line",
    "distances",
    "diversity",
    "effective_rate",
    "effective_rates",
    "ensemble",
    "log_probabilities",
    "measure_directions",
    "measure_noise",
    "norms",
    "over_plane",
    "ritz",
    "spectral_density",
    "squared_norm",
    "top_eigenvalues",
    "trace",
    "trace_and_frobenius",
]
