"""Read run folders from disk: finished, running, failed or damaged."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from gadam._errors import UserError
from gadam._names import count
from gadam.runs.experiment import Experiment
from gadam.runs.files import Document, Json, RunError, read_json
from gadam.runs.lines import read_lines
from gadam.runs.manifest import NAME as MANIFEST
from gadam.runs.manifest import RunCheck, check_run, missing_sections
from gadam.runs.recipe import Recipe
from gadam.runs.record import EpochRecord, RunHeader, RunResult

__all__ = ["Collection", "RunRecord", "Section", "collect", "find_files", "not_a_folder"]


@dataclass(frozen=True)
class RunRecord:
    """One run, read from its folder.

    Args:
        folder: Where it was read from.
        header: What the run is. Its label may have been made unique and printable.
        epochs: Its lines, without a torn last one.
        result: How it ended; None if it has not.
        failure: Why it stopped; empty if it did not fail.
    """

    folder: Path
    header: RunHeader
    epochs: tuple[EpochRecord, ...]
    result: RunResult | None = None
    failure: str = ""

    @property
    def label(self) -> str:
        """The run's name beside other runs."""
        return self.header.label

    @property
    def recipe(self) -> Recipe:
        """What the run trains."""
        return self.header.recipe

    @property
    def seed(self) -> int:
        """The run's seed."""
        return self.header.seed

    @property
    def status(self) -> str:
        """The run's progress: "done", "diverged", "at epoch 3 of 20", or why it failed."""
        if self.result is not None:
            return self.result.status
        if self.failure:
            return f"failed ({self.failure})"
        return f"at epoch {len(self.epochs)} of {self.recipe.epochs}"


@dataclass(frozen=True)
class Section:
    """A section of the report, left in a folder by another part of the library.

    Args:
        title: Its heading.
        blocks: What it shows; see :mod:`gadam.report.sections`.
        folder: Where its images are.
    """

    title: str
    blocks: tuple[Json, ...]
    folder: Path


@dataclass(frozen=True)
class Collection:
    """Runs to look at together.

    Args:
        title: The page's title.
        runs: By label, then seed, in the experiment's order.
        experiment: What they belong to; derived from the runs if no folder says it.
        sections: Extra sections of the report.
        problems: Sentences about what is missing or damaged.
        expected: How many runs the experiments have.
    """

    title: str
    runs: tuple[RunRecord, ...]
    experiment: Experiment
    sections: tuple[Section, ...] = ()
    problems: tuple[str, ...] = ()
    expected: int = 0

    def describe(self) -> str:
        """Return how many runs there are, such as "6 runs (5 finished)"."""
        total, finished = len(self.runs), sum(run.result is not None for run in self.runs)
        share = "all" if finished == total else str(finished or "none")
        if total == 1:
            share = "" if finished else "not"
        return f"{count(total, 'run')} ({f'{share} finished'.strip()})"

    @property
    def labels(self) -> list[str]:
        """The rows that have runs, in order."""
        return list(dict.fromkeys(run.label for run in self.runs))

    def runs_of(self, label: str) -> list[RunRecord]:
        """Return the runs of a row.

        Args:
            label: The row.
        """
        return [run for run in self.runs if run.label == label]

    @property
    def results(self) -> dict[tuple[str, int], RunResult | None]:
        """The results of ended runs by label and seed; None for a failed run."""
        return {(r.label, r.seed): r.result for r in self.runs if r.result is not None or r.failure}


def not_a_folder(path: Path) -> str:
    """Return a sentence about a path that is not a folder of runs, with a suggestion if any.

    Args:
        path: As the user typed it.
    """
    likely = [path.parent] if path.is_file() else [Path("runs") / path]
    hints = [f" Did you mean {place}?" for place in likely if place.is_dir()]
    return f"{path} is not a folder.{''.join(hints)}"


def collect(folders: Iterable[str | Path]) -> Collection:
    """Read every run in these folders, and at most two levels below them.

    Damaged and foreign files are skipped and named among the problems. Other parts of the library
    add sections to the report by writing ``sections/*.json``; see :mod:`gadam.report.sections`.

    Args:
        folders: Folders of runs, or of whole sweeps.
    """
    problems: list[str] = []
    places = []
    for folder in map(Path, folders):
        if folder.is_dir():
            places.append(folder)
        else:
            problems.append(not_a_folder(folder))
    experiments: dict[Path, Experiment] = {}
    for path in _files(places, "experiment.json"):
        if (experiment := _read_experiment(path, problems)) is not None:
            experiments[path.parent.resolve()] = experiment
    runs = []
    for path in _files(places, "run.json"):
        run = _read_run(path, problems)
        if run is not None:
            home = next((p for p in path.resolve().parents if p in experiments), None)
            runs.append((run, home))
    sections = tuple(_read_sections(places, problems))
    apart, found = _make_labels_unique(runs, experiments)
    return _ordered(apart, found, sections, problems)


_LEVELS = ("", "*/", "*/*/")


def find_files(folder: Path, pattern: str) -> list[Path]:
    """Return the matching files in a folder and at most two levels below it.

    This reaches a run, the runs of a sweep, and the runs of all sweeps in a folder, but does not
    walk a whole disk.

    Args:
        folder: The folder.
        pattern: The name of a file, or a pattern such as ``sections/*.json``.
    """
    return sorted(path for level in _LEVELS for path in folder.glob(level + pattern))


def _files(places: list[Path], pattern: str) -> list[Path]:
    """Find files, each once even if several places contain it."""
    found = {p.resolve(): p for place in places for p in find_files(place, pattern)}
    return list(found.values())


def _make_labels_unique(
    runs: list[tuple[RunRecord, Path | None]], experiments: dict[Path, Experiment]
) -> tuple[list[RunRecord], list[Experiment]]:
    """Prefix labels that several experiments share with their experiment's title."""
    homes: dict[str, set[Path | None]] = {}
    for run, home in runs:
        homes.setdefault(run.label, set()).add(home)
    shared = {label for label, where in homes.items() if len(where) > 1}

    def name(label: str, home: Path) -> str:
        return f"{experiments[home].title}: {label}" if label in shared else label

    apart = [
        run
        if home is None
        else replace(run, header=replace(run.header, label=name(run.label, home)))
        for run, home in runs
    ]
    found = [
        experiment.renamed({label: name(label, home) for label in experiment.recipes})
        for home, experiment in experiments.items()
    ]
    return apart, found


# ------------------------------------------------------------------------------------- reading


def _read(path: Path, problems: list[str]) -> Document | None:
    try:
        return read_json(path)
    except ValueError as error:
        problems.append(_skipped(path, error))
        return None


def _skipped(path: Path, error: Exception) -> str:
    return f"{path} is damaged and was skipped: {str(error).rstrip('.')}."


def _read_experiment(path: Path, problems: list[str]) -> Experiment | None:
    content = _read(path, problems)
    if content is None:
        return None
    try:
        experiment = Experiment.from_dict(content)
    except UserError as error:
        problems.append(_skipped(path, error))
        return None
    clean = experiment.renamed({label: printable(label) for label in experiment.recipes})
    return replace(clean, title=printable(experiment.title, limit=200))


def _read_sections(places: list[Path], problems: list[str]) -> Iterator[Section]:
    for path in _files(places, "sections/*.json"):
        content = _read(path, problems)
        if content is None:
            continue
        blocks = content.get("blocks")
        if isinstance(blocks, list):
            yield Section(str(content.get("title", "")), tuple(blocks), path.parent)
        else:
            problems.append(f"{path} is not a section: it has no list of blocks.")
    for path in _files(places, "analysis.json"):
        for missing in missing_sections(path):
            problems.append(f"{missing} is missing. Run `gadam analyze` again.")


def printable(text: object, limit: int = 80) -> str:
    """Return a label that can be drawn and encoded: short, and of printable characters.

    Args:
        text: Anything.
        limit: The largest number of characters.
    """
    shown = "".join(c if c.isprintable() else "?" for c in str(text))
    return shown if len(shown) <= limit else shown[: limit - 1] + "…"


def _read_run(path: Path, problems: list[str]) -> RunRecord | None:
    content = _read(path, problems)
    if content is None:
        return None
    folder = path.parent
    try:
        label = content.get("label") or ""
        header = RunHeader.from_dict({"threads": 1, **content, "label": label})
        label = printable(header.label or header.recipe.method)
        lines = read_lines(folder / "epochs.jsonl")
    except (UserError, OSError) as error:
        problems.append(_skipped(folder, error))
        return None
    check = check_run(folder)
    problems += map(str, check.problems)
    # The first line vouches for run.json, and the manifest of a finished run does.
    unknown = check.state == "unfinished" and lines.damaged > 0 and not lines.records
    if check.concerns("run.json") or unknown:
        problems.append(f"{folder} was skipped: its recipe cannot be trusted.")
        return None
    failure = _read_failure(folder / "failure.json", problems)
    result = _read_result(check, problems)
    return RunRecord(folder, replace(header, label=label), lines.records, result, failure)


def _read_result(check: RunCheck, problems: list[str]) -> RunResult | None:
    """Return the result, unless the run is not finished or the result was changed."""
    if check.state == "unfinished":
        return None
    if not check.concerns("result.json", MANIFEST):
        try:
            return RunResult.from_dict(read_json(check.folder / "result.json"))
        except (ValueError, RunError):  # it has just been replaced
            pass
    problems.append(f"The result of {check.folder} was left out.")
    return None


def _read_failure(path: Path, problems: list[str]) -> str:
    if not path.exists():
        return ""
    return str((_read(path, problems) or {}).get("reason") or "unknown")


# ------------------------------------------------------------------------------------ together


def _ordered(
    runs: list[RunRecord],
    experiments: list[Experiment],
    sections: tuple[Section, ...],
    problems: list[str],
) -> Collection:
    rows = [label for e in experiments for label in e.recipes]
    order = {label: i for i, label in enumerate(dict.fromkeys(rows))}
    runs = sorted(runs, key=lambda r: (order.get(r.label, len(order)), r.label, r.seed))
    if len({(run.label, run.seed) for run in runs}) < len(runs):
        problems.append("Some runs share a name and seed. The table shows the last of each.")
    recipes = {run.label: run.recipe for run in runs}
    metrics = dict.fromkeys(metric for e in experiments for metric in e.metrics)
    image_metrics = [metric for metric in metrics if metric != "perplexity"]
    first = experiments[0] if experiments else Experiment("", "Runs", {})
    experiment = replace(
        first,
        recipes=recipes,
        bases={
            a: b for e in experiments for a, b in e.bases.items() if a in recipes and b in recipes
        },
        published={row: n for e in experiments for row, n in e.published.items()},
        metric=next(iter(image_metrics), "accuracy"),
        analysis=tuple(dict.fromkeys(part for e in experiments for part in e.analysis)),
        command="\n".join(e.command for e in experiments if e.command),
        floors=first.floors if len(experiments) == 1 else {},
    )
    if len(image_metrics) > 1:
        problems.append(
            f"The experiments use different metrics ({', '.join(image_metrics)}). All are shown by "
            f"{experiment.metric}."
        )
    problems += _run_problems(runs)
    expected = sum(len(e.recipes) * e.seeds for e in experiments)
    if expected > len(runs):
        missing = expected - len(runs)
        verb = "has" if missing == 1 else "have"
        problems.append(f"{missing} of {count(expected, 'run')} {verb} not started.")
    problems += [
        f"{run.label}, seed {run.seed} failed: {run.failure}" for run in runs if run.failure
    ]
    unfinished = sum(run.result is None and not run.failure for run in runs)
    if unfinished:
        problems.append(
            "1 run is not finished. It is not in the table."
            if unfinished == 1
            else f"{unfinished} runs are not finished. They are not in the table."
        )
    title = " · ".join(dict.fromkeys(e.title for e in experiments)) or experiment.title
    return Collection(title, tuple(runs), experiment, sections, tuple(problems), expected)


def _run_problems(runs: Iterable[RunRecord]) -> list[str]:
    return [
        f"{run.label}, seed {run.seed} diverged: "
        + (
            "the means include its last metrics."
            if run.recipe.language is None
            else "no mean includes it."
        )
        for run in runs
        if run.result is not None and run.result.diverged
    ]
