"""The manifest of a finished run: the hash of every file of its record.

`manifest.json` is written last. It lists `run.json`, `epochs.jsonl`, `result.json`, the last
checkpoint and the kept iterates::

    {"files": {"result.json": {"size": 512, "sha256": "9f2c…"}, …}, "sha256": "31ab…"}

Runs of older versions have no manifest. Their result is compared with their last line.
"""

from __future__ import annotations

import hashlib
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple, TypeAlias

from gadam._errors import UserError
from gadam._names import count
from gadam.runs.fields import Record, mapping_of, parse, text, whole
from gadam.runs.files import Document, RunError, read_json, read_regular_file, sha256, write_json
from gadam.runs.lines import (
    Lines,
    has_hashes,
    is_beginning,
    is_intact,
    read_header_bytes,
    read_lines,
)
from gadam.runs.record import RunHeader, RunResult

__all__ = [
    "FileHash",
    "Problem",
    "RunCheck",
    "check_run",
    "check_tree",
    "drop_weights",
    "missing_sections",
    "write_manifest",
]

NAME = "manifest.json"
_SMALL = ("run.json", "epochs.jsonl", "result.json")
_WEIGHTS = re.compile(
    r"(checkpoint|iterates/iterate)-\d{6}-[0-9a-f]{16}\.pt"
    r"|checkpoint-\d{6}-[0-9a-f]{16}\.dcp/manifest\.json"
)

State: TypeAlias = Literal["finished", "unverified", "unfinished"]


@dataclass(frozen=True)
class FileHash(Record):
    """A file of a run's record.

    Args:
        size: Its size in bytes.
        sha256: The hash of its content.
        extra: Fields written by a newer version, kept as they are.
    """

    size: int
    sha256: str

    @classmethod
    def of(cls, content: bytes) -> FileHash:
        """Return the size and hash of some content.

        Args:
            content: The content of a file.
        """
        return cls(len(content), sha256(content))

    @classmethod
    def from_dict(cls, values: Document) -> FileHash:
        """Return the entry of a manifest.

        Args:
            values: Plain data.

        Raises:
            RunError: A field is missing or has the wrong type.
        """
        return parse(cls, values, {"size": whole, "sha256": text})


class Problem(NamedTuple):
    """A file that is damaged, missing, or was changed.

    Args:
        path: The file.
        reason: What is wrong, as a clause without a subject.
    """

    path: Path
    reason: str

    def __str__(self) -> str:
        return f"{self.path} {self.reason}."


class RunCheck(NamedTuple):
    """What the check of a run found.

    Args:
        folder: The run's folder.
        state: "finished" if there is a manifest; "unverified" if the run has a result, but was
            written by a version without manifests; otherwise "unfinished".
        problems: Files that are not as the run wrote them.
    """

    folder: Path
    state: State
    problems: tuple[Problem, ...] = ()

    def concerns(self, *names: str) -> bool:
        """Return True if there is a problem with one of these files.

        Args:
            *names: File names, relative to the folder.
        """
        return bool(self.first(*names))

    def first(self, *names: str) -> str:
        """Return a sentence about the first problem with one of these files, or an empty string.

        Args:
            *names: File names, relative to the folder.
        """
        paths = [self.folder / name for name in names]
        return next((str(problem) for problem in self.problems if problem.path in paths), "")


def write_manifest(folder: Path, files: Mapping[str, FileHash]) -> None:
    """Write the manifest of a finished run, atomically.

    Args:
        folder: The run's folder.
        files: By path, relative to the folder.
    """
    entries = {name: {"size": f.size, "sha256": f.sha256} for name, f in sorted(files.items())}
    write_json(folder / NAME, {"files": entries}, sealed=True)


def drop_weights(folder: Path) -> None:
    """Remove the checkpoints of a finished run, to save space. Its record stays.

    Args:
        folder: The run's folder.
    """
    files = {name: FileHash.of(read_regular_file(folder / name)) for name in _SMALL}
    write_manifest(folder, files)
    for path in folder.glob("checkpoint-*.pt"):
        path.unlink(missing_ok=True)
    for path in folder.glob("checkpoint-*.dcp"):
        shutil.rmtree(path, ignore_errors=True)


def check_run(folder: Path, *, weights: bool = False) -> RunCheck:
    """Check that the files of a run are as the run wrote them.

    Args:
        folder: The run's folder.
        weights: Hash checkpoints and iterates too, and require them to exist. By default, only
            their size is compared, and they may be missing: reports do not need them.
    """
    if (folder / NAME).exists():
        return RunCheck(folder, "finished", tuple(_check_manifest(folder, weights)))
    problems = [*_check_header(folder)]
    try:
        lines = read_lines(folder / "epochs.jsonl")
        needs_manifest = lines.hashed or has_hashes(read_header_bytes(folder))
    except OSError as error:
        problems.append(Problem(folder / "epochs.jsonl", f"cannot be read ({error.strerror})"))
        lines, needs_manifest = Lines(), True
    finished = (folder / "result.json").exists() and not needs_manifest
    if lines.damaged > (0 if finished else 1):  # one may be in progress
        damaged = count(lines.damaged, "damaged line")
        problems.append(Problem(folder / "epochs.jsonl", f"has {damaged}"))
    if not finished:
        # A run that was killed before it wrote its manifest rewrites its result when it resumes.
        return RunCheck(folder, "unfinished", tuple(problems))
    problems += _check_result(folder / "result.json", lines)
    return RunCheck(folder, "unverified", tuple(problems))


def _check_manifest(folder: Path, weights: bool) -> Iterator[Problem]:
    try:
        entries = read_json(folder / NAME).get("files")
        files = mapping_of(FileHash.from_dict)(entries) if isinstance(entries, dict) else {}
        if not set(_SMALL) <= set(files):
            raise ValueError(f"it does not list {', '.join(_SMALL)}")
        for name in set(files) - set(_SMALL):
            if not _WEIGHTS.fullmatch(name):  # never look outside the folder
                raise ValueError(f"it lists {name!r}")
    except (ValueError, RunError) as error:
        yield Problem(folder / NAME, f"is damaged ({str(error).rstrip('.')})")
        return
    for name, expected in files.items():
        path, is_small = folder / name, name in _SMALL
        if path.is_file():
            if not _matches(path, expected, weights or is_small):
                yield Problem(path, f"does not match {NAME}: it was changed after the run finished")
            elif weights and path.parent.suffix == ".dcp":
                from gadam.runs import sharded

                if problem := sharded.verify(path.parent):
                    yield Problem(path.parent, problem)
        elif weights or is_small:
            yield Problem(path, f"is missing, but {NAME} lists it")


def _matches(path: Path, expected: FileHash, by_content: bool) -> bool:
    try:
        if path.stat().st_size != expected.size:
            return False
        return not by_content or _hash_file(path) == expected.sha256
    except OSError:
        return False


def _hash_file(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while content := file.read(2**20):
            digest.update(content)
    return digest.hexdigest()


def _check_header(folder: Path) -> Iterator[Problem]:
    path = folder / "run.json"
    if not path.exists():
        yield Problem(path, "is missing")
        return
    try:
        content = read_json(path)
        RunHeader.from_dict({"threads": 1, **content, "label": content.get("label") or ""})
    except (ValueError, UserError) as error:
        yield Problem(path, f"is damaged ({str(error).rstrip('.')})")


def _check_result(path: Path, lines: Lines) -> Iterator[Problem]:
    try:
        result = RunResult.from_dict(read_json(path))
    except (ValueError, RunError) as error:
        yield Problem(path, f"is damaged ({str(error).rstrip('.')})")
        return
    last = lines.records[-1].to_dict() if lines.records else {}
    found = result.to_dict()
    same = len(lines.records) == result.epochs and all(
        _same(last.get(key), found[key]) for key in ("iterate", "average", "samples")
    )
    if not same:
        yield Problem(path, "does not match the last line of epochs.jsonl")


def _same(a: object, b: object) -> bool:
    """Return True if two values are equal; NaN equals NaN."""
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(_same(a[key], b[key]) for key in a)
    return a == b or (a != a and b != b)


# ------------------------------------------------------------------------------------- whole trees


def check_tree(folder: Path, *, weights: bool = False) -> Iterator[RunCheck | Problem]:
    """Check every run in or below a folder, and the other files that carry hashes.

    Args:
        folder: A run, or a folder of runs.
        weights: Hash checkpoints and iterates too.

    Yields:
        A check per run, in the order of the folders' names, then problems with other files.
    """
    names = {*_SMALL, NAME}
    runs, sealed, notebooks = set(), [], []
    for path in _walk(folder):
        if path.name in names:
            runs.add(path.parent)
        elif path.name in ("experiment.json", "summary.json", "analysis.json", "tails.json") or (
            path.parent.name == "sections" and path.suffix == ".json"
        ):
            sealed.append(path)
        elif path.name in ("analysis.jsonl", "tails.jsonl"):
            notebooks.append(path)
    for run in sorted(runs):
        yield check_run(run, weights=weights)
    for path in sorted(sealed):
        try:
            read_json(path)
        except ValueError as error:
            yield Problem(path, f"is damaged ({error})")
    for path in sorted(p for p in sealed if p.name == "analysis.json"):
        for section in missing_sections(path):
            yield Problem(section, "is missing. Run `gadam analyze` again")
    for path in sorted(notebooks):
        damaged = _damaged_lines(path)
        if damaged:
            yield Problem(path, f"has {count(damaged, 'damaged line')}")


def missing_sections(path: Path) -> list[Path]:
    """Return the sections of a report that an analysis has written and that are gone.

    Args:
        path: The `analysis.json` of the folder. If it is damaged, nothing is known to be missing.
            An archive has no sections at all.
    """
    folder = path.parent / "sections"
    if not folder.is_dir():
        return []
    try:
        parts = dict(read_json(path)["parts"])
    except (ValueError, KeyError, TypeError):
        return []
    places = [folder / f"analysis-{name}.json" for name in parts]
    return [place for place in places if not place.exists()]


def _walk(folder: Path) -> Iterable[Path]:
    """Iterate over the files that may belong to a run, but not to one of its checkpoints."""
    for path in folder.rglob("*.json*"):
        if not path.name.startswith(".") and ".dcp" not in path.parent.name:
            yield path


def _damaged_lines(path: Path) -> int:
    """Count the damaged lines of an analysis. The beginning of a last line may be in progress."""
    try:
        *lines, rest = read_regular_file(path).decode(errors="replace").split("\n")
    except OSError:
        return 1
    return sum(not is_intact(line) for line in lines) + (not is_beginning(rest))
