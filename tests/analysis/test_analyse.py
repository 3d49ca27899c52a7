"""`gadam analyse` as its user meets it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from gadam import cli
from gadam.train import experiments

SMALL = [
    *("--set", "epochs=4", "--set", "data.examples=500", "--set", "data.validation=100"),
    *("--set", "data.size=8", "--set", "average.start=1", "--set", "schedule.milestones=2"),
]
QUICK = ["--probes", "2", "--steps", "2", "--grid", "3", "--examples", "128", "--workers", "1"]


@pytest.fixture(scope="module")
def reproduced(tmp_path_factory) -> Path:
    """fig1b, its recipes made small: trained, measured and reported by one command."""
    folder = tmp_path_factory.mktemp("analysis") / "fig1b"
    arguments = ["reproduce", "fig1b", "--seeds", "2", "--quiet", "--out", str(folder), *SMALL]
    assert cli.main(arguments) == 0
    return folder


def test_reproducing_a_figure_of_iterates_measures_them(reproduced):
    found = json.loads((reproduced / "analysis.json").read_text())["parts"]
    assert list(found) == ["diversity"]
    values = found["diversity"]["values"]
    assert list(values) == ["no decay SWA", "low decay SWA", "high decay SWA"]
    assert values["no decay SWA"]["kl"]["runs"] == 2
    assert values["no decay SWA"]["iterates"] == 3
    page = (reproduced / "report.html").read_text()
    assert "How different the iterates" in page
    names = {path.name for path in (reproduced / "sections").iterdir()}
    assert {"diversity.png", "diversity-decay.svg", "error-decay.png"} <= names


def test_parts_are_added_to_what_is_there(reproduced, tmp_path, capsys):
    folder = tmp_path / "copy"
    shutil.copytree(reproduced, folder)
    parts = "ensemble,networks,rate,parameters,curvature,density,landscape"
    assert cli.main(["analyse", str(folder), "--parts", parts, *QUICK]) == 0
    text = capsys.readouterr().out
    assert "ensemble of iterates" in text
    found = json.loads((folder / "analysis.json").read_text())["parts"]
    assert set(found) == {"diversity", *parts.split(",")}
    assert found["curvature"]["settings"]["examples"] == 128
    assert found["diversity"]["settings"]["examples"] is None
    ends = found["curvature"]["values"]["low decay SWA"]["average"]
    assert ends["trace a parameter"]["mean"] == pytest.approx(
        ends["trace"]["mean"] / 72442, rel=1e-9
    )
    assert found["networks"]["values"]["no decay SGD"]["networks"] == 2
    assert found["rate"]["values"]["no decay SGD"]["last"]["mean"] > 0
    page = (folder / "report.html").read_text()
    for title in ("ensemble of the iterates", "effective learning rate", "in the plane through"):
        assert title in page
    assert list((folder / "sections").glob("plane-*.png"))
    assert "128 training examples" in page


def test_one_run_alone_and_for_programs(reproduced, tmp_path, capsys):
    folder = tmp_path / "run"
    shutil.copytree(reproduced / "low-decay-swa-0", folder)
    assert cli.main(["analyse", str(folder), "--json", *QUICK]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert lines[0]["event"] == "started"
    assert lines[-1]["event"] == "analysis"
    assert {"diversity", "ensemble", "rate", "curvature", "landscape"} <= set(lines[-1]["parts"])
    assert "networks" not in lines[-1]["parts"]
    assert (folder / "sections" / "rate-layers.png").exists()


def test_what_could_not_be_measured_leaves_the_rest_in_the_report(reproduced, tmp_path, capsys):
    """An iterate that was damaged after its predictions were taken: they stand, distances do not."""
    folder = tmp_path / "copy"
    shutil.copytree(reproduced, folder)
    for notes in folder.glob("low-decay-swa-*/analysis.jsonl"):
        kept = [line for line in notes.read_text().splitlines() if '"distances"' not in line]
        notes.write_text("\n".join(kept) + "\n")
        path = min(notes.parent.glob("iterates/iterate-000003-*.pt"))
        path.write_bytes(path.read_bytes()[:-1] + b"?")
    assert cli.main(["analyse", str(folder), "--quiet", "--workers", "1"]) == 1
    said = capsys.readouterr()
    assert "is damaged: remove it" in said.err
    row = next(line for line in said.out.splitlines() if "low decay SWA" in line)
    assert "–" in row
    found = json.loads((folder / "analysis.json").read_text())["parts"]["diversity"]["values"]
    assert "kl" in found["low decay SWA"]
    assert "distance" not in found["low decay SWA"]
    assert "distance" in found["high decay SWA"]


def test_what_needs_no_weights_is_there_for_committed_results(tmp_path, capsys):
    results = Path(__file__).parents[2] / "results" / "compare"
    shutil.copytree(results, tmp_path / "compare")
    arguments = ["analyse", str(tmp_path / "compare"), "--parts", "parameters", "--quiet"]
    assert cli.main(arguments) == 0
    assert "72,666" in capsys.readouterr().out
    arguments = ["analyse", str(tmp_path / "compare"), "--parts", "curvature", "--quiet"]
    assert cli.main(arguments) == 1
    assert "has lost its last checkpoint" in capsys.readouterr().err


def test_the_small_scale_has_networks_of_three_sizes():
    found = experiments.get("fig3d")
    models = list(dict.fromkeys(r.model for r in found.recipes.values()))
    assert models == ["vgg-mini-narrow", "vgg-mini", "vgg-mini-wide"]
    assert found.bases["wide GadamX"] == "wide PadamW"
    assert found.analysis == ("parameters",)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["nowhere"], "nowhere is not a folder"),
        (["."], "there are no runs"),
        (["RUN", "--parts", "diversty"], "did you mean 'diversity'"),
        (["RUN", "--grid", "1"], "grid must be at least 3"),
        (["RUN", "--probes", "0"], "probes must be at least 2"),
        (["RUN", "--workers", "0"], "--workers must be at least 1"),
        (["RUN", "--device", "warp9"], "--device warp9"),
    ],
)
def test_mistakes_get_a_sentence_and_code_2(
    arguments, sentence, reproduced, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    given = [str(reproduced) if a == "RUN" else a for a in arguments]
    assert cli.main(["analyse", *given]) == 2
    assert sentence in capsys.readouterr().err


def test_unfinished_runs_are_refused_and_what_cannot_be_shown_is_named(
    reproduced, tmp_path, capsys
):
    folder = tmp_path / "run"
    shutil.copytree(reproduced / "low-decay-sgd-0", folder)
    assert cli.main(["analyse", str(folder), "--parts", "diversity", *QUICK]) == 1
    assert "nothing to show of diversity: it needs iterates" in capsys.readouterr().err
    (folder / "result.json").unlink()
    assert cli.main(["analyse", str(folder), *QUICK]) == 2
    assert "is finished" in capsys.readouterr().err
