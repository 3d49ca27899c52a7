"""The analysis finds the answers that synthetic records were made with."""

from __future__ import annotations

import copy
import math
import sys
import xml.etree.ElementTree
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from statistics import stdev
from typing import Any

import pytest
import scipy.stats
from benchmarks.evidence.contenders import CHAMPIONS, CONTENDERS
from benchmarks.evidence.equal_time import on_curve
from benchmarks.evidence.harness import OWN, Record, Trial
from benchmarks.evidence.methods import averages_itself
from benchmarks.evidence.statistics import (
    Paired,
    correlated,
    holm,
    mean_and_error,
    sign_test,
    stouffer,
    unpaired,
)
from benchmarks.evidence.tasks import TASKS, Workload
from benchmarks.evidence.tuning import pending
from hypothesis import assume, given
from hypothesis import strategies as st

import gadam
from benchmarks.evidence import analysis, claims, figures

ROOT = Path(__file__).parents[3]
METHODS = ("adamw cosine", "schedule-free-adamw", "padamw held", "adamw held")
POINTS = ("half", "half, paper's stride", "tail 25%", "tail 75%", "auto", "lawa", "ema 5%", "bema")
# What a seed adds to every method, and to Schedule-Free besides: in pairs, only the latter counts.
SHARED = {1: 3.0, 2: -2.0, 3: 5.0, 4: 0.0, 5: -6.0}
OWN_NOISE = {1: 0.1, 2: -0.1, 3: 0.2, 4: -0.2, 5: 0.0}
# Test accuracies of the iterate and of all averages; the last half of AdamW is a little better.
TRUTH = {
    "adamw cosine": (79.0, 80.5),
    "schedule-free-adamw": (81.0, math.nan),
    "padamw held": (75.0, 84.0),
    "padamw wsd": (81.5, 84.0),
    "adamw held": (74.0, 82.0),
    "adamw wsd": (80.0, 82.0),
}
# A step of ours takes twice as long as AdamW's, and Schedule-Free's as long as ours.
STEP = {"AdamW": 1.0, "Gadam": 2.0, "PadamW": 1.0, "GadamX": 2.0, "Schedule-Free AdamW": 2.0}
COSTS = {
    "fashion-noisy": {
        "step": STEP,
        "evaluation": 5.0,
        "run": {label: 100 * step + 12 * 5.0 for label, step in STEP.items()},
        "steps": 100,
    }
}


def simulated(trial: Trial) -> list[Record]:
    """Return records whose metrics are known, with the best setting at the center."""
    lr, decay = TASKS["fashion-noisy"].centers[trial.base]
    far = abs(math.log10(trial.knobs.lr / lr)) + abs(math.log10(trial.knobs.weight_decay / decay))
    names = [trial.method, f"{trial.base} wsd"] if trial.method.endswith("held") else [trial.method]
    records = []
    for name in names:
        own, average = TRUTH[name]
        seed = SHARED.get(trial.seed, 0.0) + OWN_NOISE.get(trial.seed, 0.0) * (own == 81.0)
        values = {OWN: own - 10 * far + seed}
        if not averages_itself(trial.base):
            values |= dict.fromkeys(POINTS, average - 3 * far + seed)
            values["half"] += 0.2
            values["tail 25%"] -= 2.0
        records.append(
            Record(
                replace(trial, method=name),
                100,
                {point: [(50, v - 1, 1.0), (100, v, 1.0)] for point, v in values.items()},
                {point: {"accuracy": v - 1} for point, v in values.items()},
                seconds={"train": 10.0, "refresh": 1.0, "evaluate": 2.0},
                versions={"torch": "2", "harness": "abc"},
            )
        )
    return records


def finished(workload: Workload) -> list[Record]:
    records: list[Record] = []
    while trials := pending(workload, records):
        for trial in trials:
            records += simulated(trial)
    return records


@pytest.fixture
def tasks(monkeypatch: pytest.MonkeyPatch) -> dict[str, Workload]:
    chosen = {
        "fashion-noisy": replace(TASKS["fashion-noisy"], methods=METHODS),
        "ablation": TASKS["ablation"],
    }
    monkeypatch.setattr(analysis, "TASKS", chosen)
    monkeypatch.setattr(claims, "LEAST_TASKS", 1)
    every_second = gadam.Averaging(start=50, every=2)
    monkeypatch.setitem(claims.AVERAGES, claims.STRIDE, lambda *_: every_second)
    return chosen


@pytest.fixture
def summary(tasks: dict[str, Workload]) -> dict[str, Any]:
    records = {"fashion-noisy": finished(tasks["fashion-noisy"]), "ablation": []}
    return analysis.summarize(records.__getitem__, COSTS)


def rows(summary: dict[str, Any]) -> dict[str, Any]:
    return {row["label"]: row for row in summary["tasks"]["fashion-noisy"]["rows"]}


def claim(summary: dict[str, Any], words: str) -> dict[str, Any]:
    (found,) = [one for one in summary["claims"] if words in one["text"]]
    return dict(found)


def test_equal_time(summary: dict[str, Any]) -> None:
    found = summary["equal time"]["fashion-noisy"]["Gadam"]
    # AdamW's time pays for half of the steps, where every curve is a point lower than at its end.
    cosine = found["AdamW, cosine"]
    assert cosine["share"] == pytest.approx(0.5)
    assert cosine["cost"] == pytest.approx(1.0)
    assert cosine["mean"] == pytest.approx(82.0 - 1 - 79.0)
    # Schedule-Free pays for all of them, and has noise of its own.
    free = found["Schedule-Free AdamW"]
    assert free["share"] == pytest.approx(1.0)
    assert free["cost"] == pytest.approx(0.0)
    values = [82.0 - 81.0 - noise for noise in OWN_NOISE.values()]
    interval = scipy.stats.ttest_1samp(values, 0).confidence_interval()
    assert free["interval"] == pytest.approx([interval.low, interval.high])


@given(st.integers(1, 99), st.floats(-5, 5), st.floats(-5, 5))
def test_metric_between_evaluations(step: int, low: float, slope: float) -> None:
    curve = [(at, low + slope * at) for at in (10, 40, 90)]
    found = on_curve(curve, step)
    assert (found is None) == (step < 10 or step > 90)
    if found is not None:
        assert found == pytest.approx(low + slope * step)
        assert on_curve([(at, None) for at, _ in curve], step) is None


def test_means_and_paired_differences(summary: dict[str, Any]) -> None:
    found = rows(summary)
    assert found["Gadam"]["mean"] == pytest.approx(82.2 - 1)
    assert found["Gadam"]["error"] == pytest.approx(scipy.stats.sem([*SHARED.values()]))
    assert found["Gadam"]["point"] == "half"
    assert found["AdamW, WSD"]["mean"] == pytest.approx(79)
    # The difference between seeds cancels: only Schedule-Free's own noise remains.
    difference = found["Schedule-Free AdamW"]["differences"]["Gadam"]
    values = [81.0 - 82.2 + noise for noise in OWN_NOISE.values()]
    expected = scipy.stats.ttest_1samp(values, 0)
    assert difference["mean"] == pytest.approx(-1.2)
    assert difference["p"] == pytest.approx(expected.pvalue)
    assert difference["interval"] == pytest.approx([*expected.confidence_interval()])
    assert difference["p"] < difference["holm p"] < 0.05
    assert found["GadamX"]["differences"]["Gadam"]["mean"] == pytest.approx(2)
    assert next(iter(found)) == "GadamX"


def test_verdicts(summary: dict[str, Any]) -> None:
    assert claim(summary, "beats decaying the rate")["verdict"] == "holds"
    assert claim(summary, "Averaging at a constant rate beats Schedule-Free")["verdict"] == "holds"
    for average in ("The best average", "The best average at a constant rate"):
        for other in ("the best decayed schedule", "the best other method"):
            assert claim(summary, f"{average} beats {other}.")["verdict"] == "holds"
    assert claim(summary, "every few steps")["verdict"] == "holds"  # the stride costs 0.2 points
    assert claim(summary, "GadamAuto")["verdict"] == "holds"
    # One start costs 2.2 points, the other 0.2.
    start = claim(summary, "start of the average")
    assert start["verdict"] == "cannot be said"
    assert start["reason"] == "2 of 4 tests in favor, 2 against."
    assert claim(summary, "monotone")["verdict"] == "holds"
    assert claim(summary, "label noise")["verdict"] == "cannot be said"
    assert claim(summary, "decoupled")["reason"] == "No final runs yet."


def test_champions_are_chosen_on_validation_data(tasks: dict[str, Workload]) -> None:
    """The best on test data is not the choice: the user does not have it."""
    records = finished(tasks["fashion-noisy"])
    for record in records:
        if record.trial.method == "adamw cosine":
            record.test[OWN]["accuracy"] = 130.0 - record.trial.seed
            value = record.final("auto") + 3  # below GadamX, above others
            record.validation["auto"][-1] = (record.steps, value, 1.0)
    found = analysis.summarize({"fashion-noisy": records, "ablation": []}.__getitem__, COSTS)
    assert found["tasks"]["fashion-noisy"]["champions"] == {
        "average": "GadamX",
        "held": "GadamX",
        "decayed": "PadamW, WSD",
        "rival": "AdamW, cosine, average",
    }
    for words, other in (("decayed schedule", "PadamW, WSD"), ("other", "AdamW, cosine, average")):
        (test,) = claim(found, f"The best average beats the best {words}")["comparisons"]
        assert test["what"] == f"GadamX − {other}"


def test_champions_of_each_optimizer(summary: dict[str, Any]) -> None:
    assert summary["tasks"]["fashion-noisy"]["champions by base"] == {
        "AdamW": {
            "average": "Gadam",
            "held": "Gadam",
            "decayed": "AdamW, WSD",
            "rival": "AdamW, cosine, average",
        },
        "PadamW": {
            "average": "GadamX",
            "held": "GadamX",
            "decayed": "PadamW, WSD",
            "rival": "PadamW, WSD",
        },
    }
    tests = claim(summary, "best average of each optimizer")["comparisons"]
    assert [one["what"] for one in tests] == ["Gadam − AdamW, WSD", "GadamX − PadamW, WSD"]
    assert [one["mean"] for one in tests] == pytest.approx([82.2 - 80, 84.2 - 81.5])


def test_champions_have_all_final_seeds(tasks: dict[str, Workload]) -> None:
    workload = tasks["fashion-noisy"]
    short = [
        record
        for record in finished(workload)
        if record.trial.base != "padamw" or record.trial.seed != 5
    ]
    found = analysis.summarize({"fashion-noisy": short, "ablation": []}.__getitem__, COSTS)
    champions = found["tasks"]["fashion-noisy"]["champions"]
    assert champions["average"] == "Gadam"
    assert champions["decayed"] == "AdamW, WSD"


@pytest.mark.parametrize(
    ("label", "family"),
    [
        *((label, "average") for label in ("Gadam", "GadamX, eased rate", "SWA", "Muon, average")),
        *((label, "average") for label in ("GadamX, interpolated", "LAWA", "Gadam, last half")),
        *((label, "decayed") for label in ("AdamW, cosine", "Muon, WSD", "AdamW, linear")),
        *((label, "average") for label in ("Muon, average, eased rate", "Gadam + Lookahead")),
        *((label, "other") for label in ("SGD, cosine, average", "Schedule-Free SGD")),
        *((label, "other") for label in ("Muon, cosine, average", "Muon, WSD, average")),
        ("GPA-AdamW, cosine", "other"),
    ],
)
def test_families(label: str, family: str) -> None:
    assert CONTENDERS[label].family == family
    assert (label in CHAMPIONS) == (family == "average" and "half" not in label and label != "LAWA")


def test_a_stride_of_one_step_is_not_compared(
    tasks: dict[str, Workload], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(claims.AVERAGES, claims.STRIDE, lambda *_: gadam.Averaging(start=50))
    records = {"fashion-noisy": finished(tasks["fashion-noisy"]), "ablation": []}
    found = analysis.summarize(records.__getitem__, COSTS)
    assert claim(found, "every few steps")["comparisons"] == []


def test_an_average_that_leads_is_not_one_that_only_watches(
    monkeypatch: pytest.MonkeyPatch, tasks: dict[str, Workload]
) -> None:
    methods = (*METHODS, "gadamx-between")
    workload = replace(tasks["fashion-noisy"], methods=methods)
    monkeypatch.setitem(tasks, "fashion-noisy", workload)
    monkeypatch.setitem(TRUTH, "gadamx-between", (90.0, math.nan))
    records = {"fashion-noisy": finished(workload), "ablation": []}
    found = analysis.summarize(records.__getitem__, {})["tasks"]["fashion-noisy"]["champions"]
    assert (found["average"], found["held"]) == ("GadamX, interpolated", "GadamX")


def test_one_task_decides_no_claim_about_tasks(
    tasks: dict[str, Workload], monkeypatch: pytest.MonkeyPatch
) -> None:
    records = {"fashion-noisy": finished(tasks["fashion-noisy"]), "ablation": []}
    monkeypatch.setattr(claims, "LEAST_TASKS", 2)
    found = claim(analysis.summarize(records.__getitem__, COSTS), "beats decaying the rate")
    assert found["verdict"] == "cannot be said"
    assert found["reason"].startswith("Pooled over 1 task: p = ")


def test_a_start_that_matters_more_often_than_not(tasks: dict[str, Workload]) -> None:
    records = finished(tasks["fashion-noisy"])
    for record in records:
        if record.trial.method == "adamw held":
            record.test["tail 75%"]["accuracy"] = 60.0 + SHARED.get(record.trial.seed, 0.0)
    found = analysis.summarize({"fashion-noisy": records, "ablation": []}.__getitem__, COSTS)
    start = claim(found, "start of the average")
    assert start["reason"] == "1 of 4 tests in favor, 3 against."
    assert start["verdict"] == "does not hold"


def test_averages_are_compared_along_the_same_runs(summary: dict[str, Any]) -> None:
    held, cosine = summary["averages"]["held"], summary["averages"]["cosine"]
    # Every average but the last half and the last 25% is the same in the simulation.
    assert held["lawa"]["tasks"]["fashion-noisy"] == pytest.approx(-0.2)
    assert held["tail 25%"]["worst"] == held["tail 25%"]["mean"] == pytest.approx(-2.2)
    assert held[OWN]["mean"] == pytest.approx((74 - 82.2 + 75 - 84.2) / 2)  # of both bases
    assert "half" not in held
    assert cosine["half"]["mean"] == pytest.approx(80.7 - 79)
    assert OWN not in cosine


def test_unpaired_means_are_compared_as_in_scipy() -> None:
    first, second = [1.0, 2.5, 3.0], [0.5, 0.7, 0.2, 0.9]
    ours = unpaired(*((*mean_and_error(one), len(one)) for one in (first, second)))  # type: ignore[arg-type]
    theirs = scipy.stats.ttest_ind(first, second, equal_var=False)
    assert ours.p_value == pytest.approx(theirs.pvalue)
    assert ours.interval() == pytest.approx(tuple(theirs.confidence_interval()))


def test_tests_are_combined_as_in_scipy() -> None:
    samples = ([1.0, 2.5, 3.0, 0.4], [0.5, -0.7, 0.2, 0.9], [-0.1, -0.2, -0.4, 0.0])
    parts = [Paired.of(dict(enumerate(one)), dict.fromkeys(range(4), 0.0)) for one in samples]
    z, p_value = stouffer([part for part in parts if part is not None])
    one_sided = [scipy.stats.ttest_1samp(one, 0, alternative="greater").pvalue for one in samples]
    theirs = scipy.stats.combine_pvalues(one_sided, "stouffer")
    assert z == pytest.approx(theirs.statistic)
    assert p_value == pytest.approx(2 * min(theirs.pvalue, 1 - theirs.pvalue))


def test_gains_by_width_come_from_the_committed_archive(summary: dict[str, Any]) -> None:
    found = claim(summary, "parameters per example")
    assert [one["what"].split()[2] for one in found["comparisons"]] == ["SWA,", "Gadam,", "GadamX,"]
    assert found["verdict"] == "holds"
    assert "3 of 3 tests in favor" in found["reason"]


def test_flatness_is_judged_by_the_committed_curvatures(summary: dict[str, Any]) -> None:
    found = claim(summary, "Flatness")
    assert len(found["comparisons"]) == 3
    assert all(
        low < one["mean"] < high for one in found["comparisons"] for low, high in [one["interval"]]
    )
    assert f"{found['comparisons'][0]['mean']:.2f} (" in found["reason"]


@pytest.mark.parametrize(("slope", "verdict"), [(1, "holds"), (-1, "does not hold")])
def test_flatness_against_known_curvatures(slope: int, verdict: str) -> None:
    """If flat points have lower accuracies, flatness does not explain the gain."""
    measures = ("spectral norm", "squared norm a parameter", "trace a parameter")
    values = {
        f"row {i}": {
            "average": {
                "test": {"mean": 80.0 + slope * i + 0.01 * (-1) ** i},
                **{measure: {"mean": float(i)} for measure in measures},
            }
        }
        for i in range(6)
    }
    archive = {"files": {"analysis.json": {"parts": {"curvature": {"values": values}}}}}
    assert claims._flatness(archive).verdict == verdict


@given(st.lists(st.tuples(st.floats(-9, 9), st.floats(-9, 9)), min_size=4, max_size=12))
def test_correlations_are_those_of_scipy(pairs: list[tuple[float, float]]) -> None:
    first, second = ([pair[i] for pair in pairs] for i in (0, 1))
    assume(min(stdev(first), stdev(second)) > 1e-3)
    expected = scipy.stats.pearsonr(first, second)
    assume(abs(expected.statistic) < 0.999)
    interval = expected.confidence_interval(0.95)
    assert correlated(first, second) == pytest.approx((expected.statistic, *interval), abs=1e-6)


def test_a_rival_that_leads_is_said_to_lead(
    tasks: dict[str, Workload], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(TRUTH, "schedule-free-adamw", (90.0, math.nan))
    records = {"fashion-noisy": finished(tasks["fashion-noisy"]), "ablation": []}
    found = analysis.summarize(records.__getitem__, COSTS)
    assert (
        claim(found, "Averaging at a constant rate beats Schedule-Free")["verdict"]
        == "does not hold"
    )
    assert claim(found, "beats decaying the rate")["verdict"] == "holds"


def test_choices_are_made_on_validation_data(tasks: dict[str, Workload]) -> None:
    records = finished(tasks["fashion-noisy"])
    for record in records:
        if record.trial.seed == 0:  # its test metrics say the opposite of its validation metrics
            for metrics in record.test.values():
                metrics["accuracy"] = 200 - (metrics["accuracy"] or 0)
    found = rows(analysis.summarize({"fashion-noisy": records, "ablation": []}.__getitem__, COSTS))
    lr, decay = TASKS["fashion-noisy"].centers["adamw"]
    assert found["Gadam"]["knobs"] == {"lr": lr, "weight_decay": decay, "beta": 0.9}
    assert found["Gadam"]["mean"] == pytest.approx(81.2)


def test_grids_and_untuned_defaults(summary: dict[str, Any]) -> None:
    grid = summary["tasks"]["fashion-noisy"]["grids"]["AdamW, WSD"]
    step = math.log10(3 / 1), math.log10(10 / 3)
    far = sorted(a + b for a in (0, *step) for b in (0, *step))
    assert grid["best"] == pytest.approx(79)
    assert grid["median"] == pytest.approx(79 - 10 * far[4])
    assert grid["area"] == pytest.approx(10 * sum(far) / 9)
    assert grid["quartiles"][0] < grid["median"] < grid["quartiles"][1]
    assert summary["untuned"]["Gadam"]["mean"] == 0  # the center is the best setting


def test_partial_data_is_said_to_be_partial(tasks: dict[str, Workload]) -> None:
    everything = finished(tasks["fashion-noisy"])
    for count in (0, 1, 12, 40, 70):
        records = {"fashion-noisy": everything[:count], "ablation": []}
        found = analysis.summarize(records.__getitem__, COSTS)
        task = found["tasks"]["fashion-noisy"]
        assert task["records"] == count
        assert task["remaining runs"] > 0
        if count < 12:
            assert "adamw held" in task["missing methods"]
            here = [one for one in found["claims"] if "fig3d" not in one["reason"]]
            assert {one["verdict"] for one in here} == {"cannot be said"}


def test_the_ablation_finds_the_switch_that_matters(tasks: dict[str, Workload]) -> None:
    def run(trial: Trial) -> Record:
        gain = 3.0 * trial.base.startswith("between") + 0.5 * ("/late" in trial.base)
        far = abs(math.log10(trial.knobs.lr / 1e-2)) + abs(
            math.log10(trial.knobs.weight_decay / 0.3)
        )
        noise = {1: 0.02, 2: -0.03, 3: 0.01}.get(trial.seed, 0.0) * len(trial.base)
        number = 30 + gain - far + noise
        return Record(trial, 10, {OWN: [(10, number, 1.0)]}, {OWN: {"accuracy": number}})

    records: list[Record] = []
    while trials := pending(tasks["ablation"], records):
        records += map(run, trials)
    every = {"fashion-noisy": [], "ablation": records}
    found = analysis.summarize(every.__getitem__, COSTS)["ablation"]
    effects = found["effects"]
    assert len(found["cells"]) == 9
    between, plain = "gradient between iterate and average", "without momentum"
    for momentum in (plain, "with momentum"):
        effect = effects[f"{between}, {momentum}"]
        assert effect["mean"] == pytest.approx(3, abs=0.1)
        assert effect["p"] < 1e-4
    for where in ("gradient at the iterate", "gradient between"):
        late = effects[f"weight on late iterates, {where}, {plain}"]["mean"]
        assert late == pytest.approx(0.5, abs=0.1)
        assert abs(effects[f"momentum, {where}"]["mean"]) < 0.2
    assert [one["pairs"] for one in effects.values()] == [6, 6, 6, 6, 3, 3, 3]


def test_figures_are_xml_with_a_row_per_method(summary: dict[str, Any], tmp_path: Path) -> None:
    (file,) = figures.write(summary, tmp_path)
    root = xml.etree.ElementTree.parse(file).getroot()
    texts = [element.text for element in root.iter("{http://www.w3.org/2000/svg}text")]
    circles = [*root.iter("{http://www.w3.org/2000/svg}circle")]
    compared = [row for row in rows(summary).values() if "Gadam" in row["differences"]]
    assert len(circles) == len(compared)
    assert {row["label"] for row in compared} <= set(texts)
    for circle in circles:
        assert figures.LEFT <= float(circle.attrib["cx"]) <= figures.WIDTH - figures.RIGHT
    assert "prefers-color-scheme" not in file.read_text()  # the site has its own switch
    empty = {**summary["tasks"]["fashion-noisy"], "rows": []}
    assert figures.forest(empty) is None


@pytest.fixture
def tables(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Any], dict[str, str]]]:
    monkeypatch.syspath_prepend(ROOT)
    from tools import evidence, evidence_summary

    def written(summary: dict[str, Any]) -> dict[str, str]:
        empty = analysis.summarize(lambda _: [], COSTS)
        tasks = dict.fromkeys(evidence_summary.TASKS, empty["tasks"]["fashion-noisy"])
        content = {**summary, "tasks": {**tasks, **summary["tasks"]}}
        monkeypatch.setattr(evidence_summary, "read", lambda: content)
        return {name: table() for name, table in evidence.TABLES.items()}

    yield written
    for name in ("evidence", "evidence_details", "evidence_summary"):
        sys.modules.pop(f"tools.{name}", None)


CONFIRMED: dict[str, Any] = {
    "seeds": [6, 7, 8, 9, 10],
    "tasks": {
        "fashion-noisy": {
            "average": "GadamX",
            "decayed": {
                "label": "PadamW, WSD",
                "other": 80.0,
                "mean": 1.5,
                "interval": [0.5, 2.5],
                "pairs": 4,
            },
        }
    },
    "pooled": {"decayed": {"p": 0.01, "in favor": True, "tasks": 1, "positive": 1}},
}


def test_the_page_says_what_the_summary_says(
    summary: dict[str, Any], tables: Callable[[Any], dict[str, str]]
) -> None:
    page = tables(summary)
    assert page["evidence-answer"] == "No final runs yet."
    assert "| 83.20 ± 1.92 |" in page["evidence-fashion-noisy"]
    assert "Schedule-Free AdamW | 0.01, 0.3, 0.9" in page["evidence-fashion-noisy"]
    assert "-1.20 (" in page["evidence-fashion-noisy"]
    assert page["evidence-ablation"] == "No runs yet."
    assert "**holds**" in page["evidence-claims"]
    # GadamX is best on validation data: +2.7 to PadamW with WSD, +3.2 to Schedule-Free.
    situation = next(line for line in page["evidence-situations"].splitlines() if "GadamX" in line)
    assert situation.startswith("| Labels are wrong |")
    assert "| **+2.7** (+2.7 to +2.7) (PadamW, WSD) |  | **+3.2** (+3.0 to +3.4) |" in situation
    # Half of the steps fit into the time of PadamW, where the EMA is a point lower: 83 to 81.5.
    at_equal_time = page["evidence-equal-time"].splitlines()[2]
    assert "| GadamX | 50.0% | 1.00 | **+1.5** (+1.5 to +1.5) (PadamW, WSD) |" in at_equal_time
    # One of several tasks with images has runs, so there is no mean over them.
    assert "| last 25% | -2.20 | -2.20 |  | -2.20 |" in page["evidence-averages-held"]
    # The last quarter of AdamW is one point ahead of a cosine.
    assert "| **+1.0** (+1.0 to +1.0) | GadamX |" in page["evidence-overview"]
    gains = "|  | **+2.2** (+2.2 to +2.2), Gadam | **+2.7** (+2.7 to +2.7), GadamX |  |"
    assert gains in page["evidence-by-optimizer"]
    assert "all choices made before" not in page["evidence-overview"]
    assert page["evidence-confirmation"] == "No runs yet."


def test_the_overview_names_the_tasks_where_a_rival_is_ahead(
    summary: dict[str, Any], tables: Callable[[Any], dict[str, str]]
) -> None:
    lost = copy.deepcopy(summary)
    rival = rows(lost)["Schedule-Free AdamW"]
    lost["tasks"]["fashion-noisy"]["champions"]["rival"] = rival["label"]
    for one in rival["differences"].values():
        one["mean"], one["interval"] = 2.0, [1.0, 3.0]
    page = tables({**lost, "confirmation": CONFIRMED})["evidence-overview"]
    assert "**-2.0** (-3.0 to -1.0) (Schedule-Free AdamW) |" in page
    ahead = "{} are significantly ahead of the best average: {} on Fashion-MNIST"
    assert ahead.format("other methods", '"Schedule-Free AdamW"') in page
    lost["tasks"]["fashion-noisy"]["champions"]["rival"] = "AdamW, cosine, average"
    rows(lost)["AdamW, cosine, average"]["differences"] = rival["differences"]
    page = tables({**lost, "confirmation": CONFIRMED})["evidence-overview"]
    who = "averages along a decayed schedule", '"AdamW, cosine, average"'
    assert ahead.format(*who) in page


def test_the_page_shows_the_confirmation(
    summary: dict[str, Any], tables: Callable[[Any], dict[str, str]]
) -> None:
    page = tables({**summary, "confirmation": CONFIRMED})
    row = page["evidence-confirmation"].splitlines()[2]
    assert "| GadamX | **+1.50** (+0.50 to +2.50, 4 seeds so far), PadamW, WSD |  |" in row
    assert "p = 0.01 in favor; 1 of 1 means are positive" in page["evidence-confirmation"]
    assert "for which a sign test has p = 1." in page["evidence-confirmation"]
    assert "best decayed schedule | 1 of 1 | 1 | 0 | 0.01 |" in page["evidence-overview"]
    assert "No other method is significantly ahead" in page["evidence-overview"]
    assert "beats the best decayed schedule on 1, loses on none" in page["evidence-answer"]
    assert "The gains are 1.5 points on Fashion-MNIST" in page["evidence-answer"]
    situation = next(line for line in page["evidence-situations"].splitlines() if "GadamX" in line)
    assert "| **+1.5** (+0.5 to +2.5) |" in situation
    text = {**CONFIRMED, "tasks": {"ptb-lstm-short": CONFIRMED["tasks"]["fashion-noisy"]}}
    empty = summary["tasks"]["fashion-noisy"]
    lstm = {**empty, "title": "LSTM", "metric": "perplexity", "mode": "min"}
    shown = tables({**summary, "tasks": {"ptb-lstm-short": lstm}, "confirmation": text})
    assert "The gains are 1.9% of the perplexity on LSTM." in shown["evidence-answer"]  # of 80


def test_the_answer_says_if_the_runs_of_the_best_method_are_not_finished(
    summary: dict[str, Any], tables: Callable[[Any], dict[str, str]]
) -> None:
    begun = {**copy.deepcopy(summary), "confirmation": CONFIRMED}
    assert "Not final" not in tables(begun)["evidence-answer"]
    row = rows(begun)["Schedule-Free AdamW"]
    row["tuned"], row["validation"] = False, 99.0
    page = tables(begun)
    for table in ("evidence-answer", "evidence-overview"):
        assert "Schedule-Free AdamW has the best validation accuracy, 99.0, but" in page[table]


def test_the_page_without_any_runs(
    tasks: dict[str, Workload], tables: Callable[[Any], dict[str, str]]
) -> None:
    page = tables(analysis.summarize(lambda _: [], COSTS))
    assert page["evidence-fashion-noisy"] == "No runs yet."
    assert page["evidence-overview"] == "No task has final results yet."
    for name in ("situations", "by-optimizer", "averages-held", "equal-time"):
        assert page[f"evidence-{name}"] == "No final runs yet."
    assert page["evidence-grids"] == page["evidence-untuned"] == "No complete grids yet."


# -------------------------------------------------------------------------------------- statistics


def test_paired_against_a_known_answer() -> None:
    paired = Paired.of({1: 2.0, 2: 4.0, 3: 6.0, 9: 0.0}, {1: 1.0, 2: 2.0, 3: 3.0, 8: 5.0})
    assert paired is not None
    assert (paired.mean, paired.count) == (2, 3)
    assert paired.error == pytest.approx(1 / math.sqrt(3))
    assert paired.p_value == pytest.approx(0.07418, abs=1e-5)
    assert paired.interval() == pytest.approx((2 - 2.48414, 2 + 2.48414), abs=1e-4)
    assert Paired.of({1: 1.0}, {1: 2.0}) is None


NUMBERS = st.floats(-100, 100).map(lambda number: round(number, 3))


@given(st.lists(st.tuples(NUMBERS, NUMBERS), min_size=2, max_size=9))
def test_paired_is_students_test(pairs: list[tuple[float, float]]) -> None:
    first, second = (dict(enumerate(column)) for column in zip(*pairs))
    paired = Paired.of(first, second)
    assert paired is not None
    if paired.error > 1e-9:
        expected = scipy.stats.ttest_rel([*first.values()], [*second.values()])
        assert paired.p_value == pytest.approx(expected.pvalue, rel=1e-6, abs=1e-12)


def test_holm_against_a_known_answer() -> None:
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([]) == []


@given(st.lists(st.floats(0, 1), max_size=12))
def test_holm_rejects_what_the_stepwise_procedure_rejects(p_values: list[float]) -> None:
    corrected = holm(p_values)
    rejected: list[float] = []
    for rank, p in enumerate(sorted(p_values)):
        if p * (len(p_values) - rank) > 0.05:
            break
        rejected.append(p)
    assert sorted(p for p, c in zip(p_values, corrected) if c <= 0.05) == rejected
    assert all(c >= p for p, c in zip(p_values, corrected))


@given(st.integers(0, 12), st.integers(0, 12))
def test_sign_test(positive: int, negative: int) -> None:
    if positive + negative:
        expected = scipy.stats.binomtest(positive, positive + negative).pvalue
        assert sign_test(positive, negative) == pytest.approx(expected)
    else:
        assert sign_test(0, 0) == 1
