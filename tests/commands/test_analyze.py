"""Run `gadam analyze` as its user does."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from gadam import commands
from gadam.runs.archive import unpack
from gadam.study import parts
from gadam.train import experiments

pytestmark = pytest.mark.usefixtures("quick_workers")

RESULTS = Path(__file__).parents[2] / "results"
SMALL = [
    *("--set", "epochs=4", "--set", "data.examples=500", "--set", "data.validation=100"),
    *("--set", "data.size=8", "--set", "average.start=1", "--set", "schedule.milestones=2"),
]
QUICK = ["--probes", "2", "--steps", "2", "--grid", "3", "--examples", "128", "--workers", "1"]


@pytest.fixture(scope="module")
def reproduced(tmp_path_factory) -> Path:
    """Train, measure and report fig1b with small recipes, by one command."""
    folder = tmp_path_factory.mktemp("analysis") / "fig1b"
    arguments = ["reproduce", "fig1b", "--seeds", "2", "--quiet", "--out", str(folder), *SMALL]
    assert commands.main(arguments) == 0
    return folder


def test_reproducing_a_figure_measures_its_parts(reproduced):
    found = json.loads((reproduced / "analysis.json").read_text())["parts"]
    assert list(found) == ["diversity"]
    values = found["diversity"]["values"]
    assert list(values) == ["no decay SWA", "low decay SWA", "high decay SWA"]
    assert values["no decay SWA"]["kl"]["runs"] == 2
    assert values["no decay SWA"]["iterates"] == 3
    page = (reproduced / "report.html").read_text()
    assert "Diversity of the iterates" in page
    names = {path.name for path in (reproduced / "sections").iterdir()}
    assert {"diversity.png", "diversity-decay.svg", "error-decay.png"} <= names


def test_parts_are_added_to_existing_ones(reproduced, tmp_path, capsys):
    folder = tmp_path / "copy"
    left_out = shutil.ignore_patterns("high-decay-*", "no-decay-swa-*", "low-decay-*-1")
    shutil.copytree(reproduced, folder, ignore=left_out)
    names = "ensemble,networks,rate,parameters,curvature,density,landscape"
    assert commands.main(["analyze", str(folder), "--parts", names, *QUICK]) == 0
    text = capsys.readouterr().out
    runs = len(list(folder.glob("*/run.json")))
    assert f"Found {runs} runs (all finished) in {folder}." in text
    assert not list(folder.rglob("*lock*"))
    assert "ensemble of iterates" in text
    found = json.loads((folder / "analysis.json").read_text())["parts"]
    assert set(found) == {"diversity", *names.split(",")}
    assert found["curvature"]["settings"]["examples"] == 128
    assert found["diversity"]["settings"]["examples"] is None
    ends = found["curvature"]["values"]["low decay SWA"]["average"]
    assert ends["trace a parameter"]["mean"] == pytest.approx(
        ends["trace"]["mean"] / 72442, rel=1e-9
    )
    assert found["networks"]["values"]["no decay SGD"]["networks"] == 2
    assert found["rate"]["values"]["no decay SGD"]["last"]["mean"] > 0
    page = (folder / "report.html").read_text()
    for title in ("Ensemble of the iterates", "Effective learning rate", "in the plane through"):
        assert title in page
    assert list((folder / "sections").glob("plane-*.png"))
    assert "128 training examples" in page


def test_single_run_as_json(reproduced, tmp_path, capsys):
    folder = tmp_path / "run"
    shutil.copytree(reproduced / "low-decay-swa-0", folder)
    assert commands.main(["analyze", str(folder), "--json", *QUICK]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [lines[0]["event"], lines[1]["event"]] == ["started", "measured"]
    last = lines[-1]
    assert last["event"] == "analysis"
    assert {"diversity", "ensemble", "rate", "curvature", "landscape"} <= set(last["parts"])
    assert "networks" not in last["parts"]
    (table,) = last["tables"]["diversity"]
    assert table["header"][:2] == ["method", "KL, nats"]
    assert table["rows"][0][0] == "low decay SWA"
    assert (folder / "sections" / "rate-layers.png").exists()


def test_failed_values_leave_the_rest_in_the_report(reproduced, tmp_path, capsys):
    """Damage iterates after their predictions were saved: only the distances are lost."""
    folder = tmp_path / "copy"
    shutil.copytree(reproduced, folder)
    for notes in folder.glob("low-decay-swa-*/analysis.jsonl"):
        kept = [line for line in notes.read_text().splitlines() if '"distances"' not in line]
        notes.write_text("\n".join(kept) + "\n")
        path = min(notes.parent.glob("iterates/iterate-000003-*.pt"))
        path.write_bytes(path.read_bytes()[:-1] + b"?")
    assert commands.main(["analyze", str(folder), "--quiet", "--workers", "1"]) == 1
    printed = capsys.readouterr()
    assert "is damaged. Remove it" in printed.err
    row = next(line for line in printed.out.splitlines() if "low decay SWA" in line)
    assert "–" in row
    found = json.loads((folder / "analysis.json").read_text())["parts"]["diversity"]["values"]
    assert "kl" in found["low decay SWA"]
    assert "distance" not in found["low decay SWA"]
    assert "distance" in found["high decay SWA"]


def test_committed_results_have_parts_that_need_no_weights(tmp_path, capsys):
    folder = tmp_path / "compare"
    unpack(RESULTS / "compare.json", folder)
    assert commands.main(["analyze", str(folder), "--parts", "parameters", "--quiet"]) == 0
    assert "72,666" in capsys.readouterr().out
    assert commands.main(["analyze", str(folder), "--parts", "curvature", "--quiet"]) == 1
    assert "has no intact last checkpoint" in capsys.readouterr().err


def test_mini_scale_has_networks_of_three_sizes():
    found = experiments.get("fig3d")
    models = list(dict.fromkeys(r.model for r in found.recipes.values()))
    assert models == ["vgg-mini-narrow", "vgg-mini", "vgg-mini-wide"]
    assert found.bases["wide GadamX"] == "wide PadamW"
    assert found.analysis == ("parameters",)


@pytest.mark.parametrize("name", ["analyze", "analyse"])
def test_help_lists_the_parts_and_names_the_arguments(name, capsys):
    with pytest.raises(SystemExit):
        commands.main([name, "--help"])
    text = capsys.readouterr().out
    assert text.startswith("usage: gadam analyze [-h] [OPTIONS] DIR\n")
    assert "None" not in text
    lines = [" ".join(line.split()) for line in text.splitlines()]
    for part in parts().values():
        assert f"{part.name} {part.title}" in lines


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere"], "nowhere is not a folder"),
        (["."], "There are no runs in"),
        (["RUN", "--parts", "diversty"], "Did you mean 'diversity'"),
        (["RUN", "--grid", "1"], "grid must be at least 3"),
        (["RUN", "--probes", "0"], "probes must be at least 2"),
        (["RUN", "--workers", "0"], "--workers must be at least 1"),
        (["RUN", "--device", "warp9"], "--device warp9"),
    ],
)
def test_mistakes_are_explained_and_exit_with_2(
    arguments, message, reproduced, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    given = [str(reproduced) if a == "RUN" else a for a in arguments]
    assert commands.main(["analyze", *given]) == 2
    assert message in capsys.readouterr().err


def test_unfinished_runs_are_refused_and_missing_parts_are_named(reproduced, tmp_path, capsys):
    folder = tmp_path / "run"
    shutil.copytree(reproduced / "low-decay-sgd-0", folder)
    assert commands.main(["analyze", str(folder), "--parts", "diversity", *QUICK]) == 1
    expected = "There is nothing to show for diversity. It needs kept iterates"
    assert expected in capsys.readouterr().err
    (folder / "result.json").unlink()
    assert commands.main(["analyze", str(folder), *QUICK]) == 2
    assert "is finished" in capsys.readouterr().err
