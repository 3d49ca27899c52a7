"""`gadam bench`: the shapes of its networks, what it measures, and what it refuses."""

from __future__ import annotations

import json
import math
import sys
import tempfile

import pytest

from gadam.average.block_files import BlockFolder
from gadam.commands import bench, bench_blocks, main


@pytest.mark.parametrize(
    ("network", "tensors", "parameters"),
    [
        ("resnet50", 161, 25_557_032),
        ("vgg16", 58, 15_299_748),
        ("preresnet110", 332, 1_169_972),
        ("awd-lstm", 14, 24_221_600),
        ("transformer", 148, 110_418_432),
    ],
)
def test_shapes_are_those_of_the_networks(network, tensors, parameters):
    shapes = list(bench.NETWORKS[network]())
    assert len(shapes) == tensors
    assert sum(map(math.prod, shapes)) == parameters


def test_measures_prints_and_writes(tmp_path, capsys):
    file = tmp_path / "report.json"
    arguments = ["preresnet110", "--repetitions", "1", "--blocks", "0", "--out", str(file)]
    assert main(["bench", *arguments]) == 0
    text = capsys.readouterr().out
    assert "| Gadam |" in text
    assert "**preresnet110**: 332 tensors, 1,169,972 parameters" in text
    assert f"The numbers are in {file}." in text
    report = json.loads(file.read_text())
    assert set(report) == {"machine", "versions", "networks"}
    assert bench.to_markdown(report) in text
    results = report["networks"][0]["results"]
    assert results["torch AdamW fused"]["ratio"] == 1.0
    # Two moments of four bytes, and four more for the average: there is no hidden state.
    assert results["Gadam"]["state bytes per parameter"] == 8
    assert results["Gadam, a sample every step"]["state bytes per parameter"] == 12
    assert results["Gadam, sampled into a block"]["state bytes per parameter"] == 12


def test_json_is_one_object_per_network(tmp_path, capsys, monkeypatch):
    names = ["torch AdamW fused", "Gadam"]
    known = bench.contenders()
    monkeypatch.setattr(bench, "contenders", lambda: {name: known[name] for name in names})
    file = tmp_path / "report.json"
    arguments = ["preresnet110", "preresnet110", "--repetitions", "1", "--out", str(file)]
    assert main(["bench", *arguments, "--blocks", "0", "--json"]) == 0
    captured = capsys.readouterr()
    lines = [json.loads(line) for line in captured.out.splitlines()]
    report = json.loads(file.read_text())
    for line, network in zip(lines, report["networks"], strict=True):
        assert line["event"] == "bench"
        assert list(line["results"]) == names
        assert {key: line[key] for key in network} == network
        assert (line["machine"], line["versions"]) == (report["machine"], report["versions"])
    # Peers that are not installed are named on the other stream.
    assert "Left out schedulefree AdamW: it is not installed." in captured.err


def test_peers_that_are_not_installed_are_left_out(monkeypatch):
    monkeypatch.setitem(sys.modules, "schedulefree", None)
    assert "schedulefree AdamW" not in bench.contenders()


def test_the_base_is_always_measured():
    measured = bench.measure("preresnet110", ["Gadam"], repetitions=1, warm_up=1)
    assert list(measured["results"]) == ["torch AdamW fused", "Gadam"]


def test_blocks_are_measured_over_rounds_in_which_they_end(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setitem(bench.NETWORKS, "preresnet110", lambda: iter([(30, 20), (7,)]))
    written = []
    write = BlockFolder.write

    def note_and_write(*args):
        written.append(args[1].stop)
        return write(*args)

    monkeypatch.setattr(BlockFolder, "write", note_and_write)
    assert main(["bench", "preresnet110", "--repetitions", "1", "--blocks", "3"]) == 0
    text = capsys.readouterr().out
    # Two blocks end before the rounds, and one in each round. Those of the second contender, and
    # what they are merged into, are written by it.
    assert sorted(set(written)) == [100, 200, 300, 400, 500]
    assert len(written) == 5 + 5 + 3
    assert "| 3 rounds of 100 steps | mean step, ms |" in text
    assert "| Gadam, a block ends, and two are merged |" in text
    assert not list(tmp_path.glob("gadam-bench-*/*/*")), "temporary files are removed"
    assert main(["bench", "preresnet110", "--blocks", "-1"]) == 2
    assert "--blocks must be non-negative" in capsys.readouterr().err


def test_what_the_end_of_a_block_adds_is_relative_to_sampled_steps():
    names = (bench_blocks.BASE, bench_blocks.SAMPLED, bench_blocks.ENDED, bench_blocks.MERGED)
    seconds = {name: [1.0 * i, 1.0 * i, 9.0 * i] for i, name in enumerate(names, 1)}
    rows = {name: bench_blocks._row(name, seconds) for name in names}
    assert rows[bench_blocks.SAMPLED] == {
        "milliseconds": 2000.0,
        "ratio": 2.0,
        "added by the end of a block": None,
    }
    assert rows[bench_blocks.ENDED]["added by the end of a block"] == 0.5
    assert rows[bench_blocks.MERGED]["added by the end of a block"] == 1.0


def report_of(load: float | None, quartiles: list[float]) -> dict[str, object]:
    base = {"milliseconds": 10.0, "milliseconds, quartiles": quartiles}
    return {
        "machine": {"load average": load, "cores": 2},
        "networks": [{"network": "vgg16", "results": {bench.BASE: base}}],
    }


@pytest.mark.parametrize(
    ("load", "quartiles", "expected"),
    [
        (0.4, [9.5, 10.5], []),
        (None, [9.5, 10.5], []),
        (7.25, [9.5, 10.5], ["load average was 7.2 on 2 cores"]),
        (0.4, [9.0, 12.0], ["on vgg16 differ by 30% of the median"]),
        (1.5, [5.0, 15.0], ["load average was 1.5 on 2 cores", "differ by 100%"]),
    ],
)
def test_a_busy_machine_and_variable_times_are_pointed_out(load, quartiles, expected):
    found = bench.warnings(report_of(load, quartiles))
    assert len(found) == len(expected)
    assert all(part in sentence for part, sentence in zip(expected, found))


def test_spread_is_shown(monkeypatch):
    seconds = iter(range(10_000))
    # Each step reads the clock twice. Its time grows by the number of readings between the two.
    monkeypatch.setattr(bench.time, "perf_counter", lambda: next(seconds) ** 2 * 1e-3)
    measured = bench.measure("preresnet110", ["Gadam"], repetitions=4, warm_up=1)
    for row in measured["results"].values():
        first, third = row["milliseconds, quartiles"]
        assert first < row["milliseconds"] < third
        low, high = row["ratio, quartiles"]
        assert low <= high
    assert measured["results"][bench.BASE]["ratio, quartiles"] == [1.0, 1.0]
