"""When to start averaging, from one run per seed: `python -m benchmarks.windows.starts`.

Every run stores blocks. `gadam tails`' search chooses a start on validation data, and then the
default start and the choice are evaluated on test data, and so are all starts of the paper's
figure. Some runs also compare with a greedy soup of blocks. Results go to results/starts.json, one
run at a time, so a stopped command resumes.
"""

from __future__ import annotations

import argparse
import platform
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path

import torch

import gadam
from gadam.runs.files import Document, read_json, write_json
from gadam.runs.folder import RunFolder
from gadam.runs.lock import locked
from gadam.runs.recipe import Recipe
from gadam.study.tails import Tails
from gadam.train import experiments, tasks
from gadam.train.loop import train

RESULT = Path(__file__).parents[2] / "results" / "starts.json"
SEEDS = (0, 1, 2)


@dataclass(frozen=True)
class Workload:
    """Runs of one recipe, which differ in the seed.

    Args:
        recipe: The recipe, with the default start.
        blocks: Steps per block. The default start is a boundary, if all epochs have equally many.
        starts: The epochs of the paper's figure, scaled to this run, by their label there.
        greedy: Whether to compare with a greedy soup of blocks, which takes many evaluations.
    """

    recipe: Recipe
    blocks: int
    starts: dict[str, int]
    greedy: bool = False


def workloads() -> dict[str, Workload]:
    """Return what to train, by label, in order."""
    found = {}
    rows = experiments.get("fig-tavg").recipes

    def over_starts(group: str, default: int, blocks: int) -> Workload:
        names = [name for name in rows if name.startswith(f"{group} from ")]
        starts = {}
        for name in names:
            average = rows[name].average
            assert average is not None
            assert isinstance(average.start, int)
            starts[name.rpartition(" ")[2]] = average.start
        return Workload(rows[f"{group} from {default}"], blocks, starts)

    found["LSTM Gadam"] = over_starts("LSTM Gadam", 100, 112)
    compared = experiments.get("compare").recipes
    for row, recipe in compared.items():
        if recipe.average is not None:
            group = "" if ":" in row else "noisy labels: "
            found[f"{group}{row}"] = Workload(recipe, 10, {}, greedy=row == "Gadam")
    for group in ("VGG-16 Gadam", "VGG-16 GadamX", "PRN-110 Gadam", "PRN-110 GadamX"):
        found[group] = over_starts(group, 161, 14)
    found["lm-mini Gadam"] = Workload(experiments.get("lm-mini").recipes["Gadam"], 60, {})
    return found


def nearest(boundaries: list[int], step: int) -> int:
    """Return the start that is closest to a step, of those before the end."""
    return min(boundaries[:-1], key=lambda start: abs(start - step))


def measure(workload: Workload, seed: int) -> Document:
    """Train one run, choose its start on validation data, and evaluate the others for the figure.

    Args:
        workload: What to train.
        seed: The seed.
    """
    recipe = replace(workload.recipe, blocks=workload.blocks, evaluate_every=workload.recipe.epochs)
    begun = time.process_time()
    with tempfile.TemporaryDirectory() as place:
        train(recipe, Path(place) / "run", seed=seed, threads=1)
        run = RunFolder(Path(place) / "run", recipe, seed)
        trained = time.process_time() - begun
        tails = Tails(run, None, torch.device("cpu"))
        validation = tails.search()
        chosen = tails.best(validation)
        soup = tails.greedy() if workload.greedy else None
        steps = [tails.points.task.steps(epoch) for epoch in range(recipe.epochs)]
        before = tasks.steps_before_averaging(recipe, tails.points.task)
        default = nearest(tails.blocks.boundaries, before)
        starts = {
            label: nearest(tails.blocks.boundaries, sum(steps[:epoch]))
            for label, epoch in workload.starts.items()
        }
        result = run.result
        assert result is not None
        return {
            "seed": seed,
            "steps": tails.stop,
            "default": default,
            "chosen": chosen,
            "starts": {
                label: {
                    "epoch": workload.starts[label],
                    "step": sum(steps[: workload.starts[label]]),
                    "boundary": start,
                    "validation": tails.value("validation", start),
                    "test": tails.value("test", start),
                }
                for label, start in starts.items()
            },
            "validation": {
                str(start): value
                for start, value in {
                    **validation,
                    default: tails.value("validation", default),
                }.items()
            },
            "test": {str(start): tails.value("test", start) for start in {default, chosen}},
            **(
                {}
                if soup is None
                else {
                    "greedy": {
                        "blocks": soup.blocks,
                        "validation": soup.value,
                        "test": tails.soup_test(soup),
                    }
                }
            ),
            "last iterate": result.iterate,
            "trained-in average": result.average,
            "cpu seconds": {
                "training": round(trained, 1),
                "choice": round(time.process_time() - begun - trained, 1),
            },
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--out", type=Path, default=RESULT, help="file of the results")
    parser.add_argument("--seeds", type=int, nargs="+", default=SEEDS, help="one run each")
    parser.add_argument("labels", nargs="*", help="what to train; the default is all")
    options = parser.parse_args()
    out: Path = options.out
    known = workloads()
    torch.set_num_threads(1)
    with locked(out.parent, f".{out.stem}.lock"):
        report: Document = read_json(out) if out.exists() else {}
        found: Document = report.setdefault("workloads", {})
        for seed in options.seeds:
            for label in options.labels or known:
                workload = known[label]
                entry = found.setdefault(
                    label,
                    {
                        "recipe": workload.recipe.name,
                        "metric": workload.recipe.metric,
                        "mode": workload.recipe.mode,
                        "blocks": workload.blocks,
                        "runs": [],
                    },
                )
                if any(run["seed"] == seed for run in entry["runs"]):
                    continue
                entry["runs"].append(measure(workload, seed))
                report.update(
                    {
                        "command": "python -m benchmarks.windows.starts",
                        "versions": {"gadam": gadam.__version__, "torch": torch.__version__},
                        "machine": {
                            "system": platform.platform(),
                            "python": platform.python_version(),
                            "threads": 1,
                        },
                    }
                )
                write_json(out, report)
                run = entry["runs"][-1]
                print(label, seed, run["default"], run["chosen"], run["test"], flush=True)


if __name__ == "__main__":
    main()
