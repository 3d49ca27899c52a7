"""The best methods of each task once more, on seeds that have chosen nothing.

Some methods, and the claims that compare the best ones, were added when test results were known. So
the best average, decayed rate, and rival of each task are written to a file first, with their
settings and points. Then they run on new seeds, whose records no other comparison reads. If methods
that were added later are better on a task, a further round of the plan has its new best methods.
Rounds are chosen by the same validation data, so the new seeds never choose.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean

from benchmarks.evidence import harness
from benchmarks.evidence.contenders import CONTENDERS, Reading, champions, value
from benchmarks.evidence.harness import Record, Trial
from benchmarks.evidence.methods import Knobs
from benchmarks.evidence.statistics import Paired, holm, stouffer
from benchmarks.evidence.tasks import TASKS, Workload
from gadam.runs.files import Document, to_json, write_atomically

__all__ = [
    "SEEDS",
    "Choice",
    "choose",
    "compare",
    "folder_in",
    "latest",
    "pending",
    "read_plan",
    "train",
]

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
        round: Which plan of the task it belongs to, from 1 on.
    """

    task: str
    role: str
    label: str
    knobs: Knobs
    point: str
    round: int = 1

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
) -> list[str]:
    """Add the best methods of each task to the plan, unless its latest round has them already.

    Args:
        workloads: The tasks.
        readings: What the records say about the contenders of each task.
        folder: The folder of the plan.

    Returns:
        The tasks with a new round.
    """
    plan = read_plan(folder)
    added = []
    for task, workload in workloads.items():
        planned = [one for one in latest(plan) if one.task == task]
        count = max((one.round for one in planned), default=0)
        found = [
            Choice(task, role, label, readings[task][label].knobs, readings[task][label].point)
            for role, label in champions(workload, readings[task]).items()
            if role in ("average", *OPPONENTS)
        ]
        if found != [replace(one, round=1) for one in planned]:
            plan += [replace(one, round=count + 1) for one in found]
            added.append(task)
    if added:
        folder.mkdir(parents=True, exist_ok=True)
        choices = [asdict(one) for one in plan]
        write_atomically(folder / PLAN, (to_json(choices, indent=1) + "\n").encode())
    return added


def latest(choices: Iterable[Choice]) -> list[Choice]:
    """Return the choices in the latest round of each task.

    Args:
        choices: The plan.
    """
    kept = list(choices)
    last: dict[str, int] = {}
    for one in kept:
        last[one.task] = max(one.round, last.get(one.task, 0))
    return [one for one in kept if one.round == last[one.task]]


def read_plan(folder: Path) -> list[Choice]:
    """Return the choices of all rounds, or none without a plan.

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
        choices: The plan. Only the latest round of each task runs.
        done: The trials with records.
    """
    finished = set(done)
    wanted = dict.fromkeys(one.trial(seed) for seed in SEEDS for one in latest(choices))
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
        choices: The plan. Only the latest round of each task is compared.
        read_records: Returns the records of a task on the new seeds.

    Returns:
        Per task the labels and the differences, in points of accuracy or perplexity, positive if
        the average is better; and per opponent all tasks pooled (Stouffer), with Holm's correction.
    """
    by_task: dict[str, dict[str, Choice]] = {}
    for one in latest(choices):
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
