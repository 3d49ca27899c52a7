"""Run the evidence: `python -m benchmarks.evidence run`, `plan`, `status`, `analyze`, …."""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import signal
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

import gadam
from benchmarks.evidence import confirmation, defaults, harness, pilot, results, tuning
from benchmarks.evidence.harness import Record, Trial
from benchmarks.evidence.tasks import TASKS, Workload
from benchmarks.evidence.workers import work
from gadam.runs.files import to_json, write_atomically


def main() -> None:
    """Parse the command line and run a command."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.evidence", description=__doc__)
    commands = {f.__name__: f for f in (run, confirm, plan, status, costs, analyze)}
    commands |= {"defaults": run_defaults, "pilot": run_pilot}
    parser.add_argument("command", choices=[*commands, "verify"])
    parser.add_argument("tasks", nargs="*", help="tasks, in this order; the default is all")
    parser.add_argument("--workers", type=int, default=2, help="processes, one thread each")
    parser.add_argument("--out", type=Path, default=results.FOLDER, help="folder of the results")
    parser.add_argument("--first", type=int, help="only the first methods of each task")
    parser.add_argument(
        "--rows", type=int, nargs="+", default=[], help="verify: lines of the file; default: last"
    )
    options = parser.parse_args()
    unknown = [name for name in options.tasks if name not in TASKS]
    if unknown:
        parser.error(f"Unknown tasks: {', '.join(unknown)}. Choose from {', '.join(TASKS)}.")
    chosen = [TASKS[name] for name in options.tasks or TASKS]
    chosen = [replace(task, methods=task.methods[: options.first]) for task in chosen]
    if options.command == "verify":
        verify(chosen, options.out, options.rows)
    else:
        commands[options.command](chosen, options.out, options.workers)


def queue(workloads: list[Workload], folder: Path) -> list[Trial]:
    """Return the trials that remain, in order, as far as they are known now."""
    return [
        trial
        for workload in workloads
        for trial in tuning.pending(workload, results.read(workload.name, folder))
    ]


def run(workloads: list[Workload], folder: Path, workers: int) -> None:
    """Run the queue until it is empty. Finished runs are on disk, so stopping loses little."""

    def finish(records: list[Record]) -> None:
        results.append(records, folder)
        for record in records:
            print(_line(record), flush=True)

    for workload in workloads:
        file = results.path(workload.name, folder)
        file.parent.mkdir(parents=True, exist_ok=True)
        try:
            fcntl.flock(os.open(file, os.O_RDWR | os.O_CREAT), fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            sys.exit(f"Another process is running {workload.name} in {folder}.")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("Stopped."))  # and stop the workers
    failed = work(lambda: queue(workloads, folder), finish, workers, tuning.train)
    if failed:
        sys.exit(f"{len(failed)} runs failed. Fix the cause and run again.")


def confirm(workloads: list[Workload], folder: Path, workers: int) -> None:
    """Choose the best methods of the tasks, and run them on new seeds."""
    from benchmarks.evidence import analysis

    compared = {one.name: one for one in workloads if one.name != analysis.ABLATION}
    readings = {
        name: analysis.readings_of(one, results.read(name, folder))
        for name, one in compared.items()
    }
    place = confirmation.folder_in(folder)
    for task in confirmation.choose(compared, readings, place):
        print(f"{task} has new best methods.", flush=True)
    choices = [one for one in confirmation.read_plan(place) if one.task in compared]

    def left() -> list[Trial]:
        done = [record.trial for name in compared for record in results.read(name, place)]
        return confirmation.pending(choices, done)

    def finish(records: list[Record]) -> None:
        results.append(records, place)
        print(_line(records[0]), flush=True)

    train = partial(confirmation.train, folder=place)
    if failed := work(left, finish, workers, train):
        sys.exit(f"{len(failed)} runs failed. Fix the cause and run again.")


def run_defaults(workloads: list[Workload], folder: Path, workers: int) -> None:
    """Run the default settings, and other values of them, on each task."""
    place = defaults.folder_in(folder)

    def left() -> list[Trial]:
        return [
            trial
            for workload in workloads
            if workload.name != "ablation"
            for trial in defaults.pending(workload, _with_defaults(workload.name, folder))
        ]

    def finish(records: list[Record]) -> None:
        results.append(records, place)
        print(_line(records[0]), flush=True)

    if failed := work(left, finish, workers, defaults.train):
        sys.exit(f"{len(failed)} runs failed. Fix the cause and run again.")


def _with_defaults(task: str, folder: Path) -> list[Record]:
    """Return the records of a task in the evidence, and those of the default settings."""
    return [*results.read(task, folder), *results.read(task, defaults.folder_in(folder))]


def verify(workloads: list[Workload], folder: Path, rows: list[int]) -> None:
    """Rerun rows of each task, and compare their records bit for bit, except the times."""
    failed = 0
    for workload in workloads:
        recorded = results.read(workload.name, folder)
        wrong = [row for row in rows if not 1 <= row <= len(recorded)]
        if wrong:
            sys.exit(f"{workload.name} has no row {wrong[0]}. Choose from 1 to {len(recorded)}.")
        for row in rows or [len(recorded)][: len(recorded)]:
            record = recorded[row - 1]
            again = harness.rerun(record)
            made_on = record.versions.get("machine", "an unknown machine")
            is_equal = replace(again, seconds={}, versions={}) == replace(
                record, seconds={}, versions={}
            )
            failed += not is_equal
            print(
                f"{workload.name} row {row}: {'equal' if is_equal else 'DIFFERENT'}; made on "
                f"{made_on}; {record.trial}",
                flush=True,
            )
    if failed:
        sys.exit(f"Rows that differ: {failed}. This machine: {harness.machine()}.")


def plan(workloads: list[Workload], folder: Path, workers: int) -> None:
    """Print the queue and the core-hours that remain."""
    total = 0.0
    for workload in workloads:
        records = results.read(workload.name, folder)
        trials = tuning.pending(workload, records)
        for trial in trials:
            print(f"{trial.task:16} {trial.method:20} seed {trial.seed} {trial.knobs}")
        hours = tuning.expected_runs(workload, records) * workload.minutes / 60
        total += hours
        print(f"{workload.name}: {len(trials)} trials are known, about {hours:.1f} core-hours left")
    print(f"About {total:.1f} core-hours left.")


def status(workloads: list[Workload], folder: Path, workers: int) -> None:
    """Print the finished runs and the best validation metric of each target."""
    for workload in workloads:
        records = results.read(workload.name, folder)
        used = sum(sum(record.seconds.values()) for record in records if _is_paid(record)) / 3600
        print(f"{workload.name}: {len(records)} records, {used:.2f} core-hours")
        for line in tuning.summary(workload, records):
            print(f"  {line}")


def costs(workloads: list[Workload], folder: Path, workers: int) -> None:
    """Measure the CPU time of steps and evaluations in this process, on a quiet machine."""
    from benchmarks.evidence.costs import STEPS, measure

    found = {
        "torch": torch.__version__,
        "backend": gadam.backends()["cpu"],
        "measured steps": STEPS,
        "tasks": {one.name: measure(one) for one in workloads if one.name != "ablation"},
    }
    write_atomically(folder / "costs.json", (to_json(found, indent=1) + "\n").encode())


def analyze(workloads: list[Workload], folder: Path, workers: int) -> None:
    """Write the summary of all tasks, the figures, and the tables of the documentation."""
    from tools import DOCS, tables

    from benchmarks.evidence import analysis, figures

    costs = json.loads((folder / "costs.json").read_text())["tasks"]
    place = confirmation.folder_in(folder)
    confirmed = confirmation.compare(
        confirmation.read_plan(place), lambda task: results.read(task, place)
    )
    summary = analysis.summarize(lambda task: results.read(task, folder), costs, confirmed)
    compared = {name: one for name, one in TASKS.items() if name != analysis.ABLATION}
    summary["defaults"] = defaults.compare(
        compared, {name: _with_defaults(name, folder) for name in compared}
    )
    write_atomically(folder / "summary.json", (to_json(summary, indent=1) + "\n").encode())
    if folder == results.FOLDER:
        figures.write(summary)
        page = DOCS / "evidence.md"
        write_atomically(page, tables.rendered(page.read_text()).encode())


def run_pilot(workloads: list[Workload], folder: Path, workers: int) -> None:
    """Train every candidate for the size of a task that is not measured yet, one by one."""
    file = folder / "pilot.json"
    entries = json.loads(file.read_text()) if file.exists() else []
    records = [Record.from_json(json.dumps(entry)) for entry in entries]
    for candidate in pilot.CANDIDATES:
        for method in pilot.METHODS:
            if any((r.trial.task, r.trial.method) == (candidate, method) for r in records):
                continue
            records += pilot.measure(candidate, method)
            print(_line(records[-1]), flush=True)
            lines = ",\n".join(record.to_json() for record in records)
            write_atomically(file, f"[\n{lines}\n]\n".encode())


def _is_paid(record: Record) -> bool:
    return record.trial.schedule != "wsd"  # it shares the run at a held rate


def _line(record: Record) -> str:
    trial = record.trial
    values = {point: round(record.final(point), 1) for point in record.validation}
    seconds = round(sum(record.seconds.values()))
    return f"{trial.task} {trial.method} {trial.knobs} seed {trial.seed}: {seconds} s {values}"


if __name__ == "__main__":
    main()
