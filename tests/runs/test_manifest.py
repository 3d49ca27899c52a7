"""Manifests: what they find, and what they leave alone."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import made
from gadam.runs import archive
from gadam.runs.collect import collect
from gadam.runs.files import write_json
from gadam.runs.lines import with_hash
from gadam.runs.manifest import FileHash, Problem, check_run, check_tree, write_manifest

CHECKPOINT = "checkpoint-000006-0123456789abcdef.pt"


def finished(folder: Path) -> Path:
    made.run(folder, "Gadam", 0, sealed=True)
    return folder


def with_weights(folder: Path) -> Path:
    finished(folder)
    (folder / CHECKPOINT).write_bytes(b"weights")
    names = ("run.json", "epochs.jsonl", "result.json", CHECKPOINT)
    write_manifest(folder, {name: FileHash.of((folder / name).read_bytes()) for name in names})
    return folder


def reasons(folder: Path, *, weights: bool = False) -> list[tuple[str, str]]:
    return [(p.path.name, p.reason) for p in check_run(folder, weights=weights).problems]


def test_an_intact_run(tmp_path):
    verdict = check_run(with_weights(tmp_path / "a"), weights=True)
    assert (verdict.state, verdict.problems) == ("finished", ())


@pytest.mark.parametrize("name", ["run.json", "epochs.jsonl", "result.json"])
def test_a_changed_or_missing_file_is_named(tmp_path, name):
    folder = finished(tmp_path / "a")
    with (folder / name).open("a") as file:
        file.write(" ")
    changed = "does not match manifest.json: it was changed after the run finished"
    assert reasons(folder) == [(name, changed)]
    (folder / name).unlink()
    assert reasons(folder) == [(name, "is missing, but manifest.json lists it")]
    (folder / name).mkdir()
    assert reasons(folder) == [(name, "is missing, but manifest.json lists it")]


def test_weights_are_compared_by_size_or_by_content(tmp_path):
    folder = with_weights(tmp_path / "a")
    (folder / CHECKPOINT).write_bytes(b"WEIGHTS")
    assert reasons(folder) == []
    assert [name for name, _ in reasons(folder, weights=True)] == [CHECKPOINT]
    (folder / CHECKPOINT).write_bytes(b"weight")
    assert [name for name, _ in reasons(folder)] == [CHECKPOINT]
    (folder / CHECKPOINT).unlink()
    assert reasons(folder) == []
    assert reasons(folder, weights=True) == [(CHECKPOINT, "is missing, but manifest.json lists it")]


@pytest.mark.parametrize(
    "files",
    [
        None,
        [],
        {},
        {"run.json": {"size": 1, "sha256": ""}},
        {"run.json": 3, "epochs.jsonl": 3, "result.json": 3},
        {name: {"size": 1, "sha256": 2} for name in ("run.json", "epochs.jsonl", "result.json")},
        {
            name: {"size": 1, "sha256": ""}
            for name in ("run.json", "epochs.jsonl", "result.json", "../secret")
        },
    ],
)
def test_a_damaged_manifest_is_named(tmp_path, files):
    folder = finished(tmp_path / "a")
    write_json(folder / "manifest.json", {"files": files})
    (problem,) = reasons(folder)
    assert problem[0] == "manifest.json"
    assert problem[1].startswith("is damaged (")


def test_a_changed_manifest_does_not_match_its_own_hash(tmp_path):
    folder = finished(tmp_path / "a")
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["files"]["result.json"]["size"] += 1
    (folder / "manifest.json").write_text(json.dumps(manifest))
    assert reasons(folder) == [
        ("manifest.json", "is damaged (its content does not match its hash)")
    ]


def test_unfinished_runs(tmp_path):
    made.run(tmp_path / "a", "Gadam", 0, epochs=3, sealed=True)
    assert check_run(tmp_path / "a") == (tmp_path / "a", "unfinished", ())
    lines = tmp_path / "a" / "epochs.jsonl"
    content = lines.read_text()
    lines.write_text(content.replace("0.5", "0.6"))
    assert reasons(tmp_path / "a") == [("epochs.jsonl", "has 2 damaged lines")]
    lines.unlink()
    lines.mkdir()
    assert "cannot be read" in reasons(tmp_path / "a")[0][1]
    (tmp_path / "a" / "run.json").unlink()
    assert reasons(tmp_path / "a")[0] == ("run.json", "is missing")


def test_runs_of_older_versions(tmp_path):
    made.run(tmp_path / "a", "Gadam", 0)
    assert check_run(tmp_path / "a") == (tmp_path / "a", "unverified", ())
    path = tmp_path / "a" / "result.json"
    result = json.loads(path.read_text())
    result["iterate"]["test"]["accuracy"] += 1
    write_json(path, result)
    assert reasons(tmp_path / "a") == [
        ("result.json", "does not match the last line of epochs.jsonl")
    ]
    path.write_text("{}")
    assert reasons(tmp_path / "a")[0][1].startswith("is damaged (It has no status")


def test_stripped_hashes_do_not_turn_a_run_into_an_older_one(tmp_path):
    folder = finished(tmp_path / "a")
    made.run(tmp_path / "old", "Gadam", 0)
    (folder / "manifest.json").unlink()
    (folder / "epochs.jsonl").write_bytes((tmp_path / "old" / "epochs.jsonl").read_bytes())
    verdict = check_run(folder)
    assert verdict.state == "unfinished"
    assert verdict.concerns("epochs.jsonl")


def test_an_archive_of_a_sweep_matches_its_manifests(tmp_path):
    made.sweep(tmp_path / "sweep", sealed=True)
    archive.write_archive(tmp_path / "sweep", tmp_path / "sweep.json")
    archive.unpack(tmp_path / "sweep.json", tmp_path / "again")
    found = list(check_tree(tmp_path / "again"))
    assert len(found) == 6
    for verdict in found:
        assert not isinstance(verdict, Problem)
        assert (verdict.state, verdict.problems) == ("finished", ())


def test_other_files_with_hashes_are_checked(tmp_path):
    made.sweep(tmp_path, seeds=1, sealed=True)
    (tmp_path / "sections").mkdir()
    write_json(tmp_path / "sections" / "a.json", {"title": "A", "blocks": []}, sealed=True)
    write_json(tmp_path / "analysis.json", {"parts": {}, "number": 1.5}, sealed=True)
    notebook = tmp_path / "gadam-0" / "analysis.jsonl"
    notebook.write_text(with_hash('{"name": "x", "value": 1.5}') + "\n" + '{"name": "old"}\n')
    assert not [found for found in check_tree(tmp_path) if isinstance(found, Problem)]
    for path in (tmp_path / "sections" / "a.json", tmp_path / "analysis.json", notebook):
        path.write_text(path.read_text().replace("1.5", "2.5").replace("A", "B"))
    problems = [found for found in check_tree(tmp_path) if isinstance(found, Problem)]
    assert [(p.path.name, p.reason) for p in problems] == [
        ("analysis.json", "is damaged (its content does not match its hash)"),
        ("a.json", "is damaged (its content does not match its hash)"),
        ("analysis.jsonl", "has 1 damaged line"),
    ]


def test_a_removed_section_is_missed(tmp_path):
    made.sweep(tmp_path, seeds=1, sealed=True)
    section = tmp_path / "sections" / "analysis-ensemble.json"
    section.parent.mkdir()
    write_json(section, {"title": "A", "blocks": []}, sealed=True)
    write_json(tmp_path / "analysis.json", {"parts": {"ensemble": {}}}, sealed=True)
    assert not collect([tmp_path]).problems
    section.unlink()
    sentence = f"{section} is missing. Run `gadam analyze` again."
    assert sentence in collect([tmp_path]).problems
    assert sentence in [str(found) for found in check_tree(tmp_path)]
