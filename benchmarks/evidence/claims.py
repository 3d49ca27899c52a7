"""The claims about averaging, and what the records say about each.

A verdict is "holds", "does not hold", or "cannot be said". Claims that one method beats another are
tested in pairs over seeds: all tests together (Stouffer), corrected for the number of claims, and
each test on its own, corrected for the number of tests (Holm). One task alone decides none. Claims
that something hardly matters hold if the 90% interval of the difference is inside a margin that
was fixed beforehand: half a point of accuracy, or one percent of the perplexity. They do not hold
if more of these intervals are outside the margin than inside.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Literal

from benchmarks.evidence import tuning
from benchmarks.evidence.contenders import (
    EASED,
    GADAM,
    GADAMX,
    INTERPOLATED,
    MUON,
    Reading,
    champions,
    champions_by_base,
    value,
)
from benchmarks.evidence.harness import OWN, Record
from benchmarks.evidence.methods import AVERAGES
from benchmarks.evidence.results import FOLDER
from benchmarks.evidence.statistics import (
    Paired,
    correlated,
    holm,
    sign_test,
    stouffer,
    unpaired,
)
from benchmarks.evidence.tasks import Workload
from gadam.runs.files import Document

__all__ = ["Claim", "Comparison", "Evidence", "judge"]

Verdict = Literal["holds", "does not hold", "cannot be said"]
RESULTS = FOLDER.parent
LEVEL = 0.05
POINTS = 0.5  # the margin in points of accuracy
RELATIVE = 0.01  # the margin in perplexity
LEAST_SEEDS = 3
LEAST_TASKS = 2  # for a claim about tasks in general
STRIDE = "half, paper's stride"  # of one step on the shortest tasks: nothing to compare
TASKS_FOR_SIGNS = 6  # with fewer, no sign test can be significant


@dataclass(frozen=True)
class Evidence:
    """What claims are judged by.

    Args:
        workloads: The tasks.
        records: The records of each task.
        readings: Per task, what was chosen on validation data, by the label of a contender.
    """

    workloads: dict[str, Workload]
    records: dict[str, list[Record]]
    readings: dict[str, dict[str, Reading]]

    def oriented(self, task: str, label: str) -> dict[int, float]:
        """Return test metrics by seed, negated where less is better.

        Args:
            task: The task.
            label: A contender.
        """
        reading = self.readings.get(task, {}).get(label)
        if reading is None:
            return {}
        sign = 1 if self.workloads[task].mode == "max" else -1
        return {seed: sign * number for seed, number in reading.test.items()}


@dataclass
class Comparison:
    """One test.

    Args:
        task: The task.
        what: What is compared.
        mean: The mean difference. Positive is in favor of the claim.
        interval: Its confidence interval: 95%, or 90% against a margin.
        pairs: The number of pairs.
        p: The p-value, corrected over all tests of all claims; None against a margin.
        favors: 1 if the test is in favor of the claim, -1 if it is against it, 0 if it is open.
        differences: The differences by seed, where the tests of a claim are pooled.
    """

    task: str
    what: str
    mean: float
    interval: tuple[float, float]
    pairs: int
    p: float | None = None
    favors: int = 0
    differences: dict[int, float] = field(default_factory=dict)


@dataclass
class Claim:
    """A claim and its verdict.

    Args:
        text: The claim.
        verdict: What the records say.
        reason: Why, in a sentence.
        comparisons: The tests behind it.
    """

    text: str
    verdict: Verdict = "cannot be said"
    reason: str = "No final runs yet."
    comparisons: list[Comparison] = field(default_factory=list)


def judge(evidence: Evidence) -> list[Claim]:
    """Return all claims with their verdicts.

    Args:
        evidence: What is known.
    """
    duels = _duels(evidence)
    _correct([comparison for claim in duels for comparison in claim.comparisons])
    _pool(duels)
    margins = _margins(evidence)
    for claim in margins:
        _conclude(claim)
        if claim.verdict != "holds" and _against(claim) > _in_favor(claim):
            claim.verdict = "does not hold"  # it is about all tasks: exceptions refute it
    widths = _widths(_archive("fig3d"))
    flatness = _flatness(_archive("tab-sharpness"))
    return [*duels, *margins, _rates(evidence), _monotone(evidence), widths, flatness]


def _archive(name: str) -> Document:
    content: Document = json.loads((RESULTS / f"{name}.json").read_text())
    return content


def _pool(claims: Sequence[Claim]) -> None:
    """Decide by all tests of a claim together, unless one of them is significant to the contrary.

    Tests on one task share runs, so their differences are first averaged by seed.
    """
    tested = [claim for claim in claims if claim.comparisons]
    combined, signs = [], []
    for claim in tested:
        tasks: dict[str, list[dict[int, float]]] = {}
        for one in claim.comparisons:
            tasks.setdefault(one.task, []).append(one.differences)
        means = [_mean_by_seed(parts) for parts in tasks.values()]
        found = [Paired.of(one, dict.fromkeys(one, 0.0)) for one in means]
        combined.append(stouffer([paired for paired in found if paired is not None]))
        signs.append([fmean(one.values()) > 0 for one in means])
    corrected = holm([p for _, p in combined])
    for claim, (z, _), p, better in zip(tested, combined, corrected, signs):
        tasks_tested = len(better)
        _conclude(claim)
        positive = sum(one.mean > 0 for one in claim.comparisons)
        claim.reason = (
            f"Pooled over {tasks_tested} task{'s' * (tasks_tested > 1)}: p = {p:.2g} "
            f"{'in favor' if z > 0 else 'against'}. Single tests: "
            f"{claim.reason.rstrip('.')}; {positive} of {len(claim.comparisons)} means in favor."
        )
        if tasks_tested >= TASKS_FOR_SIGNS:
            by_sign = sign_test(sum(better), tasks_tested - sum(better))
            claim.reason += f" Over tasks, a sign test has p = {by_sign:.2g}."
        against = any(one.favors * z < 0 for one in claim.comparisons)
        claim.verdict = "cannot be said"
        if p < LEVEL and not against and tasks_tested >= LEAST_TASKS:
            claim.verdict = "holds" if z > 0 else "does not hold"


def _mean_by_seed(parts: Sequence[dict[int, float]]) -> dict[int, float]:
    shared = set.intersection(*map(set, parts))
    return {seed: fmean(part[seed] for part in parts) for seed in shared}


def _in_favor(claim: Claim) -> int:
    return sum(one.favors > 0 for one in claim.comparisons)


def _against(claim: Claim) -> int:
    return sum(one.favors < 0 for one in claim.comparisons)


def _conclude(claim: Claim) -> None:
    """Decide by a majority of the tests, with none to the contrary."""
    tests = claim.comparisons
    if not tests:
        return
    favor, against = _in_favor(claim), _against(claim)
    claim.reason = f"{favor} of {len(tests)} tests in favor, {against} against."
    if 2 * favor > len(tests) and not against:
        claim.verdict = "holds"
    elif 2 * against > len(tests) and not favor:
        claim.verdict = "does not hold"


# ------------------------------------------------------------------------------- one beats another


def _duels(evidence: Evidence) -> list[Claim]:
    pairs: dict[str, list[tuple[str, str]]] = {
        "Averaging at a constant rate beats decaying the rate, for each optimizer.": [
            (GADAM, "AdamW, cosine"),
            (GADAM, "AdamW, WSD"),
            (GADAM, "AdamW, linear"),
            (GADAMX, "PadamW, cosine"),
            (GADAMX, "PadamW, WSD"),
            ("SWA", "SGD, cosine"),
            ("SWA", "SGD, WSD"),
            (MUON, "Muon, cosine"),
            (MUON, "Muon, WSD"),
        ],
        "Averaging at a constant rate beats a cosine with an average.": [
            (GADAM, "AdamW, cosine, average"),
            (GADAMX, "PadamW, cosine, average"),
            ("SWA", "SGD, cosine, average"),
            (MUON, "Muon, cosine, average"),
        ],
        "Averaging along WSD beats its last iterate.": [("Muon, WSD, average", "Muon, WSD")],
        "Averaging at a constant rate beats averaging along WSD.": [(MUON, "Muon, WSD, average")],
        "Averaging at a constant rate beats Schedule-Free.": [
            (GADAM, "Schedule-Free AdamW"),
            (GADAMX, "Schedule-Free AdamW"),
        ],
        "GadamX with interpolation beats Schedule-Free AdamW.": [
            (INTERPOLATED[1], "Schedule-Free AdamW"),
        ],
        "Easing the rate before averaging beats decaying it to zero.": [
            (EASED[0], "AdamW, WSD"),
            (EASED[1], "PadamW, WSD"),
            (EASED[2], "Muon, WSD"),
        ],
        "Easing the rate before averaging beats holding it.": [
            (EASED[0], GADAM),
            (EASED[1], GADAMX),
            (EASED[2], MUON),
        ],
        "Averaging at a constant rate beats GPA.": [
            (GADAM, "GPA-AdamW, cosine"),
            (GADAMX, "GPA-AdamW, cosine"),
        ],
        "Lookahead before the average starts improves Gadam.": [("Gadam + Lookahead", GADAM)],
        "Averaging needs decoupled weight decay.": [(GADAM, "Adam with L2, average")],
    }
    opponents = {"the best decayed schedule": "decayed", "the best other method": "rival"}
    averages = {"The best average": "average", "The best average at a constant rate": "held"}
    claims = [
        _best_against(evidence, f"{first} beats {second}.", averages[first], opponents[second])
        for second in opponents
        for first in averages
    ]
    claims.append(_best_of_each_base(evidence))
    for text, compared in pairs.items():
        claim = Claim(text)
        for task in evidence.workloads:
            for first, second in compared:
                a, b = evidence.oriented(task, first), evidence.oriented(task, second)
                claim.comparisons += _tested(task, f"{first} − {second}", a, b)
        claims.append(claim)
    claims.append(_noise(evidence))
    return claims


def _best_against(evidence: Evidence, text: str, average: str, opponent: str) -> Claim:
    """Compare what a user would choose on validation data: of averages, and of other methods."""
    claim = Claim(text)
    for task, workload in evidence.workloads.items():
        chosen = champions(workload, evidence.readings.get(task, {}))
        if average not in chosen or opponent not in chosen:
            continue
        first, second = chosen[average], chosen[opponent]
        a, b = evidence.oriented(task, first), evidence.oriented(task, second)
        claim.comparisons += _tested(task, f"{first} − {second}", a, b)
    return claim


def _best_of_each_base(evidence: Evidence) -> Claim:
    """Compare what a user who keeps the optimizer would choose on validation data."""
    claim = Claim("The best average of each optimizer beats its best decayed schedule.")
    for task, workload in evidence.workloads.items():
        for chosen in champions_by_base(workload, evidence.readings.get(task, {})).values():
            first, second = chosen["average"], chosen["decayed"]
            a, b = evidence.oriented(task, first), evidence.oriented(task, second)
            claim.comparisons += _tested(task, f"{first} − {second}", a, b)
    return claim


def _noise(evidence: Evidence) -> Claim:
    claim = Claim("The gain of averaging grows with label noise.")
    noisy, clean = "fashion-noisy", "fashion-clean"
    for first, second in ((GADAM, "AdamW, cosine"), (GADAMX, "PadamW, cosine")):
        gains = []
        for task in (noisy, clean):
            a, b = evidence.oriented(task, first), evidence.oriented(task, second)
            gains.append({seed: a[seed] - b[seed] for seed in a.keys() & b.keys()})
        what = f"gain of {first} with noise − without"
        claim.comparisons += _tested(f"{noisy}, {clean}", what, *gains)
    return claim


def _tested(
    task: str, what: str, first: dict[int, float], second: dict[int, float]
) -> Iterator[Comparison]:
    paired = Paired.of(first, second)
    if paired is not None and paired.count >= LEAST_SEEDS:
        differences = {seed: first[seed] - second[seed] for seed in first.keys() & second.keys()}
        yield Comparison(
            task,
            what,
            paired.mean,
            paired.interval(),
            paired.count,
            p=paired.p_value,
            differences=differences,
        )


def _correct(tests: Sequence[Comparison]) -> None:
    for one, p in zip(tests, holm([one.p for one in tests if one.p is not None])):
        one.p = p
        one.favors = int(math.copysign(1, one.mean)) if p < LEVEL else 0


# ---------------------------------------------------------------------- something hardly matters


def _margins(evidence: Evidence) -> list[Claim]:
    """Compare averages along the same runs: those of Gadam and GadamX in the last half."""
    claims = [
        Claim("Averaging every few steps is as good as every step."),
        Claim("The start of the average hardly matters."),
        Claim("GadamAuto is about as good as tuned Gadam."),
    ]
    points = ((STRIDE,), ("tail 25%", "tail 75%"), ("auto",))
    for claim, names in zip(claims, points):
        for task in evidence.workloads:
            for label in ("Gadam, last half", "GadamX, last half"):
                for name in names:
                    claim.comparisons += _within(evidence, task, label, name)
    claims[2].comparisons = [one for one in claims[2].comparisons if "GadamX" not in one.what]
    return claims


def _within(evidence: Evidence, task: str, label: str, point: str) -> Iterator[Comparison]:
    workload, reading = evidence.workloads[task], evidence.readings[task].get(label)
    steps = max((record.steps for record in evidence.records[task]), default=1)
    if reading is None or (point == STRIDE and AVERAGES[point](steps, workload.mode).every == 1):
        return
    is_accuracy = workload.metric == "accuracy"
    both: list[dict[int, float]] = [{}, {}]
    for record in evidence.records[task]:
        trial = record.trial
        if trial.seed == 0 or trial.knobs != reading.knobs:
            continue
        if trial.method != ("adamw held" if label.startswith("Gadam,") else "padamw held"):
            continue
        for values, name in zip(both, (point, "half")):
            number = value(record, name, workload.metric)
            if number is not None:
                values[trial.seed] = number if is_accuracy else -math.log(number)
    paired = Paired.of(*both)
    if paired is None or paired.count < LEAST_SEEDS:
        return
    margin = POINTS if is_accuracy else RELATIVE
    low, high = paired.interval(0.9)
    # A start that is better by more than the margin matters too. A stride or a trigger may be.
    two_sided = point.startswith("tail")
    inside = low > -margin and (high < margin or not two_sided)
    outside = high < -margin or (two_sided and low > margin)
    favors = int(inside) - int(outside)
    what = f"{label}: {point} − half"
    yield Comparison(task, what, paired.mean, (low, high), paired.count, favors=favors)


# --------------------------------------------------------------------------- curves and grids


def _rates(evidence: Evidence) -> Claim:
    """Compare the best learning rates of the average and of the iterate, along the same runs."""
    claim = Claim("Averaged runs prefer larger rates than plain ones.")
    found: dict[str, list[int]] = {}
    for task, workload in evidence.workloads.items():
        for base, name in (("sgd", "SGD"), ("adamw", "AdamW"), ("padamw", "PadamW")):
            method = f"{base} held"
            records = evidence.records[task]
            if method not in workload.methods or not tuning.is_tuned(workload, method, records):
                continue
            average = tuning.best(records, method, ("held", "half"), workload.mode)
            iterate = tuning.best(records, method, ("held", OWN), workload.mode)
            if average is not None and iterate is not None:
                sign = (average.lr > iterate.lr) - (average.lr < iterate.lr)
                found.setdefault(name, []).append(sign)
    signs = [sign for one in found.values() for sign in one]
    if not signs:
        claim.reason = "No complete grids yet."
        return claim
    larger, smaller = signs.count(1), signs.count(-1)
    p = sign_test(larger, smaller)
    by_base = ", ".join(f"{name} {one.count(1)} of {len(one)}" for name, one in found.items())
    claim.reason = (
        "At a constant rate, the best rate is larger for the average of the last half than for the "
        f"iterate in {larger} of {len(signs)} grids ({by_base}), equal in {signs.count(0)}, and "
        f"smaller in {smaller} (sign test, p = {p:.2g}, not corrected; validation data, seed 0)."
    )
    shares = [fmean(sign > 0 for sign in one) for one in found.values()]
    if p < LEVEL and larger > smaller and min(shares) >= 0.5:  # of each optimizer's grids
        claim.verdict = "holds"
    elif p < LEVEL and smaller > larger:
        claim.verdict = "does not hold"
    return claim


def _monotone(evidence: Evidence) -> Claim:
    """Compare how far the curves of averages and iterates fall below their best value."""
    claim = Claim("The curves of the average are nearly monotone.")
    falls: dict[str, list[float]] = {"half": [], OWN: []}
    for task, records in evidence.records.items():
        if task not in evidence.workloads:
            continue
        workload = evidence.workloads[task]
        chosen = {
            reading.knobs
            for label in ("Gadam, last half", "GadamX, last half", "SWA, last half")
            if (reading := evidence.readings[task].get(label)) is not None
        }
        for record in records:
            trial = record.trial
            if trial.seed == 0 or trial.schedule != "held" or trial.knobs not in chosen:
                continue
            steps = {step for step, *_ in record.validation.get("half", [])}
            for point in falls:
                curve = [m for s, m, _ in record.validation.get(point, []) if s in steps]
                if len(curve) > 1 and None not in curve:
                    numbers = [number for number in curve if number is not None]
                    falls[point].append(_largest_fall(numbers, workload.metric == "accuracy"))
    if len(falls["half"]) < LEAST_SEEDS:
        return claim
    small = sum(fall <= 1 for fall in falls["half"])
    total = len(falls["half"])
    claim.reason = (
        f"On validation data, {small} of {total} curves of the average over the last half never "
        f"fall by more than the margin. The mean largest fall is {fmean(falls['half']):.2f} "
        f"margins for the average and {fmean(falls[OWN]):.2f} for the iterate at the same steps."
    )
    if small >= 0.9 * total:
        claim.verdict = "holds"
    elif small <= 0.5 * total:
        claim.verdict = "does not hold"
    return claim


def _largest_fall(curve: list[float], is_accuracy: bool) -> float:
    """Return how far a curve falls from its best value so far at most, in margins."""
    oriented = curve if is_accuracy else [-math.log(number) for number in curve]
    best, fall = -math.inf, 0.0
    for number in oriented:
        best = max(best, number)
        fall = max(fall, best - number)
    return fall / (POINTS if is_accuracy else RELATIVE)


# ------------------------------------------------------------------------------ measured elsewhere


def _flatness(archive: Document) -> Claim:
    """Correlate curvature and test accuracy over methods: flat points would have to be better."""
    claim = Claim("Flatness does not explain the gain.")
    values = archive["files"]["analysis.json"]["parts"]["curvature"]["values"]
    points = [next(iter(found.values())) for found in values.values()]
    accuracies = [point["test"]["mean"] for point in points]
    for measure in ("spectral norm", "squared norm a parameter", "trace a parameter"):
        r, low, high = correlated([point[measure]["mean"] for point in points], accuracies)
        what = f"correlation of test accuracy with the {measure.replace(' a ', ' per ')}"
        favors = int(low > 0) - int(high < 0)
        claim.comparisons.append(
            Comparison("tab-sharpness", what, r, (low, high), len(points), favors=favors)
        )
    _conclude(claim)
    found = [
        f"{one.mean:.2f} ({one.interval[0]:.2f} to {one.interval[1]:.2f})"
        for one in claim.comparisons
    ]
    claim.reason = (
        f"Over the {len(points)} rows of `tab-sharpness`, test accuracy has correlations of "
        f"{', '.join(found)} with the Hessian's spectral norm, squared norm, and trace. They would "
        "be negative if flat points were better: see [analysis.md](analysis.md#curvature)."
    )
    return claim


def _widths(archive: Document) -> Claim:
    """Compare the gains on the widest and the narrowest network, both on the same images."""
    claim = Claim("The gain grows with parameters per example.")
    gains = archive["files"]["analysis.json"]["parts"]["parameters"]["values"]
    for method in ("SWA", GADAM, GADAMX):
        wide, narrow = (gains[f"{width} {method}"]["gain"] for width in ("wide", "narrow"))
        test = unpaired(*((one["mean"], one["error"], one["runs"]) for one in (wide, narrow)))
        what = f"gain of {method}, wide − narrow"
        claim.comparisons.append(
            Comparison("fig3d", what, test.mean, test.interval(), wide["runs"], p=test.p_value)
        )
    _correct(claim.comparisons)
    _conclude(claim)
    ratio = gains["wide SWA"]["parameters"] / gains["narrow SWA"]["parameters"]
    claim.reason += (
        f" One network at {ratio:.0f} times as many parameters, on the same images: see `fig3d` in "
        "[analysis.md](analysis.md#number-of-parameters)."
    )
    return claim
