"""Run folders in a storage: copies in both directions, and runs that continue from it."""

from __future__ import annotations

import uuid
from pathlib import Path

import fsspec
import pytest

from compare_runs import assert_same_run, stop_after
from gadam.commands import main
from gadam.runs import Average, Data, Optimizer, Recipe
from gadam.runs.files import RunError
from gadam.train import loop, storage
from gadam.train.loop import Stopped
from gadam.train.storage import Storage
from gadam.train.sweep import TrainingJob

RECIPE = Recipe(
    "r",
    model="logistic",
    data=Data("fashion-mini", validation=100, examples=400, size=14, augment=False),
    optimizer=Optimizer("adamw", 1e-2, 0.1),
    average=Average(1),
    epochs=4,
)


@pytest.fixture
def url() -> str:
    return f"memory://{uuid.uuid4().hex}/runs"


def write(folder: Path, **files: str) -> None:
    for name, content in files.items():
        path = folder / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)


def content(folder: Path) -> dict[str, str]:
    found = {p.relative_to(folder).as_posix(): p for p in folder.rglob("*") if p.is_file()}
    return {name: path.read_text() for name, path in found.items()}


def test_push_and_pull_make_folders_equal(tmp_path, url):
    a, b = tmp_path / "a", tmp_path / "b"
    write(a, first="1", sections__search="2", gone="3")
    there = Storage(url)
    assert there.files() == {}
    there.push(a)
    write(b, old="x", first="other")
    Storage(url).pull(b)
    assert content(b) == content(a)
    (a / "gone").unlink()
    write(a, first="11")
    write(a, **{".lock": "", ".run.json.7": "half"})
    there.push(a)
    assert Storage(url).files() == {"first": 2, "sections/search": 1}
    Storage(url).pull(b, ignore=lambda name: name == "gone")
    assert content(b) == {"first": "11", "sections/search": "2", "gone": "3"}


def test_only_changed_files_are_copied_and_the_manifest_comes_last(tmp_path, url, monkeypatch):
    write(tmp_path, **{"manifest.json": "{}", "checkpoint-1.pt": "w", "epochs.jsonl": "a"})
    there, opened = Storage(url), list[str]()
    system = there._system
    open_file = system.open

    def note(path, mode="rb", **kwargs):
        opened.append(Path(path).name)
        return open_file(path, mode, **kwargs)

    monkeypatch.setattr(system, "open", note)
    there.push(tmp_path)
    assert opened == ["checkpoint-1.pt", "epochs.jsonl", "manifest.json"]
    write(tmp_path, **{"epochs.jsonl": "ab"})
    opened.clear()
    there.push(tmp_path)
    assert opened == ["epochs.jsonl"]


def test_a_push_that_fails_changes_nothing(tmp_path, url, monkeypatch):
    write(tmp_path, a="1", b="2")
    there = Storage(url)
    there.push(tmp_path)
    write(tmp_path, a="changed", b="changed")
    open_file = there._system.open

    def fail(path, mode="rb", **kwargs):
        if Path(path).name == "b":
            raise OSError("the network is down")
        return open_file(path, mode, **kwargs)

    with monkeypatch.context() as patch, pytest.raises(RunError, match=r"written: the network is"):
        patch.setattr(there._system, "open", fail)
        there.push(tmp_path)
    with fsspec.open(f"{url}/a") as file:
        assert file.read() == b"1"
    there.push(tmp_path)
    with fsspec.open(f"{url}/a") as file:
        assert file.read() == b"changed"


def test_a_url_that_cannot_be_used():
    with pytest.raises(RunError, match="nosuch://bucket/runs cannot be used: Protocol not known"):
        Storage("nosuch://bucket/runs")


def test_a_stopped_run_continues_from_the_storage_with_the_same_bits(tmp_path, url, monkeypatch):
    monkeypatch.setattr(loop, "CHECKPOINT_SECONDS", 0.0)
    monkeypatch.setattr(loop, "REPORT_SECONDS", 0.0)
    monkeypatch.setattr(storage, "LOOK_SECONDS", 0.0)
    TrainingJob("r", RECIPE, 0, tmp_path / "local").run(*_ignore, lambda: False)
    job = TrainingJob("r", RECIPE, 0, tmp_path / "copy", storage=f"{url}/r-0")
    copied: set[str] = set()

    def note(done: float, update: object) -> None:
        copied.update(Storage(f"{url}/r-0").files())

    with pytest.raises(Stopped):
        job.run(note, lambda sentence: None, stop_after(9))
    assert any(name.startswith("checkpoint-000001") for name in copied)  # before the run ended
    epochs: list[float] = []
    job.run(lambda done, update: epochs.append(done), lambda sentence: None, lambda: False)
    assert min(epochs) > 1
    assert not job.folder.exists()
    Storage(f"{url}/r-0").pull(job.folder)
    assert_same_run(tmp_path / "local", job.folder)


_ignore = (lambda done, update: None, lambda sentence: None)


@pytest.mark.usefixtures("quick_workers")
def test_a_command_with_a_url(tmp_path, monkeypatch, capsys):
    """The runs are in the storage and on this machine, and another machine skips them."""
    monkeypatch.chdir(tmp_path)
    place = tmp_path / "bucket"
    small = [
        "epochs=2",
        "examples=400",
        "data.validation=100",
        "average.start=1",
        "data.size=8",
        "model=logistic",
    ]
    arguments = ["compare", "--methods", "AdamW", "Gadam", "--seeds", "1", "--quiet"]
    arguments += ["--out", f"file://{place}", "--workers", "1"]
    arguments += [word for setting in small for word in ("--set", setting)]
    assert main(arguments) == 0
    assert f"are in runs/compare and in file://{place}." in capsys.readouterr().out
    for name in ("summary.json", "experiment.json", "gadam-0/result.json", "gadam-0/manifest.json"):
        assert (place / name).read_bytes() == (tmp_path / "runs/compare" / name).read_bytes()
    before = {path: path.stat().st_mtime_ns for path in place.glob("*-0/*")}
    other = tmp_path / "other"
    other.mkdir()
    monkeypatch.chdir(other)
    assert main(arguments) == 0
    assert before == {path: path.stat().st_mtime_ns for path in place.glob("*-0/*")}
    capsys.readouterr()
    assert main([*arguments, "--set", "lr=0.7"]) == 2
    assert "holds a run of another recipe" in capsys.readouterr().err
