"""Figures of the theory: predictions as lines, simulations as points with error bars.

The titles, captions and labels are also stored in results/theory.json. After changing one, run
``gadam theory all --out FOLDER`` and ``python -m tools.archive pack FOLDER results/theory.json``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypedDict

import numpy as np
from numpy.typing import ArrayLike

from gadam.report.chart import Chart, Series
from gadam.theory import closed_forms, predict
from gadam.theory.errata import ERRATA
from gadam.theory.mean_field import dependent
from gadam.theory.methods import Method, Tuned, loss_by_batch_size, loss_by_budget, loss_by_start
from gadam.theory.model import Moments, Quadratic, Segment
from gadam.theory.noise import Absolute, FourierNoise
from gadam.theory.simulation import Simulation, simulate, simulate_dependent
from gadam.theory.spectrum import Array, Spectrum, power_law

__all__ = ["FIGURES"]

FIGURES: dict[str, Callable[[int], Chart]] = {}


def _figure(function: Callable[[int], Chart]) -> Callable[[int], Chart]:
    FIGURES[function.__name__.replace("_", "-")] = function
    return function


class _Method(TypedDict, total=False):
    preconditioner: Array


def _floats(values: ArrayLike) -> list[float]:
    return [float(value) for value in np.asarray(values)]


def _line(label: str, x: ArrayLike, y: ArrayLike, kind: str = "prediction") -> Series:
    return Series(label, kind, _floats(x), _floats(y))


def _points(label: str, x: ArrayLike, samples: Iterable[Array], unit: float = 1.0) -> Series:
    """Return the mean and standard error of each set of samples, divided by ``unit``."""
    sets = [np.asarray(each, dtype=float).ravel() / unit for each in samples]
    return Series(
        label,
        "simulation",
        _floats(x),
        [float(each.mean()) for each in sets],
        [float(each.std(ddof=1) / np.sqrt(each.size)) for each in sets],
    )


def _sampled(point: Array | None) -> Array:
    """Narrow the type of a point of a simulation that took samples."""
    assert point is not None
    return point


@_figure
def shell(seed: int) -> Chart:
    """Plot Theorem 1: the last iterate stays on a shell, and the average lies inside it."""
    model = Quadratic(Spectrum([1.0], counts=[1000]), noise=1.0, start=10.0)
    rate, steps = 0.1, 3000
    at = np.unique(np.geomspace(1, steps, 40).astype(int))
    result = simulate(model, Segment(steps, rate), replicas=32, record=at.tolist(), seed=seed)
    shown = at[::4]
    tail = [
        simulate(model, Segment(int(n), rate), replicas=32, first=max(1, n // 2), seed=seed + 1)
        for n in shown
    ]
    names: dict[str, Callable[[int], Moments]] = {
        "last iterate": lambda n: predict.last_iterate(model, Segment(n, rate)),
        "average of all iterates": lambda n: predict.average(model, Segment(n, rate)),
        "average of the second half": lambda n: predict.average(
            model, Segment(n, rate), first=max(1, n // 2)
        ),
    }
    series = [
        _line(name, at, [point(int(n)).distance for n in at]) for name, point in names.items()
    ]
    index = np.searchsorted(at, shown)
    series += [
        _points("last iterate", shown, np.sqrt(result.squared_distance["last"][index])),
        _points(
            "average of all iterates", shown, np.sqrt(result.squared_distance["average"][index])
        ),
        _points(
            "average of the second half",
            shown,
            [np.linalg.norm(_sampled(t.average), axis=1) for t in tail],
        ),
    ]
    return Chart(
        "The last iterate stays on a shell, and the average moves inside it",
        "Expected distance to the minimum in 1,000 directions (λ = 1, α = 0.1, σ²/B = 1). The "
        "last iterate forgets its starting point quickly, but gradient noise keeps it at a nearly "
        "constant distance. The average of all iterates forgets the starting point slowly, but "
        "its noise decays. The average of the second half forgets quickly, and its noise decays "
        "too.",
        "steps",
        "expected distance to the minimum",
        series,
    )


@_figure
def dimension(seed: int) -> Chart:
    """Plot the gain of averaging, which grows with the number of parameters."""
    rate, steps, first = 0.1, 400, 200
    sizes = np.unique(np.geomspace(1, 10_000, 9).astype(int))
    lines: dict[str, list[float]] = {"last iterate": [], "average": []}
    points: dict[str, list[Array]] = {"last iterate": [], "average": []}
    for size in sizes:
        model = Quadratic(Spectrum([1.0], counts=[size]), noise=1.0, start=1.0)
        segment = Segment(steps, rate)
        lines["last iterate"].append(predict.last_iterate(model, segment).loss)
        lines["average"].append(predict.average(model, segment, first).loss)
        replicas = max(20, 2000 // size)
        result = simulate(model, segment, replicas=replicas, first=first, record=[steps], seed=seed)
        points["last iterate"].append(result.loss["last"][0])
        points["average"].append(result.loss["average"][0])
    series = [_line(name, sizes, values) for name, values in lines.items()]
    series += [_points(name, sizes, samples) for name, samples in points.items()]
    return Chart(
        "The gain from averaging grows with the number of parameters",
        "Expected loss above the minimum (λ = 1, α = 0.1, 400 steps, averaged from step 200). The "
        "noise of the last iterate adds a loss proportional to P. Averaging removes about 90% of "
        "it at every P, so the absolute gain is also proportional to P.",
        "number of parameters P",
        "expected excess loss",
        series,
    )


@_figure
def dependence(seed: int) -> Chart:
    """Plot Theorem 2: averaging helps only if iterates are far apart."""
    size, rate, steps, lam = 200, 0.2, 150, 1.0
    lengths = np.geomspace(0.5, 200, 9)
    model = Quadratic(Spectrum([lam], counts=[size]), noise=1.0, start=0.0)
    fine = np.geomspace(0.5, 200, 41)  # includes the simulated length scales
    predicted = [
        dependent(model, Segment(steps, rate), Absolute(1.0, float(ell))).average.variance[0]
        for ell in fine
    ]
    draws = []
    for j, ell in enumerate(lengths):
        result = simulate_dependent(
            model,
            Segment(steps, rate),
            lambda r, ell=ell, j=j: FourierNoise(  # type: ignore[misc]
                Absolute(1.0, float(ell)),
                size,
                features=8000,
                seed=seed + 1000 * j + r,
                structured=True,
            ),
            replicas=12,
        )
        draws.append((_sampled(result.average) ** 2).mean(1))
    independent = float(predict.average(model, Segment(steps, rate)).variance[0])
    fixed = float(np.sum((1 - (1 - rate * lam) ** (steps - np.arange(steps))) / (lam * steps)) ** 2)
    return Chart(
        "Noise that depends on the weights averages out only across distant iterates",
        "Variance of the average per direction when the noise is the gradient of one random "
        "function with length scale ℓ (P = 200, α = 0.2, 150 steps). If ℓ is much smaller than "
        "the distance between iterates, the noise acts as if it were independent. If ℓ is much "
        "larger, all steps see the same noise, and averaging cannot remove it. The prediction is "
        "to leading order in 1/P. The simulation uses random Fourier features, which add an error "
        "of about 2.5%.",
        "length scale ℓ of the noise",
        "variance of the average, per direction",
        [
            _line("dependent noise", fine, predicted),
            _points("dependent noise", lengths, draws),
            _line("independent noise", fine, np.full_like(fine, independent)),
            _line("same noise at every step", fine, np.full_like(fine, fixed)),
        ],
    )


@_figure
def stride(seed: int) -> Chart:
    """Plot the exact cost of sampling less often (the corollary on strides)."""
    steps, noise = 4000, 1.0
    strides = np.array([1, 2, 4, 8, 16, 32, 64, 128])
    series = []
    for rate in (0.01, 0.1, 0.5):
        base = float(closed_forms.average_variance(rate, 1.0, noise, steps))
        exact = [
            float(closed_forms.average_variance(rate, 1.0, noise, steps, int(k))) for k in strides
        ]
        label = f"αλ = {rate:g}"
        series.append(_line(label, strides, np.array(exact) / base))
        model = Quadratic(Spectrum([1.0], counts=[500]), noise=noise, start=0.0)
        draws = [
            simulate(
                model,
                Segment(steps, rate),
                replicas=4,
                first=int(k),
                every=int(k),
                seed=seed + int(k),
            ).average
            for k in strides[1::2]
        ]
        # The mean is zero, so the mean square is the variance.
        series.append(_points(label, strides[1::2], [_sampled(d) ** 2 for d in draws], unit=base))
    series.append(_line("factor κ, as printed in the paper", strides, strides, kind="printed"))
    return Chart(
        "A stride costs little while the skipped iterates are similar",
        "Variance of the average of every κ-th iterate over 4,000 steps, relative to the average "
        "of all iterates. The dashed line is the paper's factor κ, which would hold for "
        "independent iterates. Consecutive iterates are correlated, so a stride of κ = 1/αλ "
        "increases the variance by only about 10%.",
        "stride κ",
        "variance relative to κ = 1",
        series,
    )


@_figure
def ema(seed: int) -> Chart:
    """Plot the EMA against the average."""
    rate, lam, steps = 0.05, 2.0, 3000
    decays = np.array([0.5, 0.8, 0.9, 0.95, 0.98, 0.99, 0.995])
    window = 1 / (1 - decays)
    fine = np.union1d(decays, 1 - np.geomspace(0.5, 0.005, 60))
    model = Quadratic(Spectrum([lam], counts=[500]), noise=1.0, start=0.0)
    draws = [
        simulate(model, Segment(steps, rate), replicas=4, decay=float(d), seed=seed + i).ema
        for i, d in enumerate(decays)
    ]
    printed = [ERRATA["ema"].printed(rate, lam, 1.0, d) for d in fine]
    mean = float(predict.average(model, Segment(steps, rate)).variance[0])
    last = float(predict.last_iterate(model, Segment(steps, rate)).variance[0])
    return Chart(
        "The window of an EMA limits how much noise it removes",
        "Stationary variance of the exponential moving average (EMA) per direction, by window "
        "length 1/(1 − ρ) (λ = 2, α = 0.05, σ²/B = 1). A longer window reduces the variance, but "
        "longer training does not. The variance of the plain average keeps falling. The dashed "
        "line is the paper's formula, which treats iterates as independent.",
        "window 1/(1 − ρ) in steps",
        "variance per direction",
        [
            _line("EMA", 1 / (1 - fine), closed_forms.ema_variance(rate, lam, 1.0, fine)),
            _points("EMA", window, [_sampled(d) ** 2 for d in draws]),
            _line("last iterate", 1 / (1 - fine), np.full_like(fine, last)),
            _line("average of 3,000 steps", 1 / (1 - fine), np.full_like(fine, mean)),
            _line("EMA, as printed in the paper", 1 / (1 - fine), printed, kind="printed"),
        ],
    )


@_figure
def preconditioning(seed: int) -> Chart:
    """Plot Theorem 4: the effect of weight decay and preconditioning."""
    spectrum = power_law(500, exponent=1.0)
    # At these rates, both methods contract the sharpest direction equally.
    methods: dict[str, tuple[_Method, float]] = {
        "SGD": ({}, 0.5),
        "adaptive": ({"preconditioner": spectrum.eigenvalues + 1e-3}, 0.5),
    }
    decays = np.array([1e-4, 1e-3, 1e-2, 1e-1])
    fine = np.geomspace(1e-4, 1e-1, 25)
    steps, first = 2000, 1000
    series = []
    for name, (kwargs, rate) in methods.items():

        def model(gamma: float, kwargs: _Method = kwargs) -> Quadratic:
            return Quadratic(
                spectrum, noise=1e-3, start=0.0, minimum=1.0, weight_decay=float(gamma), **kwargs
            )

        segment = Segment(steps, rate)
        series += [
            _line(
                f"{name}, last iterate",
                fine,
                [predict.last_iterate(model(g), segment).loss for g in fine],
            ),
            _line(
                f"{name}, average",
                fine,
                [predict.average(model(g), segment, first).loss for g in fine],
            ),
        ]
        results = [
            simulate(
                model(g),
                segment,
                replicas=24,
                first=first,
                record=[steps],
                seed=[seed, len(series), i],
            )
            for i, g in enumerate(decays)
        ]
        series += [
            _points(f"{name}, last iterate", decays, [d.loss["last"][0] for d in results]),
            _points(f"{name}, average", decays, [d.loss["average"][0] for d in results]),
        ]
    return Chart(
        "Adaptive methods converge in flat directions, and averaging removes their noise",
        "Expected loss above the minimum by decoupled weight decay γ, in 500 directions with λ = "
        "1/i, after 2,000 steps from w = 0 toward w* = 1. The adaptive method divides the "
        "gradient and its noise by λ + ε. Weight decay shifts the point to which the iterates "
        "converge: to λw*/(γ + λ) for SGD and λw*/(γ(λ + ε) + λ) for the adaptive method. "
        "Averaging does not change this bias.",
        "weight decay γ",
        "expected excess loss",
        series,
    )


@_figure
def batch_growth(seed: int) -> Chart:
    """Plot learning rate drops and batch growth against averaging."""
    model = Quadratic(power_law(500, exponent=0.5), noise=1.0, start=1.0)
    rate, steps, half = 0.5, 2000, 1000
    schedules: dict[str, Callable[[int], list[Segment]]] = {
        "constant learning rate": lambda n: [Segment(n, rate)],
        "learning rate / 10 from step 1,000": lambda n: [
            Segment(min(n, half), rate),
            Segment(max(n - half, 0), rate / 10),
        ],
        "batch size × 10 from step 1,000": lambda n: [
            Segment(min(n, half), rate),
            Segment(max(n - half, 0), rate, 10.0),
        ],
    }
    at = np.unique(
        np.concatenate([np.geomspace(1, half, 25), np.geomspace(1, half, 25) + half]).astype(int)
    )
    shown = at[3::5].tolist()
    series = []
    simulations: dict[str, Simulation] = {}
    for i, (name, schedule) in enumerate(schedules.items()):
        series.append(
            _line(name, at, [predict.last_iterate(model, schedule(int(n))).loss for n in at])
        )
        simulations[name] = simulate(
            model, schedule(steps), replicas=24, first=half, record=shown, seed=seed + i
        )
        series.append(_points(name, shown, simulations[name].loss["last"]))
    later = at[at >= half]
    averaged = [predict.average(model, Segment(int(n), rate), first=half).loss for n in later]
    series.append(_line("average from step 1,000", later, averaged))
    kept = [i for i, n in enumerate(shown) if n >= half]
    loss = simulations["constant learning rate"].loss["average"][kept]
    series.append(_points("average from step 1,000", [shown[i] for i in kept], loss))
    return Chart(
        "A lower learning rate or a larger batch reduces noise once; averaging continues to",
        "Expected loss above the minimum in 500 directions with λ = 1/√i (α = 0.5, σ²/B = 1). A "
        "learning rate 10 times smaller leaves a tenth of the noise but makes progress 10 times "
        "slower. A batch 10 times larger leaves a tenth of the noise but costs 10 times as much "
        "per step. The average at the full learning rate is ahead of the learning rate drop from "
        "the start and of the larger batch after about 550 steps.",
        "steps",
        "expected excess loss",
        series,
        log_x=False,
    )


# Average or decay? Each method at its own best learning rate.

_METHODS: dict[Method, str] = {
    "constant": "constant rate, last iterate",
    "average": "constant rate, average",
    "ema": "constant rate, EMA",
    "wsd": "constant, then linear decay (WSD)",
    "cosine": "cosine decay",
    "linear": "linear decay",
}


def _regression(noise: float = 1.0) -> Quadratic:
    """Return 200 directions with noise proportional to their curvature, as in regression."""
    spectrum = power_law(200, exponent=1.0)
    return Quadratic(spectrum, noise=noise * spectrum.eigenvalues, start=1.0)


def _simulated(model: Quadratic, tuned: Tuned, seed: int) -> Array:
    """Return the losses of a tuned method in simulations."""
    point = tuned.method if tuned.method in ("average", "ema") else "last"
    result = simulate(
        model,
        tuned.segments(),
        replicas=16,
        first=tuned.first or 1,
        decay=tuned.decay,
        record=[tuned.steps],
        seed=seed,
    )
    losses: Array = result.loss[point][0]
    return losses


def _compared(
    model: Quadratic, x: ArrayLike, curves: dict[Method, list[Tuned]], shown: slice, seed: int
) -> list[Series]:
    """Return a line per method, and simulations of some of its points."""
    at, series = np.asarray(x), []
    for i, (method, curve) in enumerate(curves.items()):
        series.append(_line(_METHODS[method], at, [each.loss for each in curve]))
        samples = [_simulated(model, each, seed + 100 * i) for each in curve[shown]]
        series.append(_points(_METHODS[method], at[shown], samples))
    return series


@_figure
def budget(seed: int) -> Chart:
    """Plot the loss of each method against the number of steps."""
    model = _regression()
    budgets = np.round(np.geomspace(30, 30_000, 7)).astype(int)
    curves = loss_by_budget(model, budgets.tolist())
    return Chart(
        "At its best learning rate, the average beats every decay, more so the longer the training",
        "Expected loss above the minimum against the number of steps, with the learning rate of "
        "each method tuned for each number of steps, and with it the start of the average and the "
        "decay of the EMA (200 directions with λ = 1/i, σ²/B = λ, w_0 = 1). The average keeps a "
        "learning rate near the limit of stability, and its loss falls as 1/n. The others lower "
        "their rates as n grows.",
        "steps",
        "expected excess loss",
        _compared(model, budgets, curves, slice(1, 5, 1), seed),
    )


@_figure
def start(seed: int) -> Chart:
    """Plot the loss of the average against its start."""
    model, steps = _regression(), 3000
    starts = np.array([1, *range(100, steps, 100)])
    series = []
    for rate in (0.03, 0.1, 0.3, 1.0):
        segment, label = Segment(steps, rate), f"α = {rate:g}"
        losses = [moments.loss for moments in loss_by_start(model, segment, starts.tolist())]
        series.append(_line(label, starts, losses))
        shown = starts[4::8]
        samples = [
            simulate(
                model, segment, replicas=16, first=int(s), record=[steps], seed=seed + int(s)
            ).loss["average"][0]
            for s in shown
        ]
        series.append(_points(label, shown, samples))
    return Chart(
        "The best start of the average depends on the learning rate",
        "Expected loss of the average over steps T_avg to 3,000 (200 directions with λ = 1/i, "
        "σ²/B = λ, w_0 = 1). At a high learning rate, the iterates forget their starting point "
        "soon, and an early start is best: more iterates average out more noise. At a low "
        "learning rate, early iterates are still far from the minimum, and a late start is best.",
        "start of the average, T_avg",
        "expected excess loss",
        series,
        log_x=False,
    )


@_figure
def batch_size(seed: int) -> Chart:
    """Plot the loss of each method against the batch size, at equal cost."""
    model, examples, overhead = _regression(noise=10.0), 100_000, 16.0
    sizes = 2.0 ** np.arange(0, 13, 2)
    curves = loss_by_batch_size(model, examples, sizes, overhead=overhead)
    return Chart(
        "The average is best at every batch size, and its best batch is smaller",
        "Expected loss above the minimum at equal cost, with the learning rate of each method "
        "tuned for each batch size (200 directions with λ = 1/i, σ² = 10·λ, w_0 = 1). A step "
        "costs its B examples plus an overhead of 16. Training costs 100,000 examples. To the left "
        "of the optimum, overhead leaves too few examples. To the right, there are too few steps. "
        "An average removes noise by itself, so its optimum is at a smaller batch than that of "
        "the decays. At the largest batches, training has only tens of steps, and no method is "
        "good.",
        "batch size B",
        "expected excess loss",
        _compared(model, sizes, curves, slice(1, 7, 2), seed),
    )
