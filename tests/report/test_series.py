"""The numbers behind the charts."""

from __future__ import annotations

from dataclasses import replace

import pytest

import made
from gadam.report import series
from gadam.report.style import PAIRS
from gadam.runs import Average, Experiment, collect
from gadam.runs.files import write_json
from gadam.runs.summary import summarize


def test_curves_are_means_over_seeds(tmp_path):
    collection = collect([made.sweep(tmp_path)])
    curves = {(c.label, c.point): c for c in series.curves(collection)}
    assert set(curves) == {("AdamW", "iterate"), ("Gadam", "average"), ("Gadam", "iterate")}
    curve = curves["Gadam", "average"]
    assert curve.epoch == (3, 4, 5, 6)
    assert curve.seeds == (3,) * 4
    last = [run.epochs[-1].metric("accuracy", "average") for run in collection.runs_of("Gadam")]
    assert curve.value[-1] == pytest.approx(sum(v for v in last if v) / 3, abs=1e-3)
    assert all(low < value < high for low, value, high in zip(curve.low, curve.value, curve.high))


def test_titles_show_the_metric_itself_and_its_unit():
    assert series.axis_title("accuracy", "validation") == "validation accuracy, %"
    assert series.axis_title("top5") == "test top-5 accuracy, %"
    assert series.axis_title("perplexity") == "test perplexity"
    assert series.gain_title("accuracy") == "gain in test accuracy, points"
    assert series.gain_title("perplexity") == "gain in test perplexity"


def test_gains_are_those_of_the_summary(tmp_path):
    collection = collect([made.sweep(tmp_path)])
    (gain,) = series.gains(collection)
    row = summarize(collection.experiment, collection.results)[1]
    assert row.difference is not None
    assert row.difference.bounds is not None
    assert (gain.label, gain.base, gain.seeds) == ("Gadam", "AdamW", 3)
    assert (gain.low, gain.high) == pytest.approx(row.difference.bounds, abs=1e-6)
    assert gain.evidence == ("significant" if gain.low > 0 else "not significant")
    assert [replace(gain, seeds=1).evidence, replace(gain, low=-1.0).evidence] == [
        "one seed",
        "not significant",
    ]


def test_one_seed_has_a_gain_without_an_interval(tmp_path):
    (gain,) = series.gains(collect([made.sweep(tmp_path, seeds=1)]))
    assert gain.low == gain.mean == gain.high


def test_a_method_looks_the_same_in_every_task(tmp_path):
    made.sweep(tmp_path)
    for row, recipe in made.RECIPES.items():
        noisy = replace(recipe, data=replace(recipe.data, label_noise=0.5))
        made.run(tmp_path / f"noisy-{row}", f"noisy {row}", 0, recipe=noisy)
    collection = collect([tmp_path])
    names = series.method_names(collection)
    assert names["noisy Gadam"] == names["Gadam"] == "Gadam"
    styles = series.method_styles(collection)
    assert set(styles) == {"AdamW", "Gadam"}
    assert (styles["AdamW"].color, styles["Gadam"].color) == PAIRS[0]


def test_rates_show_where_averaging_starts(tmp_path):
    rates = {r.label: r for r in series.rates(collect([made.sweep(tmp_path)]))}
    assert rates["Gadam"].start == 2
    assert rates["AdamW"].start is None
    assert rates["AdamW"].rate[0] == pytest.approx(0.01)
    assert rates["AdamW"].rate[-1] < 0.01


def test_a_trigger_starts_where_the_first_sample_was_recorded(tmp_path):
    triggered = replace(made.LANGUAGE, average=Average("non-monotone"))
    made.run(tmp_path / "whole", "fired", 0, recipe=triggered)
    made.run(tmp_path / "short", "waiting", 0, recipe=triggered, epochs=1)
    rates = {r.label: r for r in series.rates(collect([tmp_path]))}
    assert rates["fired"].start == 2
    assert rates["waiting"].start is None


def test_costs_are_means_per_epoch(tmp_path):
    collection = collect([made.sweep(tmp_path)])
    cost = next(cost for cost in series.costs(collection) if cost.label == "Gadam")
    assert cost.seconds["refresh"] == pytest.approx(0.2)
    train = [r.seconds["train"] for run in collection.runs_of("Gadam") for r in run.epochs]
    assert cost.seconds["train"] == pytest.approx(sum(train) / len(train), abs=1e-3)
    assert (cost.peak_memory, cost.parameters) == (3, 1234)


def test_floors_come_from_the_experiment(tmp_path):
    made.run(tmp_path / "lm-0", "LSTM", 0, recipe=made.LANGUAGE)
    assert series.floors(collect([tmp_path])) == {}
    floors = {"perplexity": {"test": 7.5}, "accuracy": {"test": 1.0}}
    experiment = Experiment("made", "Made up", {"LSTM": made.LANGUAGE}, floors=floors)
    write_json(tmp_path / "experiment.json", experiment.to_dict())
    collection = collect([tmp_path])
    assert series.floors(collection) == {"perplexity": 7.5}  # no row is rated by accuracy
    assert series.floors(collection, "validation") == {}


def test_equal_gains_are_no_evidence():
    assert series.Gain("SWA", "SGD", 1.0, 1.0, 1.0, seeds=3).evidence == "not significant"
    assert series.Gain("SWA", "SGD", 1.0, 0.5, 1.5, seeds=3).evidence == "significant"
    assert series.Gain("SWA", "SGD", 1.0, 1.0, 1.0, seeds=1).evidence == "one seed"
