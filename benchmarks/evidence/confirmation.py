"""The best methods of each task once more, on seeds that have chosen nothing.

Some methods, and the claims that compare the best ones, were added when test results were known. So
the best average, decayed rate, and rival of each task are written to a file first, with their
settings and points. Then they run on new seeds, whose records no other comparison reads.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean

from benchmarks.evidence import harness
from benchmarks.evidence.contenders import CONTENDERS, Reading, champions, value
from benchmarks.evidence.harness import Record, Trial
from benchmarks.evidence.methods import Knobs
from benchmarks.evidence.statistics import Paired, holm, stouffer
from benchmarks.evidence.tasks import TASKS, Workload
from gadam.runs.files import Document, to_json, write_atomically

__all__ = ["SEEDS", "Choice", "choose", "compare", "folder_in", "pending", "read_plan", "train"]

SEEDS = (6, 7, 8, 9, 10)
PLAN = "plan.json"
OPPONENTS = ("decayed", "rival")


@dataclass(frozen=True)
class Choice:
    """A method that was best of its kind, with everything that a run of it needs.

    Args:
        task: The task.
        role: "average", "decayed", or "rival".
        label: Its name.
        knobs: Its settings.
        point: The point that is read.
    """

    task: str
    role: str
    label: str
    knobs: Knobs
    point: str

    def trial(self, seed: int) -> Trial:
        """Return the run that has it.

        Args:
            seed: The seed.
        """
        return Trial(self.task, CONTENDERS[self.label].method, self.knobs, seed)

    def read(self, records: Iterable[Record], workload: Workload) -> dict[int, float]:
        """Return test metrics by seed, negated where less is better.

        Args:
            records: Records of the task.
            workload: The task.
        """
        sign = 1 if workload.mode == "max" else -1
        recorded = CONTENDERS[self.label].recorded
        found = {}
        for record in records:
            if (record.trial.method, record.trial.knobs) == (recorded, self.knobs):
                number = value(record, self.point, workload.metric)
                if number is not None:
                    found[record.trial.seed] = sign * number
        return found


def folder_in(folder: Path) -> Path:
    """Return the folder of the plan and the new records.

    Args:
        folder: The folder of all results.
    """
    return folder / "confirmation"


def choose(
    workloads: Mapping[str, Workload], readings: Mapping[str, Mapping[str, Reading]], folder: Path
) -> None:
    """Write the choices of all tasks to a file. An existing one is kept: it was written first.

    Args:
        workloads: The tasks.
        readings: What the records say about the contenders of each task.
        folder: The folder of the plan.
    """
    plan = folder / PLAN
    if plan.exists():
        return
    choices = [
        asdict(Choice(task, role, label, readings[task][label].knobs, readings[task][label].point))
        for task, workload in workloads.items()
        for role, label in champions(workload, readings[task]).items()
        if role in ("average", *OPPONENTS)
    ]
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(plan, (to_json(choices, indent=1) + "\n").encode())


def read_plan(folder: Path) -> list[Choice]:
    """Return the choices, or none without a plan.

    Args:
        folder: The folder of the plan.
    """
    plan = folder / PLAN
    if not plan.exists():
        return []
    return [
        Choice(**{**one, "knobs": Knobs(**one["knobs"])}) for one in json.loads(plan.read_text())
    ]


def pending(choices: Iterable[Choice], done: Iterable[Trial]) -> list[Trial]:
    """Return the trials that remain. Choices with the same run share it.

    Args:
        choices: The plan.
        done: The trials with records.
    """
    finished = set(done)
    wanted = dict.fromkeys(one.trial(seed) for seed in SEEDS for one in choices)
    return [trial for trial in wanted if trial not in finished]


def train(trial: Trial, folder: Path) -> list[Record]:
    """Run a trial, and measure only the points that the plan reads.

    Args:
        trial: A trial of the plan.
        folder: The folder of the plan.
    """
    points = {one.point for one in read_plan(folder) if one.trial(trial.seed) == trial}
    return harness.run(trial, averages=points)


def compare(choices: Iterable[Choice], read_records: Callable[[str], list[Record]]) -> Document:
    """Compare the best average of each task with the best decayed schedule and the best rival.

    Args:
        choices: The plan.
        read_records: Returns the records of a task on the new seeds.

    Returns:
        Per task the labels and the differences, in points of accuracy or perplexity, positive if
        the average is better; and per opponent all tasks pooled (Stouffer), with Holm's correction.
    """
    by_task: dict[str, dict[str, Choice]] = {}
    for one in choices:
        by_task.setdefault(one.task, {})[one.role] = one
    tasks: dict[str, Document] = {}
    found: dict[str, list[Paired]] = {opponent: [] for opponent in OPPONENTS}
    for task, roles in by_task.items():
        records = read_records(task)
        workload = TASKS[task]
        for opponent in OPPONENTS:
            if not {"average", opponent} <= roles.keys():
                continue
            average, other = (roles[role].read(records, workload) for role in ("average", opponent))
            paired = Paired.of(average, other)
            if paired is None:
                continue
            found[opponent].append(paired)
            tasks.setdefault(task, {"average": roles["average"].label})[opponent] = {
                "label": roles[opponent].label,
                "other": fmean(abs(number) for number in other.values()),
                "mean": paired.mean,
                "interval": list(paired.interval()),
                "pairs": paired.count,
            }
    combined = {opponent: stouffer(tests) for opponent, tests in found.items() if tests}
    corrected = holm([p for _, p in combined.values()])
    pooled = {
        opponent: {
            "p": p,
            "in favor": z > 0,
            "tasks": len(found[opponent]),
            "positive": sum(paired.mean > 0 for paired in found[opponent]),
        }
        for (opponent, (z, _)), p in zip(combined.items(), corrected)
    }
    return {"seeds": list(SEEDS), "tasks": tasks, "pooled": pooled}
