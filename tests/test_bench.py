"""`gadam bench`, its networks, and that the README's table is what was measured."""

from __future__ import annotations

import json
import math
import subprocess
import sys

import pytest

from gadam import bench


@pytest.mark.parametrize(
    ("network", "tensors", "parameters"),
    [
        ("resnet50", 161, 25_557_032),
        ("vgg16", 58, 15_299_748),
        ("preresnet110", 332, 1_169_972),
        ("awd-lstm", 14, 24_221_600),
    ],
)
def test_shapes_are_those_of_the_papers_networks(network, tensors, parameters):
    shapes = list(bench.NETWORKS[network]())
    assert len(shapes) == tensors
    assert sum(map(math.prod, shapes)) == parameters


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", "from gadam.cli import main; raise SystemExit(main())", *arguments],
        capture_output=True,
        text=True,
    )


def test_measures_and_writes(tmp_path):
    file = tmp_path / "report.json"
    done = run("bench", "preresnet110", "--repetitions", "1", "--json", str(file))
    assert done.returncode == 0, done.stderr
    assert "| Gadam |" in done.stdout
    report = json.loads(file.read_text())
    results = report["networks"][0]["results"]
    assert results["torch AdamW fused"]["ratio"] == 1.0
    # two moments of four bytes, and four more for the average: nothing hidden
    assert results["Gadam"]["state bytes per parameter"] == 8
    assert results["Gadam, a sample every step"]["state bytes per parameter"] == 12


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["bench", "resnet49"], "no network 'resnet49'"),
        (["bench", "--repetitions", "0"], "--repetitions must be at least 1"),
        (["brew"], "no command 'brew'"),
    ],
)
def test_bad_arguments_are_refused(arguments, sentence):
    done = run(*arguments)
    assert done.returncode == 2
    assert sentence in done.stderr


def test_help():
    assert "bench" in run().stdout
    assert "--json" in run("bench", "--help").stdout
